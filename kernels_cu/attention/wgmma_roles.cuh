// What every warp-specialized forward kernel on wgmma does around its products: one producer warpgroup that walks over
// tiles and copies, consumer warpgroups of 64 query rows each that follow it. A kernel derives from both roles and adds
// its own copies and arithmetic.
//
// A kernel's Config has kConsumers, kBlockM = 64 * kConsumers, kBlockN, kStages (of K and V), kQStages, kVarlen (packed
// sequences; a constant, because the dense loop pays for more code).
#pragma once
#include "attention/mask.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/turns.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_params.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/persistent.cuh"

constexpr int32 kNoMoreTiles = -1;

template <typename Config>
struct RoleStorage {
    uint64 q_full[Config::kQStages], q_empty[Config::kQStages];
    uint64 k_full[Config::kStages], k_empty[Config::kStages];
    uint64 v_full[Config::kStages], v_empty[Config::kStages];
    // kVarlen: the tile that each Q belongs to, valid from q_full to q_empty; m0 = kNoMoreTiles ends.
    FwdTile tile[Config::kQStages];
    SequenceRange sequences[32];
};

template <typename Config>
struct RoleBarriers {
    Ring<Config::kQStages> q;
    Ring<Config::kStages> k, v;

    OA_DEVICE explicit RoleBarriers(RoleStorage<Config>& smem)
        : q{smem_addr_of(smem.q_full), smem_addr_of(smem.q_empty)},
          k{smem_addr_of(smem.k_full), smem_addr_of(smem.k_empty)},
          v{smem_addr_of(smem.v_full), smem_addr_of(smem.v_empty)} {}

    // One thread; a CTA barrier must follow.
    OA_DEVICE void init() const {
        // Of packed sequences every lane has read the tile: each orders its own read before the producer's next write.
        q.init(Config::kConsumers * (Config::kVarlen ? 128 : 4));
        k.init(4 * Config::kConsumers);
        v.init(4 * Config::kConsumers);
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
#pragma unroll 1
        for (int32 n = keys.end - 1; n >= keys.first; --n) {
            derived().copy_k(t, kv_head, n, at_.stage, bars_.k.acquire(at_, Derived::kKBytes));
            derived().copy_v(t, kv_head, n, at_.stage, bars_.v.acquire(at_, Derived::kVBytes));
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

// Derived: attend(t, keys, n, warp_row), which looks at the tiles of keys from n down to keys.first, releases them and,
// with the last scores, Q; begin() and store(t, warp_row) before and after.
template <typename Config, typename Derived>
class ConsumerRole {
  public:
    using Keys = KeyTiles<Config::kBlockM, Config::kBlockN>;

    OA_DEVICE ConsumerRole(const AttnFwdParams& p, const TileList& list, RoleStorage<Config>& smem,
                           const RoleBarriers<Config>& bars, int32 group)
        : p_(p), list_(list), smem_(smem), bars_(bars), turns_(group), group_(group), lane_(threadIdx.x & 31) {}

    // All consumer warpgroups.
    OA_DEVICE void run() {
        PersistentTiles tiles;
        for (FwdTile t; next_tile(tiles, t);) {
            Keys keys(p_, t);
            int32 warp_row = t.m0 + group_ * 64 + ((threadIdx.x >> 5) & 3) * 16;
            typename Derived::Rows rows;
            if (keys.end > keys.first) {
                int32 n = pass_over(t, keys);
                if (n >= keys.first) {
                    derived().attend(t, keys, n, warp_row, rows);
                } else {
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
    OA_DEVICE void release_k() {
        bars_.k.release(k_at_, lane_);
        k_at_.advance();
    }
    OA_DEVICE void release_v() {
        bars_.v.release(v_at_, lane_);
        v_at_.advance();
    }

    const AttnFwdParams& p_;
    const TileList& list_;
    RoleStorage<Config>& smem_;
    const RoleBarriers<Config>& bars_;
    Turns<Config::kConsumers> turns_;
    int32 group_;
    int lane_;
    RingState<Config::kQStages> q_at_;
    RingState<Config::kStages> k_at_, v_at_;

  private:
    OA_DEVICE Derived& derived() { return static_cast<Derived&>(*this); }

    OA_DEVICE bool next_tile(PersistentTiles& tiles, FwdTile& t) {
        if constexpr (Config::kVarlen) {
            bars_.q.wait(q_at_);
            t = smem_.tile[q_at_.stage];
            return t.m0 != kNoMoreTiles;
        } else {
            return tiles.next<Config::kBlockM>(p_, list_, t);
        }
    }

    // Passes over the last tiles of keys, which only later rows of the CTA see; returns the first tile to look at, or
    // keys.first - 1 if there is none.
    OA_DEVICE int32 pass_over(const FwdTile& t, const Keys& keys) {
        int32 own_end = keys.first, first_row = t.m0 + group_ * 64;
        if (first_row < t.seqlen_q) {
            KeyRange seen = visible_keys(min_of(first_row + 64, t.seqlen_q) - 1, t.seqlen_q, t.seqlen_k, p_.window_left,
                                         p_.window_right);
            own_end = max_of(int32((int64(seen.hi) + Config::kBlockN - 1) / Config::kBlockN), keys.first);
        }
        int32 n = keys.end - 1;
#pragma unroll 1
        for (; n >= own_end; --n) {
            turns_.wait();
            turns_.pass_on();
            // A buffer is given back after it has been filled: an earlier arrival would count for the round before.
            bars_.k.wait(k_at_);
            release_k();
            bars_.v.wait(v_at_);
            release_v();
        }
        return n;
    }
};
