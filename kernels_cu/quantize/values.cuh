// Tiles of 128 keys of V to e4m3, transposed and with the keys of every 16 in the order that 8-bit A fragments made of
// 32-bit accumulators have; or to fp16, as they lie.
//
//   v_mean = mean + v_scale * (sum over the keys of x - e4m3(x)) / keys,   x = (v - mean) / v_scale
//
// so that attention with equal weights makes no error, and any other a smaller one (docs/quantization.md). v_mean is an
// item of its own, behind all tiles. Where the scale is from a sample and proves too small, that item quantizes the
// head again.
//
// A thread loads 8 channels of the 4 keys that become one 32-bit word of each channel (2w, 2w+1, 2w+8, 2w+9 of a 16),
// writes the 8 words to shared memory, and later copies 16-byte vectors from there.
// Shared memory: channel c has 128 bytes = 32 words; word w lies at w ^ (c / 8 * (256 / kHeadDim)), so that the words
// that a warp writes at once, of neighbouring groups of channels, are in 32 banks.
#pragma once
#include "ptx/cvt_quant.cuh"
#include "ptx/half2.cuh"
#include "quantize/items.cuh"
#include "quantize/reduce.cuh"

template <int kHeadDim>
struct ValuesStorage {
    alignas(16) uint32 words[kBlockRows / 4 * kHeadDim];
    float inverse[kHeadDim], mean[kHeadDim];
    int32 error[kHeadDim];  // channel c at (c % 8) * (kHeadDim / 8) + c / 8: neighbouring lanes in neighbouring banks
    uint32 bad;
};

// First of the four keys of a 32-bit word of a tile; the others are 1, 8 and 9 further.
OA_DEVICE int32 key_of_word(int32 word) { return (word >> 2) * 16 + (word & 3) * 2; }

// A tile of keys: where it comes from and goes to.
struct ValuesTile {
    const uint8* rows;
    int64 stride_bytes;
    int32 count;
    uint8* out;
    int64 keys_of_unit;  // bytes of a channel of `out`
};

// Added to e4m3 codes or to fp16 magnitudes it sets their highest bit from the first one on that a scale from a sample
// must not give: 448, or less where sums are fp16 (e4m3); 256 (fp16).
OA_DEVICE uint32 overflow_addend(const QuantizeParams& p) {
    if (has(p, kHalfV)) return 0x8000u * 0x10001u - 0x5c005c00u;
    return 0x80808080u - (pack_e4m3x2(p.v_levels, p.v_levels) & 0xffu) * 0x01010101u;
}

template <typename Io, int kHeadDim>
OA_DEVICE void load_values(const QuantizeParams& p, const ValuesTile& tile, uint4 (&raw)[2][4]) {
    constexpr int kColumns = kHeadDim / 8;
    int32 tid = threadIdx.x, cc = tid % kColumns, ty = tid / kColumns;
    bool inside = cc * 8 < p.head_dim;
    uint64 policy = evict_first_policy();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int32 row = key_of_word(ty + r * kRowLanes) + (i & 1) + (i >> 1) * 8;
            raw[r][i] = inside && row < tile.count ? load_input(tile.rows + row * tile.stride_bytes + cc * 16, policy)
                                                   : uint4{0, 0, 0, 0};
        }
    }
}

// What a tile of V may hold. kRegular: finite values and keys that all exist.
enum class Values { kRegular, kRegularSmooth, kAny };

// Two neighbouring keys' x - e4m3(x), as two fp16 numbers.
OA_DEVICE uint32 rounding_errors(float x, float y, uint32 codes) {
    return sub_half2(pack2(Half{}, x, y), half2_of_e4m3x2(codes));
}

// A channel's errors of 8 keys of this thread, and of the lanes of the warp that have the same channels, to shared
// memory.
template <Values kValues, int kColumns>
OA_DEVICE void add_errors(uint32 errors, int32* sum) {
    float low = low_float(Half{}, errors), high = high_float(Half{}, errors);
    if (kValues == Values::kAny) low = is_finite(low) ? low : 0.0f, high = is_finite(high) ? high : 0.0f;
    int32 units = int32(__float_as_uint(fmaf(low + high, kErrorUnits, kRound)) - __float_as_uint(kRound));
#pragma unroll
    for (int bit = kColumns; bit < 32; bit *= 2) units += __shfl_xor_sync(0xffffffffu, units, bit);
    if ((threadIdx.x & 31) < kColumns) reduce_add_shared(sum, units);
}

