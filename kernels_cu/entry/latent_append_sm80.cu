// New tokens into a latent cache: rotary embedding of the channels behind the value's, quantization, scatter.
//
//   row = [ k | rope(k_pe) ] in 16 bits
//   row = [ e4m3(k / scale) | e4m3(rope(k_pe) / scale) ], one scale for all rows
//   row = [ e4m3(k / s_g) | s_0 s_1 s_2 s_3 | bf16(rope(k_pe)) ],   s_g = max(max |k| / 448, 2^-126) of 128 channels
//
// The last one has 656 bytes (FlashMLA 2025; vLLM's "fp8_ds_mla"). Formats: docs/kv_formats.md. A group with NaN or
// infinity gets the scale NaN and codes of 0.
//
// k: [batch, tokens, HEAD_DIM_V] or packed [rows, HEAD_DIM_V], k_pe the same with HEAD_DIM - HEAD_DIM_V channels; in
// one memory or apart, any strides, last dimension contiguous. Where tokens go: decode/append_place.cuh.
//
// One CTA takes kTokens tokens: a warp for k of each, a lane with two chunks of 8 channels half a row apart, so that 16
// lanes have a group of 128; and one warp for k_pe of all, a lane with 8 channels. No barrier and no shared memory: a
// warp reads its tokens while it looks up where they go. Bound by memory. fp32 throughout, rounded as the NumPy
// reference does, bit for bit; 16-bit channels that nothing rotates are copied as they are.
#include "decode/append_place.cuh"
#include "decode/latent_quantize.cuh"
#include "params/latent_append.cuh"
#include "ptx/cvt.cuh"
#include "ptx/cvt_quant.cuh"
#include "ptx/types.cuh"

enum LatentFormat : int { kLatent16 = 0, kLatentE4m3 = 1, kLatent656 = 2 };

struct Config {
    using Io = IO_TYPE;  // Half or BFloat16: of the new tokens, and of 16-bit rows
    static constexpr int kFormat = CACHE_FORMAT;
    static constexpr int kWidthV = HEAD_DIM_V, kWidth = HEAD_DIM;
    static constexpr int kChunk = 8;  // channels of a lane's access to k
    static constexpr int kTokens = 4;
    static constexpr int kThreads = 32 * (kTokens + 1);
    static constexpr int kCtas = 12;  // on an SM: 32 registers
    static constexpr int kGroupLanes = 16;  // of 128 channels
    static constexpr int kScalesAt = kWidthV, kRopeAt = kWidthV + 16;  // bytes of a row with scales
    static_assert(kWidthV == 2 * 32 * kChunk, "a warp has a row of k");
    static_assert(kTokens * (kWidth - kWidthV) == 32 * kChunk, "and another one k_pe of all tokens");
};
using Values = float[Config::kChunk];
OA_DEVICE constexpr bool is_bf16(BFloat16) { return true; }
OA_DEVICE constexpr bool is_bf16(Half) { return false; }

OA_DEVICE void to_values(const uint4& w, Values& x) {
    Config::Io io;
    const uint32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = low_float(io, words[i]);
        x[2 * i + 1] = high_float(io, words[i]);
    }
}

template <typename To>
OA_DEVICE uint4 packed(To to, const Values& x) {
    return make_uint4(pack2(to, x[0], x[1]), pack2(to, x[2], x[3]), pack2(to, x[4], x[5]), pack2(to, x[6], x[7]));
}

// The largest magnitudes of two chunks, in the halves of a word; NaN if there is one.
OA_DEVICE uint32 largest_of(const uint4 (&w)[2]) {
    Config::Io io;
    uint32 of[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32 both = max2_nan(io, max2_nan(io, w[i].x & ~kBothSigns, w[i].y & ~kBothSigns),
                               max2_nan(io, w[i].z & ~kBothSigns, w[i].w & ~kBothSigns));
        of[i] = both;
    }
    return max2_nan(io, permute_bytes(of[0], of[1], 0x5410), permute_bytes(of[0], of[1], 0x7632));
}

// k of a token, one warp. `to`: the row; `scale`: of e4m3 rows.
OA_DEVICE void store_latent(const uint4 (&w)[2], float scale, uint8* to, bool writes, int lane) {
    constexpr int kHalf = Config::kWidthV / 2;
    if constexpr (Config::kFormat == kLatent16) {
        if (!writes) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) *reinterpret_cast<uint4*>(to + 2 * (i * kHalf + Config::kChunk * lane)) = w[i];
    } else if constexpr (Config::kFormat == kLatentE4m3) {
        if (!writes) return;
        const Divisor by(scale);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Values x;
            to_values(w[i], x);
            *reinterpret_cast<uint2*>(to + i * kHalf + Config::kChunk * lane) = codes_of<true>(by, x);
        }
    } else {
        Config::Io io;
        uint32 amax = largest_of(w);
#pragma unroll
        for (int mask = 1; mask < Config::kGroupLanes; mask <<= 1)
            amax = max2_nan(io, amax, __shfl_xor_sync(0xffffffffu, amax, mask));
        if (!writes) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Divisor by(latent_scale(i == 0 ? low_float(io, amax) : high_float(io, amax)));
            Values x;
            to_values(w[i], x);
            *reinterpret_cast<uint2*>(to + i * kHalf + Config::kChunk * lane) = codes_of<false>(by, x);
            if (lane % Config::kGroupLanes == 0) {
                const int group = i * (32 / Config::kGroupLanes) + lane / Config::kGroupLanes;
                *reinterpret_cast<float*>(to + Config::kScalesAt + 4 * group) = by.scale;
            }
        }
    }
}

