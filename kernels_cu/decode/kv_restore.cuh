// Elements of a KV cache's rows as numbers, 16 of a row a lane: the inverse of decode/kv_quantize.cuh.
#pragma once
#include "decode/kv_dequant.cuh"
#include "decode/kv_quantize.cuh"

template <int kKind, int kHeadDim, int kLanes>
struct KvRestorer {
    static constexpr bool kFbgemm = kKind == kKvFbgemm;
    // Channels in their order: a lane has two times eight, so that lanes read and write what lies together.
    static constexpr bool kNatural = kKind == kKv16 || kFbgemm || kv_in_order(kKind);
    static constexpr int kChunks = kHeadDim / 16;  // lanes of a row
    static constexpr int kWords = kv_bits(kKind) / 2;
    using Words = uint32[kWords];

    // First channel of unit `unit` of lane `at`, four a unit, as KvChunk.
    static OA_DEVICE constexpr int channel(int at, int unit) {
        return kNatural ? 8 * (at + kChunks * (unit >> 1)) + 4 * (unit & 1)
                        : KvChunk<kKind, kHeadDim, kLanes>::channel(at, unit);
    }

    // The words of lane `at`. row: its first byte; groups: words of parameters in front of FBGEMM's codes; head_dim: no
    // more of a caller's row is read.
    static OA_DEVICE void load(const uint8* row, int at, int32 groups, int32 head_dim, Words& w) {
        if constexpr (kFbgemm) {  // rows are aligned to 4 bytes
            const uint32* from = reinterpret_cast<const uint32*>(row) + groups;
            w[0] = from[at], w[1] = from[at + kChunks];
        } else if constexpr (kv_in_order(kKind)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int first = 8 * (at + kChunks * i);
                const uint2 x = *reinterpret_cast<const uint2*>(row + (first < head_dim ? first : 0));
                w[2 * i] = x.x, w[2 * i + 1] = x.y;
            }
        } else if constexpr (kKind == kKv16) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int first = 8 * (at + kChunks * i);
                const uint4 x = *reinterpret_cast<const uint4*>(row + 2 * (first < head_dim ? first : 0));
                w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
            }
        } else if constexpr (kWords == 4) {
            const uint4 x = *reinterpret_cast<const uint4*>(row + 16 * at);
            w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
        } else {
            const uint2 x = *reinterpret_cast<const uint2*>(row + 8 * at);
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
                const uint32 low = half2_of_e4m3x2<false>(w[unit]), high = half2_of_e4m3x2<true>(w[unit]);
                x[unit][0] = low_float(Half{}, low), x[unit][1] = high_float(Half{}, low);
                x[unit][2] = low_float(Half{}, high), x[unit][3] = high_float(Half{}, high);
            } else if constexpr (kv_is_int8(kKind)) {
                const uint32 biased = with_bias<kKind>(w[unit]);
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
