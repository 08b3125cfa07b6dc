// Arguments of kv_rounds_sm80 and kv_dequantize_sm80. Steps in elements.
#pragma once
#include "ptx/types.cuh"

struct KvDequantizeParams {
    const uint8* k_data;  // planes, see params/decode.cuh
    const uint8* v_data;
    const uint32* k_params;
    const uint32* v_params;
    const float* k_mean;
    const float* k_channel_scale;
    const int32* seq_lens;  // [batch]
    const int32* cu_seqlens_q;  // [batch + 1], of total_queries; null: q_len queries of each sequence
    const int32* leftpad;  // [batch]: keys before it are nobody's; null: there are none
    const int32* block_table;  // [batch, table_columns]; null: block b is sequence b
    const int32* recent_slots;  // the recent window as in params/decode.cuh
    const int32* recent_state;  // null: there is no recent window
    const uint8* recent_k;
    const uint8* recent_v;
    uint16* k;  // [num_kv_heads, pages * kPageRows, head_dim]: sequences one behind the other, each from a page's begin
    uint16* v;
    int32* cu_k;  // [rounds, batch + 1]: where they begin
    int32* lens;  // [batch]: keys of a sequence that are there
    int32* used_q;  // [rounds, batch]: queries of a sequence that a round has, all or none; null: all of them
    int32* cu_q;  // [batch + 1]: cu_seqlens_q, where the caller has none; else null
    int32 batch, q_len, total_queries;
    int32 few;  // sequences of up to so many queries are not for attention over pages
    int32 num_kv_heads, head_dim;
    int32 capacity, block_size, num_blocks, table_columns;
    int32 window_left;  // -1: unlimited
    int32 pages, rounds, round;
    int32 k_kind, v_kind, k_groups, v_groups;  // KvKind (decode/kv_row.cuh), and words of a row's parameters
    int32 hadamard;
    int32 recent_window, recent_ring, recent_num_slots;
    uint32 block_multiplier;  // for `quotient` by block_size
    int32 block_shift;
    uint32 heads_multiplier;  // and by num_kv_heads
    int32 heads_shift;
    uint32 block_places, head_places, token_places, place_bytes;  // of a caller's rows, see params/decode.cuh
    uint32 scale_outer, scale_head, scale_token;
    int32 row_scales;
};

constexpr int32 kPageRows = 128;  // of `k` and `v`
constexpr int32 kMostRounds = 64;
