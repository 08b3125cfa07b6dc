// Conversions between fp32 and the 16-bit types (PTX ISA, "cvt").
#pragma once
#include "ptx/types.cuh"

// cvt.rn.{bf16x2,f16x2}.f32 d, hi, lo: two fp32 to one packed register, round to nearest even. Any lane; no ordering.
OA_DEVICE uint32 pack2(BFloat16, float lo, float hi) {
    uint32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}
OA_DEVICE uint32 pack2(Half, float lo, float hi) {
    uint32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}

// One 16-bit pattern to fp32, exact.
OA_DEVICE float to_float(BFloat16, uint16 bits) { return __uint_as_float(uint32(bits) << 16); }
OA_DEVICE float to_float(Half, uint16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}
// Two packed ones, exact.
OA_DEVICE float2 unpack2(BFloat16, uint32 bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
OA_DEVICE float2 unpack2(Half, uint32 bits) {
    return make_float2(to_float(Half{}, uint16(bits)), to_float(Half{}, uint16(bits >> 16)));
}
