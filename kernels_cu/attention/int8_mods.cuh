// Softcap, masks and biases on integer scores (attention/score_mods.cuh has them on floats).
//
//   product = scale * S + row shift + delta_s
//
// S: integers of Q K^T; scale: q_scale * k_scale of a lane's rows and keys; row shift: row_bias, which softcap sees.
//
// Three ways, from fast to slow, which all give the same mathematics:
//   integers      nothing but visibility: the plain kernel's exponentials on integers
//   cap series    softcap of a tile whose scores lie near their row's shift: a polynomial in S
//   products      anything: floats in the integers' registers, as attn_fwd_sm90 has them
#pragma once
#include "attention/score_mods.cuh"
#include "attention/warp_softmax.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// Floats in the registers of integers, and of products that are floats already.
OA_DEVICE void put_float(int32& s, float f) { s = __float_as_int(f); }
OA_DEVICE void put_float(float& s, float f) { s = f; }

// Integers as floats, in their registers.
template <int kScores>
OA_DEVICE void make_floats(int32 (&s)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = __float_as_int(__int2float_rn(s[i]));
}
template <int kScores>
OA_DEVICE void make_floats(float (&)[kScores]) {}
template <int kScores>
OA_DEVICE void floats_of(const int32 (&s)[kScores], float (&f)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) f[i] = __int_as_float(s[i]);
}
template <int kScores>
OA_DEVICE void floats_of(const float (&s)[kScores], float (&f)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) f[i] = s[i];
}

// Products from integers as floats. shift: of either row; delta: shared memory, from this lane's first column on, or
// null.
template <int kScores>
OA_DEVICE void make_products(float (&f)[kScores], float scale, const float (&shift)[2], const float* delta) {
    if (delta != nullptr) {
#pragma unroll
        for (int n = 0; n < kScores / 4; ++n) {
            float2 d = *reinterpret_cast<const float2*>(delta + 8 * n);
#pragma unroll
            for (int i = 4 * n; i < 4 * n + 4; ++i) f[i] = fmaf(f[i], scale, shift[i >> 1 & 1] + (i & 1 ? d.y : d.x));
        }
    } else {
#pragma unroll
        for (int i = 0; i < kScores; ++i) f[i] = fmaf(f[i], scale, shift[i >> 1 & 1]);
    }
}

// Scores in base 2 in the registers of their integers, some of which `hide` may have hidden: that holds whatever scale
// is, NaN included.
template <typename Score, int kScores>
OA_DEVICE void make_base2(Score (&s)[kScores], float scale) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
        float score = score_of(s[i]);
        put_float(s[i], score == neg_inf() ? score : (score - kScoreBias<Score>)*scale);
    }
}

template <int kScores>
OA_DEVICE void hide_by_bits(int32 (&s)[kScores], uint32 word) {
#pragma unroll
    for (int i = 0; i < kScores; ++i)
        if (!(word >> i & 1)) hide(s[i]);
}

// RowState::raise of scores that are floats, to a base that suits integers too (a multiple of 1 / kBaseSteps). c: the
// same for all lanes; shift: for all keys.
template <typename PRange, int kScores, typename Shift = NoShift>
OA_DEVICE void raise_on_grid(RowState<PRange>& rows, const float (&s)[kScores], float c, float (&alpha)[2],
                             Shift shift = {}) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float top = neg_inf();
#pragma unroll
        for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
            for (int x = 0; x < 2; ++x) top = fmaxf(top, s[4 * n + 2 * r + x]);
#pragma unroll
        for (int mask = 1; mask <= 2; mask <<= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
        float m2 = top * c - PRange::kBaseLog2;
        // Not a number where a row sees none of the tile and its shift is infinite: then the base stays.
        if constexpr (Shift::kPresent) m2 = fmaf(top, c, shift(0, 0) - PRange::kBaseLog2);
        m2 = fmaxf(rows.m2[r], m2);
        // Larger ones are multiples by themselves, and might overflow.
        if (fabsf(m2) < 65536.0f) m2 = ceilf(m2 * kBaseSteps<int32>) / kBaseSteps<int32>;
        m2 = fmaxf(m2, kLowest);
        alpha[r] = exp2_approx(rows.m2[r] - m2);
        rows.m2[r] = m2;
        rows.l[r] *= alpha[r];
    }
}

