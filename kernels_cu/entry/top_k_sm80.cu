// Positions of the k largest numbers of each row: the sparse attention's choice of keys by the indexer's logits.
//
//   indices[r, :] = the positions of the k largest of logits[r, start : start + length], counted from start, ascending
//
// logits: fp32 [rows, width]; indices: int32 [rows, k]; -1 behind the last one where a row has fewer numbers than k.
// NaN is the largest, of equal numbers the first ones are chosen, -inf is never chosen. With a block_table positions
// become rows of a pool: block_table[sequence, position / block_size] * block_size + position % block_size.
//
// A row belongs to a CTA, or with CLUSTER to a cluster, whose CTAs have consecutive parts of it and add their counts
// through distributed shared memory. It is read once (decode/sampled_select.cuh):
//
//   sample: a floor | row: what is not below it is a candidate | bins of candidates | ties | bits of positions
//
// Where the sample misleads, or many elements are alike, the row is read for each of three digits
// (decode/radix_select.cuh) and for the positions: the result is exact in any case.
//
// The order of positions comes from bits, or from sums over threads, and not from atomics: calls repeat exactly.
//
// Shared memory: bins 16 KB, bits of positions 4 * MASK, DEPTH candidates of 8 bytes a thread, 8 KB for more.
#include "decode/radix_select.cuh"
#include "decode/sampled_select.cuh"
#include "params/top_k.cuh"
#include "ptx/l2.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

constexpr int32 kThreads = THREADS, kWarps = kThreads / 32;
constexpr bool kCluster = CLUSTER;
constexpr int32 kVectors = VECTORS;  // of four elements that a thread asks for at once
constexpr uint32 kAhead = 4;  // lines of 128 bytes that a thread asks for ahead
using Sampled = SampledSelect<kThreads, DEPTH, MASK>;

