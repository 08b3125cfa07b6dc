// The forward's schedule of a tile of queries, on wgmma: Q is the outer operand, K and V the inner ones.
//
// Step i multiplies Q by the i-th tile of keys and P by the tile of V before it. So K(i) and V(i - 1) share a stage and
// its barriers: one wait, one release and one position a step. N tiles of keys take N + 1 steps, the last with V alone.
// Tiles of keys go from the last visible one to the first: step i's is keys.end - 1 - i.
//
// A kernel derives from both roles and adds its own copies and arithmetic. Its Config, besides what
// scheduler/persistent_roles.cuh asks for: kBlockM = 64 * kConsumers, kBlockN, kPingPong.
#pragma once
#include "attention/mask.cuh"
#include "attention/split_keys.cuh"
#include "pipeline/ping_pong.cuh"
#include "ptx/gpu_sync.cuh"
#include "scheduler/persistent_roles.cuh"

// Derived: prefetch_maps(), copy_q(t, stage, bar), copy_k(t, kv_head, n, stage, bar), copy_v(...): copies of kQBytes,
// k_bytes(t, n) and v_bytes(t, n) to buffer `stage` that complete on `bar`. Issued by one thread. With Config::kPaged
// producer warps have K or V or both, copies_k() and copies_v(), and call read_table(t, n, exists) before they wait for
// K's stage; by_threads(): copies are not announced, every thread completes its own.
template <typename Config, typename Derived>
class ForwardProducer : public PersistentProducer<Config, Derived> {
    using Base = PersistentProducer<Config, Derived>;

  public:
    using Span = KeyTilesOf<Config>;
    using Base::Base;

    OA_DEVICE void copy_tile(const TileOf<Config>& t, const Span& keys) {
        int32 kv_head = t.head_idx / (p_.num_q_heads / p_.num_kv_heads);
        begin_tile(t);
        // n: the tile of K; that of V is n + 1.
#pragma unroll 1
        for (int32 n = keys.end - 1; n >= keys.first - 1; --n) {
            bool has_k = copies_k() && n >= keys.first, has_v = copies_v() && n < keys.end - 1;
            read_table(t, n, n >= keys.first);
            uint32 bar = begin_step((has_k ? derived().k_bytes(t, n) : 0) + (has_v ? derived().v_bytes(t, n + 1) : 0));
            if (has_v) derived().copy_v(t, kv_head, n + 1, inner_at_.stage, bar);
            if (has_k) derived().copy_k(t, kv_head, n, inner_at_.stage, bar);
            end_step(bar);
        }
    }

  protected:
    using Base::bars_;
    using Base::inner_at_;
    using Base::outer_at_;
    using Base::p_;

    // As copy_tile, of the steps of a list (attention/score_mods.cuh: ListSteps). Masks: what is copied beside K
    // (attention/mask_copies.cuh). kWaits: a kernel ahead makes that, and has to end first.
    template <typename Masks, bool kWaits, typename Params, typename Steps>
    OA_DEVICE void copy_listed(const Params& params, const TileOf<Config>& t, const Steps& steps) {
        if (steps.count == 0) {
            if (leads()) bars_.outer.announce(outer_at_, 0);
            outer_at_.advance();
            return;
        }
        int32 kv_head = t.head_idx / (p_.num_q_heads / p_.num_kv_heads);
        begin_tile(t);
        int32 before = 0, entry = steps.entry(0);
#pragma unroll 1
        for (int32 i = 0; i <= steps.count; ++i) {
            bool has_k = copies_k() && i < steps.count, has_v = copies_v() && i > 0;
            int32 next = i + 1 < steps.count ? steps.entry(i + 1) : 0;  // one ahead: it comes from global memory
            read_table(t, Steps::tile(entry), i < steps.count);
            // Keys in pages come without masks.
            uint32 mask_bytes = has_k && !Config::kPaged ? Masks::bytes(params.mods, entry) : 0;
            uint32 bar = begin_step((has_k ? derived().k_bytes(t, Steps::tile(entry)) + mask_bytes : 0) +
                                    (has_v ? derived().v_bytes(t, before) : 0));
            if (has_v) derived().copy_v(t, kv_head, before, inner_at_.stage, bar);
            if (has_k) derived().copy_k(t, kv_head, Steps::tile(entry), inner_at_.stage, bar);
            if (kWaits && mask_bytes != 0) wait_for_kernel_ahead();
            if (mask_bytes != 0) Masks::copy(params, t, entry, inner_at_.stage, bar);
            before = Steps::tile(entry);
            entry = next;
            end_step(bar);
        }
    }

  private:
    OA_DEVICE Derived& derived() { return static_cast<Derived&>(*this); }
    // The thread that speaks to the barriers.
    OA_DEVICE static bool leads() { return !Config::kPaged || (Base::is_first_warp() && (threadIdx.x & 31) == 0); }
    OA_DEVICE bool copies_k() const {
        if constexpr (Config::kPaged) return Derived::Pages::copies_k(p_);
        return true;
    }
    OA_DEVICE bool copies_v() const {
        if constexpr (Config::kPaged) return Derived::Pages::copies_v(p_);
        return true;
    }
    OA_DEVICE void read_table(const TileOf<Config>& t, int32 n, bool exists) {
        if constexpr (Config::kPaged) derived().read_table(t, n, exists);
    }

