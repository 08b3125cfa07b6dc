// dQ of exact attention on Hopper's wgmma, sm_90a only; dK and dV are attn_bwd_dkdv_sm90's. Source: FlashAttention-2
// (Dao 2023), algorithm 2.
//
//   P = exp2(c Q K^T - lse2);  dS = P (dO V^T - delta);  dQ = scale dS K
//   lse2 = lse * log2(e), delta = rowsum(dO * O) - dlse: of attn_bwd_prepare
//
// q, do: [batch, seqlen_q, num_q_heads, head_dim]   k, v: [batch, seqlen_k, num_kv_heads, head_dim]. Where head_dim is
// below HEAD_DIM, TMA fills with zeros. No atomics: the same bits in every run.
//
// A persistent kernel, one CTA an SM, walks over tiles of 128 query rows; each of two consumer warpgroups owns 64 of
// them, their dQ in registers. Tiles of 64 keys come by. dS is an operand from registers.
//   warpgroup 0: producer, one lane copies     warpgroups 1, 2: consumers
//
//   producer                       consumer, tile i of keys
//   q_empty -> Q, dO -> q_full     wait k_full(i), v_full(i)
//   for i:                           dQ += dS(i-1) K(i-1);  S = Q K(i)^T;  dP = dO V(i)^T
//     k_empty -> K -> k_full       arrive k_empty(i-1)
//     v_empty -> V -> v_full         P = exp2(..), under dP
//                                  arrive v_empty(i)
//                                    dS(i) = P (dP - delta)
//
// LISTS: a block mask; a tile of queries visits the tiles of keys that its list names (scheduler/bwd_lists.cuh), whose
// entry the producer leaves beside K.
//
// Shared memory, bytes: Q, dO [128 * PANELS * 128] | K [NUM_K_STAGES][64 * PANELS * 128] | V [NUM_V_STAGES][same] |
// barriers. Tiles are panels of 64 columns with the 128-byte swizzle.
#include "attention/bwd_store.cuh"
#include "attention/mask.cuh"
#include "params/attn_bwd.cuh"
#include "pipeline/ring.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/uniform.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "ptx/wgmma_fp16.cuh"
#include "scheduler/bwd_lists.cuh"
#include "scheduler/persistent.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kConsumers = 2;
    static constexpr int kBlockM = 64 * kConsumers, kBlockN = 64;
    static constexpr int kKStages = NUM_K_STAGES, kVStages = NUM_V_STAGES;
    static constexpr bool kLists = LISTS;  // a block mask
    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kPanels = kHeadDim / 64;
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static_assert(kHeadDim % 64 == 0 && kHeadDim <= 256, "dQ of 64 rows in the registers of a warpgroup");
    static_assert(kKStages >= 2, "tile i of K arrives while tile i - 1 is still needed");
};

constexpr uint32 kQBytes = Config::kBlockM * Config::kPanels * 128, kQPanelBytes = Config::kBlockM * 128;
constexpr uint32 kKvBytes = Config::kBlockN * Config::kPanels * 128, kKvPanelBytes = Config::kBlockN * 128;

struct SharedStorage {
    alignas(1024) uint8 q[kQBytes];
    alignas(1024) uint8 d_o[kQBytes];
    alignas(1024) uint8 k[Config::kKStages][kKvBytes];
    alignas(1024) uint8 v[Config::kVStages][kKvBytes];
    uint64 q_full, q_empty, do_full, do_empty;
    uint64 k_full[Config::kKStages], k_empty[Config::kKStages];
    uint64 v_full[Config::kVStages], v_empty[Config::kVStages];
    int32 entries[Config::kKStages];  // kLists: of the stages of K
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

constexpr int kConsumerWarps = 4 * Config::kConsumers;

struct Barriers {
    uint32 q_full = smem_addr_at(&SharedStorage::q_full), q_empty = smem_addr_at(&SharedStorage::q_empty);
    uint32 do_full = smem_addr_at(&SharedStorage::do_full), do_empty = smem_addr_at(&SharedStorage::do_empty);
    Ring<Config::kKStages> k{smem_addr_at(&SharedStorage::k_full), smem_addr_at(&SharedStorage::k_empty)};
    Ring<Config::kVStages> v{smem_addr_at(&SharedStorage::v_full), smem_addr_at(&SharedStorage::v_empty)};

