// What happens to the scores of one tile between Q K^T and the softmax, in one warpgroup's rows. In two ways: what is
// common, prepared while the products run, and everything else.
#pragma once
#include "attention/mask.cuh"
#include "attention/mask_copies.cuh"
#include "attention/score_mods.cuh"
#include "attention/score_mod.cuh"
#include "attention/warp_softmax.cuh"
#include "params/attn_fwd.cuh"
#include "params/mask_tiles.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

// Config: as for MaskTiles, and kSoftcap, kVarlen, kLists, kSplitKeys, Io.
template <typename Config>
class TileScoreMods {
    using Masks = MaskTiles<Config>;
    using Scores = float[Config::kBlockN / 2];
    static constexpr int kBias = Config::kBiasBytes;
    using Bias = BiasTile<typename Config::Io, kBias, Config::kBlockN / 2>;

  public:
    // The common loop takes softcap into the exponent (exponentiate_near); else it calls apply().
    static constexpr bool kNearCap = Config::kSoftcap && kBias == 0 && !kHasScoreMod;
    // apply() is exact enough for some bases of the softmax only.
    static constexpr bool kMindsBase = kBias != 0 || kHasScoreMod;
    // apply() reads the stage.
    static constexpr bool kReadsLate = kBias != 0;
    // All tiles of a call are of one kind, and a mask has no bits for keys beyond the end.
    static constexpr bool kOneKind = !Config::kVarlen && !Config::kLists;
    int32 kind;

    // The steps of a tile of queries.
    template <typename Tile, typename Span>
    OA_DEVICE static ListSteps steps_of(const ScoreModParams& mods, const TileList& list, const Tile& t,
                                        const Span& keys) {
        if constexpr (Config::kVarlen && Config::kLists) {
            int32 first = first_slot(t.q_begin, t.sequence, Config::kBlockM);
            return ListSteps::of_slot(mods, t, keys, first + t.m0 / Config::kBlockM);
        } else if constexpr (!Config::kVarlen && !Config::kLists) {
            return ListSteps::unlisted<Config::kConsumers>(mods, keys);
        } else {
            ListSteps steps(mods, t, keys, (t.m0 + int32(list.lead_rows)) / Config::kBlockM);
            if constexpr (Config::kSplitKeys) steps.take_part(t);
            return steps;
        }
    }
    // Kinds of tiles, a bit each, whose scores may be common.
    OA_DEVICE static uint32 common_kinds(const ScoreModParams& f) {
        constexpr uint32 kFull = 1 << kTileFull, kMixed = 1 << kTileMixed;
        if (kMindsBase && (f.flags & kModSoftcap)) return 0;
        if (kBias != 0) return kFull | kMixed;
        if (kHasScoreMod) return f.flags & kModKeyBias ? kFull : kFull | kMixed;
        if (f.flags & kModScaled) return 0;
        if (Config::kSoftcap) return f.flags & kModSoftcap ? kFull : 0;
        return f.flags & kModBits ? kFull | kMixed : kFull;
    }

    // Of a tile of queries.
    OA_DEVICE TileScoreMods(const ScoreModParams& f, const ListSteps& steps) {
        if constexpr (kOneKind) judge(f, steps.kinds, 0);
    }
    // Hides keys of tile n0 .. that do not exist or are not in the window.
    template <typename Tile>
    OA_DEVICE static void mask_ends(Scores& s, const AttnFwdParams& p, const Tile& t, int32 warp_row, int32 n0,
                                    int32 lane) {
        if constexpr (kOneKind) {
            mask_edges_by_bits(s, p, t, warp_row, n0, lane);
        } else {
            mask_edges(s, p, t, warp_row, n0, lane);
        }
    }
    // Whether the mask hides what lies beyond the sequence's end, and no window does.
    OA_DEVICE static bool hides_edges(const AttnFwdParams& p, const ScoreModParams& f) {
        return kOneKind && (f.flags & (kModBits | kModKeyBias)) && (p.window_left & p.window_right) < 0;
    }
    // Of the tile in `stage`, which is full.
    OA_DEVICE void load(const ScoreModParams& f, int32 entry, int32 stage, int32 group) {
        if constexpr (!kOneKind) judge(f, entry, group);
        if (kBias == 0 && !kNearCap) bits_ = Masks::word(stage, group);
    }
    // Something of what load() has loaded of the stage, for PersistentConsumer::release_inner.
    OA_DEVICE uint32 loaded() const { return kBias == 0 && !kNearCap ? bits_ : 0; }
    // Whether apply() is exact enough for rows of this base. Scores far below it vanish whatever they are rounded to,
    // others are near to it or are reported by their sum. own: see RowState::too_large.
    OA_DEVICE static bool is_common(const float (&m2)[2], const bool (&own)[2]) {
        constexpr float kMost = kBias != 0 ? kPlainBias : kPlainModified;
        float top = max_nan(own[0] ? fabsf(m2[0]) : 0.0f, own[1] ? fabsf(m2[1]) : 0.0f);
        return !kMindsBase || top <= kMost;
    }
    // Returns what scores are to be multiplied by in base 2. place: of this lane's scores, none beyond the sequences.
    // used: gets something of what this loads of the stage.
    template <typename Params>
    OA_DEVICE float apply(const Params& params, Scores& s, const ModPlace& place, int32 stage, int32 group, int32 lane,
                          uint32& used) const {
        const ScoreModParams& f = params.mods;
        if constexpr (kHasScoreMod) modify_scores<false>(s, f.factor, params.arrays, place, hides(f));
        if constexpr (kBias != 0) {
            float natural = kHasScoreMod ? 1.0f : f.factor;
            add_plain_biases(s, natural, Noted{Bias(rows(stage, group), Masks::kPanelBytes, lane), used});
            return kLog2e;
        } else if constexpr (kHasScoreMod) {
            if (cut_) hide_by_bits(s, bits_);
            return kLog2e;
        } else {
            if (cut_) hide_by_bits(s, bits_);
            return f.factor2;
        }
    }

