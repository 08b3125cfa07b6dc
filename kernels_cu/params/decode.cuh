// Arguments of the decode kernels. Strides in elements.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"

// Which keys a launch of the decode kernel computes.
enum RecentSide : int32 { kRecentNone = 0, kRecentOlder = 1, kRecentNewest = 2 };

struct DecodeParams {
    const uint16* q;
    // Data planes [num_blocks, num_kv_heads, block_size, row bytes]; those of 16 bits have any strides, see below.
    const uint8* k;
    const uint8* v;
    // Parameter planes [num_blocks, num_kv_heads, block_size, groups], or null. Of the caller's 8-bit rows: scales in
    // fp32, see below, or null for 1.
    const uint32* k_params;
    const uint32* v_params;
    const float* k_mean;  // [num_kv_heads, head_dim] or null
    const float* k_channel_scale;  // the same
    const int32* seq_lens;  // [batch]
    // [batch + 1]: q, o and lse are packed, [total_queries, ...] and [num_q_heads, total_queries]; sequences with more
    // than q_len queries are another launch's. Null: q_len queries of each.
    const int32* cu_seqlens_q;
    const int32* block_table;  // [batch, table_columns]; null: block b is sequence b
    const int32* recent_slots;  // [batch]: which slot of the recent window is a sequence's; null: slot b
    const int32* recent_state;  // [num_slots, 2], see decode/recent_window.cuh; null: there is no recent window
    const void* sinks;
    uint16* o;
    float* lse;  // [batch, num_q_heads, q_len], or of packed queries as above; or null
    float* partial_o;  // [slots, rows, padded head_dim]
    float* partial_ml;  // [slots, rows, 2]: maximum in base-2 units, denominator
    int64 q_stride_b, q_stride_s, q_stride_h;
    int64 o_stride_b, o_stride_s, o_stride_h;
    int32 batch, q_len, num_q_heads, num_kv_heads;
    int32 group;  // query heads of a kv head
    int32 num_row_blocks;  // blocks of rows (query token, head of the group) of a kv head
    int32 head_dim;
    int32 capacity;  // tokens that a sequence can have at most
    int32 block_size, num_blocks, table_columns;
    int32 window_left;  // -1: unlimited
    int32 sinks_kind;
    int32 hadamard;
    int32 chunk_log2;  // of the keys of a chunk, the unit that work is divided into
    int32 fixed_splits;  // deterministic: every chunk is a split of its own
    int32 num_workers;  // CTAs of the main kernel
    int32 recent_window;  // newest tokens that are kept in 16 bits
    int32 recent_ring;  // tokens of a slot
    int32 recent_num_slots;
    int32 recent_side;  // RecentSide
    float softmax_scale;
    float softcap;  // 0: none
    int32 combine_split;  // warps of decode_combine for a row
    uint32 block_multiplier;  // for `quotient` by block_size
    int32 block_shift;
    uint32 worker_multiplier;  // and by num_workers
    int32 worker_shift;
    uint32 two_1024;  // 0x64006400, see decode/kv_dequant.cuh
    // Keys before it are another launch's; kSharedPrefix: this launch's are those that all sequences have in common.
    int32 first_key;
    // Of a launch over the shared prefix, which takes the queries of all sequences for those of one: how many sequences
    // there are (seq_lens has so many).
    int32 prefix_sequences;
    int32 least_seq_len;  // shorter lengths count as this: 0; of a shared prefix its capacity, as it is as long for all
    // Where rows of K and V in 16 bits, or of the caller's in 8, are, in both planes alike: steps from a block, a head
    // and a token to the next, in units of place_bytes, a multiple of 16. The last row's place is below 2^32.
    uint32 block_places, head_places, token_places;
    uint32 place_bytes;
    // From a token's row to the next, where 16 tokens from a multiple of 16 on are in one block and the step is below
    // 2^29; else 0: each row is looked up.
    uint32 token_bytes;
    int32 row_chunks;  // 16-byte chunks of a row; those beyond, up to the kernel's head_dim, are zeros and not read
    // Steps between scales of the caller's 8-bit rows, elements. With row_scales each row has one, and scale_outer is a
    // block's step; else it is a sequence's, whose rows have one scale a head.
    uint32 scale_outer, scale_head, scale_token;
    int32 row_scales;
    int32 total_queries;  // of packed ones
    // The queries of other sequences, and rows that no sequence owns, are those of the next launch, which may run at
    // the same time. Else decode_combine clears the rows that no sequence owns.
    int32 has_company;
};

constexpr int32 kSharedPrefix = -1;
