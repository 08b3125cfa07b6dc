// Rows of packed sequences that are not used: 0, and -inf in the LSE.
//
//   x[begin + i] = 0;  lse[begin + i] = -inf;   begin = cu_seqlens[b],  seqused[b] <= i < cu_seqlens[b + 1] - begin
//
// The kernels ahead compute used rows alone. blockIdx.y is the array, of up to three with the rows of their own
// sequences; blockIdx.x a slot of kRows rows of one sequence (scheduler/slots.cuh). A thread stores 16 bytes of a row
// of a head, neighbours store what lies next to each other. No shared memory. Bound by the bytes that it writes.
#include "params/clear_unused.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

constexpr int kThreads = 128;
constexpr int32 kRows = 64;

extern "C" __global__ void __launch_bounds__(kThreads) clear_unused_sm80(const __grid_constant__ ClearUnusedParams p) {
    const int32 array = blockIdx.y, slot = blockIdx.x, total = p.rows[array];
    const int32* cu = p.cu_seqlens[array];
    const int32 b = sequence_of_slot(cu, p.batch, total, slot, kRows);
    const Sequence all = packed_sequence(cu, b, total);
    const Sequence used = used_sequence(cu, p.seqused[array], b, total);
    const int32 index = slot - first_slot(all.begin, b, kRows);  // negative before the first sequence
    if (index < 0) return;
    // 64 bits: a slot behind the last sequence may be far behind it.
    const int64 at = int64(index) * kRows;
    const int32 first = int32(max_of<int64>(at, used.len)), last = int32(min_of<int64>(at + kRows, all.len));
    if (first >= last) return;
    const int32 heads = p.heads[array], chunks = p.head_dim[array] / 8;
    uint16* x = p.x[array] + (all.begin + first) * p.stride_s[array];
    for (int32 i = threadIdx.x; i < (last - first) * heads * chunks; i += kThreads) {
        const int32 line = i / chunks, row = line / heads;
        uint16* to = x + row * p.stride_s[array] + (line - row * heads) * p.stride_h[array] + (i - line * chunks) * 8;
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
    if (p.lse == nullptr || array != 0) return;
    for (int32 i = threadIdx.x; i < (last - first) * heads; i += kThreads) {
        const int32 head = i / (last - first);
        p.lse[head * p.lse_stride_h + all.begin + first + i - head * (last - first)] = neg_inf();
    }
}
