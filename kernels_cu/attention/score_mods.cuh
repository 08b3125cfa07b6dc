// Softcap, masks and biases on scores in a wgmma accumulator, between Q K^T and the softmax:
//
//   S = softmax_scale * Q K^T;  S = softcap * tanh(S / softcap);  S += bias, or S = -inf where a key is hidden
//
// A warpgroup has 64 rows of scores: s[4n + 2r + x] of lane l in warp w is row 16w + l/4 + 8r, key 8n + 2(l%4) + x of a
// tile of 64 keys. Masks come in that order (params/mask_tiles.cuh), biases as tiles of shared memory.
#pragma once
#include "attention/mask.cuh"
#include "params/attn_fwd.cuh"
#include "params/mask_tiles.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/split_tiles.cuh"

// The steps of one tile of queries: which tile of keys each takes, from the last to the first, and what the mask does
// to it in each warpgroup's rows (MaskTileKind).
struct ListSteps {
    const int32* list;  // null: all from `end` - 1 down
    int32 count, end, kinds;

    template <typename Span>
    OA_DEVICE ListSteps(const ScoreModParams& f, const FwdTile& t, const Span& keys, int32 m_block)
        : list(f.lists),
          count(keys.end - keys.first),
          end(keys.end),
          kinds(f.flags & kModBias ? kAllGroups * kTileMixed : kAllGroups * kTileFull) {
        if (list != nullptr) {
            list += t.sequence * f.lists_stride_b + t.head_idx * f.lists_stride_h + int64(m_block) * (1 + f.num_tiles);
            count = __ldg(list++);
        }
    }
    // Of packed sequences. slot: the tile's number among those of all sequences (scheduler/slots.cuh). Where cu_seqlens
    // decreases two tiles may have one: a list is for one sequence, and others get nothing.
    template <typename Span>
    OA_DEVICE static ListSteps of_slot(const ScoreModParams& f, const FwdTile& t, const Span& keys, int32 slot) {
        ListSteps steps(f, keys);
        if (f.lists != nullptr) {
            const int32* head = f.lists + t.head_idx * f.lists_stride_h + int64(slot) * (1 + f.num_tiles);
            int32 count = __ldg(head), sequence = __ldg(head + 1);
            if (sequence != t.sequence) {
                steps.count = 0;
            } else if (count == kNoList) {
                steps.kinds = kAllGroups * kTileMixed;
            } else {
                steps.count = count;
                steps.list = head + 2;
            }
        }
        return steps;
    }
    // Of kernels that read no lists: nothing is known of any tile, unless there is no mask. kGroups: of 64 rows in a
    // CTA; others have no bits.
    template <int kGroups, typename Span>
    OA_DEVICE static ListSteps unlisted(const ScoreModParams& f, const Span& keys) {
        constexpr int32 kOwn = kAllGroups & ((1 << (kGroupShift + 2 * kGroups)) - 1);
        ListSteps steps(f, keys);
        steps.kinds = f.flags & (kModBits | kModKeyBias | kModBias) ? kOwn * kTileMixed : kOwn * kTileFull;
        return steps;
    }
    // Of a list those of a split; all others come from keys that are the split's already.
    OA_DEVICE void take_part(const SplitTile& t) {
        if (list == nullptr) return;
        const SplitPart part(count, t.split, t.num_splits);
        list += part.first;
        count = part.count;
    }
    OA_DEVICE int32 entry(int32 i) const { return list != nullptr ? __ldg(list + i) : (end - 1 - i) | kinds; }
    OA_DEVICE static int32 tile(int32 entry) { return entry & (kFirstGroup - 1); }
    OA_DEVICE static int32 kind(int32 entry, int32 group) { return uint32(entry) >> (kGroupShift + 2 * group) & 3; }
    // Bit 2g: warpgroup g's rows see a part of the tile.
    OA_DEVICE static uint32 mixed_groups(int32 entry) { return entry / kFirstGroup & 0x55; }

  private:
    // Without a list.
    template <typename Span>
    OA_DEVICE ListSteps(const ScoreModParams& f, const Span& keys)
        : list(nullptr),
          count(keys.end - keys.first),
          end(keys.end),
          kinds(f.flags & kModBias ? kAllGroups * kTileMixed : kAllGroups * kTileFull) {}
};

