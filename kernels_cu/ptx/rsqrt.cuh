// rsqrt.approx.ftz.f32 (PTX ISA, "rsqrt"): 1 / sqrt(x), relative error below 2^-22; of infinity 0, of 0 and subnormal
// numbers infinity. Any lane; no ordering.
#pragma once
#include "ptx/types.cuh"

OA_DEVICE float rsqrt_approx(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
