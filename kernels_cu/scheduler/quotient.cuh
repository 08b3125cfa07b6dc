// Division by a number that only the host knows ahead (Granlund and Montgomery 1994).
#pragma once
#include "ptx/types.cuh"

// n / divisor for n from 0 to 2^31 - 1, by two factors that the host computes.
OA_DEVICE int32 quotient(int32 n, uint32 multiplier, int32 shift) {
    return int32(uint32((uint64(2 * uint32(n)) * multiplier) >> 32) >> shift);
}
