// New tokens into a KV cache: rotary embedding of K, changes of K, quantization, scatter.
//
//   k' = H (rope(k) - k_mean) / k_channel_scale;   code = clip(round((x - zero) / scale));   formats: docs/kv_formats.md
//
// k, v: [batch, tokens, num_kv_heads, head_dim] or packed [rows, num_kv_heads, head_dim], any strides, last dimension contiguous.
// Token i of n new ones goes to position seq_lens[b] - n + i; positions and blocks outside the cache are passed over. With a recent
// window the newest ones go to its rings too, in 16 bits, rotated and not otherwise changed.
//
// A warp takes one token of one head (head_dim 64: two), each lane the four channels 4 l .. 4 l + 3, which are a unit of K's and
// of V's row (head_dim 256: and 128 + 4 l on). fp32 throughout, rounded as the NumPy reference does, bit for bit. No shared
// memory; no row's bytes are anybody else's.
#include "attention/kv_quantize.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/types.cuh"
#include "scheduler/kv_append_params.cuh"
#include "scheduler/recent_window.cuh"
#include "tile/kv_row.cuh"

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16: k, v, and 16-bit caches
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kThreads = 256;
    static constexpr int kLanes = kHeadDim / 4 < 32 ? kHeadDim / 4 : 32;  // of a row
    static constexpr int kUnits = kHeadDim / 4 / kLanes;  // of a lane
};
using Values = float[Config::kUnits][4];

template <typename Io>
OA_DEVICE void load_unit(Io io, const uint16* from, float (&x)[4]) {
    uint2 w = *reinterpret_cast<const uint2*>(from);
    x[0] = low_float(io, w.x);
    x[1] = high_float(io, w.x);
    x[2] = low_float(io, w.y);
    x[3] = high_float(io, w.y);
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
    float other[4];
    load_unit(Config::Io{}, k + (second ? c - n : c + n), other);
    float4 cs = *reinterpret_cast<const float4*>(cos + (second ? c - n : c));
    float4 sn = *reinterpret_cast<const float4*>(sin + (second ? c - n : c));
    float sign = second ? 1.0f : -1.0f;
    x[0] = mul_rn(x[0], cs.x) + sign * mul_rn(other[0], sn.x);
    x[1] = mul_rn(x[1], cs.y) + sign * mul_rn(other[1], sn.y);
    x[2] = mul_rn(x[2], cs.z) + sign * mul_rn(other[2], sn.z);
    x[3] = mul_rn(x[3], cs.w) + sign * mul_rn(other[3], sn.w);
}

OA_DEVICE void rotate(const KvAppendParams& p, const uint16* k, int32 position, int at, Values& x) {
    if (p.rope == kRopeNone) return;
    if (position >= p.rope_rows) {  // there is no angle
#pragma unroll
        for (int i = 0; i < Config::kUnits; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[i][e] = quiet_nan();
        return;
    }
    const float* cos = p.cos + int64(position) * p.rope_pairs;
    const float* sin = p.sin + int64(position) * p.rope_pairs;
    bool whole_units = p.rope == kRopeHalf && p.rope_pairs % 4 == 0 &&
                       ((reinterpret_cast<uint64>(p.cos) | reinterpret_cast<uint64>(p.sin)) & 15) == 0;
#pragma unroll
    for (int i = 0; i < Config::kUnits; ++i) {
        int channel = 4 * (at + 32 * i);
        if (whole_units) {
            rotate_halves(p, k, cos, sin, channel, x[i]);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) x[i][e] = rotate_one(p, k, cos, sin, channel + e, x[i][e]);
        }
    }
}

