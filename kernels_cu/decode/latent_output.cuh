// O of the kernels over latent caches that compute by wgmma, from the layout of its accumulators.
#pragma once
#include "ptx/cvt.cuh"
#include "ptx/types.cuh"

// Words of the lanes of a quad: word j of lane i becomes word i of lane j.
OA_DEVICE void transpose_quad(uint32 (&w)[4], int32 lane) {
    const bool odd = lane & 1, upper = lane & 2;
    const uint32 x0 = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1);
    const uint32 x1 = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
    const uint32 a0 = odd ? x0 : w[0], a1 = odd ? w[1] : x0, b0 = odd ? x1 : w[2], b1 = odd ? w[3] : x1;
    const uint32 y0 = __shfl_xor_sync(0xffffffffu, upper ? a0 : b0, 2);
    const uint32 y1 = __shfl_xor_sync(0xffffffffu, upper ? a1 : b1, 2);
    w[0] = upper ? y0 : a0, w[1] = upper ? y1 : a1, w[2] = upper ? b0 : y0, w[3] = upper ? b1 : y1;
}

// The lane's row r of a warpgroup's channels, from `to` on: a quad exchanges words of four blocks of 8 channels, so
// that each lane stores 16 bytes, one block.
template <typename Io, int kOutput>
OA_DEVICE void store_accumulators(uint16* to, const float (&o)[kOutput], int r, float scale, int32 lane, bool exists) {
    const int32 own = lane & 3;
#pragma unroll
    for (int n = 0; n < kOutput / 4; n += 4) {
        uint32 w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            w[j] = pack2(Io{}, o[4 * (n + j) + 2 * r] * scale, o[4 * (n + j) + 2 * r + 1] * scale);
        transpose_quad(w, own);
        if (exists) *reinterpret_cast<uint4*>(to + 8 * (n + own)) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}
