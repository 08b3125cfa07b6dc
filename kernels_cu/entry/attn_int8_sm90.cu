// Low-precision attention forward on Hopper's wgmma, sm_90a only: INT8 Q K^T, FP8 P V with two-level accumulation.
// Source: SageAttention2 (Zhang et al. 2024), sections 3.1 to 3.3; warp specialization: FlashAttention-3 (Shah et al.
// 2024).
//
//   S = softmax_scale * (q_scale k_scale (q_int . k_int) + delta_s + row_bias);  P = softmax([S, sink])
//   O = (P V8) v_scale + P v_mean;  LSE = log(sum(exp(S)) + exp(sink))
//
// q_int [batch, num_q_heads, seqlen_q, head_dim_pad] s8   k_int [batch, num_kv_heads, seqlen_k, head_dim_pad] s8
// v [batch, num_kv_heads, head_dim_pad, keys] e4m3, keys padded to 128 and permuted inside each 16
// (docs/quantization.md), so that the accumulator layout of S is the operand layout of P. Packed sequences have no
// batch; theirs begin at slots of 128 (q_scale, k_scale, delta_s, v). o: any strides of attention. Scales are per
// thread: of the 16 rows of a warp, rows r and r + 8 have one scale; of a tile of 128 keys, keys 8i + 2j and 8i + 2j +
// 1 have one: a lane needs one of each. row_bias is a constant of its row, which no softmax sees: it enters with LSE
// and sinks only.
//
// Roles and barriers are those of attn_fwd_sm90 (attention/fwd_roles.cuh); only two warpgroups take part in ping-pong.
//   consumer, step i   wait inner.full | S(i) = Q K(i)^T | A += P(i-1) V(i-1), sums of P(i-1)
//                      softmax(i), under the products with P(i-1) | arrive inner.empty
//                      every flush_keys keys: O += A, A = 0
// With REGISTER_Q consumers read Q before the first step and release its stage at once.
//
// Two-level accumulation: the tensor cores keep about 13 bits of mantissa when they add e4m3 products, and truncate. So
// A, in registers, covers flush_keys keys only, and O is summed in fp32; it lies in shared memory, because three
// warpgroups have no registers for both.
// P is 28 at the base of the softmax: an e4m3 number, so that a key that counts for more than all others is not
// rounded, with room below the largest e4m3 for scores that exceed the base. O is divided by sums of P as rounded:
// products with ones. The LSE is of sums before rounding, which kernels WITH_LSE form besides; their O has the same
// bits.
//
// Shared memory, bytes: Q [NUM_Q_STAGES][BLOCK_M * HEAD_DIM] | K [NUM_STAGES][BLOCK_N * HEAD_DIM] | V [same] | ones
// [512] | delta_s [NUM_STAGES][DELTA_ROWS][BLOCK_N * 4] | O [BLOCK_M * HEAD_DIM * 4] | k_scale [NUM_STAGES][16] |
// v_scale and v_mean [NUM_CONSUMERS][2][HEAD_DIM * 4], at head_dim 256 in O's place | barriers. Rows of Q and K are
// min(HEAD_DIM, 128) bytes, those of V BLOCK_N, each with a swizzle of its length.
#include "attention/delta_shift.cuh"
#include "attention/fwd_roles.cuh"
#include "attention/p_e4m3.cuh"
#include "attention/quantized_operands.cuh"
#include "attention/warp_epilogue.cuh"
#include "attention/warp_softmax.cuh"
#include "params/attn_int8.cuh"
#include "pipeline/channel_scales.cuh"
#include "pipeline/warp_roles.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "scheduler/persistent.cuh"
#include "tile/int8_queries.cuh"

