// After how many keys a kernel on e4m3 adds what the tensor cores have summed to its own sums.
//
// Tensor cores keep about 13 bits of mantissa when they add e4m3 products, and cut off the rest: a sum of n values of
// one sign loses n 2^-14 of itself or so, a sum that stays near 0 next to nothing (docs/performance/attn_fp8_sm90.md).
// So V of a caller is looked at by the kernel that lays it out (entry/layout_fp8_sm80.cu): a bit for 128 keys.
#pragma once
#include "params/attn_int8.cuh"
#include "ptx/types.cuh"
#include "scheduler/slots.cuh"

constexpr int32 kLongFlushKeys = 2048;

// All lanes of a warp. of_head: kv head among those that drift has; first_block: of the sequence; first, end: keys of the sequence that a tile of queries looks at; flush_keys: where V drifts, or
// nobody has looked at it.
OA_DEVICE int32 flush_period(const BlockScales& s, int32 flush_keys, int64 of_head, int32 first_block, int32 first,
                             int32 end, int32 lane) {
    if (s.drift == nullptr) return flush_keys;
    const uint8* drift = s.drift + of_head * s.drift_stride_h + first_block;
    bool drifts = false;
    for (int32 i = first / kBlockRows + lane; i * kBlockRows < end; i += 32) drifts = drifts || __ldg(drift + i) != 0;
    return __any_sync(0xffffffffu, drifts) ? flush_keys : kLongFlushKeys;
}
