// What every warp-specialized forward kernel on wgmma does around its products: one producer warpgroup that walks over
// tiles and copies, consumer warpgroups of 64 query rows each that follow it. A kernel derives from both roles and adds
// its own copies and arithmetic.
//
// A kernel's Config has kConsumers, kBlockM = 64 * kConsumers, kBlockN, kStages (of K and V), kQStages, kVarlen (packed
// sequences; a constant, because the dense loop pays for more code).
//
// Step i of a tile of queries multiplies Q by the i-th tile of keys and P by the tile of V before it. So K(i) and V(i - 1)
// share a buffer and its barriers: one wait, one release and one position a step. N tiles of keys take N + 1 steps, the
// last with V alone. Tiles of keys go from the last visible one to the first: step i's is keys.end - 1 - i.
#pragma once
#include "attention/mask.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/ping_pong.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "params/attn_fwd.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/persistent.cuh"

constexpr int32 kNoMoreTiles = -1;

template <typename Config>
struct RoleStorage {
    uint64 q_full[Config::kQStages], q_empty[Config::kQStages];
    uint64 kv_full[Config::kStages], kv_empty[Config::kStages];
    // kVarlen: the tile that each Q belongs to, valid from q_full to q_empty; m0 = kNoMoreTiles ends.
    FwdTile tile[Config::kQStages];
    SequenceRange sequences[32];
};

template <typename Config>
struct RoleBarriers {
    Ring<Config::kQStages> q;
    Ring<Config::kStages> kv;

    // storage: shared address of the RoleStorage.
    OA_DEVICE explicit RoleBarriers(uint32 storage)
        : q{smem_addr_at(&RoleStorage<Config>::q_full, storage), smem_addr_at(&RoleStorage<Config>::q_empty, storage)},
          kv{smem_addr_at(&RoleStorage<Config>::kv_full, storage),
             smem_addr_at(&RoleStorage<Config>::kv_empty, storage)} {}

    // One thread; a CTA barrier must follow.
    OA_DEVICE void init() const {
        // Of packed sequences every lane has read the tile: each orders its own read before the producer's next write.
        q.init(Config::kConsumers * (Config::kVarlen ? 128 : 4));
        kv.init(4 * Config::kConsumers);
        fence_barrier_init();
    }
};

// Derived: prefetch_maps(), copy_q(t, stage, bar), copy_k(t, kv_head, n, stage, bar), copy_v(...): copies of kQBytes,
// kKBytes and kVBytes to buffer `stage` that complete on `bar`. Issued by one thread.
template <typename Config, typename Derived>
class ProducerRole {
  public:
    OA_DEVICE ProducerRole(const AttnFwdParams& p, const TileList& list, RoleStorage<Config>& smem,
                           const RoleBarriers<Config>& bars)
        : p_(p), list_(list), smem_(smem), bars_(bars) {}

    // The producer warpgroup's first warp.
    OA_DEVICE void run(int lane) {
        if (lane == 0) derived().prefetch_maps();
        if constexpr (Config::kVarlen) {
            run_varlen(lane);
        } else {
            if (lane == 0) run_dense();
        }
    }

  private:
    using Keys = KeyTiles<Config::kBlockM, Config::kBlockN>;

    OA_DEVICE Derived& derived() { return static_cast<Derived&>(*this); }

    OA_DEVICE void run_dense() {
        PersistentTiles tiles;
        for (FwdTile t; tiles.next<Config::kBlockM>(p_, list_, t);) {
            Keys keys(p_, t);
            if (keys.end > keys.first) {
                bars_.q.wait_empty(q_at_);
                copy_tile(t, keys);
            }
        }
    }

    // The walk over cu_seqlens takes all lanes, the copies one. The consumers get the tile through shared memory, so
    // that the walk is done once, and ahead of them.
    OA_DEVICE void run_varlen(int lane) {
        PackedTiles<Config::kBlockM> tiles(p_, list_, smem_.sequences);
        for (FwdTile t; tiles.next(t);) {
            if (lane == 0) {
                Keys keys(p_, t);
                bars_.q.wait_empty(q_at_);
                smem_.tile[q_at_.stage] = t;
                if (keys.end > keys.first) {
                    // From shared memory: a producer has few registers. (Every copy below clobbers memory, so none of
                    // the tile's fields stays in a register over one.)
                    asm volatile("" ::: "memory");
                    copy_tile(smem_.tile[q_at_.stage], keys);
                } else {
                    bars_.q.announce(q_at_, 0);
                    q_at_.advance();
                }
            }
            __syncwarp();
        }
        if (lane == 0) {
            bars_.q.wait_empty(q_at_);
            smem_.tile[q_at_.stage].m0 = kNoMoreTiles;
            bars_.q.announce(q_at_, 0);
        }
    }

    OA_DEVICE void copy_tile(const FwdTile& t, const Keys& keys) {
        int32 kv_head = t.head_idx / (p_.num_q_heads / p_.num_kv_heads);
        derived().copy_q(t, q_at_.stage, bars_.q.announce(q_at_, Derived::kQBytes));
        q_at_.advance();
        // n: the tile of K; that of V is n + 1.
#pragma unroll 1
        for (int32 n = keys.end - 1; n >= keys.first - 1; --n) {
            bool has_k = n >= keys.first, has_v = n < keys.end - 1;
            uint32 bar = bars_.kv.acquire(at_, (has_k ? Derived::kKBytes : 0) + (has_v ? Derived::kVBytes : 0));
            if (has_v) derived().copy_v(t, kv_head, n + 1, at_.stage, bar);
            if (has_k) derived().copy_k(t, kv_head, n, at_.stage, bar);
            at_.advance();
        }
    }

