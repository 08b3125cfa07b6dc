// What all products of a warpgroup have in common (PTX ISA, "Asynchronous warpgroup level matrix instructions"): order,
// groups, descriptors of shared operands. The products are in a file for each operand type, written by
// build_tools/wgmma_header.py.
#pragma once
#include "ptx/types.cuh"

// wgmma.fence: orders this warp's register and shared accesses before its next wgmma.
OA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group: closes the current group of products.
OA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// wgmma.wait_group N: at most N groups are still in flight.
template <int N>
OA_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving accumulators across an asynchronous product (no instruction).
template <int N>
OA_DEVICE void wgmma_pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// The same before a product that overwrites them: whatever they held is dead, and takes no registers until then.
template <int N>
OA_DEVICE void wgmma_discard(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "=f"(d[i])::"memory");
}
template <int N>
OA_DEVICE void wgmma_pin(uint32 (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i])::"memory");
}
template <int N>
OA_DEVICE void wgmma_pin(int32 (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Descriptor fields (PTX ISA, "matrix descriptor"), all addresses and offsets in units of 16 bytes. kSwizzleBytes, 128,
// 64 or 32, is also the length of a row. K-major operands (rows along k): stride = bytes between 8-row groups, leading
// unused. MN-major operands (rows along m or n): stride = bytes between groups of 8 k, leading = distance between
// blocks of 64 m or n.
struct WgmmaDescriptor {
    uint32 lo, hi;

    // The same operand `bytes` further on, a multiple of 16. One addition: no address in shared memory carries into the
    // fields above it.
    OA_DEVICE uint64 at(uint32 bytes) const {
        uint64 d;
        asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(lo + (bytes >> 4)), "r"(hi));
        return d;
    }
    OA_DEVICE WgmmaDescriptor next(uint32 bytes) const { return {lo + (bytes >> 4), hi}; }
};
template <int kSwizzleBytes = 128>
OA_DEVICE WgmmaDescriptor wgmma_descriptor(uint32 smem_addr, uint32 leading_bytes, uint32 stride_bytes) {
    static_assert(kSwizzleBytes == 128 || kSwizzleBytes == 64 || kSwizzleBytes == 32, "layout types 1 to 3");
    constexpr uint32 kLayout = kSwizzleBytes == 128 ? 1 : kSwizzleBytes == 64 ? 2 : 3;
    return {(smem_addr >> 4) | (leading_bytes >> 4) << 16, (stride_bytes >> 4) | kLayout << 30};
}

// How a shared operand of 16 bits an element lies: rows along k, or along m or n. 8-bit operands are K-major.
enum Major : int { kKMajor = 0, kMnMajor = 1 };

// Products of one operand type and one width N of D; specializations in ptx/wgmma_*.cuh.
template <typename Operand, int kWidth>
struct Wgmma;
