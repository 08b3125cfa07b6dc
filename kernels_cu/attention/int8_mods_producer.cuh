// The producer of attn_int8_sm90 with score modifications: copies by the steps of a list, masks beside K.
#pragma once
#include "attention/int8_roles.cuh"
#include "attention/mask_copies.cuh"
#include "attention/score_mods.cuh"
#include "params/attn_int8.cuh"

template <typename Config>
using WholeModsParams = typename Select<Config::kFactors, AttnFp8ModsFactorsSm90Params, AttnInt8ModsSm90Params>::Type;
template <typename Config>
using SplitModsParams =
    typename Select<Config::kFactors, AttnFp8SplitModsFactorsSm90Params, AttnInt8SplitModsSm90Params>::Type;
template <typename Config>
using ModsParams = typename Select<Config::kSplitKeys, SplitModsParams<Config>, WholeModsParams<Config>>::Type;

// The steps of a tile of queries; of a split, its part of them.
template <typename Config, typename Span>
OA_DEVICE ListSteps steps_of(const ScoreModParams& mods, const ListOf<Config>& list, const TileOf<Config>& t,
                             const Span& keys) {
    ListSteps steps(mods, t, keys, (t.m0 + int32(list.lead_rows)) / Config::kBlockM);
    if constexpr (Config::kSplitKeys) steps.take_part(t);
    return steps;
}

template <typename Config>
class Int8ModsProducer : public Int8Producer<Config, ModsParams<Config>, Int8ModsProducer<Config>> {
    using Base = Int8Producer<Config, ModsParams<Config>, Int8ModsProducer<Config>>;
    // Packed sequences have softcap alone, block masks nothing beside their lists.
    using Masks = typename Select<Config::kVarlen || Config::kBlocks, NoMaskTiles, MaskTiles<Config>>::Type;
    using Base::list_;
    using Base::params_;

  public:
    using Base::Base;
    using typename Base::Span;

    // As ForwardProducer::copy_tile, of a list's tiles.
    OA_DEVICE void copy_tile(const TileOf<Config>& t, const Span& keys) {
        this->template copy_listed<Masks, false>(params_, t, steps_of<Config>(params_.mods, list_, t, keys));
    }
};
