// Backward of exact attention on mma.sync, any GPU from sm_80 on: dK and dV, and dQ by sums in global memory. Source:
// FlashAttention-2 (Dao 2023), algorithm 2.
//
//   S = Q K^T;  P = exp2(c S - lse2);  dP = dO V^T;  dS = P (dP - delta);  dV = P^T dO;  dK = scale dS^T Q;  dQ = dS K
//   with dropout (attention/dropout.cuh)  dP = Z / keep (dO V^T);  dV = (P Z / keep)^T dO
//
// q, o, do, dq: [batch, seqlen_q, num_q_heads, head_dim]   k, v, dk, dv: [batch, seqlen_k, num_kv_heads, head_dim]
// any strides, last dimension contiguous; with cu_seqlens: packed [rows, heads, head_dim]. lse2, delta, dq_accum (whose
// columns attn_bwd_finish puts in order): padded rows (params/attn_bwd.cuh), made by attn_bwd_prepare.
//
// One CTA takes BLOCK_N keys of one kv head and walks the tiles of BLOCK_M queries that see them, of every query head
// of the group, so that dK and dV stay in registers and are the same at every run; dq_accum is not. Products are
// transposed, S^T = K Q^T, so that P^T and dS^T are operands of dV and dK where they are. The warps of the first half
// (role 0) make S, P and dV, those of the second half (role 1) dP, dS and dK, of the same keys: half the accumulators
// and twice the keys a warp of one that makes both. P, times the derivative of the scores, crosses as 16 bits from
// thread to same thread through the shared tile where dS is to lie; with dropout it is negative where it is dropped. dQ
// of a step is made in the next one, while its dS is one of two: a single barrier a step.
//
// step i, role 0:  bar | copy Q,dO(i+1) | S(i)  P(i) -> ds[i%2]  arrive(pair) | dV += P dO | dQ(i-1) += ds[(i-1)%2] K
// step i, role 1:  bar | copy Q,dO(i+1) | dP(i) | dQ(i-1) | sync(pair)  dS(i) -> ds[i%2] | dK += dS Q
// NUM_STAGES = 1: a second barrier behind the step, and the copies behind it.
//
// Shared memory, bytes: K [BLOCK_N * HEAD_DIM * 2] | V [same] | Q [NUM_STAGES][BLOCK_M * HEAD_DIM * 2] | dO [same] |
// dS^T [2][BLOCK_N * BLOCK_M * 2] | with DMASK P^T [BLOCK_N * BLOCK_M * 2] | lse2, delta [NUM_STAGES][BLOCK_M * 4]
// each.
#include "attention/bwd_keys.cuh"
#include "attention/bwd_scores.cuh"
#include "attention/query_tiles.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
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
    static constexpr int kDsTiles = kDMask ? 3 : 2;  // dS of two steps; P
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kKeyGroups = kWarps / 2;
    static constexpr int kKeyRows = kBlockN / kKeyGroups;  // keys of a warp
    static constexpr int kKTiles = kKeyRows / 16;
    static constexpr int kQTiles = kBlockM / 8;
    static constexpr int kOutKTiles = kKTiles, kOutDTiles = kHeadDim / 8;  // of dV and dK
    static constexpr int kDqWarpsM = DQ_WARPS_M;  // warps side by side along the queries of dQ
    static constexpr int kDqMTiles = kBlockM / kDqWarpsM / 16;
    static constexpr int kDqSteps = kHeadDim / (kWarps / kDqWarpsM) / 16;  // 16 columns each
    static_assert(kKTiles * 16 * kKeyGroups == kBlockN && kDqMTiles * 16 * kDqWarpsM == kBlockM, "whole MMA tiles");
    static_assert(kDqSteps * 16 * (kWarps / kDqWarpsM) == kHeadDim && kBlockRows % kBlockM == 0, "whole MMA tiles");
    static_assert(kOutDTiles % 2 == 0 && kQTiles % 2 == 0, "whole MMA tiles");
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

// Of what a warp makes scores: the first key.
OA_DEVICE int32 first_key(const Work& w) { return w.group * Config::kKeyRows; }
// What P times the slope crosses with.
constexpr float kCrossing = Config::kScoreMods ? kOfCrossing : 1.0f;
// Shared address of P^T, which lies there as it is, without the derivative of scores: with DMASK.
OA_DEVICE uint32 plain_p(const Work& w) { return w.at(&SharedStorage::ds) + 2 * DsTile::kBytes; }

