// delta_s of smoothed queries as what the softmax adds to the exponents of a column (attention/warp_softmax.cuh,
// "shift").
#pragma once
#include "attention/warp_softmax.cuh"
#include "ptx/types.cuh"

// delta_s of a column, in base 2: added to the exponents of every row of a block.
struct DeltaShift {
    static constexpr bool kPresent = true;
    const float* delta;  // shared memory, from this lane's first column on
    float scale_log2;
    OA_DEVICE DeltaShift(const float* delta, float scale_log2) : delta(delta), scale_log2(scale_log2) {}
    OA_DEVICE float operator()(int n, int x) const { return delta[8 * n + x] * scale_log2; }
};
