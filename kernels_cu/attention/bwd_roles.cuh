// Shared memory, barriers and producers of the backward on wgmma (entry/attn_bwd_sm90.cu): what is copied to the
// consumers, and dQ on its way from them.
//
//   producer                          consumer g, step i: a tile of queries of a head
//   kv_empty -> K -> k_full           wait q_full(i), ds_full(i-2)
//               V -> v_full             S(i) = K Q(i)^T;  dQ(i-2) = dS(i-2) K;  dK += dS(i-1)^T Q(i-1)
//   for i:                              P(i) = exp2(..), behind them
//     q_empty -> Q, lse2 -> q_full    arrive q_empty(i-1), ds_empty(i-2);  wait dq_empty, store dQ(i-2)
//     do_empty -> dO, delta           wait do_full(i)
//                  -> do_full           dP(i) = V dO(i)^T;  dV += P(i)^T dO(i)
//   writer g                            dS(i) = P (dP - delta), under the last one
//     wait dq_full                    arrive do_empty(i);  wait ds_empty(i), store dS(i)
//     dQ added to global memory       arrive ds_full(i), dq_full
//     arrive dq_empty
//
// wgmma and bulk copies read dS and dQ: a fence of the asynchronous proxy comes between, one of those who store, or one
// of each that reads (kReadersFence).
//
// Config: kHeadDim, kPanels (of 64 columns), kConsumers, kBlockM queries and kBlockN keys of a tile, kQStages,
// kDoStages, kDsStages, kDqWidth (columns of dQ that a warpgroup computes), kAlternate (dQ of every second step),
// kReadersFence, kVarlen (packed sequences), kKeyMask, kOrdered (attention/bwd_ordered.cuh), kLists
// (attention/bwd_listed.cuh), kWalker (one of the three), Params.
#pragma once
#include "attention/bwd_stray.cuh"
#include "attention/query_tiles.cuh"
#include "params/attn_bwd.cuh"
#include "pipeline/ring.cuh"
#include "ptx/bulk_store.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/tma_prefetch.cuh"
#include "scheduler/bwd_feed.cuh"
#include "scheduler/bwd_lists.cuh"
#include "scheduler/bwd_tile.cuh"
#include "scheduler/padded_rows.cuh"

// Bytes.
template <typename Config>
struct BwdLayout {
    static constexpr uint32 kQPanelBytes = Config::kBlockM * 128, kQBytes = Config::kPanels * kQPanelBytes;
    static constexpr uint32 kKvPanelBytes = Config::kBlockN * 128, kKvBytes = Config::kPanels * kKvPanelBytes;
    static constexpr uint32 kDsBytes = Config::kBlockM * Config::kBlockN * 2, kRowBytes = Config::kBlockM * 4;
    static constexpr uint32 kDqBytes = 64 * Config::kDqWidth * 4;
};

template <typename Config, bool kWarp = false>
using BwdTiles = BwdFeed<Config::kBlockN, Config::kVarlen, kWarp, Config::kWalker>;

// Between the writers and the warp that asks for them how many steps the tile of keys before theirs has done: the place
// of a tile among step_counters, and in the answer that number. No place: before the first tile, behind the last.
constexpr uint32 kNoStepsYet = 0xffffffff, kStepsEnded = 0xfffffffe;
struct StepsStorage {
    OA_DEVICE static uint32 asked(int32 group) { return smem_addr_at(&BwdFeedStorage<true>::steps_asked) + 8 * group; }
    OA_DEVICE static uint32 before(int32 group) {
        return smem_addr_at(&BwdFeedStorage<true>::steps_before) + 8 * group;
    }
    OA_DEVICE static uint32 ended(int32 group) { return smem_addr_at(&BwdFeedStorage<true>::tiles_ended) + 8 * group; }
};
// One thread; a CTA barrier must follow.
OA_DEVICE void init_steps() {
    for (int32 group = 0; group < 2; ++group) {
        store_release_shared2(StepsStorage::asked(group), kNoStepsYet, 0);
        store_release_shared2(StepsStorage::before(group), kNoStepsYet, 0);
        store_release_shared2(StepsStorage::ended(group), 0, 0);
    }
    store_release_shared2(BwdFeedStorage<true>::due(), 0, 0);
}

