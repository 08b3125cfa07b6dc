// A warpgroup of mla_decode_rows16_sm90 that has a half of O: O += P V. One asks for copies too.
#pragma once
#include "decode/latent16_copies.cuh"
#include "decode/latent16_scores.cuh"
#include "decode/latent16_storage.cuh"
#include "decode/latent_output.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "ptx/wgmma_fp16.cuh"

// The two have the same instructions: those of a split's end come from far away, for both once.
template <typename Config>
class Latent16Values {
    using Io = typename Config::Io;
    using Pv = Wgmma<Io, Config::kHeadDimV / 2>;
    static constexpr uint32 kBlockBytes = Latent16Storage<Config>::kBlockBytes;
    static constexpr int kOutput = Config::kHeadDimV / 4;

  public:
    OA_DEVICE Latent16Values(const MlaDecodeParams& p, Latent16Storage<Config>& smem, int32 own)
        : params_(p),
          p_(p.decode),
          smem_(smem),
          copies_(p, smem),
          own_(own),
          lane_(int32(threadIdx.x) & 31),
          warp_(__shfl_sync(0xffffffffu, int32(threadIdx.x) >> 5 & 3, 0)),
          row_(warp_ * 16 + (lane_ >> 2)) {}

    OA_DEVICE void run() {
        if (has_copies()) begin_copies();
        for (uint32 number = 0;; ++number) {
            // Here, where there are no sums that would have to leave their registers. All are done with split number -
            // 2, which had the place before: the scores of number - 1 end after that.
            if (has_copies()) copies_.publish(number + 2);
            wait_for_split(smem_, number);
            const LatentSplit& split = smem_.splits[number & 3];
            if (!__any_sync(0xffffffffu, split.blocks > 0)) return;
#pragma unroll
            for (int i = 0; i < kOutput; ++i) o_[i] = 0.0f;
            ++stream_;  // Q
            for (int32 block = 0;; ++block) {
                add_block(split, block);
                if (__all_sync(0xffffffffu, block + 1 >= split.blocks)) break;
                if (has_copies()) copies_.copy_next(stream_ + kBuffers - 1);
            }
            end(split, number);
        }
    }

  private:
    OA_DEVICE void begin_copies() {
#pragma unroll 1
        for (int i = 0; i <= kBuffers; ++i) {
            if ((i & 1) == 0 && i < kBuffers) copies_.publish(i >> 1);
            copies_.copy_next(i);
        }
    }
    OA_DEVICE bool has_copies() const { return own_ == 0 && warp_ == 0; }

    OA_DEVICE void add_block(const LatentSplit& split, int32 block) {
        mbarrier_wait(smem_addr_of(&smem_.ready[buffer_of(stream_)]), parity_of(stream_));
        if (__any_sync(0xffffffffu, smem_.grown[buffer_of(stream_)][warp_] == int32(stream_))) {
            const float alpha[2] = {smem_.alpha[row_], smem_.alpha[row_ + 8]};
            arrive_for_warp(smem_.alpha_read[warp_], lane_);
#pragma unroll
            for (int i = 0; i < kOutput; ++i) o_[i] *= alpha[i >> 1 & 1];
        }
        mbarrier_wait(smem_addr_of(&smem_.full[buffer_of(stream_)]), parity_of(stream_));
        clear_tail(split, block);
        const uint32 at = smem_addr_of(smem_.ring[0]) + buffer_of(stream_) * kBlockBytes;
        const WgmmaDescriptor p = wgmma_descriptor(at + (Config::kPanels - 1) * kPanelBytes, 16, 1024);
        const WgmmaDescriptor v = wgmma_descriptor(at + own_ * Config::kHalfPanels * kPanelBytes, kPanelBytes, 1024);
        fence_proxy_async();  // P, which others have stored
        wgmma_pin(o_);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step)
            Pv::template ss<kKMajor, kMnMajor>(o_, p.at(step * 32), v.at(step * 16 * 128), 1);
        wgmma_commit();
        wgmma_pin(o_);
        wgmma_wait<0>();
        wgmma_pin(o_);
        arrive_for_warp(smem_.empty[buffer_of(stream_)], lane_);
        ++stream_;
    }
    // TMA brings whole chunks, and leaves what is behind them: rows that are no keys of the split would be NaN times 0.
    OA_DEVICE void clear_tail(const LatentSplit& split, int32 block) const {
        const int32 rows = split.end - split.begin - block * Config::kKeys;
        if (rows >= Config::kKeys) return;
        const uint32 to = smem_addr_of(smem_.ring[0]) + buffer_of(stream_) * kBlockBytes +
                          own_ * Config::kHalfPanels * kPanelBytes + rows * 128;
        for (int32 i = int32(threadIdx.x) & 127; i < (Config::kKeys - rows) * 8; i += 128)
#pragma unroll 1
            for (int panel = 0; panel < Config::kHalfPanels; ++panel)
                store_shared4(to + panel * kPanelBytes + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
        named_barrier_sync(kValuesOnly + own_, 128);
    }

    // Of all keys O, else a partial result.
    OA_DEVICE void end(const LatentSplit& split, uint32 number) {
        // In the places of this split's last block, and of the next one's Q, which is in registers soon.
        if (has_copies())
#pragma unroll 1
            for (int i = 0; i < 2; ++i) copies_.copy_next(stream_ + kBuffers - 1 + i);
        mbarrier_wait(smem_addr_of(&smem_.scale_ready), number & 1);
        const float scale[2] = {smem_.scale[row_], smem_.scale[row_ + 8]};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 flat = int32(blockIdx.x) * Config::kRows + row_ + 8 * r, token = token_of(p_, flat);
            const bool exists = token < split.queries.count;
            const int32 column = own_ * (Config::kHeadDimV / 2);
            if (split.slot < 0) {
                uint16* to = p_.o + split.sequence * p_.o_stride_b + (split.queries.first + token) * p_.o_stride_s +
                             (flat - token * p_.group) * p_.o_stride_h + column;
                store_accumulators<Io>(to, o_, r, scale[r], lane_, exists);
            } else if (exists) {
                const int64 row = int64(split.slot) * params_.slot_rows + flat;
                float* to = p_.partial_o + row * Config::kHeadDimV + column + 4 * (lane_ & 3);
#pragma unroll
                for (int n = 0; n < kOutput / 4; n += 2)
                    *reinterpret_cast<float4*>(to + 8 * n) = pair_of_blocks(&o_[4 * n], r);
            }
        }
        arrive_for_warp(smem_.scale_read, lane_);  // and done with the split
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Latent16Storage<Config>& smem_;
    Latent16Copies<Config> copies_;
    const int32 own_;  // 0: left half of O, 1: right half
    const int32 lane_, warp_, row_;  // the lane's first row
    uint32 stream_ = 0;  // blocks of the ring
    float o_[kOutput];
};
