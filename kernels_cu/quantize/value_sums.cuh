// Means of K, and means and ranges of the channels of V, in two halves: a launch sums up a sample in
// chunks; every CTA of the next one adds the chunks up. So nobody waits for a flag, and nothing has to be zeroed
// before. The same operations in the same order as quantize/reduce.cuh, and so the same bits.
//
// Partials of a chunk of V, [4][HEAD_DIM]: 1 where the channel has NaN or infinity, sum, maximum, minimum; behind those
// of all heads the sums of K's chunks, [HEAD_DIM] each.
#pragma once
#include "quantize/items.cuh"
#include "quantize/reduce.cuh"
#include "scheduler/find_slot.cuh"

constexpr int32 kSumLanes = 32;  // rows that are summed up side by side

template <int kHeadDim>
struct ValueSumsStorage {
    alignas(16) float lanes[kSumLanes * kHeadDim];
};

// Of 16-bit values of one channel, a row of kHeadDim for each lane: the largest one, or the smallest; NaN if there is
// one.
template <bool kSmallest, typename Io, int kHeadDim>
OA_DEVICE float column_range(const uint16* column) {
    float m = kSmallest ? -neg_inf() : neg_inf();
#pragma unroll
    for (int i = 0; i < kSumLanes; ++i) {
        float x = to_float(Io{}, column[i * kHeadDim]);
        m = kSmallest ? -max_nan(-m, -x) : max_nan(m, x);
    }
    return m;
}

// Slot `index` of all slots of all heads, of kBlockRows keys or a chunk of samples (kReduceK, kReduceV); heads of a
// slot are neighbours in k and v. t.rows: of the block, or the head's first. t.batch_idx: -1, packed, if no sequence
// fills it.
OA_DEVICE QuantizeItem slot_of_keys(const QuantizeParams& p, uint32 index, ItemKind kind) {
    QuantizeItem t;
    t.kind = kind;
    const bool is_v = kind == kQuantizeV || kind == kReduceV, is_block = kind == kQuantizeV || kind == kQuantizeK;
    uint32 rest = index / uint32(p.num_kv_heads), slots = is_block ? p.slots_k : p.slots_r;
    t.head = int32(index - rest * uint32(p.num_kv_heads));
    if (is_packed(p)) {
        const int32 rows = is_block ? kBlockRows : kChunkRows;
        Sequence s{0, 0};
        t.slot = int32(rest), t.index = 0, t.batch_idx = -1, t.unit = t.head;
        if (find_slot(p.cu_seqlens_k, p.seqused_k, p.batch, p.seqlen_k, t.slot, rows, t.batch_idx, s)) {
            t.index = t.slot - first_slot(s.begin, t.batch_idx, rows);
            if (t.index >= (is_block ? blocks_of(s.len) : num_chunks(num_samples(s.len)))) t.batch_idx = -1;
        }
        t.begin = s.begin, t.len = s.len;
    } else {
        t.batch_idx = int32(rest / slots);
        t.slot = t.index = int32(rest - uint32(t.batch_idx) * slots);
        t.unit = t.batch_idx * p.num_kv_heads + t.head;
        t.begin = 0, t.len = p.seqlen_k;
    }
    int64 stride_b = is_v ? p.v_stride_b : p.k_stride_b, stride_h = is_v ? p.v_stride_h : p.k_stride_h;
    t.stride_bytes = 2 * (is_v ? p.v_stride_s : p.k_stride_s);
    t.rows = input_rows(is_v ? p.v : p.k, t, stride_b, t.stride_bytes / 2, stride_h, !is_packed(p));
    if (is_block) t.rows += int64(t.index) * kBlockRows * t.stride_bytes;
    return t;
}

// Where the partial results of a head's chunks begin among those of all heads, in chunks. By all lanes.
OA_DEVICE int64 first_chunk(const QuantizeParams& p, const QuantizeItem& t) {
    return int64(t.unit) * p.slots_r + (is_packed(p) ? first_slot(t.begin, t.batch_idx, kChunkRows) : 0);
}
// Where the sum of a chunk of K is, counted as first_chunk does: this thread's channel.
template <int kHeadDim>
OA_DEVICE float* key_partial(const QuantizeParams& p, int64 chunk) {
    int64 of_values = int64(p.units) * p.slots_r * 4;
    return p.partials + (of_values + chunk) * kHeadDim + threadIdx.x;
}

