// Rows that attend to nothing and whose `do` holds NaN or infinity. Their P is 0, but 0 times NaN is NaN: dK and dV of
// the keys that share a tile with them would get it. A tile of dO with such rows therefore gets zeros in their place
// before it is multiplied. attn_bwd_prepare says in which blocks of rows there are any; there hardly ever are.
#pragma once
#include "params/attn_bwd.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

// Not 0: there are such rows among kRows padded rows from `row` on, of all heads.
template <int kRows>
OA_DEVICE uint32 stray_do(const AttnBwdParams& p, int64 row) {
    uint32 any = 0;
    if (p.stray_do != nullptr)
#pragma unroll
        for (int i = 0; i < kRows; i += kStrayRows) any |= p.stray_do[(row + i) / kStrayRows];
    return any;
}

// Zeros in the rows of a tile of dO that attend to nothing. One thread, after the tile has landed; an arrival of that
// thread must follow. smem: kPanels panels of kRows rows of 128 bytes; lse2: of the rows, in global memory.
template <int kRows, int kPanels>
OA_DEVICE void clear_stray_rows(uint32 smem, const float* lse2) {
#pragma unroll 1
    for (int row = 0; row < kRows; ++row) {
        if (lse2[row] != -neg_inf()) continue;
#pragma unroll
        for (int chunk = 0; chunk < 8 * kPanels; ++chunk)
            store_shared4(smem + (chunk >> 3) * (kRows * 128) + row * 128 + (chunk & 7) * 16, uint4{});
    }
    fence_proxy_async();
}