    const AttnFwdParams& p_;
    const TileList& list_;
    RoleStorage<Config>& smem_;
    const RoleBarriers<Config>& bars_;
    RingState<Config::kQStages> q_at_;
    RingState<Config::kStages> at_;  // of K and V
};

// Derived: attend(t, keys, first, warp_row, rows), which takes the steps from `first` to the last, releases their buffers
// and, with the last scores, Q; store(t, warp_row, rows) after it.
template <typename Config, typename Derived>
class ConsumerRole {
  public:
    using Keys = KeyTiles<Config::kBlockM, Config::kBlockN>;

    OA_DEVICE ConsumerRole(const AttnFwdParams& p, const TileList& list, RoleStorage<Config>& smem,
                           const RoleBarriers<Config>& bars, int32 group)
        : p_(p), list_(list), smem_(smem), bars_(bars), turns_(group), group_(group), lane_(kept(threadIdx.x & 31)) {}

    // All consumer warpgroups.
    OA_DEVICE void run() {
        PersistentTiles tiles;
        for (FwdTile t; next_tile(tiles, t);) {
            Keys keys(p_, t);
            int32 warp_row = t.m0 + group_ * 64 + ((threadIdx.x >> 5) & 3) * 16;
            typename Derived::Rows rows;
            if (keys.end > keys.first) {
                int32 first = pass_over(t, keys);
                if (first < keys.end - keys.first) {
                    derived().attend(t, keys, first, warp_row, rows);
                } else {
                    wait_kv();
                    release_kv();
                    bars_.q.wait(q_at_);
                    release_q();
                }
                q_at_.advance();
            } else if (Config::kVarlen) {
                release_q();
                q_at_.advance();
            }
            derived().store(t, warp_row, rows);
        }
        turns_.finish(threadIdx.x < 256);
    }

  protected:
    OA_DEVICE void release_q() const { bars_.q.release(q_at_, Config::kVarlen ? 0 : lane_); }
    OA_DEVICE void wait_kv() const { bars_.kv.wait(kv_at_); }
    OA_DEVICE void release_kv() {
        bars_.kv.release(kv_at_, lane_);
        kv_at_.advance();
    }

    const AttnFwdParams& p_;
    const TileList& list_;
    RoleStorage<Config>& smem_;
    const RoleBarriers<Config>& bars_;
    Turns<Config::kConsumers, Config::kTurns> turns_;
    int32 group_;
    int lane_;
    RingState<Config::kQStages> q_at_;
    RingState<Config::kStages> kv_at_;

    // Whether the keys of step i need masking.
    OA_DEVICE static bool is_masked(const Keys& keys, int32 i) {
        int32 n = keys.end - 1 - i;
        return n < keys.full_first || n >= keys.full_end;
    }
    // The first step after i that is masked or the last with scores: what a loop must look out for.
    OA_DEVICE static int32 next_special(const Keys& keys, int32 i) {
        int32 last = keys.end - 1 - keys.first;
        return is_masked(keys, i + 1) ? i + 1 : min_of(keys.end - keys.full_first, last);
    }

  private:
    OA_DEVICE Derived& derived() { return static_cast<Derived&>(*this); }

    OA_DEVICE bool next_tile(PersistentTiles& tiles, FwdTile& t) {
        if constexpr (Config::kVarlen) {
            bars_.q.wait(q_at_);
            t = smem_.tile[q_at_.stage];
            // A vote, because its outcome is known to be the warp's: what comes then stays in uniform registers.
            return __any_sync(0xffffffffu, t.m0 != kNoMoreTiles);
        } else {
            return tiles.next<Config::kBlockM>(p_, list_, t);
        }
    }

    // Passes over the first steps, whose tiles of keys only later rows of the CTA see; returns the first to take, or
    // the number of tiles of keys if this warpgroup sees none.
    OA_DEVICE int32 pass_over(const FwdTile& t, const Keys& keys) {
        int32 own_end = keys.first, first_row = t.m0 + group_ * 64;
        if (uint32(first_row) < uint32(t.seqlen_q)) {  // unsigned: rows before row 0 (FwdTile::m0) see nothing either
            KeyRange seen = visible_keys(min_of(first_row + 64, t.seqlen_q) - 1, t.seqlen_q, t.seqlen_k, p_.window_left,
                                         p_.window_right);
            own_end = max_of(int32((int64(seen.hi) + Config::kBlockN - 1) / Config::kBlockN), keys.first);
        }
        int32 first = max_of(keys.end - own_end, 0);
#pragma unroll 1
        for (int32 i = 0; i < first; ++i) {
            turns_.wait();
            turns_.pass_on();
            // A buffer is given back after it has been filled: an earlier arrival would count for the round before.
            wait_kv();
            release_kv();
        }
        return first;
    }
};
