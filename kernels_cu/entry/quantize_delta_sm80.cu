// What smoothing Q takes away from the scores, as a product of tensor cores. Source: SageAttention2 (Zhang et al.
// 2024), section 3.1.
//
//   delta_s[block, key] = q_mean[block] . (k[key] - k_mean)          (fp32, not scaled; 0 for keys that do not exist)
//
// q_mean: [unit, blocks of 128 queries, head_dim_pad] fp32, from quantize_sm80; k as there; k_mean: fp32 or absent.
// delta_s: [unit, blocks, delta_columns] fp32; columns beyond delta_columns are not written. Layouts:
// docs/quantization.md.
//
// A CTA of 4 warps takes a tile of 64 or 128 keys of one kv head, 64 keys at a time, into shared memory as bf16 pairs
// hi + lo (__syncthreads before and after), and warp w walks over the blocks of all query heads of that kv head, 16 at
// a time. Both operands are split, hi*hi + hi*lo + lo*hi: about 16 mantissa bits. Bound by the writes of delta_s.
//
// Shared memory, bytes: hi[64][2 * HEAD_DIM + 16] | lo [same]; rows are 16 bytes longer than a multiple of 128, so that
// the 8 rows of a fragment lie in different banks.
#include "ptx/cvt_quant.cuh"
#include "ptx/mma_sync.cuh"
#include "quantize/items.cuh"

constexpr int kHeadDim = HEAD_DIM, kKeys = 64, kRowBytes = 2 * kHeadDim + 16, kThreads = 128;
static_assert(2 * kKeys * kRowBytes == SMEM_BYTES, "what the registry row says");

// x = hi + lo, each a pair of bf16 in one register.
struct SplitPair {
    uint32 hi, lo;
    OA_DEVICE SplitPair(float a, float b) {
        hi = pack2(BFloat16{}, a, b);
        lo = pack2(BFloat16{}, a - low_float(BFloat16{}, hi), b - high_float(BFloat16{}, hi));
    }
};

extern "C" __global__ void __launch_bounds__(kThreads) quantize_delta_sm80(const
                                                                           __grid_constant__ QuantizeDeltaParams all) {
    extern __shared__ __align__(16) uint8 smem[];
    const QuantizeParams& p = all.quantize;
    IO_TYPE io;
    int32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    int32 unit = blockIdx.x / p.tiles_k, slot = blockIdx.x - unit * p.tiles_k;
    int32 batch_idx = p.packed ? 0 : unit / p.num_kv_heads, head = p.packed ? unit : unit - batch_idx * p.num_kv_heads;
    Sequence k_rows{0, p.seqlen_k}, q_rows{0, p.seqlen_q};
    int32 tile = slot, first_block = 0;
    if (p.packed) {
        batch_idx = sequence_of_slot(p.cu_seqlens_k, p.batch, p.seqlen_k, slot, p.key_tile);
        k_rows = used_sequence(p.cu_seqlens_k, p.seqused_k, batch_idx, p.seqlen_k);
        q_rows = used_sequence(p.cu_seqlens_q, p.seqused_q, batch_idx, p.seqlen_q);
        tile = slot - first_slot(k_rows.begin, batch_idx, p.key_tile);
        first_block = first_slot(q_rows.begin, batch_idx, kBlockRows);
        if (tile < 0) return;
    }
    int32 key0 = tile * p.key_tile;
    if (key0 >= k_rows.len) return;
    int32 blocks = int32((uint32(q_rows.len) + kBlockRows - 1) / kBlockRows), group = p.num_q_heads / p.num_kv_heads;
    int64 rows = int64(blocks) * group;
    const uint8* k = p.k + 2 * ((p.packed ? 0 : batch_idx * p.k_stride_b) + head * p.k_stride_h +
                                int64(k_rows.begin) * p.k_stride_s);
    const float* k_mean = p.k_mean ? p.k_mean + (int64(batch_idx) * p.num_kv_heads + head) * p.head_dim_pad : nullptr;

    for (int32 end = key0 + p.key_tile; key0 < end; key0 += kKeys) {
        __syncthreads();
        constexpr int kColumns = kHeadDim / 8;
        for (int32 i = tid; i < kKeys * kColumns; i += kThreads) {
            int32 row = i / kColumns, c = i % kColumns * 8;
            uint4 w{0, 0, 0, 0};
            bool inside = c < p.head_dim && key0 + row < k_rows.len;
            if (inside) w = *reinterpret_cast<const uint4*>(k + (int64(key0 + row) * p.k_stride_s + c) * 2);
            const uint32 words[4] = {w.x, w.y, w.z, w.w};
            uint32 hi[4], lo[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float a = low_float(io, words[j]), b = high_float(io, words[j]);
                if (inside && k_mean) a -= k_mean[c + 2 * j], b -= k_mean[c + 2 * j + 1];
                SplitPair split(a, b);
                hi[j] = split.hi, lo[j] = split.lo;
            }
            uint8* to = smem + row * kRowBytes + c * 2;
            *reinterpret_cast<uint4*>(to) = {hi[0], hi[1], hi[2], hi[3]};
            *reinterpret_cast<uint4*>(to + kKeys * kRowBytes) = {lo[0], lo[1], lo[2], lo[3]};
        }
        __syncthreads();
        for (int64 m0 = warp * 16; m0 < rows; m0 += kThreads / 2) {
            const float* from[2];
            float* to[2];
            bool exists[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int64 m = m0 + lane / 4 + half * 8;
                exists[half] = m < rows;
                int32 h = exists[half] ? int32(m / blocks) : 0, block = exists[half] ? int32(m - int64(h) * blocks) : 0;
                int64 row = (int64(unit) * group + h) * p.slots_q + first_block + block;
                from[half] = p.q_mean + row * p.head_dim_pad + (lane & 3) * 2;
                to[half] = all.delta_s + row * p.delta_columns;
            }
            float acc[kKeys / 8][4] = {};
            for (int32 c = 0; c < p.head_dim_pad; c += 16) {
                uint32 hi[4], lo[4];
#pragma unroll
                for (int r = 0; r < 4; ++r) {  // rows +0, +8 of columns +0, then of +8
                    float2 x = exists[r & 1] ? *reinterpret_cast<const float2*>(from[r & 1] + c + (r >> 1) * 8)
                                             : float2{0.0f, 0.0f};
                    SplitPair split(x.x, x.y);
                    hi[r] = split.hi, lo[r] = split.lo;
                }
#pragma unroll
                for (int n = 0; n < kKeys / 8; ++n) {
                    const uint8* b = smem + (n * 8 + lane / 4) * kRowBytes + (c + (lane & 3) * 2) * 2;
                    uint32 b_hi[2] = {*reinterpret_cast<const uint32*>(b), *reinterpret_cast<const uint32*>(b + 16)};
                    b += kKeys * kRowBytes;
                    uint32 b_lo[2] = {*reinterpret_cast<const uint32*>(b), *reinterpret_cast<const uint32*>(b + 16)};
                    mma_m16n8k16(BFloat16{}, acc[n], hi, b_lo[0], b_lo[1]);
                    mma_m16n8k16(BFloat16{}, acc[n], lo, b_hi[0], b_hi[1]);
                    mma_m16n8k16(BFloat16{}, acc[n], hi, b_hi[0], b_hi[1]);
                }
            }
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
                int32 column = key0 + n * 8 + (lane & 3) * 2;
                if (column >= p.delta_columns) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (exists[half])
                        *reinterpret_cast<float2*>(to[half] + column) = {acc[n][2 * half], acc[n][2 * half + 1]};
                }
            }
        }
    }
}
