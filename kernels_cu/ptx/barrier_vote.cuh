// A vote at a named barrier (PTX ISA, "barrier.cta.red").
#pragma once
#include "ptx/delay.cuh"
#include "ptx/types.cuh"

// barrier.cta.red.or.pred on barrier `id` (1 .. 15) for `threads` threads, whole warps: whether x is true in some one.
OA_DEVICE bool any_at_barrier(bool x, int32 id, int32 threads) {
    random_delay();
    uint32 any;
    asm volatile(
        "{.reg .pred p, q;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "barrier.cta.red.or.pred q, %1, %3, p;\n"
        "selp.b32 %0, 1, 0, q;}"
        : "=r"(any)
        : "r"(id), "r"(uint32(x)), "r"(threads)
        : "memory");
    return any != 0;
}
