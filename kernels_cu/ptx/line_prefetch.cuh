// Hints that global memory will be read soon (PTX ISA, "prefetch").
#pragma once
#include "ptx/types.cuh"

// prefetch.global.L1: brings what holds this byte to the first-level cache of the SM. Any lane; orders nothing.
OA_DEVICE void prefetch_to_l1(const uint8* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p) : "memory"); }
// prefetch.global.L2, the same to the second level.
OA_DEVICE void prefetch_to_l2(const uint8* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }
