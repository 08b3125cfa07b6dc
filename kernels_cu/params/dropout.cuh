// Arguments of the kernels with dropout (attention/dropout.cuh).
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"

struct DropoutParams {
    const uint32* rng;  // seed and offset, 64 bits each, the lower words first
    uint32 threshold;   // of 256: a score whose byte is below it is dropped; 1 to 255
    // Of a byte x, bit 7 of (x & 127) + addend says whether the lower seven bits of x are those of the threshold at
    // least. x >= threshold is that or bit 7 of x (either: all bits; a threshold up to 128), or that and bit 7 of x
    // (either: 0).
    uint32 addend;  // (128 or 256) - threshold, in each byte
    uint32 either;
    float scale;  // of what is kept: 256 / (256 - threshold)
};

struct AttnFwdDropoutSm80Params {
    AttnFwdParams call;
    DropoutParams dropout;
};
struct AttnFwdModsDropoutSm80Params {
    AttnFwdModsSm80Params call;
    DropoutParams dropout;
};
struct AttnFwdDropoutSm90Params {
    TensorMap map_q, map_k, map_v;
    AttnFwdParams fwd;
    TileList tiles;
    DropoutParams dropout;
};
