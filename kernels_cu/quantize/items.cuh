// Work items of the quantizers: their order, and what an item waits for.
//
//   partial sums of group 0 | partial sums of group 1, [amax], Q and V, K, means of V of group 0 | sums of group 2, ...
//
// The sums are of samples of long sequences (quantize/sampling.cuh); one group of kv heads ahead, so that no item waits
// for them long. Items are taken by ticket, in this order: whatever an item waits for has been taken before it, by a
// CTA that runs, so there is no deadlock however the CTAs are scheduled.
#pragma once
#include "params/quantize.cuh"
#include "ptx/gpu_sync.cuh"
#include "quantize/sampling.cuh"
#include "scheduler/slots.cuh"

constexpr uint32 kReady = 0x80000000u;  // of a counter: all arrivals are in, and the result is written

// COMMON: a kernel for the defaults of attention(precision="int8") only: dense batches of Q, K and V, int8 with one
// scale a thread, all but Q smoothed, the grouping sm90 or sm80 (GROUPING: 90, 80), V to V_TYPE (E4m3, Half). Arguments
// of the general kernel are constants there. PACKED: of packed sequences, and K and V alone.
constexpr bool kCommon = COMMON;
constexpr int32 kCommonFlags = kSmoothK | kSmoothV | kHasQk | kHasV | (V_TYPE::kBytes == 2 ? kHalfV : 0);
constexpr int32 kCommonKeyTile = GROUPING == 90 ? 128 : 64, kCommonQuerySlice = GROUPING == 90 ? 16 : 32;
OA_DEVICE bool has(const QuantizeParams& p, Flag flag) { return ((kCommon ? kCommonFlags : p.flags) & flag) != 0; }
OA_DEVICE bool is_packed(const QuantizeParams& p) { return kCommon ? PACKED : p.packed != 0; }
OA_DEVICE int32 granularity_of(const QuantizeParams& p) { return kCommon ? kPerThread : p.granularity; }
OA_DEVICE int32 bits_of(const QuantizeParams& p) { return kCommon ? 8 : p.bits; }
OA_DEVICE int32 levels_of(const QuantizeParams& p) { return kCommon ? 127 : p.levels; }
OA_DEVICE int32 key_tile_of(const QuantizeParams& p) { return kCommon ? kCommonKeyTile : p.key_tile; }
OA_DEVICE int32 query_slice_of(const QuantizeParams& p) { return kCommon ? kCommonQuerySlice : p.q_group_rows; }

// Blocks of one kind, `parts` to a kv head and row of blocks: all heads of a batch entry before the next rows, because
// they are adjacent in the inputs; all rows of a batch entry before the next one, because they are adjacent in the
// outputs.
struct BlockOrder {
    uint32 row, unit, part;
    OA_DEVICE BlockOrder(uint32 index, uint32 units, uint32 rows, uint32 parts, uint32 heads) {
        uint32 per_entry = heads * rows * parts, entry = index / per_entry;
        uint32 first_unit = entry * heads;
        index -= entry * per_entry;
        heads = min_of(heads, units - first_unit);
        uint32 per_row = heads * parts;
        row = index / per_row;
        index -= row * per_row;
        unit = index / parts;
        part = index - unit * parts;
        unit += first_unit;
    }
};

// Blocks of Q before the first one of V: the sums are done by then.
constexpr uint32 kQueriesAhead = 1024;

// Items of one unit that wait for all of a sequence's V.
OA_DEVICE int32 finish_items(const QuantizeParams& p) { return has(p, kHasV) ? (is_packed(p) ? p.batch : 1) : 0; }

// Heads whose rows are interleaved: those of a batch entry, if a group has no part of one.
OA_DEVICE uint32 interleaved_heads(const QuantizeParams& p, uint32 units) {
    return is_packed(p) || p.num_groups > 1 ? units : uint32(p.num_kv_heads);
}

