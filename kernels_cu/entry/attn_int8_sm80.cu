// Low-precision attention forward on mma.sync, any GPU from sm_80 on: INT8, INT4 or (sm_89 and newer) e4m3 Q K^T, FP16
// or (sm_89 and newer) FP8 P V. Source: SageAttention (Zhang et al. 2024) and SageAttention2 (Zhang et al. 2024).
//
//   S = softmax_scale * (q_scale k_scale (q_int . k_int) + delta_s + row_bias)
//   S = softcap * tanh(S / softcap);  S += mask
//   with VALUE_FACTORS: one for each 128 rows of V, of the caller, in P (attention/value_factors.cuh)
//   P = softmax([S, sink]);  O = (P V_q) v_scale + P v_mean;  LSE = log(sum(exp(S)) + exp(sink))
//
// q_int [batch, num_q_heads, seqlen_q, head_dim_pad] and k_int [batch, num_kv_heads, seqlen_k, head_dim_pad], s8 or s4
// (two to a byte); v [batch, num_kv_heads, seqlen_k, head_dim_pad] fp16, or [batch, num_kv_heads, head_dim_pad, keys]
// e4m3, keys permuted inside each 16. Formats, and packed sequences: docs/quantization.md, grouping "sm80". Of the 32
// rows of a slice, rows r, r + 8, r + 16, r + 24 have one scale; of a tile of 64 keys, keys 8i + 2j and 8i + 2j + 1
// have one: a lane needs one of each; of e4m3 (QK_E4M3) 128 rows have one (BlockScales). row_bias is a constant of its
// row, which the softmax does not see: it enters with LSE, sinks and softcap.
//
// One CTA computes BLOCK_M query rows of one head; warp w owns rows [w * BLOCK_M / NUM_WARPS, ...) from the loads of Q
// to the stores of O. Keys are walked from the last visible tile to the first. The softmax is that of the Hopper
// kernels (attention/warp_softmax.cuh): a warp's 16 rows of m16n8 accumulators lie as 16 rows of a wgmma do.
//
// P V is summed over a tile of 64 keys in the tensor cores, which for e4m3 keep about 13 bits of mantissa, then in
// fp32; PV_ACC16: in fp16 over the tile, at twice the rate on GPUs where that is so. No sum can overflow fp16, because
// the softmax keeps the sum of p within a bound: |sum of p v| <= max |v| * sum of p, every partial sum too.
//   e4m3  a lane's p add up to at most 448, a row's to 1792; rounding to e4m3 adds 1/16 at most, and 64 * 2^-10
//         where p is subnormal; |v| <= 32 (QuantizeParams::v_levels): 32 * (1792 * 17/16 + 1/16) = 60930
//   fp16  a lane's p add up to at most 60, a row's to 240; rounding adds 2^-11; |v| < 256: 256 * 240.12 = 61470
//   Sums are rounded to fp16 once for 32 or 16 keys, by 16 at most: 61470 + 4 * 16 < 65504.
// With fp32 accumulators fp16 P V goes into O directly.
//
// All warps copy (cp.async); bar: __syncthreads.
// NUM_STAGES = 2 (one barrier a tile)                    NUM_STAGES = 1 (two barriers a tile)
//   wait K,V(i) | bar | copy K,V(i-1) -> other stage       wait K(i) | bar | copy V(i) | QK(i)
//   QK(i)  softmax(i)  PV(i)                               wait V(i) | bar | copy K(i-1) | softmax(i) PV(i)
//
// Shared memory, bytes: Q [BLOCK_M * HEAD_DIM * BITS / 8] | K [NUM_STAGES][64 * HEAD_DIM * BITS / 8] | V
// [NUM_STAGES][64 * HEAD_DIM * (fp16: 2, e4m3: 1)] | delta_s [2][64 * 4] | scales of K [2][4 * 4] | TileFacts.
#include "attention/p_operands.cuh"
#include "attention/quantized_epilogue.cuh"
#include "attention/quantized_operands.cuh"
#include "attention/score_mods_mma.cuh"
#include "attention/value_factors.cuh"
#include "attention/warp_scores.cuh"
#include "attention/warp_softmax.cuh"
#include "params/attn_int8.cuh"
#include "pipeline/tile_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/cvt_e4m3.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"
#include "scheduler/fwd_tile.cuh"
#include "tile/panel.cuh"

