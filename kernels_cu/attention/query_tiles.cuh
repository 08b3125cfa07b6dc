// Which query rows see a key, and the tiles of rows that a tile of keys visits: of the backward passes.
#pragma once
#include "attention/mask.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/bwd_tile.cuh"

// The rows that see a key: the transpose of visible_keys.
struct QueryRange {
    int32 lo, hi;  // rows lo <= i < hi
};
OA_DEVICE constexpr QueryRange visible_queries(int32 key, int32 seqlen_q, int32 seqlen_k, int32 window_left,
                                               int32 window_right) {
    int64 center = int64(key) + seqlen_q - seqlen_k;
    QueryRange r{};
    r.lo = window_right < 0 ? 0 : int32(max_of<int64>(min_of<int64>(center - window_right, seqlen_q), 0));
    r.hi = window_left < 0 ? seqlen_q : int32(max_of<int64>(min_of<int64>(center + window_left + 1, seqlen_q), 0));
    return r;
}

// The tiles of kBlockM query rows that see some of the kBlockN keys from t.n0 on.
template <int kBlockM, int kBlockN>
struct QueryTiles {
    int32 first = 0, end = 0;  // [first, end) holds every row that sees one of the keys
    int32 full_first = 0, full_end = 0;  // tiles in [full_first, full_end) see all of them and need no masking
    OA_DEVICE constexpr QueryTiles(const AttnFwdParams& p, const BwdTile& t)
        : QueryTiles(t.n0, t.seqlen_q, t.seqlen_k, p.window_left, p.window_right) {}
    OA_DEVICE constexpr QueryTiles(int32 n0, int32 seqlen_q, int32 seqlen_k, int32 window_left, int32 window_right) {
        int32 last_key = min_of<int64>(int64(n0) + kBlockN, seqlen_k) - 1;
        QueryRange head = visible_queries(n0, seqlen_q, seqlen_k, window_left, window_right);
        QueryRange tail = visible_queries(last_key, seqlen_q, seqlen_k, window_left, window_right);
        first = head.lo / kBlockM;
        end = int32((int64(tail.hi) + kBlockM - 1) / kBlockM);
        full_first = int32((int64(tail.lo) + kBlockM - 1) / kBlockM);
        // Of the sequence's last tile some keys may not exist: all rows need masking.
        full_end = int64(n0) + kBlockN > seqlen_k ? full_first : head.hi / kBlockM;
    }
    OA_DEVICE constexpr bool is_empty() const { return end <= first; }
};
