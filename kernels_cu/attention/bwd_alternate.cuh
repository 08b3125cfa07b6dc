// Alternating dQ (entry/attn_bwd_sm90.cu, kAlternate): warpgroup g computes and adds all columns of dQ of tiles g, g +
// 2 .. of queries of a tile of keys. An accumulator of 64 columns lies in memory as two of 32 side by side.
#pragma once
#include "attention/bwd_roles.cuh"
#include "ptx/bulk_store.cuh"
#include "ptx/mbarrier.cuh"

// In place of BwdWriter.
template <typename Config>
class BwdAlternateWriter {
    using Layout = BwdLayout<Config>;
    using SharedStorage = BwdStorage<Config>;
    using Barriers = BwdBarriers<Config>;
    using Rows = QueryTiles<Config::kBlockM, Config::kBlockN>;

  public:
    OA_DEVICE BwdAlternateWriter(const typename Config::Params& params, const Barriers& bars, int32 group)
        : params_(params), full_(bars.dq_full + 8 * group), empty_(bars.dq_empty + 8 * group), group_(group) {}

    // One thread.
    OA_DEVICE void run() {
        const AttnBwdParams& bwd = params_.bwd;
        const int32 heads = bwd.fwd.num_q_heads / bwd.fwd.num_kv_heads;
        const bool wanted = bwd.dq_accum != nullptr;
        BwdTiles<Config> tiles(bwd.fwd, params_.tiles);
        uint32 phase = 0;
        for (BwdTile t; tiles.next(t);) {
            Rows rows(bwd.fwd, t);
            const int32 count = max_of(rows.end - rows.first, 0);
            int64 row = t.kv_head_idx * heads * bwd.rows_stride_h + first_padded_row<Config>(bwd, t) +
                        rows.first * Config::kBlockM;
            float* to = bwd.dq_accum + row * Config::kHeadDim;
            int32 left = count;
#pragma unroll 1
            for (int32 i = 0; i < count * heads; ++i) {
                if ((i & 1) == group_) {
                    mbarrier_wait(full_, phase);
                    phase ^= 1;
                    if (wanted) {
                        bulk_reduce_add(to, smem_addr_at(&SharedStorage::dq) + group_ * Layout::kDqBytes,
                                        Layout::kDqBytes);
                        bulk_commit();
                        bulk_wait_read<0>();
                    }
                    mbarrier_arrive(empty_);
                }
                to += Config::kBlockM * Config::kHeadDim;
                if (--left == 0) {
                    left = count;
                    to += (bwd.rows_stride_h - int64(count) * Config::kBlockM) * Config::kHeadDim;
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
