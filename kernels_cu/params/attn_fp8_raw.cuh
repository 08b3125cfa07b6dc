// Arguments of attn_int8_sm90 that makes e4m3 of Q itself.
#pragma once
#include "params/attn_int8.cuh"
#include "params/quantize.cuh"

// AttnInt8Sm90Params, with map_q of Q in 16 bits, and what becomes of Q. `scales` are those of K.
struct AttnFp8RawSm90Params {
    TensorMap map_q, map_k, map_v;
    AttnFwdParams fwd;
    QuantizedOperands operands;
    TileList tiles;
    int32 flush_keys;
    int32 reserved;
    BlockScales scales;
    Rotation rotation;
};
