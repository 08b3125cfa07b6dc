// Exact attention forward on mma.sync, any GPU from sm_80 on. Source: FlashAttention-2 (Dao 2023), algorithm 1.
//
//   S = softmax_scale * Q K^T;  S = softcap * tanh(S / softcap);  S += mask;  P = softmax([S, sink]);  O = P V
// LSE = log(sum(exp(S)) + exp(sink)), natural logarithm, fp32;  with dropout P is P * Z / keep (attention/dropout.cuh)
//
// q, o: [batch, seqlen_q, num_q_heads, head_dim]   k, v: [batch, seqlen_k, num_kv_heads, head_dim]   any strides, last
// dimension contiguous; with cu_seqlens: packed [rows, heads, head_dim]. lse: [batch, num_q_heads, seqlen_q] or [heads,
// rows]. OWN_HEAD_DIM_V: v and o have a head_dim of their own, in tiles of the same width. SPLIT_KEYS: a CTA takes a
// part of a tile's keys, and leaves partial results that attn_combine_sm80 merges (Flash-Decoding, Dao et al. 2023);
// query heads of a kv head share the rows of a tile, row r is query r / pack of head r % pack.
//
// One CTA computes BLOCK_M query rows of one head; warp w owns rows [w * BLOCK_M / NUM_WARPS, ...) from the loads of Q
// to the stores of O, so that scores, P and O never leave its registers. Keys are walked from the last visible tile to
// the first: the partly masked tiles of a causal head come first. The maximum of a tile is found before its
// exponentials (attention/softmax.cuh), because these are mixed with the products of P, 16 keys at a time: whether P
// was too large would be known too late for the softmax of the other kernels (attention/warp_softmax.cuh).
//
// HEAD_DIM 512: two warps have the same rows, for O of 16 rows fills the registers of both: every second panel of 64
// channels is one's. Each multiplies half of the keys of a tile by Q, they exchange scores through shared memory, and
// both make the same softmax of them.
//
// All warps copy (cp.async); bar: __syncthreads.
// NUM_STAGES = 2 (one barrier a tile)                    NUM_STAGES = 1 (two barriers a tile)
//   wait K,V(i) | bar | copy K,V(i-1) -> other stage       wait K(i) | bar | copy V(i) | QK(i)
//   QK(i)  softmax(i)  PV(i)                               wait V(i) | bar | copy K(i-1) | softmax(i) PV(i)
//
// Shared memory, bytes: Q, later O [BLOCK_M * HEAD_DIM * 2] | K [NUM_STAGES][BLOCK_N * HEAD_DIM * 2] | V [same] | of
// HEAD_DIM 512 scores [BLOCK_M * BLOCK_N * 4].
#include "attention/fwd_modes.cuh"
#include "attention/mask.cuh"
#include "attention/partial_epilogue.cuh"
#include "attention/score_mods_mma.cuh"
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "attention/split_keys.cuh"
#include "attention/sync_steps.cuh"
#include "attention/warp_softmax.cuh"
#include "attention/wide_products.cuh"
#include "params/attn_fwd.cuh"
#include "pipeline/tile_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "scheduler/page_table.cuh"
#include "scheduler/fwd_tile.cuh"
#include "tile/panel.cuh"
#include "attention/dropout.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kBlockM = BLOCK_M;
    static constexpr int kBlockN = BLOCK_N;
    static constexpr int kWarps = NUM_WARPS;
    static constexpr int kStages = NUM_STAGES;
    static constexpr bool kOwnHeadDimV = OWN_HEAD_DIM_V;
    static constexpr bool kScoreMods = SCORE_MODS;  // softcap, mask, scale <= 0: scores are formed one by one
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kChannelWarps = channel_warps(kHeadDim);
    static constexpr bool kIsWide = kChannelWarps > 1;
    static constexpr int kMTiles = kBlockM * kChannelWarps / kWarps / 16;  // 16-row tiles of one warp
    static constexpr int kNTiles = kBlockN / 8;
    static constexpr int kDTiles = kHeadDim / kChannelWarps / 8;  // of one warp
    static constexpr bool kQInRegisters = Q_IN_REGISTERS;
    static constexpr bool kSplitKeys = SPLIT_KEYS;
    static constexpr bool kPaged = PAGED;  // packed sequences whose K and V lie in pages
    static constexpr bool kSearch = kBlockM < 32 && !kScoreMods;  // of the packed sequence; with scores it is walked to
    static_assert(kBlockM * kChannelWarps == kMTiles * kWarps * 16 && kBlockN % 16 == 0 && kHeadDim % 32 == 0,
                  "whole MMA tiles");
    static_assert(kStages == 1 || kStages == 2, "single or double buffer");
    static_assert(!kHasDropout || !(kSplitKeys || kPaged || kIsWide), "dropout of whole calls");
    static_assert(!kIsWide || (kStages == 1 && kMTiles == 1 && kOwnHeadDimV && !kQInRegisters),
                  "scores are exchanged at the second barrier of a tile");
};

