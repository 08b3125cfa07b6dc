// Backward of exact attention on mma.sync for heads of more than 256 channels, any GPU from sm_80 on: dK and dV, and dQ
// by sums in global memory. What attn_bwd_sm80 computes, with the same arguments. Source: FlashAttention-2 (Dao 2023),
// algorithm 2.
//
//   S = Q K^T;  P = exp2(c S - lse2);  dP = dO V^T;  dS = P (dP - delta);  dV = P^T dO;  dK = scale dS^T Q;  dQ = dS K
//
// One CTA takes BLOCK_N keys of one kv head and walks the tiles of BLOCK_M queries that see them, of every query head
// of the group. dV and dK of 16 keys fill the registers of two warps each, which have half of the channels. The warps
// of the first half (role 0) make P and dV, those of the second half (role 1) dS and dK. Warp g of a role makes scores
// of 16 keys, those of group g / 2, and half g % 2 of the queries of a tile; and of these keys and all queries the
// channels of half g % 2 of dV or dK. So P and dS cross through shared memory, in 16 bits: P as it is, for dV, and
// times the derivative of the scores, from thread to same thread of role 1, which puts dS in its place.
//
// step i, role 0:  bar | copy Q,dO(i+1) | S(i)  P(i)  arrive(pair)        | bar | dV += P dO | dQ += dS K
// step i, role 1:  bar | copy Q,dO(i+1) | dP(i)       sync(pair)   dS(i) | bar | dK += dS Q | dQ += dS K
// NUM_STAGES = 1: a third barrier behind the step, and the copies behind it.
//
// Shared memory, bytes: K [BLOCK_N * HEAD_DIM * 2] | V [same] | Q [NUM_STAGES][BLOCK_M * HEAD_DIM * 2] | dO [same] |
// P^T, dS^T [BLOCK_N * BLOCK_M * 2] each | lse2, delta [NUM_STAGES][BLOCK_M * 4] each.
#include "attention/bwd_keys.cuh"
#include "attention/bwd_scores.cuh"
#include "attention/query_tiles.cuh"
#include "attention/wide_products.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/reduce.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kBlockM = BLOCK_M;
    static constexpr int kBlockN = BLOCK_N;
    static constexpr int kWarps = NUM_WARPS;
    static constexpr int kStages = NUM_STAGES;
    static constexpr bool kScoreMods = SCORE_MODS;  // softcap, mask, score_mod: scores are modified one by one
    static constexpr bool kDMask = DMASK;
    static constexpr bool kLists = kScoreMods;  // a block mask
    static constexpr int kDsTiles = 2;  // P; dS
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kKeyGroups = kWarps / 4;
    static constexpr int kKTiles = 1;  // of 16 keys, of a warp
    static constexpr int kQTiles = kBlockM / 16;  // of 8 queries, of which a warp makes scores
    static constexpr int kOutKTiles = 1, kOutDTiles = kHeadDim / 16;  // of dV and dK
    static constexpr int kDqWarpsM = DQ_WARPS_M;  // warps side by side along the queries of dQ
    static constexpr int kDqMTiles = kBlockM / kDqWarpsM / 16;
    static constexpr int kDqSteps = kHeadDim / (kWarps / kDqWarpsM) / 16;  // 16 columns each
    static_assert(kKeyGroups * 16 == kBlockN && kDqMTiles * 16 * kDqWarpsM == kBlockM, "whole MMA tiles");
    static_assert(kDqSteps == 4 && kDqWarpsM == 1 && kBlockRows % kBlockM == 0, "a panel of dQ a warp");
    static_assert(kBlockM == 16 || kBlockM == 32, "P and dS have rows of a panel");
    static_assert(kStages == 1 || kStages == 2, "single or double buffer");
    static_assert(kScoreMods || !kDMask, "a gradient of a mask needs a mask");
};

using Keys = BwdKeys<Config>;
using Work = Keys::Work;
using Steps = Keys::Steps;
using SharedStorage = Keys::SharedStorage;
using DsTile = Keys::DsTile;
using Output = Keys::Output;
using HalfScores = WideScores<Config::Io, Config::kBlockN, Config::kBlockM, Config::kHeadDim, Config::kBlockM / 2>;
using Scores = HalfScores::Scores;
static_assert(HalfScores::kIsWhole && Config::kOutDTiles % 8 == 0, "whole panels and MMA tiles");
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

OA_DEVICE int32 key_group(const Work& w) { return w.group / 2; }
OA_DEVICE int32 half_of(const Work& w) { return w.group % 2; }  // of the queries whose scores, and of the channels
OA_DEVICE uint32 smem_p(const Work& w) { return w.at(&SharedStorage::ds); }
OA_DEVICE uint32 smem_ds(const Work& w) { return w.at(&SharedStorage::ds) + DsTile::kBytes; }
// The first of a warp's keys that this lane has, and of its queries.
OA_DEVICE int32 key_of(const Work& w, int32 lane) { return key_group(w) * 16 + (lane >> 2); }
OA_DEVICE int32 query_of(const Work& w, int32 lane) { return half_of(w) * (Config::kQTiles * 8) + 2 * (lane & 3); }

