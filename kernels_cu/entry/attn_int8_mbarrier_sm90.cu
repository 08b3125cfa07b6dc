// Attention forward with INT8 Q K^T and FP16 P V on mma.sync and a ring of mbarriers, sm_90 and newer
// (mbarrier.try_wait): the common case of attn_int8_sm80 at head_dim 128, for GPUs without wgmma and for operands in
// the sm80 grouping. Scores stay integers (no mask, softcap or delta_s), V is fp16, O is summed in fp32. Source:
// SageAttention (Zhang et al. 2024).
//
// Why it exists: int8 attention end to end at head_dim 128 is 9 to 13 % faster with it than with attn_int8_sm80, from
// 8192 tokens on (one run on an H200, docs/performance/sage_sm80_sm89.md): warps wait for tiles and not for each other,
// and a block's exponentials are mixed with the next scores' products.
//
//   S = softmax_scale * (q_scale k_scale (q_int . k_int) + row_bias);  P = softmax([S, sink])
//   O = (P V) v_scale + P v_mean;  LSE = log(sum(exp(S)) + exp(sink))
//
// q_int [batch, num_q_heads, seqlen_q, head_dim_pad] and k_int [batch, num_kv_heads, seqlen_k, head_dim_pad], s8; v
// [batch, num_kv_heads, seqlen_k, head_dim_pad] fp16. Formats, scales, and packed sequences: docs/quantization.md,
// grouping "sm80".
//
// One CTA computes BLOCK_M query rows of one head; warp w owns rows [32 w, 32 w + 32) from the loads of Q to the stores
// of O. Keys are walked from the last visible tile of 64 to the first, through a ring of three stages that all warps
// fill (cp.async): a warp waits until a tile is there and until all warps have left the stage that it fills next, so
// warps may be a tile apart.
//
//   each warp, tile n                                                              barriers (NUM_STAGES of each)
//     wait full[n], empty[n-1]                                                     full: 32 * NUM_WARPS copies landed
//     scores of the first QK_AHEAD blocks of 16 keys                               empty: NUM_WARPS warps have left
//     for each block: its exponentials | scores of the block QK_AHEAD further
//     copies of tile n - 1, arrive full[n-1] when they land | first V_EARLY operands of V
//     vote: was P too large?
//     O += P V | arrive empty[n]
//
// Up to the vote there is no branch, so the compiler may mix exponentials and products. By itself it would do all
// products first: `after`, which is zero, makes the scores of a block depend on exponentials that shall come before
// them. Scores are not kept in registers for the rare case that they are needed again, but computed again where P was
// too large and the base of the softmax is raised. The first tile, which always raises it, and tiles at edges, which
// are masked, are steps of their own: all scores, the base, all exponentials. First tile and edges are those of a
// warp's rows: of the two tiles on the diagonal of a causal CTA its upper warps see the second only, and for its lower
// warps that one is a common step.
//
// Shared memory, bytes: Q [BLOCK_M * HEAD_DIM] | 3 stages of K [64 * HEAD_DIM] and V [64 * HEAD_DIM * 2] | scales of K
// [4][16] | barriers | TileFacts | v_scale, v_mean [2][HEAD_DIM * 4] | row_bias [BLOCK_M * 4].
#include "attention/p_operands.cuh"
#include "attention/quantized_epilogue.cuh"
#include "attention/quantized_operands.cuh"
#include "attention/warp_epilogue.cuh"
#include "attention/warp_softmax.cuh"
#include "params/attn_int8.cuh"
#include "pipeline/channel_scales.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/tile_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"
#include "scheduler/fwd_tile.cuh"
#include "tile/panel.cuh"

