// ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16 (PTX ISA, "ldmatrix"): four 8x8 matrices of 16-bit elements.
// Issued by all 32 lanes; lane l gives the shared address (bytes, 16-byte aligned) of row l%8 of matrix l/8.
// Lane l receives in r[i] the elements 2(l%4)+{0,1} of row l/4 of matrix i (of its transpose with .trans).
// Reads what an earlier barrier or cp.async wait made visible; the "memory" clobber keeps it behind that wait.
#pragma once
#include "ptx/types.cuh"

OA_DEVICE void ldmatrix_x4(uint32 (&r)[4], uint32 smem_addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_addr)
                 : "memory");
}
OA_DEVICE void ldmatrix_x4_trans(uint32 (&r)[4], uint32 smem_addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_addr)
                 : "memory");
}
