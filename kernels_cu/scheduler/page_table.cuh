// Where the keys of a sequence lie whose K and V are pages of a pool (PagedAttention, Kwon et al. 2023).
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

struct PageRow {
    int32 page, row;
};

class PageTable {
  public:
    OA_DEVICE PageTable(const AttnFwdParams& p, const FwdTile& t)
        : table_(p.block_table + t.sequence * p.table_stride), page_size_(p.page_size) {}

    // Of a key that the sequence has: others have no entry that could be read.
    OA_DEVICE PageRow at(int32 key) const {
        const uint32 place = uint32(key) / page_size_;
        return {__ldg(table_ + place), int32(key - place * page_size_)};
    }
    // Elements from the pool's beginning; strides of pages and of rows in them.
    OA_DEVICE int64 offset(int32 key, int64 stride_page, int64 stride_row) const {
        const PageRow found = at(key);
        return found.page * stride_page + found.row * stride_row;
    }

  private:
    const int32* table_;
    uint32 page_size_;
};
