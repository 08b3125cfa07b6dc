// Sums over sampled keys, chunk by chunk: the mean of K and of V, and the range of every channel of V.
//
// Order of a chunk's sum, which NumPy repeats: its row r goes to lane r % 32, each lane adds its rows in order, then
// lane i adds lane i + 16, + 8, + 4, + 2, + 1. A chunk with NaN, infinity or a sum beyond fp32 in a channel adds that
// channel again: finite values only, times 2^-32 each.
// Threads: 2 * HEAD_DIM; thread t has the channels 8 (t % (HEAD_DIM / 8)) + 0..7 and the rows t / (HEAD_DIM / 8) + 16
// i.
#pragma once
#include "ptx/cvt_quant.cuh"
#include "ptx/l2.cuh"
#include "quantize/items.cuh"

constexpr int32 kRowLanes = 16;
// Partial results that a thread loads before it adds the first of them: one after the other costs half a microsecond
// each, while every block of the head waits.
constexpr int kInFlight = 8;

OA_DEVICE uint32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

template <typename Io>
OA_DEVICE void unpack8(Io io, const uint4& w, float (&x)[8]) {
    x[0] = low_float(io, w.x), x[1] = high_float(io, w.x);
    x[2] = low_float(io, w.y), x[3] = high_float(io, w.y);
    x[4] = low_float(io, w.z), x[5] = high_float(io, w.z);
    x[6] = low_float(io, w.w), x[7] = high_float(io, w.w);
}

// Lanes of one channel, kRowLanes apart in shared memory by `kHeadDim`: the rest of the tree.
template <int kHeadDim>
OA_DEVICE float tree_sum(const float* column) {
    float s[kRowLanes];
#pragma unroll
    for (int i = 0; i < kRowLanes; ++i) s[i] = column[i * kHeadDim];
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i] += s[i + 8];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] += s[i + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

// First level of the tree: lanes ty (even steps) and ty + 16 (odd steps) of this thread's channels, into `buffer`,
// which holds 16 * kHeadDim floats.
template <int kHeadDim>
OA_DEVICE void store_lanes(const float (&even)[8], const float (&odd)[8], float* buffer) {
    float4* own = reinterpret_cast<float4*>(buffer + threadIdx.x * 8);
    own[0] = {even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]};
    own[1] = {even[4] + odd[4], even[5] + odd[5], even[6] + odd[6], even[7] + odd[7]};
}

// Rows that are summed up: all of a block, or some of a sequence's samples.
struct RowsToSum {
    const uint8* row_0;
    int64 stride_bytes;
    int32 first, log2, count;  // samples first + 0 .. count - 1
    OA_DEVICE const uint8* at(int32 i) const { return row_0 + sampled_row(first + i, log2) * stride_bytes; }
};

// Row lanes' sums again: finite values only, times 2^-32. Out of line: rare, and its registers would cost every caller.
template <typename Io, int kHeadDim>
OA_DEVICE void sum_finite(const RowsToSum& rows, int32 head_dim, float* buffer) {
    constexpr int kColumns = kHeadDim / 8;
    int32 cc = threadIdx.x % kColumns, ty = threadIdx.x / kColumns;
    float x[8], even[8] = {}, odd[8] = {};
    for (int32 r = ty; cc * 8 < head_dim && r < rows.count; r += 2 * kRowLanes) {
        unpack8(Io{}, load_input(rows.at(r) + cc * 16, evict_last_policy()), x);
#pragma unroll
        for (int j = 0; j < 8; ++j) even[j] += is_finite(x[j]) ? mul_rn(x[j], kSumScale) : 0.0f;
        if (r + kRowLanes >= rows.count) break;
        unpack8(Io{}, load_input(rows.at(r + kRowLanes) + cc * 16, evict_last_policy()), x);
#pragma unroll
        for (int j = 0; j < 8; ++j) odd[j] += is_finite(x[j]) ? mul_rn(x[j], kSumScale) : 0.0f;
    }
    store_lanes<kHeadDim>(even, odd, buffer);
}

