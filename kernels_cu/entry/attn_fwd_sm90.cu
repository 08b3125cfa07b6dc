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
//   producer   copy Q -> q.full   copy K(i) -> k.full[stage]   copy V(i) -> v.full[stage]   (each waits for its .empty)
//   consumer   wait q, k(0) | S(0) = QK(0) | softmax(0)
//              wait k(i+1) | S(i+1) = QK(i+1) | wait v(i) | O += P(i)V(i) | softmax(i+1) | ... | O += P V
//              arrives at k.empty when S is there, at q.empty after a tile's last S, at v.empty when O is there
//
// The products of one warpgroup run while it does the softmax of the next tile, and the warpgroups take turns in issuing
// their products (ping-pong), so that one's softmax runs under the others' products.
//
// Shared memory, bytes: Q [BLOCK_M * HEAD_DIM * 2] | K [NUM_STAGES][BLOCK_N * HEAD_DIM * 2] | V [same] | barriers.
// Every tile is made of panels of 64 columns with the 128-byte swizzle.
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "pipeline/ring.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/fwd_params.cuh"
#include "scheduler/fwd_tile.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kConsumers = NUM_CONSUMERS;
    static constexpr int kBlockM = 64 * kConsumers;
    static constexpr int kBlockN = BLOCK_N;
    static constexpr int kStages = NUM_STAGES;
    static constexpr bool kVarlen = VARLEN;  // packed sequences; a constant, because the dense loop pays for more code
    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kPanels = kHeadDim / 64;
    static constexpr int kNTiles = kBlockN / 8;
    static constexpr int kDTiles = kHeadDim / 8;
    static_assert(kHeadDim % 64 == 0 && kBlockN % 16 == 0, "whole panels and k steps");
};

struct SharedStorage {
    alignas(1024) uint8 q[Config::kBlockM * Config::kHeadDim * 2];
    alignas(1024) uint8 k[Config::kStages][Config::kBlockN * Config::kHeadDim * 2];
    alignas(1024) uint8 v[Config::kStages][Config::kBlockN * Config::kHeadDim * 2];
    uint64 q_full, q_empty;
    uint64 k_full[Config::kStages], k_empty[Config::kStages];
    uint64 v_full[Config::kStages], v_empty[Config::kStages];
    FwdTile tile;  // kVarlen: the tile that Q belongs to, valid from q_full to q_empty; m0 = kNoMoreTiles ends
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

constexpr int32 kNoMoreTiles = -1;

struct AttnFwdSm90Params {
    TensorMap map_q, map_k, map_v;
    AttnFwdParams p;
    uint32 num_items;  // tiles, or pairs of tiles
};

constexpr uint32 kQBytes = Config::kBlockM * Config::kHeadDim * 2;
constexpr uint32 kKvBytes = Config::kBlockN * Config::kHeadDim * 2;
constexpr uint32 kKvPanelBytes = Config::kBlockN * 128;
using KvState = RingState<Config::kStages>;
using KvRing = Ring<Config::kStages>;
using Scores = float[Config::kNTiles * 4];
using Output = float[Config::kDTiles * 4];
using Probabilities = uint32[Config::kBlockN / 16][4];

struct Barriers {
    Ring<1> q;
    KvRing k, v;
    OA_DEVICE explicit Barriers(SharedStorage& smem)
        : q{smem_addr_of(&smem.q_full), smem_addr_of(&smem.q_empty)},
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
        for (FwdTile t; tiles.next<Config::kBlockM>(params_.p, params_.num_items, t);) {
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
        for (uint32 item = blockIdx.x; item < params_.num_items; item += gridDim.x) {
            // Heads side by side: a CTA's tiles are then spread over all sequences, long and short.
            uint32 block = item / params_.p.num_q_heads, head = item - block * params_.p.num_q_heads;
            FwdTile t = varlen_tile<Config::kBlockM>(params_.p, int64(head) * params_.p.num_m_blocks + block);
            if (!t.valid) continue;
            t.batch_idx = 0;  // packed tensors have no batch
            if (lane == 0) {
                Keys keys(params_.p, t);
                bars_.q.wait_empty(q_at_);
                smem_.tile = t;
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
            smem_.tile.m0 = kNoMoreTiles;
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
            tma_load_4d(smem_q_ + c * Config::kBlockM * 128, &params_.map_q, bar, c * 64, t.q_begin + t.m0, t.head_idx,
                        t.batch_idx);
        q_at_.advance();
        for (int32 n = keys.end - 1; n >= keys.first; --n) {
            int32 row = t.k_begin + n * Config::kBlockN;
            copy_keys(bars_.k, k_at_, smem_k_, &params_.map_k, row, kv_head, t.batch_idx);
            copy_keys(bars_.v, v_at_, smem_v_, &params_.map_v, row, kv_head, t.batch_idx);
        }
    }

    OA_DEVICE void copy_keys(const KvRing& ring, KvState& at, uint32 smem, const TensorMap* map, int32 row,
                             int32 kv_head, int32 batch_idx) {
        uint32 bar = ring.acquire(at, kKvBytes);
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c)
            tma_load_4d(smem + at.stage * kKvBytes + c * kKvPanelBytes, map, bar, c * 64, row, kv_head, batch_idx);
        at.advance();
    }

    const AttnFwdSm90Params& params_;
    SharedStorage& smem_;
    const Barriers& bars_;
    uint32 smem_q_, smem_k_, smem_v_;
    RingState<1> q_at_;
    KvState k_at_, v_at_;
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

// O += P V, asynchronous.
OA_DEVICE void issue_pv(Output& o, const Probabilities& probs, uint32 smem_v) {
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step)
        Wgmma<Config::kHeadDim>::rs_mn(Config::Io{}, o, probs[step],
                                       wgmma_descriptor(smem_v + step * 16 * 128, kKvPanelBytes, 1024), 1);
    wgmma_commit();
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
    named_barrier_sync(8 + group, 128);
}

OA_DEVICE void mask_edges(Scores& s, const AttnFwdParams& p, const FwdTile& t, int32 warp_row, int32 n0, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        KeyRange keys =
            visible_keys(warp_row + (lane >> 2) + r * 8, t.seqlen_q, t.seqlen_k, p.window_left, p.window_right);
        int32 lo = keys.lo - n0 - 2 * (lane & 3), hi = keys.hi - n0 - 2 * (lane & 3);
#pragma unroll
        for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                int32 col = n * 8 + x;
                if (col < lo || col >= hi) s[4 * n + 2 * r + x] = neg_inf();
            }
    }
}

