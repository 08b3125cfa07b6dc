// dK and dV of exact attention on Hopper's wgmma, sm_90a only; dQ is attn_bwd_dq_sm90's. Source: FlashAttention-2 (Dao
// 2023), algorithm 2.
//
//   P = exp2(c Q K^T - lse2);  dV = P^T dO;  dS = P (dO V^T - delta);  dK = scale dS^T Q
//   lse2 = lse * log2(e), delta = rowsum(dO * O) - dlse: of attn_bwd_prepare
//
// q, do: [batch, seqlen_q, num_q_heads, head_dim]   k, v: [batch, seqlen_k, num_kv_heads, head_dim]. Where head_dim is
// below HEAD_DIM, TMA fills with zeros. No atomics: the same bits in every run.
//
// A persistent kernel. A cluster of CLUSTER CTAs walks over tiles of 64 * CLUSTER keys of one kv head; a CTA owns 64 of
// them. Tiles of 64 queries, of all query heads of the kv head, come by, each CTA copying its part of their rows to all
// CTAs of the cluster. The consumer warpgroups split the products: one has S and dV, the other dP and dK. Scores are
// transposed, keys times queries, so that P^T and dS^T are operands from registers. P goes from a thread of one
// warpgroup to the same thread of the other, in 16 bits, through shared memory.
//   warpgroup 0: producers, a lane of two warps     warpgroup 1: values     warpgroup 2: keys
//
//   producers                   values, tile i of queries            keys, tile i of queries
//   k_empty -> K -> k_full      wait q_full(i), do_full(i-1)         wait do_full(i), q_full(i-1)
//   v_empty -> V -> v_full        S = K Q(i)^T; dV += P^T dO(i-1)      dK += dS^T Q(i-1); dP = V dO(i)^T
//   for i:                      arrive q_empty(i)                    arrive q_empty(i-1)
//     q_empty -> Q, lse2          P(i) = exp2(..), under dV          wait p_full(i): read P(i), arrive p_empty(i)
//             -> q_full         wait p_empty: write P(i),            arrive do_empty(i)
//     do_empty -> dO, delta       arrive p_full(i)                     dS(i) = P (dP - delta)
//              -> do_full       arrive do_empty(i-1)
//
// LISTS: a block mask; a tile of keys visits the tiles of queries that lists name (scheduler/bwd_lists.cuh), whose
// entry the producer leaves beside Q. Barriers q_empty and do_empty count the consumer warps of the whole cluster: a
// stage is written in all CTAs at once.
//
// Shared memory, bytes: K, V [64 * PANELS * 128] | Q [2][same] | dO [2][same] | P [2][8192] | lse2 [2][256] | delta
// [2][256] | barriers. Tiles are panels of 64 columns with the 128-byte swizzle.
#include "attention/bwd_dkdv_roles.cuh"
#include "attention/bwd_store.cuh"
#include "attention/query_tiles.cuh"
#include "params/attn_bwd.cuh"
#include "pipeline/ring.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/uniform.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "ptx/wgmma_fp16.cuh"
#include "scheduler/bwd_tile.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr uint32 kCluster = CLUSTER;
    static constexpr int kBlockM = 64, kBlockN = 64;
    static constexpr int kStages = NUM_STAGES, kPStages = 2;
    static constexpr bool kLists = LISTS;  // a block mask
    static constexpr int kThreads = 128 * 3;
    static constexpr int kPanels = kHeadDim / 64;
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    static_assert(kHeadDim % 64 == 0 && kHeadDim <= 256, "one accumulator of 64 keys a warpgroup");
    static_assert(!kLists || kCluster == 1, "a list of the CTA's own keys");
    static_assert(kCluster == 1 || kCluster == 2 || kCluster == 4, "parts of a tile are whole groups of 8 rows");
};

using Layout = DkdvLayout<Config>;
using SharedStorage = DkdvStorage<Config>;
using Barriers = DkdvBarriers<Config>;
constexpr int kClusterN = Config::kBlockN * Config::kCluster;
using ClusterRows = QueryTiles<Config::kBlockM, kClusterN>;
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

using Scores = float[Config::kBlockM / 2];  // 64 keys x kBlockM queries
using Gradient = float[Config::kHeadDim / 2];  // 64 keys x head_dim
using Operand = uint32[Config::kBlockM / 16][4];  // P^T or dS^T

