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
// The sample is asked for first, and the row a while later: memory would mix them, and the floor would be known only
// when most of the row is there.
//
// What a CTA does with its part is in decode/top_k_parts.cuh and, for parts of up to 64 elements a thread that are not
// kept, in decode/top_k_marked.cuh.
//
// Where the sample misleads, or many elements are alike, the row is read for each of three digits
// (decode/radix_select.cuh) and for the positions: the result is exact in any case.
//
// The order of positions comes from bits, or from sums over threads, and not from atomics: calls repeat exactly.
//
// Shared memory: bins 16 KB, bits of positions 4 * MASK, DEPTH candidates of 8 bytes a thread, or 2 * DEPTH of 4
// bytes with MARKED, 8 KB for more without HELD and MARKED;
// 19 KB for what the CTAs of a cluster send.
#include "decode/radix_select.cuh"
#include "decode/sampled_select.cuh"
#include "decode/top_k_marked.cuh"
#include "decode/top_k_parts.cuh"
#include "decode/top_k_row.cuh"
#include "params/top_k.cuh"
#include "ptx/cluster_copy.cuh"
#include "ptx/cluster_memory.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

constexpr int32 kThreads = THREADS, kWarps = kThreads / 32;
constexpr bool kCluster = CLUSTER;
// Of four elements that a thread asks for at once. For compute capability 12 the compiler needs more registers.
#if __CUDA_ARCH__ >= 1200
constexpr int32 kVectors = VECTORS > 8 ? 8 : VECTORS;
#else
constexpr int32 kVectors = VECTORS;
#endif
constexpr bool kIsAlone = CTAS == 1;  // no other CTA of the SM has something to do while this one waits
constexpr bool kHeld = HELD;  // rows, or their parts, have up to 32 elements a thread
constexpr bool kMarked = MARKED;  // rows have up to 32 * MASK / THREADS elements a thread
constexpr uint32 kRoom = kHeld || kMarked ? 2 : 1024;  // for candidates that stacks have none for
using Sampled = SampledSelect<kThreads, DEPTH, MASK, kRoom>;

