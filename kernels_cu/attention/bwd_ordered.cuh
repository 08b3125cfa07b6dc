// dQ in a fixed order (entry/attn_bwd_sm90.cu with ORDERED): the same bits in every run.
//
// A tile of queries gets its sums from tiles of keys in the order of the keys. The first one stores; each of the
// others waits until the tile of keys before it has added. Tiles of keys go through the queries backwards, from the
// last tile that they see to the first, and at each through all query heads (BwdStepSums). What a tile of keys sees
// moves on with the keys: where it is not the first to see a tile of queries, the one before it sees that tile too,
// and has taken it in the same order. So one number a tile of keys and warpgroup, its last step that is complete, tells
// the next one all. With kAlternate a writer has every second step, and asks for those of the writer whose tiles of
// queries are its own.
//
//   writer g, tile n                          keeper (warp 3)               writer g of tile n + 1, and its keeper
//   wait before > steps needed                ld.acquire steps(n - 1)       ..
//   add, commit, wait for the shared memory     -> before
//   arrive dq_empty
//   wait for the addition
//   red.release steps(n)                                                    ld.acquire steps(n) -> before -> add
//
// The keeper asks global memory for the writers: an answer takes about a microsecond, as long as a step. It hands on
// tiles as well.
//
// It ends. Work items, tiles of keys of a (sequence, kv head), are drawn from a counter, so an item has been begun, by
// a CTA that runs, before any with a higher number; a CTA ends its items in the order in which it draws them. A step
// waits for steps of the tile of keys before only, which is an item with a lower number. So of the items that have not
// ended the lowest never waits for ever, however few CTAs run at a time.
#pragma once
#include "attention/bwd_roles.cuh"
#include "ptx/delay.cuh"
#include "ptx/gpu_sync.cuh"

// In place of BwdWriter; dq_accum is there.
template <typename Config>
class BwdOrderedWriter {
    using Layout = BwdLayout<Config>;
    using SharedStorage = BwdStorage<Config>;
    using Barriers = BwdBarriers<Config>;
    using Rows = QueryTiles<Config::kBlockM, Config::kBlockN>;
    static constexpr uint32 kPollNs = 32;

  public:
    OA_DEVICE BwdOrderedWriter(const typename Config::Params& params, const Barriers& bars, int32 group)
        : params_(params), full_(bars.dq_full + 8 * group), empty_(bars.dq_empty + 8 * group), group_(group) {}

    // One thread.
    OA_DEVICE void run() {
        const AttnBwdParams& bwd = params_.bwd;
        BwdTiles<Config> tiles(bwd.fwd, params_.tiles);
        uint32 phase = 0;
        [[maybe_unused]] uint32 ended = 0;
        for (BwdTile t; tiles.next(t);) {
            const Rows rows(bwd.fwd, t);
            if (rows.is_empty()) continue;
            const uint32 all = uint32((rows.end - rows.first) * heads_of(bwd.fwd)), firsts = first_steps(t, rows);
            const uint32 own = place_of(t);
            uint32* steps = step_counters(bwd) + own;
            // Of the writer of the tile before that has this one's tiles of queries, more by 2.
            const uint32 place = Config::kAlternate ? own ^ (firsts & 1) : own;
            tell(place);
            BwdStepSums<Config> sums(bwd, t, rows);
            uint32 known = 0;  // steps of the tile of keys before
#pragma unroll 1
            for (uint32 done = 1; done <= all; ++done, sums.advance()) {
                if (Config::kAlternate && (done & 1) == group_) continue;
                mbarrier_wait(full_, phase);
                if constexpr (Config::kReadersFence) fence_proxy_async();
                phase ^= 1;
                const uint32 from = smem_addr_at(&SharedStorage::dq) + group_ * Layout::kDqBytes;
                float* to = sums.at() + (Config::kAlternate ? 0 : group_ * (64 * Config::kDqWidth));
                if (done <= firsts) {
                    bulk_store(to, from, Layout::kDqBytes);
                } else {
                    while (known < done - firsts) {
                        const uint2 told = load_acquire_shared2(StepsStorage::before(group_));
                        if (told.x == place) known = told.y;
                        if (known < done - firsts) nanosleep(kPollNs);
                    }
                    fence_proxy_async_global();
                    bulk_reduce_add(to, from, Layout::kDqBytes);
                }
                bulk_commit();
                bulk_wait_read<0>();
                mbarrier_arrive(empty_);
                bulk_wait<0>();
                publish(steps, done);
            }
            if constexpr (Config::kFinishes) store_release_shared2(StepsStorage::ended(group_), ++ended, 0);
        }
        tell(kStepsEnded);
    }

