// Roles of a warp-specialized kernel on Hopper: one producer warpgroup, whose first warp copies, and consumer
// warpgroups, which compute (FlashAttention-3, section 3.1; CUTLASS calls it KernelTmaWarpSpecialized).
#pragma once
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

// Registers a thread after setmaxnreg: what the launch gives (65536 / threads, a multiple of 8), redistributed.
// Producer warps that all copy need more.
OA_DEVICE constexpr int producer_registers(int consumers, int warps) {
    return warps > 1 ? 56 : consumers == 2 ? 40 : 32;
}
OA_DEVICE constexpr int consumer_registers(int consumers, int warps) {
    const int less = warps > 1 ? 8 : 0;
    return (consumers == 2 ? 232 : consumers == 3 ? 160 : 112) - less;
}

// All threads of a CTA of 1 + kConsumers warpgroups, behind the barriers' initialization and a CTA barrier.
// produce(lane): the first warp, or so many of them; consume(group): the warpgroups from the second on.
template <int kConsumers, int kProducerWarps = 1, typename Produce, typename Consume>
OA_DEVICE void run_roles(Produce produce, Consume consume) {
    static_assert(2 <= kConsumers && kConsumers <= 4, "a budget of registers for each role");
    int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) >> 7, 0);
    if (warpgroup == 0) {
        registers_release<producer_registers(kConsumers, kProducerWarps)>();
        if (threadIdx.x < 32 * kProducerWarps) produce(int(kProducerWarps == 1 ? threadIdx.x : threadIdx.x & 31));
    } else {
        registers_claim<consumer_registers(kConsumers, kProducerWarps)>();
        consume(warpgroup - 1);
    }
}

// The same for CTAs of which several share an SM: the consumer warpgroups come first, and one warp copies. Nothing is
// redistributed: the launch gives every thread what a consumer needs.
template <int kConsumers, typename Produce, typename Consume>
OA_DEVICE void run_small_roles(Produce produce, Consume consume) {
    int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) >> 7, 0);
    if (warpgroup == kConsumers) {
        produce(int(threadIdx.x & 31));
    } else {
        consume(warpgroup);
    }
}
