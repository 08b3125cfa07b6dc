// Backward of exact attention on mma.sync, any GPU from sm_80 on: dK and dV, and dQ by sums in global memory. Source:
// FlashAttention-2 (Dao 2023), algorithm 2.
//
//   S = Q K^T;  P = exp2(c S - lse2);  dP = dO V^T;  dS = P (dP - delta);  dV = P^T dO;  dK = scale dS^T Q;  dQ = dS K
//
// q, o, do, dq: [batch, seqlen_q, num_q_heads, head_dim]   k, v, dk, dv: [batch, seqlen_k, num_kv_heads, head_dim]   any
// strides, last dimension contiguous; with cu_seqlens: packed [rows, heads, head_dim]. lse2, delta, dq_accum (whose
// columns attn_bwd_finish puts in order): padded rows (params/attn_bwd.cuh), made by attn_bwd_prepare.
//
// One CTA takes BLOCK_N keys of one kv head and walks the tiles of BLOCK_M queries that see them, of every query head of
// the group, so that dK and dV stay in registers and are the same at every run; dq_accum is not. Products are
// transposed, S^T = K Q^T, so that P^T and dS^T are operands of dV and dK where they are. The warps of the first half
// (role 0) make S, P and dV, those of the second half (role 1) dP, dS and dK, of the same keys: half the accumulators
// and twice the keys a warp of one that makes both. P, times the derivative of the scores, crosses as 16 bits from
// thread to same thread through the shared tile where dS is to lie. dQ of a step is made in the next one, while its dS
// is one of two: a single barrier a step.
//
// step i, role 0:  bar | copy Q,dO(i+1) | S(i)  P(i) -> ds[i%2]  arrive(pair) | dV += P dO | dQ(i-1) += ds[(i-1)%2] K
// step i, role 1:  bar | copy Q,dO(i+1) | dP(i) | dQ(i-1) | sync(pair)  dS(i) -> ds[i%2] | dK += dS Q
// NUM_STAGES = 1: a second barrier behind the step, and the copies behind it.
//
// Shared memory, bytes: K [BLOCK_N * HEAD_DIM * 2] | V [same] | Q [NUM_STAGES][BLOCK_M * HEAD_DIM * 2] | dO [same] |
// dS^T [2][BLOCK_N * BLOCK_M * 2] | with DMASK P^T [BLOCK_N * BLOCK_M * 2] | lse2, delta [NUM_STAGES][BLOCK_M * 4] each.
#include "attention/bwd_scores.cuh"
#include "attention/mask.cuh"
#include "params/attn_bwd.cuh"
#include "pipeline/tile_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/reduce.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "scheduler/bwd_tile.cuh"
#include "scheduler/padded_rows.cuh"
#include "tile/panel.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kBlockM = BLOCK_M;
    static constexpr int kBlockN = BLOCK_N;
    static constexpr int kWarps = NUM_WARPS;
    static constexpr int kStages = NUM_STAGES;
    static constexpr bool kScoreMods = SCORE_MODS;  // softcap, mask, score_mod: scores are formed one by one
    static constexpr bool kDMask = DMASK;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kKeyGroups = kWarps / 2;  // warps of a role
    static constexpr int kKeyRows = kBlockN / kKeyGroups;  // keys of a warp
    static constexpr int kKTiles = kKeyRows / 16;
    static constexpr int kQTiles = kBlockM / 8;
    static constexpr int kDTiles = kHeadDim / 8;
    static constexpr int kDqWarpsM = DQ_WARPS_M;  // warps side by side along the queries of dQ
    static constexpr int kDqMTiles = kBlockM / kDqWarpsM / 16;
    static constexpr int kDqSteps = kHeadDim / (kWarps / kDqWarpsM) / 16;  // 16 columns each
    static_assert(kKTiles * 16 * kKeyGroups == kBlockN && kDqMTiles * 16 * kDqWarpsM == kBlockM, "whole MMA tiles");
    static_assert(kDqSteps * 16 * (kWarps / kDqWarpsM) == kHeadDim && kBlockRows % kBlockM == 0, "whole MMA tiles");
    static_assert(kStages == 1 || kStages == 2, "single or double buffer");
    static_assert(kScoreMods || !kDMask, "a gradient of a mask needs a mask");
};