using ModsParams = Select<kHasScoreMod, AttnFwdUserModSm80Params, AttnFwdModsSm80Params>::Type;
using ScoreParams = Select<Config::kScoreMods, ModsParams, AttnFwdParams>::Type;
using DropoutParamsOf = Select<Config::kScoreMods, AttnFwdModsDropoutSm80Params, AttnFwdDropoutSm80Params>::Type;
using CallParams = Select<kHasDropout, DropoutParamsOf, ScoreParams>::Type;
using SplitModsParams = Select<kHasScoreMod, AttnFwdSplitUserModSm80Params, AttnFwdSplitModsSm80Params>::Type;
using SplitParams = Select<Config::kScoreMods, SplitModsParams, AttnFwdSplitSm80Params>::Type;
using Params = Select<Config::kSplitKeys, SplitParams, CallParams>::Type;
template <typename P>
OA_DEVICE const auto& without_partial(const P& params) {
    if constexpr (Config::kSplitKeys)
        return params.call;
    else
        return params;
}

using Tile = SyncTileOf<Config>;
template <typename T, typename P>
OA_DEVICE T with_pack(const FwdTile& t, const P& params) {
    if constexpr (Config::kSplitKeys)
        return T{t, params.pack_log2, params.pack_heads};
    else
        return t;
}

using Keys = KeyTiles<Config::kBlockM, Config::kBlockN>;
struct ExchangedScores {
    alignas(1024) float scores[Config::kBlockM * Config::kBlockN];  // [warp's rows][8 keys][lane][4]
};

