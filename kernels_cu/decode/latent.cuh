// The plan of decode/plan.cuh for a latent cache, which all query heads share: the blocks of rows of a sequence walk
// over the same keys at the same time, each by a CTA of its own, so that L2 has what the first of them brings. Chunks
// are counted once for all blocks, and a slot of partial results has the rows of all.
#pragma once
#include "decode/plan.cuh"
#include "params/mla_decode.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// In the place of a number of rows: all of a sequence are one block of the plan.
constexpr int kAllRows = 0;
template <>
OA_DEVICE KeySpan key_span<kAllRows>(const DecodeParams& p, int32 b) {
    KeySpan s;
    s.seq_len = s.end = p.seq_lens == nullptr ? p.capacity : min_of(max_of(p.seq_lens[b], 0), p.capacity);
    s.queries = queries_of(p, b);
    s.row_blocks = 1;
    // Blocks of keys begin where pages do.
    const int64 first = p.window_left < 0 ? 0 : int64(s.end) - s.queries.count - p.window_left;
    s.begin = first <= 0 ? 0 : int32(first) & ~63;
    s.chunks = s.queries.count == 0 ? 0 : (s.end - s.begin + (1 << p.chunk_log2) - 1) >> p.chunk_log2;
    return s;
}

// Not where most workers only go on with a sequence: beginning few of them costs nobody much, and chunks are few.
template <>
OA_DEVICE int32 begin_chunks<kAllRows>(const DecodeParams& p) {
    return p.fixed_splits != 0 || 4 * int64(p.batch) < 3 * int64(p.num_workers) ? 0 : 2;
}

// Of a row that is done: LSE, and the largest score, `maximum` in base-2 units.
OA_DEVICE void note_row(const MlaDecodeParams& params, int32 sequence, int32 head, int32 first, int32 token,
                        float maximum, float lse) {
    const DecodeParams& p = params.decode;
    int64 place;
    if (params.lists_rows != 0) {
        const int32 own = sequence / params.listed_tokens, query = sequence - own * params.listed_tokens;
        place = (int64(own) * p.num_q_heads + head) * params.listed_tokens + query;
    } else {
        place = lse_place(p, sequence, head, first, token);
    }
    if (p.lse != nullptr) p.lse[place] = lse;
    if (params.row_max == nullptr) return;
    // The maximum of scores passes over a NaN, which the LSE keeps.
    const float top = maximum <= kLowest ? neg_inf() : maximum * kLn2;
    params.row_max[place] = lse == lse || maximum == -neg_inf() ? top : lse;
}

// Partial results: in each 16 channels those come first that the first lane of a quad has of two blocks of 8 columns of
// an accumulator, and so on: channel 8 x + 2 q + y of them is in place 4 q + 2 x + y. Nobody has to exchange anything.
OA_DEVICE float4 pair_of_blocks(const float* o, int r) {
    return make_float4(o[2 * r], o[2 * r + 1], o[4 + 2 * r], o[4 + 2 * r + 1]);
}
// The first of the channels in 4 places from `place` on; the others are behind it by 1, 8 and 9.
OA_DEVICE int32 channel_of_place(int32 place) { return (place & ~15) + (place & 15) / 2; }

// What the block table says of a key of a list: the number of a row, or none.
constexpr uint32 kNoRow = ~0u;
