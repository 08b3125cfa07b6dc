// The k largest numbers of a row that is read once: a sample gives a floor, what is not below it is a candidate.
//
// Each thread puts its candidates on a stack of its own in shared memory, without atomics or sums over threads; what
// a stack has no room for goes to a list. kBins bins of one width, between the floor and a number that
// fewer than k elements should reach, are counted; what lies higher is in the last one. The k-th largest number's bin
// has few elements: each of them is compared with the others, by number and position. Positions of the chosen are bits
// of a mask, whose order is the result's.
#pragma once
#include "decode/radix_select.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

template <int32 kThreads, int32 kDepth, int32 kMask, uint32 kRoom>
struct SampledSelect {
    static constexpr int32 kWarps = kThreads / 32, kMaskWords = kMask, kStackDepth = kDepth;
    static constexpr int32 kCoarse = 4096, kFine = 1024, kBins = 1024;
    static constexpr int32 kCoarseShift = 20, kFineShift = 10;  // of a key
    static constexpr uint32 kSpilled = kRoom, kTies = 512;
    static constexpr uint32 kNone = 0xffffffffu;
    static constexpr uint32 kWindow = 32 * kMask;  // elements that have a bit at a time
    static_assert(kThreads <= 1024 && kMask % kThreads == 0 && kDepth > 4);

    struct Rank {
        uint32 bin, above, inside;  // of an element of a certain rank: its bin, elements in the bins above and in it
    };
    struct Storage {
        union {
            alignas(16) uint32 coarse[kCoarse / 2];  // two bins in a word: a sample has less than 2^16 elements
            struct {  // when the floor is known
                uint2 ties[kTies], all_ties[kTies];
            };
        };
        alignas(16) uint32 fine[kFine];
        alignas(16) uint32 bins[kBins];
        alignas(16) uint32 mask[kMask];
        alignas(16) uint2 stacks[kDepth * kThreads];  // bits of a number, where it is
        alignas(16) uint2 spilled[kSpilled];
        alignas(8) uint64 copied[32];  // barriers of the warps' copies
        uint32 warp_sums[32];
        Rank low, high, low_fine, high_fine, kth;
        uint32 num_spilled, num_ties, num_sure;
        uint2 last;  // key and place of the last one that is chosen
    };

    // Numbers [floor, high) have bins of one width.
    struct Scale {
        float floor, factor;
        // 0 ... kBins - 1, a larger number never lower; NaN has the last one.
        OA_DEVICE float place(uint32 bits) const {
            return fminf((__uint_as_float(bits) - floor) * factor, float(kBins - 1));
        }
    };

    // Bins of the sample, counts and bits are 0. A barrier has to follow.
    static OA_DEVICE void clear(Storage& s) {
        constexpr int32 kVectors = (kCoarse / 2 + kFine + kBins + kMask) / 4;
        for (int32 i = threadIdx.x; i < kVectors; i += kThreads) {
            reinterpret_cast<uint4*>(s.coarse)[i] = make_uint4(0, 0, 0, 0);
        }
        if (threadIdx.x == 0) {
            s.low.bin = s.high.bin = s.low_fine.bin = s.high_fine.bin = s.kth.bin = kNone;
            s.num_spilled = 0, s.num_ties = 0, s.num_sure = 0;
        }
    }

    // Sum of what the threads before this one have, and of all. With a barrier; another one has to follow before the
    // next call.
    static OA_DEVICE uint32 sum_before(Storage& s, uint32 own, uint32& all) {
        const int32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
        const uint32 sum = inclusive_sum(own, lane);
        if (lane == 31) s.warp_sums[warp] = sum;
        __syncthreads();
        const uint32 of_lane = lane < kWarps ? s.warp_sums[lane] : 0u;
        all = __reduce_add_sync(0xffffffffu, of_lane);
        return sum - own + __reduce_add_sync(0xffffffffu, lane < warp ? of_lane : 0u);
    }

    // This thread's bins from the top, count[0] that of `top`, `above` elements in the bins above: the bin of the
    // element of rank `rank`, from 1 on, if it is one of them.
    template <int32 kOwn>
    static OA_DEVICE void find(Rank& to, uint32 rank, const uint32 (&count)[kOwn], uint32 top, uint32 above) {
#pragma unroll
        for (int32 i = 0; i < kOwn; ++i) {
            if (above < rank && above + count[i] >= rank) to.bin = top - i, to.above = above, to.inside = count[i];
            above += count[i];
        }
    }

