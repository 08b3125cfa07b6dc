// What the warps of mla_decode_sm80 compute, whose comment has the design: S, P and O of a CTA's rows.
#pragma once
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/latent_rows.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "ptx/shared_pairs.cuh"
#include "ptx/types.cuh"

// Config: Io, kFormat, kHeadDim, kHeadDimV, kRows, kKeys, kPanels, kStages, kHeld, kRowWarps, kParts, kKeyWarps.
// Storage: k, q, scores, alpha, m, l, exists, row_scale.
template <typename Config, typename Storage>
class LatentWarps {
    static constexpr uint32 kTileRow = 2 * Config::kHeadDim, kScoreRow = 4 * Config::kKeys;  // bytes
    static constexpr int kSteps = 4 / Config::kParts;  // of 16 channels, of a panel
    static constexpr int kOwnKeys = Config::kKeys / Config::kKeyWarps;
    static constexpr int kMTiles = Config::kRows / 16;
    // Softmax: lanes of a row, and keys of a lane.
    static constexpr int kLanes = 256 / Config::kRows, kWidth = Config::kKeys / kLanes;
    static_assert(Config::kKeys == 32 && Config::kWarps == 8 && Config::kHeadDimV == 64 * Config::kWarps,
                  "the layouts");

  public:
    OA_DEVICE LatentWarps(const MlaDecodeParams& params, Storage& smem)
        : params_(params),
          p_(params.decode),
          smem_(smem),
          lane_(int32(threadIdx.x) & 31),
          warp_(__shfl_sync(0xffffffffu, int32(threadIdx.x) >> 5, 0)) {}

    // Q of a split, from global memory; rows that the sequence has not are zeros.
    OA_DEVICE void begin(const LatentSplit& split) {
        const int32 lane = fresh(lane_), warp = fresh(warp_);
        const uint16* from[2];
        bool exists[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 flat = first_row() + row_warp(warp) * 16 + (lane >> 2) + 8 * r, token = token_of(p_, flat);
            exists[r] = token < split.queries.count;
            from[r] = p_.q + 2 * (lane & 3) + 16 * kSteps * part_of(warp);
            if (exists[r])
                from[r] += split.sequence * p_.q_stride_b + (split.queries.first + token) * p_.q_stride_s +
                           (flat - token * p_.group) * p_.q_stride_h;
        }
#pragma unroll
        for (int panel = 0; panel < Config::kPanels; ++panel)
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                uint32 x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[i] = exists[i & 1]
                               ? *reinterpret_cast<const uint32*>(from[i & 1] + 64 * panel + 16 * step + 8 * (i >> 1))
                               : 0;
                if (panel < Config::kHeld) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) q_[panel][step][i] = x[i];
                } else {
                    store_shared4(spare_q(panel, step), make_uint4(x[0], x[1], x[2], x[3]));
                }
            }
        m_ = kLowest, l_ = 0.0f;
        const int32 token = min_of(token_of(p_, first_row() + own_row(warp, lane)), split.queries.count - 1);
        const int32 end = split.seq_len - split.queries.count + token + 1;
        first_seen_ = p_.window_left < 0 ? 0 : max_of(end - 1 - p_.window_left, 0);
        end_ = min_of(end, split.end);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int i = 0; i < 32; ++i) o_[m][i] = 0.0f;
    }

    // Products of this warp's rows and keys of a tile over its part of the channels: of every panel kSteps steps.
    OA_DEVICE void part_of_scores(int32 tile) const {
        float s[kOwnKeys / 8][4];
#pragma unroll
        for (int n = 0; n < kOwnKeys / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
        const int32 lane = fresh(lane_), warp = fresh(warp_);
        // The lane's row for ldmatrix.
        const int key = key_warp(warp) * kOwnKeys + (lane & 7) + (lane >> 4) * 8;
        const int chunk = 2 * kSteps * part_of(warp) + (lane >> 3 & 1);
        const uint32 own = key * kTileRow + ((chunk ^ (lane & 7)) << 4);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32 from = tile_at(tile) + (own ^ (step * 32));
#pragma unroll
            for (int panel = 0; panel < Config::kPanels; ++panel) {
                uint32 q[4];
                if (panel < Config::kHeld) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) q[i] = q_[panel][step][i];
                } else {
                    const uint4 x = load_shared4(spare_q(panel, step));
                    q[0] = x.x, q[1] = x.y, q[2] = x.z, q[3] = x.w;
                }
#pragma unroll
                for (int n = 0; n < kOwnKeys / 8; n += 2) {
                    uint32 b[4];
                    ldmatrix_x4(b, from + n * 8 * kTileRow + panel * 128);
                    mma_m16n8k16(typename Config::Io{}, s[n], q, b[0], b[1]);
                    mma_m16n8k16(typename Config::Io{}, s[n + 1], q, b[2], b[3]);
                }
            }
        }
        const int32 later = fresh(lane_), own_warp = fresh(warp_);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = row_warp(own_warp) * 16 + (later >> 2) + 8 * r;
            const uint32 to =
                smem_addr_of(smem_.scores) + (part_of(own_warp) * Config::kRows + row) * kScoreRow + (later & 1) * 8;