// D = A B^T of 64 keys and kBlockM queries.
OA_DEVICE void issue_scores(Scores& s, WgmmaDescriptor a, WgmmaDescriptor b) {
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
        uint32 at = (step >> 2) * Layout::kPanelBytes + (step & 3) * 32;
        Wgmma<Config::Io, Config::kBlockM>::ss(s, a.at(at), b.at(at), step != 0);
    }
    wgmma_commit();
}
// D += A B, A in registers, B of kBlockM queries.
OA_DEVICE void issue_gradient(Gradient& d, const Operand& a, WgmmaDescriptor b) {
#pragma unroll
    for (int step = 0; step < Config::kBlockM / 16; ++step)
        Wgmma<Config::Io, Config::kHeadDim>::template rs<kMnMajor>(d, a[step], b.at(step * 16 * 128), 1);
    wgmma_commit();
}
// The accumulator layout of a product is the operand layout of the next: four registers of 16 queries.
OA_DEVICE void pack(uint32 (&a)[4], const Scores& s, int step) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        const int at = 8 * step + 4 * (x >> 1) + 2 * (x & 1);
        a[x] = pack2(Config::Io{}, s[at], s[at + 1]);
    }
}

// Of the queries of this thread's columns of scores, two of each 8: lse2 or delta of a stage.
struct QueryRows {
    float2 of[Config::kBlockM / 8];
    OA_DEVICE QueryRows(uint32 from, int32 stage, int lane) {
#pragma unroll
        for (int j = 0; j < Config::kBlockM / 8; ++j)
            of[j] = load_shared_float2(from + stage * Layout::kRowBytes + (lane & 3) * 8 + j * 32);
    }
    // Something of all of them, for whoever must not go on before they have arrived.
    OA_DEVICE uint32 any() const {
        uint32 bits = 0;
#pragma unroll
        for (int j = 0; j < Config::kBlockM / 8; ++j) bits |= __float_as_uint(of[j].x) | __float_as_uint(of[j].y);
        return bits;
    }
};

// What both consumer warpgroups have.
class Consumer {
  protected:
    OA_DEVICE Consumer(const AttnBwdSm90Params& params, const Barriers& bars)
        : params_(params),
          p_(params.bwd.fwd),
          bars_(bars),
          lane_(in_register(threadIdx.x & 31)),
          warp_((threadIdx.x >> 5) & 3),
          q_(wgmma_descriptor(smem_addr_at(&SharedStorage::q), 16, 1024)),
          q_trans_(wgmma_descriptor(smem_addr_at(&SharedStorage::q), Layout::kPanelBytes, 1024)),
          do_(wgmma_descriptor(smem_addr_at(&SharedStorage::d_o), 16, 1024)),
          do_trans_(wgmma_descriptor(smem_addr_at(&SharedStorage::d_o), Layout::kPanelBytes, 1024)),
          p16_at_(smem_addr_at(&SharedStorage::p, bars.base) + (threadIdx.x & 127) * 16),
          zero_(opaque_zero()) {}

    // After the warp's last read of a stage, in all CTAs that its next tile goes to. With what was loaded of it: not
    // before that has arrived (Ring::release).
    OA_DEVICE void release(uint32 empty, int32 stage) const {
        if constexpr (Config::kCluster == 1) {
            if (lane_ == 0) mbarrier_arrive(empty + 8 * stage);
        } else {
            if (lane_ < int(Config::kCluster)) mbarrier_arrive_cluster(empty + 8 * stage, lane_);
        }
    }
    OA_DEVICE void release_q() {
        release(bars_.q.empty, q_at_.stage);
        q_at_.advance();
    }
    OA_DEVICE void release_q(const QueryRows& lse2) {
        release(bars_.q.empty + (lse2.any() & zero_), q_at_.stage);
        q_at_.advance();
    }
    OA_DEVICE void release_do() {
        release(bars_.d_o.empty, do_at_.stage);
        do_at_.advance();
    }
    OA_DEVICE void release_do(const QueryRows& delta) {
        release(bars_.d_o.empty + (delta.any() & zero_), do_at_.stage);
        do_at_.advance();
    }
    OA_DEVICE int32 num_tiles(const BwdTile& t, const ClusterRows& rows) const {
        if (Config::kLists) return uniform(listed_steps(params_.bwd, t, t.n0 / Config::kBlockN));
        return (p_.num_q_heads / p_.num_kv_heads) * (rows.end - rows.first);
    }
    OA_DEVICE void store(const Gradient& d, float scale, uint16* to, int64 stride_b, int64 stride_s, int64 stride_h,
                         const BwdTile& t) const {
        if (to == nullptr) return;
        store_gradient<Config::Io>(d, scale, to + t.batch_idx * stride_b + t.kv_head_idx * stride_h, stride_s,
                                   own_n0<Config>(t) + warp_ * 16 + (lane_ >> 2), t.seqlen_k, p_.head_dim, lane_);
    }

