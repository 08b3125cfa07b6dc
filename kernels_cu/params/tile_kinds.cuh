// Arguments of tile_kinds_sm80. Strides in elements.
#pragma once
#include "params/score_mod.cuh"
#include "ptx/types.cuh"

struct TileKindsParams {
    // MaskTileKind [batch][heads][m_tiles][n_tiles]; of packed sequences [heads][m_tiles][n_tiles], rows of tiles as
    // scheduler/slots.cuh numbers them.
    uint8* kinds;
    const int32* cu_seqlens_q;  // null: batches
    const int32* cu_seqlens_k;
    const int32* seqused_q;  // null: all rows are used
    const int32* seqused_k;
    const uint8* blocks;  // booleans: whether a block of block_rows x block_keys tiles is visible; or null
    int64 block_stride_b, block_stride_h, block_stride_q, block_stride_k;
    int32 batch, heads;  // 1 where everything is broadcast
    int32 m_tiles, n_tiles;
    int32 seqlen_q, seqlen_k;  // packed: rows of the tensors
    int32 block_rows, block_keys;
    ScoreModArrays arrays;
};
