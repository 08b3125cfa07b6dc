// Storage of mla_decode_rows16_sm90, whose comment has the design, and how its roles hand over splits, blocks and
// factors.
#pragma once
#include "decode/latent.cuh"
#include "decode/latent_rows.cuh"
#include "params/mla_decode.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

constexpr uint32 kPanelBytes = 64 * 128;  // 64 rows of 64 channels
constexpr int kBuffers = 3;  // of keys, or of Q

// Of a warp one lane arrives for all of them.
#ifdef EVERY_LANE_ARRIVES  // for race checkers that do not follow that
constexpr uint32 kArrivalsOfWarp = 32;
#else
constexpr uint32 kArrivalsOfWarp = 1;
#endif
OA_DEVICE void arrive_for_warp(uint64& bar, int32 lane) {
    __syncwarp();
    if (lane < int32(kArrivalsOfWarp)) mbarrier_arrive(smem_addr_of(&bar));
}

// Named barriers: of the warpgroup that has the scores, of each that has a half of O.
enum Latent16Barrier : int32 { kScoresOnly = 1, kValuesOnly = 2 };

template <typename Config>
struct Latent16Storage {
    static constexpr uint32 kBlockBytes = Config::kPanels * kPanelBytes;
    alignas(1024) uint8 ring[kBuffers][kBlockBytes];
    alignas(1024) uint8 q_last[kPanelBytes];  // the last panel of Q
    alignas(1024) uint8 q_step[Config::kRows * 32];  // and the 16 channels before it
    float alpha[Config::kRows];  // of a block: what O is multiplied with first
    float scale[Config::kRows];  // of a split: what O is multiplied with in the end
    uint64 full[kBuffers];
    uint64 ready[kBuffers];  // P of a buffer's block, and the product that was to be ahead of its own
    uint64 empty[kBuffers];  // by those who compute O, of Q by those who compute scores
    uint64 scale_ready, scale_read;
    uint64 last_read;  // the last panel of a block, by all warps' products
    uint64 alpha_read[4];  // of the rows of each warp
    uint64 split_ready[4];
    LatentSplit splits[4];  // split n is in place n % 4; behind the last one there is one of no blocks
    SplitCursor<Config> cursor;
    int32 chunks;  // of all sequences
    // Of a buffer's block, of each warp's rows: the block if `alpha` is of it. By buffers, so that those who read one
    // block's word never meet the next block's.
    int32 grown[kBuffers][4];
    ScanStorage<Config::kThreads> scan;
};

// A block of the ring, Q of a split or keys: its buffer, and the parity of its use of it.
OA_DEVICE uint32 buffer_of(uint32 stream) { return stream % kBuffers; }
OA_DEVICE uint32 parity_of(uint32 stream) { return stream / kBuffers & 1; }

struct RingPlace {
    uint32 buffer = 0, parity = 0;
    OA_DEVICE void advance() {
        if (++buffer == kBuffers) buffer = 0, parity ^= 1;
    }
};

// Whether the sequence has row `own` of this CTA's.
template <typename Config>
OA_DEVICE bool has_row(const DecodeParams& p, const LatentSplit& split, int32 own) {
    return int32(blockIdx.x) * Config::kRows + own < split.queries.count * p.group;
}

template <typename Config>
OA_DEVICE void wait_for_split(const Latent16Storage<Config>& smem, uint32 number) {
    mbarrier_wait(smem_addr_of(&smem.split_ready[number & 3]), number >> 2 & 1);
}
