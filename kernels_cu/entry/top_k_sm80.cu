// Positions of the k largest numbers of each row: the sparse attention's choice of keys by the indexer's logits.
//
//   indices[r, :] = the positions of the k largest of logits[r, start : start + length], counted from start, ascending
//
// logits: fp32 [rows, width]; indices: int32 [rows, k]; -1 behind the last one where a row has fewer numbers than k.
// NaN is the largest, of equal numbers the first ones are chosen, -inf is never chosen. With a block_table positions
// become rows of a pool: block_table[sequence, position / block_size] * block_size + position % block_size.
//
// A row belongs to a CTA, or with CLUSTER to a cluster, whose CTAs have consecutive parts of it and add their counts
// through distributed shared memory. It is read once:
//
//   sample | row: what is not below the floor is a candidate | digits 1, 2, 3 of the candidates | positions
//
// The floor is a number that somewhat more than k elements should reach, by a sample of 1024; of rows
// that are candidates as a whole the lowest number. Where too few elements reach it, or more than there is room for,
// the row is read for each digit (decode/radix_select.cuh) and for the positions: the result is exact in any case.
//
// Candidates and positions are in ascending order without atomics: the threads of a CTA have consecutive elements,
// count those that are wanted, and begin where the threads before them end. So calls repeat exactly.
//
// Shared memory: histograms 24 KB, CANDIDATES of 8 bytes.
#include "decode/radix_select.cuh"
#include "params/top_k.cuh"
#include "ptx/l2.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

constexpr int32 kThreads = THREADS, kWarps = kThreads / 32;
constexpr bool kCluster = CLUSTER;
constexpr int32 kVectors = VECTORS;  // of four elements that a thread asks for at once
constexpr uint32 kCandidates = CANDIDATES;
constexpr uint32 kAhead = 4;  // lines of 128 bytes that a thread asks for ahead
constexpr int32 kSampleOwn = kThreads >= 1024 ? 1 : 2, kSample = kSampleOwn * kThreads;  // of a thread, of a row

struct SharedStorage {
    SelectStorage select;
    alignas(16) uint32 keys[kCandidates];
    alignas(16) uint32 positions[kCandidates];
};

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

// Where a chosen position goes.
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
template <typename Put>
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

template <int32 kDigit>
OA_DEVICE void count_keys(SelectStorage& s, const uint4& keys, uint32 prefix) {
    count_key<kDigit>(s, keys.x, prefix), count_key<kDigit>(s, keys.y, prefix);
    count_key<kDigit>(s, keys.z, prefix), count_key<kDigit>(s, keys.w, prefix);
}

using Step = Digit<kThreads, kCluster>;

// Elements [begin, end) that a CTA has of a row.
struct Part {
    uint32 begin, end;
    OA_DEVICE Part(const Row& row, const Step& step) {
        const uint32 size = ((row.end + step.size - 1) / step.size + 31) & ~31u;
        begin = min_of(step.rank * size, row.end), end = min_of(begin + size, row.end);
    }
};

// Calls take(x, first, parity) for each step of this CTA's part of the row: bits of a thread's consecutive numbers, and
// where they are.
template <typename Take>
OA_DEVICE void for_row(const Row& row, const Part& part, Take take) {
    constexpr uint32 kOwn = 4 * kVectors, kStep = kThreads * kOwn;
    uint4 next[kVectors];
    auto load = [&](uint32 at) {
        const uint32 first = at + threadIdx.x * kOwn;
        if (first >= row.lead && first + kOwn <= part.end) {
            const uint4* from = reinterpret_cast<const uint4*>(row.base + first);
#pragma unroll
            for (int32 v = 0; v < kVectors; ++v) next[v] = __ldg(from + v);
        } else {
#pragma unroll
            for (int32 v = 0; v < kVectors; ++v) next[v] = row.load(first + 4 * v < part.end ? first + 4 * v : row.end);
        }
    };
    if (part.begin < part.end) load(part.begin);
    int32 parity = 0;
    for (uint32 at = part.begin; at < part.end; at += kStep) {
        uint4 x[kVectors];
#pragma unroll
        for (int32 v = 0; v < kVectors; ++v) x[v] = next[v];
        if (at + kStep < part.end) load(at + kStep);
        take(x, at + threadIdx.x * kOwn, parity);
        parity ^= 1;
    }
}

