// Division by what is known on the host alone.
#pragma once
#include "ptx/types.cuh"

// n / divisor for n from 0 to 2^31 - 1, by two factors that the host computes (`quotient_factors` in src/omniattn/launch/params.py).
OA_DEVICE int32 quotient(int32 n, uint32 multiplier, int32 shift) {
    return int32(uint32((uint64(2 * uint32(n)) * multiplier) >> 32) >> shift);
}
