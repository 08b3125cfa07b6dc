// Shared memory and barriers of mla_decode_sm90, whose comment has the design.
//
// Config: Io, kHeadDim, kHeadDimV, kRows, kKeys, kPanels, kHalfPanels, kThreads.
#pragma once
#include "decode/latent.cuh"
#include "decode/latent_rows.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

// Named barriers: P of even and of odd blocks is there; both warpgroups are done with a split; each by itself; those
// that copy.
enum LatentBarrier : int32 { kEvenP = 1, kOddP = 2, kSplitEnd = 3, kAlone = 4, kProducersOnly = 6 };

constexpr uint32 kPanelBytes = 64 * 128;  // 64 rows of 64 channels

// Of a warp one lane arrives for all of them.
#ifdef EVERY_LANE_ARRIVES  // for race checkers that do not follow that
constexpr uint32 kArrivalsOfWarp = 32;
#else
constexpr uint32 kArrivalsOfWarp = 1;
#endif
OA_DEVICE void arrive_for_warp(uint64& bar, int32 lane) {
    if (lane < int32(kArrivalsOfWarp)) mbarrier_arrive(smem_addr_of(&bar));
}

template <typename Config>
struct LatentStorage {
    static constexpr uint32 kBlockBytes = Config::kPanels * kPanelBytes;
    alignas(1024) uint8 q[kBlockBytes];
    alignas(1024) uint8 k[2][kBlockBytes];
    float m[2][Config::kRows];  // base of exponents behind an even and behind an odd block
    float l[2][2][Config::kRows];  // of every other split: each warpgroup's part of the denominator
    uint64 full[2][Config::kPanels];  // a buffer's panels
    uint64 empty[2][2];  // a buffer's first and second half, as they are copied
    uint64 q_full, q_empty;
    // By the first thread, which alone walks over the splits, up to two ahead of the consumers: split n is in place
    // n % 4. Behind the last one there is one of no blocks.
    LatentSplit splits[4];
    SplitCursor<Config> cursor;
    int32 chunks;  // of all sequences
    uint8 listed[2][Config::kKeys];  // whether a list has the key of a buffer's row
    ScanStorage<Config::kThreads> scan;
    float top[2][2][Config::kRows];  // as `l`: the largest scores, where they are wanted
};

// The two halves of a buffer: first panel, and panels. The second has the last panel besides.
template <typename Config>
OA_DEVICE constexpr int first_panel(int buffer, int half) {
    return buffer == half ? 0 : Config::kHalfPanels;
}

// Rounds of a buffer: parity that its consumers wait for.
struct Rounds {
    uint32 parities = 0;  // a bit each: an array, indexed by a buffer that only the warp knows, would lie in memory
    OA_DEVICE uint32 parity(int buffer) const { return parities >> buffer & 1; }
    OA_DEVICE void advance(int buffer) { parities ^= 1u << buffer; }
};