template <int>
struct NothingElse {};
using MaskStorage = Select<Config::kScoreMods, MaskSlots<Config>::Storage, NothingElse<0>>::Type;
using ScoreStorage = Select<Config::kIsWide, ExchangedScores, NothingElse<1>>::Type;
struct SharedStorage : MaskStorage, ScoreStorage {
    alignas(1024) uint8 q[Config::kBlockM * Config::kHeadDim * 2];  // O on the way out
    alignas(1024) uint8 k[Config::kStages][Config::kBlockN * Config::kHeadDim * 2];
    alignas(1024) uint8 v[Config::kStages][Config::kBlockN * Config::kHeadDim * 2];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

OA_DEVICE uint32 scores_of(ExchangedScores& smem) { return smem_addr_of(smem.scores); }
OA_DEVICE uint32 scores_of(NothingElse<1>&) { return 0; }

using QTile = PanelTile<Config::kBlockM, Config::kHeadDim>;
using KvTile = PanelTile<Config::kBlockN, Config::kHeadDim>;
using QLane = PanelLane<Config::kBlockM, Config::kHeadDim>;
using KvLane = PanelLane<Config::kBlockN, Config::kHeadDim>;
using QCopy = TileCopy<Config::kBlockM, Config::kHeadDim, Config::kThreads>;
using KeyOrder = Select<Config::kScoreMods, FourKeys, RowsAsTheyAre>::Type;  // of rows of K and V in shared memory
using KeyColumns = Select<Config::kScoreMods, FourKeys, TwoKeys>::Type;
using KvCopy = TileCopy<Config::kBlockN, Config::kHeadDim, Config::kThreads, KeyOrder>;
using Scores = float[Config::kMTiles][Config::kNTiles * 4];
using Output = float[Config::kMTiles][Config::kDTiles * 4];
using QFragments = uint32[Config::kQInRegisters ? Config::kHeadDim / 16 : 1][Config::kMTiles][4];

OA_DEVICE void load_q_step(uint32 (&a)[Config::kMTiles][4], uint32 smem_q, const QLane& lane, int step) {
#pragma unroll
    for (int i = 0; i < Config::kMTiles; ++i) ldmatrix_x4(a[i], smem_q + lane.at(i * 16, step));
}

// S = Q K^T of one tile. smem_q points at this warp's first row.
OA_DEVICE void mma_qk(Scores& s, const QFragments& rq, uint32 smem_q, const QLane& q_lane, uint32 smem_k,
                      const KvLane& k_lane) {
#pragma unroll
    for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
        for (int x = 0; x < Config::kNTiles * 4; ++x) s[i][x] = 0.0f;
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
        uint32 loaded[Config::kMTiles][4];
        if (!Config::kQInRegisters) load_q_step(loaded, smem_q, q_lane, step);
        const auto& a = Config::kQInRegisters ? rq[Config::kQInRegisters ? step : 0] : loaded;
#pragma unroll
        for (int n = 0; n < Config::kNTiles; n += 2) {
            uint32 b[4];
            ldmatrix_x4(b, smem_k + k_lane.at(n * 8, step));
#pragma unroll
            for (int i = 0; i < Config::kMTiles; ++i) {
                mma_m16n8k16(Config::Io{}, s[i] + 4 * n, a[i], b[0], b[1]);
                mma_m16n8k16(Config::Io{}, s[i] + 4 * (n + 1), a[i], b[2], b[3]);
            }
        }
    }
}

// The same of two warps with the same rows: each multiplies half of the keys, and leaves them to both.
using HalfScores = WideScores<Config::Io, Config::kBlockM, Config::kBlockN, Config::kHeadDim, Config::kBlockN / 2>;
static_assert(!Config::kIsWide || (HalfScores::kIsWhole && Config::kDTiles % 8 == 0), "whole panels and MMA tiles");
OA_DEVICE void give_scores(uint32 smem_scores, uint32 smem_q, const QLane& q_lane, uint32 smem_k, int32 channels,
                           int channel_warp, int lane) {
    constexpr int kTiles = Config::kNTiles / 2;
    typename HalfScores::Scores s;
    HalfScores::multiply(s, smem_q, q_lane, smem_k + channel_warp * kTiles * 8 * 128, HalfScores::lane_b(lane),
                         channels);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
        store_shared4(smem_scores + ((channel_warp * kTiles + n) * 32 + lane) * 16,
                      make_uint4(__float_as_uint(s[4 * n]), __float_as_uint(s[4 * n + 1]),
                                 __float_as_uint(s[4 * n + 2]), __float_as_uint(s[4 * n + 3])));
}
OA_DEVICE void take_scores(Scores& s, uint32 smem_scores, int lane) {
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n) {
        uint4 x = load_shared4(smem_scores + (n * 32 + lane) * 16);
        s[0][4 * n] = __uint_as_float(x.x), s[0][4 * n + 1] = __uint_as_float(x.y);
        s[0][4 * n + 2] = __uint_as_float(x.z), s[0][4 * n + 3] = __uint_as_float(x.w);
    }
}

