// Probabilities of the backward, recomputed from scores and the LSE, and the derivatives of scores:
//
//   S = softmax_scale * Q K^T;  S = softcap * tanh(S / softcap);  S = expression(S);  S += mask, or -inf where it hides
//   P = exp(S - LSE);  slope = dS / d(softmax_scale * Q K^T)
#pragma once
#include "attention/dropout_mode.cuh"
#include "attention/mask.cuh"
#include "attention/score_mod.cuh"
#include "params/attn_bwd.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/math.cuh"
#include "ptx/min_nan.cuh"
#include "ptx/types.cuh"

struct ScoreGrad {
    float p, slope;
};

// P times the slope goes from warp to warp in 16 bits, times this, because a softcap's slopes vanish where P does not,
// and below 6e-5 fp16 loses bits. (In bf16 nothing changes, but that a wheel has room for twins of one form.) Neither P
// nor those slopes are above 1; a user's slopes may be.
constexpr float kOfCrossing = kHasScoreMod ? 1.0f : 32768.0f;

// Of one query head of one sequence. mask_row: of batches in the mask, which packed sequences have one each of.
template <typename Io>
class BwdScores {
  public:
    OA_DEVICE BwdScores(const AttnFwdParams& p, const ScoreModArrays* arrays, int32 sequence, int32 head,
                        int32 seqlen_q, int32 seqlen_k)
        : p_(p),
          arrays_(arrays),
          sequence_(sequence),
          head_(head),
          seqlen_q_(seqlen_q),
          seqlen_k_(seqlen_k),
          mask_offset_(sequence * p.mask_stride_b + head * p.mask_stride_h),
          inv_softcap_(p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f) {}

    // raw: q.k. A position that the windows and the lengths hide gives 0, and so does one that the mask hides, whatever
    // its score is, NaN included.
    OA_DEVICE ScoreGrad at(float raw, float lse2, int32 row, int32 key, bool visible) const {
        float score = raw * p_.softmax_scale, slope = 1.0f;
        if (p_.softcap > 0.0f) {
            float t = tanh_any(score * inv_softcap_);
            score = p_.softcap * t;
            slope = fmaf(-t, t, 1.0f);
        }
        if constexpr (kHasScoreMod) {
            ScorePosition q = score_position(max_of(min_of(row, seqlen_q_ - 1), 0));
            ScorePosition k = score_position(max_of(min_of(key, seqlen_k_ - 1), 0));
            slope *= user_grad(score, sequence_, head_, q, k, *arrays_);
            score = user_score(score, sequence_, head_, q, k, *arrays_);
            if (kHasScoreMask) visible = visible && user_mask(sequence_, head_, q, k, *arrays_);
        }
        if (p_.mask_kind != kMaskNone) {
            float bias = visible ? mask_value<Io>(p_, mask_offset_, row, key) : neg_inf();
            visible = visible && bias != neg_inf();
            score += max_nan(bias, kLeastBias);
        }
        // P is at most 1, which large scores need not give in fp32 (attn_bwd_prepare_sm80).
        float e = exp2_approx(min_nan(fmaf(score, kLog2e, -lse2), 0.0f));
        // Where P vanishes so does everything behind it: an expression's derivative may be infinite there.
        return visible && score != neg_inf() && e != 0.0f ? ScoreGrad{e, slope} : ScoreGrad{0.0f, 0.0f};
    }

  private:
    const AttnFwdParams& p_;
    const ScoreModArrays* arrays_;
    int32 sequence_, head_, seqlen_q_, seqlen_k_;
    int64 mask_offset_;
    float inv_softcap_;
};

// Whether scores are more than products times the scale; a block mask alone leaves them so.
OA_DEVICE bool modifies_scores(const AttnFwdParams& p) {
    return kHasScoreMod || p.softcap > 0.0f || p.mask_kind != kMaskNone;
}

// What the kernels are told, with a user's score modification, with dropout, and without.
using BwdScoreParams = Select<kHasScoreMod, AttnBwdUserModParams, AttnBwdParams>::Type;
using BwdParams = Select<kHasDropout, AttnBwdDropoutParams, BwdScoreParams>::Type;
static_assert(!(kHasScoreMod && kHasDropout), "there is no text with both");
OA_DEVICE const AttnBwdParams& backward_of(const AttnBwdParams& params) { return params; }
OA_DEVICE const AttnBwdParams& backward_of(const AttnBwdUserModParams& params) { return params.call; }
OA_DEVICE const AttnBwdParams& backward_of(const AttnBwdDropoutParams& params) { return params.call; }
OA_DEVICE const ScoreModArrays* arrays_of(const AttnBwdParams&) { return nullptr; }
OA_DEVICE const ScoreModArrays* arrays_of(const AttnBwdDropoutParams&) { return nullptr; }
OA_DEVICE const ScoreModArrays* arrays_of(const AttnBwdUserModParams& params) { return &params.arrays; }
