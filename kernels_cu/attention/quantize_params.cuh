// Arguments of the quantizers, and which rows a piece of their work has. Formats: docs/quantization.md.
#pragma once
#include "ptx/types.cuh"

enum ItemKind : int32 { kReduceK, kReduceV, kAmaxQ, kAmaxK, kQuantizeQ, kQuantizeV, kQuantizeK, kFinishV, kNoItem };

// One piece of work: a block of 128 rows, or a chunk, or (kFinishV) all of one head of one sequence.
struct alignas(16) Item {
    int32 kind;
    int32 batch_idx;  // -1: a slot that no sequence fills
    int32 head;  // query head for Q, kv head for K and V
    int32 unit;  // batch * heads + head for dense batches, head for packed sequences: leads the outputs
    int32 slot;  // of this head
    int32 index;  // of this sequence
    int32 begin, len;  // the sequence's rows in the tensor
    // COMMON kernels only: the item's first row; row 0 of the sequence where a sample of it is summed up.
    const uint8* rows;
    int64 stride_bytes;
};
static_assert(sizeof(Item) == 48, "the host makes room for that many bytes");

// The host packs the same fields in the same order (src/omniattn/launch/quantize.py).
struct QuantizeParams {
    const uint8* q;
    const uint8* k;
    const uint8* v;
    const int32* cu_seqlens_q;  // null: a dense batch
    const int32* cu_seqlens_k;
    uint8* q_int;
    uint8* k_int;
    float* q_scale;
    float* k_scale;
    float* row_bias;  // null: not wanted
    float* q_mean;  // null unless smooth_q
    float* k_mean;  // null unless smooth_k
    uint8* v_out;
    float* v_scale;
    float* v_mean;
    float* partials;  // per kv head and chunk: sums of K, sums, maxima and minima of V, HEAD_DIM each
    int64* v_error;  // per kv head and channel: what rounding took away (kErrorUnits)
    // Words that a launch of its own zeroes: the ticket, one of each kind per (batch, head), v_error.
    uint32* ticket;
    uint32* k_ready;  // chunks that have arrived, then kReady
    uint32* v_ready;
    uint32* v_bad;  // V has NaN or infinity, or, with a scale from a sample, values that the scale is too small for
    uint32* v_done;  // blocks that have become bytes
    uint32* k_amax;  // bits of the largest magnitude, and blocks that have arrived (per_tensor only)
    uint32* k_amax_done;
    uint32* q_amax;
    uint32* q_amax_done;
    // Copies of cu_seqlens that never decrease, for the launches behind the one that zeroes; null: none.
    int32* starts_q;
    int32* starts_k;
    Item* table;  // all items in the order of their tickets, decoded by the launch that zeroes (COMMON kernels only)
    int64 q_stride_b, q_stride_s, q_stride_h;  // elements
    int64 k_stride_b, k_stride_s, k_stride_h;
    int64 v_stride_b, v_stride_s, v_stride_h;
    int32 batch, num_q_heads, num_kv_heads;
    int32 seqlen_q, seqlen_k;  // rows of the packed tensors when there are cu_seqlens
    int32 head_dim, head_dim_pad;
    int32 slots_q, slots_k, slots_r;  // blocks of 128 queries, of 128 keys, and chunks of keys of one head
    int32 key_tile, tiles_k;  // keys that share k_scale groups: 128 or 64; such tiles of one head
    int32 bits;  // of a stored element: 8 or 4
    int32 q_group_rows;  // queries of a 16- or 32-row slice share scales: 16 or 32
    int32 granularity;  // Granularity
    int32 flags;  // Flag
    int32 packed;  // sequences of different lengths, with cu_seqlens
    int32 units, units_per_group, num_groups;  // heads of K (of all batch entries if dense), in groups
    int32 per_unit_r, per_unit_a, per_unit_q, per_unit_kv;  // items of one unit
    int32 last_base, num_items;  // first item of the last group's step, behind the first group's sums; all items
    int32
        clear_vectors;  // > 0: this launch zeroes that many times 16 bytes from `ticket` on, copies cu_seqlens, and that is all
    int32 delta_columns;  // extent of delta_s along the keys
    int32 levels;  // largest magnitude of an element: 127 or 7
    float v_levels;  // what the largest magnitude of a channel of V becomes in e4m3: 448, or less
};

enum Granularity : int32 { kPerTensor, kPerBlock, kPerWarp, kPerThread, kPerToken };
enum Flag : int32 { kSmoothQ = 1, kSmoothK = 2, kSmoothV = 4, kFullBias = 8, kHasQk = 16, kHasV = 32, kHalfV = 64 };

constexpr int32 kBlockRows = 128;  // rows of every tile, of queries and of keys
constexpr int32 kChunkRows = 256;  // sampled keys of a partial sum, while a sequence has at most kMaxChunks of them
constexpr int32 kMaxChunks = 64;
// Sums are kept times 2^-32, so that 2^31 values of any size stay finite.
constexpr float kSumScale = 2.3283064365386963e-10f, kSumUnscale = 4294967296.0f;
// A group whose largest magnitude is below this has scale 1 and becomes zeros: the reciprocal of every scale is finite.
constexpr float kLeastAmax = 7.888609052210118e-31f;  // 2^-100
// A channel of V keeps its mean below 1 / kMeanCounts of its range: too small to matter, and values on the grid of their own
// 16 bits, moved by it, are rounded to 8 bits with a bias that they do not have as they are.
constexpr float kMeanCounts = 16.0f;
// Sums of what rounding takes away from V, which is stored as v / v_scale, are in 1 / kErrorUnits of that.
constexpr float kErrorUnits = 256.0f;

constexpr uint32 kReady = 0x80000000u;

// Means of K and V and ranges of V come from a sample of a long sequence: one key of 2^sample_log2(len), at least
// kLeastSample keys. Any vector may be taken away from K and V, and ranges have headroom.
constexpr int32 kLeastSample = 256, kMostSampleLog2 = 5;
OA_DEVICE int32 sample_log2(int32 len) {
    return len < 2 * kLeastSample ? 0 : min_of(31 - __clz(len / kLeastSample), kMostSampleLog2);
}
OA_DEVICE int32 num_samples(int32 len) { return len >> sample_log2(len); }
// The key that is sample i: one of each 2^log2 neighbours, by the golden ratio's multiples, which follow no period of the data.
OA_DEVICE int32 sampled_row(int32 i, int32 log2) {
    return (i << log2) + int32((uint32(i) * 0x9e3779b1u) >> 16 & ((1u << log2) - 1));
}

// Samples of one partial sum, and how many partial sums a sequence has (one when it is empty).
OA_DEVICE int32 chunk_rows(int32 samples) {
    constexpr uint32 kMost = kChunkRows * kMaxChunks;
    return int32(max_of<uint32>((uint32(samples) + kMost - 1) / kMost, 1) * kChunkRows);
}
OA_DEVICE int32 num_chunks(int32 samples) {
    return int32(max_of<uint32>((uint32(samples) + chunk_rows(samples) - 1) / chunk_rows(samples), 1));
}

struct Sequence {
    int32 begin, len;
};
// Sequence b of a packed tensor of `total` rows; lengths that do not fit are clamped to it.
OA_DEVICE Sequence packed_sequence(const int32* cu, int32 b, int32 total) {
    int32 lo = min_of(max_of(cu[b], 0), total);
    return {lo, min_of(max_of(cu[b + 1], lo), total) - lo};
}
// Copies cu_seqlens, clamped to the tensor, with every entry at least as large as those before it: with lengths that go
// backwards two sequences would share slots, and one would wait for sums that nobody makes. One warp.
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
