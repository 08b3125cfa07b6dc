// A score modification of the user's on scores in an accumulator, between softcap and masks:
//
//   S = expression(S, b, h, q, k);  S = -inf where mask(b, h, q, k) is false
//
// b: sequence, h: query head, q and k: positions in their sequence. Accumulators as in attention/score_mods.cuh.
#pragma once
#include "attention/score_mod_user.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

// Where the user's expressions are evaluated. kClamp: rows and keys that a tile has beyond the sequence are given the
// nearest position within: the user's arrays need not reach further. Rows always are: they cost nothing in a loop.
template <bool kClamp>
class ModPositions {
  public:
    // first_row, first_key: of this lane's scores.
    OA_DEVICE ModPositions(const FwdTile& t, int32 first_row, int32 first_key)
        : last_key_(score_position(t.seqlen_k - 1)), key_(score_position(first_key)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) row_[r] = score_position(max_of(min_of(first_row + 8 * r, t.seqlen_q - 1), 0));
    }
    OA_DEVICE ScorePosition row(int r) const { return row_[r]; }
    // Of column x of block n.
    OA_DEVICE ScorePosition key(int n, int x) const {
        int c = 8 * n + x;
        ScorePosition key{key_.value + c, key_.real + float(c)};
        if (!kClamp) return key;
        return {min_of(key.value, last_key_.value), fminf(key.real, last_key_.real)};
    }

  private:
    ScorePosition row_[2], last_key_, key_;
};

// Where a lane's scores are: its first row and key of a tile.
struct ModPlace {
    const FwdTile& tile;
    int32 row, key;
};

// Scores to new ones, in natural-log units. natural: what brings the old ones there. hide: the mask expression has
// something to say. kClamp: see ModPositions.
template <bool kClamp, int kScores>
OA_DEVICE void modify_scores(float (&s)[kScores], float natural, const ScoreModArrays& arrays, const ModPlace& place,
                             bool hide) {
    const FwdTile& t = place.tile;
    const ModPositions<kClamp> at(t, place.row, place.key);
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x)
            s[4 * n + x] =
                user_score(s[4 * n + x] * natural, t.sequence, t.head_idx, at.row(x >> 1), at.key(n, x & 1), arrays);
    if constexpr (kHasScoreMask) {
        if (!hide) return;
#pragma unroll
        for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
            for (int x = 0; x < 4; ++x)
                if (!user_mask(t.sequence, t.head_idx, at.row(x >> 1), at.key(n, x & 1), arrays))
                    s[4 * n + x] = neg_inf();
    }
}

// Modified scores may be of any size. The exponent s * log2(e) - m2 is rounded once, and m2 itself may be rounded to a
// large part of 1 where it is large: up to here by 1/16, which does P no harm, as it is the same for a whole row.
// Beyond, scores are brought to base 2, rounded, before the base is subtracted.
constexpr float kPlainModified = 1048576.0f;
// A finite score stays one.
template <int kScores>
OA_DEVICE void to_base2(float (&s)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
        float finite = min_nan(max_nan(s[i] * kLog2e, 0.25f * kLowest), -0.25f * kLowest);
        s[i] = fabsf(s[i]) <= -kLowest ? finite : s[i];
    }
}