struct Config {
    using Io = IO_TYPE;  // of o, sinks and masks
    using Value = PV_TYPE;  // Half or E4m3
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kBits = BITS;  // of an element of Q and K
    static constexpr bool kFloatQk = QK_E4M3;  // it is e4m3
    static constexpr int kBlockM = BLOCK_M;
    static constexpr int kBlockN = 64;  // a tile of k_scale
    static constexpr int kWarps = NUM_WARPS;
    static constexpr int kStages = NUM_STAGES;
    static constexpr bool kHalfV = Value::kBytes == 2;
    static constexpr bool kAcc16 = PV_ACC16;
    static constexpr bool kSmoothQ = SMOOTH_Q;  // delta_s is added
    static constexpr bool kScoreMods = SCORE_MODS;  // softcap, mask, scale <= 0; delta_s where there is one
    static constexpr bool kFactors = VALUE_FACTORS;  // e4m3: one for each 128 rows of V
    static constexpr bool kFloatScores = kSmoothQ || kScoreMods;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kMTiles = kBlockM / kWarps / 16;  // 16-row tiles of one warp
    // 16-row tiles of one vote on whether P was too large: fewer votes, or fewer registers.
    static constexpr int kVoteTiles = ONE_VOTE ? kMTiles : 1;
    static constexpr int kPartKeys = PART_KEYS;  // keys of a tile whose scores are in registers at a time
    static constexpr int kNTiles = kPartKeys / 8;
    static constexpr int kDTiles = kHeadDim / 8;
    static constexpr int kRowHalves = kHeadDim * kBits / 16;  // 16-bit units of a row of Q and K
    static_assert(kBlockM == kMTiles * kWarps * 16 && (kMTiles == 1 || kMTiles == 2),
                  "whole MMA tiles, one q_scale a lane");
    static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "rows of 32, 64, 128 or 256 bytes");
    static_assert(kStages == 1 || kStages == 2, "single or double buffer");
    static_assert(!kFactors || (kFloatQk && !kHalfV && !kAcc16), "arrays in e4m3");
    static_assert(kPartKeys == 32 || kPartKeys == 64, "whole k32 steps");
};

using QTile = PanelTile<Config::kBlockM, Config::kRowHalves>;
using KTile = PanelTile<Config::kBlockN, Config::kRowHalves>;
// fp16 V: keys by channels; e4m3 V: channels by keys.
constexpr int kVRows = Config::kHalfV ? Config::kBlockN : Config::kHeadDim,
              kVHalves = Config::kHalfV ? Config::kHeadDim : 32;
using VTile = PanelTile<kVRows, kVHalves>;
using QLane = PanelLane<Config::kBlockM, Config::kRowHalves>;
using KLane = PanelLane<Config::kBlockN, Config::kRowHalves>;
using VLane = PanelLane<kVRows, kVHalves>;
using QCopy = TileCopy<Config::kBlockM, Config::kRowHalves, Config::kThreads>;
using KCopy = TileCopy<Config::kBlockN, Config::kRowHalves, Config::kThreads>;
using VCopy = TileCopy<kVRows, kVHalves, Config::kThreads>;

using Params = Select<Config::kFactors, AttnFp8FactorsSm89Params, AttnInt8Sm80Params>::Type;