// Softcap by a polynomial in the integers. Of one row, with u = scale * S * cap_scale and b = row shift * cap_scale:
//
//   cap * log2(e) * tanh(b + u) = a[0] + a[1] u + a[2] u^2 + a[3] u^3   for |u| <= limit
//
// Taylor's series at b, whose terms of degree 4 and 5 are put into the lower ones as Chebyshev polynomials say
// (u^4 = h^2 u^2 - h^4 / 8, u^5 = 5/4 h^2 u^3 - 5/16 h^4 u up to a sixteenth on |u| <= h). limit: where a score is
// off by kCapError at most, in natural-log units; quantization to 8 bits is off by far more.
constexpr float kCapError = 1e-3f, kCapReach = 0.25f;
struct CapRow {
    float a[4], limit;

    OA_DEVICE CapRow() : a{}, limit(0.0f) {}
    OA_DEVICE CapRow(float shift, const ScoreModParams& f) {
        float x = tanh_any(shift * f.cap_scale), x2 = x * x, d = 1.0f - x2;
        float d3 = d * (x2 - 1.0f / 3.0f), d4 = x * d * (2.0f / 3.0f - x2);
        float d5 = d * fmaf(x2, x2 - 1.0f, 2.0f / 15.0f);
        // 0.003: the terms from degree 5 on.
        float fourth = kCapError * rcp_approx(f.factor * fmaf(fabsf(d4), 0.125f, 0.003f));
        float h = fminf(exp2_approx(0.25f * log2_approx(fourth)), kCapReach), h2 = h * h;
        limit = h;
        a[0] = f.factor2 * fmaf(d4, -0.125f * h2 * h2, x);
        a[1] = f.factor2 * fmaf(d5, -0.3125f * h2 * h2, d);
        a[2] = f.factor2 * fmaf(d4, h2, -x * d);
        a[3] = f.factor2 * fmaf(d5, 1.25f * h2, d3);
    }
};

// Of a lane's two rows and one tile of keys, in place of what is added to exponents (RowState, "shift"); scores are
// integers as floats.
struct CapSeries {
    static constexpr bool kPresent = true;
    float a[2][4];  // as in CapRow, in powers of S

    // scale: of S, to u.
    OA_DEVICE CapSeries(const CapRow (&rows)[2], float scale) {
        float power = 1.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) a[r][i] = rows[r].a[i] * power;
            power *= scale;
        }
    }
    // What is added to the exponents of the tile.
    OA_DEVICE void add(float shift) {
        a[0][0] += shift;
        a[1][0] += shift;
    }
};

// As below_cap of floats. own: whether this lane's rows are the sequence's; of others there may be anything.
template <int kScores>
OA_DEVICE bool below_cap(const float (&s)[kScores], const ScoreModParams& f, const bool (&own)[2]) {
    float tops[2];
    largest_products(s, tops);
    return __all_sync(0xffffffffu, fmaxf(own[0] ? tops[0] : 0.0f, own[1] ? tops[1] : 0.0f) <= f.cap_limit);
}
// Whether the series are for all of the warp's scores; not where scale is NaN. own: as for below_cap.
template <int kScores>
OA_DEVICE bool are_near(const float (&s)[kScores], const CapRow (&rows)[2], const bool (&own)[2], float scale) {
    float tops[2], limit = -neg_inf(), top = 0.0f;
    largest_products(s, tops);
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (own[r]) limit = fminf(limit, rows[r].limit), top = fmaxf(top, tops[r]);
    return __all_sync(0xffffffffu, !(own[0] || own[1]) || top <= limit * rcp_approx(fabsf(scale)));
}

template <int kScores>
class Exponents<false, float, kScores, CapSeries> {
  public:
    OA_DEVICE Exponents(const float (&s)[kScores], const float (&)[2], const float (&m2)[2], const CapSeries& series)
        : s_(s), series_(series), base_{series.a[0][0] - m2[0], series.a[1][0] - m2[1]} {}
    OA_DEVICE float operator()(int n, int r, int x) const {
        float score = s_[4 * n + 2 * r + x];
        const float* a = series_.a[r];
        return fmaf(fmaf(fmaf(a[3], score, a[2]), score, a[1]), score, base_[r]);
    }
    OA_DEVICE bool is_hidden(int, int, int) const { return false; }

  private:
    const float (&s_)[kScores];
    CapSeries series_;
    float base_[2];
};