// Splits an item of the second half of a group's step. Some of Q comes first, during the sums; then kinds alternate,
// because they are bound by different units.
OA_DEVICE void decode_pass(const QuantizeParams& p, QuantizeItem& t, uint32 group, uint32 units, uint32 off) {
    uint32 span, heads = has(p, kHasQk) && p.num_kv_heads ? p.num_q_heads / p.num_kv_heads : 0;
    uint32 interleaved = interleaved_heads(p, units);
    auto assign = [&](ItemKind kind, uint32 index, uint32 rows, uint32 parts) {
        BlockOrder place(index, units, rows, parts, interleaved);
        t.kind = kind;
        t.unit = group * p.units_per_group + place.unit, t.slot = place.row, t.head = place.part;
    };
    uint32 of_q = units * heads * p.slots_q, of_k = has(p, kHasQk) ? units * p.slots_k : 0,
           of_v = has(p, kHasV) ? units * p.slots_k : 0;
    if (off < (span = kCommon ? 0 : units * p.per_unit_a))
        return off < of_q ? assign(kAmaxQ, off, p.slots_q, heads) : assign(kAmaxK, off - of_q, p.slots_k, 1);
    off -= span;
    // Q alone | Q and V | the rest of Q or V, V alternating with K | the rest of V or K | means of V
    uint32 ahead = min_of(of_q, kQueriesAhead), with_q = min_of(of_q - ahead, of_v), rest_q = of_q - ahead - with_q,
           rest_v = of_v - with_q, with_k = min_of(rest_v, of_k);
    if (off < ahead) return assign(kQuantizeQ, off, p.slots_q, heads);
    off -= ahead;
    if (off < (span = 2 * with_q))
        return off & 1 ? assign(kQuantizeV, off >> 1, p.slots_k, 1)
                       : assign(kQuantizeQ, ahead + (off >> 1), p.slots_q, heads);
    off -= span;
    if (off < rest_q) return assign(kQuantizeQ, ahead + with_q + off, p.slots_q, heads);
    off -= rest_q;
    if (off < (span = 2 * with_k))
        return off & 1 ? assign(kQuantizeK, off >> 1, p.slots_k, 1)
                       : assign(kQuantizeV, with_q + (off >> 1), p.slots_k, 1);
    off -= span;
    if (off < (span = rest_v - with_k)) return assign(kQuantizeV, with_q + with_k + off, p.slots_k, 1);
    off -= span;
    if (off < (span = of_k - with_k)) return assign(kQuantizeK, with_k + off, p.slots_k, 1);
    assign(kFinishV, off - span, finish_items(p), 1);
}

OA_DEVICE int32 blocks_of(int32 len) { return int32((uint32(len) + kBlockRows - 1) / kBlockRows); }

// First byte of row 0 of the item's sequence and head in an input of 16-bit elements.
OA_DEVICE const uint8* input_rows(const uint8* x, const QuantizeItem& t, int64 stride_b, int64 stride_s, int64 stride_h,
                                  bool dense) {
    return x + 2 * ((dense ? t.batch_idx * stride_b : 0) + t.head * stride_h + int64(t.begin) * stride_s);
}

// By all lanes of a warp, which all return the same; of COMMON kernels by any thread for itself.
OA_DEVICE QuantizeItem decode_item(const QuantizeParams& p, uint32 ticket) {
    QuantizeItem t;
    t.head = 0;
    uint32 full_r = p.units_per_group * p.per_unit_r;
    uint32 rest_units = p.units - (p.num_groups - 1) * p.units_per_group;  // of the last group
    uint32 group = 0, units = p.num_groups == 1 ? rest_units : p.units_per_group, off = ticket;
    bool reduce = off < units * p.per_unit_r;
    if (!reduce) {
        off -= units * p.per_unit_r;
        uint32 per_unit = p.per_unit_a + p.per_unit_q + p.per_unit_kv + finish_items(p);
        uint32 following = 0;
        if (off >= uint32(p.last_base)) {
            group = p.num_groups - 1;
            off -= p.last_base;
        } else {
            uint32 step = full_r + p.units_per_group * per_unit;
            group = off / step;
            off -= group * step;
            following = (int32(group) + 2 == p.num_groups ? rest_units : p.units_per_group) * p.per_unit_r;
        }
        units = int32(group) + 1 == p.num_groups ? rest_units : p.units_per_group;
        if (off < following) {
            reduce = true;
            ++group;
        } else {
            off -= following;
        }
    }
    if (reduce) {
        bool has_k = has(p, kSmoothK), has_v = has(p, kHasV);
        units = int32(group) + 1 == p.num_groups ? rest_units : p.units_per_group;
        BlockOrder place(off, units, p.slots_r, has_k && has_v ? 2 : 1, units);
        t.kind = place.part == 1 || !has_k ? kReduceV : kReduceK;
        t.unit = group * p.units_per_group + place.unit, t.slot = place.row;
    } else {
        decode_pass(p, t, group, units, off);
    }

    // Unit and slot to sequence, head and rows.
    bool dense = !is_packed(p);
    bool is_q = t.kind == kAmaxQ || t.kind == kQuantizeQ;
    t.batch_idx = dense ? t.unit / p.num_kv_heads : 0;
    int32 kv_head = dense ? t.unit - t.batch_idx * p.num_kv_heads : t.unit;
    int32 rows = t.kind == kReduceK || t.kind == kReduceV ? kChunkRows : kBlockRows;
    if (is_q) {
        int32 per_kv = p.num_q_heads / p.num_kv_heads;
        t.unit = t.unit * per_kv + t.head;
        t.head = kv_head * per_kv + t.head;
    } else {
        t.head = kv_head;
    }
    int32 total = is_q ? p.seqlen_q : p.seqlen_k;
    t.index = t.slot;
    t.begin = 0;
    t.len = total;
    if (!dense) {
        const int32* cu = is_q ? p.cu_seqlens_q : p.cu_seqlens_k;
        t.batch_idx = t.kind == kFinishV ? t.slot : sequence_of_slot(cu, p.batch, total, t.slot, rows);
        Sequence s = used_sequence(cu, is_q ? p.seqused_q : p.seqused_k, t.batch_idx, total);
        t.begin = s.begin;
        t.len = s.len;
        int32 first = first_slot(s.begin, t.batch_idx, rows);
        if (t.kind == kFinishV) t.slot = first;
        t.index = t.slot - first;
    }
    int32 filled = rows == kChunkRows ? num_chunks(num_samples(t.len)) : blocks_of(t.len);
    if (t.index < 0 || t.index >= filled) t.batch_idx = -1;
    if constexpr (kCommon) {
        int32 first = rows == kChunkRows ? 0 : t.index * kBlockRows;
        bool is_k = t.kind == kReduceK || t.kind == kQuantizeK;
        t.stride_bytes = 2 * (is_q ? p.q_stride_s : is_k ? p.k_stride_s : p.v_stride_s);
        t.rows = is_q   ? input_rows(p.q, t, p.q_stride_b, p.q_stride_s, p.q_stride_h, true)
                 : is_k ? input_rows(p.k, t, p.k_stride_b, p.k_stride_s, p.k_stride_h, true)
                        : input_rows(p.v, t, p.v_stride_b, p.v_stride_s, p.v_stride_h, true);
        t.rows += first * t.stride_bytes;
    }
    return t;
}

