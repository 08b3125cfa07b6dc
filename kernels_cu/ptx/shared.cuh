// Ordinary accesses to shared memory by its own addresses (PTX ISA, "ld.shared").
#pragma once
#include "ptx/types.cuh"

// ld.shared.f32. Any lane; the "memory" clobber keeps it below the wait for the data.
OA_DEVICE float load_shared_float(uint32 addr) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(addr) : "memory");
    return x;
}

// ld.shared.v2.f32, the same way; the address a multiple of 8.
OA_DEVICE float2 load_shared_float2(uint32 addr) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(addr) : "memory");
    return x;
}

// ld.shared.b32, the same way.
OA_DEVICE uint32 load_shared(uint32 addr) {
    uint32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
    return x;
}

// ld.shared.v2.b32 and .v4.b32, the same way; addresses multiples of 8 and 16.
OA_DEVICE uint2 load_shared2(uint32 addr) {
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(addr) : "memory");
    return x;
}
OA_DEVICE uint4 load_shared4(uint32 addr) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(addr)
                 : "memory");
    return x;
}

// st.shared.b8, .b16, .b32 and .v4.b32 (PTX ISA, "st.shared"). Any lane; the address a multiple of the size. Other
// threads see it after a barrier.
OA_DEVICE void store_shared(uint32 addr, uint8 x) {
    asm volatile("st.shared.b8 [%0], %1;" ::"r"(addr), "r"(uint32(x)) : "memory");
}
OA_DEVICE void store_shared(uint32 addr, uint16 x) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(addr), "h"(x) : "memory");
}
OA_DEVICE void store_shared(uint32 addr, uint32 x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(x) : "memory");
}
OA_DEVICE void store_shared4(uint32 addr, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// Where dynamic shared memory begins in a CTA that has no other: sm_90 keeps the first 1024 bytes to itself. As a
// constant of the binary it spares loops what computing addresses costs. A kernel that counts on it checks it once.
constexpr uint32 kSmemBase = 1024;
template <typename Storage, typename Member>
OA_DEVICE uint32 smem_addr_at(Member Storage::* member, uint32 base = kSmemBase) {
    return uint32(reinterpret_cast<uint64>(&(reinterpret_cast<Storage*>(uint64(base))->*member)));
}
OA_DEVICE void check_smem_base(const void* dynamic, uint32 base = kSmemBase) {
    if (static_cast<uint32>(__cvta_generic_to_shared(dynamic)) != base) asm volatile("trap;");
}
