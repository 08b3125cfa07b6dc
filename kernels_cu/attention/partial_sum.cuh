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
