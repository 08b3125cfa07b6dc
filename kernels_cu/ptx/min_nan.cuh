// min.NaN.f32 (PTX ISA, "min"): the smaller one; NaN if either is. Any lane; no ordering.
#pragma once
#include "ptx/types.cuh"

OA_DEVICE float min_nan(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
