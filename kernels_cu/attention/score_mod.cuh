// A score modification of the user's on scores in an accumulator, between softcap and masks:
//
//   S = expression(S, b, h, q, k);  S = -inf where mask(b, h, q, k) is false
//
// b: sequence, h: query head, q and k: positions in their sequence. Accumulators as in attention/score_forms.cuh.
#pragma once
#include "attention/score_mod_user.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

// Where the user's expressions are evaluated. Rows and keys that a tile has beyond the sequence are given the nearest
// position within: the user's arrays need not reach further.
class ModPositions {
  public:
    // first_row, first_key: of this lane's scores.
    OA_DEVICE ModPositions(const FwdTile& t, int32 first_row, int32 first_key)
        : last_key_(score_position(t.seqlen_k - 1)), key_(score_position(first_key)) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            row_[r] = score_position(max_of(min_of(first_row + 8 * r, t.seqlen_q - 1), 0));
    }
    OA_DEVICE ScorePosition row(int r) const { return row_[r]; }
    // Of column x of block n.
    OA_DEVICE ScorePosition key(int n, int x) const {
        int c = 8 * n + x;
        return {min_of(key_.value + c, last_key_.value), fminf(key_.real + float(c), last_key_.real)};
    }

  private:
    ScorePosition row_[2], last_key_, key_;
};

// A modified score in base 2: a finite score stays one.
OA_DEVICE float in_base2(float score) {
    return score == neg_inf() ? score : max_nan(score * kLog2e, 0.25f * kLowest);
}

// natural: what brings scores to natural-log units. Returns what the new ones are to be multiplied by in base 2. Where
// all of a warp's are small that is left to the exponent, which is rounded once; see kPlainBias.
template <int kScores>
OA_DEVICE float modify_scores(float (&s)[kScores], float natural, const ScoreModArrays& arrays, const FwdTile& t,
                              const ModPositions& at) {
    float top[2] = {};
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            float& score = s[4 * n + x];
            score = user_score(score * natural, t.sequence, t.head_idx, at.row(x >> 1), at.key(n, x & 1), arrays);
            top[x & 1] = max_nan(top[x & 1], fabsf(score));
        }
    if (__all_sync(0xffffffffu, max_nan(top[0], top[1]) <= 8192.0f)) return kLog2e;
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = in_base2(s[i]);
    return 1.0f;
}

template <int kScores>
OA_DEVICE void hide_by_expression(float (&s)[kScores], const ScoreModArrays& arrays, const FwdTile& t,
                                  const ModPositions& at) {
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x)
            if (!user_mask(t.sequence, t.head_idx, at.row(x >> 1), at.key(n, x & 1), arrays)) s[4 * n + x] = neg_inf();
}
