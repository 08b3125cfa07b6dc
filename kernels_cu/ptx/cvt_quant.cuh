// Conversions to 8-bit types and what surrounds them (PTX ISA, "cvt", "max", "prmt"). Any lane; no ordering.
#pragma once
#include "ptx/cvt.cuh"
#include "ptx/half2.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

constexpr float kMaxFinite = 3.402823466e38f;
constexpr uint32 kE4m3Nan = 0x7f;
// 1.5 * 2^23: x + kRound, |x| < 2^22, is x rounded to an integer, which stands in the low bits.
constexpr float kRound = 12582912.0f;

// max.NaN.f32 of magnitudes: NaN if either is NaN.
OA_DEVICE float max_abs_nan(float a, float b) {
    float d;
    asm("{ .reg .f32 t; abs.f32 t, %2; max.NaN.f32 %0, %1, t; }" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// {max,min}.NaN.{bf16x2,f16x2}: two elements a register; NaN if either is NaN.
OA_DEVICE uint32 max2_nan(BFloat16, uint32 a, uint32 b) {
    uint32 d;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
OA_DEVICE uint32 min2_nan(BFloat16, uint32 a, uint32 b) {
    uint32 d;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
OA_DEVICE uint32 max2_nan(Half, uint32 a, uint32 b) {
    uint32 d;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
OA_DEVICE uint32 min2_nan(Half, uint32 a, uint32 b) {
    uint32 d;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// Two infinities: the neutral element of minima.
OA_DEVICE uint32 infinities(BFloat16) { return 0x7f807f80u; }
OA_DEVICE uint32 infinities(Half) { return 0x7c007c00u; }
constexpr uint32 kBothSigns = 0x80008000u;

// Two packed 16-bit elements to fp32, exact.
OA_DEVICE float low_float(BFloat16, uint32 w) { return __uint_as_float(w << 16); }
OA_DEVICE float high_float(BFloat16, uint32 w) { return __uint_as_float(w & 0xffff0000u); }
OA_DEVICE float low_float(Half io, uint32 w) { return to_float(io, uint16(w)); }
OA_DEVICE float high_float(Half io, uint32 w) { return to_float(io, uint16(w >> 16)); }

// cvt.rm, cvt.rp: fp32 to fp16 towards -infinity and +infinity.
OA_DEVICE uint16 half_down(float x) {
    uint16 d;
    asm("cvt.rm.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
}
OA_DEVICE uint16 half_up(float x) {
    uint16 d;
    asm("cvt.rp.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
}

OA_DEVICE float quiet_nan() { return __uint_as_float(0x7fffffffu); }

// False for NaN and infinities.
OA_DEVICE bool is_finite(float x) { return fabsf(x) <= kMaxFinite; }

// Rounded by itself: never fused with an addition.
OA_DEVICE float mul_rn(float a, float b) {
    float d;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
OA_DEVICE float div_rn(float a, float b) {
    float d;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// prmt.b32: byte i of d is the byte of (a, b) that nibble i of `selector` names.
OA_DEVICE uint32 permute_bytes(uint32 a, uint32 b, uint32 selector) {
    uint32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// fp32 to e4m3, nearest even, beyond 448 (infinity included) 448, NaN 0x7f: in integers, for GPUs before sm_89.
OA_DEVICE uint32 e4m3_bits(float x) {
    uint32 bits = __float_as_uint(x), sign = (bits >> 24) & 0x80u, a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return kE4m3Nan;
    // 464 = 448 + half a step rounds to 448 as well (even).
    if (a >= 0x43e80000u) return sign | 0x7eu;
    // Below 2^-6 steps are 2^-9, the unit in the last place of 2^14.
    if (a < 0x3c800000u) return sign | (__float_as_uint(__uint_as_float(a) + 16384.0f) - 0x46800000u);
    return sign | (((a + 0x7ffffu + ((a >> 20) & 1u)) >> 20) - (120u << 3));
}

// cvt.rn.satfinite.e4m3x2.f32: `lo` in bits 0..7, `hi` in bits 8..15.
OA_DEVICE uint32 pack_e4m3x2(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
    uint16 d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
    return d;
#else
    return e4m3_bits(lo) | e4m3_bits(hi) << 8;
#endif
}

// cvt.rn.f16x2.e4m3x2, exact: two e4m3 numbers in bits 0..15 (kHigh: 16..31) to fp16.
template <bool kHigh = false>
OA_DEVICE uint32 half2_of_e4m3x2(uint32 codes) {
#if __CUDA_ARCH__ >= 890
    uint32 d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(uint16(kHigh ? codes >> 16 : codes)));
    return d;
#else
    // The byte in the upper half of 16 bits has its sign in place; exponent and mantissa belong one bit lower, where
    // they count 2^-8 of their value (the exponents' biases are 7 and 15), subnormal numbers too. (NaN becomes 480.)
    uint32 x = permute_bytes(codes, 0, kHigh ? 0x3424 : 0x1404);
    constexpr uint32 k256 = 0x5c005c00u;
    return mul_half2((x & kBothSigns) | ((x >> 1) & 0x3f803f80u), k256);
#endif
}

// cvt.rn.f16x2.e4m3x2 twice, exact: four e4m3 numbers to fp16, those of the lower half first.
OA_DEVICE uint2 halves_of_e4m3x4(uint32 codes) {
#if __CUDA_ARCH__ >= 890
    uint2 d;
    asm("{.reg .b16 l, h;\n"
        "mov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l;\n"
        "cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(d.x), "=r"(d.y)
        : "r"(codes));
    return d;
#else
    return make_uint2(half2_of_e4m3x2<false>(codes), half2_of_e4m3x2<true>(codes));
#endif
}
