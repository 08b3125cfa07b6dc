// prmt.b32 (PTX ISA, "prmt"), generic mode: byte i of the result is byte selector >> 4i & 7 of a (0 to 3) and b (4 to
// 7); with bit 3 of that number set, eight copies of its highest bit. Each thread by itself.
#pragma once
#include "ptx/types.cuh"

OA_DEVICE uint32 byte_permute(uint32 a, uint32 b, uint32 selector) {
    uint32 y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
    return y;
}