    const AttnBwdSm90Params& params_;
    const AttnFwdParams& p_;
    const Barriers& bars_;
    const int lane_, warp_;
    const WgmmaDescriptor q_, q_trans_, do_, do_trans_;
    const uint32 p16_at_;  // this thread's four registers of 16 queries, 2048 bytes between them
    const uint32 zero_;
    RingState<Config::kStages> q_at_;
    RingState<Config::kStages> do_at_;
    RingState<Config::kPStages> p_at_;
    uint32 kv_phase_ = 0;
};

// S, P and dV.
class ValueConsumer : Consumer {
  public:
    OA_DEVICE ValueConsumer(const AttnBwdSm90Params& params, const Barriers& bars)
        : Consumer(params, bars), k_(wgmma_descriptor(smem_addr_at(&SharedStorage::k), 16, 1024)) {}

    OA_DEVICE void run() {
        PersistentBwdTiles tiles;
        for (BwdTile t; tiles.next<kClusterN, Config::kCluster>(p_, params_.tiles, t);) {
            ClusterRows rows(p_, t);
            Gradient dv;
#pragma unroll
            for (int i = 0; i < Config::kHeadDim / 2; ++i) dv[i] = 0.0f;
            if (const int32 total = num_tiles(t, rows); total > 0) {
                attend(t, rows, total, dv);
                kv_phase_ ^= 1;
            }
            const AttnBwdParams& bwd = params_.bwd;
            store(dv, 1.0f, bwd.dv, bwd.dv_stride_b, bwd.dv_stride_s, bwd.dv_stride_h, t);
        }
    }

  private:
    using Rows = QueryTiles<Config::kBlockM, Config::kBlockN>;

    OA_DEVICE static int32 entry_at(int32 stage) {
        return Config::kLists ? int32(load_shared(smem_addr_at(&SharedStorage::entries) + stage * 4)) : 0;
    }

    OA_DEVICE void attend(const BwdTile& t, const ClusterRows& rows, int32 total, Gradient& dv) {
        const int32 n0 = own_n0<Config>(t);
        const Rows own(n0, t.seqlen_q, t.seqlen_k, p_.window_left, p_.window_right);
        Scores s;
        Operand p16;
        int32 m = rows.first;
        mbarrier_wait(bars_.k_full, kv_phase_);
        bars_.q.wait(q_at_);
        wgmma_discard(s);
        wgmma_fence();
        issue_scores(s, k_, q_.next(q_at_.stage * Layout::kTileBytes));
        QueryRows lse2(smem_addr_at(&SharedStorage::lse2, bars_.base), q_at_.stage, lane_);
        const int32 entry = entry_at(q_at_.stage);
        wgmma_wait<0>();
        wgmma_pin(s);
        if (Config::kLists) m = listed_tile(uniform(entry));
        release_q(lse2);
        exponentiate(t, own, n0, m, s, lse2);
        Operand next_p16;
        hand_over(next_p16, s);
        take(p16, next_p16);
#pragma unroll 1
        for (int32 i = 1; i < total; ++i) {
            if (!Config::kLists && ++m == rows.end) m = rows.first;
            bars_.q.wait(q_at_);
            bars_.d_o.wait(do_at_);
            wgmma_discard(s);
            wgmma_fence();
            issue_scores(s, k_, q_.next(q_at_.stage * Layout::kTileBytes));
            issue_gradient(dv, p16, do_trans_.next(do_at_.stage * Layout::kTileBytes));
            wgmma_pin(s);
            QueryRows next_lse2(smem_addr_at(&SharedStorage::lse2, bars_.base), q_at_.stage, lane_);
            const int32 next_entry = entry_at(q_at_.stage);
            wgmma_wait<1>();
            wgmma_pin(s);
            if (Config::kLists) m = listed_tile(uniform(next_entry));
            release_q(next_lse2);
            exponentiate(t, own, n0, m, s, next_lse2);
            hand_over(next_p16, s);
            wgmma_wait<0>();
            wgmma_pin(dv);
            release_do();
            take(p16, next_p16);
        }
        if (lane_ == 0) mbarrier_arrive(bars_.k_empty);
        bars_.d_o.wait(do_at_);
        wgmma_pin(dv);
        wgmma_fence();
        issue_gradient(dv, p16, do_trans_.next(do_at_.stage * Layout::kTileBytes));
        wgmma_wait<0>();
        wgmma_pin(dv);
        release_do();
    }

