// An approximate square root (PTX ISA, "sqrt").
#pragma once
#include "ptx/types.cuh"

// sqrt.approx.ftz.f32: the root, relative error at most 2^-23. Any lane; no ordering.
OA_DEVICE float sqrt_approx(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
