// Exact attention forward on Hopper's wgmma (FlashAttention-3, Shah et al. 2024), sm_90a only.
//
//   S = softmax_scale * Q K^T;  P = softmax([S, sink]);  O = P V;  LSE = log(sum(exp(S)) + exp(sink))
//
// q, o: [batch, seqlen_q, num_q_heads, head_dim]   k, v: [batch, seqlen_k, num_kv_heads, head_dim]; strides that tensor
// maps take; VARLEN: packed [rows, heads, dim]. lse: [batch, num_q_heads, seqlen_q] or [heads, rows]. head_dim below HEAD_DIM reads zeros beyond the tensor's edge.
//
// One CTA an SM walks over tiles of BLOCK_M = 64 * NUM_CONSUMERS query rows of one head (scheduler/fwd_tile.cuh).
//   warpgroup 0, one thread   copies: Q, then K(i), V(i) from the last visible tile to the first
//   warpgroups 1 ..           64 query rows each: S, softmax, O
//
//   producer   copy Q -> q.full[stage]   copy K(i) -> k.full[stage]   copy V(i) -> v.full[stage]   (each waits for its .empty)
//   consumer   wait q, k(0) | S(0) = QK(0) | softmax(0)
//              turn: wait k(i+1) | S(i+1) = QK(i+1) | wait v(i) | O += P(i)V(i) | next one's turn
//              softmax(i+1) | ... | O += P V
//              arrives at k.empty and v.empty when S and O are there, at q.empty after a tile's last S
//
// The warpgroups take turns in issuing their products (pipeline/turns.cuh), so that one's softmax runs under the others'
// products. Each passes over the key tiles that none of its 64 rows sees, and may be a tile of queries ahead.
//
// Shared memory, bytes: Q [NUM_Q_STAGES][BLOCK_M * PANELS * 128] | K [NUM_STAGES][BLOCK_N * PANELS * 128] | V [same] |
// barriers. Every tile is made of panels of 64 columns with the 128-byte swizzle; columns beyond HEAD_DIM are zeros that
// no product reads.
#include "attention/mask.cuh"
#include "attention/wgmma_epilogue.cuh"
#include "attention/wgmma_softmax.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/turns.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/fwd_params.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/persistent.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kConsumers = NUM_CONSUMERS;
    static constexpr int kBlockM = 64 * kConsumers;
    static constexpr int kBlockN = BLOCK_N;
    static constexpr int kStages = NUM_STAGES;
    static constexpr int kQStages = NUM_Q_STAGES;
    static constexpr bool kVarlen = VARLEN;  // packed sequences; a constant, because the dense loop pays for more code
    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kPanels = (kHeadDim + 63) / 64;
    static constexpr int kNTiles = kBlockN / 8;
    static constexpr int kDTiles = kHeadDim / 8;
    // Registers a thread after setmaxnreg: what the launch gives (65536 / kThreads, a multiple of 8) is shared out anew.
    static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
    // After how many of a product's k steps the next warpgroup may issue. With four there is always one that is ready.
    static constexpr int kTurnStep = kConsumers == 4 ? kBlockN / 32 : kBlockN / 16;
    static_assert(kHeadDim % 32 == 0 && kBlockN % 16 == 0, "whole groups of output blocks, whole k steps");
    static_assert(2 <= kConsumers && kConsumers <= 4, "64 query rows each");
};

