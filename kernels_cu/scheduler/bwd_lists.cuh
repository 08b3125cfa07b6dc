// Lists of the tiles that a block mask leaves, for the backward (params/mask_tiles.cuh): of a tile of keys the tiles of
// 64 queries, one list for each query head of its kv head.
#pragma once
#include "params/attn_bwd.cuh"
#include "params/mask_tiles.cuh"
#include "ptx/types.cuh"
#include "scheduler/bwd_feed.cuh"
#include "scheduler/bwd_tile.cuh"
#include "scheduler/fwd_tile.cuh"

constexpr int32 kListedRows = 64;  // of a tile that an entry names

// The list of tile `block` of a query head: its count, then as many entries, the last tile first.
OA_DEVICE const int32* bwd_list(const AttnBwdParams& p, int32 batch_idx, int32 head, int32 block) {
    return p.lists + batch_idx * p.lists_stride_b + head * p.lists_stride_h + block * (1 + int64(p.num_list_tiles));
}
OA_DEVICE constexpr int32 listed_tile(int32 entry) { return entry & (kFirstGroup - 1); }
// Whether group `group` of 64 of what the list is of sees nothing of the entry's tile.
OA_DEVICE constexpr bool is_hidden(int32 entry, int32 group) {
    return (entry >> (kGroupShift + 2 * group) & 3) == kTileEmpty;
}

// Entries of the lists of a tile of keys, of all query heads of its kv head; one warp, all lanes together, which all
// get the sum.
OA_DEVICE int32 listed_steps(const AttnBwdParams& p, const BwdTile& t, int32 block) {
    const int32 heads = p.fwd.num_q_heads / p.fwd.num_kv_heads;
    int32 steps = 0;
    for (int32 h = threadIdx.x & 31; h < heads; h += 32)
        steps += *bwd_list(p, t.batch_idx, t.kv_head_idx * heads + h, block);
#pragma unroll
    for (int x = 1; x < 32; x *= 2) steps += __shfl_xor_sync(0xffffffffu, steps, x);
    return steps;
}

// Tiles of keys of dense batches that CTAs draw from a counter, which is 0 before, with how many steps each takes; one
// warp, all lanes together. Head by head: few heads at a time, whose Q, dO and sums of dQ stay in L2 although CTAs go
// through the queries at places of their own. Of a head the longest tiles first, in kClasses classes of length: CTAs
// that run together then have as much to do, and a launch does not end with a long tile.
template <int kBlockN>
class ListedBwdTiles {
    using Storage = BwdFeedStorage<true>;
    static constexpr int32 kClasses = 64;  // a power of 2
    // More tiles of a head come in the order of their keys.
    static constexpr int32 kMostSorted = sizeof(Storage::sequences);

  public:
    OA_DEVICE ListedBwdTiles(const AttnBwdParams& p) : p_(p) {}

    // Moves `t` to the next tile; false when there is none.
    OA_DEVICE bool next(BwdTile& t) {
        const AttnFwdParams& fwd = p_.fwd;
        const uint32 blocks = (uint32(fwd.seqlen_k) + kBlockN - 1) / kBlockN;
        uint32 item = 0;
        if ((threadIdx.x & 31) == 0) item = atomic_add_relaxed(item_counter(p_), 1);
        item = __shfl_sync(0xffffffffu, item, 0);
        if (item >= blocks * uint32(fwd.batch) * uint32(fwd.num_kv_heads)) return false;
        const int32 head = int32(item / blocks);
        int32 block = int32(item - uint32(head) * blocks);
        t.batch_idx = t.sequence = head / fwd.num_kv_heads;
        t.kv_head_idx = head - t.batch_idx * fwd.num_kv_heads;
        t.q_begin = t.k_begin = 0;
        t.seqlen_q = fwd.seqlen_q;
        t.seqlen_k = fwd.seqlen_k;
        if (blocks <= uint32(kMostSorted)) {
            if (head != head_) classify(t, int32(blocks));
            head_ = head;
            block = block_of_rank(block, int32(blocks));
        }
        t.n0 = block * kBlockN;
        t.steps = listed_steps(p_, t, block);
        return true;
    }

  private:
    OA_DEVICE static uint8& class_of(int32 block) {
        return reinterpret_cast<uint8*>(Storage::at(&Storage::sequences))[block];
    }

