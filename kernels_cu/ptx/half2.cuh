// Two fp16 numbers in one register (PTX ISA, "add", "fma", "movmatrix"). Any lane; no ordering.
#pragma once
#include "ptx/types.cuh"

OA_DEVICE uint32 add_half2(uint32 a, uint32 b) {
    uint32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
OA_DEVICE uint32 sub_half2(uint32 a, uint32 b) {
    uint32 d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
OA_DEVICE uint32 mul_half2(uint32 a, uint32 b) {
    uint32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
OA_DEVICE uint32 fma_half2(uint32 a, uint32 b, uint32 c) {
    uint32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// movmatrix.sync.aligned.m8n8.trans.b16: an 8x8 matrix of 16-bit elements in a warp, lane l with elements 2(l%4)+{0,1}
// of row l/4, to its transpose in the same layout. Issued by all 32 lanes.
OA_DEVICE uint32 transpose_8x8(uint32 a) {
    uint32 d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}