// What a quantized cache stores in place of K.
OA_DEVICE void transform_key(const KvAppendParams& p, int32 head, int at, Values& x) {
#pragma unroll
    for (int i = 0; i < Config::kUnits; ++i) {
        int channel = 4 * (at + 32 * i);
        if (channel >= p.head_dim) continue;
        int64 from = int64(head) * p.head_dim + channel;
        if (p.k_mean != nullptr) {
            float4 m = *reinterpret_cast<const float4*>(p.k_mean + from);
            x[i][0] -= m.x, x[i][1] -= m.y, x[i][2] -= m.z, x[i][3] -= m.w;
        }
        if (p.k_channel_scale != nullptr) {
            float4 s = *reinterpret_cast<const float4*>(p.k_channel_scale + from);
            x[i][0] = div_rn(x[i][0], s.x);
            x[i][1] = div_rn(x[i][1], s.y);
            x[i][2] = div_rn(x[i][2], s.z);
            x[i][3] = div_rn(x[i][3], s.w);
        }
    }
    if (p.hadamard) hadamard_row<Config::kHeadDim, Config::kLanes>(x, at);
}

template <int kKind, int kGroups, bool kIsKey>
OA_DEVICE void store_row(uint8* data, uint32* params, uint64 row, const Values& x, int32 valid_dim, bool zero_point,
                         bool writes, int at) {
    using Row = KvRow<kKind, Config::kHeadDim, kIsKey ? 4 : 8>;
    constexpr bool kFbgemm = kKind == kKvFbgemm;  // parameters in front of the codes
    uint8* to = data + row * (kFbgemm ? FbgemmRow<Config::kHeadDim, kGroups>::kBytes : Row::kBytes);
    params = kFbgemm ? reinterpret_cast<uint32*>(to) : params + row * kGroups;
    if constexpr (kKind == kKv16) {
#pragma unroll
        for (int i = 0; i < Config::kUnits; ++i) {
            uint2 w = make_uint2(pack2(Config::Io{}, x[i][0], x[i][1]), pack2(Config::Io{}, x[i][2], x[i][3]));
            if (writes) *reinterpret_cast<uint2*>(to + 8 * (at + 32 * i)) = w;
        }
    } else {
        uint32 words[Config::kUnits];
        quantize_row<kKind, Config::kHeadDim, kGroups, Config::kLanes>(x, words, params, valid_dim, zero_point, writes,
                                                                       at);
#pragma unroll
        for (int i = 0; i < Config::kUnits; ++i) {
            int flat = at + 32 * i, unit = flat / (kIsKey ? 4 : 8), lane = flat % (kIsKey ? 4 : 8);
            if constexpr (kFbgemm) {
                if (writes) *reinterpret_cast<uint16*>(to + 4 * kGroups + 2 * flat) = uint16(words[i]);
            } else if constexpr (kKind != kKvInt4) {
                if (writes) *reinterpret_cast<uint32*>(to + Row::unit_byte(unit, lane)) = words[i];
            } else if constexpr (kIsKey) {
                // Elements 0 and 2 in a byte of the word's low half, 1 and 3 in its high half; the unit beside it has the
                // other two bytes.
                uint32 w = words[i];
                uint32 mine = (w & 0xf) | ((w >> 4) & 0xf0) | (w & 0xf0) << 12 | (w & 0xf000) << 8;
                uint32 other = __shfl_xor_sync(0xffffffffu, mine, 4);
                if (writes && (unit & 1) == 0)
                    *reinterpret_cast<uint32*>(to + Row::unit_byte(unit, lane)) = mine | other << 8;
            } else if (writes) {
                *reinterpret_cast<uint16*>(to + Row::unit_byte(unit, lane)) = uint16(words[i]);
            }
        }
    }
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

// The newest tokens once more, in 16 bits (scheduler/recent_window.cuh). Of a prompt the ring keeps the end only: others have the
// same places. `first`: of the sequence's new tokens.
OA_DEVICE void keep_recent(const KvAppendParams& p, int32 sequence, int32 head, int64 position, int64 first,
                           const Values& key, const Values& value, bool writes, int at) {
    int32 length = p.seq_lens[sequence];
    uint32 slot = p.recent_slots == nullptr ? sequence : p.recent_slots[sequence];
    writes &= slot < uint32(p.recent_num_slots);
    if (writes && position == length - 1 && head == 0 && at == 0)
        recent_append(p.recent_state + 2 * int64(slot), int32(max_of<int64>(first, 0)), length, p.recent_ring);
    writes &= position >= 0 && position < p.capacity && position >= int64(length) - p.recent_ring;
    uint64 row = 0;
    if (writes) row = (uint64(slot) * p.num_kv_heads + head) * p.recent_ring + uint32(position) % uint32(p.recent_ring);
    store_row<kKv16, 1, true>(p.recent_k, nullptr, row, key, p.head_dim, false, writes, at);
    store_row<kKv16, 1, false>(p.recent_v, nullptr, row, value, p.head_dim, false, writes, at);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) kv_append_sm80(const
                                                                              __grid_constant__ KvAppendParams p) {
    int64 item = (int64(blockIdx.x) * Config::kThreads + threadIdx.x) / Config::kLanes;
    int at = threadIdx.x % Config::kLanes;
    // Lanes beyond the last item work on it too, and write nothing: shuffles need every lane.
    bool writes = item < p.items;
    item = min_of(item, p.items - 1);
    int32 row = int32(item / p.num_kv_heads), head = int32(item - int64(row) * p.num_kv_heads);
    int32 sequence, begin, count;
    if (p.cu_seqlens == nullptr) {
        sequence = row / p.tokens;
        begin = sequence * p.tokens;
        count = p.tokens;
    } else {
        sequence = sequence_of(p, row);
        begin = p.cu_seqlens[sequence];
        count = p.cu_seqlens[sequence + 1] - begin;
        writes &= row >= begin && row - begin < count;
    }
    int64 position = int64(p.seq_lens[sequence]) - count + (row - begin);
    bool is_token = writes;
    writes &= position >= 0 && position < p.capacity;
    uint64 at_row = 0;
    if (writes) {
        uint32 index = 0, block = sequence;
        if (p.block_table != nullptr) {
            index = uint32(position) / uint32(p.block_size);
            block = p.block_table[int64(sequence) * p.table_columns + index];
        }
        writes = block < uint32(p.num_blocks);
        int64 in_block = position - int64(index) * p.block_size;
        at_row = K_KIND == kKvFbgemm ? (uint64(block) * p.block_size + in_block) * p.num_kv_heads + head
                                     : (uint64(block) * p.num_kv_heads + head) * p.block_size + in_block;
    }
    // The row's index in its own array: packed rows have stride_b 0.
    int64 in_sequence = p.cu_seqlens == nullptr ? row - begin : row;
    const uint16* k = p.k + sequence * p.k_stride_b + in_sequence * p.k_stride_s + head * p.k_stride_h;
    const uint16* v = p.v + sequence * p.v_stride_b + in_sequence * p.v_stride_s + head * p.v_stride_h;
    Values key = {}, value = {};
#pragma unroll
    for (int i = 0; i < Config::kUnits; ++i) {
        int channel = 4 * (at + 32 * i);
        if (channel >= p.head_dim) continue;
        load_unit(Config::Io{}, k + channel, key[i]);
        load_unit(Config::Io{}, v + channel, value[i]);
    }
    rotate(p, k, int32(max_of<int64>(min_of<int64>(position, p.capacity), 0)), at, key);
#pragma unroll
    for (int i = 0; i < Config::kUnits; ++i)
        if (4 * (at + 32 * i) >= p.head_dim) key[i][0] = key[i][1] = key[i][2] = key[i][3] = 0.0f;
    constexpr bool kQuantized = K_KIND != kKv16 || V_KIND != kKv16;
    if (kQuantized && p.recent_ring > 0)
        keep_recent(p, sequence, head, position, position - (row - begin), key, value, is_token, at);
    if (K_KIND != kKv16) transform_key(p, head, at, key);
    store_row<K_KIND, K_GROUPS, true>(p.k_data, p.k_params, at_row, key, p.hadamard ? Config::kHeadDim : p.head_dim,
                                      p.zero_point, writes, at);
    store_row<V_KIND, V_GROUPS, false>(p.v_data, p.v_params, at_row, value, p.head_dim, p.zero_point, writes, at);
}
