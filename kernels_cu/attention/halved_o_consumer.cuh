// What a warpgroup of attn_fwd_d512_sm90 (entry/) computes: of 64 query rows S and P of its CTA's keys, and its CTA's
// half of O of all keys.
//
// P goes to the warpgroup of the other CTA that has the same rows: from registers to the same registers, through
// shared memory of the receiver. Either warpgroup has a base of its own for its exponents, which it sends along; where
// they differ, both go on with the higher one. So no softmax waits for a maximum of the other CTA.
//
// Config: as for HalvedOStorage, and Io, kHeadDimV (a CTA's half), Params.
#pragma once
#include "attention/halved_o_epilogue.cuh"
#include "attention/halved_o_mods.cuh"
#include "attention/halved_o_scores.cuh"
#include "attention/halved_o_storage.cuh"
#include "attention/softmax.cuh"
#include "attention/warp_softmax.cuh"
#include "ptx/barrier_vote.cuh"
#include "ptx/cluster_stores.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "ptx/wgmma_fp16.cuh"

template <typename Config>
class HalvedOConsumer {
    using Layout = HalvedOLayout<Config>;
    using Storage = HalvedOStorage<Config>;
    using Params = typename Config::Params;
    using Mods = typename Select<Config::kScoreMods, HalvedOMods<Config>, NoHalvedOMods<Config>>::Type;
    using Io = typename Config::Io;
    using Products = Wgmma<Io, kOwnKeys>;
    using Pv = Wgmma<Io, Config::kHeadDimV>;
    static constexpr int kUnitsV = Layout::kUnitsV;
    static constexpr int kOutputs = Config::kHeadDimV / 2, kScores = kOwnKeys / 2, kSteps = kOwnKeys / 16;
    using Output = float[kOutputs];
    using Scores = float[kScores];
    using Probabilities = uint32[kSteps][4];

  public:
    OA_DEVICE HalvedOConsumer(const Params& params, const HalvedOBarriers<Config>& bars, int32 group)
        : p_(params.fwd),
          mods_(params, group, int32(cluster_rank())),
          bars_(bars),
          group_(group),
          rank_(int32(cluster_rank())),
          lane_(in_register(threadIdx.x & 31)),
          q_(wgmma_descriptor(smem_addr_at(&Storage::q) + group * 64 * 128, 16, 1024)),
          k_(wgmma_descriptor(smem_addr_at(&Storage::units), 16, 1024)),
          v_(wgmma_descriptor(smem_addr_at(&Storage::units), Layout::kVPanel, 1024)) {}

    OA_DEVICE void run() {
        while (next_tile()) {
            Output o;
#pragma unroll
            for (int i = 0; i < kOutputs; ++i) o[i] = 0.0f;
            m_[0] = m_[1] = kLowest, l_[0] = l_[1] = 0.0f;
            const int32 first = of_tile(&HandedTile::first), end = of_tile(&HandedTile::end);
            if (is_true(first < end)) {
                attend(first, end, o);
            } else {
                for (int u = 0; u < Layout::kUnitsK; ++u) {
                    wait_by_vote(bars_.q_full + 8 * u, q_phase_);
                    release_q(u);
                }
            }
            store(o);
            // By each lane that has read it: racecheck does not follow one that arrives for its warp.
            mbarrier_arrive(bars_.tile_empty + 8 * q_phase_);
            q_phase_ ^= 1;
        }
    }

  private:
    OA_DEVICE static int32 warp() { return int32(threadIdx.x >> 5) & 3; }
    OA_DEVICE static uint32 thread() { return threadIdx.x & 127; }

    // Of what is the same in all lanes. A vote, because the compiler knows its outcome to be the warp's: what depends
    // on it stays in uniform registers.
    OA_DEVICE static bool is_true(bool x) { return __any_sync(0xffffffffu, x); }
    // Behind a wait with a loop of its own the compiler takes the warp for divergent.
    OA_DEVICE static void wait_by_vote(uint32 bar, uint32 parity) {
        while (!__all_sync(0xffffffffu, mbarrier_test(bar, parity))) continue;
    }

    // Whether it is so in some thread of the warpgroup, which has to issue products together.
    OA_DEVICE bool is_of_some(bool x) const {
        return is_true(group_ == 0 ? any_at_barrier(x, 1, 128) : any_at_barrier(x, 2, 128));
    }