// Running maximum and denominator of this thread's two rows; see attention/softmax.cuh for the conventions.
struct RowState {
    float m2[2], l[2];

    OA_DEVICE RowState() : m2{kLowest, kLowest}, l{0.0f, 0.0f} {}

    // Takes a tile's maximum in; returns true for the whole warp if any row's base was raised, with the factors.
    // own: whether the rows belong to the tile's sequence. In packed tensors a tile's last rows may be the next sequence's;
    // they must not have a say in the vote, or a result would depend on its neighbour.
    OA_DEVICE bool raise(const Scores& s, float c, float (&alpha)[2], const bool (&own)[2]) {
        constexpr float kSlack = 8.0f;
        float top[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int n = 1; n < Config::kNTiles; ++n)
                top[r] = fmaxf(top[r], fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
        }
#pragma unroll
        for (int mask = 1; mask <= 2; mask <<= 1)
#pragma unroll
            for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], mask));
        bool grew = (own[0] && fmaf(top[0], c, -m2[0]) > kSlack) || (own[1] && fmaf(top[1], c, -m2[1]) > kSlack);
        alpha[0] = alpha[1] = 1.0f;
        bool any = __any_sync(0xffffffffu, grew);
        if (any) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float m2_new = fmaxf(m2[r], top[r] * c);
                alpha[r] = exp2_approx(m2[r] - m2_new);
                m2[r] = m2_new;
                l[r] *= alpha[r];
            }
        }
        return any;
    }

    // s = exp2(s c - m2), and its row sums.
    OA_DEVICE void exponentiate(Scores& s, float c) {
#pragma unroll
        for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                s[4 * n + 2 * r] = exp2_approx(fmaf(s[4 * n + 2 * r], c, -m2[r]));
                s[4 * n + 2 * r + 1] = exp2_approx(fmaf(s[4 * n + 2 * r + 1], c, -m2[r]));
                l[r] += s[4 * n + 2 * r] + s[4 * n + 2 * r + 1];
            }
    }
};

