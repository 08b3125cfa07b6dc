// Conversions to 8-bit floats (PTX ISA, "cvt"): e4m3 has 4 exponent and 3 mantissa bits, no infinity, largest value 448.
#pragma once
#include "ptx/types.cuh"

// cvt.rn.satfinite.e4m3x2.f32: two fp32 to the low half of a register, `a` in the lower byte; round to nearest even, beyond
// 448 to 448 (0x7e), NaN to 0x7f. sm_89 and newer. Any lane; no ordering.
OA_DEVICE uint32 pack2_e4m3(float a, float b) {
    uint32 out;
    asm("{.reg .b16 both, zero;\n"
        "cvt.rn.satfinite.e4m3x2.f32 both, %2, %1;\n"
        "mov.b16 zero, 0;\n"
        "mov.b32 %0, {both, zero};}"
        : "=r"(out)
        : "f"(a), "f"(b));
    return out;
}

// Four fp32 to one register, `a` in the lowest byte; as pack2_e4m3.
OA_DEVICE uint32 pack4_e4m3(float a, float b, float c, float d) {
    uint32 out;
    asm("{.reg .b16 lo, hi;\n"
        "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
        "mov.b32 %0, {lo, hi};}"
        : "=r"(out)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return out;
}

// prmt.b32: the low halves of two registers in one. Volatile, because where it stands matters: operands of a product must
// not be written while another one runs.
OA_DEVICE uint32 join_halves(uint32 lo, uint32 hi) {
    uint32 out;
    asm volatile("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(out) : "r"(lo), "r"(hi) : "memory");
    return out;
}
