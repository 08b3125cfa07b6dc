// dQ of the backward of exact attention on mma.sync, any GPU from sm_80 on, the same at every run. Source:
// FlashAttention-2 (Dao 2023), algorithm 2, with the loops exchanged.
//
//   S = Q K^T;  P = exp2(c S - lse2);  dP = dO V^T;  dS = P (dP - delta);  dQ = softmax_scale * dS K
//   with dropout (attention/dropout.cuh)  dP = Z / keep (dO V^T)
//
// q, do, dq: [batch, seqlen_q, num_q_heads, head_dim]   k, v: [batch, seqlen_k, num_kv_heads, head_dim]   any strides,
// last dimension contiguous; with cu_seqlens: packed [rows, heads, head_dim]. lse2, delta: padded rows
// (params/attn_bwd.cuh), made by attn_bwd_prepare.
//
// One CTA computes BLOCK_M query rows of one head; warp w owns rows [16 w, 16 w + 16), so that S, dP, dS and dQ never
// leave its registers. Keys are walked from the first visible tile to the last.
//
// HEAD_DIM 512: two warps have the same rows, for dQ of 16 rows fills the registers of both: every second panel of 64
// channels is one's. Each makes dS of half of the keys of a tile, which both then read from shared memory.
//
// All warps copy (cp.async); bar: __syncthreads.
// NUM_STAGES = 2:  wait K,V(i) | bar | copy K,V(i+1) -> other stage | S(i) dP(i) dS(i) dQ += dS K
// NUM_STAGES = 1:  wait K,V(i) | bar | S(i) dP(i) dS(i) dQ += dS K | bar | copy K,V(i+1)
//
// Shared memory, bytes: Q, later dQ [BLOCK_M * HEAD_DIM * 2] | dO [same] | K [NUM_STAGES][BLOCK_N * HEAD_DIM * 2] | V
// [same] | of HEAD_DIM 512 dS [BLOCK_M * BLOCK_N * 2].
#include "attention/bwd_scores.cuh"
#include "attention/mask.cuh"
#include "attention/wide_products.cuh"
#include "params/attn_bwd.cuh"
#include "pipeline/tile_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "scheduler/bwd_lists.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/padded_rows.cuh"
#include "tile/panel.cuh"
#include "attention/dropout.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kBlockM = BLOCK_M;
    static constexpr int kBlockN = BLOCK_N;
    static constexpr int kWarps = NUM_WARPS;
    static constexpr int kStages = NUM_STAGES;
    static constexpr bool kScoreMods = SCORE_MODS;  // softcap, mask, score_mod: scores are modified one by one
    static constexpr bool kLists = kScoreMods;  // a block mask
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kChannelWarps = channel_warps(kHeadDim);
    static constexpr bool kIsWide = kChannelWarps > 1;
    static constexpr int kNTiles = kBlockN / kChannelWarps / 8;  // of the scores of one warp
    static constexpr int kDTiles = kHeadDim / kChannelWarps / 8;  // of one warp
    static_assert(kBlockM * kChannelWarps == kWarps * 16 && kBlockN % 16 == 0 && kHeadDim % 32 == 0, "whole MMA tiles");
    static_assert(kStages == 1 || kStages == 2, "single or double buffer");
};

using QTile = PanelTile<Config::kBlockM, Config::kHeadDim>;
using KvTile = PanelTile<Config::kBlockN, Config::kHeadDim>;
using QLane = PanelLane<Config::kBlockM, Config::kHeadDim>;
using KvLane = PanelLane<Config::kBlockN, Config::kHeadDim>;
using QCopy = TileCopy<Config::kBlockM, Config::kHeadDim, Config::kThreads>;
using KvCopy = TileCopy<Config::kBlockN, Config::kHeadDim, Config::kThreads>;
using Keys = KeyTiles<Config::kBlockM, Config::kBlockN>;
using Steps = KeySteps<Config::kLists, Config::kBlockM, Config::kBlockN>;
using Scores = float[Config::kNTiles * 4];
using Output = float[Config::kDTiles * 4];

