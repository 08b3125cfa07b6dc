// The loop of a persistent, warp-specialized kernel over its tiles, for producer and consumers, and the barriers
// between them. What a tile's work is, stands in the kernel's own schedule (attention/fwd_roles.cuh: the forward's).
//
// Two rings: the outer operand stays for a tile (forward: Q), inner ones come step by step (forward: K and V).
//
//   producer   outer.empty -> copy -> outer.full | inner.empty -> copy -> inner.full | ... next tile
//   consumer   outer.full | inner.full -> products -> inner.empty | ... outer.empty
//
// Config: kConsumers, kOuterStages, kInnerStages, kBlockM, kRotateHeads (tiles of queries have different amounts of
// work: PersistentTiles), kSplitKeys (keys are split over CTAs: scheduler/split_tiles.cuh), kVarlen (packed sequences;
// a constant, because the dense loop pays for more code), kMeetAtTiles (packed sequences: warps meet before they read a
// tile), kPaged (packed sequences: all lanes of the producer's warp copy). Of packed sequences the producer walks
// cu_seqlens, once and ahead of the consumers, which get the tile beside its outer operand.
#pragma once
#include "params/attn_fwd.cuh"
#include "pipeline/ring.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/stream_k.cuh"
#include "scheduler/persistent.cuh"
#include "scheduler/split_tiles.cuh"

template <typename Config>
using TileOf =
    typename Select<Config::kSplitKeys, typename Select<Config::kVarlen, StreamKTile, SplitTile>::Type, FwdTile>::Type;

template <typename Config>
struct RoleBarrierStorage {
    uint64 outer_full[Config::kOuterStages], outer_empty[Config::kOuterStages];
    uint64 inner_full[Config::kInnerStages], inner_empty[Config::kInnerStages];
};
template <typename Config>
struct RoleStorage : RoleBarrierStorage<Config> {
    // kVarlen: the tile that each outer operand belongs to, valid from outer_full to outer_empty; m0 = kNoMoreTiles
    // ends.
    TileOf<Config> tile[Config::kOuterStages];
    SequenceRange sequences[32];  // kSplitKeys: not used
};

template <typename Config>
struct RoleBarriers {
    Ring<Config::kOuterStages> outer;
    Ring<Config::kInnerStages> inner;

    // storage: shared address of the RoleBarrierStorage.
    OA_DEVICE explicit RoleBarriers(uint32 storage)
        : outer{smem_addr_at(&RoleBarrierStorage<Config>::outer_full, storage),
                smem_addr_at(&RoleBarrierStorage<Config>::outer_empty, storage)},
          inner{smem_addr_at(&RoleBarrierStorage<Config>::inner_full, storage),
                smem_addr_at(&RoleBarrierStorage<Config>::inner_empty, storage)} {}

    // One thread; a CTA barrier must follow.
    OA_DEVICE void init() const {
        // Of packed sequences every lane has read the tile: each orders its own read before the producer's next write.
        outer.init(Config::kConsumers * (Config::kVarlen ? 128 : 4));
        inner.init(4 * Config::kConsumers);
        fence_barrier_init();
    }
};

