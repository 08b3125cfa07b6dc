// cp.async (PTX ISA, "cp.async"): global to shared copies that complete in groups.
#pragma once
#include "ptx/types.cuh"

// cp.async.cg.shared.global.L2::128B [dst], [src], 16, src_bytes: copies src_bytes (0 or 16) and fills the rest of the
// 16 with zeros; with 0 nothing is read. Any lane; both addresses 16-byte aligned. Pairs with commit/wait below.
OA_DEVICE void cp_async_16(uint32 smem_dst, const void* gmem_src, uint32 src_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(smem_dst), "l"(gmem_src), "r"(src_bytes)
                 : "memory");
}

// The same without zeros: all 16 bytes, or nothing at all.
OA_DEVICE void cp_async_16_if(uint32 smem_dst, const void* gmem_src, bool wanted) {
    asm volatile(
        "{.reg .pred p;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}"
        :
        : "r"(smem_dst), "l"(gmem_src), "r"(uint32(wanted))
        : "memory");
}

// cp.async.ca.shared.global [dst], [src], kBytes, src_bytes: the same for 4, 8 or 16 bytes, addresses aligned to as
// many.
template <int kBytes>
OA_DEVICE void cp_async_small(uint32 smem_dst, const void* gmem_src, uint32 src_bytes) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "sizes that cp.async has");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(smem_dst), "l"(gmem_src), "n"(kBytes), "r"(src_bytes)
                 : "memory");
}

// The same without zeros.
template <int kBytes>
OA_DEVICE void cp_async_whole(uint32 smem_dst, const void* gmem_src) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "sizes that cp.async has");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(smem_dst), "l"(gmem_src), "n"(kBytes) : "memory");
}

// The same without zeros: 4 bytes, aligned to as many.
OA_DEVICE void cp_async_4(uint32 smem_dst, const void* gmem_src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(smem_dst), "l"(gmem_src) : "memory");
}

// cp.async.commit_group: closes this thread's current group of copies.
OA_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group N: at most N of this thread's groups are still in flight. Other threads see the data only after
// a barrier that follows.
template <int N>
OA_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Shared-window byte address of a generic pointer into shared memory.
OA_DEVICE uint32 smem_addr_of(const void* p) { return static_cast<uint32>(__cvta_generic_to_shared(p)); }