struct Config {
    using Io = IO_TYPE;  // of o and sinks
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kBlockM = BLOCK_M;
    static constexpr int kBlockN = 64;  // a tile of k_scale
    static constexpr int kThreads = NUM_WARPS * 32;
    static constexpr int kStages = NUM_STAGES;
    static constexpr int kMTiles = 2;  // 16-row tiles of one warp
    static constexpr int kNTiles = kBlockN / 8;
    static constexpr int kDTiles = kHeadDim / 8;
    static constexpr int kSteps = kHeadDim / 32;  // of 32 channels in Q K^T
    static constexpr int kPSteps = kBlockN / 16;  // of 16 keys in P V
    static constexpr int kAhead = QK_AHEAD;
    static constexpr int kEarly = V_EARLY;  // operands of V that are loaded before the vote
    static_assert(kBlockM == 32 * NUM_WARPS && kBlockM == kThreads,
                  "32 rows a warp: one q_scale a lane; a row a thread");
    static_assert(kHeadDim == 128 && kStages == 3, "rows of K and of V's panels are 128 bytes: one place for both");
    static_assert(kAhead >= 1 && kAhead <= kNTiles / 2 && kEarly >= 1 && kEarly <= kDTiles / 2, "within a tile");
};

using QTile = PanelTile<Config::kBlockM, Config::kHeadDim / 2>;
using KTile = PanelTile<Config::kBlockN, Config::kHeadDim / 2>;
using VTile = PanelTile<Config::kBlockN, Config::kHeadDim>;
using QLane = PanelLane<Config::kBlockM, Config::kHeadDim / 2>;
using KLane = PanelLane<Config::kBlockN, Config::kHeadDim / 2>;
using VLane = PanelLane<Config::kBlockN, Config::kHeadDim>;
using QCopy = TileCopy<Config::kBlockM, Config::kHeadDim / 2, Config::kThreads>;
using KCopy = TileCopy<Config::kBlockN, Config::kHeadDim / 2, Config::kThreads>;
using VCopy = TileCopy<Config::kBlockN, Config::kHeadDim, Config::kThreads>;
using WholeQCopy = WholeTileCopy<Config::kBlockM, Config::kHeadDim / 2, Config::kThreads>;
using WholeKCopy = WholeTileCopy<Config::kBlockN, Config::kHeadDim / 2, Config::kThreads>;
using WholeVCopy = WholeTileCopy<Config::kBlockN, Config::kHeadDim, Config::kThreads>;

struct SharedStorage {
    alignas(1024) uint8 q[QTile::kBytes];
    struct {
        alignas(1024) uint8 k[KTile::kBytes];
        alignas(1024) uint8 v[VTile::kBytes];
    } stages[Config::kStages];
    alignas(16) float k_scale[4][4];  // of tile n in slot n % 4
    alignas(8) uint64 full[Config::kStages], empty[Config::kStages];
    TileFacts facts;
    float channels[2 * Config::kHeadDim];  // v_scale and v_mean
    float row_bias[Config::kBlockM];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");
constexpr uint32 kStageBytes = KTile::kBytes + VTile::kBytes;

using Score = SeededScore<8>;
using Integers = Score[Config::kNTiles * 4];
using Output = float[Config::kDTiles * 4];
using Probabilities = uint32[Config::kPSteps][4];
using QOperands = uint32[Config::kSteps][Config::kMTiles][4];
using EarlyV = uint32[Config::kEarly][4];
using Softmax = RowState<FloatPRange>;

// A value that the compiler cannot compute anew, as it likes to do with addresses in every iteration.
OA_DEVICE uint32 opaque(uint32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

OA_DEVICE void load_q(QOperands& q, const QLane& q_lane) {
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step)
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) ldmatrix_x4(q[step][i], q_lane.at(i * 16, step));
}

// S of block `block` of 16 keys of the K tile in the stage at k. after: zero.
OA_DEVICE void mma_qk_block(Integers (&s)[Config::kMTiles], const QOperands& q, uint32 k, const KLane& k_lane,
                            int block, uint32 after) {
    constexpr int32 kSeed = 0x4b400000;
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
        uint32 b[4], at = k + k_lane.at(block * 16, step);
        ldmatrix_x4(b, step == 0 ? at | after : at);
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Score* d = s[i] + 4 * (2 * block + h);
                if (step == 0) {
                    mma_integers<8>(d[0].bits, d[1].bits, d[2].bits, d[3].bits, q[step][i], b[2 * h], b[2 * h + 1],
                                    kSeed);
                } else {
                    mma_integers<8>(d[0].bits, d[1].bits, d[2].bits, d[3].bits, q[step][i], b[2 * h], b[2 * h + 1]);
                }
            }
    }
}

