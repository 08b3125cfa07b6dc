// Backward of exact attention on mma.sync for narrow heads, any GPU from sm_80 on: dK and dV, and dQ by sums in global
// memory. What attn_bwd_sm80 computes, with the same arguments; there is how. Source: FlashAttention-2 (Dao 2023),
// algorithm 2.
//
//   S = Q K^T;  P = exp2(c S - lse2);  dP = dO V^T;  dS = P (dP - delta);  dV = P^T dO;  dK = scale dS^T Q;  dQ = dS K
//   with dropout (attention/dropout.cuh)  dP = Z / keep (dO V^T);  dV = (P Z / keep)^T dO
//
// One CTA takes BLOCK_N keys of one kv head and walks the tiles of BLOCK_M queries that see them. Heads of 64 columns
// leave room for dK and dV of 32 keys in the registers of a warp: no probability ever crosses to another warp. Warp w
// takes keys [32 (w % 4), + 32) and the queries of half w / 4 of a tile, 32 at a time: of them S^T, P^T, dP^T, dS^T,
// and their part of dV and dK. At the end the halves add up their dK and dV, in a fixed order. dS crosses, as 16 bits,
// for dQ, which is made in the step after: a single barrier a step.
//
// step i:  bar | copy Q,dO(i+1) | half 1: dQ(i-1) | 32 queries at a time: S P dP dS->ds[i%2] dV dK | half 0: dQ(i-1)
// NUM_STAGES = 1: a second barrier behind the step, and the copies behind it.
//
// Shared memory, bytes: K [BLOCK_N * HEAD_DIM * 2] | V [same] | Q [NUM_STAGES][BLOCK_M * HEAD_DIM * 2] | dO [same] |
// dS^T [2][BLOCK_N * BLOCK_M * 2] | lse2, delta [NUM_STAGES][BLOCK_M * 4] each. On the way out Q to dS: parts of dV,
// dK.
#include "attention/bwd_keys.cuh"
#include "attention/bwd_scores.cuh"
#include "attention/query_tiles.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/reduce.cuh"
#include "ptx/shared.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kBlockM = BLOCK_M;
    static constexpr int kBlockN = BLOCK_N;
    static constexpr int kWarps = NUM_WARPS;
    static constexpr int kStages = NUM_STAGES;
    static constexpr bool kScoreMods = SCORE_MODS;  // softcap, mask, score_mod: scores are formed one by one
    static constexpr bool kDMask = DMASK;
    static constexpr bool kLists = false;  // of tiles of 64 queries, which kBlockM is more than
    static constexpr int kDsTiles = 2;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kKeyGroups = kWarps / 2;  // warps of a half of the queries
    static constexpr int kKeyRows = kBlockN / kKeyGroups;  // keys of a warp
    static constexpr int kKTiles = kKeyRows / 16;
    // Queries of which a warp makes scores at a time; the derivatives of scores take as many registers as scores do.
    static constexpr int kQueries = kScoreMods || kHasDropout ? 16 : 32;
    static constexpr int kQTiles = kQueries / 8;
    static constexpr int kParts = kBlockM / 2 / kQueries;
    static constexpr int kOutKTiles = kKTiles, kOutDTiles = kHeadDim / 8;  // of dV and dK
    static constexpr int kDqWarpsM = DQ_WARPS_M;  // warps side by side along the queries of dQ
    static constexpr int kDqMTiles = kBlockM / kDqWarpsM / 16;
    static constexpr int kDqSteps = kHeadDim / (kWarps / kDqWarpsM) / 16;  // 16 columns each
    static_assert(kKTiles * 16 * kKeyGroups == kBlockN && kDqMTiles * 16 * kDqWarpsM == kBlockM, "whole MMA tiles");
    static_assert(kDqSteps * 16 * (kWarps / kDqWarpsM) == kHeadDim && kBlockRows % kBlockM == 0, "whole MMA tiles");
    static_assert(kParts * kQueries * 2 == kBlockM && kHeadDim == 64, "rows of a single panel, whole parts");
    static_assert(kStages == 1 || kStages == 2, "single or double buffer");
    static_assert(kScoreMods || !kDMask, "a gradient of a mask needs a mask");
};