    // P from S, in place. Hidden pairs give 0; keys behind the end have rows of their own that are not stored.
    OA_DEVICE void exponentiate(const BwdTile& t, const Rows& own, int32 n0, int32 m, Scores& s,
                                const QueryRows& lse2) const {
        const float c = p_.softmax_scale * kLog2e;
#pragma unroll
        for (int j = 0; j < Config::kBlockM / 8; ++j)
#pragma unroll
            for (int x = 0; x < 4; ++x) s[4 * j + x] = fmaf(s[4 * j + x], c, -(x & 1 ? lse2.of[j].y : lse2.of[j].x));
        if (m < own.full_first || m >= own.full_end) hide(s, t, n0, m);
#pragma unroll
        for (int i = 0; i < Config::kBlockM / 2; ++i) s[i] = exp2_approx(s[i]);
        wgmma_pin(s);
    }
    OA_DEVICE void hide(Scores& s, const BwdTile& t, int32 n0, int32 m) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 key = n0 + warp_ * 16 + (lane_ >> 2) + r * 8;
            const QueryRange seen = visible_queries(key, t.seqlen_q, t.seqlen_k, p_.window_left, p_.window_right);
            const uint32 len = key < t.seqlen_k ? uint32(max_of(seen.hi - seen.lo, 0)) : 0;
            const int32 first = m * Config::kBlockM + 2 * (lane_ & 3) - seen.lo;
#pragma unroll
            for (int j = 0; j < Config::kBlockM / 8; ++j)
#pragma unroll
                for (int x = 0; x < 2; ++x)
                    if (uint32(first + 8 * j + x) >= len) s[4 * j + 2 * r + x] = neg_inf();
        }
    }

    // P in 16 bits, and to the other warpgroup.
    OA_DEVICE void hand_over(Operand& a, const Scores& s) {
        bars_.p.wait_empty(p_at_);
#pragma unroll
        for (int step = 0; step < Config::kBlockM / 16; ++step) {
            pack(a[step], s, step);
            store_shared4(p16_at_ + p_at_.stage * Layout::kPBytes + step * 2048,
                          make_uint4(a[step][0], a[step][1], a[step][2], a[step][3]));
        }
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(bars_.p.full + 8 * p_at_.stage);
        p_at_.advance();
    }
    // dV's operand, once no product reads it. Without its own registers the compiler would wait for each product.
    OA_DEVICE void take(Operand& p16, const Operand& a) const {
#pragma unroll
        for (int step = 0; step < Config::kBlockM / 16; ++step)
#pragma unroll
            for (int x = 0; x < 4; ++x) p16[step][x] = copy_of(a[step][x], zero_);
    }

    const WgmmaDescriptor k_;
};

// dP, dS and dK.
class KeyConsumer : Consumer {
  public:
    OA_DEVICE KeyConsumer(const AttnBwdSm90Params& params, const Barriers& bars)
        : Consumer(params, bars), v_(wgmma_descriptor(smem_addr_at(&SharedStorage::v), 16, 1024)) {}

    OA_DEVICE void run() {
        PersistentBwdTiles tiles;
        for (BwdTile t; tiles.next<kClusterN, Config::kCluster>(p_, params_.tiles, t);) {
            ClusterRows rows(p_, t);
            Gradient dk;
#pragma unroll
            for (int i = 0; i < Config::kHeadDim / 2; ++i) dk[i] = 0.0f;
            if (const int32 total = num_tiles(t, rows); total > 0) {
                attend(total, dk);
                kv_phase_ ^= 1;
            }
            const AttnBwdParams& bwd = params_.bwd;
            store(dk, p_.softmax_scale, bwd.dk, bwd.dk_stride_b, bwd.dk_stride_s, bwd.dk_stride_h, t);
        }
    }

