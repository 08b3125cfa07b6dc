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
// The floor is a number that somewhat more than k elements should reach, by a sample of four elements a thread; of rows
// that are candidates as a whole the lowest number. Where too few elements reach it, or more than there is room for,
// the row is read for each digit (decode/radix_select.cuh) and for the positions: the result is exact in any case.
//
// Candidates and positions are in ascending order without atomics: the warps of a CTA have consecutive elements, count
// those that are wanted, and begin where the warps before them end. So calls repeat exactly.
//
// Shared memory: histograms 24 KB, CANDIDATES of 8 bytes.
#include "decode/radix_select.cuh"
#include "params/top_k.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

constexpr int32 kThreads = THREADS, kWarps = kThreads / 32;
constexpr bool kCluster = CLUSTER;
constexpr int32 kVectors = VECTORS;  // of four elements that a thread asks for at once
constexpr int32 kCandidates = CANDIDATES;
constexpr int32 kSample = 4 * kThreads;

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

// What is chosen of numbers by their bits: those that are not below a floor, NaN among them.
struct NotBelow {
    float floor;
    OA_DEVICE bool above(uint32 bits) const { return !(__uint_as_float(bits) < floor); }
    OA_DEVICE bool tie(uint32) const { return false; }
    OA_DEVICE uint32 ties() const { return 0; }
};
// The same of keys by a threshold.
struct AboveThreshold {
    Threshold t;
    OA_DEVICE bool above(uint32 key) const { return key > t.key; }
    OA_DEVICE bool tie(uint32 key) const { return key == t.key && t.ties != 0; }
    OA_DEVICE uint32 ties() const { return t.ties; }
};

// Numbers of a vector above, and in the upper half ties.
template <typename Test>
OA_DEVICE uint32 chosen_of(const uint4& x, Test test) {
    const uint32 above = test.above(x.x) + test.above(x.y) + test.above(x.z) + test.above(x.w);
    return above + ((test.tie(x.x) + test.tie(x.y) + test.tie(x.z) + test.tie(x.w)) << 16);
}

// One step in order: hands each chosen element to put(rank, number, vector, element). A warp's elements follow those of
// the warp before it, a vector's lanes one another. `parity` alternates between steps.
template <int32 kCount, typename Test, typename Put>
OA_DEVICE void put_in_order(SelectStorage& s, const uint4 (&x)[kCount], Test test, Ranks& ranks, int32 parity,
                            Put put) {
    const int32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    // Two counts in a number: a warp's step has less than 2^16 elements.
    uint32 own[kCount], mine = 0;
#pragma unroll
    for (int32 v = 0; v < kCount; ++v) own[v] = chosen_of(x[v], test), mine += own[v];
    mine = __reduce_add_sync(0xffffffffu, mine);
    if (lane == 0) s.warp_sums[parity][warp] = mine;
    __syncthreads();
    const uint32 of_lane = lane < kWarps ? s.warp_sums[parity][lane] : 0u;
    const uint32 to_lane = __reduce_add_sync(0xffffffffu, lane < warp ? of_lane & 0xffffu : 0u);
    uint32 above = ranks.above + to_lane, ties = ranks.ties;
    ranks.above += __reduce_add_sync(0xffffffffu, of_lane & 0xffffu);
    if (test.ties() != 0) {
        ties += __reduce_add_sync(0xffffffffu, lane < warp ? of_lane >> 16 : 0u);
        ranks.ties += __reduce_add_sync(0xffffffffu, of_lane >> 16);
    }
    if (mine == 0) return;
#pragma unroll
    for (int32 v = 0; v < kCount; ++v) {
        if (!__any_sync(0xffffffffu, own[v])) continue;
        const uint32 to_here = inclusive_sum(own[v], lane), all = __shfl_sync(0xffffffffu, to_here, 31);
        uint32 a = above + ((to_here - own[v]) & 0xffffu), b = ties + ((to_here - own[v]) >> 16);
        const uint32 four[4] = {x[v].x, x[v].y, x[v].z, x[v].w};
#pragma unroll
        for (int32 e = 0; e < 4; ++e) {
            const bool is_above = test.above(four[e]), is_tie = test.tie(four[e]);
            if (is_above || (is_tie && b < test.ties())) put(a + min_of(b, test.ties()), four[e], v, e);
            a += is_above, b += is_tie;
        }
        above += all & 0xffffu, ties += all >> 16;
    }
}

OA_DEVICE uint4 keys_of(const uint4& x) { return make_uint4(key_of(x.x), key_of(x.y), key_of(x.z), key_of(x.w)); }