// First padded row of a tile's sequence.
template <typename Config>
OA_DEVICE int64 first_padded_row(const AttnBwdParams& p, const BwdTile& t) {
    if constexpr (Config::kVarlen)
        return padded_begin(p.fwd, t.sequence, t.q_begin);
    else
        return padded_begin(p, t);
}

// Whether in the machine code nothing that needs a load of delta stands behind the products of dV.
template <typename Config>
OA_DEVICE constexpr bool uses_delta_early() {
    return Config::kHeadDim == 128 && !Config::kWalker && !Config::kExponents;
}
// As Ring::release, of a stage whose numbers went into dS, two of each 8 queries: not before they have arrived, which
// an arrival does not wait for. zero: 0, which the compiler does not know. kWaits false: plain Ring::release.
template <bool kWaits, int kStages, int kSteps>
OA_DEVICE void release_used(const Ring<kStages>& ring, const RingState<kStages>& at, int lane,
                            const uint32 (&ds)[kSteps][4], uint32 zero) {
    uint32 used = 0;
#pragma unroll
    for (int i = 0; kWaits && i < kSteps; ++i) used |= ds[i][0] | ds[i][2];
    if (lane == 0) mbarrier_arrive(ring.empty + 8 * at.stage + (used & zero));
}

// Query heads of a kv head.
OA_DEVICE int32 heads_of(const AttnFwdParams& p) { return p.num_q_heads / p.num_kv_heads; }

// Where a tile of keys adds dQ of its steps, without lists. It goes through the tiles of queries from the last to the
// first, at each through the query heads of its kv head. So CTAs at tiles of keys that see different queries, as with
// causality, are at the same ones, with all heads: what they read and add to stays in L2.
template <typename Config>
class BwdStepSums {
  public:
    template <typename Rows>
    OA_DEVICE BwdStepSums(const AttnBwdParams& p, const BwdTile& t, const Rows& rows)
        : heads_(heads_of(p.fwd)), left_(heads_), of_head_(p.rows_stride_h * Config::kHeadDim) {
        const int64 row = first_padded_row<Config>(p, t) + (rows.end - 1) * Config::kBlockM;
        at_ = p.dq_accum + row * Config::kHeadDim + t.kv_head_idx * heads_ * of_head_;
    }
    OA_DEVICE float* at() const { return at_; }
    OA_DEVICE void advance() {
        at_ += of_head_;
        if (--left_ > 0) return;
        left_ = heads_;
        at_ -= heads_ * of_head_ + Config::kBlockM * Config::kHeadDim;
    }

  private:
    const int32 heads_;
    int32 left_;
    const int64 of_head_;
    float* at_;
};

// Bytes: VARLEN, ORDERED, LISTS: tiles | K, V [128 * PANELS * 128] | Q [3][64 * PANELS * 128] | dO
// [NUM_DO_STAGES][same] | dS [3][64 * 256] | dQ [2][256 * DQ_WIDTH] | lse2 [3][64 * 4] | delta [NUM_DO_STAGES][64 * 4]
// | barriers. Panels: 64 columns, 128-byte swizzle.
template <typename Config>
struct BwdStorage : BwdFeedStorage<Config::kWalker> {
    using Layout = BwdLayout<Config>;
    alignas(1024) uint8 k[Layout::kKvBytes];
    alignas(1024) uint8 v[Layout::kKvBytes];
    alignas(1024) uint8 q[Config::kQStages][Layout::kQBytes];
    alignas(1024) uint8 d_o[Config::kDoStages][Layout::kQBytes];
    alignas(1024) uint8 ds[Config::kDsStages][Layout::kDsBytes];
    alignas(128) uint8 dq[Config::kConsumers][Layout::kDqBytes];  // fragments, on the way to global memory
    alignas(16) float lse2[Config::kQStages][Config::kBlockM];
    alignas(16) float delta[Config::kDoStages][Config::kBlockM];
    uint64 k_full, v_full, kv_empty;
    uint64 q_full[Config::kQStages], q_empty[Config::kQStages];
    uint64 do_full[Config::kDoStages], do_empty[Config::kDoStages];
    uint64 ds_full[Config::kDsStages], ds_empty[Config::kDsStages];
    uint64 dq_full[Config::kConsumers], dq_empty[Config::kConsumers];
    uint64 do_landed;  // of a tile with stray rows, for the producer
};

