// Softcap and user masks: applied to scores one by one between Q K^T and the softmax.
#pragma once
#include "attention/mask.cuh"
#include "attention/score_mod.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

template <typename Io>
class ScoreMods {
  public:
    // arrays: of the user's score modification, where there is one.
    OA_DEVICE ScoreMods(const AttnFwdParams& p, const FwdTile& t, const ScoreModArrays* arrays = nullptr)
        : p_(p),
          t_(t),
          arrays_(arrays),
          head_offset_(t.batch_idx * p.mask_stride_b + t.head_idx * p.mask_stride_h),
          inv_softcap_(p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f) {}

    // score: softmax_scale * q.k, natural-log units. Returns base-2 units; -inf for a masked key.
    OA_DEVICE float apply(float score, int32 row, int32 key) const {
        if (p_.softcap > 0.0f) score = p_.softcap * tanh_exp2(score * inv_softcap_);
        if constexpr (kHasScoreMod) {
            // Within the sequence: the user's arrays need not reach further.
            ScorePosition q = score_position(max_of(min_of(row, t_.seqlen_q - 1), 0));
            ScorePosition k = score_position(min_of(key, t_.seqlen_k - 1));
            score = user_score(score, t_.sequence, t_.head_idx, q, k, *arrays_);
            if (kHasScoreMask && !user_mask(t_.sequence, t_.head_idx, q, k, *arrays_)) return neg_inf();
        }
        if (p_.mask_kind != kMaskNone) {
            bool inside = row < t_.seqlen_q && key < t_.seqlen_k;
            float bias = inside ? mask_value<Io>(p_, head_offset_, row, key) : neg_inf();
            // A masked key does not count whatever its score is, NaN included.
            score = bias == neg_inf() ? neg_inf() : score + bias;
        }
        float score2 = score * kLog2e;
        // A finite score stays one: masks that add the lowest finite number are common.
        return score2 == neg_inf() && score != neg_inf() ? 0.5f * kLowest : score2;
    }

  private:
    const AttnFwdParams& p_;
    const FwdTile& t_;
    const ScoreModArrays* arrays_;
    int64 head_offset_;
    float inv_softcap_;
};
