// Register budgets and named barriers (PTX ISA, "setmaxnreg", "bar").
#pragma once
#include "ptx/delay.cuh"
#include "ptx/types.cuh"

// setmaxnreg: all warps of a warpgroup; takes effect only in kernels with __launch_bounds__(threads, 1).
template <int kRegisters>
OA_DEVICE void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
OA_DEVICE void registers_claim() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// bar.sync / bar.arrive on barrier `id` (1 .. 15; 0 is __syncthreads) for `threads` threads, whole warps.
OA_DEVICE void named_barrier_sync(int32 id, int32 threads) {
    random_delay();
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
OA_DEVICE void named_barrier_arrive(int32 id, int32 threads) {
    random_delay();
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
