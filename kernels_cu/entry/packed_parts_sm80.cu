// Packed sequences of which only the first rows count, as more sequences that count whole.
//
//   seqused_q, seqused_k:  (used queries, used keys)  (other queries, no key)  (no query, other keys)
//   seqused_q:             (used queries, all keys)   (other queries, no key)
//   seqused_k:             (all queries, used keys)                            (no query, other keys)
//
// A thread takes a sequence and writes the starts of its parts; the one behind the last, where that ends. A length
// beyond its sequence counts as the whole of it, a negative one as none. No shared memory. Bound by its launch.
#include "params/packed_parts.cuh"
#include "ptx/types.cuh"

constexpr int kThreads = 128;

// Where the rows that count end. A length near 2^31, whose sum wraps, leaves none.
OA_DEVICE int32 used_end(int32 begin, int32 end, int32 used) {
    int32 at = int32(uint32(begin) + uint32(used));
    at = at > begin ? at : begin;
    return at < end ? at : end;
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_parts_sm80(const __grid_constant__ PackedPartsParams p) {
    int32 b = blockIdx.x * kThreads + threadIdx.x;
    if (b > p.batch) return;
    int32 begin_q = p.cu_seqlens_q[b * p.cu_q_stride], begin_k = p.cu_seqlens_k[b * p.cu_k_stride];
    int32* q = p.parts_q + int64(b) * p.parts;
    int32* k = p.parts_k + int64(b) * p.parts;
    q[0] = begin_q, k[0] = begin_k;
    if (b == p.batch) return;
    int32 end_q = p.cu_seqlens_q[(b + 1) * p.cu_q_stride], end_k = p.cu_seqlens_k[(b + 1) * p.cu_k_stride];
    int32 keys = p.seqused_k == nullptr ? end_k : used_end(begin_k, end_k, p.seqused_k[b * p.used_k_stride]);
    int32 i = 1;
    if (p.seqused_q != nullptr) {
        q[i] = used_end(begin_q, end_q, p.seqused_q[b * p.used_q_stride]);
        k[i++] = keys;
    }
    if (p.seqused_k != nullptr) q[i] = end_q, k[i] = keys;
}