#pragma unroll
            for (int n = 0; n < kOwnKeys / 8; ++n) {
                const int unit = 2 * (key_warp(own_warp) * (kOwnKeys / 8) + n) + (later >> 1 & 1);
                store_shared2(to + swizzled(row, unit), s[n][2 * r], s[n][2 * r + 1]);
            }
        }
    }

    // P of this lane's row and keys, in the place of its scores; returns whether its maximum rose.
    OA_DEVICE bool probabilities(const LatentSplit& split, int32 tile) {
        const int32 lane = fresh(lane_), own = own_row(fresh(warp_), lane), column = lane % kLanes * kWidth;
        const uint32 row = smem_addr_of(smem_.scores) + own * kScoreRow;
        float s[kWidth] = {};
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part)
            add_scores(s, row + part * Config::kRows * kScoreRow, own, column);
        __syncwarp();
        finish_scores(s, split, tile, column);
        float top = s[0];
#pragma unroll
        for (int i = 1; i < kWidth; ++i) top = fmaxf(top, s[i]);
#pragma unroll
        for (int distance = 1; distance < kLanes; distance <<= 1)
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
        // As `OnlineSoftmax`; the caller may want the maximum itself.
        const bool grew = top - m_ > (params_.row_max == nullptr ? 8.0f : 0.0f);
        float alpha = 1.0f;
        if (grew) {
            alpha = exp2_approx(m_ - top);
            m_ = top;
            l_ *= alpha;
        }
        if (lane % kLanes == 0) smem_.alpha[own] = alpha;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            s[i] = exp2_approx(s[i] - m_);
            l_ += s[i];
        }
        uint32 packed[kWidth / 2];
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) packed[i] = pack2(typename Config::Io{}, s[2 * i], s[2 * i + 1]);
        // 16-byte chunks as ldmatrix reads eight rows of them.
        const uint32 to = row + ((column / 8 ^ (own & 7)) << 4) + column % 8 * 2;
        if constexpr (kWidth == 8) {
            store_shared4(to, make_uint4(packed[0], packed[1], packed[2], packed[3]));
        } else if constexpr (kWidth == 4) {
            store_shared2(to, packed[0], packed[1]);
        } else {
            store_shared(to, packed[0]);
        }
        return grew;
    }
    // O += P V of all rows and this warp's channels, panel `warp_`. grew: whether any warp's maximum has risen.
    OA_DEVICE void add_values(int32 tile, bool grew) {
        if (grew) rescale();
        const int32 lane = fresh(lane_);
        // The lane's rows for ldmatrix.
        const uint32 chunk = ((lane >> 4) ^ (lane & 7)) << 4;
        const uint32 k = tile_at(tile) + (lane & 15) * kTileRow + warp_ * 128;
        const uint32 probs = smem_addr_of(smem_.scores) + (lane & 15) * kScoreRow;
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
            uint32 a[kMTiles][4];
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) ldmatrix_x4(a[m], probs + m * 16 * kScoreRow + (chunk ^ (step * 32)));
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32 b[4];
                ldmatrix_x4_trans(b, k + step * 16 * kTileRow + (chunk ^ (n * 32)));
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma_m16n8k16(typename Config::Io{}, &o_[m][8 * n], a[m], b[0], b[1]);
                    mma_m16n8k16(typename Config::Io{}, &o_[m][8 * n + 4], a[m], b[2], b[3]);
                }
            }
        }
    }

    // Of all keys O and LSE, else a partial result. Behind it the tiles' buffers are free.
    OA_DEVICE void end(const LatentSplit& split) {
#pragma unroll
        for (int distance = 1; distance < kLanes; distance <<= 1) l_ += __shfl_xor_sync(0xffffffffu, l_, distance);
        const int32 own = own_row(fresh(warp_), fresh(lane_));
        if (lane_ % kLanes == 0) smem_.m[own] = m_, smem_.l[own] = l_;
        __syncthreads();
        const int32 lane = fresh(lane_);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) store_row(split, m, r, lane);
    }

  private:
    // Of 64 rows there are no registers for what can be computed anew from this.
    OA_DEVICE static int32 fresh(int32 x) { return Config::kRows == 64 ? in_register(x) : x; }
    // Of the products of S; and the softmax's row.
    OA_DEVICE static int32 row_warp(int32 warp) { return warp % Config::kRowWarps; }
    OA_DEVICE static int32 part_of(int32 warp) { return warp / Config::kRowWarps % Config::kParts; }
    OA_DEVICE static int32 key_warp(int32 warp) { return warp / (Config::kRowWarps * Config::kParts); }
    OA_DEVICE static int32 own_row(int32 warp, int32 lane) {
        return warp * (Config::kRows / Config::kWarps) + lane / kLanes;
    }
    OA_DEVICE int32 first_row() const { return int32(blockIdx.x) * Config::kRows; }
    OA_DEVICE uint32 tile_at(int32 tile) const {
        return smem_addr_of(smem_.k[0]) + uint32(tile % Config::kStages) * uint32(sizeof(smem_.k[0]));
    }
    // Of Q what has no place in registers: every lane's own.
    OA_DEVICE uint32 spare_q(int panel, int step) const {
        return smem_addr_of(smem_.q) + ((panel - Config::kHeld) * kSteps + step) * 16 * Config::kThreads +
               16 * threadIdx.x;
    }
    OA_DEVICE float row_scale() const { return Config::kFormat == kRowsE4m3 ? smem_.row_scale : 1.0f; }
    // Where 16 bytes of a row of scores are: rows 0 to 3 that are written at once, two places of each, and rows 2i and
    // 2i + 1 that are read at once are apart in the banks.
    OA_DEVICE static uint32 swizzled(int row, int unit) { return (unit ^ ((row & 3) << 1 | (row & 1))) << 4; }

    OA_DEVICE static void add_scores(float (&s)[kWidth], uint32 row, int32 own, int32 column) {
        if constexpr (kWidth == 2) {
            const float2 x = load_shared_float2(row + swizzled(own, column >> 2) + (column & 2) * 4);
            s[0] += x.x, s[1] += x.y;
        } else {
#pragma unroll
            for (int i = 0; i < kWidth; i += 4) {
                const uint4 x = load_shared4(row + swizzled(own, (column + i) >> 2));
                s[i] += __uint_as_float(x.x), s[i + 1] += __uint_as_float(x.y);
                s[i + 2] += __uint_as_float(x.z), s[i + 3] += __uint_as_float(x.w);
            }
        }
    }
    // S in base-2 units; keys that the row does not see are -inf.
    OA_DEVICE void finish_scores(float (&s)[kWidth], const LatentSplit& split, int32 tile, int32 column) const {
        const float c = p_.softmax_scale * kLog2e * row_scale();
#pragma unroll
        for (int i = 0; i < kWidth; ++i) s[i] *= c;
        if (p_.softcap > 0.0f) {
            const float inverse = kLn2 / p_.softcap, back = p_.softcap * kLog2e;
#pragma unroll
            for (int i = 0; i < kWidth; ++i) s[i] = back * tanh_exp2(s[i] * inverse);
        }
        const int32 first = split.begin + tile * Config::kKeys;
        if (first + Config::kKeys > end_ || first < first_seen_) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i)
                if (first + column + i >= end_ || first + column + i < first_seen_) s[i] = neg_inf();
        }
        if (params_.lists_rows != 0) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i)
                if (!smem_.exists[tile & 1][column + i]) s[i] = neg_inf();
        }
    }

    OA_DEVICE void rescale() {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float alpha = smem_.alpha[16 * m + (lane_ >> 2) + 8 * r];
#pragma unroll
                for (int n = 0; n < 8; ++n) o_[m][4 * n + 2 * r] *= alpha, o_[m][4 * n + 2 * r + 1] *= alpha;
            }
    }
    OA_DEVICE void store_row(const LatentSplit& split, int m, int r, int32 lane) const {
        const int32 own = 16 * m + (lane >> 2) + 8 * r, flat = first_row() + own, token = token_of(p_, flat);
        if (token >= split.queries.count) return;
        const int32 head = flat - token * p_.group, column = 64 * warp_ + 2 * (lane & 3);
        const bool first = warp_ == 0 && (lane & 3) == 0;
        const float top = smem_.m[own], l = smem_.l[own];
        if (split.slot < 0) {
            const RowResult result = finish_row(top, l, sink_log2<typename Config::Io>(p_.sinks, p_.sinks_kind, head));
            const float scale = result.o_scale * row_scale();
            if (first) note_row(params_, split.sequence, head, split.queries.first, token, top, result.lse);
            uint16* to = p_.o + split.sequence * p_.o_stride_b + (split.queries.first + token) * p_.o_stride_s +
                         head * p_.o_stride_h + column;
#pragma unroll
            for (int n = 0; n < 8; ++n)
                *reinterpret_cast<uint32*>(to + 8 * n) =
                    pack2(typename Config::Io{}, o_[m][4 * n + 2 * r] * scale, o_[m][4 * n + 2 * r + 1] * scale);
        } else {
            const int64 row = int64(split.slot) * params_.slot_rows + flat;
            if (first) *reinterpret_cast<float2*>(p_.partial_ml + 2 * row) = make_float2(top, l);
            float* to = p_.partial_o + row * Config::kHeadDimV + (column & ~15) + 4 * (lane & 3);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                const float4 x = pair_of_blocks(&o_[m][4 * n], r);
                const float scale = row_scale();
                *reinterpret_cast<float4*>(to + 8 * n) =
                    make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
            }
        }
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Storage& smem_;
    const int32 lane_, warp_;
    float m_, l_;  // of the softmax's row: the maximum, and this lane's part of the denominator
    int32 first_seen_, end_;  // keys that it sees
    uint32 q_[Config::kHeld][kSteps][4];
    float o_[kMTiles][32];
};
