// Attention of one or a few new query tokens over a latent cache (multi-head latent attention, DeepSeek-V2, 2024), any
// GPU from sm_80 on. Source: Flash-Decoding (Dao et al. 2023); FlashMLA (DeepSeek 2025): formats.
//
//   S = softmax_scale * q k^T;  S = softcap * tanh(S / softcap);  P = softmax([S, sink]);  O = P k[:, :HEAD_DIM_V]
//
// q: [batch, q_len, num_q_heads, HEAD_DIM], or packed by cu_seqlens_q; o with HEAD_DIM_V. k: rows of HEAD_DIM wherever
// the strides say, one for all query heads, as CACHE_FORMAT says (`LatentFormat`); those of 8 bits become q's type in
// shared memory: those with four scales are multiplied by them in fp32 and rounded, the one scale of others is in S and
// O. Query token i of sequence b sees the keys up to seq_lens[b] - q_len + i.
//
// A CTA has ROWS rows (query token, head), and one split of the keys after another, of which it takes 32 at a time. Its
// eight warps divide S by rows, channels and keys, so that Q stays in registers and K is read from shared memory once
// for 16 rows; they divide the softmax by rows, and O by channels, 64 of all rows each:
//
//   all warps: wait for tile i  |  barrier  |  copy tile i + 1, part of S(i) -> shared  |  barrier  |
//              sum of the parts, m, P(i) -> shared  |  barrier  |  O += P(i) k(i)
//
// 8-bit rows stay so in shared memory where a CTA has 16 rows, 64 keys at a time (decode/latent_codes.cuh). Else tile i
// is converted behind the first barrier, and another one follows. Q of up to 32 rows comes by way of a tile's place.
//
// Shared memory, bytes: K [stages][keys * row], 16-bit rows by 16 bytes of 128 swizzled by key | scores
// [parts][ROWS * 4 * keys], P in the first part's | Q that registers do not hold | scales of 656-byte rows | rescale
// factors, maxima, denominators | 8-bit rows that become 16 [32 * row] | listed keys | scan, splits. Two stages, but
// one where rows are converted.
#include "decode/latent.cuh"
#include "decode/latent_rows.cuh"
#include "decode/latent_tiles.cuh"
#include "decode/latent_warps.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/delay.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/types.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16
    static constexpr int kFormat = CACHE_FORMAT;
    static constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V, kPanels = kHeadDim / 64;
    static constexpr int kRows = ROWS, kTeams = 1;
    // Rows in 8 bits stay so in shared memory, or become 16 bits there.
    static constexpr bool kInCodes = kFormat != kRows16 && kRows == 16;
    static constexpr bool kConverts = kFormat != kRows16 && !kInCodes;
    static constexpr bool kNarrowed = kIsBFloat16<Io>;
    static constexpr int kKeys = kInCodes ? 64 : 32;  // of a tile
    static constexpr int kStages = kConverts ? 1 : 2;
    static constexpr int kTileRow = kConverts ? 2 * kHeadDim : kCodeRow<kFormat, kHeadDim>;  // bytes of a key in a tile
    static constexpr int kWarps = 8, kTeamThreads = 32 * kWarps, kThreads = kTeamThreads;
    // Warps of S: by rows, 16 each; by channels; by keys.
    static constexpr int kRowWarps = kRows / 16, kParts = kRows == 16 ? 4 : 2,
                         kKeyWarps = kWarps / (kRowWarps * kParts);
    static constexpr int kHeld = HELD_PANELS;  // panels of Q in registers; those behind are in shared memory
    static constexpr int kHeldSteps = kFormat == kRowsE4m3 ? 7 : 9;  // with kInCodes, of nine
    static constexpr bool kByCopies = kRows <= 32;  // Q comes by way of shared memory
    static_assert(kRows == 16 || kRows == 32 || kRows == 64, "the warps of S");
    static constexpr bool kClusters = false;
    static_assert(kHeadDim == 576 && kHeadDimV == 512, "the formats of rows");
};

