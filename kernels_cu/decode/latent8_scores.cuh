// The warpgroup of mla_decode_rows8_sm90 that has the scores: Q in its registers, S, softmax, P.
#pragma once
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/latent8_storage.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "ptx/wgmma_fp16.cuh"

template <typename Config>
class Latent8Scores {
    using Io = typename Config::Io;
    using Products = Wgmma<Io, Config::kKeys>;
    static constexpr uint32 kBlockBytes = Latent8Storage<Config>::kBlockBytes;
    static constexpr int kScores = Config::kKeys / 2;
    enum : int32 { kCapped = 1, kMasked = 2, kListed = 4 };  // what scores of a block need besides
    static constexpr int kSteps = Config::kHeadDimV / 16, kHeld = kSteps - 5;  // of 16 channels

  public:
    OA_DEVICE Latent8Scores(const MlaDecodeParams& p, Latent8Storage<Config>& smem)
        : params_(p),
          p_(p.decode),
          smem_(smem),
          lane_(int32(threadIdx.x) & 31),
          warp_(__shfl_sync(0xffffffffu, int32(threadIdx.x) >> 5, 0)),
          row_(warp_ * 16 + (lane_ >> 2)) {}

    OA_DEVICE void run() {
        if (threadIdx.x == 0) publish(0);
        for (uint32 number = 0;; ++number) {
            wait_for_split(smem_, number);
            if (!__any_sync(0xffffffffu, split_of(smem_, number).blocks > 0)) return;
            load_queries(number);
            // Three ahead: where splits have one block each, the copies are so far ahead.
            if (threadIdx.x == 0)
                for (uint32 next = number == 0 ? 1 : number + 3; next <= number + 3; ++next) publish(next);
            blocks(number);
        }
    }

  private:
    // By the first thread: the next split.
    OA_DEVICE void publish(uint32 number) const {
        LatentSplit& split = split_of(smem_, number);
        if (!smem_.cursor.next(p_, Partition(smem_.chunks, p_), split)) split.blocks = 0;
        mbarrier_arrive(smem_addr_of(&smem_.split_ready[number % kSplitPlaces]));
    }

    // Q of a split: rows that the sequence has not are zeros. Four bytes a load, as the products want them: whatever
    // exchanged words between lanes would be more instructions, which come from far away once a split.
    OA_DEVICE void load_queries(uint32 number) {
        const LatentSplit& split = split_of(smem_, number);
        const uint16* from[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (query_row<Config>(p_, from[r], split, row_ + 8 * r)) {
                from[r] += 2 * (lane_ & 3);
#pragma unroll
                for (int step = 0; step < kHeld; ++step)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        q_[step][2 * half + r] = *reinterpret_cast<const uint32*>(from[r] + 16 * step + 8 * half);
            } else {
#pragma unroll
                for (int step = 0; step < kHeld; ++step) q_[step][r] = q_[step][2 + r] = 0;
            }
        }
        // The last two panels, and the 16 channels before them.
        const int32 thread = in_register(int32(threadIdx.x));
#pragma unroll
        for (int i = 0; i < 9; ++i) {
            const int32 own = i < 8 ? (thread >> 3) + 16 * (i & 3) : thread >> 1,
                        chunk = i < 8 ? thread & 7 : thread & 1;
            const uint16* row;
            uint4 x = make_uint4(0, 0, 0, 0);
            if (query_row<Config>(p_, row, split, own))
                x = *reinterpret_cast<const uint4*>(row + (i < 8 ? 16 * kHeld + 16 + i / 4 * 64 : 16 * kHeld) +
                                                    8 * chunk);
            const uint32 to =
                i < 8 ? smem_addr_of(smem_.q_last) + i / 4 * kPanelBytes + own * 128 + ((chunk ^ (own & 7)) << 4)
                      : smem_addr_of(smem_.q_step) + own * 32 + ((chunk ^ (own >> 2 & 1)) << 4);
            store_shared4(to, x);
        }
        fence_proxy_async();
        named_barrier_sync(kScoresOnly, 128);
#pragma unroll
        for (int r = 0; r < 2; ++r) m_[r] = kLowest, l_[r] = 0.0f;
    }

    OA_DEVICE void blocks(uint32 number) {
        const LatentSplit& split = split_of(smem_, number);
        float s[kScores];
        for (int32 block = 0;; ++block) {
            issue_scores(s);
            // While products run: what the softmax has to know, and what has to come before P of the block before.
            const bool last = __all_sync(0xffffffffu, block + 1 >= split.blocks);
            const bool masked = __any_sync(0xffffffffu, is_masked(split, block));
            const uint32 place = place_of_probabilities();
            float factor = p_.softmax_scale * kLog2e;
            int32 rare = (p_.softcap > 0.0f || !(factor > 0.0f) ? kCapped : 0) | (masked ? kMasked : 0) |
                         (is_unlisted() ? kListed : 0);
            // In registers from here on: sunk behind the wait, they would hold up what follows it.
            asm volatile("" : "+f"(factor), "+r"(rare));
            if (block > 0) fence_proxy_async();
            wgmma_wait<1>();
            if (block > 0) arrive_for_warp(smem_.ready[buffer_of(stream_ - 1)], lane_);
            wgmma_wait<0>();
            wgmma_pin(s);
            arrive_for_warp(smem_.last_read, lane_);
            if (rare & kCapped) cap(s, factor);
            if (rare & kMasked) mask(s, split, split.begin + block * Config::kKeys);
            if (rare & kListed) hide_unlisted(s);
            soften(s, factor, place, block > 0);
            ++stream_;
            if (last) break;
        }
        fence_proxy_async();
        end(split, number);
        __syncwarp();
        arrive_for_warp(smem_.ready[buffer_of(stream_ - 1)], lane_);
    }

