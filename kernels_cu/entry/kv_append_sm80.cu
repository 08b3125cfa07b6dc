// New tokens into a KV cache: rotary embedding of K, transforms of K, quantization, scatter.
//
//   k' = H (rope(k) - k_mean) / k_channel_scale;   code = clip(round((x - zero) / scale))
//
// Formats: docs/kv_formats.md.
//
// k, v: [batch, tokens, num_kv_heads, head_dim] or packed [rows, num_kv_heads, head_dim], any strides, last dimension
// contiguous. Token i of n new ones goes to position seq_lens[b] - n + i, or packed token i to slots[i]; positions,
// blocks and slots outside the cache are passed over. With a recent window the newest tokens go to its rings too, in 16
// bits, rotated and not otherwise changed.
//
// One CTA takes 2048 / head_dim tokens of one head (packed or not, one sequence behind the other); a lane has 16
// channels of a token's K and 16 of its V: those that lie together in the cache's rows, so that what is read in 8 bytes
// is written in 16 (int4: in 8), and rows of a warp follow each other in the cache. fp32 throughout, rounded as the
// NumPy reference does, bit for bit. No barrier and no shared memory; no two lanes write the same byte.
#include "decode/kv_quantize.cuh"
#include "decode/kv_row.cuh"
#include "decode/recent_window.cuh"
#include "params/kv_append.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16: k, v, and 16-bit caches
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kThreads = 128;
    static constexpr int kCtas = kHeadDim == 64 ? 6 : 7;  // on an SM: 80 and 72 registers
    static constexpr int kLanes = kHeadDim / 16;  // of a row
    static constexpr int kRows = kThreads / kLanes;  // of a CTA
};
using KChunk = KvChunk<K_KIND, Config::kHeadDim, 4>;
using VChunk = KvChunk<V_KIND, Config::kHeadDim, 8>;
constexpr bool kInOrder = kv_in_order(K_KIND);  // the caller's arrays in 8 bits
constexpr bool kPlaces = (K_KIND == kKv16 && V_KIND == kKv16) || kInOrder;  // rows are where the strides say
static_assert(!(kInOrder || kv_in_order(V_KIND)) || K_KIND == V_KIND, "K and V of a caller are alike");

// The chunk's 16 channels of a row, padding as zeros.
template <typename Chunk>
OA_DEVICE void load_chunk(ChunkWords& w, const uint16* from, int32 head_dim, int at) {
    // A unit's address is this plus a constant.
    int first = Chunk::channel(at, 0);
    from += first;
    constexpr bool kPairs = Chunk::channel(0, 1) == 4;  // units are adjacent in pairs
    auto load = [&](int unit) {
        if (kPairs) {
            uint4 x = *reinterpret_cast<const uint4*>(from + Chunk::channel(0, unit));
            w[unit][0] = x.x, w[unit][1] = x.y, w[unit + 1][0] = x.z, w[unit + 1][1] = x.w;
        } else {
            uint2 x = *reinterpret_cast<const uint2*>(from + Chunk::channel(0, unit));
            w[unit][0] = x.x, w[unit][1] = x.y;
        }
    };
    if (head_dim == Config::kHeadDim) {
#pragma unroll
        for (int unit = 0; unit < 4; unit += kPairs ? 2 : 1) load(unit);
        return;
    }
#pragma unroll
    for (int unit = 0; unit < 4; ++unit) w[unit][0] = w[unit][1] = 0;
#pragma unroll
    for (int unit = 0; unit < 4; unit += kPairs ? 2 : 1)
        if (first < head_dim - Chunk::channel(0, unit)) load(unit);
}

OA_DEVICE void to_values(const ChunkWords& w, ChunkValues& x) {
    Config::Io io;
#pragma unroll
    for (int unit = 0; unit < 4; ++unit)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            x[unit][2 * i] = low_float(io, w[unit][i]);
            x[unit][2 * i + 1] = high_float(io, w[unit][i]);
        }
}

// Rotation of channel c, whose own value is x, by row `cos`, `sin` of the tables.
OA_DEVICE float rotate_one(const KvAppendParams& p, const uint16* k, const float* cos, const float* sin, int c,
                           float x) {
    int n = p.rope_pairs;
    if (c >= 2 * n) return x;
    bool interleaved = p.rope == kRopeInterleaved, second = interleaved ? c & 1 : c >= n;
    int pair = interleaved ? c >> 1 : second ? c - n : c;
    int partner = interleaved ? c ^ 1 : second ? c - n : c + n;
    float other = to_float(Config::Io{}, k[partner]);
    float a = mul_rn(x, cos[pair]), b = mul_rn(other, sin[pair]);
    return second ? a + b : a - b;
}

