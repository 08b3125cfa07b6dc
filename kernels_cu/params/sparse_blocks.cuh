// Arguments of block_means_sm80 and choose_blocks_sm80. Strides in elements.
#pragma once
#include "ptx/types.cuh"

constexpr int MAX_SHARES = 256;  // registry/sparse_blocks.py has it too

struct BlockMeansParams {
    const void* q;
    const void* k;
    float* q_means;    // [batch, num_q_heads, q_blocks, head_dim]
    float* k_means;    // [batch, num_kv_heads, head_dim, k_blocks]
    float* q_similar;  // [batch, num_q_heads, q_blocks]
    float* k_similar;  // [batch, num_kv_heads, k_blocks]
    int64 q_stride_b, q_stride_s, q_stride_h;
    int64 k_stride_b, k_stride_s, k_stride_h;
    int32 num_q_heads, num_kv_heads, head_dim;
    int32 seqlen_q, seqlen_k;
    int32 block_q, block_k;    // rows of a block
    int32 q_blocks, k_blocks;  // of a head
    int32 q_ctas;              // batch * num_q_heads * q_blocks; those of k come behind them
};

struct ChooseBlocksParams {
    const float* q_means;  // as above
    const float* k_means;
    const float* q_similar;
    const float* k_similar;
    uint8* blocks;  // booleans [batch, num_q_heads, q_blocks, k_blocks]
    int32 num_q_heads, num_kv_heads, head_dim;
    int32 seqlen_q, seqlen_k;
    int32 block_q, block_k;
    int32 q_blocks, k_blocks;
    int32 rows;        // of blocks that a CTA takes, at most 4
    int32 by_count;    // shares are numbers of blocks
    int32 num_shares;  // 1: all heads have one; or num_q_heads
    int32 causal, keep_first;
    float similarity;          // blocks that are not more similar to themselves are kept
    float scale;               // of the products of means
    float shares[MAX_SHARES];  // what a row of each head keeps: so many blocks, or at most this share of its weights
};
