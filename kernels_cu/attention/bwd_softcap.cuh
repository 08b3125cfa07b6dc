// Softcap of the backward on wgmma: of transposed scores, keys times queries, an accumulator's x-th number of 8 queries
// is that of query x & 1 of the thread's two.
//
//   S = cap * tanh(S / cap);  P = exp2(S - lse2);  dS = P (dP - delta) (1 - (S / cap)^2)
#pragma once
#include "attention/score_forms.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/math.cuh"
#include "ptx/min_nan.cuh"
#include "ptx/types.cuh"

// Raw products to the exponents of P, by the forward's functions (score_forms.cuh). lse2(j): of the j-th 8 queries.
template <int kScores, typename Row>
OA_DEVICE void capped_exponents(float (&s)[kScores], const ScoreForms& f, const Row& lse2) {
    if (below_cap(s, f)) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const float2 row = lse2(i >> 2);
            s[i] = fmaf(s[i], cap_factor(f, s[i]), -(i & 1 ? row.y : row.x));
        }
    } else {
        cap_scores(s, f);
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const float2 row = lse2(i >> 2);
            // Large scores can be rounded to more than their row's LSE; P is at most 1.
            s[i] = min_nan(fmaf(s[i], f.factor2, -(i & 1 ? row.y : row.x)), 0.0f);
        }
    }
}

// dS from P (dP - delta), with S / cap from P: registers that would keep it are not there. lse: lse2 * inv_factor2.
// Where P is 0, or the LSE +inf, S / cap is not between -1 and 1, and ds is 0.
OA_DEVICE float uncap(float ds, float p, float inv_factor2, float lse) {
    const float t = fmaf(log2_normal(p), inv_factor2, lse);
    return fmaf(-ds, fminf(t * t, 1.0f), ds);
}
