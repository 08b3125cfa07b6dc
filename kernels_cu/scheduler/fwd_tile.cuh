// Tile index -> (batch, head, block of query rows) of the forward kernels.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

// Rows of a packed tensor that belong to no sequence. A length and not a flag: these kernels are short of registers.
constexpr int32 kNoSequence = -1;

struct FwdTile {
    int32 batch_idx, head_idx;
    // First query row of the tile inside its sequence; negative for the first tile of a head (TileList::lead_rows).
    int32 m0;
    int32 q_begin, k_begin;      // first row of the sequence in packed tensors; 0 for dense batches
    int32 sequence;              // its number: of packed tensors that in cu_seqlens, of dense batches batch_idx
    int32 seqlen_q, seqlen_k;  // of this sequence; seqlen_k = kNoSequence: rows that only receive O = 0, LSE = -inf
    bool valid;  // false: nothing to do
};

// Which query and head a row of a tile is. PackedTile (scheduler/split_tiles.cuh) has others.
OA_DEVICE int32 query_of(const FwdTile&, int32 row) { return row; }
OA_DEVICE int32 head_of(const FwdTile& t, int32) { return t.head_idx; }

// A tile of a dense batch.
OA_DEVICE FwdTile tile_of(const AttnFwdParams& p, int32 batch_idx, int32 head_idx, int32 m0) {
    FwdTile t;
    t.batch_idx = batch_idx;
    t.head_idx = head_idx;
    t.m0 = m0;
    t.q_begin = t.k_begin = 0;
    t.sequence = batch_idx;
    t.seqlen_q = p.seqlen_q;
    t.seqlen_k = p.seqlen_k;
    t.valid = true;
    return t;
}

// Heads whose tiles are interleaved in a causal launch, and the number of their tiles that is enough.
constexpr uint32 kInterleavedHeads = 16, kInterleavedTiles = 1024;

// Dense, one tile a CTA. Tiles of one head are neighbours (K and V stay in L2), the longest first. Causal heads, whose
// tiles grow with their row, are interleaved in groups of up to 16, the longest tiles of a group first, so that a
// launch does not end with some long tiles alone; groups of long heads are smaller, so that more of a head's tiles run
// at the same time. Groups are counted from the end: an incomplete one comes first, where nothing waits for it.
template <int kBlockM>
OA_DEVICE FwdTile dense_tile(const AttnFwdParams& p, int64 tile_idx) {
    int64 num_tiles = int64(p.batch) * p.num_q_heads * p.num_m_blocks;
    uint32 blocks = p.num_m_blocks, m;
    int64 head;
    if (num_tiles > 0x7fffffff) {  // 64-bit division costs about 100 cycles more
        head = tile_idx / p.num_m_blocks;
        m = blocks - 1 - uint32(tile_idx - head * p.num_m_blocks);
    } else if (p.window_right >= 0 && p.window_left < 0) {
        uint32 heads = min_of(max_of(kInterleavedTiles / blocks, 1u), kInterleavedHeads);
        uint32 behind = uint32(num_tiles) - 1 - uint32(tile_idx), group = behind / (heads * blocks);
        behind -= group * (heads * blocks);
        uint32 end = uint32(p.batch) * p.num_q_heads - group * heads;
        heads = min_of(heads, end);
        m = behind / heads;
        head = end - 1 - (behind - m * heads);
    } else {
        uint32 flat = uint32(tile_idx) / blocks;
        m = blocks - 1 - (uint32(tile_idx) - flat * blocks);
        head = flat;
    }
    int32 batch_idx = int32(head / p.num_q_heads);
    return tile_of(p, batch_idx, int32(head - int64(batch_idx) * p.num_q_heads), m * kBlockM);
}

// Used rows of one sequence in the packed tensors. Clamped to them: lengths come from device memory and cannot be
// checked without a synchronization.
struct SequenceRange {
    int32 q_begin, seqlen_q, k_begin, seqlen_k;
    int32 sequence;
};
// kPaged: of kernels over pages, whose keys are counted by seqused_k alone, and which may have no cu_seqlens_q. A
// constant, because the others are short of registers.
template <bool kPaged = false>
OA_DEVICE SequenceRange sequence_range(const AttnFwdParams& p, int32 b) {
    SequenceRange r;
    r.sequence = b;
    Sequence of_q, of_k;
    if (kPaged && p.cu_seqlens_q == nullptr) {
        of_q = {b * p.queries_per_sequence, p.queries_per_sequence};
    } else {
        of_q = used_sequence(p.cu_seqlens_q, p.seqused_q, b, p.seqlen_q);
    }
    if (kPaged) {
        of_k = {0, min_of(max_of(p.seqused_k[b], 0), p.seqlen_k)};
    } else {
        of_k = used_sequence(p.cu_seqlens_k, p.seqused_k, b, p.seqlen_k);
    }
    r.q_begin = of_q.begin, r.seqlen_q = of_q.len;
    r.k_begin = of_k.begin, r.seqlen_k = of_k.len;
    return r;
}

// Where packed sequence b begins, or the one before it ends, within the tensor.
template <bool kPaged = false>
OA_DEVICE int32 query_edge(const AttnFwdParams& p, int32 b) {
    if (kPaged && p.cu_seqlens_q == nullptr) return b * p.queries_per_sequence;
    return min_of(max_of(p.cu_seqlens_q[b], 0), p.seqlen_q);
}

// Sum over the lanes up to this one.
OA_DEVICE int32 inclusive_sum(int32 x, int lane) {
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        int32 up = __shfl_up_sync(0xffffffffu, x, d);
        if (lane >= d) x += up;
    }
    return x;
}

