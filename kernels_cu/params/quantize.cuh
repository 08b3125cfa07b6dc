// Arguments of the quantizers. Formats: docs/quantization.md.
#pragma once
#include "ptx/types.cuh"

enum ItemKind : int32 { kReduceK, kReduceV, kAmaxQ, kAmaxK, kQuantizeQ, kQuantizeV, kQuantizeK, kFinishV, kNoItem };

// One work item: a block of 128 rows, or a chunk, or (kFinishV) all of one head of one sequence.
struct alignas(16) QuantizeItem {
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
static_assert(sizeof(QuantizeItem) == 48, "the host makes room for that many bytes");

struct QuantizeParams {
    const uint8* q;
    const uint8* k;
    const uint8* v;
    const int32* cu_seqlens_q;  // null: a dense batch
    const int32* cu_seqlens_k;
    const int32* seqused_q;  // null: all rows of a packed sequence are used
    const int32* seqused_k;
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
    uint32* v_done;  // blocks that have been quantized
    uint32* k_amax;  // bits of the largest magnitude, and blocks that have arrived (per_tensor only)
    uint32* k_amax_done;
    uint32* q_amax;
    uint32* q_amax_done;
    // Copies of cu_seqlens that never decrease, for the launches behind the one that zeroes; null: none.
    int32* starts_q;
    int32* starts_k;
    // All items in the order of their tickets, decoded by the launch that zeroes (COMMON kernels only).
    QuantizeItem* item_table;
    int64 q_stride_b, q_stride_s, q_stride_h;  // elements
    int64 k_stride_b, k_stride_s, k_stride_h;
    int64 v_stride_b, v_stride_s, v_stride_h;
    int32 batch, num_q_heads, num_kv_heads;
    int32 seqlen_q, seqlen_k;  // rows of the packed tensors when there are cu_seqlens
    int32 head_dim, head_dim_pad;
    int32 slots_q, slots_k, slots_r;  // blocks of 128 queries, of 128 keys, and chunks of keys of one head
    int32 key_tile, tiles_k;  // keys of a tile of k_scale: 128 or 64; such tiles of one head
    int32 bits;  // of a stored element: 8 or 4
    int32 q_group_rows;  // rows of a slice of queries with common scales: 16 or 32
    int32 granularity;  // Granularity
    int32 flags;  // Flag
    int32 packed;  // sequences of different lengths, with cu_seqlens
    int32 units, units_per_group, num_groups;  // heads of K (of all batch entries if dense), in groups
    int32 per_unit_r, per_unit_a, per_unit_q, per_unit_kv;  // items of one unit
    int32 last_base, num_items;  // first item of the last group's step, behind the first group's sums; all items
    // > 0: this launch zeroes that many times 16 bytes from `ticket` on, copies cu_seqlens, and does nothing else.
    int32 clear_vectors;
    int32 delta_columns;  // extent of delta_s along the keys
    int32 levels;  // largest magnitude of an element: 127 or 7
    float v_levels;  // what the largest magnitude of a channel of V becomes in e4m3: 448, or less
};

enum Granularity : int32 { kPerTensor, kPerBlock, kPerWarp, kPerThread, kPerToken };
enum Flag : int32 { kSmoothQ = 1, kSmoothK = 2, kSmoothV = 4, kFullBias = 8, kHasQk = 16, kHasV = 32, kHalfV = 64 };

// quantize_sm80 with ROTATED: what becomes of rows of Q and K besides.
struct Rotation {
    static constexpr bool kPresent = true;
    uint32 signs[8];  // bit c % 32 of word c / 32: whether channel c changes its sign
    int32 channels;  // of a block that is transformed by itself, a power of two from 32 on; 0: no rotation
    float norm;  // 1 / sqrt(channels)
    int32 to_e4m3;  // elements are e4m3, and no integers
    int32 reserved;
};
struct QuantizeRotatedParams {
    QuantizeParams quantize;
    Rotation rotation;
};

// quantize_delta_sm80.
struct QuantizeDeltaParams {
    QuantizeParams quantize;
    float* delta_s;
};
