// Bulk tensor copies, global -> shared (PTX ISA, "cp.async.bulk.tensor").
#pragma once
#include "ptx/types.cuh"

// 128 opaque bytes from cuTensorMapEncodeTiled; a __grid_constant__ kernel parameter.
struct alignas(64) TensorMap {
    uint8 opaque[128];
};

// cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes: the map's box at the element coordinates
// {c0 .. c3} (innermost first) to shared memory; elements outside the tensor arrive as zeros and count as bytes.
// One thread; dst 128-byte aligned: a row is swizzled by its place in 1024 bytes of shared memory. Completes on `bar`,
// which must expect the box's bytes.
OA_DEVICE void tma_load_4d(uint32 dst, const TensorMap* map, uint32 bar, int32 c0, int32 c1, int32 c2, int32 c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// The same of five dimensions.
OA_DEVICE void tma_load_5d(uint32 dst, const TensorMap* map, uint32 bar, int32 c0, int32 c1, int32 c2, int32 c3,
                           int32 c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes: contiguous bytes, a multiple of 16, both addresses
// 16-byte aligned; completes on `bar`, which must expect them. One thread.
OA_DEVICE void bulk_load(uint32 dst, const void* src, uint32 bytes, uint32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}

// prefetch.tensormap: fetches the descriptor ahead of the first copy. One thread.
OA_DEVICE void tma_prefetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// fence.proxy.async.shared::cta: this thread's ordinary stores to shared memory come before later reads of it by wgmma
// or bulk copies. Every writing thread, then a barrier.
OA_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// fence.proxy.async.global: one thread, between what it knows by ordinary accesses to global memory (an acquire, a
// release to come) and what bulk copies do there.
OA_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