struct Config {
    using Io = IO_TYPE;  // of o and sinks
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kConsumers = NUM_CONSUMERS;
    static constexpr bool kPingPong = kConsumers == 2;
    static constexpr int kBlockM = 64 * kConsumers;
    static constexpr int kBlockN = BLOCK_N;
    static constexpr int kInnerStages = NUM_STAGES;
    static constexpr int kOuterStages = NUM_Q_STAGES;
    static constexpr bool kRotateHeads = false;
    static constexpr bool kVarlen = VARLEN;
    static constexpr bool kDelta = SMOOTH_Q;
    static constexpr bool kLse = WITH_LSE;
    static constexpr bool kRegisterQ = REGISTER_Q;
    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kRowBytes = kHeadDim < 128 ? kHeadDim : 128;
    static constexpr int kPanels = kHeadDim / kRowBytes;
    static constexpr int kNTiles = kBlockN / 8;
    static constexpr int kDTiles = kHeadDim / 8;
    static constexpr int kOutputs = kHeadDim / 2;  // of one thread
    // Blocks of 128 query rows, which delta_s has, in a tile.
    static constexpr int kDeltaRows = kBlockM % 128 == 0 ? kBlockM / 128 : kBlockM / 128 + 1;
    static constexpr bool kByRow = kHeadDim == 128;  // order of exponentials: the other one costs 1 to 2 %
    static constexpr bool kEarlyChannels = kHeadDim <= 128;
    static constexpr int kOwnChannels = kEarlyChannels ? kHeadDim : 1;
    static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "rows of 64 or 128 bytes");
    static_assert(kBlockN == 64, "rows of V have the length of their swizzle; two tiles to a tile of scales");
};

struct SharedStorage {
    alignas(1024) uint8 q[Config::kOuterStages][Config::kBlockM * Config::kHeadDim];
    alignas(1024) uint8 k[Config::kInnerStages][Config::kBlockN * Config::kHeadDim];
    alignas(1024) uint8 v[Config::kInnerStages][Config::kBlockN * Config::kHeadDim];
    alignas(512) uint8 ones[512];  // 8 rows of 64 e4m3
    alignas(16) float delta[Config::kDelta ? Config::kInnerStages : 1][Config::kDeltaRows][Config::kBlockN];
    float4 o[Config::kConsumers][Config::kOutputs / 4][128];  // each thread's own, in its order
    alignas(16) float k_scale[Config::kInnerStages][4];
    float channels[Config::kConsumers][2][Config::kOwnChannels];  // v_scale and v_mean
    RoleStorage<Config> roles;
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

constexpr uint32 kQBytes = Config::kBlockM * Config::kHeadDim;
constexpr uint32 kKBytes = Config::kBlockN * Config::kHeadDim;
constexpr uint32 kDeltaBytes = Config::kBlockN * 4;
using Queries = Select<Config::kRegisterQ, RegisterQueries<Config>, SharedQueries<Config>>::Type;
using Scores = int32[Config::kNTiles * 4];
using Output = float[Config::kOutputs];
using RowSums = float[4];
// P as operand. Keys are permuted inside each 16, as those of V are: a register holds columns x of blocks n and n + 1.
using Probabilities = uint32[Config::kBlockN / 32][4];
using Packer = E4m3Packer<Config::kBlockN / 32, Config::kLse>;

// slot_of, known when compiled of dense batches.
OA_DEVICE int32 first_block(const FwdTile& t, int32 begin) {
    return Config::kVarlen ? first_slot(begin, t.sequence, kBlockRows) : 0;
}

class Producer : public ForwardProducer<Config, Producer> {
  public:
    static constexpr uint32 kQBytes = ::kQBytes, kVBytes = ::kKBytes;
    OA_DEVICE uint32 k_bytes() const { return ::kKBytes + 16 + (has_columns() ? Config::kDeltaRows * kDeltaBytes : 0); }

    OA_DEVICE Producer(const AttnInt8Sm90Params& params, SharedStorage& smem, const RoleBarriers<Config>& bars)
        : ForwardProducer(params.fwd, params.tiles, smem.roles, bars), params_(params) {}