template <int32 kDigit>
OA_DEVICE void count_keys(SelectStorage& s, const uint4& keys, uint32 prefix) {
    count_key<kDigit>(s, keys.x, prefix), count_key<kDigit>(s, keys.y, prefix);
    count_key<kDigit>(s, keys.z, prefix), count_key<kDigit>(s, keys.w, prefix);
}

using Step = Digit<kThreads, kCluster>;

// Calls take(x, first, parity) for each step of this CTA's part of the row: bits of numbers; `first`: where this
// thread's first vector is.
template <typename Take>
OA_DEVICE void for_row(const Row& row, const Step& step, Take take) {
    constexpr uint32 kStep = kThreads * 4 * kVectors;
    const uint32 part = ((row.end + step.size - 1) / step.size + 127) & ~127u;
    const uint32 begin = step.rank * part, end = min_of(begin + part, row.end);
    const uint32 own = (threadIdx.x / 32) * (128 * kVectors) + 4 * (threadIdx.x & 31);
    uint4 next[kVectors];
    auto load = [&](uint32 at) {
        if (at >= row.lead && at + kStep <= end) {
            const uint4* from = reinterpret_cast<const uint4*>(row.base + at + own);
#pragma unroll
            for (int32 v = 0; v < kVectors; ++v) next[v] = __ldg(from + 32 * v);
        } else {
#pragma unroll
            for (int32 v = 0; v < kVectors; ++v) {
                const uint32 x = at + own + 128 * v;
                next[v] = row.load(x < end ? x : row.end);
            }
        }
    };
    if (begin < end) load(begin);
    int32 parity = 0;
    for (uint32 at = begin; at < end; at += kStep) {
        uint4 x[kVectors];
#pragma unroll
        for (int32 v = 0; v < kVectors; ++v) x[v] = next[v];
        if (at + kStep < end) load(at + kStep);
        take(x, at + own, parity);
        parity ^= 1;
    }
}

template <int32 kDigit>
OA_DEVICE void digit_of_row(const TopKParams& p, const Row& row, SharedStorage& s, const Step& step, Selected& found) {
    for_row(row, step, [&](const uint4(&x)[kVectors], uint32, int32) {
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
// the row and five standard deviations more. The same in all CTAs of a cluster. Leaves counts in the histogram.
OA_DEVICE float floor_of(const TopKParams& p, const Row& row, SharedStorage& s) {
    const uint32 vectors = row.end / 4;
    const uint4 keys = keys_of(row.load(4 * uint32(uint64(threadIdx.x) * vectors / kThreads)));
    const float share = float(p.k) * (float(kSample) / float(row.end));
    const uint32 rank = uint32(min_of(share + 5.0f * sqrtf(share) + 8.0f, float(kSample)));
    const Digit<kThreads, false> own{s.select, 0, 1};
    Selected found;
    count_keys<0>(s.select, keys, 0);
    __syncthreads();
    own.template find<0>(rank);
    found.template take<0>(s.select, rank);
    if (found.digits == 1 && found.inside == 0) return kLowest;  // the sample has fewer numbers
    count_keys<1>(s.select, keys, found.prefix);
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
    const bool is_short = row.end <= kCandidates;
    float floor = kLowest;
    if (!is_short) {
        floor = floor_of(p, row, s);
        __syncthreads();
        clear_histogram(s.select);
    }
    Ranks ranks{0, 0};
    for_row(row, step, [&](const uint4(&x)[kVectors], uint32 first, int32 parity) {
        put_in_order(s.select, x, NotBelow{floor}, ranks, parity, [&](uint32 rank, uint32 bits, int32 v, int32 e) {
            if (rank < kCandidates) s.keys[rank] = key_of(bits), s.positions[rank] = first + 128 * v + e - row.lead;
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
        for_candidates(s, ranks.above, [&](const uint4& keys, uint32 first, int32 parity) {
            const uint4 one[1] = {keys};
            put_in_order(s.select, one, AboveThreshold{found.threshold}, places, parity,
                         [&](uint32 rank, uint32, int32, int32 e) { out.put(rank, s.positions[first + e]); });
        });
    } else {
        digit_of_row<0>(p, row, s, step, found);
        if (!found.done) digit_of_row<1>(p, row, s, step, found);
        if (!found.done) digit_of_row<2>(p, row, s, step, found);
        Ranks places{found.before, found.before_in};
        for_row(row, step, [&](const uint4(&x)[kVectors], uint32 first, int32 parity) {
            uint4 keys[kVectors];
#pragma unroll
            for (int32 v = 0; v < kVectors; ++v) keys[v] = keys_of(x[v]);
            put_in_order(s.select, keys, AboveThreshold{found.threshold}, places, parity,
                         [&](uint32 rank, uint32, int32 v, int32 e) { out.put(rank, first + 128 * v + e - row.lead); });
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
