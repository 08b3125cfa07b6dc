// Packed sequences whose keys are split over CTAs: every CTA has an even share of all work, whatever the lengths are
// (Lean Attention, Sanovar et al. 2024). Query heads of one kv head share the rows of a tile (SplitTileList).
//
// Work is counted in tiles of keys, and kTileWork for a tile of rows. It lies in one order: sequence by sequence, of
// each head by head, of each tile by tile, of each key by key. CTA c has the work from c * share on, up to the next
// one's. A tile of rows that lies in two shares or more is cut: each CTA leaves a partial result of its part.
//
// Tiles of rows that read the same keys are to do so at the same time, so that K and V come from memory once. Where a
// sequence has two to kMostGang of them, as many CTAs, a gang, take a share together, a tile each. Sequences are of
// a class by that number, all others of the first class, whose gangs are one CTA. A CTA has a share of every class, and
// of each class two partial results at most: of the tile that began before its share, slot 0, and of the one that goes
// on behind it, slot 1. Of the latter it writes down what it is (CutTile), and attn_combine_packed_sm90 merges the
// parts.
#pragma once
#include "params/attn_combine.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/split_tiles.cuh"

constexpr int32 kTileWork = 2;  // what a tile costs to begin and end
constexpr int32 kLeastWork = 8;  // of a CTA: with shorter ones partial results would be more than keys
constexpr int32 kLargest = 0x7fffffff;
constexpr uint32 kMostWork = 1u << 30;  // where there is more, several tiles of keys are counted as one
constexpr int32 kMostShift = 40;
constexpr int32 kMostGang = kStreamKClasses;

// A tile of rows, or a CTA's part of one. SplitTile: num_splits is 1 where the part is all of it.
struct StreamKTile : SplitTile {
    int32 part_begin, part_end, part_of;  // of the tile's work, part_of in all: its keys go in proportion
    int32 num_parts;  // with slot 1: gangs that have one, this one included
    int32 distance;  // from the CTA of a part to that of the next. split: which of the CTA's slots
    int32 pack_log2;
};
OA_DEVICE int32 query_of(const StreamKTile& t, int32 row) { return row >> t.pack_log2; }
OA_DEVICE int32 head_of(const StreamKTile& t, int32 row) {
    return t.head_idx * t.pack_heads + min_of(row & (t.pack - 1), t.pack_heads - 1);
}
OA_DEVICE bool is_of_head(const StreamKTile& t, int32 row) { return (row & (t.pack - 1)) < t.pack_heads; }

template <int kPower>
constexpr int32 kLog2 = 1 + kLog2<kPower / 2>;
template <>
constexpr int32 kLog2<1> = 0;

// The work of a sequence's heads. Packs are powers of two: they divide a tile's rows.
template <int kBlockM, int kBlockN>
struct SequenceWork {
    int32 blocks;  // tiles of rows of a head, a gang's counted as one
    int32 gang;  // CTAs that take them at the same time
    int32 first_keys;  // that the first of them sees
    int32 more_keys;  // that each one sees more than the one before it: an estimate, by which nothing but balance goes

    OA_DEVICE SequenceWork(const AttnFwdParams& p, const SequenceRange& r, int32 pack_log2) {
        const int32 queries_log2 = kLog2<kBlockM> - pack_log2, queries = 1 << queries_log2;  // of a tile
        blocks = (r.seqlen_q + queries - 1) >> queries_log2;
        const bool grows = p.window_right >= 0 && p.window_left < 0 && p.window_right < r.seqlen_q && r.seqlen_k > 0;
        const int64 offset = int64(r.seqlen_k) - r.seqlen_q + queries + p.window_right;
        const int64 in_window = int64(p.window_left) + max_of(p.window_right, 0) + queries;
        int64 keys = r.seqlen_k;
        if (grows) keys = min_of(max_of<int64>(offset, 0), keys);
        if (p.window_left >= 0) keys = min_of(in_window, keys);
        first_keys = int32(max_of<int64>(keys, 0));  // kNoSequence is negative
        more_keys = grows ? queries : 0;
        gang = 1;
        if (1 < blocks && blocks <= kMostGang) {
            gang = blocks;
            blocks = 1;
            first_keys = int32(min_of<int64>(first_keys + int64(gang - 1) * more_keys, max_of(r.seqlen_k, 0)));
        }
    }

    // Of a head, before its tile `block`; of_tile: kTileWork or more. shift: 2^shift tiles of keys count as one.
    OA_DEVICE uint64 before(int32 block, int32 of_tile, int32 shift) const {
        const uint64 pairs = uint64(uint32(block)) * uint32(max_of(block - 1, 0)) / 2;
        const uint64 keys = uint64(uint32(block)) * uint32(first_keys) + pairs * uint32(more_keys);
        return uint32(block * of_tile) + (keys / kBlockN >> shift);
    }
};

