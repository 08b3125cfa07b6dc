// Rows of a decode launch: (query token, head of the kv head's group).
#pragma once
#include "params/decode.cuh"
#include "ptx/types.cuh"

// Query token of a row (token, head of the group).
OA_DEVICE int32 token_of(const DecodeParams& p, int32 row) { return row < p.group ? 0 : row / p.group; }