// O += P V; early: the first operands of the first step.
OA_DEVICE void mma_pv(Output (&o)[Config::kMTiles], const Probabilities (&probs)[Config::kMTiles], uint32 v,
                      const VLane& v_lane, const EarlyV& early) {
#pragma unroll
    for (int step = 0; step < Config::kPSteps; ++step)
#pragma unroll
        for (int d = 0; d < Config::kDTiles; d += 2) {
            uint32 b[4];
            if (step == 0 && d / 2 < Config::kEarly) {
#pragma unroll
                for (int x = 0; x < 4; ++x) b[x] = early[d / 2][x];
            } else {
                ldmatrix_x4_trans(b, v + v_lane.at(step * 16, d / 2));
            }
#pragma unroll
            for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    mma_pv_more(Half{}, o[i] + 4 * (d + h), probs[i][step], b[2 * h], b[2 * h + 1]);
        }
}

// What store_quantized needs, from shared memory.
struct StagedOperands {
    bool has_keys;
    ChannelScales<Config::kHeadDim> all_channels;
    const float* row_bias;
    OA_DEVICE bool attended() const { return has_keys; }
    OA_DEVICE ChannelScales<Config::kHeadDim> channels() const { return all_channels; }
    OA_DEVICE float bias(int32 row) const { return row_bias[row]; }
};

class Worker {
  public:
    OA_DEVICE Worker(const AttnInt8Sm80Params& params, const FwdTile& t, int warp_row, int lane)
        : p_(params.fwd), x_(params.operands), t_(t), lane_(lane), warp_row_(warp_row) {
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
#pragma unroll
            for (int d = 0; d < Config::kDTiles * 4; ++d) o_[i][d] = 0.0f;
        // Where none of the lane's rows exists, neither does their scale.
        scale_ = p_.softmax_scale * kLog2e;
        if (warp_row_ + (lane_ >> 2) < t_.seqlen_q) scale_ *= q_scales(p_, x_, t_, warp_row_)[lane_ >> 2];
    }

