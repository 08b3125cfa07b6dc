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

// The sequences of a packed batch, by one warp, all lanes together; 32 sequences at a time, the ones with the longest
// tiles first. The walk goes on where the item before was found, so that all items of a CTA together cost one pass over
// cu_seqlens.
//
// Axis: what tiles are of. kNone, a sequence that does not exist; heads(p); items(p, r) of a head of sequence r;
// kSteps, the length that a tile is walked along; kPaged.
template <typename Axis>
class PackedSequences {
  public:
    // ranges: 32 of them in shared memory, this warp's own (a producer has few registers).
    OA_DEVICE PackedSequences(const AttnFwdParams& p, SequenceRange* ranges)
        : p_(p), ranges_(ranges), chunk_(0), before_(0) {
        load_chunk();
    }

    // The sequence of an item, which does not come before the last one asked for; at: its number among the sequence's
    // items, of all heads. False behind the last sequence; at: its number there.
    OA_DEVICE bool find(int32 item, SequenceRange& r, int32& at) {
        while (chunk_ < p_.batch) {
            uint32 candidates = __ballot_sync(0xffffffffu, inclusive_ * Axis::heads(p_) > item - before_);
            if (candidates != 0) {
                int src = __ffs(int(candidates)) - 1;
                r = ranges_[src];
                int32 first = __shfl_sync(0xffffffffu, inclusive_, src) - Axis::items(p_, r);
                at = item - before_ - first * Axis::heads(p_);
                return true;
            }
            before_ += __shfl_sync(0xffffffffu, inclusive_, 31) * Axis::heads(p_);
            chunk_ += 32;
            load_chunk();
        }
        at = item - before_;
        return false;
    }

  private:
    // Sorts the chunk's sequences by the length of their tiles.
    OA_DEVICE void load_chunk() {
        int lane = threadIdx.x & 31;
        bool exists = chunk_ + lane < p_.batch;
        SequenceRange mine = exists ? sequence_range<Axis::kPaged>(p_, chunk_ + lane) : Axis::kNone;
        int32 place = 0;
#pragma unroll 1
        for (int j = 0; j < 32; ++j) {
            int32 other = __shfl_sync(0xffffffffu, mine.*Axis::kSteps, j);
            place += other > mine.*Axis::kSteps || (other == mine.*Axis::kSteps && j < lane);
        }
        __syncwarp();
        ranges_[place] = mine;
        __syncwarp();
        inclusive_ = inclusive_sum(Axis::items(p_, ranges_[lane]), lane);
    }

    const AttnFwdParams& p_;
    SequenceRange* ranges_;  // of the chunk's sequences, those with the longest tiles first
    int32 chunk_;      // its first sequence
    int32 before_;     // items of all sequences before the chunk
    int32 inclusive_;  // items, of one head, of the chunk's sequences 0 .. lane, as sorted
};

// Tiles of queries of packed sequences; one warp walks, all lanes together. The items are those of the sequences; of
// each sequence head by head, so that K and V stay in L2; of each head the tiles, or with causality and few keys before
// the queries pairs of a long and a short one. At the end come the rows that no sequence owns. Every second round runs
// backwards.
template <int kBlockM, bool kOverPages = false>
class PackedTiles {
    struct Axis {
        static constexpr bool kPaged = kOverPages;
        static constexpr SequenceRange kNone{0, 0, 0, -1, 0};
        static constexpr int32 SequenceRange::* kSteps = &SequenceRange::seqlen_k;
        OA_DEVICE static int32 heads(const AttnFwdParams& p) { return p.num_q_heads; }
        OA_DEVICE static int32 blocks(const SequenceRange& r) { return (r.seqlen_q + kBlockM - 1) / kBlockM; }
        // The longest tile of a sequence with as many keys before its queries as it has queries is not even twice the
        // shortest one: single tiles then are divided more evenly.
        OA_DEVICE static bool in_pairs(const AttnFwdParams& p, const SequenceRange& r) {
            return p.window_right >= 0 && p.window_left < 0 && r.seqlen_k - r.seqlen_q < r.seqlen_q;
        }
        OA_DEVICE static int32 items(const AttnFwdParams& p, const SequenceRange& r) {
            return in_pairs(p, r) ? (blocks(r) + 1) / 2 : blocks(r);
        }
    };

  public:
    OA_DEVICE PackedTiles(const AttnFwdParams& p, const TileList& list, SequenceRange* ranges)
        : p_(p), list_(list), sequences_(p, ranges), round_(0), second_(false) {}

    // Moves `t` to the next tile; false when there is none.
    OA_DEVICE bool next(FwdTile& t) {
        for (;;) {
            uint32 item = round_ * gridDim.x + (round_ & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
            if (item >= list_.num_items) return false;
            bool found = find(int32(item), t);
            if (second_) return true;
            ++round_;
            if (found) return true;
            round_ = 0x80000000u / gridDim.x;  // nothing but slack is behind slack
        }
    }

  private:
    // The next tile of an item, and whether another one follows; false for the slack at the end of the list.
    OA_DEVICE bool find(int32 item, FwdTile& t) {
        SequenceRange r;
        int32 at;
        t.batch_idx = 0;
        if (sequences_.find(item, r, at)) {
            int32 blocks = Axis::blocks(r), per_head = Axis::items(p_, r);
            t.head_idx = at / per_head;
            int32 j = at - t.head_idx * per_head;
            t.m0 = (second_ ? j : blocks - 1 - j) * kBlockM;
            // The middle tile of an odd number is its own partner.
            second_ = Axis::in_pairs(p_, r) && !second_ && 2 * j + 1 != blocks;
            t.sequence = r.sequence;
            t.q_begin = r.q_begin;
            t.seqlen_q = r.seqlen_q;
            t.k_begin = r.k_begin;
            t.seqlen_k = r.seqlen_k;
            t.valid = true;
            return true;
        }
        int32 block = at / p_.num_q_heads;
        t.head_idx = at - block * p_.num_q_heads;
        unowned_tile<kBlockM, kOverPages>(p_, block, t);
        return t.valid;
    }

    const AttnFwdParams& p_;
    const TileList& list_;
    PackedSequences<Axis> sequences_;
    uint32 round_;
    bool second_;
};