using QTile = PanelTile<Config::kBlockM, Config::kHeadDim>;
using KvTile = PanelTile<Config::kBlockN, Config::kHeadDim>;
using DsTile = PanelTile<Config::kBlockN, Config::kBlockM>;  // transposed: a row a key
using QLane = PanelLane<Config::kBlockM, Config::kHeadDim>;
using KvLane = PanelLane<Config::kBlockN, Config::kHeadDim>;
using DsLane = PanelLane<Config::kBlockN, Config::kBlockM>;
using QCopy = TileCopy<Config::kBlockM, Config::kHeadDim, Config::kThreads>;
using KvCopy = TileCopy<Config::kBlockN, Config::kHeadDim, Config::kThreads>;
using Scores = float[Config::kKTiles][Config::kQTiles * 4];
using Output = float[Config::kKTiles][Config::kDTiles * 4];
using DqTile = float[Config::kDqMTiles][Config::kDqSteps * 8];
using Queries = QueryTiles<Config::kBlockM, Config::kBlockN>;

struct SharedStorage {
    alignas(1024) uint8 k[KvTile::kBytes];  // dK on the way out
    alignas(1024) uint8 v[KvTile::kBytes];  // dV on the way out
    alignas(1024) uint8 q[Config::kStages][QTile::kBytes];
    alignas(1024) uint8 d_o[Config::kStages][QTile::kBytes];
    alignas(1024) uint8 ds[Config::kDMask ? 3 : 2][DsTile::kBytes];  // the third: P
    alignas(1024) float lse2[Config::kStages][Config::kBlockM];
    float delta[Config::kStages][Config::kBlockM];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

// A step: a tile of queries of a query head.
struct Place {
    int32 head, m;
};
// The steps of a CTA: tiles of queries of one query head after the other.
struct Steps {
    int32 first, end;  // tiles of a head
    int32 left;  // steps from `at` on
    Place at;
    OA_DEVICE Steps(const Queries& tiles, int32 head, int32 group)
        : first(tiles.first), end(tiles.end), left(max_of(tiles.end - tiles.first, 0) * group), at{head, first} {}
    OA_DEVICE Place next() const { return at.m + 1 == end ? Place{at.head + 1, first} : Place{at.head, at.m + 1}; }
};

// What all warps know of the CTA's work.
struct Work {
    const AttnBwdParams& p;
    const ScoreModArrays* arrays;
    const BwdTile& t;
    const Queries& tiles;
    uint32 smem;
    int64 padded;  // first padded row of the sequence
    int warp_idx, lane, group;  // group: of keys
    // Shared address of a member.
    template <typename Member>
    OA_DEVICE uint32 at(Member SharedStorage::* member) const {
        return smem_addr_at(member, smem);
    }
};

// D^T = A B^T of a warp's keys: A keys (K or V), B queries (Q or dO).
OA_DEVICE void mma_scores(Scores& s, uint32 smem_a, const KvLane& a_lane, uint32 smem_b, const QLane& b_lane) {
#pragma unroll
    for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
        for (int x = 0; x < Config::kQTiles * 4; ++x) s[i][x] = 0.0f;
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
        uint32 a[Config::kKTiles][4];
#pragma unroll
        for (int i = 0; i < Config::kKTiles; ++i) ldmatrix_x4(a[i], smem_a + a_lane.at(i * 16, step));
#pragma unroll
        for (int n = 0; n < Config::kQTiles; n += 2) {
            uint32 b[4];
            ldmatrix_x4(b, smem_b + b_lane.at(n * 8, step));
#pragma unroll
            for (int i = 0; i < Config::kKTiles; ++i) {
                mma_m16n8k16(Config::Io{}, s[i] + 4 * n, a[i], b[0], b[1]);
                mma_m16n8k16(Config::Io{}, s[i] + 4 * (n + 1), a[i], b[2], b[3]);
            }
        }
    }
}

