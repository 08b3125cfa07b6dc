// What a warpgroup of mla_decode_sm90 computes: S and P of every other block of keys, and half of O's channels.
#pragma once
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/latent_copies.cuh"
#include "decode/latent_output.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "ptx/wgmma_fp16.cuh"

// Warpgroup kOwn of the two that compute.
template <typename Config, int kOwn>
class LatentConsumer {
    using Products = Wgmma<typename Config::Io, Config::kKeys>;
    using Pv = Wgmma<typename Config::Io, Config::kHeadDimV / 2 / Config::kPvParts>;
    static constexpr uint32 kBlockBytes = LatentStorage<Config>::kBlockBytes;
    static constexpr int kOutput = Config::kHeadDimV / 4, kScores = Config::kKeys / 2;
    static constexpr int kPartOutput = kOutput / Config::kPvParts;
    // Without registers to hold scores until P is known to be small enough, the maximum is taken first. Where TMA
    // brings rows memory binds, and less time between products made it slower.
    static constexpr bool kMaximumFirst = Config::kByMaps || Config::kPvParts != 1;
    static constexpr uint32 kPartBytes = Config::kHalfPanels / Config::kPvParts * kPanelBytes;

  public:
    OA_DEVICE LatentConsumer(const MlaDecodeParams& p, LatentStorage<Config>& smem)
        : params_(p),
          p_(p.decode),
          smem_(smem),
          lane_(int32(threadIdx.x) & 31),
          row_((int32(threadIdx.x) >> 5 & 3) * 16 + (lane_ >> 2)),
          q_(wgmma_descriptor(smem_addr_of(smem.q), 16, 1024)),
          k_(wgmma_descriptor(smem_addr_of(smem.k[0]), 16, 1024)),
          v_(wgmma_descriptor(smem_addr_of(smem.k[0]) + kOwn * Config::kHalfPanels * kPanelBytes, kPanelBytes, 1024)) {}

    OA_DEVICE void run() {
        factor_ = p_.softmax_scale * kLog2e * common_scale();
        for (uint32 number = 0;; ++number) {
            mbarrier_wait(smem_addr_of(&smem_.q_full), number & 1);
            const LatentSplit split = smem_.splits[number & 3];
            if (!__any_sync(0xffffffffu, split.blocks > 0)) return;
            begin(split);
            fence_proxy_async();
            if (kOwn >= split.blocks) release(smem_.q_empty);
            if constexpr (kOwn == 0) {
                even_blocks(split);
            } else {
                odd_blocks(split);
            }
            if constexpr (Config::kFormat == kRowsE4m3) {
                const float scale = common_scale();
                rescale({scale, scale});
            }
            end(split, number & 1);
        }
    }

