// Which packed sequence a slot belongs to (scheduler/slots.cuh), of cu_seqlens as the caller has them.
#pragma once
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

// The sequence that a slot belongs to, of starts as copy_starts makes them of `cu`: every warp for itself, all lanes,
// in a pass over cu. False: nobody's.
OA_DEVICE bool find_slot(const int32* cu, const int32* used, int32 batch, int32 total, int32 slot, int32 rows, int32& b,
                         Sequence& s) {
    int32 lane = threadIdx.x & 31, most = 0;
    for (int32 base = 0; base < batch; base += 31) {  // a lane more, for where the last one ends
        int32 x = base + lane <= batch ? min_of(max_of(cu[base + lane], 0), total) : 0;
#pragma unroll
        for (int32 d = 1; d < 32; d <<= 1) {
            int32 before = __shfl_up_sync(0xffffffffu, x, d);
            if (lane >= d) x = max_of(x, before);
        }
        x = max_of(x, most);
        int32 end = __shfl_sync(0xffffffffu, x, (lane + 1) & 31), own = base + lane;
        bool mine =
            lane < 31 && own < batch && first_slot(x, own, rows) <= slot && slot < first_slot(end, own + 1, rows);
        uint32 found = __ballot_sync(0xffffffffu, mine);
        if (found != 0) {
            int32 at = __ffs(found) - 1;
            b = base + at;
            s.begin = __shfl_sync(0xffffffffu, x, at);
            s.len = __shfl_sync(0xffffffffu, end, at) - s.begin;
            if (used != nullptr) s.len = min_of(max_of(used[b], 0), s.len);
            return true;
        }
        most = __shfl_sync(0xffffffffu, x, 31);
    }
    return false;
}
