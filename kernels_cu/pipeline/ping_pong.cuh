// Ping-pong: the consumer warpgroups of a CTA take turns in issuing their products, so that one's softmax runs under the
// others' products (FlashAttention-3, section 3.1). Without it their softmaxes coincide and the tensor cores wait.
#pragma once
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

// kTake false: nobody waits for a turn. Three and more warpgroups whose products are short are faster so
// (docs/performance/attn_int8_sm90.md).
//
// Named barrier 1 + g opens warpgroup g's turn. All warpgroups take equally many turns in a fixed order: one that has
// nothing to do passes its turn on.
template <int kGroups, bool kTake>
class Turns {
  public:
    OA_DEVICE explicit Turns(int32 group)
        : own_(kTake ? kept(1 + group) : 0), next_(kTake ? kept(group == kGroups - 1 ? 1 : 2 + group) : 0) {
        if (kTake && group == kGroups - 1) named_barrier_arrive(1, 256);
    }
    OA_DEVICE void wait() const {
        if (kTake) named_barrier_sync(own_, 256);
    }
    OA_DEVICE void pass_on() const {
        if (kTake) named_barrier_arrive(next_, 256);
    }
    // After the last turn: takes the arrival that the constructor, or the last warpgroup's last turn, left.
    // is_first: in warpgroup 0; asked for anew, because remembering it would take a register through all loops.
    OA_DEVICE void finish(bool is_first) const {
        if (kTake && is_first) named_barrier_sync(1, 256);
    }

  private:
    int32 own_, next_;
};
// First named barrier that Turns leaves to others.
constexpr int32 kFirstFreeBarrier = 8;
