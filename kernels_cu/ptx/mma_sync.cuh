// mma.sync.aligned.m16n8k16.row.col.f32.{bf16,f16}.{bf16,f16}.f32 (PTX ISA, "mma"): D = A·B + D.
// Issued by all 32 lanes of a warp. Register-only: orders nothing, so no "memory" clobber.
// Lane l holds: A rows l/4 and l/4+8, columns 2(l%4)+{0,1} and +8 (four packed registers);
// B rows (k) 2(l%4)+{0,1} and +8, column l/4 (two packed registers);
// D rows l/4 (d0, d1) and l/4+8 (d2, d3), columns 2(l%4)+{0,1}.
#pragma once
#include "ptx/types.cuh"

OA_DEVICE void mma_m16n8k16(BFloat16, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
OA_DEVICE void mma_m16n8k16(Half, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