// S^T or dP^T of a warp's keys and queries: A is K or V, B a stage of Q or dO.
OA_DEVICE void make_scores(const Work& w, Scores& s, uint32 smem_a, uint32 smem_b) {
    int lane = in_register(w.lane);
    Keys::KvLane a_lane(key_group(w) * 16 + (lane & 15), lane >> 4);
    HalfScores::multiply(s, smem_a, a_lane, smem_b + half_of(w) * (Config::kQTiles * 8 * 128), HalfScores::lane_b(lane),
                         w.p.fwd.head_dim);
}

// What P times the slope crosses with.
constexpr float kCrossing = Config::kScoreMods ? kOfCrossing : 1.0f;

// P^T of a step, of which kHides hides a part, to shared memory. kModifies: scores are modified one by one.
template <bool kHides, bool kModifies>
OA_DEVICE void make_p(const Work& w, const Scores& s, const Place& at, int stage) {
    int lane = in_register(w.lane);
    int32 key = key_of(w, lane), query = query_of(w, lane);
    [[maybe_unused]] float c = w.p.fwd.softmax_scale * kLog2e;
    uint32 lse2_at = w.at(&SharedStorage::lse2) + (stage * Config::kBlockM + query) * 4;
    BwdScores<Config::Io> scores(w.p.fwd, w.arrays, w.t.sequence, at.head, w.t.seqlen_q, w.t.seqlen_k);
    QueryRange visible[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int32 k = w.t.n0 + key + 8 * r;
        visible[r] = QueryRange{0, 0};
        if (kHides && k < w.t.seqlen_k)
            visible[r] = visible_queries(k, w.t.seqlen_q, w.t.seqlen_k, w.p.fwd.window_left, w.p.fwd.window_right);
    }
#pragma unroll
    for (int n = 0; n < Config::kQTiles; ++n) {
        float2 lse2 = load_shared_float2(lse2_at + n * 32);
        int32 row = at.m * Config::kBlockM + query + 8 * n;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float x = s[4 * n + 2 * r], y = s[4 * n + 2 * r + 1];
            bool see0 = !kHides || (row >= visible[r].lo && row < visible[r].hi);
            bool see1 = !kHides || (row + 1 >= visible[r].lo && row + 1 < visible[r].hi);
            uint32 to = Keys::ds_word(key + 8 * r, half_of(w) * Config::kQTiles + n, lane);
            uint32 plain, cross;
            if constexpr (kModifies) {
                int32 k = w.t.n0 + key + 8 * r;
                ScoreGrad a = scores.at(x, lse2.x, row, k, see0), b = scores.at(y, lse2.y, row + 1, k, see1);
                plain = pack2(Config::Io{}, a.p, b.p);
                cross = pack2(Config::Io{}, a.p * (kCrossing * a.slope), b.p * (kCrossing * b.slope));
            } else {
                float a = exp2_approx(fmaf(x, c, -lse2.x)), b = exp2_approx(fmaf(y, c, -lse2.y));
                if (kHides) a = see0 ? a : 0.0f, b = see1 ? b : 0.0f;
                cross = plain = pack2(Config::Io{}, a, b);
            }
            store_shared(smem_p(w) + to, plain);
            store_shared(smem_ds(w) + to, cross);
        }
    }
}

// dS^T of a step in the place of P^T. kHides: where P is 0 dO or V may be NaN and yet not count.
template <bool kHides>
OA_DEVICE void make_ds(const Work& w, const Scores& dp, const Place& at, int stage, [[maybe_unused]] float of_crossed) {
    int lane = in_register(w.lane);
    int32 key = key_of(w, lane), query = query_of(w, lane);
    uint32 delta_at = w.at(&SharedStorage::delta) + (stage * Config::kBlockM + query) * 4;
#pragma unroll
    for (int n = 0; n < Config::kQTiles; ++n) {
        float2 delta = load_shared_float2(delta_at + n * 32);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32 word = Keys::ds_word(key + 8 * r, half_of(w) * Config::kQTiles + n, lane);
            float2 p = unpack2(Config::Io{}, load_shared(smem_ds(w) + word));
            float d0 = dp[4 * n + 2 * r] - delta.x, d1 = dp[4 * n + 2 * r + 1] - delta.y;
            if constexpr (kCrossing != 1.0f) p.x *= of_crossed, p.y *= of_crossed;
            float a = p.x * d0, b = p.y * d1;
            if (kHides) a = p.x == 0.0f ? 0.0f : a, b = p.y == 0.0f ? 0.0f : b;
            store_shared(smem_ds(w) + word, pack2(Config::Io{}, a, b));
            if constexpr (Config::kDMask) {
                float2 plain = unpack2(Config::Io{}, load_shared(smem_p(w) + word));
                int32 row = at.m * Config::kBlockM + query + 8 * n;
                float* to = w.p.dmask + w.t.sequence * w.p.dmask_stride_b + at.head * w.p.dmask_stride_h +
                            row * w.p.dmask_stride_q + (w.t.n0 + key + 8 * r) * w.p.dmask_stride_k;
                if (plain.x != 0.0f) reduce_add_global(to, plain.x * d0);
                if (plain.y != 0.0f) reduce_add_global(to + w.p.dmask_stride_q, plain.y * d1);
            }
        }
    }
}

