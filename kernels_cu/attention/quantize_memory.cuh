// Reads of inputs and writes of outputs of the quantizers, with what the L2 cache is to make of them.
#pragma once
#include "ptx/types.cuh"

// createpolicy.fractional.L2: how the L2 cache treats what is read: first out (not needed again), or last (needed soon).
OA_DEVICE uint64 passing_policy() {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
OA_DEVICE uint64 keeping_policy() {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// st.global.L2::cache_hint: outputs, which are not read here; aligned to their size.
OA_DEVICE void store_output(uint8* p, const uint4& w) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z),
                 "r"(w.w), "l"(passing_policy())
                 : "memory");
}
OA_DEVICE void store_output(uint8* p, const uint2& w) {
    asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1,%2}, %3;" ::"l"(p), "r"(w.x), "r"(w.y),
                 "l"(passing_policy())
                 : "memory");
}

// The same where `stored`.
OA_DEVICE void store_output_if(bool stored, uint8* p, const uint2& w) {
    asm volatile(
        "{ .reg .pred q; setp.ne.s32 q, %4, 0; @q st.global.L2::cache_hint.v2.u32 [%0], {%1,%2}, %3; }" ::"l"(p),
        "r"(w.x), "r"(w.y), "l"(passing_policy()), "r"(int32(stored))
        : "memory");
}

// ld.global.nc.L1::no_allocate.L2::cache_hint.v4: 16 bytes of an input, which nobody writes; 16-byte aligned.
OA_DEVICE uint4 load_input(const uint8* p, uint64 policy) {
    uint4 w;
    asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
        : "l"(p), "l"(policy));
    return w;
}