  private:
    OA_DEVICE void attend(int32 total, Gradient& dk) {
        Scores dp;
        Operand p16, ds16;
        mbarrier_wait(bars_.v_full, kv_phase_);
        bars_.d_o.wait(do_at_);
        wgmma_discard(dp);
        wgmma_fence();
        issue_scores(dp, v_, do_.next(do_at_.stage * Layout::kTileBytes));
        QueryRows delta(smem_addr_at(&SharedStorage::delta, bars_.base), do_at_.stage, lane_);
        take_over(p16);
        wgmma_wait<0>();
        wgmma_pin(dp);
        release_do(delta);
        differentiate(ds16, p16, dp, delta);
#pragma unroll 1
        for (int32 i = 1; i < total; ++i) {
            bars_.q.wait(q_at_);
            bars_.d_o.wait(do_at_);
            wgmma_discard(dp);
            wgmma_fence();
            issue_gradient(dk, ds16, q_trans_.next(q_at_.stage * Layout::kTileBytes));
            issue_scores(dp, v_, do_.next(do_at_.stage * Layout::kTileBytes));
            wgmma_pin(dp);
            QueryRows next_delta(smem_addr_at(&SharedStorage::delta, bars_.base), do_at_.stage, lane_);
            wgmma_wait<1>();
            wgmma_pin(dk);
            release_q();
            take_over(p16);
            wgmma_wait<0>();
            wgmma_pin(dp);
            release_do(next_delta);
            differentiate(ds16, p16, dp, next_delta);
        }
        if (lane_ == 0) mbarrier_arrive(bars_.v_empty);
        bars_.q.wait(q_at_);
        wgmma_pin(dk);
        wgmma_fence();
        issue_gradient(dk, ds16, q_trans_.next(q_at_.stage * Layout::kTileBytes));
        wgmma_wait<0>();
        wgmma_pin(dk);
        release_q();
    }

    // P of the other warpgroup.
    OA_DEVICE void take_over(Operand& p16) {
        bars_.p.wait(p_at_);
#pragma unroll
        for (int step = 0; step < Config::kBlockM / 16; ++step) {
            uint4 a = load_shared4(p16_at_ + p_at_.stage * Layout::kPBytes + step * 2048);
            p16[step][0] = a.x, p16[step][1] = a.y, p16[step][2] = a.z, p16[step][3] = a.w;
        }
        __syncwarp();
        bars_.p.release(p_at_, lane_);
        p_at_.advance();
    }
    OA_DEVICE static void differentiate(Operand& ds16, const Operand& p16, const Scores& dp, const QueryRows& delta) {
#pragma unroll
        for (int j = 0; j < Config::kBlockM / 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float* of = dp + 4 * j + 2 * r;
                const int x = 2 * (j & 1) + r;
                const float2 p = unpack2(Config::Io{}, p16[j >> 1][x]);
                ds16[j >> 1][x] = pack2(Config::Io{}, p.x * (of[0] - delta.of[j].x), p.y * (of[1] - delta.of[j].y));
            }
    }

    const WgmmaDescriptor v_;
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(Config::kThreads, 1)
attn_bwd_dkdv_sm90(const __grid_constant__ AttnBwdSm90Params params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    Barriers bars;
    if (threadIdx.x == 0) {
        check_smem_base(smem_raw, bars.base);
        bars.init();
    }
    cluster_sync();
    int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) >> 7, 0);
    if (warpgroup == 0) {
        registers_release<Config::kProducerRegisters>();
        if (threadIdx.x == 0) DkdvProducer<Config, true>(params, bars).run();
        if (threadIdx.x == 32) DkdvProducer<Config, false>(params, bars).run();
        __syncwarp();
    } else {
        registers_claim<Config::kConsumerRegisters>();
        if (warpgroup == 1)
            ValueConsumer(params, bars).run();
        else
            KeyConsumer(params, bars).run();
    }
    // No CTA leaves while others still copy to it, or arrive at its barriers.
    if (Config::kCluster > 1) cluster_sync();
}
