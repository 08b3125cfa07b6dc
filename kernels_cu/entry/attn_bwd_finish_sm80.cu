// What is left to do behind the backward of attention.
//
//   dq = softmax_scale * dq_accum, rounded to 16 bits;  dsinks = sum of sink_partials, in their order
//
// dq: [batch, seqlen_q, num_q_heads, head_dim], any strides, last dimension contiguous, 16-byte rows; packed: [rows,
// heads, head_dim]. dq_accum: padded rows (params/attn_bwd.cuh); kQuads: of each 16 columns those that a lane of
// mma.sync has lie together: column 8 i + 2 j + x at 4 j + 2 i + x; kFragments: as attn_bwd_sm90 leaves it.
//
// The first num_q_heads CTAs sum up dsinks, if it is wanted; one CTA each takes 128 padded rows of one query head, if
// there is a dq_accum. Bound by memory.
#include "params/attn_bwd.cuh"
#include "ptx/cvt.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/types.cuh"
#include "scheduler/padded_rows.cuh"

constexpr int kThreads = 256;
constexpr bool kQuads = QUADS, kFragments = FRAGMENTS;

OA_DEVICE void sum_sinks(const AttnBwdParams& p, int32 head) {
    __shared__ float sums[kThreads];
    int32 blocks = int32(p.rows_stride_h / kBlockRows);
    float sum = 0.0f;
    for (int32 i = threadIdx.x; i < blocks; i += kThreads) sum += p.sink_partials[int64(head) * blocks + i];
    sums[threadIdx.x] = sum;
#pragma unroll
    for (int width = kThreads / 2; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
    }
    if (threadIdx.x == 0) p.dsinks[head] = sums[0];
}

// Columns 8 * chunk to 8 * chunk + 7 of a row.
OA_DEVICE void load_chunk(const float* row, int32 chunk, float (&x)[8]) {
    if (kQuads) {
        const float* half = row + chunk / 2 * 16 + chunk % 2 * 2;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 two = *reinterpret_cast<const float2*>(half + 4 * j);
            x[2 * j] = two.x, x[2 * j + 1] = two.y;
        }
    } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float4 four = *reinterpret_cast<const float4*>(row + 8 * chunk + 4 * j);
            x[4 * j] = four.x, x[4 * j + 1] = four.y, x[4 * j + 2] = four.z, x[4 * j + 3] = four.w;
        }
    }
}

OA_DEVICE void store_chunk(uint16* dq, const float (&x)[8], float scale) {
    *reinterpret_cast<uint4*>(dq) = {
        pack2(IO_TYPE{}, x[0] * scale, x[1] * scale), pack2(IO_TYPE{}, x[2] * scale, x[3] * scale),
        pack2(IO_TYPE{}, x[4] * scale, x[5] * scale), pack2(IO_TYPE{}, x[6] * scale, x[7] * scale)};
}

// Fragments hold rows r and r + 8 side by side: a lane takes 8 columns of both, a warp 16 rows of 32 columns.
OA_DEVICE void finish_fragments(const AttnBwdParams& p, const float* block, uint16* dq, int32 rows) {
    const int32 lane = threadIdx.x & 31, units = kBlockRows / 16 * (p.dq_columns / 32), half = p.dq_columns / 2;
    for (int32 unit = threadIdx.x / 32; unit < units; unit += kThreads / 32) {
        const int32 group = unit % (kBlockRows / 16), column = unit / (kBlockRows / 16) * 32 + (lane & 3) * 8;
        if (group * 16 >= rows) continue;  // nobody may have written there
        const int32 row = group * 16 + (lane >> 2);
        const float* from = block + int64(row / 64) * 64 * p.dq_columns + column / half * (64 * half) +
                            column % half / 8 * 512 + (row % 64 / 16 * 32 + row % 8 * 4) * 4;
        float x[2][8];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 four = *reinterpret_cast<const float4*>(from + 4 * j);
            x[0][2 * j] = four.x, x[0][2 * j + 1] = four.y, x[1][2 * j] = four.z, x[1][2 * j + 1] = four.w;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (row + 8 * i < rows && column < p.fwd.head_dim)
                store_chunk(dq + (row + 8 * i) * p.dq_stride_s + column, x[i], p.fwd.softmax_scale);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) attn_bwd_finish_sm80(const __grid_constant__ AttnBwdParams p) {
    int32 item = blockIdx.x;
    wait_for_kernel_ahead();
    if (p.dsinks != nullptr) {
        if (item < p.fwd.num_q_heads) return sum_sinks(p, item);
        item -= p.fwd.num_q_heads;
    }
    int32 blocks = int32(p.rows_stride_h / kBlockRows), head = item / blocks, block = item - head * blocks;
    PaddedBlock at = padded_block(p.fwd, block);
    int64 first = head * p.rows_stride_h + int64(block) * kBlockRows;
    int32 batch_idx = p.fwd.cu_seqlens_q == nullptr ? at.sequence : 0;  // packed tensors have no batch
    uint16* dq = p.dq + batch_idx * p.dq_stride_b + head * p.dq_stride_h;
    int32 chunks = p.fwd.head_dim / 8, rows = min_of(at.seqlen_q - at.row, kBlockRows);
    dq += (int64(at.q_begin) + at.row) * p.dq_stride_s;
    const float* sums = p.dq_accum + first * p.dq_columns;
    if constexpr (kFragments) {
        finish_fragments(p, sums, dq, rows);
    } else {
        for (int32 i = threadIdx.x; i < rows * chunks; i += kThreads) {
            int32 r = i / chunks, chunk = i - r * chunks;
            float x[8];
            load_chunk(sums + int64(r) * p.dq_columns, chunk, x);
            store_chunk(dq + r * p.dq_stride_s + chunk * 8, x, p.fwd.softmax_scale);
        }
    }
}
