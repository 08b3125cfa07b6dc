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
            m_[r] = kLowest, l_[r] = 0.0f;
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
            wgmma_wait<0>();
            wgmma_pin(s);
            wgmma_pin(o_);
            finish_scores(s, split, block);
            const bool grew = raise(s, alpha);
            note_maximum(0);
            probabilities(s, probs);
            share(probs, 0);
            named_barrier_arrive(kEvenP, 256);
            if (grew) rescale(alpha);
            clear_tail(split, block, 0);
            issue_own(probs, 0);
            wgmma_wait<0>();
            wgmma_pin(o_);
            release(smem_.empty[0][0]);
            rounds_.advance(0);
            if (!__any_sync(0xffffffffu, block + 1 < split.blocks)) return;
            take_odd(split, block + 1);
            if (!__any_sync(0xffffffffu, block + 2 < split.blocks)) break;
        }
        wgmma_wait<0>();
        wgmma_pin(o_);
        release(smem_.empty[1][1]);
    }
    OA_DEVICE void take_odd(const LatentSplit& split, int32 block) {
        float alpha[2];
        named_barrier_sync(kOddP, 256);
        if (follow(1, alpha)) rescale(alpha);
        wait_full(1);
        clear_tail(split, block, 1);
        issue_shared(1);
        rounds_.advance(1);
    }

    // Warpgroup 1: S and P of odd blocks, and of O's right half all.
    OA_DEVICE void odd_blocks(const LatentSplit& split) {
        float s[kScores], alpha[2];
        int32 block = 0;
        for (; __any_sync(0xffffffffu, block + 1 < split.blocks); block += 2) {
            uint32 probs[Config::kKeys / 16][4];
            issue_scores<1>(s);
            wgmma_wait<0>();
            finish_scores(s, split, block + 1);
            take_even(split, block);
            const bool grew = raise(s, alpha);
            note_maximum(1);
            probabilities(s, probs);
            share(probs, 1);
            named_barrier_arrive(kOddP, 256);
            wgmma_wait<0>();
            wgmma_pin(o_);
            release(smem_.empty[0][1]);
            if (grew) rescale(alpha);
            clear_tail(split, block + 1, 1);
            issue_own(probs, 1);
            wgmma_wait<0>();
            wgmma_pin(o_);
            release(smem_.empty[1][0]);
            rounds_.advance(1);
            rounds_.advance(0);
        }
        if (!__any_sync(0xffffffffu, block < split.blocks)) return;
        take_even(split, block);
        wgmma_wait<0>();
        wgmma_pin(o_);
        release(smem_.empty[0][1]);
        rounds_.advance(0);
    }
    OA_DEVICE void take_even(const LatentSplit& split, int32 block) {
        float alpha[2];
        named_barrier_sync(kEvenP, 256);
        if (follow(0, alpha)) rescale(alpha);
        wait_full(0);
        clear_tail(split, block, 0);
        issue_shared(0);
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
    // The panels of this warpgroup's half of V.
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
            // The last panel of those that threads bring comes with those before it, or by copies that nobody fenced.
            if (n % Config::kTogether == 0 && (Config::kByMaps || n < Config::kHalfPanels))
                wait_together(kBuffer, panel);
            if (Config::kCopiesLast && n == Config::kHalfPanels) wait_panel(kBuffer, panel), fence_proxy_async();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const uint32 at = panel * kPanelBytes + step * 32;
                Products::ss(s, q_.at(at), k_.at(kBuffer * kBlockBytes + at), kHalf + n + step != 0);
            }
        }
    }
    // S that is there in base-2 units; keys that a row does not see are -inf.
    OA_DEVICE void finish_scores(float (&s)[kScores], const LatentSplit& split, int32 block) const {
        wgmma_pin(s);
        if (block + 2 >= split.blocks) release(smem_.q_empty);
        const int32 first = split.begin + block * Config::kKeys;
        const float c = p_.softmax_scale * kLog2e * common_scale();
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] *= c;
        if (p_.softcap > 0.0f) {
            const float inverse = kLn2 / p_.softcap, back = p_.softcap * kLog2e;
#pragma unroll
            for (int i = 0; i < kScores; ++i) s[i] = back * tanh_exp2(s[i] * inverse);
        }
        // Every row sees the keys before this one, but for the window.
        const int32 seen_by_all = min_of(split.seq_len - split.queries.count + 1, split.end);
        if (!Config::kByMaps && params_.lists_rows != 0) hide_unlisted(s, block & 1);
        const bool is_behind = first + Config::kKeys > seen_by_all;
        if (is_behind || (p_.window_left >= 0 && first < split.seq_len - 1 - p_.window_left)) mask(s, split, first);
    }
    // Keys that are numbers of no row.
    OA_DEVICE void hide_unlisted(float (&s)[kScores], int buffer) const {
        const uint8* listed = smem_.listed[buffer] + 2 * (lane_ & 3);
#pragma unroll
        for (int n = 0; n < Config::kKeys / 8; ++n) {
            const uint32 two = *reinterpret_cast<const uint16*>(listed + 8 * n);
            if ((two & 0xff) == 0) s[4 * n] = s[4 * n + 2] = neg_inf();
            if (two < 0x100) s[4 * n + 1] = s[4 * n + 3] = neg_inf();
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

    // Raises the maximum where a score is far above it; returns whether O has to follow, by `alpha`.
    OA_DEVICE bool raise(const float (&s)[kScores], float (&alpha)[2]) {
        // As `OnlineSoftmax`; the caller may want the maximum itself.
        const float slack = params_.row_max != nullptr ? 0.0f : 8.0f;
        float top[2];
        bool grew = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int n = 4; n < kScores; n += 4) top[r] = fmaxf(top[r], fmaxf(s[n + 2 * r], s[n + 2 * r + 1]));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
            grew |= top[r] - m_[r] > slack;
        }
        if (!__any_sync(0xffffffffu, grew)) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) move_to(r, fmaxf(m_[r], top[r]), alpha[r]);
        return true;
    }
    OA_DEVICE void move_to(int r, float m, float& alpha) {
        alpha = exp2_approx(m_[r] - m);
        m_[r] = m;
        l_[r] *= alpha;
    }
    // Tells the other warpgroup.
    OA_DEVICE void note_maximum(int which) const {
        if ((lane_ & 3) != 0) return;
        smem_.m[which][row_] = m_[0];
        smem_.m[which][row_ + 8] = m_[1];
    }
    // Takes over the other warpgroup's maximum; returns whether O has to follow.
    OA_DEVICE bool follow(int which, float (&alpha)[2]) {
        const float m[2] = {smem_.m[which][row_], smem_.m[which][row_ + 8]};
        if (!__any_sync(0xffffffffu, m[0] != m_[0] || m[1] != m_[1])) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) move_to(r, m[r], alpha[r]);
        return true;
    }
    OA_DEVICE void rescale(const float (&alpha)[2]) {
#pragma unroll
        for (int i = 0; i < kOutput; ++i) o_[i] *= alpha[i >> 1 & 1];
    }

    // P, as left operand of a product: the layout of S is that of P.
    OA_DEVICE void probabilities(const float (&s)[kScores], uint32 (&probs)[Config::kKeys / 16][4]) {
#pragma unroll
        for (int n = 0; n < Config::kKeys / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float p0 = exp2_approx(s[4 * n + 2 * r] - m_[r]);
                const float p1 = exp2_approx(s[4 * n + 2 * r + 1] - m_[r]);
                l_[r] += p0 + p1;
                probs[n >> 1][2 * (n & 1) + r] = pack2(typename Config::Io{}, p0, p1);
            }
    }
    // To shared memory, where the last panel of the buffer was. All four warps' products have read that.
    OA_DEVICE void share(const uint32 (&probs)[Config::kKeys / 16][4], int buffer) const {
        named_barrier_sync(kAlone + kOwn, 128);
        const int32 warp_row = row_ - (lane_ >> 2) + (lane_ & 15);
        const uint32 to = smem_addr_of(smem_.k[buffer]) + (Config::kPanels - 1) * kPanelBytes + warp_row * 128;
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step)
            stmatrix_x4(to + (((2 * step + (lane_ >> 4)) ^ (lane_ & 7)) << 4), probs[step]);
        fence_proxy_async();
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
        sum_of_quad(l_);
        if ((lane_ & 3) == 0) smem_.l[which][kOwn][row_] = l_[0], smem_.l[which][kOwn][row_ + 8] = l_[1];
        named_barrier_sync(kSplitEnd, 256);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 flat = int32(blockIdx.x) * Config::kRows + row_ + 8 * r, token = token_of(p_, flat);
            const bool exists = token < split.queries.count;
            const int32 head = flat - token * p_.group;
            const float l = smem_.l[which][0][row_ + 8 * r] + smem_.l[which][1][row_ + 8 * r];
            const int32 column = kOwn * (Config::kHeadDimV / 2);
            if (split.slot < 0) {
                const float sink = exists ? sink_log2<typename Config::Io>(p_.sinks, p_.sinks_kind, head) : neg_inf();
                const RowResult result = finish_row(m_[r], l, sink);
                if (kOwn == 0 && (lane_ & 3) == 0 && exists)
                    note_row(params_, split.sequence, head, split.queries.first, token, m_[r], result.lse);
                uint16* to = p_.o + split.sequence * p_.o_stride_b + (split.queries.first + token) * p_.o_stride_s +
                             head * p_.o_stride_h + column;
                store_accumulators<typename Config::Io>(to, o_, r, result.o_scale, lane_, exists);
            } else {
                const int64 row = int64(split.slot) * params_.slot_rows + flat;
                if (kOwn == 0 && (lane_ & 3) == 0 && exists)
                    *reinterpret_cast<float2*>(p_.partial_ml + 2 * row) = make_float2(m_[r], l);
                float* to = p_.partial_o + row * Config::kHeadDimV + column + 4 * (lane_ & 3);
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
    float m_[2], l_[2];
    int32 ends_[2];  // keys that a row sees end here
    float o_[kOutput];
};
