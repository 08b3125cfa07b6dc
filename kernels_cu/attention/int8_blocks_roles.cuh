// The consumers of attn_int8_sm90 with a block mask: steps of a list, and nothing else is done to scores.
//
// A warpgroup's rows see nothing of some tiles of its CTA's list. It takes the others in runs: a run begins with S
// alone and ends with A += P V alone, on the stage of the tile that it does not see. Barriers, products and two-level
// sums are those of the plain kernel (entry/attn_int8_sm90.cu). Each step takes one of two ways:
//   integers   tiles that every row sees whole: the plain kernel's exponentials on integers
//   floats     edges, the last step, scales that are not positive: scores in base 2 in the integers' registers
#pragma once
#include "attention/int8_mods.cuh"
#include "attention/int8_mods_producer.cuh"
#include "attention/int8_roles.cuh"
#include "attention/int8_walk.cuh"
#include "attention/value_factors.cuh"

template <typename Config>
class Int8BlocksConsumer : public Int8Consumer<Config, ModsParams<Config>, Int8BlocksConsumer<Config>> {
    using Base = Int8Consumer<Config, ModsParams<Config>, Int8BlocksConsumer<Config>>;
    using Tile = Int8Tile<Config>;
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
    static_assert(!Config::kVarlen && !Config::kDelta && !Config::kFactors && !Config::kSplitKeys,
                  "what no row of block masks has");

  public:
    using typename Base::Rows;
    using typename Base::Span;

    OA_DEVICE Int8BlocksConsumer(const ModsParams<Config>& params, Int8Storage<Config>& smem,
                                 const RoleBarriers<Config>& bars, int32 group)
        : Base(params, smem, bars, group) {
        lane_ = __shfl_sync(0xffffffffu, lane_, lane_);  // as Int8ModsConsumer
    }

    // All steps of a tile of queries.
    OA_DEVICE void attend_tile(const TileOf<Config>& t, const Span& keys, int32 warp_row, Rows& state) {
        const ListSteps steps = steps_of<Config>(params_.mods, list_, t, keys);
        int32 i = 0;
        const int32 own_end = this->own_end_of(t, keys.first);
        auto is_foreign = [&](int32 entry) {
            return ListSteps::tile(entry) >= own_end || ListSteps::kind(entry, group_) == kTileEmpty;
        };
#pragma unroll 1
        for (; i < steps.count && is_foreign(steps.entry(i)); ++i) this->pass_over_step();
        if (i == steps.count) {
            if (steps.count != 0) {
                this->wait_inner();
                this->release_inner();
            }
            this->wait_outer();
            this->release_outer();
            return;
        }
        const bool own[2] = {true, true};
        this->find_key_scales(t);
        // By way of a shuffle: computing it anew at every step would stand between two products.
        const float q_scale2 =
            __shfl_sync(0xffffffffu, this->scale_of_queries(t, warp_row) * params_.mods.factor2, lane_);
        typename Tile::Queries q;
        typename Tile::Scores s;
        typename Tile::Probabilities probs, fresh;
        const uint32 opaque = NoValueFactor::opaque();
        typename Tile::RowSums sums = {};
        float alpha[2], sum[2], scale;
        NoValueFactor factor;
        bool is_full = false;
        Window window;
        Walk w{{t, keys, warp_row, state, own, q, s, probs, fresh, opaque, sums, alpha, sum, factor, i, is_full},
               steps,
               q_scale2,
               scale,
               window};
        state.attended = true;
        prefetch_steps(w);
        begin_tile(w);

        const int32 flush_tiles = this->tiles_to_flush(t, keys.first, keys.end);
        int32 flush_at = i + flush_tiles;
        for (;;) {
            take_run(w, flush_at, flush_tiles);
            if (i == steps.count) {
                this->take_last_product(w);
                return;
            }
            end_run(w);
            // The last period of a flush goes on with the next tile that these rows see.
            const int32 left = flush_at - i;
            pass_over(w);
            flush_at = i + left;
            if (i == steps.count) break;
            begin_run(w);
        }
        // The list's last tile is not this warpgroup's.
        if (!is_full) this->wait_inner();
        this->release_inner();
        if (!Tile::Queries::kTaken) this->release_outer();
        if (state.flushed) this->add_flushed(state);
    }

