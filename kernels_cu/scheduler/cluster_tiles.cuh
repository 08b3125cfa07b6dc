// The tiles of queries of one cluster of kCluster CTAs, which take each of them together: scheduler/persistent.cuh with
// clusters in the place of CTAs.
#pragma once
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/persistent.cuh"

// Of dense batches.
template <int kBlockM, uint32 kCluster>
class ClusterTiles {
  public:
    OA_DEVICE bool next(const AttnFwdParams& p, const TileList& list, FwdTile& t) {
        uint32 head, m;
        if (!items_.next<kCluster>(list, p.num_m_blocks, uint32(p.batch) * p.num_q_heads, head, m)) return false;
        uint32 batch_idx = head / p.num_q_heads;
        t = tile_of(p, batch_idx, head - batch_idx * p.num_q_heads, int32(m * kBlockM) - int32(list.lead_rows));
        return true;
    }

  private:
    PersistentItems items_;
};

// Of packed sequences; one warp walks, all lanes together. Order as PackedTiles: sequence by sequence, of each head by
// head; with causality and few keys before the queries pairs of a long and a short tile. Every second round runs
// backwards. At the end come the rows that no sequence owns.
template <int kBlockM, uint32 kCluster>
class PackedClusterTiles {
    struct Axis {
        static constexpr bool kPaged = false;
        static constexpr SequenceRange kNone{0, 0, 0, -1, 0};
        static constexpr int32 SequenceRange::* kSteps = &SequenceRange::seqlen_k;
        OA_DEVICE static int32 heads(const AttnFwdParams& p) { return p.num_q_heads; }
        OA_DEVICE static int32 blocks(const SequenceRange& r) { return (r.seqlen_q + kBlockM - 1) / kBlockM; }
        OA_DEVICE static bool in_pairs(const AttnFwdParams& p, const SequenceRange& r) {
            return p.window_right >= 0 && p.window_left < 0 && r.seqlen_k - r.seqlen_q < r.seqlen_q;
        }
        OA_DEVICE static int32 items(const AttnFwdParams& p, const SequenceRange& r) {
            return in_pairs(p, r) ? (blocks(r) + 1) / 2 : blocks(r);
        }
    };

  public:
    OA_DEVICE PackedClusterTiles(const AttnFwdParams& p, const TileList& list, SequenceRange* ranges)
        : p_(p), list_(list), sequences_(p, ranges), round_(0), second_(false) {}

    // Moves `t` to the next tile; false when there is none.
    OA_DEVICE bool next(FwdTile& t) {
        const uint32 takers = gridDim.x / kCluster, taker = blockIdx.x / kCluster;
        for (;;) {
            uint32 item = round_ * takers + (round_ & 1 ? takers - 1 - taker : taker);
            if (item >= list_.num_items) return false;
            bool found = find(int32(item), t);
            if (second_) return true;
            ++round_;
            if (found) return true;
            round_ = 0x80000000u / takers;  // nothing but slack is behind slack
        }
    }

  private:
    // The next tile of an item, and whether there is one: not in the slack at the end of the list.
    OA_DEVICE bool find(int32 item, FwdTile& t) {
        SequenceRange r;
        int32 at;
        t.batch_idx = 0;
        if (!sequences_.find(item, r, at)) {
            int32 block = at / p_.num_q_heads;
            t.head_idx = at - block * p_.num_q_heads;
            unowned_tile<kBlockM>(p_, block, t);
            return t.valid;
        }
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

    const AttnFwdParams& p_;
    const TileList& list_;
    PackedSequences<Axis> sequences_;
    uint32 round_;
    bool second_;
};
