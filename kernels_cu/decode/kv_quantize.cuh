// Quantization of rows of a KV cache, 16 channels (KvChunk) a lane, kHeadDim / 16 lanes a row, so several rows a warp:
// bit for bit as the NumPy reference (reference/kv_cache.py).
#pragma once
#include "decode/hadamard.cuh"
#include "decode/kv_row.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/math.cuh"
#include "ptx/min_nan.cuh"
#include "ptx/types.cuh"

constexpr float kMinKvScale = 8.673617379884035e-19f;  // 2^-60

using ChunkWords = uint32[4][2];  // 16-bit elements of a chunk's units
using ChunkValues = float[4][4];

// Hadamard transform of a row, from the lowest bit of the channel's number up.
template <typename Chunk, int kHeadDim>
OA_DEVICE void hadamard_row(ChunkValues& x, int at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) hadamard_elements(x[i]);
#pragma unroll
    for (int bit = 4; bit < kHeadDim; bit <<= 1) {
#pragma unroll
        for (int mask = 1; mask < Chunk::kChunks; mask <<= 1)
            if (Chunk::channel(mask, 0) == bit) hadamard_lanes(x, mask, at & mask);
#pragma unroll
        for (int step = 1; step < 4; step <<= 1)
            if (Chunk::channel(0, step) == bit) hadamard_units(x, step);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i][e] = mul_rn(x[i][e], kHadamardNorm<kHeadDim>);
}

// Smallest bfloat16 that is not below a positive number, as a number.
OA_DEVICE float bf16_up(float x) { return __uint_as_float((__float_as_uint(x) + 0xffffu) & 0xffff0000u); }
OA_DEVICE float bf16_nearest(float x) { return __uint_as_float(pack2(BFloat16{}, x, 0.0f) << 16); }

// FBGEMM's parameters of a group from `low` to `high`, fp16 as floats; what is beyond fp16 is not finite.
OA_DEVICE void fbgemm_params(float low, float high, float& scale, float& shift) {
    shift = to_float(Half{}, half_down(low + 0.0f));  // the sum makes -0 +0
    scale = to_float(Half{}, half_up(fmaxf(div_rn(high - shift, 15.0f), 5.9604644775390625e-8f)));  // 2^-24
}

// x / c rounded to nearest, for c of at most 8 significant bits (a bfloat16, a small integer) and `inverse` within
// 2^-22 of 1 / c: the corrected quotient deviates by less than 2^-43 of itself before it is rounded, and x / c, unless
// it is a number, is at least 2^-34 away from any that is halfway between two numbers. Needs |x| >= 2^-117 or an
// integer c; below, codes are 0 anyway.
OA_DEVICE float div_short(float x, float c, float inverse) {
    float q = mul_rn(x, inverse);
    return fmaf(fmaf(-q, c, x), inverse, q);
}

// Rows of the caller's arrays in 8 bits: channels in their order, codes of x / scale without a zero.
template <int kKind, int kHeadDim>
struct InOrderQuantizer {
    static constexpr int kLanes = kHeadDim / 16;  // of a row
    static constexpr bool kE4m3 = kKind == kKvE4m3InOrder;

    // The scale of a row by its values, which its lanes have together; NaN where one is not finite.
    static OA_DEVICE float scale_of(const ChunkValues& x) {
        float amax = 0.0f;
#pragma unroll
        for (int unit = 0; unit < 4; ++unit)
#pragma unroll
            for (int e = 0; e < 4; ++e) amax = max_nan(amax, fabsf(x[unit][e]));
#pragma unroll
        for (int mask = 1; mask < kLanes; mask <<= 1) amax = max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
        return is_finite(amax) ? fmaxf(div_rn(amax, kE4m3 ? 448.0f : 127.0f), kMinKvScale) : quiet_nan();
    }

    // Codes, 0 where the scale is NaN; what is beyond the largest one becomes that. int8 has no NaN: it becomes 0.
    static OA_DEVICE void quantize(const ChunkValues& x, float scale, uint32 (&words)[4]) {
        bool there = scale == scale;
#pragma unroll
        for (int unit = 0; unit < 4; ++unit) {
            float c[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) c[e] = div_rn(x[unit][e], scale);
            uint32 w;
            if (kE4m3) {
                w = pack_e4m3x2(c[0], c[1]) | pack_e4m3x2(c[2], c[3]) << 16;
            } else {
                uint32 b[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float code = c[e] == c[e] ? fminf(fmaxf(c[e], -128.0f), 127.0f) : 0.0f;
                    b[e] = __float_as_uint(code + 12582912.0f);  // 1.5 * 2^23: the low byte is the rounded code's
                }
                w = permute_bytes(permute_bytes(b[0], b[1], 0x0040), permute_bytes(b[2], b[3], 0x0040), 0x5410);
            }
            words[unit] = there ? w : 0u;
        }
    }
};