// P = exp2(S c - bias), O += P V. 16 keys at a time, so that the exponentials of the next 16 fill the issue slots
// that the products of these leave.
// channels: of V, from this warp's first panel on.
OA_DEVICE void exp_and_mma_pv(Scores& s, Output& o, OnlineSoftmax<Config::kMTiles>& softmax, float c, uint32 smem_v,
                              const KvLane& v_lane, int32 channels, const TileDropout& dropout, int32 first_row,
                              int32 first_key) {
    TileDropout::Kept kept[Config::kMTiles];
#pragma unroll
    for (int n = 0; n < Config::kNTiles; n += 2) {
        uint32 p[Config::kMTiles][4];
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) {
            if (n % 4 == 0) dropout.find<KeyColumns>(kept[i], first_row / 16 + i, first_key / 16 + n / 2);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float e[4];
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    e[x] = exp2_approx(fmaf(s[i][4 * (n + half) + x], c, -softmax.m2[i][x >> 1]));
                    softmax.l[i][x >> 1] += e[x];
                }
                p[i][2 * half] = pack2(Config::Io{}, e[0], e[1]);
                p[i][2 * half + 1] = pack2(Config::Io{}, e[2], e[3]);
            }
            dropout.drop(p[i], kept[i], n / 2 % 2);
        }
        if constexpr (Config::kIsWide) {
            add_wide_output<Config::Io, Config::kChannelWarps>(o[0], p[0], smem_v, v_lane, n * 8, channels);
        } else {
#pragma unroll
            for (int d = 0; d < Config::kDTiles; d += 2) {
                uint32 b[4];
                ldmatrix_x4_trans(b, smem_v + v_lane.at(n * 8, d / 2));
#pragma unroll
                for (int i = 0; i < Config::kMTiles; ++i) {
                    mma_m16n8k16(Config::Io{}, o[i] + 4 * d, p[i], b[0], b[1]);
                    mma_m16n8k16(Config::Io{}, o[i] + 4 * (d + 1), p[i], b[2], b[3]);
                }
            }
        }
    }
}

// O / l through shared memory (the rows of Q that only this warp has read; two warps with the same rows are done with
// them since the last barrier) to 16-byte stores, and the LSE. warp_idx: of those with rows of their own.
OA_DEVICE void epilogue(Output& o, OnlineSoftmax<Config::kMTiles>& softmax, const AttnFwdParams& p, const FwdTile& t,
                        uint8* q_smem, int warp_idx, int channel_warp, int lane, const TileDropout& dropout) {
    softmax.reduce_denominator();
    float sink2 = sink_log2<Config::Io>(p, t);
    constexpr int kWarpRows = Config::kMTiles * 16;
    int32 warp_row = t.m0 + warp_idx * kWarpRows;
    float* lse =
        p.lse == nullptr ? nullptr : p.lse + t.batch_idx * p.lse_stride_b + t.head_idx * p.lse_stride_h + t.q_begin;
    __syncwarp();  // every lane's ldmatrix of Q comes before any lane's store of O
#pragma unroll
    for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            RowResult res = finish_row(softmax.m2[i][r], softmax.l[i][r], sink2);
            res.o_scale = dropout.scaled(res.o_scale);
            int row = warp_idx * kWarpRows + i * 16 + (lane >> 2) + r * 8;
            if (lse != nullptr && channel_warp == 0 && (lane & 3) == 0 && t.m0 + row < t.seqlen_q)
                lse[t.m0 + row] = res.lse;
#pragma unroll
            for (int d = 0; d < Config::kDTiles; ++d) {
                uint32 packed =
                    pack2(Config::Io{}, o[i][4 * d + 2 * r] * res.o_scale, o[i][4 * d + 2 * r + 1] * res.o_scale);
                *reinterpret_cast<uint32*>(q_smem +
                                           QTile::offset(row, channel_chunk<Config::kChannelWarps>(d, channel_warp)) +
                                           (lane & 3) * 4) = packed;
            }
        }
    __syncwarp();
    uint16* go = p.o + t.batch_idx * p.o_stride_b + t.head_idx * p.o_stride_h + int64(t.q_begin) * p.o_stride_s;
    constexpr int kChunks = Config::kDTiles;
