// Arguments of attn_combine_sm80, in a file that kernels which merge by themselves do not read.
#pragma once
#include "params/attn_combine.cuh"

struct AttnCombineUsedParams {
    AttnCombineParams combine;
    const int32* seqused_q;  // [sequence]: rows of it that are used, and have partial results; null: all
};
