// Merge of the partial results that decode_sm80 leaves. Source: Flash-Decoding (Dao et al. 2023).
//
//   M = max m_i;  L = sum l_i 2^(m_i - M);  O = sum O_i 2^(m_i - M) / L;  LSE = ln 2 (M + log2 L), sinks added to L
//
// partial_o: [slots, ROWS, HEAD_DIM] fp32, partial_ml: [slots, ROWS, 2]: maximum in base-2 units and denominator.
//
// A CTA of 8 warps has rows of one segment (sequence, kv head, block of query rows); combine_split warps (1, 2, 4, 8)
// have a row (query token, query head), a lane HEAD_DIM / 32 channels. Which splits a segment has, the kernel works out
// as decode_sm80 does (decode/plan.cuh). Segments that one CTA of decode_sm80 had as a whole are done already; those
// without keys become O = 0, LSE = -inf (or the sink) here. A warp asks for kUnroll partial results at once and adds
// them with a running maximum: one trip to L2 where there are no more. Bits depend on the plan alone; with fixed splits
// on the sequence alone.
//
// Shared memory, bytes: the warps' sums 8 * HEAD_DIM * 4 | maxima, denominators 64 | scan.
#include "attention/partial_sum.cuh"
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/latent.cuh"
#include "decode/plan.cuh"
#include "decode/rows.cuh"
#include "params/decode.cuh"
#include "ptx/cvt.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/math.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kRows = ROWS;  // of a segment; kAllRows: of a latent cache, see decode/latent.cuh
    static constexpr int kWarps = 8;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kWidth = kHeadDim / 32;  // channels of a lane
    static constexpr int kUnroll = kWidth >= 8 ? 32 / kWidth : 8;  // partial results that are asked for at once
};

struct SharedStorage {
    float o[Config::kWarps][Config::kHeadDim];
    float m[Config::kWarps], l[Config::kWarps];
    ScanStorage<Config::kThreads> scan;
};

template <int kWidth>
OA_DEVICE void load_channels(float (&x)[kWidth], const float* from) {
    if constexpr (kWidth == 2) {
        float2 v = *reinterpret_cast<const float2*>(from);
        x[0] = v.x, x[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < kWidth; i += 4) {
            float4 v = *reinterpret_cast<const float4*>(from + i);
            x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
        }
    }
}
// to: of the first one; count: that there are from it on, a multiple of 8.
template <int kWidth>
OA_DEVICE void store_channels(uint16* to, const float (&x)[kWidth], float scale, int32 count) {
    if (count <= 0) return;
    uint32 w[kWidth / 2];
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) w[i] = pack2(Config::Io{}, x[2 * i] * scale, x[2 * i + 1] * scale);
    if constexpr (kWidth == 2) {
        *reinterpret_cast<uint32*>(to) = w[0];
    } else if constexpr (kWidth == 4) {
        *reinterpret_cast<uint2*>(to) = make_uint2(w[0], w[1]);
    } else {
#pragma unroll
        for (int i = 0; i < kWidth / 2; i += 4)
            if (2 * i < count) *reinterpret_cast<uint4*>(to + 2 * i) = make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]);
    }
}

// O and LSE of rows of packed queries, those of all heads, to a constant: a warp a row and head. `warp` of `warps`.
OA_DEVICE void fill_rows(const DecodeParams& p, int32 first, int32 count, float o, float lse, int32 warp, int32 warps) {
    const int lane = threadIdx.x & 31;
    for (int64 at = warp; at < int64(count) * p.num_q_heads; at += warps) {
        int32 row = int32(at / p.num_q_heads), head = int32(at - int64(row) * p.num_q_heads);
        row += first;
        float values[Config::kWidth];
#pragma unroll
        for (int e = 0; e < Config::kWidth; ++e) values[e] = o;
        uint16* to = p.o + row * p.o_stride_s + head * p.o_stride_h;
        store_channels(to + lane * Config::kWidth, values, 1.0f, p.head_dim - lane * Config::kWidth);
        if (p.lse != nullptr && lane == 0) p.lse[int64(head) * p.total_queries + row] = lse;
    }
}

