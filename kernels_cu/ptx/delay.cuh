// Delays before barriers, in builds with RANDOM_DELAYS alone: they bring out what depends on who comes first.
#pragma once
#include "ptx/types.cuh"

#ifdef RANDOM_DELAYS
// nanosleep of up to 4 us, at one call of eight; another number for every warp and every call, the same in its lanes.
OA_DEVICE void random_delay() {
    uint32 x;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(x));
    x = (x ^ (threadIdx.x >> 5) * 0x9e3779b9u ^ blockIdx.x * 0x85ebca6bu) * 0xc2b2ae35u;
    if (x >> 29 == 0) asm volatile("nanosleep.u32 %0;" ::"r"(x >> 16 & 4095));
}
#else
OA_DEVICE void random_delay() {}
#endif
