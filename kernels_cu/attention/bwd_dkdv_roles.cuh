// Shared memory, barriers and producers of attn_bwd_dkdv_sm90 (entry/): what is copied to the consumers.
//
// Config: kHeadDim, kPanels (of 64 columns), kCluster CTAs, kBlockM queries and kBlockN keys of a CTA's tile, kStages
// of Q and dO, kPStages of P, kLists (a block mask, scheduler/bwd_lists.cuh).
#pragma once
#include "attention/bwd_stray.cuh"
#include "attention/mask.cuh"
#include "params/attn_bwd.cuh"
#include "pipeline/ring.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "scheduler/bwd_lists.cuh"
#include "scheduler/bwd_tile.cuh"

// Bytes.
template <typename Config>
struct DkdvLayout {
    static constexpr uint32 kPanelBytes = 64 * 128, kTileBytes = Config::kPanels * kPanelBytes;
    static constexpr uint32 kPBytes = Config::kBlockM * Config::kBlockN * 2, kRowBytes = Config::kBlockM * 4;
    static_assert(Config::kBlockM == 64 && Config::kBlockN == 64, "panels of 64 rows");
};

template <typename Config>
struct DkdvStorage {
    using Layout = DkdvLayout<Config>;
    alignas(1024) uint8 k[Layout::kTileBytes];
    alignas(1024) uint8 v[Layout::kTileBytes];
    alignas(1024) uint8 q[Config::kStages][Layout::kTileBytes];
    alignas(1024) uint8 d_o[Config::kStages][Layout::kTileBytes];
    alignas(1024) uint8 p[Config::kPStages][Layout::kPBytes];
    alignas(16) float lse2[Config::kStages][Config::kBlockM];
    alignas(16) float delta[Config::kStages][Config::kBlockM];
    uint64 k_full, k_empty, v_full, v_empty;
    uint64 q_full[Config::kStages], q_empty[Config::kStages];
    uint64 do_full[Config::kStages], do_empty[Config::kStages];
    uint64 p_full[Config::kPStages], p_empty[Config::kPStages];
    uint64 do_landed;  // of a tile with stray rows, for the producer
    int32 entries[Config::kStages];  // kLists: of the stages of Q
};

template <typename Config>
struct DkdvBarriers {
    using SharedStorage = DkdvStorage<Config>;
    static constexpr int kConsumerWarps = 8;

    uint32 base = smem_base<Config::kCluster>();  // of all addresses here and of copies
    uint32 k_full = smem_addr_at(&SharedStorage::k_full, base), k_empty = smem_addr_at(&SharedStorage::k_empty, base);
    uint32 v_full = smem_addr_at(&SharedStorage::v_full, base), v_empty = smem_addr_at(&SharedStorage::v_empty, base);
    Ring<Config::kStages> q{smem_addr_at(&SharedStorage::q_full, base), smem_addr_at(&SharedStorage::q_empty, base)};
    Ring<Config::kStages> d_o{smem_addr_at(&SharedStorage::do_full, base),
                              smem_addr_at(&SharedStorage::do_empty, base)};
    uint32 do_landed = smem_addr_at(&SharedStorage::do_landed, base);
    Ring<Config::kPStages> p{smem_addr_at(&SharedStorage::p_full, base), smem_addr_at(&SharedStorage::p_empty, base)};

    // One thread; a barrier of the cluster must follow.
    OA_DEVICE void init() const {
        mbarrier_init(k_full, 1);
        mbarrier_init(k_empty, 4);
        mbarrier_init(v_full, 1);
        mbarrier_init(v_empty, 4);
        mbarrier_init(do_landed, 1);
        q.init(kConsumerWarps * Config::kCluster);
        d_o.init(kConsumerWarps * Config::kCluster);
        for (int s = 0; s < Config::kPStages; ++s) {
            mbarrier_init(p.full + 8 * s, 4);
            mbarrier_init(p.empty + 8 * s, 4);
        }
        fence_barrier_init();
    }
};

// First key of this CTA; behind the end of the sequence where the cluster's tile is not full.
template <typename Config>
OA_DEVICE int32 own_n0(const BwdTile& t) {
    return t.n0 + (Config::kCluster == 1 ? 0 : int32(cluster_rank()) * Config::kBlockN);
}

// K and Q, or V and dO; two warps, because one thread would not have registers enough for both.
template <typename Config, bool kQ>
class DkdvProducer {
    using Layout = DkdvLayout<Config>;
    using SharedStorage = DkdvStorage<Config>;
    using Barriers = DkdvBarriers<Config>;
    // The tiles of queries that the keys of the cluster see, all of which its CTAs go through together.
    static constexpr int kClusterN = Config::kBlockN * Config::kCluster;
    using Rows = QueryTiles<Config::kBlockM, kClusterN>;

