// Blocks of 128 rows of Q or K to integers with one scale a group of rows.
//
//   t = x - mean;  scale = amax(group) / 127 (int4: / 7);  x_int = nearest_even(t * (1 / scale))
//
// A row that holds NaN or infinity does not count for its group's amax and becomes zeros; a query row is marked by NaN
// in row_bias, a key by NaN in its group's k_scale.
// Threads as in quantize_reduce.cuh: a thread has 8 channels of 8 rows, in registers between the two uses.
#pragma once
#include "attention/quantize_items.cuh"
#include "attention/quantize_reduce.cuh"
#include "ptx/cvt_quant.cuh"

constexpr int32 kSteps = kBlockRows / kRowLanes;

template <int kHeadDim>
struct RowsStorage {
    float sums[kRowLanes * kHeadDim];
    float mean[kHeadDim], k_mean[kHeadDim];
    float row_amax[kBlockRows];
    float row_dot[kBlockRows];
    float row_inverse[kBlockRows];  // NaN: a bad row
    uint32 group_amax[kBlockRows];
    uint32 group_bad[kBlockRows];
};

struct MaxOp {
    OA_DEVICE float operator()(float a, float b) const { return max_nan(a, b); }
};
struct SumOp {
    OA_DEVICE float operator()(float a, float b) const { return a + b; }
};

// Combines kLanes neighbouring lanes' values of 8 rows. Each step exchanges half of what is left, so that 8 rows cost
// 7 shuffles and not 24. Lane c ends up with row `row_of_lane(c)`, the lanes 8, 16, ... further on with the same.
template <int kLanes, class Op>
OA_DEVICE float combine_rows(float (&v)[8], Op op) {
    int32 lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 0; step < 3; ++step) {
        bool up = lane >> step & 1;
#pragma unroll
        for (int j = 0; j < 4 >> step; ++j) {
            float other = v[j + (4 >> step)], keep = up ? other : v[j], send = up ? v[j] : other;
            v[j] = op(keep, __shfl_xor_sync(0xffffffffu, send, 1 << step));
        }
    }
#pragma unroll
    for (int bit = 8; bit < kLanes; bit *= 2) v[0] = op(v[0], __shfl_xor_sync(0xffffffffu, v[0], bit));
    return v[0];
}
OA_DEVICE int32 row_of_lane(int32 c) { return (c & 1) * 4 + (c & 2) + (c >> 2 & 1); }

// Which rows of a block share a scale, and where that scale is stored, for queries and keys. Slots are what the
// per-thread granularity needs; coarser ones repeat their scale in all of them.
struct Grouping {
    int32 granularity, slice;  // slice: 16 or 32 queries, 64 or 128 keys
    bool is_q;
    OA_DEVICE int32 slot(int32 row) const {
        if (granularity == kPerToken) return row;
        return is_q ? row / slice * 8 + (row & 7) : row / slice * 4 + (row & 7) / 2;
    }
    // First row of those that share the slot.
    OA_DEVICE bool leads(int32 row) const {
        return granularity == kPerToken || (is_q ? row % slice < 8 : (row % slice < 8 && !(row & 1)));
    }
    OA_DEVICE int32 group(int32 row) const {
        if (granularity >= kPerThread) return slot(row);
        if (is_q) return granularity == kPerWarp ? row / slice : 0;
        return granularity == kPerTensor ? 0 : row / slice;
    }
    OA_DEVICE int32 slots_of(int32 rows) const {
        return granularity == kPerToken ? rows : rows / slice * (is_q ? 8 : 4);
    }
};

OA_DEVICE float scale_of(float amax, int32 bits) {
    return amax >= kLeastAmax ? div_rn(amax, bits == 8 ? 127.0f : 7.0f) : 1.0f;
}

// 1.5 * 2^23: x * inverse + kRound is x * inverse rounded to an integer, which stands in the low bits.
constexpr float kRound = 12582912.0f;

