// Keys and values of a cache in 16 bits, sequences one behind the other, for attention to read.
//
//   x = scale * code + zero;   K: x = H x * k_channel_scale + k_mean   (H: orthonormal, its own inverse)
//
// What `append` did to K is undone, so that queries stay as they are. Tokens of a recent window come from there. Caches
// in 16 bits are copied. Formats: docs/kv_formats.md. Which sequences, and where: kv_rounds_sm80.
//
// A CTA takes kPageRows tokens of a head at a time; a lane has 16 channels of a token, of several tokens at once. fp32,
// rounded once. Memory bound: 2 bytes of an element or fewer are read, 2 are written. The formats of K and V are
// arguments: six kernels serve all of them.
#include "decode/kv_restore.cuh"
#include "decode/recent_window.cuh"
#include "params/kv_dequantize.cuh"
#include "ptx/types.cuh"
#include "scheduler/keys_in_pages.cuh"
#include "scheduler/quotient.cuh"

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
    int32 seen;  // those before it become zeros
    int32 recent;  // keys from here on are in the recent window
    uint64 recent_row;  // row 0 of its ring
    int64 to;  // first element in `k` and `v`
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
    if (kv_in_order(kKind) || (kKind == kKv16 && p.place_bytes != 0)) {
        const uint32 place = block * p.block_places + uint32(job.head) * p.head_places + in_block * p.token_places;
        uint64 at = uint64(uint32(job.head)) * p.scale_head;
        at += p.row_scales ? uint64(uint32(block)) * p.scale_outer + uint64(in_block) * p.scale_token
                           : uint64(uint32(job.sequence)) * p.scale_outer;
        const bool has_scale = kKind != kKv16 && params != nullptr;
        return {data + uint64(place) * p.place_bytes, has_scale ? params + at : nullptr};
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
template <typename Restorer>
OA_DEVICE void restore_key(const KvDequantizeParams& p, int32 head, int at, ChunkValues& x) {
    if (p.hadamard) hadamard_row<Restorer, Config::kHeadDim>(x, at);
#pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
        const int channel = Restorer::channel(at, unit);
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
    const int at = threadIdx.x % Config::kLanes, slot = threadIdx.x / Config::kLanes;
    const int32 groups = kIsKey ? p.k_groups : p.v_groups, group_log2 = 31 - __clz(Config::kHeadDim / groups);
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
            rows[i] = row_of<kKind>(p, job, max_of(job.first + row, job.seen), kIsKey);
            Restorer::load(rows[i].data, at, groups, p.head_dim, words[i]);
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
                    const int at_word = kv_in_order(kKind) ? 0 : Restorer::channel(at, unit) >> group_log2;
                    const uint32 w = __ldg(rows[i].params + at_word);
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        x[unit][e] = fmaf(param_scale<kKind>(w), x[unit][e], param_zero<kKind>(w));
                }
            if (kIsKey && kKind != kKv16) restore_key<Restorer>(p, job.head, at, x);
            if (row >= job.count) continue;
            const uint64 recent_row = job.recent_row + uint32(key) % uint32(max_of(p.recent_ring, 1));
            const uint16* recent = reinterpret_cast<const uint16*>(kIsKey ? p.recent_k : p.recent_v);
            const bool is_recent = key >= job.recent, is_seen = key >= job.seen;
            constexpr int kStep = Restorer::kNatural ? 2 : 1;  // units that lie together
#pragma unroll
            for (int unit = 0; unit < 4; unit += kStep) {
                const int channel = Restorer::channel(at, unit);
                if (channel >= p.head_dim) continue;
                const uint16* ring = recent + recent_row * Config::kHeadDim + channel;
                uint2 w[kStep];
#pragma unroll
                for (int i = 0; i < kStep; ++i) {
                    const float (&y)[4] = x[unit + i];
                    w[i] = make_uint2(pack2(io, y[0], y[1]), pack2(io, y[2], y[3]));
                    if (is_recent) w[i] = *reinterpret_cast<const uint2*>(ring + 4 * i);
                    if (!is_seen) w[i] = make_uint2(0, 0);
                }
                uint16* own = to + row * p.head_dim + channel;
                if constexpr (kStep == 2) {
                    *reinterpret_cast<uint4*>(own) = make_uint4(w[0].x, w[0].y, w[1].x, w[1].y);
                } else {
                    *reinterpret_cast<uint2*>(own) = w[0];
                }
            }
        }
    }
}

template <bool kIsKey>
OA_DEVICE void make_page(const KvDequantizeParams& p, const Job& job) {
    switch (kIsKey ? p.k_kind : p.v_kind) {
        case kKv16:
            return make_rows<kKv16, kIsKey>(p, job);
        case kKvE4m3:
            return make_rows<kKvE4m3, kIsKey>(p, job);
        case kKvInt8:
            return make_rows<kKvInt8, kIsKey>(p, job);
        case kKvInt4:
            return make_rows<kKvInt4, kIsKey>(p, job);
        case kKvFbgemm:
            return make_rows<kKvFbgemm, kIsKey>(p, job);
        case kKvE4m3InOrder:
            return make_rows<kKvE4m3InOrder, kIsKey>(p, job);
        default:
            return make_rows<kKvInt8InOrder, kIsKey>(p, job);
    }
}

// The last sequence that begins at `row` or before it: one that has keys, as those without begin where the next one
// does.
OA_DEVICE int32 sequence_at(const int32* cu, int32 batch, int32 row) {
    int32 low = 0, high = batch;
    while (high - low > 1) {
        const int32 middle = (low + high) >> 1;
        const bool before = cu[middle] <= row;
        low = before ? middle : low;
        high = before ? high : middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtas) kv_dequantize_sm80(
    const __grid_constant__ KvDequantizeParams p) {
    const int32* cu = p.cu_k + int64(p.round) * (p.batch + 1);
    const int32 pages = cu[p.batch] / kPageRows;
    for (int32 item = blockIdx.x; item < pages * p.num_kv_heads; item += gridDim.x) {
        const int32 page = quotient(item, p.heads_multiplier, p.heads_shift), row = page * kPageRows;
        Job job;
        job.head = item - page * p.num_kv_heads;
        job.sequence = sequence_at(cu, p.batch, row);
        const KeysInPages keys = keys_of(p, job.sequence);
        const int32 before = row - cu[job.sequence];
        job.first = keys.first + before;
        job.count = min_of(keys.count - before, kPageRows);
        job.seen = keys.seen;
        job.to = (int64(job.head) * p.pages * kPageRows + row) * p.head_dim;
        job.recent = 0x7fffffff;
        job.recent_row = 0;
        if (p.recent_state != nullptr) {
            const uint32 slot = min_of(uint32(p.recent_slots == nullptr ? job.sequence : p.recent_slots[job.sequence]),
                                       uint32(p.recent_num_slots - 1));
            job.recent =
                recent_begin(p.recent_state + 2 * int64(slot), keys.first + keys.count, p.recent_window, p.recent_ring);
            job.recent_row = (uint64(slot) * p.num_kv_heads + job.head) * p.recent_ring;
        }
        make_page<true>(p, job);
        make_page<false>(p, job);
    }
}
