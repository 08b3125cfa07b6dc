// A CTA on the CPU, for tests of device code without a GPU: its threads are fibers of one thread of the host, and what a
// warp's lanes do together is a barrier of 32 of them. What CUDA C++ has beyond C++; ptx.h has kernels_cu/ptx.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __device__
#define __global__
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH__ 890

struct Dim3 {
    unsigned x, y, z;
};
extern Dim3 threadIdx, blockIdx, gridDim;
extern unsigned char smem_raw[];  // dynamic shared memory

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
template <typename T>
inline T __ldg(const T* p) {
    return *p;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
    return unsigned((uint64_t(high) << 32 | low) >> (bits & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t both = a | uint64_t(b) << 32;
    unsigned d = 0;
    for (int i = 0; i < 4; ++i) d |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return d;
}
inline void __trap() { abort(); }

// Waits for all threads of the CTA, or of this warp.
void host_barrier(bool of_cta);
inline void __syncthreads() { host_barrier(true); }
bool host_any(bool x);
inline int __syncthreads_or(int x) { return host_any(x != 0); }
inline void __syncwarp() { host_barrier(false); }

// What each lane of this warp has in an operation of all: (*lanes)[i] is lane i's. Two sets of places in turn: who is
// two operations ahead knows that all have read the first one's.
constexpr int kLaneBytes = 32;
using Lanes = unsigned char[32][kLaneBytes];
Lanes& host_lanes();
inline int host_lane() { return int(threadIdx.x & 31); }
template <typename T>
struct Gathered {
    Lanes& lanes;
    T operator[](int lane) const {
        T x;
        memcpy(&x, lanes[lane & 31], sizeof x);
        return x;
    }
};
template <typename T>
inline Gathered<T> gather(T own) {
    static_assert(sizeof own <= kLaneBytes, "what a lane has");
    Lanes& lanes = host_lanes();
    memcpy(lanes[host_lane()], &own, sizeof own);
    host_barrier(false);
    return {lanes};
}

template <typename T>
inline T __shfl_sync(unsigned, T x, int lane, int width = 32) {
    return gather(x)[host_lane() / width * width + lane % width];
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T x, int mask) {
    return gather(x)[host_lane() ^ mask];
}
template <typename T>
inline T __shfl_up_sync(unsigned, T x, int step) {
    return gather(x)[host_lane() >= step ? host_lane() - step : host_lane()];
}
inline unsigned __ballot_sync(unsigned, bool x) {
    auto all = gather(x);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane]) << lane;
    return bits;
}
template <typename T, typename Operation>
inline T reduced(T own, Operation operation) {
    auto all = gather(own);
    T x = all[0];
    for (int lane = 1; lane < 32; ++lane) x = operation(x, all[lane]);
    return x;
}
template <typename T>
inline T __reduce_add_sync(unsigned, T x) {
    return reduced(x, [](T a, T b) { return a + b; });
}
template <typename T>
inline T __reduce_max_sync(unsigned, T x) {
    return reduced(x, [](T a, T b) { return a > b ? a : b; });
}
template <typename T>
inline T __reduce_min_sync(unsigned, T x) {
    return reduced(x, [](T a, T b) { return a < b ? a : b; });
}
inline unsigned __reduce_or_sync(unsigned, unsigned x) {
    return reduced(x, [](unsigned a, unsigned b) { return a | b; });
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == 0xffffffffu; }

// Fibers take turns where they wait: nothing comes between.
template <typename T>
inline T atomicAdd(T* p, T x) {
    T old = *p;
    *p += x;
    return old;
}
template <typename T>
inline T atomicOr(T* p, T x) {
    T old = *p;
    *p |= x;
    return old;
}

// Addresses of shared memory, as sm_90 has them: from 1024 on.
inline uint64_t __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - smem_raw + 1024; }
inline unsigned char* host_shared(unsigned address) { return smem_raw + (address - 1024); }