    // Of the tile at hand: read where it is needed, as registers are short.
    OA_DEVICE int32 of_tile(int32 HandedTile::* member) const {
        return int32(load_shared(smem_addr_at(member, tile_at_hand())));
    }
    OA_DEVICE uint32 tile_at_hand() const {
        return smem_addr_at(&Storage::tiles, bars_.base) + q_phase_ * uint32(sizeof(typename Storage::Tile));
    }
    OA_DEVICE bool next_tile() const {
        wait_by_vote(bars_.q_full, q_phase_);
        return is_true(of_tile(&HandedTile::m0) != kNoMoreTiles);
    }
    // First row of the warp.
    OA_DEVICE int32 warp_row() const { return of_tile(&HandedTile::m0) + group_ * 64 + warp() * 16; }

    // P of step n is multiplied by V under the softmax of step n - 1. The other CTA's P is there by then: it was sent a
    // step ago. What is rare, a base that is raised, leaves the inner loop: O is touched with no product in flight, or
    // ptxas would let each product wait for the one before.
    OA_DEVICE void attend(int32 first, int32 end, Output& o) {
        Scores s;
        Probabilities own, next, other;
        float alpha[2], by[2], factor[2];
        int32 n = end - 1;
        issue_scores<true>(s, n, n == first, [] {});
        wgmma_wait<0>();
        wgmma_pin(s);
        release_last_scores(n == first);
        softmax(s, n, own, alpha, [] {});
        send(own, n == first);
        bool is_later = false, grew = false;
        for (;;) {
            bool ends;
            for (;;) {
                ends = is_true(n == first);
                if (ends) break;
                issue_scores<false>(s, n - 1, n - 1 == first, [&] {
                    if (is_later) {
                        release<kUnitsV>();
                        take(own, next);
                    }
                });
                if (has_foreign_keys(n)) clear_foreign_keys(n);
                issue_values(o, own);
                wgmma_wait<kUnitsV>();
                wgmma_pin(s);
                --n;
                release_last_scores(n == first);
                grew = softmax(s, n, next, alpha, [&] {
                    wgmma_wait<kUnitsV / 2>();
                    release<kUnitsV / 2>();
                });
                if (is_of_some(wait_message() || grew)) {
                    wgmma_wait<0>();
                    wgmma_pin(o);
                    break;
                }
                receive(other);
                issue_values(o, other);
                received();
                send(next, n == first);
                wgmma_wait<kUnitsV>();
                release<kUnitsV - kUnitsV / 2>();
                is_later = true;
            }
            if (ends) break;
            release<kUnitsV - kUnitsV / 2>();
            take(own, next);
            follow(factor, by);
            scale_probabilities<Io>(own, by);
            rescale(o, by);
            if (grew) rescale(o, alpha);
            receive(other);
            scale_probabilities<Io>(other, factor);
            issue_values(o, other);
            received();
            send(own, n == first);
            wgmma_wait<0>();
            wgmma_pin(o);
            release<kUnitsV>();
            is_later = false;
        }
        wgmma_wait<0>();
        wgmma_pin(o);
        if (is_later) {
            release<kUnitsV>();
            take(own, next);
        }
        if (has_foreign_keys(n)) clear_foreign_keys(n);
        issue_values(o, own);
        wait_message();
        follow(factor, by);
        wgmma_wait<0>();
        wgmma_pin(o);
        release<kUnitsV>();
        rescale(o, by);
        receive(own);
        scale_probabilities<Io>(own, factor);
        issue_values(o, own);
        received();
        sum_of_quad(l_);
#pragma unroll
        for (int r = 0; r < 2; ++r) l_[r] = fmaf(other_l_[r], factor[r], l_[r]);
        wgmma_wait<0>();
        wgmma_pin(o);
        release<kUnitsV>();
    }

