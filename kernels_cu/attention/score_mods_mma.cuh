// Softcap, masks and biases on scores in accumulators of mma.sync, between Q K^T and the softmax:
//
//   S = softmax_scale * Q K^T;  S = softcap * tanh(S / softcap);  S += mask, or S = -inf where it hides a key
#pragma once
#include "attention/mask.cuh"
#include "attention/mask_slots.cuh"
#include "attention/score_mods.cuh"
#include "attention/score_mod.cuh"
#include "params/attn_fwd.cuh"
#include "params/mask_tiles.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "tile/four_keys.cuh"

// One by one, for attn_int8_sm80.
template <typename Io>
class ElementMods {
  public:
    OA_DEVICE ElementMods(const AttnFwdParams& p, const FwdTile& t)
        : p_(p),
          t_(t),
          head_offset_(t.batch_idx * p.mask_stride_b + t.head_idx * p.mask_stride_h),
          inv_softcap_(p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f) {}

    // score: softmax_scale * q.k, natural-log units. Returns base-2 units; -inf for a masked key.
    OA_DEVICE float apply(float score, int32 row, int32 key) const {
        if (p_.softcap > 0.0f) score = p_.softcap * tanh_any(score * inv_softcap_);
        if (p_.mask_kind != kMaskNone) {
            bool inside = row < t_.seqlen_q && key < t_.seqlen_k;
            float bias = inside ? mask_value<Io>(p_, head_offset_, row, key) : neg_inf();
            // A masked key does not count whatever its score is, NaN included.
            score = bias == neg_inf() ? neg_inf() : score + bias;
        }
        float score2 = score * kLog2e;
        // A finite score stays one: masks that add the lowest finite number are common.
        return score2 == neg_inf() && score != neg_inf() ? 0.5f * kLowest : score2;
    }

  private:
    const AttnFwdParams& p_;
    const FwdTile& t_;
    int64 head_offset_;
    float inv_softcap_;
};

// A warp's tile of kMTiles * 16 rows and kBlockN keys, which lie in the order of FourKeys.
template <typename Config>
class TileMods {
  public:
    using Scores = float[Config::kMTiles][Config::kNTiles * 4];
    using Io = typename Config::Io;
    using Slots = MaskSlots<Config>;
    using Tile = typename Slots::Tile;
    static constexpr int kRows = Slots::kRows, kGroups = Slots::kGroups;

    // What happens to scores. Raw products come in; returns what they are to be multiplied by in base 2. n: tile of
    // keys; kind: what the mask does to the warp's rows there. The newest group of copies is not the mask's.
    // arrays: of the user's score modification, or null.
    OA_DEVICE static float apply(Scores& s, const AttnFwdParams& p, const ScoreModParams& f,
                                 const ScoreModArrays* arrays, const Tile& t, const Slots& slots, int32 n, int32 kind,
                                 int32 warp_row, int lane) {
        ScoreFactors c{f.factor, f.factor2};
        if (f.flags & kModSoftcap) c = cap(s, f);
        if (f.flags & kModScaled) c = scale(s, c);
        if constexpr (kHasScoreMod) {
            modify(s, c.natural, *arrays, t, n, warp_row, lane, kind == kTileMixed || !(f.flags & kModUserTiles));
            c = {kLn2, 1.0f};
        }
        if (kind == kTileEmpty && (f.flags & kModUserTiles)) {
#pragma unroll
            for (int x = 0; x < int(sizeof(Flat) / sizeof(float)); ++x) flat(s)[x] = neg_inf();
        } else if (kind != kTileFull && p.mask_kind != kMaskNone) {
            cp_async_wait<1>();
            if (slots.source() == Slots::kBits) {
                hide_by_bits(s, slots, n, kind, lane);
            } else if (slots.source() == Slots::kKeys) {
                c.base2 = add_keys(s, c, slots, kind);
            } else {
                c.base2 = read_mask(s, p, c, slots, n, warp_row, lane);
            }
        }
        return c.base2;
    }

    // Calls see(score, row, key) for every score.
    template <typename See>
    OA_DEVICE static void for_each(Scores& s, int32 n, int32 warp_row, int lane, See see) {
        int32 row = warp_row + (lane >> 2), key = n * Config::kBlockN + FourKeys::of_lane(lane);
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
            for (int x = 0; x < Config::kNTiles * 4; ++x)
                see(s[i][x], row + 16 * i + 8 * (x >> 1 & 1), key + FourKeys::of(x >> 2, x & 1));
    }

  private:
    // Scores to the user's, in base 2. hide: the mask expression has something to say.
    OA_DEVICE static void modify(Scores& s, float natural, const ScoreModArrays& arrays, const Tile& t, int32 n,
                                 int32 warp_row, int lane, bool hide) {
        for_each(s, n, warp_row, lane, [&](float& score, int32 row, int32 key) {
            // Within the sequence: the user's arrays need not reach further.
            row = max_of(min_of(row, t.seqlen_q - 1), 0);
            const int32 head = head_of(t, row);
            ScorePosition q = score_position(query_of(t, row));
            ScorePosition k = score_position(min_of(key, t.seqlen_k - 1));
            score = user_score(score * natural, t.sequence, head, q, k, arrays);
            if (kHasScoreMask && hide && !user_mask(t.sequence, head, q, k, arrays)) score = neg_inf();
        });
        to_base2(flat(s));
    }

