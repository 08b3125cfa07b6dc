// What L2 shall do with data (PTX ISA, "prefetch"). Any lane; no ordering of its own.
#pragma once
#include "ptx/types.cuh"

// prefetch.global.L2 [address]: asks for a line of 128 bytes. A hint.
OA_DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
