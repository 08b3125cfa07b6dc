// The roles of attn_int8_sm90 with forms: steps of a list, scores that something is done to.
//
// Each step takes the fastest way that its tile leaves (attention/int8_forms.cuh). Barriers, products and two-level sums
// are those of the plain kernel (entry/attn_int8_sm90.cu).
#pragma once
#include "attention/int8_forms.cuh"
#include "attention/int8_roles.cuh"
#include "attention/mask_copies.cuh"
#include "params/attn_int8.cuh"

template <typename Config>
class Int8FormsProducer : public Int8Producer<Config, AttnInt8FormsSm90Params, Int8FormsProducer<Config>> {
    using Base = Int8Producer<Config, AttnInt8FormsSm90Params, Int8FormsProducer<Config>>;
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
    OA_DEVICE void copy_tile(const FwdTile& t, const Span& keys) {
        const ScoreForms& forms = params_.forms;
        const FormSteps steps(forms, t, keys, (t.m0 + int32(list_.lead_rows)) / Config::kBlockM);
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
            uint32 bar = bars_.inner.acquire(inner_at_, (has_k ? this->k_bytes() + mask_bytes : 0) + (has_v ? Base::kVBytes : 0));
            if (has_v) this->copy_v(t, kv_head, before, inner_at_.stage, bar);
            if (has_k) this->copy_k(t, kv_head, FormSteps::tile(entry), inner_at_.stage, bar);
            if (mask_bytes != 0) Masks::copy(params_, t, entry, inner_at_.stage, bar);
            before = FormSteps::tile(entry);
            entry = next;
            inner_at_.advance();
        }
    }
};

template <typename Config>
class Int8FormsConsumer : public Int8Consumer<Config, AttnInt8FormsSm90Params, Int8FormsConsumer<Config>> {
    using Base = Int8Consumer<Config, AttnInt8FormsSm90Params, Int8FormsConsumer<Config>>;
    using Tile = Int8Tile<Config>;
    using Scores = typename Tile::Scores;
    using Masks = MaskTiles<Config>;
    using Packer = E4m3Packer<Config::kBlockN / 32, Config::kLse>;
    using Base::group_;
    using Base::inner_at_;
    using Base::k_;
    using Base::lane_;
    using Base::list_;
    using Base::outer_at_;
    using Base::p_;
    using Base::params_;
    using Base::ping_pong_;
    using Base::v_;
    // Tiles that nothing is done to, or bits, go to the exponentials as integers.
    static constexpr bool kIntegers = !Config::kSoftcap && Config::kBiasBytes == 0;
    static constexpr bool kSeries = Config::kSoftcap && Config::kBiasBytes == 0;

  public:
    using Base::Base;
    using typename Base::Rows;
    using typename Base::Span;

