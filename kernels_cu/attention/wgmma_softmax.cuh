// Softmax on wgmma accumulators: lane l of warp w of a warpgroup owns rows 16w + l/4 and + 8, of every block of 8 columns
// those at 2(l%4) and + 1: s[4n + 2r + x] is row r, column 8n + 2(l%4) + x.
#pragma once
#include "attention/mask.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_params.cuh"
#include "scheduler/fwd_tile.cuh"

// Hides the keys of tile n0 .. that causality, the window and the sequence's end hide. warp_row: the warp's first row.
template <int kScores>
OA_DEVICE void mask_edges(float (&s)[kScores], const AttnFwdParams& p, const FwdTile& t, int32 warp_row, int32 n0,
                          int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        KeyRange keys =
            visible_keys(warp_row + (lane >> 2) + r * 8, t.seqlen_q, t.seqlen_k, p.window_left, p.window_right);
        int32 lo = keys.lo - n0 - 2 * (lane & 3), hi = keys.hi - n0 - 2 * (lane & 3);
#pragma unroll
        for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                int32 col = n * 8 + x;
                if (col < lo || col >= hi) s[4 * n + 2 * r + x] = neg_inf();
            }
    }
}

// Running base and denominator of this thread's two rows, in base 2: p = exp2(s c - m2).
//
// The base need not be the maximum, only near enough for p to neither overflow nor vanish. So the maximum is looked for
// in a row block's first tile only; afterwards a tile's probabilities are taken against the base as it stands, and their
// sum, which is needed anyway, tells whether that was good enough: p <= sum <= kSumLimit. Only otherwise (a score 8 or
// more above the base in base 2) is the tile done again, with the base raised. This takes 64 comparisons a tile and the
// exchange of maxima out of the chain between the two products.
struct RowState {
    static constexpr float kSumLimit = 256.0f;  // p <= 2^8 costs no relative precision in bf16, fp16 or fp32

    // Before the first visible key the base is the lowest finite number and not -inf, so that a hidden score gives
    // exp2(-inf) = 0, and the first visible one infinity, which the sum reports.
    float m2[2], l[2];

    OA_DEVICE RowState() : m2{kLowest, kLowest}, l{0.0f, 0.0f} {}

    // Raises the base to the maximum of these scores (of four lanes); alpha: what O and l are to be multiplied by, l
    // has been. c: score units -> base-2 exponent, positive, of either row.
    template <int kScores>
    OA_DEVICE void raise(const float (&s)[kScores], const float (&c)[2], float (&alpha)[2]) {
        float top[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int n = 1; n < kScores / 4; ++n) top[r] = fmaxf(top[r], fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
            top[r] *= c[r];  // the lanes of a row may have scales of their own
        }
#pragma unroll
        for (int mask = 1; mask <= 2; mask <<= 1)
#pragma unroll
            for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], mask));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m2_new = fmaxf(m2[r], top[r]);
            alpha[r] = exp2_approx(m2[r] - m2_new);
            m2[r] = m2_new;
            l[r] *= alpha[r];
        }
    }

    // Calls put(n, r, p0, p1) for the two neighbouring columns of row r in column block n; sum: this lane's sums.
    template <int kScores, typename Put>
    OA_DEVICE void exponentiate(const float (&s)[kScores], const float (&c)[2], float (&sum)[2], Put put) const {
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float p0 = exp2_approx(fmaf(s[4 * n + 2 * r], c[r], -m2[r]));
                float p1 = exp2_approx(fmaf(s[4 * n + 2 * r + 1], c[r], -m2[r]));
                sum[r] += p0 + p1;
                put(n, r, p0, p1);
            }
    }

    // Whether the probabilities of any of the warp's rows were too large, or NaN. own: whether the rows belong to the
    // tile's sequence. In packed tensors a tile's last rows may be the next sequence's; they must not have a say, or a
    // result would depend on its neighbour.
    OA_DEVICE static bool too_large(const float (&sum)[2], const bool (&own)[2]) {
        return __any_sync(0xffffffffu, (own[0] && !(sum[0] <= kSumLimit)) || (own[1] && !(sum[1] <= kSumLimit)));
    }

    OA_DEVICE void add(const float (&sum)[2]) {
        l[0] += sum[0];
        l[1] += sum[1];
    }
};

template <int kOutputs>
OA_DEVICE void rescale(float (&o)[kOutputs], const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= alpha[(i >> 1) & 1];
}
