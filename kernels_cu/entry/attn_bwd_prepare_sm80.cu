// What the backward of attention needs of each query row, before it, and what it adds to, cleared.
//
//   lse2 = lse * log2(e);  delta = rowsum(do * o) - dlse;  sink_partials = -sum over rows of exp(sink - lse) * delta
//
// do, o: [batch, seqlen_q, num_q_heads, head_dim], any strides, last dimension contiguous, 16-byte rows; packed: [rows,
// heads, head_dim]. lse2, delta, dq_accum: padded rows (params/attn_bwd.cuh). Rows that attend to nothing, and padding,
// get lse2 = +inf, which makes P = exp2(S - lse2) vanish, and delta = 0, whatever o and do hold. Where do is not finite
// there, stray_do says so (attention/bwd_stray.cuh).
//
// One CTA takes 128 padded rows of one query head; 8 lanes take a row. Besides, it clears these rows of dq_accum, the
// rows of dq of the same number that belong to no packed sequence, and its part of dmask and of counters. Bound by
// memory.
#include "attention/mask.cuh"
#include "attention/sinks.cuh"
#include "params/attn_bwd.cuh"
#include "ptx/cvt.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/math.cuh"
#include "ptx/min_nan.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/padded_rows.cuh"

constexpr int kThreads = 256, kLanes = 8, kRowsPerStep = kThreads / kLanes;
// Below this an LSE is a number of the mask's that has swallowed scores and log(n), and is itself a few digits off: P
// of keys with this number would be anything. With lse2 lowered by four of its last digits P, which is at most 1, is 1
// for all of them, as exp(S - LSE) says, and 0 for keys with a lower number.
constexpr float kLeastLse = -0x1p26f, kLowered = 1.0f + 0x1p-21f;

OA_DEVICE float dot8(uint4 a, uint4 b) {
    float sum = 0.0f;
    const uint32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 u = unpack2(IO_TYPE{}, x[i]), v = unpack2(IO_TYPE{}, y[i]);
        sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
    return sum;
}

// Whether none of 8 values of do is NaN or infinite.
OA_DEVICE bool is_finite8(uint4 a) {
    // 0 times a value: 0, or NaN.
    return dot8(a, uint4{}) == 0.0f;
}

// Rows of dq that belong to no sequence.
OA_DEVICE void clear_unowned_rows(const AttnBwdParams& p, int32 block, int32 head) {
    const int32* cu = p.fwd.cu_seqlens_q;
    int32 total = p.fwd.seqlen_q, chunks = p.fwd.head_dim / 8;
    int32 first = p.fwd.batch > 0 ? packed_sequence(cu, 0, total).begin : total;
    int32 last = p.fwd.batch > 0 ? min_of(max_of(cu[p.fwd.batch], first), total) : total;
    for (int32 at = threadIdx.x; at < kBlockRows * chunks; at += kThreads) {
        int64 row = int64(block) * kBlockRows + at / chunks;
        if (row < total && (row < first || row >= last))
            *reinterpret_cast<uint4*>(p.dq + head * p.dq_stride_h + row * p.dq_stride_s + at % chunks * 8) = uint4{};
    }
}

// This CTA's part of dmask; extents of 1 have stride 0.
OA_DEVICE void clear_dmask(const AttnBwdParams& p) {
    int64 heads = p.dmask_stride_h != 0 ? p.fwd.num_q_heads : 1, rows = p.dmask_stride_q != 0 ? p.fwd.mask_rows : 1;
    int64 cols = p.dmask_stride_k != 0 ? p.fwd.mask_cols : 1, batch = p.dmask_stride_b != 0 ? p.fwd.batch : 1;
    int64 total = batch * heads * rows * cols;
    for (int64 at = blockIdx.x * int64(kThreads) + threadIdx.x; at < total; at += int64(gridDim.x) * kThreads) {
        int64 row = at / cols, col = at - row * cols, head = row / rows, b = head / heads;
        p.dmask[b * p.dmask_stride_b + (head - b * heads) * p.dmask_stride_h + (row - head * rows) * p.dmask_stride_q +
                col * p.dmask_stride_k] = 0.0f;
    }
}

