// Gradients from accumulators of wgmma to global memory, in 16 bits.
#pragma once
#include "ptx/cvt.cuh"
#include "ptx/types.cuh"

// Rows row0 and row0 + 8 of this lane, those below `rows`, times `scale`: 16 bytes a lane after a transpose inside each
// quad, as in attention/warp_epilogue.cuh. to: row 0 of the head, stride in elements.
template <typename Io, int kOutputs>
OA_DEVICE void store_gradient(const float (&d)[kOutputs], float scale, uint16* to, int64 stride, int32 row0, int32 rows,
                              int32 head_dim, int lane) {
    const int quad_lane = lane & 3;
    const bool odd = quad_lane & 1, upper = quad_lane & 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int32 row = row0 + r * 8;
#pragma unroll
        for (int j = 0; j < kOutputs / 4; j += 4) {
            uint32 w[4];
#pragma unroll
            for (int x = 0; x < 4; ++x)
                w[x] = pack2(Io{}, d[4 * (j + x) + 2 * r] * scale, d[4 * (j + x) + 2 * r + 1] * scale);
            uint32 x0 = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1);
            uint32 x1 = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
            uint32 a0 = odd ? x0 : w[0], a1 = odd ? w[1] : x0, b0 = odd ? x1 : w[2], b1 = odd ? w[3] : x1;
            uint32 y0 = __shfl_xor_sync(0xffffffffu, upper ? a0 : b0, 2);
            uint32 y1 = __shfl_xor_sync(0xffffffffu, upper ? a1 : b1, 2);
            uint4 out = upper ? make_uint4(y0, y1, b0, b1) : make_uint4(a0, a1, y0, y1);
            const int32 column = (j + quad_lane) * 8;
            if (row < rows && column < head_dim) *reinterpret_cast<uint4*>(to + int64(row) * stride + column) = out;
        }
    }
}
