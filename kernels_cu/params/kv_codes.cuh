// Arguments of attn_fwd_sm80 over pages of codes.
#pragma once
#include "params/attn_fwd.cuh"
#include "params/score_mod.cuh"

// K and V are arrays of the caller in 8 bits, whose strides in `AttnFwdParams` are in bytes; an element is its code
// times a scale. Scales are in elements apart: from a page to the next where each row has one, else from a sequence.
struct KvCodes {
    const float* k_scale;  // null: 1
    const float* v_scale;
    uint32 scale_outer, scale_head, scale_token;
    int32 row_scales;  // each row of a page has a scale
    int32 e4m3;  // else int8
    int32 reserved;
};
struct AttnFwdCodesSm80Params {
    AttnFwdParams call;
    KvCodes codes;
};
struct AttnFwdModsCodesSm80Params {
    AttnFwdModsSm80Params call;
    KvCodes codes;
};
struct AttnFwdUserModCodesSm80Params {
    AttnFwdUserModSm80Params call;
    KvCodes codes;
};
