// Work items of a kernel that walks tiles of keys, such as a backward pass, which sums dK and dV of a tile over all
// queries.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/persistent.cuh"

struct BwdTile {
    int32 batch_idx, kv_head_idx;
    int32 n0;  // first key of the tile inside its sequence
    int32 q_begin, k_begin;  // first row of the sequence in packed tensors; 0 for dense batches
    int32 sequence;
    int32 seqlen_q, seqlen_k;
};

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
