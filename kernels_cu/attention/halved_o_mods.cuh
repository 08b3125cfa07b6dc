// Softcap, masks, biases and a user's expressions in attn_fwd_d512_sm90 (entry/): what its producer is told of steps,
// and what its warpgroups do to their scores between Q K^T and the softmax (attention/score_mods.cuh).
//
// A step is two tiles of 64 keys, of which each CTA has one: any two that the mask leaves, neighbours in the list of a
// tile of queries. Of an odd number the last step has the same tile twice, which the second CTA's rows do not see.
// Bits and numbers of keys come from global memory, a word or two a lane, while S is multiplied: shared memory is full.
// Tiles of an additive mask come through the ring of K and V.
#pragma once
#include "attention/halved_o_storage.cuh"
#include "attention/score_mod.cuh"
#include "attention/score_mods.cuh"
#include "attention/warp_softmax.cuh"
#include "params/attn_fwd.cuh"
#include "params/mask_tiles.cuh"
#include "params/score_mod.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

// The tiles of keys of one step, with what the mask does to them: as entries of a list.
struct PairEntries {
    int32 of[kPair];
};
// The list of tiles of a tile of queries. In shared memory, as the producer is short of registers.
template <bool kVarlen, typename Params>
OA_DEVICE void hand_list(const Params& params, const FwdTile& t, HandedModsTile& to) {
    const KeyTiles<kQueries, kOwnKeys> keys(params.fwd, t);
    auto hand = [&](const ListSteps& steps) {
        to.list = steps.list;
        to.count = max_of(steps.count, 0);
        to.last = (steps.end - 1) | steps.kinds;
    };
    to.full_first = keys.full_first, to.full_end = keys.full_end;
    if constexpr (kVarlen) {
        hand(ListSteps::of_slot(params.mods, t, keys, first_slot(t.q_begin, t.sequence, kQueries) + t.m0 / kQueries));
    } else {
        hand(ListSteps(params.mods, t, keys, (t.m0 + int32(params.tiles.lead_rows)) / kQueries));
    }
}
// Of step i, counted from the last one.
OA_DEVICE PairEntries entries_of(const HandedModsTile& t, int32 i) {
    auto entry = [&](int32 at) { return t.list != nullptr ? __ldg(t.list + at) : t.last - at; };
    const int32 x = entry(2 * i);
    return {{x, 2 * i + 1 < t.count ? entry(2 * i + 1) : ListSteps::tile(x) | kAllGroups * kTileEmpty}};
}

// Without score modifications.
template <typename Config>
struct NoHalvedOMods {
    OA_DEVICE NoHalvedOMods(const typename Config::Params&, int32, int32) {}
};

// Of a warpgroup. tile: shared address of the HandedModsTile at hand; n: the step, as HandedTile counts.
template <typename Config>
class HalvedOMods {
    using Scores = float[kOwnKeys / 2];
    using Io = typename Config::Io;
    static constexpr int kBias = Config::kBiasBytes;

  public:
    OA_DEVICE HalvedOMods(const typename Config::Params& params, int32 group, int32 rank)
        : params_(params), group_(group), rank_(rank) {}

    OA_DEVICE static int32 entry(uint32 tile, int32 n, int32 rank) {
        return int32(load_shared(smem_addr_at(&HandedModsTile::entries, tile) + 8 * (n & 1) + 4 * rank));
    }
    // Under the products of S: the entry, and a word of bits, or of lane l the numbers of keys 2 l and 2 l + 1.
    OA_DEVICE void load(uint32 tile, int32 n, int32 lane) {
        const int32 x = entry(tile, n, rank_), full_first = of(tile, &HandedModsTile::full_first),
                    full_end = of(tile, &HandedModsTile::full_end);
        entry_ = ListSteps::tile(x) < full_first || ListSteps::tile(x) >= max_of(full_end, full_first) ? x | kEdge : x;
        if constexpr (kBias == 0) {
            const ScoreModParams& f = params_.mods;
            const int32 kind = ListSteps::kind(x, group_);
            beside_[0] = kind == kTileEmpty ? 0 : 0xffffffffu;
            if (!__any_sync(0xffffffffu, kind == kTileMixed && (f.flags & (kModBits | kModKeyBias)))) return;
            if (f.flags & kModBits) {
                const int64 head = of(tile, &HandedModsTile::sequence) * f.tiles_stride_b +
                                   of(tile, &HandedModsTile::head_idx) * f.tiles_stride_h;
                const int32 row = (of(tile, &HandedModsTile::m0) >> 6) + group_;
                beside_[0] = __ldg(static_cast<const uint32*>(f.tiles) + head + row * f.tiles_stride_m +
                                   ListSteps::tile(x) * 128 + (threadIdx.x & 127));
            } else {
                // Two keys of 64 a lane: the others are in the first-level cache then.
                const float2 two = __ldg(keys_of(tile, x) + lane);
                beside_[0] = __float_as_uint(two.x), beside_[1] = __float_as_uint(two.y);
            }
        }
    }

