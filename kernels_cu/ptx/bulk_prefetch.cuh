// Bulk prefetch into L2 (PTX ISA, "cp.async.bulk.prefetch").
#pragma once
#include "ptx/l2.cuh"
#include "ptx/types.cuh"

// cp.async.bulk.prefetch.L2.global [address], bytes: both multiples of 16. One lane, no ordering, a hint. sm_90 and
// newer; elsewhere line by line.
OA_DEVICE void prefetch_l2(const void* address, uint32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#else
    for (uint32 i = 0; i < bytes; i += 128) prefetch_l2(static_cast<const uint8*>(address) + i);
#endif
}
