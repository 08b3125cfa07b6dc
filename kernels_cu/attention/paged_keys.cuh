// Copies of tiles of K and V from pages of a pool (PagedAttention, Kwon et al. 2023), by producer warps.
//
// A tile is copied in chunks of 2^page_rows_log2 rows, each within a page. Chunks of 8 rows and more: by TMA, a lane a
// chunk; of four warps two copy K and two V. Of smaller chunks a tile would need more copies than TMA issues while it
// is multiplied: all warps copy rows of both, 16 bytes a lane (cp.async), eight lanes a row of a panel; lane i looks up
// the warp's row i. Where the swizzle puts 16 bytes follows from their place in the tile, so that tiles are those of
// one copy. TMA leaves chunks without a key of the sequence: their rows are masked in K and cleared in V, as rows of
// others are. Left of all windows it fills chunks with zeros, and threads copy the first key that is seen.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/page_table.cuh"

template <int kBlockN, int kWarps>
class PagedKeys {
    static constexpr int32 kTmaRowsLog2 = 3;
    static constexpr int kWarpRows = kBlockN / kWarps, kSlots = (kWarpRows + 31) / 32;
    static constexpr int kShares = kWarps == 1 ? 1 : kWarps / 2;  // warps that share the chunks of a tile
    static_assert(kWarpRows % 4 == 0 && kBlockN >> kTmaRowsLog2 <= 32, "whole copies of rows; a lane a chunk");

  public:
    // Whether threads copy, each completing its own copies, which nobody announces.
    OA_DEVICE static bool by_threads(const AttnFwdParams& p) { return p.page_rows_log2 < kTmaRowsLog2; }
    // Arrivals that fill a stage.
    OA_DEVICE static uint32 arrivals(const AttnFwdParams& p) { return by_threads(p) ? 32 * kWarps : kWarps; }
    OA_DEVICE static bool copies_k(const AttnFwdParams& p) { return kWarps == 1 || by_threads(p) || warp() % 2 == 0; }
    OA_DEVICE static bool copies_v(const AttnFwdParams& p) { return kWarps == 1 || by_threads(p) || warp() % 2 == 1; }

    // Finds the rows of tile n of K, ahead of its copy: the table is in global memory. Those of V are a tile behind.
    template <typename Tile>
    OA_DEVICE void read_table(const AttnFwdParams& p, const Tile& t, int32 n, bool exists) {
        const int32 seen = first_seen_key(p, t);
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            of_v_[slot] = of_k_[slot];
            const int32 at = 32 * slot + lane();
            const int32 row = by_threads(p) ? (at / 4 * kWarps + warp()) * 4 + at % 4 : chunk_row(p);
            const int32 key = n * kBlockN + row;
            if (!exists || row >= kBlockN || key >= t.seqlen_k) continue;
            if (by_threads(p)) {
                of_k_[slot] = PageTable(p, t).at(max_of(key, seen));
            } else if (key + (1 << p.page_rows_log2) > seen) {
                of_k_[slot] = PageTable(p, t).at(key);
            } else {
                of_k_[slot] = {p.num_pages, 0};  // no page of the tensor map
            }
        }
    }

    // Tile n to `smem`, completing on `bar`: of K the one that was looked up last, of V the one before. map: {column,
    // row of a page, kv head, page}. pool: the head's rows, `width` columns of which exist.
    template <int kPanels, bool kIsV>
    OA_DEVICE void copy(const AttnFwdParams& p, const FwdTile& t, const TensorMap* map, int32 n, int32 kv_head,
                        const uint16* pool, int64 stride_page, int64 stride_row, int32 width, uint32 smem,
                        uint32 bar) const {
        const PageRow(&from)[kSlots] = kIsV ? of_v_ : of_k_;
        const int32 rows = min_of(t.seqlen_k - n * kBlockN, kBlockN);
        if (!by_threads(p)) {
            const int32 row = chunk_row(p);
            if (row >= rows) return;
#pragma unroll
            for (int c = 0; c < kPanels; ++c)
                tma_load_4d(smem + c * (kBlockN * 128) + row * 128, map, bar, c * 64, from[0].row, kv_head,
                            from[0].page);
        } else if (rows == kBlockN && width == kPanels * 64) {
            copy_rows<kPanels, true>(p, from, pool, stride_page, stride_row, width, rows, smem);
        } else {
            copy_rows<kPanels, false>(p, from, pool, stride_page, stride_row, width, rows, smem);
        }
    }
    // Of the chunks of tile n that this warp copies by TMA.
    template <int kPanels>
    OA_DEVICE static uint32 bytes(const AttnFwdParams& p, const FwdTile& t, int32 n) {
        const int32 rows = min_of(t.seqlen_k - n * kBlockN, kBlockN), log2 = p.page_rows_log2;
        const int32 chunks = (rows + (1 << log2) - 1) >> log2;
        return uint32((chunks + kShares - 1 - share()) / kShares << log2) * (kPanels * 128);
    }

  private:
    PageRow of_k_[kSlots] = {}, of_v_[kSlots] = {};

    OA_DEVICE static int32 lane() { return int32(threadIdx.x & 31); }
    OA_DEVICE static int32 warp() { return kWarps == 1 ? 0 : int32(threadIdx.x >> 5); }
    OA_DEVICE static int32 share() { return kShares == 1 ? 0 : warp() / 2; }
    // First row of a lane's chunk.
    OA_DEVICE static int32 chunk_row(const AttnFwdParams& p) {
        return (lane() * kShares + share()) << p.page_rows_log2;
    }

    // kWhole: all rows and columns exist. Else those that do not become zeros.
    template <int kPanels, bool kWhole>
    OA_DEVICE static void copy_rows(const AttnFwdParams& p, const PageRow (&from)[kSlots], const uint16* pool,
                                    int64 stride_page, int64 stride_row, int32 width, int32 rows, uint32 smem) {
        const int32 chunk = lane() & 7, first = warp() * 4 + (lane() >> 3);
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            const uint16* own = pool + PageTable::offset(p, from[slot], stride_page, stride_row);
            const uint64 own_row = reinterpret_cast<uint64>(own);
#pragma unroll(kWhole ? 4 : 1)
            for (int i = 0; i < min_of(kWarpRows - 32 * slot, 32) / 4; ++i) {
                const int32 row = (8 * slot + i) * (4 * kWarps) + first;
                const uint64 address = __shfl_sync(0xffffffffu, own_row, 4 * i + (lane() >> 3)) + chunk * 16;
                const uint32 to = smem + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
                for (int c = 0; c < kPanels; ++c) {
                    const void* source = reinterpret_cast<const void*>(address + c * 128);
                    const bool exists = kWhole || (row < rows && c * 64 + chunk * 8 < width);
                    cp_async_16(to + c * (kBlockN * 128), source, exists ? 16 : 0);
                }
            }
        }
    }
};
