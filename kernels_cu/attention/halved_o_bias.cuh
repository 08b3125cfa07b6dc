// Tiles of an additive mask in attn_fwd_d512_sm90 (entry/), 16 rows and 64 keys of a warp, from global memory: there is
// no shared memory for them, and no registers before the scores are there. So the tile is brought to the first-level
// cache while S is multiplied, and read in pieces of 16 bytes, of which lanes of a row then exchange parts.
//
// Rows are at multiples of 16 bytes, kBytes an element. Rows and keys that the mask has not are never read.
#pragma once
#include "attention/score_mods.cuh"
#include "ptx/line_prefetch.cuh"
#include "ptx/types.cuh"

template <typename Io, int kBytes>
class WarpBias {
    static constexpr int kKeys = 16 / kBytes;  // of a piece

  public:
    // rows: where the mask's rows of this sequence and head begin; stride: from one to the next, in elements; count,
    // keys: how many rows and keys it has. row, key: the warp's first of the tile.
    OA_DEVICE WarpBias(const void* rows, int64 stride, int32 count, int32 keys, int32 row, int32 key)
        : at_(static_cast<const uint8*>(rows) + int64(key) * kBytes),
          stride_(stride * kBytes),
          last_row_(count - 1),
          row_(row),
          left_(keys - key) {}

    // Brings the tile to the first-level cache. Each lane has some of its sectors of 32 bytes.
    OA_DEVICE void prefetch(int32 lane) const {
        const uint8* const row = row_at(lane >> 1);
#pragma unroll
        for (int i = 0; i < kBytes; ++i) {
            const int32 byte = ((lane & 1) * kBytes + i) * 32;
            if (byte < left_ * kBytes) prefetch_to_l1(row + byte);
        }
    }

    // Adds to scores, of lane `thread` of the warp; returns what these are then to be multiplied by in base 2.
    template <int kScores>
    OA_DEVICE float add(float (&s)[kScores], ScoreFactors c, int32 thread) const {
        // Computed here: the compiler would keep keys of pieces in registers from the first tile on.
        const int32 lane = in_register(thread), quad_lane = lane & 3;
        const uint8* const rows[2] = {row_at(lane >> 2), row_at((lane >> 2) + 8)};
        if constexpr (kBytes == 2) {
            uint32 b[4][4];  // of row r and keys from 32 j on: b[2 j + r]
#pragma unroll
            for (int i = 0; i < 4; ++i) load(b[i], rows[i & 1], (i >> 1) * 32 + quad_lane * 8);
#pragma unroll
            for (int i = 0; i < 4; ++i) exchange(b[i], quad_lane);
            uint32 top = 0;
#pragma unroll
            for (int i = 0; i < 16; ++i) top = max_u16x2(top, b[i >> 2][i & 3] & 0x7fff7fffu);
            const bool is_plain = (top & 0xffffu) <= kPlainBiasBits<Io> && top >> 16 <= kPlainBiasBits<Io>;
            return add_biases(s, c, is_plain, [&](int n, int r) { return unpack2(Io{}, b[2 * (n >> 2) + r][n & 3]); });
        } else {
            // Half of the keys after the other: registers are short.
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32 b[4][4];  // of row r and keys from 32 half + 16 j on: b[2 j + r]
                const int32 piece = (quad_lane >> 1 | (quad_lane & 1) << 1) * 4;
#pragma unroll
                for (int i = 0; i < 4; ++i) load(b[i], rows[i & 1], half * 32 + (i >> 1) * 16 + piece);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    exchange_halves(b[i], quad_lane);
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
                        float& score = s[4 * (4 * half + 2 * (i >> 1) + (x >> 1)) + 2 * (i & 1) + (x & 1)];
                        score = biased(score, c.base2, __uint_as_float(b[i][x]));
                    }
                }
            }
            return 1.0f;
        }
    }

  private:
    OA_DEVICE const uint8* row_at(int32 i) const { return at_ + max_of(min_of(row_ + i, last_row_), 0) * stride_; }
    // Keys from `key` on of a row.
    OA_DEVICE void load(uint32 (&b)[4], const uint8* row, int32 key) const {
        if (key + kKeys <= left_) {
            const uint4 w = __ldg(reinterpret_cast<const uint4*>(row + key * kBytes));
            b[0] = w.x, b[1] = w.y, b[2] = w.z, b[3] = w.w;
            return;
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            b[x] = 0;
            if constexpr (kBytes == 4) {
                if (key + x < left_) b[x] = __ldg(reinterpret_cast<const uint32*>(row) + key + x);
            } else {
                const uint16* const keys = reinterpret_cast<const uint16*>(row) + key + 2 * x;
                if (key + 2 * x < left_) b[x] = __ldg(keys);
                if (key + 2 * x + 1 < left_) b[x] |= uint32(__ldg(keys + 1)) << 16;
            }
        }
    }
    // Of four lanes with four words each: word i of lane q becomes word q of lane i.
    OA_DEVICE static void exchange(uint32 (&b)[4], int quad_lane) {
        const bool odd = quad_lane & 1, upper = quad_lane & 2;
        swap(b[0], b[1], odd, 1);
        swap(b[2], b[3], odd, 1);
        swap(b[0], b[2], upper, 2);
        swap(b[1], b[3], upper, 2);
    }
    // Of two lanes with four words each: the second half of the even lane's for the first half of the odd lane's.
    OA_DEVICE static void exchange_halves(uint32 (&b)[4], int quad_lane) {
        const bool odd = quad_lane & 1;
        swap(b[0], b[2], odd, 1);
        swap(b[1], b[3], odd, 1);
    }
    OA_DEVICE static void swap(uint32& low, uint32& high, bool is_high, int distance) {
        const uint32 other = __shfl_xor_sync(0xffffffffu, is_high ? low : high, distance);
        (is_high ? low : high) = other;
    }

    const uint8* const at_;
    const int64 stride_;
    const int32 last_row_, row_, left_;
};
