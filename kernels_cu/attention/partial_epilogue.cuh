// Partial results of a split of the keys from accumulators to global memory, in fp32; layout as in
// attention/warp_softmax.cuh.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/split_tiles.cuh"

// Stores this thread's two rows, layout as in attention/warp_softmax.cuh; a quad writes 32 bytes at a time.
template <int kOutputs>
OA_DEVICE void store_partial_rows(const float (&o)[kOutputs], const float (&m2)[2], const float (&l)[2],
                                  const AttnFwdSplitSm90Params& params, const SplitTile& t, int32 warp_row, int lane) {
    const AttnFwdParams& p = params.fwd;
    int64 place = (int64(t.batch_idx) * p.num_q_heads + t.head_idx) * t.num_splits + t.split;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int32 row = warp_row + (lane >> 2) + r * 8;
        if (row >= t.seqlen_q) continue;
        int64 at = place * t.seqlen_q + row;
        float* to = params.partial_o + at * p.head_dim + 2 * (lane & 3);
#pragma unroll
        for (int d = 0; d < kOutputs / 4; ++d)
            if (d * 8 < p.head_dim)
                *reinterpret_cast<float2*>(to + d * 8) = make_float2(o[4 * d + 2 * r], o[4 * d + 2 * r + 1]);
        if ((lane & 3) == 0) *reinterpret_cast<float2*>(params.partial_ml + 2 * at) = make_float2(m2[r], l[r]);
    }
}