    // One thread; a CTA barrier must follow.
    OA_DEVICE void init() const {
        mbarrier_init(q_full, 1);
        mbarrier_init(do_full, 1);
        mbarrier_init(q_empty, kConsumerWarps);
        mbarrier_init(do_empty, kConsumerWarps);
        k.init(kConsumerWarps);
        v.init(kConsumerWarps);
        fence_barrier_init();
    }
};

using Keys = KeyTiles<Config::kBlockM, Config::kBlockN>;

// The list of a tile of queries, at its count, and how many tiles of keys it visits.
OA_DEVICE const int32* list_of(const AttnBwdParams& p, const FwdTile& t) {
    return Config::kLists ? bwd_list(p, t.batch_idx, t.head_idx, t.m0 / Config::kBlockM) : nullptr;
}
OA_DEVICE int32 num_tiles(const Keys& keys, const int32* list) {
    return Config::kLists ? *list : max_of(keys.end - keys.first, 0);
}

class Producer {
  public:
    OA_DEVICE Producer(const AttnBwdSm90Params& params, const Barriers& bars) : params_(params), bars_(bars) {}

    // One thread.
    OA_DEVICE void run() {
        const AttnFwdParams& fwd = params_.bwd.fwd;
        tma_prefetch(&params_.map_q);
        tma_prefetch(&params_.map_k);
        tma_prefetch(&params_.map_v);
        tma_prefetch(&params_.map_do);
        const uint32 group = fwd.num_q_heads / fwd.num_kv_heads;
        PersistentTiles tiles;
        uint32 phase = 1;  // of q_empty and do_empty
        for (FwdTile t; tiles.next<Config::kBlockM>(fwd, params_.tiles, t);) {
            Keys keys(fwd, t);
            const int32* list = list_of(params_.bwd, t);
            int32 left = num_tiles(keys, list), n = keys.first;
            if (left == 0) continue;
            load_queries(smem_addr_at(&SharedStorage::q), &params_.map_q, bars_.q_full, bars_.q_empty, phase, t);
            bool is_first = true;
#pragma unroll 1
            for (; left > 0; --left, ++n) {
                const int32 kv_head = t.head_idx / group;
                [[maybe_unused]] int32 entry = 0;
                if constexpr (Config::kLists) entry = *++list, n = listed_tile(entry);
                bars_.k.wait_empty(k_at_);
                if constexpr (Config::kLists)
                    store_shared(smem_addr_at(&SharedStorage::entries) + k_at_.stage * 4, uint32(entry));
                uint32 bar = bars_.k.announce(k_at_, kKvBytes);
                copy<kKvPanelBytes>(smem_addr_at(&SharedStorage::k) + k_at_.stage * kKvBytes, &params_.map_k, bar,
                                    n * Config::kBlockN, kv_head, t.batch_idx);
                k_at_.advance();
                if (is_first)
                    load_queries(smem_addr_at(&SharedStorage::d_o), &params_.map_do, bars_.do_full, bars_.do_empty,
                                 phase, t);
                is_first = false;
                bar = bars_.v.acquire(v_at_, kKvBytes);
                copy<kKvPanelBytes>(smem_addr_at(&SharedStorage::v) + v_at_.stage * kKvBytes, &params_.map_v, bar,
                                    n * Config::kBlockN, kv_head, t.batch_idx);
                v_at_.advance();
            }
            phase ^= 1;
        }
    }

  private:
    template <uint32 kBytes>
    OA_DEVICE static void copy(uint32 smem, const TensorMap* map, uint32 bar, int32 row, int32 head, int32 batch) {
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c) tma_load_4d(smem + c * kBytes, map, bar, c * 64, row, head, batch);
    }
    OA_DEVICE static void load_queries(uint32 smem, const TensorMap* map, uint32 full, uint32 empty, uint32 phase,
                                       const FwdTile& t) {
        mbarrier_wait(empty, phase);
        mbarrier_arrive_expect_tx(full, kQBytes);
        copy<kQPanelBytes>(smem, map, full, t.m0, t.head_idx, t.batch_idx);
    }

    const AttnBwdSm90Params& params_;
    const Barriers& bars_;
    RingState<Config::kKStages> k_at_;
    RingState<Config::kVStages> v_at_;
};

class Consumer {
    using Scores = float[Config::kBlockN / 2];          // 64 rows x kBlockN keys
    using Gradient = float[Config::kHeadDim / 2];       // 64 rows x head_dim
    using Operand = uint32[Config::kBlockN / 16][4];  // dS

