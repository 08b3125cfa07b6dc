// Shared memory and barriers of attn_fwd_d512_sm90 (entry/), whose clusters of two CTAs have half of O's channels each.
//
// Config: kPanels, kPanelsV (of 64 channels of q and k, of a CTA's half of v), kVarlen, kStages, kScoreMods, kBiasBytes
// (of an element of an additive mask; 0: none).
#pragma once
#include "attention/mask.cuh"
#include "pipeline/ring.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
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
    // Of an additive mask: panels of 128 bytes of all queries, that of 32 bits has two.
    static constexpr int kUnitsBias = kOwnKeys * Config::kBiasBytes / 128;
    static_assert(kUnitsBias == 0 || kUnit == kQueries * 128, "a unit is a panel of the mask");
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

// With score modifications. Tiles of keys are of 64 then; steps of the tile count down to 0: first is 0, end their
// number.
struct HandedModsTile : HandedTile {
    int32 sequence;
    int32 entries[2 * kPair];  // of step n: 2 * (n % 2) + CTA (PairEntries); valid from its first unit of K on
    const int32* list;  // of all tiles of keys, the last one first; null: `last` and those before it
    int32 count, last;  // of them; as an entry
};

template <typename Config>
struct HalvedOStorage {
    using Layout = HalvedOLayout<Config>;
    using Tile = typename Select<Config::kScoreMods, HandedModsTile, HandedTile>::Type;
    alignas(1024) uint8 q[Config::kPanels * Layout::kQPanel];
    alignas(1024) uint8 units[Config::kStages][Layout::kUnit];
    alignas(1024) uint8 p[2][Layout::kP];  // what the other CTA's warpgroups sent
    alignas(16) uint8 rows[2][Layout::kRows];
    uint64 q_full[Layout::kUnitsK], q_empty[Layout::kUnitsK];
    uint64 full[Config::kStages], empty[Config::kStages];
    uint64 p_full[2], p_empty[2], tile_empty[2];
    Tile tiles[2];  // valid from q_full[0] of the tile to its tile_empty
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