    // S = Q K^T of this CTA's keys of step n; the products of the last unit are in flight at the end. between: called
    // once all products that were in flight before are done.
    template <bool kFirst, typename Between>
    OA_DEVICE void issue_scores(Scores& s, int32 n, bool is_last, Between between) {
        wgmma_discard(s);
#pragma unroll
        for (int u = 0; u < Layout::kUnitsK; ++u) {
            if constexpr (kFirst) mbarrier_wait(bars_.q_full + 8 * u, q_phase_);
            bars_.ring.wait(at_);
            const WgmmaDescriptor k = k_.next(at_.stage * Layout::kUnit);
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < Layout::panels_of(u); ++c)
#pragma unroll
                for (int step = 0; step < 4; ++step)
                    Products::ss(s, q_.at((kUnitPanels * u + c) * Layout::kQPanel + step * 32),
                                 k.at(c * Layout::kKPanel + step * 32), (u | c | step) != 0);
            wgmma_commit();
            wgmma_pin(s);
            if constexpr (Config::kScoreMods) {
                if (u == 0) mods_.load(tile_at_hand(), n, lane_);
            }
            at_.advance();
            if (!kFirst || u > 0) wgmma_wait<1>();
            if (u == 0) {
                between();
            } else {
                release();
                if (is_last) release_q(u - 1);
            }
        }
        if constexpr (Layout::kUnitsBias != 0) {
            bias_at_ = at_;
            advance_over_bias(at_);
        }
    }

    // Whether a step has keys of the next sequence.
    OA_DEVICE bool has_foreign_keys(int32 n) const {
        const int32 last = max_of(first_key(n, 0), first_key(n, 1)) + kOwnKeys;
        return Config::kVarlen && is_true(of_tile(&HandedTile::seqlen_k) < last);
    }
    // Of a CTA's keys of step n.
    OA_DEVICE int32 first_key(int32 n, int32 rank) const {
        if constexpr (Config::kScoreMods) return ListSteps::tile(Mods::entry(tile_at_hand(), n, rank)) * kOwnKeys;
        return n * kStepKeys + rank * kOwnKeys;
    }
    // O += P V of the next 64 keys in the ring, asynchronous.
    OA_DEVICE void issue_values(Output& o, const Probabilities& probs) {
        wgmma_pin(o);
#pragma unroll
        for (int u = 0; u < kUnitsV; ++u) {
            bars_.ring.wait(at_);
            const WgmmaDescriptor v = v_.next(at_.stage * Layout::kUnit);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < kUnitKeysV / 16; ++step)
                Pv::template rs<kMnMajor>(o, probs[u * (kUnitKeysV / 16) + step], v.at(step * 16 * 128), 1);
            wgmma_commit();
            wgmma_pin(o);
            at_.advance();
        }
    }
    // Clears the rows of V, in the next buffers of the ring, that belong to the next sequence: 0 times its NaN would be
    // NaN. Both warpgroups do, with the same zeros.
    OA_DEVICE void clear_foreign_keys(int32 n) const {
        RingState<Config::kStages> at = at_;
#pragma unroll 1
        for (int32 u = 0; u < 2 * kUnitsV; ++u) {
            const int32 from = first_key(n, u < kUnitsV ? rank_ : 1 - rank_) + u % kUnitsV * kUnitKeysV;
            const int32 valid = of_tile(&HandedTile::seqlen_k) - from;
            wait_by_vote(bars_.ring.full + 8 * at.stage, at.phase);
            const uint32 to = smem_addr_at(&Storage::units, bars_.base) + at.stage * Layout::kUnit;
#pragma unroll 1
            for (int32 i = 0; i < kUnitKeysV * 8; i += 128)
#pragma unroll
                for (int c = 0; c < Config::kPanelsV; ++c)
                    if (i + int32(thread()) >= valid * 8)
                        store_shared4(to + c * Layout::kVPanel + (i + thread()) * 16, make_uint4(0, 0, 0, 0));
            at.advance();
        }
        fence_proxy_async();
        // Not 1 + group_: behind a barrier with a number in a register ptxas keeps nothing in uniform registers.
        if (group_ == 0) {
            named_barrier_sync(1, 128);
        } else {
            named_barrier_sync(2, 128);
        }
    }

    // Buffers are released in the order in which they are used.
    OA_DEVICE void release() {
        bars_.ring.release(released_, lane_);
        released_.advance();
    }
    template <int kUnits>
    OA_DEVICE void release() {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) release();
    }
    // A mask's units are released apart, by softmax().
    OA_DEVICE static void advance_over_bias(RingState<Config::kStages>& at) {
#pragma unroll
        for (int u = 0; u < Layout::kUnitsBias; ++u) at.advance();
    }
    // S is there: the last unit of K, and at a tile's end of Q, is free.
    OA_DEVICE void release_last_scores(bool is_last) {
        release();
        advance_over_bias(released_);
        if (is_last) release_q(Layout::kUnitsK - 1);
    }
    OA_DEVICE void release_q(int u) const {
        __syncwarp();
        // Not a predicate kept over a tile: they are short too.
        if (in_register(lane_) == 0) mbarrier_arrive(bars_.q_empty + 8 * u);
    }

    // P from S, and the sums. Returns whether the base was raised, and O has to follow by alpha. between: called before
    // the last quarter.
    template <typename Between>
    OA_DEVICE bool softmax(Scores& s, int32 n, Probabilities& probs, float (&alpha)[2], Between between) {
        float c;
        if constexpr (Config::kScoreMods) {
            c = modify(s);
        } else {
            c = p_.softmax_scale * kLog2e;
            // Else a factor in the exponent is all that scores need.
            if (Config::kSoftcap && (p_.softcap > 0.0f || !(c > 0.0f && c < 1e30f))) {
                transform_scores(s, p_);
                c = 1.0f;
            }
            if (is_true(n < of_tile(&HandedTile::full_first) || n >= of_tile(&HandedTile::full_end))) {
                FwdTile t;
                t.seqlen_q = of_tile(&HandedTile::seqlen_q), t.seqlen_k = of_tile(&HandedTile::seqlen_k);
                mask_edges_by_bits(s, p_, t, warp_row(), first_key(n, rank_), lane_);
            }
        }
        const bool grew = raise(s, c, alpha);
        // Behind a vote on scores that biases of 32 bits have been added to: all have been read.
        if constexpr (Layout::kUnitsBias == 2) release_bias();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step == kSteps - 1) between();
