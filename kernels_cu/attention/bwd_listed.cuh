// Block masks in the one-pass backward (entry/attn_bwd_sm90.cu, LISTS): a tile of keys visits the tiles of queries that
// a list names (scheduler/bwd_lists.cuh), head by head. A warp hands the tiles of keys to the other roles, with their
// number of steps; the producer hands the entry of each step to the consumers, beside Q. It copies Q and dO of a tile's
// first step ahead of V, which is released (v_empty) before the last dK and dQ of the tile before, and V ahead of K.
#pragma once
#include "attention/bwd_roles.cuh"
#include "ptx/bulk_store.cuh"
#include "ptx/mbarrier.cuh"
#include "scheduler/bwd_lists.cuh"

// The entry of a stage of Q, which has arrived. Without lists: 0.
template <typename Config>
OA_DEVICE uint32 entry_of_step([[maybe_unused]] int32 stage) {
    if constexpr (Config::kLists)
        return load_shared(BwdFeedStorage<Config::kWalker>::entry_at(stage));
    else
        return 0;
}

// A warp has read V for the last time, and goes on to read K. Without lists: both are released together.
template <typename Config>
OA_DEVICE void release_listed_v([[maybe_unused]] int lane) {
    if constexpr (Config::kLists)
        if (lane == 0) mbarrier_arrive(BwdFeedStorage<Config::kWalker>::v_free());
}

// In place of BwdWriter.
template <typename Config>
class BwdListedWriter {
    using Layout = BwdLayout<Config>;
    using SharedStorage = BwdStorage<Config>;
    using Barriers = BwdBarriers<Config>;

  public:
    OA_DEVICE BwdListedWriter(const typename Config::Params& params, const Barriers& bars, int32 group)
        : params_(params), full_(bars.dq_full + 8 * group), empty_(bars.dq_empty + 8 * group), group_(group) {}

    // One thread.
    OA_DEVICE void run() {
        const AttnBwdParams& bwd = params_.bwd;
        const int32 heads = heads_of(bwd.fwd);
        BwdTiles<Config> tiles(bwd.fwd, params_.tiles);
        uint32 phase = 0;
        for (BwdTile t; tiles.next(t);) {
            int32 step = 0;
#pragma unroll 1
            for (int32 head = t.kv_head_idx * heads; step < t.steps; ++head) {
                const int32* list = bwd_list(bwd, t.batch_idx, head, t.n0 / Config::kBlockN);
                // Half of the columns of every tile, or all of every second one.
                float* of_head = bwd.dq_accum +
                                 (head * bwd.rows_stride_h + first_padded_row<Config>(bwd, t)) * Config::kHeadDim +
                                 (Config::kAlternate ? 0 : group_ * (64 * Config::kDqWidth));
                const int32 end = step + *list;
#pragma unroll 1
                for (; step < end; ++step) {
                    const int32 entry = *++list;  // on its way while dQ is
                    if (Config::kAlternate && (step & 1) != group_) continue;
                    mbarrier_wait(full_, phase);
                    if constexpr (Config::kReadersFence) fence_proxy_async();
                    phase ^= 1;
                    if (bwd.dq_accum != nullptr) {
                        bulk_reduce_add(of_head + listed_tile(entry) * int64(Config::kBlockM * Config::kHeadDim),
                                        smem_addr_at(&SharedStorage::dq) + group_ * Layout::kDqBytes, Layout::kDqBytes);
                        bulk_commit();
                        bulk_wait_read<0>();
                    }
                    mbarrier_arrive(empty_);
                }
            }
        }
        bulk_wait<0>();
    }

  private:
    const typename Config::Params& params_;
    const uint32 full_, empty_;
    const int32 group_;
};
