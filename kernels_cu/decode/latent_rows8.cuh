// Channels of a latent cache's rows in 8 bits, to 16 bits.
#pragma once
#include "ptx/cvt.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/shared.cuh"

// 8 channels.
template <typename Io>
OA_DEVICE uint4 dequantize8(uint32 low, uint32 high, float scale) {
    auto two = [&](uint32 halves) {
        const float2 x = unpack2(Half{}, halves);
        return pack2(Io{}, x.x * scale, x.y * scale);
    };
    return make_uint4(two(half2_of_e4m3x2(low)), two(half2_of_e4m3x2<true>(low)), two(half2_of_e4m3x2(high)),
                      two(half2_of_e4m3x2<true>(high)));
}

// 8 threads have a row: of a half each reads two chunks of 16 codes, 128 channels apart, which have a scale each.
struct LatentCodes {
    uint4 left, right, last;  // last: of the last panel, with the second half
    float2 scales;
};