#pragma unroll
            for (int i = 2 * step; i < 2 * step + 2; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float p0 = exp2_approx(fmaf(s[4 * i + 2 * r], c, -m_[r]));
                    const float p1 = exp2_approx(fmaf(s[4 * i + 2 * r + 1], c, -m_[r]));
                    l_[r] += p0 + p1;
                    probs[step][2 * (i & 1) + r] = pack2(Io{}, p0, p1);
                }
            wgmma_pin(probs[step]);  // here, and not behind the loads that come later: registers are short
        }
        return grew;
    }
    // With masks.
    OA_DEVICE float modify(Scores& s) {
        uint32 bias = 0, panel = 0;
        if constexpr (Layout::kUnitsBias != 0) {
            RingState<Config::kStages> at = bias_at_;
            const uint32 units = smem_addr_at(&Storage::units, bars_.base) + group_ * 64 * 128;
            bars_.ring.wait(at);
            bias = units + at.stage * Layout::kUnit;
            if constexpr (Layout::kUnitsBias == 2) {
                at.advance();
                bars_.ring.wait(at);
                panel = units + at.stage * Layout::kUnit - bias;
            }
        }
        return mods_.apply(s, tile_at_hand(), warp_row(), lane_, bias, panel, [&] { release_bias(); });
    }
    OA_DEVICE void release_bias() const {
        RingState<Config::kStages> at = bias_at_;
#pragma unroll
        for (int u = 0; u < Layout::kUnitsBias; ++u) {
            bars_.ring.release(at, lane_);
            at.advance();
        }
    }
    // c: see softmax(). Large scores of a user's expression are brought to base 2, and c to 1.
    OA_DEVICE bool raise(Scores& s, float& c, float (&alpha)[2]) {
        constexpr float kSlack = 8.0f;  // as `OnlineSoftmax`
        // Rows of the next sequence have no say: results would depend on them.
        int32 own_rows = 16;
        if constexpr (Config::kVarlen) own_rows = of_tile(&HandedTile::seqlen_q) - warp_row() - (lane_ >> 2);
        float top[2];
        largest_scores(s, c, top);
        if constexpr (kHasScoreMod) {
            bool is_large = false;  // as `kPlainModified` says
#pragma unroll
            for (int r = 0; r < 2; ++r)
                is_large |= 8 * r < own_rows && top[r] != neg_inf() && !(fabsf(fmaxf(m_[r], top[r])) <= kPlainModified);
            if (c != 1.0f && __any_sync(0xffffffffu, is_large)) {
                to_base2(s);
                c = 1.0f;
                largest_scores(s, c, top);
            }
        }
        bool grew = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) grew |= 8 * r < own_rows && top[r] - m_[r] > kSlack;
        alpha[0] = alpha[1] = 1.0f;
        if (!__any_sync(0xffffffffu, grew)) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float m = fmaxf(m_[r], top[r]);
            alpha[r] = exp2_approx(m_[r] - m);
            m_[r] = m;
            l_[r] *= alpha[r];
        }
        return true;
    }
    // Once no product reads `own`. Without its own registers the compiler would wait for each product.
    OA_DEVICE void take(Probabilities& own, const Probabilities& next) const {
        const uint32 zero = uint32(p_.head_dim_qk);  // which the compiler does not know
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int x = 0; x < 4; ++x) own[step][x] = copy_of(next[step][x], zero);
    }

    // P to the other CTA, with base and, at the end, sum of each row.
    OA_DEVICE void send(const Probabilities& probs, bool is_last) {
        mbarrier_wait(bars_.p_empty + 8 * group_, messages_ ^ 1);
        const uint32 bar = of_peer(bars_.p_full + 8 * group_);
        const uint32 to = of_peer(smem_addr_at(&Storage::p, bars_.base) + group_ * Layout::kP + thread() * 16);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) store_async4(to + step * 2048, probs[step], bar);
        float l[2] = {l_[0], l_[1]};
        if (is_last) sum_of_quad(l);
        if ((lane_ & 3) == 0) {
            store_async2(of_peer(rows()), m_[0], l[0], bar);
            store_async2(of_peer(rows() + 64), m_[1], l[1], bar);
        }
    }
    // Returns whether what the other CTA sent has another base.
    OA_DEVICE bool wait_message() {
        const uint32 bar = bars_.p_full + 8 * group_;
        if (thread() == 0) mbarrier_arrive_expect_tx(bar, Layout::kP + Layout::kRows);
        mbarrier_wait(bar, messages_);
        messages_ ^= 1;
        const float first = load_shared_float(rows()), second = load_shared_float(rows() + 64);
        return __any_sync(0xffffffffu, first != m_[0] || second != m_[1]);
    }
    // To the higher base: what O and this CTA's P are to be multiplied by, and by `factor` what was received.
    OA_DEVICE void follow(float (&factor)[2], float (&by)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float2 other = load_shared_float2(rows() + 64 * r);
            const float m = fmaxf(m_[r], other.x);
            factor[r] = exp2_approx(other.x - m);
            by[r] = exp2_approx(m_[r] - m);
            m_[r] = m;
            l_[r] *= by[r];
            other_l_[r] = other.y;
        }
    }
    OA_DEVICE void receive(Probabilities& other) const {
        const uint32 from = smem_addr_at(&Storage::p, bars_.base) + group_ * Layout::kP + thread() * 16;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint4 x = load_shared4(from + step * 2048);
            other[step][0] = x.x, other[step][1] = x.y, other[step][2] = x.z, other[step][3] = x.w;
        }
    }
    // Behind the products that read what was loaded.
    OA_DEVICE void received() const {
        __syncwarp();
        if (in_register(lane_) == 0) mbarrier_arrive_at(of_peer(bars_.p_empty + 8 * group_));
    }
    // Where this lane's first row has base and sum; 8 rows further the second.
    OA_DEVICE uint32 rows() const {
        return smem_addr_at(&Storage::rows, bars_.base) + group_ * Layout::kRows + (warp() * 16 + (lane_ >> 2)) * 8;
    }

    OA_DEVICE void store(const Output& o) const {
        FwdTile t;
        t.batch_idx = of_tile(&HandedTile::batch_idx), t.head_idx = of_tile(&HandedTile::head_idx);
        t.q_begin = of_tile(&HandedTile::q_begin);
        t.seqlen_q = of_tile(&HandedTile::seqlen_q), t.seqlen_k = of_tile(&HandedTile::seqlen_k);
        store_half<Io>(o, m_, l_, p_, t, warp_row(), rank_, in_register(lane_));
    }

    const AttnFwdParams& p_;
    Mods mods_;
    const HalvedOBarriers<Config>& bars_;
    const int32 group_, rank_;
    const int32 lane_;
    const WgmmaDescriptor q_, k_, v_;
    RingState<Config::kStages> at_, released_;
    RingState<Config::kStages> bias_at_;  // of an additive mask's tile for the scores at hand, behind the units of K
    uint32 q_phase_ = 0, messages_ = 0;  // parities; messages are sent and received in turn
    float m_[2], l_[2];  // base of the exponents in base 2, and sum of P, of this CTA's keys until the end
    float other_l_[2];
};
