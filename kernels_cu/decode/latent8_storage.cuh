// Storage of mla_decode_rows8_sm90, whose comment has the design, and how its roles hand over splits and blocks.
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
constexpr int kBuffers = 2;  // blocks in 16 bits
constexpr int kStages = 3;  // halves of blocks, 32 rows, as they come from memory
constexpr int kStageRows = 32;
constexpr int kCopyWarps = 4;
// Places of splits: the copies are up to five blocks ahead, and so many splits where each has one.
constexpr int kSplitPlaces = 8;

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

// Named barriers: of the warpgroup that has the scores, of each that has a half of O, of those two together.
enum Latent8Barrier : int32 { kScoresOnly = 1, kValuesOnly = 2, kAllValues = 4 };

template <typename Config>
struct Latent8Storage {
    static constexpr uint32 kBlockBytes = Config::kPanels * kPanelBytes;
    static constexpr uint32 kStageBytes = kStageRows * Config::kRowBytes;
    alignas(1024) uint8 k[kBuffers][kBlockBytes];
    alignas(1024) uint8 q_last[2 * kPanelBytes];  // the last two panels of Q
    alignas(1024) uint8 q_step[Config::kRows * 32];  // and the 16 channels before them
    alignas(16) uint8 codes[kStages][kStageBytes];
    float alpha[Config::kRows];  // of a block: what O is multiplied with first
    float scale[Config::kRows];  // of a split: what O is multiplied with in the end
    uint64 full[kBuffers];  // the panels that values have
    uint64 rest[kBuffers];  // and the last one
    uint64 ready[kBuffers];  // P of a buffer's block, and the product that was to be ahead of its own
    uint64 codes_full[kStages];
    uint64 scale_read;
    uint64 last_read;  // the last panel of a block, by the products of all warps
    uint64 alpha_read[4];  // of the rows of each warp
    uint64 split_ready[kSplitPlaces];
    LatentSplit splits[kSplitPlaces];  // split n is in place n % 8; behind the last one there is one of no blocks
    SplitCursor<Config> cursor;
    int32 chunks;  // of all sequences
    // Of a buffer's block, of each warp's rows: the block if `alpha` is of it. By buffers, so that those who read one
    // block's word never meet the next block's.
    int32 grown[kBuffers][4];
    // Of a stage with the first half of a block: whether there is such a block, or those before were all.
    uint32 is_block[kStages];
    // Of a stage's rows, and of a buffer's: whether a list has the key.
    uint8 is_listed[kStages][kStageRows];
    uint8 listed[kBuffers][Config::kKeys];
    ScanStorage<Config::kThreads> scan;
};

// A block of all splits: its buffer, and the parity of its use of it.
OA_DEVICE uint32 buffer_of(uint32 stream) { return stream & 1; }
OA_DEVICE uint32 parity_of(uint32 stream) { return stream >> 1 & 1; }

// Row `own` of Q of this CTA's rows of a split, or whether the sequence has none there.
template <typename Config>
OA_DEVICE bool query_row(const DecodeParams& p, const uint16*& from, const LatentSplit& split, int32 own) {
    const int32 flat = int32(blockIdx.x) * Config::kRows + own, token = token_of(p, flat);
    const bool exists = token < split.queries.count;
    from = p.q;
    if (exists)
        from += split.sequence * p.q_stride_b + (split.queries.first + token) * p.q_stride_s +
                (flat - token * p.group) * p.q_stride_h;
    return exists;
}

template <typename Config>
OA_DEVICE LatentSplit& split_of(Latent8Storage<Config>& smem, uint32 number) {
    return smem.splits[number % kSplitPlaces];
}
template <typename Config>
OA_DEVICE void wait_for_split(Latent8Storage<Config>& smem, uint32 number) {
    mbarrier_wait(smem_addr_of(&smem.split_ready[number % kSplitPlaces]), number / kSplitPlaces & 1);
}
