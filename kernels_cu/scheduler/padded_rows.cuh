// Padded rows of the backward's workspaces (params/attn_bwd.cuh).
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

// First padded row of sequence b. begin: its first row in packed tensors.
OA_DEVICE int64 padded_begin(const AttnFwdParams& p, int32 b, int32 begin) {
    if (p.cu_seqlens_q == nullptr) return b * ((int64(p.seqlen_q) + kBlockRows - 1) / kBlockRows * kBlockRows);
    return (begin + int64(b) * kBlockRows) / kBlockRows * kBlockRows;
}

// Where a block of kBlockRows padded rows lies.
struct PaddedBlock {
    int32 sequence;
    int32 row;      // of the first padded row, in its sequence
    int32 q_begin;  // first row of the sequence in packed tensors; 0 for dense batches
    int32 seqlen_q;
};

// The sequence that begins last at or before a block. Blocks behind its end have rows at or beyond seqlen_q.
OA_DEVICE PaddedBlock padded_block(const AttnFwdParams& p, int32 block) {
    int64 first = int64(block) * kBlockRows;
    if (p.cu_seqlens_q == nullptr) {
        int32 blocks = (p.seqlen_q + kBlockRows - 1) / kBlockRows, b = block / blocks;
        return {b, (block - b * blocks) * kBlockRows, 0, p.seqlen_q};
    }
    if (p.batch == 0) return {0, 0, 0, 0};
    int32 lo = 0, hi = p.batch;
    while (hi - lo > 1) {
        int32 mid = lo + (hi - lo) / 2;
        bool before = padded_begin(p, mid, packed_sequence(p.cu_seqlens_q, mid, p.seqlen_q).begin) <= first;
        lo = before ? mid : lo;
        hi = before ? hi : mid;
    }
    Sequence s = used_sequence(p.cu_seqlens_q, p.seqused_q, lo, p.seqlen_q);
    int64 row = first - padded_begin(p, lo, s.begin);
    // Before the first sequence, or far behind the last one: nobody's.
    return {lo, row < 0 || row > s.len ? s.len : int32(row), s.begin, s.len};
}