// D += A B of a warp's keys: A P^T or dS^T, packed pairs of queries; B dO or Q.
using Packed = uint32[Config::kKTiles][Config::kQTiles * 2];
OA_DEVICE void mma_output(Output& o, const Packed& a, uint32 smem_b, const QLane& b_lane) {
#pragma unroll
    for (int n = 0; n < Config::kQTiles; n += 2)
#pragma unroll
        for (int d = 0; d < Config::kDTiles; d += 2) {
            uint32 b[4];
            ldmatrix_x4_trans(b, smem_b + b_lane.at(n * 8, d / 2));
#pragma unroll
            for (int i = 0; i < Config::kKTiles; ++i) {
                const uint32 rows[4] = {a[i][2 * n], a[i][2 * n + 1], a[i][2 * n + 2], a[i][2 * n + 3]};
                mma_m16n8k16(Config::Io{}, o[i] + 4 * d, rows, b[0], b[1]);
                mma_m16n8k16(Config::Io{}, o[i] + 4 * (d + 1), rows, b[2], b[3]);
            }
        }
}

// dQ of a step: this warp's part of queries and columns. Here and below addresses are made anew in every step
// (in_register): kept, they would take registers that the accumulators need.
OA_DEVICE void add_dq(const Work& w, uint32 smem_ds, const Place& of) {
    int lane = in_register(w.lane);
    int32 first_row = w.warp_idx % Config::kDqWarpsM * Config::kDqMTiles;  // in 16 rows
    int32 first_step = w.warp_idx / Config::kDqWarpsM * Config::kDqSteps;
    DsLane ds_lane((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    KvLane k_lane(lane & 15, lane >> 4);
    uint32 smem_k = w.at(&SharedStorage::k);
    DqTile dq;
#pragma unroll
    for (int i = 0; i < Config::kDqMTiles; ++i)
#pragma unroll
        for (int x = 0; x < Config::kDqSteps * 8; ++x) dq[i][x] = 0.0f;
#pragma unroll
    for (int key = 0; key < Config::kBlockN; key += 16) {
        uint32 a[Config::kDqMTiles][4];
#pragma unroll
        for (int i = 0; i < Config::kDqMTiles; ++i) ldmatrix_x4_trans(a[i], smem_ds + ds_lane.at(key, first_row + i));
#pragma unroll
        for (int d = 0; d < Config::kDqSteps; ++d) {
            uint32 b[4];
            ldmatrix_x4_trans(b, smem_k + k_lane.at(key, first_step + d));
#pragma unroll
            for (int i = 0; i < Config::kDqMTiles; ++i) {
                mma_m16n8k16(Config::Io{}, dq[i] + 8 * d, a[i], b[0], b[1]);
                mma_m16n8k16(Config::Io{}, dq[i] + 8 * d + 4, a[i], b[2], b[3]);
            }
        }
    }
    // Rows behind the sequence are padding: their sums are zeros, and nobody reads them.
    int64 row = of.head * w.p.rows_stride_h + w.padded + int64(of.m) * Config::kBlockM + first_row * 16 + (lane >> 2);
    float* to = w.p.dq_accum + row * w.p.dq_columns + first_step * 16 + (lane & 3) * 4;
#pragma unroll
    for (int i = 0; i < Config::kDqMTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float* at = to + int64(i * 16 + r * 8) * w.p.dq_columns;
#pragma unroll
            for (int d = 0; d < Config::kDqSteps; ++d)
                reduce_add_global4(at + 16 * d, dq[i][8 * d + 2 * r], dq[i][8 * d + 2 * r + 1],
                                   dq[i][8 * d + 4 + 2 * r], dq[i][8 * d + 5 + 2 * r]);
        }
}

// Shared address of queries 8n + 2(lane % 4) + {0, 1} of a key of the tile.
OA_DEVICE uint32 ds_word(int key, int n, int lane) { return DsTile::offset(key, n) + (lane & 3) * 4; }

// P^T of a step, of which kHides hides a part: packed for dV in `packed`; times the derivative of scores, for role 1, in shared memory.
template <bool kHides>
OA_DEVICE void make_p(const Work& w, Scores& s, Packed& packed, const Place& at, int stage, uint32 smem_ds) {
    int lane = in_register(w.lane);
    int32 m0 = at.m * Config::kBlockM, key = w.group * Config::kKeyRows + (lane >> 2), query = 2 * (lane & 3);
    float c = w.p.fwd.softmax_scale * kLog2e;
    uint32 lse2_at = w.at(&SharedStorage::lse2) + (stage * Config::kBlockM + query) * 4;
    BwdScores<Config::Io> scores(w.p.fwd, w.arrays, w.t.sequence, at.head, w.t.seqlen_q, w.t.seqlen_k);
    QueryRange visible[Config::kKTiles][2];
#pragma unroll
    for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int32 k = w.t.n0 + key + 16 * i + 8 * r;
            if (kHides)
                visible[i][r] = k < w.t.seqlen_k ? visible_queries(k, w.t.seqlen_q, w.t.seqlen_k, w.p.fwd.window_left,
                                                                   w.p.fwd.window_right)
                                                 : QueryRange{0, 0};
        }
#pragma unroll
    for (int n = 0; n < Config::kQTiles; ++n) {
        float2 lse2 = load_shared_float2(lse2_at + n * 32);
        int32 row = m0 + 8 * n + query;
#pragma unroll
        for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float* x = s[i] + 4 * n + 2 * r;
                QueryRange range = visible[i][r];
                bool see0 = !kHides || (row >= range.lo && row < range.hi);
                bool see1 = !kHides || (row + 1 >= range.lo && row + 1 < range.hi);
                uint32 to = ds_word(key + 16 * i + 8 * r, n, lane);
                uint32 cross;
                if constexpr (Config::kScoreMods) {
                    int32 k = w.t.n0 + key + 16 * i + 8 * r;
                    ScoreGrad a = scores.at(x[0], lse2.x, row, k, see0), b = scores.at(x[1], lse2.y, row + 1, k, see1);
                    packed[i][2 * n + r] = pack2(Config::Io{}, a.p, b.p);
                    cross = pack2(Config::Io{}, a.p * a.slope, b.p * b.slope);
                    if constexpr (Config::kDMask)
                        store_shared(w.at(&SharedStorage::ds) + 2 * DsTile::kBytes + to, packed[i][2 * n + r]);
                } else {
                    float a = exp2_approx(fmaf(x[0], c, -lse2.x)), b = exp2_approx(fmaf(x[1], c, -lse2.y));
                    if (kHides) a = see0 ? a : 0.0f, b = see1 ? b : 0.0f;
                    cross = packed[i][2 * n + r] = pack2(Config::Io{}, a, b);
                }
                store_shared(smem_ds + to, cross);
            }
    }
}

