// A [rows x head_dim] tile of 16-bit elements in shared memory, as panels of 64 columns (128-byte rows), plus one panel
// of 32 columns (64-byte rows) when head_dim is an odd multiple of 32; rows of 16 columns (32 bytes) are a panel of
// their own. Inside a panel the 16-byte chunk c of row r lies at chunk c ^ (r % 8) (128-byte rows), c ^ ((r / 2) % 4)
// (64) or c ^ ((r / 4) % 2) (32): every ldmatrix and every 16-byte row access of 8 consecutive rows then touches all 32
// banks once. Elements of 8 and 4 bits are moved in pairs and fours, with half and a quarter of their number as
// head_dim.
#pragma once
#include "ptx/types.cuh"

template <int kRows, int kHeadDim>
struct PanelTile {
    static_assert(kHeadDim % 32 == 0 || kHeadDim == 16, "rows of 32 or of a multiple of 64 bytes");
    static constexpr int kFullPanels = kHeadDim / 64;
    static constexpr bool kHasTail = kHeadDim % 64 != 0;
    static constexpr uint32 kTailBytes = kHeadDim % 64 * 2;  // of a row of the last panel
    static constexpr int kNumPanels = kFullPanels + (kHasTail ? 1 : 0);
    static constexpr uint32 kPanelBytes = kRows * 128;
    static constexpr uint32 kBytes = kRows * kHeadDim * 2;

    // Byte offset of 16-byte chunk `chunk` (0 .. kHeadDim/8 - 1) of row `row`.
    static OA_DEVICE uint32 offset(int row, int chunk) {
        int panel = chunk >> 3;
        if (kHasTail && panel == kFullPanels) {
            return kFullPanels * kPanelBytes + row * kTailBytes + tail_chunk(row, chunk) * 16;
        }
        return panel * kPanelBytes + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
    }

    // Where chunk `chunk` (0 .. 3 or 0 .. 1) of a row of the last panel lies.
    static OA_DEVICE uint32 tail_chunk(int row, int chunk) {
        return kTailBytes == 32 ? (chunk & 1) ^ ((row >> 2) & 1) : (chunk & 3) ^ ((row >> 1) & 3);
    }
};

// Address generator for ldmatrix over a PanelTile: lane-dependent parts are computed once, a 16-column step is one XOR.
// `row` and `half` are this lane's row (0..15 of a 16-row slice) and its chunk (0 or 1) inside a 16-column step.
// All base addresses are multiples of 1024 bytes, so that XOR on the low bits of the sum is exact.
template <int kRows, int kHeadDim>
struct PanelLane {
    using Tile = PanelTile<kRows, kHeadDim>;
    uint32 full;  // offset in a 128-byte panel at step 0
    uint32 tail;  // offset in the last panel at its step 0

    OA_DEVICE PanelLane(int row, int half) {
        full = row * 128 + ((half ^ (row & 7)) << 4);
        tail = row * Tile::kTailBytes + Tile::tail_chunk(row, half) * 16;
    }

    // Byte offset for rows [row_base, row_base + 16) and columns [16 * step, 16 * step + 16); both compile-time
    // constants after unrolling; row_base is a multiple of 8.
    OA_DEVICE uint32 at(int row_base, int step) const {
        int panel = step >> 2;
        if (Tile::kHasTail && panel == Tile::kFullPanels) {
            return (tail ^ ((step & 1) << 5)) + Tile::kFullPanels * Tile::kPanelBytes + row_base * Tile::kTailBytes;
        }
        return (full ^ ((step & 3) << 5)) + panel * Tile::kPanelBytes + row_base * 128;
    }
};
