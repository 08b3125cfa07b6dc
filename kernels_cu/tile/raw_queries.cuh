// Q of one warpgroup, 64 rows of 16-bit elements where TMA has put them, to integers in registers: the left operand of
// wgmma, in place of what quantize_sm80 makes of Q by default, bit for bit.
//
//   scale = amax(rows r and r + 8 of a warp's 16) / 127;  q_int = nearest_even(q * (1 / scale))
//
// A row that holds NaN or infinity does not count for the scale and becomes zeros. Arithmetic: docs/quantization.md.
#pragma once
#include "ptx/cvt_quant.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma_s8.cuh"
#include "tile/group_scale.cuh"

// Config: Io (of Q), Qk (Int8), kHeadDim, kBlockM, kBlockN. In shared memory a row has panels of 64 elements, 128 bytes
// with a swizzle of that length, each behind all rows of the one before it.
template <typename Config>
struct RawQueries {
    static constexpr bool kTaken = true;
    static constexpr int kPanelBytes = 128;
    uint32 words[Config::kHeadDim / 32][4];
    float scale;  // of this lane's two rows
    uint32 bad;  // bits 0 and 1: this lane's first and second row hold NaN or infinity

    // All lanes. A lane has row l/4 (+ 8) of the warp's 16 and channels 4(l%4) + 0..3 of each 16: with the other lanes
    // of its quad all channels of two rows, whose scale is common. Loads have two lanes a bank.
    OA_DEVICE void take(uint32 tile, int32 group, int lane) {
        typename Config::Io io;
        constexpr int kUnits = Config::kHeadDim / 16;  // of 32 bytes
        const uint32 row = group * 64 + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2), swizzle = (lane >> 2 & 7) << 4;
        const uint32 first = tile + row * kPanelBytes + ((8 * (lane & 3)) ^ (swizzle & 16));
        uint2 raw[kUnits][2];
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint32 byte = 32 * u, panel = byte / kPanelBytes * Config::kBlockM * kPanelBytes;
                raw[u][r] =
                    load_shared2(first + panel + r * 8 * kPanelBytes + ((byte % kPanelBytes) ^ (swizzle & 0x60)));
            }
        uint32 most[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            most[r] = 0;
#pragma unroll
            for (int u = 0; u < kUnits; ++u)
                most[r] = max2_nan(io, most[r], max2_nan(io, raw[u][r].x & ~kBothSigns, raw[u][r].y & ~kBothSigns));
        }
        // The first row's in the lower half of a word, the second one's in the upper half.
        uint32 both = max2_nan(io, permute_bytes(most[0], most[1], 0x5410), permute_bytes(most[0], most[1], 0x7632));
        both = max2_nan(io, both, __shfl_xor_sync(0xffffffffu, both, 1));
        both = max2_nan(io, both, __shfl_xor_sync(0xffffffffu, both, 2));
        const float of_row[2] = {low_float(io, both), high_float(io, both)};
        const bool is_bad[2] = {!is_finite(of_row[0]), !is_finite(of_row[1])};
        bad = uint32(is_bad[0]) | uint32(is_bad[1]) << 1;
        scale = scale_of(fmaxf(is_bad[0] ? 0.0f : of_row[0], is_bad[1] ? 0.0f : of_row[1]), 127);
        const float inverse = div_rn(1.0f, scale);
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                auto rounded = [&](float x) { return __float_as_uint(fmaf(x, inverse, kRound)); };
                const uint2 w = raw[u][r];
                uint32 packed = pack_low_bytes(rounded(low_float(io, w.x)), rounded(high_float(io, w.x)),
                                               rounded(low_float(io, w.y)), rounded(high_float(io, w.y)));
                words[u / 2][2 * (u & 1) + r] = is_bad[r] ? 0 : packed;
            }
    }
    OA_DEVICE void multiply(typename Config::Score (&s)[Config::kBlockN / 2], int step, uint64 k) const {
        Wgmma<typename Config::Qk, Config::kBlockN>::rs(s, words[step], k, step != 0);
    }
};
