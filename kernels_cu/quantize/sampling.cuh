// Which keys the quantizers sum up, in which parts, and constants of their arithmetic.
#pragma once
#include "ptx/types.cuh"
#include "tile/group_scale.cuh"

constexpr int32 kChunkRows = 256;  // sampled keys of a partial sum, while a sequence has at most kMaxChunks of them
constexpr int32 kMaxChunks = 64;
// Sums are kept times 2^-32, so that 2^31 values of any size stay finite.
constexpr float kSumScale = 2.3283064365386963e-10f, kSumUnscale = 4294967296.0f;
// A channel of V keeps its mean below 1 / kMeanCounts of its range: too small to matter, and values on the grid of
// their own 16 bits, moved by it, are rounded to 8 bits with a bias that they do not have as they are.
constexpr float kMeanCounts = 16.0f;
// Sums of what rounding takes away from V, which is stored as v / v_scale, are in 1 / kErrorUnits of that.
constexpr float kErrorUnits = 256.0f;

// Means of K and V and ranges of V come from a sample of a long sequence: one key of 2^sample_log2(len), at least
// kLeastSample keys. Any vector may be taken away from K and V, and ranges have headroom.
constexpr int32 kLeastSample = 256, kMostSampleLog2 = 5;
OA_DEVICE int32 sample_log2(int32 len) {
    return len < 2 * kLeastSample ? 0 : min_of(31 - __clz(len / kLeastSample), kMostSampleLog2);
}
OA_DEVICE int32 num_samples(int32 len) { return len >> sample_log2(len); }
// The key that is sample i: one of each 2^log2 neighbours, by the golden ratio's multiples, which follow no period of
// the data.
OA_DEVICE int32 sampled_row(int32 i, int32 log2) {
    return (i << log2) + int32((uint32(i) * 0x9e3779b1u) >> 16 & ((1u << log2) - 1));
}

// Samples of one partial sum, and how many partial sums a sequence has (one when it is empty).
OA_DEVICE int32 chunk_rows(int32 samples) {
    constexpr uint32 kMost = kChunkRows * kMaxChunks;
    return int32(max_of<uint32>((uint32(samples) + kMost - 1) / kMost, 1) * kChunkRows);
}
OA_DEVICE int32 num_chunks(int32 samples) {
    return int32(max_of<uint32>((uint32(samples) + chunk_rows(samples) - 1) / chunk_rows(samples), 1));
}
