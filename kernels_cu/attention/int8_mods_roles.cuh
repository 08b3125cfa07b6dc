// The consumers of attn_int8_sm90 with score modifications: steps of a list, scores that something is done to.
//
// Each step takes the fastest way that its tile leaves (attention/int8_mods.cuh). Barriers, products and two-level
// sums are those of the plain kernel (entry/attn_int8_sm90.cu).
#pragma once
#include "attention/int8_mods.cuh"
#include "attention/int8_mods_producer.cuh"
#include "attention/int8_roles.cuh"
#include "attention/int8_walk.cuh"
#include "attention/mask_copies.cuh"
#include "attention/value_factors.cuh"

template <typename Config>
class Int8ModsConsumer : public Int8Consumer<Config, ModsParams<Config>, Int8ModsConsumer<Config>> {
    using Base = Int8Consumer<Config, ModsParams<Config>, Int8ModsConsumer<Config>>;
    using Tile = Int8Tile<Config>;
    using Scores = typename Tile::Scores;
    using Masks = MaskTiles<Config>;
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

    OA_DEVICE Int8ModsConsumer(const ModsParams<Config>& params, Int8Storage<Config>& smem,
                               const RoleBarriers<Config>& bars, int32 group)
        : Base(params, smem, bars, group) {
        lane_ = __shfl_sync(0xffffffffu, lane_, lane_);
    }

