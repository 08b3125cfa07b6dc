// Copies of mla_decode_few_sm90 by warps of their own, which bring the tiles of both teams to a ring of stages, one
// after the other: a copy holds up the warp that asks for it where memory is busy.
#pragma once
#include "decode/latent_codes.cuh"
#include "decode/latent_rows.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

// Of a warp one lane arrives for all of them.
#ifdef EVERY_LANE_ARRIVES  // for race checkers that do not follow that
constexpr uint32 kArrivalsOfWarp = 32;
#else
constexpr uint32 kArrivalsOfWarp = 1;
#endif

// Stage and parity of the ring's tile `number`.
template <typename Config>
OA_DEVICE uint32 stage_of(uint32 number) {
    return number % Config::kStages;
}
template <typename Config>
OA_DEVICE uint32 parity_of(uint32 number) {
    return number / Config::kStages & 1;
}

// Four warps have a quarter of a tile's keys each. A lane asks for every eighth 16 bytes of a key's row, of every
// fourth key of the warp's; it looks up one of them.
//
// Config: kFormat, kHeadDim, kKeys, kStages, kTileRow, kInCodes. Storage: stages, exists, full, empty.
template <typename Config, typename Storage>
class LatentProducer {
    static constexpr int kRowBytes = kLatentRowBytes<Config::kFormat, Config::kHeadDim>;
    static constexpr int kChunks = kRowBytes / 16;
    static constexpr int kOwn = Config::kKeys / 4;  // keys of a warp

  public:
    // Arrivals at `full`: of each warp the lanes' copies, and itself for what it stores.
    static constexpr uint32 kArrivals = 4 * (32 + kArrivalsOfWarp);

    OA_DEVICE LatentProducer(const MlaDecodeParams& params, Storage& smem)
        : params_(params),
          p_(params.decode),
          smem_(smem),
          lane_(int32(threadIdx.x) & 31),
          first_((int32(threadIdx.x) >> 5 & 3) * kOwn) {}

    OA_DEVICE void bring(const LatentSplit& split) {
        const int32 own_key = first_ + (lane_ & (kOwn - 1));
        int32 entry = table_entry(params_, split, split.begin + own_key);
#pragma unroll 1
        for (int32 tile = 0; tile < split.blocks; ++tile) {
            const uint32 stage = stage_of<Config>(number_);
            mbarrier_wait(smem_addr_of(&smem_.empty[0]) + stage * 8, parity_of<Config>(number_) ^ 1);
            const int32 key = split.begin + tile * Config::kKeys + own_key;
            const KeyPlace own = key_place(params_, split, key, entry);
            if (tile + 1 < split.blocks) entry = table_entry(params_, split, key + Config::kKeys);
            if (params_.lists_rows != 0 && lane_ < kOwn) smem_.exists[stage][own_key] = own.exists;
            copy(smem_addr_of(smem_.stages[0]) + stage * uint32(sizeof(smem_.stages[0])), own);
            const uint32 full = smem_addr_of(&smem_.full[0]) + stage * 8;
            mbarrier_arrive_after_copies(full);
            __syncwarp();
            if (lane_ < int32(kArrivalsOfWarp)) mbarrier_arrive(full);
            ++number_;
        }
    }

  private:
    OA_DEVICE void copy(uint32 stage, const KeyPlace& own) const {
        const uint32 all = __ballot_sync(0xffffffffu, own.exists);
        const int32 chunk = lane_ & 7;
#pragma unroll 2
        for (int n = 0; n < kOwn / 4; ++n) {
            const int32 source = 4 * n + (lane_ >> 3);
            const uint32 place = __shfl_sync(0xffffffffu, own.place, source);
            const uint32 bytes = (all >> source & 1) != 0 ? 16 : 0;
            const uint8* from = p_.k + uint64(place) * p_.place_bytes + chunk * 16;
            const uint32 to =
                stage + (first_ + source) * Config::kTileRow + (Config::kInCodes ? chunk : chunk ^ (source & 7)) * 16;
#pragma unroll
            for (int i = 0; i < (kChunks + 7) / 8; ++i)
                if (8 * i + 8 <= kChunks || chunk < kChunks - 8 * i) cp_async_16(to + i * 128, from + i * 128, bytes);
        }
    }

    const MlaDecodeParams& params_;
    const DecodeParams& p_;
    Storage& smem_;
    const int32 lane_, first_;  // and the first of the warp's keys
    uint32 number_ = 0;  // of the ring's next tile
};