// Quantization of a row by its lanes together. kGroups: groups of channels with parameters of their own.
template <int kKind, int kHeadDim, int kLanes, int kGroups>
struct KvQuantizer {
    using Chunk = KvChunk<kKind, kHeadDim, kLanes>;
    static constexpr int kGroup = kHeadDim / kGroups;
    static OA_DEVICE constexpr int group_of(int at, int unit) { return Chunk::channel(at, unit) / kGroup; }
    // Whether bit `unit` of the unit's number, bit `at` of the lane's, changes the group.
    static OA_DEVICE constexpr bool splits(int at, int unit) { return group_of(at, unit) != 0; }
    static constexpr int kLow0 = splits(0, 1) ? 1 : 0, kHigh0 = splits(0, 2) ? 1 : 0;
    static constexpr int kParts = (1 + kLow0) * (1 + kHigh0);  // groups that a chunk has elements of
    static OA_DEVICE constexpr int part_of(int unit) {
        return (kLow0 ? unit & 1 : 0) + (kHigh0 ? (unit >> 1) << kLow0 : 0);
    }
    static OA_DEVICE constexpr int unit_of(int part) {
        return kLow0 ? (part & 1) + (part >> 1 << 1) : kHigh0 ? part << 1 : 0;
    }
    static constexpr bool kFbgemm = kKind == kKvFbgemm;
    static constexpr int kMin = kFbgemm ? 0 : kKind == kKvInt4 ? -8 : -128, kMax = kKind == kKvInt4 ? 7 : 127;

    // Smallest and largest values of the chunk's groups, NaN if one is; channels from valid_dim on do not count.
    template <typename Io>
    static OA_DEVICE void extremes(Io io, const ChunkWords& w, int32 valid_dim, int at, float (&low)[kParts],
                                   float (&high)[kParts]) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            uint32 lo = infinities(io), hi = infinities(io) ^ kBothSigns;
#pragma unroll
            for (int unit = 0; unit < 4; ++unit)
                if (part_of(unit) == part && Chunk::channel(at, unit) < valid_dim) {
                    lo = min2_nan(io, lo, min2_nan(io, w[unit][0], w[unit][1]));
                    hi = max2_nan(io, hi, max2_nan(io, w[unit][0], w[unit][1]));
                }
            hi ^= kBothSigns;  // one minimum for both from here on
            uint32 both = min2_nan(io, permute_bytes(lo, hi, 0x5410), permute_bytes(lo, hi, 0x7632));
#pragma unroll
            for (int mask = 1; mask < Chunk::kChunks; mask <<= 1)
                if (!splits(mask, 0)) both = min2_nan(io, both, __shfl_xor_sync(0xffffffffu, both, mask));
            low[part] = low_float(io, both);
            high[part] = -high_float(io, both);
        }
    }
    static OA_DEVICE void extremes(const ChunkValues& x, int32 valid_dim, int at, float (&low)[kParts],
                                   float (&high)[kParts]) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            float lo = -neg_inf(), hi = neg_inf();
#pragma unroll
            for (int unit = 0; unit < 4; ++unit)
                if (part_of(unit) == part && Chunk::channel(at, unit) < valid_dim)
#pragma unroll
                    for (int e = 0; e < 4; ++e) lo = min_nan(lo, x[unit][e]), hi = max_nan(hi, x[unit][e]);