struct SharedStorage {
    alignas(1024) uint8 q[QTile::kBytes];
    alignas(1024) uint8 k[Config::kStages][KTile::kBytes];
    alignas(1024) uint8 v[Config::kStages][VTile::kBytes];
    alignas(16) float delta[2][Config::kBlockN];
    alignas(16) float k_scale[2][4];
    Select<Config::kFactors, FactorFacts, TileFacts>::Type facts;
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

// Of a part of K in each of its panels.
constexpr uint32 kKPartBytes = Config::kPartKeys * (KTile::kHasTail ? KTile::kTailBytes : 128);
constexpr int kSteps = Config::kRowHalves / 16;
using SeededInteger = SeededScore<Config::kBits>;
using Score = Select<Config::kFloatQk, float, SeededInteger>::Type;
using Integers = Score[Config::kNTiles * 4];
using Floats = float[Config::kNTiles * 4];
using Output = float[Config::kDTiles * 4];
// A operands of P V, of 16 keys each (fp16) or of 32 (e4m3).
constexpr int kPSteps = Config::kBlockN / (Config::kHalfV ? 16 : 32);
constexpr int kParts = Config::kBlockN / Config::kPartKeys, kPartSteps = kPSteps / kParts;
using Probabilities = uint32[kPSteps][4];
// Whether products go into O itself, or a tile's are summed first.
constexpr bool kDirect = Config::kHalfV && !Config::kAcc16;

// P at the base of the softmax, and what a lane's P of one part of a tile may add up to.
struct PRange {
    static constexpr float kBaseLog2 = Config::kHalfV ? 0.0f : 4.754887502f;  // log2(27): 16 at the base give 432
    static constexpr float kSumLimit =
        (Config::kAcc16 ? (Config::kHalfV ? 60.0f : 448.0f) / kParts : (Config::kHalfV ? 256.0f : 448.0f));
};
using Softmax = RowState<PRange>;

// S of one part of a tile, whose first key smem_k points at.
OA_DEVICE void mma_qk(Integers (&s)[Config::kMTiles], uint32 smem_q, const QLane& q_lane, uint32 smem_k,
                      const KLane& k_lane) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32 a[Config::kMTiles][4];
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) ldmatrix_x4(a[i], smem_q + q_lane.at(i * 16, step));
#pragma unroll
        for (int n = 0; n < Config::kNTiles; n += 2) {
            uint32 b[4];
            ldmatrix_x4(b, smem_k + k_lane.at(n * 8, step));
#pragma unroll
            for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) mma_scores(s[i] + 4 * (n + h), a[i], b[2 * h], b[2 * h + 1], step == 0);
        }
    }
}

// O += P V of steps [kFirst, kEnd) of a tile.
template <int kFirst, int kEnd>
OA_DEVICE void mma_pv_steps(Output (&o)[Config::kMTiles], const Probabilities (&probs)[Config::kMTiles], uint32 smem_v,
                            const VLane& v_lane) {
    typename Config::Value value;
    // B operands of one step for two blocks of 8 channels: b[0], b[1] and b[2], b[3].
    auto load = [&](uint32(&b)[4], int step, int d) {
        if constexpr (Config::kHalfV) {
            ldmatrix_x4_trans(b, smem_v + v_lane.at(step * 16, d / 2));
        } else {
            ldmatrix_x4(b, smem_v + v_lane.at(d * 8, step));
        }
    };
    if constexpr (kDirect) {
#pragma unroll
        for (int step = kFirst; step < kEnd; ++step)
#pragma unroll
            for (int d = 0; d < Config::kDTiles; d += 2) {
                uint32 b[4];
                load(b, step, d);
#pragma unroll
                for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        mma_pv_more(value, o[i] + 4 * (d + h), probs[i][step], b[2 * h], b[2 * h + 1]);
            }
    } else {
        constexpr int kWords = Config::kAcc16 ? 2 : 4;
        using Word = typename Select<Config::kAcc16, uint32, float>::Type;
#pragma unroll
        for (int d = 0; d < Config::kDTiles; d += 2) {
            Word part[Config::kMTiles][2][kWords];
#pragma unroll
            for (int step = kFirst; step < kEnd; ++step) {
                uint32 b[4];
                load(b, step, d);
#pragma unroll
                for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        mma_pv_step(value, part[i][h], probs[i][step], b[2 * h], b[2 * h + 1], step == kFirst);
            }
#pragma unroll
            for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) add_part(o[i] + 4 * (d + h), part[i][h]);
        }
    }
}

