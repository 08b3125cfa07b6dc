// Ping-pong: the consumer warpgroups of a CTA issue their products in a fixed order, so that one's softmax runs under
// the others' products (FlashAttention-3, section 3.1). Without it their softmaxes coincide and the tensor cores wait.
#pragma once
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

// kOrdered false: nobody waits. Three and more warpgroups whose products are short are faster so
// (docs/performance/attn_int8_sm90.md).
//
// Named barrier 1 + g lets warpgroup g issue: 256 threads, those of g, which wait, and those of the one before, which
// arrive. All warpgroups pass the order on equally often: one that has nothing to do passes it on at once.
template <int kGroups, bool kOrdered>
class PingPong {
  public:
    OA_DEVICE explicit PingPong(int32 group)
        : own_(kOrdered ? in_register(1 + group) : 0),
          next_(kOrdered ? in_register(group == kGroups - 1 ? 1 : 2 + group) : 0) {
        if (kOrdered && group == kGroups - 1) named_barrier_arrive(1, 256);
    }
    OA_DEVICE void wait() const {
        if (kOrdered) named_barrier_sync(own_, 256);
    }
    OA_DEVICE void pass_on() const {
        if (kOrdered) named_barrier_arrive(next_, 256);
    }
    // At the end: takes the arrival that the constructor, or the last warpgroup's last pass_on, left.
    // is_first: in warpgroup 0; computed anew, because keeping it would take a register through all loops.
    OA_DEVICE void finish(bool is_first) const {
        if (kOrdered && is_first) named_barrier_sync(1, 256);
    }

  private:
    int32 own_, next_;
};
// First named barrier that PingPong does not use.
constexpr int32 kFirstFreeBarrier = 8;
