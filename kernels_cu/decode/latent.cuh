// The plan of decode/plan.cuh for a latent cache, which all query heads share: the blocks of rows of a sequence walk
// over the same keys at the same time, each by a CTA of its own, so that L2 has what the first of them brings. Chunks
// are counted once for all blocks, and a slot of partial results has the rows of all.
#pragma once
#include "decode/plan.cuh"
#include "params/decode.cuh"
#include "ptx/types.cuh"

constexpr int32 kLatentRows = 64;  // of a block

// In the place of a number of rows: all of a sequence are one block of the plan.
constexpr int kAllRows = 0;
template <>
OA_DEVICE KeySpan key_span<kAllRows>(const DecodeParams& p, int32 b) {
    KeySpan span = key_span<1 << 30>(p, b);
    span.row_blocks = 1;
    // Blocks of keys begin where pages do.
    span.begin &= ~63;
    if (span.chunks > 0) span.chunks = (span.end - span.begin + (1 << p.chunk_log2) - 1) >> p.chunk_log2;
    return span;
}
