// Rows of a latent cache in 8 bits, as mla_decode_sm90's producer warps bring them: dequantized on the way.
#pragma once
#include "decode/latent_copies.cuh"
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

// A half is asked for as soon as the one before is announced, and waits in registers until its place is free.
template <typename Config>
OA_DEVICE void LatentProducer<Config>::convert_blocks(const LatentSplit& split) {
    LatentCodes codes[kSteps];
    load_codes<0>(codes, 0);
    for (int32 block = 0; block < split.blocks; ++block) {
        const int buffer = block & 1;
        wait_empty(buffer, 0);
        note_listed(buffer, exists_);
        store_codes<0>(codes, buffer);
        load_codes<1>(codes, buffer);
        look_up(split, block + 1);
        wait_empty(buffer, 1);
        store_codes<1>(codes, buffer);
        load_codes<0>(codes, buffer ^ 1);
        rounds_.advance(buffer);
    }
}

template <typename Config>
template <int kHalf>
OA_DEVICE void LatentProducer<Config>::load_codes(LatentCodes (&codes)[kSteps], int buffer) const {
    const int first = first_panel<Config>(buffer, kHalf);
    const float common = p_.k_params == nullptr ? 1.0f : __uint_as_float(*p_.k_params);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        LatentCodes& own = codes[i];
        const uint8* from = address(i);
        auto chunk = [&](int at) {
            return exists(i) ? *reinterpret_cast<const uint4*>(from + at) : make_uint4(0, 0, 0, 0);
        };
        own.left = chunk(first * 64 + chunk_ * 16);
        own.right = chunk(first * 64 + 128 + chunk_ * 16);
        if constexpr (Config::kFormat == kRows656) {
            // Of a row that is not there zeros too: it may be NaN.
            own.scales = exists(i) ? *reinterpret_cast<const float2*>(from + Config::kHeadDimV + first * 2)
                                   : make_float2(0.0f, 0.0f);
            if constexpr (kHalf == 1) own.last = chunk(Config::kHeadDimV + 16 + chunk_ * 16);
        } else {
            own.scales = make_float2(common, common);
            if constexpr (kHalf == 1) own.last = chunk(Config::kHeadDimV + (chunk_ & 3) * 16);
        }
    }
}

template <typename Config>
template <int kHalf>
OA_DEVICE void LatentProducer<Config>::store_codes(const LatentCodes (&codes)[kSteps], int buffer) const {
    const int first = first_panel<Config>(buffer, kHalf);
    const uint32 to = smem_addr_of(smem_.k[buffer]) + row_ * 128, swizzle = row_ & 7;
    const bool flip = (chunk_ & 4) != 0;  // 8 threads store to 8 different chunks of 16 bytes
    const uint32 column = (2 * (chunk_ & 3)) ^ swizzle;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const LatentCodes& own = codes[i];
        const uint32 row = to + i * kRowsAtOnce * 128, half = row + (first + (chunk_ >> 2)) * kPanelBytes;
        store16(own.left, own.scales.x, half, column, flip);
        store16(own.right, own.scales.y, half + 2 * kPanelBytes, column, flip);
        if constexpr (kHalf == 1) {
            const uint32 last = row + (Config::kPanels - 1) * kPanelBytes;
            if constexpr (Config::kFormat == kRows656) {
                store_shared4(last + ((chunk_ ^ swizzle) << 4), own.last);
            } else if (chunk_ < 4) {
                store16(own.last, own.scales.x, last, column, false);
            }
        }
    }
    fence_proxy_async();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(smem_addr_of(&smem_.full[buffer][first]));
}

// 16 channels to a panel's row: to the chunk of number `column` and its neighbour, the upper 8 first with `flip`.
template <typename Config>
OA_DEVICE void LatentProducer<Config>::store16(uint4 codes, float scale, uint32 row, uint32 column, bool flip) const {
    const uint4 low = dequantize8<typename Config::Io>(codes.x, codes.y, scale);
    const uint4 high = dequantize8<typename Config::Io>(codes.z, codes.w, scale);
    const uint32 first = row + ((column ^ (flip ? 1 : 0)) << 4);
    store_shared4(first, flip ? high : low);
    store_shared4(first ^ 16, flip ? low : high);
}