    OA_DEVICE static ScoreFactors cap(Scores& s, const ScoreModParams& f) {
        if (below_cap(flat(s), f)) {
            cap_near_scores(flat(s), f);
            return {kLn2, 1.0f};
        }
        cap_scores(flat(s), f);
        return {f.factor, f.factor2};
    }

    // A factor that cannot wait for the exponent is applied here.
    OA_DEVICE static ScoreFactors scale(Scores& s, ScoreFactors c) {
#pragma unroll
        for (int x = 0; x < int(sizeof(Flat) / sizeof(float)); ++x) flat(s)[x] *= c.base2;
        return {kLn2, 1.0f};
    }

    OA_DEVICE static void hide_by_bits(Scores& s, const Slots& slots, int32 n, int32 kind, int lane) {
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) {
            uint2 w = kind == kTileMixed ? slots.bits(i, n, lane) : make_uint2(0, 0);
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int x = 0; x < 4; ++x)
                        if (!((m ? w.y : w.x) >> (8 * g + x) & 1)) s[i][8 * g + 4 * m + x] = neg_inf();
        }
    }

    // All scores of the lane, as one block after another.
    using Flat = float[Config::kMTiles * Config::kNTiles * 4];
    OA_DEVICE static Flat& flat(Scores& s) { return reinterpret_cast<Flat&>(s); }

    // bias(row, n): of two scores.
    template <typename Bias>
    OA_DEVICE static float add(Scores& s, ScoreFactors c, bool plain, Bias bias) {
        // The user's scores may be of any size: they stay in base 2.
        return add_biases(flat(s), c, plain && !kHasScoreMod, [&](int block, int r) {
            return bias(2 * (block / Config::kNTiles) + r, block % Config::kNTiles);
        });
    }

    OA_DEVICE static float add_keys(Scores& s, ScoreFactors c, const Slots& slots, int32 kind) {
        float2 b[kGroups][2];
        float top = 0.0f;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            float4 w = slots.numbers(0, g);
            if (kind != kTileMixed) w.x = w.y = w.z = w.w = neg_inf();
            b[g][0] = make_float2(w.x, w.y);
            b[g][1] = make_float2(w.z, w.w);
#pragma unroll
            for (int m = 0; m < 2; ++m) top = max_nan(top, max_nan(fabsf(b[g][m].x), fabsf(b[g][m].y)));
        }
        return add(s, c, top <= kPlainBias, [&](int, int n) { return b[n >> 1][n & 1]; });
    }

    OA_DEVICE static float read_mask(Scores& s, const AttnFwdParams& p, ScoreFactors c, const Slots& slots, int32 n,
                                     int32 warp_row, int lane) {
        slots.settle(n);
        if (p.mask_kind == kMaskBool) {
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
                    uint32 w = slots.bytes(r, g);
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
                        float& score = s[r >> 1][8 * g + 4 * (x >> 1) + 2 * (r & 1) + (x & 1)];
                        if ((w & 0xffu << 8 * x) == 0) score = neg_inf();
                    }
                }
        } else if (p.mask_kind == kMaskFloat) {
            // Read twice: there are no registers for 32 numbers.
            float top = 0.0f;
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
                    float4 w = slots.numbers(r, g);
                    top = max_nan(top, max_nan(max_nan(fabsf(w.x), fabsf(w.y)), max_nan(fabsf(w.z), fabsf(w.w))));
                }
            c.base2 = add(s, c, top <= kPlainBias, [&](int row, int n) { return slots.two_numbers(row, n); });
        } else {
            uint2 w[kRows][kGroups];
            uint32 tops[kRows] = {};  // chains of their own
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
                    w[r][g] = slots.halves(r, g);
                    tops[r] = max_abs2(Io{}, max_abs2(Io{}, tops[r], w[r][g].x), w[r][g].y);
                }
            uint32 top = tops[0];
#pragma unroll
            for (int r = 1; r < kRows; ++r) top = max_abs2(Io{}, top, tops[r]);
            bool plain = (top & 0xffffu) <= kPlainBiasBits<Io> && top >> 16 <= kPlainBiasBits<Io>;
            c.base2 = add(s, c, plain, [&](int row, int n) {
                uint2 x = w[row][n >> 1];
                return unpack2(Io{}, n & 1 ? x.y : x.x);
            });
        }
        // Of packed sequences the mask may be too small.
        if (n * Config::kBlockN > p.mask_cols - Config::kBlockN || warp_row + 8 * kRows > p.mask_rows)
            for_each(s, n, warp_row, lane, [&](float& score, int32 row, int32 key) {
                if (row >= p.mask_rows || key >= p.mask_cols) score = neg_inf();
            });
        return c.base2;
    }
};
