// Where the keys of each sequence go that kv_dequantize_sm80 makes: whole sequences in rounds of `pages` pages.
//
// Sequences of up to `few` queries have none, and none have those that no query sees (window_left). In the order of the
// batch: a sequence that does not fit into a round begins the next one. So each round but the last has as many
// sequences as would fit if all were as long as the cache allows, by which the host counts rounds.
//
// One CTA: needs in parallel, places by one thread, at a few cycles a sequence.
#include "params/kv_dequantize.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

constexpr int kThreads = 256, kPortion = 1024;

extern "C" __global__ void __launch_bounds__(kThreads) kv_rounds_sm80(const __grid_constant__ KvDequantizeParams p) {
    __shared__ int32 places[kPortion], rounds[kPortion];
    const int tid = threadIdx.x;
    int32 round = 0, filled = 0;  // of thread 0
    for (int32 base = 0; base < p.batch; base += kPortion) {
        const int32 count = min_of(p.batch - base, kPortion);
        for (int i = tid; i < count; i += kThreads) {
            const int32 b = base + i, len = min_of(max_of(p.seq_lens[b], 0), p.capacity);
            int32 queries = p.q_len;
            if (p.cu_seqlens_q != nullptr) queries = packed_sequence(p.cu_seqlens_q, b, p.total_queries).len;
            p.lens[b] = len;
            if (p.cu != nullptr) p.cu[b] = b * p.q_len;
            const int32 first = p.window_left < 0 ? 0 : max_of(len - queries - p.window_left, 0) / kPageRows;
            places[i] = queries > p.few ? (len + kPageRows - 1) / kPageRows - first : 0;
        }
        __syncthreads();
        if (tid == 0) {
            for (int i = 0; i < count; ++i) {
                const int32 needed = places[i];
                if (filled + needed > p.pages) {
                    if (round < p.rounds) p.ends[round] = round * p.pages + filled;
                    ++round, filled = 0;
                }
                // Only with cu_seqlens_q that overlap there are more rounds: what they would have is not made.
                rounds[i] = round;
                places[i] = min_of(round, p.rounds) * p.pages + filled;
                filled += needed;
            }
        }
        __syncthreads();
        for (int i = tid; i < count; i += kThreads) {
            p.starts[base + i] = places[i];
            if (p.used != nullptr)
                for (int32 r = 0; r < p.rounds; ++r)
                    p.used[int64(r) * p.batch + base + i] = rounds[i] == r ? 0x7fffffff : 0;
        }
        __syncthreads();
    }
    if (tid != 0) return;
    if (p.cu != nullptr) p.cu[p.batch] = p.batch * p.q_len;
    for (; round < p.rounds; ++round, filled = 0) p.ends[round] = round * p.pages + filled;
}