// P^T of a step, of which kHides hides a part: packed for dV in `packed`; times the derivative of scores, for role 1,
// in shared memory. kModifies: scores are modified one by one.
template <bool kHides, bool kModifies>
OA_DEVICE void make_p(const Work& w, Scores& s, Packed& packed, const Place& at, int stage, uint32 smem_ds) {
    int lane = in_register(w.lane);
    int32 m0 = at.m * Config::kBlockM, key = first_key(w) + (lane >> 2), query = 2 * (lane & 3);
    [[maybe_unused]] float c = w.p.fwd.softmax_scale * kLog2e;
    uint32 lse2_at = w.at(&SharedStorage::lse2) + (stage * Config::kBlockM + query) * 4;
    BwdScores<Config::Io> scores(w.p.fwd, w.arrays, w.t.sequence, at.head, w.t.seqlen_q, w.t.seqlen_k);
    QueryRange visible[Config::kKTiles][2];
    const int32 seqlen_k = Keys::hides_all(at, first_key(w)) ? 0 : w.t.seqlen_k;
#pragma unroll
    for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int32 k = w.t.n0 + key + 16 * i + 8 * r;
            if (kHides)
                visible[i][r] = k < seqlen_k ? visible_queries(k, w.t.seqlen_q, w.t.seqlen_k, w.p.fwd.window_left,
                                                               w.p.fwd.window_right)
                                             : QueryRange{0, 0};
        }
    const TileDropout dropout = w.dropout_of(at, lane);
    // Of two squares a word at a time: of 32 keys, or of 32 queries.
    constexpr bool kDown = Config::kKTiles == 2;
    static_assert(!kHasDropout || Config::kKTiles <= 2, "squares of a warp's keys");
    TileDropout::Kept kept;
#pragma unroll
    for (int n = 0; n < Config::kQTiles; ++n) {
        float2 lse2 = load_shared_float2(lse2_at + n * 32);
        int32 row = m0 + 8 * n + query;
        if (n % (kDown ? 2 : 4) == 0)
            dropout.find<ColumnPairs, true, kDown>(kept, (w.t.n0 + first_key(w)) / 16, m0 / 16 + n / 2);
#pragma unroll
        for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float* x = s[i] + 4 * n + 2 * r;
                QueryRange range = visible[i][r];
                bool see0 = !kHides || (row >= range.lo && row < range.hi);
                bool see1 = !kHides || (row + 1 >= range.lo && row + 1 < range.hi);
                uint32 to = Keys::ds_word(key + 16 * i + 8 * r, n, lane);
                uint32 cross;
                if constexpr (kModifies) {
                    int32 k = w.t.n0 + key + 16 * i + 8 * r;
                    ScoreGrad a = scores.at(x[0], lse2.x, row, k, see0), b = scores.at(x[1], lse2.y, row + 1, k, see1);
                    packed[i][2 * n + r] = pack2(Config::Io{}, a.p, b.p);
                    cross = pack2(Config::Io{}, a.p * (kCrossing * a.slope), b.p * (kCrossing * b.slope));
                } else {
                    float a = exp2_approx(fmaf(x[0], c, -lse2.x)), b = exp2_approx(fmaf(x[1], c, -lse2.y));
                    if (kHides) a = see0 ? a : 0.0f, b = see1 ? b : 0.0f;
                    cross = packed[i][2 * n + r] = pack2(Config::Io{}, a, b);
                }
                if constexpr (Config::kDsTiles == 3) store_shared(plain_p(w) + to, packed[i][2 * n + r]);
                const int square = kDown ? i : n / 2 % 2, byte = n % 2 + 2 * r;
                packed[i][2 * n + r] = dropout.drop_pair(packed[i][2 * n + r], kept, square, byte);
                store_shared(smem_ds + to, dropout.marked(cross, kept, square, byte));
            }
    }
}

// dS^T of a step from P^T in shared memory, which it takes the place of. kHides: where P is 0 dO or V may be NaN and
// yet not count.
template <bool kHides>
OA_DEVICE void make_ds(const Work& w, const Scores& dp, Packed& packed, const Place& at, int stage, uint32 smem_ds,
                       [[maybe_unused]] float of_crossed) {
    int lane = in_register(w.lane);
    int32 key = first_key(w) + (lane >> 2), query = 2 * (lane & 3);
    uint32 delta_at = w.at(&SharedStorage::delta) + (stage * Config::kBlockM + query) * 4;
#pragma unroll
    for (int n = 0; n < Config::kQTiles; ++n) {
        float2 delta = load_shared_float2(delta_at + n * 32);
#pragma unroll
        for (int i = 0; i < Config::kKTiles; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint32 word = Keys::ds_word(key + 16 * i + 8 * r, n, lane);
                float2 p = unpack2(Config::Io{}, load_shared(smem_ds + word));
                float d0 = w.dropout.change(dp[i][4 * n + 2 * r], delta.x, p.x);
                float d1 = w.dropout.change(dp[i][4 * n + 2 * r + 1], delta.y, p.y);
                p = w.dropout.unmarked(p);
                if constexpr (kCrossing != 1.0f) p.x *= of_crossed, p.y *= of_crossed;
                float a = p.x * d0, b = p.y * d1;
                if (kHides) a = p.x == 0.0f ? 0.0f : a, b = p.y == 0.0f ? 0.0f : b;
                packed[i][2 * n + r] = pack2(Config::Io{}, a, b);
                store_shared(smem_ds + word, packed[i][2 * n + r]);
                if constexpr (Config::kDMask) {
                    float2 plain = unpack2(Config::Io{}, load_shared(plain_p(w) + word));
                    int32 row = at.m * Config::kBlockM + 8 * n + query;
                    float* to = w.p.dmask + w.t.sequence * w.p.dmask_stride_b + at.head * w.p.dmask_stride_h +
                                row * w.p.dmask_stride_q + (w.t.n0 + key + 16 * i + 8 * r) * w.p.dmask_stride_k;
                    if (plain.x != 0.0f) reduce_add_global(to, plain.x * d0);
                    if (plain.y != 0.0f) reduce_add_global(to + w.p.dmask_stride_q, plain.y * d1);
                }
            }
    }
}