// The parts of a CTA's share. One warp walks, all lanes together.
template <int kBlockM, int kBlockN, bool kPaged = false>
class StreamKTiles {
    using Work = SequenceWork<kBlockM, kBlockN>;

  public:
    OA_DEVICE StreamKTiles(const AttnFwdParams& p, const SplitTileList& list)
        : p_(p), list_(list), pack_log2_(__ffs(list.pack) - 1), classes_(~0u), gang_(0), shift_(0), at_(0), end_(0) {}

    // Moves `t` to the next part; false when there is none.
    OA_DEVICE bool next(StreamKTile& t) {
        int32 begin, work;
        while (at_ >= end_ || !find(t, begin, work))
            if (!next_class()) return false;
        const int32 from = at_ - begin, to = min_of(end_ - begin, work);
        at_ = begin + to;
        t.split = (gang_ - 1) * kStreamKSlots + (from > 0 ? 0 : 1);
        t.num_splits = from == 0 && to == work ? 1 : 2;
        t.part_begin = from;
        t.part_end = to;
        t.part_of = work;
        t.num_parts = 1;
        if (t.num_splits > 1) {
            // No more than there are gangs, whatever lengths cu_seqlens has.
            const int32 gang = (end_ - 1) / share_, behind = (begin + work - 1) / share_ - gang;
            t.num_parts += min_of(max_of(behind, 0), int32(gridDim.x) / gang_ - 1 - gang);
        }
        t.distance = is_backwards() ? -gang_ : gang_;
        return true;
    }

  private:
    OA_DEVICE static int32 lane() { return threadIdx.x & 31; }

    // Sequence i + 1 is the caller's i; the first and the last one have the rows before and behind the caller's.
    OA_DEVICE int32 num_sequences() const { return p_.batch + 2; }
    OA_DEVICE SequenceRange range_of(int32 i) const {
        if (0 < i && i <= p_.batch) return sequence_range<kPaged>(p_, i - 1);
        const int32 edge = query_edge<kPaged>(p_, i == 0 ? 0 : p_.batch);
        return {i == 0 ? 0 : edge, i == 0 ? edge : p_.seqlen_q - edge, 0, kNoSequence, max_of(i - 1, 0)};
    }
    OA_DEVICE Work work_of(int32 i) const {
        const SequenceRange none{0, 0, 0, kNoSequence, 0};
        return Work(p_, i < num_sequences() ? range_of(i) : none, pack_log2_);
    }
    // Of this class; no more than kMostWork.
    OA_DEVICE int32 work_of_heads(const Work& work) const {
        if (work.gang != gang_) return 0;
        return int32(min_of<uint64>(work.before(work.blocks, tile_work_, shift_) * uint32(p_.num_q_heads), kMostWork));
    }
    OA_DEVICE void load_chunk() { inclusive_ = inclusive_sum(work_of_heads(work_of(chunk_ + lane())), lane()); }

    OA_DEVICE bool is_backwards() const { return gang_ % 2 == 0; }
    // Begins with the next class that has sequences; false when there is none.
    OA_DEVICE bool next_class() {
        do {
            if (++gang_ > kMostGang) return false;
        } while ((classes_ >> gang_ & 1) == 0);
        tile_work_ = kTileWork;
        chunk_ = before_ = 0;
        // Of all sequences: work, tiles, the longest and the shortest first tile of one that has keys.
        uint32 sum, classes;
        int32 tiles, most, least;
        bool is_counted;
        shift_ = -4;
        do {
            shift_ += 4;
            sum = classes = 0;
            tiles = most = 0;
            least = kLargest;
#pragma unroll 1
            for (int32 first = 0; first < num_sequences(); first += 32) {
                const Work work = work_of(first + lane());
                const int32 of_first = int32(work.before(1, kTileWork, shift_)), mine = work_of_heads(work);
                if (first == 0) inclusive_ = inclusive_sum(mine, lane());
                sum = min_of(sum + uint32(mine), kMostWork);
                if (work.blocks > 0) classes |= 1u << work.gang;
                if (work.gang != gang_ || work.blocks == 0) continue;
                tiles += work.blocks * p_.num_q_heads;
                most = max_of(most, of_first);
                if (work.first_keys > 0) least = min_of(least, of_first);
            }
            is_counted = __reduce_add_sync(0xffffffffu, sum / 32) < kMostWork / 32;
        } while (!is_counted && shift_ < kMostShift);
        classes_ = __reduce_or_sync(0xffffffffu, classes);
        // Only tiles of lengths that overlap are too many to be counted: nothing is done, and no number overflows.
        const int32 total = is_counted ? int32(__reduce_add_sync(0xffffffffu, sum)) : 0;
        // Every second class begins with the last gang: there may be less work than gangs.
        const int32 gangs = int32(gridDim.x) / gang_, own = int32(blockIdx.x) / gang_;
        const int32 gang = is_backwards() ? gangs - 1 - own : own;
        share_ = max_of((total - 1) / gangs + 1, kLeastWork);
        // Tiles of one length are cut into parts of one length, where that takes hardly longer than even shares.
        most = __reduce_max_sync(0xffffffffu, most);
        const int32 parts = most / share_;
        if (parts > 0 && (most - 1) / parts + 1 <= share_ + kTileWork) {
            share_ = (most - 1) / parts + 1;
            // If all are, CTAs of other heads read the same rows of K and V at the same time: each begins with a share.
            const int32 pad = parts * share_ - most;
            if (__reduce_min_sync(0xffffffffu, least) == most &&
                int64(pad) * __reduce_add_sync(0xffffffffu, tiles) <= share_ * gangs - total) {
                tile_work_ += pad;
                load_chunk();
            }
        }
        const bool takes_part = uint32(gang) < uint32(gangs);  // CTAs that are left over do not
        at_ = takes_part ? gang * share_ : 0;
        end_ = takes_part && total > 0 ? at_ + share_ : at_;
        return true;
    }

