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

// 8 channels times the inverse of their scale. A zero is positive: the sign of a difference of 0 is left to chance.
OA_DEVICE uint2 to_e4m3(const float (&x)[8], float inverse) {
    uint32 packed[4];
#pragma unroll
    for (int w = 0; w < 4; ++w)
        packed[w] = pack_e4m3x2(fmaf(x[2 * w], inverse, 0.0f), fmaf(x[2 * w + 1], inverse, 0.0f));
    return {packed[0] | packed[1] << 16, packed[2] | packed[3] << 16};
}

// Of 8 neighbouring channels: signs, and strides 1, 2 and 4 of the transform. The lower channel of a pair becomes the
// sum, the upper one the difference.
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

// Strides of the transform come in the order 1, 2, 4, n / 4, n / 2, 8, .., n / 8: those of n channels' quarters before
// those between, so that rotate_row, whose lanes have channels of all quarters, can exchange halves.

// This lane's 8 channels, from `first` on, of kRows rows each; neighbouring lanes have neighbouring channels.
template <int kRows>
OA_DEVICE void rotate(float (&x)[kRows][8], const Rotation& rotation, uint32 first) {
    rotate_neighbours(x, signs_of(rotation, first / 8));
    int32 quarter = rotation.channels / 32, lanes = quarter;
#pragma unroll 1
    do {
        rotate_lanes(x, lanes, (first / 8 & lanes) != 0);
        lanes = lanes == 2 * quarter ? 1 : 2 * lanes;
    } while (lanes != quarter);
    normalize(x, rotation.norm);
}

// One row, of which lane `lane` of kLanes has units lane, lane + kLanes, .. of 8 channels.
template <int kLanes>
OA_DEVICE void rotate_units_neighbours(float (&x)[4][8], const Rotation& rotation, uint32 lane) {
#pragma unroll
    for (uint32 u = 0; u < 4; ++u) {
        float one[1][8];
#pragma unroll
        for (int j = 0; j < 8; ++j) one[0][j] = x[u][j];
        rotate_neighbours(one, signs_of(rotation, u * kLanes + lane));
#pragma unroll
        for (int j = 0; j < 8; ++j) x[u][j] = one[0][j];
    }
}

// The stride between units u and u + step; flipped: the differences go to u, the sums to u + step.
template <int kStep>
OA_DEVICE void rotate_between_units(float (&x)[4][8], bool flipped) {
    const float t = flipped ? -1.0f : 1.0f;
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if ((u & kStep) == 0) {
                float a = x[u][j], b = x[u + kStep][j];
                x[u][j] = fmaf(b, t, a);
                x[u + kStep][j] = fmaf(b, -t, a);
            }
}

// The stride that lanes `mask` apart have, of rows whose blocks may be parts of the row. Half of the units would do for
// each lane, but then it would end with other units, depending on the block.
template <int kLanes>
OA_DEVICE void rotate_blocks(float (&x)[4][8], const Rotation& rotation, uint32 lane) {
    rotate_units_neighbours<kLanes>(x, rotation, lane);
    int32 quarter = rotation.channels / 32, lanes = quarter;
#pragma unroll 1
    do {
        if (lanes < kLanes) {
            rotate_lanes(x, lanes, (lane & uint32(lanes)) != 0);
        } else {
            rotate_between_units<1>(x, false);  // two lanes and 32 channels
        }
        lanes = lanes == 2 * quarter ? 1 : 2 * lanes;
    } while (lanes != quarter);
    normalize(x, rotation.norm);
}

// The stride that lanes kMask apart have, by an exchange of halves: a lane keeps the units without kStep, gets as many
// from the other lane, whose channels are those of its own but for this stride, and has sums and differences of both.
// flipped: differences go to the units without kStep. A lane with the upper channels has differences of the other sign.
template <int kStep, int kMask>
OA_DEVICE void rotate_halves(float (&x)[4][8], bool flipped) {
    const float t = flipped ? -1.0f : 1.0f;
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if ((u & kStep) == 0) {
                float own = x[u][j], other = __shfl_xor_sync(0xffffffffu, x[u + kStep][j], kMask);
                x[u][j] = fmaf(other, t, own);
                x[u + kStep][j] = fmaf(other, -t, own);
            }
}

// A row that is one block: half of the shuffles. Afterwards this lane has other channels: units 0 and 1, and 2 and 3,
// are neighbours, from first_unit_of(lane, 0) and first_unit_of(lane, 1) on.
template <int kLanes>
OA_DEVICE void rotate_row(float (&x)[4][8], const Rotation& rotation, uint32 lane) {
    rotate_units_neighbours<kLanes>(x, rotation, lane);
    const bool b0 = lane & 1, b1 = lane & 2, b2 = lane & 4;
    rotate_between_units<1>(x, b0);
    rotate_between_units<2>(x, kLanes > 2 && b1);
    rotate_halves<1, 1>(x, false);
    if (kLanes > 2) rotate_halves<2, 2>(x, kLanes > 4 && b2);
    if (kLanes > 4) rotate_halves<2, 4>(x, false);
    // Signs of the differences, which the exchanges have left.
    const float sign0 = b0 ? -1.0f : 1.0f, sign1 = b1 ? -1.0f : 1.0f, sign2 = b2 ? -1.0f : 1.0f;
    const float low = kLanes > 4 && b2 ? rotation.norm * sign1 : rotation.norm;
    const float high = kLanes > 4 ? low * sign2 : kLanes > 2 ? low * sign1 : low;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        const float norm = (u & 2 ? high : low) * (u & 1 ? sign0 : 1.0f);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[u][j] = mul_rn(x[u][j], norm);
    }
}

// Which units of its row a lane has behind rotate_row: of two neighbours the first, of pair 0 or 1.
template <int kLanes>
OA_DEVICE uint32 first_unit_of(uint32 lane, uint32 pair) {
    const uint32 b0 = lane & 1, b1 = lane >> 1 & 1, b2 = lane >> 2;
    return kLanes == 2   ? b0 << 1 | pair << 2
           : kLanes == 4 ? pair << 1 | b0 << 2 | b1 << 3
                         : b2 << 1 | pair << 2 | b0 << 3 | b1 << 4;
}