class Worker : Select<Config::kFloatQk, WithBlockScales, NoBlockScales>::Type {
    using Base = Select<Config::kFloatQk, WithBlockScales, NoBlockScales>::Type;
    using Base::scales_;

  public:
    OA_DEVICE Worker(const Params& params, const FwdTile& t, SharedStorage& smem, int warp_idx, int lane)
        : Base(params.scales),
          params_(params),
          p_(params.fwd),
          x_(params.operands),
          t_(t),
          smem_(smem),
          lane_(lane),
          warp_row_(t.m0 + warp_idx * Config::kMTiles * 16) {
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
            for (int d = 0; d < Config::kDTiles * 4; ++d) o_[i][d] = 0.0f;
        // Where none of the lane's rows exists, neither does their scale.
        q_scale_ = 1.0f;
        if (warp_row_ + (lane_ >> 2) < t_.seqlen_q) {
            if constexpr (Config::kFloatQk) {
                q_scale_ = q_block_scale(x_, scales_, t_, warp_row_);
            } else {
                q_scale_ = q_scales(p_, x_, t_, warp_row_)[lane_ >> 2];
            }
        }
    }

    OA_DEVICE bool has_delta() const { return Config::kSmoothQ || (Config::kScoreMods && x_.delta_s != nullptr); }

    // k_scale and delta_s of a tile, with the copies of K. Double-buffered, however many stages there are.
    OA_DEVICE void copy_scales(int32 n, int tid) const {
        if (!Config::kFloatQk && tid == 0)
            cp_async_16(smem_addr_of(smem_.k_scale[n & 1]), smem_.facts.k_scale + int64(n) * 4, 16);
        // Beyond the columns that max_seqlen_k allowed for there is nothing to read; softmax makes NaN of it.
        if (!has_delta() || tid >= Config::kBlockN / 4 || x_.delta_columns < Config::kBlockN) return;
        int32 column = min_of(n * Config::kBlockN, x_.delta_columns - Config::kBlockN);
        cp_async_16(smem_addr_of(smem_.delta[n & 1]) + tid * 16, smem_.facts.delta + column + tid * 4, 16);
    }

    // P of part kPart of tile n from its integers. multiply_before: P V of the parts before, where that has not
    // happened yet.
    template <int kPart, typename Multiply>
    OA_DEVICE void softmax(Integers (&s)[Config::kMTiles], int32 n, bool edges, Multiply multiply_before) {
        int32 n0 = n * Config::kBlockN + kPart * Config::kPartKeys;
        float k_scale = Config::kFloatQk
                            ? block_scale(smem_.facts.k_scale, scales_.k_stride_block, scales_.k_blocks, uint32(n) / 2)
                            : smem_.k_scale[n & 1][lane_ & 3];
        if constexpr (!Config::kFloatScores) {
            float c = q_scale_ * k_scale * (p_.softmax_scale * kLog2e);
            if constexpr (!Config::kFloatQk) c = scale_without_rounding(c);
            if (edges) hide_keys(s, n0);
            exponentiate<kPart>(s, n, c, !Config::kFloatQk && c > kCoarseScaleOf<Score>, multiply_before);
        } else {
            float c = q_scale_ * k_scale;
            // A max_seqlen_k below the longest sequence: not a number, rather than one that means nothing.
            if (has_delta() && (n + 1) * Config::kBlockN > x_.delta_columns) c = __int_as_float(0x7fffffff);
            const float* delta = smem_.delta[n & 1] + kPart * Config::kPartKeys + 2 * (lane_ & 3);
            Floats f[Config::kMTiles];
            if constexpr (Config::kScoreMods) {
                modified_scores(f, s, c, has_delta() ? delta : nullptr, n0);
            } else {
                shifted_scores(f, s, c * (p_.softmax_scale * kLog2e), delta, p_.softmax_scale * kLog2e);
            }
            if (edges) hide_keys(f, n0);
            exponentiate<kPart>(f, n, 1.0f, false, multiply_before);
        }
    }