  private:
    OA_DEVICE void begin(const LatentSplit& split) {
        const int32 flat = int32(blockIdx.x) * Config::kRows + row_;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            m_[r] = kLowest, l_[r] = 0.0f, top_[r] = neg_inf();
            const int32 token = min_of(token_of(p_, flat + 8 * r), split.queries.count - 1);
            ends_[r] = split.seq_len - split.queries.count + token + 1;
        }
#pragma unroll
        for (int i = 0; i < kOutput; ++i) o_[i] = 0.0f;
    }

    // Of rows that are converted without it.
    OA_DEVICE float common_scale() const {
        if (Config::kFormat != kRowsE4m3 || p_.k_params == nullptr) return 1.0f;
        return __uint_as_float(*p_.k_params);
    }

    // Warpgroup 0: S and P of even blocks, and of O's left half all.
    OA_DEVICE void even_blocks(const LatentSplit& split) {
        float s[kScores], alpha[2];
        for (int32 block = 0;; block += 2) {
            uint32 probs[Config::kKeys / 16][4];
            wgmma_discard(s);
            wgmma_fence();
            issue_half<0, 0>(s);
            wgmma_commit();
            wgmma_wait<1>();  // the product of the odd block before
            if (block > 0) release(smem_.empty[1][1]);
            issue_half<0, 1>(s);
            wgmma_commit();
            wgmma_pin(s);
            Extras extras = extras_of(split, block);
            wgmma_wait<0>();
            wgmma_pin(s);
            wgmma_pin(o_);
            finish_scores(s, split, block, extras);
            const bool grew = soften(s, extras, probs, alpha, block == 0);
            announce(kEvenP);
            if (grew) rescale(alpha);
            clear_tail(split, block, 0);
            issue_own(probs, 0);
            note_top(s);
            wgmma_wait<0>();
            wgmma_pin(o_);
            release(smem_.empty[0][0]);
            rounds_.advance(0);
            if (!__any_sync(0xffffffffu, block + 1 < split.blocks)) return;
            take<1>(split, block + 1);
            if (!__any_sync(0xffffffffu, block + 2 < split.blocks)) break;
        }
        wgmma_wait<0>();
        wgmma_pin(o_);
        release(smem_.empty[1][1]);
    }
    // P, and the base if it rose, are there.
    OA_DEVICE void announce(int32 barrier) const {
        fence_proxy_async();
        named_barrier_arrive(barrier, 256);
    }
    // P V of the other warpgroup's block, asynchronous. Who has announced P has waited for the block.
    template <int kBuffer>
    OA_DEVICE void take(const LatentSplit& split, int32 block) {
        float alpha[2];
        named_barrier_sync(kBuffer == 0 ? kEvenP : kOddP, 256);
        if (follow(alpha)) rescale(alpha);
        if constexpr (Config::kByMaps) wait_full(kBuffer), rounds_.advance(kBuffer);
        clear_tail(split, block, kBuffer);
        issue_shared(kBuffer);
    }

    // Warpgroup 1: S and P of odd blocks, and of O's right half all. It takes the even block's P, and base, ahead of
    // its own: the other order leaves the tensor cores nothing to do meanwhile.
    OA_DEVICE void odd_blocks(const LatentSplit& split) {
        float s[kScores], alpha[2];
        int32 block = 0;
        for (; __any_sync(0xffffffffu, block + 1 < split.blocks); block += 2) {
            uint32 probs[Config::kKeys / 16][4];
            issue_scores<1>(s);
            Extras extras = extras_of(split, block + 1);
            wgmma_wait<0>();
            finish_scores(s, split, block + 1, extras);
            take<0>(split, block);
            const bool grew = soften(s, extras, probs, alpha, block == 0);
            announce(kOddP);
            wgmma_wait<0>();
            wgmma_pin(o_);
            release(smem_.empty[0][1]);
            if (grew) rescale(alpha);
            clear_tail(split, block + 1, 1);
            issue_own(probs, 1);
            note_top(s);
            wgmma_wait<0>();
            wgmma_pin(o_);
            release(smem_.empty[1][0]);
            rounds_.advance(1);
        }
        if (!__any_sync(0xffffffffu, block < split.blocks)) return;
        take<0>(split, block);
        wgmma_wait<0>();
        wgmma_pin(o_);
        release(smem_.empty[0][1]);
    }

    OA_DEVICE void wait_panel(int buffer, int panel) const {
        mbarrier_wait(smem_addr_of(&smem_.full[buffer][panel]), rounds_.parity(buffer));
    }
    // Panels that are brought together, the first one of them and the number; each by itself where TMA brings them.
    OA_DEVICE void wait_together(int buffer, int first) const {
        wait_panel(buffer, first);
        // Copies of threads are announced by the copies themselves; converted rows are fenced by those who write them.
        if constexpr (Config::kFormat == kRows16 && !Config::kByMaps) fence_proxy_async();
    }
    // The panels of this warpgroup's half of V. Not needed: without it 64 heads took 2 % longer.
    OA_DEVICE void wait_full(int buffer) const {
#pragma unroll
        for (int n = 0; n < Config::kHalfPanels; n += Config::kTogether)
            wait_together(buffer, kOwn * Config::kHalfPanels + n);
    }
    OA_DEVICE void release(uint64& bar) const { arrive_for_warp(bar, lane_); }
    // TMA brings whole chunks, and leaves what is behind them: rows that are no keys of the split would be NaN times 0.
    OA_DEVICE void clear_tail(const LatentSplit& split, int32 block, int buffer) const {
        const int32 rows = split.end - split.begin - block * Config::kKeys;
        if (!Config::kByMaps || rows >= Config::kKeys) return;
        const uint32 to = smem_addr_of(smem_.k[buffer]) + kOwn * Config::kHalfPanels * kPanelBytes + rows * 128;
        for (int32 i = int32(threadIdx.x) & 127; i < (Config::kKeys - rows) * 8; i += 128)
#pragma unroll
            for (int panel = 0; panel < Config::kHalfPanels; ++panel)
                store_shared4(to + panel * kPanelBytes + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
        named_barrier_sync(kAlone + kOwn, 128);
    }

    // S = Q K^T of a block, asynchronous.
    template <int kBuffer>
    OA_DEVICE void issue_scores(float (&s)[kScores]) const {
        wgmma_discard(s);
        wgmma_fence();
        issue_half<kBuffer, 0>(s);
        issue_half<kBuffer, 1>(s);
        wgmma_commit();
        wgmma_pin(s);
    }
    template <int kBuffer, int kHalf>
    OA_DEVICE void issue_half(float (&s)[kScores]) const {
#pragma unroll
        for (int n = 0; n < Config::kHalfPanels + kHalf; ++n) {
            const int panel = n == Config::kHalfPanels ? Config::kPanels - 1 : first_panel<Config>(kBuffer, kHalf) + n;
            // The last panel of those that threads bring comes with those before it.
            if (n % Config::kTogether == 0 && (Config::kByMaps || n < Config::kHalfPanels))
                wait_together(kBuffer, panel);
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const uint32 at = panel * kPanelBytes + step * 32;
                Products::ss(s, q_.at(at), k_.at(kBuffer * kBlockBytes + at), kHalf + n + step != 0);
            }
        }
    }
    // What is known of a block's scores before they are there.
    struct Extras {
        float factor;  // to exponents of base 2
        int32 kinds;
        uint32 listed[2];  // keys that are numbers of rows, a bit each
        uint32 place;  // where the lane stores P
    };
    enum : int32 { kCapped = 1, kHidden = 2, kUnlisted = 4 };
    OA_DEVICE uint32 place_of_probabilities() const {
        const int32 lane = in_register(int32(threadIdx.x)) & 127, row = lane >> 5 << 4 | (lane & 15);
        return smem_addr_of(smem_.k[kOwn]) + (Config::kPanels - 1) * kPanelBytes + row * 128 +
               (((lane >> 4 & 1) ^ (lane & 7)) << 4);
    }
    OA_DEVICE bool is_capped() const { return p_.softcap > 0.0f || !(factor_ > 0.0f); }
    OA_DEVICE Extras extras_of(const LatentSplit& split, int32 block) const {
        Extras x{factor_, is_capped() ? kCapped : 0, {0, 0}, place_of_probabilities()};
        const int32 first = split.begin + block * Config::kKeys;
        // Every row sees the keys before this one, but for the window.
        const int32 seen_by_all = min_of(split.seq_len - split.queries.count + 1, split.end);
        const bool is_behind = first + Config::kKeys > seen_by_all;
        if (is_behind || (p_.window_left >= 0 && first < split.seq_len - 1 - p_.window_left)) x.kinds |= kHidden;
        if (!Config::kByMaps && params_.lists_rows != 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                x.listed[i] = __ballot_sync(0xffffffffu, smem_.listed[block & 1][32 * i + lane_] != 0);
            if ((x.listed[0] & x.listed[1]) != ~0u) x.kinds |= kUnlisted;
        }
        // In registers from here on: sunk behind the wait for the scores, they would hold up what follows it.
        asm volatile("" : "+f"(x.factor), "+r"(x.kinds), "+r"(x.listed[0]), "+r"(x.listed[1]), "+r"(x.place));
        return x;
    }
    // S that is there: scores that no positive factor makes exponents become such exponents; keys that a row does not
    // see are -inf.
    OA_DEVICE void finish_scores(float (&s)[kScores], const LatentSplit& split, int32 block, Extras& x) const {
        wgmma_pin(s);
        if (block + 2 >= split.blocks) release(smem_.q_empty);
        if (__any_sync(0xffffffffu, x.kinds == 0)) return;
        if (x.kinds & kCapped) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) s[i] *= x.factor;
            if (p_.softcap > 0.0f) {
                const float inverse = kLn2 / p_.softcap, back = p_.softcap * kLog2e;
#pragma unroll
                for (int i = 0; i < kScores; ++i) s[i] = back * tanh_exp2(s[i] * inverse);
            }
            x.factor = 1.0f;
        }
        if (x.kinds & kUnlisted) hide_unlisted(s, x);
        if (x.kinds & kHidden) mask(s, split, split.begin + block * Config::kKeys);
    }
    // Keys that are numbers of no row.
    OA_DEVICE void hide_unlisted(float (&s)[kScores], const Extras& x) const {
#pragma unroll
        for (int n = 0; n < Config::kKeys / 8; ++n) {
            const uint32 two = x.listed[n / 4] >> (8 * (n & 3) + 2 * (lane_ & 3));
            if ((two & 1) == 0) s[4 * n] = s[4 * n + 2] = neg_inf();
            if ((two & 2) == 0) s[4 * n + 1] = s[4 * n + 3] = neg_inf();
        }
    }
    OA_DEVICE void mask(float (&s)[kScores], const LatentSplit& split, int32 first) const {
#pragma unroll
        for (int n = 0; n < Config::kKeys / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int32 key = first + 8 * n + 2 * (lane_ & 3) + x;
                    const bool hidden = key >= min_of(ends_[r], split.end) ||
                                        (p_.window_left >= 0 && int64(key) < int64(ends_[r]) - 1 - p_.window_left);
                    if (hidden) s[4 * n + 2 * r + x] = neg_inf();
                }
    }

    // Whether P, of which a lane has these sums, is not too large: then the base may stay. NaN does not fit.
    OA_DEVICE static bool fits(const float (&sum)[2]) {
        constexpr float kMost = 256.0f;  // half precision has as much
        return __all_sync(0xffffffffu, sum[0] <= kMost && sum[1] <= kMost);
    }
    // The base becomes the maximum, where that is above it; returns whether O has to follow, by `alpha`.
    OA_DEVICE bool raise(const float (&s)[kScores], float factor, float (&alpha)[2]) {
        constexpr float kSlack = kMaximumFirst ? 8.0f : 0.0f;
        float top[2];
        bool grew = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int n = 4; n < kScores; n += 4) top[r] = fmaxf(top[r], fmaxf(s[n + 2 * r], s[n + 2 * r + 1]));
            if (kMaximumFirst) top_[r] = fmaxf(top_[r], top[r]);
            top[r] *= factor;
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
            grew |= top[r] - m_[r] > kSlack;
        }
        if (!__any_sync(0xffffffffu, grew)) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) move_to(r, fmaxf(m_[r], top[r]), alpha[r]);
        return true;
    }
    // The largest score, where it is wanted: beside products, as nobody waits for it.
    OA_DEVICE void note_top(const float (&s)[kScores]) {
        if (kMaximumFirst || params_.row_max == nullptr) return;
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int n = 0; n < kScores; n += 4) top_[r] = fmaxf(top_[r], fmaxf(s[n + 2 * r], s[n + 2 * r + 1]));
    }
    OA_DEVICE void move_to(int r, float m, float& alpha) {
        alpha = exp2_approx(m_[r] - m);
        m_[r] = m;
        l_[r] *= alpha;
    }
    // Tells the other warpgroup of a base that rose, and of the first one of a split.
    OA_DEVICE void note_base() const {
        if ((lane_ & 3) != 0) return;
        smem_.m[kOwn][row_] = m_[0];
        smem_.m[kOwn][row_ + 8] = m_[1];
    }
    // Takes over the other warpgroup's base, which may be of blocks before; returns whether O has to follow.
    OA_DEVICE bool follow(float (&alpha)[2]) {
        const float m[2] = {fmaxf(m_[0], smem_.m[1 - kOwn][row_]), fmaxf(m_[1], smem_.m[1 - kOwn][row_ + 8])};
        if (!__any_sync(0xffffffffu, m[0] != m_[0] || m[1] != m_[1])) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) move_to(r, m[r], alpha[r]);
        return true;
    }
    OA_DEVICE void rescale(const float (&alpha)[2]) {
#pragma unroll
        for (int i = 0; i < kOutput; ++i) o_[i] *= alpha[i >> 1 & 1];
    }

    // P of a block, by a base that the maximum is not far above: whether it is shows in the sums of P. Then, and for
    // the first block of a split, the base becomes the maximum. Returns whether O has to follow.
    OA_DEVICE bool soften(const float (&s)[kScores], const Extras& x, uint32 (&probs)[Config::kKeys / 16][4],
                          float (&alpha)[2], bool first) {
        bool grew = false, sure = kMaximumFirst || first;
        float sum[2];
#pragma unroll 1
        for (bool again = false;; again = sure = true) {
            if (sure) {
                grew = raise(s, x.factor, alpha);
                // Ahead of the barrier in `share`: racecheck does not follow bar.arrive.
                if (grew || first) note_base();
            }
            share(s, x, probs, sum, again);
            if (sure || fits(sum)) break;
        }
        l_[0] += sum[0], l_[1] += sum[1];
        return grew;
    }
    // P, as left operand of a product, whose layout is that of S; and to shared memory, where the last panel of the
    // buffer was, once all four warps' products have read that. again: they have.
    OA_DEVICE void share(const float (&s)[kScores], const Extras& x, uint32 (&probs)[Config::kKeys / 16][4],
                         float (&sum)[2], bool again) {
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 8 * step + 4 * (i >> 1) + 2 * (i & 1), r = i & 1;
                const float p0 = exp2_approx(fmaf(s[at], x.factor, -m_[r]));
                const float p1 = exp2_approx(fmaf(s[at + 1], x.factor, -m_[r]));
                sum[r] += p0 + p1;
                probs[step][i] = pack2(typename Config::Io{}, p0, p1);
            }
            if (step == 0 && !again) named_barrier_sync(kAlone + kOwn, 128);
            stmatrix_x4(x.place ^ step << 5, probs[step]);
        }
    }

    // O of the columns that one product adds to.
    using PartOutput = float[kPartOutput];
    OA_DEVICE PartOutput& output(int part) {
        if constexpr (Config::kPvParts == 1)
            return o_;
        else
            return *reinterpret_cast<PartOutput*>(&o_[part * kPartOutput]);
    }

    // O += P V of this warpgroup's own P, and of the other's.
    OA_DEVICE void issue_own(const uint32 (&probs)[Config::kKeys / 16][4], int buffer) {
        wgmma_pin(o_);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step)