  public:
    OA_DEVICE Consumer(const AttnBwdSm90Params& params, const Barriers& bars, int32 group)
        : params_(params),
          p_(params.bwd.fwd),
          bars_(bars),
          lane_(in_register(threadIdx.x & 31)),
          group_(group),
          row_(group * 64 + ((threadIdx.x >> 5) & 3) * 16 + (lane_ >> 2)),
          q_(wgmma_descriptor(smem_addr_at(&SharedStorage::q) + group * 64 * 128, 16, 1024)),
          do_(wgmma_descriptor(smem_addr_at(&SharedStorage::d_o) + group * 64 * 128, 16, 1024)),
          k_(wgmma_descriptor(smem_addr_at(&SharedStorage::k), 16, 1024)),
          k_trans_(wgmma_descriptor(smem_addr_at(&SharedStorage::k), kKvPanelBytes, 1024)),
          v_(wgmma_descriptor(smem_addr_at(&SharedStorage::v), 16, 1024)) {}

    OA_DEVICE void run() {
        const AttnBwdParams& bwd = params_.bwd;
        PersistentTiles tiles;
        for (FwdTile t; tiles.next<Config::kBlockM>(p_, params_.tiles, t);) {
            Keys keys(p_, t);
            Gradient dq;
#pragma unroll
            for (int i = 0; i < Config::kHeadDim / 2; ++i) dq[i] = 0.0f;
            if (const int32 total = num_tiles(keys, list_of(bwd, t)); total > 0) {
                attend(t, keys, total, dq);
                q_phase_ ^= 1;
            }
            store_gradient<Config::Io>(dq, p_.softmax_scale,
                                       bwd.dq + t.batch_idx * bwd.dq_stride_b + t.head_idx * bwd.dq_stride_h,
                                       bwd.dq_stride_s, t.m0 + row_, t.seqlen_q, p_.head_dim, lane_);
        }
    }

