// Arguments of top_k_sm80 and top_k_sm90. Strides in elements.
#pragma once
#include "ptx/types.cuh"

struct TopKParams {
    const float* logits;       // [rows, width], last dimension contiguous
    const int32* starts;       // [rows] or null: a row's first element
    const int32* lengths;      // [rows / queries] or null: elements of a row from its first one on
    const int32* block_table;  // [rows / queries, blocks] or null
    int32* indices;            // [rows, k], last dimension contiguous
    int64 logits_stride, indices_stride, table_stride;
    int32 width, k;
    int32 queries;          // row i of so many of a sequence has lengths - queries + i + 1 elements
    int32 block_size;         // of block_table; 0: there is none
    uint32 block_multiplier;  // of quotient() by it
    int32 block_shift;
};
