// Which keys a query row sees. Bottom-right alignment: query i stands at key position i + seqlen_k - seqlen_q.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/cvt.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

struct KeyRange {
    int32 lo, hi;  // visible keys: lo <= j < hi
};

// 64-bit in between: lengths reach 2^31 and windows are arbitrary 32-bit numbers.
OA_DEVICE constexpr KeyRange visible_keys(int32 row, int32 seqlen_q, int32 seqlen_k, int32 window_left,
                                          int32 window_right) {
    int64 center = int64(row) + seqlen_k - seqlen_q;
    KeyRange r{};
    r.lo = window_left < 0 ? 0 : int32(max_of<int64>(min_of<int64>(center - window_left, seqlen_k), 0));
    r.hi = window_right < 0 ? seqlen_k : int32(max_of<int64>(min_of<int64>(center + window_right + 1, seqlen_k), 0));
    return r;
}

// Of a row of a tile of queries.
OA_DEVICE KeyRange visible_to(const AttnFwdParams& p, const FwdTile& t, int32 row) {
    return visible_keys(row, t.seqlen_q, t.seqlen_k, p.window_left, p.window_right);
}

// The tiles of kBlockN keys that kBlockM query rows from t.m0 on see.
template <int kBlockM, int kBlockN>
struct KeyTiles {
    int32 first = 0, end = 0;  // [first, end) holds every visible key
    int32 full_first = 0, full_end = 0;  // tiles in [full_first, full_end) are visible to every row and need no masking
    OA_DEVICE constexpr KeyTiles(const AttnFwdParams& p, const FwdTile& t)
        : KeyTiles(t.m0, t.seqlen_q, t.seqlen_k, p.window_left, p.window_right) {}
    OA_DEVICE constexpr KeyTiles(int32 m0, int32 seqlen_q, int32 seqlen_k, int32 window_left, int32 window_right)
        : KeyTiles(m0, min_of(m0 + kBlockM, seqlen_q) - 1, seqlen_q, seqlen_k, window_left, window_right) {}
    // Of query rows from first_row to last_row.
    OA_DEVICE constexpr KeyTiles(int32 first_row, int32 last_row, int32 seqlen_q, int32 seqlen_k, int32 window_left,
                                 int32 window_right) {
        KeyRange top = visible_keys(first_row, seqlen_q, seqlen_k, window_left, window_right);
        KeyRange bottom = visible_keys(last_row, seqlen_q, seqlen_k, window_left, window_right);
        first = top.lo / kBlockN;
        end = (int64(bottom.hi) + kBlockN - 1) / kBlockN;
        full_first = (int64(bottom.lo) + kBlockN - 1) / kBlockN;
        full_end = top.hi / kBlockN;
    }
    OA_DEVICE constexpr bool is_empty() const { return end <= first; }
};

// The user's mask at (row, key) in natural-log units: 0 / -inf for booleans, the value for additive masks.
template <typename Io>
OA_DEVICE float mask_value(const AttnFwdParams& p, int64 head_offset, int32 row, int32 key) {
    if (row >= p.mask_rows || key >= p.mask_cols) return neg_inf();
    int64 at = head_offset + row * p.mask_stride_q + key * p.mask_stride_k;
    if (p.mask_kind == kMaskBool) return static_cast<const uint8*>(p.mask)[at] ? 0.0f : neg_inf();
    if (p.mask_kind == kMaskFloat) return static_cast<const float*>(p.mask)[at];
    return to_float(Io{}, static_cast<const uint16*>(p.mask)[at]);
}

// The least number that masks add in the forward (score_mods.cuh), and so the least LSE of rows that they have.
constexpr float kLeastBias = 0.25f * kLowest * kLn2;