// The same, step by step, with the next step's entry already there: it comes from global memory. kListed: there may be
// a list; else entries are computed.
template <bool kListed>
class StepCursor {
  public:
    int32 left;  // steps from this one on

    // left: the same in all lanes, unknown to the compiler. Else it moves entries to uniform registers as soon as they
    // are loaded, and waits for them.
    OA_DEVICE explicit StepCursor(const ListSteps& steps)
        : left(steps.count + int32(opaque_zero())),
          list_end_(steps.list != nullptr ? steps.list + steps.count + 1 : nullptr),
          base_(steps.kinds + steps.end - steps.count - 1) {
        if (kListed) {
            entry_ = next_ = left > 0 ? steps.entry(0) : 0;
            load_next();
        }
    }
    // This step's, and the one's after it, if there are.
    OA_DEVICE int32 entry() const { return kListed ? entry_ : base_ + left; }
    OA_DEVICE int32 next() const { return kListed ? next_ : base_ + left - 1; }
    OA_DEVICE void advance() {
        --left;
        if (kListed) {
            entry_ = next_;
            load_next();
        }
    }

  private:
    const int32* list_end_;  // one behind it; null: no list
    int32 base_;  // of entries that are computed
    int32 entry_, next_;

    OA_DEVICE void load_next() {
        --next_;
        if (list_end_ != nullptr && left > 1) next_ = __ldg(list_end_ - left);
    }
};

// What scores are to be multiplied by: to natural-log units, to base 2.
struct ScoreFactors {
    float natural, base2;
};

// Softcap of a raw product that is small against the cap, in base 2: an odd polynomial of degree 7, relative error
// below 1e-6 up to cap_limit.
OA_DEVICE float cap_factor(const ScoreModParams& f, float s) {
    float z = s * s;
    return fmaf(fmaf(fmaf(f.cap_poly[3], z, f.cap_poly[2]), z, f.cap_poly[1]), z, f.cap_poly[0]);
}
// The largest absolute product of each row; NaN is passed over, it stays NaN either way.
template <int kScores>
OA_DEVICE void largest_products(const float (&s)[kScores], float (&top)[2]) {
    float tops[2][2] = {};  // four chains: one would wait for its own result at every step
#pragma unroll
    for (int i = 0; i < kScores; ++i) tops[i >> 1 & 1][i & 1] = fmaxf(tops[i >> 1 & 1][i & 1], fabsf(s[i]));
    top[0] = fmaxf(tops[0][0], tops[0][1]);
    top[1] = fmaxf(tops[1][0], tops[1][1]);
}
// Whether all products of a warp are below the cap.
template <int kScores>
OA_DEVICE bool below_cap(const float (&s)[kScores], const ScoreModParams& f) {
    float top[2];
    largest_products(s, top);
    return __all_sync(0xffffffffu, fmaxf(top[0], top[1]) <= f.cap_limit);
}
// Products below the cap to scores in base 2.
template <int kScores>
OA_DEVICE void cap_near_scores(float (&s)[kScores], const ScoreModParams& f) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= cap_factor(f, s[i]);
}
// Any products to tanh(cap_scale * product), which the cap is still to multiply.
template <int kScores>
OA_DEVICE void cap_scores(float (&s)[kScores], const ScoreModParams& f) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = tanh_any(s[i] * f.cap_scale);
}
// Softcap of a warp's products, by the cheaper of both where it is exact enough. Returns what the scores are to be
// multiplied by. near: whether exponentiate_near would do. own: see RowState::too_large.
template <int kScores>
OA_DEVICE ScoreFactors softcap_scores(float (&s)[kScores], const ScoreModParams& f, const bool (&own)[2], bool& near) {
    float tops[2];
    largest_products(s, tops);
    float top = fmaxf(own[0] ? tops[0] : 0.0f, own[1] ? tops[1] : 0.0f);
    near = __all_sync(0xffffffffu, top * top <= f.cap_near_limit);
    if (__all_sync(0xffffffffu, top <= f.cap_limit)) {
        cap_near_scores(s, f);
        return {kLn2, 1.0f};
    }
    cap_scores(s, f);
    return {f.factor, f.factor2};
}
// The shorter polynomial. Of one of its numbers the compiler knows nothing: else it has two in registers, and a
// multiply-add that reads three waits for their ports, which the products of other warps keep busy.
struct NearCap {
    float limit, c0, c1, c2;
    OA_DEVICE explicit NearCap(const ScoreModParams& f)
        : limit(f.cap_near_limit),
          c0(f.cap_near[0]),
          c1(__uint_as_float(__float_as_uint(f.cap_near[1]) | threadIdx.y)),  // which is 0
          c2(f.cap_near[2]) {}
};
// P of products far below the cap: as RowState::exponentiate, with softcap in the exponent, which costs three
// multiply-adds a score: an odd polynomial of degree 5, relative error below 1e-6 for squares up to cap.limit.
// top: bits of the largest square, NaN above all, of each row or (kTops = 1) of both; where it is larger, P is not for
// use.
template <int kScores, int kTops, typename Put>
OA_DEVICE void exponentiate_near(const float (&s)[kScores], const NearCap& cap, const float (&m2)[2], float (&sum)[2],
                                 int32 (&top)[kTops], Put put) {
    top[0] = top[kTops - 1] = 0;
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float p[2], z[2];
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                float score = s[4 * n + 2 * r + x];
                z[x] = score * score;
                float factor = fmaf(fmaf(z[x], cap.c2, cap.c1), z[x], cap.c0);
                p[x] = exp2_approx(fmaf(score, factor, -m2[r]));
            }
            int32& largest = top[r % kTops];
            largest = max_of(max_of(largest, __float_as_int(z[0])), __float_as_int(z[1]));  // one instruction
            sum[r] = n == 0 ? p[0] + p[1] : sum[r] + (p[0] + p[1]);
            put(n, r, p[0], p[1]);
        }
}

