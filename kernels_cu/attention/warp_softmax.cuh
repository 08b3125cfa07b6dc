// Softmax of one warp's 16 rows of scores, as accumulators of wgmma and of mma.sync m16n8 hold them alike: lane l has
// rows l/4 and l/4 + 8, of every block of 8 columns those at 2(l%4) and + 1: s[4n + 2r + x] is row r, column 8n +
// 2(l%4) + x. A wgmma's warp w has rows 16w on.
#pragma once
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "tile/four_keys.cuh"

// Scores as numbers. Integer products S become floats by an addition of bit patterns: 0x4b400000 + S is 12582912 + S
// for |S| < 2^22, and the constant leaves with the multiply-add that scales the score. It leaves exactly: 12582912 is 3
// * 2^22, scale_without_rounding cuts the scale c to 20 bits and the base m2 of the softmax is a multiple of 1 /
// kBaseSteps, so that 12582912 c + m2 has 24 bits while c <= kCoarseScale. Coarser scores take the slow path, which
// subtracts the constant first; so do scores with a shift, which is no multiple of anything.
// SeededScore: the accumulator began with the pattern (mma.sync takes any). Of
// 4-bit products, whose units are worth 300 times as much, the base is an integer.
template <int kBits>
struct SeededScore {
    int32 bits;
};
OA_DEVICE float score_of(float s) { return s; }
template <int kBits>
OA_DEVICE float score_of(SeededScore<kBits> s) {
    return __int_as_float(s.bits);
}
OA_DEVICE float score_of(int32 s) { return __int_as_float(s + 0x4b400000); }
template <typename Score>
constexpr float kScoreBias = 0.0f;
template <>
constexpr float kScoreBias<int32> = 12582912.0f;
template <int kBits>
constexpr float kScoreBias<SeededScore<kBits>> = 12582912.0f;
template <typename Score>
constexpr float kBaseSteps = 128.0f;
template <>
constexpr float kBaseSteps<SeededScore<4>> = 1.0f;
template <typename Score>
constexpr float kCoarseScaleOf = kBaseSteps<Score> == 1.0f ? 0.5f : 0.005f;
constexpr float kCoarseScale = kCoarseScaleOf<int32>;
OA_DEVICE float scale_without_rounding(float c) { return __uint_as_float(__float_as_uint(c) & 0xfffffff0u); }
// A hidden key's score: score_of it is -inf.
OA_DEVICE void hide(float& s) { s = neg_inf(); }
template <int kBits>
OA_DEVICE void hide(SeededScore<kBits>& s) {
    s.bits = int32(0xff800000u);
}
OA_DEVICE void hide(int32& s) { s = int32(0xff800000u - 0x4b400000u); }

// Hides the keys of tile n0 .. that causality, the window and the sequence's end hide. warp_row: the warp's first row.
// Keys: their order.
template <typename Keys = TwoKeys, typename Score, int kScores, typename Tile>
OA_DEVICE void mask_edges(Score (&s)[kScores], const AttnFwdParams& p, const Tile& t, int32 warp_row, int32 n0,
                          int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        KeyRange keys = visible_to(p, t, warp_row + (lane >> 2) + r * 8);
        int32 lo = keys.lo - n0 - Keys::of_lane(lane), hi = keys.hi - n0 - Keys::of_lane(lane);
#pragma unroll
        for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                int32 col = Keys::of(n, x);
                if (col < lo || col >= hi) hide(s[4 * n + 2 * r + x]);
            }
    }
}

// Of this lane's 16 scores of a row, columns 8n + x of its own, those before column `end`: bit 2n + x each.
OA_DEVICE constexpr uint32 columns_before(int32 end) {
    int32 inside = end & 7, count = end <= 0 ? 0 : end >= 64 ? 16 : 2 * (end >> 3) + (inside < 2 ? inside : 2);
    return (1u << count) - 1;
}
static_assert(columns_before(0) == 0 && columns_before(1) == 1 && columns_before(2) == 3 && columns_before(8) == 3, "");
static_assert(columns_before(9) == 7 && columns_before(57) == 0x7fff && columns_before(58) == 0xffff, "");

// As mask_edges, of 64 keys, by bits instead of two comparisons a score.
template <typename Tile>
OA_DEVICE void mask_edges_by_bits(float (&s)[32], const AttnFwdParams& p, const Tile& t, int32 warp_row, int32 n0,
                                  int32 lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        KeyRange keys = visible_to(p, t, warp_row + (lane >> 2) + r * 8);
        int32 first = n0 + 2 * (lane & 3);
        uint32 seen = columns_before(keys.hi - first) & ~columns_before(keys.lo - first);
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (!(seen >> i & 1)) hide(s[4 * (i >> 1) + 2 * r + (i & 1)]);
    }
}