// Rows of packed queries that decode_sm80 does not compute: 0 and -inf in those that no sequence owns, by the CTAs of
// one sequence more than there are; NaN in those of a sequence with more queries than the caller has said.
OA_DEVICE void fill_others(const DecodeParams& p, int32 sequence, int32 segment, int32 segments) {
    const int32 warp = (segment * int32(gridDim.y) + int32(blockIdx.y)) * Config::kWarps + int32(threadIdx.x >> 5);
    const int32 warps = segments * int32(gridDim.y) * Config::kWarps;
    auto edge = [&](int32 b) { return min_of(max_of(p.cu_seqlens_q[b], 0), p.total_queries); };
    if (sequence == p.batch) {
        const int32 last = edge(p.batch);
        fill_rows(p, 0, edge(0), 0.0f, neg_inf(), warp, warps);
        fill_rows(p, last, p.total_queries - last, 0.0f, neg_inf(), warp, warps);
    } else if (p.cu_seqlens_q != nullptr && p.has_company == 0) {
        const int32 first = edge(sequence), count = edge(sequence + 1) - first;
        if (count > p.q_len) fill_rows(p, first, count, quiet_nan(), quiet_nan(), warp, warps);
    }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) decode_combine_sm80(const
                                                                                   __grid_constant__ DecodeParams p) {
    __shared__ SharedStorage smem;
    int tid = threadIdx.x, lane = tid & 31, warp_idx = tid >> 5;
    constexpr bool kIsLatent = Config::kRows == kAllRows;
    const int32 row_blocks = kIsLatent ? 1 : p.num_row_blocks;
    const int32 slot_rows = kIsLatent ? p.num_row_blocks * kLatentRows : Config::kRows;
    int32 segments = p.num_kv_heads * row_blocks;
    int32 sequence = int32(blockIdx.x) / segments, segment = int32(blockIdx.x) - sequence * segments;
    int32 kv_head = segment / row_blocks, row_block = segment - kv_head * row_blocks;
    int32 split = p.combine_split, part = warp_idx & (split - 1);
    int32 row = (int32(blockIdx.y) * Config::kWarps + warp_idx) / split;
    int32 flat = row_block * Config::kRows + row;
    int32 token = token_of(p, flat), head = kv_head * p.group + (flat - token * p.group);
    fill_others(p, sequence, segment, segments);
    if (sequence == p.batch) {
        wait_for_kernel_ahead();  // as every CTA
        return;
    }
    const KeySpan span = key_span<Config::kRows>(p, sequence);
    bool active = row < slot_rows && token < span.queries.count;

    // Of a sequence's queries there may be fewer blocks than of the longest one's.
    int32 chunks = row_block < span.row_blocks ? span.chunks : 0, count = 0;
    int64 first_slot = 0, later_slots = 0;  // slots of partial result 0, and of i > 0: later_slots + i * step
    int32 step = p.fixed_splits ? 1 : 2;
    Scan<Config::kThreads, Config::kRows> scan(p, smem.scan);
    Partition partition(scan.total, p);
    if (chunks > 0) {
        scan.before_sequence(p, sequence, smem.scan);
        int32 begin = smem.scan.before + (kv_head * span.row_blocks + row_block) * chunks;
        if (p.fixed_splits) {
            count = chunks;
            first_slot = later_slots = begin;
        } else {
            int32 worker = partition.worker_of(begin);
            count = partition.worker_of(begin + chunks - 1) - worker + 1;
            later_slots = 2 * worker;
            first_slot = partial_slot(p, partition, worker, begin, begin);
        }
    }
    wait_for_kernel_ahead();  // it was launched early, and has worked out the plan meanwhile
    if (count == 1) return;  // decode_sm80 wrote it
    PartialSum<Config::kWidth> total;
    for (int32 i = part; active && i < count; i += split * Config::kUnroll) {
        float2 ml[Config::kUnroll];
        float o[Config::kUnroll][Config::kWidth];
#pragma unroll
        for (int u = 0; u < Config::kUnroll; ++u) {
            int32 at = i + u * split;
            int64 slot_row = (at == 0 ? first_slot : later_slots + int64(at) * step) * slot_rows + row;
            ml[u] = make_float2(kLowest, 0.0f);
#pragma unroll
            for (int e = 0; e < Config::kWidth; ++e) o[u][e] = 0.0f;
            if (at >= count) continue;
            ml[u] = *reinterpret_cast<const float2*>(p.partial_ml + 2 * slot_row);
            load_channels(o[u], p.partial_o + slot_row * Config::kHeadDim + lane * Config::kWidth);
        }
        total.add(ml, o);
    }
    float m = total.m, l = total.l;
    float (&sum)[Config::kWidth] = total.o;
    if (split > 1) {
#pragma unroll
        for (int e = 0; e < Config::kWidth; ++e) smem.o[warp_idx][lane * Config::kWidth + e] = sum[e];
        if (lane == 0) smem.m[warp_idx] = m, smem.l[warp_idx] = l;
        __syncthreads();
        if (part != 0) return;
        for (int w = warp_idx + 1; w < warp_idx + split; ++w) m = fmaxf(m, smem.m[w]);
        l = 0.0f;
#pragma unroll
        for (int e = 0; e < Config::kWidth; ++e) sum[e] = 0.0f;
        for (int w = warp_idx; w < warp_idx + split; ++w) {
            float weight = exp2_approx(smem.m[w] - m);
            l = fmaf(smem.l[w], weight, l);
#pragma unroll
            for (int e = 0; e < Config::kWidth; ++e)
                sum[e] = fmaf(smem.o[w][lane * Config::kWidth + e], weight, sum[e]);
        }
    }
    if (!active) return;
    RowResult result = finish_row(m, l, sink_log2<Config::Io>(p.sinks, p.sinks_kind, head));
    uint16* to = p.o + sequence * p.o_stride_b + (span.queries.first + token) * p.o_stride_s + head * p.o_stride_h;
    store_channels(to + lane * Config::kWidth, sum, result.o_scale, p.head_dim - lane * Config::kWidth);
    if (p.lse != nullptr && lane == 0) p.lse[lse_place(p, sequence, head, span.queries.first, token)] = result.lse;
}
