// Query rows of one kv head as B fragments of S^T = K Q^T, and what their scores need besides: rows are (query token,
// head of the group), 8 a fragment; lane l holds channels of row l / 4.
#pragma once
#include "decode/hadamard.cuh"
#include "decode/kv_dequant.cuh"
#include "decode/kv_row.cuh"
#include "params/decode.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// 8 channels of two units in the order in which `unpack_int4` gives the nibbles of a word: 0 4 1 5 | 2 6 3 7.
template <int kUnits>
OA_DEVICE void order_fbgemm_query(float (&x)[kUnits][4]) {
#pragma unroll
    for (int unit = 0; unit < kUnits; unit += 2) {
        float a[4] = {x[unit][0], x[unit][1], x[unit][2], x[unit][3]}, b[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) b[e] = x[unit + 1][e];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            x[unit][e] = e & 1 ? b[e >> 1] : a[e >> 1];
            x[unit + 1][e] = e & 1 ? b[2 + (e >> 1)] : a[2 + (e >> 1)];
        }
    }
}

// kByMatrix: K's fragments have its channels in their order, else (16 bits) 8 adjacent ones are a lane's.
template <int kKind, int kHeadDim, int kGroups, bool kByMatrix = false>
struct QueryRow {
    using Row = KvRow<kKind, kHeadDim, 4>;
    uint32 b[kHeadDim / 16][2];  // fragments
    float scale;  // products -> base-2 exponents
    float bias;  // to add, in base-2 units: what smoothing took from K
    float sum[kGroups];  // of the row's values in units of the products, by group; if it is one, times `scale`
    float start[kGroups];  // what products begin with, see KeyCodes

    // Loads the row; null is a row of zeros. Before the first copies of K and V: behind them it would arrive last.
    OA_DEVICE void load(const uint16* row, const DecodeParams& p, int q) {
        if constexpr (kByMatrix) {
            static_assert(kKind == kKv16, "codes are unpacked");
#pragma unroll
            for (int step = 0; step < kHeadDim / 16; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int channel = 16 * step + 8 * half + 2 * q;
                    bool there = row != nullptr && channel < p.head_dim;
                    b[step][half] = there ? *reinterpret_cast<const uint32*>(row + channel) : 0;
                }
        } else if constexpr (kKind == kKv16) {
#pragma unroll
            for (int vec = 0; vec < kHeadDim / 32; ++vec) {
                int channel = 8 * (4 * vec + q);
                uint4 w = make_uint4(0, 0, 0, 0);
                if (row != nullptr && channel < p.head_dim) w = *reinterpret_cast<const uint4*>(row + channel);
                b[2 * vec][0] = w.x;
                b[2 * vec][1] = w.y;
                b[2 * vec + 1][0] = w.z;
                b[2 * vec + 1][1] = w.w;
            }
        } else {
#pragma unroll
            for (int unit = 0; unit < kHeadDim / 16; ++unit) {
                int channel = Row::channel(unit, q, 0);
                uint2 w = make_uint2(0, 0);
                if (row != nullptr && channel < p.head_dim) w = *reinterpret_cast<const uint2*>(row + channel);
                b[unit][0] = w.x;
                b[unit][1] = w.y;
            }
        }
    }

    // 16-bit K: the queries as they are.
    OA_DEVICE void keep(const DecodeParams& p) {
        scale = p.softmax_scale * kLog2e;
        bias = 0.0f;
    }