    // S = Q K^T of a block, asynchronous, in two groups.
    OA_DEVICE void issue_scores(float (&s)[kScores]) const {
        const WgmmaDescriptor k =
            wgmma_descriptor(smem_addr_of(smem_.k[0]) + buffer_of(stream_) * kBlockBytes, 16, 1024);
        mbarrier_wait(smem_addr_of(&smem_.full[buffer_of(stream_)]), parity_of(stream_));
        wgmma_discard(s);
        wgmma_fence();
        const WgmmaDescriptor last = wgmma_descriptor(smem_addr_of(smem_.q_last), 16, 1024);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint64 keys = k.at(step / 4 * kPanelBytes + step % 4 * 32);
            if (step < kHeld) {
                Products::rs(s, q_[step], keys, step != 0);
            } else if (step == kHeld) {
                const WgmmaDescriptor spare = wgmma_descriptor<32>(smem_addr_of(smem_.q_step), 16, 256);
                Products::ss(s, spare.at(0), keys, 1);
            } else {
                Products::ss(s, last.at(step % 4 * 32), keys, 1);
            }
        }
        wgmma_commit();
        mbarrier_wait(smem_addr_of(&smem_.rest[buffer_of(stream_)]), parity_of(stream_));
#pragma unroll
        for (int step = 0; step < 4; ++step)
            Products::ss(s, last.at(kPanelBytes + step * 32), k.at((Config::kPanels - 1) * kPanelBytes + step * 32), 1);
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
    // Whether the lane's keys of a block have one that a list does not name: 2 of each 8.
    OA_DEVICE bool is_unlisted() const {
        if (params_.lists_rows == 0) return false;
        uint32 all = 0x0101;
#pragma unroll
        for (int n = 0; n < Config::kKeys / 8; ++n) all &= listed(n);
        return __any_sync(0xffffffffu, all != 0x0101);
    }
    OA_DEVICE uint32 listed(int n) const {
        return *reinterpret_cast<const uint16*>(smem_.listed[buffer_of(stream_)] + 2 * (lane_ & 3) + 8 * n);
    }
    OA_DEVICE void hide_unlisted(float (&s)[kScores]) const {
#pragma unroll
        for (int n = 0; n < Config::kKeys / 8; ++n) {
            const uint32 two = listed(n);
            if ((two & 0xff) == 0) s[4 * n] = s[4 * n + 2] = neg_inf();
            if (two < 0x100) s[4 * n + 1] = s[4 * n + 3] = neg_inf();
        }
    }
    // Scores that no positive factor makes exponents of base 2 become such exponents.
    OA_DEVICE void cap(float (&s)[kScores], float& factor) const {
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] *= factor;
        factor = 1.0f;
        if (!(p_.softcap > 0.0f)) return;
        const float inverse = kLn2 / p_.softcap, back = p_.softcap * kLog2e;
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = back * tanh_exp2(s[i] * inverse);
    }
    OA_DEVICE void mask(float (&s)[kScores], const LatentSplit& split, int32 first) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 flat = int32(blockIdx.x) * Config::kRows + row_ + 8 * r;
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
            const bool fits = sum[0] <= kMost && sum[1] <= kMost;
            if (wants_maximum || __all_sync(0xffffffffu, fits)) break;
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
            if (follows && (lane_ & 3) == 0) smem_.alpha[row_ + 8 * r] = alpha;
        }
        if (!follows) return;
        ++times_grown_;
        if (lane_ == 0) smem_.grown[buffer_of(stream_)][warp_] = int32(stream_);
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
        return smem_addr_of(smem_.k[0]) + buffer_of(stream_) * kBlockBytes + (Config::kPanels - 1) * kPanelBytes +
               row * 128 + (((lane >> 4 & 1) ^ (lane & 7)) << 4);
    }

    // What O of all keys is multiplied with, and LSE; else what a partial result needs besides O.
    OA_DEVICE void end(const LatentSplit& split, uint32 number) {
        sum_of_quad(l_);
        mbarrier_wait(smem_addr_of(&smem_.scale_read), number & 1 ^ 1);
        if ((lane_ & 3) != 0) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 flat = int32(blockIdx.x) * Config::kRows + row_ + 8 * r, token = token_of(p_, flat);
            const bool exists = token < split.queries.count;
            if (split.slot < 0) {
                const int32 head = flat - token * p_.group;
                const float sink = exists ? sink_log2<Io>(p_.sinks, p_.sinks_kind, head) : neg_inf();
                const RowResult result = finish_row(m_[r], l_[r], sink);
                smem_.scale[row_ + 8 * r] = result.o_scale;
                if (exists) note_row(params_, split.sequence, head, split.queries.first, token, m_[r], result.lse);
            } else if (exists) {
                const int64 row = int64(split.slot) * params_.slot_rows + flat;
                *reinterpret_cast<float2*>(p_.partial_ml + 2 * row) = make_float2(m_[r], l_[r]);
            }
        }
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Latent8Storage<Config>& smem_;
    const int32 lane_, warp_, row_;  // the lane's first row
    uint32 stream_ = 0, times_grown_ = 0;  // blocks of all splits; those whose alpha others have to read
    float m_[2], l_[2];
    uint32 q_[kHeld][4];
};
