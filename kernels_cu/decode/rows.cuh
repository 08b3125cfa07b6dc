// Rows of a decode launch: (query token, head of the kv head's group).
#pragma once
#include "params/decode.cuh"
#include "ptx/cvt.cuh"
#include "ptx/types.cuh"

// Query token of a row (token, head of the group).
OA_DEVICE int32 token_of(const DecodeParams& p, int32 row) { return row < p.group ? 0 : row / p.group; }

// A query head's sink in base-2 units; -inf if there is none.
template <typename Io>
OA_DEVICE float decode_sink_log2(const DecodeParams& p, int32 head) {
    if (p.sinks_kind == kSinksNone) return neg_inf();
    float sink = p.sinks_kind == kSinksFloat ? static_cast<const float*>(p.sinks)[head]
                                             : to_float(Io{}, static_cast<const uint16*>(p.sinks)[head]);
    return sink * kLog2e;
}