#pragma unroll
            for (int part = 0; part < Config::kPvParts; ++part)
                Pv::template rs<kMnMajor>(output(part), probs[step],
                                          v_.at(buffer * kBlockBytes + part * kPartBytes + step * 16 * 128), 1);
        wgmma_commit();
        wgmma_pin(o_);
    }
    OA_DEVICE void issue_shared(int buffer) {
        wgmma_pin(o_);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step)
#pragma unroll
            for (int part = 0; part < Config::kPvParts; ++part)
                Pv::template ss<kKMajor, kMnMajor>(
                    output(part), k_.at(buffer * kBlockBytes + (Config::kPanels - 1) * kPanelBytes + step * 32),
                    v_.at(buffer * kBlockBytes + part * kPartBytes + step * 16 * 128), 1);
        wgmma_commit();
        wgmma_pin(o_);
    }

    // Of all keys O and LSE, else a partial result. which: of the two places for denominators.
    OA_DEVICE void end(const LatentSplit& split, int which) {
        const bool wants_maximum = params_.row_max != nullptr;
        float part[2] = {l_[0], l_[1]};
        sum_of_quad(part);
        if ((lane_ & 3) == 0) smem_.l[which][kOwn][row_] = part[0], smem_.l[which][kOwn][row_ + 8] = part[1];
        if (wants_maximum) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                top_[r] = fmaxf(top_[r], __shfl_xor_sync(0xffffffffu, top_[r], 1));
                top_[r] = fmaxf(top_[r], __shfl_xor_sync(0xffffffffu, top_[r], 2));
                if ((lane_ & 3) == 0) smem_.top[which][kOwn][row_ + 8 * r] = top_[r];
            }
        }
        named_barrier_sync(kSplitEnd, 256);
        float l[2], scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 row = row_ + 8 * r;
            l[r] = smem_.l[which][0][row] + smem_.l[which][1][row];
            // The base of exponents is not the maximum, but that is wanted.
            if (wants_maximum) {
                const float factor = is_capped() ? 1.0f : factor_;
                const float top = fmaxf(smem_.top[which][0][row], smem_.top[which][1][row]) * factor;
                move_to(r, fmaxf(m_[r], top), scale[r]);
                l[r] *= scale[r];
            }
        }
        if (wants_maximum) rescale(scale);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 flat = int32(blockIdx.x) * Config::kRows + row_ + 8 * r, token = token_of(p_, flat);
            const bool exists = token < split.queries.count;
            const int32 head = flat - token * p_.group;
            const int32 column = kOwn * (Config::kHeadDimV / 2);
            if (split.slot < 0) {
                const float sink = exists ? sink_log2<typename Config::Io>(p_.sinks, p_.sinks_kind, head) : neg_inf();
                const RowResult result = finish_row(m_[r], l[r], sink);
                if (kOwn == 0 && (lane_ & 3) == 0 && exists)
                    note_row(params_, split.sequence, head, split.queries.first, token, m_[r], result.lse);
                uint16* to = p_.o + split.sequence * p_.o_stride_b + (split.queries.first + token) * p_.o_stride_s +
                             head * p_.o_stride_h + column;
                store_accumulators<typename Config::Io>(to, o_, r, result.o_scale, lane_, exists);
            } else {
                const int64 slot_row = int64(split.slot) * params_.slot_rows + flat;
                if (kOwn == 0 && (lane_ & 3) == 0 && exists)
                    *reinterpret_cast<float2*>(p_.partial_ml + 2 * slot_row) = make_float2(m_[r], l[r]);
                float* to = p_.partial_o + slot_row * Config::kHeadDimV + column + 4 * (lane_ & 3);
                if (exists)
#pragma unroll
                    for (int n = 0; n < kOutput / 4; n += 2)
                        *reinterpret_cast<float4*>(to + 8 * n) = pair_of_blocks(&o_[4 * n], r);
            }
        }
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    LatentStorage<Config>& smem_;
    const int32 lane_, row_;  // the lane's first row
    const WgmmaDescriptor q_, k_, v_;
    Rounds rounds_;
    float factor_;  // of scores, to exponents of base 2
    float m_[2], l_[2];  // the base of exponents, the lane's part of the denominator
    float top_[2];  // the largest of the lane's scores
    int32 ends_[2];  // keys that a row sees end here
    float o_[kOutput];
};
