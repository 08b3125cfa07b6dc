// Quantization of Q and K to e4m3 where nothing but a rotation comes before it: one scale for 128 rows.
//
//   scale = amax(128 rows of R x) / 448;  out = e4m3(R x * (1 / scale));  R: quantize/rotation.cuh, or 1
//
// q: [batch, seqlen_q, num_q_heads, head_dim], k alike, fp16 or bf16, any strides with 16-byte rows. out: [batch,
// heads, rows, head_dim_pad] e4m3, scale: [batch, heads, blocks] fp32. The bits are those of quantize_sm80, which does
// all else (means, packed sequences); a row that holds NaN or infinity does not count for the scale and becomes NaN.
//
// One CTA of 4 * HEAD_DIM threads takes 128 rows of a head; kLanes = HEAD_DIM / 32 lanes have a row, lane l units l, l
// + kLanes, .. of 8 channels. So strides 1, 2, 4 of the transform and the largest two are within a lane, and loads are
// of whole sectors. The others exchange half of a lane's channels each. Bound by memory.
//
// SUMS: CTAs in front of these sum up samples of V and find the ranges of its channels (quantize/value_sums.cuh), for
// quantize_values, which may be launched while this kernel ends.
//
// Shared memory (static): largest magnitudes of the warps | with SUMS sums of V.
#include "params/quantize_fp8.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/l2.cuh"
#include "ptx/types.cuh"
#include "quantize/rotation.cuh"
#include "quantize/sampling.cuh"
#if SUMS
#include "quantize/value_sums.cuh"
#endif

constexpr int kHeadDim = HEAD_DIM, kBlock = 128, kLanes = kHeadDim / 32, kThreads = kBlock * kLanes, kUnits = 4;

#if SUMS
using Params = QuantizeFp8SumsParams;
OA_DEVICE const QuantizeFp8Params& rows_of(const Params& params) { return params.rows; }
#else
using Params = QuantizeFp8Params;
OA_DEVICE const QuantizeFp8Params& rows_of(const Params& params) { return params; }
#endif

// 128 rows of a head of Q or K.
struct BlockOfRows {
    const RowsToFp8& rows;
    int32 batch_idx, head, first;  // first: row

    OA_DEVICE BlockOfRows(const QuantizeFp8Params& p, uint32 index) : rows(index < uint32(p.q.items) ? p.q : p.k) {
        // All heads of a block of rows first: they are neighbours in the input.
        uint32 item = index < uint32(p.q.items) ? index : index - uint32(p.q.items), rest = item / uint32(rows.heads);
        head = int32(item - rest * uint32(rows.heads));
        batch_idx = int32(rest / uint32(rows.blocks));
        first = int32(rest - uint32(batch_idx) * uint32(rows.blocks)) * kBlock;
    }
    OA_DEVICE const uint8* at(int32 row) const {
        return rows.x + 2 * (batch_idx * rows.stride_b + head * rows.stride_h + int64(row) * rows.stride_s);
    }
};

// How many blocks further the rows are that a CTA has L2 fetch: half as many as run at once on an H200.
constexpr uint32 kAhead = 66 * CTAS;

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) quantize_fp8_sm80(const __grid_constant__ Params params) {
    __shared__ float most_of[kThreads / 32];
    const QuantizeFp8Params& p = rows_of(params);
    uint32 block_idx = blockIdx.x;
#if SUMS
    __shared__ ValueSumsStorage<kHeadDim> sums;
    launch_dependents();
    if (block_idx < uint32(params.chunks)) {
        sum_samples<true, IO_TYPE, kHeadDim>(params.values, int32(block_idx), sums);
        return;
    }
    block_idx -= uint32(params.chunks);
#endif
    int32 tid = threadIdx.x, row = tid / kLanes, lane = tid % kLanes;
    const bool whole = p.rotation.channels == kHeadDim;  // rows are one block of the transform
    // The transform leaves the memory idle, which CTAs that only convert do not.
    if (whole && tid < kThreads / 2 && block_idx + kAhead < uint32(p.q.items) + uint32(p.k.items)) {
        const BlockOfRows ahead(p, block_idx + kAhead);
        constexpr int kLines = kHeadDim / 64;  // of 128 bytes, of a row
        int32 at = ahead.first + tid / kLines, line = tid % kLines;
        if (at < ahead.rows.rows && line * 64 < p.head_dim) prefetch_l2(ahead.at(at) + line * 128);
    }
    const BlockOfRows own(p, block_idx);
    const RowsToFp8& rows = own.rows;
    int32 first = own.first;
    bool exists = first + row < rows.rows;
    const uint8* from = own.at(first + row) + lane * 16;
    uint64 policy = evict_first_policy();
    float x[kUnits][8];
    {
        uint4 raw[kUnits];
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            bool inside = exists && (u * kLanes + lane) * 8 < p.head_dim;
            raw[u] = inside ? load_input(from + u * kLanes * 16, policy) : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            const uint32 words[4] = {raw[u].x, raw[u].y, raw[u].z, raw[u].w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                x[u][2 * w] = low_float(IO_TYPE{}, words[w]);
                x[u][2 * w + 1] = high_float(IO_TYPE{}, words[w]);
            }
        }
    }
    if (whole) {
        rotate_row<kLanes>(x, p.rotation, uint32(lane));
    } else if (p.rotation.channels != 0) {
        rotate_blocks<kLanes>(x, p.rotation, uint32(lane));
    }
    float most = 0.0f;
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
        for (int j = 0; j < 8; ++j) most = max_abs_nan(most, x[u][j]);
#pragma unroll
    for (int bit = 1; bit < kLanes; bit *= 2) most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, bit));
    bool bad = !is_finite(most);
    most = bad ? 0.0f : most;
#pragma unroll
    for (int bit = kLanes; bit < 32; bit *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, bit));
    if (tid % 32 == 0) most_of[tid / 32] = most;
    __syncthreads();
    most = most_of[tid % (kThreads / 32)];
#pragma unroll
    for (int bit = 1; bit < kThreads / 32; bit *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, bit));
    float scale = most >= kLeastAmax ? div_rn(most, 448.0f) : 1.0f, inverse = div_rn(1.0f, scale);
    int64 of_head = int64(own.batch_idx) * rows.heads + own.head;
    if (tid == 0) rows.scale[of_head * rows.blocks + first / kBlock] = scale;
    if (!exists) return;
    uint8* to = rows.out + (of_head * rows.rows + first + row) * p.head_dim_pad;
    if (whole) {
#pragma unroll
        for (int pair = 0; pair < kUnits / 2; ++pair) {
            uint2 low = to_e4m3(x[2 * pair], inverse), high = to_e4m3(x[2 * pair + 1], inverse);
            if (bad) low = high = {kE4m3Nans, kE4m3Nans};
            *reinterpret_cast<uint4*>(to + first_unit_of<kLanes>(uint32(lane), pair) * 8) =
                uint4{low.x, low.y, high.x, high.y};
        }
        return;
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        uint2 codes = bad ? uint2{kE4m3Nans, kE4m3Nans} : to_e4m3(x[u], inverse);
        if ((u * kLanes + lane) * 8 < p.head_dim_pad) *reinterpret_cast<uint2*>(to + (u * kLanes + lane) * 8) = codes;
    }
}