    // All steps of a tile of queries. Each step takes the fastest way that its tile leaves
    // (attention/int8_forms.cuh).
    OA_DEVICE void attend_tile(const FwdTile& t, const Span& keys, int32 warp_row, Rows& state) {
        const ScoreForms& forms = params_.forms;
        const FormSteps steps(forms, t, keys, (t.m0 + int32(list_.lead_rows)) / Config::kBlockM);
        if (steps.count == 0) {
            this->wait_outer();
            this->release_outer();
            return;
        }
        const int32 own_end = this->own_end_of(t, keys);
        int32 i = 0;
#pragma unroll 1
        for (; i < steps.count && FormSteps::tile(steps.entry(i)) >= own_end; ++i) this->pass_over_step();
        if (i == steps.count) {
            this->wait_inner();
            this->release_inner();
            this->wait_outer();
            this->release_outer();
            return;
        }
        const bool own[2] = {!Config::kVarlen || warp_row + (lane_ >> 2) < t.seqlen_q,
                             !Config::kVarlen || warp_row + (lane_ >> 2) + 8 < t.seqlen_q};
        const bool capped = Config::kSoftcap && (forms.forms & kFormSoftcap);
        // Whether a tile that the mask leaves as it is goes to the exponentials as integers; or, with softcap, as a
        // series in them.
        const bool plain = !this->has_delta() && !(forms.forms & kFormScaled);
        float q_scale = this->scale_of_queries(t, warp_row);
        float row_shift[2] = {0.0f, 0.0f};
        CapRow cap[2];
        if (capped) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                row_shift[r] = row_bias_of(p_, params_.operands, t, warp_row + (lane_ >> 2) + 8 * r);
                if (kSeries) cap[r] = CapRow(row_shift[r], forms);
            }
        }
        typename Tile::Queries q;
        RowState<PRange>& rows = state.softmax;
        Scores s;  // as floats once `formed`
        typename Tile::Probabilities probs, fresh;
        const uint32 zero = opaque_zero();
        typename Tile::RowSums sums = {};
        float alpha[2], sum[2], scale, factor = 1.0f;
        bool is_full = false, formed = false;
        int32 entry = steps.entry(i), seed = 0;

        // S(i), and A += P(i - 1) V(i - 1), which is still running at the end.
        auto products = [&] {
            scale = this->scale_of_tile(q_scale, FormSteps::tile(entry));
            ping_pong_.wait();
            Tile::issue_qk(s, q, k_.next(inner_at_.stage * Tile::kKBytes));
            Tile::issue_pv(state.acc, sums, probs, v_.next(inner_at_.stage * Tile::kKBytes));
            ping_pong_.pass_on();
            wgmma_wait<1>();
            wgmma_pin(s);
        };
        auto finish_pv = [&] {
            wgmma_wait<0>();
            wgmma_pin(state.acc);
            wgmma_pin(sums);
#pragma unroll
            for (int k = 0; k < Config::kBlockN / 32; ++k) wgmma_pin(probs[k]);
            rows.l[0] += sums[0];
            rows.l[1] += sums[2];
        };
        auto renew_probs = [&] {
#pragma unroll
            for (int k = 0; k < Config::kBlockN / 32; ++k)
#pragma unroll
                for (int x = 0; x < 4; ++x) probs[k][x] = copy_of(fresh[k][x], zero);
        };
        auto release_stage = [&] {
            __syncwarp();
            this->release_inner();
            is_full = this->is_inner_full();
        };
        auto base2_scale = [&] { return scale_without_rounding(scale * (p_.softmax_scale * kLog2e)); };
        auto exponentiate_integers = [&] {
            sum[0] = sum[1] = 0.0f;
            const float both = base2_scale(), c[2] = {both, both};
            rows.exponentiate_in_order<false, Config::kByRow>(s, c, Packer{{fresh, {}}, sum});
        };
        auto exponentiate_floats = [&] {
            sum[0] = sum[1] = 0.0f;
            const float c[2] = {factor, factor};
            float f[Config::kNTiles * 4];
            floats_of(s, f);
            rows.exponentiate_in_order<false, Config::kByRow>(f, c, Packer{{fresh, {}}, sum});
        };
        // Softcap of a tile whose scores are near; whether they were.
        auto exponentiate_series = [&]() -> bool {
            if constexpr (kSeries) {
                const CapSeries series(cap, scale * forms.cap_scale);
                seed = series.seed;
                if (!series.take(s)) return false;
                sum[0] = sum[1] = 0.0f;
                const float none[2] = {};
                rows.exponentiate_in_order<false, Config::kByRow>(s, none, Packer{{fresh, {}}, sum}, series);
            }
            return kSeries;
        };
        auto form = [&](uint32 bits) {
            factor = form_scores(s, t, keys, warp_row, entry, scale, row_shift, seed, bits);
            formed = true;
        };
        // Of this lane's rows, as in the plain kernel.
        auto is_too_large = [&] {
            uint32 signs[2];
            past_largest(fresh, signs);
            return (((own[0] ? signs[0] : 0) | (own[1] ? signs[1] : 0)) & kSigns) != 0 ||
                   (kIntegers && !formed && base2_scale() > kCoarseScale);
        };
        // Of scores as they are, hidden ones hidden: what they were made of may have left shared memory.
        auto redo = [&] {
            if (!formed) {
                if (capped) {
                    form(0xffffffffu);
                } else {
                    make_base2(s, base2_scale());
                    factor = 1.0f;
                }
            }
            {
                float f[Config::kNTiles * 4];
                floats_of(s, f);
                raise_on_grid(rows, f, factor, alpha);
            }
            rescale(state.acc, alpha);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                state.shrink[r] *= alpha[r];
                state.lse_sum[r] *= alpha[r];
            }
            exponentiate_floats();
            renew_probs();
        };
        auto add = [&] {
            if (!Config::kLse) return;
            state.lse_sum[0] += sum[0];
            state.lse_sum[1] += sum[1];
        };

        this->wait_outer();
        q.take(smem_addr_at(&Int8Storage<Config>::q) + outer_at_.stage * Tile::kQBytes, group_, lane_);
        this->wait_inner();
        scale = this->scale_of_tile(q_scale, FormSteps::tile(entry));
        ping_pong_.wait();
        Tile::issue_qk(s, q, k_.next(inner_at_.stage * Tile::kKBytes));
        ping_pong_.pass_on();
        if (Config::kEarlyChannels) {
            named_barrier_sync(kFirstFreeBarrier + group_, 128);  // all four warps have read the last tile's
            this->fetch_channels(t);
        }
        state.attended = true;
        wgmma_wait<0>();
        wgmma_pin(s);
        if (i == steps.count - 1) this->release_outer();
        form(bits_of(entry));
        release_stage();
        redo();
        add();

        const int32 flush_tiles = params_.flush_keys / Config::kBlockN;
        int32 flush_at = i + flush_tiles;
        auto is_common = [&](int32 entry, int32 i) {
            return FormSteps::kind(entry, group_) == kTileFull && !is_edge(keys, FormSteps::tile(entry)) &&
                   i != steps.count - 1 && i != flush_at;
        };
