// Lists of the tiles that a block mask leaves, for the backward (params/mask_tiles.cuh): of a tile of keys the tiles of
// 64 queries, one list for each query head of its kv head.
#pragma once
#include "params/attn_bwd.cuh"
#include "params/mask_tiles.cuh"
#include "ptx/types.cuh"
#include "scheduler/bwd_feed.cuh"
#include "scheduler/bwd_tile.cuh"
#include "scheduler/fwd_tile.cuh"

constexpr int32 kListedRows = 64;  // of a tile that an entry names

// The list of tile `block` of a query head: its count, then as many entries, the last tile first.
OA_DEVICE const int32* bwd_list(const AttnBwdParams& p, int32 batch_idx, int32 head, int32 block) {
    return p.lists + batch_idx * p.lists_stride_b + head * p.lists_stride_h + block * (1 + int64(p.num_list_tiles));
}
OA_DEVICE constexpr int32 listed_tile(int32 entry) { return entry & (kFirstGroup - 1); }
// Whether group `group` of 64 of what the list is of sees nothing of the entry's tile.
OA_DEVICE constexpr bool is_hidden(int32 entry, int32 group) {
    return (entry >> (kGroupShift + 2 * group) & 3) == kTileEmpty;
}

// Entries of the lists of a tile of keys, of all query heads of its kv head; one warp, all lanes together, which all
// get the sum.
OA_DEVICE int32 listed_steps(const AttnBwdParams& p, const BwdTile& t, int32 block) {
    const int32 heads = p.fwd.num_q_heads / p.fwd.num_kv_heads;
    int32 steps = 0;
    for (int32 h = threadIdx.x & 31; h < heads; h += 32)
        steps += *bwd_list(p, t.batch_idx, t.kv_head_idx * heads + h, block);
#pragma unroll
    for (int x = 1; x < 32; x *= 2) steps += __shfl_xor_sync(0xffffffffu, steps, x);
    return steps;
}

// Tiles of keys of dense batches as DrawnBwdTiles has them, with how many steps each takes; one warp, all lanes
// together.
template <int kBlockN>
class ListedBwdTiles {
  public:
    OA_DEVICE ListedBwdTiles(const AttnBwdParams& p) : p_(p), tiles_(p.fwd, item_counter(p)) {}

    // Moves `t` to the next tile; false when there is none.
    OA_DEVICE bool next(BwdTile& t) {
        if (!tiles_.next(t)) return false;
        t.steps = listed_steps(p_, t, t.n0 / kBlockN);
        return true;
    }

  private:
    const AttnBwdParams& p_;
    DrawnBwdTiles<kBlockN> tiles_;
};

// Hands these tiles to the other roles; one warp.
template <int kBlockN>
OA_DEVICE void walk_listed_bwd_tiles(const AttnBwdParams& p) {
    ListedBwdTiles<kBlockN> tiles(p);
    RingState<kTileStages> at;
    for (bool more = true; more; at.advance()) {
        BwdFeedStorage<true>::ring().wait_empty(at);
        more = hand_on_bwd_tile(tiles, at);
    }
}

// The tiles of kBlockN keys that a tile of queries visits, one after the other: those of its window, or of a list of
// tiles of 64 keys, where a call has one; some of these may lie behind the last key or outside of the window.
template <bool kLists, int kBlockM, int kBlockN>
struct KeySteps {
    int32 n;  // the tile
    int32 left;  // from it on
    template <typename Keys>
    OA_DEVICE KeySteps(const AttnBwdParams&, const FwdTile&, const Keys& keys)
        : n(keys.first), left(keys.end - keys.first) {}
    OA_DEVICE void advance() { ++n; }
    // Whether row `row` of the tile of queries, and the others of its 64, see nothing of the tile.
    OA_DEVICE static constexpr bool hides_all(int32) { return false; }
};
template <int kBlockM, int kBlockN>
struct KeySteps<true, kBlockM, kBlockN> : KeySteps<false, kBlockM, kBlockN> {
    using Plain = KeySteps<false, kBlockM, kBlockN>;
    using Plain::n, Plain::left;
    static constexpr int32 kParts = kListedRows / kBlockN;
    static_assert(kParts * kBlockN == kListedRows, "an entry names whole tiles");

    template <typename Keys>
    OA_DEVICE KeySteps(const AttnBwdParams& p, const FwdTile& t, const Keys& keys) : Plain(p, t, keys), list(p.lists) {
        if (list == nullptr) return;
        list = bwd_list(p, t.batch_idx, t.head_idx, t.m0 / kBlockM);
        left = *list * kParts;
        n = kParts - 1;  // the last part of an entry, before the first one
        if (left > 0) advance();
    }
    OA_DEVICE void advance() {
        if (list == nullptr || (n + 1) % kParts != 0) {
            ++n;
            return;
        }
        entry = *++list;
        n = listed_tile(entry) * kParts;
    }
    OA_DEVICE bool hides_all(int32 row) const { return kBlockM > kListedRows && is_hidden(entry, row / kListedRows); }

    const int32* list;  // at the tile's entry
    int32 entry = kAllGroups * kTileFull;
};
