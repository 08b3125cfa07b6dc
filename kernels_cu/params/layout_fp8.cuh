// Arguments of layout_fp8.
#pragma once
#include "ptx/types.cuh"

struct LayoutFp8Params {
    const uint8* v;  // e4m3
    const float* descale;  // of v: one, or one for each kv head of a sequence; null: 1
    const int32* cu_seqlens_k;  // null: a dense batch
    const int32* seqused_k;  // null: all rows are used
    uint8* v_out;
    float* v_scale;
    uint8* drift;  // [kv heads of all sequences][slots]: whether sums over the block's keys run away from 0
    int64 v_stride_b, v_stride_s, v_stride_h;  // elements
    int64 descale_stride_b, descale_stride_h;
    int32 batch, num_kv_heads, seqlen_k, head_dim, head_dim_pad;
    int32 slots;  // blocks of 128 keys of one head
};
