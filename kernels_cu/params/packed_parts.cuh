// Arguments of packed_parts_sm80.
#pragma once
#include "ptx/types.cuh"

struct PackedPartsParams {
    const int32* cu_seqlens_q;  // [batch + 1]
    const int32* cu_seqlens_k;  // [batch + 1]
    const int32* seqused_q;  // [batch] or null
    const int32* seqused_k;  // [batch] or null
    int32* parts_q;  // [parts * batch + 1]
    int32* parts_k;  // [parts * batch + 1]
    int64 cu_q_stride, cu_k_stride, used_q_stride, used_k_stride;  // elements
    int32 batch, parts;  // parts: 1 + one for each of seqused_q and seqused_k that is there
};
