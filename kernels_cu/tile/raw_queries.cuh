// Q of one warpgroup, 64 rows of 16-bit elements where TMA has put them, to integers in registers: the left operand of
// wgmma, in place of what quantize_sm80 makes of Q by default, bit for bit.
//
//   scale = amax(rows r and r + 8 of a warp's 16) / 127;  q_int = nearest_even(q * (1 / scale))
//
// A row that holds NaN or infinity does not count for the scale and becomes zeros. Arithmetic: docs/quantization.md.
#pragma once
#include "ptx/cvt_quant.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma_s8.cuh"
#include "tile/group_scale.cuh"

// Config: Io (of Q), Qk (Int8), kHeadDim, kBlockM, kBlockN. In shared memory a row has panels of 64 elements, 128 bytes
// with a swizzle of that length, each behind all rows of the one before it, or where `Panels` says.
//
// A lane has row l/4 (+ 8) of the warp's 16 and channels 4(l%4) + 0..3 of each 16: with the other lanes of its quad all
// channels of two rows, whose scale is common. Loads have two lanes a bank.
template <typename Config>
struct RawPanels {
    static constexpr uint32 kBytes = 128 * Config::kBlockM;  // of a panel
    // Shared addresses of the first two panels, and of the third and the fourth (kHeadDim 256).
    uint32 first, third, fourth;
    OA_DEVICE uint32 at(int panel) const { return panel < 2 ? first + panel * kBytes : panel == 2 ? third : fourth; }
};

// Where a lane finds its two rows.
template <typename Config>
struct RawRows {
    OA_DEVICE static uint32 row_of(int32 group, int lane) {
        return group * 64 + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
    }
    // Channels 4(l%4) + 0..3 of unit u, of row l/4 + 8r.
    OA_DEVICE static uint2 load_unit(const RawPanels<Config>& tile, int32 group, int lane, int u, int r) {
        const uint32 swizzle = (lane >> 2) << 4, byte = 32 * u;
        const uint32 first = row_of(group, lane) * 128 + ((8 * (lane & 3)) ^ (swizzle & 16));
        return load_shared2(tile.at(byte / 128) + first + r * 8 * 128 + ((byte % 128) ^ (swizzle & 0x60)));
    }
};

template <typename Config>
struct RawQueries : RawRows<Config> {
    using RawRows<Config>::load_unit, RawRows<Config>::row_of;
    static constexpr bool kTaken = true;
    static constexpr int kUnits = Config::kHeadDim / 16;  // of 32 bytes, of a row
    uint32 words[Config::kHeadDim / 32][4];
    float scale;  // of this lane's two rows
    uint32 bad;  // bits 0 and 1: this lane's first and second row hold NaN or infinity

    // All lanes. rows: of the warp's 16 those that count; of packed sequences others are the next one's.
    OA_DEVICE void take(const RawPanels<Config>& tile, int32 group, int lane, int32 rows) {
        typename Config::Io io;
        uint2 raw[kUnits][2];
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                raw[u][r] = load_unit(tile, group, lane, u, r);
                if (Config::kVarlen && (lane >> 2) + 8 * r >= rows) raw[u][r] = uint2{0, 0};
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

    // Of this lane's two rows q . mean, with the additions in the order of dot_with_mean and combine_rows
    // (quantize/rows.cuh): 8 channels one after the other, then those sums as a tree. All lanes; all of a quad get it.
    // mean: of K, head_dim_pad channels; null: zeros.
    OA_DEVICE static void multiply_mean(const RawPanels<Config>& tile, int32 group, int lane, const float* mean,
                                        int32 head_dim_pad, float (&dots)[2]) {
        dots[0] = dots[1] = 0.0f;
        if (mean == nullptr) return;
        typename Config::Io io;
        float4 means[kUnits];  // all ahead: a trip to L2 or memory
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            const int32 channel = 16 * u + 4 * (lane & 3);
            means[u] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (channel < head_dim_pad) means[u] = load_gpu(reinterpret_cast<const float4*>(mean + channel));
        }
        float level[5][2];  // sums of the tree that wait for their other half
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            const float4 m = means[u];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint2 w = load_unit(tile, group, lane, u, r);
                auto add = [&](float x) {
                    x = fmaf(low_float(io, w.x), m.x, x);
                    x = fmaf(high_float(io, w.x), m.y, x);
                    x = fmaf(low_float(io, w.y), m.z, x);
                    return fmaf(high_float(io, w.y), m.w, x);
                };
                // An odd lane goes on where the one before it, which has the lower channels of the 8, has ended.
                float sum = add(__shfl_xor_sync(0xffffffffu, add(0.0f), 1));
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
#pragma unroll
                for (int bit = 0; bit < 5; ++bit) {
                    if (!(u >> bit & 1)) {
                        level[bit][r] = sum;
                        break;
                    }
                    sum = level[bit][r] + sum;
                }
                dots[r] = sum;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) dots[r] = __shfl_sync(0xffffffffu, dots[r], lane | 1);
    }

    // kHeadDim 256: to where RegisterQueries and SharedQueries look for them, in the place of the first two panels. A
    // lane writes over what its own quad has read: behind a __syncwarp.
    OA_DEVICE void store(uint32 tile, int32 group, int lane) const {
        static_assert(Config::kHeadDim == 256 && Config::kRowBytes == 128, "rows of integers are those of a panel");
        const uint32 row = row_of(group, lane), first = tile + row * 128 + 4 * (lane & 3), swizzle = (lane >> 2) << 4;
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 32; ++step)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                uint32 byte = 32 * step + 16 * (x >> 1);
                store_shared(
                    first + byte / 128 * RawPanels<Config>::kBytes + (x & 1) * 8 * 128 + ((byte % 128) ^ swizzle),
                    words[step][x]);
            }
    }
};