#pragma unroll
    for (int at = 0; at < kWarpRows * kChunks; at += 32) {
        int row = (at + lane) / kChunks,
            chunk = channel_chunk<Config::kChannelWarps>((at + lane) % kChunks, channel_warp);
        if (warp_row + row < t.seqlen_q && chunk * 8 < p.head_dim) {
            uint4 data = *reinterpret_cast<const uint4*>(q_smem + QTile::offset(warp_idx * kWarpRows + row, chunk));
            *reinterpret_cast<uint4*>(go + int64(warp_row + row) * p.o_stride_s + chunk * 8) = data;
        }
    }
}

// Partial results of a split, for attn_combine_sm80; what is final where there is one.
template <typename P>
OA_DEVICE void split_epilogue(Output& o, OnlineSoftmax<Config::kMTiles>& softmax, const P& params,
                              const AttnFwdParams& p, const Tile& t, int warp_idx, int channel_warp, int lane) {
    softmax.reduce_denominator();
    // Of packed sequences all rows are those of one batch.
    int64 head = (p.cu_seqlens_q == nullptr ? int64(t.batch_idx) * p.num_q_heads : 0) + t.head_idx;
    int64 first = (head * gridDim.y + blockIdx.y) * p.seqlen_q + t.q_begin;
#pragma unroll
    for (int i = 0; i < Config::kMTiles; ++i)
        store_split_rows<Config::Io, true, Config::kChannelWarps>(
            o[i], softmax.m2[i], softmax.l[i], params, p, t, gridDim.y, first,
            t.m0 + (warp_idx * Config::kMTiles + i) * 16, lane, channel_warp);
}

using EverySteps = AllSteps<Config, Tile, Keys>;
using SomeSteps = ListedSteps<Config, Tile, Keys>;
using Steps = Select<Config::kScoreMods, SomeSteps, EverySteps>::Type;

// What the loop does about the mask: a group of copies for each tile, from the time when the tile before is done with
// its scores.
struct NoMods {
    static constexpr int kGroups = 0;
    OA_DEVICE NoMods(const AttnFwdParams&, const ScoreModArrays*, const Tile&, SharedStorage&, int32, int, int) {}
    OA_DEVICE void begin(const EverySteps&) const {}
    OA_DEVICE void apply(Scores&, float&, const EverySteps&) const {}
};
class Mods {
  public:
    static constexpr int kGroups = 1;
    OA_DEVICE Mods(const AttnFwdModsSm80Params& params, const ScoreModArrays* arrays, const Tile& t,
                   SharedStorage& smem, int32 warp_row, int warp_idx, int lane)
        : params_(params),
          arrays_(arrays),
          tile_(t),
          warp_row_(warp_row),
          lane_(lane),
          slots_(params, t, smem_addr_of(&smem) + warp_idx * MaskSlots<Config>::kWarpBytes, warp_row, lane) {}
    OA_DEVICE void begin(const SomeSteps& steps) const {
        if (steps.kind() == kTileMixed && has_mask()) slots_.copy(steps.n());
        cp_async_commit();
    }
    // c: as softmax and products take it.
    OA_DEVICE void apply(Scores& s, float& c, const SomeSteps& steps) const {
        c = TileMods<Config>::apply(s, params_.fwd, params_.mods, arrays_, tile_, slots_, steps.n(), steps.kind(),
                                    warp_row_, lane_);
        if (steps.next_kind() == kTileMixed && has_mask()) slots_.copy(steps.next());
        cp_async_commit();
    }

  private:
    OA_DEVICE bool has_mask() const { return params_.fwd.mask_kind != kMaskNone; }

    const AttnFwdModsSm80Params& params_;
    const ScoreModArrays* arrays_;
    const Tile& tile_;
    const int32 warp_row_;
    const int lane_;
    const MaskSlots<Config> slots_;
};
using ScoreChanges = Select<Config::kScoreMods, Mods, NoMods>::Type;

