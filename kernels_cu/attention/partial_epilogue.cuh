// Partial results of a split of the keys from accumulators to global memory, in fp32; layout as in
// attention/warp_softmax.cuh.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/split_tiles.cuh"

// Stores this thread's two rows of 16, layout as in attention/warp_softmax.cuh; a quad writes 32 bytes at a time.
// partial_o, partial_ml: of a tile's rows, of which there are num_rows; row: the first of the 16.
template <int kOutputs>
OA_DEVICE void store_partial_rows(const float (&o)[kOutputs], const float (&m2)[2], const float (&l)[2],
                                  float* partial_o, float* partial_ml, int32 head_dim, int32 num_rows, int32 row,
                                  int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int32 at = row + (lane >> 2) + r * 8;
        if (at >= num_rows) continue;
        float* to = partial_o + int64(at) * head_dim + 2 * (lane & 3);
#pragma unroll
        for (int d = 0; d < kOutputs / 4; ++d)
            if (d * 8 < head_dim)
                *reinterpret_cast<float2*>(to + d * 8) = make_float2(o[4 * d + 2 * r], o[4 * d + 2 * r + 1]);
        if ((lane & 3) == 0) *reinterpret_cast<float2*>(partial_ml + 2 * int64(at)) = make_float2(m2[r], l[r]);
    }
}

// First row of a split among those of all.
OA_DEVICE int64 first_partial_row(const AttnFwdParams& p, const SplitTile& t) {
    return ((int64(t.batch_idx) * p.num_q_heads + t.head_idx) * t.num_splits + t.split) * t.seqlen_q;
}

// Base and denominator alone.
OA_DEVICE void store_partial_sums(const float (&m2)[2], const float (&l)[2], float* partial, const AttnFwdParams& p,
                                  const SplitTile& t, int32 warp_row, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int32 row = warp_row + (lane >> 2) + r * 8;
        if (row < t.seqlen_q && (lane & 3) == 0)
            *reinterpret_cast<float2*>(partial + 2 * (first_partial_row(p, t) + row)) = make_float2(m2[r], l[r]);
    }
}

// Of attn_fwd_sm90 and attn_int8_sm90: Params have fwd, partial_o and partial_ml.
template <int kOutputs, typename Params>
OA_DEVICE void store_partial_rows(const float (&o)[kOutputs], const float (&m2)[2], const float (&l)[2],
                                  const Params& params, const SplitTile& t, int32 warp_row, int lane) {
    const AttnFwdParams& p = params.fwd;
    int64 first = first_partial_row(p, t);
    store_partial_rows(o, m2, l, params.partial_o + first * p.head_dim, params.partial_ml + 2 * first, p.head_dim,
                       t.seqlen_q, warp_row, lane);
}
