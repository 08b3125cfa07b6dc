// Elements of a KV cache's rows as numbers, 16 channels (KvChunk) a lane: the inverse of decode/kv_quantize.cuh.
#pragma once
#include "decode/kv_dequant.cuh"
#include "decode/kv_quantize.cuh"

template <int kKind, int kHeadDim, int kLanes>
struct KvRestorer {
    using Chunk = KvChunk<kKind, kHeadDim, kLanes>;
    static constexpr bool kFbgemm = kKind == kKvFbgemm;
    static constexpr int kWords = Chunk::kBytes / 4;
    using Words = uint32[kWords];

    // The words of chunk `at`. `row`: the row's first byte; groups: words of parameters in front of FBGEMM's codes.
    static OA_DEVICE void load(const uint8* row, int at, int32 groups, Words& w) {
        if constexpr (kKind == kKv16) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint4 x = *reinterpret_cast<const uint4*>(row + 2 * Chunk::channel(at, 2 * i));
                w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
            }
        } else if constexpr (kFbgemm) {  // rows are aligned to 4 bytes
            const uint32* from = reinterpret_cast<const uint32*>(row) + groups + 2 * at;
            w[0] = from[0], w[1] = from[1];
        } else if constexpr (kWords == 4) {
            uint4 x = *reinterpret_cast<const uint4*>(row + 16 * at);
            w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
        } else {
            uint2 x = *reinterpret_cast<const uint2*>(row + 8 * at);
            w[0] = x.x, w[1] = x.y;
        }
    }

    // Codes as numbers; of 16 bits the elements.
    template <typename Io>
    static OA_DEVICE void codes(Io io, const Words& w, ChunkValues& x) {
#pragma unroll
        for (int unit = 0; unit < 4; ++unit) {
            if constexpr (kKind == kKv16) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    x[unit][2 * i] = low_float(io, w[2 * unit + i]);
                    x[unit][2 * i + 1] = high_float(io, w[2 * unit + i]);
                }
            } else if constexpr (kv_is_e4m3(kKind)) {
                uint32 low = half2_of_e4m3x2<false>(w[unit]), high = half2_of_e4m3x2<true>(w[unit]);
                x[unit][0] = low_float(Half{}, low), x[unit][1] = high_float(Half{}, low);
                x[unit][2] = low_float(Half{}, high), x[unit][3] = high_float(Half{}, high);
            } else if constexpr (kv_is_int8(kKind)) {
                uint32 biased = with_bias<kKind>(w[unit]);
#pragma unroll
                for (int e = 0; e < 4; ++e) x[unit][e] = float(int32(biased >> (8 * e) & 0xffu) - 128);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) x[unit][e] = float(int32(w[unit >> 1] >> nibble(unit, e) & 0xfu) - 8);
            }
        }
    }

  private:
    // Bit of element `e` of a unit in its word, which two units share: K's as KVFormat.position has them.
    static OA_DEVICE constexpr int nibble(int unit, int e) {
        return kLanes == 4 && !kFbgemm ? 16 * (e & 1) + 8 * (unit & 1) + 4 * (e >> 1) : 16 * (unit & 1) + 4 * e;
    }
};
