// Which keys a split of a tile of queries has (scheduler/split_tiles.cuh).
#pragma once
#include "attention/mask.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/stream_k.cuh"
#include "scheduler/split_tiles.cuh"

// The keys that a row of a tile sees.
OA_DEVICE KeyRange visible_to(const AttnFwdParams& p, const SplitTile& t, int32 row) {
    return visible_keys(row / t.pack, t.num_queries, t.seqlen_k, p.window_left, p.window_right);
}
OA_DEVICE KeyRange visible_to(const AttnFwdParams& p, const StreamKTile& t, int32 row) {
    return visible_keys(query_of(t, row), t.num_queries, t.seqlen_k, p.window_left, p.window_right);
}

OA_DEVICE KeyRange visible_to(const AttnFwdParams& p, const PackedTile& t, int32 row) {
    return visible_keys(query_of(t, row), query_of(t, t.seqlen_q), t.seqlen_k, p.window_left, p.window_right);
}

// A split's part of the tiles of keys that a tile of queries sees: as many as the others have, or one more. Of packed
// sequences the part that the tile says.
template <int kBlockM, int kBlockN>
struct SplitKeyTiles : KeyTiles<kBlockM, kBlockN> {
    using Base = KeyTiles<kBlockM, kBlockN>;
    OA_DEVICE constexpr SplitKeyTiles(const AttnFwdParams& p, const SplitTile& t)
        : SplitKeyTiles(t.m0, t.pack, t.num_queries, t.seqlen_k, p.window_left, p.window_right, t.split, t.num_splits) {
    }
    OA_DEVICE constexpr SplitKeyTiles(const AttnFwdParams& p, const StreamKTile& t)
        : Base(query_of(t, t.m0), query_of(t, min_of(t.m0 + kBlockM, t.seqlen_q) - 1), t.num_queries, t.seqlen_k,
               p.window_left, p.window_right) {
        if (t.num_splits == 1) return;
        const int64 count = max_of(this->end - this->first, 0);
        const int32 begin = int32(count * t.part_begin / t.part_of), end = int32(count * t.part_end / t.part_of);
        this->end = this->first + end;
        this->first += begin;
    }
    OA_DEVICE constexpr SplitKeyTiles(int32 m0, int32 pack, int32 num_queries, int32 seqlen_k, int32 window_left,
                                      int32 window_right, int32 split, int32 num_splits)
        : Base(m0 / pack, (min_of(m0 + kBlockM, num_queries * pack) - 1) / pack, num_queries, seqlen_k, window_left,
               window_right) {
        const SplitPart part(max_of(this->end - this->first, 0), split, num_splits);
        this->first += part.first;
        this->end = this->first + part.count;
    }
};

// Config as in scheduler/persistent_roles.cuh.
template <typename Config>
using KeyTilesOf = typename Select<Config::kSplitKeys, SplitKeyTiles<Config::kBlockM, Config::kBlockN>,
                                   KeyTiles<Config::kBlockM, Config::kBlockN>>::Type;
