// An mbarrier in the place of a barrier of threads (PTX ISA, "mbarrier.arrive").
#pragma once
#include "ptx/types.cuh"

// mbarrier.arrive, and mbarrier.try_wait with the state of the phase that it arrived at: no parity has to be kept.
OA_DEVICE void mbarrier_arrive_and_wait(uint32 bar) {
    uint64 state;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(bar) : "memory");
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again_%=:\n"
        "mbarrier.try_wait.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=;\n"
        "}" ::"r"(bar),
        "l"(state)
        : "memory");
}
