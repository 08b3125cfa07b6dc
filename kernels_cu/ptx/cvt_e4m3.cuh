// Conversions to 8-bit floats (PTX ISA, "cvt"): e4m3 has 4 exponent and 3 mantissa bits, no infinity, largest value
// 448.
#pragma once
#include "ptx/types.cuh"

// cvt.rn.satfinite.e4m3x2.f32, twice: four fp32 to the bytes of a register, `a` in the lowest; round to nearest even,
// beyond 448 to 448 (0x7e), NaN to 0x7f. sm_89 and newer. Any lane; no ordering.
OA_DEVICE uint32 pack4_e4m3(float a, float b, float c, float d) {
    uint32 out;
    asm("{.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};}"
        : "=r"(out)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return out;
}
