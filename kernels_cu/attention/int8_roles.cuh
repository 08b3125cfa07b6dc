// What both roles of attn_int8_sm90 do around their steps: copies, scales, two-level sums, the end of a tile. The
// equation, the map of shared memory and the steps themselves: entry/attn_int8_sm90.cu.
#pragma once
#include "attention/delta_shift.cuh"
#include "attention/flush_rule.cuh"
#include "attention/fwd_roles.cuh"
#include "attention/int8_storage.cuh"
#include "attention/mask_copies.cuh"
#include "attention/p_e4m3.cuh"
#include "attention/partial_epilogue.cuh"
#include "attention/quantized_operands.cuh"
#include "attention/value_factors.cuh"
#include "attention/warp_epilogue.cuh"
#include "attention/warp_softmax.cuh"
#include "params/attn_int8.cuh"
#include "pipeline/channel_scales.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/raw_queries.cuh"

// slot_of, known when compiled of dense batches.
template <typename Config>
OA_DEVICE int32 first_block(const FwdTile& t, int32 begin) {
    return Config::kVarlen ? first_slot(begin, t.sequence, kBlockRows) : 0;
}

constexpr float kScaleOfNoRow = 1e-30f;

// Params: AttnInt8Sm90Params, or those with score modifications.
template <typename Config, typename Params, typename Derived>
class Int8Producer : public ForwardProducer<Config, Derived> {
    using Base = ForwardProducer<Config, Derived>;
    using Storage = Int8Storage<Config>;

  protected:
    using Tile = Int8Tile<Config>;

  public:
    static constexpr uint32 kQBytes = Tile::kQBytes;
    OA_DEVICE static uint32 v_bytes(const FwdTile&, int32) { return Tile::kKBytes; }
    OA_DEVICE uint32 k_bytes(const FwdTile&, int32) const {
        return Tile::kKBytes + (Config::kBlockScales ? 0 : 16) +
               (has_columns() ? Config::kDeltaRows * Tile::kDeltaBytes : 0);
    }

    OA_DEVICE Int8Producer(const Params& params, Storage& smem, const RoleBarriers<Config>& bars)
        : Base(params.fwd, params.tiles, smem.role_storage(), bars), params_(params) {}