    OA_DEVICE void prefetch_maps() const {
        tma_prefetch(&params_.map_q);
        tma_prefetch(&params_.map_k);
        tma_prefetch(&params_.map_v);
    }
    OA_DEVICE void copy_q(const FwdTile& t, int32 stage, uint32 bar) const {
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c)
            tma_load_4d(smem_addr_at(&SharedStorage::q) + stage * kQBytes + c * Config::kBlockM * Config::kRowBytes,
                        &params_.map_q, bar, c * Config::kRowBytes, t.q_begin + t.m0, t.head_idx, t.batch_idx);
    }
    OA_DEVICE void copy_k(const FwdTile& t, int32 kv_head, int32 n, int32 stage, uint32 bar) const {
        const AttnFwdParams& p = params_.fwd;
        int32 key = n * Config::kBlockN;
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c)
            tma_load_4d(smem_addr_at(&SharedStorage::k) + stage * ::kKBytes + c * Config::kBlockN * Config::kRowBytes,
                        &params_.map_k, bar, c * Config::kRowBytes, t.k_begin + key, kv_head, t.batch_idx);
        int64 head = int64(t.batch_idx) * p.num_kv_heads + kv_head;
        bulk_load(smem_addr_at(&SharedStorage::k_scale) + 16 * stage,
                  params_.operands.k_scale + head * params_.operands.k_scale_stride_h +
                      (first_block(t, t.k_begin) + key / kBlockRows) * 4,
                  16, bar);
        if constexpr (Config::kDelta) {
            int64 q_head = int64(t.batch_idx) * p.num_q_heads + t.head_idx;
            int32 first = t.m0 / kBlockRows, last = (t.seqlen_q - 1) / kBlockRows;
            // Beyond the columns that max_seqlen_k allowed for there is nothing to read; the consumers make NaN of it.
            if (!has_columns()) return;
            int32 column = min_of(key, params_.operands.delta_columns - Config::kBlockN);
            const float* rows = params_.operands.delta_s + q_head * params_.operands.delta_stride_h + column;
#pragma unroll
            for (int i = 0; i < Config::kDeltaRows; ++i)
                bulk_load(
                    smem_addr_at(&SharedStorage::delta) + (stage * Config::kDeltaRows + i) * kDeltaBytes,
                    rows + int64(first_block(t, t.q_begin) + min_of(first + i, last)) * params_.operands.delta_columns,
                    kDeltaBytes, bar);
        }
    }
    OA_DEVICE void copy_v(const FwdTile& t, int32 kv_head, int32 n, int32 stage, uint32 bar) const {
        tma_load_4d(smem_addr_at(&SharedStorage::v) + stage * ::kKBytes, &params_.map_v, bar,
                    first_block(t, t.k_begin) * kBlockRows + n * Config::kBlockN, 0, kv_head, t.batch_idx);
    }

  private:
    // Whether delta_s has a tile's columns at all: with a max_seqlen_k of 0 it is empty.
    OA_DEVICE bool has_columns() const { return Config::kDelta && params_.operands.delta_columns >= Config::kBlockN; }

    const AttnInt8Sm90Params& params_;
};

// S = Q K^T, asynchronous.
OA_DEVICE void issue_qk(Scores& s, const Queries& q, WgmmaDescriptor k) {
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 32; ++step) {
        uint32 panel = step * 32 / Config::kRowBytes, column = step * 32 % Config::kRowBytes;
        q.multiply(s, step, k.at(panel * Config::kBlockN * Config::kRowBytes + column));
    }
    wgmma_commit();
    wgmma_pin(s);
}

// A += P V, and sums = P 1: elements 0 and 2 are the tile's sums of this lane's two rows. Asynchronous.
OA_DEVICE void issue_pv(Output& acc, RowSums& sums, const Probabilities& probs, WgmmaDescriptor v) {
    const WgmmaDescriptor ones = wgmma_descriptor<64>(smem_addr_at(&SharedStorage::ones), 16, 512);
    wgmma_pin(acc);
    wgmma_pin(sums);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 32; ++step)
        Wgmma<E4m3, Config::kHeadDim>::rs(acc, probs[step], v.at(step * 32), 1);
    // After the product with V, which takes longer: the other way round costs 2 %.
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 32; ++step)
        Wgmma<E4m3, 8>::rs(sums, probs[step], ones.at(0), step != 0);
    wgmma_commit();
    wgmma_pin(acc);
    wgmma_pin(sums);
}

using Softmax = RowState<PRange>;

using Shift = Select<Config::kDelta, DeltaShift, NoShift>::Type;

class Consumer : public ForwardConsumer<Config, Consumer> {
  public:
    struct Rows {
        Output acc;
        Softmax softmax;
        float lse_sum[2];  // kLse: this lane's sums of P before rounding
        float shrink[2];  // what O in shared memory has to be multiplied by
        bool flushed;  // whether O in shared memory holds anything
        bool attended;  // whether there was a tile of keys

        OA_DEVICE Rows() : lse_sum{0.0f, 0.0f}, shrink{1.0f, 1.0f}, flushed(false), attended(false) { clear(); }
        OA_DEVICE void clear() {
#pragma unroll
            for (int i = 0; i < Config::kOutputs; ++i) acc[i] = 0.0f;
        }
    };