  public:
    OA_DEVICE DkdvProducer(const AttnBwdSm90Params& params, const Barriers& bars)
        : params_(params),
          ring_(kQ ? bars.q : bars.d_o),
          keys_full_(kQ ? bars.k_full : bars.v_full),
          keys_empty_(kQ ? bars.k_empty : bars.v_empty),
          do_landed_(bars.do_landed),
          keys_(smem_addr_at(kQ ? &SharedStorage::k : &SharedStorage::v, bars.base)),
          queries_(smem_addr_at(kQ ? &SharedStorage::q : &SharedStorage::d_o, bars.base)),
          rows_(smem_addr_at(kQ ? &SharedStorage::lse2 : &SharedStorage::delta, bars.base)),
          entries_(smem_addr_at(&SharedStorage::entries, bars.base)) {}

    // One thread.
    OA_DEVICE void run() {
        const AttnFwdParams& fwd = params_.bwd.fwd;
        const TensorMap* map = kQ ? &params_.map_q : &params_.map_do;
        const TensorMap* keys_map = kQ ? &params_.map_k : &params_.map_v;
        const float* rows_of = kQ ? params_.bwd.lse2 : params_.bwd.delta;
        tma_prefetch(map);
        tma_prefetch(keys_map);
        PersistentBwdTiles tiles;
        uint32 phase = 1;  // of keys_empty_
        RingState<Config::kStages> at;
        for (BwdTile t; tiles.template next<kClusterN, Config::kCluster>(fwd, params_.tiles, t);) {
            Rows rows(fwd, t);
            bool is_first = true;
            const int32 group = fwd.num_q_heads / fwd.num_kv_heads;
            if constexpr (!Config::kLists)
                if (rows.is_empty()) continue;
#pragma unroll 1
            for (int32 head = t.kv_head_idx * group; head < (t.kv_head_idx + 1) * group; ++head) {
                const int64 first_row = head * params_.bwd.rows_stride_h + padded_begin(params_.bwd, t);
                const int32* list = nullptr;
                if constexpr (Config::kLists) list = bwd_list(params_.bwd, t.batch_idx, head, t.n0 / Config::kBlockN);
                int32 m = rows.first;
#pragma unroll 1
                for (int32 left = Config::kLists ? *list : rows.end - rows.first; left > 0; --left, ++m) {
                    if (is_first) {
                        mbarrier_wait(keys_empty_, phase);
                        phase ^= 1;
                        mbarrier_arrive_expect_tx(keys_full_, Layout::kTileBytes);
#pragma unroll
                        for (int c = 0; c < Config::kPanels; ++c)
                            tma_load_4d(keys_ + c * Layout::kPanelBytes, keys_map, keys_full_, c * 64,
                                        own_n0<Config>(t), t.kv_head_idx, t.batch_idx);
                        is_first = false;
                    }
                    [[maybe_unused]] int32 entry = 0;
                    if constexpr (Config::kLists) entry = *++list, m = listed_tile(entry);
                    const int64 row = first_row + m * Config::kBlockM;
                    const uint32 is_stray = kQ ? 0 : stray_do<Config::kBlockM>(params_.bwd, row);
                    const uint32 to = queries_ + at.stage * Layout::kTileBytes;
                    ring_.wait_empty(at);
                    if constexpr (Config::kLists && kQ) store_shared(entries_ + at.stage * 4, uint32(entry));
                    uint32 bar;
                    if (is_stray) {
                        mbarrier_expect_and_wait(do_landed_, Layout::kTileBytes, [&] {
                            load_queries(to, map, do_landed_, m * Config::kBlockM, head, t.batch_idx);
                        });
                        clear_stray_rows<Config::kBlockM, Config::kPanels>(to, params_.bwd.lse2 + row);
                        bar = ring_.announce(at, Layout::kRowBytes);
                    } else {
                        bar = ring_.announce(at, Layout::kTileBytes + Layout::kRowBytes);
                        load_queries(to, map, bar, m * Config::kBlockM, head, t.batch_idx);
                    }
                    bulk_load(rows_ + at.stage * Layout::kRowBytes, rows_of + row, Layout::kRowBytes, bar);
                    at.advance();
                }
            }
        }
    }

  private:
    // This CTA's part of the rows, to all CTAs of the cluster; the other parts arrive from the others.
    OA_DEVICE static void load_queries(uint32 smem, const TensorMap* map, uint32 bar, int32 row, int32 head,
                                       int32 batch) {
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c) {
            if constexpr (Config::kCluster == 1) {
                tma_load_4d(smem + c * Layout::kPanelBytes, map, bar, c * 64, row, head, batch);
            } else {
                const int32 first = int32(cluster_rank()) * (Config::kBlockM / Config::kCluster);
                tma_load_4d_multicast(smem + c * Layout::kPanelBytes + first * 128, map, bar,
                                      uint16((1 << Config::kCluster) - 1), c * 64, row + first, head, batch);
            }
        }
    }

    const AttnBwdSm90Params& params_;
    const Ring<Config::kStages> ring_;
    const uint32 keys_full_, keys_empty_, do_landed_;
    // Shared addresses: K or V, stages of Q or dO, of lse2 or delta, of entries.
    const uint32 keys_, queries_, rows_, entries_;
};