OA_DEVICE void pack_probabilities(Probabilities& probs, const Scores& s) {
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int at = 8 * step + 4 * half;
            probs[step][2 * half] = pack2(Config::Io{}, s[at], s[at + 1]);
            probs[step][2 * half + 1] = pack2(Config::Io{}, s[at + 2], s[at + 3]);
        }
}

// Scales and stores this thread's rows. The four lanes of a quad hold 4 x 4 words of one row (four 8-column blocks); a
// transpose inside the quad gives each lane 16 contiguous bytes.
OA_DEVICE void epilogue(const Output& o, RowState& rows, const AttnFwdParams& p, const FwdTile& t, int32 warp_row,
                        int lane) {
    float sink2 = sink_log2<Config::Io>(p, t);
    int quad_lane = lane & 3;
    uint16* go = p.o + t.batch_idx * p.o_stride_b + t.head_idx * p.o_stride_h + int64(t.q_begin) * p.o_stride_s;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float l = rows.l[r];
        l += __shfl_xor_sync(0xffffffffu, l, 1);
        l += __shfl_xor_sync(0xffffffffu, l, 2);
        RowResult res = finish_row(rows.m2[r], l, sink2);
        int32 row = warp_row + (lane >> 2) + r * 8;
        bool row_ok = row < t.seqlen_q;
        if (p.lse != nullptr && quad_lane == 0 && row_ok)
            p.lse[t.batch_idx * p.lse_stride_b + t.head_idx * p.lse_stride_h + t.q_begin + row] = res.lse;
#pragma unroll
        for (int d = 0; d < Config::kDTiles; d += 4) {
            uint32 w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                w[j] =
                    pack2(Config::Io{}, o[4 * (d + j) + 2 * r] * res.o_scale, o[4 * (d + j) + 2 * r + 1] * res.o_scale);
            // Two butterfly steps: afterwards lane q holds the words of lanes 0..3 of block d + q.
            bool odd = quad_lane & 1, upper = quad_lane & 2;
            uint32 x0 = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1);
            uint32 x1 = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
            uint32 a0 = odd ? x0 : w[0], a1 = odd ? w[1] : x0, b0 = odd ? x1 : w[2], b1 = odd ? w[3] : x1;
            uint32 y0 = __shfl_xor_sync(0xffffffffu, upper ? a0 : b0, 2);
            uint32 y1 = __shfl_xor_sync(0xffffffffu, upper ? a1 : b1, 2);
            uint4 out = upper ? make_uint4(y0, y1, b0, b1) : make_uint4(a0, a1, y0, y1);
            int32 column = (d + quad_lane) * 8;
            if (row_ok && column < p.head_dim) *reinterpret_cast<uint4*>(go + int64(row) * p.o_stride_s + column) = out;
        }
    }
}

