// Merge of the partial results that attn_fwd_sm80 and attn_fwd_sm90 leave where keys are split over CTAs. Source:
// Flash-Decoding (Dao et al. 2023).
//
//   M = max m_i;  L = sum l_i 2^(m_i - M);  O = sum O_i 2^(m_i - M) / L;  LSE = ln 2 (M + log2 L), sinks added to L
//
// partial_o: [batch, heads, splits, rows, head_dim] fp32, partial_ml: [batch, heads, splits, rows, 2]: base in base-2
// units and denominator. o: [batch, seqlen_q, num_q_heads, head_dim], any strides, last dimension contiguous. Row r is
// query r / pack of query head `head * pack_heads + r % pack`, and of none where r % pack is pack_heads or more. With
// tile_rows: [splits, tiles, tile_rows], of a few tiles of queries of one head each.
//
// A thread has a column, four channels of a row; a CTA of 256 threads has 2^threads_log2 columns, and as many threads
// of each as that leaves, which take the splits in turns. The order of the sum depends on the launch alone. Rows that
// attend to nothing become O = 0, LSE = -inf (or the sink, where a sequence has them).
//
// OWN_LSE: of partial_lse, laid out as partial_ml, the LSE alone (attn_int8_sm90, whose O is divided by sums of P as
// rounded).
//
// Shared memory, bytes: the threads' sums 4096 | maxima 1024 | denominators 1024.
#include "attention/partial_sum.cuh"
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "params/attn_combine_used.cuh"
#include "ptx/cvt.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/math.cuh"
#include "scheduler/slots.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr int kThreads = 256;
    static constexpr int kWidth = 4;  // channels of a thread
    static constexpr int kUnroll = 8;  // partial results that are asked for at once
    static constexpr bool kOwnLse = OWN_LSE;  // the LSE is of other sums than O is divided by
};

struct SharedStorage {
    float4 o[Config::kThreads];
    float m[Config::kThreads], l[Config::kThreads];
};

// Whether a query of packed sequences is used, and has partial results; so have those that no sequence owns.
OA_DEVICE bool is_used(const AttnCombineUsedParams& params, int32 query) {
    const AttnCombineParams& p = params.combine;
    if (query < __ldg(p.cu_seqlens_q) || query >= __ldg(p.cu_seqlens_q + p.num_sequences)) return true;
    int32 first = 0, end = p.num_sequences;  // the sequence is the last one that does not begin behind the query
    while (end - first > 1) {
        const int32 middle = first + (end - first) / 2;
        (__ldg(p.cu_seqlens_q + middle) <= query ? first : end) = middle;
    }
    const Sequence of = used_sequence(p.cu_seqlens_q, params.seqused_q, first, p.rows);
    return query < of.begin + of.len;
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) attn_combine_sm80(
    const __grid_constant__ AttnCombineUsedParams params) {
    const AttnCombineParams& p = params.combine;
    __shared__ SharedStorage smem;
    const int32 tid = threadIdx.x, own = 1 << p.threads_log2, parts = Config::kThreads >> p.threads_log2;
    const int32 part = tid >> p.threads_log2, column = int32(blockIdx.x) * own + (tid & (own - 1));
    const int32 chunks = p.head_dim / Config::kWidth, flat = column / chunks, chunk = column - flat * chunks;
    int32 place = flat / p.rows, row = flat - place * p.rows;  // place: of the head among those of all batches
    const int64 first = int64(place) * p.num_splits * p.rows + row;
    bool active = column < p.num_columns;
    if (p.tile_rows != 0) {
        const int32 at = row / p.tile_rows, tile = p.first_tile + at;
        place = tile / p.blocks;
        row = (p.blocks - 1 - (tile - place * p.blocks)) * p.tile_rows + (row - at * p.tile_rows);
        active = active && row < p.num_queries;
    }
    const int32 query = row / p.pack, own_head = row - query * p.pack;
    active = active && own_head < p.pack_heads;
    wait_for_kernel_ahead();
    // Others are cleared behind this kernel, or belong to another launch.
    if (params.seqused_q != nullptr) active = active && is_used(params, query);
    PartialSum<Config::kWidth> sum;
    auto row_of = [&](int32 split) { return first + int64(split) * p.rows; };
    if (active)
        add_parts<Config::kUnroll>(sum, part, parts, p.num_splits, row_of, p.partial_ml, p.partial_o, p.head_dim,
                                   chunk * Config::kWidth);
    if (parts > 1) {
        smem.o[tid] = make_float4(sum.o[0], sum.o[1], sum.o[2], sum.o[3]);
        smem.m[tid] = sum.m, smem.l[tid] = sum.l;
        __syncthreads();
        if (part != 0) return;
        for (int32 other = tid + own; other < Config::kThreads; other += own) {
            float4 x = smem.o[other];
            const float2 ml[1] = {make_float2(smem.m[other], smem.l[other])};
            const float o[1][Config::kWidth] = {{x.x, x.y, x.z, x.w}};
            sum.add(ml, o);
        }
    }
    if (!active) return;
    int32 batch_idx = place / p.heads, head = (place - batch_idx * p.heads) * p.pack_heads + own_head;
    const bool owned = p.cu_seqlens_q == nullptr ||
                       (query >= __ldg(p.cu_seqlens_q) && query < __ldg(p.cu_seqlens_q + p.num_sequences));
    const float sink = owned ? sink_log2<Config::Io>(p.sinks, p.sinks_kind, head) : neg_inf();
    RowResult result = finish_row(sum.m, sum.l, sink);
    uint16* to = p.o + batch_idx * p.o_stride_b + query * p.o_stride_s + head * p.o_stride_h + chunk * Config::kWidth;
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack2(Config::Io{}, sum.o[0] * result.o_scale, sum.o[1] * result.o_scale),
                   pack2(Config::Io{}, sum.o[2] * result.o_scale, sum.o[3] * result.o_scale));
    if constexpr (Config::kOwnLse) {
        if (chunk == 0) {
            PartialSum<1> sums;
            add_parts<Config::kUnroll>(sums, 0, 1, p.num_splits, row_of, p.partial_lse, nullptr, 0, 0);
            result.lse = finish_row(sums.m, sums.l, sink).lse;
        }
    }
    if (p.lse != nullptr && chunk == 0) p.lse[batch_idx * p.lse_stride_b + head * p.lse_stride_h + query] = result.lse;
}