    // Ranks `low` and `high` (not above it) of what kAll bins have; kPacked: two of them are in a word. Ends with a
    // barrier.
    template <int32 kAll, bool kPacked>
    static OA_DEVICE void find_two(Storage& s, const uint32* bins, uint32 low, uint32 high, Rank& to_low,
                                   Rank& to_high) {
        constexpr int32 kOwn = kAll / kThreads;
        const uint32 top = kAll - 1 - threadIdx.x * kOwn;
        uint32 count[kOwn], sum = 0, all;
        if constexpr (kPacked) {
            constexpr int32 kWords = kOwn / 2;
            static_assert(kWords == 2 || kWords % 4 == 0, "loads of 8 or 16 bytes");
            uint32 words[kWords];
            const uint32* own = bins + (top + 1 - kOwn) / 2;
            if constexpr (kWords == 2) {
                const uint2 x = *reinterpret_cast<const uint2*>(own);
                words[0] = x.x, words[1] = x.y;
            } else {
#pragma unroll
                for (int32 i = 0; i < kWords; i += 4) {
                    const uint4 x = *reinterpret_cast<const uint4*>(own + i);
                    words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
                }
            }
#pragma unroll
            for (int32 i = 0; i < kOwn; ++i) {
                const uint32 word = words[kWords - 1 - i / 2];
                count[i] = i % 2 == 0 ? word >> 16 : word & 0xffffu;
            }
        } else {
#pragma unroll
            for (int32 i = 0; i < kOwn; ++i) count[i] = bins[top - i];
        }
#pragma unroll
        for (int32 i = 0; i < kOwn; ++i) sum += count[i];
        const uint32 above = sum_before(s, sum, all);
        if (above < low && above + sum >= low) find(to_low, low, count, top, above);
        if (above < high && above + sum >= high) find(to_high, high, count, top, above);
        __syncthreads();
    }

    // Floor and width of the bins by a sample: the elements of it of the ranks `low` and `high`. `keys` are a thread's
    // kOwn of the first round, more(r) those of another one; arrived() is called when all have been counted. False: the
    // sample has fewer numbers. Bins are clear, a barrier has passed.
    template <int32 kOwn, typename More, typename Arrived>
    static OA_DEVICE bool sample(Storage& s, int32 rounds, uint32 low, uint32 high, Scale& scale, uint32 (&keys)[kOwn],
                                 More more, Arrived arrived) {
        for (int32 r = 0;;) {
#pragma unroll
            for (int32 i = 0; i < kOwn; ++i) {
                if (keys[i] > kKeyNegInf) {
                    const uint32 bin = keys[i] >> kCoarseShift;
                    atomicAdd(&s.coarse[bin / 2], bin % 2 == 0 ? 1u : 1u << 16);
                }
            }
            if (++r == rounds) break;
            more(r, keys);
        }
        arrived();
        __syncthreads();
        find_two<kCoarse, true>(s, s.coarse, low, high, s.low, s.high);
        const Rank at_low = s.low, at_high = s.high;
        if (at_low.bin == kNone) return false;
        uint32 first = at_low.bin << kCoarseShift, last = at_high.bin << kCoarseShift | ((1u << kCoarseShift) - 1);
        // Finer bins, where a coarse one has too much of what is looked for.
        if (4 * at_low.inside > low) {
            for (int32 r = rounds;;) {  // the keys of the last round are still there
#pragma unroll
                for (int32 i = 0; i < kOwn; ++i) {
                    if (keys[i] >> kCoarseShift == at_low.bin) {
                        atomicAdd(&s.fine[keys[i] >> kFineShift & (kFine - 1)], 1u);
                    }
                }
                if (--r == 0) break;
                more(r - 1, keys);
            }
            __syncthreads();
            const bool is_one = at_low.bin == at_high.bin;
            find_two<kFine, false>(s, s.fine, low - at_low.above, is_one ? high - at_low.above : 1, s.low_fine,
                                   s.high_fine);
            first |= s.low_fine.bin << kFineShift;
            if (is_one) last = at_high.bin << kCoarseShift | s.high_fine.bin << kFineShift | ((1u << kFineShift) - 1);
        }
        scale.floor = number_of(first);
        const float top = number_of(last);
        scale.factor = float(kBins - 1) * rcp_approx(top - scale.floor);
        return true;
    }

