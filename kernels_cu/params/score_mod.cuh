// The arrays that a score modification of the user's reads (attention/score_mod.cuh).
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"

constexpr int kMaxModArrays = 8, kMaxModDims = 4;

struct ScoreModArrays {
    const void* data[kMaxModArrays];
    int64 strides[kMaxModArrays * kMaxModDims];  // [array][dimension], elements
    int32 extents[kMaxModArrays * kMaxModDims];
};

// Arguments of the forward kernels with a score modification.
struct AttnFwdUserModSm80Params {
    AttnFwdModsSm80Params call;
    ScoreModArrays arrays;
};
// With the keys split over CTAs.
struct AttnFwdSplitUserModSm80Params {
    AttnFwdUserModSm80Params call;
    float* partial_o;
    float* partial_ml;
    int32 pack_log2;
    int32 pack_heads;
};
struct AttnFwdUserModSm90Params {
    TensorMap map_q, map_k, map_v, map_bias;
    AttnFwdParams fwd;
    TileList tiles;
    ScoreModParams mods;
    ScoreModArrays arrays;
};
struct AttnFwdSplitUserModSm90Params {
    TensorMap map_q, map_k, map_v, map_bias;
    AttnFwdParams fwd;
    SplitTileList tiles;
    ScoreModParams mods;
    ScoreModArrays arrays;
    float* partial_o;
    float* partial_ml;
};
