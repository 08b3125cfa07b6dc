// The consumers of attn_int8_sm90 with forms: steps of a list, scores that something is done to.
//
// Each step takes the fastest way that its tile leaves (attention/int8_forms.cuh). Barriers, products and two-level
// sums are those of the plain kernel (entry/attn_int8_sm90.cu).
#pragma once
#include "attention/int8_forms.cuh"
#include "attention/int8_forms_producer.cuh"
#include "attention/int8_roles.cuh"
#include "attention/mask_copies.cuh"
#include "attention/value_factors.cuh"

template <typename Config>
class Int8FormsConsumer : public Int8Consumer<Config, FormsParams<Config>, Int8FormsConsumer<Config>> {
    using Base = Int8Consumer<Config, FormsParams<Config>, Int8FormsConsumer<Config>>;
    using Tile = Int8Tile<Config>;
    using Scores = typename Tile::Scores;
    using Masks = MaskTiles<Config>;
    using Packer = E4m3Packer<Config::kBlockN / 32, Config::kLse, Config::kFactors>;
    using Factor = typename Select<Config::kFactors, ValueFactor, NoValueFactor>::Type;  // of V
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

    static constexpr int32 kNothingHidden = -1;  // in place of an entry
    // Steps for which a warp does not ask again whether scores are near, after they were not.
    static constexpr int32 kFarSteps = 8;

  public:
    using typename Base::Rows;
    using typename Base::Span;

    OA_DEVICE Int8FormsConsumer(const FormsParams<Config>& params, Int8Storage<Config>& smem,
                                const RoleBarriers<Config>& bars, int32 group)
        : Base(params, smem, bars, group) {
        lane_ = __shfl_sync(0xffffffffu, lane_, lane_);
    }