// Sum of channel `tid` over the rows, from what store_lanes wrote, in threads below kHeadDim; times 2^-32.
template <typename Io, int kHeadDim>
OA_DEVICE float channel_sum(const RowsToSum& rows, int32 head_dim, float* buffer) {
    int32 tid = threadIdx.x;
    __syncthreads();
    float sum = 0.0f;
    if (tid < kHeadDim) sum = tree_sum<kHeadDim>(buffer + tid);
    bool again = tid < kHeadDim && !is_finite(sum);
    sum = mul_rn(sum, kSumScale);
    if (__syncthreads_or(again)) {
        sum_finite<Io, kHeadDim>(rows, head_dim, buffer);
        __syncthreads();
        if (again) sum = tree_sum<kHeadDim>(buffer + tid);
    }
    return sum;
}

// The partials of a chunk: [unit][slot][sum K, sum V, max V, min V][kHeadDim].
template <int kHeadDim>
OA_DEVICE float* partial_of(const QuantizeParams& p, const QuantizeItem& t, int32 slot, int32 which) {
    return p.partials + ((int64(t.unit) * p.slots_r + slot) * 4 + which) * kHeadDim;
}

// The item's chunk of a sequence's samples.
OA_DEVICE RowsToSum chunk_of(const QuantizeItem& t, int32 samples, const uint8* row_0, int64 stride_bytes) {
    int32 size = chunk_rows(samples), first = t.index * size;
    return {row_0, stride_bytes, first, sample_log2(t.len), min_of(size, samples - first)};
}

template <typename Io, int kHeadDim>
OA_DEVICE void reduce_k(const QuantizeParams& p, const QuantizeItem& t, float* buffer, uint32* flag) {
    constexpr int kColumns = kHeadDim / 8, kBatch = 8;
    Io io;
    int32 tid = threadIdx.x, cc = tid % kColumns, ty = tid / kColumns;
    int32 samples = num_samples(t.len), chunks = num_chunks(samples);
    RowsToSum rows = chunk_of(t, samples, item_rows(p, t, p.k, p.k_stride_b, p.k_stride_s, p.k_stride_h, 0),
                              kCommon ? t.stride_bytes : p.k_stride_s * 2);
    float sums[2][8] = {};
    bool inside = cc * 8 < p.head_dim;
    uint64 policy = evict_last_policy();
    for (int32 r0 = ty; r0 < rows.count; r0 += kRowLanes * kBatch) {
        uint4 raw[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            int32 r = r0 + i * kRowLanes;
            raw[i] = inside && r < rows.count ? load_input(rows.at(r) + cc * 16, policy) : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            float x[8];
            unpack8(io, raw[i], x);
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[i & 1][j] += x[j];
        }
    }
    store_lanes<kHeadDim>(sums[0], sums[1], buffer);
    float sum = channel_sum<Io, kHeadDim>(rows, p.head_dim, buffer);
    int64 at = sequence_head(t, p.num_kv_heads);
    if (chunks > 1) {
        if (tid < kHeadDim) partial_of<kHeadDim>(p, t, t.slot, 0)[tid] = sum;
        if (!arrive_is_last(p.k_ready + at, chunks, flag)) return;
    }
    if (tid < p.head_dim_pad) {
        const float* partial = partial_of<kHeadDim>(p, t, t.slot - t.index, 0) + tid;
        float total = chunks > 1 ? 0.0f : 0.0f + sum, part[kInFlight];  // from 0 on, as NumPy does: -0 becomes 0
        for (int32 c0 = 0; chunks > 1 && c0 < chunks; c0 += kInFlight) {
#pragma unroll
            for (int i = 0; i < kInFlight; ++i)
                part[i] = load_gpu(partial + int64(min_of(c0 + i, chunks - 1)) * (4 * kHeadDim));
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                if (c0 + i < chunks) total += part[i];
            }
        }
        p.k_mean[at * p.head_dim_pad + tid] = t.len ? mul_rn(div_rn(total, float(samples)), kSumUnscale) : 0.0f;
    }
    __syncthreads();
    if (tid == 0) store_release(p.k_ready + at, kReady);
}

