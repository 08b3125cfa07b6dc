// Full/empty barrier rings between a producer and consumer warps (CUTLASS calls it PipelineTmaAsync).
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

// Position in a ring of kStages; `phase` flips at every wrap.
template <int kStages>
struct RingState {
    int32 stage = 0;
    uint32 phase = 0;
    OA_DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// `full`: one arrival (the producer's expect_tx) and the copy's bytes; where all threads copy (cp.async), one of each.
// `empty`: as many arrivals as `init` says, one a consumer warp as a rule.
template <int kStages>
struct Ring {
    uint32 full, empty;  // shared addresses of kStages barriers each

    OA_DEVICE void init(uint32 arrivals, uint32 of_full = 1) const {
        for (int s = 0; s < kStages; ++s) {
            mbarrier_init(full + 8 * s, of_full);
            mbarrier_init(empty + 8 * s, arrivals);
        }
    }
    // Producer: waits until the stage is free (at once in the first round).
    OA_DEVICE void wait_empty(const RingState<kStages>& at) const { mbarrier_wait(empty + 8 * at.stage, at.phase ^ 1); }
    // Producer: whether it is, without waiting.
    OA_DEVICE bool is_empty(const RingState<kStages>& at) const {
        return mbarrier_test(empty + 8 * at.stage, at.phase ^ 1);
    }
    // Producer: the stage is full once `bytes` of copies have landed; returns the barrier that they complete on.
    OA_DEVICE uint32 announce(const RingState<kStages>& at, uint32 bytes) const {
        mbarrier_arrive_expect_tx(full + 8 * at.stage, bytes);
        return full + 8 * at.stage;
    }
    OA_DEVICE uint32 acquire(const RingState<kStages>& at, uint32 bytes) const {
        wait_empty(at);
        return announce(at, bytes);
    }
    // Consumer, every thread.
    OA_DEVICE void wait(const RingState<kStages>& at) const { mbarrier_wait(full + 8 * at.stage, at.phase); }
    // Consumer: whether the stage is full, without waiting: tested ahead, the result is there when it is needed.
    OA_DEVICE bool is_full(const RingState<kStages>& at) const { return mbarrier_test(full + 8 * at.stage, at.phase); }
    // Consumer, after the warp's last read: lane 0 arrives. Loads of what bulk copies write must have returned by then:
    // ptxas lets the arrival follow a load at once, __syncwarp or not, and while wgmma reads shared memory a load has
    // been seen to return what the next copy wrote (docs/performance/records/attn_bwd_sm90.toml, v20).
    OA_DEVICE void release(const RingState<kStages>& at, int lane) const {
        if (lane == 0) mbarrier_arrive(empty + 8 * at.stage);
    }
};
