// Merge of the partial results that decode_sm80 leaves. Source: Flash-Decoding (Dao et al. 2023).
//
//   M = max m_i;  L = sum l_i 2^(m_i - M);  O = sum O_i 2^(m_i - M) / L;  LSE = ln 2 (M + log2 L), sinks added to L
//
// partial_o: [slots, ROWS, HEAD_DIM] fp32, partial_ml: [slots, ROWS, 2]: maximum in base-2 units and denominator.
//
// A CTA of 8 warps has rows of one segment (sequence, kv head, block of query rows); combine_split warps (1, 2, 4, 8)
// have a row (query token, query head), a lane HEAD_DIM / 32 channels. Which splits a segment has, the kernel works out
// as decode_sm80 does (decode/plan.cuh). Segments that one CTA of decode_sm80 had as a whole are done already; those
// without keys become O = 0, LSE = -inf (or the sink) here. A warp asks for kUnroll partial results at once and adds
// them with a running maximum: one trip to L2 where there are no more. Bits depend on the plan alone; with fixed splits
// on the sequence alone.
//
// Shared memory, bytes: the warps' sums 8 * HEAD_DIM * 4 | maxima, denominators 64 | scan.
#include "decode/combine.cuh"
#include "params/decode.cuh"

using Config = CombineConfig<IO_TYPE, HEAD_DIM, ROWS>;

extern "C" __global__ void __launch_bounds__(Config::kThreads) decode_combine_sm80(const
                                                                                   __grid_constant__ DecodeParams p) {
    __shared__ CombineStorage<Config> smem;
    combine(p, Config::kRows, smem, [&](int32 sequence, int32 head, int32 first, int32 token, float, float lse) {
        if (p.lse != nullptr) p.lse[lse_place(p, sequence, head, first, token)] = lse;
    });
}
