// Blocks of 128 rows of Q or K to integers with one scale a group of rows.
//
//   t = x - mean;  scale = amax(group) / 127 (int4: / 7);  x_int = nearest_even(t * (1 / scale))
//   with Rotation, which only some kernels have: t rotated, and perhaps  x_int = e4m3(t * (1 / scale)), 448 for 127
//
// A row that holds NaN or infinity does not count for its group's amax and becomes zeros; a query row is marked by NaN
// in row_bias, a key by NaN in its group's k_scale.
// Threads as in quantize/reduce.cuh: a thread has 8 channels of 8 rows, in registers between the two uses.
#pragma once
#include "ptx/cvt_quant.cuh"
#include "quantize/items.cuh"
#include "quantize/reduce.cuh"
#include "quantize/rotation.cuh"
#include "tile/group_scale.cuh"

constexpr int32 kSteps = kBlockRows / kRowLanes;

template <int kHeadDim>
struct RowsStorage {
    alignas(16) float sums[kRowLanes * kHeadDim];
    float mean[kHeadDim];
};

// Largest magnitudes of the groups of a block, and whether one of their rows is bad. Double-buffered, so that one can
// be cleared while the other is in use.
struct GroupStorage {
    uint32 amax[kBlockRows], bad[kBlockRows];
    uint32 irregular;  // kCommon: some magnitude is not finite

    // All threads; a barrier has to follow.
    template <int kThreads>
    OA_DEVICE void clear() {
        static_assert(kThreads >= kBlockRows, "one row a thread");
        if (threadIdx.x < kBlockRows) amax[threadIdx.x] = bad[threadIdx.x] = 0;
        if (threadIdx.x == 0) irregular = 0;
    }
};

struct MaxOp {
    OA_DEVICE float operator()(float a, float b) const { return max_nan(a, b); }
};
template <typename Io>
struct PackedMaxOp {
    OA_DEVICE uint32 operator()(uint32 a, uint32 b) const { return max2_nan(Io{}, a, b); }
};
struct SumOp {
    OA_DEVICE float operator()(float a, float b) const { return a + b; }
};

// Combines kLanes neighbouring lanes' values of 8 rows. Each step exchanges half of what is left, so that 8 rows cost
// 7 shuffles and not 24. Lane c ends up with row `row_of_lane(c)`, the lanes 8, 16, ... further on with the same.
template <int kLanes, class Value, class Op>
OA_DEVICE Value combine_rows(Value (&v)[8], Op op) {
    int32 lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 0; step < 3; ++step) {
        bool up = lane >> step & 1;
#pragma unroll
        for (int j = 0; j < 4 >> step; ++j) {
            Value other = v[j + (4 >> step)], keep = up ? other : v[j], send = up ? v[j] : other;
            v[j] = op(keep, __shfl_xor_sync(0xffffffffu, send, 1 << step));
        }
    }
#pragma unroll
    for (int bit = 8; bit < kLanes; bit *= 2) v[0] = op(v[0], __shfl_xor_sync(0xffffffffu, v[0], bit));
    return v[0];
}
// Three bits reversed: its own inverse.
OA_DEVICE int32 row_of_lane(int32 c) { return (c & 1) * 4 + (c & 2) + (c >> 2 & 1); }

// Which rows of a block share a scale, and where that scale is stored, for queries and keys. Slots are what the
// per-thread granularity needs; coarser ones repeat their scale in all of them.
struct Grouping {
    int32 granularity, slice_log2;  // slices of 16 or 32 queries, 64 or 128 keys
    bool is_q, of_blocks;  // of_blocks: one slot for all 128 rows
    OA_DEVICE Grouping(int32 granularity, int32 slice, bool is_q, bool of_blocks)
        : granularity(granularity), slice_log2(31 - __clz(slice)), is_q(is_q), of_blocks(of_blocks) {}
    OA_DEVICE int32 slot(int32 row) const {
        if (of_blocks) return 0;
        if (granularity == kPerToken) return row;
        return is_q ? (row >> slice_log2) * 8 + (row & 7) : (row >> slice_log2) * 4 + (row >> 1 & 3);
    }
    // Whether it is the first row of its slot.
    OA_DEVICE bool leads(int32 row) const {
        if (of_blocks) return row == 0;
        int32 in_slice = row & ((1 << slice_log2) - 1);
        return granularity == kPerToken || (in_slice < 8 && (is_q || !(row & 1)));
    }
    OA_DEVICE int32 group(int32 row) const {
        if (of_blocks) return 0;
        if (granularity >= kPerThread) return slot(row);
        if (is_q) return granularity == kPerWarp ? row >> slice_log2 : 0;
        return granularity == kPerTensor ? 0 : row >> slice_log2;
    }
    OA_DEVICE int32 slots_of(int32 rows) const {
        if (of_blocks) return 1;
        return granularity == kPerToken ? rows : (rows >> slice_log2) * (is_q ? 8 : 4);
    }
};