  private:
    // 32 entries of the list ahead, one to a lane (as in Int8ModsConsumer).
    struct Window {
        uint32 shut, rare;  // bits of those that these rows do not see, and that take floats
        int32 entries, at;  // this lane's entry; the step of the first lane's
    };
    // What the steps share besides.
    struct Walk : Int8Walk<Config, Int8BlocksConsumer> {
        const ListSteps& steps;
        const float& q_scale2;  // of this lane's two rows, with the softmax's scale in it, to base 2
        float& scale;  // of the step's scores, to base 2
        Window& window;
    };

    // Entries from this step on.
    OA_DEVICE void prefetch_steps(Walk& w) const {
        Window& x = w.window;
        x.at = w.i;
        x.entries = w.steps.entry(min_of(w.i + lane_, w.steps.count - 1));
        const int32 n = ListSteps::tile(x.entries);
        const bool is_edge = n < w.keys.full_first || n >= w.keys.full_end;
        x.rare = __ballot_sync(0xffffffffu,
                               (params_.mods.flags & kModScaled) || w.i + lane_ >= w.steps.count - 1 || is_edge);
        x.shut = __ballot_sync(0xffffffffu, ListSteps::kind(x.entries, group_) == kTileEmpty);
    }
    OA_DEVICE int32 tile_now(const Walk& w) const {
        return ListSteps::tile(__shfl_sync(0xffffffffu, w.window.entries, w.i - w.window.at));
    }
    OA_DEVICE bool is_rare(const Walk& w) const { return w.window.rare >> (w.i - w.window.at) & 1; }
    OA_DEVICE bool is_shut(const Walk& w) const { return w.window.shut >> (w.i - w.window.at) & 1; }

    // The step's scale of scores. What exponentials of integers take is cut.
    template <bool kCut>
    OA_DEVICE void find_scale(Walk& w) const {
        const float c = w.q_scale2 * this->scale_of_keys(Config::kBlockScales ? tile_now(w) : 0);
        w.scale = kCut ? this->without_rounding(c) : c;
    }

    // The tile's first step: S alone, and the base of the softmax.
    OA_DEVICE void begin_tile(Walk& w) {
        this->wait_outer();
        w.q.take(smem_addr_at(&Int8Storage<Config>::q) + outer_at_.stage * Tile::kQBytes, group_, lane_);
        this->wait_inner();
        issue_scores(w);
        if (Config::kEarlyChannels) {
            named_barrier_sync(kFirstFreeBarrier + group_, 128);  // all four warps have read the last tile's
            this->fetch_channels(w.t);
        }
        find_scale<false>(w);
        wgmma_wait<0>();
        wgmma_pin(w.s);
        // Q's registers have been operands, so that loads of them have returned (Ring::release).
        if (Tile::Queries::kTaken) this->release_outer();
        release_queries(w);
        make_scores(w);
        this->release_stage(w.is_full);
        redo(w);
        w.add_sums();
    }
    // The first step of another run: S alone.
    OA_DEVICE void begin_run(Walk& w) {
        if (!w.is_full) this->wait_inner();
        const bool rare = is_rare(w);
        find_scale<true>(w);
        issue_scores(w);
        wgmma_wait<0>();
        wgmma_pin(w.s);
        release_queries(w);
        this->release_stage(w.is_full);
        bool again = true;
        if (!rare) {
            exponentiate_integers(w);
            w.renew_probs();
            again = __any_sync(0xffffffffu, w.signs_past_largest() != 0 || this->is_coarse(w.scale));
        }
        if (again) {
            make_scores(w);
            redo(w);
        }
        w.add_sums();
    }
    // Further steps, up to the list's end or a tile that these rows do not see; the product of the last one's P is left
    // to the caller. Which of the places of products a step takes has to be the same for all four warps.
    OA_DEVICE void take_run(Walk& w, int32& flush_at, int32 flush_tiles) {
        int32& i = w.i;
        const Window& x = w.window;
#pragma unroll 1
        for (++i; i < w.steps.count; ++i) {
            if (i - x.at == 32) prefetch_steps(w);
            if (is_shut(w)) return;
            if (!w.is_full) this->wait_inner();
            bool again;
            if (!is_rare(w) && i < flush_at) {
                const uint32 others = (x.rare | x.shut) >> (i - x.at);
                const int32 stop = min_of(others != 0 ? i + __ffs(int32(others)) - 1 : x.at + 32, flush_at);
                // As in the plain kernel: rare cases leave the loop.
                for (;;) {
                    take_integers(w);
                    again = w.signs_past_largest() != 0 || this->is_coarse(w.scale);
                    if (__any_sync(0xffffffffu, again || i + 1 >= stop || !w.is_full)) break;
                    w.add_sums();
                    ++i;
                }
                again = __any_sync(0xffffffffu, again);
                if (again) make_base2(w.s, w.scale);
            } else {
                take_floats(w);
                if (i >= flush_at) {
                    this->flush(w.state);
                    flush_at += flush_tiles;
                }
                this->release_stage(w.is_full);
                exponentiate_floats(w);
                w.renew_probs();
                again = __any_sync(0xffffffffu, w.signs_past_largest() != 0);
            }
            if (again) redo(w);
            w.add_sums();
        }
    }
    // The run's last product, on the stage of a tile that these rows do not see.
    OA_DEVICE void end_run(Walk& w) {
        if (!w.is_full) this->wait_inner();
        ping_pong_.wait();
        Tile::issue_pv(w.state.acc, w.sums, w.probs, v_.next(inner_at_.stage * Tile::kKBytes));
        ping_pong_.pass_on();
        w.finish_pv();
        this->release_stage(w.is_full);
    }
    // Behind such a tile: up to the next one that these rows see, or the list's end.
    OA_DEVICE void pass_over(Walk& w) {
#pragma unroll 1
        for (++w.i; w.i < w.steps.count; ++w.i) {
            if (w.i - w.window.at == 32) prefetch_steps(w);
            if (!is_shut(w)) return;
            this->pass_over_step();
            w.is_full = false;
        }
    }