    // All steps of a tile of queries. Each step takes the fastest way that its tile leaves
    // (attention/int8_forms.cuh).
    OA_DEVICE void attend_tile(const TileOf<Config>& t, const Span& keys, int32 warp_row, Rows& state) {
        const ScoreForms& forms = params_.forms;
        const FormSteps steps = steps_of<Config>(forms, list_, t, keys);
        if (steps.count == 0) {
            this->wait_outer();
            this->release_outer();
            return;
        }
        // A list is divided by itself: a split's part of it begins before the keys that are its own without one.
        const int32 own_end = this->own_end_of(t, Config::kSplitKeys ? 0 : keys.first);
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
        const bool plain = !this->has_delta() && !(forms.forms & kFormScaled) && (kIntegers || capped);
        this->find_key_scales(t);
        const float q_scale = this->scale_of_queries(t, warp_row);
        // By way of a shuffle, as with lane_: computing it anew at every step would stand between two products.
        const float q_scale2 = __shfl_sync(0xffffffffu, q_scale * (p_.softmax_scale * kLog2e), lane_);
        float row_shift[2] = {0.0f, 0.0f};
        CapRow cap[2];
        if (capped) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (!Config::kBlockScales || (!Config::kFactors && params_.operands.row_bias != nullptr))
                    row_shift[r] = row_bias_of(p_, params_.operands, t, warp_row + (lane_ >> 2) + 8 * r);
                if (kSeries) cap[r] = CapRow(row_shift[r], forms);
            }
        }
        typename Tile::Queries q;
        RowState<PRange>& rows = state.softmax;
        Scores s;  // integers, then floats
        // Integers take little time: their P is computed while the product of the last one runs, whose operands must
        // not be written. All others wait for it.
        typename Tile::Probabilities probs, other;
        typename Tile::Probabilities& fresh = kIntegers ? other : probs;
        const uint32 opaque = Factor::opaque();
        typename Tile::RowSums sums = {};
        float alpha[2], sum[2], scale;
        Factor of_v;  // of the step's keys
        bool is_full = false;

        // S(i), and A += P(i - 1) V(i - 1), which is still running at the end.
        auto products = [&] {
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
            if (!Config::kFactors) wgmma_pin(sums);
#pragma unroll
            for (int k = 0; k < Config::kBlockN / 32; ++k) wgmma_pin(probs[k]);
            if (Config::kFactors) return;
            rows.l[0] += sums[0];
            rows.l[1] += sums[2];
        };
        auto renew_probs = [&] {
            if constexpr (kIntegers) {
#pragma unroll
                for (int k = 0; k < Config::kBlockN / 32; ++k)
#pragma unroll
                    for (int x = 0; x < 4; ++x) probs[k][x] = of_v.copy_of_operand(fresh[k][x], opaque);
            }
        };
        auto release_stage = [&] {
            __syncwarp();
            this->release_inner();
            is_full = this->is_inner_full();
        };
        auto exponentiate_integers = [&] {
            sum[0] = sum[1] = 0.0f;
            const float c[2] = {scale, scale};
            rows.exponentiate_in_order<false, Config::kByRow>(s, c, Packer{{fresh, {}}, sum}, of_v.shift());
        };
        auto exponentiate_floats = [&](float factor) {
            sum[0] = sum[1] = 0.0f;
            const float c[2] = {factor, factor};
            float f[Config::kNTiles * 4];
            floats_of(s, f);
            rows.exponentiate_in_order<false, Config::kByRow>(f, c, Packer{{fresh, {}}, sum}, of_v.shift());
        };
        // The same for redo(). With a factor of V that is not finite a hidden key's exponent is none either.
        auto exponentiate_again = [&](float factor) {
            if constexpr (Config::kFactors) {
                sum[0] = sum[1] = 0.0f;
                const float c[2] = {factor, factor};
                float f[Config::kNTiles * 4];
                floats_of(s, f);
                rows.exponentiate_in_order<true, Config::kByRow>(f, c, Packer{{fresh, {}}, sum}, of_v.shift());
            } else {
                exponentiate_floats(factor);
            }
        };
        // Softcap of a tile whose scores are near.
        auto exponentiate_series = [&] {
            if constexpr (kSeries) {
                float f[Config::kNTiles * 4];
                floats_of(s, f);
                sum[0] = sum[1] = 0.0f;
                const float none[2] = {};
                CapSeries series(cap, scale * forms.cap_scale);
                if constexpr (Config::kFactors) series.add(of_v.log2);
                rows.exponentiate_in_order<false, Config::kByRow>(f, none, Packer{{fresh, {}}, sum}, series);
            }
        };
        auto is_near = [&] {
            float f[Config::kNTiles * 4];
            floats_of(s, f);
            return are_near(f, cap, scale * forms.cap_scale);
        };
        // Of this lane's rows, as in the plain kernel.
        auto is_too_large = [&] {
            uint32 signs[2];
            past_largest(fresh, signs);
            return (((own[0] ? signs[0] : 0) | (own[1] ? signs[1] : 0)) & kSigns) != 0;
        };
        // Of scores that are floats.
        auto redo = [&](float factor) {
            float f[Config::kNTiles * 4];
            floats_of(s, f);
            raise_on_grid(rows, f, factor, alpha, of_v.shift());
            rescale(state.acc, alpha);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                state.shrink[r] *= alpha[r];
                state.lse_sum[r] *= alpha[r];
            }
            exponentiate_again(factor);
            renew_probs();
        };
        // At the end of a step, when nothing but the product reads P any more.
        auto add = [&] {
            if constexpr (Config::kFactors && !kIntegers) {
#pragma unroll
                for (int k = 0; k < Config::kBlockN / 32; ++k)
#pragma unroll
                    for (int x = 0; x < 4; ++x) probs[k][x] = of_v.operand(probs[k][x]);
            }
            if (!Config::kLse) return;
            of_v.add(state.lse_sum, sum);
        };

        // 32 entries ahead, one to a lane. By bits: those that are left to the slow path (something hides keys other
        // than by bits, or it is the last step), that the mask leaves as they are, or hides. Entries one by one would
        // be awaited at every step, and judged by a chain of dependent instructions.
        int32 window_at, window;
        uint32 rare, open, shut;
        float window_k;  // kFactors: K's scales and V's factors of the entries
        Factor window_v;
        auto look_ahead = [&] {
            window_at = i;
            window = steps.entry(min_of(i + lane_, steps.count - 1));
            if constexpr (Config::kFactors) {
                window_k = this->scale_of_keys(FormSteps::tile(window));
                window_v.set(this->factor_of_values(FormSteps::tile(window)));
            }
            const int32 kind = FormSteps::kind(window, group_);
            rare = __ballot_sync(0xffffffffu, !plain || i + lane_ >= steps.count - 1 ||
                                                  is_edge(keys, FormSteps::tile(window)) ||
                                                  (kind != kTileFull && !(kIntegers && (forms.forms & kFormBits))));
            open = __ballot_sync(0xffffffffu, kind == kTileFull);
            shut = __ballot_sync(0xffffffffu, kind == kTileEmpty);
        };
        look_ahead();
        auto entry_now = [&] { return __shfl_sync(0xffffffffu, window, i - window_at); };
        auto scale_of_keys = [&] {
            if constexpr (Config::kFactors) {
                of_v = window_v.of_lane(i - window_at);
                return __shfl_sync(0xffffffffu, window_k, i - window_at);
            } else {
                return this->scale_of_keys(Config::kBlockScales ? FormSteps::tile(entry_now()) : 0);
            }
        };
        // Of the step's entry.
        auto scale_of_tile = [&](int32 entry) {
            if constexpr (Config::kFactors)
                return q_scale * scale_of_keys();
            else
                return this->scale_of_tile(q_scale, FormSteps::tile(entry));
        };
        // Of the step's tile: scores to base 2.
        auto base2_scale = [&] { return this->without_rounding(q_scale2 * scale_of_keys()); };

        this->wait_outer();
        q.take(smem_addr_at(&Int8Storage<Config>::q) + outer_at_.stage * Tile::kQBytes, group_, lane_);
        auto release_queries = [&] {
            if (!Tile::Queries::kTaken && i == steps.count - 1) this->release_outer();
        };
        this->wait_inner();
        ping_pong_.wait();
        Tile::issue_qk(s, q, k_.next(inner_at_.stage * Tile::kKBytes));
        ping_pong_.pass_on();
        if (Config::kEarlyChannels) {
            named_barrier_sync(kFirstFreeBarrier + group_, 128);  // all four warps have read the last tile's
            this->fetch_channels(t);
        }
        state.attended = true;
        int32 entry = entry_now();
        scale = scale_of_tile(entry);
        wgmma_wait<0>();
        wgmma_pin(s);
        // Q's registers have been operands, so that loads of them have returned (Ring::release).
        if (Tile::Queries::kTaken) this->release_outer();
        release_queries();
        {
            make_floats(s);
            float factor = form_scores(s, t, keys, warp_row, entry, scale, row_shift, bits_of(entry));
            release_stage();
            redo(factor);
            add();
        }

        const int32 flush_tiles = period_of(t, keys, steps);
        int32 flush_at = i + flush_tiles, far_end = 0;
        // Which of the four places of products a step takes has to be the same for all four warps.