// P has been written, for the warp of role 1 with the same keys.
#ifdef PAIRS_WAIT  // for race checkers that do not follow bar.arrive
OA_DEVICE void pass_p(const Work& w) { named_barrier_sync(1 + w.group, 64); }
#else
OA_DEVICE void pass_p(const Work& w) { named_barrier_arrive(1 + w.group, 64); }
#endif
OA_DEVICE void take_p(const Work& w) { named_barrier_sync(1 + w.group, 64); }

// dV or dK of a step: P^T or dS^T, `packed`, times dO or Q.
OA_DEVICE void make_output(const Work& w, Output& o, const Packed& packed, uint32 smem_b) {
    int lane = in_register(w.lane);
    Keys::mma_output(o, packed, smem_b, Keys::QLane(lane & 15, lane >> 4));
}

// All steps of one role; leaves dV (role 0) or dK (role 1) in `o`, if that is wanted.
template <int kRole, bool kWanted>
OA_DEVICE void run(const Work& w, Output& o, Steps steps) {
    uint32 smem_q = w.at(&SharedStorage::q), smem_do = w.at(&SharedStorage::d_o), smem_ds = w.at(&SharedStorage::ds);
    bool wants_dq = w.p.dq_accum != nullptr;
    bool wants_ds = wants_dq || Config::kDMask;
    Place before{-1, 0};
    int stage = 0, parity = 0;
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
        int lane = in_register(w.lane);
        Keys::KvLane a_lane(first_key(w) + (lane & 15), lane >> 4);
        Keys::QLane s_lane((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
        bool hides = at.m < w.tiles.full_first || at.m >= w.tiles.full_end;
        if constexpr (Config::kLists) hides = hides || Keys::hides_all(at, first_key(w));
        const bool modifies = Keys::modifies_scores(w.p.fwd);
        Scores s;
        Packed packed;
        uint32 tile = stage * Keys::QTile::kBytes, ds = smem_ds + parity * DsTile::kBytes;
        uint32 ds_before = smem_ds + (parity ^ 1) * DsTile::kBytes;
        if constexpr (kRole == 0) {
            Keys::mma_scores(s, w.at(&SharedStorage::k), a_lane, smem_q + tile, s_lane);
            if (modifies)
                make_p<true, Config::kScoreMods>(w, s, packed, at, stage, ds);
            else if (hides)
                make_p<true, false>(w, s, packed, at, stage, ds);
            else
                make_p<false, false>(w, s, packed, at, stage, ds);
            pass_p(w);
            if (kWanted) make_output(w, o, packed, smem_do + tile);
            if (wants_dq && before.head >= 0) Keys::add_dq(w, ds_before, before);
        } else {
            if (wants_dq && before.head >= 0) Keys::add_dq(w, ds_before, before);
            if (kWanted || wants_ds) Keys::mma_scores(s, w.at(&SharedStorage::v), a_lane, smem_do + tile, s_lane);
            take_p(w);
            if (!kWanted && !wants_ds) {
            } else if (modifies || hides)
                make_ds<true>(w, s, packed, at, stage, ds, modifies ? 1.0f / kCrossing : 1.0f);
            else
                make_ds<false>(w, s, packed, at, stage, ds, 1.0f);
            if (kWanted) make_output(w, o, packed, smem_q + tile);
        }
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
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, MIN_CTAS) attn_bwd_sm80(
    const __grid_constant__ BwdParams params) {
    Keys::run(params, [](const Work& w, Output& o, const Steps& steps) {
        bool first = w.warp_idx < Config::kKeyGroups;
        if (first && w.p.dv != nullptr)
            run<0, true>(w, o, steps);
        else if (first)
            run<0, false>(w, o, steps);
        else if (w.p.dk != nullptr)
            run<1, true>(w, o, steps);
        else
            run<1, false>(w, o, steps);
    });
}
