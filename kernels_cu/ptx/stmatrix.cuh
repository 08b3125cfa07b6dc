// stmatrix.sync.aligned.m8n8.x{1,2,4}[.trans].shared.b16 (PTX ISA, "stmatrix", sm_90 and newer): 8x8 matrices of 16-bit
// elements from registers to shared memory, what ldmatrix reads back.
// Issued by all 32 lanes of a warp; lane l gives the shared address (bytes, 16-byte aligned) of row l%8 of matrix l/8;
// with x2 those of lanes 0 to 15 count, with x1 those of 0 to 7. Lane l holds in r[i] the elements 2(l%4)+{0,1} of row
// l/4 of matrix i (kTranspose: of column l/4, rows 2(l%4)+{0,1}).
// An ordinary store: a barrier orders it before other threads' reads, fence_proxy_async before that one orders it
// before reads of TMA and wgmma.
#pragma once
#include "ptx/types.cuh"

template <bool kTranspose = false>
OA_DEVICE void stmatrix_x1(uint32 smem_addr, const uint32 (&r)[1]) {
    if constexpr (kTranspose) {
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(smem_addr), "r"(r[0])
                     : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(smem_addr), "r"(r[0]) : "memory");
    }
}

template <bool kTranspose = false>
OA_DEVICE void stmatrix_x2(uint32 smem_addr, const uint32 (&r)[2]) {
    if constexpr (kTranspose) {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(smem_addr), "r"(r[0]),
                     "r"(r[1])
                     : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(smem_addr), "r"(r[0]), "r"(r[1])
                     : "memory");
    }
}

template <bool kTranspose = false>
OA_DEVICE void stmatrix_x4(uint32 smem_addr, const uint32 (&r)[4]) {
    if constexpr (kTranspose) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_addr),
                     "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                     : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_addr), "r"(r[0]),
                     "r"(r[1]), "r"(r[2]), "r"(r[3])
                     : "memory");
    }
}