    OA_DEVICE void prefetch_maps() const {
        tma_prefetch(&params_.map_q);
        tma_prefetch(&params_.map_k);
        tma_prefetch(&params_.map_v);
    }
    // A template, as further down: of the other kind of tile one branch would not compile.
    template <typename T>
    OA_DEVICE void copy_q(const T& t, int32 stage, uint32 bar) {
#pragma unroll
        for (int c = 0; c < Config::kQueryPanels; ++c) {
            uint32 smem = smem_addr_at(&Storage::q) + stage * kQBytes + c * Config::kBlockM * Config::kQueryRowBytes;
            if constexpr (Config::kSplitKeys) {
                const int32 first = (Config::kVarlen ? t.q_begin : 0) + t.m0 / t.pack;
                tma_load_5d(smem, &params_.map_q, bar, c * Config::kQueryRowBytes, 0, first, t.head_idx, t.batch_idx);
            } else {
                tma_load_4d(smem, &params_.map_q, bar, c * Config::kQueryRowBytes, t.q_begin + t.m0, t.head_idx,
                            t.batch_idx);
            }
        }
        if constexpr (Config::kRingQ) {
            static_assert(Tile::kKBytes == RawPanels<Config>::kBytes,
                          "a panel of Q in the place of K, one in that of V");
            bars_.inner.wait_empty(inner_at_);
            const uint32 of_step = bars_.inner.announce(inner_at_, 2 * Tile::kKBytes),
                         at = inner_at_.stage * Tile::kKBytes;
            tma_load_4d(smem_addr_at(&Storage::k) + at, &params_.map_q, of_step, 2 * Config::kQueryRowBytes,
                        t.q_begin + t.m0, t.head_idx, t.batch_idx);
            tma_load_4d(smem_addr_at(&Storage::v) + at, &params_.map_q, of_step, 3 * Config::kQueryRowBytes,
                        t.q_begin + t.m0, t.head_idx, t.batch_idx);
            inner_at_.advance();
        }
        if (Config::kRawQ) wait_for_kernel_ahead();  // it makes K and V
    }
    OA_DEVICE void copy_k(const FwdTile& t, int32 kv_head, int32 n, int32 stage, uint32 bar) const {
        const AttnFwdParams& p = params_.fwd;
        int32 key = n * Config::kBlockN;
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c)
            tma_load_4d(smem_addr_at(&Storage::k) + stage * Tile::kKBytes + c * Config::kBlockN * Config::kRowBytes,
                        &params_.map_k, bar, c * Config::kRowBytes, t.k_begin + key, kv_head, t.batch_idx);
        int64 head = int64(t.batch_idx) * p.num_kv_heads + kv_head;
        if constexpr (!Config::kBlockScales)
            bulk_load(smem_addr_at(&Storage::k_scale) + 16 * stage,
                      params_.operands.k_scale + head * params_.operands.k_scale_stride_h +
                          (first_block<Config>(t, t.k_begin) + key / kBlockRows) * 4,
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
                bulk_load(smem_addr_at(&Storage::delta) + (stage * Config::kDeltaRows + i) * Tile::kDeltaBytes,
                          rows + int64(first_block<Config>(t, t.q_begin) + min_of(first + i, last)) *
                                     params_.operands.delta_columns,
                          Tile::kDeltaBytes, bar);
        }
    }
    OA_DEVICE void copy_v(const FwdTile& t, int32 kv_head, int32 n, int32 stage, uint32 bar) const {
        tma_load_4d(smem_addr_at(&Storage::v) + stage * Tile::kKBytes, &params_.map_v, bar,
                    first_block<Config>(t, t.k_begin) * kBlockRows + n * Config::kBlockN, 0, kv_head, t.batch_idx);
    }

  protected:
    using Base::bars_;
    using Base::inner_at_;
    const Params& params_;

  private:
    // Whether delta_s has a tile's columns at all: with a max_seqlen_k of 0 it is empty.
    OA_DEVICE bool has_columns() const { return Config::kDelta && params_.operands.delta_columns >= Config::kBlockN; }
};

// Derived: attend (ForwardConsumer).
template <typename Config, typename Params, typename Derived>
class Int8Consumer : public ForwardConsumer<Config, Derived> {
    using Base = ForwardConsumer<Config, Derived>;
    using Storage = Int8Storage<Config>;

  protected:
    using Tile = Int8Tile<Config>;

  public:
    struct Rows {
        typename Tile::Output acc;
        RowState<PRange> softmax;
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

    OA_DEVICE Int8Consumer(const Params& params, Storage& smem, const RoleBarriers<Config>& bars, int32 group)
        : Base(params.fwd, params.tiles, smem.role_storage(), bars, group),
          params_(params),
          storage_(smem),
          k_(wgmma_descriptor<Config::kRowBytes>(smem_addr_at(&Storage::k), 16, 8 * Config::kRowBytes)),
          v_(wgmma_descriptor<Config::kBlockN>(smem_addr_at(&Storage::v), 16, 8 * Config::kBlockN)),
          k_scale_(in_register(smem_addr_at(&Storage::k_scale) + 4 * (lane_ & 3))) {}