// Makes the compiler forget what it has computed from these registers: it would otherwise keep 64 differences from the
// search of the maximum for the rounding, which costs more registers than there are.
OA_DEVICE void forget(uint4 (&raw)[kSteps]) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) asm volatile("" : "+r"(raw[i].x), "+r"(raw[i].y), "+r"(raw[i].z), "+r"(raw[i].w));
}

// Largest magnitude of the row that combine_rows gives to this lane, of 8 rows of Q as they are.
template <typename Io, int kColumns>
OA_DEVICE float largest_of_row(const uint4 (&raw)[kSteps]) {
    Io io;
    uint32 most[kSteps];
    auto magnitudes = [](uint32 w) { return w & ~kBothSigns; };
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
        most[i] = max2_nan(io, max2_nan(io, magnitudes(raw[i].x), magnitudes(raw[i].y)),
                           max2_nan(io, magnitudes(raw[i].z), magnitudes(raw[i].w)));
    uint32 pair = combine_rows<kColumns>(most, PackedMaxOp<Io>{});
    return max_nan(low_float(io, pair), high_float(io, pair));
}

// Largest magnitude of x - mean over some of this thread's rows of K, which are of one group, and over those of the
// other threads of the same rows. Rounding keeps the order of numbers, so the largest and the smallest x of a channel
// have it.
template <typename Io, int kColumns, int kFirst, int kCount>
OA_DEVICE float largest_of_rows(const uint4 (&raw)[kSteps], const float (&mean)[8]) {
    Io io;
    float most = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        uint32 hi = word_of(raw[kFirst], w), lo = hi;
#pragma unroll
        for (int i = kFirst + 1; i < kFirst + kCount; ++i) {
            hi = max2_nan(io, hi, word_of(raw[i], w));
            lo = min2_nan(io, lo, word_of(raw[i], w));
        }
        most = max_abs_nan(most, low_float(io, hi) - mean[2 * w]);
        most = max_abs_nan(most, low_float(io, lo) - mean[2 * w]);
        most = max_abs_nan(most, high_float(io, hi) - mean[2 * w + 1]);
        most = max_abs_nan(most, high_float(io, lo) - mean[2 * w + 1]);
    }
#pragma unroll
    for (int bit = 1; bit < kColumns; bit *= 2) most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, bit));
    return most;
}

// Rows as floats, without their mean and rotated; rows that do not exist are zeros.
template <typename Io, int kColumns>
OA_DEVICE void rotated_rows(const uint4 (&raw)[kSteps], const float (&mean)[8], const Rotation& rotation, int32 count,
                            float (&x)[kSteps][8]) {
    int32 cc = threadIdx.x % kColumns, ty = threadIdx.x / kColumns;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        unpack8(Io{}, raw[i], x[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] = ty + i * kRowLanes < count ? x[i][j] - mean[j] : 0.0f;
    }
    if (rotation.channels != 0) rotate(x, rotation, uint32(cc) * 8);
}

OA_DEVICE bool to_e4m3(NoRotation) { return false; }
OA_DEVICE bool to_e4m3(const Rotation& rotation) { return rotation.to_e4m3 != 0; }

// The steps of quantize_rows. cc, ty: the thread's column of 8 channels and its first row; is_q: rows of Q, not of K.

// This thread's channels of its rows; zeros where there are none.
template <int kColumns>
OA_DEVICE void load_rows(const QuantizeParams& p, int32 cc, int32 ty, const uint8* rows, int64 stride, int32 count,
                         uint4 (&raw)[kSteps]) {
    const uint8* from = rows + ty * stride + cc * 16;
    uint64 policy = evict_first_policy();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        bool inside = cc * 8 < p.head_dim && ty + i * kRowLanes < count;
        raw[i] = inside ? load_input(from, policy) : uint4{0, 0, 0, 0};
        from += kRowLanes * stride;
    }
}

