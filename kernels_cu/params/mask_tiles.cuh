// Arguments of mask_pack_sm80, mask_list_sm80 and mask_align_sm80, and what attention reads of their results. Strides
// in elements.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"

// What a mask does to a tile of 64 rows x 64 keys.
enum MaskTileKind : int32 {
    kTileEmpty = 0,  // hides every key from every row
    kTileMixed = 1,
    kTileFull = 2,  // changes nothing, and every key exists
};

// An entry of a list: the number of the tile of keys, below kFirstGroup, and from there on two bits for each group of
// 64 rows, what the mask does to it there (MaskTileKind). kAllGroups times a kind: the same for all.
// Lists of batches begin with their count; those of packed sequences, one for each tile of queries as
// scheduler/slots.cuh numbers them, with the count and the sequence. kNoList as the count: all tiles of keys, of which
// nothing is known.
constexpr int32 kNoList = -1;
constexpr int32 kGroupShift = 22, kFirstGroup = 1 << kGroupShift, kMaxGroups = 4, kAllGroups = 0x55 * kFirstGroup;

struct MaskPackParams {
    const uint8* mask;
    uint32* bits;     // booleans: [mask_batch][mask_heads][m_tiles][n_tiles][128]; else null
    float* key_bias;  // additive masks, rows = 1: [mask_batch][mask_heads][64 * n_tiles]; else null
    uint8* kinds;     // MaskTileKind [mask_batch][mask_heads][m_tiles][n_tiles]
    int64 mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k;
    int64 first_byte, end_byte;  // the mask's memory, from `mask` on
    // Of packed sequences with a mask each: tiles beyond their ends are empty, and not read. Else null.
    const int32* cu_seqlens_q;
    const int32* cu_seqlens_k;
    const int32* seqused_q;  // null: all rows are used
    const int32* seqused_k;
    int32 mask_kind;
    int32 mask_heads;  // 1 where the mask is broadcast
    int32 rows, cols;  // rows = 1: the same for every query
    // Of heads that share rows (params/attn_fwd.cuh: SplitTileList), at most 8 a query; mask_heads and rows are theirs
    // then. Else 0 and 1.
    int32 pack_log2, pack_heads;
    int32 m_tiles, n_tiles;
    int32 total_q, total_k;  // rows of the packed tensors
};

struct MaskAlignParams {
    const uint8* mask;
    uint8* copy;  // [mask_batch][mask_heads][rows][row_chunks] of 16 bytes
    int64 mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k;
    int64 first_byte, end_byte;  // the mask's memory, from `mask` on
    int32 mask_heads, rows, cols;
    int32 row_chunks, element_bytes;
    uint32 chunks;  // of all rows
};

struct MaskListParams {
    const uint8* kinds;
    // Batches: [mask_batch][mask_heads][num_m_blocks][1 + n_tiles]: count, then entries, the last tile first. Packed
    // sequences: [mask_heads][num_m_blocks][2 + n_tiles]: count, sequence, entries.
    int32* lists;
    const int32* cu_seqlens_q;  // null: batches
    const int32* cu_seqlens_k;
    const int32* seqused_q;  // null: all rows are used
    const int32* seqused_k;
    int32 mask_batch, mask_heads;
    int32 m_tiles, n_tiles;
    int32 broadcast_rows;  // 1: the only tile of rows stands for all
    int32 num_m_blocks, block_m, lead_rows;  // block m begins at row m * block_m - lead_rows; of 64 or its parts
    int32 seqlen_q, seqlen_k;  // packed: rows of the tensors
    int32 window_left, window_right;  // -1: unlimited
    int32 pack;  // rows of a query
    int32 batch;
    // Packed: 1: kinds are those of the sequences' own tiles, [mask_heads][m_tiles][n_tiles], rows as
    // scheduler/slots.cuh numbers them; a sequence with more than n_tiles tiles of keys has none of them.
    int32 kinds_of_slots;
    int32 zero;  // makes the size a multiple of 8
};