    // A thread's stack: every kThreads-th of s.stacks from its own number on, up to `end`.
    struct Stack {
        Storage& s;
        uint32 end = threadIdx.x;

        OA_DEVICE void push(uint32 bits, uint32 at) {
            s.stacks[end] = make_uint2(bits, at);
            end += kThreads;
        }
        // Leaves room for four: the last four go elsewhere if there is none.
        OA_DEVICE void make_room(const Scale& scale) {
            if (end < uint32(kDepth - 3) * kThreads) return;
            const uint32 to = atomicAdd(&s.num_spilled, 4u);
#pragma unroll 1
            for (uint32 i = 0; i < 4; ++i) {
                end -= kThreads;
                const uint2 x = s.stacks[end];
                if (to + i < kSpilled) s.spilled[to + i] = x;
                atomicAdd(&s.bins[uint32(scale.place(x.x))], 1u);
            }
        }
        // take(candidate) for those of this thread: four are loaded before what is done with them, which may wait.
        template <typename Take>
        OA_DEVICE void for_own(Take take) const {
#pragma unroll 1
            for (uint32 i = threadIdx.x; i < end; i += 4 * kThreads) {
                uint2 x[4];
#pragma unroll
                for (uint32 j = 0; j < 4; ++j) x[j] = s.stacks[min_of(i + j * kThreads, end - kThreads)];
#pragma unroll
                for (uint32 j = 0; j < 4; ++j) {
                    if (i + j * kThreads < end) take(x[j]);
                }
            }
        }
        OA_DEVICE void count(const Scale& scale) const {
            for_own([&](uint2 x) { atomicAdd(&s.bins[uint32(scale.place(x.x))], 1u); });
        }
        // take(candidate) for those of this thread, and then for its part of what was spilled.
        template <typename Take>
        OA_DEVICE void for_each(Take take) const {
            for_own(take);
            for (uint32 i = threadIdx.x; i < s.num_spilled; i += kThreads) take(s.spilled[i]);
        }
    };

    static OA_DEVICE bool is_better(uint2 x, uint2 than) { return x.x > than.x || (x.x == than.x && x.y < than.y); }

    static OA_DEVICE void add_tie(Storage& s, uint32 bits, uint32 at) {
        const uint32 i = atomicAdd(&s.num_ties, 1u);
        if (i < kTies) s.ties[i] = make_uint2(key_of(bits), at);
    }
    // take(place) for those of this CTA's that are not behind the last one that is chosen.
    template <typename Take>
    static OA_DEVICE void for_ties(const Storage& s, uint2 last, Take take) {
        for (uint32 i = threadIdx.x; i < s.num_ties; i += kThreads) {
            const uint2 own = s.ties[i];
            if (!is_better(last, own)) take(own.y);
        }
    }
    static OA_DEVICE void set_bit(Storage& s, uint32 at) {
        if (at < kWindow) atomicOr(&s.mask[at / 32], 1u << (at & 31));
    }

    // put(rank, at) for each bit, in order, ranks from `first` on; returns the bits' number. By way of `list`, if it
    // has room for so many: then neighbours write neighbours. With a barrier.
    template <typename Put>
    static OA_DEVICE uint32 for_bits(Storage& s, uint32 elements, uint32 first, uint32* list, uint32 room, Put put) {
        constexpr int32 kWords = kMask / kThreads;
        const uint32 words = (elements + 31) / 32, own = (words + kThreads - 1) / kThreads;
        uint32 bits[kWords], sum = 0, all;
#pragma unroll
        for (int32 i = 0; i < kWords; ++i) {
            bits[i] = uint32(i) < own ? s.mask[threadIdx.x * own + i] : 0u;
            sum += __popc(bits[i]);
        }
        uint32 rank = first + sum_before(s, sum, all);
        const bool is_listed = all <= room;
#pragma unroll
        for (int32 i = 0; i < kWords; ++i) {
            for (uint32 left = bits[i]; left != 0; left &= left - 1) {
                const uint32 at = 32 * (threadIdx.x * own + i) + __ffs(int32(left)) - 1;
                if (is_listed) {
                    list[rank++ - first] = at;
                } else {
                    put(rank++, at);
                }
            }
        }
        if (is_listed) {
            __syncthreads();
            for (uint32 i = threadIdx.x; i < all; i += kThreads) put(first + i, list[i]);
        }
        return all;
    }
};
