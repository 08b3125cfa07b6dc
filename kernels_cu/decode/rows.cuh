// Rows of a decode launch: (query token, head of the kv head's group).
#pragma once
#include "params/decode.cuh"
#include "ptx/types.cuh"

// Query token of a row (token, head of the group).
OA_DEVICE int32 token_of(const DecodeParams& p, int32 row) { return row < p.group ? 0 : row / p.group; }

// A sequence's queries: how many this launch has, and where they are.
struct Queries {
    int32 first;  // row of packed queries; of a batch 0
    int32 count;
};
// Clamped to the arrays: starts come from device memory and cannot be checked without a synchronization.
OA_DEVICE Queries queries_of(const DecodeParams& p, int32 b) {
    if (p.cu_seqlens_q == nullptr) return {0, p.q_len};
    int32 first = min_of(max_of(p.cu_seqlens_q[b], 0), p.total_queries);
    int32 count = min_of(p.cu_seqlens_q[b + 1], p.total_queries) - first;
    return {first, count > p.q_len ? 0 : max_of(count, 0)};
}

// Index of a query token's LSE.
OA_DEVICE int64 lse_place(const DecodeParams& p, int32 sequence, int32 head, int32 first, int32 token) {
    if (p.cu_seqlens_q != nullptr) return int64(head) * p.total_queries + first + token;
    return (int64(sequence) * p.num_q_heads + head) * p.q_len + token;
}
