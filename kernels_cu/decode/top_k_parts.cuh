// What a CTA does with its part of a row of which it knows a floor (decode/sampled_select.cuh).
#pragma once
#include "decode/sampled_select.cuh"
#include "decode/top_k_row.cuh"
#include "ptx/bulk_prefetch.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

// What reaches the floor of a part of any length: it passes through registers, and candidates go to stacks of threads.
// The interface of all: fits() says whether it takes the row, start() asks for the part, wait() waits for what is
// copied to shared memory, read() finds candidates, count() counts their bins, choose() takes those above the k-th
// largest's bin and returns how many this thread has, and puts those in it to s.ties; put() hands on the positions of
// the chosen, ranks from `first` on, `last` being the last one of the bin that is chosen.
template <typename S, int32 kThreads, int32 kVectors, bool kIsAlone>
struct StackedPart {
    static constexpr uint32 kAhead = 1 << 16;  // elements that are asked for ahead
    const Row& row;
    const Part& part;
    typename S::Storage& s;
    Stream<kThreads, kVectors> stream;
    typename S::Stack stack;

    OA_DEVICE StackedPart(const Row& row, const Part& part, typename S::Storage& s)
        : row(row), part(part), s(s), stream(row, part), stack{s} {}

    static OA_DEVICE bool fits(const Row&, uint32) { return true; }
    OA_DEVICE void start() {
        if constexpr (kIsAlone) stream.start();
        constexpr uint32 kChunk = 4096;
        const uint32 chunk = stream.begin + (kIsAlone ? stream.kStep : 0) + threadIdx.x * kChunk;
        if (threadIdx.x * kChunk < kAhead && chunk < stream.end) {
            prefetch_l2(row.base + chunk, 4 * min_of(stream.end - chunk, kChunk));
        }
    }
    OA_DEVICE void wait() const {}
    OA_DEVICE void read(const typename S::Scale& scale) {
        if constexpr (!kIsAlone) stream.start();
        stream.for_each([&](const uint4& x, uint32 at) {
            stack.make_room(scale);
            // NaN is not below anything.
            if (!(__uint_as_float(x.x) < scale.floor)) stack.push(x.x, at);
            if (!(__uint_as_float(x.y) < scale.floor)) stack.push(x.y, at + 1);
            if (!(__uint_as_float(x.z) < scale.floor)) stack.push(x.z, at + 2);
            if (!(__uint_as_float(x.w) < scale.floor)) stack.push(x.w, at + 3);
        });
    }
    OA_DEVICE void count(const typename S::Scale& scale) const { stack.count(scale); }
    OA_DEVICE uint32 choose(const typename S::Scale& scale, float edge) {
        uint32 num_sure = 0;
        stack.for_each([&](uint2 x) {
            const float place = scale.place(x.x);
            if (place >= edge + 1.0f) {
                S::set_bit(s, x.y - part.begin), ++num_sure;
            } else if (place >= edge) {
                S::add_tie(s, x.x, x.y);
            }
        });
        return num_sure;
    }
    OA_DEVICE void put(uint32 first, uint2 last, const Positions<kThreads>& out) const {
        S::for_ties(s, last, [&](uint32 at) { S::set_bit(s, at - part.begin); });
        __syncthreads();
        for (uint32 window = part.begin;; __syncthreads()) {
            // Nobody needs the bins any more.
            first += S::for_bits(s, min_of(part.end - window, uint32(S::kWindow)), first, s.fine, S::kFine + S::kBins,
                                 [&](uint32 rank, uint32 at) { out.put(rank, window + at - row.lead); });
            if (part.end - window <= S::kWindow) return;
            // The bits of the next elements.
            window += S::kWindow;
            __syncthreads();
            for (int32 i = threadIdx.x; i < S::kMaskWords; i += kThreads) s.mask[i] = 0;
            __syncthreads();
            stack.for_each([&](uint2 x) {
                if (x.y >= window && !S::is_better(last, make_uint2(key_of(x.x), x.y))) S::set_bit(s, x.y - window);
            });
        }
    }
};

// The same of a part of up to 32 elements a thread, which lies in shared memory: a thread's candidates are bits of one
// number, in the order of the row, and what is chosen of them needs no other order. A warp copies its own elements, and
// waits for nothing else.
template <typename S, int32 kThreads>
struct HeldPart {
    static constexpr uint32 kMost = 8;  // vectors of four elements of a thread
    const Row& row;
    const Part& part;
    typename S::Storage& s;
    uint32 vectors;  // of a thread, a power of two
    uint32* own;  // this thread's elements
    uint32 bar;   // of this warp's copy, where copies are bulk copies
    uint32 candidates = 0, chosen = 0, ties = 0;

