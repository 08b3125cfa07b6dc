// Arguments of the forward kernels. The host packs every struct of params/ by the same names, little-endian
// (src/omniattn/launch/structs.py, which build_tools/host_structs.py writes from these headers; a test compares sizes
// and offsets). Strides in elements.
#pragma once
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

enum MaskKind : int32 { kMaskNone = 0, kMaskBool = 1, kMaskFloat = 2, kMaskIo = 3 };     // kMaskIo: q's dtype
enum SinksKind : int32 { kSinksNone = 0, kSinksFloat = 1, kSinksIo = 2 };

struct AttnFwdParams {
    const uint16* q;
    const uint16* k;
    const uint16* v;
    uint16* o;
    float* lse;                 // or null
    const int32* cu_seqlens_q;  // [batch + 1]; null for dense batches
    const int32* cu_seqlens_k;
    const int32* seqused_q;     // [batch]: rows of a packed sequence that are used; null: all
    const int32* seqused_k;
    // With page_size > 0 K and V are pages of a pool: key i of sequence b is row i % page_size of page
    // block_table[c * table_stride + i / page_size], c = batch_index[b]; entries behind the last key are not read.
    const int32* block_table;  // null: page c alone
    const int32* batch_index;  // null: c = b
    const void* mask;
    const void* sinks;
    int64 q_stride_b, q_stride_s, q_stride_h;
    int64 k_stride_b, k_stride_s, k_stride_h;
    int64 v_stride_b, v_stride_s, v_stride_h;
    int64 o_stride_b, o_stride_s, o_stride_h;
    int64 lse_stride_b, lse_stride_h;  // LSE is contiguous along the sequence
    int64 mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k;
    int64 table_stride;  // of block_table, between sequences
    int64 tile_offset;  // first tile of this launch: more than 2^31 - 1 tiles take several launches
    int32 batch, num_q_heads, num_kv_heads;
    int32 seqlen_q, seqlen_k;  // dense: lengths; varlen: rows of the packed tensors; pages: keys of a whole table
    int32 page_size, page_rows_log2;  // rows of a page, and of a copy of them, which divides pages and tiles
    int32 num_pages;  // of the pool
    int32 queries_per_sequence;  // of packed sequences without cu_seqlens_q; else 0
    int32 mask_rows, mask_cols;
    int32 head_dim;  // of v and o; of q and k too, unless head_dim_qk says something else
    int32 window_left, window_right;  // -1: unlimited; causal is window_right = 0
    int32 num_m_blocks;               // dense: tiles per (batch, head); varlen: upper bound over all sequences
    int32 mask_kind, sinks_kind;
    float softmax_scale;
    float softcap;  // 0: none
    // attn_fwd_sm80 with OWN_HEAD_DIM_V, and keys in pages: of q and k. Else 0, which the compiler does not know.
    int32 head_dim_qk;
};

// The work of a launch as one list of items, which the host composes (problems/tile_order.py). CTA b takes item b, then
// every gridDim.x-th further; from the first round that holds no pair only, every second round runs backwards, so
// that a list that goes from long to short is distributed evenly. No counter in global memory is needed, and every warp
// role walks the list by itself. Fewer than 2^31 - gridDim.x items.
//   items < num_pairs   the j-th longest and the j-th shortest tile of one head: causal pairs are all equally long
//   then                the tiles of the last num_tail_heads heads, the longest of all heads first
// or, with neither, head by head: K and V stay in L2.
struct TileList {
    uint32 num_items;
    uint32 num_pairs;
    uint32 num_tail_heads;
    // Rows of a head's first tile that lie before row 0, a multiple of 64: of causal heads the short first tile is
    // better not full than the long last one.
    uint32 lead_rows;
};

// The same where keys are split over CTAs (scheduler/split_tiles.cuh). To the kernel `pack` query heads of one kv head
// are one head, whose row r is query r / pack of head r % pack of them: `fwd` has the extents of that problem. Of heads
// that are fewer than `pack`, rows of the others are computed and not merged.
struct SplitTileList : TileList {
    int32 num_splits;
    int32 pack;
    int32 num_queries;  // of a query head: rows / pack
    int32 pack_heads;
    // Not 0: these tiles alone, from first_tile on, in the order of head by head (TileList). They have partial results
    // of their own, [split, tile, row of the tile], and one head a tile.
    uint32 num_tiles;
    uint32 first_tile;
};

// Score modifications that attn_fwd applies between Q K^T and the softmax (attention/score_mods.cuh), in this order.
enum ScoreModFlag : int32 {
    kModSoftcap = 1,   // tanh; else the raw product
    kModScaled = 2,    // times `factor2`, which cannot wait for the exponent: it is not positive, or not finite
    kModBits = 4,      // visibility, a bit a score
    kModKeyBias = 8,   // one number a key, added
    kModBias = 16,     // a tile of numbers, added
    kModUserTiles = 32, // the lists' kinds are those of the user's mask expression
};

