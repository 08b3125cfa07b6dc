// Shared memory, barriers and the producer of attn_fwd_d512_sm90 (entry/), whose clusters of two CTAs have half of O's
// channels each.
//
// Config: kPanels, kPanelsV (of 64 channels of q and k, of a CTA's half of v), kVarlen, kStages.
#pragma once
#include "attention/mask.cuh"
#include "params/attn_fwd.cuh"
#include "pipeline/ring.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "scheduler/cluster_tiles.cuh"
#include "scheduler/fwd_tile.cuh"

constexpr uint32 kPair = 2;  // CTAs of a cluster
constexpr int32 kQueries = 128, kOwnKeys = 64, kStepKeys = kPair * kOwnKeys;  // of a tile; of a step of a CTA, of both
// K and V come in units, which are the buffers of one ring: of K two panels of a CTA's keys, of V 32 keys.
constexpr int32 kUnitPanels = 2, kUnitKeysV = 32;

// Bytes, and numbers of units.
template <typename Config>
struct HalvedOLayout {
    static constexpr uint32 kQPanel = kQueries * 128, kKPanel = kOwnKeys * 128, kVPanel = kUnitKeysV * 128;
    static constexpr uint32 kUnit = max_of(kUnitPanels * kKPanel, Config::kPanelsV* kVPanel);
    static constexpr int kUnitsK = (Config::kPanels + kUnitPanels - 1) / kUnitPanels;  // of a step
    static constexpr int kUnitsV = kOwnKeys / kUnitKeysV;  // of a CTA's keys of a step
    // P of a warpgroup, in the order of its threads' registers; base and sum of its rows.
    static constexpr uint32 kP = 64 * kOwnKeys * 2, kRows = 64 * 8;
    // Panels of unit u.
    OA_DEVICE static constexpr int panels_of(int u) { return min_of(Config::kPanels - kUnitPanels * u, kUnitPanels); }
};

// The steps of a tile, from the last to the first. Step n: keys from 128 n on, CTA r has the 64 from 128 n + 64 r on.
using PairSteps = KeyTiles<kQueries, kStepKeys>;

// What consumers are told of a tile, by the producer, which alone walks over the tiles: FwdTile and PairSteps.
struct HandedTile {
    int32 batch_idx, head_idx, m0, q_begin, seqlen_q, k_begin, seqlen_k;  // m0 = kNoMoreTiles: there is none
    int32 first, end, full_first, full_end;
};

template <typename Config>
struct HalvedOStorage {
    using Layout = HalvedOLayout<Config>;
    alignas(1024) uint8 q[Config::kPanels * Layout::kQPanel];
    alignas(1024) uint8 units[Config::kStages][Layout::kUnit];
    alignas(1024) uint8 p[2][Layout::kP];  // what the other CTA's warpgroups sent
    alignas(16) uint8 rows[2][Layout::kRows];
    uint64 q_full[Layout::kUnitsK], q_empty[Layout::kUnitsK];
    uint64 full[Config::kStages], empty[Config::kStages];
    uint64 p_full[2], p_empty[2], tile_empty[2];
    HandedTile tiles[2];  // valid from q_full[0] of the tile to its tile_empty
    SequenceRange sequences[Config::kVarlen ? 32 : 1];
};

template <typename Config>
struct HalvedOBarriers {
    using Storage = HalvedOStorage<Config>;
    using Layout = HalvedOLayout<Config>;

    uint32 base = smem_base<kPair>();  // of all addresses here and of copies
    uint32 q_full = smem_addr_at(&Storage::q_full, base), q_empty = smem_addr_at(&Storage::q_empty, base);
    Ring<Config::kStages> ring{smem_addr_at(&Storage::full, base), smem_addr_at(&Storage::empty, base)};
    uint32 p_full = smem_addr_at(&Storage::p_full, base), p_empty = smem_addr_at(&Storage::p_empty, base);
    uint32 tile_empty = smem_addr_at(&Storage::tile_empty, base);

    // One thread; a barrier of the cluster must follow.
    OA_DEVICE void init() const {
        for (int u = 0; u < Layout::kUnitsK; ++u) {
            mbarrier_init(q_full + 8 * u, 1);
            mbarrier_init(q_empty + 8 * u, 8);
        }
        ring.init(8);
        for (int group = 0; group < 2; ++group) {  // or slot
            mbarrier_init(p_full + 8 * group, 1);  // and the bytes that the other CTA sends
            mbarrier_init(p_empty + 8 * group, 4);  // warps of the other CTA
            mbarrier_init(tile_empty + 8 * group, 256);
        }
        fence_barrier_init();
    }
};

