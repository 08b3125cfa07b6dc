// Stores of pairs to shared memory (PTX ISA, "st.shared"), as those of ptx/shared.cuh: st.shared.v2.b32 and .v2.f32.
// Any lane; the address a multiple of 8.
#pragma once
#include "ptx/types.cuh"

OA_DEVICE void store_shared2(uint32 addr, uint32 x, uint32 y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(addr), "r"(x), "r"(y) : "memory");
}
OA_DEVICE void store_shared2(uint32 addr, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(addr), "f"(x), "f"(y) : "memory");
}