template <int32 kDigit>
OA_DEVICE void digit_of_row(const TopKParams& p, const Row& row, const Part& part, SharedStorage& s, const Step& step,
                            Selected& found) {
    for_row(row, part, [&](const uint4(&x)[kVectors], uint32, int32) {
#pragma unroll
        for (int32 v = 0; v < kVectors; ++v) count_keys<kDigit>(s.select, keys_of(x[v]), found.prefix);
    });
    __syncthreads();
    step.template find<kDigit>(p.k - found.above);
    found.template take<kDigit>(s.select, p.k);
}

// Candidates of this CTA, four a thread and step; beyond the last one keys that are never chosen.
template <typename Take>
OA_DEVICE void for_candidates(const SharedStorage& s, uint32 count, Take take) {
    int32 parity = 0;
    for (uint32 at = 0; at < count; at += 4 * kThreads) {
        const uint32 first = at + 4 * threadIdx.x;
        uint4 keys = make_uint4(0, 0, 0, 0);
        if (first < count) keys = *reinterpret_cast<const uint4*>(s.keys + first);
        if (first + 1 >= count) keys.y = 0;
        if (first + 2 >= count) keys.z = 0;
        if (first + 3 >= count) keys.w = 0;
        take(keys, first, parity);
        parity ^= 1;
    }
}

template <int32 kDigit>
OA_DEVICE void digit_of_candidates(const TopKParams& p, uint32 count, SharedStorage& s, const Step& step,
                                   Selected& found) {
    for_candidates(s, count,
                   [&](const uint4& keys, uint32, int32) { count_keys<kDigit>(s.select, keys, found.prefix); });
    __syncthreads();
    step.template find<kDigit>(p.k - found.above);
    found.template take<kDigit>(s.select, p.k);
}

