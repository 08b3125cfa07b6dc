// Order between CTAs of one grid (PTX ISA, "Memory Consistency Model"; "atom", "red", "ld", "st").
#pragma once
#include "ptx/types.cuh"

// ld.acquire.gpu / st.release.gpu: one lane; what it or, behind a CTA barrier, its CTA wrote before the release is seen
// by whoever reads the released value with an acquire, and by its CTA behind the next CTA barrier.
OA_DEVICE uint32 load_acquire(const uint32* p) {
    uint32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
OA_DEVICE void store_release(uint32* p, uint32 v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// atom.acq_rel.gpu.add.u32: both at once; returns the value before.
OA_DEVICE uint32 atomic_add_acq_rel(uint32* p, uint32 v) {
    uint32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

// red.release.gpu.add.u32: counts an arrival, as store_release.
OA_DEVICE void reduce_add_release(uint32* p, uint32 v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// red.release.gpu.max.u32: as store_release, and never back to less.
OA_DEVICE void reduce_max_release(uint32* p, uint32 v) {
    asm volatile("red.release.gpu.global.max.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// ld.acquire.cta.shared and st.release.cta.shared of two numbers that belong together; the address a multiple of 8.
// Between lanes of a CTA, as load_acquire and store_release.
OA_DEVICE uint2 load_acquire_shared2(uint32 addr) {
    uint64 v;
    asm volatile("ld.acquire.cta.shared::cta.b64 %0, [%1];" : "=l"(v) : "r"(addr) : "memory");
    return make_uint2(uint32(v), uint32(v >> 32));
}
OA_DEVICE void store_release_shared2(uint32 addr, uint32 x, uint32 y) {
    asm volatile("st.release.cta.shared::cta.b64 [%0], %1;" ::"r"(addr), "l"(uint64(y) << 32 | x) : "memory");
}

// atom.relaxed.gpu.add.u32: a ticket, orders nothing else.
OA_DEVICE uint32 atomic_add_relaxed(uint32* p, uint32 v) {
    uint32 old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

// red.relaxed.gpu.{max,or}.u32: the barrier and atomic that follow publish it.
OA_DEVICE void reduce_max_global(uint32* p, uint32 v) {
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

OA_DEVICE void reduce_add_global(int64* p, int64 v) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// red.shared.{max,add}: any lane, ordered by the CTA barrier that follows.
OA_DEVICE void reduce_max_shared(uint32* p, uint32 v) {
    asm volatile("red.shared.max.u32 [%0], %1;" ::"l"(__cvta_generic_to_shared(p)), "r"(v) : "memory");
}
OA_DEVICE void reduce_add_shared(int32* p, int32 v) {
    asm volatile("red.shared.add.s32 [%0], %1;" ::"l"(__cvta_generic_to_shared(p)), "r"(v) : "memory");
}

// ld.relaxed.gpu: a value that another CTA wrote, past the L1 cache, which may hold an older one. Behind an acquire.
OA_DEVICE float load_gpu(const float* p) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
OA_DEVICE uint32 load_gpu(const uint32* p) {
    uint32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
OA_DEVICE int64 load_gpu(const int64* p) {
    int64 v;
    asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
OA_DEVICE float4 load_gpu(const float4* p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// griddepcontrol (PTX ISA, sm_90 and newer; nothing before): programmatic dependent launch. Any thread; after
// launch_dependents of every CTA the next kernel on the stream may be started, wait returns when the kernel ahead has
// ended and its writes are seen. Every CTA has to wait, also those that need nothing: a kernel that ends counts as
// done, and so do those before it.
OA_DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
OA_DEVICE void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// nanosleep.u32: about t ns without issuing.
OA_DEVICE void nanosleep(uint32 t) { asm volatile("nanosleep.u32 %0;" ::"r"(t)); }
