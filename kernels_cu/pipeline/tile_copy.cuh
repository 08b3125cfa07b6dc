// Global -> shared copy of a [rows x head_dim] tile by all threads of a CTA (cp.async, 16 bytes a thread and step).
// Rows at or beyond `valid_rows` and columns at or beyond `head_dim` are filled with zeros: NaN beyond the end of V
// would otherwise survive the product with P = 0.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/types.cuh"
#include "tile/panel.cuh"

// Order: which row of the source goes to a row of the tile; rows change places inside each 16 only.
struct RowsAsTheyAre {
    static constexpr bool kIsIdentity = true;
    OA_DEVICE static constexpr int row_at(int slot) { return slot; }
};
template <int kRows, int kHeadDim, int kThreads, typename Order = RowsAsTheyAre>
struct TileCopy {
    using Tile = PanelTile<kRows, kHeadDim>;
    static constexpr int kRowsPerStep = kThreads / 8;      // 8 chunks of 16 bytes in a 128-byte row
    static constexpr int kTailChunks = Tile::kHasTail ? Tile::kTailBytes / 16 : 4;  // in a row of the last panel
    static constexpr int kTailRowsPerStep = kThreads / kTailChunks;
    // Rows of a step that are no multiple of 16 are not ordered alike in each step, nor of 8 swizzled alike.
    static constexpr bool kOrderedAlike = kRowsPerStep % 16 == 0 || Order::kIsIdentity;
    static_assert(kRowsPerStep % 4 == 0, "swizzle of a step");
    static_assert(!Tile::kHasTail || kTailRowsPerStep % 16 == 0 || (kTailRowsPerStep % 8 == 0 && Order::kIsIdentity),
                  "rows of the last panel are ordered and swizzled alike in each step");

    // Whether a thread's row of the step that starts at row `r` lies inside the tile: known at compile time but for the
    // last step of a tile that is no multiple of it.
    static OA_DEVICE bool inside(int r, int row0, int step) { return r + step <= kRows || r + row0 < kRows; }

    // What does not change from tile to tile; one per thread.
    uint32 dst;  // shared byte offset of this thread's first chunk in a 128-byte panel
    uint32 columns;  // bit p: this thread's chunk of panel p lies inside head_dim (one register, not one a panel)

    OA_DEVICE TileCopy(int head_dim, int tid) {
        int row = tid >> 3, chunk = tid & 7;
        dst = row * 128 + ((chunk ^ (row & 7)) << 4);
        columns = 0;
#pragma unroll
        for (int p = 0; p < Tile::kFullPanels; ++p) columns |= uint32(p * 64 + chunk * 8 < head_dim) << p;
        if (Tile::kHasTail)
            columns |= uint32(Tile::kFullPanels * 64 + tid % kTailChunks * 8 < head_dim) << Tile::kFullPanels;
    }

    OA_DEVICE uint32 bytes(bool row_ok, int panel) const { return row_ok && (columns >> panel & 1) ? 16 : 0; }

    // smem: the tile's shared address; g: its first element; row_stride in elements.
    OA_DEVICE void issue(uint32 smem, const uint16* g, int64 row_stride, int valid_rows, int tid) const {
        if (Tile::kFullPanels > 0) {
            int row0 = Order::row_at(tid >> 3);
            const uint16* src = g + row0 * row_stride + (tid & 7) * 8;
#pragma unroll
            for (int r = 0; r < kRows; r += kRowsPerStep) {
                if (inside(r, row0, kRowsPerStep)) {
                    int row = kOrderedAlike ? row0 + r : Order::row_at((tid >> 3) + r);
                    const uint16* from = kOrderedAlike ? src : g + row * row_stride + (tid & 7) * 8;
                    uint32 to = kRowsPerStep % 8 ? dst ^ (r & 4) << 4 : dst;
                    bool row_ok = row < valid_rows;
#pragma unroll
                    for (int p = 0; p < Tile::kFullPanels; ++p)
                        cp_async_16(smem + to + p * Tile::kPanelBytes + r * 128, from + p * 64, bytes(row_ok, p));
                }
                src += kRowsPerStep * row_stride;
            }
        }
        if (Tile::kHasTail) {
            int slot = tid / kTailChunks, chunk = tid % kTailChunks, row0 = Order::row_at(slot);
            const uint16* src = g + row0 * row_stride + Tile::kFullPanels * 64 + chunk * 8;
            uint32 tail_dst =
                Tile::kFullPanels * Tile::kPanelBytes + slot * Tile::kTailBytes + Tile::tail_chunk(slot, chunk) * 16;
#pragma unroll
            for (int r = 0; r < kRows; r += kTailRowsPerStep) {
                if (inside(r, row0, kTailRowsPerStep))
                    cp_async_16(smem + tail_dst + r * Tile::kTailBytes, src,
                                bytes(row0 + r < valid_rows, Tile::kFullPanels));
                src += kTailRowsPerStep * row_stride;
            }
        }
    }