// This CTA's part of what attn_bwd_sm90 counts behind delta.
OA_DEVICE void clear_counters(const AttnBwdParams& p) {
    const bool varlen = p.fwd.cu_seqlens_q != nullptr;
    int64 steps = 2ll * p.num_n_blocks * p.fwd.num_kv_heads * (varlen ? 1 : p.fwd.batch);
    if (!varlen && steps == 0) return;
    for (int64 at = blockIdx.x * int64(kThreads) + threadIdx.x; at <= steps; at += int64(gridDim.x) * kThreads)
        item_counter(p)[at] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads) attn_bwd_prepare_sm80(const __grid_constant__ AttnBwdParams p) {
    __shared__ float warp_sums[kThreads / 32];
    launch_dependents();  // attn_bwd_sm90 waits
    int32 blocks = int32(p.rows_stride_h / kBlockRows);
    if (p.dmask != nullptr) clear_dmask(p);
    clear_counters(p);
    if (blocks == 0) return;
    int32 head = int32(blockIdx.x) / blocks;
    int32 block = int32(blockIdx.x) - head * blocks, lane = threadIdx.x % kLanes;
    PaddedBlock at = padded_block(p.fwd, block);
    int64 first = head * p.rows_stride_h + int64(block) * kBlockRows;
    int32 batch_idx = p.fwd.cu_seqlens_q == nullptr ? at.sequence : 0;  // packed tensors have no batch
    const uint16* o = p.fwd.o + batch_idx * p.fwd.o_stride_b + head * p.fwd.o_stride_h;
    const uint16* d_o = p.d_o + batch_idx * p.do_stride_b + head * p.do_stride_h;
    float sink2 = sink_log2<IO_TYPE>(p.fwd.sinks, p.fwd.sinks_kind, head), sum = 0.0f;
    bool is_stray[kBlockRows / kStrayRows] = {};
    // Nobody reads tiles of queries none of which sees a key.
    const KeyTiles<kBlockRows, 1> keys(at.row, p.fwd.seqlen_q, p.fwd.seqlen_k, p.fwd.window_left, p.fwd.window_right);
    const bool seeks_stray = p.stray_do != nullptr && (p.fwd.cu_seqlens_q != nullptr || !keys.is_empty());
    for (int32 r = threadIdx.x / kLanes; r < kBlockRows; r += kRowsPerStep) {
        int32 row = at.row + r;
        int64 packed_row = int64(at.q_begin) + row;
        float lse = neg_inf(), delta = 0.0f;
        if (row < at.seqlen_q) lse = p.fwd.lse[batch_idx * p.fwd.lse_stride_b + head * p.fwd.lse_stride_h + packed_row];
        bool dead = lse == neg_inf();
        if (!dead)
            for (int32 d = lane * 8; d < p.fwd.head_dim; d += kLanes * 8)
                delta += dot8(*reinterpret_cast<const uint4*>(o + packed_row * p.fwd.o_stride_s + d),
                              *reinterpret_cast<const uint4*>(d_o + packed_row * p.do_stride_s + d));
        else if (seeks_stray && row < at.seqlen_q)
            for (int32 d = lane * 8; d < p.fwd.head_dim; d += kLanes * 8)
                if (!is_finite8(*reinterpret_cast<const uint4*>(d_o + packed_row * p.do_stride_s + d)))
                    is_stray[r / kStrayRows] = true;
#pragma unroll
        for (int x = 1; x < kLanes; x *= 2) delta += __shfl_xor_sync(0xffffffffu, delta, x);
        if (lane != 0) continue;
        if (!dead && p.dlse != nullptr)
            delta -= p.dlse[batch_idx * p.dlse_stride_b + head * p.dlse_stride_h + packed_row];
        float lse2 = dead ? -neg_inf() : lse * kLog2e;
        // Never to -inf without a mask: P would be NaN.
        bool lowered = p.fwd.mask_kind != kMaskNone && lse < kLeastLse;
        p.lse2[first + r] = lowered ? lse2 * kLowered : max_of(lse2, kLowest);
        p.delta[first + r] = delta;
        if (!dead) sum -= (sink2 == -neg_inf() ? 1.0f : exp2_approx(min_nan(sink2 - lse2, 0.0f))) * delta;
    }
    if (p.dq_accum != nullptr) {
        float4* accum = reinterpret_cast<float4*>(p.dq_accum + first * p.dq_columns);
        for (int32 i = threadIdx.x; i < kBlockRows * p.dq_columns / 4; i += kThreads) accum[i] = float4{};
    }
    if (p.dq != nullptr && p.fwd.cu_seqlens_q != nullptr) clear_unowned_rows(p, block, head);
    if (p.stray_do != nullptr)
#pragma unroll
        for (int i = 0; i < kBlockRows / kStrayRows; ++i) {
            const int any = seeks_stray ? __syncthreads_or(is_stray[i]) : 0;
            if (threadIdx.x == 0) p.stray_do[first / kStrayRows + i] = any;
        }
    if (p.sink_partials != nullptr) {
#pragma unroll
        for (int x = kLanes; x < 32; x *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
        if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            float total = 0.0f;
            for (int w = 0; w < kThreads / 32; ++w) total += warp_sums[w];
            p.sink_partials[int64(head) * blocks + block] = total;
        }
    }
}