// What masks were made into (params/mask_tiles.cuh): tiles of 64 keys. Strides 0 where the mask is broadcast.
struct ScoreModParams {
    const void* tiles;   // kModBits: words [tile of 64 rows][tile of keys][128]; kModKeyBias: floats [key]
    const int32* lists;  // of each tile of queries: which tiles of keys (params/mask_tiles.cuh); null: all visible
    int64 tiles_stride_b, tiles_stride_h, tiles_stride_m;  // elements
    int64 lists_stride_b, lists_stride_h;
    int32 num_tiles;             // one less than a list has elements
    int32 flags;                 // ScoreModFlag
    int32 bias_batch, bias_head; // 1: the tile's own; 0: the only one
    float cap_scale;             // softmax_scale / softcap
    float factor, factor2;       // of the raw product, or of tanh, to natural-log units; to base 2
    float cap_limit;             // largest raw product that the polynomial is for
    float cap_poly[4];           // softcap * log2(e) * tanh(cap_scale * s) / s, in powers of s^2
    float cap_near_limit;        // largest square of a raw product that the shorter polynomial is for
    float cap_near[3];           // the same of lower degree
};

// attn_fwd_sm80 with score modifiers. Without lists it reads the mask of `fwd` itself.
struct AttnFwdModsSm80Params {
    AttnFwdParams fwd;
    ScoreModParams mods;
    int64 mask_first_byte, mask_end_byte;  // the mask's memory, from `fwd.mask` on
};

// attn_fwd_sm90. The maps are those of q, k and v, whose pointers and strides in `fwd` are not used.
struct AttnFwdSm90Params {
    TensorMap map_q, map_k, map_v;
    AttnFwdParams fwd;
    TileList tiles;
};
// Keys split over CTAs: partial results in place of `fwd.o` and `fwd.lse`, which attn_combine_sm80 merges.
struct AttnFwdSplitSm90Params {
    TensorMap map_q, map_k, map_v;  // map_q: [batch, head, query, pack, head_dim]
    AttnFwdParams fwd;
    SplitTileList tiles;
    float* partial_o;   // [batch, head, split, row, head_dim], not divided by the denominator
    float* partial_ml;  // [batch, head, split, row, 2]: base of the exponents in base 2, and denominator
};
// Packed sequences, an even share for every CTA (scheduler/stream_k.cuh); one that is not cut has `fwd.o` and
// `fwd.lse`. Of `tiles` pack and pack_heads count.
struct AttnFwdStreamKSm90Params {
    TensorMap map_q, map_k, map_v;  // map_q as above, of one batch
    AttnFwdParams fwd;
    SplitTileList tiles;
    float* partial_o;   // as attn_combine_packed_sm90 reads them (params/attn_combine.cuh)
    float* partial_ml;
    struct CutTile* cuts;
};
// With softcap, or a scale that is not positive.
struct AttnFwdStreamKModsSm90Params {
    TensorMap map_q, map_k, map_v;
    AttnFwdParams fwd;
    SplitTileList tiles;
    ScoreModParams mods;
    float* partial_o;
    float* partial_ml;
    struct CutTile* cuts;
};
// The same on mma.sync: blockIdx.y is the split, gridDim.y their number. Rows as SplitTileList has them: heads and rows
// of queries and mask in `fwd` are those of packed heads, strides are those of the arrays. Packed sequences: pack is 1.
struct AttnFwdSplitSm80Params {
    AttnFwdParams call;
    float* partial_o;
    float* partial_ml;
    int32 pack_log2;
    int32 pack_heads;  // of the 2^pack_log2 rows of a query those that are a head's
};
struct AttnFwdSplitModsSm80Params {
    AttnFwdModsSm80Params call;
    float* partial_o;
    float* partial_ml;
    int32 pack_log2;
    int32 pack_heads;
};
struct AttnFwdModsSm90Params {
    TensorMap map_q, map_k, map_v, map_bias;  // map_bias: with kModBias
    AttnFwdParams fwd;
    TileList tiles;
    ScoreModParams mods;
};
// With the keys split over CTAs. Bits, lists and map_bias ([batch, head, query, pack, key]) are those of packed rows.
struct AttnFwdSplitModsSm90Params {
    TensorMap map_q, map_k, map_v, map_bias;
    AttnFwdParams fwd;
    SplitTileList tiles;
    ScoreModParams mods;
    float* partial_o;
    float* partial_ml;
};