    OA_DEVICE void take_integers(Walk& w) {
        find_scale<true>(w);
        issue_products(w);
        exponentiate_integers(w);
        w.finish_pv();
        this->release_stage(w.is_full);
        w.renew_probs();
    }
    // Up to scores in base 2.
    OA_DEVICE void take_floats(Walk& w) {
        find_scale<false>(w);
        issue_products(w);
        release_queries(w);
        make_scores(w);
        w.finish_pv();
    }

    OA_DEVICE void issue_scores(Walk& w) {
        ping_pong_.wait();
        Tile::issue_qk(w.s, w.q, k_.next(inner_at_.stage * Tile::kKBytes));
        ping_pong_.pass_on();
    }
    // S(i), and A += P V of the step before, which is still running at the end.
    OA_DEVICE void issue_products(Walk& w) {
        ping_pong_.wait();
        Tile::issue_qk(w.s, w.q, k_.next(inner_at_.stage * Tile::kKBytes));
        Tile::issue_pv(w.state.acc, w.sums, w.probs, v_.next(inner_at_.stage * Tile::kKBytes));
        ping_pong_.pass_on();
        wgmma_wait<1>();
        wgmma_pin(w.s);
    }
    // Q in shared memory, once the list's last scores are there.
    OA_DEVICE void release_queries(Walk& w) {
        if (!Tile::Queries::kTaken && w.i == w.steps.count - 1) this->release_outer();
    }

    // Scores in base 2, in the registers of their integers.
    OA_DEVICE void make_scores(Walk& w) const {
        const int32 n = tile_now(w);
        if (n < w.keys.full_first || n >= w.keys.full_end)
            mask_edges(w.s, p_, w.t, w.warp_row, n * Config::kBlockN, lane_);
        make_base2(w.s, w.scale);
    }
    // P(i), except as operand: of integers, of scores in base 2.
    OA_DEVICE void exponentiate_integers(Walk& w) const {
        w.sum[0] = w.sum[1] = 0.0f;
        const float c[2] = {w.scale, w.scale};
        w.state.softmax.template exponentiate_in_order<false, Config::kByRow>(w.s, c, w.packer());
    }
    OA_DEVICE void exponentiate_floats(Walk& w) const {
        w.sum[0] = w.sum[1] = 0.0f;
        const float c[2] = {1.0f, 1.0f};
        float f[Config::kNTiles * 4];
        floats_of(w.s, f);
        w.state.softmax.template exponentiate_in_order<false, Config::kByRow>(f, c, w.packer());
    }
    // P(i) anew, of scores in base 2, with the base raised to the largest.
    OA_DEVICE void redo(Walk& w) const {
        float f[Config::kNTiles * 4];
        floats_of(w.s, f);
        raise_on_grid(w.state.softmax, f, 1.0f, w.alpha);
        w.rescale_sums();
        exponentiate_floats(w);
        w.renew_probs();
    }
};
