// Approximate special functions of the multi-function unit (PTX ISA, "ex2", "lg2", "rcp").
#pragma once
#include "ptx/min_nan.cuh"
#include "ptx/types.cuh"

// ex2.approx.ftz.f32: 2^x, at most 2 ulp; ex2(-inf) = +0, ex2(NaN) = NaN.
OA_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The same, volatile: in the order of the source among its kind.
OA_DEVICE float exp2_in_order(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// lg2.approx.f32: log2(x), absolute error below 2^-22 around 1, relative elsewhere; log2(0) = -inf.
OA_DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// lg2.approx.ftz.f32: the same of numbers that are not subnormal: those count as 0.
OA_DEVICE float log2_normal(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// rcp.approx.ftz.f32: 1/x, at most 1 ulp.
OA_DEVICE float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// max.NaN.f32: the larger one; NaN if either is.
OA_DEVICE float max_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// max.u16x2 (PTX ISA, "max"): of either half. sm_90 and newer.
OA_DEVICE uint32 max_u16x2(uint32 a, uint32 b) {
    uint32 y;
    asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// max.NaN.{bf16x2,f16x2} (PTX ISA, "max") of absolute values ("abs"), which a is: of either half; NaN if either is.
// sm_80 and newer.
OA_DEVICE uint32 max_abs2(BFloat16, uint32 a, uint32 b) {
    uint32 y;
    asm("{.reg .b32 x;\nabs.bf16x2 x, %2;\nmax.NaN.bf16x2 %0, %1, x;}" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
OA_DEVICE uint32 max_abs2(Half, uint32 a, uint32 b) {
    uint32 y;
    asm("{.reg .b32 x;\nabs.f16x2 x, %2;\nmax.NaN.f16x2 %0, %1, x;}" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// tanh with one special function, the reciprocal: e^(2x) - 1 comes from the nearest power of two and a polynomial of
// degree 5 (minimax on [-1/2, 1/2]). Absolute error below 3e-7, relative below 1e-6; NaN stays NaN.
OA_DEVICE float tanh_any(float x) {
    constexpr float kRound = 12582912.0f;                       // 1.5 * 2^23: adding it rounds to an integer
    float a = min_nan(fabsf(x * (2.0f * kLog2e)), 60.0f);       // beyond, the result is 1
    float shifted = a + kRound;
    float f = a - (shifted - kRound);
    float power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
    float p = fmaf(fmaf(1.340043615e-3f, f, 9.666373022e-3f), f, 5.550333112e-2f);
    p = fmaf(fmaf(p, f, 2.402234823e-1f), f, 6.931471825e-1f) * f;
    float e = fmaf(power, p, power - 1.0f);
    return copysignf(e * rcp_approx(e + 2.0f), x);
}

// tanh through exp2, absolute error about 2e-7; near 0, where a large softcap would multiply that error, by its series
// with a relative error of 1e-7. (tanh.approx.f32 has 5e-4, which a softcap of 50 would turn into 0.025 on a logit.)
OA_DEVICE float tanh_exp2(float x) {
    float e = exp2_approx(2.0f * kLog2e * x);  // inf for large x: 1 - 2/(inf) = 1
    float far = 1.0f - 2.0f * rcp_approx(1.0f + e);
    float x2 = x * x;
    float near = x * (1.0f - x2 * (1.0f / 3.0f - x2 * (2.0f / 15.0f - x2 * (17.0f / 315.0f))));
    return x2 < 0.01f ? near : far;
}
