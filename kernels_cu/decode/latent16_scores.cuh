// The warpgroup of mla_decode_rows16_sm90 that has the scores: Q in its registers, S, softmax, P.
#pragma once
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/latent16_storage.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/uniform.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "ptx/wgmma_fp16.cuh"

template <typename Config>
class Latent16Scores {
    using Io = typename Config::Io;
    using Products = Wgmma<Io, Config::kKeys>;
    static constexpr uint32 kBlockBytes = Latent16Storage<Config>::kBlockBytes;
    static constexpr int kScores = Config::kKeys / 2;
    enum : int32 { kCapped = 1, kMasked = 2 };  // what scores of a block need besides
    static constexpr int kSteps = Config::kHeadDim / 16, kHeld = Config::kHeadDimV / 16 - 1;  // of 16 channels
    static constexpr float kPlainCap = 256.0f;  // up to which an error of 2e-7 of tanh is one of 1e-4 of an exponent
    static constexpr int kAhead = 26;  // products of S after which P V of the block before may begin

  public:
    OA_DEVICE Latent16Scores(const MlaDecodeParams& p, Latent16Storage<Config>& smem)
        : params_(p),
          p_(p.decode),
          smem_(smem),
          lane_(int32(threadIdx.x) & 31),
          warp_(__shfl_sync(0xffffffffu, int32(threadIdx.x) >> 5, 0)) {}

    OA_DEVICE void run() {
        for (uint32 number = 0;; ++number) {
            wait_for_split(smem_, number);
            if (!__any_sync(0xffffffffu, smem_.splits[number & 3].blocks > 0)) return;
            load_queries(smem_.splits[number & 3]);
            blocks(number);
        }
    }

  private:
    // The lane's; worked out where it is needed, as registers are scarce.
    OA_DEVICE static int32 first_row() {
        const int32 thread = in_register(int32(threadIdx.x));
        return thread >> 5 << 4 | (thread >> 2 & 7);
    }

    // Q of a split, from the ring, where it has the layout of a block of keys. Rows that the sequence has not become
    // zeros: a NaN there would change what P of other rows is rounded to.
    OA_DEVICE void load_queries(const LatentSplit& split) {
        const int32 thread = in_register(int32(threadIdx.x));  // of the first warpgroup
        const uint32 block = smem_addr_of(smem_.ring[0]) + ring_.buffer * kBlockBytes;
        mbarrier_wait(smem_addr_of(&smem_.full[ring_.buffer]), ring_.parity);
        const int32 row = thread >> 5 << 4 | (thread & 15);
        const uint32 place = block + row * 128 + (((thread >> 4 & 1) ^ (thread & 7)) << 4);
#pragma unroll
        for (int step = 0; step < kHeld; ++step)
            ldmatrix_x4(q_[step], (place ^ (step % 4) << 5) + step / 4 * kPanelBytes);
        // What has no registers: the last panel, and the 16 channels before it.
        uint4 x[5];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            x[i] = load_shared4(block + (Config::kPanels - 1) * kPanelBytes + thread * 16 + i * 2048);
        const int32 half = thread >> 1, chunk = thread & 1;
        x[4] = load_shared4(block + (Config::kPanels - 2) * kPanelBytes + half * 128 + ((6 + chunk ^ (half & 7)) << 4));
        if (!has_row<Config>(p_, split, Config::kRows - 1)) {
#pragma unroll
            for (int i = 0; i < 5; ++i)
                if (!has_row<Config>(p_, split, i < 4 ? (thread >> 3) + 16 * i : half)) x[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (!has_row<Config>(p_, split, first_row() + 8 * r))
#pragma unroll
                    for (int step = 0; step < kHeld; ++step) q_[step][r] = q_[step][2 + r] = 0;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) store_shared4(smem_addr_of(smem_.q_last) + thread * 16 + i * 2048, x[i]);
        store_shared4(smem_addr_of(smem_.q_step) + half * 32 + ((chunk ^ (half >> 2 & 1)) << 4), x[4]);
        fence_proxy_async();
#pragma unroll
        for (int r = 0; r < 2; ++r) m_[r] = kLowest, l_[r] = 0.0f;
        // For the eight warps that have O, which pass over this block of the ring.
        arrive_for_warp(smem_.empty[ring_.buffer], lane_);
        arrive_for_warp(smem_.empty[ring_.buffer], lane_);
        // As after each block, so that all phases of these are counted by blocks of the ring; nobody waits for this
        // one.
        arrive_for_warp(smem_.ready[ring_.buffer], lane_);
        arrive_for_warp(smem_.last_read, lane_);
        ring_.advance();
        ++stream_;
        named_barrier_sync(kScoresOnly, 128);
    }

    OA_DEVICE void blocks(uint32 number) {
        const LatentSplit& split = smem_.splits[number & 3];
        float s[kScores];
        const int32 count = uniform(split.blocks);
        for (int32 block = 0;; ++block) {
            issue_scores(s, block > 0);
            // While products run: what the softmax has to know.
            const bool masked = __any_sync(0xffffffffu, is_masked(split, block));
            float factor = p_.softmax_scale * kLog2e;
            int32 rare = (p_.softcap > 0.0f || !(factor > 0.0f) ? kCapped : 0) | (masked ? kMasked : 0);
            // In registers from here on: sunk behind the wait, they would hold up what follows it.
            asm volatile("" : "+f"(factor), "+r"(rare));
            wgmma_wait<0>();
            wgmma_pin(s);
            arrive_for_warp(smem_.last_read, lane_);
            if (rare & kCapped) cap(s, factor);
            if (rare & kMasked) mask(s, split, split.begin + block * Config::kKeys);
            soften(s, factor, place_of_probabilities(), block > 0);
            before_ = ring_.buffer;
            ring_.advance();
            ++stream_;
            if (block + 1 >= count) break;
        }
        arrive_for_warp(smem_.ready[before_], lane_);
        end(split, number);
        arrive_for_warp(smem_.scale_ready, lane_);
    }

    // S = Q K^T of a block, asynchronous. Issuing products takes as long as they do, so that what comes between them
    // comes when most of them are done.
    OA_DEVICE void issue_scores(float (&s)[kScores], bool follows) const {
        const WgmmaDescriptor k = wgmma_descriptor(smem_addr_of(smem_.ring[0]) + ring_.buffer * kBlockBytes, 16, 1024);
        const WgmmaDescriptor spare = wgmma_descriptor<32>(smem_addr_of(smem_.q_step), 16, 256);
        const WgmmaDescriptor last = wgmma_descriptor(smem_addr_of(smem_.q_last), 16, 1024);
        mbarrier_wait(smem_addr_of(&smem_.full[ring_.buffer]), ring_.parity);
        wgmma_discard(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step == kAhead && follows) arrive_for_warp(smem_.ready[before_], lane_);
            const uint64 keys = k.at(step / 4 * kPanelBytes + step % 4 * 32);
            if (step < kHeld) {
                Products::rs(s, q_[step], keys, step != 0);
            } else {
                Products::ss(s, step == kHeld ? spare.at(0) : last.at(step % 4 * 32), keys, 1);
            }
        }
        wgmma_commit();
        wgmma_pin(s);
    }

