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
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"
#include "scheduler/fwd_tile.cuh"
#include "scheduler/stream_k.cuh"
#include "scheduler/persistent.cuh"
#include "scheduler/split_tiles.cuh"

template <typename Config>
using TileOf =
    typename Select<Config::kSplitKeys, typename Select<Config::kVarlen, StreamKTile, SplitTile>::Type, FwdTile>::Type;

// Warps of a CTA's producer: of several CTAs an SM each has one.
template <typename Config>
OA_DEVICE constexpr int producer_warps() {
    if constexpr (Config::kPaged) return Config::kCtas == 1 ? 4 : 1;
    return 1;
}
constexpr int32 kProducersMeet = 15;  // named barrier of producer warps; PingPong has the first ones

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
    // of_inner_full: who announces bulk copies of inner operands, or threads that copy by themselves.
    OA_DEVICE void init(uint32 of_inner_full = 1) const {
        // Of packed sequences every lane has read the tile: each orders its own read before the producer's next write.
        outer.init(Config::kConsumers * (Config::kVarlen ? 128 : 4));
        inner.init(4 * Config::kConsumers, of_inner_full);
        fence_barrier_init();
    }
};

// Derived: prefetch_maps(); Span, built from (arguments, tile), with is_empty(): the steps of a tile; copy_tile(t,
// span), which fills the outer operand's buffer, free already, and the inner ones', and advances both rings. One thread
// calls it; with kPaged all producer warps.
template <typename Config, typename Derived>
class PersistentProducer {
  public:
    OA_DEVICE PersistentProducer(const AttnFwdParams& p, const ListOf<Config>& list, RoleStorage<Config>& smem,
                                 const RoleBarriers<Config>& bars)
        : p_(p), list_(list), smem_(smem), bars_(bars) {}

    // The producer warpgroup's first warp; with kPaged all of its warps.
    OA_DEVICE void run(int lane) {
        if constexpr (Config::kPaged) {
            run_paged(lane);
            return;
        }
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

    OA_DEVICE static bool is_first_warp() { return !Config::kPaged || kWarps == 1 || threadIdx.x < 32; }

  private:
    static constexpr int kWarps = producer_warps<Config>();

    OA_DEVICE Derived& derived() { return static_cast<Derived&>(*this); }

    OA_DEVICE void meet() {
        if constexpr (kWarps > 1) named_barrier_sync(kProducersMeet, 32 * kWarps);
    }
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
            if (lane == 0) {
                typename Derived::Span span(p_, t);
                bars_.outer.wait_empty(outer_at_);
                smem_.tile[outer_at_.stage] = t;
                copy_given(span);
            }
            __syncwarp();
        }
        if (lane == 0) {
            bars_.outer.wait_empty(outer_at_);
            smem_.tile[outer_at_.stage].m0 = kNoMoreTiles;
            bars_.outer.announce(outer_at_, 0);
        }
    }

    // The first warp gives the others each tile as it does the consumers.
    OA_DEVICE void run_paged(int lane) {
        if (lane == 0 && is_first_warp()) derived().prefetch_maps();
        auto tiles = packed_tiles();
        TileOf<Config>& given = smem_.tile[0];
        static_assert(Config::kOuterStages == 1, "one tile at a time");
        for (bool more = true; more;) {
            if (is_first_warp()) {
                TileOf<Config> t;
                if (!tiles.next(t)) t.m0 = kNoMoreTiles;
                bars_.outer.wait_empty(outer_at_);
                meet();  // all have left the tile before
                if (lane == 0) given = t;
                __syncwarp();
            } else {
                meet();
            }
            meet();
            more = __any_sync(0xffffffffu, given.m0 != kNoMoreTiles);
            if (more) copy_given(typename Derived::Span(p_, given));
        }
        if (lane == 0 && is_first_warp()) bars_.outer.announce(outer_at_, 0);
    }

    // From shared memory: a producer has few registers. (Every copy clobbers memory, so none of the tile's fields stays
    // in a register over one.)
    template <typename Span>
    OA_DEVICE void copy_given(const Span& span) {
        if (!span.is_empty()) {
            asm volatile("" ::: "memory");
            derived().copy_tile(smem_.tile[outer_at_.stage], span);
        } else {
            if (!Config::kPaged || (is_first_warp() && (threadIdx.x & 31) == 0)) bars_.outer.announce(outer_at_, 0);
            outer_at_.advance();
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
    // Products read what threads have copied through another proxy than these wrote.
    OA_DEVICE void wait_inner() const {
        bars_.inner.wait(inner_at_);
        if (Config::kPaged) fence_proxy_async();
    }
    OA_DEVICE bool is_inner_full() const {
        if constexpr (!Config::kPaged) return bars_.inner.is_full(inner_at_);
        const bool is_full = bars_.inner.is_full(inner_at_);
        fence_proxy_async();
        return is_full;
    }
    OA_DEVICE void release_inner() {
        bars_.inner.release(inner_at_, lane_);
        inner_at_.advance();
    }
    // The same of a stage that was loaded from: not before the loads have returned (Ring::release). used: something of
    // each of them.
    OA_DEVICE void release_inner(uint32 used) {
        // Which the compiler does not know.
        const uint32 zero = uint32(Config::kPaged ? p_.tile_offset : p_.head_dim_qk);
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
