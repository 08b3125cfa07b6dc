// Where the keys of each sequence go that kv_dequantize_sm80 makes: whole sequences in rounds of `pages` pages.
//
// Sequences of up to `few` queries have none, and none have pages whose keys no query sees (window_left). In the order
// of the batch: a sequence that does not fit into a round begins the next one. So each round but the last has as many
// sequences as would fit if all were as long as the cache allows, by which the host counts rounds.
//
// One CTA: needs in parallel, places by one thread, at a few cycles a sequence.
#include "params/kv_dequantize.cuh"
#include "ptx/types.cuh"
#include "scheduler/keys_in_pages.cuh"

constexpr int kThreads = 256, kPortion = 1024;

extern "C" __global__ void __launch_bounds__(kThreads) kv_rounds_sm80(const __grid_constant__ KvDequantizeParams p) {
    __shared__ int32 places[kPortion];  // pages that a sequence needs, then its first page in its round
    __shared__ int32 rounds[kPortion];
    __shared__ int32 ends[kMostRounds];  // pages of a round
    const int tid = threadIdx.x;
    int32 round = 0, filled = 0;  // of thread 0
    if (tid < kMostRounds) ends[tid] = 0;
    for (int32 base = 0; base < p.batch; base += kPortion) {
        const int32 count = min_of(p.batch - base, kPortion);
        for (int i = tid; i < count; i += kThreads) {
            const int32 b = base + i;
            const KeysInPages keys = keys_of(p, b);
            p.lens[b] = keys.count;
            if (p.cu_q != nullptr) p.cu_q[b] = b * p.q_len;
            places[i] = (keys.count + kPageRows - 1) / kPageRows;
            rounds[i] = keys.has_queries;
        }
        __syncthreads();
        if (tid == 0) {
            for (int i = 0; i < count; ++i) {
                const int32 needed = places[i];
                if (filled + needed > p.pages) ++round, filled = 0;
                places[i] = filled;
                filled += needed;
                if (round < p.rounds) ends[round] = filled;
                // Only with cu_seqlens_q that overlap there are more rounds: nobody has their queries.
                rounds[i] = rounds[i] ? round : -1 - round;
            }
        }
        __syncthreads();
        for (int i = tid; i < count; i += kThreads) {
            const bool has_queries = rounds[i] >= 0;
            const int32 own = has_queries ? rounds[i] : -1 - rounds[i];
            for (int32 r = 0; r < p.rounds; ++r) {
                const int32 page = own == r ? places[i] : own > r ? ends[r] : 0;
                p.cu_k[int64(r) * (p.batch + 1) + base + i] = page * kPageRows;
                if (p.used_q != nullptr)
                    p.used_q[int64(r) * p.batch + base + i] = has_queries && own == r ? 0x7fffffff : 0;
            }
        }
        __syncthreads();
    }
    if (tid < p.rounds) p.cu_k[int64(tid) * (p.batch + 1) + p.batch] = ends[tid] * kPageRows;
    if (tid == 0 && p.cu_q != nullptr) p.cu_q[p.batch] = p.batch * p.q_len;
}
