// Online softmax in base 2 for products whose operand P has few bits: p = exp2(s c - m2) stays within a bound.
#pragma once
#include "attention/wgmma_softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// Of one warp's kMTiles slices of 16 rows, scores as in RowState (attention/wgmma_softmax.cuh), whose fields, sums and integer
// scores these are. Lift::kValue is log2 of p at the maximum that the base was made for, Lift::kMost log2 of the largest p.
//
// Whether the base still does is looked at before the exponentials, by the very expression that they are made of: nothing
// has to be taken back, and exponentials and products with V can run side by side. The lanes of a row exchange their maxima
// only where it does not.
template <int kMTiles, typename Lift>
struct BoundedSoftmax {
    RowState<Lift> rows[kMTiles];
    // exponent = s scale + offset, of the current tile.
    float scale, offset[kMTiles][2];

    // Takes new scores into the base; before_move() is called, and O rescaled, if it has to move. c: score units -> base-2
    // exponent, positive, one for all scores of a lane; NaN where a scale is.
    template <typename Score, int kScores, int kOutputs, typename Before>
    OA_DEVICE void prepare(Score (&s)[kMTiles][kScores], float c, float (&o)[kMTiles][kOutputs], Before before_move) {
        float bias = kScoreBias<Score>;
        scale = c;
        if constexpr (kScoreBias<Score> != 0.0f) {
            // Too coarse for the constant to leave without rounding; or NaN or 0, which no hidden key must meet.
            if (__any_sync(0xffffffffu, !(c > 0.0f && c <= kCoarseScale))) {
#pragma unroll
                for (int i = 0; i < kMTiles; ++i)
#pragma unroll
                    for (int e = 0; e < kScores; ++e) {
                        float x = score_of(s[i][e]);
                        store_bits(s[i][e], x == neg_inf() ? x : (x - kScoreBias<Score>)*c);
                    }
                bias = 0.0f;
                scale = 1.0f;
            }
        }
        float top[kMTiles][2];
        bool move = false;
#pragma unroll
        for (int i = 0; i < kMTiles; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                top[i][r] = neg_inf();
#pragma unroll
                for (int n = 0; n < kScores / 4; ++n)
                    top[i][r] =
                        fmaxf(top[i][r], fmaxf(score_of(s[i][4 * n + 2 * r]), score_of(s[i][4 * n + 2 * r + 1])));
                offset[i][r] = fmaf(-bias, scale, -rows[i].m2[r]);
                move |= fmaf(top[i][r], scale, offset[i][r]) > Lift::kMost;
            }
        if (__any_sync(0xffffffffu, move)) {
            before_move();
#pragma unroll
            for (int i = 0; i < kMTiles; ++i) {
                float alpha[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float highest = (top[i][r] - bias) * scale;
                    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
                    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
                    float m2 = fmaxf(rows[i].m2[r], highest - Lift::kValue);
                    if constexpr (kScoreBias<Score> != 0.0f) m2 = ceilf(m2);
                    alpha[r] = exp2_approx(rows[i].m2[r] - m2);
                    rows[i].m2[r] = m2;
                    rows[i].l[r] *= alpha[r];
                    offset[i][r] = fmaf(-bias, scale, -m2);
                }
                rescale(o[i], alpha);
            }
        }
    }

    // P of score e of slice i; adds it to the denominator.
    template <typename Score>
    OA_DEVICE float exponential(Score s, int i, int e) {
        int r = e >> 1 & 1;
        float p = exp2_approx(fmaf(score_of(s), scale, offset[i][r]));
        rows[i].l[r] += p;
        return p;
    }

  private:
    static OA_DEVICE void store_bits(float& s, float x) { s = x; }
    static OA_DEVICE void store_bits(SeededScore& s, float x) { s.bits = __float_as_int(x); }
};