template <typename Io, int kHeadDim>
OA_DEVICE void quantize_rows(const QuantizeParams& p, const Item& t, RowsStorage<kHeadDim>& s) {
    constexpr int kColumns = kHeadDim / 8;
    Io io;
    int32 tid = threadIdx.x, cc = tid % kColumns, ty = tid / kColumns;
    bool is_q = t.kind == kQuantizeQ || t.kind == kAmaxQ;
    bool only_amax = t.kind == kAmaxQ || t.kind == kAmaxK;
    int32 heads = is_q ? p.num_q_heads : p.num_kv_heads;
    Grouping grouping{p.granularity, is_q ? p.q_group_rows : p.key_tile, is_q};
    int64 at = sequence_head(t, heads);
    int64 kv_at = int64(t.batch_idx) * p.num_kv_heads + (is_q ? t.head / (p.num_q_heads / p.num_kv_heads) : t.head);
    int32 first = t.index * kBlockRows, count = min_of(t.len - first, kBlockRows);
    int64 stride = (is_q ? p.q_stride_s : p.k_stride_s) * 2;
    bool dense = !p.packed;
    const uint8* rows = is_q ? input_rows(p.q, t, p.q_stride_b, p.q_stride_s, p.q_stride_h, dense)
                             : input_rows(p.k, t, p.k_stride_b, p.k_stride_s, p.k_stride_h, dense);
    rows += first * stride;

    uint4 raw[kSteps];
    const uint8* from = rows + ty * stride + cc * 16;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        bool inside = cc * 8 < p.head_dim && ty + i * kRowLanes < count;
        raw[i] = inside ? load_input(from) : uint4{0, 0, 0, 0};
        from += kRowLanes * stride;
    }
    if (tid < kBlockRows) s.group_amax[tid] = s.group_bad[tid] = 0, s.row_dot[tid] = 0.0f;
    bool full_bias = is_q && !only_amax && (p.flags & kFullBias);
    bool needs_k_mean = (!is_q && (p.flags & kSmoothK)) || full_bias;
    if (needs_k_mean) wait_for(p.k_ready + kv_at, kReady);
    if (tid < kHeadDim) {
        float k_mean = needs_k_mean && tid < p.head_dim_pad ? load_gpu(p.k_mean + kv_at * p.head_dim_pad + tid) : 0.0f;
        s.k_mean[tid] = k_mean;
        s.mean[tid] = is_q ? 0.0f : k_mean;
    }
    __syncthreads();
    float value[kSteps];
    // Registers are what this kernel lacks: two channels at a time.
    if (full_bias) {
        // What smoothing K takes away from every score of a row: q . k_mean.
#pragma unroll
        for (int i = 0; i < kSteps; ++i) value[i] = 0.0f;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float2 mean = reinterpret_cast<const float2*>(s.k_mean + cc * 8)[w];
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                value[i] = fmaf(low_float(io, word_of(raw[i], w)), mean.x, value[i]);
                value[i] = fmaf(high_float(io, word_of(raw[i], w)), mean.y, value[i]);
            }
        }
        float dot = combine_rows<kColumns>(value, SumOp{});
        if (cc < 8) s.row_dot[ty + row_of_lane(cc) * kRowLanes] = dot;
    }
    if (is_q && (p.flags & kSmoothQ)) {
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
        float sum = channel_sum<Io, kHeadDim>(rows, stride, count, p.head_dim, s.sums);
        if (tid < kHeadDim) {
            float mean = mul_rn(div_rn(sum, float(count)), kSumUnscale);
            s.mean[tid] = mean;
            if (!only_amax && tid < p.head_dim_pad)
                p.q_mean[(int64(t.unit) * p.slots_q + t.slot) * p.head_dim_pad + tid] = mean;
        }
        __syncthreads();
    }

    // Largest magnitude of every row; rows that do not exist are zeros, not minus the mean.