// The row's digits are counted where nothing else is needed any more.
union SharedStorage {
    Sampled::Storage sampled;
    SelectStorage select;
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

// Calls take(x, at) for this thread's numbers of this CTA's part of the row: bits of the four from `at` on.
template <int32 kLoads, typename Take>
OA_DEVICE void for_row(const Row& row, const Part& part, Take take) {
    constexpr uint32 kAcross = 4 * kThreads, kStep = kLoads * kAcross;
    const uint32 own = 4 * threadIdx.x;
    uint32 at = part.begin;
    if (at < row.lead) {  // the part's first 16 bytes are not the row's as a whole
        take(row.load(own < part.end ? own : row.end), own);
        at = kAcross;
    }
    const uint32 rounds = at < part.end ? (part.end - at) / kStep : 0;
    if (rounds > 0) {
        const uint4* from = reinterpret_cast<const uint4*>(row.base + at + own);
        uint4 next[kLoads];
#pragma unroll
        for (int32 v = 0; v < kLoads; ++v) next[v] = __ldg(from + v * kThreads);
        for (uint32 r = 0; r < rounds; ++r) {
            from += kLoads * kThreads;
#pragma unroll
            for (int32 v = 0; v < kLoads; ++v) {
                take(next[v], at + own + v * kAcross);
                if (r + 1 < rounds) next[v] = __ldg(from + v * kThreads);
            }
            at += kStep;
        }
    }
    for (at += own; at < part.end; at += kAcross) take(row.load(at), at);
}

template <int32 kDigit>
OA_DEVICE void digit_of_row(const TopKParams& p, const Row& row, const Part& part, SelectStorage& s, const Step& step,
                            Selected& found) {
    for_row<2>(row, part, [&](const uint4& x, uint32) { count_keys<kDigit>(s, keys_of(x), found.prefix); });
    __syncthreads();
    step.template find<kDigit>(p.k - found.above);
    found.template take<kDigit>(s, p.k);
}

constexpr int32 kSampleSize = 2048, kSampleOwn = kSampleSize / kThreads;  // of a row, of a thread, in one round
constexpr uint32 kLongRow = 1 << 18;  // elements from which on the sample is of kLongRounds rounds
constexpr int32 kLongRounds = 4;

// Elements at equal distances: of each 16 bytes up to four.
OA_DEVICE void sample_keys(const Row& row, int32 round, int32 rounds, uint32 (&keys)[kSampleOwn]) {
    constexpr int32 kEach = kSampleOwn < 4 ? kSampleOwn : 4, kLoads = kSampleOwn / kEach;
    const uint32 vectors = row.end / 4, places = uint32(rounds * kLoads * kThreads);
#pragma unroll
    for (int32 i = 0; i < kLoads; ++i) {
        const uint32 place = uint32((round * kLoads + i) * kThreads) + threadIdx.x;
        const uint4 x = row.load(4 * uint32(uint64(place) * vectors / places));
        keys[i * kEach] = key_of(x.x);
        if constexpr (kEach > 1) keys[i * kEach + 1] = key_of(x.z);
        if constexpr (kEach > 2) keys[i * kEach + 2] = key_of(x.y), keys[i * kEach + 3] = key_of(x.w);
    }
}

OA_DEVICE bool sample_row(const TopKParams& p, const Row& row, Sampled::Storage& s, Sampled::Scale& scale) {
    const int32 rounds = row.end >= kLongRow ? kLongRounds : 1;
    // What k is of the row, and four standard deviations more and less.
    const float size = float(kSampleSize * rounds), share = float(p.k) * (size / float(row.end));
    const float spread = 4.0f * sqrtf(share) + 8.0f;
    const uint32 low = uint32(fminf(share + spread, size)), high = uint32(fmaxf(share - spread, 1.0f));
    return Sampled::sample<kSampleOwn>(s, rounds, low, high, scale, [&](int32 round, uint32(&keys)[kSampleOwn]) {
        sample_keys(row, round, rounds, keys);
    });
}

// Sum over the cluster's CTAs of what each has in `own`, and the sum of those of lower rank. All lanes of a warp.
OA_DEVICE uint32 cluster_sum(const uint32& own, const Step& step, uint32& before) {
    if constexpr (!kCluster) {
        before = 0;
        return own;
    } else {
        const uint32 lane = threadIdx.x & 31;
        const uint32 of_lane = lane < step.size ? load_cluster(smem_addr_of(&own), lane) : 0u;
        before = __reduce_add_sync(0xffffffffu, lane < step.rank ? of_lane : 0u);
        return __reduce_add_sync(0xffffffffu, of_lane);
    }
}

// Whether no CTA of the cluster has spilled more candidates than there is room for. All lanes of a warp.
OA_DEVICE bool all_have_room(const uint32& spilled, const Step& step) {
    if constexpr (!kCluster) {
        return spilled <= Sampled::kSpilled;
    } else {
        const uint32 lane = threadIdx.x & 31;
        const uint32 of_lane = lane < step.size ? load_cluster(smem_addr_of(&spilled), lane) : 0u;
        return !__any_sync(0xffffffffu, of_lane > Sampled::kSpilled);
    }
}

// Finds the k-th largest candidate's bin, in s.kth. False: there are not so many, or some CTA had no room for its own.
// Behind a barrier of the cluster, ends with one of the CTA.
OA_DEVICE bool find_bin(const TopKParams& p, Sampled::Storage& s, const Step& step) {
    constexpr int32 kOwn = Sampled::kBins / kThreads;
    const uint32 top = Sampled::kBins - 1 - threadIdx.x * kOwn;
    uint32 count[kOwn] = {}, sum = 0, all;
#pragma unroll
    for (int32 i = 0; i < kOwn; ++i) count[i] = s.bins[top - i];
    if constexpr (kCluster) {
#pragma unroll
        for (uint32 r = 1; r < kMaxCluster; ++r) {
            if (r >= step.size) continue;
            const uint32 other = step.rank + r < step.size ? step.rank + r : step.rank + r - step.size;
#pragma unroll
            for (int32 i = 0; i < kOwn; ++i) count[i] += load_cluster(smem_addr_of(&s.bins[top - i]), other);
        }
    }
#pragma unroll
    for (int32 i = 0; i < kOwn; ++i) sum += count[i];
    const uint32 above = Sampled::sum_before(s, sum, all);
    if (above < uint32(p.k) && above + sum >= uint32(p.k)) Sampled::find(s.kth, p.k, count, top, above);
    const bool fits = all_have_room(s.num_spilled, step);
    __syncthreads();
    return fits && all >= uint32(p.k);
}

// Ties of all CTAs; `before` of them are of CTAs of lower rank. False: they are too many. Ends with a barrier.
OA_DEVICE bool gather_ties(Sampled::Storage& s, const Step& step, const uint2*& ties, uint32& count) {
    ties = s.ties;
    uint32 before;
    count = cluster_sum(s.num_ties, step, before);
    if (count > Sampled::kTies) return false;
    if constexpr (kCluster) {
        uint32 to = 0;
        for (uint32 r = 0; r < step.size; ++r) {
            const uint32 of_rank = load_cluster(smem_addr_of(&s.num_ties), r);
            for (uint32 i = threadIdx.x; i < of_rank; i += kThreads) {
                const uint32 from = smem_addr_of(&s.ties[i]);
                s.all_ties[to + i] = make_uint2(load_cluster(from, r), load_cluster(from + 4, r));
            }
            to += of_rank;
        }
        ties = s.all_ties;
        __syncthreads();
    }
    return true;
}

// The positions of a row that is read once. False: that is not enough, and nothing is written.
OA_DEVICE bool select_once(const TopKParams& p, const Row& row, Sampled::Storage& s, const Step& step,
                           const Positions& out) {
    using S = Sampled;
    if (row.end - row.lead <= uint32(p.k)) return false;
    const Part part(row, step);
    // The row is under way while the sample is read and ranked.
    for (uint32 i = 0; i < kAhead; ++i) {
        const uint32 at = part.begin + (i * kThreads + threadIdx.x) * 32;
        if (at < part.end && at >= row.lead) prefetch_l2(row.base + at);
    }
    S::clear(s);
    __syncthreads();
    S::Scale scale;
    if (!sample_row(p, row, s, scale)) return false;

    S::Stack stack{s};
    for_row<kVectors>(row, part, [&](const uint4& x, uint32 at) {
        stack.make_room(scale);
        // NaN is not below anything.
        if (!(__uint_as_float(x.x) < scale.floor)) stack.push(x.x, at);
        if (!(__uint_as_float(x.y) < scale.floor)) stack.push(x.y, at + 1);
        if (!(__uint_as_float(x.z) < scale.floor)) stack.push(x.z, at + 2);
        if (!(__uint_as_float(x.w) < scale.floor)) stack.push(x.w, at + 3);
    });
    stack.count(scale);
    step.sync();
    if (!find_bin(p, s, step)) return false;

    const S::Rank kth = s.kth;
    const float edge = float(kth.bin);
    uint32 sure = 0;
    stack.for_each([&](uint2 x) {
        const float place = scale.place(x.x);
        if (place >= edge + 1.0f) {
            S::set_bit(s, x.y - part.begin), ++sure;
        } else if (place >= edge) {
            const uint32 i = atomicAdd(&s.num_ties, 1u);
            if (i < S::kTies) s.ties[i] = make_uint2(key_of(x.x), x.y);
        }
    });
    if constexpr (kCluster) {
        sure = __reduce_add_sync(0xffffffffu, sure);
        if ((threadIdx.x & 31) == 0 && sure != 0) atomicAdd(&s.num_sure, sure);
    }
    step.sync();
    const uint2* ties;
    uint32 num_ties, first = 0;
    if (!gather_ties(s, step, ties, num_ties)) return false;
    const uint32 wanted = p.k - kth.above;
    if (threadIdx.x < num_ties) {
        const uint2 own = ties[threadIdx.x];
        uint32 better = 0;
#pragma unroll 4
        for (uint32 i = 0; i < num_ties; ++i) better += S::is_better(ties[i], own);
        if (better < wanted && own.y >= part.begin && own.y < part.end) S::set_bit(s, own.y - part.begin);
        if (better == wanted - 1) s.last = own;
    }
    if constexpr (kCluster) cluster_sum(s.num_sure, step, first);
    __syncthreads();
    const uint2 last = s.last;
    if constexpr (kCluster) {
        // Chosen ties of the parts before this one.
        for (uint32 i = 0; i < num_ties; ++i) first += ties[i].y < part.begin && !S::is_better(last, ties[i]);
    }
    const uint32 begin = part.begin, end = part.end;
    for (uint32 window = begin;;) {
        first += S::for_bits(s, min_of(end - window, S::kWindow), first,
                             [&](uint32 rank, uint32 at) { out.put(rank, window + at - row.lead); });
        if (end - window <= S::kWindow) break;
        window += S::kWindow;
        __syncthreads();
        for (int32 i = threadIdx.x; i < MASK; i += kThreads) s.mask[i] = 0;
        __syncthreads();
        stack.for_each([&](uint2 x) {
            if (x.y >= window && !S::is_better(last, make_uint2(key_of(x.x), x.y))) S::set_bit(s, x.y - window);
        });
        __syncthreads();
    }
    return true;
}

// The same in any case.
OA_DEVICE void select_by_digits(const TopKParams& p, const Row& row, SelectStorage& s, const Step& step,
                                const Positions& out) {
    const Part part(row, step);
    step.sync();  // others may still read what is overwritten
    for (int32 i = threadIdx.x; i < kAllBins / 4; i += kThreads) {
        reinterpret_cast<uint4*>(s.histogram)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    Selected found;
    digit_of_row<0>(p, row, part, s, step, found);
    if (!found.done) digit_of_row<1>(p, row, part, s, step, found);
    if (!found.done) digit_of_row<2>(p, row, part, s, step, found);
    Ranks places{found.before, found.before_in};
    const Threshold t = found.threshold;
    int32 parity = 0;
    for (uint32 at = part.begin; at < part.end; at += 4 * kThreads) {
        const uint32 first = at + 4 * threadIdx.x;
        const uint4 keys = keys_of(row.load(first < part.end ? first : row.end));
        const uint32 above = mask_of(keys, [&](uint32 key) { return key > t.key; });
        const uint32 ties = t.ties == 0 ? 0 : mask_of(keys, [&](uint32 key) { return key == t.key; });
        put_in_order(s, above, ties, t.ties, places, parity,
                     [&](uint32 rank, int32 i) { out.put(rank, first + i - row.lead); });
        parity ^= 1;
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
    const Row row(p, at);
    const Positions out(p, at);
    if (!select_once(p, row, s.sampled, step, out)) select_by_digits(p, row, s.select, step, out);
    if constexpr (kCluster) cluster_sync();  // others may still read this CTA's shared memory
}
