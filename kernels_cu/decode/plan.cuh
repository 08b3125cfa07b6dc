// Split-KV: which CTA computes which keys, planned on the device from seq_lens, so that a captured graph may be
// replayed with other lengths. The keys of each (sequence, kv head, block of query rows), a segment, are cut into
// chunks; all chunks of all segments, in this order, are distributed evenly over the CTAs. The part of a segment that
// one CTA has is a split; splits that are not a whole segment leave partial results, for decode_combine to merge.
#pragma once
#include "decode/recent_window.cuh"
#include "decode/rows.cuh"
#include "params/decode.cuh"
#include "ptx/types.cuh"
#include "scheduler/quotient.cuh"

// Keys of a sequence that some row sees and this launch computes: [begin, end); begin is a multiple of 16, but for the
// newest keys beside a quantized cache.
struct KeySpan {
    int32 begin, end, chunks;
    int32 seq_len;
    Queries queries;
    int32 row_blocks;  // blocks of rows of a kv head that the sequence's queries make
};
// A sequence that has all of the shared prefix, whose row of the block table is read for all: the first one, unless it
// is paused; the last one if all are paused and the result does not count.
OA_DEVICE int32 prefix_owner(const DecodeParams& p) {
    int32 b = 0;
    while (b < p.prefix_sequences - 1 && p.seq_lens[b] < p.capacity) ++b;
    return b;
}
// kRows: of a block.
template <int kRows>
OA_DEVICE KeySpan key_span(const DecodeParams& p, int32 b) {
    KeySpan s;
    s.seq_len = s.end = min_of(max_of(p.seq_lens[b], p.least_seq_len), p.capacity);
    s.queries = queries_of(p, b);
    s.row_blocks = p.cu_seqlens_q == nullptr ? p.num_row_blocks : (s.queries.count * p.group + kRows - 1) / kRows;
    int64 first = p.window_left < 0 ? 0 : int64(s.end) - s.queries.count - p.window_left;
    s.begin = first <= 0 ? 0 : int32(first) & ~15;
    if (p.recent_side != kRecentNone) {
        // A number out of range reads the last slot, nothing outside the ring.
        uint32 slot = min_of(uint32(p.recent_slots == nullptr ? b : p.recent_slots[b]), uint32(p.recent_num_slots - 1));
        int32 newest = recent_begin(p.recent_state + 2 * int64(slot), s.seq_len, p.recent_window, p.recent_ring);
        if (p.recent_side == kRecentNewest) {
            s.begin = max_of(s.begin, newest);
        } else {
            s.end = max_of(newest, s.begin);
        }
    }
    if (p.first_key > s.begin) s.begin = min_of(p.first_key, s.seq_len), s.end = max_of(s.end, s.begin);
    s.chunks = s.queries.count == 0 ? 0 : (s.end - s.begin + (1 << p.chunk_log2) - 1) >> p.chunk_log2;
    return s;
}

// What beginning a split costs, in chunks, where workers shall be even in time: so many chunks without keys are counted
// in front of each segment's. Fixed splits are numbered by chunk and have none.
template <int kRows>
OA_DEVICE int32 begin_chunks(const DecodeParams&) {
    return 0;
}

// Chunks of each worker (CTA): worker w has those from floor(w total / num_workers) on, so that sequences of equal
// length end where workers end if each has a whole number of them. Workers without chunks come last: those of a segment
// are consecutive.
struct Partition {
    int32 total, num_workers;  // of those that have any
    int32 each, extra;  // total = each num_workers + extra
    uint32 multiplier;
    int32 shift;
    OA_DEVICE Partition(int32 total_chunks, const DecodeParams& p)
        : total(total_chunks),
          num_workers(max_of(min_of(p.num_workers, total_chunks), 1)),
          multiplier(p.worker_multiplier),
          shift(p.worker_shift) {
        bool one_each = total_chunks <= p.num_workers;
        each = one_each ? 1 : quotient(total, multiplier, shift);
        extra = one_each ? 0 : total - each * num_workers;
    }
    // The host keeps the square of p.num_workers below 2^31.
    OA_DEVICE int32 begin(int32 worker) const {
        if (worker >= num_workers) return total;
        return worker * each + quotient(worker * extra, multiplier, shift);
    }
    // The last one that begins at `chunk` < total or before it.
    OA_DEVICE int32 worker_of(int32 chunk) const {
        return int32((uint64(chunk + 1) * uint32(num_workers) - 1) / uint32(total));
    }
};

