// Arguments of attention on quantized operands. Formats: docs/quantization.md.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

// What it needs besides AttnFwdParams.
struct QuantizedOperands {
    const float* q_scale;
    const float* k_scale;
    const float* row_bias;
    const float* v_scale;
    const float* v_mean;  // null: zeros
    const float* delta_s;  // null without smooth_q
    int64 q_scale_stride_h, k_scale_stride_h, delta_stride_h;  // elements, between heads
    int32 delta_columns;
    int32 head_dim_pad;
};

// Where e4m3 operands have their scales, one for 128 rows of a head; strides in elements, 0 for what shares a scale.
// Integers have theirs where QuantizedOperands says, one for each lane's rows.
struct BlockScales {
    uint16 by_slot;  // packed: blocks are slots of all sequences; else each sequence's own, at its batch stride
    uint16 q_heads;  // neighbouring heads of q that share scales
    int32 row_bytes;  // of q and k that are there; those behind them, up to head_dim_pad, count as zeros
    int64 q_stride_b, q_stride_h, q_stride_block;
    int64 k_stride_b, k_stride_h, k_stride_block;
    int32 q_blocks, k_blocks;  // blocks that a sequence has scales for
    const uint8* drift;  // of V, for 128 keys (attention/flush_rule.cuh); null: unknown
    int64 drift_stride_h;
};

// attn_int8_sm80, attn_int8_mbarrier_sm90. q, k, v of `fwd` are the quantized ones, their strides in 16-bit units.
struct AttnInt8Sm80Params {
    AttnFwdParams fwd;
    QuantizedOperands operands;
    BlockScales scales;  // e4m3 only
};

// attn_int8_sm90. The maps are those of q_int, k_int and v, whose pointers and strides in `fwd` are not used.
struct AttnInt8Sm90Params {
    TensorMap map_q, map_k, map_v;
    AttnFwdParams fwd;
    QuantizedOperands operands;
    TileList tiles;
    int32 flush_keys;  // keys whose products with V are summed by the tensor cores
    int32 reserved;
    BlockScales scales;  // e4m3 only
};
// Keys split over CTAs: partial results in place of `fwd.o` and `fwd.lse` (params/attn_fwd.cuh). The scales of queries
// and their biases are those of the call, whose heads the tiles pack. `fwd.sinks` says that there are some.
struct AttnInt8SplitSm90Params {
    TensorMap map_q, map_k, map_v;  // map_q: [batch, head, query, pack, head_dim_pad]
    AttnFwdParams fwd;
    QuantizedOperands operands;
    SplitTileList tiles;
    int32 flush_keys;
    int32 reserved;
    BlockScales scales;
    float* partial_o;
    float* partial_ml;   // denominators of P as rounded; bases with the bias of their row where there are sinks
    float* partial_lse;  // null, or as partial_ml: of P before rounding, with the bias
};
// Packed sequences, an even share for every CTA (params/attn_fwd.cuh: AttnFwdStreamKSm90Params).
struct AttnInt8StreamKSm90Params {
    TensorMap map_q, map_k, map_v;  // map_q as above, of one batch
    AttnFwdParams fwd;
    QuantizedOperands operands;
    SplitTileList tiles;
    int32 flush_keys;
    int32 reserved;
    BlockScales scales;
    float* partial_o;    // as attn_combine_packed_sm90 reads them; what they hold as above
    float* partial_ml;
    float* partial_lse;  // null: nobody asks for the LSE
    struct CutTile* cuts;
};
struct AttnInt8ModsSm90Params {
    TensorMap map_q, map_k, map_v, map_bias;  // map_bias: with kModBias
    AttnFwdParams fwd;
    QuantizedOperands operands;
    TileList tiles;
    ScoreModParams mods;
    int32 flush_keys;
    int32 reserved;
    BlockScales scales;
};
// With the keys split over CTAs as well. A tile has the rows of one head, `tiles.pack` is 1: maps of q and of biases
// have five dimensions, as AttnFwdSplitModsSm90Params says.
struct AttnInt8SplitModsSm90Params {
    TensorMap map_q, map_k, map_v, map_bias;
    AttnFwdParams fwd;
    QuantizedOperands operands;
    SplitTileList tiles;
    ScoreModParams mods;
    int32 flush_keys;
    int32 reserved;
    BlockScales scales;
    float* partial_o;
    float* partial_ml;   // as AttnInt8SplitSm90Params
    float* partial_lse;  // null: nobody asks for the LSE
};

// A factor for each 128 rows of V of a kv head, counted from its sequence's first; strides in elements. There are as
// many as BlockScales::k_blocks says.
struct ValueFactors {
    const float* factors;
    int64 stride_b, stride_h, stride_block;
};
// The same calls with such factors.
struct AttnFp8FactorsSm89Params {
    AttnFwdParams fwd;
    QuantizedOperands operands;
    BlockScales scales;
    ValueFactors factors;
};
struct AttnFp8FactorsSm90Params {
    TensorMap map_q, map_k, map_v;
    AttnFwdParams fwd;
    QuantizedOperands operands;
    TileList tiles;
    int32 flush_keys;
    int32 reserved;
    BlockScales scales;
    ValueFactors factors;
};
struct AttnFp8SplitFactorsSm90Params {
    TensorMap map_q, map_k, map_v;  // as AttnInt8SplitSm90Params
    AttnFwdParams fwd;
    QuantizedOperands operands;
    SplitTileList tiles;
    int32 flush_keys;
    int32 reserved;
    BlockScales scales;
    float* partial_o;
    float* partial_ml;  // denominators of P before rounding, so that the LSE is theirs too; bases as they are
    ValueFactors factors;
};
struct AttnFp8ModsFactorsSm90Params {
    TensorMap map_q, map_k, map_v, map_bias;  // as AttnInt8ModsSm90Params
    AttnFwdParams fwd;
    QuantizedOperands operands;
    TileList tiles;
    ScoreModParams mods;
    int32 flush_keys;
    int32 reserved;
    BlockScales scales;
    ValueFactors factors;
};
struct AttnFp8SplitModsFactorsSm90Params {
    TensorMap map_q, map_k, map_v, map_bias;  // as AttnInt8SplitModsSm90Params
    AttnFwdParams fwd;
    QuantizedOperands operands;
    SplitTileList tiles;
    ScoreModParams mods;
    int32 flush_keys;
    int32 reserved;
    BlockScales scales;
    float* partial_o;
    float* partial_ml;  // as AttnFp8SplitFactorsSm90Params
    ValueFactors factors;
};
