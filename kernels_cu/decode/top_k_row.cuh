// A row of logits: its elements, the part of it that a CTA has, where its positions go.
#pragma once
#include "decode/radix_select.cuh"
#include "params/top_k.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

// A row, in coordinates that count from the 16 bytes in which its first element lies: [lead, end).
struct Row {
    const float* base;
    uint32 lead, end;

    OA_DEVICE Row(const TopKParams& p, int32 row) {
        const int32 start = p.starts == nullptr ? 0 : min_of(max_of(p.starts[row], 0), p.width);
        int64 length = p.width - start;
        if (p.lengths != nullptr) {
            const int32 sequence = row / p.queries;
            const int64 own = int64(p.lengths[sequence]) - p.queries + (row - sequence * p.queries) + 1;
            length = min_of(max_of(own, int64(0)), length);
        }
        const float* first = p.logits + row * p.logits_stride + start;
        lead = uint32(reinterpret_cast<uint64>(first) >> 2) & 3u;
        base = first - lead;
        end = lead + uint32(length);
    }

    // Bits of elements at .. at + 3, `at` a multiple of 4; -inf for those that the row has not.
    OA_DEVICE uint4 load(uint32 at) const {
        constexpr uint32 kNegInf = 0xff800000u;
        uint4 x = make_uint4(kNegInf, kNegInf, kNegInf, kNegInf);
        if (at >= lead && at + 4 <= end) {
            x = __ldg(reinterpret_cast<const uint4*>(base + at));
        } else if (at < end) {
            const uint32* bits = reinterpret_cast<const uint32*>(base + at);
            if (at >= lead) x.x = __ldg(bits);
            if (at + 1 >= lead && at + 1 < end) x.y = __ldg(bits + 1);
            if (at + 2 >= lead && at + 2 < end) x.z = __ldg(bits + 2);
            if (at + 3 >= lead && at + 3 < end) x.w = __ldg(bits + 3);
        }
        return x;
    }
};

// Where a chosen position goes. By CTAs of kThreads.
template <int32 kThreads>
class Positions {
  public:
    OA_DEVICE Positions(const TopKParams& p, int32 row)
        : p_(p),
          out_(p.indices + row * p.indices_stride),
          table_(p.block_size == 0 ? nullptr : p.block_table + (row / p.queries) * p.table_stride) {}

    OA_DEVICE void put(uint32 rank, uint32 position) const {
        int32 value = int32(position);
        if (table_ != nullptr) {
            const int32 place = quotient(value, p_.block_multiplier, p_.block_shift);
            value = __ldg(table_ + place) * p_.block_size + (value - place * p_.block_size);
        }
        out_[rank] = value;
    }
    OA_DEVICE void fill(uint32 from, uint32 rank, uint32 size) const {
        for (uint32 i = from + rank * kThreads + threadIdx.x; i < uint32(p_.k); i += size * kThreads) out_[i] = -1;
    }

  private:
    const TopKParams& p_;
    int32* out_;
    const int32* table_;
};

// Counters of chosen keys, those above the threshold and those equal to it.
struct Ranks {
    uint32 above, ties;
};

// One step in order: hands each chosen element to put(rank, element). Bits of `above` and `ties` are this thread's
// elements, in order; its elements follow those of the thread before it. Of the ties the first `limit` of all steps are
// chosen. `parity` alternates between steps.
template <int32 kWarps, typename Put>
OA_DEVICE void put_in_order(SelectStorage& s, uint32 above, uint32 ties, uint32 limit, Ranks& ranks, int32 parity,
                            Put put) {
    const int32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    // Two counts in a number: a warp has less than 2^16 elements.
    const uint32 own = __popc(above) + (__popc(ties) << 16);
    const uint32 mine = __reduce_add_sync(0xffffffffu, own);
    if (lane == 0) s.warp_sums[parity][warp] = mine;
    __syncthreads();
    const uint32 of_lane = lane < kWarps ? s.warp_sums[parity][lane] : 0u;
    uint32 a = ranks.above + __reduce_add_sync(0xffffffffu, lane < warp ? of_lane & 0xffffu : 0u), b = ranks.ties;
    ranks.above += __reduce_add_sync(0xffffffffu, of_lane & 0xffffu);
    if (limit != 0) {
        b += __reduce_add_sync(0xffffffffu, lane < warp ? of_lane >> 16 : 0u);
        ranks.ties += __reduce_add_sync(0xffffffffu, of_lane >> 16);
    }
    if (mine == 0) return;
    const uint32 before = inclusive_sum(own, lane) - own;
    a += before & 0xffffu, b += before >> 16;
    for (uint32 left = above | ties; left != 0; left &= left - 1) {
        const int32 i = __ffs(int32(left)) - 1;
        const bool is_above = above >> i & 1;
        if (is_above || b < limit) put(a + min_of(b, limit), i);
        a += is_above, b += !is_above;
    }
}

OA_DEVICE uint4 keys_of(const uint4& x) { return make_uint4(key_of(x.x), key_of(x.y), key_of(x.z), key_of(x.w)); }

// Bits of the numbers of a vector that test(number) holds for.
template <typename Test>
OA_DEVICE uint32 mask_of(const uint4& x, Test test) {
    return uint32(test(x.x)) | uint32(test(x.y)) << 1 | uint32(test(x.z)) << 2 | uint32(test(x.w)) << 3;
}

// Elements [begin, end) that a CTA has of a row.
struct Part {
    uint32 begin, end;
    OA_DEVICE Part(const Row& row, uint32 rank, uint32 ctas) {
        const uint32 size = ((row.end + ctas - 1) / ctas + 31) & ~31u;
        begin = min_of(rank * size, row.end), end = min_of(begin + size, row.end);
    }
};

// What a CTA has of the row in whole 16 bytes, read kLoads vectors a thread ahead.
template <int32 kThreads, int32 kLoads>
struct Stream {
    static constexpr uint32 kAcross = 4 * kThreads, kStep = kLoads * kAcross;
    const Row& row;
    const Part& part;
    uint32 begin, end;
    const uint4* next;  // of this thread's, what is read next
    uint4 ahead[kLoads];

    OA_DEVICE Stream(const Row& row, const Part& part) : row(row), part(part) {
        begin = part.begin + (part.begin < row.lead ? 4 : 0), end = part.end & ~3u;
    }
    OA_DEVICE void start() {
        const uint32 own = begin + 4 * threadIdx.x;
        next = reinterpret_cast<const uint4*>(row.base + own);
#pragma unroll
        for (int32 v = 0; v < kLoads; ++v) load(v, own + v * kAcross);
    }
    OA_DEVICE void load(int32 v, uint32 at) {
        if (at < end) ahead[v] = __ldg(next + v * kThreads);
    }
    // take(x, at) for this thread's numbers: bits of the four from `at` on.
    template <typename Take>
    OA_DEVICE void for_each(Take take) {
#pragma unroll 1
        for (uint32 at = begin + 4 * threadIdx.x; at < end; at += kStep) {
            next += kLoads * kThreads;
#pragma unroll
            for (int32 v = 0; v < kLoads; ++v) {
                if (at + v * kAcross >= end) break;
                take(ahead[v], at + v * kAcross);
                load(v, at + kStep + v * kAcross);
            }
        }
        // The first and the last few.
        uint32 edge = part.end;
        if (threadIdx.x == 0 && part.begin < row.lead) edge = 0;
        if (threadIdx.x == kThreads - 1 && end != part.end && end >= begin) edge = end;
        if (edge < part.end) take(row.load(edge), edge);
    }
};