using Keys = BwdKeys<Config>;
using Work = Keys::Work;
using Steps = Keys::Steps;
using SharedStorage = Keys::SharedStorage;
using DsTile = Keys::DsTile;
using Scores = Keys::Scores;
using Output = Keys::Output;
using Packed = Keys::Packed;
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");
static_assert(2 * sizeof(Output) * 32 * Config::kKeyGroups <=
                  sizeof(SharedStorage::q) + sizeof(SharedStorage::d_o) + sizeof(SharedStorage::ds),
              "parts of dV and dK take the place of what is read");

// P^T of kQueries queries from m0 on, of which kHides hides a part, in `s`; packed for dV. slope, with score
// modifications: the derivative of the scores.
template <bool kHides>
OA_DEVICE void make_p(const Work& w, Scores& s, Scores& slope, Packed& packed, TileDropout::Kept& kept,
                      const Place& step, int32 m0, uint32 lse2_at) {
    int lane = in_register(w.lane);
    int32 key = w.t.n0 + w.group * Config::kKeyRows + (lane >> 2), query = m0 + 2 * (lane & 3);
    [[maybe_unused]] float c = w.p.fwd.softmax_scale * kLog2e;
    BwdScores<Config::Io> scores(w.p.fwd, w.arrays, w.t.sequence, step.head, w.t.seqlen_q, w.t.seqlen_k);
    const TileDropout dropout = w.dropout_of(step, lane);
    dropout.find<ColumnPairs, true, true>(kept, (w.t.n0 + w.group * Config::kKeyRows) / 16, m0 / 16);
#pragma unroll
    for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int32 k = key + 16 * i + 8 * r;
            QueryRange range{0, 0};
            if (kHides && k < w.t.seqlen_k)
                range = visible_queries(k, w.t.seqlen_q, w.t.seqlen_k, w.p.fwd.window_left, w.p.fwd.window_right);
#pragma unroll
            for (int n = 0; n < Config::kQTiles; ++n) {
                float2 lse2 = load_shared_float2(lse2_at + n * 32);
                int32 row = query + 8 * n;
                float& x = s[i][4 * n + 2 * r];
                float& y = s[i][4 * n + 2 * r + 1];
                bool see0 = !kHides || (row >= range.lo && row < range.hi);
                bool see1 = !kHides || (row + 1 >= range.lo && row + 1 < range.hi);
                if constexpr (Config::kScoreMods) {
                    ScoreGrad a = scores.at(x, lse2.x, row, k, see0), b = scores.at(y, lse2.y, row + 1, k, see1);
                    x = a.p, y = b.p;
                    slope[i][4 * n + 2 * r] = a.slope, slope[i][4 * n + 2 * r + 1] = b.slope;
                } else {
                    x = exp2_approx(fmaf(x, c, -lse2.x)), y = exp2_approx(fmaf(y, c, -lse2.y));
                    if (kHides) x = see0 ? x : 0.0f, y = see1 ? y : 0.0f;
                }
                packed[i][2 * n + r] = dropout.drop_pair(pack2(Config::Io{}, x, y), kept, i, n % 2 + 2 * r);
            }
        }
}

