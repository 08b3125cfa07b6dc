// Arguments of kv_append_sm80. Strides in elements.
#pragma once
#include "ptx/types.cuh"

enum RopeStyle : int32 { kRopeNone = 0, kRopeHalf = 1, kRopeInterleaved = 2 };

struct KvAppendParams {
    const uint16* k;
    const uint16* v;
    const int32* seq_lens;  // [batch], new tokens included; null with slots
    const int32* cu_seqlens;  // [batch + 1]; null: `tokens` a sequence
    const int32* block_table;  // [batch, table_columns]; null: block b is sequence b
    const float* cos;  // [rope_rows, rope_pairs]
    const float* sin;
    uint8* k_data;  // planes, see params/decode.cuh
    uint8* v_data;
    uint32* k_params;
    uint32* v_params;
    const float* k_mean;
    const float* k_channel_scale;
    const int32* recent_slots;  // [batch], null: slot b. The recent window as in params/decode.cuh
    uint8* recent_k;  // [recent_num_slots, num_kv_heads, recent_ring, row], 16 bits
    uint8* recent_v;
    int32* recent_state;
    // Places of packed rows, block * block_size + row of the block, negative: not written; null: by seq_lens.
    const void* slots;  // [rows]
    const void* positions;  // [rows], with slots and a rotation
    int64 k_stride_b, k_stride_s, k_stride_h;
    int64 v_stride_b, v_stride_s, v_stride_h;
    int64 rows;  // new tokens in all
    int32 batch, tokens, num_kv_heads, head_dim;
    int32 capacity, block_size, num_blocks, table_columns;
    int32 rope, rope_pairs, rope_rows;
    int32 hadamard, zero_point;
    int32 recent_ring, recent_num_slots;  // 0: there is no recent window
    uint32 heads_multiplier;  // for `quotient` by num_kv_heads
    int32 heads_shift;
    uint32 tokens_multiplier;  // by tokens
    int32 tokens_shift;
    uint32 block_multiplier;  // and by block_size
    int32 block_shift;
    int32 wide_slots, wide_positions;  // 64 bits each
    uint32 block_places, head_places, token_places, place_bytes;  // of rows with strides, see params/decode.cuh
    int32 row_chunks;
    uint32 scale_outer, scale_head, scale_token;  // of the caller's 8-bit rows, see params/decode.cuh
    int32 row_scales;  // scales are written; else they are read, scale_outer is 0
};