// Slot of a partial result. With fixed splits that of the split's chunk; else the worker's: only its first and its last
// segment can be incomplete, so it has two.
OA_DEVICE int32 partial_slot(const DecodeParams& p, const Partition& partition, int32 worker, int32 segment,
                             int32 chunk) {
    return p.fixed_splits ? chunk : 2 * worker + (partition.begin(worker) < segment ? 1 : 0);
}

template <int kThreads>
struct ScanStorage {
    int32 warp_sums[kThreads / 32];
    int32 sequence, before;  // of `Scan::locate`
};

// Prefix sums of the sequences' chunks, by all threads of a CTA; a thread has consecutive sequences.
template <int kThreads, int kRows>
struct Scan {
    int32 first, last;  // this thread's sequences
    int32 before;  // chunks of all sequences before them
    int32 own;  // theirs
    int32 total;  // of all sequences
    KeySpan span;  // of the thread's last sequence

    OA_DEVICE static int32 chunks_of(const DecodeParams& p, int32 b) { return chunks_of(p, key_span<kRows>(p, b)); }
    OA_DEVICE static int32 chunks_of(const DecodeParams& p, const KeySpan& span) {
        return (span.chunks == 0 ? 0 : span.chunks + begin_chunks<kRows>(p)) * p.num_kv_heads * span.row_blocks;
    }

    // One CTA barrier.
    OA_DEVICE Scan(const DecodeParams& p, ScanStorage<kThreads>& smem) {
        int32 each = (p.batch + kThreads - 1) / kThreads;
        first = min_of(int32(threadIdx.x) * each, p.batch);
        last = min_of(first + each, p.batch);
        own = 0;
        for (int32 b = first; b < last; ++b) {
            span = key_span<kRows>(p, b);
            own += chunks_of(p, span);
        }
        int lane = threadIdx.x & 31, warp_idx = threadIdx.x >> 5;
        int32 inclusive = own;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            int32 up = __shfl_up_sync(0xffffffffu, inclusive, d);
            if (lane >= d) inclusive += up;
        }
        if (lane == 31) smem.warp_sums[warp_idx] = inclusive;
        __syncthreads();
        before = inclusive - own;
        total = 0;
#pragma unroll
        for (int w = 0; w < kThreads / 32; ++w) {
            int32 sum = smem.warp_sums[w];
            if (w < warp_idx) before += sum;
            total += sum;
        }
    }

    // The sequence that chunk `wanted` < total belongs to, and the chunks before that sequence, to every thread. One
    // CTA barrier.
    OA_DEVICE void locate(const DecodeParams& p, int32 wanted, ScanStorage<kThreads>& smem) {
        int32 sequence, chunks_before;
        if (find(p, wanted, sequence, chunks_before)) smem.sequence = sequence, smem.before = chunks_before;
        __syncthreads();
    }

    // The same without a barrier: whether this thread knows it, which one does.
    OA_DEVICE bool find(const DecodeParams& p, int32 wanted, int32& sequence, int32& chunks_before) const {
        if (wanted < before || before + own <= wanted) return false;
        int32 at = before, b = first;
        for (; b < last - 1; ++b) {
            const int32 here = chunks_of(p, b);
            if (wanted < at + here) break;
            at += here;
        }
        sequence = b, chunks_before = at;
        return true;
    }

    // Chunks before sequence `wanted` < batch, in smem.before for every thread. One CTA barrier.
    OA_DEVICE void before_sequence(const DecodeParams& p, int32 wanted, ScanStorage<kThreads>& smem) {
        if (first <= wanted && wanted < last) {
            int32 at = before;
            for (int32 b = first; b < wanted; ++b) at += chunks_of(p, b);
            smem.before = at;
        }
        __syncthreads();
    }
};