    // Whether rows see less than all keys of a block.
    OA_DEVICE bool is_masked(const LatentSplit& split, int32 block) const {
        const int32 first = split.begin + block * Config::kKeys;
        // Every row sees the keys before this one, but for the window.
        const int32 seen_by_all = min_of(split.seq_len - split.queries.count + 1, split.end);
        return first + Config::kKeys > seen_by_all ||
               (p_.window_left >= 0 && first < split.seq_len - 1 - p_.window_left);
    }
    // Scores that no positive factor makes exponents of base 2 become such exponents.
    OA_DEVICE void cap(float (&s)[kScores], float& factor) const {
        const float back = p_.softcap * kLog2e, inverse = rcp_approx(p_.softcap);
        if (p_.softcap > 0.0f && p_.softcap <= kPlainCap) {
            // softcap tanh(x) = softcap - 2 softcap / (1 + exp(2 x))
            const float to_exponent = 2.0f * factor * inverse;
#pragma unroll
            for (int i = 0; i < kScores; ++i)
                s[i] = fmaf(-2.0f * back, rcp_approx(1.0f + exp2_approx(s[i] * to_exponent)), back);
        } else {
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                s[i] *= factor;
                if (p_.softcap > 0.0f) s[i] = back * tanh_exp2(s[i] * kLn2 * inverse);
            }
        }
        factor = 1.0f;
    }
    OA_DEVICE void mask(float (&s)[kScores], const LatentSplit& split, int32 first) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 flat = int32(blockIdx.x) * Config::kRows + first_row() + 8 * r;
            const int32 token = min_of(token_of(p_, flat), split.queries.count - 1);
            const int32 own_end = split.seq_len - split.queries.count + token + 1, end = min_of(own_end, split.end);
            const int32 begin = p_.window_left < 0 ? 0 : max_of(own_end - 1 - p_.window_left, 0);
