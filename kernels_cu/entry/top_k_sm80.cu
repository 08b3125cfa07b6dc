// Positions of the k largest numbers of each row: the sparse attention's choice of keys by the indexer's logits.
//
//   indices[r, :] = the positions of the k largest of logits[r, start : start + length], counted from start, ascending
//
// logits: fp32 [rows, width]; indices: int32 [rows, k]; -1 behind the last one where a row has fewer numbers than k.
// NaN is the largest, of equal numbers the first ones are chosen, -inf is never chosen. With a block_table positions
// become rows of a pool: block_table[sequence, position / block_size] * block_size + position % block_size.
//
// A row belongs to a CTA, or with CLUSTER to a cluster, whose CTAs have consecutive parts of it and send each other
// their counts and ties. It is read once (decode/sampled_select.cuh):
//
//   sample: a floor | row: what is not below it is a candidate | bins of candidates | ties | bits of positions
//
// The sample is asked for first, and the row when it has come: memory would mix them, and the floor would be known only
// when most of the row is there.
//
// Where the sample misleads, or many elements are alike, the row is read for each of three digits
// (decode/radix_select.cuh) and for the positions: the result is exact in any case.
//
// The order of positions comes from bits, or from sums over threads, and not from atomics: calls repeat exactly.
//
// Shared memory: bins 16 KB, bits of positions 4 * MASK, DEPTH candidates of 8 bytes a thread, 8 KB for more;
// 19 KB for what the CTAs of a cluster send.
#include "decode/radix_select.cuh"
#include "decode/sampled_select.cuh"
#include "params/top_k.cuh"
#include "ptx/bulk_prefetch.cuh"
#include "ptx/cluster_copy.cuh"
#include "ptx/cluster_memory.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

constexpr int32 kThreads = THREADS, kWarps = kThreads / 32;
constexpr bool kCluster = CLUSTER;
constexpr int32 kVectors = VECTORS;  // of four elements that a thread asks for at once
constexpr bool kIsAlone = CTAS == 1;  // no other CTA of the SM has something to do while this one waits
constexpr bool kHeld = HELD;  // rows, or their parts, have up to 32 elements a thread
constexpr uint32 kAhead = 1 << 16;  // elements that are asked for ahead
using Sampled = SampledSelect<kThreads, DEPTH, MASK>;

// What the CTAs of a cluster send each other: each of them gets everything from all, itself too.
struct Exchange {
    static constexpr uint32 kTies = 32;
    // Bins by two in a word, and how many candidates were spilled. More than 2^16 in a bin have no room anyway.
    struct Bins {
        uint32 pairs[Sampled::kBins / 2], num_spilled, none[3];
    };
    struct Ties {
        uint2 of[kTies];
        uint32 count, num_sure, none[2];
    };
    alignas(16) Bins bins[kMaxCluster];
    alignas(16) Ties ties[kMaxCluster];
    alignas(8) uint64 bins_bar, ties_bar;  // of one phase

    // Ahead of cluster_arrive_relaxed. One thread.
    OA_DEVICE void start(uint32 size) {
        mbarrier_init(smem_addr_of(&bins_bar), 1), mbarrier_init(smem_addr_of(&ties_bar), 1);
        fence_barrier_init();
        mbarrier_arrive_expect_tx(smem_addr_of(&bins_bar), size * sizeof(Bins));
        mbarrier_arrive_expect_tx(smem_addr_of(&ties_bar), size * sizeof(Ties));
    }
    // Sends `from`, which other threads may have written, into every CTA's to[rank], and waits for those of all.
    template <typename Part>
    OA_DEVICE void send(const Part& from, Part (&to)[kMaxCluster], uint64& bar, uint32 rank, uint32 size) {
        fence_proxy_async();
        __syncthreads();
        if (threadIdx.x < size) {
            bulk_copy_cluster(smem_addr_of(&to[rank]), smem_addr_of(&from), sizeof(Part), smem_addr_of(&bar),
                              threadIdx.x);
        }
        mbarrier_wait(smem_addr_of(&bar), 0);
    }
};

