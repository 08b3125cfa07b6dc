// The producer of attn_fwd_d512_sm90 (entry/), one warp of either CTA of a cluster.
//
// Config: as for HalvedOStorage, and Params.
#pragma once
#include "attention/halved_o_mods.cuh"
#include "attention/halved_o_storage.cuh"
#include "params/attn_fwd.cuh"
#include "pipeline/ring.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "scheduler/cluster_tiles.cuh"
#include "scheduler/fwd_tile.cuh"

template <typename Config>
class HalvedOProducer {
    using Layout = HalvedOLayout<Config>;
    using Storage = HalvedOStorage<Config>;
    using Params = typename Config::Params;
    // With a list and packed sequences to walk over registers are shorter still.
    static constexpr int kUnroll = Config::kVarlen && Config::kScoreMods ? 1 : 8;

  public:
    OA_DEVICE HalvedOProducer(const Params& params, Storage& smem, const HalvedOBarriers<Config>& bars)
        : params_(params), smem_(smem), bars_(bars), rank_(int32(cluster_rank())) {}

    // One warp; one lane copies.
    OA_DEVICE void run(int32 lane) {
        const AttnFwdParams& p = params_.fwd;
        if (lane == 0) {
            tma_prefetch(&params_.map_q);
            tma_prefetch(&params_.map_k);
            tma_prefetch(&params_.map_v);
            if constexpr (Layout::kUnitsBias != 0) tma_prefetch(&params_.map_bias);
        }
        if constexpr (Config::kVarlen) {
            PackedClusterTiles<kQueries, kPair> tiles(p, params_.tiles, smem_.sequences);
            for (FwdTile t; tiles.next(t);) {
                if (lane == 0) take(t);
                __syncwarp();
            }
        } else if (lane == 0) {
            ClusterTiles<kQueries, kPair> tiles;
            for (FwdTile t; tiles.next(p, params_.tiles, t);) take(t);
        }
        if (lane == 0) {
            mbarrier_wait(bars_.q_empty, q_phase_ ^ 1);
            wait_slot();
            smem_.tiles[q_phase_].m0 = kNoMoreTiles;
            mbarrier_arrive_expect_tx(bars_.q_full, 0);
        }
    }

  private:
    OA_DEVICE void take(const FwdTile& t) {
        if constexpr (Config::kScoreMods) {
            take_listed(params_, t);
            return;
        }
        const PairSteps steps(params_.fwd, t);
        wait_slot();
        smem_.tiles[q_phase_] = {t.batch_idx, t.head_idx,  t.m0,      t.q_begin,        t.seqlen_q,    t.k_begin,
                                 t.seqlen_k,  steps.first, steps.end, steps.full_first, steps.full_end};
        const bool is_empty = steps.is_empty();
        asm volatile("" ::: "memory");  // from here on the tile is that in shared memory: registers are short
        if (!is_empty) {
            copy_tile(smem_.tiles[q_phase_]);
        } else {
            pass_over_q();
        }
        next_slot();
    }
    OA_DEVICE void pass_over_q() const {
        for (int u = 0; u < Layout::kUnitsK; ++u) {
            mbarrier_wait(bars_.q_empty + 8 * u, q_phase_ ^ 1);
            mbarrier_arrive_expect_tx(bars_.q_full + 8 * u, 0);
        }
    }
    OA_DEVICE void next_slot() {
        slot_phase_ ^= q_phase_;
        q_phase_ ^= 1;
    }
    // As take, with score modifications: steps are those of a list.
    template <typename P>
    OA_DEVICE void take_listed(const P& params, const FwdTile& t) {
        wait_slot();
        HandedModsTile& to = smem_.tiles[q_phase_];
        to.batch_idx = t.batch_idx, to.head_idx = t.head_idx, to.sequence = t.sequence;
        to.m0 = t.m0, to.q_begin = t.q_begin, to.seqlen_q = t.seqlen_q;
        to.k_begin = t.k_begin, to.seqlen_k = t.seqlen_k;
        hand_list<Config::kVarlen>(params, t, to);
        to.first = 0, to.end = (to.count + 1) / 2;
        asm volatile("" ::: "memory");
        if (to.end > 0) {
            copy_listed(params, to);
        } else {
            pass_over_q();
        }
        next_slot();
    }
    // As copy_tile. Entries of a list are read a step before they are used.
    template <typename P>
    OA_DEVICE void copy_listed(const P& params, HandedModsTile& t) {
        kv_head_ = t.head_idx / (params_.fwd.num_q_heads / params_.fwd.num_kv_heads);
        int32 n = t.end - 1;
        hand(t, n, entries_of(t, 0));
        PairEntries next = entries_of(t, min_of(1, n));
        copy_k<true>(t, first_key(t, n, rank_));
        copy_bias(params, t, first_key(t, n, rank_));
#pragma unroll 1
        for (; n > 0; --n) {
            const PairEntries later = entries_of(t, min_of(t.end - n + 1, t.end - 1));
            bars_.ring.wait_empty(at_);
            hand(t, n - 1, next);
            copy_k<false>(t, first_key(t, n - 1, rank_));
            copy_bias(params, t, first_key(t, n - 1, rank_));
            copy_v(t, first_key(t, n, rank_));
            copy_v(t, first_key(t, n, 1 - rank_));
            next = later;
        }
        copy_v(t, first_key(t, n, rank_));
        copy_v(t, first_key(t, n, 1 - rank_));
    }
    // Before the first unit of K of the step is announced. What was handed at its place is of two steps ago, which no
    // warp reads any more once that unit's buffer is free.
    OA_DEVICE static void hand(HandedModsTile& t, int32 n, const PairEntries& x) {
#pragma unroll
        for (int32 rank = 0; rank < int32(kPair); ++rank) t.entries[2 * (n & 1) + rank] = x.of[rank];
    }
    // Of a CTA's keys of a step that has been handed on.
    OA_DEVICE static int32 first_key(const HandedModsTile& t, int32 n, int32 rank) {
        return ListSteps::tile(t.entries[2 * (n & 1) + rank]) * kOwnKeys;
    }
    template <typename P>
    OA_DEVICE void copy_bias(const P& params, const HandedModsTile& t, int32 key) {
        if constexpr (Layout::kUnitsBias != 0) {
#pragma unroll 1
            for (int c = 0; c < Layout::kUnitsBias; ++c) {
                const uint32 bar = bars_.ring.acquire(at_, Layout::kUnit);
                tma_load_4d(unit(), &params.map_bias, bar, key + c * (128 / Config::kBiasBytes), t.m0,
                            t.head_idx * params.mods.bias_head, t.sequence * params.mods.bias_batch);
                at_.advance();
            }
        }
    }
    OA_DEVICE void wait_slot() const { mbarrier_wait(bars_.tile_empty + 8 * q_phase_, slot_phase_ ^ 1); }