// What the CTAs of a cluster send each other: each of them gets everything from all, itself too.
struct Exchange {
    static constexpr uint32 kVectors = Sampled::kBins / 8, kTies = 30;
    // Bins by two in a word, and how many candidates were spilled. More than 2^16 in a bin have no room anyway.
    struct Bins {
        uint4 bins[kVectors];
        uint32 num_spilled, none[3];
        OA_DEVICE uint32 pair(uint32 i) const { return reinterpret_cast<const uint32*>(bins)[i]; }
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
    // Each thread has a pair of bins, those of thread 0 are the highest: sends them, and waits for those of all CTAs.
    OA_DEVICE void send_bins(uint32 pair, uint32 num_spilled, uint32 rank, uint32 size) {
        const uint32 a = __shfl_xor_sync(0xffffffffu, pair, 1);
        const uint32 b = __shfl_xor_sync(0xffffffffu, pair, 2), c = __shfl_xor_sync(0xffffffffu, pair, 3);
        const uint32 bar = smem_addr_of(&bins_bar);
        if ((threadIdx.x & 3) == 3) {  // the pair of a higher thread comes first
            const uint32 to = smem_addr_of(&bins[rank].bins[kVectors - 1 - threadIdx.x / 4]);
            for (uint32 r = 0; r < size; ++r) store_cluster_async4(to, make_uint4(pair, a, b, c), bar, r);
        }
        if (threadIdx.x < size) {
            const uint4 head = make_uint4(num_spilled, 0, 0, 0);
            store_cluster_async4(smem_addr_of(&bins[rank].num_spilled), head, bar, threadIdx.x);
        }
        mbarrier_wait(bar, 0);
    }
    OA_DEVICE void send_ties(const Sampled::Storage& s, uint32 rank, uint32 size) {
        constexpr uint32 kParts = sizeof(Ties) / 16;
        const uint32 bar = smem_addr_of(&ties_bar), part = threadIdx.x % kParts, r = threadIdx.x / kParts;
        if (r < size) {
            uint4 x = make_uint4(s.num_ties, s.num_sure, 0, 0);
            if (part < kParts - 1) x = reinterpret_cast<const uint4*>(s.ties)[part];
            store_cluster_async4(smem_addr_of(&ties[rank]) + 16 * part, x, bar, r);
        }
        mbarrier_wait(bar, 0);
    }
};

// The row's digits are counted where nothing else is needed any more. In a cluster an Exchange follows.
union SharedStorage {
    Sampled::Storage sampled;
    SelectStorage select;
};

constexpr int32 kExchangeBytes = kCluster ? int32(sizeof(Exchange)) : 0;
static_assert(sizeof(SharedStorage) <= 4 * 4096 + 4 * MASK + 8 * DEPTH * kThreads + 8 * kRoom + 512, "as the registry");
static_assert(!kHeld || 8 * DEPTH == 4 * 32, "candidates' room is that of the part");
static_assert(kExchangeBytes <= 37 * 512, "as the registry");

template <int32 kDigit>
OA_DEVICE void count_keys(SelectStorage& s, const uint4& keys, uint32 prefix) {
    count_key<kDigit>(s, keys.x, prefix), count_key<kDigit>(s, keys.y, prefix);
    count_key<kDigit>(s, keys.z, prefix), count_key<kDigit>(s, keys.w, prefix);
}

using Step = Digit<kThreads, kCluster>;

template <int32 kDigit>
OA_DEVICE void digit_of_row(const TopKParams& p, const Row& row, const Part& part, SelectStorage& s, const Step& step,
                            Selected& found) {
    Stream<kThreads, 2> stream(row, part);
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
constexpr int32 kOwnVectors = kSampleVectors <= kThreads ? 1 : kSampleVectors / kThreads;  // of a thread that has some
static_assert(kSampleVectors % 32 == 0 && (kOwnVectors == 1 || kSampleVectors % kThreads == 0),
              "whole warps have some");

struct RowSample {
    const Row& row;
    uint32 begin, vectors;
    bool is_long;

    // What k is of a sample of so many, and four standard deviations more and less.
    struct Ranks {
        float low, high;
        OA_DEVICE Ranks(const TopKParams& p, const Row& row, float size) {
            const float share = float(p.k) * size * rcp_approx(float(row.end));
            const float spread = 4.0f * exp2_approx(0.5f * log2_approx(share)) + 8.0f;
            low = fminf(share + spread, size), high = fmaxf(share - spread, 1.0f);
        }
    };

    OA_DEVICE RowSample(const TopKParams& p, const Row& row, uint32 ctas) : row(row), is_long(row.end >= kLongRow) {
        if constexpr (kCluster && !kHeld && !kMarked) {
            // A floor by a small sample is so low that stacks of four numbers a thread would be filled.
            const float candidates = Ranks(p, row, kSampleSize).low * float(row.end) / float(kSampleSize * ctas);
            is_long |= candidates > float(4 * kThreads);
        }
        begin = row.lead == 0 ? 0 : 4;
        vectors = max_of(row.end / 4, begin / 4) - begin / 4;
    }
    struct Own {
        uint4 x[kOwnVectors];
    };
    // Threads beyond kSampleVectors have none: -inf, which is not counted.
    OA_DEVICE Own load(int32 round) const {
        constexpr uint32 kNegInf = 0xff800000u;
        Own own;
#pragma unroll
        for (int32 i = 0; i < kOwnVectors; ++i) {
            own.x[i] = make_uint4(kNegInf, kNegInf, kNegInf, kNegInf);
            if (threadIdx.x >= kSampleVectors) continue;
            const uint64 place = uint32(round) * kSampleVectors + i * kThreads + threadIdx.x;
            const uint32 vector = uint32(place * vectors / kSampleVectors >> (is_long ? kLongShift : 0));
            own.x[i] = __ldg(reinterpret_cast<const uint4*>(row.base + begin + 4 * vector));
        }
        return own;
    }
    static OA_DEVICE void keys_of_all(const Own& own, uint32 (&keys)[4 * kOwnVectors]) {
#pragma unroll
        for (int32 i = 0; i < kOwnVectors; ++i) {
            const uint4 x = own.x[i];
            keys[4 * i] = key_of(x.x), keys[4 * i + 1] = key_of(x.y);
            keys[4 * i + 2] = key_of(x.z), keys[4 * i + 3] = key_of(x.w);
        }
    }
    // arrived() when the sample is there, before it is ranked.
    template <typename Arrived>
    OA_DEVICE bool rank(const TopKParams& p, Sampled::Storage& s, const Own& first, Sampled::Scale& scale,
                        Arrived arrived) const {
        const Ranks ranks(p, row, float(is_long ? kSampleSize << kLongShift : kSampleSize));
        uint32 keys[4 * kOwnVectors];
        keys_of_all(first, keys);
        return Sampled::sample(
            s, is_long ? kLongRounds : 1, uint32(ranks.low), uint32(ranks.high), scale, keys,
            [&](int32 round, uint32(&to)[4 * kOwnVectors]) { keys_of_all(load(round), to); }, arrived);
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
        e.send_bins(count[kOwn - 1] | count[0] << 16, s.num_spilled, step.rank, step.size);
        fits = true, count[0] = count[kOwn - 1] = 0;
#pragma unroll
        for (uint32 r = 0; r < kMaxCluster; ++r) {
            if (r >= step.size) break;
            const uint32 pair = e.bins[r].pair(top / 2);
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
        e.send_ties(s, step.rank, step.size);
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

// The one of rank `wanted`, from 1 on, of those in the k-th largest's bin. All threads.
OA_DEVICE uint2 last_tie(Sampled::Storage& s, const uint2* ties, uint32 count, uint32 wanted) {
    // A warp, or the CTA, has one a thread.
    const bool is_of_warp = count <= 32;
#pragma unroll 1
    for (uint32 at = is_of_warp ? threadIdx.x & 31 : threadIdx.x; is_of_warp || at < count; at += kThreads) {
        const uint2 own = ties[min_of(at, count - 1)];
        uint32 better = 0;
#pragma unroll 4
        for (uint32 i = 0; i < count; ++i) better += Sampled::is_better(ties[i], own);
        if (is_of_warp) {
            const int32 lane = __ffs(int32(__ballot_sync(0xffffffffu, better == wanted - 1))) - 1;
            return make_uint2(__shfl_sync(0xffffffffu, own.x, lane), __shfl_sync(0xffffffffu, own.y, lane));
        }
        if (better == wanted - 1) s.last = own;
    }
    __syncthreads();
    return s.last;
}

// How many chosen ones of that bin are in the parts before `begin`.
OA_DEVICE uint32 ties_before(const uint2* ties, uint32 count, uint2 last, uint32 begin) {
    uint32 before = 0;
    for (uint32 i = threadIdx.x & 31; i < count; i += 32) {
        before += ties[i].y < begin && !Sampled::is_better(last, ties[i]);
    }
    return __reduce_add_sync(0xffffffffu, before);
}

using ReadPart = Select<kMarked, MarkedPart<Sampled, kThreads, kVectors, kIsAlone>,
                        StackedPart<Sampled, kThreads, kVectors, kIsAlone>>::Type;
using OwnPart = Select<kHeld, HeldPart<Sampled, kThreads>, ReadPart>::Type;

// The positions of a row that is read once. False: that is not enough, and nothing is written.
OA_DEVICE bool select_once(const TopKParams& p, const Row& row, Sampled::Storage& s, Exchange& e, const Step& step,
                           const Positions<kThreads>& out) {
    using S = Sampled;
    const RowSample sample(p, row, step.size);
    const bool is_other = row.end - row.lead <= uint32(p.k) || sample.vectors == 0 || !OwnPart::fits(row, step.size);
    if constexpr (kCluster) {
        if (is_other) cluster_wait();
    }
    if (is_other) return false;
    const Part part(row, step.rank, step.size);
    const RowSample::Own first_sample = sample.load(0);
    OwnPart own(row, part, s);
    S::clear(s);
    __syncthreads();
    if constexpr (kHeld) own.start();
    S::Scale scale;
    // The row is under way while the sample is ranked.
    const bool is_ranked = sample.rank(p, s, first_sample, scale, [&] {
        if constexpr (!kHeld) own.start();
    });
    if constexpr (kCluster) cluster_wait();  // the others' barriers are there
    if (!is_ranked) {
        own.wait();  // what is copied there does not land in what follows
        return false;
    }
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
    const uint2 last = last_tie(s, ties, num_ties, p.k - kth.above);
    if constexpr (kCluster) first += ties_before(ties, num_ties, last, part.begin);
    own.put(first, last, out);
    return true;
}

// The same in any case.
OA_DEVICE void select_by_digits(const TopKParams& p, const Row& row, SelectStorage& s, const Step& step,
                                const Positions<kThreads>& out) {
    const Part part(row, step.rank, step.size);
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
        put_in_order<kWarps>(s, above, ties, t.ties, places, parity,
                             [&](uint32 rank, int32 i) { out.put(rank, first + i - row.lead); });
        parity ^= 1;
    }
    out.fill(found.chosen, step.rank, step.size);
}

// GPUs of compute capability 12 have shared memory for one CTA an SM.
#if __CUDA_ARCH__ >= 1200
constexpr int32 kPlaces = 1;
#else
constexpr int32 kPlaces = CTAS;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kPlaces) top_k_sm80(const __grid_constant__ TopKParams p) {
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
    const Positions<kThreads> out(p, at);
    if (!select_once(p, row, s.sampled, e, step, out)) {
        select_by_digits(p, row, s.select, step, out);
        if constexpr (kCluster) cluster_arrive();
    }
    if constexpr (kCluster) cluster_wait();  // others may still read this CTA's shared memory
}