  private:
    // Steps at tiles of queries that no tile of keys before this one sees, those with the highest numbers.
    OA_DEVICE uint32 first_steps(const BwdTile& t, const Rows& rows) const {
        const AttnFwdParams& fwd = params_.bwd.fwd;
        int32 tiles = rows.end - rows.first;
        if (t.n0 > 0) {
            const Rows last(t.n0 - Config::kBlockN, t.seqlen_q, t.seqlen_k, fwd.window_left, fwd.window_right);
            if (!last.is_empty()) tiles = min_of(tiles, rows.end - last.end);
        }
        return uint32(tiles * heads_of(fwd));
    }
    // Of a tile of keys and this warpgroup, among step_counters; that of the tile before is 2 less.
    OA_DEVICE uint32 place_of(const BwdTile& t) const {
        const AttnBwdParams& bwd = params_.bwd;
        // Sequences of packed keys end with a part of a tile at most: no two have a number in common.
        const int32 sequence = Config::kVarlen ? t.k_begin / Config::kBlockN + t.sequence : 0;
        const int32 head = Config::kVarlen ? t.kv_head_idx : t.batch_idx * bwd.fwd.num_kv_heads + t.kv_head_idx;
        return 2 * (uint32(head) * bwd.num_n_blocks + sequence + t.n0 / Config::kBlockN) + group_;
    }
    OA_DEVICE void tell(uint32 place) const {
        random_delay();
        store_release_shared2(StepsStorage::asked(group_), place, 0);
    }
    // What this thread's bulk groups have written comes before.
    OA_DEVICE static void publish(uint32* steps, uint32 done) {
        random_delay();
        fence_proxy_async_global();
        reduce_max_release(steps, done);
    }

    const typename Config::Params& params_;
    const uint32 full_, empty_;
    const int32 group_;
};

// Lane g, for writer g: asks what the tile before its tile has done. False behind the last tile.
OA_DEVICE bool ask_for_steps(const uint32* counters, int32 group) {
    const uint32 place = load_acquire_shared2(StepsStorage::asked(group)).x;
    if (place == kStepsEnded) return false;
    if (place == kNoStepsYet) return true;
    // Of a head's first tile: some number that nobody asks for.
    store_release_shared2(StepsStorage::before(group), place, load_acquire(counters + place - 2));
    return true;
}

template <typename Config, typename Tiles>
OA_DEVICE void keep_order(const AttnBwdParams& p, Tiles tiles) {
    const int lane = threadIdx.x & 31;
    RingState<kTileStages> at;
    uint32 handed_on = 0;
    bool more_tiles = true, more_steps = true;
    while (more_tiles || more_steps) {
        // Not a whole tile ahead: a tile that waits for a CTA holds up those behind it.
        const bool is_due = BwdFeedStorage<true>::ring().is_empty(at) &&
                            load_acquire_shared2(BwdFeedStorage<true>::due()).x >= handed_on;
        if (more_tiles && __all_sync(0xffffffffu, is_due)) {
            more_tiles = hand_on_bwd_tile(tiles, at);
            at.advance();
            ++handed_on;
        }
        const bool mine = lane < Config::kConsumers && ask_for_steps(step_counters(p), lane);
        more_steps = __any_sync(0xffffffffu, mine);
    }
}

// One warp.
template <typename Config>
OA_DEVICE void keep_order(const AttnBwdParams& p, const TileList& tiles) {
    using Storage = BwdFeedStorage<true>;
    if constexpr (Config::kVarlen)
        keep_order<Config>(
            p, PackedBwdTiles<Config::kBlockN, true>(p.fwd, item_counter(p), *Storage::at(&Storage::sequences)));
    else
        keep_order<Config>(p, DrawnBwdTiles<Config::kBlockN>(p.fwd, tiles.num_tail_heads, item_counter(p)));
}
