// Clusters of CTAs (PTX ISA, "mapa", "barrier.cluster", "cp.async.bulk.tensor" with multicast). sm_90 and newer.
#pragma once
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

// %cluster_ctarank: number of this CTA in its cluster.
OA_DEVICE uint32 cluster_rank() {
    uint32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Where dynamic shared memory begins (kSmemBase) in a cluster of kCluster CTAs: from bit 24 on, a shared address has
// the number of its CTA. Descriptors of products have the lowest 18 bits only: they are made of kSmemBase.
template <uint32 kCluster>
OA_DEVICE uint32 smem_base() {
    return kCluster == 1 ? kSmemBase : kSmemBase + (cluster_rank() << 24);
}

// barrier.cluster.arrive.release, .wait.acquire: all threads of all CTAs of the cluster, none of them exited.
OA_DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// mapa.shared::cluster, mbarrier.arrive.release.cluster: arrives at the barrier that CTA `rank` has at the address
// `bar` of its own shared memory; release semantics for this thread's earlier accesses.
OA_DEVICE void mbarrier_arrive_cluster(uint32 bar, uint32 rank) {
    asm volatile(
        "{.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];}" ::"r"(bar),
        "r"(rank)
        : "memory");
}

// tma_load_4d with .multicast::cluster: the box goes to the address `dst` of every CTA whose bit `ctas` has, and its
// bytes complete on the barrier that each of them has at the address `bar`, which must expect them.
OA_DEVICE void tma_load_4d_multicast(uint32 dst, const TensorMap* map, uint32 bar, uint16 ctas, int32 c0, int32 c1,
                                     int32 c2, int32 c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(dst),
        "l"(map), "r"(bar), "h"(ctas), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