// The row's digits are counted where nothing else is needed any more. In a cluster an Exchange follows.
union SharedStorage {
    Sampled::Storage sampled;
    SelectStorage select;
};

constexpr int32 kExchangeBytes = kCluster ? int32(sizeof(Exchange)) : 0;
static_assert(sizeof(SharedStorage) <= 4 * 4096 + 4 * MASK + 8 * DEPTH * kThreads + 8 * 1024 + 256, "as the registry");
static_assert(!kHeld || 8 * DEPTH == 4 * 32, "candidates' room is that of the part");
static_assert(kExchangeBytes <= 19 * 1024, "as the registry");

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

// A sample is of kSampleVectors vectors of four at equal distances; of long rows kLongRounds times as many. The CTAs of
// a cluster have room for more candidates of a row.
constexpr uint32 kSampleVectors = 512, kSampleSize = 4 * kSampleVectors, kLongRow = kCluster ? 1 << 21 : 1 << 17;
constexpr int32 kLongShift = 2, kLongRounds = 1 << kLongShift;
static_assert(kSampleVectors <= kThreads && kSampleVectors % 32 == 0, "whole warps have some");

struct RowSample {
    const Row& row;
    uint32 begin, vectors;
    bool is_long;

    OA_DEVICE explicit RowSample(const Row& row) : row(row), is_long(row.end >= kLongRow) {
        begin = row.lead == 0 ? 0 : 4;
        vectors = max_of(row.end / 4, begin / 4) - begin / 4;
    }
    // Threads beyond kSampleVectors have none: -inf, which is not counted.
    OA_DEVICE uint4 load(int32 round) const {
        constexpr uint32 kNegInf = 0xff800000u;
        if (threadIdx.x >= kSampleVectors) return make_uint4(kNegInf, kNegInf, kNegInf, kNegInf);
        const uint64 place = uint32(round) * kSampleVectors + threadIdx.x;
        const uint32 vector = uint32(place * vectors / kSampleVectors >> (is_long ? kLongShift : 0));
        return __ldg(reinterpret_cast<const uint4*>(row.base + begin + 4 * vector));
    }
    static OA_DEVICE void keys_of_all(const uint4& x, uint32 (&keys)[4]) {
        keys[0] = key_of(x.x), keys[1] = key_of(x.y), keys[2] = key_of(x.z), keys[3] = key_of(x.w);
    }
    // arrived() when the sample is there, before it is ranked.
    template <typename Arrived>
    OA_DEVICE bool rank(const TopKParams& p, Sampled::Storage& s, const uint4& first, Sampled::Scale& scale,
                        Arrived arrived) const {
        // What k is of the row, and four standard deviations more and less.
        const float size = float(is_long ? kSampleSize << kLongShift : kSampleSize);
        const float share = float(p.k) * size * rcp_approx(float(row.end));
        const float spread = 4.0f * exp2_approx(0.5f * log2_approx(share)) + 8.0f;
        const uint32 low = uint32(fminf(share + spread, size)), high = uint32(fmaxf(share - spread, 1.0f));
        uint32 keys[4];
        keys_of_all(first, keys);
        return Sampled::sample(
            s, is_long ? kLongRounds : 1, low, high, scale, keys,
            [&](int32 round, uint32(&to)[4]) { keys_of_all(load(round), to); }, arrived);
    }
};

