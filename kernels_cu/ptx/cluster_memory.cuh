// Shared memory of the other CTAs of a cluster (PTX ISA, "mapa", "ld.shared"). sm_90 and newer.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/types.cuh"

// %cluster_nctarank: CTAs of the cluster.
OA_DEVICE uint32 cluster_size() {
    uint32 size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// mapa.shared::cluster, ld.shared::cluster.u32: what CTA `rank` has at the address `addr` of its own shared memory.
// Behind a cluster_sync that its stores come before; ahead of another one before it exits. Any lane.
OA_DEVICE uint32 load_cluster(uint32 addr, uint32 rank) {
    uint32 x;
    asm volatile(
        "{.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %1, %2;\n"
        "ld.shared::cluster.u32 %0, [remote];}"
        : "=r"(x)
        : "r"(addr), "r"(rank)
        : "memory");
    return x;
}
// The same of two numbers, .v2.u32; the address a multiple of 8.
OA_DEVICE uint2 load_cluster2(uint32 addr, uint32 rank) {
    uint2 x;
    asm volatile(
        "{.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %2, %3;\n"
        "ld.shared::cluster.v2.u32 {%0, %1}, [remote];}"
        : "=r"(x.x), "=r"(x.y)
        : "r"(addr), "r"(rank)
        : "memory");
    return x;
}
// The same of four numbers, .v4.u32; the address a multiple of 16.
OA_DEVICE uint4 load_cluster4(uint32 addr, uint32 rank) {
    uint4 x;
    asm volatile(
        "{.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %4, %5;\n"
        "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [remote];}"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "r"(addr), "r"(rank)
        : "memory");
    return x;
}

// The halves of cluster_sync: a thread arrives when it needs the others' shared memory no more, and waits before its
// own may go.
OA_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
OA_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
