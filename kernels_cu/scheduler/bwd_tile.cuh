// Work items of a kernel that walks tiles of keys, such as a backward pass, which sums dK and dV of a tile over all
// queries.
#pragma once
#include "params/attn_bwd.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/persistent.cuh"

struct BwdTile {
    int32 batch_idx, kv_head_idx;
    int32 n0;  // first key of the tile inside its sequence
    int32 q_begin, k_begin;  // first row of the sequence in packed tensors; 0 for dense batches
    int32 sequence;
    int32 seqlen_q, seqlen_k;  // seqlen_q = kNoSequence: rows that only receive dk = dv = 0
    int32 steps;  // of ListedBwdTiles (scheduler/bwd_lists.cuh): tiles of queries of all heads
};

// First padded row of a batch entry (params/attn_bwd.cuh).
OA_DEVICE int64 padded_begin(const AttnBwdParams& p, const BwdTile& t) {
    return int64(t.batch_idx) * ((p.fwd.seqlen_q + 127) / 128 * 128);
}

// Tiles of keys of dense batches, in the order of a list that the host composes as for queries: a list's last block is
// the longest one with causality, and a tile of keys is the longer the nearer it is to key 0.
class PersistentBwdTiles {
  public:
    // Moves `t` to the next tile; false when there is none. kCluster: CTAs that take a tile together.
    template <int kBlockN, uint32 kCluster = 1>
    OA_DEVICE bool next(const AttnFwdParams& p, const TileList& list, BwdTile& t) {
        uint32 blocks = (uint32(p.seqlen_k) + kBlockN - 1) / kBlockN, head, block;
        if (!items_.next<kCluster>(list, blocks, uint32(p.batch) * p.num_kv_heads, head, block)) return false;
        t.batch_idx = t.sequence = int32(head / p.num_kv_heads);
        t.kv_head_idx = int32(head) - t.batch_idx * p.num_kv_heads;
        t.n0 = int32((blocks - 1 - block) * kBlockN);
        t.q_begin = t.k_begin = 0;
        t.seqlen_q = p.seqlen_q;
        t.seqlen_k = p.seqlen_k;
        return true;
    }

  private:
    PersistentItems items_;
};

// Block `block` of the rows of keys before the first and behind the last sequence, which no sequence owns; all fields
// but the head and batch_idx. False behind the last of them.
template <int kBlockN>
OA_DEVICE bool unowned_bwd_tile(const AttnFwdParams& p, int32 block, BwdTile& t) {
    int32 first = p.batch > 0 ? packed_sequence(p.cu_seqlens_k, 0, p.seqlen_k).begin : p.seqlen_k;
    int32 last = p.batch > 0 ? min_of(max_of(p.cu_seqlens_k[p.batch], first), p.seqlen_k) : p.seqlen_k;
    int32 head_blocks = (first + kBlockN - 1) / kBlockN;
    t.sequence = 0;
    t.q_begin = 0;
    t.seqlen_q = kNoSequence;
    t.k_begin = block < head_blocks ? 0 : last;
    t.seqlen_k = block < head_blocks ? first : p.seqlen_k - last;
    t.n0 = (block < head_blocks ? block : block - head_blocks) * kBlockN;
    return t.n0 < t.seqlen_k;
}

// Tiles of keys of dense batches that CTAs draw from a counter, which is 0 before; one warp walks, all lanes together.
// The tiles of a head come in the order of their keys, and heads are interleaved in groups of per_group: a head's next
// tile of keys begins some steps later than the one before. Causal tiles shrink with their key: the second half of a
// group's tiles is interleaved with the first half of the next group's.
template <int kBlockN>
class DrawnBwdTiles {
  public:
    OA_DEVICE DrawnBwdTiles(const AttnFwdParams& p, uint32 per_group, uint32* counter)
        : p_(p), per_group_(per_group), counter_(counter) {}

