// Results of a split of the keys from accumulators to global memory; layout as in attention/warp_softmax.cuh. Partial
// ones are fp32; where a split is the only one, O and LSE are final.
#pragma once
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "attention/wide_products.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/cvt.cuh"
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

// Base and denominator alone. first: as for store_split_rows.
OA_DEVICE void store_partial_sums(const float (&m2)[2], const float (&l)[2], float* partial, const SplitTile& t,
                                  int64 first, int32 warp_row, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int32 row = warp_row + (lane >> 2) + r * 8;
        if (row < t.seqlen_q && (lane & 3) == 0)
            *reinterpret_cast<float2*>(partial + 2 * (first + row)) = make_float2(m2[r], l[r]);
    }
}

// Of attn_fwd_sm80 and attn_fwd_sm90: as store_partial_rows; with one split what is final, O and the LSE. Tile:
// SplitTile or PackedTile. first: of the split's partial results, the row of the sequence's first query. o is used up.
// kLse: not where the LSE is of other sums. kChannelWarps: warps with the same rows, of which this is channel_warp.
template <typename Io, bool kLse = true, int kChannelWarps = 1, int kOutputs, typename Params, typename Tile>
OA_DEVICE void store_split_rows(float (&o)[kOutputs], const float (&m2)[2], const float (&l)[2], const Params& params,
                                const AttnFwdParams& p, const Tile& t, int32 num_splits, int64 first, int32 row,
                                int lane, int channel_warp = 0) {
    const bool is_final = num_splits == 1, has_sums = channel_warp == 0 && (lane & 3) == 0;
    // A loop, for which the second row's O moves: every split row has this code, and wheels carry a hundred of them.
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
        const int32 at = row + (lane >> 2) + r * 8;
        const float top = r == 0 ? m2[0] : m2[1], sum = r == 0 ? l[0] : l[1];
        if (at < t.seqlen_q && !(is_final && !is_of_head(t, at))) {
            float scale = 1.0f;
            uint16* to = nullptr;
            float* partial = nullptr;
            if (is_final) {
                const int32 head = head_of(t, at), query = t.q_begin + query_of(t, at);
                const bool exists = t.seqlen_k != kNoSequence;
                const RowResult result =
                    finish_row(top, sum, exists ? sink_log2<Io>(p.sinks, p.sinks_kind, head) : neg_inf());
                scale = result.o_scale;
                to = p.o + t.batch_idx * p.o_stride_b + query * p.o_stride_s + head * p.o_stride_h + 2 * (lane & 3);
                if (kLse && p.lse != nullptr && has_sums)
                    p.lse[t.batch_idx * p.lse_stride_b + head * p.lse_stride_h + query] = result.lse;
            } else {
                partial = params.partial_o + (first + at) * p.head_dim + 2 * (lane & 3);
                if (has_sums) *reinterpret_cast<float2*>(params.partial_ml + 2 * (first + at)) = make_float2(top, sum);
            }
#pragma unroll
            for (int d = 0; d < kOutputs / 4; ++d) {
                const int channel = channel_chunk<kChannelWarps>(d, channel_warp) * 8;
                if (channel >= p.head_dim) break;
                const float2 x = make_float2(o[4 * d] * scale, o[4 * d + 1] * scale);
                if (is_final)
                    *reinterpret_cast<uint32*>(to + channel) = pack2(Io{}, x.x, x.y);
                else
                    *reinterpret_cast<float2*>(partial + channel) = x;
            }
        }
#pragma unroll
        for (int d = 0; d < kOutputs / 4; ++d) o[4 * d] = o[4 * d + 2], o[4 * d + 1] = o[4 * d + 3];
    }
}

// The final LSE of these rows, of sums that O is not divided by. Of packed sequences.
template <typename Io>
OA_DEVICE void store_lse_rows(const float (&m2)[2], const float (&l)[2], const AttnFwdParams& p, const SplitTile& t,
                              int32 row, int lane) {
    if (p.lse == nullptr || (lane & 3) != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int32 at = row + (lane >> 2) + r * 8, head = head_of(t, at);
        if (at >= t.seqlen_q || !is_of_head(t, at)) continue;
        const float sink = t.seqlen_k != kNoSequence ? sink_log2<Io>(p.sinks, p.sinks_kind, head) : neg_inf();
        p.lse[head * p.lse_stride_h + t.q_begin + query_of(t, at)] = finish_row(m2[r], l[r], sink).lse;
    }
}