// Biases of this size at most are added in natural-log units, by one instruction: the exponent scores * log2(e) - base,
// rounded once, has to be exact to a small part of 1. Larger ones, and -inf, are added in base 2.
constexpr float kPlainBias = 8192.0f;
template <typename Io>
constexpr uint32 kPlainBiasBits = 0x4600;  // bf16
template <>
constexpr uint32 kPlainBiasBits<Half> = 0x7000;

// A score in base 2 with a bias: -inf hides the key whatever its score is, NaN included; a finite bias stays finite in
// base 2, as masks that add the lowest finite number are common.
OA_DEVICE float biased(float s, float factor2, float bias) {
    float sum = fmaf(s, factor2, max_nan(bias * kLog2e, 0.25f * kLowest));
    return bias == neg_inf() ? bias : sum;
}

// Adds biases of kPlainBias at most to scores: to natural-log units. bias(n, r): those of row r, columns 2(l%4) and
// 2(l%4) + 1 of block n.
template <int kScores, typename Bias>
OA_DEVICE void add_plain_biases(float (&s)[kScores], float natural, Bias bias) {
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float2 two = bias(n, r);
            float* at = s + 4 * n + 2 * r;
            at[0] = fmaf(at[0], natural, two.x);
            at[1] = fmaf(at[1], natural, two.y);
        }
}
// Adds any; scores are then in base 2.
template <int kScores, typename Bias>
OA_DEVICE void add_any_biases(float (&s)[kScores], float factor2, Bias bias) {
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float2 two = bias(n, r);
            float* at = s + 4 * n + 2 * r;
            at[0] = biased(at[0], factor2, two.x);
            at[1] = biased(at[1], factor2, two.y);
        }
}
// Either, by what a warp has. Returns what the scores are to be multiplied by in base 2. plain: all of this lane's
// biases are of kPlainBias at most.
template <int kScores, typename Bias>
OA_DEVICE float add_biases(float (&s)[kScores], ScoreFactors f, bool plain, Bias bias) {
    if (__all_sync(0xffffffffu, plain)) {
        add_plain_biases(s, f.natural, bias);
        return kLog2e;
    }
    add_any_biases(s, f.base2, bias);
    return 1.0f;
}

// Tiles of a bias in shared memory: rows of 128 bytes with the 128-byte swizzle, one panel of 64 keys in 16 bits, or
// two panels of 32 in 32 bits. rows: shared address of the warp's 16 rows; panel_bytes: from one panel to the next.
// This lane's biases, kBytes each: those of 16 bits come to registers, those of 32 bits are read at each use.
template <typename Io, int kBytes, int kScores>
class BiasTile;

