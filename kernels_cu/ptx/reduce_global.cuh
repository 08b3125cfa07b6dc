// Additions to global memory that return nothing (PTX ISA, "red").
#pragma once
#include "ptx/types.cuh"

// red.relaxed.gpu.global.add.v4.f32 (sm_90 and newer): four fp32 numbers, the address a multiple of 16. Each is atomic
// by itself. Any lane; a later kernel on the stream sees the sums.
OA_DEVICE void reduce_add4(float* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}