// By a CTA of 4 * kHeadDim threads: chunk `index` of K or, with kRanges, of V; lane ty of 32 has 8 channels of the rows
// ty + 32 i. The CTA of a head's first chunk of V zeroes what the blocks of V count in.
template <bool kRanges, typename Io, int kHeadDim>
OA_DEVICE void sum_samples(const QuantizeParams& p, int32 index, ValueSumsStorage<kHeadDim>& s) {
    constexpr int kColumns = kHeadDim / 8, kBatch = 8;
    Io io;
    int32 tid = threadIdx.x, cc = tid % kColumns, ty = tid / kColumns;
    const QuantizeItem t = slot_of_keys(p, uint32(index), kRanges ? kReduceV : kReduceK);
    if (is_packed(p) && t.batch_idx < 0) return;
    const RowsToSum rows = chunk_of(t, num_samples(t.len), t.rows, t.stride_bytes);
    const int64 chunk = first_chunk(p, t) + t.index;
    if (kRanges && t.index == 0 && tid < p.head_dim_pad) {
        int64 at = sequence_head(t, p.num_kv_heads);
        p.v_error[at * p.head_dim_pad + tid] = 0;
        if (tid == 0) p.v_bad[at] = p.v_done[at] = 0;
    }
    bool inside = cc * 8 < p.head_dim;
    uint4 hi, lo;  // -inf and +inf: no row seen
    lo.x = lo.y = lo.z = lo.w = infinities(io);
    hi.x = hi.y = hi.z = hi.w = infinities(io) | kBothSigns;
    float sums[8] = {};
    uint64 policy = evict_last_policy();
    for (int32 r0 = ty; inside && r0 < rows.count; r0 += kSumLanes * kBatch) {
        uint4 raw[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            int32 r = r0 + i * kSumLanes;
            raw[i] = load_input(rows.at(r < rows.count ? r : r0) + cc * 16, policy);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (r0 + i * kSumLanes >= rows.count) break;
            if (kRanges) {
                hi.x = max2_nan(io, hi.x, raw[i].x), lo.x = min2_nan(io, lo.x, raw[i].x);
                hi.y = max2_nan(io, hi.y, raw[i].y), lo.y = min2_nan(io, lo.y, raw[i].y);
                hi.z = max2_nan(io, hi.z, raw[i].z), lo.z = min2_nan(io, lo.z, raw[i].z);
                hi.w = max2_nan(io, hi.w, raw[i].w), lo.w = min2_nan(io, lo.w, raw[i].w);
            }
            float x[8];
            unpack8(io, raw[i], x);
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[j] += x[j];
        }
    }
    float4* own = reinterpret_cast<float4*>(s.lanes + tid * 8);
    own[0] = {sums[0], sums[1], sums[2], sums[3]};
    own[1] = {sums[4], sums[5], sums[6], sums[7]};
    __syncthreads();
    // The first level of the tree is lanes i and i + 16.
    if (tid < 2 * kHeadDim) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float4 *low = own + i, high = low[kRowLanes * kHeadDim / 4];
            *low = {low->x + high.x, low->y + high.y, low->z + high.z, low->w + high.w};
        }
    }
    __syncthreads();
    float sum = 0.0f;
    if (tid < kHeadDim) sum = tree_sum<kHeadDim>(s.lanes + tid);
    bool again = tid < kHeadDim && !is_finite(sum);
    sum = mul_rn(sum, kSumScale);
    if (__syncthreads_or(again)) {
        if (tid < 2 * kHeadDim) sum_finite<Io, kHeadDim>(rows, p.head_dim, s.lanes);
        __syncthreads();
        if (again) sum = tree_sum<kHeadDim>(s.lanes + tid);
        __syncthreads();
    }
    if constexpr (!kRanges) {
        if (tid < kHeadDim) *key_partial<kHeadDim>(p, chunk) = sum;
        return;
    }
    uint4* ranges = reinterpret_cast<uint4*>(s.lanes);
    ranges[tid] = hi;
    ranges[tid + 4 * kHeadDim] = lo;
    __syncthreads();
    if (tid >= kHeadDim) return;
    const uint16* column = reinterpret_cast<const uint16*>(s.lanes) + tid;
    float most = column_range<false, Io, kHeadDim>(column);
    float least = column_range<true, Io, kHeadDim>(column + kSumLanes * kHeadDim);
    again = tid < p.head_dim && !(is_finite(most) && is_finite(least));
    if (again) {  // this thread's channel alone, finite values only
        most = neg_inf(), least = -neg_inf();
        for (int32 r = 0; r < rows.count; ++r) {
            float value = to_float(io, *reinterpret_cast<const uint16*>(rows.at(r) + tid * 2));
            if (is_finite(value)) most = fmaxf(most, value), least = fminf(least, value);
        }
    }
    float* to = p.partials + chunk * 4 * kHeadDim + tid;
    to[0] = again ? 1.0f : 0.0f;
    to[kHeadDim] = sum;
    to[2 * kHeadDim] = most;
    to[3 * kHeadDim] = least;
}