    // e4m3 has none unless K was smoothed.
    OA_DEVICE float bias_of(const FwdTile& t, int32 row) const {
        if (Config::kFloatQk && x_.row_bias == nullptr) return 0.0f;
        return row_bias_of(p_, x_, t, row);
    }

    // O and LSE to global memory.
    OA_DEVICE void store(const FwdTile& t, int warp_idx) {
        int32 warp_row = t.m0 + warp_idx * Config::kMTiles * 16;
        struct Operands {
            const Worker& w;
            const FwdTile& t;
            int32 first_row;
            OA_DEVICE bool attended() const { return t.seqlen_k > 0; }
            OA_DEVICE GlobalChannels channels() const {
                int32 kv_head = t.head_idx / (w.p_.num_q_heads / w.p_.num_kv_heads);
                return GlobalChannels(w.x_, int64(t.sequence) * w.p_.num_kv_heads + kv_head);
            }
            // With a softcap the scores have had it before.
            OA_DEVICE float bias(int32 row) const {
                if (Config::kScoreMods && w.p_.softcap > 0.0f) return 0.0f;
                return w.bias_of(t, first_row + row);
            }
        };
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) {
            int32 first_row = warp_row + i * 16;
            store_quantized<Config::Io>(o_[i], rows_[i], Operands{*this, t, first_row}, p_, t, first_row, lane_);
        }
    }

    Output o_[Config::kMTiles];
    Probabilities probs_[Config::kMTiles];

  private:
    template <typename Scores>
    OA_DEVICE void hide_keys(Scores (&s)[Config::kMTiles], int32 n0) const {
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) mask_edges(s[i], p_, t_, warp_row_ + i * 16, n0, lane_);
    }

    // P and its sums from scores; O and the denominators follow where the base of the softmax has to move. Rows that do
    // not exist are zeros (QCopy), not the next sequence's: they may take part in the vote.
    template <int kPart, typename Scores, typename Multiply>
    OA_DEVICE void exponentiate(const Scores (&s)[Config::kMTiles], int32 n, float c0, bool coarse,
                                Multiply multiply_before) {
        const float c[2] = {c0, c0};
        const auto factor = factor_of_tile<Config::kBlockN>(smem_.facts, params_, n);
        const auto shift = factor.shift();
        using Packer = OperandPacker<Config::kHalfV, kPart * kPartSteps, kPSteps>;
#pragma unroll
        for (int first = 0; first < Config::kMTiles; first += Config::kVoteTiles) {
            float sum[Config::kMTiles][2];
            bool too_large = coarse;
#pragma unroll
            for (int i = first; i < first + Config::kVoteTiles; ++i) {
                rows_[i].template exponentiate<false>(s[i], c, sum[i], Packer{probs_[i], {}}, shift);
                too_large |= !(sum[i][0] <= PRange::kSumLimit) || !(sum[i][1] <= PRange::kSumLimit);
            }
            if (__any_sync(0xffffffffu, too_large)) {
                multiply_before();
#pragma unroll
                for (int i = first; i < first + Config::kVoteTiles; ++i) {
                    float alpha[2];
                    rows_[i].raise(s[i], c, alpha, shift);
                    rescale(o_[i], alpha);
                    rows_[i].template exponentiate<true>(s[i], c, sum[i], Packer{probs_[i], {}}, shift);
                }
            }
#pragma unroll
            for (int i = first; i < first + Config::kVoteTiles; ++i) {
                factor.add(rows_[i].l, sum[i]);
#pragma unroll
                for (int w = 4 * kPart * kPartSteps; w < 4 * (kPart + 1) * kPartSteps; ++w)
                    probs_[i][w / 4][w % 4] = factor.operand(probs_[i][w / 4][w % 4]);
            }
        }
    }

    OA_DEVICE void modified_scores(Floats (&f)[Config::kMTiles], const Integers (&s)[Config::kMTiles], float c,
                                   const float* delta, int32 n0) const {
        ElementMods<Config::Io> mods(p_, t_);
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) {
            float bias[2] = {0.0f, 0.0f};
            if (p_.softcap > 0.0f) {
                bias[0] = bias_of(t_, warp_row_ + i * 16 + (lane_ >> 2));
                bias[1] = bias_of(t_, warp_row_ + i * 16 + (lane_ >> 2) + 8);
            }
#pragma unroll
            for (int n = 0; n < Config::kNTiles; ++n) {
                float2 d = make_float2(0.0f, 0.0f);
                if (delta != nullptr) d = *reinterpret_cast<const float2*>(delta + 8 * n);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float score = score_of(s[i][4 * n + e]) - kScoreBias<Score>;
                    score = fmaf(score, c, e & 1 ? d.y : d.x) + bias[e >> 1];
                    f[i][4 * n + e] =
                        mods.apply(score * p_.softmax_scale, warp_row_ + i * 16 + (lane_ >> 2) + (e >> 1) * 8,
                                   n0 + n * 8 + 2 * (lane_ & 3) + (e & 1));
                }
            }
        }
    }

    const Select<Config::kFactors, const Params&, NoFactors>::Type params_;
    const AttnFwdParams& p_;
    const QuantizedOperands& x_;
    const FwdTile& t_;
    SharedStorage& smem_;
    const int lane_;
    const int32 warp_row_;
    float q_scale_;  // of all of the lane's rows
    Softmax rows_[Config::kMTiles];
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, MIN_CTAS) attn_int8_sm80(
    const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    const AttnFwdParams& p = params.fwd;
    int tid = threadIdx.x, lane = tid & 31, warp_idx = __shfl_sync(0xffffffffu, tid >> 5, 0);

    FwdTile t = fwd_tile<Config::kBlockM>(p);
    if (!t.valid) return;

    KeyTiles<Config::kBlockM, Config::kBlockN> keys(p, t);
    TileFacts& facts = smem.facts;
    if (tid == 0) {
        static_cast<TileFacts&>(facts) =
            facts_of<Config::kBlockN, Config::kHalfV>(p, params.operands, t, keys.full_first, keys.full_end);
        if constexpr (Config::kFloatQk)
            facts.k_scale =
                k_block_scales(params.operands, params.scales, t, t.head_idx / (p.num_q_heads / p.num_kv_heads));
        find_value_factors(smem.facts, params, t);
    }
    __syncthreads();
    Worker worker(params, t, smem, warp_idx, lane);
    int32 n = keys.end - 1;
    if (n >= keys.first) {
        const uint16* gq =
            p.q + t.batch_idx * p.q_stride_b + t.head_idx * p.q_stride_h + (int64(t.q_begin) + t.m0) * p.q_stride_s;
        uint32 smem_q = smem_addr_of(smem.q), smem_k = smem_addr_of(smem.k), smem_v = smem_addr_of(smem.v);
        const int32 row_halves =
            Config::kFloatQk ? params.scales.row_bytes / 2 : params.operands.head_dim_pad * Config::kBits / 16;
        KCopy k_copy(row_halves, tid);
        VCopy v_copy(Config::kHalfV ? params.operands.head_dim_pad : 32, tid);
        auto copy_k = [&](int32 n, int stage) {
            int64 row = int64(n) * Config::kBlockN;
            k_copy.issue(smem_k + stage * KTile::kBytes, facts.k + row * p.k_stride_s, p.k_stride_s,
                         int32(min_of<int64>(t.seqlen_k - row, Config::kBlockN)), tid);
            worker.copy_scales(n, tid);
        };
        auto copy_v = [&](int32 n, int stage) {
            int64 row = int64(n) * Config::kBlockN;
            if constexpr (Config::kHalfV) {
                v_copy.issue(smem_v + stage * VTile::kBytes, facts.v + row * p.v_stride_s, p.v_stride_s,
                             int32(min_of<int64>(t.seqlen_k - row, Config::kBlockN)), tid);
            } else {
                v_copy.issue(smem_v + stage * VTile::kBytes, facts.v + row / 2, p.v_stride_s,
                             params.operands.head_dim_pad, tid);
            }
        };

        QCopy(row_halves, tid).issue(smem_q, gq, p.q_stride_s, t.seqlen_q - t.m0, tid);
        copy_k(n, 0);
        if (Config::kStages == 2) copy_v(n, 0);
        cp_async_commit();

        // ldmatrix lanes: Q (A fragments) and fp16 V (B, transposed) walk 16 rows by 2 chunks; K and e4m3 V (B) 2 x 8
        // rows by 2 chunks.
        QLane q_lane(warp_idx * Config::kMTiles * 16 + (lane & 15), lane >> 4);
        KLane k_lane((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
        VLane v_lane(Config::kHalfV ? lane & 15 : (lane & 7) + ((lane >> 4) << 3),
                     Config::kHalfV ? lane >> 4 : (lane >> 3) & 1);

        int stage = 0;
        for (; n >= keys.first; --n) {
            cp_async_wait<0>();
            __syncthreads();  // this tile has landed; every warp has left the tile before
            if (Config::kStages == 2) {
                if (n > keys.first) {
                    copy_k(n - 1, stage ^ 1);
                    copy_v(n - 1, stage ^ 1);
                }
            } else {
                copy_v(n, 0);
            }
            cp_async_commit();

            bool edges = n < facts.full_first || n >= facts.full_end;
            uint32 k_tile = smem_k + stage * KTile::kBytes, v_tile = smem_v + stage * VTile::kBytes;
            Integers s[Config::kMTiles];
            mma_qk(s, smem_q, q_lane, k_tile, k_lane);
            auto next_k = [&] {  // where V(n) has to be there, and no warp needs K(n) any more
                if (Config::kStages == 2) return;
                cp_async_wait<0>();
                __syncthreads();
                if (n > keys.first) copy_k(n - 1, 0);
                cp_async_commit();
            };
            if constexpr (kParts == 1) next_k();
            worker.template softmax<0>(s, n, edges, [] {});
            if constexpr (kParts == 2) {
                mma_qk(s, smem_q, q_lane, k_tile + kKPartBytes, k_lane);
                next_k();
                if constexpr (kDirect) {
                    mma_pv_steps<0, kPartSteps>(worker.o_, worker.probs_, v_tile, v_lane);
                    worker.template softmax<1>(s, n, edges, [] {});
                } else {
                    worker.template softmax<1>(s, n, edges, [&] {
                        mma_pv_steps<0, kPartSteps>(worker.o_, worker.probs_, v_tile, v_lane);
#pragma unroll
                        for (int j = 0; j < Config::kMTiles; ++j)
#pragma unroll
                            for (int w = 0; w < kPartSteps * 4; ++w) worker.probs_[j][w / 4][w % 4] = 0;
                    });
                }
            }
            mma_pv_steps<kDirect && kParts == 2 ? kPartSteps : 0, kPSteps>(worker.o_, worker.probs_, v_tile, v_lane);
            if (Config::kStages == 2) stage ^= 1;
        }
    }
    worker.store(facts.tile, warp_idx);
}