// 8 channels of 8 keys to e4m3 in shared memory. smooth: for kAny. Bits of the result: some code is one that
// overflow_addend names.
template <Values kValues, typename Io, int kHeadDim>
OA_DEVICE uint32 convert_values(Io io, const uint4 (&raw)[2][4], ValuesStorage<kHeadDim>& s, int32 count, bool smooth,
                                uint32 addend) {
    constexpr int kColumns = kHeadDim / 8, kWords = kBlockRows / 4, kSwizzle = 256 / kHeadDim;
    int32 tid = threadIdx.x, cc = tid % kColumns, ty = tid / kColumns;
    uint32 over = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {  // two channels at a time: the kernel is short of registers
        float2 inverse = reinterpret_cast<const float2*>(s.inverse + cc * 8)[w], mean{0.0f, 0.0f};
        if (kValues == Values::kRegularSmooth || (kValues == Values::kAny && smooth))
            mean = reinterpret_cast<const float2*>(s.mean + cc * 8)[w];
        uint32 errors[2] = {};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int32 word = ty + r * kRowLanes;
            float x[4], y[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = low_float(io, word_of(raw[r][i], w));
                y[i] = high_float(io, word_of(raw[r][i], w));
                if (kValues != Values::kRegular) x[i] -= mean.x, y[i] -= mean.y;
                x[i] = mul_rn(x[i], inverse.x);
                y[i] = mul_rn(y[i], inverse.y);
                if (kValues == Values::kAny) {
                    // The conversion would make 448 of an infinity. Rows that do not exist are zeros, not minus the
                    // mean.
                    if (!is_finite(x[i])) x[i] = quiet_nan();
                    if (!is_finite(y[i])) y[i] = quiet_nan();
                    if (smooth && key_of_word(word) + (i & 1) + (i >> 1) * 8 >= count) x[i] = y[i] = 0.0f;
                }
            }
            uint32 codes[2][2] = {{pack_e4m3x2(x[0], x[1]), pack_e4m3x2(x[2], x[3])},
                                  {pack_e4m3x2(y[0], y[1]), pack_e4m3x2(y[2], y[3])}};
            if (kValues == Values::kRegularSmooth || (kValues == Values::kAny && smooth)) {
                uint32 of_x =
                    add_half2(rounding_errors(x[0], x[1], codes[0][0]), rounding_errors(x[2], x[3], codes[0][1]));
                uint32 of_y =
                    add_half2(rounding_errors(y[0], y[1], codes[1][0]), rounding_errors(y[2], y[3], codes[1][1]));
                errors[0] = r == 0 ? of_x : add_half2(errors[0], of_x);
                errors[1] = r == 0 ? of_y : add_half2(errors[1], of_y);
            }
            uint32* to = s.words + (cc * 8 + 2 * w) * kWords + (word ^ (cc * kSwizzle));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32 four = permute_bytes(codes[i][0], codes[i][1], 0x5410);
                over |= (four & 0x7f7f7f7fu) + addend;
                to[i * kWords] = four;
            }
        }
        if (kValues == Values::kRegularSmooth || (kValues == Values::kAny && smooth)) {
            add_errors<kValues, kColumns>(errors[0], s.error + 2 * w * kColumns + cc);
            add_errors<kValues, kColumns>(errors[1], s.error + (2 * w + 1) * kColumns + cc);
        }
    }
    return over & 0x80808080u;
}

// From shared to global memory, behind a barrier.
template <int kHeadDim>
OA_DEVICE void store_values(const QuantizeParams& p, const ValuesTile& tile, const ValuesStorage<kHeadDim>& s) {
    constexpr int kSwizzle = 256 / kHeadDim;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        int32 i = threadIdx.x + r * (2 * kHeadDim), c = i >> 3, vec = i & 7, f = (c >> 3) * kSwizzle;
        uint4 w = reinterpret_cast<const uint4*>(s.words)[c * 8 + (vec ^ (f >> 2 & 7))];
        if (f & 1) {
            uint32 a = w.x, b = w.z;
            w.x = w.y, w.y = a, w.z = w.w, w.w = b;
        }
        if (f & 2) {
            uint32 a = w.x, b = w.y;
            w.x = w.z, w.z = a, w.y = w.w, w.w = b;
        }
        if (c < p.head_dim_pad) *reinterpret_cast<uint4*>(tile.out + c * tile.keys_of_unit + vec * 16) = w;
    }
}