#pragma unroll
            for (int mask = 1; mask < Chunk::kChunks; mask <<= 1)
                if (!splits(mask, 0)) {
                    lo = min_nan(lo, __shfl_xor_sync(0xffffffffu, lo, mask));
                    hi = max_nan(hi, __shfl_xor_sync(0xffffffffu, hi, mask));
                }
            low[part] = lo;
            high[part] = hi;
        }
    }

    // Parameters from `low` and `high`, and the chunk's codes as they are stored. Lanes that begin a group write its
    // parameters, if `writes`.
    static OA_DEVICE void quantize(const ChunkValues& x, const float (&low_in)[kParts], const float (&high_in)[kParts],
                                   uint32 (&words)[Chunk::kBytes / 4], uint32* params, bool padded, bool zero_point,
                                   bool writes, int at) {
        float zero[kParts], scale[kParts], inverse[kParts];
        bool finite[kParts];
        bool begins = writes;
#pragma unroll
        for (int mask = 1; mask < Chunk::kChunks; mask <<= 1)
            if (!splits(mask, 0)) begins &= (at & mask) == 0;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            float low = low_in[part], high = high_in[part];
            finite[part] = is_finite(low) && is_finite(high);
            if (low > high) low = high = 0.0f, finite[part] = true;  // nothing but padding
            if constexpr (kFbgemm) {
                fbgemm_params(low, high, scale[part], zero[part]);
                finite[part] = finite[part] && is_finite(scale[part]) && is_finite(zero[part]);
                uint32 stored = finite[part] ? pack2(Half{}, scale[part], zero[part]) : 0x7e00u;
                if (begins) params[group_of(at, unit_of(part))] = stored;
                continue;
            }
            float amax = fmaxf(high, -low), s;
            zero[part] = 0.0f;
            if (kKind == kKvE4m3) {
                s = div_short(amax, 448.0f, 1.0f / 448.0f);
            } else if (zero_point) {
                constexpr float kSteps = kMax - kMin, kInverse = 1.0f / kSteps;
                float middle = div_short(high, kSteps, kInverse) - div_short(low, kSteps, kInverse);
                float z = bf16_nearest(low - kMin * middle);
                s = fmaxf(div_short(high - z, kMax, 1.0f / kMax), (z - low) * (-1.0f / kMin));
                if (finite[part]) zero[part] = z;
            } else {
                s = div_short(amax, kMax, 1.0f / kMax);
            }
            scale[part] = bf16_up(fmaxf(s, kMinKvScale));
            inverse[part] = rcp_approx(scale[part]);
            uint32 stored = finite[part] ? __float_as_uint(scale[part]) >> 16 : 0x7fc0u;
            if (begins) params[group_of(at, unit_of(part))] = stored | (__float_as_uint(zero[part]) & 0xffff0000u);
        }
        float code[4][4];
#pragma unroll
        for (int unit = 0; unit < 4; ++unit)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int part = part_of(unit);
                // fp16 has too many significant bits for div_short.
                code[unit][e] = kFbgemm ? div_rn(x[unit][e] - zero[part], scale[part])
                                        : div_short(x[unit][e] - zero[part], scale[part], inverse[part]);
            }
        if constexpr (kKind == kKvE4m3) {
#pragma unroll
            for (int unit = 0; unit < 4; ++unit) {
                uint32 w = pack_e4m3x2(code[unit][0], code[unit][1]) | pack_e4m3x2(code[unit][2], code[unit][3]) << 16;
                words[unit] = finite[part_of(unit)] ? w : 0u;
            }
            return;
        }
        // Only padding, whose 0 did not count for the group's extremes, can be out of range.
        if (padded)
#pragma unroll
            for (int unit = 0; unit < 4; ++unit)
#pragma unroll
                for (int e = 0; e < 4; ++e) code[unit][e] = fminf(fmaxf(code[unit][e], kMin), kMax);
        // Adding 1.5 * 2^23 leaves the code, rounded to nearest even and as it is stored, in the low bits; the bits
        // above it do not reach the low half of the sums below.
        uint32 bits[4][4];
#pragma unroll
        for (int unit = 0; unit < 4; ++unit)
#pragma unroll
            for (int e = 0; e < 4; ++e) bits[unit][e] = __float_as_uint(code[unit][e] + (12582912.0f - kMin));
        if constexpr (kKind == kKvInt8) {
#pragma unroll
            for (int unit = 0; unit < 4; ++unit) {
                const uint32(&b)[4] = bits[unit];
                uint32 w = permute_bytes(b[0] + (b[1] << 8), b[2] + (b[3] << 8), 0x5410);
                words[unit] = finite[part_of(unit)] ? w : 0x80808080u;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32(&a)[4] = bits[2 * i];
                const uint32(&b)[4] = bits[2 * i + 1];
                bool first = finite[part_of(2 * i)], second = finite[part_of(2 * i + 1)];
                if (kLanes == 4 && !kFbgemm) {  // K: elements 0 and 2 of both units, then 1 and 3
                    uint32 even = a[0] + (a[2] << 4) + (b[0] << 8) + (b[2] << 12);
                    uint32 odd = a[1] + (a[3] << 4) + (b[1] << 8) + (b[3] << 12);
                    static_assert(kLanes != 4 || kFbgemm || kLow0 == 0, "units that share a word share a group");
                    words[i] = first ? permute_bytes(even, odd, 0x5410) : 0x88888888u;
                } else {
                    uint32 lo = a[0] + (a[1] << 4) + (a[2] << 8) + (a[3] << 12);
                    uint32 hi = b[0] + (b[1] << 4) + (b[2] << 8) + (b[3] << 12);
                    constexpr uint32 kNothing = kFbgemm ? 0u : 0x8888u;
                    words[i] = permute_bytes(first ? lo : kNothing, second ? hi : kNothing, 0x5410);
                }
            }
        }
    }
};