// Four numbers, at a multiple of 16 bytes.
OA_DEVICE void load4(const float* from, float* to) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

// x: channels from `first` on of `k_pe`, of which 2 * n are rotated, these too, by the angles `cos` and `sin`.
OA_DEVICE void rotate_whole(const float* cos, const float* sin, const uint16* k_pe, int n, bool interleaved, int first,
                            Values& x) {
    float c[Config::kChunk], s[Config::kChunk];
    if (interleaved) {
        load4(cos + first / 2, c), load4(sin + first / 2, s);
#pragma unroll
        for (int i = 0; i < Config::kChunk / 2; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = mul_rn(a, c[i]) - mul_rn(b, s[i]);
            x[2 * i + 1] = mul_rn(b, c[i]) + mul_rn(a, s[i]);
        }
        return;
    }
    const bool second = first >= n;
    const int pair = second ? first - n : first;
    Values other;
    to_values(*reinterpret_cast<const uint4*>(k_pe + (second ? pair : pair + n)), other);
    load4(cos + pair, c), load4(cos + pair + 4, c + 4), load4(sin + pair, s), load4(sin + pair + 4, s + 4);
    const float sign = second ? 1.0f : -1.0f;
#pragma unroll
    for (int e = 0; e < Config::kChunk; ++e) x[e] = mul_rn(x[e], c[e]) + sign * mul_rn(other[e], s[e]);
}

// x: channels from `first` on of `k_pe`, rotated by the angles of a position.
OA_DEVICE void rotate(const LatentAppendParams& p, const uint16* k_pe, int32 position, int first, Values& x) {
    const int n = p.rope_pairs;
    const bool interleaved = p.rope == kRopeInterleaved;
    if (position >= p.rope_rows) {  // there is no angle
#pragma unroll
        for (int e = 0; e < Config::kChunk; ++e) x[e] = quiet_nan();
        return;
    }
    const float* cos = p.cos + int64(position) * n;
    const float* sin = p.sin + int64(position) * n;
    const bool is_aligned = ((reinterpret_cast<uint64>(p.cos) | reinterpret_cast<uint64>(p.sin)) & 15) == 0;
    if (is_aligned && n % Config::kChunk == 0) {  // a chunk is rotated as a whole, or not at all
        if (first < 2 * n) rotate_whole(cos, sin, k_pe, n, interleaved, first, x);
        return;
    }
#pragma unroll
    for (int e = 0; e < Config::kChunk; ++e) {
        const int c = first + e;
        if (c >= 2 * n) continue;
        const bool second = interleaved ? c & 1 : c >= n;
        const int pair = interleaved ? c >> 1 : second ? c - n : c;
        const int partner = interleaved ? c ^ 1 : second ? c - n : c + n;
        const float other = to_float(Config::Io{}, k_pe[partner]);
        const float a = mul_rn(x[e], cos[pair]), b = mul_rn(other, sin[pair]);
        x[e] = second ? a + b : a - b;
    }
}

// Eight channels of k_pe of a token, from `first` on. `to`: the row.
OA_DEVICE void store_rope(const LatentAppendParams& p, const uint16* k_pe, const uint4& w, float scale, uint8* to,
                          int32 position, int first) {
    const bool rotates = p.rope != kRopeNone;
    Values x;
    to_values(w, x);
    if (rotates) rotate(p, k_pe, position, first, x);
    if constexpr (Config::kFormat == kLatentE4m3) {
        const Divisor by(scale);
        *reinterpret_cast<uint2*>(to + Config::kWidthV + first) = codes_of<true>(by, x);
    } else if constexpr (Config::kFormat == kLatent656) {
        const uint4 bits = is_bf16(Config::Io{}) && !rotates ? w : packed(BFloat16{}, x);
        *reinterpret_cast<uint4*>(to + Config::kRopeAt + 2 * first) = bits;
    } else {
        *reinterpret_cast<uint4*>(to + 2 * (Config::kWidthV + first)) = rotates ? packed(Config::Io{}, x) : w;
    }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtas) latent_append_sm80(
    const __grid_constant__ LatentAppendParams p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool has_rope = warp == Config::kTokens;
    constexpr int kRopeLanes = 32 / Config::kTokens;  // of a token
    const int64 wanted = int64(blockIdx.x) * Config::kTokens + (has_rope ? lane / kRopeLanes : warp);
    // Warps and lanes behind the last token work on it too, and write nothing.
    const int32 index = int32(min_of<int64>(wanted, p.rows - 1));
    const Source source = source_of(p, index);
    const float scale = Config::kFormat == kLatentE4m3 && p.scale != nullptr ? *p.scale : 1.0f;
    auto row_of = [&](const NewToken& token) { return p.data + uint64(token.place) * p.place_bytes; };
    if (has_rope) {
        const uint16* k_pe = p.k_pe + source.sequence * p.k_pe_stride_b + source.row * p.k_pe_stride_s;
        const int first = lane % kRopeLanes * Config::kChunk;
        const uint4 w = *reinterpret_cast<const uint4*>(k_pe + first);
        const NewToken token = new_token(p, source, index);
        if (token.writes && wanted < p.rows) store_rope(p, k_pe, w, scale, row_of(token), token.position, first);
        return;
    }
    const uint16* k = p.k + source.sequence * p.k_stride_b + source.row * p.k_stride_s + Config::kChunk * lane;
    const uint4 w[2] = {*reinterpret_cast<const uint4*>(k), *reinterpret_cast<const uint4*>(k + Config::kWidthV / 2)};
    const NewToken token = new_token(p, source, index);
    store_latent(w, scale, row_of(token), token.writes && wanted < p.rows, lane);
}
