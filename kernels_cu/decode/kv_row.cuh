// A row of a KV cache (docs/kv_formats.md), and where its 16-byte chunks
// lie in shared memory.
#pragma once
#include "ptx/types.cuh"

// Element types of a cache, as the registry passes them.
enum KvKind : int {
    kKv16 = 0,
    kKvE4m3 = 1,
    kKvInt8 = 2,
    kKvInt4 = 3,
    kKvFbgemm = 4,
    kKvE4m3InOrder = 5,  // arrays of the caller: channels in their order, scales in fp32, no zeros
    kKvInt8InOrder = 6,  // the same of two's complement
};

OA_DEVICE constexpr bool kv_in_order(int kind) { return kind == kKvE4m3InOrder || kind == kKvInt8InOrder; }
OA_DEVICE constexpr bool kv_is_e4m3(int kind) { return kind == kKvE4m3 || kind == kKvE4m3InOrder; }
OA_DEVICE constexpr bool kv_is_int8(int kind) { return kind == kKvInt8 || kind == kKvInt8InOrder; }
// Whether rows have zeros beside their scales.
OA_DEVICE constexpr bool kv_has_zeros(int kind) { return kind != kKv16 && kind != kKvE4m3 && !kv_in_order(kind); }

OA_DEVICE constexpr int kv_bits(int kind) { return kind == kKv16 ? 16 : kind == kKvInt4 || kind == kKvFbgemm ? 4 : 8; }

// Lanes of a fragment that divide a row: 4 for K (l % 4), 8 for V (l / 4). A lane owns units of four elements, stored
// in vectors of up to 16 bytes; vector i of all lanes comes before vector i + 1.
//
// FBGEMM's int4 rows (kKvFbgemm) have the nibbles in the order of the channels, and parameters in front of them. They
// are copied word by word, so that they are in vectors in shared memory: word 4 j + q of a row, channels 8 (4 j + q)
// and on, is word j of lane q of four. For K that is two units, in the order of order_fbgemm_query (decode/query.cuh);
// for V unit j of the lanes 2 q (its low half) and 2 q + 1, which both load the word.
template <int kKind, int kHeadDim, int kLanes>
struct KvRow {
    static constexpr bool kQuantized = kKind != kKv16;
    static constexpr int kBytes = kHeadDim * kv_bits(kKind) / 8;
    static constexpr int kChunks = kBytes / 16;
    static constexpr int kUnits = kHeadDim / (4 * kLanes);  // of a lane
    static constexpr int kUnitBytes = kKind == kKvFbgemm && kLanes == 8 ? 4 : kv_bits(kKind) / 2;
    static constexpr int kLaneBytes = kUnits * kUnitBytes;
    static constexpr int kVecBytes = kLaneBytes < 16 ? kLaneBytes : 16;
    static constexpr int kVecs = kLaneBytes / kVecBytes;
    static_assert(kBytes >= 32 && (kVecBytes == 4 || kVecBytes == 8 || kVecBytes == 16), "head_dim 64, 128 or 256");

    // Byte of the row at which unit `unit` of lane `lane` begins (quantized rows).
    static OA_DEVICE constexpr int unit_byte(int unit, int lane) {
        return (unit * kUnitBytes / kVecBytes * kLanes + lane) * kVecBytes + unit * kUnitBytes % kVecBytes;
    }
    // Channel of element `element` of unit `unit` of lane `lane`. 16-bit rows are in their natural order, two units a
    // vector, and so are the caller's 8-bit rows, four (or two) units a vector. FBGEMM's K: of the two units' elements
    // together, before their nibbles' order is applied.
    static OA_DEVICE constexpr int channel(int unit, int lane, int element) {
        if (kv_in_order(kKind)) return unit_byte(unit, lane) + element;
        return kQuantized && !(kKind == kKvFbgemm && kLanes == 4)
                   ? 4 * (kLanes * unit + lane) + element
                   : 8 * (kLanes * (unit >> 1) + lane) + 4 * (unit & 1) + element;
    }
};

