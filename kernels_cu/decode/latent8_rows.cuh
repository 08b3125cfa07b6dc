// The copies of mla_decode_rows8_sm90: rows as they are in memory, to shared memory.
#pragma once
#include "decode/latent8_storage.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

// Four warps, by bulk copies, which hold up no load or store: 8 rows of a half of a block each, a lane a row. Rows that
// lie side by side are one copy; those that there are not are zeros.
template <typename Config>
class Latent8Rows {
    static constexpr int kRowBytes = Config::kRowBytes, kOwn = kStageRows / kCopyWarps;
    static constexpr uint32 kAll = (1u << kOwn) - 1;

  public:
    OA_DEVICE Latent8Rows(const MlaDecodeParams& p, Latent8Storage<Config>& smem)
        : params_(p), p_(p.decode), smem_(smem) {}

    OA_DEVICE void run() {
        uint32 number = 0;  // of the half, of all splits
        for (uint32 which = 0;; ++which) {
            wait_for_split(smem_, which);
            const LatentSplit& split = split_of(smem_, which);
            const int32 stop = 2 * split.blocks;
            if (stop <= 0) break;
            int32 entry = table_entry(params_, split, key_of(split, 0));
#pragma unroll 1
            for (int32 half = 0; half < stop; ++half) {
                const KeyPlace own = key_place(params_, split, key_of(split, half), entry);
                entry = table_entry(params_, split, key_of(split, min_of(half + 1, stop - 1)));
                wait_for_place(number);
                bring(number, own.place, own.exists);
                ++number;
            }
        }
        // Those who wait for one of the next two blocks learn that there is none.
#pragma unroll 1
        for (int i = 0; i < 2; ++i, number += 2) {
            wait_for_place(number);
            note(number, false);
            arrive_for_warp(smem_.codes_full[number % kStages], lane());
        }
    }

  private:
    OA_DEVICE static int32 lane() { return int32(threadIdx.x) & 31; }
    OA_DEVICE static int32 row() { return (int32(threadIdx.x) >> 5 & 3) * kOwn + (lane() & (kOwn - 1)); }
    OA_DEVICE static int32 key_of(const LatentSplit& split, int32 half) {
        return split.begin + half * kStageRows + row();
    }
    // Of a half: once all warps have read the block that has the half three before.
    OA_DEVICE void wait_for_place(uint32 number) const {
        if (number < 3) return;
        const uint32 block = (number - 3) >> 1;
        mbarrier_wait(smem_addr_of(&smem_.rest[buffer_of(block)]), parity_of(block));
    }
    OA_DEVICE void note(uint32 number, bool is_block) const {
        if (int32(threadIdx.x) == Config::kThreads - 32 * kCopyWarps && number % 2 == 0)
            smem_.is_block[number % kStages] = is_block;
    }
    OA_DEVICE void bring(uint32 number, uint32 place, bool exists) const {
        const uint32 stage = number % kStages;
        const uint32 to =
            smem_addr_of(smem_.codes[0]) + stage * Latent8Storage<Config>::kStageBytes + row() * kRowBytes;
        const uint32 bar = smem_addr_of(&smem_.codes_full[stage]);
        const bool active = lane() < kOwn;
        if (params_.lists_rows != 0 && active) smem_.is_listed[stage][row()] = exists;
        note(number, true);
        const uint32 first = __shfl_sync(0xffffffffu, place, 0);
        const bool follows = exists && uint64(place - first) * p_.place_bytes == uint64(lane() * kRowBytes);
        const bool together = (__ballot_sync(0xffffffffu, follows) & kAll) == kAll;
        for (uint32 missing = __ballot_sync(0xffffffffu, active && !exists); missing != 0; missing &= missing - 1) {
            const uint32 there = __shfl_sync(0xffffffffu, to, __ffs(missing) - 1);
#pragma unroll 1
            for (int32 at = lane() * 16; at < kRowBytes; at += 32 * 16)
                store_shared4(there + at, make_uint4(0, 0, 0, 0));
        }
        const uint32 count = __popc(__ballot_sync(0xffffffffu, exists) & kAll);
        __syncwarp();
        if (lane() == 0) {
            mbarrier_arrive_expect_tx(bar, count * kRowBytes);
        } else if (lane() < int32(kArrivalsOfWarp)) {
            mbarrier_arrive(bar);
        }
        __syncwarp();
        if (active && exists && (!together || lane() == 0))
            bulk_load(to, p_.k + uint64(place) * p_.place_bytes, together ? kOwn * kRowBytes : kRowBytes, bar);
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Latent8Storage<Config>& smem_;
};