template <typename Config>
struct BwdBarriers {
    using SharedStorage = BwdStorage<Config>;
    static constexpr int kConsumerWarps = 4 * Config::kConsumers;

    uint32 k_full = smem_addr_at(&SharedStorage::k_full), v_full = smem_addr_at(&SharedStorage::v_full);
    uint32 kv_empty = smem_addr_at(&SharedStorage::kv_empty);
    Ring<Config::kQStages> q{smem_addr_at(&SharedStorage::q_full), smem_addr_at(&SharedStorage::q_empty)};
    Ring<Config::kDoStages> d_o{smem_addr_at(&SharedStorage::do_full), smem_addr_at(&SharedStorage::do_empty)};
    Ring<Config::kDsStages> ds{smem_addr_at(&SharedStorage::ds_full), smem_addr_at(&SharedStorage::ds_empty)};

    uint32 dq_full = smem_addr_at(&SharedStorage::dq_full), dq_empty = smem_addr_at(&SharedStorage::dq_empty);
    uint32 do_landed = smem_addr_at(&SharedStorage::do_landed);

    // One thread; a CTA barrier must follow.
    OA_DEVICE void init() const {
        for (int g = 0; g < Config::kConsumers; ++g) {
            mbarrier_init(dq_full + 8 * g, 4);
            mbarrier_init(dq_empty + 8 * g, 1);
        }
        // Consumer warps, the producer, the writers.
        if constexpr (Config::kWalker) init_bwd_feed(kConsumerWarps + 1 + Config::kConsumers);
        if constexpr (Config::kOrdered) init_steps();
        if constexpr (Config::kLists) mbarrier_init(BwdFeedStorage<true>::v_free(), kConsumerWarps);
        mbarrier_init(k_full, 1);
        mbarrier_init(v_full, 1);
        mbarrier_init(kv_empty, kConsumerWarps);
        mbarrier_init(do_landed, 1);
        q.init(kConsumerWarps);
        d_o.init(kConsumerWarps);
        for (int s = 0; s < Config::kDsStages; ++s) {
            mbarrier_init(ds.full + 8 * s, kConsumerWarps);
            mbarrier_init(ds.empty + 8 * s, Config::kAlternate ? 4 : kConsumerWarps);
        }
        fence_barrier_init();
    }
};

template <typename Config>
class BwdProducer {
    using Layout = BwdLayout<Config>;
    using SharedStorage = BwdStorage<Config>;
    using Barriers = BwdBarriers<Config>;
    using Rows = QueryTiles<Config::kBlockM, Config::kBlockN>;

  public:
    OA_DEVICE BwdProducer(const typename Config::Params& params, const Barriers& bars) : params_(params), bars_(bars) {}

    // One thread. At d128 registers are short: calls all of whose rows attend to something have a loop of their own.
    OA_DEVICE void run() {
        tma_prefetch(&params_.map_q);
        tma_prefetch(&params_.map_k);
        tma_prefetch(&params_.map_v);
        tma_prefetch(&params_.map_do);
        if (Config::kHeadDim == 128 && !Config::kVarlen && !Config::kKeyMask && !Config::kLists &&
            params_.bwd.stray_do == nullptr)
            load<false>();
        else
            load<true>();
    }

