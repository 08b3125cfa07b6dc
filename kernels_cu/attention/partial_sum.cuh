// Sum of partial results of attention over disjoint sets of keys, whose O are not divided by their denominators.
// Source: Flash-Decoding (Dao et al. 2023).
//
//   M = max m_i;  L = sum l_i 2^(m_i - M);  O = sum O_i 2^(m_i - M)
#pragma once
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// With a running maximum; kWidth channels of a row.
template <int kWidth>
struct PartialSum {
    float m = kLowest, l = 0.0f, o[kWidth] = {};

    // Adds kCount results: maximum and denominator, and O. One that there is not: kLowest and zeros.
    template <int kCount>
    OA_DEVICE void add(const float2 (&ml)[kCount], const float (&x)[kCount][kWidth]) {
        float top = m;
#pragma unroll
        for (int u = 0; u < kCount; ++u) top = fmaxf(top, ml[u].x);
        float alpha = exp2_approx(m - top);
        m = top;
        l *= alpha;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) o[e] *= alpha;
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
            float weight = exp2_approx(ml[u].x - m);
            l = fmaf(ml[u].y, weight, l);
#pragma unroll
            for (int e = 0; e < kWidth; ++e) o[e] = fmaf(x[u][e], weight, o[e]);
        }
    }
};

// Adds the parts first, first + step .. of `count`, kUnroll of them asked for at once. row_of(part): its row among
// partial results, partial_ml [row, 2] and partial_o [row, head_dim], of which four channels from `channel` on are
// summed. kWidth 1: denominators alone.
template <int kUnroll, int kWidth, typename RowOf>
OA_DEVICE void add_parts(PartialSum<kWidth>& sum, int32 first, int32 step, int32 count, const RowOf& row_of,
                         const float* partial_ml, const float* partial_o, int32 head_dim, int32 channel) {
    static_assert(kWidth == 1 || kWidth == 4, "a vector of channels, or none");
    for (int32 i = first; i < count; i += step * kUnroll) {
        float2 ml[kUnroll];
        float o[kUnroll][kWidth];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int32 part = i + u * step;
            ml[u] = make_float2(kLowest, 0.0f);
#pragma unroll
            for (int e = 0; e < kWidth; ++e) o[u][e] = 0.0f;
            if (part >= count) continue;
            const int64 row = row_of(part);
            ml[u] = *reinterpret_cast<const float2*>(partial_ml + 2 * row);
            if constexpr (kWidth == 4) {
                const float4 x = *reinterpret_cast<const float4*>(partial_o + row * head_dim + channel);
                o[u][0] = x.x, o[u][1] = x.y, o[u][2] = x.z, o[u][3] = x.w;
            }
        }
        sum.add(ml, o);
    }
}
