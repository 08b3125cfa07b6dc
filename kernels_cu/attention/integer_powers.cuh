// P in e4m3 of integer scores, by integer arithmetic alone: no conversion of the score, no special function, no
// conversion of P.
//
// The bits of an e4m3 number are 8 times its base-2 logarithm and a constant, where the mantissa is taken to be linear
// in the logarithm. So one multiply-add of the score gives, in the upper half of a word and in units of 1/16 of the
// last place,
//   h = 128 (log2 P + 7 + kShift)
// kShift makes the mean of what P is off by 0. Two forms of the rest, in packed halves:
//   linear      e4m3 = h / 16, cut
//   corrected   e4m3 = (16 (h - 35) + 112 - (h & 112)) / 256, cut: the mantissa lies below its chord, most in the
//               middle. Bits 4, 5 and 6 of h, worth 1/8, 1/4 and 1/2 of an octave, are subtracted as 1/16, 1/8 and 1/4
//               of the last place; 35 puts the chord's ends where that fits.
// Rms error of P: linear 3.14 %, corrected 2.82 %, rounded to nearest 2.65 %. Shifts are such that all P from 0.059
// octaves below 28, the base of the softmax, become 28 (0.062 linear; to nearest 0.052): where scores are nearly equal,
// a step of e4m3 among P would be all the error there is.
// Below 2^-6, where e4m3 itself is linear, P is too small, and 0 from 2^-7 on instead of 2^-10: where most P of a step
// are that small (mostly_small), others take special functions.
//
// A word holds 512 octaves. P beyond e4m3 up to 2^255 becomes NaN, which the test of P finds (attention/p_e4m3.cuh);
// so does P below 2^-263, whose word wraps, down to 2^-503: the tile is computed again. What lies beyond must not
// happen: scores are bounded by the length of Q and the greatest length of integers in K.
// The scale of scores is an integer: off by 2^-24 of a score in octaves, 0.09 of the greatest scores allowed.
#pragma once
#include "attention/warp_softmax.cuh"
#include "ptx/cvt_e4m3.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/packed16.cuh"
#include "ptx/sqrt_approx.cuh"
#include "ptx/types.cuh"

// Which P of a tile without hidden keys are made of integers: none; all, corrected; half of them, linear; all, linear.
constexpr int kNoPowers = 0, kCorrectedPowers = 1, kHalfLinearPowers = 2, kLinearPowers = 3;
// Of c |S| in a tile's first step, with room for other keys' scales.
constexpr float kMostOctaves = 210.0f;

template <bool kLinear>
struct IntegerPowers {
    static constexpr float kOctave = 8388608.0f;  // 2^23
    static constexpr float kShift = kLinear ? 0.0054f : 0.252f;
    static constexpr float kMostScore = 1572864.0f;  // 1.5 * 2^20
    int32 base[2];  // of either row: added to the product
    uint32 down;  // -35 twice, in a register: no instruction takes two constants
    float most_scale;  // c up to which nothing is wrong

    // m2: RowState's. most: the largest |S| that may be. All lanes.
    OA_DEVICE IntegerPowers(const float (&m2)[2], float most) {
        down = kLinear ? 0 : __shfl_sync(0xffffffffu, 0xffddffddu + threadIdx.y, 0);  // opaque: threadIdx.y is 0
        most_scale = most <= kMostScore ? kCoarseScale : -1.0f;
        const float inverse = rcp_approx(most);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            base[r] = in_register(__float2int_rn((7.0f + kShift - m2[r]) * kOctave));
            // 248 + m2 and 503 - m2, and a base that is no integer of 32 bits.
            const float below = m2[r] < 250.0f ? 495.0f - m2[r] : -1.0f;
            most_scale = fminf(most_scale, fminf(244.0f + m2[r], below) * inverse);
        }
    }

    // Of scores in base 2, up to kCoarseScale -> what integers are multiplied by.
    OA_DEVICE static int32 multiplier(float c) {
        return __float_as_int(fmaf(c, kOctave, kScoreBias<int32>)) - 0x4b400000;
    }
    // h of two scores of row r.
    OA_DEVICE uint32 logarithms(int32 s0, int32 s1, int32 multiplier, int r) const {
        return permute_bytes(s0 * multiplier + base[r], s1 * multiplier + base[r], 0x7632);
    }
    // Two e4m3, in bytes 1 and 3.
    OA_DEVICE uint32 rounded(uint32 h) const {
        if (kLinear) return clamp_s16x2(h, 0x07ff07ffu) << 4;
        return add_clamp_s16x2(h, down, 0x07f807f8u) * 16 + ((h & 0x00700070u) ^ 0x00700070u);
    }
    // Of four scores, the word of an operand.
    OA_DEVICE uint32 word(uint32 h0, uint32 h1) const { return permute_bytes(rounded(h0), rounded(h1), 0x7531); }
};

