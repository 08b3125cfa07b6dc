// Stores to shared memory of another CTA of the cluster (PTX ISA, "st.async"). sm_90 and newer.
#pragma once
#include "ptx/delay.cuh"
#include "ptx/types.cuh"

// The address that the other CTA of a cluster of two has for what this CTA has at `addr`, an address with the number of
// its CTA from bit 24 on (ptx/cluster.cuh: smem_base).
OA_DEVICE uint32 of_peer(uint32 addr) { return addr ^ 1 << 24; }

// st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 and .v2.f32: to the address `to` of another CTA;
// completes its 16 or 8 bytes on that CTA's barrier `bar`, which must expect them: waiting for it makes them visible
// (mbarrier_wait: to acquire in the cluster would empty L1 at each wait). Any lane; addresses multiples of 16 and 8.
OA_DEVICE void store_async4(uint32 to, const uint32 (&x)[4], uint32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(bar)
                 : "memory");
}
OA_DEVICE void store_async2(uint32 to, float x, float y, uint32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(x),
                 "f"(y), "r"(bar)
                 : "memory");
}

// mbarrier.arrive at a barrier of another CTA, by its address there (of_peer). Release semantics within this CTA only,
// as in CUTLASS: a release in the cluster is a MEMBAR.ALL.GPU, which waits for all that is under way. So it tells the
// other CTA that loads of this thread have returned whose results it has used, and nothing about its stores.
OA_DEVICE void mbarrier_arrive_at(uint32 remote_bar) {
    random_delay();
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_bar) : "memory");
}
