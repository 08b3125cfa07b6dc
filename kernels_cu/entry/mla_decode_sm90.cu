// Attention of one or a few new query tokens over a latent cache (multi-head latent attention, DeepSeek-V2, 2024), on
// Hopper's wgmma, sm_90a only. Source: FlashMLA (DeepSeek 2025): two warpgroups that have half of O's channels each.
//
//   S = softmax_scale * q k^T;  S = softcap * tanh(S / softcap);  P = softmax([S, sink]);  O = P k[:, :HEAD_DIM_V]
//
// q: [batch, q_len, num_q_heads, HEAD_DIM], or packed by cu_seqlens_q; o with HEAD_DIM_V. k: rows of HEAD_DIM wherever
// the strides say, one for all query heads, 16-bit or e4m3 with one scale for all rows. Query token i of
// sequence b sees the keys up to seq_lens[b] - q_len + i, or the rows that a list has for it (sparse attention,
// DeepSeek-V3.2, 2025).
//
// A CTA has 64 rows (query token, head), and one split of the keys after another (decode/latent.cuh). It takes 64 keys
// at a time, even blocks in buffer 0, odd ones in buffer 1. Warpgroup 0 makes P of even blocks, warpgroup 1 of odd
// ones; both add all blocks in order, each to its half of O:
//
//   warpgroup 0: copies             warpgroup 1 (even, O left)            warpgroup 2 (odd, O right)
//   Q, then of each block two       S = Q k(0)^T                          S = Q k(1)^T
//   halves, each when its last      P(0) -> shared, barrier ------------> wait
//   reader has released it          O += P(0) k(0) left                   O += P(0) k(0) right
//                                   wait <-------------- barrier -------- P(1) -> shared
//                                   O += P(1) k(1) left                   O += P(1) k(1) right
//
// Exponents of both follow one base, which the maximum of a row may exceed: that shows in the sums of P, not in a
// maximum taken first. Then, and for the first block of a split, the base becomes the maximum and P is computed again;
// the other warpgroup learns of the base before it takes that P. Rows in 8 bits leave no registers for scores that P
// may have to be computed from again: there the maximum is taken first.
//
// P takes the place of the last 64 channels of its block, which no value has. Of buffer 0 the left half is warpgroup
// 1's alone once S is there, and the right half with P is released by warpgroup 2; of buffer 1 the other way round: S
// begins with the half that is free first.
//
// The first thread walks over the splits, and hands each one to all others in shared memory. Where TMA brings keys, one
// warp asks for them and the other three copy Q, so that neither waits for the other.
//
// Rows in 8 bits are converted by two warpgroups in the place of warpgroup 0.
//
// Shared memory, bytes: Q [9][64 * 128] | K [2][9][64 * 128] | bases, denominators, barriers, splits, scan, maxima.
// Panels of 64 channels, 128-byte swizzle.
#include "decode/latent.cuh"
#include "decode/latent_consumer.cuh"
#include "decode/latent_copies.cuh"
#include "params/mla_decode.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16
    static constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
    static constexpr int kRows = 64, kKeys = 64;  // of a CTA, of a block
    static constexpr int kPanels = kHeadDim / 64, kHalfPanels = kHeadDimV / 128;
    static constexpr int kFormat = CACHE_FORMAT;  // LatentFormat
    static constexpr bool kByMaps = BY_MAPS;  // rows come by TMA; else by threads, 16 bytes each
    static_assert(!kByMaps || kFormat == kRows16, "TMA converts nothing");
    static constexpr int kProducers = kFormat == kRows16 ? 128 : 256, kThreads = kProducers + 256;
    // Of a thread: 3 * 168 or 4 * 128 together. Rows in 8 bits wait in registers.
    static constexpr int kProducerRegisters = kFormat == kRows16 ? 56 : 64;
    static constexpr int kConsumerRegisters = kFormat == kRows16 ? 224 : 192;
    // Products that a warpgroup adds P V by. ptxas compiles 512 threads for 128 registers, too few for one of 256
    // columns.
    static constexpr int kPvParts = kThreads > 384 ? 2 : 1;
    static constexpr int kTogether = kByMaps ? 1 : kHalfPanels;  // panels of a barrier
    static_assert(kFormat == kRows16 || kFormat == kRowsE4m3, "rows of 656 bytes have mla_decode_rows8_sm90");
    static_assert(kHeadDim % 64 == 0 && kHeadDimV == kHeadDim - 64 && kHeadDimV % 128 == 0, "P has a panel of its own");
};

// Of a panel that is there: of the copy's lane, of each thread that copies, of each warp that converts.
constexpr int32 kFullArrivals = Config::kByMaps              ? 1
                                : Config::kFormat == kRows16 ? Config::kProducers
                                                             : Config::kProducers / 32 * kArrivalsOfWarp;

using SharedStorage = LatentStorage<Config>;
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) mla_decode_sm90(
    const __grid_constant__ MlaDecodeParams params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    const DecodeParams& p = params.decode;
    launch_dependents();  // decode_combine waits for the end of this kernel
    if (Config::kByMaps && threadIdx.x == 0) tma_prefetch(&params.map);
    if (threadIdx.x == Config::kThreads - 32) {  // a warp that has to look at no sequence, unless there are many
#pragma unroll 1
        for (int buffer = 0; buffer < 2; ++buffer) {
#pragma unroll 1
            for (int panel = 0; panel < Config::kPanels; ++panel)
                mbarrier_init(smem_addr_of(&smem.full[buffer][panel]), kFullArrivals);
            for (int half = 0; half < 2; ++half)
                mbarrier_init(smem_addr_of(&smem.empty[buffer][half]), 4 * kArrivalsOfWarp);
        }
        mbarrier_init(smem_addr_of(&smem.q_full), kQueryArrivals<Config> + 1);
        mbarrier_init(smem_addr_of(&smem.q_empty), 8 * kArrivalsOfWarp);
        fence_barrier_init();
    }
    Scan<Config::kThreads, kAllRows> scan(p, smem.scan);
    const Partition partition(scan.total, p);
    SplitCursor<Config> cursor;
    cursor.at = partition.begin(blockIdx.y), cursor.end = partition.begin(blockIdx.y + 1);
    if (cursor.at >= cursor.end) return;
    scan.locate(p, cursor.at, smem.scan);
    cursor.sequence = smem.scan.sequence, cursor.before = smem.scan.before;
    if (threadIdx.x == 0) smem.cursor = cursor, smem.chunks = scan.total;
    const int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) >> 7, 0);
    if (warpgroup < Config::kProducers / 128) {
        registers_release<Config::kProducerRegisters>();
        LatentProducer<Config>(params, smem).run();
        return;
    }
    registers_claim<Config::kConsumerRegisters>();
    if (warpgroup == Config::kProducers / 128) {
        LatentConsumer<Config, 0>(params, smem).run();
    } else {
        LatentConsumer<Config, 1>(params, smem).run();
    }
}