struct ExchangedDs {
    alignas(1024) uint8 ds[Config::kBlockM * Config::kBlockN * 2];
};
struct NothingElse {};
struct SharedStorage : Select<Config::kIsWide, ExchangedDs, NothingElse>::Type {
    alignas(1024) uint8 q[QTile::kBytes];  // dQ on the way out
    alignas(1024) uint8 d_o[QTile::kBytes];
    alignas(1024) uint8 k[Config::kStages][KvTile::kBytes];
    alignas(1024) uint8 v[Config::kStages][KvTile::kBytes];
};
OA_DEVICE uint32 ds_of(ExchangedDs& smem) { return smem_addr_of(smem.ds); }
OA_DEVICE uint32 ds_of(NothingElse&) { return 0; }
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

// D = A B^T of a warp's rows: A Q or dO, B K or V.
OA_DEVICE void mma_scores(Scores& s, uint32 smem_a, const QLane& a_lane, uint32 smem_b, const KvLane& b_lane) {
#pragma unroll
    for (int x = 0; x < Config::kNTiles * 4; ++x) s[x] = 0.0f;
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
        uint32 a[4];
        ldmatrix_x4(a, smem_a + a_lane.at(0, step));
#pragma unroll
        for (int n = 0; n < Config::kNTiles; n += 2) {
            uint32 b[4];
            ldmatrix_x4(b, smem_b + b_lane.at(n * 8, step));
            mma_m16n8k16(Config::Io{}, s + 4 * n, a, b[0], b[1]);
            mma_m16n8k16(Config::Io{}, s + 4 * (n + 1), a, b[2], b[3]);
        }
    }
}

// dQ += dS K.
OA_DEVICE void mma_dq(Output& dq, const Scores& ds, uint32 smem_k, const KvLane& lane) {
#pragma unroll
    for (int n = 0; n < Config::kNTiles; n += 2) {
        const float* x = ds + 4 * n;
        const uint32 a[4] = {pack2(Config::Io{}, x[0], x[1]), pack2(Config::Io{}, x[2], x[3]),
                             pack2(Config::Io{}, x[4], x[5]), pack2(Config::Io{}, x[6], x[7])};
#pragma unroll
        for (int d = 0; d < Config::kDTiles; d += 2) {
            uint32 b[4];
            ldmatrix_x4_trans(b, smem_k + lane.at(n * 8, d / 2));
            mma_m16n8k16(Config::Io{}, dq + 4 * d, a, b[0], b[1]);
            mma_m16n8k16(Config::Io{}, dq + 4 * (d + 1), a, b[2], b[3]);
        }
    }
}

// The same of two warps with the same rows. smem_ds: of these rows.
using HalfScores = WideScores<Config::Io, Config::kBlockM, Config::kBlockN, Config::kHeadDim, Config::kNTiles * 8>;
static_assert(!Config::kIsWide || (HalfScores::kIsWhole && Config::kDTiles % 8 == 0), "whole panels and MMA tiles");
OA_DEVICE void exchange_ds(const Scores& ds, uint32 smem_ds, int row_warp, int channel_warp, int lane) {
    using DsTile = PanelTile<Config::kBlockM, Config::kBlockN>;
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r)
            store_shared(smem_ds +
                             DsTile::offset(row_warp * 16 + (lane >> 2) + 8 * r, channel_warp * Config::kNTiles + n) +
                             (lane & 3) * 4,
                         pack2(Config::Io{}, ds[4 * n + 2 * r], ds[4 * n + 2 * r + 1]));
    named_barrier_sync(1 + row_warp, 32 * Config::kChannelWarps);
}
// smem_k: from the warp's first panel on, as channels.
OA_DEVICE void add_half_dq(Output& dq, uint32 smem_ds, uint32 smem_k, const KvLane& lane_k, int32 channels,
                           int row_warp, int lane) {
    PanelLane<Config::kBlockM, Config::kBlockN> lane_a(row_warp * 16 + (lane & 15), lane >> 4);
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step) {
        uint32 a[4];
        ldmatrix_x4(a, smem_ds + lane_a.at(0, step));
        add_wide_output<Config::Io, Config::kChannelWarps>(dq, a, smem_k, lane_k, step * 16, channels);
    }
}
// Which chunk of 8 channels of a row the warp's number `own` is.
OA_DEVICE int chunk_of(int own, int channel_warp) {
    return Config::kIsWide ? (own >> 3) * (8 * Config::kChannelWarps) + channel_warp * 8 + (own & 7) : own;
}

