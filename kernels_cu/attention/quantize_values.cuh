// Tiles of 128 keys of V to e4m3, transposed and with the keys of every 16 in the order that 8-bit A fragments made of
// 32-bit accumulators have; or to fp16, as they lie.
//
// A thread loads 8 channels of the four keys that become one 32-bit word of each channel (2w, 2w+1, 2w+8, 2w+9 of a 16),
// writes the eight words to shared memory, and later copies 16-byte vectors from there.
// Shared memory: channel c has 128 bytes = 32 words; word w lies at w ^ (c / 8 * (256 / kHeadDim)), so that the words
// that a warp writes at once, of neighbouring groups of channels, are in 32 banks.
#pragma once
#include "attention/quantize_items.cuh"
#include "attention/quantize_reduce.cuh"
#include "ptx/cvt_quant.cuh"

template <int kHeadDim>
struct ValuesStorage {
    alignas(16) uint32 words[kBlockRows / 4 * kHeadDim];
    float inverse[kHeadDim], mean[kHeadDim];
    uint32 bad;
};

// First of the four keys of a 32-bit word of a tile; the others are 1, 8 and 9 further.
OA_DEVICE int32 key_of_word(int32 word) { return (word >> 2) * 16 + (word & 3) * 2; }

// What a tile of V may hold. kRegular: finite values and keys that all exist.
enum class Values { kRegular, kRegularSmooth, kAny };

// Eight channels of eight keys to e4m3 in shared memory. smooth: for kAny.
template <Values kValues, typename Io, int kHeadDim>
OA_DEVICE void convert_values(Io io, const uint4 (&raw)[2][4], ValuesStorage<kHeadDim>& s, int32 count, bool smooth) {
    constexpr int kColumns = kHeadDim / 8, kWords = kBlockRows / 4, kSwizzle = 256 / kHeadDim;
    int32 tid = threadIdx.x, cc = tid % kColumns, ty = tid / kColumns;
#pragma unroll
    for (int w = 0; w < 4; ++w) {  // two channels at a time: registers are what this kernel lacks
        float2 inverse = reinterpret_cast<const float2*>(s.inverse + cc * 8)[w], mean{0.0f, 0.0f};
        if (kValues == Values::kRegularSmooth || (kValues == Values::kAny && smooth))
            mean = reinterpret_cast<const float2*>(s.mean + cc * 8)[w];
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
                    // The conversion would make 448 of an infinity. Rows that do not exist are zeros, not minus the mean.
                    if (!is_finite(x[i])) x[i] = quiet_nan();
                    if (!is_finite(y[i])) y[i] = quiet_nan();
                    if (smooth && key_of_word(word) + (i & 1) + (i >> 1) * 8 >= count) x[i] = y[i] = 0.0f;
                }
            }
            uint32* to = s.words + (cc * 8 + 2 * w) * kWords + (word ^ (cc * kSwizzle));
            to[0] = permute_bytes(pack_e4m3x2(x[0], x[1]), pack_e4m3x2(x[2], x[3]), 0x5410);
            to[kWords] = permute_bytes(pack_e4m3x2(y[0], y[1]), pack_e4m3x2(y[2], y[3]), 0x5410);
        }
    }
}

template <typename Io, int kHeadDim>
OA_DEVICE void quantize_v(const QuantizeParams& p, const Item& t, ValuesStorage<kHeadDim>& s) {
    constexpr int kColumns = kHeadDim / 8, kSwizzle = 256 / kHeadDim;
    Io io;
    int32 tid = threadIdx.x, cc = tid % kColumns, ty = tid / kColumns;
    bool half = has(p, kHalfV);
    int64 keys_of_unit = int64(p.slots_k) * kBlockRows;
    uint8* out = p.v_out + int64(t.unit) * p.head_dim_pad * keys_of_unit + int64(t.slot) * kBlockRows;
    int32 first = t.index * kBlockRows, count = min_of(t.len - first, kBlockRows);
    int64 stride = kCommon ? t.stride_bytes : p.v_stride_s * 2;
    const uint8* rows = item_rows(p, t, p.v, p.v_stride_b, p.v_stride_s, p.v_stride_h, first) + cc * 16;
    bool inside = cc * 8 < p.head_dim;
    uint4 raw[2][4];
    uint64 policy = passing_policy();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int32 row = key_of_word(ty + r * kRowLanes) + (i & 1) + (i >> 1) * 8;
            raw[r][i] = inside && row < count ? load_input(rows + row * stride, policy) : uint4{0, 0, 0, 0};
        }
    }
    int64 at = sequence_head(t, p.num_kv_heads);
    int32 first_chunk = is_packed(p) ? first_slot(t.begin, t.batch_idx, kChunkRows) : 0;
    fetch_channels<kHeadDim>(p.v_ready + at, partial_of<kHeadDim>(p, t, first_chunk, 2), p.head_dim_pad, s.inverse);
    bool smooth = has(p, kSmoothV);
    if (smooth) fetch_channels<kHeadDim>(p.v_ready + at, p.v_mean + at * p.head_dim_pad, p.head_dim_pad, s.mean);
    if (tid == 2 * kHeadDim - 1) s.bad = load_gpu(p.v_bad + at);
    __syncthreads();
    bool bad = s.bad != 0;
    const float *inverse = s.inverse + cc * 8, *means = s.mean + cc * 8;
    if (half) {
        uint8* to = p.v_out + (output_row(t, p.seqlen_k) + first) * p.head_dim_pad * 2 + cc * 16;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int32 row = key_of_word(ty + r * kRowLanes) + (i & 1) + (i >> 1) * 8;
                float x[8];
                unpack8(io, raw[r][i], x);
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = mul_rn(smooth ? x[j] - means[j] : x[j], inverse[j]);
                uint4 packed;
                packed.x = pack2(Half{}, x[0], x[1]), packed.y = pack2(Half{}, x[2], x[3]);
                packed.z = pack2(Half{}, x[4], x[5]), packed.w = pack2(Half{}, x[6], x[7]);
                if (cc * 8 < p.head_dim_pad && row < count)
                    *reinterpret_cast<uint4*>(to + int64(row) * p.head_dim_pad * 2) = packed;
            }
        }
        return;
    }
    if (bad || (smooth && (!kCommon || count < kBlockRows))) {
        convert_values<Values::kAny, Io, kHeadDim>(io, raw, s, count, smooth);
    } else if (kCommon) {
        convert_values<Values::kRegularSmooth, Io, kHeadDim>(io, raw, s, count, true);
    } else {
        convert_values<Values::kRegular, Io, kHeadDim>(io, raw, s, count, false);
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        int32 i = tid + r * (2 * kHeadDim), c = i >> 3, vec = i & 7, f = (c >> 3) * kSwizzle;
        uint4 w = reinterpret_cast<const uint4*>(s.words)[c * 8 + (vec ^ (f >> 2 & 7))];
        if (f & 1) {
            uint32 a = w.x, b = w.z;
            w.x = w.y, w.y = a, w.z = w.w, w.w = b;
        }
        if (f & 2) {
            uint32 a = w.x, b = w.y;
            w.x = w.z, w.z = a, w.y = w.w, w.w = b;
        }
        if (c < p.head_dim_pad) store_output(out + c * keys_of_unit + vec * 16, w);
    }
}
