// Orthonormal Hadamard transform of a row whose channels are spread over lanes, four elements a unit: a butterfly for
// each bit of the channel's number, which is a bit of the element's, the unit's or the lane's. Their order does not
// matter to the result but for rounding; whoever repeats another's bits takes the same one.
#pragma once
#include "ptx/types.cuh"

// The two lowest bits: the elements of a unit.
OA_DEVICE void hadamard_elements(float (&x)[4]) {
    float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
    x[0] = a + c;
    x[1] = b + d;
    x[2] = a - c;
    x[3] = b - d;
}

// A bit of the lane's number: lanes that differ in `mask`; upper: whether this one has it. All lanes of a warp.
template <int kUnits>
OA_DEVICE void hadamard_lanes(float (&x)[kUnits][4], int mask, bool upper) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float other = __shfl_xor_sync(0xffffffffu, x[unit][e], mask);
            x[unit][e] = upper ? other - x[unit][e] : x[unit][e] + other;
        }
}

// A bit of the unit's number.
template <int kUnits>
OA_DEVICE void hadamard_units(float (&x)[kUnits][4], int step) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
        if ((unit & step) == 0)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float a = x[unit][e], b = x[unit + step][e];
                x[unit][e] = a + b;
                x[unit + step][e] = a - b;
            }
}

// What makes it orthonormal: 1 / sqrt(kHeadDim).
template <int kHeadDim>
constexpr float kHadamardNorm = kHeadDim == 64    ? 0.125f
                                : kHeadDim == 128 ? 0.08838834764831845f
                                                  : 0.0625f;