    // P of a tile from its operands. copies: called once the last of K has been read; load_early: loads V's first
    // operands.
    template <typename Copies, typename LoadEarly>
    OA_DEVICE void probabilities(int32 n, float k_scale, const QLane& q_lane, uint32 k, const KLane& k_lane,
                                 Copies copies, LoadEarly load_early) {
        float c0 = scale_without_rounding(scale_ * k_scale);
        const float c[2] = {c0, c0};
        float sum[Config::kMTiles][2] = {};
        {
            Integers s[Config::kMTiles];
            QOperands q;
            load_q(q, q_lane);
#pragma unroll
            for (int block = 0; block < Config::kAhead; ++block) mma_qk_block(s, q, k, k_lane, block, 0);
            blocks_from<0>(s, c, sum, q, k, k_lane, copies);
        }
        load_early();
        bool too_large = c0 > kCoarseScaleOf<Score>;
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
            too_large |= !(sum[i][0] <= FloatPRange::kSumLimit) || !(sum[i][1] <= FloatPRange::kSumLimit);
        if (__any_sync(0xffffffffu, too_large)) {
            redo(n, c, false, sum, q_lane, k, k_lane);
            load_early();  // so that they take no registers meanwhile
        }
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) rows_[i].add(sum[i]);
    }

    // P of a tile at an edge, or of a row's first tile, which raises the base anyway.
    OA_DEVICE void masked_probabilities(int32 n, float k_scale, const QLane& q_lane, uint32 k, const KLane& k_lane) {
        float c0 = scale_without_rounding(scale_ * k_scale);
        const float c[2] = {c0, c0};
        float sum[Config::kMTiles][2];
        redo(n, c, true, sum, q_lane, k, k_lane);
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) rows_[i].add(sum[i]);
    }

    // O and LSE to global memory. attended: whether there was a tile of keys. row_bias: of the warp's rows.
    OA_DEVICE void store(const FwdTile& t, int32 warp_row, bool attended, ChannelScales<Config::kHeadDim> channels,
                         const float* row_bias) {
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
            store_quantized<Config::Io>(o_[i], rows_[i], StagedOperands{attended, channels, row_bias + i * 16}, p_, t,
                                        warp_row + i * 16, lane_);
    }

    Output o_[Config::kMTiles];
    Probabilities probs_[Config::kMTiles];

  private:
    using Packer = OperandPacker<true, 0, Config::kPSteps>;

    // Exponentials of blocks from kBlock on, and scores of those that are kAhead further.
    template <int kBlock, typename Copies>
    OA_DEVICE void blocks_from(Integers (&s)[Config::kMTiles], const float (&c)[2], float (&sum)[Config::kMTiles][2],
                               const QOperands& q, uint32 k, const KLane& k_lane, Copies copies) {
        constexpr int kBlocks = Config::kNTiles / 2, kNext = kBlock + Config::kAhead;
        uint32 after = 0;
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) {
            Packer pack{probs_[i], {}};
            auto put = [&](int n, int r, float p0, float p1) {
                pack(n, r, p0, p1);
                if (n == 2 * kBlock + 1) after |= __float_as_uint(p1) & p_.head_dim_qk;
            };
            rows_[i].template exponentiate_blocks<2 * kBlock, 2 * kBlock + 2>(s[i], c, sum[i], put);
        }
        if constexpr (kNext < kBlocks) mma_qk_block(s, q, k, k_lane, kNext, after);
        if constexpr (kNext == kBlocks - 1 || (kBlock == 0 && kNext == kBlocks)) copies();
        if constexpr (kBlock + 1 < kBlocks) blocks_from<kBlock + 1>(s, c, sum, q, k, k_lane, copies);
    }

    // A tile at an edge, or one whose P was too large: masked, with the base raised; O and the denominators follow.
    OA_DEVICE void redo(int32 n, const float (&c)[2], bool edges, float (&sum)[Config::kMTiles][2], QLane q_lane,
                        uint32 k, KLane k_lane) {
        // Opaque, or the compiler keeps what this has in common with the first computation in registers.
        q_lane.full = in_register(q_lane.full), q_lane.tail = in_register(q_lane.tail);
        k_lane.full = in_register(k_lane.full), k_lane.tail = in_register(k_lane.tail);
        Integers s[Config::kMTiles];
        QOperands q;
        load_q(q, q_lane);
#pragma unroll
        for (int block = 0; block < Config::kNTiles / 2; ++block) mma_qk_block(s, q, k, k_lane, block, 0);
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i) {
            if (edges) mask_edges(s[i], p_, t_, warp_row_ + i * 16, n * Config::kBlockN, lane_);
            float alpha[2];
            rows_[i].raise(s[i], c, alpha);
            rescale(o_[i], alpha);
            rows_[i].template exponentiate<true>(s[i], c, sum[i], Packer{probs_[i], {}});
        }
    }

    const AttnFwdParams& p_;
    const QuantizedOperands& x_;
    const FwdTile& t_;
    const int lane_;
    const int32 warp_row_;
    float scale_;  // q_scale of all of the lane's rows, softmax_scale and log2(e)
    Softmax rows_[Config::kMTiles];
};