  private:
    template <bool kMayStray>
    OA_DEVICE void load() {
        const AttnFwdParams& fwd = params_.bwd.fwd;
        BwdTiles<Config> tiles(fwd, params_.tiles);
        uint32 phase = 1;  // of kv_empty
        [[maybe_unused]] uint32 due = 0;
        for (BwdTile t; tiles.next(t);) {
            Rows rows(fwd, t);
            if (Config::kLists ? t.steps == 0 : rows.is_empty()) {
                if constexpr (Config::kOrdered) store_release_shared2(BwdFeedStorage<true>::due(), ++due, 0);
                continue;
            }
            if constexpr (!Config::kLists) {
                mbarrier_wait(bars_.kv_empty, phase);
                phase ^= 1;
                load_k(t);
            }
            const int32 heads = heads_of(fwd), first_head = t.kv_head_idx * heads;
            bool is_first = true;
            if constexpr (Config::kLists) {
#pragma unroll 1
                for (int32 head = first_head; head < first_head + heads; ++head) {
                    if (is_first) prefetch(&params_.map_k, t), prefetch(&params_.map_v, t);
                    const int32* list = bwd_list(params_.bwd, t.batch_idx, head, t.n0 / Config::kBlockN);
#pragma unroll 1
                    for (int32 left = *list; left > 0; --left) {
                        const int32 entry = *++list;
                        load_step<kMayStray>(t, head, listed_tile(entry) * Config::kBlockM, is_first, entry);
                        // Q, dO and V of the first step come while the consumers end the tile before.
                        if (is_first) {
                            mbarrier_wait(BwdFeedStorage<Config::kWalker>::v_free(), phase);
                            load_v(t);
                            mbarrier_wait(bars_.kv_empty, phase);
                            load_k(t);
                            phase ^= 1;
                            is_first = false;
                        }
                    }
                }
                continue;
            }
            int32 left = (rows.end - rows.first) * heads;
            [[maybe_unused]] const int32 due_at = min_of(left, 3);
#pragma unroll 1
            for (int32 m = rows.end - 1; m >= rows.first; --m)
#pragma unroll 1
                for (int32 head = first_head; head < first_head + heads; ++head, --left) {
                    if constexpr (Config::kOrdered)
                        if (left == due_at) store_release_shared2(BwdFeedStorage<true>::due(), ++due, 0);
                    load_step<kMayStray>(t, head, m * Config::kBlockM, is_first);
                }
        }
    }

    // Into L2, while the place in shared memory is taken.
    OA_DEVICE static void prefetch(const TensorMap* map, const BwdTile& t) {
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c) tma_prefetch_4d(map, c * 64, t.n0, t.kv_head_idx, t.batch_idx);
    }
    OA_DEVICE void load_k(const BwdTile& t) const {
        mbarrier_arrive_expect_tx(bars_.k_full, Layout::kKvBytes);
        copy<Config::kBlockN>(smem_addr_at(&SharedStorage::k), &params_.map_k, bars_.k_full, t.n0, t.kv_head_idx,
                              t.batch_idx, t.k_begin, t.seqlen_k);
    }
    OA_DEVICE void load_v(const BwdTile& t) const {
        mbarrier_arrive_expect_tx(bars_.v_full, Layout::kKvBytes);
        copy<Config::kBlockN>(smem_addr_at(&SharedStorage::v), &params_.map_v, bars_.v_full, t.n0, t.kv_head_idx,
                              t.batch_idx, t.k_begin, t.seqlen_k);
    }

    // A step's Q, dO and numbers of their rows; without lists V ahead of the first dO. entry: of a list, for the
    // consumers.
    template <bool kMayStray>
    OA_DEVICE void load_step(const BwdTile& t, int32 head, int32 first_row, bool& is_first,
                             [[maybe_unused]] int32 entry = 0) {
        // In the workspaces.
        const int64 row = head * params_.bwd.rows_stride_h + first_padded_row<Config>(params_.bwd, t) + first_row;
        bars_.q.wait_empty(q_at_);
        if constexpr (Config::kLists)
            store_shared(BwdFeedStorage<Config::kWalker>::entry_at(q_at_.stage), uint32(entry));
        uint32 bar = bars_.q.announce(q_at_, Layout::kQBytes + Layout::kRowBytes);
        copy<Config::kBlockM>(smem_addr_at(&SharedStorage::q) + q_at_.stage * Layout::kQBytes, &params_.map_q, bar,
                              first_row, head, t.batch_idx, t.q_begin, t.seqlen_q);
        bulk_load(smem_addr_at(&SharedStorage::lse2) + q_at_.stage * Layout::kRowBytes, params_.bwd.lse2 + row,
                  Layout::kRowBytes, bar);
        q_at_.advance();
        if (!Config::kLists && is_first) {
            load_v(t);
            is_first = false;
        }
        const uint32 is_stray = kMayStray ? stray_do<Config::kBlockM>(params_.bwd, row) : 0;
        bars_.d_o.wait_empty(do_at_);
        const uint32 to = smem_addr_at(&SharedStorage::d_o) + do_at_.stage * Layout::kQBytes;
        if (is_stray) {
            mbarrier_expect_and_wait(bars_.do_landed, Layout::kQBytes, [&] {
                copy<Config::kBlockM>(to, &params_.map_do, bars_.do_landed, first_row, head, t.batch_idx, t.q_begin,
                                      t.seqlen_q);
            });
            clear_stray_rows<Config::kBlockM, Config::kPanels>(to, params_.bwd.lse2 + row);
            bar = bars_.d_o.announce(do_at_, Layout::kRowBytes);
        } else {
            bar = bars_.d_o.announce(do_at_, Layout::kQBytes + Layout::kRowBytes);
            copy<Config::kBlockM>(to, &params_.map_do, bar, first_row, head, t.batch_idx, t.q_begin, t.seqlen_q);
        }
        bulk_load(smem_addr_at(&SharedStorage::delta) + do_at_.stage * Layout::kRowBytes, params_.bwd.delta + row,
                  Layout::kRowBytes, bar);
        do_at_.advance();
    }

    // kRows rows from `row` on. begin, len: the sequence, of packed ones; rows behind its end arrive as zeros.
    template <int kRows>
    OA_DEVICE void copy(uint32 smem, const TensorMap* map, uint32 bar, int32 row, int32 head, int32 batch, int32 begin,
                        int32 len) const {
        if constexpr (Config::kVarlen) {
            const int32 end = min_of(row + kRows, len);
            row += kRows - end;
            batch = begin + end;
        }
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c)
            tma_load_4d(smem + c * kRows * 128, map, bar, c * 64, row, head, batch);
    }

    const typename Config::Params& params_;
    const Barriers& bars_;
    RingState<Config::kQStages> q_at_;
    RingState<Config::kDoStages> do_at_;
};

