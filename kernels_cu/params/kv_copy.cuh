// Arguments of kv_copy_sm80.
#pragma once
#include "ptx/types.cuh"

constexpr int32 kMaxPairs = 112;

struct KvCopyParams {
    uint8* planes[4];  // null: there is none
    int64 block_bytes[4];  // multiples of 4
    // Of rows apart: row_chunks times 16 bytes each, block_bytes in all, and steps in bytes. 0 chunks: blocks are
    // contiguous and follow each other.
    int64 block_step, head_step, token_step;
    int32 row_chunks, block_size;
    int32 pairs[2 * kMaxPairs];
};
