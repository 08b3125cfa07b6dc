// A part of a row of which candidates are marked by bits, as top_k_parts.cuh has the interface.
//
// A thread has every kThreads-th vector of four elements: 32 elements in groups of eight vectors, of which a word says
// what are candidates. Their numbers go to a stack of the thread, in the same order, so that nothing says where they
// are. Eight neighbours transpose the words of what is chosen: then a word has 32 elements one behind the other.
#pragma once
#include "decode/sampled_select.cuh"
#include "decode/top_k_row.cuh"
#include "ptx/bulk_prefetch.cuh"
#include "ptx/types.cuh"

template <typename S, int32 kThreads, int32 kVectors, bool kIsAlone>
struct MarkedPart {
    static constexpr uint32 kWords = S::kMaskWords / kThreads;  // of a thread
    static constexpr uint32 kAcross = 4 * kThreads,
                            kGroup = 8 * kAcross;  // elements of a vector, a word of all threads
    static constexpr uint32 kRoom = 2 * S::kStackDepth;  // numbers of a thread's stack
    static_assert(8 * kWords % kVectors == 0, "a vector on its way has one place");
    const Row& row;
    const Part& part;
    typename S::Storage& s;
    uint32 whole;  // the end of whole vectors
    uint4 ahead[kVectors];
    uint32 marks[kWords], chosen[kWords];
    uint32 count_ = 0;

    OA_DEVICE MarkedPart(const Row& row, const Part& part, typename S::Storage& s)
        : row(row), part(part), s(s), whole(part.end & ~3u) {}

    static OA_DEVICE bool fits(const Row& row, uint32 size) { return Part(row, 0, size).end <= kWords * kGroup; }
    OA_DEVICE void start() {
        constexpr uint32 kChunk = 4096;
        if constexpr (kIsAlone) load_first();
        const uint32 chunk = begin() + (kIsAlone ? kVectors * kAcross : 0) + threadIdx.x * kChunk;
        if (chunk < whole) prefetch_l2(row.base + chunk, 4 * min_of(whole - chunk, kChunk));
    }
    OA_DEVICE void wait() const {}

    OA_DEVICE void read(const typename S::Scale& scale) {
        uint32* const own = stack();
        if constexpr (!kIsAlone) load_first();
        if (first() < begin()) ahead[0] = row.load(0);
        uint32 end = 0;
#pragma unroll
        for (uint32 j = 0; j < kWords; ++j) marks[j] = 0;
#pragma unroll
        for (uint32 j = 0; j < kWords; ++j) {
            if (part.begin + j * kGroup >= whole) break;
#pragma unroll
            for (uint32 v = 0; v < 8; ++v) {
                const uint32 i = 8 * j + v;
                if (first() + i * kAcross >= whole) break;
                push(own, end, marks[j], ahead[i % kVectors], 4 * v, scale.floor);
                if (i + kVectors < 8 * kWords) load(i + kVectors);
                end = min_of(end, (kRoom - 4) * kThreads);
            }
        }
        const uint32 last = (whole - part.begin) / 4;  // the vector of the last few
        if (part.begin <= whole && whole < part.end && threadIdx.x == last % kThreads) {
            const uint32 i = last / kThreads;
            uint32 mark = 0;
            push(own, end, mark, row.load(whole), 0, scale.floor);
#pragma unroll
            for (uint32 j = 0; j < kWords; ++j) marks[j] |= i / 8 == j ? mark << (4 * (i & 7)) : 0u;
        }
#pragma unroll
        for (uint32 j = 0; j < kWords; ++j) count_ += __popc(marks[j]);
        if (count_ > kRoom - 4) s.num_spilled = S::kSpilled + 1, count_ = 0;  // they have no room
    }
    OA_DEVICE void count(const typename S::Scale& scale) const {
        const uint32* const own = stack();
#pragma unroll 1
        for (uint32 i = 0; i < count_; i += 4) {
            uint32 bits[4];
#pragma unroll
            for (uint32 j = 0; j < 4; ++j) bits[j] = own[(i + j) * kThreads];
#pragma unroll
            for (uint32 j = 0; j < 4; ++j) {
                if (i + j < count_) atomicAdd(&s.bins[uint32(scale.place(bits[j]))], 1u);
            }
        }
    }
    OA_DEVICE uint32 choose(const typename S::Scale& scale, float edge) {
        const uint32* next = stack();
        uint32 num_sure = 0;
        // In the last bin, whatever is not below it is.
        const uint32 sure = edge >= float(S::kBins - 1) ? 0u : 0xffffffffu;
        const float above = edge + 1.0f;
#pragma unroll
        for (uint32 j = 0; j < kWords; ++j) {
            uint32 high = 0, inside = 0;
            const uint32* const begin = next;
#pragma unroll 1
            for (uint32 left = marks[j]; left != 0;) {
                uint32 bits[4];
#pragma unroll
                for (uint32 i = 0; i < 4; ++i) bits[i] = next[i * kThreads];
#pragma unroll
                for (uint32 i = 0; i < 4; ++i) {
                    const uint32 bit = left & -left;  // none at the end
                    left ^= bit;
                    const float place = (__uint_as_float(bits[i]) - scale.floor) * scale.factor;
                    if (!(place < above)) high |= bit;
                    if (!(place < edge)) inside |= bit;
                }
                next += 4 * kThreads;
            }
            next = begin + __popc(marks[j]) * kThreads;
            chosen[j] = high & sure, inside &= ~chosen[j];
            num_sure += __popc(chosen[j]);
            for (uint32 left = inside; left != 0; left &= left - 1) {
                const uint32 bit = __ffs(int32(left)) - 1;
                const uint32 rank = __popc(marks[j] & ((1u << bit) - 1));
                S::add_tie(s, begin[rank * kThreads], first() + (8 * j + bit / 4) * kAcross + (bit & 3));
            }
        }
        return num_sure;
    }
    OA_DEVICE void put(uint32 before, uint2 last, const Positions<kThreads>& out) const {
#pragma unroll
        for (uint32 j = 0; j < kWords; ++j) {
            // Behind the j-th group's words: those of its eighth vectors.
            s.mask[(8 * j + (threadIdx.x & 7)) * (kThreads / 8) + threadIdx.x / 8] = transposed(chosen[j]);
        }
        __syncthreads();
        S::for_ties(s, last, [&](uint32 at) { S::set_bit(s, at - part.begin); });
        __syncthreads();
        // Nobody needs the stacks any more.
        S::for_bits(s, part.end - part.begin, before, reinterpret_cast<uint32*>(s.stacks), kRoom * kThreads,
                    [&](uint32 rank, uint32 at) { out.put(rank, part.begin + at - row.lead); });
    }

