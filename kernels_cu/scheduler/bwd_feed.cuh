// Tiles of keys for the roles of a persistent kernel. Of dense batches every role walks the list by itself. Of packed
// sequences, and where tiles are drawn in an order, one warp walks ahead of the other roles, which get the tiles by way
// of shared memory:
//
//   walker    tile_empty -> tile -> tile_full
//   others    tile_full -> read -> tile_empty
#pragma once
#include "params/attn_bwd.cuh"
#include "pipeline/ring.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "ptx/uniform.cuh"
#include "scheduler/bwd_tile.cuh"
#include "scheduler/persistent.cuh"

// One tile ahead, not more: a tile that waits for a CTA cannot go to another one.
constexpr int32 kTileStages = 1;

// The first bytes of a kernel's shared memory; nothing where every role walks.
template <bool kWalker>
struct BwdFeedStorage {};
template <>
struct BwdFeedStorage<true> {
    alignas(16) BwdTile tile[kTileStages];  // n0 = kNoMoreTiles ends
    SequenceRange sequences[32];  // of the walker
    uint64 tile_full[kTileStages], tile_empty[kTileStages];
    // Of the order of dQ (attention/bwd_ordered.cuh).
    uint64 steps_asked[2], steps_before[2];
    uint64 tiles_due;  // how many tiles the producer has as good as ended
    // Of the end of dQ (attention/bwd_finish.cuh): how many tiles either writer has added; a tile of each consumer
    // warp.
    uint64 tiles_ended[2];
    alignas(16) uint4 tile_before[8];
    int32 entries[4];  // of lists (attention/bwd_listed.cuh), one a stage of Q
    uint64 v_empty;  // of lists: V is free before K is

    OA_DEVICE static Ring<kTileStages> ring() {
        return {smem_addr_at(&BwdFeedStorage::tile_full), smem_addr_at(&BwdFeedStorage::tile_empty)};
    }
    OA_DEVICE static uint32 entry_at(int32 stage) { return smem_addr_at(&BwdFeedStorage::entries) + 4 * stage; }
    OA_DEVICE static uint32 v_free() { return smem_addr_at(&BwdFeedStorage::v_empty); }
    OA_DEVICE static uint32 due() { return smem_addr_at(&BwdFeedStorage::tiles_due); }
    template <typename Member>
    OA_DEVICE static Member* at(Member BwdFeedStorage::* member) {
        return static_cast<Member*>(__cvta_shared_to_generic(smem_addr_at(member)));
    }
};

// kWarp: next() is called by whole warps, whose lanes all get the tile; else by one thread. kWalker: a warp walks.
template <int kBlockN, bool kVarlen, bool kWarp, bool kWalker = kVarlen>
class BwdFeed {
  public:
    OA_DEVICE BwdFeed(const AttnFwdParams& p, const TileList& list) : p_(p), list_(list) {}

    // Moves `t` to the next tile; false when there is none.
    OA_DEVICE bool next(BwdTile& t) { return tiles_.next<kBlockN>(p_, list_, t); }

  private:
    const AttnFwdParams& p_;
    const TileList& list_;
    PersistentBwdTiles tiles_;
};

template <int kBlockN, bool kVarlen, bool kWarp>
class BwdFeed<kBlockN, kVarlen, kWarp, true> {
    using Storage = BwdFeedStorage<true>;

  public:
    OA_DEVICE BwdFeed(const AttnFwdParams&, const TileList&) {}

    OA_DEVICE bool next(BwdTile& t) {
        Storage::ring().wait(at_);
        t = (*Storage::at(&Storage::tile))[at_.stage];
        if constexpr (kWarp) {
            // Every lane has read. Consumers ask for neither the sequence nor its queries' place.
            __syncwarp();
            t.batch_idx = kVarlen ? 0 : uniform(t.batch_idx);
            t.kv_head_idx = uniform(t.kv_head_idx);
            t.n0 = uniform(t.n0);
            t.k_begin = uniform(t.k_begin);
            t.seqlen_q = uniform(t.seqlen_q);
            t.seqlen_k = uniform(t.seqlen_k);
            t.steps = uniform(t.steps);
        }
        Storage::ring().release(at_, kWarp ? int(threadIdx.x & 31) : 0);
        at_.advance();
        return t.n0 != kNoMoreTiles;
    }

  private:
    RingState<kTileStages> at_;
};

// Before a CTA barrier, one thread. readers: warps and threads that take tiles.
OA_DEVICE void init_bwd_feed(uint32 readers) { BwdFeedStorage<true>::ring().init(readers); }

// The next tile of a walk, or the end of it (false), to a stage that is empty; one warp.
template <typename Tiles>
OA_DEVICE bool hand_on_bwd_tile(Tiles& tiles, const RingState<kTileStages>& at) {
    using Storage = BwdFeedStorage<true>;
    BwdTile t;
    const bool more = tiles.next(t);
    if ((threadIdx.x & 31) == 0) {
        if (!more) t.n0 = kNoMoreTiles;
        (*Storage::at(&Storage::tile))[at.stage] = t;
        mbarrier_arrive(Storage::ring().full + 8 * at.stage);
    }
    return more;
}

// The walk of packed sequences; one warp. counter: as PackedBwdTiles.
template <int kBlockN>
OA_DEVICE void walk_bwd_tiles(const AttnFwdParams& p, uint32* counter) {
    using Storage = BwdFeedStorage<true>;
    PackedBwdTiles<kBlockN> tiles(p, counter, *Storage::at(&Storage::sequences));
    RingState<kTileStages> at;
    for (bool more = true; more; at.advance()) {
        Storage::ring().wait_empty(at);
        more = hand_on_bwd_tile(tiles, at);
    }
}
