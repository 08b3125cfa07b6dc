// Merge of the partial results that attn_fwd_sm90 leaves of packed sequences whose keys are split over CTAs
// (scheduler/stream_k.cuh). Source: Flash-Decoding (Dao et al. 2023).
//
//   M = max m_i;  L = sum l_i 2^(m_i - M);  O = sum O_i 2^(m_i - M) / L;  LSE = ln 2 (M + log2 L), sinks added to L
//
// o: [rows, num_q_heads, head_dim], any strides, last dimension contiguous; lse: [heads, rows]. Of a tile that is in
// several shares the parts are at equal distances: slot 1 of the CTA that it begins in, slot 0 of all that follow.
// Rows that attend to nothing become O = 0, LSE = -inf (or the sink).
//
// A CTA has kRows rows (blockIdx.x) of the tiles that go on behind the shares of some CTAs of the kernel ahead, from
// blockIdx.y on. A thread has four channels of a row. The order of the sum depends on lengths and launch alone.
//
// Shared memory: none.
#include "attention/partial_sum.cuh"
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "params/attn_combine.cuh"
#include "ptx/cvt.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/math.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr int kThreads = 256;
    static constexpr int kRows = 8;    // of a CTA
    static constexpr int kWidth = 4;   // channels of a thread
    static constexpr int kUnroll = 8;  // partial results that are asked for at once
};

// Among partial results: the first row of part `part` of a tile.
OA_DEVICE int64 first_row_of(const AttnCombinePackedParams& p, const CutTile& t, int32 first_cta, int32 of_class,
                             int32 part) {
    const int32 cta = first_cta + part * t.distance;
    return int64((cta * kStreamKClasses + of_class) * kStreamKSlots + (part == 0 ? 1 : 0)) * p.block_m;
}

// Rows of the tile that goes on behind the share of class `of_class` of CTA `first_cta`.
OA_DEVICE void merge(const AttnCombinePackedParams& p, const CutTile& t, int32 first_cta, int32 of_class) {
    const int32 first_row = int32(blockIdx.x) * Config::kRows;
    if (t.m0 + first_row >= t.seqlen_q) return;
    const int32 chunks = p.head_dim / Config::kWidth;
    for (int32 column = threadIdx.x; column < Config::kRows * chunks; column += Config::kThreads) {
        const int32 of_rows = column / chunks, chunk = column - of_rows * chunks;
        const int32 row_of_tile = first_row + of_rows, row = t.m0 + row_of_tile;
        const int32 of_query = row / p.pack, own_head = row - of_query * p.pack;
        if (row >= t.seqlen_q || own_head >= p.pack_heads) continue;
        auto row_of = [&](int32 part) { return first_row_of(p, t, first_cta, of_class, part) + row_of_tile; };
        PartialSum<Config::kWidth> sum;
        add_parts<Config::kUnroll>(sum, 0, 1, t.num_parts, row_of, p.partial_ml, p.partial_o, p.head_dim,
                                   chunk * Config::kWidth);
        const int32 head = t.head_idx * p.pack_heads + own_head, query = t.q_begin + of_query;
        const float sink = t.exists ? sink_log2<Config::Io>(p.sinks, p.sinks_kind, head) : neg_inf();
        const RowResult result = finish_row(sum.m, sum.l, sink);
        uint16* to = p.o + query * p.o_stride_s + head * p.o_stride_h + chunk * Config::kWidth;
        *reinterpret_cast<uint2*>(to) =
            make_uint2(pack2(Config::Io{}, sum.o[0] * result.o_scale, sum.o[1] * result.o_scale),
                       pack2(Config::Io{}, sum.o[2] * result.o_scale, sum.o[3] * result.o_scale));
        if (p.lse == nullptr || chunk != 0) continue;
        float lse = result.lse;
        if (p.partial_lse != nullptr) {
            PartialSum<1> sums;
            add_parts<1>(sums, 0, 1, t.num_parts, row_of, p.partial_lse, nullptr, 0, 0);
            lse = finish_row(sums.m, sums.l, sink).lse;
        }
        p.lse[head * p.lse_stride_h + query] = lse;
    }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) attn_combine_packed_sm90(
    const __grid_constant__ AttnCombinePackedParams p) {
    wait_for_kernel_ahead();
#pragma unroll 1
    for (int32 cta = blockIdx.y; cta < p.num_ctas; cta += gridDim.y) {
        // All classes at once: most have nothing.
        const CutTile* cuts = p.cuts + cta * kStreamKClasses;
        uint32 cut = 0;
#pragma unroll
        for (int32 i = 0; i < kStreamKClasses; ++i) cut |= uint32(cuts[i].num_parts > 0) << i;
#pragma unroll 1
        for (; cut != 0; cut &= cut - 1) {
            const int32 i = __ffs(int(cut)) - 1;
            merge(p, cuts[i], cta, i);
        }
    }
}
