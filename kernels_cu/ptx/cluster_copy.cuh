// Bulk copies to shared memory of other CTAs of a cluster, and a barrier of the cluster that orders nothing (PTX ISA,
// "cp.async.bulk", "barrier.cluster"). sm_90 and newer.
#pragma once
#include "ptx/types.cuh"

// mapa.shared::cluster, cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes: `bytes` from the address
// `src` of this CTA to the address `dst` that CTA `rank` of the cluster has, complete on its barrier at the address
// `bar`, which must expect them: waiting for it makes them visible there. Addresses and bytes are multiples of 16. One
// lane, behind fence_proxy_async of the threads that wrote the source and a barrier of theirs.
OA_DEVICE void bulk_copy_cluster(uint32 dst, uint32 src, uint32 bytes, uint32 bar, uint32 rank) {
    asm volatile(
        "{.reg .b32 there, its_bar;\n"
        "mapa.shared::cluster.u32 there, %0, %4;\n"
        "mapa.shared::cluster.u32 its_bar, %3, %4;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, [its_bar];}" ::"r"(
            dst),
        "r"(src), "r"(bytes), "r"(bar), "r"(rank)
        : "memory");
}

// barrier.cluster.arrive.relaxed: cluster_arrive without a release, which waits for all that is under way. For what
// needs no more than that a thread has come so far: loads whose results it has used, barriers that
// fence_barrier_init has made known.
OA_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
