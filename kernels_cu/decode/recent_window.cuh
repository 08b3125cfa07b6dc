// The newest tokens of a sequence in 16 bits, beside a quantized cache that has them all (docs/kv_formats.md;
// reference/decode.py has the same rules).
//
// A slot is a ring of rows: position t is in row t % ring. Its state is the half-open range of positions that the ring
// has, from state[0] to state[1]; what more than `ring` positions before the end was there is overwritten.
#pragma once
#include "ptx/types.cuh"

// First position that is read from the ring: of the newest `window` of `length` tokens those that are there. A ring
// that ends before the sequence does is not read.
OA_DEVICE int32 recent_begin(const int32* state, int32 length, int32 window, int32 ring) {
    int32 begin = state[0], end = state[1];
    if (end < length) return length;
    return min_of(max_of(max_of(begin, end - ring), max_of(length - window, 0)), length);
}

// The state after tokens at `first` .. `length` - 1 have been written. What the ring held is kept if it reaches up to
// them.
OA_DEVICE void recent_append(int32* state, int32 first, int32 length, int32 ring) {
    int32 kept = max_of(state[0], state[1] - ring);
    if (kept > first || first > state[1]) kept = first;
    state[0] = max_of(kept, length - ring);
    state[1] = length;
}
