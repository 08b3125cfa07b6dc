// From the largest magnitude of a group of rows to its scale, and from rounded sums to integers in bytes.
#pragma once
#include "ptx/cvt_quant.cuh"
#include "ptx/types.cuh"

// A group whose largest magnitude is below this has scale 1 and becomes zeros: the reciprocal of every scale is finite.
constexpr float kLeastAmax = 7.888609052210118e-31f;  // 2^-100

// Of integers up to `levels`; 1 where all are too small for a reciprocal that is finite.
OA_DEVICE float scale_of(float amax, int32 levels) { return amax >= kLeastAmax ? div_rn(amax, float(levels)) : 1.0f; }

// The low bytes of four words, the first one lowest.
OA_DEVICE uint32 pack_low_bytes(uint32 a, uint32 b, uint32 c, uint32 d) {
    return permute_bytes(permute_bytes(a, b, 0x0040), permute_bytes(c, d, 0x0040), 0x5410);
}
