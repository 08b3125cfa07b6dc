// Prefetch of a tensor's box into L2 (PTX ISA, "cp.async.bulk.prefetch.tensor").
#pragma once
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

// cp.async.bulk.prefetch.tensor.4d.L2.global: the box that tma_load_4d of the same coordinates copies. A hint: it
// orders nothing, and nothing waits for it. One thread.
OA_DEVICE void tma_prefetch_4d(const TensorMap* map, int32 c0, int32 c1, int32 c2, int32 c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1),
                 "r"(c2), "r"(c3)
                 : "memory");
}