  private:
    OA_DEVICE uint32 begin() const { return part.begin + (part.begin < row.lead ? 4 : 0); }  // of whole vectors
    OA_DEVICE uint32 first() const { return part.begin + 4 * threadIdx.x; }
    OA_DEVICE void load(uint32 i) {  // of this thread's vectors
        const uint32 at = first() + i * kAcross;
        const uint4* const from = reinterpret_cast<const uint4*>(row.base + first());
        if (at < whole && at >= begin()) ahead[i % kVectors] = __ldg(from + i * kThreads);
    }
    OA_DEVICE void load_first() {
#pragma unroll
        for (uint32 i = 0; i < kVectors; ++i) load(i);
    }
    OA_DEVICE uint32* stack() const { return reinterpret_cast<uint32*>(s.stacks) + threadIdx.x; }
    static OA_DEVICE void push(uint32* own, uint32& end, uint32& mark, const uint4& x, uint32 bit, float floor) {
        const uint32 bits[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (uint32 i = 0; i < 4; ++i) {
            // NaN is not below anything.
            if (!(__uint_as_float(bits[i]) < floor)) own[end] = bits[i], end += kThreads, mark |= 1u << (bit + i);
        }
    }
    // Eight neighbours have eight digits of four bits each, this one that of every neighbour's at its own place.
    static OA_DEVICE uint32 transposed(uint32 x) {
        const uint32 lane = threadIdx.x & 7;
        // Digits whose place has another bit than the lane go to the lane that has another bit there.
        const uint32 by4 = __shfl_xor_sync(0xffffffffu, x, 4);
        x = lane & 4 ? __byte_perm(x, by4, 0x3276) : __byte_perm(x, by4, 0x5410);
        const uint32 by2 = __shfl_xor_sync(0xffffffffu, x, 2);
        x = lane & 2 ? __byte_perm(x, by2, 0x3715) : __byte_perm(x, by2, 0x6240);
        const uint32 by1 = __shfl_xor_sync(0xffffffffu, x, 1);
        constexpr uint32 kEven = 0x0f0f0f0fu;
        return lane & 1 ? (x & ~kEven) | (by1 >> 4 & kEven) : (x & kEven) | (by1 << 4 & ~kEven);
    }
};
