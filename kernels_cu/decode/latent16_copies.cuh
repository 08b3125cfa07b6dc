// The copies of mla_decode_rows16_sm90, by TMA: Q of a split, then its keys.
#pragma once
#include "decode/latent16_storage.cuh"
#include "scheduler/quotient.cuh"

// Walks over the splits and hands them to everybody, and asks for their blocks, up to three ahead: one warp of those
// that have O, which waits for P meanwhile. One lane asks for a whole block at once: more copies would wait for each
// other, and the warp with them.
template <typename Config>
class Latent16Copies {
    static constexpr uint32 kBlockBytes = Latent16Storage<Config>::kBlockBytes;

  public:
    OA_DEVICE Latent16Copies(const MlaDecodeParams& p, Latent16Storage<Config>& smem)
        : params_(p), p_(p.decode), smem_(smem) {}

    // Split `number`, which the one before preceded, for everybody. Its place is that of four splits before.
    OA_DEVICE void publish(uint32 number) {
        if ((int32(threadIdx.x) & 31) == 0) {
            LatentSplit& split = smem_.splits[number & 3];
            if (!smem_.cursor.next(p_, Partition(smem_.chunks, p_), split)) split.blocks = 0;
            mbarrier_arrive(smem_addr_of(&smem_.split_ready[number & 3]));
        }
        __syncwarp();
    }

    // Asks for block number `stream` of the ring, once there is a place for it.
    OA_DEVICE void copy_next(uint32 stream) {
        if (block_ == kEnded) return;
        const LatentSplit& split = smem_.splits[number_ & 3];
        if (split.blocks == 0) {
            block_ = kEnded;
            return;
        }
        mbarrier_wait(smem_addr_of(&smem_.empty[buffer_of(stream)]), parity_of(stream) ^ 1);
        if ((int32(threadIdx.x) & 31) == 0) {
            const uint32 bar = smem_addr_of(&smem_.full[buffer_of(stream)]);
            const uint32 to = smem_addr_of(smem_.ring[0]) + buffer_of(stream) * kBlockBytes;
            mbarrier_arrive_expect_tx(bar, kBlockBytes);
            if (block_ == kQueries) {
                ask_for_queries(split, to, bar);
            } else {
                tma_load_4d(to, &params_.map, bar, 0, row_, 0, page_);
            }
        }
        ++block_;
        if (block_ < split.blocks) {
            locate(split);
        } else {
            ++number_, block_ = kQueries;
        }
    }

  private:
    // Rows of a CTA that begin with a head of a token: heads of one token, or all heads of several. Those that the
    // sequence has not are zeros, or another one's.
    OA_DEVICE void ask_for_queries(const LatentSplit& split, uint32 to, uint32 bar) const {
        const int32 flat = int32(blockIdx.x) * Config::kRows, token = token_of(p_, flat);
        tma_load_5d(to, &params_.map_q, bar, 0, flat - token * p_.group, split.queries.first + token, 0,
                    p_.cu_seqlens_q == nullptr ? split.sequence : 0);
    }

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

    enum : int32 { kQueries = -1, kEnded = -2 };  // in the place of a block: Q of the split, and that there is none
    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Latent16Storage<Config>& smem_;
    uint32 number_ = 0;
    int32 block_ = kQueries;
    int32 page_ = 0, row_ = 0;
};