struct SharedStorage {
    alignas(1024) uint8 q[Config::kQStages][Config::kBlockM * Config::kPanels * 128];
    alignas(1024) uint8 k[Config::kStages][Config::kBlockN * Config::kPanels * 128];
    alignas(1024) uint8 v[Config::kStages][Config::kBlockN * Config::kPanels * 128];
    uint64 q_full[Config::kQStages], q_empty[Config::kQStages];
    uint64 k_full[Config::kStages], k_empty[Config::kStages];
    uint64 v_full[Config::kStages], v_empty[Config::kStages];
    // kVarlen: the tile that each Q belongs to, valid from q_full to q_empty; m0 = kNoMoreTiles ends.
    FwdTile tile[Config::kQStages];
    SequenceRange sequences[32];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

constexpr int32 kNoMoreTiles = -1;

struct AttnFwdSm90Params {
    TensorMap map_q, map_k, map_v;
    AttnFwdParams p;
    TileList tiles;
};

constexpr uint32 kQBytes = Config::kBlockM * Config::kPanels * 128;
constexpr uint32 kKvBytes = Config::kBlockN * Config::kPanels * 128;
constexpr uint32 kKvPanelBytes = Config::kBlockN * 128;
using QState = RingState<Config::kQStages>;
using KvState = RingState<Config::kStages>;
using KvRing = Ring<Config::kStages>;
using Scores = float[Config::kNTiles * 4];
using Output = float[Config::kDTiles * 4];
using Probabilities = uint32[Config::kBlockN / 16][4];

struct Barriers {
    Ring<Config::kQStages> q;
    KvRing k, v;
    OA_DEVICE explicit Barriers(SharedStorage& smem)
        : q{smem_addr_of(smem.q_full), smem_addr_of(smem.q_empty)},
          k{smem_addr_of(smem.k_full), smem_addr_of(smem.k_empty)},
          v{smem_addr_of(smem.v_full), smem_addr_of(smem.v_empty)} {}
};

using Keys = KeyTiles<Config::kBlockM, Config::kBlockN>;

class Producer {
  public:
    OA_DEVICE Producer(const AttnFwdSm90Params& params, SharedStorage& smem, const Barriers& bars)
        : params_(params),
          smem_(smem),
          bars_(bars),
          smem_q_(smem_addr_of(smem.q)),
          smem_k_(smem_addr_of(smem.k)),
          smem_v_(smem_addr_of(smem.v)) {}

    // One thread.
    OA_DEVICE void run_dense() {
        prefetch_maps();
        PersistentTiles tiles;
        for (FwdTile t; tiles.next<Config::kBlockM>(params_.p, params_.tiles, t);) {
            Keys keys(params_.p, t);
            if (keys.end > keys.first) {
                bars_.q.wait_empty(q_at_);
                copy_tile(t, keys);
            }
        }
    }

    // One warp: the walk over cu_seqlens takes all lanes, the copies one. The consumers get the tile through shared
    // memory, so that the walk is done once, and ahead of them.
    OA_DEVICE void run_varlen(int lane) {
        if (lane == 0) prefetch_maps();
        PackedTiles<Config::kBlockM> tiles(params_.p, params_.tiles, smem_.sequences);
        for (FwdTile t; tiles.next(t);) {
            t.batch_idx = 0;  // packed tensors have no batch
            if (lane == 0) {
                Keys keys(params_.p, t);
                bars_.q.wait_empty(q_at_);
                smem_.tile[q_at_.stage] = t;
                if (keys.end > keys.first) {
                    copy_tile(t, keys);
                } else {
                    bars_.q.announce(q_at_, 0);
                    q_at_.advance();
                }
            }
            __syncwarp();
        }
        if (lane == 0) {
            bars_.q.wait_empty(q_at_);
            smem_.tile[q_at_.stage].m0 = kNoMoreTiles;
            bars_.q.announce(q_at_, 0);
        }
    }

  private:
    OA_DEVICE void prefetch_maps() const {
        tma_prefetch(&params_.map_q);
        tma_prefetch(&params_.map_k);
        tma_prefetch(&params_.map_v);
    }

