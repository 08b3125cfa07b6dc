// Q of one warpgroup, 64 rows of 8-bit elements, as left operand of wgmma: where TMA has put it, or in registers.
#pragma once
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "ptx/wgmma_s8.cuh"

// What a product of Q and K is.
template <typename Qk>
struct Int8Score {
    using Type = float;
};
template <>
struct Int8Score<Int8> {
    using Type = int32;
};

// Config: Qk (Int8, or E4m3 with Score = float), kHeadDim, kBlockM, kRowBytes (of a row in shared memory, with a
// swizzle of its length; further channels follow in a panel behind all rows), kBlockN. `tile`: shared address of the
// CTA's rows.
// kTaken: whether `take` has read all of Q, so that its stage can be released behind the first product.
template <typename Config>
struct SharedQueries {
    static constexpr bool kTaken = false;
    WgmmaDescriptor first;

    OA_DEVICE void take(uint32 tile, int32 group, int) {
        first = wgmma_descriptor<Config::kRowBytes>(tile + group * 64 * Config::kRowBytes, 16, 8 * Config::kRowBytes);
    }
    // S (+)= Q K^T over the 32 channels of `step`.
    OA_DEVICE void multiply(typename Config::Score (&s)[Config::kBlockN / 2], int step, uint64 k) const {
        uint32 panel = step * 32 / Config::kRowBytes, column = step * 32 % Config::kRowBytes;
        Wgmma<typename Config::Qk, Config::kBlockN>::ss(
            s, first.at(panel * Config::kBlockM * Config::kRowBytes + column), k, step != 0);
    }
};

// Halves what the products read from shared memory, and needs no descriptors; takes kHeadDim / 8 registers.
template <typename Config>
struct RegisterQueries {
    static constexpr bool kTaken = true;
    uint32 words[Config::kHeadDim / 32][4];

    // All lanes. Row l/4 (+ 8: odd words) of the warp's 16; bytes 4(l%4) + 0..3 of each 16.
    OA_DEVICE void take(uint32 tile, int32 group, int lane) {
        constexpr uint32 kRow = Config::kRowBytes;
        uint32 row = group * 64 + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
        uint32 first = tile + row * kRow + 4 * (lane & 3), swizzle = (kRow == 128 ? lane >> 2 & 7 : lane >> 3 & 3) << 4;
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 32; ++step)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                uint32 byte = 32 * step + 16 * (x >> 1), panel = byte / kRow * Config::kBlockM * kRow;
                words[step][x] = load_shared(first + panel + (x & 1) * 8 * kRow + ((byte % kRow) ^ swizzle));
            }
    }
    OA_DEVICE void multiply(typename Config::Score (&s)[Config::kBlockN / 2], int step, uint64 k) const {
        Wgmma<typename Config::Qk, Config::kBlockN>::rs(s, words[step], k, step != 0);
    }
};