    // Moves `t` to the next tile; false when there is none.
    OA_DEVICE bool next(BwdTile& t) {
        const uint32 blocks = (uint32(p_.seqlen_k) + kBlockN - 1) / kBlockN, heads = uint32(p_.batch) * p_.num_kv_heads;
        const uint32 per_group = per_group_, groups = (heads - 1) / per_group + 1;
        const uint32 parts = p_.window_right >= 0 && p_.window_left < 0 ? 2 : 1;  // of a group
        const uint32 rows = (blocks - 1) / parts + 1;  // of a part
        uint32 head, block;
        do {  // some places of the first and the last group are nobody's
            uint32 item = 0;
            if ((threadIdx.x & 31) == 0) item = atomic_add_relaxed(counter_, 1);
            item = __shfl_sync(0xffffffffu, item, 0);
            const uint32 row = item / (parts * per_group), at = item - row * (parts * per_group);
            const uint32 part = at / per_group, group = row / rows;
            if (group >= groups + parts - 1) return false;
            // Of group - 1 in part 1; below 0 no head is valid.
            head = (group - part) * per_group + at - part * per_group;
            block = row - group * rows + part * rows;
            if (group < part) head = heads;
        } while (head >= heads || block >= blocks);
        t.batch_idx = t.sequence = int32(head / p_.num_kv_heads);
        t.kv_head_idx = int32(head) - t.batch_idx * p_.num_kv_heads;
        t.n0 = int32(block * kBlockN);
        t.q_begin = t.k_begin = 0;
        t.seqlen_q = p_.seqlen_q;
        t.seqlen_k = p_.seqlen_k;
        return true;
    }

  private:
    const AttnFwdParams& p_;
    const uint32 per_group_;
    uint32* counter_;
};

// Tiles of keys of packed sequences; one warp walks, all lanes together. The items are those of the sequences, the ones
// with the longest tiles first; at the end come the rows that no sequence owns. The first item of CTA b is item b, the
// others it draws from a counter, which is 0 before: the host knows no lengths, and CTAs end together.
//
// Of each sequence head by head, so that Q and dO stay in L2. Causal tiles shrink with their key: heads are interleaved
// in groups of up to kInterleavedPackedTiles tiles, the longest tiles of a group first.
//
// kOrdered: all items are drawn, so that an item has been begun before any with a higher number, and heads are always
// interleaved, up to kInterleavedDrawnTiles tiles together.
constexpr int32 kInterleavedPackedTiles = 512, kInterleavedDrawnTiles = 192;

template <int kBlockN, bool kOrdered = false>
class PackedBwdTiles {
    struct Axis {
        static constexpr bool kPaged = false;
        static constexpr SequenceRange kNone{0, -1, 0, 0, 0};
        static constexpr int32 SequenceRange::* kSteps = &SequenceRange::seqlen_q;
        OA_DEVICE static int32 heads(const AttnFwdParams& p) { return p.num_kv_heads; }
        OA_DEVICE static int32 items(const AttnFwdParams&, const SequenceRange& r) {
            return (r.seqlen_k + kBlockN - 1) / kBlockN;
        }
    };

  public:
    // ranges: as PackedSequences.
    OA_DEVICE PackedBwdTiles(const AttnFwdParams& p, uint32* counter, SequenceRange* ranges)
        : p_(p), counter_(counter), sequences_(p, ranges), is_first_(!kOrdered) {}

    // Moves `t` to the next tile; false when there is none.
    OA_DEVICE bool next(BwdTile& t) {
        SequenceRange r;
        int32 item = blockIdx.x, at;
        if (!is_first_) {
            if ((threadIdx.x & 31) == 0) item = int32((kOrdered ? 0 : gridDim.x) + atomic_add_relaxed(counter_, 1));
            item = __shfl_sync(0xffffffffu, item, 0);
        }
        is_first_ = false;
        t.batch_idx = 0;
        if (sequences_.find(item, r, at)) {
            int32 blocks = Axis::items(p_, r), per_group = 1;
            if (p_.window_right >= 0 && p_.window_left < 0)
                per_group = min_of(max_of(kInterleavedPackedTiles / blocks, 1), p_.num_kv_heads);
            else if (kOrdered)
                per_group = min_of(max_of(kInterleavedDrawnTiles / blocks, 1), p_.num_kv_heads);
            int32 group = at / (per_group * blocks) * per_group;
            at -= group * blocks;
            per_group = min_of(per_group, p_.num_kv_heads - group);
            int32 block = at / per_group;
            t.kv_head_idx = group + at - block * per_group;
            t.n0 = block * kBlockN;
            t.sequence = r.sequence;
            t.q_begin = r.q_begin;
            t.seqlen_q = r.seqlen_q;
            t.k_begin = r.k_begin;
            t.seqlen_k = r.seqlen_k;
            return true;
        }
        int32 block = at / p_.num_kv_heads;
        t.kv_head_idx = at - block * p_.num_kv_heads;
        return unowned_bwd_tile<kBlockN>(p_, block, t);
    }