// dS^T of these queries from P^T, packed for dK and in shared memory. kHides: where P is 0 dO or V may be NaN and yet
// not count. n0: the first of these tiles of 8 queries.
template <bool kHides>
OA_DEVICE void make_ds(const Work& w, const Scores& p, const Scores& slope, const Scores& dp, Packed& packed,
                       const TileDropout::Kept& kept, int32 head, int32 m0, uint32 delta_at, uint32 smem_ds, int n0) {
    int lane = in_register(w.lane);
    int32 key = w.group * Config::kKeyRows + (lane >> 2);
#pragma unroll
    for (int n = 0; n < Config::kQTiles; ++n) {
        float2 delta = load_shared_float2(delta_at + n * 32);
#pragma unroll
        for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int x = 4 * n + 2 * r;
                float d0 = w.dropout.change(dp[i][x], delta.x, kept, i, n % 2 + 2 * r, 0);
                float d1 = w.dropout.change(dp[i][x + 1], delta.y, kept, i, n % 2 + 2 * r, 1);
                float a = p[i][x] * d0, b = p[i][x + 1] * d1;
                if (kHides) a = p[i][x] == 0.0f ? 0.0f : a, b = p[i][x + 1] == 0.0f ? 0.0f : b;
                if constexpr (Config::kDMask) {
                    float* to = w.p.dmask + w.t.sequence * w.p.dmask_stride_b + head * w.p.dmask_stride_h +
                                (m0 + 8 * n + 2 * (lane & 3)) * w.p.dmask_stride_q +
                                (w.t.n0 + key + 16 * i + 8 * r) * w.p.dmask_stride_k;
                    if (p[i][x] != 0.0f) reduce_add_global(to, a);
                    if (p[i][x + 1] != 0.0f) reduce_add_global(to + w.p.dmask_stride_q, b);
                }
                if constexpr (Config::kScoreMods) a *= slope[i][x], b *= slope[i][x + 1];
                packed[i][2 * n + r] = pack2(Config::Io{}, a, b);
                store_shared(smem_ds + Keys::ds_word(key + 16 * i + 8 * r, n0 + n, lane), packed[i][2 * n + r]);
            }
    }
}