    OA_DEVICE void copy_tile(const FwdTile& t, const Keys& keys) {
        int32 kv_head = t.head_idx / (params_.p.num_q_heads / params_.p.num_kv_heads);
        uint32 bar = bars_.q.announce(q_at_, kQBytes);
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c)
            tma_load_4d(smem_q_ + q_at_.stage * kQBytes + c * Config::kBlockM * 128, &params_.map_q, bar, c * 64,
                        t.q_begin + t.m0, t.head_idx, t.batch_idx);
        q_at_.advance();
#pragma unroll 1
        for (int32 n = keys.end - 1; n >= keys.first; --n) {
            int32 row = t.k_begin + n * Config::kBlockN;
            copy_keys(bars_.k, smem_k_, &params_.map_k, row, kv_head, t.batch_idx);
            copy_keys(bars_.v, smem_v_, &params_.map_v, row, kv_head, t.batch_idx);
            kv_at_.advance();
        }
    }

    OA_DEVICE void copy_keys(const KvRing& ring, uint32 smem, const TensorMap* map, int32 row, int32 kv_head,
                             int32 batch_idx) {
        uint32 bar = ring.acquire(kv_at_, kKvBytes);
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c)
            tma_load_4d(smem + kv_at_.stage * kKvBytes + c * kKvPanelBytes, map, bar, c * 64, row, kv_head, batch_idx);
    }

    const AttnFwdSm90Params& params_;
    SharedStorage& smem_;
    const Barriers& bars_;
    uint32 smem_q_, smem_k_, smem_v_;
    QState q_at_;
    KvState kv_at_;
};

// S = Q K^T, asynchronous. smem_q: this warpgroup's 64 rows.
OA_DEVICE void issue_qk(Scores& s, uint32 smem_q, uint32 smem_k) {
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
        uint32 column = (step & 3) * 32;  // inside a panel's 128-byte rows
        Wgmma<Config::kBlockN>::ss(
            Config::Io{}, s, wgmma_descriptor(smem_q + (step >> 2) * Config::kBlockM * 128 + column, 16, 1024),
            wgmma_descriptor(smem_k + (step >> 2) * kKvPanelBytes + column, 16, 1024), step != 0);
    }
    wgmma_commit();
    wgmma_pin(s);
}

// O += P V, asynchronous. pass_on: called when the next warpgroup may issue.
template <typename PassOn>
OA_DEVICE void issue_pv(Output& o, const Probabilities& probs, uint32 smem_v, PassOn pass_on) {
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step) {
        if (step == Config::kTurnStep) pass_on();
        Wgmma<Config::kHeadDim>::rs_mn(Config::Io{}, o, probs[step],
                                       wgmma_descriptor(smem_v + step * 16 * 128, kKvPanelBytes, 1024), 1);
    }
    wgmma_commit();
    if (Config::kTurnStep == Config::kBlockN / 16) pass_on();
    wgmma_pin(o);
}

// Clears the rows of V from `valid_rows` on: in packed tensors they belong to the next sequence, and 0 times its NaN
// would be NaN. Every warpgroup clears all of them before its own product; they write the same zeros.
OA_DEVICE void clear_tail(uint32 smem_v, int32 valid_rows, int32 group) {
    int32 words = (Config::kBlockN - valid_rows) * 8;  // 16 bytes each, in one panel
    for (int32 i = threadIdx.x & 127; i < words; i += 128)
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c)
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem_v + c * kKvPanelBytes +
                                                                          valid_rows * 128 + i * 16),
                         "r"(0)
                         : "memory");
    fence_proxy_async();
    named_barrier_sync(kFirstFreeBarrier + group, 128);
}

// P, packed, from S: the accumulator layout of S is the operand layout of P.
OA_DEVICE void probabilities(const RowState& rows, const Scores& s, const float (&c)[2], Probabilities& probs,
                             float (&sum)[2]) {
    rows.exponentiate(s, c, sum, [&](int n, int r, float p0, float p1) {
        probs[n >> 1][2 * (n & 1) + r] = pack2(Config::Io{}, p0, p1);
    });
}