#pragma unroll
    for (int i = 0; i < kSteps; ++i) value[i] = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float2 mean = reinterpret_cast<const float2*>(s.mean + cc * 8)[w];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            value[i] = max_abs_nan(value[i], low_float(io, word_of(raw[i], w)) - mean.x);
            value[i] = max_abs_nan(value[i], high_float(io, word_of(raw[i], w)) - mean.y);
        }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) value[i] = ty + i * kRowLanes < count ? value[i] : 0.0f;
    float most = combine_rows<kColumns>(value, MaxOp{});
    if (cc < 8) s.row_amax[ty + row_of_lane(cc) * kRowLanes] = most;
    __syncthreads();
    bool bad = false;
    if (tid < kBlockRows) {
        float amax = s.row_amax[tid];
        bad = !is_finite(amax);
        reduce_max_shared(&s.group_amax[grouping.group(tid)], bad ? 0 : __float_as_uint(amax));
        if (bad) reduce_max_shared(&s.group_bad[grouping.granularity == kPerToken ? tid : grouping.slot(tid)], 1);
    }
    __syncthreads();
    uint32* tensor_amax = (is_q ? p.q_amax : p.k_amax) + at;
    uint32* tensor_done = (is_q ? p.q_amax_done : p.k_amax_done) + at;
    if (only_amax) {
        if (tid == 0) {
            reduce_max_global(tensor_amax, s.group_amax[0]);
            atomic_add_acq_rel(tensor_done, 1);
        }
        return;
    }
    bool per_tensor = p.granularity == kPerTensor;
    if (per_tensor) wait_for(tensor_done, uint32(t.len + kBlockRows - 1) / kBlockRows);
    // Blocks of queries and tiles of keys begin at slots of their own in packed arrays.
    int32 tiles = is_q ? p.slots_q : p.tiles_k, tile_rows = is_q ? kBlockRows : p.key_tile;
    int32 tile = first / tile_rows + (dense ? 0 : first_slot(t.begin, t.batch_idx, tile_rows));
    float* scales = (is_q ? p.q_scale : p.k_scale) + (int64(t.unit) * tiles + tile) * grouping.slots_of(tile_rows);
    if (tid < kBlockRows) {
        float amax = __uint_as_float(per_tensor ? load_gpu(tensor_amax) : s.group_amax[grouping.group(tid)]);
        float scale = scale_of(amax, p.bits);
        s.row_inverse[tid] = bad ? __uint_as_float(0x7fffffffu) : div_rn(1.0f, scale);
        int32 slot = grouping.slot(tid);
        // The block's rows end with the sequence's last tile.
        bool exists = tid / tile_rows * tile_rows < count;
        if (exists && grouping.leads(tid))
            scales[slot] = !is_q && s.group_bad[slot] ? __uint_as_float(0x7fffffffu) : scale;
        if (is_q && p.row_bias && tid < count)
            p.row_bias[output_row(t, p.seqlen_q) + first + tid] = bad ? __uint_as_float(0x7fffffffu) : s.row_dot[tid];
    }
    __syncthreads();

    int32 row_bytes = p.head_dim_pad * p.bits / 8;
    uint8* to = (is_q ? p.q_int : p.k_int) + (output_row(t, is_q ? p.seqlen_q : p.seqlen_k) + first + ty) * row_bytes +
                cc * p.bits;
    bool stored = cc * 8 < p.head_dim_pad;
    float mean[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) mean[j] = s.mean[cc * 8 + j];
#pragma unroll
    for (int i = 0; i < kSteps; ++i, to += kRowLanes * row_bytes) {
        int32 row = ty + i * kRowLanes;
        float inverse = s.row_inverse[row], x[8];
        bool is_bad = !is_finite(inverse);
        uint32 n[8];
        unpack8(io, raw[i], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) n[j] = __float_as_uint(fmaf(x[j] - mean[j], inverse, kRound));
        if (!stored || row >= count) continue;
        if (p.bits == 8) {
            uint2 packed;
            packed.x = permute_bytes(permute_bytes(n[0], n[1], 0x0040), permute_bytes(n[2], n[3], 0x0040), 0x5410);
            packed.y = permute_bytes(permute_bytes(n[4], n[5], 0x0040), permute_bytes(n[6], n[7], 0x0040), 0x5410);
            if (is_bad) packed.x = packed.y = 0;
            *reinterpret_cast<uint2*>(to) = packed;
        } else {
            uint32 packed = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) packed |= (n[j] & 15u) << (4 * j);
            *reinterpret_cast<uint32*>(to) = is_bad ? 0 : packed;
        }
    }
}