    // All steps of a tile of queries. Each step takes the fastest way that its tile leaves
    // (attention/int8_mods.cuh).
    OA_DEVICE void attend_tile(const TileOf<Config>& t, const Span& keys, int32 warp_row, Rows& state) {
        const ScoreModParams& mods = params_.mods;
        const ListSteps steps = steps_of<Config>(mods, list_, t, keys);
        if (steps.count == 0) {
            this->wait_outer();
            this->release_outer();
            return;
        }
        // A list is divided by itself: a split's part of it begins before the keys that are its own without one.
        const int32 own_end = this->own_end_of(t, Config::kSplitKeys ? 0 : keys.first);
        int32 i = 0;
#pragma unroll 1
        for (; i < steps.count && ListSteps::tile(steps.entry(i)) >= own_end; ++i) this->pass_over_step();
        if (i == steps.count) {
            this->wait_inner();
            this->release_inner();
            this->wait_outer();
            this->release_outer();
            return;
        }
        const bool own[2] = {!Config::kVarlen || warp_row + (lane_ >> 2) < t.seqlen_q,
                             !Config::kVarlen || warp_row + (lane_ >> 2) + 8 < t.seqlen_q};
        const bool capped = Config::kSoftcap && (mods.flags & kModSoftcap);
        const bool plain = !this->has_delta() && !(mods.flags & kModScaled) && (kIntegers || capped);
        this->find_key_scales(t);
        const float q_scale = this->scale_of_queries(t, warp_row);
        // By way of a shuffle, as with lane_: computing it anew at every step would stand between two products.
        const float q_scale2 = __shfl_sync(0xffffffffu, q_scale * (p_.softmax_scale * kLog2e), lane_);
        float row_shift[2] = {0.0f, 0.0f};
        CapRow cap[2];
        if (capped) find_caps(t, warp_row, row_shift, cap);
        typename Tile::Queries q;
        Scores s;  // integers, then floats
        // Integers take little time: their P is computed while the product of the last one runs, whose operands must
        // not be written. All others wait for it.
        typename Tile::Probabilities probs, other;
        typename Tile::Probabilities& fresh = kIntegers ? other : probs;
        const uint32 opaque = Factor::opaque();
        typename Tile::RowSums sums = {};
        float alpha[2], sum[2], scale;
        Factor factor;
        bool is_full = false;
        Window window;
        Walk w{{t, keys, warp_row, state, own, q, s, probs, fresh, opaque, sums, alpha, sum, factor, i, is_full},
               mods,
               steps,
               plain,
               q_scale,
               q_scale2,
               row_shift,
               cap,
               scale,
               window};
        prefetch_step(w);
        first_step(w);

        int32 entry;  // the step's, where its mask or an edge may hide keys
        const int32 flush_tiles = period_of(t, keys, steps);
        int32 flush_at = i + flush_tiles, far_end = 0;
        // Which of the four places of products a step takes has to be the same for all four warps.
#pragma unroll 1
        for (++i; i < steps.count; ++i) {
            if (!is_full) this->wait_inner();
            if (i - window.at == 32) prefetch_step(w);
            const int32 ahead = i - window.at;
            // The first step from i on that one of these bits says, or that leaves the window or flushes.
            auto next_of = [&](uint32 steps) {
                steps >>= ahead;
                return min_of(steps != 0 ? i + __ffs(int32(steps)) - 1 : window.at + 32, flush_at);
            };
            // Whether P is there, scores are integers, the stage is still needed, P was too large. The loops that set
            // them stand here, not in functions of their own: the compiler would order these variables otherwise.
            bool done = true, integers = false, held = false, again = false;
            entry = kNothingHidden;
            uint32 bits = 0xffffffffu;
            const bool is_rare = (window.rare >> ahead & 1) || i == flush_at;
            if (kIntegers && !is_rare && (window.open >> ahead & 1)) {
                // As in the plain kernel: rare cases leave the loop.
                const int32 stop = next_of(window.rare | ~window.open);
                integers = true;
                for (;;) {
                    take_integers<false>(w);
                    again = w.signs_past_largest() != 0 || this->is_coarse(scale);
                    if (__any_sync(0xffffffffu, again || i + 1 >= stop || !is_full)) break;
                    add(w);
                    ++i;
                }
            } else if (kIntegers && !is_rare) {
                const int32 stop = next_of(window.rare | window.open);
                integers = true;
                for (;;) {
                    take_integers<true>(w);
                    again = w.signs_past_largest() != 0 || this->is_coarse(scale);
                    if (__any_sync(0xffffffffu, again || i + 1 >= stop || !is_full)) break;
                    add(w);
                    ++i;
                }
            } else if (kSeries && !is_rare) {
                const int32 stop = next_of(window.rare);
                for (;;) {
                    issue_series(w);
                    done = i >= far_end && is_near(w);
                    w.finish_pv();
                    this->release_stage(is_full);
                    if (!done) break;
                    exponentiate_series(w);
                    again = w.signs_past_largest() != 0;
                    if (__any_sync(0xffffffffu, again || i + 1 >= stop || !is_full)) break;
                    add(w);
                    ++i;
                }
                if (!done && i >= far_end) far_end = i + kFarSteps;
            } else {
                entry = entry_now(w);
                bits = bits_of(entry);
                take_anything(w, entry);
                if (i == flush_at) {
                    this->flush(state);
                    flush_at += flush_tiles;
                }
                done = false;
                held = true;
            }
            again = __any_sync(0xffffffffu, again);
            float to_base2 = 1.0f;
            if (!integers && (!done || again)) {
                to_base2 = modify_scores(w, entry, bits);
                if (held) this->release_stage(is_full);
                if (!done) {
                    exponentiate_floats<false>(w, to_base2);
                    renew_probs(w);
                    again = __any_sync(0xffffffffu, w.signs_past_largest() != 0);
                }
            }
            if (again) {
                if (integers) make_base2(s, scale);
                redo(w, to_base2);
            }
            add(w);
        }
        this->take_last_product(w);
    }

  private:
    // 32 entries of the list ahead, one to a lane. Entries one by one would be awaited at every step, and judged by a
    // chain of dependent instructions. (The order of members is the compiler's order of registers: code depends on it.)
    struct Window {
        Factor v;  // kFactors: V's factor and K's scale of this lane's entry
        float k;
        // By bits: those that the mask hides, or leaves as they are, or that are left to the slow path (something hides
        // keys other than by bits, or it is the last step).
        uint32 shut, open, rare;
        int32 entries, at;  // this lane's entry; the step of the first lane's
    };
    // What the steps share besides.
    struct Walk : Int8Walk<Config, Int8ModsConsumer> {
        const ScoreModParams& mods;
        const ListSteps& steps;
        // Whether a tile that the mask leaves as it is goes to the exponentials as integers; or, with softcap, as a
        // series in them.
        const bool& plain;
        const float& q_scale;  // of this lane's two rows
        const float& q_scale2;  // with the softmax's scale in it, to base 2
        float (&row_shift)[2];  // what softcap sees of a row beside its scores
        CapRow (&cap)[2];  // kSeries: softcap of the row
        float& scale;  // of the step's scores: to base 2 where the exponentials take integers, else to products
        Window& window;
    };

