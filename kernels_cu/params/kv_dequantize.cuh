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
    const int32* block_table;  // [batch, table_columns]; null: block b is sequence b
    const int32* recent_slots;  // the recent window as in params/decode.cuh
    const int32* recent_state;  // null: there is no recent window
    const uint8* recent_k;
    const uint8* recent_v;
    uint16* k;  // [pages, num_kv_heads, kPageRows, head_dim]
    uint16* v;
    int32* table;  // [batch, columns]: the page that holds the keys from kPageRows * column on
    int32* lens;  // [batch]: seq_lens within the cache
    int32* starts;  // [batch]: where the sequence's first page is, rounds behind each other, `pages` places each
    int32* ends;  // [rounds]: where those of a round end
    int32* used;  // [rounds, batch]: queries of a sequence in a round, all or none; null: there is one round
    int32* cu;  // [batch + 1]: cu_seqlens_q, where the caller has none; else null
    int32 batch, q_len, total_queries;
    int32 few;  // sequences of up to so many queries are not for attention over pages
    int32 num_kv_heads, head_dim;
    int32 capacity, block_size, num_blocks, table_columns;
    int32 window_left;  // -1: unlimited
    int32 pages, columns, rounds, round;
    int32 k_kind, v_kind, k_groups, v_groups;  // KvKind (decode/kv_row.cuh), and words of a row's parameters
    int32 hadamard;
    int32 recent_window, recent_ring, recent_num_slots;
    uint32 block_multiplier;  // for `quotient` by block_size
    int32 block_shift;
    uint32 heads_multiplier;  // and by num_kv_heads
    int32 heads_shift;
    uint32 block_places, head_places, token_places, place_bytes;  // of a caller's rows, see params/decode.cuh
    int32 row_chunks;
    uint32 scale_outer, scale_head, scale_token;
    int32 row_scales;
};

constexpr int32 kPageRows = 128;  // of a page of `k` and `v`
