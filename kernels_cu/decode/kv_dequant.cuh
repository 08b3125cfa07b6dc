// Codes of a quantized KV cache as fp16 numbers, exactly; scale and zero are applied to scores and probabilities
// instead. V's are the codes. K's integers keep the conversion's weight and offset: an element is weight * code +
// offset, which queries and accumulators correct (decode/query.cuh), so that K costs no subtractions.
#pragma once
#include "decode/kv_row.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/half2.cuh"
#include "ptx/types.cuh"

constexpr uint32 kHalf2Minus1152 = 0xe480e480u;  // -1152: 1024 of the magic number, and the bias of int8
constexpr uint32 kHalf2Minus1032 = 0xe408e408u;  // -1032
constexpr uint32 kHalf2Sixteenth = 0x2c002c00u;  // 2^-4
constexpr uint32 kHalf2Minus72 = 0xd480d480u;  // -72

// fp16 1024 twice, from the kernel's arguments: the instruction that masks and adds it has one immediate operand only,
// and a constant known to the compiler would be a second one.
struct HalfMagic {
    uint32 two_1024;
};

// Eight nibbles: out[j] has nibble j of the low half of w and nibble j of its high half. A nibble n in the mantissa of
// 1024 is 1024 + n, four bits further up 1024 + 16 n.
OA_DEVICE void unpack_int4(uint32 w, HalfMagic magic, uint32 (&out)[4]) {
    uint32 high = w >> 8;
    out[0] = add_half2((w & 0x000f000fu) | magic.two_1024, kHalf2Minus1032);
    out[1] = fma_half2((w & 0x00f000f0u) | magic.two_1024, kHalf2Sixteenth, kHalf2Minus72);
    out[2] = add_half2((high & 0x000f000fu) | magic.two_1024, kHalf2Minus1032);
    out[3] = fma_half2((high & 0x00f000f0u) | magic.two_1024, kHalf2Sixteenth, kHalf2Minus72);
}

// The same without the correction: nibbles, not codes, times 1 | 16 | 1 | 16, and 1024.
OA_DEVICE void unpack_int4_offset(uint32 w, HalfMagic magic, uint32* out) {
    uint32 high = w >> 8;
    out[0] = (w & 0x000f000fu) | magic.two_1024;
    out[1] = (w & 0x00f000f0u) | magic.two_1024;
    out[2] = (high & 0x000f000fu) | magic.two_1024;
    out[3] = (high & 0x00f000f0u) | magic.two_1024;
}

// What K's elements 0, 1 and 2, 3 of a unit are as fragments: weight * code + offset. Queries are multiplied by
// kWeight / weight, so that all products are kWeight times too large.
template <int kKind>
struct KeyCodes {
    static constexpr bool kInt4 = kKind == kKvInt4 || kKind == kKvFbgemm;
    static constexpr float kWeight = kInt4 ? 16.0f : 1.0f;
    static constexpr float kFirst = kInt4 ? 16.0f : 1.0f;  // kWeight / weight; that of elements 2 and 3 is 1
    static constexpr float kOffset01 = kInt4 ? 1032.0f : kv_is_int8(kKind) ? 1152.0f : 0.0f;
    static constexpr float kOffset23 = kInt4 || kv_is_int8(kKind) ? 1152.0f : 0.0f;
};

// Groups whose zeros go into the scores by a product of their own: four are a fragment's columns, in bfloat16 as they
// are stored.
OA_DEVICE constexpr bool has_zero_product(int kind, int groups) {
    return groups == 4 && (kind == kKvInt8 || kind == kKvInt4);
}

// Four int8 codes as the packages' own rows have them, plus 128.
template <int kKind>
OA_DEVICE uint32 with_bias(uint32 w) {
    return kKind == kKvInt8InOrder ? w ^ 0x80808080u : w;
}

// Two bytes to two fp16: bytes 0 and 1 of w (kHigh: 2 and 3). int8 has its bias.
template <int kKind, bool kHigh>
OA_DEVICE uint32 unpack_bytes(uint32 w) {
    if (kv_is_int8(kKind)) {
        return add_half2(permute_bytes(w, 0x64646464u, kHigh ? 0x4342 : 0x4140), kHalf2Minus1152);
    }
    return half2_of_e4m3x2<kHigh>(w);
}

// A vector of K: fragments a0 (elements 0, 1) and a2 (2, 3) of each unit in it, see KeyCodes.
template <int kKind>
OA_DEVICE void unpack_k_word(uint32 w, HalfMagic magic, uint32* out) {
    if (kKind == kKvInt4 || kKind == kKvFbgemm) {
        unpack_int4_offset(w, magic, out);
    } else if (kv_is_int8(kKind)) {
        w = with_bias<kKind>(w);
        out[0] = permute_bytes(w, 0x64646464u, 0x4140);
        out[1] = permute_bytes(w, 0x64646464u, 0x4342);
    } else {
        out[0] = unpack_bytes<kKind, false>(w);
        out[1] = unpack_bytes<kKind, true>(w);
    }
}

// Words of V of two tokens with one unit (int4: two) each: out[2 i] and out[2 i + 1] have elements 2i and 2i + 1 of
// both tokens (int4: out[4] on are of the second unit; FBGEMM's int4: the unit of `lane`, half of each word).
template <int kKind>
OA_DEVICE void unpack_v_words(uint32 w0, uint32 w1, HalfMagic magic, int lane, uint32* out) {
    if (kKind == kKvFbgemm) {
        uint32 r[4];
        unpack_int4(permute_bytes(w0, w1, lane & 1 ? 0x7632 : 0x5410), magic, r);
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = r[i];
    } else if (kKind == kKvInt4) {
        uint32 r[4];
        unpack_int4(permute_bytes(w0, w1, 0x5410), magic, r);
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = r[i];
        unpack_int4(permute_bytes(w0, w1, 0x7632), magic, r);
#pragma unroll
        for (int i = 0; i < 4; ++i) out[4 + i] = r[i];
    } else {
        uint32 x = with_bias<kKind>(permute_bytes(w0, w1, 0x5140));
        uint32 y = with_bias<kKind>(permute_bytes(w0, w1, 0x7362));
        out[0] = unpack_bytes<kKind, false>(x);
        out[1] = unpack_bytes<kKind, true>(x);
        out[2] = unpack_bytes<kKind, false>(y);
        out[3] = unpack_bytes<kKind, true>(y);
    }
}

// A word of parameters. FBGEMM's have scale and shift in fp16, the shift that of nibble 0, which is code -8. The
// caller's arrays have scales in fp32.
template <int kKind>
OA_DEVICE float param_scale(uint32 w) {
    if (kv_in_order(kKind)) return __uint_as_float(w);
    return kKind == kKvFbgemm ? low_float(Half{}, w) : __uint_as_float(w << 16);
}
template <int kKind>
OA_DEVICE float param_zero(uint32 w) {
    if (!kv_has_zeros(kKind)) return 0.0f;
    return kKind == kKvFbgemm ? fmaf(8.0f, low_float(Half{}, w), high_float(Half{}, w))
                              : __uint_as_float(w & 0xffff0000u);
}
