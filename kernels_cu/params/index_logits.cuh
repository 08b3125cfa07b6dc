// Arguments of index_logits_sm90 and index_logits_sm80. Strides of q, k, k_scale in bytes, of the others in elements.
#pragma once
#include "ptx/types.cuh"

struct IndexLogitsParams {
    const uint8* q;  // e4m3 [sequences, queries, num_heads, 128]
    const uint8* k;  // e4m3 [num_blocks, block_size, 128]
    const uint8* k_scale;  // fp32 [num_blocks, block_size]
    const float* weights;  // [sequences * queries, num_heads]
    float* logits;  // [sequences * queries, max_keys]
    const int32* seq_lens;  // [sequences]: query i sees the keys below seq_lens - queries + i + 1; or null
    const int32* block_table;  // [sequences, blocks], or null: all keys are in block 0
    const int32* k_start;  // [sequences * queries] or null: the first key that a query sees
    const int32* k_end;  // [sequences * queries] or null: behind the last one
    int64 q_stride_b, q_stride_n, q_stride_h;  // bytes
    int64 k_stride_block, k_stride_row;
    int64 scale_stride_block, scale_stride_row;
    int64 weights_stride, logits_stride, table_stride;
    int32 queries, num_heads, max_keys;
    int32 block_size;  // of block_table
    uint32 block_multiplier;  // of quotient() by it
    int32 block_shift;
    int32 num_blocks;
    int32 query_tile;  // queries of a CTA
    int32 query_tiles;  // CTAs for the queries of a sequence
    int32 span, spans;  // keys of a CTA, a multiple of 64; CTAs for the keys of a query
    int32 k_aligned;  // rows of k lie at multiples of 16 bytes; else of 4
};
