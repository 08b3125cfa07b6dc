// Radix select of the k largest numbers of a row by one CTA, or by the CTAs of a cluster that share it.
//
// A number's key is an integer of the same order. Three digits of it, 12, 10 and 10 bits, are counted in histograms,
// each among the keys that have the digits before it; the digit in which the k-th largest one lies follows from sums
// over the bins from the top. What is left is a threshold: all keys above it are chosen, and the first `ties` of those
// equal to it.
#pragma once
#include "ptx/cluster_memory.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/types.cuh"

// fp32 to its key: NaN of either sign first, then +inf ... -inf; both zeros are one.
constexpr uint32 kKeyNan = 0xffffffffu;
constexpr uint32 kKeyNegInf = 0x007fffffu;  // the smallest key of a number
OA_DEVICE uint32 key_of(uint32 bits) {
    const float x = __uint_as_float(bits);
    const uint32 b = __float_as_uint(x + 0.0f);  // -0 becomes +0
    const uint32 key = b ^ (uint32(int32(b) >> 31) | 0x80000000u);
    return x != x ? kKeyNan : key;
}

constexpr int32 kDigits = 3;
constexpr uint32 kMaxCluster = 8;
constexpr int32 kBins[kDigits] = {4096, 1024, 1024};
constexpr int32 kShift[kDigits] = {20, 10, 0};
constexpr int32 kAllBins = 4096 + 1024 + 1024;
OA_DEVICE constexpr int32 first_bin(int32 digit) {
    return digit == 0 ? 0 : digit == 1 ? kBins[0] : kBins[0] + kBins[1];
}
// Bins of the first digit that hold nothing but -inf, which is never chosen.
constexpr int32 kNegInfBins = int32(kKeyNegInf >> 20) + 1;

// Keys above `key` are chosen, and the first `ties` of those equal to it.
struct Threshold {
    uint32 key, ties;
};

struct SelectStorage {
    alignas(16) uint32 histogram[kAllBins];
    uint32 warp_sums[2][32];
    uint32 bin, above, inside;  // of the last digit: the bin, keys in the bins above it, keys in it
    uint32 before_above, before_in;  // of these, those of the cluster's CTAs of lower rank
};

// A key's number, of keys of numbers.
OA_DEVICE float number_of(uint32 key) { return __uint_as_float(key ^ (int32(key) < 0 ? 0x80000000u : 0xffffffffu)); }

// Sum over the lanes up to this one.
OA_DEVICE uint32 inclusive_sum(uint32 x, int32 lane) {
#pragma unroll
    for (int32 d = 1; d < 32; d *= 2) {
        const uint32 y = __shfl_up_sync(0xffffffffu, x, d);
        if (lane >= d) x += y;
    }
    return x;
}

// One digit of a select. All threads of the CTA.
template <int32 kThreads, bool kCluster>
struct Digit {
    SelectStorage& s;
    uint32 rank, size;  // of this CTA in the cluster, CTAs of the cluster

    OA_DEVICE void sync() const {
        if constexpr (kCluster) {
            cluster_sync();
        } else {
            __syncthreads();
        }
    }

    // kOwn bins of a CTA of the cluster, from the top; `own` is the lowest one.
    template <int32 kOwn>
    OA_DEVICE void take_bins(const uint32* own, uint32 of_rank, uint32 (&count)[kOwn]) const {
        static_assert(kOwn == 1 || kOwn % 2 == 0, "bins of a thread");
        if constexpr (kOwn % 4 == 0) {
#pragma unroll
            for (int32 i = 0; i < kOwn / 4; ++i) {
                uint4 x;
                if constexpr (kCluster) {
                    x = load_cluster4(smem_addr_of(own + 4 * i), of_rank);
                } else {
                    x = *reinterpret_cast<const uint4*>(own + 4 * i);
                }
                uint32* to = count + kOwn - 4 - 4 * i;
                to[3] = x.x, to[2] = x.y, to[1] = x.z, to[0] = x.w;
            }
        } else {
#pragma unroll
            for (int32 i = 0; i < kOwn; ++i) {
                if constexpr (kCluster) {
                    count[kOwn - 1 - i] = load_cluster(smem_addr_of(own + i), of_rank);
                } else {
                    count[kOwn - 1 - i] = own[i];
                }
            }
        }
    }

