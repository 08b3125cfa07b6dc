// Arguments of attn_combine_sm80. Strides in elements.
#pragma once
#include "ptx/types.cuh"

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
    int32 zero;  // makes the size a multiple of 8
};