extern "C" __global__ void __launch_bounds__(Config::kThreads, MIN_CTAS) attn_fwd_sm80(
    const __grid_constant__ Params params) {
    const auto& call = call_of(without_partial(params));
    const AttnFwdParams& p = forward_of(call);
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    int tid = threadIdx.x, lane = tid & 31, warp_idx = __shfl_sync(0xffffffffu, tid >> 5, 0);
    const int row_warp = warp_idx / Config::kChannelWarps, channel_warp = warp_idx % Config::kChannelWarps;

    Tile t = with_pack<Tile>(fwd_tile<Config::kBlockM, Config::kSearch, Config::kPaged>(p), params);
    t.sequence = in_register(t.sequence), t.q_begin = in_register(t.q_begin);  // else sm_120 spills at head_dim 128
    if (!t.valid) return;

    const Keys keys(query_of(t, t.m0), query_of(t, min_of(t.m0 + Config::kBlockM, t.seqlen_q) - 1),
                    query_of(t, t.seqlen_q), t.seqlen_k, p.window_left, p.window_right);
    int32 kv_head = t.head_idx / (p.num_q_heads / p.num_kv_heads);
    const uint16* gq = p.q + t.batch_idx * p.q_stride_b + head_of(t, 0) * p.q_stride_h +
                       (int64(t.q_begin) + query_of(t, t.m0)) * p.q_stride_s;
    const int32 page = Config::kPaged ? 0 : t.batch_idx;  // others are found by the table
    const uint16* gk = p.k + page * p.k_stride_b + kv_head * p.k_stride_h + int64(t.k_begin) * p.k_stride_s;
    const uint16* gv = p.v + page * p.v_stride_b + kv_head * p.v_stride_h + int64(t.k_begin) * p.v_stride_s;
    uint32 smem_q = smem_addr_of(smem.q), smem_k = smem_addr_of(smem.k), smem_v = smem_addr_of(smem.v);

    const KvCopy kv_copy(p.head_dim, tid);
    auto copy_keys = [&](const KvCopy& columns, uint32 to, const uint16* from, int64 stride_b, int64 stride_s,
                         int32 n) {
        const int64 row = int64(n) * Config::kBlockN;
        const int32 count = int32(min_of<int64>(t.seqlen_k - row, Config::kBlockN));
        if constexpr (Config::kPaged) {
            auto at = [&](int i) { return from + PageTable(p, t).offset(seen_key(p, t, row + i), stride_b, stride_s); };
            columns.issue_rows(to, at, count, tid);
        } else {
            columns.issue(to, from + row * stride_s, stride_s, count, tid);
        }
    };
    auto copy_k = [&](int32 n, int stage) {
        const KvCopy& columns = Config::kOwnHeadDimV ? KvCopy(p.head_dim_qk, tid) : kv_copy;
        copy_keys(columns, smem_k + stage * KvTile::kBytes, gk, p.k_stride_b, p.k_stride_s, n);
    };
    auto copy_v = [&](int32 n, int stage) {
        copy_keys(kv_copy, smem_v + stage * KvTile::kBytes, gv, p.v_stride_b, p.v_stride_s, n);
    };

    Output o;
#pragma unroll
    for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
        for (int d = 0; d < Config::kDTiles * 4; ++d) o[i][d] = 0.0f;
    OnlineSoftmax<Config::kMTiles> softmax;
    softmax.init();
    float c = p.softmax_scale * kLog2e;  // score units -> base-2 exponent
    TileDropout dropout(params);

    Steps steps(call, t, keys, warp_idx);
    if (!steps.done()) {
        const QCopy q_copy(Config::kOwnHeadDimV ? p.head_dim_qk : p.head_dim, tid);
        if constexpr (Config::kSplitKeys) {
            // A tile begins with the first of its heads.
            auto row_at = [&](int row) {
                return gq + query_of(t, row) * p.q_stride_s + (head_of(t, row) - head_of(t, 0)) * p.q_stride_h;
            };
            q_copy.issue_rows(smem_q, row_at, t.seqlen_q - t.m0, tid);
        } else {
            q_copy.issue(smem_q, gq, p.q_stride_s, t.seqlen_q - t.m0, tid);
        }
        copy_k(steps.n(), 0);
        if (Config::kStages == 2) copy_v(steps.n(), 0);
        cp_async_commit();

        constexpr int kWarpRows = Config::kMTiles * 16;
        int32 warp_row = t.m0 + row_warp * kWarpRows;
        // Few queries leave warps without rows: these copy, and keep step.
        const bool has_rows = !Config::kSplitKeys || warp_row < t.seqlen_q;
        dropout.begin(t.sequence, t.head_idx, lane);
        ScoreChanges changes(call, arrays_of(without_partial(params)), t, smem, warp_row, warp_idx, lane);
        changes.begin(steps);
        // ldmatrix lanes: Q (A fragments) and V (B, transposed) walk 16 rows by 2 chunks; K (B) 2 x 8 rows by 2 chunks.
        QLane q_lane(lane & 15, lane >> 4);
        KvLane k_lane((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
        KvLane v_lane(lane & 15, lane >> 4);
        // Warp offset inside the panels: whole 8-row groups, so the swizzle stays the same.
        uint32 smem_q_warp = smem_q + row_warp * kWarpRows * 128;
        if (QTile::kHasTail) q_lane.tail -= row_warp * kWarpRows * (128 - QTile::kTailBytes);
        const uint32 smem_scores = scores_of(smem) + row_warp * kWarpRows * Config::kBlockN * 4;

        QFragments rq;
        if (Config::kQInRegisters) {
            cp_async_wait<0>();
            __syncthreads();
#pragma unroll
            for (int step = 0; step < Config::kHeadDim / 16; ++step)
                load_q_step(rq[Config::kQInRegisters ? step : 0], smem_q_warp, q_lane, step);
        }

        int stage = 0;
        for (; !steps.done(); steps.advance()) {
            steps.find_next();
            cp_async_wait<ScoreChanges::kGroups>();
            __syncthreads();  // this tile has landed; every warp has left the tile before
            if (Config::kStages == 2) {
                if (steps.has_next()) {
                    copy_k(steps.next(), stage ^ 1);
                    copy_v(steps.next(), stage ^ 1);
                }
            } else {
                copy_v(steps.n(), 0);
            }
            cp_async_commit();

            Scores s;
            if constexpr (Config::kIsWide)
                give_scores(smem_scores, smem_q_warp, q_lane, smem_k, p.head_dim_qk, channel_warp, lane);
            else if (has_rows)
                mma_qk(s, rq, smem_q_warp, q_lane, smem_k + stage * KvTile::kBytes, k_lane);

            if (Config::kStages == 1) {
                cp_async_wait<0>();
                __syncthreads();
                if (steps.has_next()) copy_k(steps.next(), 0);
                cp_async_commit();
            }
            if constexpr (Config::kIsWide) take_scores(s, smem_scores, lane);
            int32 n = steps.n(), n0 = n * Config::kBlockN;
            if (!has_rows) {
                if (ScoreChanges::kGroups > 0) cp_async_commit();
                if (Config::kStages == 2) stage ^= 1;
                continue;
            }
            changes.apply(s, c, steps);
            if (n < keys.full_first || n >= keys.full_end)
#pragma unroll
                for (int i = 0; i < Config::kMTiles; ++i)
                    mask_edges<KeyColumns>(s[i], p, t, warp_row + i * 16, n0, lane);

            softmax.update(s, o, c);
            constexpr uint32 kPanel = KvTile::kPanelBytes;
            exp_and_mma_pv(s, o, softmax, c, smem_v + stage * KvTile::kBytes + channel_warp * kPanel, v_lane,
                           p.head_dim - channel_warp * 64, dropout, warp_row, n0);
            if (Config::kStages == 2) stage ^= 1;
        }
    }
    if constexpr (Config::kSplitKeys)
        split_epilogue(o, softmax, params, p, t, row_warp, channel_warp, lane);
    else
        epilogue(o, softmax, p, t, smem.q, row_warp, channel_warp, lane, dropout);
}