// The same for a whole unit, where the pairs' halves begin at units.
OA_DEVICE void rotate_halves(const KvAppendParams& p, const uint16* k, const float* cos, const float* sin, int c,
                             float (&x)[4]) {
    int n = p.rope_pairs;
    if (c >= 2 * n) return;
    bool second = c >= n;
    uint2 w = *reinterpret_cast<const uint2*>(k + (second ? c - n : c + n));
    Config::Io io;
    float other[4] = {low_float(io, w.x), high_float(io, w.x), low_float(io, w.y), high_float(io, w.y)};
    float4 cs = *reinterpret_cast<const float4*>(cos + (second ? c - n : c));
    float4 sn = *reinterpret_cast<const float4*>(sin + (second ? c - n : c));
    float sign = second ? 1.0f : -1.0f;
    x[0] = mul_rn(x[0], cs.x) + sign * mul_rn(other[0], sn.x);
    x[1] = mul_rn(x[1], cs.y) + sign * mul_rn(other[1], sn.y);
    x[2] = mul_rn(x[2], cs.z) + sign * mul_rn(other[2], sn.z);
    x[3] = mul_rn(x[3], cs.w) + sign * mul_rn(other[3], sn.w);
}

// Where the channels of the row's other half are that a chunk's are rotated with: the bit of the lane's number, or of
// the unit's, that differs.
struct OtherHalf {
    int lanes = 0, units = 0;
    OA_DEVICE constexpr OtherHalf() {
        for (int bit = 1; bit < KChunk::kChunks; bit <<= 1)
            if (KChunk::channel(bit, 0) == Config::kHeadDim / 2) lanes = bit;
        for (int bit = 1; bit < 4; bit <<= 1)
            if (KChunk::channel(0, bit) == Config::kHeadDim / 2) units = bit;
    }
};

// The same for a chunk of a row that is rotated as a whole, without padding. All lanes of a warp call it: one has the
// other half in its own units, or another lane of its row has it. Angles of two units are loaded at once.
OA_DEVICE void rotate_row(const ChunkWords& raw, const float* cos, const float* sin, int at, ChunkValues& x) {
    constexpr int kHalf = Config::kHeadDim / 2;
    constexpr OtherHalf kOther;
    static_assert((kOther.lanes == 0) != (kOther.units == 0), "a channel's first bit is a lane's or a unit's");
    Config::Io io;
    int from = KChunk::channel(at, 0) & (kHalf - 1);
#pragma unroll
    for (int first = 0; first < 4; first += 2) {
        float4 cs[2], sn[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int c = from + (KChunk::channel(0, first + i) & (kHalf - 1));
            cs[i] = *reinterpret_cast<const float4*>(cos + c);
            sn[i] = *reinterpret_cast<const float4*>(sin + c);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32(&theirs)[2] = raw[(first + i) ^ kOther.units];
            uint32 w[2] = {theirs[0], theirs[1]};
            if (kOther.lanes > 0) {
                w[0] = __shfl_xor_sync(0xffffffffu, w[0], kOther.lanes);
                w[1] = __shfl_xor_sync(0xffffffffu, w[1], kOther.lanes);
            }
            float sign = (at & kOther.lanes) != 0 || ((first + i) & kOther.units) != 0 ? 1.0f : -1.0f;
            const uint32(&own)[2] = raw[first + i];
            float (&y)[4] = x[first + i];
            y[0] = mul_rn(low_float(io, own[0]), cs[i].x) + sign * mul_rn(low_float(io, w[0]), sn[i].x);
            y[1] = mul_rn(high_float(io, own[0]), cs[i].y) + sign * mul_rn(high_float(io, w[0]), sn[i].y);
            y[2] = mul_rn(low_float(io, own[1]), cs[i].z) + sign * mul_rn(low_float(io, w[1]), sn[i].z);
            y[3] = mul_rn(high_float(io, own[1]), cs[i].w) + sign * mul_rn(high_float(io, w[1]), sn[i].w);
        }
    }
}