// kQueries queries of a step. kAll: dv and dk are wanted.
template <bool kHides, bool kAll>
OA_DEVICE void make_part(const Work& w, Output& dv, Output& dk, const Place& at, int first, int stage, uint32 smem_ds) {
    int lane = in_register(w.lane);
    uint32 rows = stage * Keys::QTile::kBytes + first * (Config::kHeadDim * 2);
    uint32 numbers = (stage * Config::kBlockM + first + 2 * (lane & 3)) * 4;
    uint32 smem_q = w.at(&SharedStorage::q) + rows, smem_do = w.at(&SharedStorage::d_o) + rows;
    int32 m0 = at.m * Config::kBlockM + first;
    bool wants_ds = w.p.dq_accum != nullptr || w.p.dk != nullptr || Config::kDMask;
    Keys::KvLane a_lane(w.group * Config::kKeyRows + (lane & 15), lane >> 4);
    Keys::QLane s_lane((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1), o_lane(lane & 15, lane >> 4);
    Scores p, slope, dp;
    Packed packed;
    TileDropout::Kept kept;  // of 32 keys
    static_assert(!kHasDropout || (Config::kQTiles == 2 && Config::kKTiles == 2), "two squares");
    Keys::mma_scores(p, w.at(&SharedStorage::k), a_lane, smem_q, s_lane);
    make_p<kHides>(w, p, slope, packed, kept, at, m0, w.at(&SharedStorage::lse2) + numbers);
    if (kAll || w.p.dv != nullptr) Keys::mma_output(dv, packed, smem_do, o_lane);
    if (!kAll && !wants_ds) return;
    Keys::mma_scores(dp, w.at(&SharedStorage::v), a_lane, smem_do, s_lane);
    make_ds<kHides>(w, p, slope, dp, packed, kept, at.head, m0, w.at(&SharedStorage::delta) + numbers, smem_ds,
                    first / 8);
    if (kAll || w.p.dk != nullptr) Keys::mma_output(dk, packed, smem_q, o_lane);
}

// The other half's part of dV or dK onto this warp's; lanes have the same elements of both.
OA_DEVICE void give_part(const Output& o, uint32 to, int lane) {
#pragma unroll
    for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
        for (int x = 0; x < Config::kOutDTiles * 4; ++x)
            store_shared(to + ((i * Config::kOutDTiles * 4 + x) * 32 + lane) * 4, __float_as_uint(o[i][x]));
}
OA_DEVICE void take_part(Output& o, const Output& own, uint32 from, int lane) {
#pragma unroll
    for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
        for (int x = 0; x < Config::kOutDTiles * 4; ++x)
            o[i][x] =
                own[i][x] + __uint_as_float(load_shared(from + ((i * Config::kOutDTiles * 4 + x) * 32 + lane) * 4));
}

// All steps; leaves dV (first half) or dK (second half) in `o`.
template <bool kAll>
OA_DEVICE void run(const Work& w, Output& o, Steps steps) {
    uint32 smem_ds = w.at(&SharedStorage::ds);
    bool wants_dq = w.p.dq_accum != nullptr;
    int half = w.warp_idx / Config::kKeyGroups;
    Place before{-1, 0};
    int stage = 0, parity = 0;
    Output dv, dk;
#pragma unroll
    for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
        for (int x = 0; x < Config::kOutDTiles * 4; ++x) dv[i][x] = dk[i][x] = 0.0f;
    uint32 is_stray = steps.left > 0 ? Keys::is_stray(w, steps.at) : 0;
    for (; steps.left > 0; --steps.left, parity ^= 1) {
        const Place at = steps.at, next = steps.next();
        bool has_next = steps.left > 1;
        cp_async_wait<0>();
        __syncthreads();  // this step has landed, dS of the step before is there, every warp has left that step
        if (is_stray) Keys::clear_stray(w, stage);
        if (Config::kStages == 2 && has_next) Keys::copy_step(w, next, stage ^ 1);
        is_stray = has_next ? Keys::is_stray(w, next) : 0;  // read ahead
        cp_async_commit();
        bool hides = !kAll || Config::kScoreMods || at.m < w.tiles.full_first || at.m >= w.tiles.full_end;
        uint32 ds = smem_ds + parity * DsTile::kBytes, ds_before = smem_ds + (parity ^ 1) * DsTile::kBytes;
        bool adds_dq = wants_dq && before.head >= 0;
        if (half == 1 && adds_dq) Keys::add_dq(w, ds_before, before);
#pragma unroll 1
        for (int part = 0; part < Config::kParts; ++part) {
            int first = (half * Config::kParts + part) * Config::kQueries;
            if (hides)
                make_part<true, kAll>(w, dv, dk, at, first, stage, ds);
            else
                make_part<Config::kScoreMods || !kAll, kAll>(w, dv, dk, at, first, stage, ds);
        }
        if (half == 0 && adds_dq) Keys::add_dq(w, ds_before, before);
        before = at;
        steps.at = next;
        if (Config::kStages == 2) {
            stage ^= 1;
        } else {
            __syncthreads();
            if (has_next) Keys::copy_step(w, next, 0);
            cp_async_commit();
        }
    }
    __syncthreads();
    if (wants_dq && before.head >= 0) Keys::add_dq(w, smem_ds + (parity ^ 1) * DsTile::kBytes, before);
    __syncthreads();
    // The first half gives dK and takes dV.
    uint32 places = w.at(&SharedStorage::q), bytes = sizeof(Output) * 32;
    if (half == 0)
        give_part(dk, places + w.group * bytes, w.lane);
    else
        give_part(dv, places + (Config::kKeyGroups + w.group) * bytes, w.lane);
    __syncthreads();
    if (half == 0)
        take_part(o, dv, places + (Config::kKeyGroups + w.group) * bytes, w.lane);
    else
        take_part(o, dk, places + w.group * bytes, w.lane);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, MIN_CTAS) attn_bwd_joint_sm80(
    const __grid_constant__ BwdParams params) {
    Keys::run(params, [](const Work& w, Output& o, const Steps& steps) {
        if (w.p.dv != nullptr && w.p.dk != nullptr)
            run<true>(w, o, steps);
        else
            run<false>(w, o, steps);
    });
}
