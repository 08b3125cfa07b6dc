// Arguments of quantize_fp8.
#pragma once
#include "params/quantize.cuh"
#include "ptx/types.cuh"

// Q or K.
struct RowsToFp8 {
    const uint8* x;
    uint8* out;
    float* scale;
    int64 stride_b, stride_s, stride_h;  // elements
    int32 heads, rows;
    int32 blocks;  // of 128 rows of a head
    int32 items;  // blocks of all heads of all batch entries
};

struct QuantizeFp8Params {
    RowsToFp8 q, k;
    int32 head_dim, head_dim_pad;
    Rotation rotation;
};

// quantize_fp8 with SUMS: sums and ranges of V besides, for quantize_values.
struct QuantizeFp8SumsParams {
    QuantizeFp8Params rows;
    QuantizeParams values;  // of V alone: its arrays, extents, partials, v_error, v_bad, v_done
    int32 chunks;  // CTAs that sum up V, in front of the others
    int32 reserved;
};
