// The producer of attn_int8_sm90 with forms: copies by the steps of a list, masks beside K.
#pragma once
#include "attention/int8_roles.cuh"
#include "attention/mask_copies.cuh"
#include "attention/score_forms.cuh"
#include "params/attn_int8.cuh"

template <typename Config>
using WholeFormsParams =
    typename Select<Config::kFactors, AttnFp8FormsFactorsSm90Params, AttnInt8FormsSm90Params>::Type;
template <typename Config>
using SplitFormsParams =
    typename Select<Config::kFactors, AttnFp8SplitFormsFactorsSm90Params, AttnInt8SplitFormsSm90Params>::Type;
template <typename Config>
using FormsParams = typename Select<Config::kSplitKeys, SplitFormsParams<Config>, WholeFormsParams<Config>>::Type;

// The steps of a tile of queries; of a split, its part of them.
template <typename Config, typename Span>
OA_DEVICE FormSteps steps_of(const ScoreForms& forms, const ListOf<Config>& list, const TileOf<Config>& t,
                             const Span& keys) {
    FormSteps steps(forms, t, keys, (t.m0 + int32(list.lead_rows)) / Config::kBlockM);
    if constexpr (Config::kSplitKeys) steps.take_part(t);
    return steps;
}

template <typename Config>
class Int8FormsProducer : public Int8Producer<Config, FormsParams<Config>, Int8FormsProducer<Config>> {
    using Base = Int8Producer<Config, FormsParams<Config>, Int8FormsProducer<Config>>;
    // Packed sequences have softcap alone.
    using Masks = typename Select<Config::kVarlen, NoMaskTiles, MaskTiles<Config>>::Type;
    using Base::list_;
    using Base::params_;

  public:
    using Base::Base;
    using typename Base::Span;

    // As ForwardProducer::copy_tile, of a list's tiles.
    OA_DEVICE void copy_tile(const TileOf<Config>& t, const Span& keys) {
        this->template copy_listed<Masks, false>(params_, t, steps_of<Config>(params_.forms, list_, t, keys));
    }
};