  private:
    const AttnFwdParams& p_;
    uint32* counter_;
    PackedSequences<Axis> sequences_;
    bool is_first_;
};

// Dense, one tile a CTA. Tiles of one head are neighbours: Q and dO stay in L2. Causal heads, whose tiles shrink with
// their key, are interleaved in groups of up to 16, the longest tiles of a group first.
template <int kBlockN>
OA_DEVICE BwdTile dense_bwd_tile(const AttnFwdParams& p, int64 tile_idx, int32 num_n_blocks) {
    int64 num_heads = int64(p.batch) * p.num_kv_heads, head = tile_idx / num_n_blocks;
    int32 n = int32(tile_idx - head * num_n_blocks);
    if (p.window_right >= 0 && p.window_left < 0) {
        int64 heads = min_of<int64>(max_of(kInterleavedTiles / uint32(num_n_blocks), 1u), kInterleavedHeads);
        int64 first = head / heads * heads, behind = tile_idx - first * num_n_blocks;
        heads = min_of(heads, num_heads - first);
        n = int32(behind / heads);
        head = first + (behind - n * heads);
    }
    BwdTile t;
    t.batch_idx = t.sequence = int32(head / p.num_kv_heads);
    t.kv_head_idx = int32(head - int64(t.batch_idx) * p.num_kv_heads);
    t.n0 = n * kBlockN;
    t.q_begin = t.k_begin = 0;
    t.seqlen_q = p.seqlen_q;
    t.seqlen_k = p.seqlen_k;
    return t;
}

// Packed sequences, one tile a CTA, as varlen_tile has it for queries. False: nothing to do.
template <int kBlockN>
OA_DEVICE bool varlen_bwd_tile(const AttnFwdParams& p, int64 tile_idx, int32 num_n_blocks, BwdTile& t) {
    t.batch_idx = 0;
    t.kv_head_idx = int32(tile_idx / num_n_blocks);
    int32 block = int32(tile_idx - int64(t.kv_head_idx) * num_n_blocks);
    int lane = threadIdx.x & 31;
    for (int32 base = 0; base < p.batch; base += 32) {
        int32 seqlen_k = used_sequence(p.cu_seqlens_k, p.seqused_k, min_of(base + lane, p.batch - 1), p.seqlen_k).len;
        int32 blocks = base + lane < p.batch ? (seqlen_k + kBlockN - 1) / kBlockN : 0;
        int32 inclusive = inclusive_sum(blocks, lane);
        uint32 past = __ballot_sync(0xffffffffu, inclusive > block);
        if (past != 0) {
            int src = __ffs(int(past)) - 1;
            SequenceRange found = sequence_range(p, base + src);
            t.batch_idx = t.sequence = base + src;
            t.q_begin = found.q_begin;
            t.seqlen_q = found.seqlen_q;
            t.k_begin = found.k_begin;
            t.seqlen_k = found.seqlen_k;
            t.n0 = (block - __shfl_sync(0xffffffffu, inclusive - blocks, src)) * kBlockN;
            return true;
        }
        block -= __shfl_sync(0xffffffffu, inclusive, 31);
    }
    return unowned_bwd_tile<kBlockN>(p, block, t);
}

// The tile of a CTA that computes one; false: nothing to do.
template <int kBlockN>
OA_DEVICE bool bwd_tile(const AttnFwdParams& p, int32 num_n_blocks, BwdTile& t) {
    int64 tile_idx = p.tile_offset + blockIdx.x;
    if (p.cu_seqlens_k != nullptr) return varlen_bwd_tile<kBlockN>(p, tile_idx, num_n_blocks, t);
    t = dense_bwd_tile<kBlockN>(p, tile_idx, num_n_blocks);
    return true;
}
