// What attention on quantized operands needs besides AttnFwdParams (src/omniattn/launch/attn_int8_sm80.py packs the same
// fields in the same order). Formats: docs/quantization.md.
#pragma once
#include "attention/quantize_params.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_params.cuh"
#include "scheduler/fwd_tile.cuh"

struct QuantizedOperands {
    const float* q_scale;
    const float* k_scale;
    const float* row_bias;
    const float* v_scale;
    const float* v_mean;  // null: zeros
    const float* delta_s;  // null without smooth_q
    int64 q_scale_stride_h, k_scale_stride_h, delta_stride_h;  // elements, between heads
    int32 delta_columns;
    int32 head_dim_pad;
};

// First block of `rows` rows of the tile's sequence, of queries or of keys. Dense batches have their own for every head.
OA_DEVICE int32 slot_of(const AttnFwdParams& p, const FwdTile& t, int32 begin, int32 rows) {
    return p.cu_seqlens_q == nullptr ? 0 : first_slot(begin, t.sequence, rows);
}

// Number of a head among all that an array holds; packed sequences share their heads.
OA_DEVICE int64 head_of(const AttnFwdParams& p, const FwdTile& t, int32 heads, int32 head) {
    return (p.cu_seqlens_q == nullptr ? int64(t.batch_idx) * heads : 0) + head;
}

// Scales of the rows from warp_row on, 8 for the slice of 32 that they are.
OA_DEVICE const float* q_scales(const AttnFwdParams& p, const QuantizedOperands& x, const FwdTile& t, int32 warp_row) {
    int32 slice = slot_of(p, t, t.q_begin, kBlockRows) * 4 + (warp_row >> 5);
    return x.q_scale + head_of(p, t, p.num_q_heads, t.head_idx) * x.q_scale_stride_h + slice * 8;
}

// What smoothing took from the scores of a row, before the softmax's scale.
OA_DEVICE float row_bias_of(const AttnFwdParams& p, const QuantizedOperands& x, const FwdTile& t, int32 row) {
    if (row >= t.seqlen_q) return 0.0f;
    return x.row_bias[head_of(p, t, p.num_q_heads, t.head_idx) * p.seqlen_q + t.q_begin + row];
}

// What is known of a CTA's tile and not needed all the time: registers are what this kernel lacks.
struct TileFacts {
    FwdTile tile;
    int32 full_first, full_end;  // as in KeyTiles
    const uint16* k;
    const uint16* v;
    const float* k_scale;
    const float* delta;  // of its block of queries
};

template <int kBlockN, bool kHalfV>
OA_DEVICE TileFacts facts_of(const AttnFwdParams& p, const QuantizedOperands& x, const FwdTile& t, int32 full_first,
                             int32 full_end) {
    int32 kv_head = t.head_idx / (p.num_q_heads / p.num_kv_heads);
    TileFacts f{t, full_first, full_end, nullptr, nullptr, nullptr, nullptr};
    f.k = p.k + t.batch_idx * p.k_stride_b + kv_head * p.k_stride_h + int64(t.k_begin) * p.k_stride_s;
    f.v = p.v + t.batch_idx * p.v_stride_b + kv_head * p.v_stride_h;
    f.v += kHalfV ? int64(t.k_begin) * p.v_stride_s : int64(slot_of(p, t, t.k_begin, kBlockRows)) * (kBlockRows / 2);
    f.k_scale =
        x.k_scale + head_of(p, t, p.num_kv_heads, kv_head) * x.k_scale_stride_h + slot_of(p, t, t.k_begin, kBlockN) * 4;
    f.delta = x.delta_s + head_of(p, t, p.num_q_heads, t.head_idx) * x.delta_stride_h +
              int64(slot_of(p, t, t.q_begin, kBlockRows) + t.m0 / kBlockRows) * x.delta_columns;
    return f;
}

// Divides one thread's part of two rows of O by the sum of P and undoes V's scale and mean, both per channel:
// O = (O / l) v_scale + v_mean, l = 1, and the base m2 with what l was. The division comes first, because v_scale times a sum of
// products may exceed fp32 where their mean does not. o[4d + 2r + x]: row r, channel 8d + 2(lane % 4) + x.
template <int kOutputs>
OA_DEVICE void restore_values(float (&o)[kOutputs], float (&m2)[2], float (&l)[2], const QuantizedOperands& x,
                              int64 kv_head, int lane) {
    const float* scales = x.v_scale + kv_head * x.head_dim_pad;
    const float* means = x.v_mean == nullptr ? nullptr : x.v_mean + kv_head * x.head_dim_pad;
    float inverse[2], weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        bool nothing = l[r] == 0.0f;  // a row that attends to nothing stays 0
        inverse[r] = nothing ? 0.0f : 1.0f / l[r];
        weight[r] = nothing ? 0.0f : 1.0f;
        if (!nothing) m2[r] += log2_approx(l[r]);
        l[r] = nothing ? 0.0f : l[r] * inverse[r];  // 1, or NaN
    }
    // All loads of a group before any of them is waited for. What lies behind head_dim_pad is stored nowhere.
    constexpr int kGroup = 8;
#pragma unroll
    for (int first = 0; first < kOutputs / 4; first += kGroup) {
        float2 scale[kGroup], mean[kGroup];
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            int32 column = min_of(8 * (first + j) + 2 * (lane & 3), x.head_dim_pad - 2);
            scale[j] = *reinterpret_cast<const float2*>(scales + column);
            mean[j] = make_float2(0.0f, 0.0f);
            if (means != nullptr) mean[j] = *reinterpret_cast<const float2*>(means + column);
        }
#pragma unroll
        for (int j = 0; j < kGroup; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float* at = o + 4 * (first + j) + 2 * r;
                at[0] = fmaf(at[0] * inverse[r], scale[j].x, weight[r] * mean[j].x);
                at[1] = fmaf(at[1] * inverse[r], scale[j].y, weight[r] * mean[j].y);
            }
    }
}