OA_DEVICE void clear_histogram(SelectStorage& s) {
    for (int32 i = threadIdx.x; i < kAllBins / 4; i += kThreads) {
        reinterpret_cast<uint4*>(s.histogram)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
}

// A number that more than k elements of the row should reach: an element of a sample, whose rank there is what k is of
// the row and four standard deviations more. The same in all CTAs of a cluster. Leaves counts in the histogram.
OA_DEVICE float floor_of(const TopKParams& p, const Row& row, SharedStorage& s) {
    const uint32 vectors = row.end / 4;
    const uint4 x = row.load(4 * uint32(uint64(threadIdx.x) * vectors / kThreads));
    const uint32 own_keys[2] = {key_of(x.x), key_of(x.z)};
    const float share = float(p.k) * (float(kSample) / float(row.end));
    const uint32 rank = uint32(min_of(share + 4.0f * sqrtf(share) + 8.0f, float(kSample)));
    const Digit<kThreads, false> own{s.select, 0, 1};
    Selected found;
#pragma unroll
    for (int32 i = 0; i < kSampleOwn; ++i) count_key<0>(s.select, own_keys[i], 0);
    __syncthreads();
    own.template find<0>(rank);
    found.template take<0>(s.select, rank);
    if (found.digits == 1 && found.inside == 0) return kLowest;  // the sample has fewer numbers
#pragma unroll
    for (int32 i = 0; i < kSampleOwn; ++i) count_key<1>(s.select, own_keys[i], found.prefix);
    __syncthreads();
    own.template find<1>(rank - found.above);
    found.template take<1>(s.select, rank);
    return number_of(found.prefix);
}

// Sum of the candidates of all CTAs; `fits`: whether none of them has more than there is room for.
OA_DEVICE uint32 all_candidates(SharedStorage& s, const Step& step, uint32 own, bool& fits) {
    if constexpr (!kCluster) {
        fits = own <= kCandidates;
        return own;
    } else {
        if (threadIdx.x == 0) s.select.count = own;
        cluster_sync();
        const uint32 lane = threadIdx.x & 31;
        const uint32 of_lane = lane < step.size ? load_cluster(smem_addr_of(&s.select.count), lane) : 0u;
        fits = !__any_sync(0xffffffffu, of_lane > kCandidates);
        return __reduce_add_sync(0xffffffffu, of_lane);
    }
}

OA_DEVICE void select_row(const TopKParams& p, const Row& row, SharedStorage& s, const Step& step,
                          const Positions& out) {
    const Part part(row, step);
    float floor = kLowest;
    if (row.end > kCandidates) {
        // The row is under way while the sample is read and ranked.
        for (uint32 i = 0; i < kAhead; ++i) {
            const uint32 at = part.begin + (i * kThreads + threadIdx.x) * 32;
            if (at < part.end && at >= row.lead) prefetch_l2(row.base + at);
        }
        floor = floor_of(p, row, s);
        __syncthreads();
        clear_histogram(s.select);
    }
    Ranks ranks{0, 0};
    for_row(row, part, [&](const uint4(&x)[kVectors], uint32 first, int32 parity) {
        uint32 chosen = 0;
#pragma unroll
        for (int32 v = 0; v < kVectors; ++v) {
            // NaN is not below anything.
            chosen |= mask_of(x[v], [&](uint32 bits) { return !(__uint_as_float(bits) < floor); }) << (4 * v);
        }
        put_in_order(s.select, chosen, 0, 0, ranks, parity, [&](uint32 rank, int32 i) {
            if (rank >= kCandidates) return;
            s.keys[rank] = key_of(__float_as_uint(__ldg(row.base + first + i)));
            s.positions[rank] = first + i - row.lead;
        });
    });
    bool fits;
    const uint32 all = all_candidates(s, step, ranks.above, fits);
    __syncthreads();
    Selected found;
    if (fits && (all >= uint32(p.k) || floor == kLowest)) {
        digit_of_candidates<0>(p, ranks.above, s, step, found);
        if (!found.done) digit_of_candidates<1>(p, ranks.above, s, step, found);
        if (!found.done) digit_of_candidates<2>(p, ranks.above, s, step, found);
        Ranks places{found.before, found.before_in};
        const Threshold t = found.threshold;
        for_candidates(s, ranks.above, [&](const uint4& keys, uint32 first, int32 parity) {
            const uint32 above = mask_of(keys, [&](uint32 key) { return key > t.key; });
            const uint32 ties = t.ties == 0 ? 0 : mask_of(keys, [&](uint32 key) { return key == t.key; });
            put_in_order(s.select, above, ties, t.ties, places, parity,
                         [&](uint32 rank, int32 i) { out.put(rank, s.positions[first + i]); });
        });
    } else {
        digit_of_row<0>(p, row, part, s, step, found);
        if (!found.done) digit_of_row<1>(p, row, part, s, step, found);
        if (!found.done) digit_of_row<2>(p, row, part, s, step, found);
        Ranks places{found.before, found.before_in};
        const Threshold t = found.threshold;
        for_row(row, part, [&](const uint4(&x)[kVectors], uint32 first, int32 parity) {
            uint32 above = 0, ties = 0;
#pragma unroll
            for (int32 v = 0; v < kVectors; ++v) {
                const uint4 keys = keys_of(x[v]);
                above |= mask_of(keys, [&](uint32 key) { return key > t.key; }) << (4 * v);
                if (t.ties != 0) ties |= mask_of(keys, [&](uint32 key) { return key == t.key; }) << (4 * v);
            }
            put_in_order(s.select, above, ties, t.ties, places, parity,
                         [&](uint32 rank, int32 i) { out.put(rank, first + i - row.lead); });
        });
    }
    out.fill(found.chosen, step.rank, step.size);
}

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) top_k_sm80(const __grid_constant__ TopKParams p) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(smem_raw);
    uint32 rank = 0, size = 1;
    if constexpr (kCluster) rank = cluster_rank(), size = cluster_size();
    const Step step{s.select, rank, size};
    const int32 at = int32(blockIdx.x / size);
    clear_histogram(s.select);
    select_row(p, Row(p, at), s, step, Positions(p, at));
    if constexpr (kCluster) cluster_sync();  // others may still read this CTA's histograms
}
