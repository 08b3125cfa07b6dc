// Attention of one or a few new query tokens over a latent cache (multi-head latent attention, DeepSeek-V2, 2024), on
// Hopper's wgmma, sm_90a only: rows in 16 bits that TMA copies. What it computes, and how work is divided, is in the
// comment of mla_decode_sm90.cu, whose kernel has rows that threads copy or convert.
//
// A CTA has 64 rows (query token, head), and one split of the keys after another. Three warpgroups, 64 keys a block;
// a ring of three blocks:
//
//   warpgroup 0: scores                warpgroups 1, 2: O's left and right half      first warp of 1: copies
//                                                                                    Q, K(0), K(1)
//   Q -> registers                     -- empty of Q ------------------------------> K(2) in the place of Q
//   S(0) = Q K(0)^T, P(0) -> shared
//   S(1) = Q K(1)^T  -- ready 0 -----> O += P(0) K(0)[:, half]
//   P(1) -> shared                     -- empty 0 ---------------------------------> K(3) in the place of K(0)
//   S(2) = Q K(2)^T  -- ready 1 -----> O += P(1) K(1)[:, half]
//   P(2) -> shared                     -- empty 1 ---------------------------------> Q of the next split
//
// P V of a block begins when two thirds of the products of the next S have been issued, not when P is there. If it
// began with P, both would have half of the tensor cores, be done together, and leave them idle during the softmax. As
// it is, they are busy with P V while the softmax runs, and the end of S and the begin of P V overlap.
//
// Q of a split has the size and the layout of a block of keys, and is one in the ring, ahead of the split's keys: so it
// is asked for while the split before is computed. Its 512 channels that a value has too go to the registers of
// warpgroup 0, but for 16 of them: wgmma takes no registers below 24, and three warpgroups have 504 for a thread of
// each. Those 16 and the last 64 are copied to a place of their own. P takes the place of the last 64 channels of its
// block, which no value has.
//
// The warp that asks for copies walks over the splits too, up to two ahead. Where the running maximum rises, rows of
// alpha tell warpgroups 1 and 2 to rescale O; at the end of a split scale is what O is multiplied with, worked out
// while its last P V runs. A warp of rows has to do with the warps of the same rows only.
//
// Shared memory, bytes: ring [3][9][64 * 128] | Q [64 * 128], [64 * 32] | factors, barriers, splits, scan: 1024. Panels
// of 64 channels, 128-byte swizzle; the 16 channels of Q 32-byte swizzle.
#include "decode/latent.cuh"
#include "decode/latent16_scores.cuh"
#include "decode/latent16_values.cuh"
#include "params/mla_decode.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16
    static constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
    static constexpr int kRows = 64, kKeys = 64;  // of a CTA, of a block
    static constexpr int kPanels = kHeadDim / 64, kHalfPanels = kHeadDimV / 128;
    static constexpr int kThreads = 384;
    static constexpr int kCopies = 128;  // the first thread of those that ask for copies
    // Of a thread, 3 * 168 together.
    static constexpr int kScoreRegisters = 184, kValueRegisters = 160;
    static_assert(kScoreRegisters + 2 * kValueRegisters == 3 * 168, "all registers");
    static_assert(kHeadDim % 64 == 0 && kHeadDimV == kHeadDim - 64 && kHeadDimV % 128 == 0, "P has a panel of its own");
};

using SharedStorage = Latent16Storage<Config>;
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) mla_decode_rows16_sm90(
    const __grid_constant__ MlaDecodeParams params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    check_smem_base(smem_raw);
    // Its address is a constant: registers are scarce.
    SharedStorage& smem = *static_cast<SharedStorage*>(__cvta_shared_to_generic(kSmemBase));
    const DecodeParams& p = params.decode;
    launch_dependents();  // decode_combine waits for the end of this kernel
    if (threadIdx.x == 0) tma_prefetch(&params.map_q), tma_prefetch(&params.map);
    if (threadIdx.x == Config::kThreads - 32) {  // a warp that has to look at no sequence, unless there are many
#pragma unroll 1
        for (int buffer = 0; buffer < kBuffers; ++buffer) {
            mbarrier_init(smem_addr_of(&smem.full[buffer]), 1);
            mbarrier_init(smem_addr_of(&smem.ready[buffer]), 4 * kArrivalsOfWarp);
            mbarrier_init(smem_addr_of(&smem.empty[buffer]), 8 * kArrivalsOfWarp);
        }
        mbarrier_init(smem_addr_of(&smem.scale_ready), 4 * kArrivalsOfWarp);
        mbarrier_init(smem_addr_of(&smem.scale_read), 8 * kArrivalsOfWarp);
        mbarrier_init(smem_addr_of(&smem.last_read), 4 * kArrivalsOfWarp);
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            mbarrier_init(smem_addr_of(&smem.alpha_read[i]), 2 * kArrivalsOfWarp);
            mbarrier_init(smem_addr_of(&smem.split_ready[i]), 1);
#pragma unroll 1
            for (int buffer = 0; buffer < kBuffers; ++buffer) smem.grown[buffer][i] = -1;
        }
        fence_barrier_init();
    }
    Scan<Config::kThreads, kAllRows> scan(p, smem.scan);
    const Partition partition(scan.total, p);
    SplitCursor<Config> cursor;
    cursor.at = partition.begin(blockIdx.y), cursor.end = partition.begin(blockIdx.y + 1);
    if (cursor.at >= cursor.end) return;
    scan.locate(p, cursor.at, smem.scan);
    cursor.sequence = smem.scan.sequence, cursor.before = smem.scan.before;
    if (threadIdx.x == Config::kCopies) smem.cursor = cursor, smem.chunks = scan.total;
    const int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) >> 7, 0);
    if (warpgroup == 0) {
        registers_claim<Config::kScoreRegisters>();
        Latent16Scores<Config>(params, smem).run();
    } else {
        registers_release<Config::kValueRegisters>();
        Latent16Values<Config>(params, smem, warpgroup - 1).run();
    }
}