    // Classes of all tiles of a head, by their steps.
    OA_DEVICE void classify(const BwdTile& t, int32 blocks) const {
        const int32 heads = p_.fwd.num_q_heads / p_.fwd.num_kv_heads;
        const int32 shift = max_of(32 - __clz(heads * p_.num_list_tiles) - 6, 0);
        __syncwarp();  // all lanes have read those of the head before
#pragma unroll 1
        for (int32 block = threadIdx.x & 31; block < blocks; block += 32) {
            int32 steps = 0;
#pragma unroll 1
            for (int32 h = 0; h < heads; ++h) steps += *bwd_list(p_, t.batch_idx, t.kv_head_idx * heads + h, block);
            class_of(block) = uint8(steps >> shift);
        }
        __syncwarp();
    }

    // How many tiles of the head have a class above `of`.
    OA_DEVICE static int32 count_above(int32 of, int32 blocks) {
        int32 count = 0;
#pragma unroll 1
        for (int32 base = 0; base < blocks; base += 32) {
            const int32 block = base + int32(threadIdx.x & 31);
            count += __popc(__ballot_sync(0xffffffffu, block < blocks && class_of(block) > of));
        }
        return count;
    }

    // The tile with `rank` tiles ahead of it: those of higher classes, and of its class those of lower keys.
    OA_DEVICE static int32 block_of_rank(int32 rank, int32 blocks) {
        int32 low = 0;
#pragma unroll 1
        for (int32 high = kClasses - 1; low < high;) {
            const int32 middle = (low + high) / 2;
            if (count_above(middle, blocks) <= rank)
                high = middle;
            else
                low = middle + 1;
        }
        rank -= count_above(low, blocks);
#pragma unroll 1
        for (int32 base = 0;; base += 32) {
            const int32 block = base + int32(threadIdx.x & 31);
            uint32 equal = __ballot_sync(0xffffffffu, block < blocks && class_of(block) == low);
            const int32 count = __popc(equal);
            if (rank < count) {
#pragma unroll 1
                for (; rank > 0; --rank) equal &= equal - 1;
                return base + __ffs(int(equal)) - 1;
            }
            rank -= count;
        }
    }

    const AttnBwdParams& p_;
    int32 head_ = -1;  // whose classes are there
};

// Hands these tiles to the other roles; one warp.
template <int kBlockN>
OA_DEVICE void walk_listed_bwd_tiles(const AttnBwdParams& p) {
    ListedBwdTiles<kBlockN> tiles(p);
    RingState<kTileStages> at;
    for (bool more = true; more; at.advance()) {
        BwdFeedStorage<true>::ring().wait_empty(at);
        more = hand_on_bwd_tile(tiles, at);
    }
}

// The tiles of kBlockN keys that a tile of queries visits, one after the other: those of its window, or of a list of
// tiles of 64 keys, where a call has one; some of these may lie behind the last key or outside of the window.
template <bool kLists, int kBlockM, int kBlockN>
struct KeySteps {
    int32 n;  // the tile
    int32 left;  // from it on
    template <typename Keys>
    OA_DEVICE KeySteps(const AttnBwdParams&, const FwdTile&, const Keys& keys)
        : n(keys.first), left(keys.end - keys.first) {}
    OA_DEVICE void advance() { ++n; }
    // Whether row `row` of the tile of queries, and the others of its 64, see nothing of the tile.
    OA_DEVICE static constexpr bool hides_all(int32) { return false; }
};
template <int kBlockM, int kBlockN>
struct KeySteps<true, kBlockM, kBlockN> : KeySteps<false, kBlockM, kBlockN> {
    using Plain = KeySteps<false, kBlockM, kBlockN>;
    using Plain::n, Plain::left;
    static constexpr int32 kParts = kListedRows / kBlockN;
    static_assert(kParts * kBlockN == kListedRows, "an entry names whole tiles");

    template <typename Keys>
    OA_DEVICE KeySteps(const AttnBwdParams& p, const FwdTile& t, const Keys& keys) : Plain(p, t, keys), list(p.lists) {
        if (list == nullptr) return;
        list = bwd_list(p, t.batch_idx, t.head_idx, t.m0 / kBlockM);
        left = *list * kParts;
        n = kParts - 1;  // the last part of an entry, before the first one
        if (left > 0) advance();
    }
    OA_DEVICE void advance() {
        if (list == nullptr || (n + 1) % kParts != 0) {
            ++n;
            return;
        }
        entry = *++list;
        n = listed_tile(entry) * kParts;
    }
    OA_DEVICE bool hides_all(int32 row) const { return kBlockM > kListedRows && is_hidden(entry, row / kListedRows); }

    const int32* list;  // at the tile's entry
    int32 entry = kAllGroups * kTileFull;
};