// K's mean, of the head that belongs to the block's: other CTAs make it.
template <int kHeadDim>
OA_DEVICE void fetch_key_mean(const QuantizeParams& p, const QuantizeItem& t, bool is_q, int32 cc,
                              RowsStorage<kHeadDim>& s, float (&mean)[8]) {
    int64 kv_at = int64(t.batch_idx) * p.num_kv_heads + (is_q ? t.head / (p.num_q_heads / p.num_kv_heads) : t.head);
    const float* from[1] = {p.k_mean + kv_at * p.head_dim_pad};
    float* to[1] = {s.mean};
    fetch_channels<kHeadDim>(p.k_ready + kv_at, from, p.head_dim_pad, to);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) mean[j] = s.mean[cc * 8 + j];
}

// What smoothing K takes away from every score of a query, q . k_mean, of the row that combine_rows gives to this lane.
// One or two channels at a time, as in all steps: the kernel is short of registers. dots: for nothing else.
template <typename Io, int kColumns>
OA_DEVICE float dot_with_mean(const uint4 (&raw)[kSteps], const float (&mean)[8], float (&dots)[kSteps]) {
    Io io;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) dots[i] = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            dots[i] = fmaf(low_float(io, word_of(raw[i], w)), mean[2 * w], dots[i]);
            dots[i] = fmaf(high_float(io, word_of(raw[i], w)), mean[2 * w + 1], dots[i]);
        }
    }
    return combine_rows<kColumns>(dots, SumOp{});
}

// The mean of a block of queries, which is an output too.
template <typename Io, int kHeadDim>
OA_DEVICE void mean_of_queries(const QuantizeParams& p, const QuantizeItem& t, bool only_amax, const uint8* rows,
                               int64 stride, int32 count, const uint4 (&raw)[kSteps], RowsStorage<kHeadDim>& s,
                               float (&mean)[8]) {
    Io io;
    int32 tid = threadIdx.x, cc = tid % (kHeadDim / 8);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float lo[2] = {}, hi[2] = {};
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            lo[i & 1] += low_float(io, word_of(raw[i], w));
            hi[i & 1] += high_float(io, word_of(raw[i], w));
        }
        reinterpret_cast<float2*>(s.sums + tid * 8)[w] = {lo[0] + lo[1], hi[0] + hi[1]};
    }
    float sum = channel_sum<Io, kHeadDim>({rows, stride, 0, 0, count}, p.head_dim, s.sums);
    if (tid < kHeadDim) {
        float of_block = mul_rn(div_rn(sum, float(count)), kSumUnscale);
        s.mean[tid] = of_block;
        if (!only_amax && tid < p.head_dim_pad)
            p.q_mean[(int64(t.unit) * p.slots_q + t.slot) * p.head_dim_pad + tid] = of_block;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) mean[j] = s.mean[cc * 8 + j];
}

