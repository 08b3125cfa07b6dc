// Online softmax of one warp's rows in base 2 (FlashAttention-2, section 3.1; Milakov and Gimelshein 2018).
#pragma once
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// Of the four lanes that have a row.
OA_DEVICE void sum_of_quad(float (&l)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        l[r] += __shfl_xor_sync(0xffffffffu, l[r], 1);
        l[r] += __shfl_xor_sync(0xffffffffu, l[r], 2);
    }
}

// Rows of the m16n8 accumulator layout: lane l owns rows l/4 and l/4+8 of each 16-row tile; the four lanes of a quad
// have a row.
template <int kMTiles>
struct OnlineSoftmax {
    // Running maximum that the exponents are taken against, in base-2 units: p = exp2(s * c - m2). Before the first
    // visible key it is the lowest finite number and not -inf, so that a masked score still gives exp2(-inf) = 0 and
    // no per-tile guard against -inf - -inf is needed.
    float m2[kMTiles][2];
    float l[kMTiles][2];  // this lane's part of the running denominator

    OA_DEVICE void init() {
#pragma unroll
        for (int i = 0; i < kMTiles; ++i) {
            m2[i][0] = m2[i][1] = kLowest;
            l[i][0] = l[i][1] = 0.0f;
        }
    }

    // Updates the maximum by the tile's scores and rescales O and the denominator. The rescale is skipped for the
    // whole warp while no row's maximum grew by more than kSlack in base 2: P is then at most 2^kSlack, which costs no
    // relative precision in bf16, fp16 or fp32, and the final division removes the common factor.
    // c: score units -> base-2 exponent (positive).
    template <int kScores, int kOutputs>
    OA_DEVICE void update(const float (&s)[kMTiles][kScores], float (&o)[kMTiles][kOutputs], float c) {
        constexpr float kSlack = 8.0f;
        float top[kMTiles][2];
#pragma unroll
        for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float x = fmaxf(s[i][2 * r], s[i][2 * r + 1]);
#pragma unroll
                for (int n = 4; n < kScores; n += 4) x = fmaxf(x, fmaxf(s[i][n + 2 * r], s[i][n + 2 * r + 1]));
                top[i][r] = x;
            }
        }
#pragma unroll
        for (int mask = 1; mask <= 2; mask <<= 1)
#pragma unroll
            for (int i = 0; i < kMTiles; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r) top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(0xffffffffu, top[i][r], mask));
        bool grew = false;
#pragma unroll
        for (int i = 0; i < kMTiles; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) grew |= fmaf(top[i][r], c, -m2[i][r]) > kSlack;
        if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
            for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float m2_new = fmaxf(m2[i][r], top[i][r] * c);
                    float alpha = exp2_approx(m2[i][r] - m2_new);
                    m2[i][r] = m2_new;
                    l[i][r] *= alpha;
#pragma unroll
                    for (int d = 0; d < kOutputs; d += 4) {
                        o[i][d + 2 * r] *= alpha;
                        o[i][d + 2 * r + 1] *= alpha;
                    }
                }
            }
        }
    }

    // Sums the denominators over the quad; call once, after the last tile.
    OA_DEVICE void reduce_denominator() {
#pragma unroll
        for (int i = 0; i < kMTiles; ++i) sum_of_quad(l[i]);
    }
};

// Final scale of O and the LSE of one row. m2: maximum in base-2 units; l: denominator relative to 2^m2; sink2: extra
// logit in base-2 units, -inf if there is none.
struct RowResult {
    float o_scale;
    float lse;  // natural log
};
// 1 / l of two rows, 0 for a row without keys. One branch for both: of normal numbers, as nearly all are, a step of
// Newton's from the approximation is the nearest float, as the division is, but without a branch of its own.
OA_DEVICE void reciprocals(const float (&l)[2], float (&out)[2]) {
    float top = fmaxf(l[0], l[1]), least = fminf(l[0], l[1]);
    if (least > 1e-30f && top < 1e30f) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float near = rcp_approx(l[r]);
            out[r] = fmaf(near, -fmaf(l[r], near, -1.0f), near);
        }
    } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) out[r] = l[r] == 0.0f ? 0.0f : 1.0f / l[r];
    }
}

OA_DEVICE RowResult finish_row(float m2, float l, float sink2) {
    RowResult out;
    if (sink2 != neg_inf()) {
        float top = fmaxf(m2, sink2);
        float shrink = exp2_approx(m2 - top);
        float denom = l * shrink + exp2_approx(sink2 - top);
        out.o_scale = shrink / denom;
        out.lse = (top + log2_approx(denom)) * kLn2;
    } else {
        out.o_scale = l == 0.0f ? 0.0f : 1.0f / l;
        out.lse = l == 0.0f ? neg_inf() : (m2 + log2_approx(l)) * kLn2;
    }
    return out;
}
