// Keys and values of a quantized cache in 16 bits, in pages for attention over pages to read.
//
//   x = scale * code + zero;   K: x = H x * k_channel_scale + k_mean   (H: orthonormal, its own inverse)
//
// What `append` did to K is undone, so that queries stay as they are. Tokens of a recent window come from there.
// Formats: docs/kv_formats.md. Pages: those of the sequences of round `round`, by kv_rounds_sm80.
//
// A CTA takes pages of a head, one after the other; a lane has 16 channels (KvChunk) of a token, of several tokens at a
// time. fp32, rounded once. Memory bound: 1 or 1/2 byte of an element is read, 2 are written. The formats of K and V
// are arguments: six kernels serve all of them.
#include "decode/kv_restore.cuh"
#include "decode/recent_window.cuh"
#include "params/kv_dequantize.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"
#include "scheduler/slots.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16: queries, and 16-bit planes
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kThreads = 128;
    static constexpr int kCtas = 8;  // on an SM
    static constexpr int kLanes = kHeadDim / 16;  // of a row
    static constexpr int kRows = kThreads / kLanes;  // of a CTA at a time
    static constexpr int kBatch = 2;  // rows of a lane whose loads are on their way together
};

// A page to be made, of one head.
struct Job {
    int32 sequence, head;
    int32 first, count;  // keys of the sequence
    int32 recent;        // keys from here on are in the recent window
    uint64 recent_row;   // row 0 of its ring
    int64 to;            // first element in `k` and `v`
};

// Where a row is, and its parameters.
struct Row {
    const uint8* data;
    const uint32* params;  // null: the scale is 1
};

template <int kKind>
OA_DEVICE Row row_of(const KvDequantizeParams& p, const Job& job, int32 key, bool is_key) {
    int32 index = 0, block = job.sequence;
    if (p.block_table != nullptr) {
        index = quotient(key, p.block_multiplier, p.block_shift);
        block = __ldg(p.block_table + int64(job.sequence) * p.table_columns + index);
    }
    block = min_of(max_of(block, 0), p.num_blocks - 1);  // nothing outside of the cache is read
    const uint32 in_block = uint32(key - index * p.block_size);
    const uint8* data = is_key ? p.k_data : p.v_data;
    const uint32* params = is_key ? p.k_params : p.v_params;
    const int32 groups = is_key ? p.k_groups : p.v_groups;
    if constexpr (kv_in_order(kKind)) {
        const uint32 place = block * p.block_places + uint32(job.head) * p.head_places + in_block * p.token_places;
        uint64 at = uint64(uint32(job.head)) * p.scale_head;
        at += p.row_scales ? uint64(uint32(block)) * p.scale_outer + uint64(in_block) * p.scale_token
                           : uint64(uint32(job.sequence)) * p.scale_outer;
        return {data + uint64(place) * p.place_bytes, params == nullptr ? nullptr : params + at};
    }
    constexpr int kBytes = Config::kHeadDim * kv_bits(kKind) / 8;
    if constexpr (kKind == kKvFbgemm) {
        const uint64 row = uint64(uint32(block) * p.block_size + in_block) * p.num_kv_heads + job.head;
        const uint8* from = data + row * (kBytes + 4 * groups);
        return {from, reinterpret_cast<const uint32*>(from)};
    }
    const uint64 row = uint64(uint32(block) * p.num_kv_heads + job.head) * p.block_size + in_block;
    return {data + row * kBytes, kKind == kKv16 ? nullptr : params + row * groups};
}

// K as the caller gave it.
template <typename Chunk>
OA_DEVICE void restore_key(const KvDequantizeParams& p, int32 head, int at, ChunkValues& x) {
    if (p.hadamard) hadamard_row<Chunk, Config::kHeadDim>(x, at);
#pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
        const int channel = Chunk::channel(at, unit);
        if (channel >= p.head_dim) continue;
        const int64 from = int64(head) * p.head_dim + channel;
        if (p.k_channel_scale != nullptr) {
            const float4 s = *reinterpret_cast<const float4*>(p.k_channel_scale + from);
            x[unit][0] = mul_rn(x[unit][0], s.x), x[unit][1] = mul_rn(x[unit][1], s.y);
            x[unit][2] = mul_rn(x[unit][2], s.z), x[unit][3] = mul_rn(x[unit][3], s.w);
        }
        if (p.k_mean != nullptr) {
            const float4 m = *reinterpret_cast<const float4*>(p.k_mean + from);
            x[unit][0] += m.x, x[unit][1] += m.y, x[unit][2] += m.z, x[unit][3] += m.w;
        }
    }
}

