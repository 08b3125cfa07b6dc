// Arguments of kv_copy_sm80.
#pragma once
#include "ptx/types.cuh"

constexpr int32 kMaxPairs = 112;

struct KvCopyParams {
    uint8* planes[4];  // null: there is none
    int64 block_bytes[4];  // multiples of 4
    int32 pairs[2 * kMaxPairs];
};
