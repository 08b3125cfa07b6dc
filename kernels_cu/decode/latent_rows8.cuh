// Channels of a latent cache's rows in 8 bits, to 16 bits.
#pragma once
#include "ptx/cvt.cuh"
#include "ptx/shared.cuh"

// cvt.rn.f16x2.e4m3x2, of sm_89 and newer, of either half of a register, which the instruction can name.
template <bool kHigh>
OA_DEVICE uint32 half2_of(uint32 codes) {
    uint32 d;
    if constexpr (kHigh) {
        asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(d) : "r"(codes));
    } else {
        asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(d) : "r"(codes));
    }
    return d;
}

// 8 channels.
template <typename Io>
OA_DEVICE uint4 dequantize8(uint32 low, uint32 high, float scale) {
    auto two = [&](uint32 halves) {
        const float2 x = unpack2(Half{}, halves);
        return pack2(Io{}, x.x * scale, x.y * scale);
    };
    return make_uint4(two(half2_of<false>(low)), two(half2_of<true>(low)), two(half2_of<false>(high)),
                      two(half2_of<true>(high)));
}

// 16 bytes of global memory, or zeros. Volatile: it is issued where it stands.
OA_DEVICE uint4 load_if(const uint8* from, bool exists) {
    uint4 x;
    asm volatile(
        "{.reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
        : "l"(from), "r"(uint32(exists))
        : "memory");
    return x;
}

// Two numbers of fp16 to another type.
OA_DEVICE uint32 from_half2(Half, uint32 halves) { return halves; }
OA_DEVICE uint32 from_half2(BFloat16, uint32 halves) {
    const float2 x = unpack2(Half{}, halves);
    return pack2(BFloat16{}, x.x, x.y);
}

// The same without a scale: exact.
template <typename Io>
OA_DEVICE uint4 widen8(uint32 low, uint32 high) {
    auto two = [&](uint32 halves) { return from_half2(Io{}, halves); };
    return make_uint4(two(half2_of<false>(low)), two(half2_of<true>(low)), two(half2_of<false>(high)),
                      two(half2_of<true>(high)));
}

// Of a row a lane has 16 codes of each panel of a half.
struct LatentCodes {
    uint4 panels[4];
};
