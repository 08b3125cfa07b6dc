// Arguments of the kernels that merge partial results. Strides in elements.
#pragma once
#include "ptx/types.cuh"

// attn_combine_sm80.
struct AttnCombineParams {
    const float* partial_o;   // as in AttnFwdSplitSm90Params
    const float* partial_ml;
    uint16* o;
    float* lse;               // or null
    const void* sinks;
    int64 o_stride_b, o_stride_s, o_stride_h;
    int64 lse_stride_b, lse_stride_h;  // LSE is contiguous along the sequence
    int32 num_columns;  // batch * heads * rows * chunks: of four channels each
    int32 num_splits;
    int32 heads, rows;  // of the packed problem (params/attn_fwd.cuh: SplitTileList)
    int32 pack, head_dim;
    int32 threads_log2;  // of a CTA, those that have different columns; the others have other splits of the same
    int32 sinks_kind;
    const float* partial_lse;  // OWN_LSE: what the LSE is of, laid out as partial_ml
    int32 pack_heads;          // of the `pack` rows of a query those that are a head's
    // Not 0: `rows` are those of tiles of so many rows, of which a head has `blocks`, from first_tile on in the order
    // of head by head (TileList); of a head num_queries rows exist.
    int32 tile_rows, first_tile, blocks, num_queries;
    int32 num_sequences;
    const int32* cu_seqlens_q;  // of packed sequences; else null
};

// Partial results of a CTA that has even shares of packed sequences (scheduler/stream_k.cuh), of each class.
constexpr int32 kStreamKClasses = 4, kStreamKSlots = 2;

// A tile of rows that goes on behind a CTA's share of a class.
struct CutTile {
    int32 num_parts;  // CTAs that have one, the first of them this one; 0: no tile goes on
    int32 distance;  // from one to the next
    int32 m0, seqlen_q;  // its first row, and the rows of its sequence, packed heads counted
    int32 q_begin;  // row of the packed tensors that the sequence begins with
    int32 head_idx;  // of packed heads
    int32 exists;  // 0: rows of no sequence
    int32 reserved;
};

// attn_combine_packed_sm90.
struct AttnCombinePackedParams {
    const float* partial_o;  // [CTA, class, slot, row of the tile, head_dim], not divided by the denominator
    const float* partial_ml;  // [CTA, class, slot, row of the tile, 2]
    const CutTile* cuts;  // [CTA, class]
    uint16* o;
    float* lse;  // or null
    const void* sinks;
    int64 o_stride_s, o_stride_h, lse_stride_h;
    int32 block_m, pack, pack_heads;  // rows of a tile; as in SplitTileList
    int32 head_dim, sinks_kind, num_ctas;  // num_ctas: of the kernel ahead
    const float* partial_lse;  // what the LSE is of, laid out as partial_ml; null: of that
};
