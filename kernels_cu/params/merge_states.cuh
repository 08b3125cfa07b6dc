// Arguments of merge_states_sm80. Strides in elements.
#pragma once
#include "ptx/types.cuh"

struct MergeStatesParams {
    const uint8* o_a;
    const uint8* o_b;
    uint8* o;
    const float* lse_a;
    const float* lse_b;
    float* lse;
    const int32* seq_lens;  // [batch] or null: of a sequence of length 0, a paused one, o_a does not count
    int64 o_a_stride_b, o_a_stride_s, o_a_stride_h;  // elements
    int64 o_b_stride_b, o_b_stride_s, o_b_stride_h;
    int64 o_stride_b, o_stride_s, o_stride_h;
    int64 lse_a_stride_b, lse_a_stride_h, lse_a_stride_s;
    int64 lse_b_stride_b, lse_b_stride_h, lse_b_stride_s;
    int64 lse_stride_b, lse_stride_h, lse_stride_s;
    int64 total;  // rows * chunks
    int32 seqlen, num_heads, chunks, reserved;
};