// Largest value of a channel over the row lanes that a thread's 8 channels were stored for; NaN if there is one.
template <int kHeadDim>
OA_DEVICE float column_max(const float* column) {
    float m = neg_inf();
#pragma unroll
    for (int i = 0; i < kRowLanes; ++i) m = max_nan(m, column[i * kHeadDim]);
    return m;
}

// What a channel of V may exceed a sample's largest magnitude by: as floating-point numbers its values do not lose by
// it, while few of them become subnormal (e4m3 values up to 32, for fp16 sums, have three octaves less above that).
OA_DEVICE float headroom(const QuantizeParams& p) { return !has(p, kHalfV) && p.v_levels < 448.0f ? 4.0f : 16.0f; }

// Scale of a channel of V of which nothing exceeds `amax`. e4m3: amax becomes v_levels. fp16: a power of two, so that
// only subnormals are rounded, which puts it into [128, 256): 128 products with P <= 1 stay below 65504.
OA_DEVICE float value_scale(const QuantizeParams& p, float amax) {
    if (!(amax >= kLeastAmax)) return 1.0f;
    if (has(p, kHalfV)) return __uint_as_float((__float_as_uint(amax) & 0x7f800000u) - (7u << 23));
    return div_rn(amax, p.v_levels);
}

// Range of every channel and, with smooth_v, its sum; the last chunk of a sequence makes mean and scale of it.
template <typename Io, int kHeadDim>
OA_DEVICE void reduce_v(const QuantizeParams& p, const QuantizeItem& t, float* buffer, uint32* flag) {
    constexpr int kColumns = kHeadDim / 8, kBatch = kCommon ? 8 : 4;
    Io io;
    int32 tid = threadIdx.x, cc = tid % kColumns, ty = tid / kColumns;
    int32 samples = num_samples(t.len), chunks = num_chunks(samples);
    RowsToSum rows = chunk_of(t, samples, item_rows(p, t, p.v, p.v_stride_b, p.v_stride_s, p.v_stride_h, 0),
                              kCommon ? t.stride_bytes : p.v_stride_s * 2);
    bool smooth = has(p, kSmoothV), inside = cc * 8 < p.head_dim;
    uint4 none_hi, none_lo;  // -inf and +inf: no row seen
    none_lo.x = none_lo.y = none_lo.z = none_lo.w = infinities(io);
    none_hi.x = none_hi.y = none_hi.z = none_hi.w = infinities(io) | kBothSigns;
    uint4 hi = none_hi, lo = none_lo;
    float sums[2][8] = {};
    uint64 policy = evict_last_policy();
    // Rows behind the last one: this thread's first one again, which changes no range.
    for (int32 r0 = ty; inside && r0 < rows.count; r0 += kRowLanes * kBatch) {
        uint4 raw[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            int32 r = r0 + i * kRowLanes;
            raw[i] = load_input(rows.at(r < rows.count ? r : r0) + cc * 16, policy);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            hi.x = max2_nan(io, hi.x, raw[i].x), lo.x = min2_nan(io, lo.x, raw[i].x);
            hi.y = max2_nan(io, hi.y, raw[i].y), lo.y = min2_nan(io, lo.y, raw[i].y);
            hi.z = max2_nan(io, hi.z, raw[i].z), lo.z = min2_nan(io, lo.z, raw[i].z);
            hi.w = max2_nan(io, hi.w, raw[i].w), lo.w = min2_nan(io, lo.w, raw[i].w);
            if (smooth && r0 + i * kRowLanes < rows.count) {
                float x[8];
                unpack8(io, raw[i], x);
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[i & 1][j] += x[j];
            }
        }
    }
    int64 at = sequence_head(t, p.num_kv_heads);
    float sum = 0.0f, x[8];
    if (smooth) {
        store_lanes<kHeadDim>(sums[0], sums[1], buffer);
        sum = channel_sum<Io, kHeadDim>(rows, p.head_dim, buffer);
    }
    __syncthreads();
    float* of_lo = buffer + kRowLanes * kHeadDim;
    unpack8(io, hi, x);
    reinterpret_cast<float4*>(buffer + tid * 8)[0] = {x[0], x[1], x[2], x[3]};
    reinterpret_cast<float4*>(buffer + tid * 8)[1] = {x[4], x[5], x[6], x[7]};
    unpack8(io, lo, x);
    reinterpret_cast<float4*>(of_lo + tid * 8)[0] = {-x[0], -x[1], -x[2], -x[3]};
    reinterpret_cast<float4*>(of_lo + tid * 8)[1] = {-x[4], -x[5], -x[6], -x[7]};
    __syncthreads();
    float most = neg_inf(), least = neg_inf();
    if (tid < kHeadDim) most = column_max<kHeadDim>(buffer + tid), least = -column_max<kHeadDim>(of_lo + tid);
    bool again = rows.count > 0 && tid < p.head_dim && !(is_finite(most) && is_finite(least));
    if (__syncthreads_or(again)) {
        if (again) {  // this thread's channel alone, finite values only
            most = neg_inf(), least = -neg_inf();
            for (int32 r = 0; r < rows.count; ++r) {
                uint16 bits = *reinterpret_cast<const uint16*>(rows.at(r) + tid * 2);
                float value = to_float(io, bits);
                if (is_finite(value)) most = fmaxf(most, value), least = fminf(least, value);
            }
        }
        if (tid == 0) reduce_max_global(p.v_bad + at, 1);
    }
    if (chunks > 1) {
        if (tid < kHeadDim) {
            partial_of<kHeadDim>(p, t, t.slot, 1)[tid] = sum;
            partial_of<kHeadDim>(p, t, t.slot, 2)[tid] = most;
            partial_of<kHeadDim>(p, t, t.slot, 3)[tid] = least;
        }
        if (!arrive_is_last(p.v_ready + at, chunks, flag)) return;
    }
    if (tid < p.head_dim_pad) {
        const float* partial = partial_of<kHeadDim>(p, t, t.slot - t.index, 1) + tid;
        float total = 0.0f + sum;
        if (chunks > 1) total = 0.0f, most = neg_inf(), least = -neg_inf();
        for (int32 c0 = 0; chunks > 1 && c0 < chunks; c0 += kInFlight) {
            float part[3][kInFlight];
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const float* from = partial + int64(min_of(c0 + i, chunks - 1)) * (4 * kHeadDim);
#pragma unroll
                for (int which = 0; which < 3; ++which) part[which][i] = load_gpu(from + which * kHeadDim);
            }
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                if (c0 + i < chunks) total += part[0][i];
                most = fmaxf(most, part[1][i]);
                least = fminf(least, part[2][i]);
            }
        }
        bool real = tid < p.head_dim && most >= least;
        float mean = smooth && real ? mul_rn(div_rn(total, float(samples)), kSumUnscale) : 0.0f;
        if (!(fabsf(mean) * kMeanCounts > fmaxf(most - mean, mean - least))) mean = 0.0f;
        // A difference beyond fp32 counts as infinity.
        if (real && !is_finite(fmaxf(most - mean, mean - least))) reduce_max_global(p.v_bad + at, 1);
        float amax = real ? fmaxf(most - mean, mean - least) : 0.0f;
        // A sample of zeros says nothing of the others: anything that is not 0 will be too large.
        if (rows.log2 > 0 && tid < p.head_dim) amax = mul_rn(fmaxf(amax, kLeastAmax), headroom(p));
        float scale = value_scale(p, fminf(amax, kMaxFinite));
        // Where the first chunk had its maxima: read by all blocks of the sequence.
        partial_of<kHeadDim>(p, t, t.slot - t.index, 2)[tid] = div_rn(1.0f, scale);
        p.v_scale[at * p.head_dim_pad + tid] = scale;
        p.v_mean[at * p.head_dim_pad + tid] = mean;
    }
    __syncthreads();
    if (tid == 0) store_release(p.v_ready + at, kReady);
}
