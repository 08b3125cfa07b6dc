// Arrays by blocks of rows (slots), in which every packed sequence begins at a slot of its own.
#pragma once
#include "ptx/types.cuh"

constexpr int32 kBlockRows = 128;  // rows of a slot, of queries and of keys

struct Sequence {
    int32 begin, len;
};
// Sequence b of a packed tensor of `total` rows; lengths that do not fit are clamped to it.
OA_DEVICE Sequence packed_sequence(const int32* cu, int32 b, int32 total) {
    int32 lo = min_of(max_of(cu[b], 0), total);
    return {lo, min_of(max_of(cu[b + 1], lo), total) - lo};
}
// The same up to its last row that is used. used: [batch], or null where all rows are.
OA_DEVICE Sequence used_sequence(const int32* cu, const int32* used, int32 b, int32 total) {
    Sequence s = packed_sequence(cu, b, total);
    if (used != nullptr) s.len = min_of(max_of(used[b], 0), s.len);
    return s;
}
// Copies cu_seqlens, clamped to the tensor, with every entry at least as large as those before it: with lengths that go
// backwards two sequences would have a slot in common, and one would wait for sums that never come. One warp.
OA_DEVICE void copy_starts(const int32* cu, int32* starts, int32 batch, int32 total) {
    int32 lane = threadIdx.x & 31, most = 0;
    for (int64 base = 0; base <= batch; base += 32) {
        int32 x = base + lane <= batch ? min_of(max_of(cu[base + lane], 0), total) : 0;
#pragma unroll
        for (int32 d = 1; d < 32; d <<= 1) {
            int32 before = __shfl_up_sync(0xffffffffu, x, d);
            if (lane >= d) x = max_of(x, before);
        }
        x = max_of(x, most);
        if (base + lane <= batch) starts[base + lane] = x;
        most = __shfl_sync(0xffffffffu, x, 31);
    }
}

// First slot of sequence b among slots of `rows` rows: at least one slot for every sequence, empty ones too.
OA_DEVICE int32 first_slot(int32 begin, int32 b, int32 rows) { return int32((uint32(begin) + rows - 1) / rows) + b; }

// The sequence whose first slot is the last one at or before `slot`. By all lanes of a warp: 32-ary search.
OA_DEVICE int32 sequence_of_slot(const int32* cu, int32 batch, int32 total, int32 slot, int32 rows) {
    int32 lane = threadIdx.x & 31, lo = 0, count = batch;
    while (count > 1) {
        int32 step = int32((uint32(count) + 31) / 32);
        int64 b = lo + int64(lane) * step;
        bool before = lane * int64(step) < count && first_slot(min_of(max_of(cu[b], 0), total), int32(b), rows) <= slot;
        int32 last = 31 - __clz(__ballot_sync(0xffffffffu, before) | 1u);
        lo += last * step;
        count = min_of(step, count - last * step);
    }
    return lo;
}
