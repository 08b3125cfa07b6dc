// The copies of mla_decode_rows16_sm90, by TMA.
#pragma once
#include "decode/latent16_storage.cuh"
#include "scheduler/quotient.cuh"

// The copies of all splits, up to three blocks ahead, by one warp of those that have O, which waits for P meanwhile.
// One lane asks for a whole block at once: more copies would wait for each other, and the warp with them.
template <typename Config>
class Latent16Keys {
    static constexpr uint32 kBlockBytes = Latent16Storage<Config>::kBlockBytes;

  public:
    OA_DEVICE Latent16Keys(const MlaDecodeParams& p, Latent16Storage<Config>& smem)
        : params_(p), p_(p.decode), smem_(smem) {}

    // Asks for block number `stream` of all splits, once there is a place for it.
    OA_DEVICE void copy_next(uint32 stream) {
        if (block_ == kEnded) return;
        const LatentSplit& split = smem_.splits[number_ & 3];
        if (block_ == kUnknown) {
            wait_for_split(smem_, number_);
            block_ = split.blocks > 0 ? 0 : kEnded;
            if (block_ == kEnded) return;
            locate(split);
        }
        mbarrier_wait(smem_addr_of(&smem_.empty[buffer_of(stream)]), parity_of(stream) ^ 1);
        if ((int32(threadIdx.x) & 31) == 0) {
            const uint32 bar = smem_addr_of(&smem_.full[buffer_of(stream)]);
            mbarrier_arrive_expect_tx(bar, kBlockBytes);
            tma_load_4d(smem_addr_of(smem_.k[0]) + buffer_of(stream) * kBlockBytes, &params_.map, bar, 0, row_, 0,
                        page_);
        }
        ++block_;
        if (block_ < split.blocks) {
            locate(split);
        } else {
            ++number_, block_ = kUnknown;
        }
    }

  private:
    // Where the block is, which lies in one page. What is left of all windows may be another sequence's by now: no page
    // of the tensor map, zeros.
    OA_DEVICE void locate(const LatentSplit& split) {
        const int32 seen = p_.window_left < 0 ? 0 : split.seq_len - split.queries.count - p_.window_left;
        const int32 key = split.begin + block_ * Config::kKeys;
        const int32 index = quotient(key, p_.block_multiplier, p_.block_shift);
        row_ = key - index * p_.block_size;
        page_ = split.sequence;
        if (key + Config::kKeys <= seen) {
            page_ = p_.num_blocks;
        } else if (p_.block_table != nullptr) {
            page_ = p_.block_table[int64(split.sequence) * p_.table_columns + index];
        }
    }

    enum : int32 {
        kUnknown = -1,
        kEnded = -2
    };  // in the place of a block: which split's it is, and that there is none
    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Latent16Storage<Config>& smem_;
    uint32 number_ = 0;
    int32 block_ = kUnknown;
    int32 page_ = 0, row_ = 0;
};