#pragma unroll 1
        for (++i; i < steps.count; ++i) {
            entry = steps.entry(i);
            if (!is_full) this->wait_inner();
            formed = false;
            if (kIntegers && plain && is_common(entry, i)) {
                // As in the plain kernel: rare cases leave the loop.
                bool again;
                for (;;) {
                    int32 next = steps.entry(i + 1);
                    products();
                    exponentiate_integers();
                    finish_pv();
                    release_stage();
                    renew_probs();
                    again = is_too_large();
                    if (__any_sync(0xffffffffu, again || !is_full || !is_common(next, i + 1))) break;
                    add();
                    entry = next;
                    ++i;
                }
                if (__any_sync(0xffffffffu, again)) redo();
            } else {
                const int32 n = FormSteps::tile(entry);
                const bool mixed = FormSteps::kind(entry, group_) != kTileFull, edge = is_edge(keys, n);
                uint32 bits = bits_of(entry);
                seed = 0;
                products();
                if (i == steps.count - 1) this->release_outer();
                if (kIntegers && plain && !(mixed && (forms.forms & kFormKeyBias))) {
                    if (bits != 0xffffffffu) hide_by_bits(s, bits);
                    if (edge) mask_edges(s, p_, t, warp_row, n * Config::kBlockN, lane_);
                    exponentiate_integers();
                } else if (!(capped && plain && !mixed && !edge && exponentiate_series())) {
                    form(bits);
                    if (Config::kBiasBytes != 0) {  // the next tile of the bias is awaited more than products are
                        finish_pv();
                        release_stage();
                    }
                    exponentiate_floats();
                }
                if (Config::kBiasBytes == 0) finish_pv();
                if (i == flush_at) {
                    this->flush(state);
                    flush_at += flush_tiles;
                }
                if (Config::kBiasBytes == 0) release_stage();
                renew_probs();
                if (__any_sync(0xffffffffu, is_too_large())) redo();
            }
            add();
        }
        if (!is_full) this->wait_inner();
        Tile::issue_pv(state.acc, sums, probs, v_.next(inner_at_.stage * Tile::kKBytes));
        finish_pv();
        this->release_inner();
        if (state.flushed) this->add_flushed(state);
    }

  private:
    // What becomes of integers, which have `seed` added, before the softmax: floats in their registers. Returns what
    // they are to be multiplied by in base 2. scale: to products (attention/int8_forms.cuh).
    OA_DEVICE float form_scores(Scores& s, const FwdTile& t, const Span& keys, int32 warp_row,
                                int32 entry, float scale, const float (&row_shift)[2], int32 seed, uint32 bits) const {
        const ScoreForms& forms = params_.forms;
        const bool mixed = FormSteps::kind(entry, group_) != kTileFull;
        const int32 n = FormSteps::tile(entry);
        make_products(s, 0x4b400000 - seed, scale, row_shift, this->has_delta() ? this->delta_of(t) : nullptr);
        float f[Config::kNTiles * 4];
        floats_of(s, f);
        ScoreFactors c{forms.factor, forms.factor2};
        if (Config::kSoftcap && (forms.forms & kFormSoftcap)) {
            if (below_cap(f, forms)) {
                c = {kLn2, 1.0f};
                cap_near_scores(f, forms);
            } else {
                cap_scores(f, forms);
            }
        }
        if constexpr (Config::kBiasBytes != 0) {
            uint32 rows = Masks::at(inner_at_.stage) + (group_ * 64 + ((threadIdx.x >> 5) & 3) * 16) * 128;
            c.base2 = add_bias_tile<Config::Io, Config::kBiasBytes>(f, c, rows, Masks::kPanelBytes, lane_);
        } else if (!Config::kVarlen && mixed && (forms.forms & kFormKeyBias)) {
            c.base2 = add_key_bias(f, c, mask_at(), lane_);
        } else {
            if (forms.forms & kFormScaled) {
#pragma unroll
                for (int i = 0; i < Config::kNTiles * 4; ++i) f[i] *= c.base2;
                c.base2 = 1.0f;
            }
            if (bits != 0xffffffffu) hide_by_bits(f, bits);
        }
        if (is_edge(keys, n)) mask_edges(f, p_, t, warp_row, n * Config::kBlockN, lane_);
#pragma unroll
        for (int i = 0; i < Config::kNTiles * 4; ++i) s[i] = __float_as_int(f[i]);
        return c.base2;
    }

    // Whether causality, the window or the sequence's end hide keys of tile n.
    OA_DEVICE static bool is_edge(const Span& keys, int32 n) { return n < keys.full_first || n >= keys.full_end; }

    // Packed sequences have no masks.
    OA_DEVICE uint32 mask_at() const {
        if constexpr (Config::kVarlen) return 0;
        else return Masks::at(inner_at_.stage);
    }
    OA_DEVICE uint32 bits_of(int32 entry) const {
        if constexpr (Config::kVarlen) return 0xffffffffu;
        else return Masks::bits(params_.forms, entry, inner_at_.stage, group_);
    }
};

