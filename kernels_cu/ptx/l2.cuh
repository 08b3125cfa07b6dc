// Cache policies of L2 (PTX ISA, "prefetch", "createpolicy", "cp.async"). Any lane; no ordering of their own.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/types.cuh"

// prefetch.global.L2 [address]: a line of 128 bytes. A hint.
OA_DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// createpolicy.fractional.L2: what is read is evicted first (not needed again), or last (needed soon).
OA_DEVICE uint64 evict_first_policy() {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
OA_DEVICE uint64 evict_last_policy() {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// createpolicy.fractional.L2: a short stream is evicted first, so that it evicts nothing that others will need, and no
// dirty lines. A long one is faster with evict_unchanged (measured on an H200). sm_90 only: untested elsewhere, and
// ptxas has a bug there (KvRing in decode/kv_copy.cuh).
OA_DEVICE uint64 l2_policy(bool short_stream) {
#if __CUDA_ARCH__ == 900
    uint64 unchanged;
    asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(unchanged));
    return short_stream ? evict_first_policy() : unchanged;
#else
    return 0;
#endif
}

// cp_async_16 and cp_async_small (ptx/cp_async.cuh) under a policy.
OA_DEVICE void cp_async_16(uint32 smem_dst, const void* gmem_src, uint32 src_bytes, uint64 policy) {
#if __CUDA_ARCH__ == 900
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
                 :
                 : "r"(smem_dst), "l"(gmem_src), "r"(src_bytes), "l"(policy)
                 : "memory");
#else
    cp_async_16(smem_dst, gmem_src, src_bytes);
#endif
}
// cp_async_4 (ptx/cp_async.cuh) under a policy.
OA_DEVICE void cp_async_4(uint32 smem_dst, const void* gmem_src, uint64 policy) {
#if __CUDA_ARCH__ == 900
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 4, %2;"
                 :
                 : "r"(smem_dst), "l"(gmem_src), "l"(policy)
                 : "memory");
#else
    cp_async_4(smem_dst, gmem_src);
#endif
}
// cp_async_16 without the count: all 16 bytes.
OA_DEVICE void cp_async_16(uint32 smem_dst, const void* gmem_src, uint64 policy) {
#if __CUDA_ARCH__ == 900
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(smem_dst), "l"(gmem_src), "l"(policy)
                 : "memory");
#else
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"(smem_dst), "l"(gmem_src) : "memory");
#endif
}
template <int kBytes>
OA_DEVICE void cp_async_small(uint32 smem_dst, const void* gmem_src, uint32 src_bytes, uint64 policy) {
#if __CUDA_ARCH__ == 900
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "sizes that cp.async has");
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3, %4;"
                 :
                 : "r"(smem_dst), "l"(gmem_src), "n"(kBytes), "r"(src_bytes), "l"(policy)
                 : "memory");
#else
    cp_async_small<kBytes>(smem_dst, gmem_src, src_bytes);
#endif
}

// ld.global.nc.L1::no_allocate.L2::cache_hint.v4: 16 bytes that no thread of the launch writes; 16-byte aligned.
OA_DEVICE uint4 load_input(const uint8* p, uint64 policy) {
    uint4 w;
    asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
        : "l"(p), "l"(policy));
    return w;
}