// Finds the k-th largest candidate's bin, in s.kth. False: there are not so many, or some CTA had no room for its own.
// With barriers.
OA_DEVICE bool find_bin(const TopKParams& p, Sampled::Storage& s, Exchange& e, const Step& step) {
    constexpr int32 kOwn = Sampled::kBins / kThreads;
    static_assert(kOwn == 2 || !kCluster, "bins of a thread are a pair");
    const uint32 top = Sampled::kBins - 1 - threadIdx.x * kOwn;
    __syncthreads();
    uint32 count[kOwn], sum = 0, all;
#pragma unroll
    for (int32 i = 0; i < kOwn; ++i) count[i] = s.bins[top - i];
    bool fits = s.num_spilled <= Sampled::kSpilled;
    if constexpr (kCluster) {
        // Where the sample was ranked.
        Exchange::Bins& own = *reinterpret_cast<Exchange::Bins*>(s.fine);
        own.pairs[top / 2] = count[kOwn - 1] | count[0] << 16;
        if (threadIdx.x == 0) own.num_spilled = s.num_spilled;
        e.send(own, e.bins, e.bins_bar, step.rank, step.size);
        fits = true, count[0] = count[kOwn - 1] = 0;
#pragma unroll
        for (uint32 r = 0; r < kMaxCluster; ++r) {
            if (r >= step.size) break;
            const uint32 pair = e.bins[r].pairs[top / 2];
            count[0] += pair >> 16, count[kOwn - 1] += pair & 0xffffu;
            fits &= e.bins[r].num_spilled <= Sampled::kSpilled;
        }
    }
#pragma unroll
    for (int32 i = 0; i < kOwn; ++i) sum += count[i];
    const uint32 above = Sampled::sum_before(s, sum, all);
    if (above < uint32(p.k) && above + sum >= uint32(p.k)) Sampled::find(s.kth, p.k, count, top, above);
    __syncthreads();
    return fits && all >= uint32(p.k);
}

// Those of the cluster that are in the k-th largest's bin; `sure`: how many higher ones the CTAs of lower rank have.
// False: they are too many. With barriers.
OA_DEVICE bool gather_ties(Sampled::Storage& s, Exchange& e, const Step& step, const uint2*& ties, uint32& count,
                           uint32& sure) {
    __syncthreads();
    if constexpr (!kCluster) {
        ties = s.ties, count = s.num_ties, sure = 0;
        return count <= Sampled::kTies;
    } else {
        const uint32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
        // Nothing is ranked in these bins any more.
        Exchange::Ties& own = *reinterpret_cast<Exchange::Ties*>(s.bins);
        if (threadIdx.x < Exchange::kTies) own.of[threadIdx.x] = s.ties[threadIdx.x];
        if (threadIdx.x == 0) own.count = s.num_ties, own.num_sure = s.num_sure;
        e.send(own, e.ties, e.ties_bar, step.rank, step.size);
        const uint32 of_lane = lane < step.size ? e.ties[lane].count : 0u;
        const uint32 sure_of_lane = lane < step.rank ? e.ties[lane].num_sure : 0u;
        count = __reduce_add_sync(0xffffffffu, of_lane), sure = __reduce_add_sync(0xffffffffu, sure_of_lane);
        if (count > Sampled::kTies) return false;
        const bool sent = !__any_sync(0xffffffffu, of_lane > Exchange::kTies);
        if (!sent) step.sync();
        // A warp has a CTA's.
        const uint32 to = __reduce_add_sync(0xffffffffu, lane < warp ? of_lane : 0u);
        const uint32 of_warp = __shfl_sync(0xffffffffu, of_lane, warp);
        for (uint32 i = lane; i < of_warp; i += 32) {
            s.all_ties[to + i] = sent ? e.ties[warp].of[i] : load_cluster2(smem_addr_of(&s.ties[i]), warp);
        }
        ties = s.all_ties;
        __syncthreads();
        return true;
    }
}

// What reaches the floor of a part of any length: it passes through registers, and candidates go to stacks of threads.
// The interface of both: start() asks for the part, read() finds candidates, count() counts their bins, choose() takes
// those above the k-th largest's bin and returns how many this thread has, and puts those in it to s.ties; put() hands
// on the positions of the chosen, ranks from `first` on, `last` being the last one of the bin that is chosen.
struct StackedPart {
    using S = Sampled;
    const Row& row;
    const Part& part;
    S::Storage& s;
    Stream<kVectors> stream;
    S::Stack stack;

    OA_DEVICE StackedPart(const Row& row, const Part& part, S::Storage& s)
        : row(row), part(part), s(s), stream(row, part), stack{s} {}

