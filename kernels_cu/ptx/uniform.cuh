// Numbers that all lanes of a warp have (PTX ISA, "redux.sync").
#pragma once
#include "ptx/types.cuh"

// redux.sync.or.b32 of a number that is the same in all 32 lanes: that number, in a uniform register. What is computed
// from it, and branches on it, the compiler then knows to be the warp's. All lanes; sm_80 and newer; orders nothing.
OA_DEVICE int32 uniform(int32 x) {
    int32 y;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

// redux.sync.max.u32: the largest of the 32 lanes' numbers; of fp32 from 0 on too, by their bits. All lanes.
OA_DEVICE uint32 max_of_warp(uint32 x) {
    uint32 y;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}
