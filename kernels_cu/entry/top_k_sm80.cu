// Positions of the k largest numbers of each row: the sparse attention's choice of keys by the indexer's logits.
//
//   indices[r, :] = the positions of the k largest of logits[r, start : start + length], counted from start, ascending
//
// logits: fp32 [rows, width]; indices: int32 [rows, k]; -1 behind the last one where a row has fewer numbers than k.
// NaN is the largest, of equal numbers the first ones are chosen, -inf is never chosen. With a block_table positions
// become rows of a pool: block_table[sequence, position / block_size] * block_size + position % block_size.
//
// Radix select by three digits (decode/radix_select.cuh). A row belongs to a CTA, or with CLUSTER to a cluster, whose
// CTAs have consecutive parts of it and add their histograms through distributed shared memory.
//
//   HELD    a row is read once and its keys stay in shared memory, CANDIDATES of them.
//             load, digit 1 | digit 2 | digit 3 | positions
//   else    a row is read twice, the second time from L2: what reaches the first digit's bin goes to shared memory,
//           in order, if it fits; else the row is read for each digit.
//             load, digit 1 | load, candidates | digits 2 and 3 of the candidates | positions
//
// Positions come out in ascending order without atomics: the warps of a CTA have consecutive elements, count what is
// above the threshold and what is equal to it, and begin where the warps before them end. So calls repeat exactly.
//
// Shared memory: histograms 24 KB, CANDIDATES keys of 4 bytes, without HELD as many positions.
#include "decode/radix_select.cuh"
#include "params/top_k.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

constexpr int32 kThreads = THREADS, kWarps = kThreads / 32;
constexpr bool kHeld = HELD, kCluster = CLUSTER;
constexpr int32 kVectors = VECTORS;  // of four elements that a thread asks for at once
constexpr int32 kCandidates = CANDIDATES;

