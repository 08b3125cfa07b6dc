// Sums into global memory (PTX ISA, "red"). Any lane; relaxed, orders nothing; the order of the sums is not defined.
#pragma once
#include "ptx/types.cuh"

// red.relaxed.gpu.global.add.f32: rounded to nearest.
OA_DEVICE void reduce_add_global(float* p, float v) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}

// Four at consecutive addresses, the first 16-byte aligned: red.v4.f32 from sm_90 on, one by one before.
OA_DEVICE void reduce_add_global4(float* p, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
#else
    reduce_add_global(p, a);
    reduce_add_global(p + 1, b);
    reduce_add_global(p + 2, c);
    reduce_add_global(p + 3, d);
#endif
}