// Block `block` of the rows before the first and behind the last sequence, which no sequence owns; all fields but the
// head. Not valid behind the last of them.
template <int kBlockM, bool kPaged = false>
OA_DEVICE void unowned_tile(const AttnFwdParams& p, int32 block, FwdTile& t) {
    int32 total_q = p.seqlen_q;
    int32 first = p.batch > 0 ? query_edge<kPaged>(p, 0) : total_q;
    int32 last = p.batch > 0 ? max_of(query_edge<kPaged>(p, p.batch), first) : total_q;
    int32 head_blocks = (first + kBlockM - 1) / kBlockM;
    t.batch_idx = 0;
    t.sequence = 0;
    t.k_begin = 0;
    t.seqlen_k = kNoSequence;
    if (block < head_blocks) {
        t.q_begin = 0;
        t.seqlen_q = first;
        t.m0 = block * kBlockM;
    } else {
        t.q_begin = last;
        t.seqlen_q = total_q - last;
        t.m0 = (block - head_blocks) * kBlockM;
    }
    t.valid = t.m0 < t.seqlen_q;
}

// Packed sequences, one tile a CTA: every warp walks cu_seqlens, 32 sequences a step, until the running number of
// blocks passes the tile's own. The grid holds ceil(total/kBlockM) + batch + 2 blocks a head, an upper bound for any
// lengths, so that the result does not depend on max_seqlen_q. Blocks behind the last sequence clear the rows that no
// sequence owns.
template <int kBlockM, bool kPaged = false>
OA_DEVICE FwdTile varlen_tile(const AttnFwdParams& p, int64 tile_idx) {
    FwdTile t;
    t.head_idx = int32(tile_idx / p.num_m_blocks);
    int32 block = int32(tile_idx - int64(t.head_idx) * p.num_m_blocks);
    int lane = threadIdx.x & 31;
    for (int32 base = 0; base < p.batch; base += 32) {
        int32 seqlen_q = sequence_range<kPaged>(p, min_of(base + lane, p.batch - 1)).seqlen_q;
        int32 blocks = base + lane < p.batch ? (seqlen_q + kBlockM - 1) / kBlockM : 0;
        int32 inclusive = inclusive_sum(blocks, lane);
        uint32 past = __ballot_sync(0xffffffffu, inclusive > block);
        if (past != 0) {
            int src = __ffs(int(past)) - 1;
            int32 before = __shfl_sync(0xffffffffu, inclusive - blocks, src);
            SequenceRange found = sequence_range<kPaged>(p, base + src);
            t.batch_idx = t.sequence = base + src;
            t.q_begin = found.q_begin;
            // As it is: kernels on mma.sync spill registers where the compiler sees through it.
            t.seqlen_q = in_register(found.seqlen_q);
            t.k_begin = found.k_begin;
            t.seqlen_k = in_register(found.seqlen_k);
            t.m0 = (__shfl_sync(0xffffffffu, blocks, src) - 1 - (block - before)) * kBlockM;
            t.valid = true;
            return t;
        }
        block -= __shfl_sync(0xffffffffu, inclusive, 31);
    }
    unowned_tile<kBlockM, kPaged>(p, block, t);
    return t;
}

// The same by a search instead of the walk: sequence b has the blocks from first_slot(its first row, b) on, one more
// than it may need; together as many as the grid holds.
template <int kBlockM>
OA_DEVICE FwdTile searched_tile(const AttnFwdParams& p, int32 head_idx, int32 block) {
    FwdTile t;
    t.head_idx = head_idx;
    int32 last = p.batch - 1;
    if (p.batch > 0) {
        int32 first = first_slot(packed_sequence(p.cu_seqlens_q, 0, p.seqlen_q).begin, 0, kBlockM);
        Sequence of_last = packed_sequence(p.cu_seqlens_q, last, p.seqlen_q);
        int32 end = first_slot(of_last.begin + of_last.len, p.batch, kBlockM);
        if (block >= first && block < end) {
            int32 b = sequence_of_slot(p.cu_seqlens_q, p.batch, p.seqlen_q, block, kBlockM);
            SequenceRange found = sequence_range(p, b);
            t.batch_idx = t.sequence = b;
            t.q_begin = found.q_begin;
            t.seqlen_q = found.seqlen_q;
            t.k_begin = found.k_begin;
            t.seqlen_k = found.seqlen_k;
            int32 blocks = (found.seqlen_q + kBlockM - 1) / kBlockM;
            t.m0 = (blocks - 1 - (block - first_slot(found.q_begin, b, kBlockM))) * kBlockM;
            t.valid = t.m0 >= 0;
            return t;
        }
        if (block >= end) block -= end - first;
    }
    unowned_tile<kBlockM>(p, block, t);
    return t;
}

// The tile of a CTA that computes one. kSearch: for tiles so small that the walk to a packed sequence takes too long.
template <int kBlockM, bool kSearch = false, bool kPaged = false>
OA_DEVICE FwdTile fwd_tile(const AttnFwdParams& p) {
    int64 tile_idx = p.tile_offset + blockIdx.x;
    if (!kPaged && p.cu_seqlens_q == nullptr) return dense_tile<kBlockM>(p, tile_idx);
    if constexpr (kSearch) {
        int32 head_idx = int32(tile_idx / p.num_m_blocks);
        return searched_tile<kBlockM>(p, head_idx, int32(tile_idx - int64(head_idx) * p.num_m_blocks));
    } else {
        return varlen_tile<kBlockM, kPaged>(p, tile_idx);
    }
}
