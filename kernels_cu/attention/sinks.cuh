// A logit of each query head that no value belongs to: it is in the softmax's denominator and in the LSE.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/cvt.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

// In base-2 units; -inf if there is none.
template <typename Io>
OA_DEVICE float sink_log2(const void* sinks, int32 kind, int32 head) {
    if (kind == kSinksNone) return neg_inf();
    float sink = kind == kSinksFloat ? static_cast<const float*>(sinks)[head]
                                     : to_float(Io{}, static_cast<const uint16*>(sinks)[head]);
    return sink * kLog2e;
}
// Of a tile's head; none for rows that belong to no sequence.
template <typename Io>
OA_DEVICE float sink_log2(const AttnFwdParams& p, const FwdTile& t) {
    if (t.seqlen_k == kNoSequence) return neg_inf();
    return sink_log2<Io>(p.sinks, p.sinks_kind, t.head_idx);
}