// x: the elements `raw`, rotated. All lanes of a warp.
OA_DEVICE void rotate(const KvAppendParams& p, const uint16* k, const ChunkWords& raw, int32 position, int at,
                      ChunkValues& x) {
    const float* cos = p.cos + int64(position) * p.rope_pairs;
    const float* sin = p.sin + int64(position) * p.rope_pairs;
    bool whole_units = p.rope == kRopeHalf && p.rope_pairs % 4 == 0 &&
                       ((reinterpret_cast<uint64>(p.cos) | reinterpret_cast<uint64>(p.sin)) & 15) == 0;
    if (whole_units && 2 * p.rope_pairs == Config::kHeadDim && p.head_dim == Config::kHeadDim &&
        __all_sync(0xffffffffu, position < p.rope_rows)) {
        rotate_row(raw, cos, sin, at, x);
        return;
    }
    to_values(raw, x);
#pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
        int channel = KChunk::channel(at, unit);
        if (channel >= p.head_dim) continue;
        if (position >= p.rope_rows) {  // there is no angle
            x[unit][0] = x[unit][1] = x[unit][2] = x[unit][3] = quiet_nan();
        } else if (whole_units) {
            rotate_halves(p, k, cos, sin, channel, x[unit]);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) x[unit][e] = rotate_one(p, k, cos, sin, channel + e, x[unit][e]);
        }
    }
}

// What a quantized cache stores in place of K.
OA_DEVICE void transform_key(const KvAppendParams& p, int32 head, int at, ChunkValues& x) {
#pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
        int channel = KChunk::channel(at, unit);
        if (channel >= p.head_dim) continue;
        int64 from = int64(head) * p.head_dim + channel;
        if (p.k_mean != nullptr) {
            float4 m = *reinterpret_cast<const float4*>(p.k_mean + from);
            x[unit][0] -= m.x, x[unit][1] -= m.y, x[unit][2] -= m.z, x[unit][3] -= m.w;
        }
        if (p.k_channel_scale != nullptr) {
            float4 s = *reinterpret_cast<const float4*>(p.k_channel_scale + from);
            x[unit][0] = div_rn(x[unit][0], s.x);
            x[unit][1] = div_rn(x[unit][1], s.y);
            x[unit][2] = div_rn(x[unit][2], s.z);
            x[unit][3] = div_rn(x[unit][3], s.w);
        }
    }
    if (p.hadamard) hadamard_row<KChunk, Config::kHeadDim>(x, at);
}

// A row of the caller's arrays in 8 bits. `scales`: where the row's own scale goes, or (row_scales is 0) the scale that
// all have, null for 1.
template <int kKind>
OA_DEVICE void store_in_order(const KvAppendParams& p, uint8* to, uint32* scales, const ChunkValues& x, bool writes,
                              int at) {
    using Quantizer = InOrderQuantizer<kKind, Config::kHeadDim>;
    float scale = p.row_scales ? Quantizer::scale_of(x) : scales == nullptr ? 1.0f : __uint_as_float(*scales);
    uint32 w[4];
    Quantizer::quantize(x, scale, w);
    if (!writes) return;
    if (p.row_scales && at == 0) *scales = __float_as_uint(scale);
    if (at < p.row_chunks) *reinterpret_cast<uint4*>(to + 16 * at) = make_uint4(w[0], w[1], w[2], w[3]);
}

// `raw`: the elements of x, if nothing has changed them (`as_they_were`).
template <int kKind, int kGroups, bool kIsKey>
OA_DEVICE void store_row(const KvAppendParams& p, uint8* data, uint32* params, uint64 row, const ChunkValues& x,
                         const ChunkWords& raw, bool as_they_were, int32 valid_dim, bool zero_point, bool writes,
                         int at) {
    using Chunk = KvChunk<kKind, Config::kHeadDim, kIsKey ? 4 : 8>;
    constexpr bool kFbgemm = kKind == kKvFbgemm;  // parameters in front of the codes
    uint8* to = data + row * (kPlaces   ? p.place_bytes
                              : kFbgemm ? FbgemmRow<Config::kHeadDim, kGroups>::kBytes
                                        : Chunk::Row::kBytes);
    params = kFbgemm ? reinterpret_cast<uint32*>(to) : params + row * kGroups;
    if constexpr (kKind == kKv16) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float (&a)[4] = x[2 * i];
            const float (&b)[4] = x[2 * i + 1];
            Config::Io io;
            uint4 w =
                make_uint4(pack2(io, a[0], a[1]), pack2(io, a[2], a[3]), pack2(io, b[0], b[1]), pack2(io, b[2], b[3]));
            int channel = Chunk::channel(at, 2 * i);
            if (writes && (!kPlaces || channel < 8 * p.row_chunks)) *reinterpret_cast<uint4*>(to + 2 * channel) = w;
        }
    } else {
        using Quantizer = KvQuantizer<kKind, Config::kHeadDim, kIsKey ? 4 : 8, kGroups>;
        uint32 w[Chunk::kBytes / 4];
        float low[Quantizer::kParts], high[Quantizer::kParts];
        if (as_they_were) {
            Quantizer::extremes(Config::Io{}, raw, valid_dim, at, low, high);
        } else {
            Quantizer::extremes(x, valid_dim, at, low, high);
        }
        Quantizer::quantize(x, low, high, w, params, valid_dim < Config::kHeadDim, zero_point, writes, at);
        if (!writes) return;
        to += at * Chunk::kBytes;
        if constexpr (kFbgemm) {  // rows are aligned to 4 bytes
            reinterpret_cast<uint32*>(to)[kGroups] = w[0];
            reinterpret_cast<uint32*>(to)[kGroups + 1] = w[1];
        } else if constexpr (Chunk::kBytes == 16) {
            *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
        } else {
            *reinterpret_cast<uint2*>(to) = make_uint2(w[0], w[1]);
        }
    }
}