    // Quantized K: the queries scaled per channel, rotated, and converted to fp16 times a power of two, so that no
    // bfloat16 overflows.
    template <typename Io>
    OA_DEVICE void transform(Io io, const DecodeParams& p, int32 kv_head, int q) {
        using Codes = KeyCodes<kKind>;
        constexpr int kUnits = kHeadDim / 16;
        float x[kUnits][4];
        float dot = 0.0f;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            int channel = Row::channel(unit, q, 0);
            bool there = channel < p.head_dim;
            x[unit][0] = low_float(io, b[unit][0]);
            x[unit][1] = high_float(io, b[unit][0]);
            x[unit][2] = low_float(io, b[unit][1]);
            x[unit][3] = high_float(io, b[unit][1]);
            int64 at = int64(kv_head) * p.head_dim + channel;
            if (there && p.k_mean != nullptr) {
                float4 mean = *reinterpret_cast<const float4*>(p.k_mean + at);
                dot += x[unit][0] * mean.x + x[unit][1] * mean.y + x[unit][2] * mean.z + x[unit][3] * mean.w;
            }
            if (there && p.k_channel_scale != nullptr) {
                float4 s = *reinterpret_cast<const float4*>(p.k_channel_scale + at);
                x[unit][0] *= s.x;
                x[unit][1] *= s.y;
                x[unit][2] *= s.z;
                x[unit][3] *= s.w;
            }
        }
        if (p.hadamard) rotate(x, q);
        float amax = 0.0f;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
            for (int e = 0; e < 4; ++e) amax = fmaxf(amax, fabsf(x[unit][e]));
#pragma unroll
        for (int mask = 1; mask <= 2; mask <<= 1) {
            amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
            dot += __shfl_xor_sync(0xffffffffu, dot, mask);
        }
        // 2^-exponent is a normal number for exponents -126 .. 126.
        int32 exponent = min_of(max_of(int32(__float_as_uint(amax) >> 23) - 127, -126), 126);
        float down = __uint_as_float(uint32(127 - exponent) << 23);
        scale = p.softmax_scale * kLog2e / Codes::kWeight * __uint_as_float(uint32(127 + exponent) << 23);
        bias = dot * p.softmax_scale * kLog2e;
        if (kKind == kKvFbgemm) order_fbgemm_query(x);
        float sums[kGroups];
#pragma unroll
        for (int i = 0; i < kGroups; ++i) sums[i] = start[i] = 0.0f;
        float first = down * Codes::kFirst;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            uint32 lo = pack2(Half{}, x[unit][0] * first, x[unit][1] * first);
            uint32 hi = pack2(Half{}, x[unit][2] * down, x[unit][3] * down);
            b[unit][0] = lo;
            b[unit][1] = hi;
            float sum01 = low_float(Half{}, lo) + high_float(Half{}, lo),
                  sum23 = low_float(Half{}, hi) + high_float(Half{}, hi);
            sums[unit * kGroups / kUnits] += fmaf(sum23, Codes::kFirst, sum01);
            start[unit * kGroups / kUnits] -= fmaf(sum01, Codes::kOffset01, sum23 * Codes::kOffset23);
        }
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 1);
            sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 2);
            start[i] += __shfl_xor_sync(0xffffffffu, start[i], 1);
            start[i] += __shfl_xor_sync(0xffffffffu, start[i], 2);
            sum[i] = kGroups == 1 ? sums[i] * scale : sums[i];
        }
    }

    // The sums of four groups as a fragment beside K's zeros, which are bfloat16, in three parts that keep all of their
    // 24 bits.
    OA_DEVICE void pack_sums(uint32 (&b)[2], int q) const {
        float x = q & 1 ? sum[2] : sum[0], y = q & 1 ? sum[3] : sum[1];
        uint32 part[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            part[i] = pack2(BFloat16{}, x, y);
            x -= low_float(BFloat16{}, part[i]);
            y -= high_float(BFloat16{}, part[i]);
        }
        b[0] = q < 2 ? part[0] : part[1];
        b[1] = q < 2 ? part[2] : 0;
    }

    // Hadamard transform over the channels: bits 0, 1 of a channel are the element, 2, 3 the lane, the rest the unit
    // (in FBGEMM's layout others; the order of the bits does not matter to the transform).
    static OA_DEVICE void rotate(float (&x)[kHeadDim / 16][4], int q) {
        constexpr int kUnits = kHeadDim / 16;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) hadamard_elements(x[unit]);
#pragma unroll
        for (int mask = 1; mask <= 2; mask <<= 1) hadamard_lanes(x, mask, q & mask);
#pragma unroll
        for (int step = 1; step < kUnits; step <<= 1) hadamard_units(x, step);
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[unit][e] *= kHadamardNorm<kHeadDim>;
    }
};