// dS^T of a step from P^T in shared memory, which it takes the place of. kHides: where P is 0 dO or V may be NaN and yet
// not count.
template <bool kHides>
OA_DEVICE void make_ds(const Work& w, const Scores& dp, Packed& packed, const Place& at, int stage, uint32 smem_ds) {
    int lane = in_register(w.lane);
    int32 m0 = at.m * Config::kBlockM, key = w.group * Config::kKeyRows + (lane >> 2), query = 2 * (lane & 3);
    uint32 delta_at = w.at(&SharedStorage::delta) + (stage * Config::kBlockM + query) * 4;
#pragma unroll
    for (int n = 0; n < Config::kQTiles; ++n) {
        float2 delta = load_shared_float2(delta_at + n * 32);
#pragma unroll
        for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint32 word = ds_word(key + 16 * i + 8 * r, n, lane);
                float2 p = unpack2(Config::Io{}, load_shared(smem_ds + word));
                float d0 = dp[i][4 * n + 2 * r] - delta.x, d1 = dp[i][4 * n + 2 * r + 1] - delta.y;
                float a = p.x * d0, b = p.y * d1;
                if (kHides) a = p.x == 0.0f ? 0.0f : a, b = p.y == 0.0f ? 0.0f : b;
                packed[i][2 * n + r] = pack2(Config::Io{}, a, b);
                store_shared(smem_ds + word, packed[i][2 * n + r]);
                if constexpr (Config::kDMask) {
                    float2 plain =
                        unpack2(Config::Io{}, load_shared(w.at(&SharedStorage::ds) + 2 * DsTile::kBytes + word));
                    int32 row = m0 + 8 * n + query;
                    float* to = w.p.dmask + w.t.sequence * w.p.dmask_stride_b + at.head * w.p.dmask_stride_h +
                                row * w.p.dmask_stride_q + (w.t.n0 + key + 16 * i + 8 * r) * w.p.dmask_stride_k;
                    if (plain.x != 0.0f) reduce_add_global(to, plain.x * d0);
                    if (plain.y != 0.0f) reduce_add_global(to + w.p.dmask_stride_q, plain.y * d1);
                }
            }
    }
}