// P has been written, for the warp of role 1 with the same keys and queries.
#ifdef PAIRS_WAIT  // for race checkers that do not follow bar.arrive
OA_DEVICE void pass_p(const Work& w) { named_barrier_sync(1 + w.group, 64); }
#else
OA_DEVICE void pass_p(const Work& w) { named_barrier_arrive(1 + w.group, 64); }
#endif
OA_DEVICE void take_p(const Work& w) { named_barrier_sync(1 + w.group, 64); }

// dV or dK of a step: P^T or dS^T times a stage of dO or Q, half of the channels.
OA_DEVICE void add_output(const Work& w, Output& o, uint32 smem_a, uint32 smem_b) {
    constexpr int kHalf = Config::kHeadDim / 2;
    int lane = in_register(w.lane);
    Keys::DsLane a_lane(key_group(w) * 16 + (lane & 15), lane >> 4);
    Keys::QLane b_lane(lane & 15, lane >> 4);
    smem_b += half_of(w) * (kHalf / 64 * Keys::QTile::kPanelBytes);
#pragma unroll
    for (int step = 0; step < Config::kBlockM / 16; ++step) {
        uint32 a[4];
        ldmatrix_x4(a, smem_a + a_lane.at(0, step));
        add_wide_output<Config::Io, 1>(o[0], a, smem_b, b_lane, step * 16, w.p.fwd.head_dim - half_of(w) * kHalf);
    }
}

// All steps of one role; leaves dV (role 0) or dK (role 1) in `o`, if that is wanted.
template <int kRole>
OA_DEVICE void run(const Work& w, Output& o, Steps steps) {
    uint32 smem_q = w.at(&SharedStorage::q), smem_do = w.at(&SharedStorage::d_o);
    const bool wants_dq = w.p.dq_accum != nullptr;
    const bool wanted = kRole == 0 ? w.p.dv != nullptr : w.p.dk != nullptr;
    const bool wants_ds = wants_dq || Config::kDMask || w.p.dk != nullptr;
    const bool adds_dq = wants_dq && w.warp_idx * 64 < w.p.fwd.head_dim;
    int stage = 0;
    uint32 is_stray = steps.left > 0 ? Keys::is_stray(w, steps.at) : 0;
    for (; steps.left > 0; --steps.left) {
        const Place at = steps.at, next = steps.next();
        bool has_next = steps.left > 1;
        cp_async_wait<0>();
        __syncthreads();  // this step has landed; every warp has left the step before
        if (is_stray) Keys::clear_stray(w, stage);
        if (Config::kStages == 2 && has_next) Keys::copy_step(w, next, stage ^ 1);
        is_stray = has_next ? Keys::is_stray(w, next) : 0;  // read ahead
        cp_async_commit();
        bool hides = at.m < w.tiles.full_first || at.m >= w.tiles.full_end;
        const bool modifies = Keys::modifies_scores(w.p.fwd);
        uint32 tile = stage * Keys::QTile::kBytes;
        Scores s;
        if constexpr (kRole == 0) {
            make_scores(w, s, w.at(&SharedStorage::k), smem_q + tile);
            if (modifies)
                make_p<true, Config::kScoreMods>(w, s, at, stage);
            else if (hides)
                make_p<true, false>(w, s, at, stage);
            else
                make_p<false, false>(w, s, at, stage);
            pass_p(w);
        } else {
            if (wants_ds) make_scores(w, s, w.at(&SharedStorage::v), smem_do + tile);
            take_p(w);
            if (!wants_ds) {
            } else if (modifies || hides)
                make_ds<true>(w, s, at, stage, modifies ? 1.0f / kCrossing : 1.0f);
            else
                make_ds<false>(w, s, at, stage, 1.0f);
        }
        __syncthreads();  // P and dS are there
        if (wanted) {
            if (kRole == 0)
                add_output(w, o, smem_p(w), smem_do + tile);
            else
                add_output(w, o, smem_ds(w), smem_q + tile);
        }
        if (adds_dq) Keys::add_dq(w, smem_ds(w), at);
        steps.at = next;
        if (Config::kStages == 2) {
            stage ^= 1;
        } else {
            __syncthreads();
            if (has_next) Keys::copy_step(w, next, 0);
            cp_async_commit();
        }
    }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, MIN_CTAS) attn_bwd_wide_sm80(
    const __grid_constant__ BwdParams params) {
    Keys::run(params, [](const Work& w, Output& o, const Steps& steps) {
        if (w.warp_idx < Config::kWarps / 2)
            run<0>(w, o, steps);
        else
            run<1>(w, o, steps);
    });
}
