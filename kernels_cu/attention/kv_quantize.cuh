// Quantization of one row of a KV cache by kLanes lanes of a warp, four channels a lane (head_dim 256: twice four), bit for
// bit as src/omniattn/reference/kv_cache.py.
#pragma once
#include "ptx/cvt_quant.cuh"
#include "ptx/types.cuh"
#include "tile/kv_row.cuh"

constexpr float kMinKvScale = 8.673617379884035e-19f;  // 2^-60

// Hadamard transform over the row's channels, from the lowest bit of the channel up.
template <int kHeadDim, int kLanes>
OA_DEVICE void hadamard_row(float (&x)[kHeadDim / 4 / kLanes][4], int at) {
    constexpr int kUnits = kHeadDim / 4 / kLanes;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        float a = x[i][0] + x[i][1], b = x[i][0] - x[i][1], c = x[i][2] + x[i][3], d = x[i][2] - x[i][3];
        x[i][0] = a + c;
        x[i][1] = b + d;
        x[i][2] = a - c;
        x[i][3] = b - d;
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask <<= 1)
#pragma unroll
        for (int i = 0; i < kUnits; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float other = __shfl_xor_sync(0xffffffffu, x[i][e], mask);
                x[i][e] = (at & mask) ? other - x[i][e] : x[i][e] + other;
            }
    if constexpr (kUnits == 2) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float a = x[0][e], b = x[1][e];
            x[0][e] = a + b;
            x[1][e] = a - b;
        }
    }
    constexpr float kNorm = kHeadDim == 64 ? 0.125f : kHeadDim == 128 ? 0.08838834764831845f : 0.0625f;
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i][e] = mul_rn(x[i][e], kNorm);
}

// Smallest bfloat16 that is not below a positive number, as a number.
OA_DEVICE float bf16_up(float x) { return __uint_as_float((__float_as_uint(x) + 0xffffu) & 0xffff0000u); }
OA_DEVICE float bf16_nearest(float x) { return __uint_as_float(pack2(BFloat16{}, x, 0.0f) << 16); }

// FBGEMM's parameters of a group from `low` to `high`, fp16 as floats; what is beyond fp16 is not finite.
OA_DEVICE void fbgemm_params(float low, float high, float& scale, float& shift) {
    shift = to_float(Half{}, half_down(low + 0.0f));  // the sum makes -0 +0
    scale = to_float(Half{}, half_up(fmaxf(div_rn(high - shift, 15.0f), 5.9604644775390625e-8f)));  // 2^-24
}

// The group's parameters and this lane's codes, as stored: words[i] has element 0 in its low bits. `params`: the row's; lanes that begin a group write them, if `writes`.
template <int kKind, int kHeadDim, int kGroups, int kLanes>
OA_DEVICE void quantize_row(const float (&x)[kHeadDim / 4 / kLanes][4], uint32 (&words)[kHeadDim / 4 / kLanes],
                            uint32* params, int32 valid_dim, bool zero_point, bool writes, int at) {
    constexpr int kUnits = kHeadDim / 4 / kLanes, kGroup = kHeadDim / kGroups;
    constexpr bool kBoth = kGroup > 4 * kLanes;  // one group has both units
    constexpr int kGroupLanes = kBoth ? kLanes : kGroup / 4;
    constexpr int kLow = kKind == kKvFbgemm ? 0 : kKind == kKvInt4 ? -8 : -128;
    constexpr int kHigh = kKind == kKvFbgemm ? 15 : kKind == kKvInt4 ? 7 : 127;
    float infinity = -neg_inf();
    float amax[kUnits], low[kUnits], high[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        bool valid = 4 * (at + 32 * i) < valid_dim;
        amax[i] = 0.0f;
        low[i] = infinity;
        high[i] = -infinity;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            amax[i] = max_abs_nan(amax[i], x[i][e]);
            if (valid) low[i] = fminf(low[i], x[i][e]), high[i] = fmaxf(high[i], x[i][e]);
        }
    }
    if (kBoth) {
        amax[0] = amax[kUnits - 1] = max_nan(amax[0], amax[kUnits - 1]);
        low[0] = low[kUnits - 1] = fminf(low[0], low[kUnits - 1]);
        high[0] = high[kUnits - 1] = fmaxf(high[0], high[kUnits - 1]);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
        for (int mask = 1; mask < kGroupLanes; mask <<= 1) {
            amax[i] = max_nan(amax[i], __shfl_xor_sync(0xffffffffu, amax[i], mask));
            if (kKind != kKvE4m3) {
                low[i] = fminf(low[i], __shfl_xor_sync(0xffffffffu, low[i], mask));
                high[i] = fmaxf(high[i], __shfl_xor_sync(0xffffffffu, high[i], mask));
            }
        }
        bool finite = is_finite(amax[i]);
        if (low[i] > high[i]) low[i] = high[i] = 0.0f;  // nothing but padding
        float zero = 0.0f, scale;
        if (kKind == kKvFbgemm) {
            fbgemm_params(low[i], high[i], scale, zero);
            finite = finite && is_finite(scale) && is_finite(zero);
        } else if (kKind == kKvE4m3) {
            scale = div_rn(amax[i], 448.0f);
        } else if (zero_point) {
            constexpr float kSteps = kHigh - kLow;
            zero = bf16_nearest(low[i] - kLow * (div_rn(high[i], kSteps) - div_rn(low[i], kSteps)));
            scale = fmaxf(div_rn(high[i] - zero, kHigh), div_rn(zero - low[i], -kLow));
        } else {
            scale = div_rn(amax[i], kHigh);
        }
        if (kKind != kKvFbgemm) scale = bf16_up(fmaxf(scale, kMinKvScale));
        if (!finite) zero = 0.0f;
        int channel = 4 * (at + 32 * i);
        if (kKind == kKvFbgemm) {
            if (writes && channel % kGroup == 0)
                params[channel / kGroup] = finite ? pack2(Half{}, scale, zero) : 0x7e00u;
        } else if (writes && channel % kGroup == 0) {
            uint32 stored = finite ? __float_as_uint(scale) >> 16 : 0x7fc0u;
            params[channel / kGroup] = stored | (__float_as_uint(zero) & 0xffff0000u);
        }
        float code[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) code[e] = finite ? div_rn(x[i][e] - zero, scale) : 0.0f;
        if (kKind == kKvE4m3) {
            words[i] = pack_e4m3x2(code[0], code[1]) | pack_e4m3x2(code[2], code[3]) << 16;
        } else {
            words[i] = 0;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int32 c = min_of(max_of(__float2int_rn(code[e]), kLow), kHigh) - kLow;
                words[i] |= uint32(c) << (e * kv_bits(kKind));
            }
        }
    }
}
