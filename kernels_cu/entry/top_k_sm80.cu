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
#include "ptx/bulk_prefetch.cuh"
#include "ptx/cluster_memory.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

constexpr int32 kThreads = THREADS, kWarps = kThreads / 32;
constexpr bool kCluster = CLUSTER;
constexpr int32 kVectors = VECTORS;  // of four elements that a thread asks for at once
constexpr bool kIsAlone = CTAS == 1;  // no other CTA of the SM has something to do while this one waits
constexpr uint32 kAhead = 1 << 16;  // elements that are asked for ahead
using Sampled = SampledSelect<kThreads, DEPTH, MASK>;

// The row's digits are counted where nothing else is needed any more.
union SharedStorage {
    Sampled::Storage sampled;
    SelectStorage select;
};

static_assert(sizeof(SharedStorage) <= 4 * 4096 + 4 * MASK + 8 * DEPTH * kThreads + 8 * 1024 + 256, "as the registry");

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

// What a CTA has of the row in whole 16 bytes, read kLoads vectors a thread ahead.
template <int32 kLoads>
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

template <int32 kDigit>
OA_DEVICE void digit_of_row(const TopKParams& p, const Row& row, const Part& part, SelectStorage& s, const Step& step,
                            Selected& found) {
    Stream<2> stream(row, part);
    stream.start();
    stream.for_each([&](const uint4& x, uint32) { count_keys<kDigit>(s, keys_of(x), found.prefix); });
    __syncthreads();
    step.template find<kDigit>(p.k - found.above);
    found.template take<kDigit>(s, p.k);
}

// A sample is of kSampled of four neighbours at equal distances, kThreads times; of long rows kLongRounds times as
// often. The CTAs of a cluster have room for more candidates of a row.
constexpr int32 kSampled = kThreads >= 1024 ? 2 : 4;
constexpr uint32 kSampleSize = kSampled * kThreads, kLongRow = kCluster ? 1 << 21 : 1 << 17;
constexpr int32 kLongShift = 2, kLongRounds = 1 << kLongShift;

struct RowSample {
    const Row& row;
    uint32 begin, vectors;
    bool is_long;

    OA_DEVICE explicit RowSample(const Row& row) : row(row), is_long(row.end >= kLongRow) {
        begin = row.lead == 0 ? 0 : 4;
        vectors = max_of(row.end / 4, begin / 4) - begin / 4;
    }
    OA_DEVICE uint4 load(int32 round) const {
        const uint64 place = uint32(round * kThreads) + threadIdx.x;
        const uint32 vector = uint32(place * vectors / kThreads >> (is_long ? kLongShift : 0));
        return __ldg(reinterpret_cast<const uint4*>(row.base + begin + 4 * vector));
    }
    static OA_DEVICE void keys_of_some(const uint4& x, uint32 (&keys)[kSampled]) {
        keys[0] = key_of(x.x), keys[1] = key_of(x.z);
        if constexpr (kSampled > 2) keys[2] = key_of(x.y), keys[3] = key_of(x.w);
    }
    OA_DEVICE bool rank(const TopKParams& p, Sampled::Storage& s, const uint4& first, Sampled::Scale& scale) const {
        // What k is of the row, and four standard deviations more and less.
        const float size = float(is_long ? kSampleSize << kLongShift : kSampleSize);
        const float share = float(p.k) * size * rcp_approx(float(row.end));
        const float spread = 4.0f * exp2_approx(0.5f * log2_approx(share)) + 8.0f;
        const uint32 low = uint32(fminf(share + spread, size)), high = uint32(fmaxf(share - spread, 1.0f));
        uint32 keys[kSampled];
        keys_of_some(first, keys);
        return Sampled::sample(s, is_long ? kLongRounds : 1, low, high, scale, keys,
                               [&](int32 round, uint32(&to)[kSampled]) { keys_of_some(load(round), to); });
    }
};

// Finds the k-th largest candidate's bin, in s.kth. False: there are not so many, or some CTA had no room for its own.
// Behind a barrier of the cluster, ends with one of the CTA.
OA_DEVICE bool find_bin(const TopKParams& p, Sampled::Storage& s, const Step& step) {
    constexpr int32 kOwn = Sampled::kBins / kThreads;
    static_assert(kOwn == 2 || !kCluster, "bins of a thread are read from the others by twos");
    const uint32 top = Sampled::kBins - 1 - threadIdx.x * kOwn;
    uint32 count[kOwn], sum = 0, all;
#pragma unroll
    for (int32 i = 0; i < kOwn; ++i) count[i] = s.bins[top - i];
    bool fits = s.num_spilled <= Sampled::kSpilled;
    if constexpr (kCluster) {
        const uint32 lane = threadIdx.x & 31;
        const uint32 spilled = lane < step.size ? load_cluster(smem_addr_of(&s.num_spilled), lane) : 0u;
        uint2 more[kMaxCluster] = {};
#pragma unroll
        for (uint32 r = 1; r < kMaxCluster; ++r) {
            const uint32 other = step.rank + r < step.size ? step.rank + r : step.rank + r - step.size;
            if (r < step.size) more[r] = load_cluster2(smem_addr_of(&s.bins[top - 1]), other);
        }
#pragma unroll
        for (uint32 r = 1; r < kMaxCluster; ++r) count[0] += more[r].y, count[kOwn - 1] += more[r].x;
        fits = !__any_sync(0xffffffffu, spilled > Sampled::kSpilled);
    }
#pragma unroll
    for (int32 i = 0; i < kOwn; ++i) sum += count[i];
    const uint32 above = Sampled::sum_before(s, sum, all);
    if (above < uint32(p.k) && above + sum >= uint32(p.k)) Sampled::find(s.kth, p.k, count, top, above);
    __syncthreads();
    return fits && all >= uint32(p.k);
}

