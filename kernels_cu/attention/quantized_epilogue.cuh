// O and LSE of quantized attention, of 16 rows of one warp, from accumulators to global memory.
#pragma once
#include "attention/quantized_operands.cuh"
#include "attention/warp_epilogue.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

// V's scales and means of one head, in global memory. Columns beyond head_dim_pad are not stored.
struct GlobalChannels {
    const float* scales;
    const float* means;  // null: zeros
    int32 head_dim_pad;
    OA_DEVICE GlobalChannels(const QuantizedOperands& x, int64 kv_head)
        : scales(x.v_scale + kv_head * x.head_dim_pad),
          means(x.v_mean == nullptr ? nullptr : x.v_mean + kv_head * x.head_dim_pad),
          head_dim_pad(x.head_dim_pad) {}
    OA_DEVICE void get(int32 column, float2& scale, float2& mean) const {
        column = min_of(column, head_dim_pad - 2);
        scale = *reinterpret_cast<const float2*>(scales + column);
        mean = make_float2(0.0f, 0.0f);
        if (means != nullptr) mean = *reinterpret_cast<const float2*>(means + column);
    }
};

// Divides one thread's part of two rows of O by the sum of P and undoes V's scale and mean, both per channel:
// O = (O / l) v_scale + v_mean, l = 1, and the base m2 with what l was. The division comes first, because v_scale times
// a sum of products may exceed fp32 where their mean does not. o[4d + 2r + x]: row r, channel 8d + 2(lane % 4) + x.
// channels: get(column, scale, mean) of two of them.
template <int kOutputs, typename Channels>
OA_DEVICE void restore_values(float (&o)[kOutputs], float (&m2)[2], float (&l)[2], const Channels& channels, int lane) {
    float inverse[2], weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        bool nothing = l[r] == 0.0f;  // a row that attends to nothing stays 0
        inverse[r] = nothing ? 0.0f : 1.0f / l[r];
        weight[r] = nothing ? 0.0f : 1.0f;
        if (!nothing) m2[r] += log2_approx(l[r]);
        l[r] = nothing ? 0.0f : l[r] * inverse[r];  // 1, or NaN
    }
    // All loads of a group before any of them is waited for.
    constexpr int kGroup = 8;
#pragma unroll
    for (int first = 0; first < kOutputs / 4; first += kGroup) {
        float2 scale[kGroup], mean[kGroup];
#pragma unroll
        for (int j = 0; j < kGroup; ++j) channels.get(8 * (first + j) + 2 * (lane & 3), scale[j], mean[j]);
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

// rows: a RowState. operands: attended(), whether there was a key, without which nothing else is asked (a function,
// because a flag kept from before the sums costs registers and spills at head_dim 256); channels(), as restore_values
// takes them; bias(row), what smoothing took from the scores of row first_row + 0 .. 15.
template <typename Io, int kOutputs, typename Rows, typename Operands>
OA_DEVICE void store_quantized(float (&o)[kOutputs], Rows& rows, const Operands& operands, const AttnFwdParams& p,
                               const FwdTile& t, int32 first_row, int lane) {
    rows.reduce();
    float bias[2] = {0.0f, 0.0f};
    if (operands.attended()) {
        restore_values(o, rows.m2, rows.l, operands.channels(), lane);
        bias[0] = operands.bias(lane >> 2) * p.softmax_scale;
        bias[1] = operands.bias((lane >> 2) + 8) * p.softmax_scale;
    }
    store_rows<Io>(o, rows.m2, rows.l, bias, p, t, first_row, lane);
}