// Copies of a step's Q, dO, lse2 and delta.
OA_DEVICE void copy_step(const Work& w, const Place& at, int stage) {
    const AttnFwdParams& f = w.p.fwd;
    int32 tid = in_register(int32(threadIdx.x));
    QCopy copy(f.head_dim, tid);
    int32 rows = w.t.seqlen_q - at.m * Config::kBlockM;
    int64 row = int64(w.t.q_begin) + int64(at.m) * Config::kBlockM;
    copy.issue(w.at(&SharedStorage::q) + stage * QTile::kBytes,
               f.q + w.t.batch_idx * f.q_stride_b + at.head * f.q_stride_h + row * f.q_stride_s, f.q_stride_s, rows,
               tid);
    copy.issue(w.at(&SharedStorage::d_o) + stage * QTile::kBytes,
               w.p.d_o + w.t.batch_idx * w.p.do_stride_b + at.head * w.p.do_stride_h + row * w.p.do_stride_s,
               w.p.do_stride_s, rows, tid);
    int64 padded = at.head * w.p.rows_stride_h + w.padded + int64(at.m) * Config::kBlockM;
    constexpr int kChunks = Config::kBlockM / 4;
    if (tid < 2 * kChunks) {
        bool second = tid >= kChunks;
        int32 chunk = second ? tid - kChunks : tid;
        cp_async_16(
            w.at(second ? &SharedStorage::delta : &SharedStorage::lse2) + stage * Config::kBlockM * 4 + chunk * 16,
            (second ? w.p.delta : w.p.lse2) + padded + chunk * 4, 16);
    }
}

