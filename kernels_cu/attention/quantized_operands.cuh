// Where the scales and biases of a tile of quantized operands lie. Formats: docs/quantization.md.
#pragma once
#include "params/attn_fwd.cuh"
#include "params/attn_int8.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/slots.cuh"

// First block of `rows` rows of the tile's sequence, of queries or of keys. Dense batches have their own for every
// head.
OA_DEVICE int32 slot_of(const AttnFwdParams& p, const FwdTile& t, int32 begin, int32 rows) {
    return p.cu_seqlens_q == nullptr ? 0 : first_slot(begin, t.sequence, rows);
}

// Number of a head among all that an array holds; packed sequences have no batch.
OA_DEVICE int64 head_of(const AttnFwdParams& p, const FwdTile& t, int32 heads, int32 head) {
    return (p.cu_seqlens_q == nullptr ? int64(t.batch_idx) * heads : 0) + head;
}

// The 8 scales of the slice of 32 rows from warp_row on.
OA_DEVICE const float* q_scales(const AttnFwdParams& p, const QuantizedOperands& x, const FwdTile& t, int32 warp_row) {
    int32 slice = slot_of(p, t, t.q_begin, kBlockRows) * 4 + (warp_row >> 5);
    return x.q_scale + head_of(p, t, p.num_q_heads, t.head_idx) * x.q_scale_stride_h + slice * 8;
}

__device__ const float kNoScale = 1.0f;

// Scales of e4m3, of 128 rows each: those of a head of the tile's sequence, counted from its first; null, with strides
// of 0: all are 1. `scale`: what BlockScales has for q or for k.
OA_DEVICE const float* block_scales(const float* scale, int64 stride_b, int64 stride_h, int64 stride_block,
                                    int32 by_slot, const FwdTile& t, int32 head, int32 begin) {
    if (scale == nullptr) return &kNoScale;  // strides are 0
    int32 batch = by_slot ? 0 : t.sequence, first = by_slot ? first_slot(begin, t.sequence, kBlockRows) : 0;
    return scale + batch * stride_b + head * stride_h + first * stride_block;
}
OA_DEVICE const float* q_block_scales(const QuantizedOperands& x, const BlockScales& s, const FwdTile& t) {
    return block_scales(x.q_scale, s.q_stride_b, s.q_stride_h, s.q_stride_block, s.by_slot, t,
                        t.head_idx / int32(s.q_heads), t.q_begin);
}
OA_DEVICE const float* k_block_scales(const QuantizedOperands& x, const BlockScales& s, const FwdTile& t,
                                      int32 kv_head) {
    return block_scales(x.k_scale, s.k_stride_b, s.k_stride_h, s.k_stride_block, s.by_slot, t, kv_head, t.k_begin);
}
// Of a block of rows; the last one there is for rows behind it. A loop asks once in a step, with few instructions; and
// where it asks, because elsewhere the compiler would place the chain between two products.
OA_DEVICE float block_scale(const float* scales, int64 stride_block, int32 blocks, uint32 block) {
    float scale;
    block = min_of(block, uint32(blocks) - 1);
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(scale) : "l"(scales + uint64(block) * uint32(stride_block)));
    return scale;
}
// Of a query's row. Where a sequence is longer than its scales (max_seqlen below the longest one): not a number, rather
// than one that means nothing.
OA_DEVICE float q_block_scale(const QuantizedOperands& x, const BlockScales& s, const FwdTile& t, int32 row) {
    if (t.seqlen_q > int64(s.q_blocks) * kBlockRows || t.seqlen_k > int64(s.k_blocks) * kBlockRows)
        return __int_as_float(0x7fffffff);
    return block_scale(q_block_scales(x, s, t), s.q_stride_block, s.q_blocks, uint32(row) / kBlockRows);
}

// Base of a kernel's class: integers have no BlockScales, and no member for them.
struct WithBlockScales {
    const BlockScales& scales_;
    OA_DEVICE WithBlockScales(const BlockScales& scales) : scales_(scales) {}
};
struct NoBlockScales {
    static constexpr BlockScales scales_ = {};
    OA_DEVICE NoBlockScales(const BlockScales&) {}
};

// What smoothing took from the scores of each row, before the softmax's scale; from row 0 of the tile's sequence on.
OA_DEVICE const float* row_biases(const AttnFwdParams& p, const QuantizedOperands& x, const FwdTile& t) {
    return x.row_bias + head_of(p, t, p.num_q_heads, t.head_idx) * p.seqlen_q + t.q_begin;
}
OA_DEVICE float row_bias_of(const AttnFwdParams& p, const QuantizedOperands& x, const FwdTile& t, int32 row) {
    return uint32(row) < uint32(t.seqlen_q) ? row_biases(p, x, t)[row] : 0.0f;  // row may be negative (FwdTile::m0)
}

// A CTA's tile, in shared memory because the kernels are short of registers.
struct TileFacts {
    FwdTile tile;
    int32 full_first, full_end;  // as in KeyTiles
    const uint16* k;
    const uint16* v;
    const float* k_scale;
    const float* delta;  // of its block of queries
};

template <int kBlockN, bool kHalfV>
OA_DEVICE TileFacts facts_of(const AttnFwdParams& p, const QuantizedOperands& x, const FwdTile& t, int32 full_first,
                             int32 full_end) {
    int32 kv_head = t.head_idx / (p.num_q_heads / p.num_kv_heads);
    TileFacts f{t, full_first, full_end, nullptr, nullptr, nullptr, nullptr};
    f.k = p.k + t.batch_idx * p.k_stride_b + kv_head * p.k_stride_h + int64(t.k_begin) * p.k_stride_s;
    f.v = p.v + t.batch_idx * p.v_stride_b + kv_head * p.v_stride_h;
    f.v += kHalfV ? int64(t.k_begin) * p.v_stride_s : int64(slot_of(p, t, t.k_begin, kBlockRows)) * (kBlockRows / 2);
    f.k_scale =
        x.k_scale + head_of(p, t, p.num_kv_heads, kv_head) * x.k_scale_stride_h + slot_of(p, t, t.k_begin, kBlockN) * 4;
    f.delta = x.delta_s + head_of(p, t, p.num_q_heads, t.head_idx) * x.delta_stride_h +
              int64(slot_of(p, t, t.q_begin, kBlockRows) + t.m0 / kBlockRows) * x.delta_columns;
    return f;
}
