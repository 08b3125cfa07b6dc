// Rotation of rows of Q and K before they are quantized: a random sign for each channel, then an orthonormal Hadamard
// transform (QuaRot, Ashkboos et al. 2024; FlashAttention-3, Shah et al. 2024, "incoherent processing"). q . k stays as
// it is; a large channel is spread over all of them. Blocks of channels, signs and the order of the additions:
// docs/quantization.md.
#pragma once
#include "params/quantize.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/types.cuh"

struct NoRotation {
    static constexpr bool kPresent = false;
};

// Of 8 channels, from 8 * unit on: a bit each.
OA_DEVICE uint32 signs_of(const Rotation& rotation, uint32 unit) {
    return reinterpret_cast<const uint8*>(rotation.signs)[unit];
}

// A row that holds NaN or infinity becomes NaN in e4m3: four bytes of it.
constexpr uint32 kE4m3Nans = kE4m3Nan * 0x01010101u;

// Of 8 neighbouring channels: signs, and strides 1, 2 and 4 of the transform. The lower channel
// of a pair becomes the sum, the upper one the difference.
template <int kRows>
OA_DEVICE void rotate_neighbours(float (&x)[kRows][8], uint32 signs) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            x[i][j] = __uint_as_float(__float_as_uint(x[i][j]) ^ (signs << (31 - j) & 0x80000000u));
#pragma unroll
        for (int step = 1; step < 8; step *= 2)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if ((j & step) == 0) {
                    float a = x[i][j], b = x[i][j + step];
                    x[i][j] = a + b;
                    x[i][j + step] = a - b;
                }
    }
}

// The stride that lanes `mask` apart have; upper: whether this one has the upper channels. All lanes of a warp.
template <int kRows>
OA_DEVICE void rotate_lanes(float (&x)[kRows][8], int32 mask, bool upper) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float other = __shfl_xor_sync(0xffffffffu, x[i][j], mask);
            x[i][j] = upper ? other - x[i][j] : x[i][j] + other;
        }
}

template <int kRows>
OA_DEVICE void normalize(float (&x)[kRows][8], float norm) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] = mul_rn(x[i][j], norm);
}

// This lane's 8 channels, from `first` on, of kRows rows each; neighbouring lanes have neighbouring channels.
template <int kRows>
OA_DEVICE void rotate(float (&x)[kRows][8], const Rotation& rotation, uint32 first) {
    rotate_neighbours(x, signs_of(rotation, first / 8));
#pragma unroll 1
    for (int32 lanes = 1; lanes < rotation.channels / 8; lanes *= 2) rotate_lanes(x, lanes, (first / 8 & lanes) != 0);
    normalize(x, rotation.norm);
}

// One row, of which lane `lane` of kLanes has units lane, lane + kLanes, .. of 8 channels.
template <int kLanes>
OA_DEVICE void rotate_units(float (&x)[4][8], const Rotation& rotation, uint32 lane) {
#pragma unroll
    for (uint32 u = 0; u < 4; ++u) {
        float one[1][8];
#pragma unroll
        for (int j = 0; j < 8; ++j) one[0][j] = x[u][j];
        rotate_neighbours(one, signs_of(rotation, u * kLanes + lane));
#pragma unroll
        for (int j = 0; j < 8; ++j) x[u][j] = one[0][j];
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2)
        if (8 * mask < rotation.channels) rotate_lanes(x, mask, (lane & mask) != 0);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        if (8 * kLanes * step >= rotation.channels) break;
#pragma unroll
        for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if ((u & step) == 0) {
                    float a = x[u][j], b = x[u + step][j];
                    x[u][j] = a + b;
                    x[u + step][j] = a - b;
                }
    }
    normalize(x, rotation.norm);
}