    OA_DEVICE void start() {
        if constexpr (kIsAlone) stream.start();
        constexpr uint32 kChunk = 4096;
        const uint32 chunk = stream.begin + (kIsAlone ? stream.kStep : 0) + threadIdx.x * kChunk;
        if (threadIdx.x * kChunk < kAhead && chunk < stream.end) {
            prefetch_l2(row.base + chunk, 4 * min_of(stream.end - chunk, kChunk));
        }
    }
    OA_DEVICE void read(const S::Scale& scale) {
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
    OA_DEVICE void count(const S::Scale& scale) const { stack.count(scale); }
    OA_DEVICE uint32 choose(const S::Scale& scale, float edge) {
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
    OA_DEVICE void put(uint32 first, uint2 last, const Positions& out) const {
        if (threadIdx.x < s.num_ties) {
            const uint2 own = s.ties[threadIdx.x];
            if (!S::is_better(last, own)) S::set_bit(s, own.y - part.begin);
        }
        __syncthreads();
        for (uint32 window = part.begin;; __syncthreads()) {
            first += S::for_bits(s, min_of(part.end - window, uint32(S::kWindow)), first,
                                 [&](uint32 rank, uint32 at) { out.put(rank, window + at - row.lead); });
            if (part.end - window <= S::kWindow) return;
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
};

// The same of a part of up to 32 elements a thread, which lies in shared memory: a thread's candidates are bits of one
// number, in the order of the row, and what is chosen of them needs no other order. A warp copies its own elements, and
// waits for nothing else.
struct HeldPart {
    static constexpr uint32 kMost = 8;  // vectors of four elements of a thread
    using S = Sampled;
    const Row& row;
    const Part& part;
    S::Storage& s;
    uint32 vectors;  // of a thread, a power of two
    uint32* own;  // this thread's elements
    uint32 candidates = 0, chosen = 0, ties = 0;

    static OA_DEVICE bool fits(const Row& row, uint32 size) {
        return (row.end + size - 1) / size <= 4 * kMost * kThreads;
    }
    OA_DEVICE HeldPart(const Row& row, const Part& part, S::Storage& s) : row(row), part(part), s(s), vectors(1) {
        while (vectors < kMost && 4 * vectors * kThreads < part.end - part.begin) vectors *= 2;
        own = reinterpret_cast<uint32*>(s.stacks) + 4 * vectors * threadIdx.x;
    }

    OA_DEVICE void start() const {
        const uint32 lane = threadIdx.x & 31, first = (threadIdx.x & ~31u) * 4 * vectors + 4 * lane;
        uint32* to = reinterpret_cast<uint32*>(s.stacks) + first;
#pragma unroll
        for (uint32 i = 0; i < kMost; ++i) {
            if (i >= vectors) break;
            const uint32 at = part.begin + first + 128 * i;
            if (at >= row.lead && at + 4 <= part.end) {
                cp_async_16(smem_addr_of(to + 128 * i), row.base + at, 16u);
            } else {
                *reinterpret_cast<uint4*>(to + 128 * i) = row.load(at < part.end ? at : row.end);
            }
        }
        cp_async_commit();
    }
    OA_DEVICE void read(const S::Scale& scale) {
        cp_async_wait<0>();
        __syncwarp();
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
    template <typename Take>
    static OA_DEVICE void for_bits(uint32 bits, Take take) {
        for (; bits != 0; bits &= bits - 1) take(uint32(__ffs(int32(bits)) - 1));
    }
    OA_DEVICE uint32 at(uint32 bit) const { return part.begin + 4 * vectors * threadIdx.x + bit; }

    OA_DEVICE void count(const S::Scale& scale) const {
        for_bits(candidates, [&](uint32 bit) { atomicAdd(&s.bins[uint32(scale.place(own[bit]))], 1u); });
    }
    OA_DEVICE uint32 choose(const S::Scale& scale, float edge) {
        for_bits(candidates, [&](uint32 bit) {
            const uint32 x = own[bit];
            const float place = scale.place(x);
            if (place >= edge + 1.0f) {
                chosen |= 1u << bit;
            } else if (place >= edge) {
                ties |= 1u << bit;
                S::add_tie(s, x, at(bit));
            }
        });
        return __popc(chosen);
    }
    OA_DEVICE void put(uint32 first, uint2 last, const Positions& out) {
        for_bits(ties, [&](uint32 bit) {
            if (!S::is_better(last, make_uint2(key_of(own[bit]), at(bit)))) chosen |= 1u << bit;
        });
        uint32 all;
        uint32 rank = first + S::sum_before(s, __popc(chosen), all);
        for_bits(chosen, [&](uint32 bit) { out.put(rank++, at(bit) - row.lead); });
    }
};

// The positions of a row that is read once. False: that is not enough, and nothing is written.
OA_DEVICE bool select_once(const TopKParams& p, const Row& row, Sampled::Storage& s, Exchange& e, const Step& step,
                           const Positions& out) {
    using S = Sampled;
    const RowSample sample(row);
    const bool is_other = row.end - row.lead <= uint32(p.k) || sample.vectors == 0 ||
                          (kHeld && !HeldPart::fits(row, step.size));
    if constexpr (kCluster) {
        if (is_other) cluster_wait();
    }
    if (is_other) return false;
    const Part part(row, step);
    const uint4 first_sample = sample.load(0);
    typename Select<kHeld, HeldPart, StackedPart>::Type own(row, part, s);
    S::clear(s);
    __syncthreads();
    S::Scale scale;
    // The row is under way while the sample is ranked.
    const bool is_ranked = sample.rank(p, s, first_sample, scale, [&] { own.start(); });
    if constexpr (kCluster) cluster_wait();  // the others' barriers are there
    if (!is_ranked) return false;

    own.read(scale);
    own.count(scale);
    if (!find_bin(p, s, e, step)) return false;
    const S::Rank kth = s.kth;
    uint32 num_sure = own.choose(scale, float(kth.bin));
    if constexpr (kCluster) {
        num_sure = __reduce_add_sync(0xffffffffu, num_sure);
        if ((threadIdx.x & 31) == 0 && num_sure != 0) atomicAdd(&s.num_sure, num_sure);
    }
    const uint2* ties;
    uint32 num_ties, first;
    if (!gather_ties(s, e, step, ties, num_ties, first)) return false;
    if constexpr (kCluster) cluster_arrive_relaxed();  // this CTA has what the others had to send
    const uint32 wanted = p.k - kth.above;
    if (threadIdx.x < num_ties) {
        const uint2 own = ties[threadIdx.x];
        uint32 better = 0;
#pragma unroll 4
        for (uint32 i = 0; i < num_ties; ++i) better += S::is_better(ties[i], own);
        if (better == wanted - 1) s.last = own;
    }
    __syncthreads();
    const uint2 last = s.last;
    if constexpr (kCluster) {
        // Chosen ties of the parts before this one.
#pragma unroll 1
        for (uint32 i = 0; i < num_ties; ++i) first += ties[i].y < part.begin && !S::is_better(last, ties[i]);
    }
    own.put(first, last, out);
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
    Exchange& e = *reinterpret_cast<Exchange*>(smem_raw + sizeof(SharedStorage));
    uint32 rank = 0, size = 1;
    if constexpr (kCluster) {
        rank = cluster_rank(), size = cluster_size();
        if (threadIdx.x == 0) e.start(size);
        __syncwarp();
        cluster_arrive_relaxed();
    }
    const Step step{s.select, rank, size};
    const int32 at = int32(blockIdx.x / size);
    const Row row(p, at);
    const Positions out(p, at);
    if (!select_once(p, row, s.sampled, e, step, out)) {
        select_by_digits(p, row, s.select, step, out);
        if constexpr (kCluster) cluster_arrive();
    }
    if constexpr (kCluster) cluster_wait();  // others may still read this CTA's shared memory
}