// 8 channels of 8 keys to fp16 in global memory; result as that of convert_values.
template <typename Io, int kHeadDim>
OA_DEVICE uint32 convert_to_half(const QuantizeParams& p, const ValuesTile& tile, const uint4 (&raw)[2][4],
                                 const ValuesStorage<kHeadDim>& s, bool smooth, uint32 addend) {
    constexpr int kColumns = kHeadDim / 8;
    int32 cc = threadIdx.x % kColumns, ty = threadIdx.x / kColumns;
    const float *inverse = s.inverse + cc * 8, *means = s.mean + cc * 8;
    uint32 over = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int32 row = key_of_word(ty + r * kRowLanes) + (i & 1) + (i >> 1) * 8;
            float x[8];
            unpack8(Io{}, raw[r][i], x);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = mul_rn(smooth ? x[j] - means[j] : x[j], inverse[j]);
            uint4 packed;
            packed.x = pack2(Half{}, x[0], x[1]), packed.y = pack2(Half{}, x[2], x[3]);
            packed.z = pack2(Half{}, x[4], x[5]), packed.w = pack2(Half{}, x[6], x[7]);
            if (cc * 8 >= p.head_dim_pad || row >= tile.count) continue;
            *reinterpret_cast<uint4*>(tile.out + int64(row) * p.head_dim_pad * 2 + cc * 16) = packed;
#pragma unroll
            for (int j = 0; j < 4; ++j) over |= (word_of(packed, j) & ~kBothSigns) + addend;
        }
    }
    return over & kBothSigns;
}

// Tile `index` of the item's sequence and head.
OA_DEVICE ValuesTile values_tile(const QuantizeParams& p, const QuantizeItem& t, int32 index) {
    int32 first = index * kBlockRows;
    ValuesTile tile;
    tile.stride_bytes = kCommon ? t.stride_bytes : p.v_stride_s * 2;
    tile.rows = item_rows(p, t, p.v, p.v_stride_b, p.v_stride_s, p.v_stride_h, 0);
    tile.rows += tile.stride_bytes * (kCommon ? first - t.index * kBlockRows : first);
    tile.count = min_of(t.len - first, kBlockRows);
    tile.keys_of_unit = int64(p.slots_k) * kBlockRows;
    tile.out = has(p, kHalfV) ? p.v_out + (output_row(t, p.seqlen_k) + first) * p.head_dim_pad * 2
                              : p.v_out + int64(t.unit) * p.head_dim_pad * tile.keys_of_unit +
                                    int64(t.slot - t.index + index) * kBlockRows;
    return tile;
}

// Quantizes the whole head again, by one CTA, with scales that its values fit: a channel's largest magnitude was beyond
// headroom() times that of the sample, or the head has NaN or infinity. Returns the errors of channel threadIdx.x.
template <typename Io, int kHeadDim>
__device__ __noinline__ int64 quantize_v_again(const QuantizeParams& p, const QuantizeItem& t,
                                               ValuesStorage<kHeadDim>& s, float* scale) {
    constexpr int kColumns = kHeadDim / 8;
    Io io;
    int32 tid = threadIdx.x, tiles = blocks_of(t.len);
    bool smooth = has(p, kSmoothV);
    // Largest magnitudes of all channels, in `words`, as bits.
    float most_of[8] = {};
    if (tid < kHeadDim) s.words[tid] = 0;
    __syncthreads();
    for (int32 index = 0; index < tiles; ++index) {
        uint4 raw[2][4];
        ValuesTile tile = values_tile(p, t, index);
        load_values<Io, kHeadDim>(p, tile, raw);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x[8];
                unpack8(io, raw[r][i], x);
                bool exists = key_of_word(tid / kColumns + r * kRowLanes) + (i & 1) + (i >> 1) * 8 < tile.count;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    float difference = fabsf(smooth ? x[j] - s.mean[tid % kColumns * 8 + j] : x[j]);
                    if (exists && is_finite(difference)) most_of[j] = fmaxf(most_of[j], difference);
                }
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) reduce_max_shared(s.words + tid % kColumns * 8 + j, __float_as_uint(most_of[j]));
    __syncthreads();
    if (tid < p.head_dim) {
        float amax = __uint_as_float(s.words[tid]);
        float most = mul_rn(amax, s.inverse[tid]);
        bool over = has(p, kHalfV) ? (pack2(Half{}, most, most) & 0x7fffu) >= 0x5c00u
                                   : (pack_e4m3x2(most, most) & 0xffu) >= (pack_e4m3x2(p.v_levels, 0.0f) & 0xffu);
        if (over) {
            *scale = value_scale(p, amax);
            s.inverse[tid] = div_rn(1.0f, *scale);
        }
    }
    int64 error = 0;
    for (int32 index = 0; index < tiles; ++index) {
        ValuesTile tile = values_tile(p, t, index);
        uint4 raw[2][4];
        load_values<Io, kHeadDim>(p, tile, raw);
        if (tid < kHeadDim) s.error[tid] = 0;
        __syncthreads();
        if (has(p, kHalfV)) {
            convert_to_half<Io, kHeadDim>(p, tile, raw, s, smooth, 0);
            continue;
        }
        convert_values<Values::kAny, Io, kHeadDim>(io, raw, s, tile.count, smooth, 0);
        __syncthreads();
        store_values<kHeadDim>(p, tile, s);
        if (tid < kHeadDim) error += s.error[(tid & 7) * kColumns + (tid >> 3)];
        __syncthreads();
    }
    return error;
}

