// Arguments of the kernels over latent caches: mla_decode_rows16_sm90, mla_decode_sm90, mla_decode_sm80,
// mla_combine_sm80.
#pragma once
#include "params/decode.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

struct MlaDecodeParams {
    // Of the cache: {column, row of a block, head, block}, boxes of 64 columns and 2^box_rows_log2 rows. Of
    // mla_decode_rows16_sm90 {column of a panel, row of a block, panel of 64 columns, block}, boxes of 64 rows, all
    // panels.
    TensorMap map;
    // Of Q, for mla_decode_rows16_sm90 alone: {column of a panel, head, token, panel of 64 columns, sequence}, boxes of
    // 64 rows, all panels. Of packed queries tokens of all sequences, one sequence.
    TensorMap map_q;
    // Of a cache with one head; head_dim is that of V. k_params: the one scale of e4m3 rows without scales of their
    // own, or null for 1.
    DecodeParams decode;
    float* row_max;  // the largest score of a row, natural units, as lse lies; or null
    int32 box_rows_log2;  // less than 3: there is no map
    int32 slot_rows;  // rows of a slot of partial results: those of all blocks
    // Sparse attention: block_table has, for each sequence and key, the number block * block_size + token of the row
    // that is the key; -1 and numbers beyond the cache are no key. seq_lens may be null: all have `capacity` keys.
    int32 lists_rows;
    // With lists_rows a sequence is one query token of the caller's, of whose sequences each has so many: lse is
    // [batch / listed_tokens, num_q_heads, listed_tokens].
    int32 listed_tokens;
    // CTAs of a cluster, which merge their partial results: the one that is left is the first one's.
    int32 cluster;
};