struct TeamStorage {
    // Q that registers do not hold: panels, a warp's own part of them, or steps.
    alignas(16) uint8
        q[Config::kInCodes ? max_of((9 - Config::kHeldSteps) * 4 * 512, 16)
                           : max_of((Config::kPanels - Config::kHeld) * Config::kRows * Config::kKeyWarps * 128, 16)];
    uint16 scales[1][4][Config::kInCodes && Config::kFormat == kRows656 ? Config::kKeys : 2];
    float alpha[Config::kRows], m[Config::kRows], l[Config::kRows];
};
struct SharedStorage {
    using Team = TeamStorage;
    alignas(128) uint8 stages[Config::kStages][Config::kKeys * Config::kTileRow];
    float scores[1][Config::kParts][Config::kRows][Config::kKeys];
    TeamStorage teams[1];
    // Rows in 8 bits that become 16.
    uint8 raw[Config::kConverts ? Config::kKeys * kLatentRowBytes<Config::kFormat, Config::kHeadDim> : 16];
    uint8 exists[2][Config::kKeys];  // of a list: whether a place has a key
    ScanStorage<Config::kThreads> scan;
    SplitCursor<Config> cursor;
    int32 chunks;  // of all sequences
    float row_scale;  // the one of e4m3 rows, else 1
    LatentSplit split[2];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

using Tiles = LatentTiles<Config, SharedStorage>;
using Warps = LatentWarps<Config, SharedStorage>;
// Waits for a tile; the next one is on its way then.
OA_DEVICE void ready(Tiles& tiles, const LatentSplit& split, int32 tile) {
    if constexpr (Config::kConverts) {
        random_delay();
        __syncthreads();
        tiles.convert(split, tile);
        random_delay();
        __syncthreads();
    } else {
        cp_async_wait<0>();
        random_delay();
        __syncthreads();  // every warp is done with the tile before
        tiles.copy(split, tile + 1);
    }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, MIN_CTAS) mla_decode_sm80(
    const __grid_constant__ MlaDecodeParams params) {
    extern __shared__ __align__(128) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    const DecodeParams& p = params.decode;
    launch_dependents();  // mla_combine waits for the end of this kernel
    {
        Scan<Config::kThreads, kAllRows> scan(p, smem.scan);
        const Partition partition(scan.total, p);
        SplitCursor<Config> cursor;
        cursor.at = partition.begin(blockIdx.y), cursor.end = partition.begin(blockIdx.y + 1);
        if (cursor.at >= cursor.end) return;
        scan.locate(p, cursor.at, smem.scan);
        cursor.sequence = smem.scan.sequence, cursor.before = smem.scan.before;
        if (threadIdx.x == 0) {
            smem.cursor = cursor, smem.chunks = scan.total;
            const bool scaled = Config::kFormat == kRowsE4m3 && p.k_params != nullptr;
            smem.row_scale = scaled ? __uint_as_float(*p.k_params) : 1.0f;
        }
    }
    Tiles tiles(params, smem);
    Warps warps(params, smem, 0);
#pragma unroll 1
    for (uint32 number = 0;; ++number) {
        // In shared memory, by one thread: registers are for the products.
        LatentSplit& split = smem.split[number & 1];
        if (threadIdx.x == 0 && !smem.cursor.next(p, Partition(smem.chunks, p), split)) split.blocks = 0;
        __syncthreads();
        if (split.blocks == 0) break;
        tiles.ask(split);
        warps.ask(split);
        tiles.copy(split, 0);
        warps.begin(split);
#pragma unroll 1
        for (int32 tile = 0; tile < split.blocks; ++tile) {
            ready(tiles, split, tile);
            warps.part_of_scores(tile);
            random_delay();
            __syncthreads();
            const bool grew = warps.probabilities(split, tile);
            random_delay();
            warps.add_values(tile, __syncthreads_or(grew));
        }
        // Copies of what is behind the end.
        cp_async_wait<0>();
        warps.end(split);
    }
}