// Index of the item's (batch, head) among counters and per-sequence results.
OA_DEVICE int64 sequence_head(const QuantizeItem& t, int32 num_heads) {
    return int64(t.batch_idx) * num_heads + t.head;
}

// First row of the item's sequence in an output [unit, rows, ...]; dense outputs have len rows a unit.
OA_DEVICE int64 output_row(const QuantizeItem& t, int32 rows_of_unit) { return int64(t.unit) * rows_of_unit + t.begin; }

// Where the item's rows begin in an input: row `first` of its sequence and head.
OA_DEVICE const uint8* item_rows(const QuantizeParams& p, const QuantizeItem& t, const uint8* x, int64 stride_b,
                                 int64 stride_s, int64 stride_h, int32 first) {
    return kCommon ? t.rows : input_rows(x, t, stride_b, stride_s, stride_h, !is_packed(p)) + 2 * stride_s * first;
}

// Any thread, for itself: waits until `word` is at least `target`. The lanes of a warp poll together.
OA_DEVICE void wait_for_own(const uint32* word, uint32 target) {
    while (load_acquire(word) < target) nanosleep(64);
}

// Per-channel arrays that another CTA writes before it releases `word`, into shared memory, by the CTA's last threads:
// one copy for all, because every CTA of a head reads the same few lines. A barrier has to follow. kArrays: 1, or 2:
// both at once, because to wait and to read takes a microsecond and more.
template <int kHeadDim, int kArrays>
OA_DEVICE void fetch_channels(const uint32* word, const float* (&from)[kArrays], int32 head_dim_pad,
                              float* (&to)[kArrays]) {
    constexpr int kLanes = kHeadDim / 4;
    int32 lane = int32(threadIdx.x) - (2 * kHeadDim - kArrays * kLanes);
    if (lane < 0) return;
    const float* x = from[0];
    float* y = to[0];
    if (kArrays == 2 && lane >= kLanes) x = from[kArrays - 1], y = to[kArrays - 1], lane -= kLanes;
    wait_for_own(word, kReady);
    float4 values{0.0f, 0.0f, 0.0f, 0.0f};
    if (lane * 4 < head_dim_pad) values = load_gpu(reinterpret_cast<const float4*>(x) + lane);
    reinterpret_cast<float4*>(y)[lane] = values;
}

// All threads, after their writes, which whoever reads `word` with an acquire sees.
OA_DEVICE void arrive(uint32* word) {
    __syncthreads();
    if (threadIdx.x == 0) reduce_add_release(word, 1);
}

// All threads, after their writes: true in all of them for the CTA that is the last of `expected` to arrive; that CTA
// sees what the others wrote. `flag` is a word of shared memory.
OA_DEVICE bool arrive_is_last(uint32* word, uint32 expected, uint32* flag) {
    __syncthreads();
    if (threadIdx.x == 0) *flag = atomic_add_acq_rel(word, 1) + 1 == expected;
    __syncthreads();
    return *flag != 0;
}