// The largest magnitude of the row that combine_rows gives to this lane, whatever the block. Rows that do not exist are
// zeros, not minus the mean. rotated: the rows as rotated_rows leaves them, read with a Rotation alone. most: scratch.
template <typename Io, int kColumns, typename Rotate, int kRows>
OA_DEVICE float largest_of_any_row(const uint4 (&raw)[kSteps], const float (&mean)[8], const float (&rotated)[kRows][8],
                                   float (&most)[kSteps], int32 ty, int32 count) {
    Io io;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) most[i] = 0.0f;
    if constexpr (Rotate::kPresent) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) most[i] = max_abs_nan(most[i], rotated[i][j]);
    } else {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                most[i] = max_abs_nan(most[i], low_float(io, word_of(raw[i], w)) - mean[2 * w]);
                most[i] = max_abs_nan(most[i], high_float(io, word_of(raw[i], w)) - mean[2 * w + 1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) most[i] = ty + i * kRowLanes < count ? most[i] : 0.0f;
    return combine_rows<kColumns>(most, MaxOp{});
}

// kPerTensor, whose blocks collect their tensor's largest magnitude in a pass of their own: puts it in place of the
// block's. False in that pass, whose work this ends.
OA_DEVICE bool share_amax(const QuantizeParams& p, const QuantizeItem& t, bool is_q, bool only_amax, int64 at,
                          uint32& amax) {
    uint32* tensor_amax = (is_q ? p.q_amax : p.k_amax) + at;
    uint32* tensor_done = (is_q ? p.q_amax_done : p.k_amax_done) + at;
    if (only_amax) {
        if (threadIdx.x == 0) {
            reduce_max_global(tensor_amax, amax);
            atomic_add_acq_rel(tensor_done, 1);
        }
        return false;
    }
    wait_for_own(tensor_done, uint32(blocks_of(t.len)));
    amax = load_gpu(tensor_amax);
    return true;
}

// The scale of a row's slot, once for the slot. Blocks of queries and tiles of keys begin at slots of their own in
// packed arrays. The block's rows end with the sequence's last tile. first, count: the block's rows.
template <typename Rotate>
OA_DEVICE void store_scale(const QuantizeParams& p, const QuantizeItem& t, const Rotate& rotation, bool is_q,
                           int32 first, int32 count, const Grouping& grouping, int32 row, int32 slot, float scale,
                           const GroupStorage& groups) {
    int32 tile_rows = is_q ? kBlockRows : key_tile_of(p), tile_log2 = 31 - __clz(tile_rows);
    if (row >> tile_log2 << tile_log2 < count && grouping.leads(row)) {
        int32 tile = (first >> tile_log2) + (is_packed(p) ? first_slot(t.begin, t.batch_idx, tile_rows) : 0);
        int64 at_slot = (int64(t.unit) * (is_q ? p.slots_q : p.tiles_k) + tile) * grouping.slots_of(tile_rows) + slot;
        // Rows of e4m3 are NaN themselves.
        (is_q ? p.q_scale : p.k_scale)[at_slot] = !is_q && !to_e4m3(rotation) && groups.bad[slot] ? quiet_nan() : scale;
    }
}

// Rotate: NoRotation or Rotation.
template <typename Io, int kHeadDim, typename Rotate>
OA_DEVICE void quantize_rows(const QuantizeParams& p, const Rotate& rotation, const QuantizeItem& t,
                             RowsStorage<kHeadDim>& s, GroupStorage& groups) {
    constexpr int kColumns = kHeadDim / 8;
    Io io;
    int32 tid = threadIdx.x, cc = tid % kColumns, ty = tid / kColumns;
    bool is_q = t.kind == kQuantizeQ || t.kind == kAmaxQ;
    bool only_amax = !kCommon && (t.kind == kAmaxQ || t.kind == kAmaxK);
    int64 at = sequence_head(t, is_q ? p.num_q_heads : p.num_kv_heads);
    int32 first = t.index * kBlockRows, count = min_of(t.len - first, kBlockRows);
    int64 stride = kCommon ? t.stride_bytes : (is_q ? p.q_stride_s : p.k_stride_s) * 2;
    const uint8* rows = is_q ? item_rows(p, t, p.q, p.q_stride_b, p.q_stride_s, p.q_stride_h, first)
                             : item_rows(p, t, p.k, p.k_stride_b, p.k_stride_s, p.k_stride_h, first);

    uint4 raw[kSteps];
    load_rows<kColumns>(p, cc, ty, rows, stride, count, raw);

    bool full_bias = is_q && !only_amax && has(p, kFullBias);
    float mean[8] = {}, value[kSteps], dot = 0.0f;
    if ((!is_q && has(p, kSmoothK)) || full_bias) fetch_key_mean<kHeadDim>(p, t, is_q, cc, s, mean);
    if (full_bias) {
        dot = dot_with_mean<Io, kColumns>(raw, mean, value);
#pragma unroll
        for (int j = 0; j < 8; ++j) mean[j] = 0.0f;
    }
    if (is_q && has(p, kSmoothQ)) mean_of_queries<Io, kHeadDim>(p, t, only_amax, rows, stride, count, raw, s, mean);
    float rotated[Rotate::kPresent ? kSteps : 1][8];
    if constexpr (Rotate::kPresent) rotated_rows<Io, kColumns>(raw, mean, rotation, count, rotated);

    // Lane cc < 8 of a row's lanes has the result of one row.
    Grouping grouping(granularity_of(p), is_q ? query_slice_of(p) : key_tile_of(p), is_q, to_e4m3(rotation));
    int32 own_row = ty + row_of_lane(cc & 7) * kRowLanes, slot = grouping.slot(own_row),
          group = grouping.group(own_row);
    bool regular = kCommon && count == kBlockRows, bad = false;  // rows that all exist, and are finite
    if (regular) {
        constexpr int kTiles = kBlockRows / kCommonKeyTile, kHalf = kSteps / 2;
        float most;
        if (is_q) {
            most = largest_of_row<Io, kColumns>(raw);
        } else if (kTiles == 1) {
            most = largest_of_rows<Io, kColumns, 0, kSteps>(raw, mean);
        } else {
            float first_tile = largest_of_rows<Io, kColumns, 0, kHalf>(raw, mean);
            forget(raw);
            most = largest_of_rows<Io, kColumns, kHalf, kHalf>(raw, mean);
            if (cc == 0) most = first_tile;  // row_of_lane(1) is in the second tile
        }
        if (cc < (is_q ? 8 : kTiles)) {  // a lane for each row of Q, for each tile of K
            reduce_max_shared(&groups.amax[group], __float_as_uint(most));
            if (!is_finite(most)) groups.irregular = 1;
        }
        __syncthreads();
        regular = groups.irregular == 0;
        if (!regular) {
            __syncthreads();
            groups.clear<2 * kHeadDim>();
            __syncthreads();
        }
    }
    if (!regular) {
        forget(raw);
        float most = largest_of_any_row<Io, kColumns, Rotate>(raw, mean, rotated, value, ty, count);
        bad = !is_finite(most);
        if (cc < 8) {
            reduce_max_shared(&groups.amax[group], bad ? 0 : __float_as_uint(most));
            if (bad) reduce_max_shared(&groups.bad[slot], 1);
        }
        __syncthreads();
    }
    bool per_tensor = granularity_of(p) == kPerTensor;
    uint32 amax = groups.amax[group];
    if (per_tensor && !share_amax(p, t, is_q, only_amax, at, amax)) return;
    float scale = scale_of(__uint_as_float(amax), levels_of(p)), inverse = div_rn(1.0f, scale);
    if (cc < 8) {
        store_scale(p, t, rotation, is_q, first, count, grouping, own_row, slot, scale, groups);
        if (is_q && p.row_bias && own_row < count)
            p.row_bias[output_row(t, p.seqlen_q) + first + own_row] = bad ? quiet_nan() : dot;
    }
    if (bad) inverse = quiet_nan();
    forget(raw);

    int32 row_bytes = p.head_dim_pad * bits_of(p) / 8;
    uint8* to = (is_q ? p.q_int : p.k_int) + (output_row(t, is_q ? p.seqlen_q : p.seqlen_k) + first + ty) * row_bytes +
                cc * bits_of(p);
    bool has_channels = cc * 8 < p.head_dim_pad;
#pragma unroll
    for (int i = 0; i < kSteps; ++i, to += kRowLanes * row_bytes) {
        float of_row = __shfl_sync(0xffffffffu, inverse, row_of_lane(i), kColumns), x[8];
        uint32 n[8];
        bool stored = has_channels && (regular || ty + i * kRowLanes < count);
        bool is_bad = !regular && !is_finite(of_row);
        if constexpr (Rotate::kPresent) {
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = rotated[i][j];
            if (to_e4m3(rotation)) {
                uint2 codes = is_bad ? uint2{kE4m3Nans, kE4m3Nans} : to_e4m3(x, of_row);
                if (stored) *reinterpret_cast<uint2*>(to) = codes;
                continue;
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) n[j] = __float_as_uint(fmaf(x[j], of_row, kRound));
        } else {
            unpack8(io, raw[i], x);
#pragma unroll
            for (int j = 0; j < 8; ++j) n[j] = __float_as_uint(fmaf(x[j] - mean[j], of_row, kRound));
        }
        if (bits_of(p) == 8) {
            uint2 packed;
            packed.x = pack_low_bytes(n[0], n[1], n[2], n[3]);
            packed.y = pack_low_bytes(n[4], n[5], n[6], n[7]);
            if (is_bad) packed.x = packed.y = 0;
            if (stored) *reinterpret_cast<uint2*>(to) = packed;
        } else {
            uint32 packed = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) packed |= (n[j] & 15u) << (4 * j);
            if (stored) *reinterpret_cast<uint32*>(to) = is_bad ? 0 : packed;
        }
    }
}