// Those of the cluster that are in the k-th largest's bin; `sure`: how many higher ones the CTAs of lower rank have.
// False: they are too many. Behind a barrier of the cluster.
OA_DEVICE bool gather_ties(Sampled::Storage& s, const Step& step, const uint2*& ties, uint32& count, uint32& sure) {
    if constexpr (!kCluster) {
        ties = s.ties, count = s.num_ties, sure = 0;
        return count <= Sampled::kTies;
    } else {
        const uint32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
        uint32 of_lane = 0, sure_of_lane = 0;
        if (lane < step.size) {
            of_lane = load_cluster(smem_addr_of(&s.num_ties), lane);
            sure_of_lane = load_cluster(smem_addr_of(&s.num_sure), lane);
        }
        count = __reduce_add_sync(0xffffffffu, of_lane);
        sure = __reduce_add_sync(0xffffffffu, lane < step.rank ? sure_of_lane : 0u);
        if (count > Sampled::kTies) return false;
        // A warp has a CTA's.
        const uint32 to = __reduce_add_sync(0xffffffffu, lane < warp ? of_lane : 0u);
        const uint32 of_warp = __shfl_sync(0xffffffffu, of_lane, warp);
        for (uint32 i = lane; i < of_warp; i += 32) {
            s.all_ties[to + i] = load_cluster2(smem_addr_of(&s.ties[i]), warp);
        }
        ties = s.all_ties;
        __syncthreads();
        return true;
    }
}

// The positions of a row that is read once. False: that is not enough, and nothing is written.
OA_DEVICE bool select_once(const TopKParams& p, const Row& row, Sampled::Storage& s, const Step& step,
                           const Positions& out) {
    using S = Sampled;
    const RowSample sample(row);
    if (row.end - row.lead <= uint32(p.k) || sample.vectors == 0) return false;
    const Part part(row, step);
    // The row is under way while the sample is read and ranked.
    const uint4 first_sample = sample.load(0);
    Stream<kVectors> stream(row, part);
    if constexpr (kIsAlone) stream.start();
    constexpr uint32 kChunk = 4096;
    const uint32 chunk = stream.begin + (kIsAlone ? stream.kStep : 0) + threadIdx.x * kChunk;
    if (threadIdx.x * kChunk < kAhead && chunk < stream.end) {
        prefetch_l2(row.base + chunk, 4 * min_of(stream.end - chunk, kChunk));
    }
    S::clear(s);
    __syncthreads();
    S::Scale scale;
    if (!sample.rank(p, s, first_sample, scale)) return false;
    if constexpr (!kIsAlone) stream.start();

    S::Stack stack{s};
    stream.for_each([&](const uint4& x, uint32 at) {
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
    uint32 num_sure = 0;
    stack.for_each([&](uint2 x) {
        const float place = scale.place(x.x);
        if (place >= edge + 1.0f) {
            S::set_bit(s, x.y - part.begin), ++num_sure;
        } else if (place >= edge) {
            const uint32 i = atomicAdd(&s.num_ties, 1u);
            if (i < S::kTies) s.ties[i] = make_uint2(key_of(x.x), x.y);
        }
    });
    if constexpr (kCluster) {
        num_sure = __reduce_add_sync(0xffffffffu, num_sure);
        if ((threadIdx.x & 31) == 0 && num_sure != 0) atomicAdd(&s.num_sure, num_sure);
    }
    step.sync();
    const uint2* ties;
    uint32 num_ties, first;
    if (!gather_ties(s, step, ties, num_ties, first)) return false;
    if constexpr (kCluster) cluster_arrive();
    const uint32 wanted = p.k - kth.above;
    if (threadIdx.x < num_ties) {
        const uint2 own = ties[threadIdx.x];
        uint32 better = 0;
#pragma unroll 4
        for (uint32 i = 0; i < num_ties; ++i) better += S::is_better(ties[i], own);
        if (better < wanted && own.y >= part.begin && own.y < part.end) S::set_bit(s, own.y - part.begin);
        if (better == wanted - 1) s.last = own;
    }
    __syncthreads();
    const uint2 last = s.last;
    if constexpr (kCluster) {
        // Chosen ties of the parts before this one.
#pragma unroll 1
        for (uint32 i = 0; i < num_ties; ++i) first += ties[i].y < part.begin && !S::is_better(last, ties[i]);
    }
    for (uint32 window = part.begin;; __syncthreads()) {
        first += S::for_bits(s, min_of(part.end - window, uint32(S::kWindow)), first,
                             [&](uint32 rank, uint32 at) { out.put(rank, window + at - row.lead); });
        if (part.end - window <= S::kWindow) return true;
        // The bits of the next elements.
        window += S::kWindow;
        __syncthreads();
        for (int32 i = threadIdx.x; i < MASK; i += kThreads) s.mask[i] = 0;
        __syncthreads();
        stack.for_each([&](uint2 x) {
            if (x.y >= window && !S::is_better(last, make_uint2(key_of(x.x), x.y))) S::set_bit(s, x.y - window);
        });
    }
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
    if (!select_once(p, row, s.sampled, step, out)) {
        select_by_digits(p, row, s.select, step, out);
        if constexpr (kCluster) cluster_arrive();
    }
    if constexpr (kCluster) cluster_wait();  // others may still read this CTA's shared memory
}