// Scores to dS, of rows row and row + 8. hides: some of the keys are hidden; all: every one is. kModifies: scores are
// modified one by one.
template <bool kModifies>
OA_DEVICE void make_ds(Scores& s, const Scores& dp, const AttnFwdParams& f, const BwdScores<Config::Io>& scores,
                       const TileDropout& dropout, const FwdTile& t, const float (&lse2)[2], const float (&delta)[2],
                       int32 row, int32 key, bool hides, bool all) {
    float c = f.softmax_scale * kLog2e;
    KeyRange visible[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        visible[r] = {0, t.seqlen_k};
        if (hides)
            visible[r] = row + 8 * r < t.seqlen_q && !all
                             ? visible_keys(row + 8 * r, t.seqlen_q, t.seqlen_k, f.window_left, f.window_right)
                             : KeyRange{0, 0};
    }
    TileDropout::Kept kept;
#pragma unroll
    for (int x = 0; x < Config::kNTiles * 4; ++x) {
        int r = x >> 1 & 1;
        if (x % 16 == 0) dropout.find<ColumnPairs>(kept, row / 16, key / 16 + x / 8);
        int32 k = key + 8 * (x >> 2) + (x & 1);
        bool see = k >= visible[r].lo && k < visible[r].hi;
        float p;
        if constexpr (kModifies) {
            ScoreGrad g = scores.at(s[x], lse2[r], row + 8 * r, k, see);
            p = g.p * g.slope;
            s[x] = p == 0.0f ? 0.0f : p * dropout.change(dp[x], delta[r], kept, x / 8 % 2, r + x / 4 % 2 * 2, x & 1);
        } else {
            p = exp2_approx(fmaf(s[x], c, -lse2[r]));
            s[x] = p * dropout.change(dp[x], delta[r], kept, x / 8 % 2, r + x / 4 % 2 * 2, x & 1);
            // Where a key is hidden, dO or V may be NaN and yet not count.
            if (hides) s[x] = see && p != 0.0f ? s[x] : 0.0f;
        }
    }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, MIN_CTAS) attn_bwd_dq_sm80(
    const __grid_constant__ BwdParams params) {
    const AttnBwdParams& p = backward_of(params);
    const AttnFwdParams& f = p.fwd;
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    int tid = threadIdx.x, lane = tid & 31, warp_idx = __shfl_sync(0xffffffffu, tid >> 5, 0);
    const int row_warp = warp_idx / Config::kChannelWarps, channel_warp = warp_idx % Config::kChannelWarps;

    FwdTile t = fwd_tile<Config::kBlockM>(f);
    // Rows that belong to no sequence are attn_bwd_prepare's.
    if (!t.valid || t.seqlen_k == kNoSequence) return;
    Keys keys(f, t);
    int32 kv_head = t.head_idx / (f.num_q_heads / f.num_kv_heads);
    int64 first_row = int64(t.q_begin) + t.m0;
    uint32 smem_q = smem_addr_of(smem.q), smem_do = smem_addr_of(smem.d_o);
    uint32 smem_k = smem_addr_of(smem.k), smem_v = smem_addr_of(smem.v);
    const uint16* gk = f.k + t.batch_idx * f.k_stride_b + kv_head * f.k_stride_h + int64(t.k_begin) * f.k_stride_s;
    const uint16* gv = f.v + t.batch_idx * f.v_stride_b + kv_head * f.v_stride_h + int64(t.k_begin) * f.v_stride_s;
    KvCopy kv_copy(f.head_dim, tid);
    auto copy = [&](int32 n, int stage) {
        int64 key = int64(n) * Config::kBlockN;
        int32 rows = int32(min_of<int64>(t.seqlen_k - key, Config::kBlockN));
        kv_copy.issue(smem_k + stage * KvTile::kBytes, gk + key * f.k_stride_s, f.k_stride_s, rows, tid);
        kv_copy.issue(smem_v + stage * KvTile::kBytes, gv + key * f.v_stride_s, f.v_stride_s, rows, tid);
    };

    Output dq;
#pragma unroll
    for (int x = 0; x < Config::kDTiles * 4; ++x) dq[x] = 0.0f;
    Steps steps(p, t, keys);
    if (steps.left > 0) {
        QCopy q_copy(f.head_dim, tid);
        q_copy.issue(smem_q, f.q + t.batch_idx * f.q_stride_b + t.head_idx * f.q_stride_h + first_row * f.q_stride_s,
                     f.q_stride_s, t.seqlen_q - t.m0, tid);
        q_copy.issue(smem_do,
                     p.d_o + t.batch_idx * p.do_stride_b + t.head_idx * p.do_stride_h + first_row * p.do_stride_s,
                     p.do_stride_s, t.seqlen_q - t.m0, tid);
        copy(steps.n, 0);
        cp_async_commit();

        int32 row = t.m0 + row_warp * 16 + (lane >> 2);
        int64 padded = t.head_idx * p.rows_stride_h + padded_begin(f, t.sequence, t.q_begin) + row;
        float lse2[2] = {p.lse2[padded], p.lse2[padded + 8]}, delta[2] = {p.delta[padded], p.delta[padded + 8]};
        TileDropout dropout(params);
        dropout.begin(t.sequence, t.head_idx, lane);
        BwdScores<Config::Io> scores(f, arrays_of(params), t.sequence, t.head_idx, t.seqlen_q, t.seqlen_k);
        QLane a_lane(row_warp * 16 + (lane & 15), lane >> 4);
        KvLane b_lane((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1), k_lane(lane & 15, lane >> 4);
        int stage = 0;
        for (; steps.left > 0; --steps.left) {
            const int32 n = steps.n;
            const bool hides_all = steps.hides_all(row_warp * 16), has_next = steps.left > 1;
            if (has_next) steps.advance();
            cp_async_wait<0>();
            __syncthreads();  // this tile has landed; every warp has left the tile before
            if (Config::kStages == 2 && has_next) copy(steps.n, stage ^ 1);
            cp_async_commit();
            uint32 tile = stage * KvTile::kBytes;
            Scores s, dp;
            const int own = channel_warp * (Config::kNTiles * 8);  // first key
            if constexpr (Config::kIsWide) {
                const auto lane_b = HalfScores::lane_b(lane);
                HalfScores::multiply(s, smem_q, a_lane, smem_k + tile + own * 128, lane_b, f.head_dim);
                HalfScores::multiply(dp, smem_do, a_lane, smem_v + tile + own * 128, lane_b, f.head_dim);
            } else {
                mma_scores(s, smem_q, a_lane, smem_k + tile, b_lane);
                mma_scores(dp, smem_do, a_lane, smem_v + tile, b_lane);
            }
            const int32 key = n * Config::kBlockN + own + 2 * (lane & 3);
            const bool hides = n < keys.full_first || n >= keys.full_end || hides_all;
            if (Config::kScoreMods && (!Config::kLists || modifies_scores(f)))
                make_ds<Config::kScoreMods>(s, dp, f, scores, dropout, t, lse2, delta, row, key, hides, hides_all);
            else
                make_ds<false>(s, dp, f, scores, dropout, t, lse2, delta, row, key, hides, hides_all);
            if constexpr (Config::kIsWide) {
                exchange_ds(s, ds_of(smem), row_warp, channel_warp, lane);
                add_half_dq(dq, ds_of(smem), smem_k + tile + channel_warp * KvTile::kPanelBytes, k_lane,
                            f.head_dim - channel_warp * 64, row_warp, lane);
            } else {
                mma_dq(dq, s, smem_k + tile, k_lane);
            }
            if (Config::kStages == 2) {
                stage ^= 1;
            } else {
                __syncthreads();
                if (has_next) copy(steps.n, 0);
                cp_async_commit();
            }
        }
    }
    // Through the rows of Q that only this warp has read (or both, before they exchanged dS) to 16-byte stores.
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int d = 0; d < Config::kDTiles; ++d)
            *reinterpret_cast<uint32*>(smem.q +
                                       QTile::offset(row_warp * 16 + (lane >> 2) + r * 8, chunk_of(d, channel_warp)) +
                                       (lane & 3) * 4) =
                pack2(Config::Io{}, dq[4 * d + 2 * r] * f.softmax_scale, dq[4 * d + 2 * r + 1] * f.softmax_scale);
    __syncwarp();
    uint16* to = p.dq + t.batch_idx * p.dq_stride_b + t.head_idx * p.dq_stride_h + first_row * p.dq_stride_s;
    constexpr int kChunks = Config::kDTiles;
#pragma unroll
    for (int at = 0; at < 16 * kChunks; at += 32) {
        int row = row_warp * 16 + (at + lane) / kChunks, chunk = chunk_of((at + lane) % kChunks, channel_warp);
        if (t.m0 + row < t.seqlen_q && chunk * 8 < f.head_dim)
            *reinterpret_cast<uint4*>(to + row * p.dq_stride_s + chunk * 8) =
                *reinterpret_cast<const uint4*>(smem.q + QTile::offset(row, chunk));
    }
}
