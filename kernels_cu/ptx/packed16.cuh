// Integers that lie side by side in a word (PTX ISA, "add", "min", "dp4a"). Any lane; no ordering.
#pragma once
#include "ptx/types.cuh"

// add.s16x2, then min.relu.s16x2: max(min(a + b, most), 0) of either half; the sum wraps. One instruction; sm_90 and
// newer.
OA_DEVICE uint32 add_clamp_s16x2(uint32 a, uint32 b, uint32 most) {
    uint32 d;
    asm("{.reg .b32 x;\nadd.s16x2 x, %1, %2;\nmin.relu.s16x2 %0, x, %3;}" : "=r"(d) : "r"(a), "r"(b), "r"(most));
    return d;
}

// min.relu.s16x2: max(min(a, most), 0) of either half. sm_90 and newer.
OA_DEVICE uint32 clamp_s16x2(uint32 a, uint32 most) {
    uint32 d;
    asm("min.relu.s16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(most));
    return d;
}

// dp4a.s32.s32: sum + the products of four signed bytes.
OA_DEVICE int32 dot_s8x4(uint32 a, uint32 b, int32 sum) {
    int32 d;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(sum));
    return d;
}
