// Codes of e4m3 of latent rows, bit for bit as the NumPy reference (reference/kv_cache.py).
#pragma once
#include "ptx/cvt_quant.cuh"
#include "ptx/math.cuh"
#include "ptx/min_nan.cuh"
#include "ptx/types.cuh"

constexpr float kE4m3Max = 448.0f;
constexpr float kMinLatentScale = 1.17549435e-38f;  // 2^-126, the smallest normal number, as vLLM's kernel has it
constexpr uint32 kScaleOfNothing = 0x7fc00000u;  // NaN

// Division by a number that many are divided by, rounded to nearest.
//
// For scales from 2^-60 to 2^60 without the division of the instruction set: with the reciprocal rounded to nearest,
// a quotient that is off by less than one unit in the last place becomes the nearest one by its remainder, which is
// exact (Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000 processor"); the
// first correction makes it so. Dividends are at most 1024 scales. Where a remainder is no number any more, the
// quotient is below 2^-40, and its code 0.
struct Divisor {
    float scale, inverse;
    bool is_usual;
    OA_DEVICE explicit Divisor(float s) : scale(s), inverse(div_rn(1.0f, s)), is_usual(s >= 0x1p-60f && s <= 0x1p60f) {}
    OA_DEVICE float corrected(float q, float x) const { return fmaf(fmaf(-q, scale, x), inverse, q); }
    OA_DEVICE float quotient(float x) const {
        float q = corrected(corrected(mul_rn(x, inverse), x), x);
        return copysignf(q, x);  // -0 over a scale
    }
};

// Four codes of x / scale in a word; where kSaturates, x may be far beyond the largest code.
template <bool kSaturates>
OA_DEVICE uint32 codes_of(const Divisor& d, const float (&x)[4]) {
    float c[4];
    if (d.is_usual) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            // Infinity has no remainder.
            float most = 1024.0f * d.scale;
            c[e] = d.quotient(kSaturates ? max_nan(min_nan(x[e], most), -most) : x[e]);
        }
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) c[e] = div_rn(x[e], d.scale);
    }
    return pack_e4m3x2(c[0], c[1]) | pack_e4m3x2(c[2], c[3]) << 16;
}

// Of eight values; 0 where the scale is NaN.
template <bool kSaturates>
OA_DEVICE uint2 codes_of(const Divisor& d, const float (&x)[8]) {
    float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
    bool there = d.scale == d.scale;
    uint2 codes;
    codes.x = there ? codes_of<kSaturates>(d, low) : 0u;
    codes.y = there ? codes_of<kSaturates>(d, high) : 0u;
    return codes;
}

// The scale of a group by its largest magnitude: NaN, unless that is finite.
OA_DEVICE float latent_scale(float amax) {
    return is_finite(amax) ? fmaxf(div_rn(amax, kE4m3Max), kMinLatentScale) : __uint_as_float(kScaleOfNothing);
}