struct SharedStorage {
    SelectStorage select;
    alignas(16) uint32 keys[kCandidates];
    alignas(16) uint32 positions[kHeld ? 4 : kCandidates];
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

// Keys of a vector above a threshold, and in the upper half those equal to it.
OA_DEVICE uint32 chosen_of(const uint4& keys, Threshold t) {
    const uint32 above = (keys.x > t.key) + (keys.y > t.key) + (keys.z > t.key) + (keys.w > t.key);
    if (t.ties == 0) return above;
    return above + (((keys.x == t.key) + (keys.y == t.key) + (keys.z == t.key) + (keys.w == t.key)) << 16);
}

// One step in order: hands each chosen element to put(rank, key, vector, element). A warp's elements follow those of
// the warp before it, a vector's lanes one another. of(v): this thread's keys of vector v. `parity` alternates between
// steps. kUnroll: of(v) is in registers.
template <int32 kUnroll, typename Keys, typename Put>
OA_DEVICE void put_in_order(SelectStorage& s, Keys of, int32 vectors, Threshold t, Ranks& ranks, int32 parity,
                            Put put) {
    const int32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    // Two counts in a number: a warp's step has less than 2^16 elements.
    uint32 mine = 0;
#pragma unroll kUnroll
    for (int32 v = 0; v < vectors; ++v) mine += chosen_of(of(v), t);
    mine = __reduce_add_sync(0xffffffffu, mine);
    if (lane == 0) s.warp_sums[parity][warp] = mine;
    __syncthreads();
    const uint32 of_lane = lane < kWarps ? s.warp_sums[parity][lane] : 0u;
    const uint32 low = of_lane & 0xffffu, high = of_lane >> 16;
    uint32 above = ranks.above + __reduce_add_sync(0xffffffffu, lane < warp ? low : 0u);
    uint32 ties = ranks.ties + __reduce_add_sync(0xffffffffu, lane < warp ? high : 0u);
    ranks.above += __reduce_add_sync(0xffffffffu, low);
    ranks.ties += __reduce_add_sync(0xffffffffu, high);
    if (mine == 0) return;
#pragma unroll kUnroll
    for (int32 v = 0; v < vectors; ++v) {
        const uint4 keys = of(v);
        const uint32 own = chosen_of(keys, t);
        if (!__any_sync(0xffffffffu, own)) continue;
        const uint32 to_here = inclusive_sum(own, lane), all = __shfl_sync(0xffffffffu, to_here, 31);
        uint32 a = above + ((to_here - own) & 0xffffu), b = ties + ((to_here - own) >> 16);
        const uint32 four[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
        for (int32 e = 0; e < 4; ++e) {
            const bool is_tie = four[e] == t.key && t.ties != 0;
            if (four[e] > t.key || (is_tie && b < t.ties)) put(a + min_of(b, t.ties), four[e], v, e);
            a += four[e] > t.key, b += is_tie;
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

#if HELD
template <int32 kDigit>
OA_DEVICE void digit_of_held(const TopKParams& p, SharedStorage& s, const uint4* own, int32 vectors, const Step& step,
                             Selected& found) {
    for (int32 v = 0; v < vectors; ++v) count_keys<kDigit>(s.select, own[32 * v], found.prefix);
    __syncthreads();
    step.find<kDigit>(p.k - found.above);
    found.take<kDigit>(s.select, p.k);
}

OA_DEVICE void select_held(const TopKParams& p, const Row& row, SharedStorage& s, const Step& step,
                           const Positions& out) {
    const int32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    // A warp's elements are consecutive, and so are the warps of a CTA and the CTAs of a cluster.
    const uint32 warps = step.size * kWarps, chunk = ((row.end + warps - 1) / warps + 127) & ~127u;
    const uint32 begin = (step.rank * kWarps + warp) * chunk, first = begin + 4 * lane;
    const int32 vectors = int32(chunk / 128);
    const bool whole = begin >= row.lead && begin + chunk <= row.end;
    uint4* own = reinterpret_cast<uint4*>(s.keys + warp * chunk) + lane;
    for (int32 v = 0; v < vectors; v += kVectors) {
        uint4 x[kVectors];
        if (whole) {
            const uint4* from = reinterpret_cast<const uint4*>(row.base + first) + 32 * v;
#pragma unroll
            for (int32 i = 0; i < kVectors; ++i) {
                if (v + i < vectors) x[i] = __ldg(from + 32 * i);
            }
        } else {
#pragma unroll
            for (int32 i = 0; i < kVectors; ++i) x[i] = row.load(v + i < vectors ? first + 128 * (v + i) : row.end);
        }
#pragma unroll
        for (int32 i = 0; i < kVectors; ++i) {
            if (v + i >= vectors) break;
            const uint4 keys = keys_of(x[i]);
            own[32 * (v + i)] = keys;
            count_keys<0>(s.select, keys, 0);
        }
    }
    Selected found;
    __syncthreads();
    step.find<0>(p.k);
    found.take<0>(s.select, p.k);
    if (!found.done) digit_of_held<1>(p, s, own, vectors, step, found);
    if (!found.done) digit_of_held<2>(p, s, own, vectors, step, found);
    Ranks ranks{found.before, found.before_in};
    put_in_order<1>(
        s.select, [&](int32 v) { return own[32 * v]; }, vectors, found.threshold, ranks, 1,
        [&](uint32 rank, uint32, int32 v, int32 e) { out.put(rank, first + 128 * v + e - row.lead); });
    out.fill(found.chosen, step.rank, step.size);
}
#else
// Calls take(keys, first, parity) for each step of this CTA's part of the row; `first`: this thread's first element.
template <typename Take>
OA_DEVICE void for_row(const Row& row, const Step& step, Take take) {
    constexpr uint32 kStep = kThreads * 4 * kVectors;
    const uint32 part = ((row.end + step.size - 1) / step.size + 127) & ~127u;
    const uint32 begin = step.rank * part, end = min_of(begin + part, row.end);
    const uint32 own = (threadIdx.x / 32) * (128 * kVectors) + 4 * (threadIdx.x & 31);
    uint4 next[kVectors];
    auto load = [&](uint32 at) {
#pragma unroll
        for (int32 v = 0; v < kVectors; ++v) {
            const uint32 x = at + own + 128 * v;
            next[v] = row.load(x < end ? x : row.end);
        }
    };
    if (begin < end) load(begin);
    int32 parity = 0;
    for (uint32 at = begin; at < end; at += kStep) {
        uint4 keys[kVectors];
#pragma unroll
        for (int32 v = 0; v < kVectors; ++v) keys[v] = keys_of(next[v]);
        if (at + kStep < end) load(at + kStep);
        take(keys, at + own, parity);
        parity ^= 1;
    }
}

template <int32 kDigit>
OA_DEVICE void digit_of_row(const TopKParams& p, const Row& row, SharedStorage& s, const Step& step, Selected& found) {
    for_row(row, step, [&](const uint4(&keys)[kVectors], uint32, int32) {
#pragma unroll
        for (int32 v = 0; v < kVectors; ++v) count_keys<kDigit>(s.select, keys[v], found.prefix);
    });
    __syncthreads();
    step.find<kDigit>(p.k - found.above);
    found.take<kDigit>(s.select, p.k);
}

// Candidates of this CTA, four a thread and step; beyond the last one keys that are never chosen.
template <typename Take>
OA_DEVICE void for_candidates(const SharedStorage& s, uint32 count, Take take) {
    int32 parity = 0;
    for (uint32 at = 0; at < count; at += 4 * kThreads) {
        const uint32 first = at + 4 * threadIdx.x;
        uint4 keys = make_uint4(0, 0, 0, 0);
        if (first < count) keys.x = s.keys[first];
        if (first + 1 < count) keys.y = s.keys[first + 1];
        if (first + 2 < count) keys.z = s.keys[first + 2];
        if (first + 3 < count) keys.w = s.keys[first + 3];
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
    step.find<kDigit>(p.k - found.above);
    found.take<kDigit>(s.select, p.k);
}

OA_DEVICE void select_stream(const TopKParams& p, const Row& row, SharedStorage& s, const Step& step,
                             const Positions& out) {
    Selected found;
    digit_of_row<0>(p, row, s, step, found);
    if (!found.done && found.above + found.inside > kCandidates) digit_of_row<1>(p, row, s, step, found);
    if (!found.done && found.above + found.inside > kCandidates) digit_of_row<2>(p, row, s, step, found);
    // Candidates: all keys that have the digits found so far, or higher ones. None where the threshold is known.
    const bool direct = found.done;
    const Threshold least = direct ? found.threshold : Threshold{found.prefix - 1, 0};
    Ranks ranks{direct ? found.before : 0, direct ? found.before_in : 0};
    for_row(row, step, [&](const uint4(&keys)[kVectors], uint32 first, int32 parity) {
        put_in_order<kVectors>(
            s.select, [&](int32 v) { return keys[v]; }, kVectors, least, ranks, parity,
            [&](uint32 rank, uint32 key, int32 v, int32 e) {
                const uint32 position = first + 128 * v + e - row.lead;
                if (direct) {
                    out.put(rank, position);
                } else {
                    s.keys[rank] = key, s.positions[rank] = position;
                }
            });
    });
    if (!direct) {
        __syncthreads();
        if (found.digits == 1) digit_of_candidates<1>(p, ranks.above, s, step, found);
        if (!found.done) digit_of_candidates<2>(p, ranks.above, s, step, found);
        Ranks places{found.before, found.before_in};
        for_candidates(s, ranks.above, [&](const uint4& keys, uint32 first, int32 parity) {
            put_in_order<1>(
                s.select, [&](int32) { return keys; }, 1, found.threshold, places, parity,
                [&](uint32 rank, uint32, int32, int32 e) { out.put(rank, s.positions[first + e]); });
        });
    }
    out.fill(found.chosen, step.rank, step.size);
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) top_k_sm80(const __grid_constant__ TopKParams p) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(smem_raw);
    uint32 rank = 0, size = 1;
    if constexpr (kCluster) rank = cluster_rank(), size = cluster_size();
    const Step step{s.select, rank, size};
    const int32 at = int32(blockIdx.x / size);
    for (int32 i = threadIdx.x; i < kAllBins / 4; i += kThreads) {
        reinterpret_cast<uint4*>(s.select.histogram)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    const Row row(p, at);
    const Positions out(p, at);
#if HELD
    select_held(p, row, s, step, out);
#else
    select_stream(p, row, s, step, out);
#endif
    if constexpr (kCluster) cluster_sync();  // others may still read this CTA's histograms
}
