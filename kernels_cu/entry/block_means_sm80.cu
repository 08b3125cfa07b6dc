// Mean and similarity of each block of rows of q and k, in one pass: what choose_blocks_sm80 predicts from.
// Source: SpargeAttn (Zhang et al. 2025), section 3.2.
//
//   mean = sum(x_i) / n;  similarity = mean of cos(x_i, x_j) over all pairs = |sum(x_i / |x_i|) / n|^2
//
// A row whose square is 0 in fp32 has no direction and counts as a cosine of 0; a row whose square is not finite makes
// its block's similarity NaN. A CTA takes a block: a row has HEAD_DIM / 8 lanes with 16 bytes each. Bound by bytes.
// Shared memory, static: sums of each warp [2][4][HEAD_DIM * 4] | of squares [4 * 4].
#include "params/sparse_blocks.cuh"
#include "ptx/cvt.cuh"
#include "ptx/rsqrt.cuh"
#include "ptx/types.cuh"

using Io = IO_TYPE;
constexpr int kHeadDim = HEAD_DIM, kWarps = 4, kThreads = 32 * kWarps;
constexpr int kLanes = kHeadDim / 8;     // of a row
constexpr int kRowsAStep = 32 / kLanes;  // of a warp
constexpr float kLeastSquare = 1.17549435e-38f;  // the smallest normal number
constexpr int kUnroll = 8;               // steps whose loads are under way at the same time
static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "lanes of a row are a power of two");

// One side of the call.
struct Side {
    const uint16* x;
    float* means;
    float* similar;
    int64 stride_b, stride_s, stride_h;
    int64 mean_stride;  // between channels of a mean
    int32 heads, seqlen, rows, blocks;
};

OA_DEVICE float sum_of_lanes(float x, int first, int last) {
    for (int mask = first; mask <= last; mask <<= 1) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

extern "C" __global__ void __launch_bounds__(kThreads) block_means_sm80(const __grid_constant__ BlockMeansParams p) {
    __shared__ float sums[2][kWarps][kHeadDim];
    __shared__ float squares[kWarps];
    const bool of_k = int32(blockIdx.x) >= p.q_ctas;
    const Side s = of_k ? Side{static_cast<const uint16*>(p.k),
                               p.k_means,
                               p.k_similar,
                               p.k_stride_b,
                               p.k_stride_s,
                               p.k_stride_h,
                               p.k_blocks,
                               p.num_kv_heads,
                               p.seqlen_k,
                               p.block_k,
                               p.k_blocks}
                        : Side{static_cast<const uint16*>(p.q),
                               p.q_means,
                               p.q_similar,
                               p.q_stride_b,
                               p.q_stride_s,
                               p.q_stride_h,
                               1,
                               p.num_q_heads,
                               p.seqlen_q,
                               p.block_q,
                               p.q_blocks};
    const int32 cta = int32(blockIdx.x) - (of_k ? p.q_ctas : 0);
    const int32 head = cta / s.blocks, block = cta - head * s.blocks, b = head / s.heads;
    const int64 first = int64(block) * s.rows;
    const int32 count = int32(min_of<int64>(s.rows, s.seqlen - first));
    const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % kLanes * 8;
    const int32 own_row = warp * kRowsAStep + lane / kLanes;
    const uint16* x = s.x + b * s.stride_b + (head - b * s.heads) * s.stride_h + first * s.stride_s + column;

    float mean[8] = {}, direction[8] = {};
    constexpr int kStep = kWarps * kRowsAStep;
    for (int32 begin = 0; begin < count; begin += kStep * kUnroll) {
        uint4 loaded[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int32 row = begin + u * kStep + own_row;
            loaded[u] = make_uint4(0, 0, 0, 0);
            if (row < count && column < p.head_dim) loaded[u] = *reinterpret_cast<const uint4*>(x + row * s.stride_s);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const uint32 words[4] = {loaded[u].x, loaded[u].y, loaded[u].z, loaded[u].w};
            float f[8], square = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 two = unpack2(Io{}, words[i]);
                f[2 * i] = two.x;
                f[2 * i + 1] = two.y;
                square = fmaf(two.x, two.x, fmaf(two.y, two.y, square));
            }
            square = sum_of_lanes(square, 1, kLanes / 2);
            // Infinity minus itself: not a number, as is a row that has one.
            const float inverse = square < kLeastSquare ? 0.0f : rsqrt_approx(square) + (square - square);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                mean[i] += f[i];
                direction[i] = fmaf(f[i], inverse, direction[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        mean[i] = sum_of_lanes(mean[i], kLanes, 16);
        direction[i] = sum_of_lanes(direction[i], kLanes, 16);
        if (lane < kLanes) {
            sums[0][warp][column + i] = mean[i];
            sums[1][warp][column + i] = direction[i];
        }
    }
    __syncthreads();
    const float part = 1.0f / float(count);
    float square = 0.0f;
    for (int32 c = threadIdx.x; c < p.head_dim; c += kThreads) {
        float total[2] = {};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            total[0] += sums[0][w][c];
            total[1] += sums[1][w][c];
        }
        const int64 at =
            s.mean_stride == 1 ? int64(cta) * p.head_dim + c : (int64(head) * p.head_dim + c) * s.mean_stride + block;
        s.means[at] = total[0] * part;
        square = fmaf(total[1] * part, total[1] * part, square);
    }
    square = sum_of_lanes(square, 1, 16);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    if (threadIdx.x == 0) s.similar[cta] = squares[0] + squares[1] + squares[2] + squares[3];
}
