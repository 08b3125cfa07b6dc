// Where the keys of a sequence lie whose K and V are pages of a pool (PagedAttention, Kwon et al. 2023).
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

struct PageRow {
    int32 page, row;
};

// Of packed sequences over pages. With cu_seqlens_q those of up to queries_per_sequence queries are another launch's,
// and count as having none.
template <>
OA_DEVICE SequenceRange sequence_range<true>(const AttnFwdParams& p, int32 b) {
    SequenceRange r;
    Sequence of_q = {b * p.queries_per_sequence, p.queries_per_sequence};
    if (p.cu_seqlens_q != nullptr) {
        of_q = used_sequence(p.cu_seqlens_q, p.seqused_q, b, p.seqlen_q);
        if (of_q.len <= p.queries_per_sequence) of_q.len = 0;
    }
    r.sequence = b;
    r.q_begin = of_q.begin, r.seqlen_q = of_q.len;
    r.k_begin = 0, r.seqlen_k = min_of(max_of(p.seqused_k[b], 0), p.seqlen_k);
    return r;
}

// The first key that a query of the tile's sequence sees. Pages left of it may be another sequence's by now, or hold
// NaN, which is NaN times 0 too.
template <typename Tile>
OA_DEVICE int32 first_seen_key(const AttnFwdParams& p, const Tile& t) {
    return p.window_left < 0 ? 0 : max_of(t.seqlen_k - query_of(t, t.seqlen_q) - p.window_left, 0);
}

// Of a tile's key, or the first one that is seen if it is left of that.
template <typename Tile>
OA_DEVICE int32 seen_key(const AttnFwdParams& p, const Tile& t, int64 key) {
    return max_of(int32(key), first_seen_key(p, t));
}

class PageTable {
  public:
    OA_DEVICE PageTable(const AttnFwdParams& p, const FwdTile& t)
        : p_(p),
          own_(p.batch_index == nullptr ? t.sequence : __ldg(p.batch_index + t.sequence)),
          table_(p.block_table == nullptr ? nullptr : p.block_table + own_ * p.table_stride),
          page_size_(p.page_size) {}

    // Of a key that the sequence has: others have no entry that could be read.
    OA_DEVICE PageRow at(int32 key) const {
        if (table_ == nullptr) return {own_, key};
        // Most pages have a power of two of rows, and a division takes as long as a copy.
        const bool shifts = (page_size_ & (page_size_ - 1)) == 0;
        const uint32 place = shifts ? uint32(key) >> (31 - __clz(int(page_size_))) : uint32(key) / page_size_;
        return {__ldg(table_ + place), int32(key - place * page_size_)};
    }
    OA_DEVICE int64 offset(int32 key, int64 stride_page, int64 stride_row) const {
        return offset(p_, at(key), stride_page, stride_row);
    }
    // Elements from the pool's beginning; strides of pages and of rows in them. An entry that is no page of the pool is
    // taken for its nearest one: nothing else may be read. (Tensor maps give zeros.)
    OA_DEVICE static int64 offset(const AttnFwdParams& p, const PageRow& found, int64 stride_page, int64 stride_row) {
        return min_of(max_of(found.page, 0), p.num_pages - 1) * stride_page + found.row * stride_row;
    }

  private:
    const AttnFwdParams& p_;
    int32 own_;  // its row of the table, or its page where there is no table
    const int32* table_;
    uint32 page_size_;
};
