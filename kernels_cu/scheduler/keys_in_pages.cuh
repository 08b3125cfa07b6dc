// Which keys of a sequence are made in 16 bits (params/kv_dequantize.cuh).
#pragma once
#include "params/kv_dequantize.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

struct KeysInPages {
    int32 first;  // whole pages behind the sequence's first one
    int32 count;  // from there on
    int32 seen;  // none before it is seen by any query: what lies there may be anybody's
    bool has_queries;  // more than `few`
};

OA_DEVICE KeysInPages keys_of(const KvDequantizeParams& p, int32 b) {
    int32 queries = p.q_len;
    if (p.cu_seqlens_q != nullptr) queries = packed_sequence(p.cu_seqlens_q, b, p.total_queries).len;
    if (queries <= p.few) return {0, 0, 0, false};
    const int32 len = min_of(max_of(p.seq_lens[b], 0), p.capacity);
    const int32 pad = p.leftpad == nullptr ? 0 : min_of(max_of(p.leftpad[b], 0), len);
    const int32 seen = p.window_left < 0 ? pad : max_of(len - queries - p.window_left, pad);
    const int32 first = pad + (seen - pad) / kPageRows * kPageRows;
    return {first, len - first, seen, true};
}