    // Before the base is raised to scores of apply(): brings them to base 2, where the largest is the base exactly, and
    // hides keys that -inf hides although their product is NaN.
    template <typename Tile>
    OA_DEVICE static void refine(Scores& s, const AttnFwdParams& p, const Tile& t, const ModPlace& place,
                                 const float (&sum)[2]) {
        if constexpr (kBias != 0) {
            if (__any_sync(0xffffffffu, isnan(sum[0] + sum[1])))
                hide_by_bits(s, visible_bits<typename Config::Io>(p, t, place.row, place.key));
        }
        if constexpr (kHasScoreMod) {
            to_base2(s);
        } else {
#pragma unroll
            for (int i = 0; i < Config::kBlockN / 2; ++i) s[i] *= kLog2e;
        }
    }

    // All of them, in their order. release: gives the stage back; called when the warp has read it, with something of
    // each load that nothing has waited for. own: see RowState::too_large. near: set to whether the common loop's
    // softcap would do.
    template <typename Params, typename Release>
    OA_DEVICE float apply_mods(const Params& params, Scores& s, const ModPlace& place, int32 stage, int32 group,
                               int32 lane, const bool (&own)[2], bool& near, Release release) const {
        const ScoreModParams& f = params.mods;
        uint32 bits = kBias != 0 || !cut_ ? 0xffffffffu : kNearCap ? Masks::word(stage, group) : bits_;
        bool key_bias = kBias == 0 && kind == kTileMixed && (f.flags & kModKeyBias);
        // All lanes have the same. Of packed sequences the compiler does not know it without a vote, and rings that
        // advance behind the branches below would leave uniform registers.
        if constexpr (Config::kVarlen && kBias == 0) key_bias = __any_sync(0xffffffffu, key_bias);
        if (kBias == 0 && !key_bias) release(bits);
        ScoreFactors c{f.factor, f.factor2};
        if (Config::kSoftcap && (f.flags & kModSoftcap)) c = softcap_scores(s, f, own, near);
        if constexpr (kHasScoreMod) {
            modify_scores<true>(s, c.natural, params.arrays, place, hides(f));
            to_base2(s);
            c = {kLn2, 1.0f};
        }
        if constexpr (kBias != 0) {
            const Bias bias(rows(stage, group), Masks::kPanelBytes, lane);
            float base2 = 1.0f;
            uint32 used = 0;
            if constexpr (kOneKind && kBias == 2) {
                base2 = add_biases(s, c, bias.is_plain(), bias);  // by a vote on all
            } else {
                add_any_biases(s, c.base2, Noted{bias, used});
            }
            release(used);
            return base2;
        }
        if (key_bias) {
            if constexpr (kHasScoreMod) {
                const uint32 keys = Masks::at(stage) + 8 * (lane & 3);
                uint32 used = 0;
                add_any_biases(s, c.base2, [&](int n, int) {
                    const float2 two = load_shared_float2(keys + 32 * n);
                    used |= __float_as_uint(two.x);
                    return two;
                });
                release(used);
                return 1.0f;
            }
            float base2 = add_key_bias(s, c, Masks::at(stage), lane);
            release(0);  // behind a vote on all biases
            return base2;
        }
        if (!kHasScoreMod && (f.flags & kModScaled)) {
#pragma unroll
            for (int i = 0; i < Config::kBlockN / 2; ++i) s[i] *= c.base2;
            c.base2 = 1.0f;
        }
        if (cut_) hide_by_bits(s, bits);
        return c.base2;
    }

  private:
    // Biases of which `used` gets something of each load. (Of the scores, ptxas would make products wait for each
    // other.)
    struct Noted {
        Bias of;
        uint32& used;
        OA_DEVICE float2 operator()(int n, int r) const {
            const float2 two = of(n, r);
            if (kBias == 4 || (n % 2 == 0 && r == 0)) used |= __float_as_uint(two.x);  // ldmatrix: of two n and r
            return two;
        }
    };
    OA_DEVICE void judge(const ScoreModParams& f, int32 entry, int32 group) {
        kind = ListSteps::kind(entry, group);
        cut_ = kBias == 0 && kind == kTileMixed && (f.flags & kModBits);
    }
    uint32 bits_;
    bool cut_;  // bits hide a part

    // Whether the user's mask expression has something to say.
    OA_DEVICE bool hides(const ScoreModParams& f) const { return kind == kTileMixed || !(f.flags & kModUserTiles); }
    // Of the warp's biases.
    OA_DEVICE static uint32 rows(int32 stage, int32 group) {
        return Masks::at(stage) + (group * 64 + ((threadIdx.x >> 5) & 3) * 16) * 128;
    }
};
