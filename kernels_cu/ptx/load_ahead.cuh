// Loads of what is needed later (PTX ISA, "ld.global.nc").
#pragma once
#include "ptx/types.cuh"

// ld.global.nc.L1::no_allocate: 16 or 4 bytes that no thread of the launch writes, aligned to as many. volatile: issued
// where it stands in the source, so that what is needed later is under way meanwhile.
OA_DEVICE uint4 load_ahead4(const uint8* p) {
    uint4 w;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(p));
    return w;
}
OA_DEVICE uint32 load_ahead(const uint8* p) {
    uint32 w;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w) : "l"(p));
    return w;
}
OA_DEVICE float load_ahead(const float* p) {
    float x;
    asm volatile("ld.global.nc.L1::no_allocate.f32 %0, [%1];" : "=f"(x) : "l"(p));
    return x;
}