#pragma unroll
            for (int n = 0; n < Config::kKeys / 8; ++n)
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int32 key = first + 8 * n + 2 * (lane_ & 3) + x;
                    if (key >= end || key < begin) s[4 * n + 2 * r + x] = neg_inf();
                }
        }
    }

    // P of a block to shared memory. Exponents follow a base that the row's maximum is not far above: whether it is
    // shows in the sum of what they give. Then, and where the caller wants the maximum, P is computed with that.
    OA_DEVICE void soften(const float (&s)[kScores], float factor, uint32 place, bool follows) {
        constexpr float kMost = 256.0f;  // of a lane's keys; half precision has as much
        const bool wants_maximum = params_.row_max != nullptr;
        if (wants_maximum) raise(s, factor, follows);
        float sum[2];
#pragma unroll 1
        for (int pass = 0; pass < 2; ++pass) {
            sum[0] = sum[1] = 0.0f;
            share(s, factor, place, sum);
            // Not of NaN: a row that has one is lost, and others need not know.
            if (wants_maximum || !__any_sync(0xffffffffu, sum[0] > kMost || sum[1] > kMost)) break;
            if (pass == 0) raise(s, factor, follows);
        }
        l_[0] += sum[0], l_[1] += sum[1];
    }
    // The base becomes the maximum; O, if there is one, has to follow then.
    OA_DEVICE void raise(const float (&s)[kScores], float factor, bool follows) {
        float top[2];
        bool grew = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int n = 4; n < kScores; n += 4) top[r] = fmaxf(top[r], fmaxf(s[n + 2 * r], s[n + 2 * r + 1]));
            top[r] *= factor;
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
            grew |= top[r] > m_[r];
        }
        if (!__any_sync(0xffffffffu, grew)) return;
        if (follows) mbarrier_wait(smem_addr_of(&smem_.alpha_read[warp_]), times_grown_ & 1 ^ 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float m = fmaxf(m_[r], top[r]), alpha = exp2_approx(m_[r] - m);
            m_[r] = m;
            l_[r] *= alpha;
            if (follows && (lane_ & 3) == 0) smem_.alpha[first_row() + 8 * r] = alpha;
        }
        if (!follows) return;
        ++times_grown_;
        if (lane_ == 0) smem_.grown[ring_.buffer][warp_] = int32(stream_);
    }

    // P, as left operand of a product, to where the last panel of the block was, once all warps' products have read
    // that.
    OA_DEVICE void share(const float (&s)[kScores], float factor, uint32 place, float (&sum)[2]) const {
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
            uint32 probs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = 2 * step + (i >> 1), r = i & 1;
                const float p0 = exp2_approx(fmaf(s[4 * n + 2 * r], factor, -m_[r]));
                const float p1 = exp2_approx(fmaf(s[4 * n + 2 * r + 1], factor, -m_[r]));
                sum[r] += p0 + p1;
                probs[i] = pack2(Io{}, p0, p1);
            }
            if (step == 0) mbarrier_wait(smem_addr_of(&smem_.last_read), stream_ & 1);
            stmatrix_x4(place ^ step << 5, probs);
        }
    }
    OA_DEVICE uint32 place_of_probabilities() const {
        const int32 lane = in_register(int32(threadIdx.x)) & 127, row = lane >> 5 << 4 | (lane & 15);
        return smem_addr_of(smem_.ring[0]) + ring_.buffer * kBlockBytes + (Config::kPanels - 1) * kPanelBytes +
               row * 128 + (((lane >> 4 & 1) ^ (lane & 7)) << 4);
    }

    // What O of all keys is multiplied with, and LSE; else what a partial result needs besides O.
    OA_DEVICE void end(const LatentSplit& split, uint32 number) {
        sum_of_quad(l_);
        mbarrier_wait(smem_addr_of(&smem_.scale_read), number & 1 ^ 1);
        if ((lane_ & 3) != 0) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 own = first_row() + 8 * r;
            if (!has_row<Config>(p_, split, own)) continue;
            const int32 flat = int32(blockIdx.x) * Config::kRows + own;
            if (split.slot < 0) {
                float scale = l_[r] == 0.0f ? 0.0f : rcp_approx(l_[r]);
                if (p_.sinks_kind != kSinksNone || p_.lse != nullptr || params_.row_max != nullptr)
                    note(split, flat, m_[r], l_[r], scale);
                smem_.scale[own] = scale;
            } else {
                const int64 row = int64(split.slot) * params_.slot_rows + flat;
                *reinterpret_cast<float2*>(p_.partial_ml + 2 * row) = make_float2(m_[r], l_[r]);
            }
        }
    }
    // LSE and the largest score of a row; with a sink another scale.
    OA_DEVICE void note(const LatentSplit& split, int32 flat, float m, float l, float& scale) const {
        const int32 token = token_of(p_, flat), head = flat - token * p_.group;
        const float sink = sink_log2<Io>(p_.sinks, p_.sinks_kind, head);
        const RowResult result = finish_row(m, l, sink);
        if (sink != neg_inf()) scale = result.o_scale;
        note_row(params_, split.sequence, head, split.queries.first, token, m, result.lse);
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Latent16Storage<Config>& smem_;
    const int32 lane_, warp_;
    RingPlace ring_;
    uint32 before_ = 0;  // the buffer of the block before
    uint32 stream_ = 0, times_grown_ = 0;  // blocks of the ring; those whose alpha others have to read
    float m_[2], l_[2];
    uint32 q_[kHeld][4];
};
