// Ping-pong: the consumer warpgroups of a CTA take turns in issuing their products, so that one's softmax runs under the
// others' products (FlashAttention-3, section 3.1). Without it their softmaxes coincide and the tensor cores wait.
#pragma once
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

// Named barrier 1 + g opens warpgroup g's turn. All warpgroups take equally many turns in a fixed order: one that has
// nothing to do passes its turn on.
template <int kGroups>
class Turns {
  public:
    OA_DEVICE explicit Turns(int32 group) : own_(kept(1 + group)), next_(kept(group == kGroups - 1 ? 1 : 2 + group)) {
        if (group == kGroups - 1) named_barrier_arrive(1, 256);
    }
    OA_DEVICE void wait() const { named_barrier_sync(own_, 256); }
    OA_DEVICE void pass_on() const { named_barrier_arrive(next_, 256); }
    // After the last turn: takes the arrival that the constructor, or the last warpgroup's last turn, left.
    // is_first: in warpgroup 0; asked for anew, because remembering it would take a register through all loops.
    OA_DEVICE void finish(bool is_first) const {
        if (is_first) named_barrier_sync(1, 256);
    }

  private:
    int32 own_, next_;
};
// First named barrier that Turns leaves to others.
constexpr int32 kFirstFreeBarrier = 8;