// The rows of a page, of K or V. All lanes go through all rows: those of a row exchange elements.
template <int kKind, bool kIsKey>
OA_DEVICE void make_rows(const KvDequantizeParams& p, const Job& job) {
    using Restorer = KvRestorer<kKind, Config::kHeadDim, kIsKey ? 4 : 8>;
    using Chunk = typename Restorer::Chunk;
    const int at = threadIdx.x % Config::kLanes, slot = threadIdx.x / Config::kLanes;
    const int32 groups = kIsKey ? p.k_groups : p.v_groups, group_log2 = 31 - __clz(Config::kHeadDim / groups);
    const bool exists = !kv_in_order(kKind) || at < p.row_chunks;
    const Config::Io io;
    uint16* const to = (kIsKey ? p.k : p.v) + job.to;
#pragma unroll 1
    for (int begin = 0; begin < kPageRows; begin += Config::kRows * Config::kBatch) {
        if (begin >= job.count) return;
        typename Restorer::Words words[Config::kBatch];
        Row rows[Config::kBatch];
#pragma unroll
        for (int i = 0; i < Config::kBatch; ++i) {
            const int32 row = min_of(begin + i * Config::kRows + slot, job.count - 1);
            rows[i] = row_of<kKind>(p, job, job.first + row, kIsKey);
            Restorer::load(rows[i].data, exists ? at : 0, groups, words[i]);
        }
#pragma unroll
        for (int i = 0; i < Config::kBatch; ++i) {
            const int32 row = begin + i * Config::kRows + slot, key = job.first + row;
            ChunkValues x;
            Restorer::codes(io, words[i], x);
            if (kKind != kKv16 && rows[i].params != nullptr)
#pragma unroll
                for (int unit = 0; unit < 4; ++unit) {
                    // The caller's rows have one scale.
                    const int at_word = kv_in_order(kKind) ? 0 : Chunk::channel(at, unit) >> group_log2;
                    const uint32 w = __ldg(rows[i].params + at_word);
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        x[unit][e] = fmaf(param_scale<kKind>(w), x[unit][e], param_zero<kKind>(w));
                }
            if (kIsKey && kKind != kKv16) restore_key<Chunk>(p, job.head, at, x);
            if (row >= job.count) continue;
            const uint64 recent_row = job.recent_row + uint32(key) % uint32(max_of(p.recent_ring, 1));
            const uint16* recent = reinterpret_cast<const uint16*>(kIsKey ? p.recent_k : p.recent_v);
#pragma unroll
            for (int unit = 0; unit < 4; ++unit) {
                const int channel = Chunk::channel(at, unit);
                if (channel >= p.head_dim) continue;
                uint2 w = make_uint2(pack2(io, x[unit][0], x[unit][1]), pack2(io, x[unit][2], x[unit][3]));
                if (key >= job.recent)
                    w = *reinterpret_cast<const uint2*>(recent + recent_row * Config::kHeadDim + channel);
                *reinterpret_cast<uint2*>(to + row * p.head_dim + channel) = w;
            }
        }
    }
}

template <bool kIsKey>
OA_DEVICE void make_page(const KvDequantizeParams& p, const Job& job) {
    switch (kIsKey ? p.k_kind : p.v_kind) {
        case kKv16: return make_rows<kKv16, kIsKey>(p, job);
        case kKvE4m3: return make_rows<kKvE4m3, kIsKey>(p, job);
        case kKvInt8: return make_rows<kKvInt8, kIsKey>(p, job);
        case kKvInt4: return make_rows<kKvInt4, kIsKey>(p, job);
        case kKvFbgemm: return make_rows<kKvFbgemm, kIsKey>(p, job);
        case kKvE4m3InOrder: return make_rows<kKvE4m3InOrder, kIsKey>(p, job);
        default: return make_rows<kKvInt8InOrder, kIsKey>(p, job);
    }
}

// The last sequence that begins at `place` or before it: one that has pages, as those without begin where the next one
// does.
OA_DEVICE int32 sequence_at(const KvDequantizeParams& p, int32 place) {
    int32 low = 0, high = p.batch;
    while (high - low > 1) {
        const int32 middle = (low + high) >> 1;
        const bool before = p.starts[middle] <= place;
        low = before ? middle : low;
        high = before ? high : middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtas) kv_dequantize_sm80(
    const __grid_constant__ KvDequantizeParams p) {
    const int32 begin = p.round * p.pages, pages = p.ends[p.round] - begin;
    for (int32 item = blockIdx.x; item < pages * p.num_kv_heads; item += gridDim.x) {
        const int32 page = quotient(item, p.heads_multiplier, p.heads_shift);
        Job job;
        job.head = item - page * p.num_kv_heads;
        job.sequence = sequence_at(p, begin + page);
        const int32 len = p.lens[job.sequence];
        int32 column = begin + page - p.starts[job.sequence];
        if (p.window_left >= 0) {
            int32 queries = p.q_len;
            if (p.cu_seqlens_q != nullptr) {
                const int32 b = job.sequence;
                queries = packed_sequence(p.cu_seqlens_q, b, p.total_queries).len;
            }
            column += max_of(len - queries - p.window_left, 0) / kPageRows;
        }
        job.first = column * kPageRows;
        job.count = min_of(len - job.first, kPageRows);
        job.to = (int64(page) * p.num_kv_heads + job.head) * kPageRows * p.head_dim;
        job.recent = 0x7fffffff;
        job.recent_row = 0;
        if (p.recent_state != nullptr) {
            const uint32 slot = min_of(uint32(p.recent_slots == nullptr ? job.sequence : p.recent_slots[job.sequence]),
                                       uint32(p.recent_num_slots - 1));
            job.recent = recent_begin(p.recent_state + 2 * int64(slot), len, p.recent_window, p.recent_ring);
            job.recent_row = (uint64(slot) * p.num_kv_heads + job.head) * p.recent_ring;
        }
        if (job.head == 0 && threadIdx.x == 0) p.table[int64(job.sequence) * p.columns + column] = page;
        make_page<true>(p, job);
        make_page<false>(p, job);
    }
}