template <typename Io, int kScores>
class BiasTile<Io, 2, kScores> {
  public:
    OA_DEVICE BiasTile(uint32 rows, uint32, int lane) {
        // Matrices of an ldmatrix: rows 0-7 and 8-15 of one block of 8 keys, then of the next.
        uint32 row = rows + ((lane >> 3 & 1) * 8 + (lane & 7)) * 128;
#pragma unroll
        for (int n = 0; n < kScores / 8; ++n) ldmatrix_x4(b_[n], row + (((2 * n + (lane >> 4)) ^ (lane & 7)) << 4));
    }
    // Whether all are of kPlainBias at most.
    OA_DEVICE bool is_plain() const {
        uint32 top = 0;
#pragma unroll
        for (int n = 0; n < kScores / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) top = max_u16x2(top, b_[n][i] & 0x7fff7fffu);
        return (top & 0xffffu) <= kPlainBiasBits<Io> && top >> 16 <= kPlainBiasBits<Io>;
    }
    OA_DEVICE float2 operator()(int n, int r) const { return unpack2(Io{}, b_[n >> 1][2 * (n & 1) + r]); }

  private:
    uint32 b_[kScores / 8][4];
};

template <typename Io, int kScores>
class BiasTile<Io, 4, kScores> {
  public:
    OA_DEVICE BiasTile(uint32 rows, uint32 panel_bytes, int lane)
        : at_(rows + (lane >> 2) * 128 + (lane & 1) * 8), panel_bytes_(panel_bytes), lane_(lane) {}
    OA_DEVICE bool is_plain() const {
        float top = 0.0f;
#pragma unroll
        for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float2 two = (*this)(n, r);
                top = max_nan(top, max_nan(fabsf(two.x), fabsf(two.y)));
            }
        return top <= kPlainBias;
    }
    OA_DEVICE float2 operator()(int n, int r) const {
        uint32 column = (2 * (n & 3) + (lane_ >> 1 & 1)) ^ (lane_ >> 2);
        return load_shared_float2(at_ + (n >> 2) * panel_bytes_ + r * 1024 + (column << 4));
    }

  private:
    uint32 at_, panel_bytes_;
    int lane_;
};

// Adds them to scores, kBytes each; returns as add_biases.
template <typename Io, int kBytes, int kScores>
OA_DEVICE float add_bias_tile(float (&s)[kScores], ScoreFactors f, uint32 rows, uint32 panel_bytes, int lane) {
    const BiasTile<Io, kBytes, kScores> tile(rows, panel_bytes, lane);
    return add_biases(s, f, tile.is_plain(), tile);
}

// One number a key. keys: shared address of the tile's. kAnySize: of the scores, which stay in base 2 then.
template <bool kAnySize = false, int kScores>
OA_DEVICE float add_key_bias(float (&s)[kScores], ScoreFactors f, uint32 keys, int lane) {
    float2 b[kScores / 4];
    float top = 0.0f;
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n) {
        b[n] = load_shared_float2(keys + (8 * n + 2 * (lane & 3)) * 4);
        top = max_nan(top, max_nan(fabsf(b[n].x), fabsf(b[n].y)));
    }
    return add_biases(s, f, !kAnySize && top <= kPlainBias, [&](int n, int) { return b[n]; });
}

// A bit for each of this thread's 32 scores that an additive mask does not hide by -inf, from memory: rows `row` and
// row + 8, keys from `key` on.
template <typename Io, typename Tile>
OA_DEVICE uint32 visible_bits(const AttnFwdParams& p, const Tile& t, int32 row, int32 key) {
    int64 head = t.sequence * p.mask_stride_b + head_of(t, row) * p.mask_stride_h;
    uint32 word = 0;
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
        int32 own = row + 8 * (i >> 1 & 1);
        // Of packed heads rows behind the last one are queries behind the mask's end.
        float value = neg_inf();
        if (own < p.mask_rows) value = mask_value<Io>(p, head, query_of(t, own), key + 8 * (i >> 2) + (i & 1));
        word |= uint32(value != neg_inf()) << i;
    }
    return word;
}

// word: of this thread.
template <int kScores>
OA_DEVICE void hide_by_bits(float (&s)[kScores], uint32 word) {
#pragma unroll
    for (int i = 0; i < kScores; ++i)
        if (!(word >> i & 1)) s[i] = neg_inf();
}
