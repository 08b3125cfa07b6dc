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

// Bit 31: whether the channel changes its sign.
OA_DEVICE uint32 sign_of_channel(uint32 seed, uint32 channel) {
    uint32 h = channel + seed * 0x9e3779b9u;
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    h ^= h >> 16;
    return h << 31;
}

// This lane's 8 channels, from `first` on, of kRows rows each; neighbouring lanes have neighbouring channels. All lanes
// of a warp. The lower channel of a pair becomes the sum, the upper one the difference.
template <int kRows>
OA_DEVICE void rotate(float (&x)[kRows][8], const Rotation& rotation, uint32 first) {
#pragma unroll
    for (uint32 j = 0; j < 8; ++j) {
        uint32 sign = sign_of_channel(rotation.seed, first + j);
#pragma unroll
        for (int i = 0; i < kRows; ++i) x[i][j] = __uint_as_float(__float_as_uint(x[i][j]) ^ sign);
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if ((j & step) == 0) {
                    float a = x[i][j], b = x[i][j + step];
                    x[i][j] = a + b;
                    x[i][j + step] = a - b;
                }
#pragma unroll 1
    for (int32 lanes = 1; lanes < rotation.channels / 8; lanes *= 2) {
        bool upper = (first / 8 & lanes) != 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float other = __shfl_xor_sync(0xffffffffu, x[i][j], lanes);
                x[i][j] = upper ? other - x[i][j] : x[i][j] + other;
            }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] = mul_rn(x[i][j], rotation.norm);
}