// The largest |S| of this lane's rows with K of integers up to 127: |q| |k|. Queries: in registers (kTaken), `words` as
// operand of wgmma, even ones of one row, odd ones of the other. All lanes.
template <typename Queries>
OA_DEVICE float most_score(const Queries& q) {
    constexpr int kSteps = sizeof(q.words) / sizeof(q.words[0]);
    int32 squares[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int x = 0; x < 4; ++x) squares[x & 1] = dot_s8x4(q.words[i][x], q.words[i][x], squares[x & 1]);
#pragma unroll
    for (int mask = 1; mask <= 2; mask <<= 1)
#pragma unroll
        for (int r = 0; r < 2; ++r) squares[r] += __shfl_xor_sync(0xffffffffu, squares[r], mask);
    const int32 longest = squares[0] > squares[1] ? squares[0] : squares[1];
    // A thousandth for the root.
    return 127.2f * sqrt_approx(float(longest) * (32.0f * kSteps)) + 1.0f;
}

// Whether all P of this lane are below 2^-5 in one of its rows, of 64 keys of which it has 16: more than half of the
// row is, as a rule, where some lane of its says so. probs: operand of the product with V, even words of one row.
OA_DEVICE bool mostly_small(const uint32 (&probs)[2][4]) {
    uint32 bits[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int x = 0; x < 4; ++x) bits[x & 1] |= probs[k][x];
    constexpr uint32 kFrom = 0x70707070;  // bits that e4m3 has from 2^-5 on
    return (bits[0] & kFrom) == 0 || (bits[1] & kFrom) == 0;
}

// h of 64 keys of two rows.
struct Logarithms {
    uint32 h[2][8];  // row, block of 8 columns

    template <typename Powers>
    OA_DEVICE void take(const int32 (&s)[32], float c, const Powers& powers) {
        const int32 multiplier = Powers::multiplier(c);
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int n = 0; n < 8; ++n)
                h[r][n] = powers.logarithms(s[4 * n + 2 * r], s[4 * n + 2 * r + 1], multiplier, r);
    }
    // As operand of the product with V.
    template <typename Powers>
    OA_DEVICE void put(const Powers& powers, uint32 (&probs)[2][4]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int n = 0; n < 8; n += 2) probs[n / 4][(n & 2) + r] = powers.word(h[r][n], h[r][n + 1]);
    }
};

// P of 64 keys of two rows as operand of the product with V: every second of its words by integers, the others by the
// special-function unit, whose arguments are computed a pair ahead and packed two pairs behind.
template <bool kByRow, typename Powers>
OA_DEVICE void exponentiate_half(const int32 (&s)[32], const float (&m2)[2], const float (&c)[2], const Powers& powers,
                                 uint32 (&probs)[2][4]) {
    constexpr int kPairs = 8, kLater = 2;  // by special functions
    const Exponents<false, int32, 32, NoShift> exponent(s, c, m2, {});
    const int32 multiplier = Powers::multiplier(c[0]);
    // Of word j in the order of the loop: its row, and its first block of 8 columns.
    auto row = [](int j) { return kByRow ? j / 4 : j % 2; };
    auto block = [](int j) { return 2 * (kByRow ? j % 4 : j / 2); };
    auto word = [&](int j) -> uint32& { return probs[block(j) / 4][(block(j) & 2) + row(j)]; };
    float e[2 * kPairs];
    auto prepare = [&](int k) {
        const int j = k / 2 * 2, n = block(j) + k % 2;
        e[2 * k] = exponent(n, row(j), 0);
        e[2 * k + 1] = exponent(n, row(j), 1);
    };
    prepare(0);
#pragma unroll
    for (int k = 0; k < kPairs + kLater; ++k) {
        if (k < kPairs) {
            e[2 * k] = exp2_in_order(e[2 * k]);
            e[2 * k + 1] = exp2_in_order(e[2 * k + 1]);
            if (k + 1 < kPairs) prepare(k + 1);
        }
        if (k >= kLater && k % 2 == 1) {
            const int done = k - kLater - 1;
            word(done) = pack4_e4m3(e[2 * done], e[2 * done + 1], e[2 * done + 2], e[2 * done + 3]);
        }
        if (k < kPairs && k % 2 == 0) {
            const int j = k + 1, r = row(j), first = 4 * block(j) + 2 * r;
            word(j) = powers.word(powers.logarithms(s[first], s[first + 1], multiplier, r),
                                  powers.logarithms(s[first + 4], s[first + 5], multiplier, r));
        }
    }
}