    // The same once, from rows that lie anywhere. at(row): its first element.
    template <typename At>
    OA_DEVICE void issue_rows(uint32 smem, At at, int valid_rows, int tid) const {
        if (Tile::kFullPanels > 0) {
#pragma unroll
            for (int r = 0; r < kRows; r += kRowsPerStep) {
                const int row = Order::row_at((tid >> 3) + r);
                if (!inside(r, tid >> 3, kRowsPerStep)) continue;
                const uint16* from = at(row < valid_rows ? row : 0) + (tid & 7) * 8;
                uint32 to = kRowsPerStep % 8 ? dst ^ (r & 4) << 4 : dst;
#pragma unroll
                for (int p = 0; p < Tile::kFullPanels; ++p)
                    cp_async_16(smem + to + p * Tile::kPanelBytes + r * 128, from + p * 64, bytes(row < valid_rows, p));
            }
        }
        if (Tile::kHasTail) {
            const int slot = tid / kTailChunks, chunk = tid % kTailChunks;
            uint32 tail_dst =
                Tile::kFullPanels * Tile::kPanelBytes + slot * Tile::kTailBytes + Tile::tail_chunk(slot, chunk) * 16;
#pragma unroll
            for (int r = 0; r < kRows; r += kTailRowsPerStep) {
                const int row = Order::row_at(slot) + r;
                if (!inside(r, slot, kTailRowsPerStep)) continue;
                const uint16* from = at(row < valid_rows ? row : 0) + Tile::kFullPanels * 64 + chunk * 8;
                cp_async_16(smem + tail_dst + r * Tile::kTailBytes, from, bytes(row < valid_rows, Tile::kFullPanels));
            }
        }
    }
};

// The same for contiguous tiles that have all their rows and columns. A warp copies consecutive rows,
// 512 bytes of a panel with each instruction; one address in global memory serves for all of them, because cp.async
// takes offsets from -2048 to 2047, and two in shared memory: rows that are a multiple of 8 apart have their chunks in
// one order.
template <int kRows, int kHeadDim, int kThreads>
struct WholeTileCopy {
    using Tile = PanelTile<kRows, kHeadDim>;
    static_assert(!Tile::kHasTail || Tile::kFullPanels == 0, "panels of one width");
    static constexpr int kPanelRowBytes = Tile::kHasTail ? Tile::kTailBytes : 128, kRowBytes = kHeadDim * 2;
    static constexpr int kChunks = kPanelRowBytes / 16, kStepRows = 32 / kChunks;
    static constexpr int kWarpRows = kRows / (kThreads / 32), kSpan = kWarpRows * kRowBytes;
    static_assert(kWarpRows % 8 == 0 && kWarpRows % kStepRows == 0 && kSpan <= 4096, "whole steps within the offsets");

    uint32 dst[2], src;  // this thread's first chunk, and the one 4 rows on; the middle of its chunks in the tile

    OA_DEVICE explicit WholeTileCopy(int tid) {
        int row = (tid >> 5) * kWarpRows + (tid & 31) / kChunks, chunk = tid % kChunks;
        dst[0] = Tile::offset(row, chunk);
        dst[1] = Tile::offset(row + kStepRows, chunk);
        src = row * kRowBytes + chunk * 16 + kSpan / 2;
    }

    // g: `src` behind the tile's beginning.
    OA_DEVICE void issue(uint32 smem, const uint8* g, bool wanted) const {
#pragma unroll
        for (int r = 0; r < kWarpRows; r += kStepRows)
#pragma unroll
            for (int p = 0; p < Tile::kNumPanels; ++p) {
                int own = r % 8 / kStepRows;  // rows of 128 bytes: 0 or 1; shorter ones: 0
                cp_async_16_if(smem + dst[own] + p * Tile::kPanelBytes + (r - own * kStepRows) * kPanelRowBytes,
                               g + (r * kRowBytes + p * 128 - kSpan / 2), wanted);
            }
    }
};