    // With softcap: what it sees of this lane's rows beside their scores, and its series there.
    OA_DEVICE void find_caps(const TileOf<Config>& t, int32 warp_row, float (&row_shift)[2], CapRow (&cap)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!Config::kBlockScales || (!Config::kFactors && params_.operands.row_bias != nullptr))
                row_shift[r] = row_bias_of(p_, params_.operands, t, warp_row + (lane_ >> 2) + 8 * r);
            if (kSeries) cap[r] = CapRow(row_shift[r], params_.mods);
        }
    }

    // The first step: S alone, by the slow path, which also raises the base of the softmax.
    OA_DEVICE void first_step(Walk& w) {
        this->wait_outer();
        w.q.take(smem_addr_at(&Int8Storage<Config>::q) + outer_at_.stage * Tile::kQBytes, group_, lane_);
        this->wait_inner();
        ping_pong_.wait();
        Tile::issue_qk(w.s, w.q, k_.next(inner_at_.stage * Tile::kKBytes));
        ping_pong_.pass_on();
        if (Config::kEarlyChannels) {
            named_barrier_sync(kFirstFreeBarrier + group_, 128);  // all four warps have read the last tile's
            this->fetch_channels(w.t);
        }
        w.state.attended = true;
        int32 entry = entry_now(w);
        w.scale = scale_of_tile(w, entry);
        wgmma_wait<0>();
        wgmma_pin(w.s);
        // Q's registers have been operands, so that loads of them have returned (Ring::release).
        if (Tile::Queries::kTaken) this->release_outer();
        release_queries(w);
        make_floats(w.s);
        const float to_base2 = modify_scores(w, entry, bits_of(entry));
        this->release_stage(w.is_full);
        redo(w, to_base2);
        add(w);
    }

    // A step whose scores go to the exponentials as integers. kHide: the mask's bits hide some.
    template <bool kHide>
    OA_DEVICE void take_integers(Walk& w) {
        w.scale = this->without_rounding(w.q_scale2 * scale_of_keys(w));
        const uint32 bits = kHide && !(w.window.shut >> (w.i - w.window.at) & 1) ? load_bits() : 0;
        issue_products(w);
        if (kHide) hide_by_bits(w.s, bits);
        exponentiate_integers(w);
        w.finish_pv();
        this->release_stage(w.is_full);
        renew_probs(w);
    }

    // A step whose softcap is a series in the integers, up to its scores as floats.
    OA_DEVICE void issue_series(Walk& w) {
        w.scale = w.q_scale * scale_of_keys(w);
        issue_products(w);
        make_floats(w.s);
    }
    // Any other step, up to its scores as floats: modify_scores does the rest. entry: the step's.
    OA_DEVICE void take_anything(Walk& w, int32 entry) {
        w.scale = scale_of_tile(w, entry);
        issue_products(w);
        release_queries(w);
        make_floats(w.s);
        w.finish_pv();
    }

    // S(i), and A += P(i - 1) V(i - 1), which is still running at the end.
    OA_DEVICE void issue_products(Walk& w) {
        ping_pong_.wait();
        Tile::issue_qk(w.s, w.q, k_.next(inner_at_.stage * Tile::kKBytes));
        Tile::issue_pv(w.state.acc, w.sums, w.probs, v_.next(inner_at_.stage * Tile::kKBytes));
        ping_pong_.pass_on();
        wgmma_wait<1>();
        wgmma_pin(w.s);
    }
    // Q in shared memory, once the last scores are there.
    OA_DEVICE void release_queries(Walk& w) {
        if (!Tile::Queries::kTaken && w.i == w.steps.count - 1) this->release_outer();
    }

    // Entries from this step on.
    OA_DEVICE void prefetch_step(Walk& w) const {
        Window& x = w.window;
        x.at = w.i;
        x.entries = w.steps.entry(min_of(w.i + lane_, w.steps.count - 1));
        if constexpr (Config::kFactors) {
            x.k = Base::scale_of_keys(ListSteps::tile(x.entries));
            x.v.set(this->factor_of_values(ListSteps::tile(x.entries)));
        }
        const int32 kind = ListSteps::kind(x.entries, group_);
        x.rare = __ballot_sync(0xffffffffu, !w.plain || w.i + lane_ >= w.steps.count - 1 ||
                                                is_edge(w.keys, ListSteps::tile(x.entries)) ||
                                                (kind != kTileFull && !(kIntegers && (w.mods.flags & kModBits))));
        x.open = __ballot_sync(0xffffffffu, kind == kTileFull);
        x.shut = __ballot_sync(0xffffffffu, kind == kTileEmpty);
    }
    // The step's entry.
    OA_DEVICE int32 entry_now(const Walk& w) const {
        return __shfl_sync(0xffffffffu, w.window.entries, w.i - w.window.at);
    }
    // K's scale of the step's tile. kFactors: V's factor is taken with it.
    OA_DEVICE float scale_of_keys(Walk& w) const {
        if constexpr (Config::kFactors) {
            w.factor = w.window.v.of_lane(w.i - w.window.at);
            return __shfl_sync(0xffffffffu, w.window.k, w.i - w.window.at);
        } else {
            return Base::scale_of_keys(Config::kBlockScales ? ListSteps::tile(entry_now(w)) : 0);
        }
    }
    // Of the step's integers to products. entry: the step's.
    OA_DEVICE float scale_of_tile(Walk& w, int32 entry) const {
        if constexpr (Config::kFactors)
            return w.q_scale * scale_of_keys(w);
        else
            return Base::scale_of_tile(w.q_scale, ListSteps::tile(entry));
    }

    // P(i), except as operand: of integers, of floats (to_base2: times), of a tile whose scores are near (softcap).
    OA_DEVICE void exponentiate_integers(Walk& w) const {
        w.sum[0] = w.sum[1] = 0.0f;
        const float c[2] = {w.scale, w.scale};
        w.state.softmax.template exponentiate_in_order<false, Config::kByRow>(w.s, c, w.packer(), w.factor.shift());
    }
    // kHides: with a factor of V that is not finite a hidden key's exponent is none either.
    template <bool kHides>
    OA_DEVICE void exponentiate_floats(Walk& w, float to_base2) const {
        w.sum[0] = w.sum[1] = 0.0f;
        const float c[2] = {to_base2, to_base2};
        float f[Config::kNTiles * 4];
        floats_of(w.s, f);
        w.state.softmax.template exponentiate_in_order<kHides, Config::kByRow>(f, c, w.packer(), w.factor.shift());
    }
    OA_DEVICE void exponentiate_series(Walk& w) const {
        if constexpr (kSeries) {
            float f[Config::kNTiles * 4];
            floats_of(w.s, f);
            w.sum[0] = w.sum[1] = 0.0f;
            const float none[2] = {};
            CapSeries series(w.cap, w.scale * w.mods.cap_scale);
            if constexpr (Config::kFactors) series.add(w.factor.log2);
            w.state.softmax.template exponentiate_in_order<false, Config::kByRow>(f, none, w.packer(), series);
        }
    }
    // Whether softcap's series are for all of the step's scores.
    OA_DEVICE bool is_near(const Walk& w) const {
        float f[Config::kNTiles * 4];
        floats_of(w.s, f);
        return are_near(f, w.cap, w.own, w.scale * w.mods.cap_scale);
    }

    // P(i) anew, of scores that are floats, with the base raised to the largest.
    OA_DEVICE void redo(Walk& w, float to_base2) const {
        float f[Config::kNTiles * 4];
        floats_of(w.s, f);
        raise_on_grid(w.state.softmax, f, to_base2, w.alpha, w.factor.shift());
        w.rescale_sums();
        exponentiate_floats<Config::kFactors>(w, to_base2);
        renew_probs(w);
    }
    // P(i) becomes the operand, where it is not computed in its place.
    OA_DEVICE void renew_probs(const Walk& w) const {
        if constexpr (kIntegers) w.renew_probs();
    }
    // At the end of a step, when nothing but the product reads P any more.
    OA_DEVICE void add(const Walk& w) const {
        if constexpr (Config::kFactors && !kIntegers) {
#pragma unroll
            for (int k = 0; k < Config::kBlockN / 32; ++k)
#pragma unroll
                for (int x = 0; x < 4; ++x) w.probs[k][x] = w.factor.operand(w.probs[k][x]);
        }
        w.add_sums();
    }

    // What becomes of integers as floats before the softmax, in their registers. Returns what they are to be multiplied
    // by in base 2. w.scale: to products (attention/int8_mods.cuh). entry: kNothingHidden, or the step's.
    OA_DEVICE float modify_scores(Walk& w, int32 entry, uint32 bits) const {
        const ScoreModParams& mods = params_.mods;
        const bool capped = Config::kSoftcap && (mods.flags & kModSoftcap);
        const bool mixed = entry != kNothingHidden && ListSteps::kind(entry, group_) != kTileFull;
        const int32 n = ListSteps::tile(entry);
        float f[Config::kNTiles * 4];
        floats_of(w.s, f);
        ScoreFactors c{mods.factor, mods.factor2};
        if (capped || this->has_delta()) {
            make_products(f, w.scale, w.row_shift, this->has_delta() ? this->delta_of(w.t) : nullptr);
        } else {
            c = {w.scale * c.natural, w.scale * c.base2};
        }
        if (capped) {
            // Which way a tile takes must not hang on the next sequence, nor on what nobody has written.
            if (Config::kVarlen && entry != kNothingHidden && is_edge(w.keys, n))
                forget_keys(f, w.t.seqlen_k, n * Config::kBlockN, lane_);
            if (below_cap(f, mods, w.own)) {
                c = {kLn2, 1.0f};
                cap_near_scores(f, mods);
            } else {
                cap_scores(f, mods);
            }
        }
        if constexpr (Config::kBiasBytes != 0) {
            uint32 rows = Masks::at(inner_at_.stage) + (group_ * 64 + ((threadIdx.x >> 5) & 3) * 16) * 128;
            c.base2 = add_bias_tile<Config::Io, Config::kBiasBytes>(f, c, rows, Masks::kPanelBytes, lane_);
        } else if (!Config::kVarlen && mixed && (mods.flags & kModKeyBias)) {
            c.base2 = add_key_bias(f, c, mask_at(), lane_);
        } else {
            if (!capped || (mods.flags & kModScaled)) {
#pragma unroll
                for (int i = 0; i < Config::kNTiles * 4; ++i) f[i] *= c.base2;
                c.base2 = 1.0f;
            }
            if (bits != 0xffffffffu) hide_by_bits(f, bits);
        }
        if (entry != kNothingHidden && is_edge(w.keys, n))
            mask_edges(f, p_, w.t, w.warp_row, n * Config::kBlockN, lane_);
#pragma unroll
        for (int i = 0; i < Config::kNTiles * 4; ++i) put_float(w.s[i], f[i]);
        return c.base2;
    }

    // Steps between two flushes. The keys of a split's list are none that the tile alone would tell.
    OA_DEVICE int32 period_of(const TileOf<Config>& t, const Span& keys, const ListSteps& steps) const {
        if constexpr (Config::kSplitKeys && Config::kBlockScales)
            return this->tiles_to_flush(t, ListSteps::tile(steps.entry(steps.count - 1)),
                                        ListSteps::tile(steps.entry(0)) + 1);
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
            return Masks::bits(params_.mods, entry, inner_at_.stage, group_);
    }
};
