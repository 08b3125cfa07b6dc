// Copies of tiles of K and V from pages of a pool (PagedAttention, Kwon et al. 2023), by the lanes of a producer warp.
//
// A tile is copied in chunks of 2^page_rows_log2 rows, each within a page: lane i has the chunks i, i + 32, .. of a
// tile. The swizzle of a tile follows from shared addresses, so that chunks make up the tile that one copy would.
// Chunks without a key of the sequence are not copied: their rows are masked in K and cleared in V, as rows of others
// are.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/page_table.cuh"

template <int kBlockN>
class PagedKeys {
  public:
    OA_DEVICE PagedKeys(const AttnFwdParams& p, const FwdTile& t)
        : pages_(p, t), seqlen_k_(t.seqlen_k), rows_log2_(p.page_rows_log2) {}

    // Of the chunks of tile n that are copied.
    template <int kPanels>
    OA_DEVICE uint32 bytes(int32 n) const {
        const int32 mask = (1 << rows_log2_) - 1;
        return uint32((min_of(seqlen_k_ - n * kBlockN, kBlockN) + mask) & ~mask) * (kPanels * 128);
    }

    // Tile n to `smem`, completing on `bar`; by all lanes of a warp. map: {column, row of a page, kv head, page}.
    template <int kPanels>
    OA_DEVICE void copy(const TensorMap* map, int32 n, int32 kv_head, uint32 smem, uint32 bar) const {
        const int32 end = min_of(seqlen_k_ - n * kBlockN, kBlockN);
        for (int32 row = int32(threadIdx.x & 31) << rows_log2_; row < end; row += 32 << rows_log2_) {
            const PageRow from = pages_.at(n * kBlockN + row);
#pragma unroll
            for (int c = 0; c < kPanels; ++c)
                tma_load_4d(smem + c * (kBlockN * 128) + row * 128, map, bar, c * 64, from.row, kv_head, from.page);
        }
    }

  private:
    PageTable pages_;
    int32 seqlen_k_, rows_log2_;
};
