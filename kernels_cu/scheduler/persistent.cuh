// The tiles of one CTA of a persistent kernel.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

constexpr int32 kNoMoreTiles = -1;  // in place of a tile's first row

// The walk over the list, for tiles of queries and of keys alike: `blocks` tiles to each of `heads` heads.
class PersistentItems {
  public:
    OA_DEVICE PersistentItems() : round_begin_(0), backwards_(false), second_(false) {}

    // The next tile: block `block` of head `head` (batch * heads of an entry + head); false when there is none.
    // kCluster: CTAs that take an item together.
    template <uint32 kCluster = 1>
    OA_DEVICE bool next(const TileList& list, uint32 blocks, uint32 heads, uint32& head, uint32& block) {
        const uint32 takers = gridDim.x / kCluster, taker = blockIdx.x / kCluster;
        uint32 item = round_begin_ + (backwards_ ? takers - 1 - taker : taker);
        if (item >= list.num_items) return false;
        bool last_of_item = true;
        if (item < list.num_pairs) {
            uint32 per_head = (blocks + 1) / 2;
            head = item / per_head;
            uint32 j = item - head * per_head;
            block = second_ ? j : blocks - 1 - j;
            // The middle tile of an odd number is its own partner.
            second_ = !second_ && 2 * j + 1 != blocks;
            last_of_item = !second_;
        } else if (list.num_tail_heads != 0) {
            uint32 at = item - list.num_pairs, rank = at / list.num_tail_heads;
            head = heads - list.num_tail_heads + (at - rank * list.num_tail_heads);
            block = blocks - 1 - rank;
        } else {
            head = item / blocks;
            block = blocks - 1 - (item - head * blocks);
        }
        if (last_of_item) {
            round_begin_ += takers;
            if (round_begin_ > list.num_pairs) backwards_ = !backwards_;
        }
        return true;
    }

  private:
    uint32 round_begin_;
    bool backwards_;
    bool second_;
};

// Tiles of queries of dense batches.
class PersistentTiles {
  public:
    // Moves `t` to the next tile; false when there is none.
    // kRotate: heads begin at different blocks, so that a CTA does not have the same block of many heads: with a mask
    // some blocks have far more to do than others.
    template <int kBlockM, bool kRotate = false>
    OA_DEVICE bool next(const AttnFwdParams& p, const TileList& list, FwdTile& t) {
        uint32 head, m;
        if (!items_.next(list, p.num_m_blocks, uint32(p.batch) * p.num_q_heads, head, m)) return false;
        if (kRotate && (list.num_pairs | list.num_tail_heads) == 0)
            m = (m + (head * 0x9e3779b9u >> 16)) % uint32(p.num_m_blocks);
        uint32 batch_idx = head / p.num_q_heads;
        t = tile_of(p, batch_idx, head - batch_idx * p.num_q_heads, int32(m * kBlockM) - int32(list.lead_rows));
        return true;
    }

  private:
    PersistentItems items_;
};

// Packed sequences; one warp walks, all lanes together. The items are those of the sequences, 32 sequences at a time
// and the ones with the longest tiles first; of each sequence head by head, so that what its tiles have in common stays
// in L2; of each head the tiles, or with causality pairs of a long and a short one. At the end come the rows that no
// sequence owns. Every second round runs backwards. The walk goes on where the CTA's last item was found, so that all
// tiles of a CTA together cost one pass over cu_seqlens.
//
// Axis: what the tiles are tiles of. Tile; kBlock, its rows; kNone, a sequence that does not exist; heads(p); rows(r)
// of a sequence, and kSteps, the length that a tile of it is walked along; place(t, r, head, row), the tile of a
// sequence's rows from `row` on; unowned(p, block, head, t), as unowned_tile.
template <typename Axis>
class PackedItems {
    using Tile = typename Axis::Tile;

  public:
    // ranges: 32 of them in shared memory, this warp's own (a producer has few registers).
    OA_DEVICE PackedItems(const AttnFwdParams& p, const TileList& list, SequenceRange* ranges)
        : p_(p), list_(list), ranges_(ranges), round_(0), second_(false), chunk_(0), before_(0) {
        load_chunk();
    }