template <typename Io, int kHeadDim>
OA_DEVICE void quantize_v(const QuantizeParams& p, const QuantizeItem& t, ValuesStorage<kHeadDim>& s) {
    constexpr int kColumns = kHeadDim / 8;
    Io io;
    int32 tid = threadIdx.x;
    bool half = has(p, kHalfV), smooth = has(p, kSmoothV), sampled = sample_log2(t.len) > 0;
    ValuesTile tile = values_tile(p, t, t.index);
    uint4 raw[2][4];
    load_values<Io, kHeadDim>(p, tile, raw);
    int64 at = sequence_head(t, p.num_kv_heads);
    int32 first_chunk = is_packed(p) ? first_slot(t.begin, t.batch_idx, kChunkRows) : 0;
    // The inverse of the scale and, even if it is zeros, the mean.
    const float* from[2] = {partial_of<kHeadDim>(p, t, first_chunk, 2), p.v_mean + at * p.head_dim_pad};
    float* to[2] = {s.inverse, s.mean};
    fetch_channels<kHeadDim>(p.v_ready + at, from, p.head_dim_pad, to);
    if (tid == 2 * kHeadDim - 1) s.bad = load_gpu(p.v_bad + at);
    if (tid < kHeadDim) s.error[tid] = 0;
    __syncthreads();
    uint32 addend = sampled ? overflow_addend(p) : 0, over;
    if (half) {
        over = convert_to_half<Io, kHeadDim>(p, tile, raw, s, smooth, addend);
    } else {
        if (s.bad != 0 || (smooth && (!kCommon || tile.count < kBlockRows))) {
            over = convert_values<Values::kAny, Io, kHeadDim>(io, raw, s, tile.count, smooth, addend);
        } else if (kCommon) {
            over = convert_values<Values::kRegularSmooth, Io, kHeadDim>(io, raw, s, tile.count, true, addend);
        } else {
            over = convert_values<Values::kRegular, Io, kHeadDim>(io, raw, s, tile.count, false, addend);
        }
        __syncthreads();
        store_values<kHeadDim>(p, tile, s);
    }
    if (sampled && over) reduce_max_global(p.v_bad + at, 1);
    if (smooth && !half && tid < p.head_dim_pad)
        reduce_add_global(p.v_error + at * p.head_dim_pad + tid, s.error[(tid & 7) * kColumns + (tid >> 3)]);
    if ((smooth && !half) || sampled) arrive(p.v_done + at);
}

// After all tiles of a head of V: its mean, and the whole head again where the scale was too small.
template <typename Io, int kHeadDim>
OA_DEVICE void finish_v(const QuantizeParams& p, const QuantizeItem& t, ValuesStorage<kHeadDim>& s) {
    int32 tid = threadIdx.x;
    bool corrected = has(p, kSmoothV) && !has(p, kHalfV), sampled = sample_log2(t.len) > 0, mine = tid < p.head_dim_pad;
    if (!(corrected || sampled)) return;
    int64 at = sequence_head(t, p.num_kv_heads), channel = at * p.head_dim_pad + tid;
    if (tid == 0) {
        wait_for_own(p.v_done + at, uint32(blocks_of(t.len)));
        s.bad = sampled && load_gpu(p.v_bad + at) != 0;
    }
    __syncthreads();
    float scale = mine ? load_gpu(p.v_scale + channel) : 1.0f, mean = mine ? load_gpu(p.v_mean + channel) : 0.0f;
    int64 error = mine && corrected ? load_gpu(p.v_error + channel) : 0;
    if (s.bad != 0) {
        if (tid < kHeadDim) s.inverse[tid] = div_rn(1.0f, scale), s.mean[tid] = mean;
        error = quantize_v_again<Io, kHeadDim>(p, t, s, &scale);
        if (mine) p.v_scale[channel] = scale;
    }
    if (mine && corrected)
        p.v_mean[channel] = mean + mul_rn(div_rn(mul_rn(float(error), 1.0f / kErrorUnits), float(t.len)), scale);
}