// All steps of one role; leaves dV (role 0) or dK (role 1) in `o`.
template <int kRole>
OA_DEVICE void run(const Work& w, Output& o, Steps steps) {
    uint32 smem_q = w.at(&SharedStorage::q), smem_do = w.at(&SharedStorage::d_o), smem_ds = w.at(&SharedStorage::ds);
    bool wants_dq = w.p.dq_accum != nullptr;
    Place before{-1, 0};
    int stage = 0, parity = 0;
    for (; steps.left > 0; --steps.left, parity ^= 1) {
        const Place at = steps.at, next = steps.next();
        bool has_next = steps.left > 1;
        cp_async_wait<0>();
        __syncthreads();  // this step has landed, dS of the step before is there, every warp has left that step
        if (Config::kStages == 2 && has_next) copy_step(w, next, stage ^ 1);
        cp_async_commit();
        int lane = in_register(w.lane);
        KvLane a_lane(w.group * Config::kKeyRows + (lane & 15), lane >> 4);
        QLane s_lane((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1), o_lane(lane & 15, lane >> 4);
        bool hides = at.m < w.tiles.full_first || at.m >= w.tiles.full_end;
        Scores s;
        Packed packed;
        uint32 tile = stage * QTile::kBytes, ds = smem_ds + parity * DsTile::kBytes;
        uint32 ds_before = smem_ds + (parity ^ 1) * DsTile::kBytes;
        if constexpr (kRole == 0) {
            mma_scores(s, w.at(&SharedStorage::k), a_lane, smem_q + tile, s_lane);
            if (Config::kScoreMods || hides)
                make_p<true>(w, s, packed, at, stage, ds);
            else
                make_p<Config::kScoreMods>(w, s, packed, at, stage, ds);
            named_barrier_arrive(1 + w.group, 64);
            mma_output(o, packed, smem_do + tile, o_lane);
            if (wants_dq && before.head >= 0) add_dq(w, ds_before, before);
        } else {
            if (wants_dq && before.head >= 0) add_dq(w, ds_before, before);
            mma_scores(s, w.at(&SharedStorage::v), a_lane, smem_do + tile, s_lane);
            named_barrier_sync(1 + w.group, 64);
            if (Config::kScoreMods || hides)
                make_ds<true>(w, s, packed, at, stage, ds);
            else
                make_ds<Config::kScoreMods>(w, s, packed, at, stage, ds);
            mma_output(o, packed, smem_q + tile, o_lane);
        }
        before = at;
        steps.at = next;
        if (Config::kStages == 2) {
            stage ^= 1;
        } else {
            __syncthreads();
            if (has_next) copy_step(w, next, 0);
            cp_async_commit();
        }
    }
    __syncthreads();
    if (wants_dq && before.head >= 0) add_dq(w, smem_ds + (parity ^ 1) * DsTile::kBytes, before);
}

// A warp's rows of dK or dV through shared memory to 16-byte stores.
OA_DEVICE void store_rows(const Output& o, float scale, uint8* tile, uint16* to, int64 stride, int32 rows,
                          int32 head_dim, int group, int lane) {
#pragma unroll
    for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = group * Config::kKeyRows + i * 16 + (lane >> 2) + r * 8;
#pragma unroll
            for (int d = 0; d < Config::kDTiles; ++d)
                *reinterpret_cast<uint32*>(tile + KvTile::offset(row, d) + (lane & 3) * 4) =
                    pack2(Config::Io{}, o[i][4 * d + 2 * r] * scale, o[i][4 * d + 2 * r + 1] * scale);
        }
    __syncwarp();
    constexpr int kChunks = Config::kHeadDim / 8;
#pragma unroll
    for (int at = 0; at < Config::kKeyRows * kChunks; at += 32) {
        int row = group * Config::kKeyRows + (at + lane) / kChunks, chunk = (at + lane) % kChunks;
        if (row < rows && chunk * 8 < head_dim)
            *reinterpret_cast<uint4*>(to + row * stride + chunk * 8) =
                *reinterpret_cast<const uint4*>(tile + KvTile::offset(row, chunk));
    }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, MIN_CTAS) attn_bwd_sm80(
    const __grid_constant__ BwdParams params) {
    const AttnBwdParams& p = backward_of(params);
    const AttnFwdParams& f = p.fwd;
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    int tid = threadIdx.x, lane = tid & 31, warp_idx = __shfl_sync(0xffffffffu, tid >> 5, 0);

    BwdTile t;
    if (!bwd_tile<Config::kBlockN>(f, p.num_n_blocks, t)) return;
    bool owned = t.seqlen_q != kNoSequence;
    Queries tiles(f, t);
    int32 group_heads = f.num_q_heads / f.num_kv_heads;
    Steps steps(tiles, t.kv_head_idx * group_heads, group_heads);
    if (!owned) steps.left = 0;
    int role = warp_idx / Config::kKeyGroups;
    Work w{p,
           arrays_of(params),
           t,
           tiles,
           smem_addr_of(smem_raw),
           owned ? padded_begin(f, t.sequence, t.q_begin) : 0,
           warp_idx,
           lane,
           warp_idx % Config::kKeyGroups};

    Output o;
#pragma unroll
    for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
        for (int x = 0; x < Config::kDTiles * 4; ++x) o[i][x] = 0.0f;
    int64 row = int64(t.k_begin) + t.n0;
    int32 rows = min_of(t.seqlen_k - t.n0, Config::kBlockN);
    if (steps.left > 0) {
        KvCopy kv_copy(f.head_dim, tid);
        const uint16* gk = f.k + t.batch_idx * f.k_stride_b + t.kv_head_idx * f.k_stride_h + row * f.k_stride_s;
        const uint16* gv = f.v + t.batch_idx * f.v_stride_b + t.kv_head_idx * f.v_stride_h + row * f.v_stride_s;
        kv_copy.issue(w.at(&SharedStorage::k), gk, f.k_stride_s, rows, tid);
        kv_copy.issue(w.at(&SharedStorage::v), gv, f.v_stride_s, rows, tid);
        copy_step(w, steps.at, 0);
        cp_async_commit();
        if (role == 0)
            run<0>(w, o, steps);
        else
            run<1>(w, o, steps);
        __syncthreads();  // K and V are read
    }
    uint16* to = role == 0 ? p.dv : p.dk;
    if (to == nullptr) return;
    int64 stride = role == 0 ? p.dv_stride_s : p.dk_stride_s;
    to += role == 0 ? t.batch_idx * p.dv_stride_b + t.kv_head_idx * p.dv_stride_h + row * stride
                    : t.batch_idx * p.dk_stride_b + t.kv_head_idx * p.dk_stride_h + row * stride;
    store_rows(o, role == 0 ? 1.0f : f.softmax_scale, role == 0 ? smem.v : smem.k, to, stride, rows, f.head_dim,
               w.group, lane);
}