    // Undoes V's scale and mean, both per channel: O = A v_scale + (sum of P) v_mean, before the division by that sum.
    template <typename T>
    OA_DEVICE void store(const T& t, int32 warp_row, Rows& state) const {
        float bias[2] = {0.0f, 0.0f};
        if constexpr (Config::kFactors) {
            sum_of_quad(state.lse_sum);
            state.softmax.l[0] = state.lse_sum[0], state.softmax.l[1] = state.lse_sum[1];
        }
        if (state.attended) {
            if (!Config::kEarlyChannels) {
                named_barrier_sync(kFirstFreeBarrier + group_, 128);  // O has been read
                fetch_channels(t);
            }
            if (has_bias()) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    if constexpr (Config::kRawQ && !Config::kBlockScales) {
                        float of_row = 0.0f;
                        if constexpr (Config::kLse) of_row = raw_bias(r) * p_.softmax_scale;
                        bias[r] = marks() >> r & 1 ? quiet_nan() : of_row;
                    } else {
                        bias[r] = bias_of(t, warp_row + (lane_ >> 2) + 8 * r) * p_.softmax_scale;
                    }
                }
            }
            cp_async_wait<0>();
            named_barrier_sync(kFirstFreeBarrier + group_, 128);
            channels().undo(state.acc, state.softmax.l, lane_);
        }
        if (Config::kLse && !Config::kFactors) sum_of_quad(state.lse_sum);
        if constexpr (Config::kSplitKeys) {
            store_partial(t, warp_row, state, bias);
            return;
        }
        store_rows<typename Config::Io>(state.acc, state.softmax.m2, state.softmax.l,
                                        Config::kLse ? state.lse_sum : state.softmax.l, bias, p_, t, warp_row, lane_);
    }

  protected:
    using Base::group_;
    using Base::inner_at_;
    using Base::lane_;
    using Base::outer_at_;
    using Base::p_;

    // Of this lane's two rows.
    OA_DEVICE float scale_of_queries(const FwdTile& t, int32 warp_row) const {
        // Rows behind the sequence, or (unsigned) before row 0, are zeros: a scale that never needs the slow path.
        if (uint32(warp_row) >= uint32(t.seqlen_q)) return kScaleOfNoRow;
        if constexpr (Config::kBlockScales) return q_block_scale(params_.operands, params_.scales, t, warp_row);
        int64 head = int64(t.batch_idx) * p_.num_q_heads + t.head_idx;
        return params_.operands.q_scale[head * params_.operands.q_scale_stride_h +
                                        first_block<Config>(t, t.q_begin) * 64 + (warp_row >> 4) * 8 + (lane_ >> 2)];
    }

    // The same where heads share a tile: they have scales of their own.
    OA_DEVICE void scales_of_queries(const SplitTile& t, int32 warp_row, float (&scales)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int32 row = warp_row + (lane_ >> 2) + 8 * r, query = row / t.pack;
            scales[r] = kScaleOfNoRow;
            if (row >= t.seqlen_q) continue;
            if constexpr (Config::kBlockScales) {
                FwdTile own = t;
                own.head_idx = head_of(t, row);
                own.seqlen_q = t.num_queries;
                scales[r] = q_block_scale(params_.operands, params_.scales, own, query);
            } else {
                scales[r] =
                    params_.operands.q_scale[head_of_row(t, row) * params_.operands.q_scale_stride_h +
                                             first_block<Config>(t, t.q_begin) * 64 + (query >> 4) * 8 + (query & 7)];
            }
        }
    }
    OA_DEVICE void scales_of_queries(const FwdTile& t, int32 warp_row, float (&scales)[2]) const {
        scales[0] = scales[1] = scale_of_queries(t, warp_row);
    }

    // What RawQueries found besides, once it has taken them; of others nothing. From here on what the kernel ahead
    // makes is read.
    template <typename Queries>
    OA_DEVICE void note_queries(const Queries& q, const FwdTile& t, int32 warp_row, float (&scales)[2]) const {
        if constexpr (Config::kRawQ && Config::kBlockScales) {
            scales[0] = q.scale[0], scales[1] = q.scale[1];
        } else if constexpr (Config::kRawQ) {
            // As scale_of_queries.
            scales[0] = scales[1] = uint32(warp_row) < uint32(t.seqlen_q) ? q.scale : kScaleOfNoRow;
            marks() = uint8(q.bad);
        }
        if constexpr (Config::kRawQ) wait_for_kernel_ahead();
        if constexpr (RawBias<Config>::kMade) note_bias(t, raw_queries());
    }
    // kRingQ: makes integers of a tile's Q, in its own place, and gives back the stage of K and V that has half of it.
    // The scale of this lane's two rows.
    OA_DEVICE float quantize_queries(const FwdTile& t) {
        RawQueries<Config> q;
        const RawPanels<Config> tile = raw_queries();
        q.take(tile, group_, lane_, rows_of_warp(t));
        marks() = uint8(q.bad);
        wait_for_kernel_ahead();
        if constexpr (Config::kLse) note_bias(t, tile);
        __syncwarp();  // integers go where other lanes of the quad have read
        q.store(tile.first, group_, lane_);
        // All that is loaded and stored here is over before the next copies, which the arrival below allows.
        fence_proxy_async();
        __syncwarp();
        this->release_inner();
        const int32 warp_row = t.m0 + group_ * 64 + (threadIdx.x >> 5 & 3) * 16;
        return uint32(warp_row) < uint32(t.seqlen_q) ? q.scale : kScaleOfNoRow;
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

    // Q of this warpgroup, where it has come, or to registers.
    template <typename T, typename Queries>
    OA_DEVICE void take_queries(const T& t, Queries& q) const {
        if constexpr (Config::kRawQ && Config::kBlockScales) {
            q.take(raw_queries(), group_, lane_, params_.rotation);
        } else if constexpr (Config::kRawQ && !Config::kRingQ) {
            q.take(raw_queries(), group_, lane_, rows_of_warp(t));
        } else {
            q.take(smem_addr_at(&Storage::q) + outer_at_.stage * Tile::kQBytes, group_, lane_);
        }
    }
    // How many rows there are from this warp's first one on.
    OA_DEVICE int32 rows_of_warp(const FwdTile& t) const {
        return t.seqlen_q - (t.m0 + group_ * 64 + (threadIdx.x >> 5 & 3) * 16);
    }
    // kRawQ: where Q in 16 bits is.
    OA_DEVICE RawPanels<Config> raw_queries() const {
        const uint32 at = inner_at_.stage * Tile::kKBytes;
        return {smem_addr_at(&Storage::q) + outer_at_.stage * Tile::kQBytes, smem_addr_at(&Storage::k) + at,
                smem_addr_at(&Storage::v) + at};
    }
    // kRawQ and kLse: what K's mean takes from the scores of this lane's two rows, before the softmax's scale.
    OA_DEVICE void note_bias(const FwdTile& t, const RawPanels<Config>& tile) const {
        const int32 kv_head = t.head_idx / (p_.num_q_heads / p_.num_kv_heads), pad = params_.operands.head_dim_pad;
        const float* mean = params_.operands.row_bias;
        if (mean != nullptr) mean += (int64(t.sequence) * p_.num_kv_heads + kv_head) * pad;
        float dots[2];
        RawQueries<Config>::multiply_mean(tile, group_, lane_, mean, pad, dots);
        if ((lane_ & 3) == 0) raw_bias(0) = dots[0], raw_bias(1) = dots[1];
        __syncwarp();
    }
    OA_DEVICE float& raw_bias(int r) const {
        return storage_.raw_bias.of_row[group_ * 64 + (threadIdx.x >> 5 & 3) * 16 + (lane_ >> 2) + 8 * r];
    }

    // RawQueries::bad, each thread's own, in the place of delta_s, which these kernels do not have.
    OA_DEVICE uint8& marks() const {
        static_assert(!Config::kRawQ || sizeof(storage_.delta) >= 128 * Config::kConsumers, "a byte a thread");
        return reinterpret_cast<uint8*>(storage_.delta)[threadIdx.x - 128];
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

    // After the last read of a step's stage. is_full: whether the next one was seen to be.
    OA_DEVICE void release_stage(bool& is_full) {
        __syncwarp();
        this->release_inner();
        is_full = this->is_inner_full();
    }
    // Behind the last step: A += P V alone, and what was flushed. w: Int8Walk.
    template <typename Walk>
    OA_DEVICE void take_last_product(const Walk& w) {
        if (!w.is_full) this->wait_inner();
        Tile::issue_pv(w.state.acc, w.sums, w.probs, v_.next(inner_at_.stage * Tile::kKBytes));
        w.finish_pv();
        this->release_inner();
        if (w.state.flushed) add_flushed(w.state);
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

    // Whether there is delta_s: with score modifications it is the call that says so.
    OA_DEVICE bool has_delta() const {
        return Config::kDelta && (!Config::kScoreMods || params_.operands.delta_s != nullptr);
    }

    // Score units of tile n -> those of q_scale times K's, of this lane's two rows and its keys.
    OA_DEVICE float scale_of_tile(float q_scale, int32 n) const {
        // A max_seqlen_k below the longest sequence: not a number, rather than one that means nothing.
        if (has_delta() && (n + 1) * Config::kBlockN > params_.operands.delta_columns)
            return __int_as_float(0x7fffffff);
        return q_scale * scale_of_keys(n);
    }
    // Of the step's tile n.
    OA_DEVICE float scale_of_keys(int32 n) const {
        if constexpr (Config::kBlockScales)
            return block_scale(k_scales_, params_.scales.k_stride_block, params_.scales.k_blocks,
                               uint32(n) / (kBlockRows / Config::kBlockN));
        return load_shared_float(k_scale_ + 16 * inner_at_.stage);
    }
    // Tiles of keys between two flushes. first, end: the tiles that these queries look at.
    OA_DEVICE int32 tiles_to_flush(const FwdTile& t, int32 first, int32 end) const {
        int32 keys = params_.flush_keys;
        if constexpr (Config::kBlockScales) {
            int32 kv_head = t.head_idx / (p_.num_q_heads / p_.num_kv_heads);
            keys =
                flush_period(params_.scales, keys, int64(t.batch_idx) * p_.num_kv_heads + kv_head,
                             first_block<Config>(t, t.k_begin), first * Config::kBlockN, end * Config::kBlockN, lane_);
        }
        return keys / Config::kBlockN;
    }
    // Before the first step of a tile of queries.
    OA_DEVICE void find_key_scales(const FwdTile& t) {
        if constexpr (Config::kBlockScales)
            k_scales_ =
                k_block_scales(params_.operands, params_.scales, t, t.head_idx / (p_.num_q_heads / p_.num_kv_heads));
        if constexpr (Config::kFactors)
            v_factors_ = value_factors(params_.factors, t, t.head_idx / (p_.num_q_heads / p_.num_kv_heads));
    }
    // kFactors: of V, for the keys of tile n.
    OA_DEVICE float factor_of_values(int32 n) const {
        if constexpr (Config::kFactors)
            return value_factor<Config::kBlockN>(v_factors_, params_.factors, params_.scales.k_blocks, n);
        return 1.0f;
    }

    // A scale of scores that are added to a constant as they are (attention/warp_softmax.cuh): integers.
    OA_DEVICE static float without_rounding(float c) {
        return kScoreBias<typename Config::Score> != 0.0f ? scale_without_rounding(c) : c;
    }
    OA_DEVICE static bool is_coarse(float c) { return kScoreBias<typename Config::Score> != 0.0f && c > kCoarseScale; }

    // Score units of tile n -> base-2 exponent, of the plain kernel: q_scale has the softmax's scale in it.
    OA_DEVICE float scale_of_scores(float q_scale, int32 n) const {
        if (Config::kDelta && (n + 1) * Config::kBlockN > params_.operands.delta_columns)
            return __int_as_float(0x7fffffff);
        return without_rounding(q_scale * scale_of_keys(n));
    }
    // Of this lane's two rows.
    OA_DEVICE void scales_of_scores(const float (&q_scale)[2], int32 n, float (&c)[2]) const {
        if constexpr (Config::kSplitKeys || (Config::kRawQ && Config::kBlockScales)) {  // a scale for each row
            float of_keys = scale_of_keys(n);
            c[0] = without_rounding(q_scale[0] * of_keys);
            c[1] = without_rounding(q_scale[1] * of_keys);
        } else {
            c[0] = c[1] = scale_of_scores(q_scale[0], n);
        }
    }

    // delta_s of the step's tile, from this lane's first column on.
    OA_DEVICE const float* delta_of(const FwdTile& t) const {
        int32 row = (t.m0 + group_ * 64) / kBlockRows - t.m0 / kBlockRows;
        return storage_.delta[Config::kDelta ? inner_at_.stage : 0][row] + 2 * (lane_ & 3);
    }

    const Params& params_;
    Storage& storage_;
    WgmmaDescriptor k_, v_;  // of the first stages
    uint32 k_scale_;  // shared address of this lane's
    const float* k_scales_ = nullptr;  // kBlockScales: of the keys of this tile of queries
    const float* v_factors_ = nullptr;  // kFactors: the same

  private:
    // The call's head, of all batches, that a row of packed heads belongs to.
    OA_DEVICE int64 head_of_row(const SplitTile& t, int32 row) const {
        return int64(t.batch_idx) * p_.num_q_heads * t.pack_heads + head_of(t, row);
    }
    OA_DEVICE float bias_of(const FwdTile& t, int32 row) const { return row_bias_of(p_, params_.operands, t, row); }
    OA_DEVICE float bias_of(const SplitTile& t, int32 row) const {
        if (row >= t.seqlen_q) return 0.0f;
        const int32 queries = Config::kVarlen ? p_.seqlen_q : t.num_queries, first = Config::kVarlen ? t.q_begin : 0;
        return params_.operands.row_bias[head_of_row(t, row) * queries + first + row / t.pack];
    }

    // A split's sums. What smoothing took from the scores moves the base only where sinks are measured by it, so that O
    // has the same bits with an LSE and without. A row without keys has none, whatever its bias; NaN marks a row.
    OA_DEVICE void store_partial(const TileOf<Config>& t, int32 warp_row, Rows& state, const float (&bias)[2]) const {
        float m2[2], base[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float lacks = state.softmax.l[r] == 0.0f ? 0.0f : bias[r] * kLog2e;
            base[r] = state.softmax.m2[r] + lacks;
            m2[r] = p_.sinks != nullptr || lacks != lacks ? base[r] : state.softmax.m2[r];
        }
        const int64 first = first_partial_row<Config::kBlockM>(p_, params_.tiles, t);
        if constexpr (Config::kVarlen) {
            note_cut<true>(params_, t, warp_row, lane_);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (m2[r] != m2[r]) state.softmax.l[r] = m2[r];  // final results have no use for a base without sinks
            store_split_rows<typename Config::Io, false>(state.acc, m2, state.softmax.l, params_, p_, t, t.num_splits,
                                                         first, warp_row, lane_);
            if (t.num_splits == 1) {
                store_lse_rows<typename Config::Io>(base, state.lse_sum, p_, t, warp_row, lane_);
                return;
            }
        } else {
            store_partial_rows(state.acc, m2, state.softmax.l, params_.partial_o + first * p_.head_dim,
                               params_.partial_ml + 2 * first, p_.head_dim, t.seqlen_q, warp_row, lane_);
        }
        if constexpr ((Config::kScoreMods || Config::kVarlen) && !Config::kFactors)
            if (params_.partial_lse == nullptr) return;  // these kernels always have the sums
        if constexpr (Config::kLse && !Config::kFactors)
            store_partial_sums(base, state.lse_sum, params_.partial_lse, t, first, warp_row, lane_);
    }

    // Whether what smoothing took from the scores is still to be added: the softcap has had it already.
    OA_DEVICE bool has_bias() const {
        if constexpr (Config::kFactors && (Config::kScoreMods || Config::kSplitKeys)) return false;
        if constexpr (Config::kBlockScales)
            if (params_.operands.row_bias == nullptr) return false;
        if constexpr (Config::kSoftcap) return !(params_.mods.flags & kModSoftcap);
        return true;
    }
};