#pragma unroll 1
        for (++i; i < steps.count; ++i) {
            if (!is_full) this->wait_inner();
            if (i - window_at == 32) look_ahead();
            const int32 ahead = i - window_at;
            // The first step from i on that one of these bits says, or that leaves the window or flushes.
            auto next_of = [&](uint32 steps) {
                steps >>= ahead;
                return min_of(steps != 0 ? i + __ffs(int32(steps)) - 1 : window_at + 32, flush_at);
            };
            // Whether P is there, scores are integers, the stage is still needed, P was too large.
            bool done = true, integers = false, held = false, again = false;
            entry = kNothingHidden;
            uint32 bits = 0xffffffffu;
            const bool is_rare = (rare >> ahead & 1) || i == flush_at;
            if (kIntegers && !is_rare && (open >> ahead & 1)) {
                // As in the plain kernel: rare cases leave the loop.
                const int32 stop = next_of(rare | ~open);
                integers = true;
                for (;;) {
                    scale = base2_scale();
                    products();
                    exponentiate_integers();
                    finish_pv();
                    release_stage();
                    renew_probs();
                    again = is_too_large() || this->is_coarse(scale);
                    if (__any_sync(0xffffffffu, again || i + 1 >= stop || !is_full)) break;
                    add();
                    ++i;
                }
            } else if (kIntegers && !is_rare) {
                const int32 stop = next_of(rare | open);
                integers = true;
                for (;;) {
                    scale = base2_scale();
                    const uint32 own_bits = shut >> (i - window_at) & 1 ? 0 : load_bits();
                    products();
                    hide_by_bits(s, own_bits);
                    exponentiate_integers();
                    finish_pv();
                    release_stage();
                    renew_probs();
                    again = is_too_large() || this->is_coarse(scale);
                    if (__any_sync(0xffffffffu, again || i + 1 >= stop || !is_full)) break;
                    add();
                    ++i;
                }
            } else if (kSeries && !is_rare) {
                const int32 stop = next_of(rare);
                for (;;) {
                    scale = q_scale * scale_of_keys();
                    products();
                    make_floats(s);
                    done = i >= far_end && is_near();
                    finish_pv();
                    release_stage();
                    if (!done) break;
                    exponentiate_series();
                    again = is_too_large();
                    if (__any_sync(0xffffffffu, again || i + 1 >= stop || !is_full)) break;
                    add();
                    ++i;
                }
                if (!done && i >= far_end) far_end = i + kFarSteps;
            } else {
                entry = entry_now();
                bits = bits_of(entry);
                scale = scale_of_tile(entry);
                products();
                release_queries();
                make_floats(s);
                finish_pv();
                if (i == flush_at) {
                    this->flush(state);
                    flush_at += flush_tiles;
                }
                done = false;
                held = true;
            }
            again = __any_sync(0xffffffffu, again);
            float factor = 1.0f;
            if (!integers && (!done || again)) {
                factor = form_scores(s, t, keys, warp_row, entry, scale, row_shift, bits);
                if (held) release_stage();
                if (!done) {
                    exponentiate_floats(factor);
                    renew_probs();
                    again = __any_sync(0xffffffffu, is_too_large());
                }
            }
            if (again) {
                if (integers) make_base2(s, scale);
                redo(factor);
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
    // What becomes of integers as floats before the softmax, in their registers. Returns what they are to be multiplied
    // by in base 2. scale: to products (attention/int8_forms.cuh).
    OA_DEVICE float form_scores(Scores& s, const TileOf<Config>& t, const Span& keys, int32 warp_row, int32 entry,
                                float scale, const float (&row_shift)[2], uint32 bits) const {
        const ScoreForms& forms = params_.forms;
        const bool capped = Config::kSoftcap && (forms.forms & kFormSoftcap);
        const bool mixed = entry != kNothingHidden && FormSteps::kind(entry, group_) != kTileFull;
        const int32 n = FormSteps::tile(entry);
        float f[Config::kNTiles * 4];
        floats_of(s, f);
        ScoreFactors c{forms.factor, forms.factor2};
        if (capped || this->has_delta()) {
            make_products(f, scale, row_shift, this->has_delta() ? this->delta_of(t) : nullptr);
        } else {
            c = {scale * c.natural, scale * c.base2};
        }
        if (capped) {
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
            if (!capped || (forms.forms & kFormScaled)) {
#pragma unroll
                for (int i = 0; i < Config::kNTiles * 4; ++i) f[i] *= c.base2;
                c.base2 = 1.0f;
            }
            if (bits != 0xffffffffu) hide_by_bits(f, bits);
        }
        if (entry != kNothingHidden && is_edge(keys, n)) mask_edges(f, p_, t, warp_row, n * Config::kBlockN, lane_);
#pragma unroll
        for (int i = 0; i < Config::kNTiles * 4; ++i) put_float(s[i], f[i]);
        return c.base2;
    }

    // Steps between two flushes. The keys of a split's list are none that the tile alone would tell.
    OA_DEVICE int32 period_of(const TileOf<Config>& t, const Span& keys, const FormSteps& steps) const {
        if constexpr (Config::kSplitKeys && Config::kBlockScales)
            return this->tiles_to_flush(t, FormSteps::tile(steps.entry(steps.count - 1)),
                                        FormSteps::tile(steps.entry(0)) + 1);
        return this->tiles_to_flush(t, keys.first, keys.end);
    }

    // Whether causality, the window or the sequence's end hide keys of tile n.
    OA_DEVICE static bool is_edge(const Span& keys, int32 n) { return n < keys.full_first || n >= keys.full_end; }

    // Packed sequences have no masks.
    OA_DEVICE uint32 mask_at() const {
        if constexpr (Config::kVarlen)
            return 0;
        else
            return Masks::at(inner_at_.stage);
    }
    OA_DEVICE uint32 load_bits() const {
        if constexpr (Config::kVarlen)
            return 0xffffffffu;
        else
            return load_shared(Masks::at(inner_at_.stage) + group_ * Masks::kWordBytes + (threadIdx.x & 127) * 4);
    }
    OA_DEVICE uint32 bits_of(int32 entry) const {
        if constexpr (Config::kVarlen)
            return 0xffffffffu;
        else
            return Masks::bits(params_.forms, entry, inner_at_.stage, group_);
    }
};
