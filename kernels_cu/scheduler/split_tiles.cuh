// Tiles of queries by splits of their keys: few queries on many keys (Flash-Decoding, Dao et al. 2023). Query heads of
// one kv head share the rows of a tile (params/attn_fwd.cuh: SplitTileList).
//
// A head's items are its tiles of queries of one split, then those of the next: CTAs that run at the same time read the
// same keys, so that these come from L2.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/persistent.cuh"

// A split's part of `of` steps: as many as the others have, or one more.
struct SplitPart {
    int32 first, count;
    OA_DEVICE constexpr SplitPart(int32 of, int32 split, int32 num_splits) : first(0), count(of) {
        int32 each = of / num_splits, rest = of - each * num_splits;
        first = split * each + min_of(split, rest);
        count = each + (split < rest ? 1 : 0);
    }
};

struct SplitTile : FwdTile {
    int32 split, num_splits;
    int32 pack, num_queries, pack_heads;
};
OA_DEVICE int32 query_of(const SplitTile& t, int32 row) { return row / t.pack; }
OA_DEVICE int32 head_of(const SplitTile& t, int32 row) {
    return t.head_idx * t.pack_heads + min_of(row % t.pack, t.pack_heads - 1);
}

// The same on mma.sync, a CTA each: pack_heads query heads have 2^pack_log2 rows a query. At most 8, so that rows which
// are 8 apart have one head, and a lane's rows are queries at equal distances. Rows that are no head's repeat the last.
struct PackedTile : FwdTile {
    int32 pack_log2, pack_heads;
};
OA_DEVICE int32 query_of(const PackedTile& t, int32 row) { return row >> t.pack_log2; }
OA_DEVICE int32 head_of(const PackedTile& t, int32 row) {
    return t.head_idx * t.pack_heads + min_of(row & ((1 << t.pack_log2) - 1), t.pack_heads - 1);
}

class SplitTiles {
  public:
    // As PersistentTiles::next.
    template <int kBlockM, bool kRotate = false>
    OA_DEVICE bool next(const AttnFwdParams& p, const SplitTileList& list, SplitTile& t) {
        uint32 head, item, blocks = p.num_m_blocks;
        if (!items_.next(list, blocks * list.num_splits, uint32(p.batch) * p.num_q_heads, head, item)) return false;
        uint32 split = item / blocks, batch_idx = head / p.num_q_heads;
        static_cast<FwdTile&>(t) =
            tile_of(p, batch_idx, head - batch_idx * p.num_q_heads, int32((item - split * blocks) * kBlockM));
        t.split = split;
        t.num_splits = list.num_splits;
        t.pack = list.pack;
        t.num_queries = list.num_queries;
        t.pack_heads = list.pack_heads;
        return true;
    }

  private:
    PersistentItems items_;
};

// Of attn_fwd_sm80.
template <typename Config>
using SyncTileOf = typename Select<Config::kSplitKeys, PackedTile, FwdTile>::Type;

// What the roles of a persistent kernel walk over. Config::kSplitKeys: keys are split over CTAs.
template <typename Config>
using ListOf = typename Select<Config::kSplitKeys, SplitTileList, TileList>::Type;
template <typename Config>
using TileOf = typename Select<Config::kSplitKeys, SplitTile, FwdTile>::Type;
template <typename Config>
using TilesOf = typename Select<Config::kSplitKeys, SplitTiles, PersistentTiles>::Type;