template <typename Config>
class HalvedOProducer {
    using Layout = HalvedOLayout<Config>;
    using Storage = HalvedOStorage<Config>;

  public:
    OA_DEVICE HalvedOProducer(const AttnFwdSm90Params& params, Storage& smem, const HalvedOBarriers<Config>& bars)
        : params_(params), smem_(smem), bars_(bars), rank_(int32(cluster_rank())) {}

    // One warp; one lane copies.
    OA_DEVICE void run(int32 lane) {
        const AttnFwdParams& p = params_.fwd;
        if (lane == 0) {
            tma_prefetch(&params_.map_q);
            tma_prefetch(&params_.map_k);
            tma_prefetch(&params_.map_v);
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
        const PairSteps steps(params_.fwd, t);
        wait_slot();
        smem_.tiles[q_phase_] = {t.batch_idx, t.head_idx,  t.m0,      t.q_begin,        t.seqlen_q,    t.k_begin,
                                 t.seqlen_k,  steps.first, steps.end, steps.full_first, steps.full_end};
        const bool is_empty = steps.is_empty();
        asm volatile("" ::: "memory");  // from here on the tile is that in shared memory: registers are short
        if (!is_empty) {
            copy_tile(smem_.tiles[q_phase_]);
        } else {
            for (int u = 0; u < Layout::kUnitsK; ++u) {
                mbarrier_wait(bars_.q_empty + 8 * u, q_phase_ ^ 1);
                mbarrier_arrive_expect_tx(bars_.q_full + 8 * u, 0);
            }
        }
        slot_phase_ ^= q_phase_;
        q_phase_ ^= 1;
    }
    OA_DEVICE void wait_slot() const { mbarrier_wait(bars_.tile_empty + 8 * q_phase_, slot_phase_ ^ 1); }

    // K of a step comes with V of the step before.
    OA_DEVICE void copy_tile(const HandedTile& t) {
        kv_head_ = t.head_idx / (params_.fwd.num_q_heads / params_.fwd.num_kv_heads);
        int32 n = t.end - 1;
        copy_k<true>(t, n);
#pragma unroll 1
        for (; n > t.first; --n) {
            copy_k<false>(t, n - 1);
            copy_v(t, n);
        }
        copy_v(t, n);
    }
    // kFirst: with Q, whose unit of channels comes just ahead.
    template <bool kFirst>
    OA_DEVICE void copy_k(const HandedTile& t, int32 n) {
        const int32 row = t.k_begin + n * kStepKeys + rank_ * kOwnKeys, batch_idx = t.batch_idx;
#pragma unroll
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
    // Of all keys of a step this CTA's channels; its own keys come first.
    OA_DEVICE void copy_v(const HandedTile& t, int32 n) {
        const int32 batch_idx = t.batch_idx, row = t.k_begin + n * kStepKeys;
#pragma unroll
        for (int u = 0; u < 2 * Layout::kUnitsV; ++u) {
            const int32 of = (u < Layout::kUnitsV ? rank_ : 1 - rank_) * kOwnKeys + u % Layout::kUnitsV * kUnitKeysV;
            const uint32 bar = bars_.ring.acquire(at_, Config::kPanelsV * Layout::kVPanel);
            const uint32 to = unit();
#pragma unroll
            for (int c = 0; c < Config::kPanelsV; ++c)
                tma_load_4d(to + c * Layout::kVPanel, &params_.map_v, bar, (rank_ * Config::kPanelsV + c) * 64,
                            row + of, kv_head_, batch_idx);
            at_.advance();
        }
    }
    OA_DEVICE uint32 unit() const { return smem_addr_at(&Storage::units, bars_.base) + at_.stage * Layout::kUnit; }

    const AttnFwdSm90Params& params_;
    Storage& smem_;
    const HalvedOBarriers<Config>& bars_;
    const int32 rank_;
    int32 kv_head_ = 0;
    RingState<Config::kStages> at_;
    uint32 q_phase_ = 0, slot_phase_ = 0;  // slot_phase_ turns with every other tile
};