// Makes the products of keys from `end` on 0, in tile n0 ..: of packed sequences they are the next sequence's.
template <typename Keys = TwoKeys, int kScores>
OA_DEVICE void forget_keys(float (&s)[kScores], int32 end, int32 n0, int lane) {
    int32 hi = end - n0 - Keys::of_lane(lane);
#pragma unroll
    for (int i = 0; i < kScores; ++i)
        if (Keys::of(i >> 2, i & 1) >= hi) s[i] = 0.0f;
}

struct FloatPRange {
    static constexpr float kBaseLog2 = 0.0f;
    static constexpr float kSumLimit = 256.0f;  // p <= 2^8 costs no relative precision in bf16, fp16 or fp32
};
struct NoShift {
    static constexpr bool kPresent = false;
    OA_DEVICE NoShift(const float* = nullptr, float = 0.0f) {}
    OA_DEVICE float operator()(int, int) const { return 0.0f; }
};

// Base-2 exponents of a tile's scores, relative to the base m2 of their row.
template <bool kSlowPath, typename Score, int kScores, typename Shift>
class Exponents {
  public:
    OA_DEVICE Exponents(const Score (&s)[kScores], const float (&c)[2], const float (&m2)[2], Shift shift)
        : s_(s), c_(c), m2_(m2), shift_(shift) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            base_[r] = kScoreBias<Score> == 0.0f ? -m2[r] : fmaf(-kScoreBias<Score>, c[r], -m2[r]);
    }
    // Of row r, column x of block n.
    OA_DEVICE float operator()(int n, int r, int x) const {
        float score = score_of(s_[4 * n + 2 * r + x]);
        if constexpr (kSlowPath) return fmaf(score - kScoreBias<Score>, c_[r], shift_(n, x)) - m2_[r];
        if constexpr (Shift::kPresent) return fmaf(score - kScoreBias<Score>, c_[r], shift_(n, x) - m2_[r]);
        return fmaf(score, c_[r], base_[r]);
    }
    // Whether P has to be set to 0 whatever c is.
    OA_DEVICE bool is_hidden(int n, int r, int x) const {
        return kSlowPath && score_of(s_[4 * n + 2 * r + x]) == neg_inf();
    }

  private:
    const Score (&s_)[kScores];
    const float (&c_)[2];
    const float (&m2_)[2];
    Shift shift_;
    float base_[2];
};

// Running base and denominator of this thread's two rows, in base 2: p = exp2(s c - m2).
//
// The base need not be the maximum, only near enough for p to neither overflow nor vanish. So the maximum is found in a
// row block's first tile only; afterwards a tile's probabilities are computed against the base as it is, and their
// sums, which are needed anyway, tell whether that was good enough: p <= sum <= PRange::kSumLimit. (attn_int8_sm90 has
// no such sums: it tests the packed bytes, attention/p_e4m3.cuh.) Only otherwise (a score 8 or more above the base in
// base 2) is the tile computed again, with the base raised. This removes 64 comparisons a tile and the exchange of
// maxima from the chain between the two products.
//
// PRange: kBaseLog2 is log2 of p at the base, kSumLimit what the sum of a lane's p may be. Formats with a small range
// of exponents need p large.
template <typename PRange = FloatPRange>
struct RowState {
    // Before the first visible key the base is the lowest finite number and not -inf, so that a hidden score gives
    // exp2(-inf) = 0, and the first visible one infinity, which the sum reports.
    float m2[2], l[2];

    OA_DEVICE RowState() : m2{kLowest, kLowest}, l{0.0f, 0.0f} {}

    // Raises the base to the maximum of these scores (of four lanes); alpha: what O and l are to be multiplied by, l
    // has been. c: score units -> base-2 exponent, positive, of either row. shift: see exponentiate.
    template <typename Score, int kScores, typename Shift = NoShift>
    OA_DEVICE void raise(const Score (&s)[kScores], const float (&c)[2], float (&alpha)[2], Shift shift = {}) {
        // Four chains of comparisons, which do not wait for each other.
        float tops[2][2], top[2];
#pragma unroll
        for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    float score = score_of(s[4 * n + 2 * r + x]);
                    if constexpr (Shift::kPresent) score = fmaf(score - kScoreBias<Score>, c[r], shift(n, x));
                    tops[r][x] = n == 0 ? score : fmaxf(tops[r][x], score);
                }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(fmaxf(tops[r][0], neg_inf()), tops[r][1]);
            // The lanes of a row may have different scales.
            if constexpr (!Shift::kPresent) top[r] = (top[r] - kScoreBias<Score>)*c[r];
        }
#pragma unroll
        for (int mask = 1; mask <= 2; mask <<= 1)