    OA_DEVICE Consumer(const AttnInt8Sm90Params& params, SharedStorage& smem, const RoleBarriers<Config>& bars,
                       int32 group)
        : ForwardConsumer(params.fwd, params.tiles, smem.roles, bars, group),
          params_(params),
          storage_(smem),
          k_(wgmma_descriptor<Config::kRowBytes>(smem_addr_at(&SharedStorage::k), 16, 8 * Config::kRowBytes)),
          v_(wgmma_descriptor<Config::kBlockN>(smem_addr_at(&SharedStorage::v), 16, 8 * Config::kBlockN)),
          k_scale_(in_register(smem_addr_at(&SharedStorage::k_scale) + 4 * (lane_ & 3))) {}

    // All steps from i on. All four warps have to issue a product by the very same instruction, so only what is equal
    // for the whole warpgroup may decide between two places where products are issued.
    OA_DEVICE void attend(const FwdTile& t, const Span& keys, int32 i, int32 warp_row, Rows& state) {
        const int32 num_tiles = keys.end - keys.first;
        const bool own[2] = {!Config::kVarlen || warp_row + (lane_ >> 2) < t.seqlen_q,
                             !Config::kVarlen || warp_row + (lane_ >> 2) + 8 < t.seqlen_q};
        // Loaded here, used behind the waits for Q and K: a trip to L2 or memory.
        float q_scale = scale_of_queries(t, warp_row);
        Queries q;
        Softmax& rows = state.softmax;
        Scores s;
        // The next P is computed while the product of the last one runs, whose operands must not be written.
        Probabilities probs, fresh;
        const uint32 zero = opaque_zero();
        RowSums sums = {};
        float c[2], alpha[2], sum[2];
        bool is_full = false;  // whether the next stage was seen to be

        // S(i), and A += P(i - 1) V(i - 1), which is still running at the end.
        auto products = [&] {
            c[0] = c[1] = scale_of_scores(q_scale, keys.end - 1 - i);
            ping_pong_.wait();
            issue_qk(s, q, k_.next(inner_at_.stage * kKBytes));
            issue_pv(state.acc, sums, probs, v_.next(inner_at_.stage * kKBytes));
            ping_pong_.pass_on();
            wgmma_wait<1>();
            wgmma_pin(s);
        };
        auto finish_pv = [&] {
            wgmma_wait<0>();
            wgmma_pin(state.acc);
            wgmma_pin(sums);
#pragma unroll
            for (int k = 0; k < Config::kBlockN / 32; ++k) wgmma_pin(probs[k]);
            rows.l[0] += sums[0];
            rows.l[1] += sums[2];
        };
        auto renew_probs = [&] {
#pragma unroll
            for (int k = 0; k < Config::kBlockN / 32; ++k)
#pragma unroll
                for (int x = 0; x < 4; ++x) probs[k][x] = copy_of(fresh[k][x], zero);
        };
        // After the last read of the stage.
        auto release_stage = [&] {
            __syncwarp();
            release_inner();
            is_full = is_inner_full();
        };
        // P(i), except as operand.
        auto exponentiate = [&] {
            sum[0] = sum[1] = 0.0f;
            rows.exponentiate_in_order<false, Config::kByRow>(s, c, Packer{{fresh, {}}, sum}, shift_of(t));
        };
        // Of this lane's rows. In packed tensors a tile's last rows may be the next sequence's; they must not take part
        // in the vote, or a result would depend on its neighbour.
        auto is_too_large = [&] {
            uint32 signs[2];
            past_largest(fresh, signs);
            return (((own[0] ? signs[0] : 0) | (own[1] ? signs[1] : 0)) & kSigns) != 0 ||
                   (!Config::kDelta && c[0] > kCoarseScale);
        };
        auto redo = [&] {
            Shift shift = shift_of(t);
            rows.raise(s, c, alpha, shift);
            rescale(state.acc, alpha);
            state.shrink[0] *= alpha[0];
            state.shrink[1] *= alpha[1];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                state.lse_sum[r] *= alpha[r];
                sum[r] = 0.0f;
            }
            rows.exponentiate_in_order<true, Config::kByRow>(s, c, Packer{{fresh, {}}, sum}, shift);
            renew_probs();
        };
        auto add = [&] {
            if (!Config::kLse) return;
            state.lse_sum[0] += sum[0];
            state.lse_sum[1] += sum[1];
        };
        auto mask = [&] {
            if (is_masked(keys, i)) mask_edges(s, p_, t, warp_row, (keys.end - 1 - i) * Config::kBlockN, lane_);
        };

