// Score modifications of the backward on wgmma. Scores are transposed, keys times queries: number i of a thread is that
// of its key i >> 1 & 1 and of query i & 1 of two, of the (i >> 2)-th 8 queries.
//
//   softcap   S = cap * tanh(S / cap);  P = exp2(S - lse2);  dS = P (1 - (S / cap)^2) (dP - delta)
//   keys      P = exp2(c S + bias of the key - lse2)
#pragma once
#include "attention/dropout.cuh"
#include "attention/dropout_mode.cuh"
#include "attention/mask.cuh"
#include "attention/score_mods.cuh"
#include "params/attn_bwd.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/min_nan.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"

// Arguments of attn_bwd_sm90.
template <bool kSoftcap>
struct BwdSm90Params {
    using Scores = typename Select<kSoftcap, AttnBwdModsSm90Params, AttnBwdSm90Params>::Type;
    using Type = typename Select<kHasDropout, AttnBwdDropoutSm90Params, Scores>::Type;
    static_assert(!(kHasDropout && kSoftcap), "there are no arguments with both");
};

// Of the queries of this thread's columns of scores, two of each 8: lse2 or delta, kBlockM floats a stage.
template <int kBlockM>
class BwdQueryRows {
  public:
    OA_DEVICE BwdQueryRows(uint32 from, int32 stage, int lane) : at_(from + stage * (kBlockM * 4) + (lane & 3) * 8) {}
    OA_DEVICE float2 operator()(int j) const { return load_shared_float2(at_ + j * 32); }

  private:
    uint32 at_;
};
// The same, read ahead.
template <int kBlockM>
class BwdReadRows {
  public:
    OA_DEVICE explicit BwdReadRows(const BwdQueryRows<kBlockM>& from) {
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) row_[j] = from(j);
    }
    OA_DEVICE float2 operator()(int j) const { return row_[j]; }

  private:
    float2 row_[kBlockM / 8];
};

// Raw products to S in base 2, where all of a warp's are below the cap, else to S / cap, by the forward's functions
// (score_mods.cuh). Returns which.
template <int kScores>
OA_DEVICE bool cap_products(float (&s)[kScores], const ScoreModParams& f) {
    const bool near = below_cap(s, f);
    if (near)
        cap_near_scores(s, f);
    else
        cap_scores(s, f);
    return near;
}
// From what cap_products made to P (1 - (S / cap)^2), in place, and P as an operand of a product; from -inf to 0 and
// something to clear. lse2(j): of the j-th 8 queries. inv_factor2: S / cap of S in base 2.
template <bool kNear, typename Io, int kScores, typename Row>
OA_DEVICE void capped_probabilities(float (&s)[kScores], uint32 (&p16)[kScores / 8][4], const ScoreModParams& f,
                                    float inv_factor2, const Row& lse2) {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
        const float2 row = lse2(i >> 2);
        float p[2];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            const float lse = x ? row.y : row.x, at = s[i + x];
            // Large scores can be rounded to more than their row's LSE; P is at most 1.
            p[x] = exp2_approx(kNear ? at - lse : min_nan(fmaf(at, f.factor2, -lse), 0.0f));
            const float t = kNear ? at * inv_factor2 : at;
            s[i + x] = p[x] * fmaf(-t, t, 1.0f);
        }
        p16[i / 8][i / 2 % 4] = pack2(Io{}, p[0], p[1]);
    }
}

// What a mask that is the same for all queries adds to a key's scores, in base 2; -inf where it hides the key, and
// behind its end.
template <typename Io>
OA_DEVICE float key_bias_log2(const AttnFwdParams& p, int32 sequence, int32 head, int32 key) {
    const float bias = mask_value<Io>(p, sequence * p.mask_stride_b + head * p.mask_stride_h, 0, key);
    return bias == neg_inf() ? bias : max_nan(bias, kLeastBias) * kLog2e;
}

// Raw products to the exponents of P; bias: of this thread's keys.
template <int kScores, typename Row>
OA_DEVICE void biased_exponents(float (&s)[kScores], float c, const float (&bias)[2], const Row& lse2) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
        const float2 row = lse2(i >> 2);
        // P is at most 1, which large numbers of masks need not give in fp32 (attn_bwd_prepare_sm80).
        s[i] = min_nan(fmaf(s[i], c, bias[i >> 1 & 1] - (i & 1 ? row.y : row.x)), 0.0f);
    }
}