#pragma unroll
            for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], mask));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m2_new = fmaxf(m2[r], top[r] - PRange::kBaseLog2);
            if constexpr (kScoreBias<Score> != 0.0f)
                m2_new = fmaxf(ceilf(m2_new * kBaseSteps<Score>) / kBaseSteps<Score>, kLowest);
            alpha[r] = exp2_approx(m2[r] - m2_new);
            m2[r] = m2_new;
            l[r] *= alpha[r];
        }
    }

    // Calls put(n, r, p0, p1) for the two neighbouring columns of row r in column block n; sum: this lane's sums.
    // shift(n, x): what is added to the exponents of a column, in base 2.
    // kSlowPath: hidden keys give 0 even where c is NaN, and integer scores of any scale are exact.
    template <bool kSlowPath = false, typename Score, int kScores, typename Put, typename Shift = NoShift>
    OA_DEVICE void exponentiate(const Score (&s)[kScores], const float (&c)[2], float (&sum)[2], Put put,
                                Shift shift = {}) const {
        sum[0] = sum[1] = 0.0f;
        exponentiate_blocks<0, kScores / 4, kSlowPath>(s, c, sum, put, shift);
    }

    // The same for column blocks [kFirst, kEnd), whose sums are added to those that there are.
    template <int kFirst, int kEnd, bool kSlowPath = false, typename Score, int kScores, typename Put,
              typename Shift = NoShift>
    OA_DEVICE void exponentiate_blocks(const Score (&s)[kScores], const float (&c)[2], float (&sum)[2], Put& put,
                                       Shift shift = {}) const {
        static_assert(0 <= kFirst && kFirst < kEnd && kEnd <= kScores / 4, "column blocks of the tile");
        const Exponents<kSlowPath, Score, kScores, Shift> exponent(s, c, m2, shift);
#pragma unroll
        for (int n = kFirst; n < kEnd; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float p[2];
#pragma unroll
                for (int x = 0; x < 2; ++x) p[x] = exponent.is_hidden(n, r, x) ? 0.0f : exp2_approx(exponent(n, r, x));
                sum[r] += p[0] + p[1];
                put(n, r, p[0], p[1]);
            }
    }

    // A whole tile, exponentials in the order of the source: put(n, r, p0, p1) as above, but no sums. kByRow: row 0's
    // columns before row 1's; else block by block. Their arguments are computed one pair ahead and put() comes two
    // pairs behind, so that fewer instructions wait for the result of the one before.
    template <bool kSlowPath, bool kByRow, typename Score, int kScores, typename Put, typename Shift = NoShift>
    OA_DEVICE void exponentiate_in_order(const Score (&s)[kScores], const float (&c)[2], Put put,
                                         Shift shift = {}) const {
        const Exponents<kSlowPath, Score, kScores, Shift> exponent(s, c, m2, shift);
        constexpr int kPairs = kScores / 2, kLater = 2;
        float e[kScores];
        auto block = [](int k) { return kByRow ? k % (kPairs / 2) : k >> 1; };
        auto row = [](int k) { return kByRow ? k / (kPairs / 2) : k & 1; };
        auto prepare = [&](int k) {
            e[2 * k] = exponent(block(k), row(k), 0);
            e[2 * k + 1] = exponent(block(k), row(k), 1);
        };
        prepare(0);
#pragma unroll
        for (int k = 0; k < kPairs + kLater; ++k) {
            if (k < kPairs) {
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    float p = exp2_in_order(e[2 * k + x]);
                    e[2 * k + x] = exponent.is_hidden(block(k), row(k), x) ? 0.0f : p;
                }
                if (k + 1 < kPairs) prepare(k + 1);
            }
            if (k >= kLater) {
                int done = k - kLater;
                put(block(done), row(done), e[2 * done], e[2 * done + 1]);
            }
        }
    }

    // Whether the probabilities of one of this lane's rows were too large, or NaN; the warp has to vote. own: whether
    // the rows belong to the tile's sequence. In packed tensors a tile's last rows may be the next sequence's; they
    // must not take part in the vote, or a result would depend on its neighbour.
    OA_DEVICE static bool too_large(const float (&sum)[2], const bool (&own)[2]) {
        float top = max_nan(own[0] ? sum[0] : 0.0f, own[1] ? sum[1] : 0.0f);
        return !(top <= PRange::kSumLimit);
    }

    OA_DEVICE void add(const float (&sum)[2]) {
        l[0] += sum[0];
        l[1] += sum[1];
    }

    // Sums the denominators over the four lanes of a row; once, after the last tile.
    OA_DEVICE void reduce() { sum_of_quad(l); }
};

template <int kOutputs>
OA_DEVICE void rescale(float (&o)[kOutputs], const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= alpha[(i >> 1) & 1];
}