// Adds a warpgroup's dQ, step by step, to global memory: half of the columns, or all of every second step (kAlternate).
// By way of the asynchronous proxy: additions of the consumers' own would delay each of their fences.
template <typename Config>
class BwdWriter {
    using Layout = BwdLayout<Config>;
    using SharedStorage = BwdStorage<Config>;
    using Barriers = BwdBarriers<Config>;
    using Rows = QueryTiles<Config::kBlockM, Config::kBlockN>;

  public:
    OA_DEVICE BwdWriter(const typename Config::Params& params, const Barriers& bars, int32 group)
        : params_(params), full_(bars.dq_full + 8 * group), empty_(bars.dq_empty + 8 * group), group_(group) {}

    // One thread.
    OA_DEVICE void run() {
        const AttnBwdParams& bwd = params_.bwd;
        const bool wanted = bwd.dq_accum != nullptr;
        BwdTiles<Config> tiles(bwd.fwd, params_.tiles);
        uint32 phase = 0;
        for (BwdTile t; tiles.next(t);) {
            const Rows rows(bwd.fwd, t);
            const int32 steps = (rows.end - rows.first) * heads_of(bwd.fwd);
            BwdStepSums<Config> to(bwd, t, rows);
#pragma unroll 1
            for (int32 i = 0; i < steps; ++i, to.advance()) {
                if (Config::kAlternate && (i & 1) != group_) continue;
                mbarrier_wait(full_, phase);
                if constexpr (Config::kReadersFence) fence_proxy_async();
                phase ^= 1;
                if (wanted) {
                    bulk_reduce_add(to.at() + (Config::kAlternate ? 0 : group_ * (64 * Config::kDqWidth)),
                                    smem_addr_at(&SharedStorage::dq) + group_ * Layout::kDqBytes, Layout::kDqBytes);
                    bulk_commit();
                    bulk_wait_read<0>();
                }
                mbarrier_arrive(empty_);
            }
        }
        bulk_wait<0>();
    }

  private:
    const typename Config::Params& params_;
    const uint32 full_, empty_;
    const int32 group_;
};