OA_DEVICE void consume(const AttnFwdSm90Params& params, SharedStorage& smem, const Barriers& bars, int32 group) {
    const AttnFwdParams& p = params.p;
    int lane = threadIdx.x & 31, warp_in_group = (threadIdx.x >> 5) & 3;
    uint32 smem_q = smem_addr_of(smem.q) + group * 64 * 128;
    uint32 smem_k = smem_addr_of(smem.k), smem_v = smem_addr_of(smem.v);
    float c = p.softmax_scale * kLog2e;
    RingState<1> q_at;
    KvState k_at, v_at;
    // Barrier 1 + g opens warpgroup g's turn to issue products; each tile of keys is one turn of every warpgroup.
    if (group == Config::kConsumers - 1) named_barrier_arrive(1, 256);
    auto my_turn = [&] { named_barrier_sync(1 + group, 256); };
    auto next_turn = [&] { named_barrier_arrive(group == Config::kConsumers - 1 ? 1 : 2 + group, 256); };

    PersistentTiles tiles;
    auto next_tile = [&](FwdTile& t) {
        if constexpr (Config::kVarlen) {
            bars.q.wait(q_at);
            t = smem.tile;
            return t.m0 != kNoMoreTiles;
        } else {
            return tiles.next<Config::kBlockM>(p, params.num_items, t);
        }
    };
    auto release_q = [&] {
        // Every lane, where every lane has read the tile: each orders its own read before the producer's next write.
        bars.q.release(q_at, Config::kVarlen ? 0 : lane);
    };
    // Before the product with V of tile n.
    auto clear_foreign_rows = [&](const FwdTile& t, int32 n) {
        if constexpr (Config::kVarlen) {
            int32 valid_rows = t.seqlen_k - n * Config::kBlockN;
            if (valid_rows < Config::kBlockN) clear_tail(smem_v + v_at.stage * kKvBytes, valid_rows, group);
        }
    };
    for (FwdTile t; next_tile(t);) {
        Keys keys(p, t);
        int32 warp_row = t.m0 + group * 64 + warp_in_group * 16;
        Output o;
#pragma unroll
        for (int i = 0; i < Config::kDTiles * 4; ++i) o[i] = 0.0f;
        RowState rows;
        // Rows of dense batches beyond the end are zeros, whose scores never grow.
        bool own[2] = {!Config::kVarlen || warp_row + (lane >> 2) < t.seqlen_q,
                       !Config::kVarlen || warp_row + (lane >> 2) + 8 < t.seqlen_q};
        if (keys.end > keys.first) {
            int32 n = keys.end - 1;
            Scores s;
            Probabilities probs;
            float alpha[2];
            bars.q.wait(q_at);
            bars.k.wait(k_at);
            my_turn();
            issue_qk(s, smem_q, smem_k + k_at.stage * kKvBytes);
            next_turn();
            wgmma_wait<0>();
            wgmma_pin(s);
            bars.k.release(k_at, lane);
            k_at.advance();
            if (n == keys.first) release_q();
            if (n < keys.full_first || n >= keys.full_end) mask_edges(s, p, t, warp_row, n * Config::kBlockN, lane);
            rows.raise(s, c, alpha, own);
            rows.exponentiate(s, c);
            pack_probabilities(probs, s);

            for (--n; n >= keys.first; --n) {
                bars.k.wait(k_at);
                my_turn();
                issue_qk(s, smem_q, smem_k + k_at.stage * kKvBytes);
                bars.v.wait(v_at);
                clear_foreign_rows(t, n + 1);
                issue_pv(o, probs, smem_v + v_at.stage * kKvBytes);
                next_turn();
                wgmma_wait<1>();
                wgmma_pin(s);
                bars.k.release(k_at, lane);
                k_at.advance();
                // The last scores are there: the producer may fetch the next tile's Q under the rest of this one.
                if (n == keys.first) release_q();
                if (n < keys.full_first || n >= keys.full_end) mask_edges(s, p, t, warp_row, n * Config::kBlockN, lane);
                bool raised = rows.raise(s, c, alpha, own);
                rows.exponentiate(s, c);
                wgmma_wait<0>();
                wgmma_pin(o);
                bars.v.release(v_at, lane);
                v_at.advance();
                if (raised) {
#pragma unroll
                    for (int i = 0; i < Config::kDTiles * 4; ++i) o[i] *= alpha[(i >> 1) & 1];
                }
                pack_probabilities(probs, s);
            }
            q_at.advance();
            bars.v.wait(v_at);
            clear_foreign_rows(t, keys.first);
            issue_pv(o, probs, smem_v + v_at.stage * kKvBytes);
            wgmma_wait<0>();
            wgmma_pin(o);
            bars.v.release(v_at, lane);
            v_at.advance();
        } else if (Config::kVarlen) {
            release_q();
            q_at.advance();
        }
        epilogue(o, rows, p, t, warp_row, lane);
    }
    if (group == 0) named_barrier_sync(1, 256);  // balances the arrive at the start
}

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
        registers_release<Config::kConsumers == 2 ? 40 : 32>();
        Producer producer(params, smem, bars);
        if constexpr (Config::kVarlen) {
            if (threadIdx.x < 32) producer.run_varlen(threadIdx.x);
        } else {
            if (threadIdx.x == 0) producer.run_dense();
        }
    } else {
        registers_claim<Config::kConsumers == 2 ? 232 : 160>();
        consume(params, smem, bars, warpgroup - 1);
    }
}