// What the epilogue needs, to shared memory: loaded there, each would wait for L2, because there are no registers to
// load ahead into.
OA_DEVICE void copy_epilogue_operands(const AttnInt8Sm80Params& params, const FwdTile& t, SharedStorage& smem,
                                      const ChannelScales<Config::kHeadDim>& channels, int32 columns, int tid) {
    const AttnFwdParams& p = params.fwd;
    const int32 kv_head = t.head_idx / (p.num_q_heads / p.num_kv_heads);
    const int64 channel = (int64(t.sequence) * p.num_kv_heads + kv_head) * columns;
    const QuantizedOperands& x = params.operands;
    channels.fetch(x.v_scale + channel, x.v_mean == nullptr ? nullptr : x.v_mean + channel, columns);
    const bool is_row = t.m0 + tid < t.seqlen_q;
    cp_async_small<4>(smem_addr_of(smem.row_bias + tid), row_biases(p, x, t) + (is_row ? t.m0 + tid : 0),
                      is_row ? 4 : 0);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, MIN_CTAS) attn_int8_mbarrier_sm90(
    const __grid_constant__ AttnInt8Sm80Params params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    const AttnFwdParams& p = params.fwd;
    int tid = threadIdx.x, lane = tid & 31, warp_idx = __shfl_sync(0xffffffffu, tid >> 5, 0);

    FwdTile t = fwd_tile<Config::kBlockM>(p);
    if (!t.valid) return;

    KeyTiles<Config::kBlockM, Config::kBlockN> keys(p, t);
    TileFacts& facts = smem.facts;
    const Ring<Config::kStages> ring{smem_addr_of(smem.full), smem_addr_of(smem.empty)};
    if (tid < Config::kStages) {
        mbarrier_init(ring.full + 8 * tid, Config::kThreads);
        mbarrier_init(ring.empty + 8 * tid, NUM_WARPS);
    }
    if (tid == 0) facts = facts_of<Config::kBlockN, true>(p, params.operands, t, keys.full_first, keys.full_end);
    __syncthreads();
    Worker worker(params, t, t.m0 + warp_idx * 32, lane);
    const ChannelScales<Config::kHeadDim> channels{smem.channels};
    int32 n = keys.end - 1;
    if (n >= keys.first) {
        const uint16* gq =
            p.q + t.batch_idx * p.q_stride_b + t.head_idx * p.q_stride_h + (int64(t.q_begin) + t.m0) * p.q_stride_s;
        const uint32 smem_q = smem_addr_of(smem.q), smem_k = smem_addr_of(smem.stages[0].k),
                     smem_v = smem_addr_of(smem.stages[0].v);
        const int32 columns = params.operands.head_dim_pad;
        auto copy_scale = [&](int32 n) {
            cp_async_16_if(smem_addr_of(smem.k_scale[n & 3]), facts.k_scale + int64(n) * 4, tid == 0);
        };
        auto copy_tile = [&](int32 n, uint32 stage, int tid) {
            int64 row = int64(n) * Config::kBlockN;
            int32 rows = int32(min_of<int64>(t.seqlen_k - row, Config::kBlockN));
            KCopy(columns / 2, tid).issue(smem_k + stage, facts.k + row * p.k_stride_s, p.k_stride_s, rows, tid);
            VCopy(columns, tid).issue(smem_v + stage, facts.v + row * p.v_stride_s, p.v_stride_s, rows, tid);
        };

        // All tiles but a sequence's last have all rows; rows lie together where none of their columns are left out.
        const bool whole = p.k_stride_s == Config::kHeadDim / 2 && p.v_stride_s == Config::kHeadDim;
        const int32 last_whole =
            in_register(whole ? keys.first : 0x7fffffff);  // while n > this, the next tile is copied as whole
        WholeKCopy whole_k(tid);
        WholeVCopy whole_v(tid);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            whole_k.dst[i] = opaque(smem_k + whole_k.dst[i], lane);
            whole_v.dst[i] = whole_k.dst[i] + uint32(KTile::kBytes);  // the same place in K and in a panel of V
        }
        const uint8* k_from = in_register(reinterpret_cast<const uint8*>(facts.k) + whole_k.src);
        const uint8* v_from = in_register(reinterpret_cast<const uint8*>(facts.v) + whole_v.src);
        const float* scales_from = facts.k_scale;
        if (whole && p.q_stride_s == Config::kHeadDim / 2 && t.seqlen_q - t.m0 >= Config::kBlockM) {
            const WholeQCopy whole_q(tid);
            whole_q.issue(smem_q, reinterpret_cast<const uint8*>(gq) + whole_q.src, true);
        } else {
            QCopy(columns / 2, tid).issue(smem_q, gq, p.q_stride_s, t.seqlen_q - t.m0, tid);
        }
        if (whole && t.seqlen_k - int64(n) * Config::kBlockN >= Config::kBlockN) {
            whole_k.issue(0, k_from + int64(n) * KTile::kBytes, true);
            whole_v.issue(0, v_from + int64(n) * VTile::kBytes, true);
        } else {
            copy_tile(n, 0, tid);
        }
        copy_scale(n);
        copy_epilogue_operands(params, t, smem, channels, columns, tid);
        mbarrier_arrive_after_copies(ring.full);

        // ldmatrix lanes: Q (A fragments) and V (B, transposed) walk 16 rows by 2 chunks; K (B) 2 x 8 rows by 2 chunks.
        QLane q_lane(warp_idx * 32 + (lane & 15), lane >> 4);
        KLane k_lane((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
        VLane v_lane(lane & 15, lane >> 4);
        q_lane.full = opaque(smem_q + q_lane.full, lane), q_lane.tail = opaque(smem_q + q_lane.tail, lane);
        k_lane.full = opaque(smem_k + k_lane.full, lane), k_lane.tail = opaque(smem_k + k_lane.tail, lane);
        v_lane.full = opaque(smem_v + v_lane.full, lane);

        RingState<Config::kStages> use, next;
        next.advance();
        uint32 here = 0, there = kStageBytes;  // of this tile and the next behind the first stage
        EarlyV early;
        auto load_early = [&] {
#pragma unroll
            for (int d = 0; d < Config::kEarly; ++d) ldmatrix_x4_trans(early[d], here + v_lane.at(0, d));
        };
        auto begin = [&] {
            // Both tests at once: each takes longer than what depends on it.
            bool landed = ring.is_full(use), left = ring.is_empty(next);
            if (!(landed & left)) {
                ring.wait(use);
                ring.wait_empty(next);
            }
        };
        auto end = [&] {
            __syncwarp();
            ring.release(use, lane);
            use.advance();
            next.advance();
            here = there;
            there = there == (Config::kStages - 1) * kStageBytes ? 0 : there + kStageBytes;
            --n;
        };
        auto announce = [&] { mbarrier_arrive_after_copies(ring.full + 8 * next.stage); };
        auto copies = [&] {
            whole_k.issue(there, k_from + int64(n - 1) * KTile::kBytes, n > last_whole);
            whole_v.issue(there, v_from + int64(n - 1) * VTile::kBytes, n > last_whole);
            cp_async_16_if(smem_addr_of(smem.k_scale[(n - 1) & 3]), scales_from + int64(n - 1) * 4,
                           n > keys.first && tid == 0);
        };
        // head_dim_pad < 128. An opaque tid, so that nothing of this stays in registers through the loop.
        auto other_copies = [&] {
            if (n > keys.first && n <= last_whole) copy_tile(n - 1, there, in_register(tid));
        };
        // Of this warp's rows: tiles [own.first, own.end) are seen; of these [common_first, common_end) need no mask
        // and are not the first. Every warp copies its part of every tile, whether it sees it or not.
        FwdTile rows = t;
        rows.m0 += warp_idx * 32;
        const KeyTiles<32, Config::kBlockN> own(p, rows);
        const int32 common_end = min_of(own.full_end, own.end - 1), common_first = max_of(own.full_first, keys.first);
#pragma unroll 1
        while (n >= keys.first) {
            if (n >= common_end || n < common_first) {
                begin();
                copies();
                other_copies();
                announce();
                if (n < own.end && n >= own.first) {
                    worker.masked_probabilities(n, smem.k_scale[n & 3][lane & 3], q_lane, here, k_lane);
                    load_early();
                    mma_pv(worker.o_, worker.probs_, here, v_lane, early);
                }
                end();
                continue;
            }
#pragma unroll 1
            do {
                begin();
                worker.probabilities(n, smem.k_scale[n & 3][lane & 3], q_lane, here, k_lane, copies, load_early);
                other_copies();
                announce();
                mma_pv(worker.o_, worker.probs_, here, v_lane, early);
                end();
            } while (n >= common_first);
        }
    }
    worker.store(facts.tile, facts.tile.m0 + warp_idx * 32, keys.end > keys.first, channels,
                 smem.row_bias + warp_idx * 32);
}