// Number `at` of an array of 32 or 64 bits.
OA_DEVICE int64 number_of(const void* from, int32 wide, int32 at) {
    return wide ? static_cast<const int64*>(from)[at] : static_cast<const int32*>(from)[at];
}

// Where a row of the cache is: its number in the planes, or (kPlaces) its place.
OA_DEVICE uint32 cache_row(const KvAppendParams& p, uint32 block, int32 head, uint32 in_block) {
    if (kPlaces) return block * p.block_places + uint32(head) * p.head_places + in_block * p.token_places;
    return K_KIND == kKvFbgemm ? (block * p.block_size + in_block) * p.num_kv_heads + head
                               : (block * p.num_kv_heads + head) * p.block_size + in_block;
}

// The sequence that a packed row belongs to.
OA_DEVICE int32 sequence_of(const KvAppendParams& p, int32 row) {
    int32 low = 0, high = p.batch;  // cu_seqlens[low] <= row < cu_seqlens[high], if it belongs to any
    while (high - low > 1) {
        int32 middle = (low + high) >> 1;
        if (p.cu_seqlens[middle] <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// The recent window (decode/recent_window.cuh): whether this token is kept in 16 bits too, and in which row. Of a
// prompt the ring keeps the end only: earlier tokens would have the same rows. `first`: position of the first of the
// sequence's new tokens.
OA_DEVICE bool recent_place(const KvAppendParams& p, int32 sequence, int32 head, int64 position, int64 first,
                            bool is_token, int at, uint64& row) {
    int32 length = p.seq_lens[sequence];
    uint32 slot = p.recent_slots == nullptr ? sequence : p.recent_slots[sequence];
    if (!is_token || slot >= uint32(p.recent_num_slots)) return false;
    // A row without new tokens, such as padding with seq_lens 0, must not touch a ring that may be another row's.
    if (position == length - 1 && position >= 0 && head == 0 && at == 0)
        recent_append(p.recent_state + 2 * int64(slot), int32(max_of<int64>(first, 0)), length, p.recent_ring);
    row = (uint64(slot) * p.num_kv_heads + head) * p.recent_ring + uint32(position) % uint32(p.recent_ring);
    return position >= 0 && position < p.capacity && position >= int64(length) - p.recent_ring;
}

template <typename Chunk>
OA_DEVICE void store_recent(uint8* plane, uint64 row, const ChunkValues& x, int at) {
    Config::Io io;
#pragma unroll
    for (int unit = 0; unit < 4; ++unit)
        *reinterpret_cast<uint2*>(plane + 2 * (row * Config::kHeadDim + Chunk::channel(at, unit))) =
            make_uint2(pack2(io, x[unit][0], x[unit][1]), pack2(io, x[unit][2], x[unit][3]));
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtas) kv_append_sm80(
    const __grid_constant__ KvAppendParams p) {
    int32 row_block = quotient(blockIdx.x, p.heads_multiplier, p.heads_shift);
    int32 head = int32(blockIdx.x) - row_block * p.num_kv_heads;
    int64 wanted = int64(row_block) * Config::kRows + threadIdx.x / Config::kLanes;
    int at = threadIdx.x % Config::kLanes;
    // Lanes beyond the last row work on it too, and write nothing: shuffles need every lane.
    bool writes = wanted < p.rows;
    int32 row = int32(min_of<int64>(wanted, p.rows - 1));
    int32 sequence = 0, begin = 0, count = 0;
    bool by_slot = p.slots != nullptr;
    if (!by_slot && p.cu_seqlens == nullptr) {
        sequence = quotient(row, p.tokens_multiplier, p.tokens_shift);
        begin = sequence * p.tokens;
        count = p.tokens;
    } else if (!by_slot) {
        sequence = sequence_of(p, row);
        begin = p.cu_seqlens[sequence];
        count = p.cu_seqlens[sequence + 1] - begin;
        writes &= row >= begin && row - begin < count;
    }
    int64 position = by_slot ? 0 : int64(p.seq_lens[sequence]) - count + (row - begin);
    uint64 recent_row = 0;
    bool recent = false;
    if (!kPlaces && p.recent_ring > 0)
        recent = recent_place(p, sequence, head, position, position - (row - begin), writes, at, recent_row);
    bool in_cache = position >= 0 && position < p.capacity;
    writes &= in_cache;
    uint32 at_row = 0, at_scale = 0;  // a cache has fewer than 2^32
    if (by_slot) {
        int64 slot = number_of(p.slots, p.wide_slots, row);
        in_cache = slot >= 0 && slot < int64(p.num_blocks) * p.block_size;
        writes &= in_cache;
        uint32 block = uint32(slot) / uint32(p.block_size);
        uint32 in_block = uint32(slot) - block * uint32(p.block_size);
        at_row = cache_row(p, block, head, in_block);
        at_scale = block * p.scale_outer + uint32(head) * p.scale_head + in_block * p.scale_token;
        if (p.rope != kRopeNone) {  // a position without angles is any such
            position = number_of(p.positions, p.wide_positions, row);
            if (position < 0 || position > p.rope_rows) position = p.rope_rows;
        }
    } else if (writes) {
        uint32 index = 0, block = sequence;
        if (p.block_table != nullptr) {
            index = uint32(quotient(int32(position), p.block_multiplier, p.block_shift));
            block = p.block_table[int64(sequence) * p.table_columns + index];
        }
        writes = block < uint32(p.num_blocks);
        uint32 in_block = uint32(position) - index * p.block_size;
        at_row = cache_row(p, block, head, in_block);
        at_scale = block * p.scale_outer + uint32(head) * p.scale_head + in_block * p.scale_token;
    }
    // The row's index in its own array: packed rows have stride_b 0.
    uint64 in_sequence = uint32(p.cu_seqlens == nullptr ? row - begin : row);
    const uint16* k = p.k + uint64(uint32(sequence)) * p.k_stride_b + in_sequence * p.k_stride_s +
                      uint64(uint32(head)) * p.k_stride_h;
    const uint16* v = p.v + uint64(uint32(sequence)) * p.v_stride_b + in_sequence * p.v_stride_s +
                      uint64(uint32(head)) * p.v_stride_h;
    ChunkWords raw_key, raw_value;
    load_chunk<KChunk>(raw_key, k, p.head_dim, at);
    load_chunk<VChunk>(raw_value, v, p.head_dim, at);
    ChunkValues x;
    bool changed = p.rope != kRopeNone;
    if (!changed) to_values(raw_key, x);
    if (changed)
        rotate(p, k, raw_key, in_cache ? int32(position) : 0, at, x);  // tokens outside the cache are not written
    if (recent) store_recent<KChunk>(p.recent_k, recent_row, x, at);
    if (K_KIND != kKv16 && (p.k_mean != nullptr || p.k_channel_scale != nullptr || p.hadamard)) {
        changed = true;
        transform_key(p, head, at, x);
    }
    if constexpr (kInOrder) {
        auto scales = [&](uint32* all) {
            return all == nullptr ? nullptr : all + (p.row_scales ? at_scale : uint32(head) * p.scale_head);
        };
        const uint64 before = uint64(at_row) * p.place_bytes;
        store_in_order<K_KIND>(p, p.k_data + before, scales(p.k_params), x, writes, at);
        to_values(raw_value, x);
        store_in_order<V_KIND>(p, p.v_data + before, scales(p.v_params), x, writes, at);
        return;
    }
    store_row<K_KIND, K_GROUPS, true>(p, p.k_data, p.k_params, at_row, x, raw_key, !changed,
                                      p.hadamard ? Config::kHeadDim : p.head_dim, p.zero_point, writes, at);
    to_values(raw_value, x);
    if (recent) store_recent<VChunk>(p.recent_v, recent_row, x, at);
    store_row<V_KIND, V_GROUPS, false>(p, p.v_data, p.v_params, at_row, x, raw_value, true, p.head_dim, p.zero_point,
                                       writes, at);
}