// Derived: prefetch_maps(); Span, built from (arguments, tile), with is_empty(): the steps of a tile; copy_tile(t,
// span), which fills the outer operand's buffer, free already, and the inner ones', and advances both rings. One thread
// calls it; with kPaged a warp.
template <typename Config, typename Derived>
class PersistentProducer {
  public:
    OA_DEVICE PersistentProducer(const AttnFwdParams& p, const ListOf<Config>& list, RoleStorage<Config>& smem,
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

  protected:
    const AttnFwdParams& p_;
    const ListOf<Config>& list_;
    RoleStorage<Config>& smem_;
    const RoleBarriers<Config>& bars_;
    RingState<Config::kOuterStages> outer_at_;
    RingState<Config::kInnerStages> inner_at_;

  private:
    OA_DEVICE Derived& derived() { return static_cast<Derived&>(*this); }

    OA_DEVICE void run_dense() {
        TilesOf<Config> tiles;
        for (TileOf<Config> t; tiles.next<Config::kBlockM, Config::kRotateHeads>(p_, list_, t);) {
            typename Derived::Span span(p_, t);
            if (!span.is_empty()) {
                bars_.outer.wait_empty(outer_at_);
                derived().copy_tile(t, span);
            }
        }
    }

    OA_DEVICE auto packed_tiles() const {
        if constexpr (Config::kSplitKeys)
            return StreamKTiles<Config::kBlockM, Config::kBlockN, Config::kPaged>(p_, list_);
        else
            return PackedTiles<Config::kBlockM, Config::kPaged>(p_, list_, smem_.sequences);
    }

    // The walk over cu_seqlens takes all lanes, the copies one.
    OA_DEVICE void run_varlen(int lane) {
        auto tiles = packed_tiles();
        for (TileOf<Config> t; tiles.next(t);) {
            if (Config::kPaged || lane == 0) {
                typename Derived::Span span(p_, t);
                bars_.outer.wait_empty(outer_at_);
                if (lane == 0) smem_.tile[outer_at_.stage] = t;
                if (Config::kPaged) __syncwarp();
                if (!span.is_empty()) {
                    // From shared memory: a producer has few registers. (Every copy below clobbers memory, so none of
                    // the tile's fields stays in a register over one.)
                    asm volatile("" ::: "memory");
                    derived().copy_tile(smem_.tile[outer_at_.stage], span);
                } else {
                    if (lane == 0) bars_.outer.announce(outer_at_, 0);
                    outer_at_.advance();
                }
            }
            __syncwarp();
        }
        if (lane == 0) {
            bars_.outer.wait_empty(outer_at_);
            smem_.tile[outer_at_.stage].m0 = kNoMoreTiles;
            bars_.outer.announce(outer_at_, 0);
        }
    }
};

// Derived: Rows, a tile's results; attend_tile(t, span, warp_row, rows): its steps; store(t, warp_row, rows).
template <typename Config, typename Derived>
class PersistentConsumer {
  public:
    OA_DEVICE PersistentConsumer(const AttnFwdParams& p, const ListOf<Config>& list, RoleStorage<Config>& smem,
                                 const RoleBarriers<Config>& bars, int32 group)
        : p_(p), list_(list), smem_(smem), bars_(bars), group_(group), lane_(in_register(threadIdx.x & 31)) {}

  protected:
    // All consumer warpgroups.
    OA_DEVICE void run_tiles() {
        TilesOf<Config> tiles;
        for (TileOf<Config> t; next_tile(tiles, t);) {
            typename Derived::Span span(p_, t);
            int32 warp_row = t.m0 + group_ * 64 + ((threadIdx.x >> 5) & 3) * 16;
            typename Derived::Rows rows;
            if (!span.is_empty()) {
                derived().attend_tile(t, span, warp_row, rows);
                outer_at_.advance();
            } else if (Config::kVarlen) {
                release_outer();
                outer_at_.advance();
            }
            derived().store(t, warp_row, rows);
        }
    }

    OA_DEVICE void wait_outer() const { bars_.outer.wait(outer_at_); }
    OA_DEVICE void release_outer() const { bars_.outer.release(outer_at_, Config::kVarlen ? 0 : lane_); }
    OA_DEVICE void wait_inner() const { bars_.inner.wait(inner_at_); }
    OA_DEVICE bool is_inner_full() const { return bars_.inner.is_full(inner_at_); }
    OA_DEVICE void release_inner() {
        bars_.inner.release(inner_at_, lane_);
        inner_at_.advance();
    }
    // The same of a stage that was loaded from: not before the loads have returned (Ring::release). used: something of
    // each of them.
    OA_DEVICE void release_inner(uint32 used) {
        const uint32 zero = uint32(p_.head_dim_qk);  // which the compiler does not know
        const uint32 empty = bars_.inner.empty + in_register(int32(used & zero));
        if (lane_ == 0) mbarrier_arrive(empty + 8 * inner_at_.stage);
        inner_at_.advance();
    }

    const AttnFwdParams& p_;
    const ListOf<Config>& list_;
    RoleStorage<Config>& smem_;
    const RoleBarriers<Config>& bars_;
    int32 group_;
    int lane_;
    RingState<Config::kOuterStages> outer_at_;
    RingState<Config::kInnerStages> inner_at_;

  private:
    OA_DEVICE Derived& derived() { return static_cast<Derived&>(*this); }

    OA_DEVICE bool next_tile(TilesOf<Config>& tiles, TileOf<Config>& t) {
        if constexpr (Config::kVarlen) {
            bars_.outer.wait(outer_at_);
            // For the compiler, which may take the warp for divergent after a wait: the tile, and all that hangs on it,
            // would then not be in uniform registers.
            if constexpr (Config::kMeetAtTiles) __syncwarp();
            t = smem_.tile[outer_at_.stage];
            // A vote, because its outcome is known to be the warp's: what comes then stays in uniform registers.
            return __any_sync(0xffffffffu, t.m0 != kNoMoreTiles);
        } else {
            return tiles.next<Config::kBlockM, Config::kRotateHeads>(p_, list_, t);
        }
    }
};
