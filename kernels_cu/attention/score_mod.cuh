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

// natural: what brings scores to natural-log units. hide: the mask expression has something to say.
template <bool kClamp, int kScores>
OA_DEVICE void modify_scores(float (&s)[kScores], float natural, const ScoreModArrays& arrays, const FwdTile& t,
                             int32 first_row, int32 first_key, bool hide) {
    const ModPositions<kClamp> at(t, first_row, first_key);
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

// Units of modified scores. They may be of any size. The exponent s * log2(e) - m2 is rounded once; where m2 itself is
// rounded to a large part of 1, that is no longer good enough: then scores are brought to base 2, rounded, before the
// base is subtracted. That costs two instructions a score, so it is done for the rest of a tile of queries from the
// first time on that it has to. Only a score that becomes a row's base can make it so: the first visible ones, and
// those that raise the base.
class ModUnits {
  public:
    // Of one tile of keys; returns what its scores are to be multiplied by in base 2. always: whatever they are.
    template <int kScores>
    OA_DEVICE float settle(float (&s)[kScores], const float (&m2)[2], bool always) {
        bool first = __any_sync(0xffffffffu, m2[0] == kLowest || m2[1] == kLowest);
        if (always || (first && !all_small(s))) careful_ = true;
        if (!careful_) return kLog2e;
        to_base2(s);
        return 1.0f;
    }
    // Before these scores raise the base. c: as settle() returned it.
    template <int kScores>
    OA_DEVICE void settle_again(float (&s)[kScores], float (&c)[2]) {
        if (careful_ || all_small(s)) return;
        careful_ = true;
        c[0] = c[1] = 1.0f;
        to_base2(s);
    }

  private:
    // -inf is small, NaN is not. 2^20: the base is rounded to 1/16 then, and P need only be roughly of size 1.
    template <int kScores>
    OA_DEVICE static bool all_small(const float (&s)[kScores]) {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < kScores; ++i) top = max_nan(top, s[i] == neg_inf() ? 0.0f : fabsf(s[i]));
        return __all_sync(0xffffffffu, top <= 1048576.0f);
    }
    // A finite score stays one.
    template <int kScores>
    OA_DEVICE static void to_base2(float (&s)[kScores]) {
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            s[i] = s[i] == neg_inf() ? neg_inf() : max_nan(s[i] * kLog2e, 0.25f * kLowest);
    }

    bool careful_ = false;  // of the whole warp
};