// 16 elements of a row that one lane quantizes and stores: four units, in quantized rows 16 or 8 adjacent bytes, in
// 16-bit ones two times 16 bytes. Chunks 0 .. kChunks - 1 are a row.
template <int kKind, int kHeadDim, int kLanes>
struct KvChunk {
    using Row = KvRow<kKind, kHeadDim, kLanes>;
    static constexpr int kChunks = kHeadDim / 16;
    static constexpr int kBytes = 2 * kv_bits(kKind);
    // First channel of unit `unit` of chunk `at`: the inverse of Row::unit_byte. Each bit of either is a
    // bit of the channel, so the unit's part is a constant that addresses have as their offset.
    static OA_DEVICE constexpr int channel(int at, int unit) { return place(at, 0) + place(0, unit); }

  private:
    static OA_DEVICE constexpr int place(int at, int unit) {
        if (kKind == kKvFbgemm || kv_in_order(kKind)) return 16 * at + 4 * unit;
        int byte = at * kBytes + unit * Row::kUnitBytes, vec = byte / Row::kVecBytes;
        return !Row::kQuantized
                   ? 8 * (at + kChunks * (unit >> 1)) + 4 * (unit & 1)
                   : Row::channel((vec / kLanes * Row::kVecBytes + byte % Row::kVecBytes) / Row::kUnitBytes,
                                  vec % kLanes, 0);
    }
};

// In shared memory chunk c of token t of a tile stands at chunk (t kChunks + c) ^ swizzle(t), so that the 8 lanes of a
// 16-byte access (16 of an 8-byte one) touch all banks: lanes of K are 2 tokens (t and t + 4) by 4 chunks, those of V 4
// tokens (t .. t + 3) by 2.
template <int kKind, int kHeadDim>
struct KTile {
    using Row = KvRow<kKind, kHeadDim, 4>;
    static OA_DEVICE uint32 swizzle(int t) { return ((t >> 2) & 1) << 2; }
    // Bytes: vector `vec` of lane q of token t.
    static OA_DEVICE uint32 offset(int t, int q, int vec) {
        return (t * Row::kBytes + (vec * 4 + q) * Row::kVecBytes) ^ (swizzle(t) << 4);
    }
};
template <int kKind, int kHeadDim>
struct VTile {
    using Row = KvRow<kKind, kHeadDim, 8>;
    static OA_DEVICE uint32 swizzle(int t) {
        return Row::kChunks >= 8 ? (t & 3) << 1 : Row::kChunks == 4 ? ((t >> 1) & 1) << 1 : 0;
    }
    static OA_DEVICE uint32 offset(int t, int g, int vec) {
        int place = kKind == kKvFbgemm ? vec * 4 + (g >> 1) : vec * 8 + g;
        return (t * Row::kBytes + place * Row::kVecBytes) ^ (swizzle(t) << 4);
    }
};

// The same for rows of 16 bits that are read by ldmatrix, 16 bytes of eight adjacent tokens at a time.
template <int kHeadDim>
struct MatrixTile {
    using Row = KvRow<kKv16, kHeadDim, 4>;
    static OA_DEVICE uint32 swizzle(int t) { return t & 7; }
    // Bytes from the tile's begin, its first token a multiple of 8: chunk `chunk` of token t.
    static OA_DEVICE uint32 offset(int t, int chunk) { return t * Row::kBytes + ((chunk ^ (t & 7)) << 4); }
};

// FBGEMM's rows in the cache: [block, row, head], words of parameters, then words of 8 channels.
template <int kHeadDim, int kGroups>
struct FbgemmRow {
    static constexpr int kWords = kHeadDim / 8;
    static constexpr int kBytes = 4 * (kGroups + kWords);
    // Bytes: word `w` of a row in shared memory, K's and V's alike.
    static OA_DEVICE uint32 place(int w) {
        constexpr int kVecWords = kWords / 4 < 4 ? kWords / 4 : 4;
        int j = w >> 2, q = w & 3;
        return ((j / kVecWords * 4 + q) * kVecWords + j % kVecWords) * 4;
    }
};
