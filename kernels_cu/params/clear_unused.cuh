// Arguments of clear_unused_sm80. Strides in elements.
#pragma once
#include "ptx/types.cuh"

constexpr int kMaxCleared = 3;

struct ClearUnusedParams {
    uint16* x[kMaxCleared];  // packed [rows, heads, head_dim], 16 bits an element, rows of 16-byte chunks
    const int32* cu_seqlens[kMaxCleared];  // [batch + 1], of each array
    const int32* seqused[kMaxCleared];     // [batch]
    float* lse;                            // [heads, rows] of the first array, or null
    int64 stride_s[kMaxCleared];
    int64 stride_h[kMaxCleared];
    int64 lse_stride_h;
    int32 rows[kMaxCleared], heads[kMaxCleared], head_dim[kMaxCleared];
    int32 batch;
};
