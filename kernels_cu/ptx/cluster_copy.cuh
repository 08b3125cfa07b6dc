// Stores to shared memory of any CTA of a cluster, and a barrier of the cluster that orders nothing (PTX ISA,
// "st.async", "mapa", "barrier.cluster"). sm_90 and newer.
#pragma once
#include "ptx/types.cuh"

// mapa.shared::cluster, st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32: 16 bytes to the address `to` that
// CTA `rank` of the cluster has, this one included; completes them on its barrier at the address `bar`, which must
// expect them: waiting for it makes them visible there. Any lane; `to` is a multiple of 16.
OA_DEVICE void store_cluster_async4(uint32 to, uint4 x, uint32 bar, uint32 rank) {
    asm volatile(
        "{.reg .b32 there, its_bar;\n"
        "mapa.shared::cluster.u32 there, %0, %6;\n"
        "mapa.shared::cluster.u32 its_bar, %5, %6;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%1, %2, %3, %4}, [its_bar];}" ::"r"(to),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(bar), "r"(rank)
        : "memory");
}

// barrier.cluster.arrive.relaxed: cluster_arrive without a release, which waits for all that is under way. For what
// needs no more than that a thread has come so far: loads whose results it has used, barriers that
// fence_barrier_init has made known.
OA_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
