// B fragments of S^T = K Q^T by steps of 16 channels: in registers, or where O leaves no room for them there in shared
// memory, in which a lane reads what it has written itself.
#pragma once
#include "ptx/shared.cuh"
#include "ptx/types.cuh"

template <int kNTiles, int kSteps>
using RegisterQuery = uint32[kNTiles][kSteps][2];

template <int kNTiles, int kSteps>
struct SharedQuery {
    static constexpr int kWarpBytes = kNTiles * kSteps * 256;  // [tile of 8 rows][step][lane][2]
    uint32 at;  // of the lane
};

template <int kNTiles, int kSteps>
OA_DEVICE uint2 query_step(const uint32 (&b)[kNTiles][kSteps][2], int n, int step) {
    return make_uint2(b[n][step][0], b[n][step][1]);
}
template <int kNTiles, int kSteps>
OA_DEVICE uint2 query_step(const SharedQuery<kNTiles, kSteps>& b, int n, int step) {
    return load_shared2(b.at + (n * kSteps + step) * 256);
}
template <int kNTiles, int kSteps>
OA_DEVICE void set_query_step(uint32 (&b)[kNTiles][kSteps][2], int n, int step, uint32 x, uint32 y) {
    b[n][step][0] = x;
    b[n][step][1] = y;
}
template <int kNTiles, int kSteps>
OA_DEVICE void set_query_step(const SharedQuery<kNTiles, kSteps>& b, int n, int step, uint32 x, uint32 y) {
    const uint32 at = b.at + (n * kSteps + step) * 256;
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}