    // The tile that has the work at at_: where its own begins, and how much it is. False behind the last tile.
    OA_DEVICE bool find(StreamKTile& t, int32& begin, int32& work) {
        uint32 past;
        while ((past = __ballot_sync(0xffffffffu, inclusive_ > at_ - before_)) == 0) {
            before_ += __shfl_sync(0xffffffffu, inclusive_, 31);
            chunk_ += 32;
            if (chunk_ >= num_sequences()) return false;
            load_chunk();
        }
        const int32 src = __ffs(int(past)) - 1;
        const int32 of_chunk = __shfl_sync(0xffffffffu, inclusive_, max_of(src - 1, 0));
        const SequenceRange r = range_of(chunk_ + src);
        const Work of_sequence(p_, r, pack_log2_);
        auto of_blocks = [&](int32 block) { return int32(of_sequence.before(block, tile_work_, shift_)); };
        const int32 per_head = of_blocks(of_sequence.blocks);
        begin = before_ + (src > 0 ? of_chunk : 0);
        t.head_idx = (at_ - begin) / per_head;
        begin += t.head_idx * per_head;
        int32 block = 0;
#pragma unroll 1
        for (int32 end = of_sequence.blocks; end - block > 1;) {
            const int32 middle = block + (end - block) / 2;
            (of_blocks(middle) <= at_ - begin ? block : end) = middle;
        }
        const int32 of_others = of_blocks(block);
        work = of_blocks(block + 1) - of_others;
        begin += of_others;
        if (gang_ > 1) block = int32(blockIdx.x) % gang_;
        t.batch_idx = 0;
        t.sequence = r.sequence;
        t.m0 = block * kBlockM;
        t.q_begin = r.q_begin;
        t.k_begin = r.k_begin;
        t.num_queries = r.seqlen_q;
        t.seqlen_q = r.seqlen_q << pack_log2_;
        t.seqlen_k = r.seqlen_k;
        t.pack = list_.pack;
        t.pack_log2 = pack_log2_;
        t.pack_heads = list_.pack_heads;
        t.valid = true;
        return true;
    }

    const AttnFwdParams& p_;
    const SplitTileList& list_;
    const int32 pack_log2_;
    uint32 classes_;  // bit g: there are, or may be, sequences whose gangs are g CTAs
    int32 gang_;  // of this class, as all that follows
    int32 shift_, tile_work_, share_;
    int32 at_, end_;  // what is left of this CTA's
    int32 chunk_;  // 32 sequences, the first of them
    int32 before_;  // work of all sequences before the chunk
    int32 inclusive_;  // of the chunk's sequences up to this lane's
};

// Among partial results, where row 0 of the tile's head would be.
template <int kBlockM>
OA_DEVICE int64 first_partial_row(const AttnFwdParams&, const SplitTileList&, const StreamKTile& t) {
    return int64(int32(blockIdx.x) * (kStreamKClasses * kStreamKSlots) + t.split) * kBlockM - t.m0;
}

// What the other kernel has to know of the tile that goes on behind a CTA's share; by the warp of its first rows.
// Templates: other kernels have no shares, and their arguments no cuts.
template <bool kStreamK, typename Params, typename Tile>
OA_DEVICE void note_cut(const Params& params, const Tile& t, int32 warp_row, int lane) {
    if constexpr (kStreamK)
        if (t.num_splits > 1 && t.split % kStreamKSlots == 1 && warp_row == t.m0 && lane == 0)
            params.cuts[blockIdx.x * kStreamKClasses + t.split / kStreamKSlots] = {
                t.num_parts, t.distance, t.m0, t.seqlen_q, t.q_begin, t.head_idx, t.seqlen_k != kNoSequence, 0};
}
// Before any of it.
template <bool kStreamK, typename Params>
OA_DEVICE void note_no_cut(const Params& params) {
    if constexpr (kStreamK)
        for (int32 i = 0; i < kStreamKClasses; ++i) params.cuts[blockIdx.x * kStreamKClasses + i].num_parts = 0;
}