    static OA_DEVICE bool fits(const Row& row, uint32 size) {
        return (row.end + size - 1) / size <= 4 * kMost * kThreads;
    }
    OA_DEVICE HeldPart(const Row& row, const Part& part, typename S::Storage& s)
        : row(row), part(part), s(s), vectors(1) {
        while (vectors < kMost && 4 * vectors * kThreads < part.end - part.begin) vectors *= 2;
        own = reinterpret_cast<uint32*>(s.stacks) + 4 * vectors * threadIdx.x;
        bar = smem_addr_of(&s.copied[threadIdx.x / 32]);
        if (kBulk && (threadIdx.x & 31) == 0) {
            mbarrier_init(bar, 1);
            fence_barrier_init();
        }
    }

#if __CUDA_ARCH__ >= 900
    static constexpr bool kBulk = true;
#else
    static constexpr bool kBulk = false;
#endif
    // Whole vectors are copied; what the row has not of the others is -inf.
    OA_DEVICE void start() const {
        const uint32 lane = threadIdx.x & 31, own_begin = part.begin + (threadIdx.x & ~31u) * 4 * vectors;
        const uint32 own_end = own_begin + 128 * vectors;
        uint32* to = reinterpret_cast<uint32*>(s.stacks) + (own_begin - part.begin);
        const uint32 whole = max_of(own_begin, row.lead == 0 ? 0u : 4u), end = min_of(own_end, part.end & ~3u);
        if constexpr (kBulk) {
            if (lane == 0) {
                const uint32 bytes = whole < end ? 4 * (end - whole) : 0;
                mbarrier_arrive_expect_tx(bar, bytes);
                if (bytes != 0) bulk_load(smem_addr_of(to + (whole - own_begin)), row.base + whole, bytes, bar);
            }
            if (whole == own_begin && end == own_end) return;
        }
        for (uint32 i = 0; i < vectors; ++i) {
            const uint32 place = 4 * lane + 128 * i, at = own_begin + place;
            if (at < whole || at >= end) {
                *reinterpret_cast<uint4*>(to + place) = row.load(at < part.end ? at : row.end);
            } else if (!kBulk) {
                cp_async_16(smem_addr_of(to + place), row.base + at, 16u);
            }
        }
        cp_async_commit();
    }
    OA_DEVICE void wait() const {
        if constexpr (kBulk) {
            mbarrier_wait(bar, 0);
        } else {
            cp_async_wait<0>();
        }
        __syncwarp();
    }
    OA_DEVICE void read(const typename S::Scale& scale) {
        wait();
        // Each lane of eight in another column of banks.
        const uint32 swap = threadIdx.x * vectors / 8 & (vectors - 1);
#pragma unroll
        for (uint32 i = 0; i < kMost; ++i) {
            if (i >= vectors) break;
            const uint32 vector = i ^ swap;
            const uint4 x = reinterpret_cast<const uint4*>(own)[vector];
            // NaN is not below anything.
            candidates |= mask_of(x, [&](uint32 bits) { return !(__uint_as_float(bits) < scale.floor); })
                          << (4 * vector);
        }
    }
    // take(first, last) for the lowest and the highest of the bits that are left, the same one at the end: two are
    // under way at a time.
    template <typename Take>
    static OA_DEVICE void for_pairs(uint32 bits, Take take) {
        while (bits != 0) {
            const uint32 first = __ffs(int32(bits)) - 1, last = 31 - __clz(int32(bits));
            bits &= ~(1u << first | 1u << last);
            take(first, last);
        }
    }
    OA_DEVICE uint32 at(uint32 bit) const { return part.begin + 4 * vectors * threadIdx.x + bit; }

    OA_DEVICE void count(const typename S::Scale& scale) const {
        for_pairs(candidates, [&](uint32 first, uint32 last) {
            const uint32 a = uint32(scale.place(own[first])), b = uint32(scale.place(own[last]));
            atomicAdd(&s.bins[a], 1u);
            if (last != first) atomicAdd(&s.bins[b], 1u);
        });
    }
    OA_DEVICE uint32 choose(const typename S::Scale& scale, float edge) {
        for_pairs(candidates, [&](uint32 first, uint32 last) {
            const float a = scale.place(own[first]), b = scale.place(own[last]);
            chosen |= uint32(a >= edge + 1.0f) << first | uint32(b >= edge + 1.0f) << last;
            ties |= uint32(a >= edge) << first | uint32(b >= edge) << last;
        });
        ties &= ~chosen;
        for (uint32 left = ties; left != 0; left &= left - 1) {
            const uint32 bit = __ffs(int32(left)) - 1;
            S::add_tie(s, own[bit], at(bit));
        }
        return __popc(chosen);
    }
    OA_DEVICE void put(uint32 before, uint2 last_tie, const Positions<kThreads>& out) {
        for (uint32 left = ties; left != 0; left &= left - 1) {
            const uint32 bit = __ffs(int32(left)) - 1;
            chosen |= uint32(!S::is_better(last_tie, make_uint2(key_of(own[bit]), at(bit)))) << bit;
        }
        uint32 all;
        uint32 low = S::sum_before(s, __popc(chosen), all), high = low + __popc(chosen);
        // By way of the part's place, which nobody needs any more: neighbours write neighbours.
        uint32* const list = reinterpret_cast<uint32*>(s.stacks);
        for_pairs(chosen, [&](uint32 first, uint32 last) {
            list[low++] = at(first);
            if (last != first) list[--high] = at(last);
        });
        __syncthreads();
        for (uint32 i = threadIdx.x; i < all; i += kThreads) out.put(before + i, list[i] - row.lead);
    }
};