    // Moves `t` to the next tile; false when there is none.
    OA_DEVICE bool next(Tile& t) {
        for (;;) {
            uint32 item = round_ * gridDim.x + (round_ & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
            if (item >= list_.num_items) return false;
            bool found = find(int32(item), t);
            if (second_) return true;
            ++round_;
            if (found) return true;
        }
    }

  private:
    // The next tile of an item, and whether another one follows; false for the slack at the end of the list.
    OA_DEVICE bool find(int32 item, Tile& t) {
        t.batch_idx = 0;
        while (chunk_ < p_.batch) {
            uint32 candidates = __ballot_sync(0xffffffffu, inclusive_ * Axis::heads(p_) > item - before_);
            if (candidates != 0) {
                int src = __ffs(int(candidates)) - 1;
                SequenceRange r = ranges_[src];
                int32 blocks = num_blocks(r), units = num_units(r);
                int32 at = item - before_ - (__shfl_sync(0xffffffffu, inclusive_, src) - units) * Axis::heads(p_);
                int32 head = at / units;
                int32 j = at - head * units;
                int32 row = (second_ ? j : blocks - 1 - j) * Axis::kBlock;
                // The middle tile of an odd number is its own partner.
                second_ = in_pairs() && !second_ && 2 * j + 1 != blocks;
                Axis::place(t, r, head, row);
                return true;
            }
            before_ += __shfl_sync(0xffffffffu, inclusive_, 31) * Axis::heads(p_);
            chunk_ += 32;
            load_chunk();
        }
        int32 block = (item - before_) / Axis::heads(p_);
        return Axis::unowned(p_, block, item - before_ - block * Axis::heads(p_), t);
    }

    OA_DEVICE bool in_pairs() const { return p_.window_right >= 0 && p_.window_left < 0; }
    OA_DEVICE int32 num_blocks(const SequenceRange& r) const {
        return (Axis::rows(r) + Axis::kBlock - 1) / Axis::kBlock;
    }
    OA_DEVICE int32 num_units(const SequenceRange& r) const {
        return in_pairs() ? (num_blocks(r) + 1) / 2 : num_blocks(r);
    }

    // Sorts the chunk's sequences by the length of their tiles.
    OA_DEVICE void load_chunk() {
        int lane = threadIdx.x & 31;
        bool exists = chunk_ + lane < p_.batch;
        SequenceRange mine = exists ? sequence_range(p_, chunk_ + lane) : Axis::kNone;
        int32 place = 0;
#pragma unroll 1
        for (int j = 0; j < 32; ++j) {
            int32 other = __shfl_sync(0xffffffffu, mine.*Axis::kSteps, j);
            place += other > mine.*Axis::kSteps || (other == mine.*Axis::kSteps && j < lane);
        }
        __syncwarp();
        ranges_[place] = mine;
        __syncwarp();
        inclusive_ = inclusive_sum(num_units(ranges_[lane]), lane);
    }

    const AttnFwdParams& p_;
    const TileList& list_;
    SequenceRange* ranges_;  // of the chunk's sequences, those with the longest tiles first
    uint32 round_;
    bool second_;
    int32 chunk_;      // its first sequence
    int32 before_;     // items of all sequences before the chunk
    int32 inclusive_;  // tiles or pairs, of one head, of the chunk's sequences 0 .. lane, as sorted
};

// Tiles of kBlockM queries, walked along the keys.
template <int kBlockM>
struct QueryAxis {
    using Tile = FwdTile;
    static constexpr int kBlock = kBlockM;
    static constexpr SequenceRange kNone{0, 0, 0, -1, 0};

    OA_DEVICE static int32 heads(const AttnFwdParams& p) { return p.num_q_heads; }
    OA_DEVICE static int32 rows(const SequenceRange& r) { return r.seqlen_q; }
    static constexpr int32 SequenceRange::* kSteps = &SequenceRange::seqlen_k;
    OA_DEVICE static void place(FwdTile& t, const SequenceRange& r, int32 head, int32 row) {
        t.head_idx = head;
        t.m0 = row;
        t.sequence = r.sequence;
        t.q_begin = r.q_begin;
        t.seqlen_q = r.seqlen_q;
        t.k_begin = r.k_begin;
        t.seqlen_k = r.seqlen_k;
        t.valid = true;
    }
    OA_DEVICE static bool unowned(const AttnFwdParams& p, int32 block, int32 head, FwdTile& t) {
        t.head_idx = head;
        unowned_tile<kBlockM>(p, block, t);
        return t.valid;
    }
};
template <int kBlockM>
using PackedTiles = PackedItems<QueryAxis<kBlockM>>;