    // Behind the histogram of digit kDigit: finds the bin of the k-th largest key; s.bin is -1 where there are not k.
    // Lanes go over the bins from the top.
    template <int32 kDigit>
    OA_DEVICE void find(uint32 k) const {
        constexpr int32 kOwn = kBins[kDigit] / kThreads;
        static_assert(kOwn * kThreads == kBins[kDigit], "every thread has as many bins");
        const int32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
        if (threadIdx.x == 0) s.bin = 0xffffffffu, s.above = 0, s.inside = 0, s.before_above = 0, s.before_in = 0;
        sync();
        const int32 top = kBins[kDigit] - 1 - int32(threadIdx.x) * kOwn;
        uint32 count[kOwn], before[kOwn], sum = 0;
        const uint32* own = &s.histogram[first_bin(kDigit) + top + 1 - kOwn];
        take_bins(own, 0, count);
#pragma unroll
        for (int32 i = 0; i < kOwn; ++i) before[i] = rank > 0 ? count[i] : 0;
        if constexpr (kCluster) {
#pragma unroll
            for (uint32 r = 1; r < kMaxCluster; ++r) {
                uint32 more[kOwn] = {};
                if (r < size) take_bins(own, r, more);
#pragma unroll
                for (int32 i = 0; i < kOwn; ++i) count[i] += more[i], before[i] += r < rank ? more[i] : 0;
            }
        }
#pragma unroll
        for (int32 i = 0; i < kOwn; ++i) {
            if (kDigit == 0 && top - i < kNegInfBins) count[i] = before[i] = 0;
            sum += count[i];
        }
        uint32 above = inclusive_sum(sum, lane);
        if (lane == 31) s.warp_sums[0][warp] = above;
        __syncthreads();
        above += __reduce_add_sync(0xffffffffu, lane < warp ? s.warp_sums[0][lane] : 0u) - sum;
        if (threadIdx.x == kThreads - 1 && above + sum < k) s.above = above + sum;
        if (above < k && above + sum >= k) {
#pragma unroll
            for (int32 i = 0; i < kOwn; ++i) {
                if (above < k && above + count[i] >= k) {
                    s.bin = top - i, s.above = above, s.inside = count[i], s.before_in = before[i];
                    above = k;  // found
                } else if (above < k) {
                    above += count[i];
                }
            }
        }
        __syncthreads();
        if constexpr (kCluster) {
            uint32 mine = 0;
#pragma unroll
            for (int32 i = 0; i < kOwn; ++i) mine += int32(s.bin) < top - i ? before[i] : 0;
            mine = __reduce_add_sync(0xffffffffu, mine);
            if (lane == 0 && mine != 0) atomicAdd(&s.before_above, mine);
            __syncthreads();
        }
    }
};

// What a select knows: the digits found so far, how many keys are above them, and where the result will be.
struct Selected {
    uint32 prefix = 0;  // of the keys that are left: their digits so far, at their place
    uint32 above = 0;  // keys with higher ones
    uint32 inside = 0;  // keys with these digits
    uint32 before = 0;  // of those above, those of CTAs of lower rank
    uint32 before_in = 0;  // the same of those inside
    uint32 chosen = 0;  // k, or all numbers of the row if they are fewer
    int32 digits = 0;  // how many are found
    Threshold threshold{kKeyNegInf, 0};
    bool done = false;

    // Takes in what Digit::find found in digit kDigit.
    template <int32 kDigit>
    OA_DEVICE void take(const SelectStorage& s, uint32 k) {
        digits = kDigit + 1;
        if (kDigit == 0 && s.bin == 0xffffffffu) {  // fewer than k numbers: all are chosen
            chosen = s.above, before = s.before_above, done = true;
            return;
        }
        prefix |= s.bin << kShift[kDigit];
        above += s.above, before += s.before_above, inside = s.inside, before_in = s.before_in;
        chosen = k;
        if (above + inside == k) {  // the whole bin
            threshold = {prefix - 1, 0}, before += before_in, before_in = 0, done = true;
        } else if (kDigit == kDigits - 1) {
            threshold = {prefix, k - above}, done = true;
        }
    }
};

// Whether a key has the digits before kDigit that are found, and its digit.
template <int32 kDigit>
OA_DEVICE bool is_left(uint32 key, uint32 prefix) {
    return kDigit == 0 || ((key ^ prefix) >> kShift[kDigit == 0 ? 0 : kDigit - 1]) == 0;
}
template <int32 kDigit>
OA_DEVICE void count_key(SelectStorage& s, uint32 key, uint32 prefix) {
    if (is_left<kDigit>(key, prefix)) {
        atomicAdd(&s.histogram[first_bin(kDigit) + ((key >> kShift[kDigit]) & (kBins[kDigit] - 1))], 1u);
    }
}
