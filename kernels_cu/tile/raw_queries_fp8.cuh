// Q of one warpgroup, 64 rows of 16-bit elements where TMA has put them, to e4m3 in registers: the left operand of
// wgmma. What quantize_fp8 makes of Q, but with a scale of its own for each row, not one for 128.
//
//   scale = amax(R q) / 448;  out = e4m3(R q * (1 / scale));  R: quantize/rotation.cuh, or 1
//
// A row that holds NaN or infinity becomes NaN. The strides of the transform come in the order 1, 2, 4, .., and its
// norm goes into the scale, so that last bits of R q differ from those of quantize_fp8; without R they are the same.
#pragma once
#include "params/quantize.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "tile/raw_queries.cuh"

// Config as of RawQueries, with kHeadDim up to 128; a lane has the same channels of the same rows.
template <typename Config>
struct RawFp8Queries : RawRows<Config> {
    static constexpr bool kTaken = true;
    static constexpr int kUnits = Config::kHeadDim / 16;  // of 4 channels of a lane, of a row
    uint32 words[Config::kHeadDim / 32][4];
    float scale[2];  // of this lane's two rows

    // All lanes.
    OA_DEVICE void take(const RawPanels<Config>& tile, int32 group, int lane, const Rotation& rotation) {
        typename Config::Io io;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float x[kUnits][4];
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                const uint2 w = this->load_unit(tile, group, lane, u, r);
                x[u][0] = low_float(io, w.x), x[u][1] = high_float(io, w.x);
                x[u][2] = low_float(io, w.y), x[u][3] = high_float(io, w.y);
            }
            if (rotation.channels != 0) rotate(x, rotation, lane);
            float most = 0.0f;
#pragma unroll
            for (int u = 0; u < kUnits; ++u)
#pragma unroll
                for (int j = 0; j < 4; ++j) most = max_abs_nan(most, x[u][j]);
            most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, 2));
            const bool bad = !is_finite(most);
            const float of_row = most >= kLeastAmax && !bad ? div_rn(most, 448.0f) : 1.0f;
            const float inverse = div_rn(1.0f, of_row);
            scale[r] = of_row * rotation.norm;
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                const uint32 low = pack_e4m3x2(fmaf(x[u][0], inverse, 0.0f), fmaf(x[u][1], inverse, 0.0f));
                const uint32 high = pack_e4m3x2(fmaf(x[u][2], inverse, 0.0f), fmaf(x[u][3], inverse, 0.0f));
                words[u / 2][2 * (u & 1) + r] = bad ? kE4m3Nan * 0x01010101u : low | high << 16;
            }
        }
    }
    OA_DEVICE void multiply(typename Config::Score (&s)[Config::kBlockN / 2], int step, uint64 k) const {
        Wgmma<E4m3, Config::kBlockN>::rs(s, words[step], k, step != 0);
    }

  private:
    // Signs, and the transform of each block of channels, without its norm. Channel 16 u + 4 (l % 4) + j is x[u][j].
    OA_DEVICE static void rotate(float (&x)[kUnits][4], const Rotation& rotation, int lane) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            const uint32 signs = rotation.signs[u / 2] >> (16 * (u & 1) + 4 * (lane & 3));
#pragma unroll
            for (int j = 0; j < 4; ++j)
                x[u][j] = __uint_as_float(__float_as_uint(x[u][j]) ^ (signs << (31 - j) & 0x80000000u));
        }
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            const float a = x[u][0] + x[u][1], b = x[u][0] - x[u][1], c = x[u][2] + x[u][3], d = x[u][2] - x[u][3];
            x[u][0] = a + c, x[u][1] = b + d, x[u][2] = a - c, x[u][3] = b - d;
        }
        rotate_quad(x, lane, 1);
        rotate_quad(x, lane, 2);
#pragma unroll
        for (int step = 1; step < kUnits; step *= 2) {
            if (16 * step >= rotation.channels) break;
#pragma unroll
            for (int u = 0; u < kUnits; ++u)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if ((u & step) == 0) {
                        const float a = x[u][j], b = x[u + step][j];
                        x[u][j] = a + b;
                        x[u + step][j] = a - b;
                    }
        }
    }
    // The stride that lanes `mask` apart have.
    OA_DEVICE static void rotate_quad(float (&x)[kUnits][4], int lane, int mask) {
        const float own = lane & mask ? -1.0f : 1.0f;
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
#pragma unroll
            for (int j = 0; j < 4; ++j) x[u][j] = fmaf(x[u][j], own, __shfl_xor_sync(0xffffffffu, x[u][j], mask));
    }
};
