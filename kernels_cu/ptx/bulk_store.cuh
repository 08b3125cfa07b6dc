// Bulk copies and reductions, shared -> global (PTX ISA, "cp.async.bulk.tensor", "cp.reduce.async.bulk", sm_90 and
// newer).
//
// They read shared memory by way of the asynchronous proxy: every thread that wrote there executes fence_proxy_async
// (ptx/tma.cuh), a barrier follows, then one thread issues. They complete in that thread's bulk groups:
//   stores; bulk_commit; bulk_wait_read<0>   before the shared memory is written again
//                        bulk_wait<0>        before somebody else, told by this thread, reads global memory
#pragma once
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

// cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [map, {c0 .. c3}], [src]: a box of the map's shape from
// shared memory, laid out as tma_load_4d leaves it, to element coordinates c0 .. c3 (innermost first); elements outside
// the tensor are not written. One thread; src 128-byte aligned (1024 with the 128-byte swizzle).
OA_DEVICE void tma_store_4d(const TensorMap* map, uint32 src, int32 c0, int32 c1, int32 c2, int32 c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group: the same, added to what is there, in the map's
// element type. One thread; additions to one element are atomic, in no order.
OA_DEVICE void tma_reduce_add_4d(const TensorMap* map, uint32 src, int32 c0, int32 c1, int32 c2, int32 c3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            map),
        "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [dst], [src], bytes: adds fp32 numbers that lie side by
// side; bytes: a multiple of 16; both addresses 16-byte aligned. One thread; additions to one element are atomic, in no
// order.
OA_DEVICE void bulk_reduce_add(float* dst, uint32 src, uint32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src),
                 "r"(bytes)
                 : "memory");
}

// cp.async.bulk.global.shared::cta.bulk_group [dst], [src], bytes: a plain copy under the same conditions.
OA_DEVICE void bulk_store(void* dst, uint32 src, uint32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
                 : "memory");
}

// cp.async.bulk.commit_group: closes this thread's current bulk group.
OA_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group N: at most N of this thread's bulk groups are not complete: writes made visible to it.
template <int N>
OA_DEVICE void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// cp.async.bulk.wait_group.read N: of all but N groups shared memory has been read.
template <int N>
OA_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