        wait_outer();
        q.take(smem_addr_at(&SharedStorage::q) + outer_at_.stage * kQBytes, group_, lane_);
        if (Queries::kTaken) {
            __syncwarp();
            release_outer();
        }
        wait_inner();
        ping_pong_.wait();
        issue_qk(s, q, k_.next(inner_at_.stage * kKBytes));
        ping_pong_.pass_on();
        if (Config::kEarlyChannels) {
            named_barrier_sync(kFirstFreeBarrier + group_, 128);  // all four warps have read the last tile's
            fetch_channels(t);
        }
        state.attended = true;
        q_scale *= p_.softmax_scale * kLog2e;
        c[0] = c[1] = scale_of_scores(q_scale, keys.end - 1 - i);
        wgmma_wait<0>();
        wgmma_pin(s);
        if (!Queries::kTaken && i == num_tiles - 1) release_outer();
        mask();
        rows.raise(s, c, alpha, shift_of(t));
        exponentiate();
        renew_probs();
        if (__any_sync(0xffffffffu, is_too_large())) redo();
        add();
        release_stage();

        const int32 flush_tiles = params_.flush_keys / Config::kBlockN;
        int32 flush_at = i + flush_tiles;
        auto next_special = [&](int32 j) { return min_of(ForwardConsumer::next_special(keys, j), flush_at); };
        int32 special = next_special(i);
        for (++i; i < num_tiles; ++i) {
            if (!is_full) wait_inner();
            if (i >= special) {
                products();
                if (!Queries::kTaken && i == num_tiles - 1) release_outer();
                mask();
                exponentiate();
                finish_pv();
                if (i == flush_at) {
                    flush(state);
                    flush_at += flush_tiles;
                }
                special = next_special(i);
                renew_probs();
                if (__any_sync(0xffffffffu, is_too_large())) redo();
                release_stage();
            } else {
                // The common case. Rare cases leave the loop, by one branch for all: a jump over them would cost ten
                // cycles a step and more.
                bool again, given = !Config::kDelta;
                for (;;) {
                    products();
                    exponentiate();
                    finish_pv();
                    if (!Config::kDelta) release_stage();
                    renew_probs();
                    again = is_too_large();
                    if (__any_sync(0xffffffffu, again || i + 1 >= special || (!Config::kDelta && !is_full))) break;
                    if (Config::kDelta) {  // redo() needs the stage's delta_s
                        release_stage();
                        given = true;
                        if (__any_sync(0xffffffffu, !is_full)) break;  // lanes may have asked at different times
                        given = false;
                    }
                    add();
                    ++i;
                }
                if (__any_sync(0xffffffffu, again)) redo();
                if (!given) release_stage();
            }
            add();
        }
        if (!is_full) wait_inner();
        issue_pv(state.acc, sums, probs, v_.next(inner_at_.stage * kKBytes));
        finish_pv();
        release_inner();
        if (state.flushed) add_flushed(state);
    }

    // Undoes V's scale and mean, both per channel: O = A v_scale + (sum of P) v_mean, before the division by that sum.
    OA_DEVICE void store(const FwdTile& t, int32 warp_row, Rows& state) const {
        float bias[2] = {0.0f, 0.0f};
        if (state.attended) {
            if (!Config::kEarlyChannels) {
                named_barrier_sync(kFirstFreeBarrier + group_, 128);  // O has been read
                fetch_channels(t);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r)
                bias[r] = row_bias_of(p_, params_.operands, t, warp_row + (lane_ >> 2) + 8 * r) * p_.softmax_scale;
            cp_async_wait<0>();
            named_barrier_sync(kFirstFreeBarrier + group_, 128);
            channels().undo(state.acc, state.softmax.l, lane_);
        }
        if (Config::kLse) sum_of_quad(state.lse_sum);
        store_rows<Config::Io>(state.acc, state.softmax.m2, state.softmax.l,
                               Config::kLse ? state.lse_sum : state.softmax.l, bias, p_, t, warp_row, lane_);
    }

  private:
    // Of this lane's two rows.
    OA_DEVICE float scale_of_queries(const FwdTile& t, int32 warp_row) const {
        // Rows behind the sequence, or (unsigned) before row 0, are zeros: a scale that never needs the slow path.
        if (uint32(warp_row) >= uint32(t.seqlen_q)) return 1e-30f;
        int64 head = int64(t.batch_idx) * p_.num_q_heads + t.head_idx;
        return params_.operands.q_scale[head * params_.operands.q_scale_stride_h + first_block(t, t.q_begin) * 64 +
                                        (warp_row >> 4) * 8 + (lane_ >> 2)];
    }

    // V's scale and mean for `store`, when the whole warpgroup has read the last tile's.
    OA_DEVICE void fetch_channels(const FwdTile& t) const {
        int32 kv_head = t.head_idx / (p_.num_q_heads / p_.num_kv_heads);
        int64 first = (int64(t.sequence) * p_.num_kv_heads + kv_head) * params_.operands.head_dim_pad;
        channels().fetch(params_.operands.v_scale + first,
                         params_.operands.v_mean == nullptr ? nullptr : params_.operands.v_mean + first,
                         params_.operands.head_dim_pad);
    }
    OA_DEVICE ChannelScales<Config::kHeadDim> channels() const {
        return {Config::kEarlyChannels ? storage_.channels[group_][0] : reinterpret_cast<float*>(storage_.o[group_])};
    }

    OA_DEVICE float4& flushed(int i) const { return storage_.o[group_][i][threadIdx.x & 127]; }

    // A = A + O.
    OA_DEVICE void add_flushed(Rows& state) const {
#pragma unroll
        for (int i = 0; i < Config::kOutputs / 4; ++i) {
            float4 o = flushed(i);
            float* acc = state.acc + 4 * i;
            acc[0] = fmaf(o.x, state.shrink[0], acc[0]);
            acc[1] = fmaf(o.y, state.shrink[0], acc[1]);
            acc[2] = fmaf(o.z, state.shrink[1], acc[2]);
            acc[3] = fmaf(o.w, state.shrink[1], acc[3]);
        }
    }

    // O = O + A, A = 0.
    OA_DEVICE void flush(Rows& state) const {
        if (state.flushed) add_flushed(state);
#pragma unroll
        for (int i = 0; i < Config::kOutputs / 4; ++i) {
            const float* acc = state.acc + 4 * i;
            flushed(i) = make_float4(acc[0], acc[1], acc[2], acc[3]);
        }
        state.clear();
        state.flushed = true;
        state.shrink[0] = state.shrink[1] = 1.0f;
    }

    // Score units of tile n -> base-2 exponent, of this lane's two rows and its keys.
    OA_DEVICE float scale_of_scores(float q_scale, int32 n) const {
        // A max_seqlen_k below the longest sequence: not a number, rather than one that means nothing.
        if (Config::kDelta && (n + 1) * Config::kBlockN > params_.operands.delta_columns)
            return __int_as_float(0x7fffffff);
        return scale_without_rounding(q_scale * load_shared_float(k_scale_ + 16 * inner_at_.stage));
    }

    // delta_s of the step's tile.
    OA_DEVICE Shift shift_of(const FwdTile& t) const {
        int32 row = (t.m0 + group_ * 64) / kBlockRows - t.m0 / kBlockRows;
        return Shift(storage_.delta[Config::kDelta ? inner_at_.stage : 0][row] + 2 * (lane_ & 3),
                     p_.softmax_scale * kLog2e);
    }

    const AttnInt8Sm90Params& params_;
    SharedStorage& storage_;
    WgmmaDescriptor k_, v_;  // of the first stages
    uint32 k_scale_;  // shared address of this lane's
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) attn_int8_sm90(
    const __grid_constant__ AttnInt8Sm90Params params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    RoleBarriers<Config> bars(smem_addr_at(&SharedStorage::roles));
    if (threadIdx.x == 0) {
        check_smem_base(smem_raw);
        bars.init();
    }
    if (threadIdx.x < sizeof(smem.ones) / 4) reinterpret_cast<uint32*>(smem.ones)[threadIdx.x] = kOnes;
    fence_proxy_async();
    __syncthreads();
    run_roles<Config::kConsumers>([&](int lane) { Producer(params, smem, bars).run(lane); },
                                  [&](int32 group) { Consumer(params, smem, bars, group).run(); });
}