class Consumer {
  public:
    OA_DEVICE Consumer(const AttnFwdSm90Params& params, SharedStorage& smem, const Barriers& bars, int32 group)
        : params_(params),
          p_(params.p),
          smem_(smem),
          bars_(bars),
          turns_(group),
          group_(group),
          lane_(threadIdx.x & 31),
          smem_q_(smem_addr_of(smem.q) + group * 64 * 128),
          smem_k_(smem_addr_of(smem.k)),
          smem_v_(smem_addr_of(smem.v)) {}

    OA_DEVICE void run() {
        PersistentTiles tiles;
        for (FwdTile t; next_tile(tiles, t);) {
            Keys keys(p_, t);
            int32 warp_row = t.m0 + group_ * 64 + ((threadIdx.x >> 5) & 3) * 16;
            Output o;
#pragma unroll
            for (int i = 0; i < Config::kDTiles * 4; ++i) o[i] = 0.0f;
            RowState rows;
            if (keys.end > keys.first) {
                int32 n = pass_over(t, keys);
                if (n >= keys.first) {
                    attend(t, keys, n, warp_row, o, rows);
                } else {
                    bars_.q.wait(q_at_);
                    release_q();
                }
                q_at_.advance();
            } else if (Config::kVarlen) {
                release_q();
                q_at_.advance();
            }
            store_rows<Config::Io>(o, rows.m2, rows.l, p_, t, warp_row, lane_);
        }
        turns_.finish(threadIdx.x < 256);
    }

  private:
    OA_DEVICE bool next_tile(PersistentTiles& tiles, FwdTile& t) {
        if constexpr (Config::kVarlen) {
            bars_.q.wait(q_at_);
            t = smem_.tile[q_at_.stage];
            return t.m0 != kNoMoreTiles;
        } else {
            return tiles.next<Config::kBlockM>(p_, params_.tiles, t);
        }
    }

    // Passes over the last tiles of keys, which only later rows of the CTA see; returns the first tile to look at, or
    // keys.first - 1 if there is none.
    OA_DEVICE int32 pass_over(const FwdTile& t, const Keys& keys) {
        int32 own_end = keys.first, first_row = t.m0 + group_ * 64;
        if (first_row < t.seqlen_q) {
            KeyRange seen = visible_keys(min_of(first_row + 64, t.seqlen_q) - 1, t.seqlen_q, t.seqlen_k, p_.window_left,
                                         p_.window_right);
            own_end = max_of(int32((int64(seen.hi) + Config::kBlockN - 1) / Config::kBlockN), keys.first);
        }
        int32 n = keys.end - 1;
#pragma unroll 1
        for (; n >= own_end; --n) {
            turns_.wait();
            turns_.pass_on();
            // A buffer is given back after it has been filled: an earlier arrival would count for the round before.
            bars_.k.wait(k_at_);
            release_k();
            bars_.v.wait(v_at_);
            release_v();
        }
        return n;
    }