    // K of a step comes with V of the step before.
    OA_DEVICE void copy_tile(const HandedTile& t) {
        kv_head_ = t.head_idx / (params_.fwd.num_q_heads / params_.fwd.num_kv_heads);
        const int32 own = rank_ * kOwnKeys, other = (1 - rank_) * kOwnKeys;
        int32 n = t.end - 1;
        copy_k<true>(t, n * kStepKeys + own);
#pragma unroll 1
        for (; n > t.first; --n) {
            copy_k<false>(t, (n - 1) * kStepKeys + own);
            copy_v(t, n * kStepKeys + own);
            copy_v(t, n * kStepKeys + other);
        }
        copy_v(t, n * kStepKeys + own);
        copy_v(t, n * kStepKeys + other);
    }
    // Of the CTA's keys of a step, from `key` on. kFirst: with Q, whose unit of channels comes just ahead.
    template <bool kFirst>
    OA_DEVICE void copy_k(const HandedTile& t, int32 key) {
        const int32 row = t.k_begin + key, batch_idx = t.batch_idx;
#pragma unroll(kUnroll)
        for (int u = 0; u < Layout::kUnitsK; ++u) {
            const int panels = Layout::panels_of(u);
            if constexpr (kFirst) {
                mbarrier_wait(bars_.q_empty + 8 * u, q_phase_ ^ 1);
                mbarrier_arrive_expect_tx(bars_.q_full + 8 * u, panels * Layout::kQPanel);
                const int32 q_row = t.q_begin + t.m0, head_idx = t.head_idx;
#pragma unroll
                for (int c = kUnitPanels * u; c < kUnitPanels * u + panels; ++c)
                    tma_load_4d(smem_addr_at(&Storage::q, bars_.base) + c * Layout::kQPanel, &params_.map_q,
                                bars_.q_full + 8 * u, c * 64, q_row, head_idx, batch_idx);
            }
            const uint32 bar = bars_.ring.acquire(at_, panels * Layout::kKPanel);
            const uint32 to = unit();
#pragma unroll
            for (int c = 0; c < panels; ++c)
                tma_load_4d(to + c * Layout::kKPanel, &params_.map_k, bar, (kUnitPanels * u + c) * 64, row, kv_head_,
                            batch_idx);
            at_.advance();
        }
    }
    // Of 64 keys from `key` on this CTA's channels. Of a step its own keys come first.
    OA_DEVICE void copy_v(const HandedTile& t, int32 key) {
        const int32 batch_idx = t.batch_idx, row = t.k_begin + key;
        // Computed here where registers are short: else the compiler keeps each panel's column.
        const int32 column = (Config::kScoreMods ? in_register(rank_) : rank_) * Config::kPanelsV * 64;
#pragma unroll(kUnroll)
        for (int u = 0; u < Layout::kUnitsV; ++u) {
            const uint32 bar = bars_.ring.acquire(at_, Config::kPanelsV * Layout::kVPanel);
            const uint32 to = unit();
#pragma unroll
            for (int c = 0; c < Config::kPanelsV; ++c)
                tma_load_4d(to + c * Layout::kVPanel, &params_.map_v, bar, column + c * 64, row + u * kUnitKeysV,
                            kv_head_, batch_idx);
            at_.advance();
        }
    }
    OA_DEVICE uint32 unit() const { return smem_addr_at(&Storage::units, bars_.base) + at_.stage * Layout::kUnit; }

    const Params& params_;
    Storage& smem_;
    const HalvedOBarriers<Config>& bars_;
    const int32 rank_;
    int32 kv_head_ = 0;
    RingState<Config::kStages> at_;
    uint32 q_phase_ = 0, slot_phase_ = 0;  // slot_phase_ turns with every other tile
};