    // All modifications in their order. Returns what the scores are then to be multiplied by in base 2. row: of the
    // warp. bias, bias_panel: shared address of the warpgroup's rows of an additive mask's tile, and from its first 32
    // keys to the others of 32 bits. free: called when they have been read, where that is before the scores are there.
    template <typename Free>
    OA_DEVICE float apply(Scores& s, uint32 tile, int32 row, int32 lane, uint32 bias, uint32 bias_panel,
                          Free free) const {
        const ScoreModParams& f = params_.mods;
        const int32 kind = ListSteps::kind(entry_, group_), key = ListSteps::tile(entry_) * kOwnKeys;
        const bool is_edge = __any_sync(0xffffffffu, (entry_ & kEdge) != 0);
        ScoreFactors c{f.factor, f.factor2};
        if (f.flags & kModSoftcap) {
            bool own[2] = {true, true}, near;
            if constexpr (Config::kVarlen) {
                // Which polynomial is taken must not hang on the next sequence.
                if (is_edge) forget_keys(s, of(tile, &HandedModsTile::seqlen_k), key, lane);
#pragma unroll
                for (int r = 0; r < 2; ++r) own[r] = row + (lane >> 2) + 8 * r < of(tile, &HandedModsTile::seqlen_q);
            }
            c = softcap_scores(s, f, own, near);
        }
        if constexpr (kHasScoreMod) {
            const FwdTile t = lengths_of(tile);
            const ModPlace place{t, row + (lane >> 2), key + 2 * (lane & 3)};
            const bool hides = __any_sync(0xffffffffu, kind == kTileMixed || !(f.flags & kModUserTiles));
            if (is_edge) {
                modify_scores<true>(s, c.natural, params_.arrays, place, hides);
            } else {
                modify_scores<false>(s, c.natural, params_.arrays, place, hides);
            }
            c = {1.0f, kLog2e};
            // Else the softmax looks whether it has to be.
            if (kBias != 0 || (f.flags & kModKeyBias)) {
                to_base2(s);
                c = {kLn2, 1.0f};
            }
        }
        uint32 seen = 0xffffffffu;
        bool has_biases = kBias != 0;
        if constexpr (kBias != 0) {
            const BiasTile<Io, kBias, kOwnKeys / 2> biases(bias + ((threadIdx.x >> 5) & 3) * 16 * 128, bias_panel,
                                                           lane);
            if constexpr (kBias == 2) {
                const bool is_plain = __all_sync(0xffffffffu, biases.is_plain());
                free();
                c.base2 = add_biases(s, c, is_plain, biases);
            } else {
                // To look at them first would be to read them twice.
                add_any_biases(s, c.base2, biases);
                c.base2 = 1.0f;
            }
            if (kind == kTileEmpty) seen = 0;
        } else if (__any_sync(0xffffffffu, (f.flags & kModKeyBias) && kind == kTileMixed)) {
            c.base2 = add_key_biases(s, c, tile, lane);
            has_biases = true;
        } else {
            seen = beside_[0];
        }
        if (!kHasScoreMod && !has_biases && (f.flags & kModScaled)) {
            const float by = c.base2;
#pragma unroll
            for (int i = 0; i < kOwnKeys / 2; ++i) s[i] *= by;
            c.base2 = 1.0f;
        }
        if (__any_sync(0xffffffffu, seen != 0xffffffffu)) hide_by_bits(s, seen);
        if (is_edge) mask_edges_by_bits(s, params_.fwd, lengths_of(tile), row, key, lane);
        return c.base2;
    }

  private:
    static constexpr int32 kEdge = 1 << 30;  // beside an entry: rows see a part of the tile's keys

    OA_DEVICE static FwdTile lengths_of(uint32 tile) {
        FwdTile t;
        t.sequence = of(tile, &HandedModsTile::sequence), t.head_idx = of(tile, &HandedModsTile::head_idx);
        t.seqlen_q = of(tile, &HandedModsTile::seqlen_q), t.seqlen_k = of(tile, &HandedModsTile::seqlen_k);
        return t;
    }
    OA_DEVICE static int32 of(uint32 tile, int32 HandedModsTile::* member) {
        return int32(load_shared(smem_addr_at(member, tile)));
    }
    // Numbers of the keys of a tile.
    OA_DEVICE const float2* keys_of(uint32 tile, int32 x) const {
        const ScoreModParams& f = params_.mods;
        const int64 head = of(tile, &HandedModsTile::sequence) * f.tiles_stride_b +
                           of(tile, &HandedModsTile::head_idx) * f.tiles_stride_h;
        return reinterpret_cast<const float2*>(static_cast<const float*>(f.tiles) + head +
                                               ListSteps::tile(x) * kOwnKeys);
    }
    OA_DEVICE float add_key_biases(Scores& s, ScoreFactors c, uint32 tile, int32 lane) const {
        const float first = __uint_as_float(beside_[0]), second = __uint_as_float(beside_[1]);
        const bool is_plain = max_nan(fabsf(first), fabsf(second)) <= kPlainBias;
        const float2* const keys = keys_of(tile, entry_) + (lane & 3);
        float2 b[kOwnKeys / 8];
#pragma unroll
        for (int n = 0; n < kOwnKeys / 8; ++n) b[n] = __ldg(keys + 4 * n);
        return add_biases(s, c, is_plain, [&](int n, int) { return b[n]; });
    }

    const typename Config::Params& params_;
    const int32 group_, rank_;
    int32 entry_;
    uint32 beside_[2];
};