    // Copies Q.
    OA_DEVICE void begin_tile(const TileOf<Config>& t) {
        if (leads()) derived().copy_q(t, outer_at_.stage, bars_.outer.announce(outer_at_, Derived::kQBytes));
        outer_at_.advance();
    }
    // Waits until the stage is free; the barrier on which copies of so many bytes complete.
    OA_DEVICE uint32 begin_step(uint32 bytes) {
        bars_.inner.wait_empty(inner_at_);
        if constexpr (Config::kPaged) {
            if (!derived().by_threads()) {
                if ((threadIdx.x & 31) == 0) bars_.inner.announce(inner_at_, bytes);
                __syncwarp();  // no copy ends before its bytes are expected
            }
        } else {
            bars_.inner.announce(inner_at_, bytes);
        }
        return bars_.inner.full + 8 * inner_at_.stage;
    }
    OA_DEVICE void end_step(uint32 bar) {
        if constexpr (Config::kPaged)
            if (derived().by_threads()) mbarrier_arrive_after_copies(bar);
        inner_at_.advance();
    }
};

// Derived: attend(t, keys, first, warp_row, rows), which takes the steps from `first` to the last, releases their
// buffers and, when its last read of it is done, Q; store(t, warp_row, rows) after it.
template <typename Config, typename Derived>
class ForwardConsumer : public PersistentConsumer<Config, Derived> {
    using Base = PersistentConsumer<Config, Derived>;

  public:
    using Span = KeyTilesOf<Config>;

    OA_DEVICE ForwardConsumer(const AttnFwdParams& p, const ListOf<Config>& list, RoleStorage<Config>& smem,
                              const RoleBarriers<Config>& bars, int32 group)
        : Base(p, list, smem, bars, group), ping_pong_(group) {}

    // All consumer warpgroups.
    OA_DEVICE void run() {
        Base::run_tiles();
        ping_pong_.finish(threadIdx.x < 256);
    }

    template <typename Rows>
    OA_DEVICE void attend_tile(const TileOf<Config>& t, const Span& keys, int32 warp_row, Rows& rows) {
        int32 first = pass_over(t, keys);
        if (first < keys.end - keys.first) {
            derived().attend(t, keys, first, warp_row, rows);
        } else {
            Base::wait_inner();
            Base::release_inner();
            Base::wait_outer();
            Base::release_outer();
        }
    }

  protected:
    using Base::bars_;
    using Base::group_;
    using Base::inner_at_;
    using Base::lane_;
    using Base::outer_at_;
    using Base::p_;
    PingPong<Config::kConsumers, Config::kPingPong> ping_pong_;

    // Whether the keys of step i need masking.
    OA_DEVICE static bool is_masked(const Span& keys, int32 i) {
        int32 n = keys.end - 1 - i;
        return n < keys.full_first || n >= keys.full_end;
    }
    // The first step after i that is masked or the last with scores: what a loop must look out for.
    OA_DEVICE static int32 next_special(const Span& keys, int32 i) {
        int32 last = keys.end - 1 - keys.first;
        return is_masked(keys, i + 1) ? i + 1 : min_of(keys.end - keys.full_first, last);
    }

    // Where the tiles of keys end that this warpgroup's rows see, `first` at the least.
    OA_DEVICE int32 own_end_of(const TileOf<Config>& t, int32 first) const {
        int32 own_end = first, first_row = t.m0 + group_ * 64;
        if (uint32(first_row) < uint32(t.seqlen_q)) {  // unsigned: rows before row 0 (FwdTile::m0) see nothing either
            KeyRange seen = visible_to(p_, t, min_of(first_row + 64, t.seqlen_q) - 1);
            own_end = max_of(int32((int64(seen.hi) + Config::kBlockN - 1) / Config::kBlockN), first);
        }
        return own_end;
    }
    OA_DEVICE void pass_over_step() {
        ping_pong_.wait();
        ping_pong_.pass_on();
        // A buffer is given back after it has been filled: an earlier arrival would count for the round before.
        Base::wait_inner();
        Base::release_inner();
    }

  private:
    OA_DEVICE Derived& derived() { return static_cast<Derived&>(*this); }

    // Passes over the first steps, whose tiles of keys only later rows of the CTA see; returns the first to take, or
    // the number of tiles of keys if this warpgroup sees none.
    OA_DEVICE int32 pass_over(const TileOf<Config>& t, const Span& keys) {
        int32 first = max_of(keys.end - own_end_of(t, keys.first), 0);
#pragma unroll 1
        for (int32 i = 0; i < first; ++i) pass_over_step();
        return first;
    }
};
