// Tile index -> (batch, head, block of query rows) of the forward kernels.
#pragma once
#include "scheduler/fwd_params.cuh"
#include "ptx/types.cuh"

// Rows of a packed tensor that belong to no sequence. A length and not a flag: registers are what these kernels lack.
constexpr int32 kNoSequence = -1;

struct FwdTile {
    int32 batch_idx, head_idx;
    int32 m0;                    // first query row of the tile inside its sequence
    int32 q_begin, k_begin;      // first row of the sequence in packed tensors; 0 for dense batches
    int32 seqlen_q, seqlen_k;  // of this sequence; seqlen_k = kNoSequence: rows that only receive O = 0, LSE = -inf
    bool valid;  // false: nothing to do
};

// A tile of a dense batch.
OA_DEVICE FwdTile tile_of(const AttnFwdParams& p, int32 batch_idx, int32 head_idx, int32 m0) {
    FwdTile t;
    t.batch_idx = batch_idx;
    t.head_idx = head_idx;
    t.m0 = m0;
    t.q_begin = t.k_begin = 0;
    t.seqlen_q = p.seqlen_q;
    t.seqlen_k = p.seqlen_k;
    t.valid = true;
    return t;
}

// Dense, one tile a CTA: tiles of one head are neighbours (they share K and V in L2), the longest of a causal head first.
template <int kBlockM>
OA_DEVICE FwdTile dense_tile(const AttnFwdParams& p, int64 tile_idx) {
    int64 head_flat;
    int32 m;
    if (tile_idx < 0x7fffffff) {  // 64-bit division costs about 100 cycles more
        uint32 flat = uint32(tile_idx) / uint32(p.num_m_blocks);
        m = int32(uint32(tile_idx) - flat * uint32(p.num_m_blocks));
        head_flat = flat;
    } else {
        head_flat = tile_idx / p.num_m_blocks;
        m = int32(tile_idx - head_flat * p.num_m_blocks);
    }
    int32 batch_idx = int32(head_flat / p.num_q_heads);
    int32 head_idx = int32(head_flat - int64(batch_idx) * p.num_q_heads);
    return tile_of(p, batch_idx, head_idx, (p.num_m_blocks - 1 - m) * kBlockM);
}

// The tiles of one CTA of a persistent kernel, in order: item blockIdx.x, then every gridDim.x further. Every warp role
// walks the same list. Fewer than 2^31 - gridDim.x items.
//   kHeadMajor     an item is a tile; the tiles of a head are neighbours
//   kLongestFirst  an item is a tile; the last rows of all heads come first (causal, few tiles)
//   kPaired        item j of a head is its j-th longest and its j-th shortest tile: all items of a causal problem are
//                  equally long, so that a static order balances them without a counter in global memory
class PersistentTiles {
  public:
    OA_DEVICE PersistentTiles() : item_(blockIdx.x), second_(false) {}

    // Moves `t` to the next tile; false when there is none.
    template <int kBlockM>
    OA_DEVICE bool next(const AttnFwdParams& p, uint32 num_items, FwdTile& t) {
        if (item_ >= num_items) return false;
        uint32 blocks = p.num_m_blocks, head, m;
        if (p.tile_order == kLongestFirst) {
            uint32 heads = uint32(p.batch) * p.num_q_heads, rank = item_ / heads;
            head = item_ - rank * heads;
            m = blocks - 1 - rank;
            item_ += gridDim.x;
        } else {
            uint32 per_head = p.tile_order == kPaired ? (blocks + 1) / 2 : blocks;
            head = item_ / per_head;
            uint32 j = item_ - head * per_head;
            m = second_ ? j : blocks - 1 - j;
            // The middle tile of an odd number is its own partner.
            second_ = p.tile_order == kPaired && !second_ && 2 * j + 1 != blocks;
            if (!second_) item_ += gridDim.x;
        }
        uint32 batch_idx = head / p.num_q_heads;
        t = tile_of(p, batch_idx, head - batch_idx * p.num_q_heads, m * kBlockM);
        return true;
    }

  private:
    uint32 item_;
    bool second_;
};

// Packed sequences: every warp walks cu_seqlens_q, 32 sequences a step, until the running number of blocks passes the
// tile's own. The grid holds ceil(total/kBlockM) + batch + 2 blocks a head, an upper bound for any lengths, so that the
// result does not depend on max_seqlen_q. Blocks behind the last sequence clear the rows that no sequence owns.
template <int kBlockM>
OA_DEVICE FwdTile varlen_tile(const AttnFwdParams& p, int64 tile_idx) {
    FwdTile t;
    t.valid = false;
    t.head_idx = int32(tile_idx / p.num_m_blocks);
    int32 block = int32(tile_idx - int64(t.head_idx) * p.num_m_blocks);
    int lane = threadIdx.x & 31;
    int32 total_q = p.seqlen_q, total_k = p.seqlen_k;
    for (int32 base = 0; base < p.batch; base += 32) {
        int32 b = min_of(base + lane, p.batch - 1);
        // Clamped to the tensors: lengths come from device memory and cannot be checked without a synchronization.
        int32 q_lo = min_of(max_of(p.cu_seqlens_q[b], 0), total_q);
        int32 q_hi = min_of(max_of(p.cu_seqlens_q[b + 1], q_lo), total_q);
        int32 blocks = base + lane < p.batch ? (q_hi - q_lo + kBlockM - 1) / kBlockM : 0;
        int32 inclusive = blocks;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            int32 up = __shfl_up_sync(0xffffffffu, inclusive, d);
            if (lane >= d) inclusive += up;
        }
        uint32 past = __ballot_sync(0xffffffffu, inclusive > block);
        if (past != 0) {
            int src = __ffs(int(past)) - 1;
            int32 before = __shfl_sync(0xffffffffu, inclusive - blocks, src);
            int32 own_blocks = __shfl_sync(0xffffffffu, blocks, src);
            t.batch_idx = base + src;
            t.q_begin = __shfl_sync(0xffffffffu, q_lo, src);
            t.seqlen_q = __shfl_sync(0xffffffffu, q_hi, src) - t.q_begin;
            t.m0 = (own_blocks - 1 - (block - before)) * kBlockM;
            int32 k_lo = min_of(max_of(p.cu_seqlens_k[t.batch_idx], 0), total_k);
            int32 k_hi = min_of(max_of(p.cu_seqlens_k[t.batch_idx + 1], k_lo), total_k);
            t.k_begin = k_lo;
            t.seqlen_k = k_hi - k_lo;
            t.valid = true;
            return t;
        }
        block -= __shfl_sync(0xffffffffu, inclusive, 31);
    }
    int32 first = p.batch > 0 ? min_of(max_of(p.cu_seqlens_q[0], 0), total_q) : total_q;
    int32 last = p.batch > 0 ? min_of(max_of(p.cu_seqlens_q[p.batch], first), total_q) : total_q;
    int32 head_blocks = (first + kBlockM - 1) / kBlockM;
    t.batch_idx = 0;
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
    return t;
}
