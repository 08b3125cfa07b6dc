// Arguments of the exact forward kernels, as the host packs them (src/omniattn/launch/attn_fwd.py declares the same
// fields in the same order, little-endian, no padding: 8-byte fields first). Strides in elements.
#pragma once
#include "ptx/types.cuh"

enum MaskKind : int32 { kMaskNone = 0, kMaskBool = 1, kMaskFloat = 2, kMaskIo = 3 };     // kMaskIo: q's dtype
enum SinksKind : int32 { kSinksNone = 0, kSinksFloat = 1, kSinksIo = 2 };

struct AttnFwdParams {
    const uint16* q;
    const uint16* k;
    const uint16* v;
    uint16* o;
    float* lse;                 // or null
    const int32* cu_seqlens_q;  // [batch + 1]; null for dense batches
    const int32* cu_seqlens_k;
    const void* mask;
    const void* sinks;
    int64 q_stride_b, q_stride_s, q_stride_h;
    int64 k_stride_b, k_stride_s, k_stride_h;
    int64 v_stride_b, v_stride_s, v_stride_h;
    int64 o_stride_b, o_stride_s, o_stride_h;
    int64 lse_stride_b, lse_stride_h;  // LSE is contiguous along the sequence
    int64 mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k;
    int64 tile_offset;  // first tile of this launch: more than 2^31 - 1 tiles take several launches
    int32 batch, num_q_heads, num_kv_heads;
    int32 seqlen_q, seqlen_k;  // dense: lengths; varlen: rows of the packed tensors
    int32 mask_rows, mask_cols;
    int32 head_dim;
    int32 window_left, window_right;  // -1: unlimited; causal is window_right = 0
    int32 num_m_blocks;               // dense: tiles per (batch, head); varlen: upper bound over all sequences
    int32 mask_kind, sinks_kind;
    float softmax_scale;
    float softcap;  // 0: none
    int32 zero;  // always 0, which the compiler does not know; and the struct's size is a multiple of 8
};