  private:
    // D = A B^T of 64 rows and kBlockN keys.
    OA_DEVICE static void issue_scores(Scores& s, WgmmaDescriptor a, WgmmaDescriptor b) {
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            uint32 panel = step >> 2, column = (step & 3) * 32;
            Wgmma<Config::Io, Config::kBlockN>::ss(s, a.at(panel * kQPanelBytes + column),
                                                   b.at(panel * kKvPanelBytes + column), step != 0);
        }
        wgmma_commit();
    }
    OA_DEVICE void issue_gradient(Gradient& dq, const Operand& ds) const {
        const WgmmaDescriptor k = k_trans_.next(k_before_.stage * kKvBytes);
#pragma unroll
        for (int step = 0; step < Config::kBlockN / 16; ++step)
            Wgmma<Config::Io, Config::kHeadDim>::template rs<kMnMajor>(dq, ds[step], k.at(step * 16 * 128), 1);
        wgmma_commit();
    }

    OA_DEVICE void attend(const FwdTile& t, const Keys& keys, int32 total, Gradient& dq) {
        // Rows behind the end of the sequence exist in the workspaces (params/attn_bwd.cuh).
        const int64 row = t.head_idx * params_.bwd.rows_stride_h +
                          int64(t.batch_idx) * ((p_.seqlen_q + 127) / 128 * 128) + t.m0 + row_;
        const float lse2[2] = {params_.bwd.lse2[row], params_.bwd.lse2[row + 8]};
        const float delta[2] = {params_.bwd.delta[row], params_.bwd.delta[row + 8]};
        Operand ds16;
        mbarrier_wait(bars_.q_full, q_phase_);
        mbarrier_wait(bars_.do_full, q_phase_);
        step<true>(t, keys, keys.first, dq, ds16, lse2, delta);
#pragma unroll 1
        for (int32 i = 1; i < total; ++i) step<false>(t, keys, keys.first + i, dq, ds16, lse2, delta);
        if (lane_ == 0) {
            mbarrier_arrive(bars_.q_empty);
            mbarrier_arrive(bars_.do_empty);
        }
        wgmma_pin(dq);
        wgmma_fence();
        issue_gradient(dq, ds16);
        wgmma_wait<0>();
        wgmma_pin(dq);
        release_k();
        // A row that attends to nothing may have NaN in do, which P = 0 does not make 0.
#pragma unroll
        for (int i = 0; i < Config::kHeadDim / 2; ++i)
            if (lse2[i >> 1 & 1] == -neg_inf()) dq[i] = 0.0f;
    }

    OA_DEVICE void release_k() {
        bars_.k.release(k_before_, lane_);
        k_before_.advance();
    }

    // Tile n of keys, and dQ of the one before. No product is in flight from one step to the next: the compiler would
    // wait for each.
    template <bool kIsFirst>
    OA_DEVICE void step(const FwdTile& t, const Keys& keys, int32 n, Gradient& dq, Operand& ds16,
                        const float (&lse2)[2], const float (&delta)[2]) {
        Scores s, dp;
        wgmma_pin(dq);
        wgmma_fence();
        if constexpr (!kIsFirst) issue_gradient(dq, ds16);
        bars_.k.wait(k_at_);
        [[maybe_unused]] uint32 entry = 0;
        if constexpr (Config::kLists) entry = load_shared(smem_addr_at(&SharedStorage::entries) + k_at_.stage * 4);
        wgmma_discard(s);
        wgmma_fence();
        issue_scores(s, q_, k_.next(k_at_.stage * kKvBytes));
        bars_.v.wait(v_at_);
        wgmma_discard(dp);
        wgmma_fence();
        issue_scores(dp, do_, v_.next(v_at_.stage * kKvBytes));
        k_at_.advance();
        [[maybe_unused]] bool hidden = false;  // from this warpgroup's rows
        if constexpr (Config::kLists) {
            const int32 now = uniform(int32(entry));  // behind the products, under which it arrives
            n = listed_tile(now), hidden = is_hidden(now, group_);
        }
        if constexpr (!kIsFirst) {
            wgmma_wait<2>();
            release_k();
        }
        wgmma_pin(s);
        wgmma_wait<1>();
        wgmma_pin(s);
        const float c = p_.softmax_scale * kLog2e;
#pragma unroll
        for (int i = 0; i < Config::kBlockN / 2; ++i) s[i] = fmaf(s[i], c, -lse2[(i >> 1) & 1]);
        if (n < keys.full_first || n >= keys.full_end || hidden) hide(s, t, n, hidden);
#pragma unroll
        for (int i = 0; i < Config::kBlockN / 2; ++i) s[i] = exp2_approx(s[i]);
        wgmma_pin(s);
        wgmma_wait<0>();
        wgmma_pin(dp);
        wgmma_pin(dq);
        bars_.v.release(v_at_, lane_);
        v_at_.advance();
        // The accumulator layout of a product is the operand layout of the next.
#pragma unroll
        for (int j = 0; j < Config::kBlockN / 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = 4 * j + 2 * r;
                ds16[j >> 1][2 * (j & 1) + r] =
                    pack2(Config::Io{}, s[i] * (dp[i] - delta[r]), s[i + 1] * (dp[i + 1] - delta[r]));
            }
    }

    // Exponents of hidden pairs, and of keys behind the end, become -inf.
    OA_DEVICE void hide(Scores& s, const FwdTile& t, int32 n, [[maybe_unused]] bool all) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const KeyRange seen =
                visible_keys(t.m0 + row_ + r * 8, t.seqlen_q, t.seqlen_k, p_.window_left, p_.window_right);
            const uint32 len = Config::kLists && all ? 0 : uint32(max_of(seen.hi - seen.lo, 0));
            const int32 first = n * Config::kBlockN + 2 * (lane_ & 3) - seen.lo;
#pragma unroll
            for (int j = 0; j < Config::kBlockN / 8; ++j)
#pragma unroll
                for (int x = 0; x < 2; ++x)
                    if (uint32(first + 8 * j + x) >= len) s[4 * j + 2 * r + x] = neg_inf();
        }
    }

    const AttnBwdSm90Params& params_;
    const AttnFwdParams& p_;
    const Barriers& bars_;
    const int lane_;
    const int32 group_;
    const int32 row_;  // this thread's first one in the tile; the other one is 8 below
    const WgmmaDescriptor q_, do_, k_, k_trans_, v_;
    RingState<Config::kKStages> k_at_, k_before_;  // tile i, and the oldest one that is still needed
    RingState<Config::kVStages> v_at_;
    uint32 q_phase_ = 0;
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) attn_bwd_dq_sm90(
    const __grid_constant__ AttnBwdSm90Params params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    Barriers bars;
    if (threadIdx.x == 0) {
        check_smem_base(smem_raw);
        bars.init();
    }
    __syncthreads();
    int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) >> 7, 0);
    if (warpgroup == 0) {
        registers_release<Config::kProducerRegisters>();
        if (threadIdx.x == 0) Producer(params, bars).run();
    } else {
        registers_claim<Config::kConsumerRegisters>();
        Consumer(params, bars, warpgroup - 1).run();
    }
}
