// Scores and P of a warp in attn_fwd_d512_sm90 (entry/), layout as in attention/warp_softmax.cuh.
#pragma once
#include "attention/score_mod.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// To base-2 units, with the softcap: what a factor in the exponent cannot do.
template <int kScores>
OA_DEVICE void transform_scores(float (&s)[kScores], const AttnFwdParams& p) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= p.softmax_scale * kLog2e;
    if (p.softcap > 0.0f) {
        const float inverse = kLn2 * rcp_approx(p.softcap), back = p.softcap * kLog2e;
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = back * tanh_exp2(s[i] * inverse);
    }
}

// The largest score of each row, of the four lanes that have it, in base 2 by the factor c.
template <int kScores>
OA_DEVICE void largest_scores(const float (&s)[kScores], float c, float (&top)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
        for (int i = 4; i < kScores; i += 4) even = fmaxf(even, s[i + 2 * r]), odd = fmaxf(odd, s[i + 2 * r + 1]);
        top[r] = fmaxf(even, odd) * c;
        // A finite score of a user's stays one.
        if (kHasScoreMod && fmaxf(even, odd) >= kLowest) top[r] = fmaxf(top[r], kLowest);
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
    }
}

// P times a factor for each row.
template <typename Io, int kSteps>
OA_DEVICE void scale_probabilities(uint32 (&probs)[kSteps][4], const float (&by)[2]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const float2 p = unpack2(Io{}, probs[step][x]);
            probs[step][x] = pack2(Io{}, p.x * by[x & 1], p.y * by[x & 1]);
        }
}