// Mean and scale of a channel, and whether it has NaN or infinity in the sample.
struct ChannelRange {
    float mean, scale;
    bool bad;
};

// By thread `tid` for its channel, below kHeadDim: from what sum_samples wrote of the item's head.
template <int kHeadDim>
OA_DEVICE ChannelRange channel_range(const QuantizeParams& p, const QuantizeItem& t, int32 tid) {
    constexpr int kAhead = 4;
    int32 samples = num_samples(t.len), chunks = num_chunks(samples);
    const float* partial = p.partials + first_chunk(p, t) * 4 * kHeadDim + tid;
    float total = 0.0f, most = neg_inf(), least = -neg_inf(), bad = 0.0f;
    for (int32 c0 = 0; c0 < chunks; c0 += kAhead) {
        float part[4][kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const float* from = partial + int64(min_of(c0 + i, chunks - 1)) * (4 * kHeadDim);
#pragma unroll
            for (int which = 0; which < 4; ++which) part[which][i] = load_gpu(from + which * kHeadDim);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            bad = fmaxf(bad, part[0][i]);
            if (c0 + i < chunks) total += part[1][i];
            most = fmaxf(most, part[2][i]);
            least = fminf(least, part[3][i]);
        }
    }
    bool real = tid < p.head_dim && most >= least;
    float mean = real ? mul_rn(div_rn(total, float(samples)), kSumUnscale) : 0.0f;
    if (!(fabsf(mean) * kMeanCounts > fmaxf(most - mean, mean - least))) mean = 0.0f;
    float amax = real ? fmaxf(most - mean, mean - least) : 0.0f;
    // A difference beyond fp32 counts as infinity.
    bool wrong = bad != 0.0f || !is_finite(amax);
    // A sample of zeros says nothing of the others: anything that is not 0 will be too large.
    if (sample_log2(t.len) > 0 && tid < p.head_dim) amax = mul_rn(fmaxf(amax, kLeastAmax), headroom(p));
    return {mean, value_scale(p, fminf(amax, kMaxFinite)), wrong};
}

// The mean of K in this thread's channel, below kHeadDim: from what sum_samples wrote of the item's head.
template <int kHeadDim>
OA_DEVICE float key_mean(const QuantizeParams& p, const QuantizeItem& t) {
    constexpr int kAhead = 8;
    int32 samples = num_samples(t.len), chunks = num_chunks(samples);
    const float* partial = key_partial<kHeadDim>(p, first_chunk(p, t));
    float total = 0.0f;
    for (int32 c0 = 0; c0 < chunks; c0 += kAhead) {
        float part[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) part[i] = load_gpu(partial + int64(min_of(c0 + i, chunks - 1)) * kHeadDim);
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            if (c0 + i < chunks) total += part[i];
    }
    return t.len > 0 ? mul_rn(div_rn(total, float(samples)), kSumUnscale) : 0.0f;
}
