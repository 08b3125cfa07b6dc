// Fixed-width names and the two 16-bit element types. No header is included anywhere below kernels_cu: NVRTC finds
// none by default, and so the run-time compiler needs nothing but libnvrtc.
#pragma once

using int32 = int;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

static_assert(sizeof(int64) == 8 && sizeof(int32) == 4 && sizeof(uint16) == 2, "LP64 or LLP64 device model expected");

#define OA_DEVICE __device__ __forceinline__

// Tags for element types in memory. The 16-bit ones are handled as raw bit patterns.
struct Float {
    static constexpr int kBytes = 4;
};
struct Half {
    static constexpr int kBytes = 2;
};
struct BFloat16 {
    static constexpr int kBytes = 2;
};
struct Int8 {
    static constexpr int kBytes = 1;
};
struct E4m3 {
    static constexpr int kBytes = 1;
};

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowest = -3.402823466e38f;  // lowest finite fp32
constexpr float kLn2 = 0.6931471805599453f;

OA_DEVICE float neg_inf() { return __int_as_float(0xff800000); }

template <typename T>
OA_DEVICE constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}
template <typename T>
OA_DEVICE constexpr T max_of(T a, T b) {
    return a > b ? a : b;
}

// One of two types.
template <bool kFirst, typename A, typename B>
struct Select {
    using Type = A;
};
template <typename A, typename B>
struct Select<false, A, B> {
    using Type = B;
};

// A copy in another register, by an instruction that is not moved: the compiler merges plain copies, and operations
// that it knows to change nothing. opaque_zero: 0, from opaque_zero().
OA_DEVICE uint32 copy_of(uint32 x, uint32 opaque_zero) {
    uint32 y;
    asm volatile("or.b32 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(opaque_zero) : "memory");
    return y;
}
// Such a copy of mask & (x | ~low) (PTX ISA, "lop3"): from x what is in low, the rest from the mask.
OA_DEVICE uint32 masked_copy_of(uint32 x, uint32 mask, uint32 low) {
    uint32 y;
    asm volatile("lop3.b32 %0, %1, %2, %3, 0xc4;" : "=r"(y) : "r"(x), "r"(mask), "r"(low) : "memory");
    return y;
}
// 0, unknown to the compiler. All lanes of a warp.
OA_DEVICE uint32 opaque_zero() { return __shfl_sync(0xffffffffu, threadIdx.y, 0); }

// The same value, opaque: the compiler keeps it in a register instead of computing it anew at every use in a loop.
OA_DEVICE int32 in_register(int32 x) {
    int32 y;
    asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
OA_DEVICE const uint8* in_register(const uint8* x) {
    const uint8* y;
    asm volatile("mov.b64 %0, %1;" : "=l"(y) : "l"(x));
    return y;
}
