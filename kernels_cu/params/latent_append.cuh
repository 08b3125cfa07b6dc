// Arguments of latent_append_sm80. Strides in elements.
#pragma once
#include "params/kv_append.cuh"
#include "ptx/types.cuh"

struct LatentAppendParams {
    const uint16* k;  // the first HEAD_DIM_V channels of the new tokens
    const uint16* k_pe;  // those behind them
    // Where tokens go: as in params/kv_append.cuh.
    const int32* seq_lens;
    const int32* cu_seqlens;
    const int32* block_table;
    const void* slots;
    const void* positions;
    const float* cos;
    const float* sin;
    uint8* data;  // rows of the cache
    const float* scale;  // of e4m3 rows, one for all; null: 1
    int64 k_stride_b, k_stride_s;
    int64 k_pe_stride_b, k_pe_stride_s;
    int64 rows;  // new tokens in all
    int32 batch, tokens, capacity, block_size, num_blocks, table_columns;
    int32 rope, rope_pairs, rope_rows;
    uint32 tokens_multiplier;  // for `quotient` by tokens
    int32 tokens_shift;
    uint32 block_multiplier;  // by block_size
    int32 block_shift;
    int32 wide_slots, wide_positions;  // 64 bits each
    uint32 block_places, token_places, place_bytes;  // of rows, see params/decode.cuh
};
