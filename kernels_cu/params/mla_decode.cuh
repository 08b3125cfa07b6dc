// Arguments of mla_decode_sm90.
#pragma once
#include "params/decode.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

struct MlaDecodeParams {
    TensorMap map;  // of the cache: {column, row of a block, head, block}, boxes of 64 columns and 2^box_rows_log2 rows
    DecodeParams decode;  // of a cache with one head; head_dim is that of V
    int32 box_rows_log2;  // less than 3: there is no map
};
