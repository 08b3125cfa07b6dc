// Tiles of queries by splits of their keys: few queries on many keys (Flash-Decoding, Dao et al. 2023). Query heads of
// one kv head share the rows of a tile (params/attn_fwd.cuh: SplitTileList).
//
// A head's items are its tiles of queries of one split, then those of the next: CTAs that run at the same time read the
// same keys, so that these come from L2. So it is with a few tiles of a call that has many.
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
OA_DEVICE bool is_of_head(const SplitTile& t, int32 row) { return row % t.pack < t.pack_heads; }

// The same on mma.sync, a CTA each: pack_heads query heads have 2^pack_log2 rows a query. At most 8, so that rows which
// are 8 apart have one head, and a lane's rows are queries at equal distances. Rows that are no head's repeat the last.
struct PackedTile : FwdTile {
    int32 pack_log2, pack_heads;
};
OA_DEVICE int32 query_of(const PackedTile& t, int32 row) { return row >> t.pack_log2; }
OA_DEVICE int32 head_of(const PackedTile& t, int32 row) {
    return t.head_idx * t.pack_heads + min_of(row & ((1 << t.pack_log2) - 1), t.pack_heads - 1);
}
OA_DEVICE bool is_of_head(const PackedTile& t, int32 row) { return (row & ((1 << t.pack_log2) - 1)) < t.pack_heads; }

class SplitTiles {
  public:
    // As PersistentTiles::next.
    template <int kBlockM, bool kRotate = false>
    OA_DEVICE bool next(const AttnFwdParams& p, const SplitTileList& list, SplitTile& t) {
        const bool few = list.num_tiles != 0;
        const uint32 blocks = p.num_m_blocks, each = few ? list.num_tiles : blocks * list.num_splits;
        uint32 outer, item;
        if (!items_.next(list, each, uint32(p.batch) * p.num_q_heads, outer, item)) return false;
        // Of few tiles: (split, tile); else (head, split, block).
        if (few) item += list.first_tile;
        const uint32 quotient = item / blocks, rest = item - quotient * blocks;
        const uint32 head = few ? quotient : outer, block = few ? blocks - 1 - rest : rest;
        const uint32 batch_idx = head / p.num_q_heads;
        static_cast<FwdTile&>(t) = tile_of(p, batch_idx, head - batch_idx * p.num_q_heads, int32(block * kBlockM));
        t.split = few ? outer : quotient;
        t.num_splits = list.num_splits;
        t.pack = list.pack;
        t.num_queries = list.num_queries;
        t.pack_heads = list.pack_heads;
        return true;
    }

  private:
    PersistentItems items_;
};

// Among partial results, where row 0 of the tile's head is, or would be.
template <int kBlockM>
OA_DEVICE int64 first_partial_row(const AttnFwdParams& p, const SplitTileList& list, const SplitTile& t) {
    const int32 head = t.batch_idx * p.num_q_heads + t.head_idx;
    if (list.num_tiles == 0) return (int64(head) * t.num_splits + t.split) * t.seqlen_q;
    const uint32 tile = (head + 1) * p.num_m_blocks - 1 - t.m0 / kBlockM;
    return int64(t.split * list.num_tiles + (tile - list.first_tile)) * kBlockM - t.m0;
}

// Of attn_fwd_sm80.
template <typename Config>
using SyncTileOf = typename Select<Config::kSplitKeys, PackedTile, FwdTile>::Type;

// What the roles of a persistent kernel walk over. Config::kSplitKeys: keys are split over CTAs.
template <typename Config>
using ListOf = typename Select<Config::kSplitKeys, SplitTileList, TileList>::Type;
template <typename Config>
using TilesOf = typename Select<Config::kSplitKeys, SplitTiles, PersistentTiles>::Type;