    // All tiles from n down to keys.first.
    OA_DEVICE void attend(const FwdTile& t, const Keys& keys, int32 n, int32 warp_row, Output& o, RowState& rows) {
        // Rows of dense batches beyond the end are zeros, whose scores never grow.
        const bool own[2] = {!Config::kVarlen || warp_row + (lane_ >> 2) < t.seqlen_q,
                             !Config::kVarlen || warp_row + (lane_ >> 2) + 8 < t.seqlen_q};
        const float c[2] = {p_.softmax_scale * kLog2e, p_.softmax_scale * kLog2e};
        auto pass_on = [&] { turns_.pass_on(); };
        auto nothing = [] {};
        Scores s;
        Probabilities probs;
        float alpha[2], sum[2];
        bars_.q.wait(q_at_);
        bars_.k.wait(k_at_);
        turns_.wait();
        issue_qk(s, smem_q_ + q_at_.stage * kQBytes, smem_k_ + k_at_.stage * kKvBytes);
        turns_.pass_on();
        wgmma_wait<0>();
        wgmma_pin(s);
        release_k();
        if (n == keys.first) release_q();
        if (n < keys.full_first || n >= keys.full_end) mask_edges(s, p_, t, warp_row, n * Config::kBlockN, lane_);
        rows.raise(s, c, alpha);
        probabilities(rows, s, c, probs, sum);
        rows.add(sum);
        clear_foreign_rows(t, n);

        for (--n; n >= keys.first; --n) {
            bars_.k.wait(k_at_);
            turns_.wait();
            issue_qk(s, smem_q_ + q_at_.stage * kQBytes, smem_k_ + k_at_.stage * kKvBytes);
            bars_.v.wait(v_at_);
            issue_pv(o, probs, smem_v_ + v_at_.stage * kKvBytes, pass_on);
            wgmma_wait<0>();
            wgmma_pin(s);
            wgmma_pin(o);
            release_k();
            release_v();
            // The last scores are there: the producer may fetch another tile's Q under the rest of this one.
            if (n == keys.first) release_q();
            if (n < keys.full_first || n >= keys.full_end) mask_edges(s, p_, t, warp_row, n * Config::kBlockN, lane_);
            probabilities(rows, s, c, probs, sum);
            if (RowState::too_large(sum, own)) {
                rows.raise(s, c, alpha);
                rescale(o, alpha);
                probabilities(rows, s, c, probs, sum);
            }
            rows.add(sum);
        }
        bars_.v.wait(v_at_);
        issue_pv(o, probs, smem_v_ + v_at_.stage * kKvBytes, nothing);
        wgmma_wait<0>();
        wgmma_pin(o);
        release_v();
    }

    OA_DEVICE void release_q() const {
        // Every lane, where every lane has read the tile: each orders its own read before the producer's next write.
        bars_.q.release(q_at_, Config::kVarlen ? 0 : lane_);
    }
    OA_DEVICE void release_k() {
        bars_.k.release(k_at_, lane_);
        k_at_.advance();
    }
    OA_DEVICE void release_v() {
        bars_.v.release(v_at_, lane_);
        v_at_.advance();
    }

    // Before the product with V of tile n, the first one: no other can be the sequence's last tile.
    OA_DEVICE void clear_foreign_rows(const FwdTile& t, int32 n) const {
        if constexpr (Config::kVarlen) {
            int32 valid_rows = t.seqlen_k - n * Config::kBlockN;
            if (valid_rows < Config::kBlockN) {
                bars_.v.wait(v_at_);
                clear_tail(smem_v_ + v_at_.stage * kKvBytes, valid_rows, group_);
            }
        }
    }

    const AttnFwdSm90Params& params_;
    const AttnFwdParams& p_;
    SharedStorage& smem_;
    const Barriers& bars_;
    Turns<Config::kConsumers> turns_;
    int32 group_;
    int lane_;
    uint32 smem_q_, smem_k_, smem_v_;
    QState q_at_;
    KvState k_at_, v_at_;
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) attn_fwd_sm90(
    const __grid_constant__ AttnFwdSm90Params params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    Barriers bars(smem);
    if (threadIdx.x == 0) {
        bars.q.init(Config::kConsumers * (Config::kVarlen ? 128 : 4));
        bars.k.init(4 * Config::kConsumers);
        bars.v.init(4 * Config::kConsumers);
        fence_barrier_init();
    }
    __syncthreads();
    int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) >> 7, 0);
    if (warpgroup == 0) {
        registers_release<Config::kProducerRegisters>();
        Producer producer(params, smem, bars);
        if constexpr (Config::kVarlen) {
            if (threadIdx.x < 32) producer.run_varlen(threadIdx.x);
        } else {
            if (threadIdx.x == 0) producer.run_dense();
        }
    } else {
        registers_claim<Config::kConsumerRegisters>();
        Consumer(params, smem, bars, warpgroup - 1).run();
    }
}
