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
    using Masks = MaskTiles<Config>;
    using Base::bars_;
    using Base::inner_at_;
    using Base::list_;
    using Base::outer_at_;
    using Base::p_;
    using Base::params_;

  public:
    using Base::Base;
    using typename Base::Span;

    // As ForwardProducer::copy_tile, of a list's tiles.
    OA_DEVICE void copy_tile(const TileOf<Config>& t, const Span& keys) {
        const ScoreForms& forms = params_.forms;
        const FormSteps steps = steps_of<Config>(forms, list_, t, keys);
        if (steps.count == 0) {
            bars_.outer.announce(outer_at_, 0);
            outer_at_.advance();
            return;
        }
        int32 kv_head = t.head_idx / (p_.num_q_heads / p_.num_kv_heads);
        this->copy_q(t, outer_at_.stage, bars_.outer.announce(outer_at_, Base::kQBytes));
        outer_at_.advance();
        int32 before = 0, entry = steps.entry(0);
#pragma unroll 1
        for (int32 i = 0; i <= steps.count; ++i) {
            bool has_k = i < steps.count, has_v = i > 0;
            int32 next = i + 1 < steps.count ? steps.entry(i + 1) : 0;  // one ahead: it comes from global memory
            uint32 mask_bytes = has_k && !Config::kVarlen ? Masks::bytes(forms, entry) : 0;
            uint32 bar = bars_.inner.acquire(inner_at_,
                                             (has_k ? this->k_bytes() + mask_bytes : 0) + (has_v ? Base::kVBytes : 0));
            if (has_v) this->copy_v(t, kv_head, before, inner_at_.stage, bar);
            if (has_k) this->copy_k(t, kv_head, FormSteps::tile(entry), inner_at_.stage, bar);
            if (mask_bytes != 0) Masks::copy(params_, t, entry, inner_at_.stage, bar);
            before = FormSteps::tile(entry);
            entry = next;
            inner_at_.advance();
        }
    }
};
