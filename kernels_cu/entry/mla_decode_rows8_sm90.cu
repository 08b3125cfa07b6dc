// Attention of one or a few new query tokens over a latent cache (multi-head latent attention, DeepSeek-V2, 2024), on
// Hopper's wgmma, sm_90a only: rows of 656 bytes (FlashMLA 2025, "FP8 KV cache"), which are dequantized. What it
// computes, and how work is divided, is in the comment of mla_decode_sm90.cu, whose kernel has other rows.
//
// A CTA has 64 rows (query token, head), and one split of the keys after another. Four warpgroups, 64 keys a block:
//
//   warpgroup 0: scores              warpgroups 1, 2: O's left and right half      warpgroup 3: copies
//   Q -> registers                   K(0), K(1) dequantized <--------------------- codes(0), codes(1), half of codes(2)
//   S(0) = Q K(0)^T, P(0) -> shared
//   S(1) = Q K(1)^T  -- ready 0 ---> O += P(0) K(0)[:, half]
//   P(1) -> shared       full 0 <--- K(2) dequantized in the place of K(0) ------> the next block and a half
//   S(2) = Q K(2)^T  -- ready 1 ---> O += P(1) K(1)[:, half]
//   P(2) -> shared       full 1 <--- K(3) dequantized in the place of K(1)
//
// P V of a block begins when S of the next one is nearly there, as in mla_decode_rows16_sm90. The first 32 keys of a
// block are dequantized while the products of the other 32 of the block in whose place they come run, the second 32
// behind them; the last 64 channels, whose place P had, come last, and S with them. Codes come by bulk copies: no
// register waits for memory, and no load or store behind another one.
//
// Q lies in the registers of warpgroup 0 as far as there are any: 432 of 576 channels. P takes the place of the last 64
// channels of its block; the first thread walks over the splits, three ahead of the scores; factors of O are handed
// over as in mla_decode_rows16_sm90.
//
// Shared memory, bytes: K [2][9][64 * 128] | Q [2][64 * 128], [64 * 32] | codes [3][32 * 656] | factors, barriers,
// splits, scan. Panels of 64 channels, 128-byte swizzle; the 16 channels of Q 32-byte swizzle.
#include "decode/latent.cuh"
#include "decode/latent8_rows.cuh"
#include "decode/latent8_scores.cuh"
#include "decode/latent8_values.cuh"
#include "params/mla_decode.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

struct Config {
    using Io = IO_TYPE;  // BFloat16, as the rows' channels in 16 bits
    static constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
    static constexpr int kRows = 64, kKeys = 64;  // of a CTA, of a block
    static constexpr int kPanels = kHeadDim / 64, kHalfPanels = kHeadDimV / 128;
    static constexpr int kRowBytes = kHeadDimV + 16 + 2 * (kHeadDim - kHeadDimV);
    static constexpr int kThreads = 512;
    // Of a thread, 4 * 128 together.
    static constexpr int kScoreRegisters = 168, kValueRegisters = 160, kCopyRegisters = 24;
    static_assert(kScoreRegisters + 2 * kValueRegisters + kCopyRegisters == 4 * 128, "all registers");
    static_assert(kHeadDimV == 512 && kHeadDim == 576, "4 scales of a row, a panel besides, which P takes");
};

using SharedStorage = Latent8Storage<Config>;
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) mla_decode_rows8_sm90(
    const __grid_constant__ MlaDecodeParams params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    check_smem_base(smem_raw);
    // Its address is a constant: registers are scarce.
    SharedStorage& smem = *static_cast<SharedStorage*>(__cvta_shared_to_generic(kSmemBase));
    const DecodeParams& p = params.decode;
    launch_dependents();  // decode_combine waits for the end of this kernel
    if (threadIdx.x == Config::kThreads - 32) {  // a warp that has to look at no sequence, unless there are many
#pragma unroll 1
        for (int buffer = 0; buffer < kBuffers; ++buffer) {
            mbarrier_init(smem_addr_of(&smem.full[buffer]), 8 * kArrivalsOfWarp);
            mbarrier_init(smem_addr_of(&smem.rest[buffer]), 8 * kArrivalsOfWarp);
            mbarrier_init(smem_addr_of(&smem.ready[buffer]), 4 * kArrivalsOfWarp);
        }
#pragma unroll 1
        for (int stage = 0; stage < kStages; ++stage)
            mbarrier_init(smem_addr_of(&smem.codes_full[stage]), kCopyWarps * kArrivalsOfWarp);
        mbarrier_init(smem_addr_of(&smem.scale_read), 8 * kArrivalsOfWarp);
        mbarrier_init(smem_addr_of(&smem.last_read), 4 * kArrivalsOfWarp);
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            mbarrier_init(smem_addr_of(&smem.alpha_read[i]), 2 * kArrivalsOfWarp);
#pragma unroll 1
            for (int buffer = 0; buffer < kBuffers; ++buffer) smem.grown[buffer][i] = -1;
        }
#pragma unroll 1
        for (int i = 0; i < kSplitPlaces; ++i) mbarrier_init(smem_addr_of(&smem.split_ready[i]), 1);
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
    if (warpgroup == 0) {
        registers_claim<Config::kScoreRegisters>();
        Latent8Scores<Config>(params, smem).run();
    } else if (warpgroup < 3) {
        registers_claim<Config::kValueRegisters>();
        Latent8Values<Config>(params, smem).run();
    } else {
        registers_release<Config::kCopyRegisters>();
        Latent8Rows<Config>(params, smem).run();
    }
}
