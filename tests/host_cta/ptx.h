// kernels_cu/ptx on the CPU: the wrappers that the kernels of `decode` use, by the same names.
#pragma once
#include "ptx/types.cuh"

// cvt.cuh
inline uint16 half_bits(float x) { return __builtin_bit_cast(uint16, _Float16(x)); }
inline float to_float(Half, uint16 bits) { return float(__builtin_bit_cast(_Float16, bits)); }
inline float to_float(BFloat16, uint16 bits) { return __uint_as_float(uint32(bits) << 16); }
inline uint16 bf16_bits(float x) {
    uint32 bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : uint16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32 pack2(Half, float lo, float hi) { return half_bits(lo) | uint32(half_bits(hi)) << 16; }
inline uint32 pack2(BFloat16, float lo, float hi) { return bf16_bits(lo) | uint32(bf16_bits(hi)) << 16; }
template <typename Io>
inline float low_float(Io io, uint32 w) {
    return to_float(io, uint16(w));
}
template <typename Io>
inline float high_float(Io io, uint32 w) {
    return to_float(io, uint16(w >> 16));
}

// math.cuh, min_nan.cuh
inline float min_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : fminf(a, b); }
inline float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : fmaxf(a, b); }
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float rcp_approx(float x) { return 1.0f / x; }
inline float rsqrt_approx(float x) { return 1.0f / sqrtf(x); }
inline float tanh_exp2(float x) { return tanhf(x); }
inline float tanh_any(float x) { return tanhf(x); }

// half2.cuh
template <typename Operation>
inline uint32 of_halves(Operation f) {
    return half_bits(f(0)) | uint32(half_bits(f(16))) << 16;
}
inline float half_at(uint32 w, int shift) { return to_float(Half{}, uint16(w >> shift)); }
inline uint32 add_half2(uint32 a, uint32 b) {
    return of_halves([=](int at) { return half_at(a, at) + half_at(b, at); });
}
inline uint32 sub_half2(uint32 a, uint32 b) {
    return of_halves([=](int at) { return half_at(a, at) - half_at(b, at); });
}
inline uint32 mul_half2(uint32 a, uint32 b) {
    return of_halves([=](int at) { return half_at(a, at) * half_at(b, at); });
}
inline uint32 fma_half2(uint32 a, uint32 b, uint32 c) {
    return of_halves([=](int at) { return half_at(a, at) * half_at(b, at) + half_at(c, at); });
}
inline uint32 transpose_8x8(uint32 a) {
    auto all = gather(a);
    int row = host_lane() / 4, column = host_lane() % 4 * 2;
    auto at = [&](int r, int c) { return all[4 * r + c / 2] >> 16 * (c % 2) & 0xffffu; };
    return at(column, row) | at(column + 1, row) << 16;
}

// cvt_quant.cuh
constexpr float kMaxFinite = 3.402823466e38f;
constexpr uint32 kBothSigns = 0x80008000u;
constexpr uint32 kE4m3Nan = 0x7f;
constexpr float kRound = 12582912.0f;
inline float max_abs_nan(float a, float b) { return max_nan(a, fabsf(b)); }
inline float quiet_nan() { return __uint_as_float(0x7fffffffu); }
inline bool is_finite(float x) { return fabsf(x) <= kMaxFinite; }
inline float mul_rn(float a, float b) { return a * b; }
inline float div_rn(float a, float b) { return a / b; }
inline uint32 infinities(Half) { return 0x7c007c00u; }
inline uint32 infinities(BFloat16) { return 0x7f807f80u; }
template <typename Io>
inline uint32 min2_nan(Io io, uint32 a, uint32 b) {
    return pack2(io, min_nan(low_float(io, a), low_float(io, b)), min_nan(high_float(io, a), high_float(io, b)));
}
template <typename Io>
inline uint32 max2_nan(Io io, uint32 a, uint32 b) {
    return pack2(io, max_nan(low_float(io, a), low_float(io, b)), max_nan(high_float(io, a), high_float(io, b)));
}
template <typename Io>
inline float2 unpack2(Io io, uint32 x) {
    return {low_float(io, x), high_float(io, x)};
}
template <typename Io>
inline uint32 max_abs2(Io io, uint32 a, uint32 b) {
    return max2_nan(io, a & ~kBothSigns, b & ~kBothSigns);
}
inline uint16 half_down(float) { abort(); }  // of FBGEMM's layout
inline uint16 half_up(float) { abort(); }
inline uint32 permute_bytes(uint32 a, uint32 b, uint32 selector) { return __byte_perm(a, b, selector); }
inline float of_e4m3(uint32 code) {
    int exponent = int(code >> 3 & 15), mantissa = int(code & 7);
    if ((code & 127) == 127) return NAN;
    float x = exponent > 0 ? ldexpf(float(8 + mantissa), exponent - 10) : ldexpf(float(mantissa), -9);
    return code & 128 ? -x : x;
}
inline uint32 to_e4m3(float x) {
    if (std::isnan(x)) return 0x7f;
    float a = fminf(fabsf(x), 448.0f);
    uint32 best = 0;  // the nearest code, of two the even one
    for (uint32 code = 1; code < 127; ++code) {
        float now = fabsf(of_e4m3(code) - a), before = fabsf(of_e4m3(best) - a);
        if (now < before || (now == before && code % 2 == 0)) best = code;
    }
    return best | (std::signbit(x) ? 128u : 0u);
}
inline uint32 pack_e4m3x2(float lo, float hi) { return to_e4m3(lo) | to_e4m3(hi) << 8; }
template <bool kHigh = false>
inline uint32 half2_of_e4m3x2(uint32 codes) {
    uint32 w = kHigh ? codes >> 16 : codes;
    return pack2(Half{}, of_e4m3(w & 0xff), of_e4m3(w >> 8 & 0xff));
}

// mma_sync.cuh
struct Fragments {
    uint32 a[4], b[2];
};
template <typename Io>
inline void mma_m16n8k16(Io io, float* d, const uint32 (&a)[4], uint32 b0, uint32 b1) {
    auto all = gather(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    auto element = [&](uint32 w, int i) { return to_float(io, uint16(w >> 16 * i)); };
    for (int i = 0; i < 4; ++i) {
        int row = host_lane() / 4 + i / 2 * 8, column = host_lane() % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            uint32 x = all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], y = all[column * 4 + k % 8 / 2].b[k / 8];
            d[i] += element(x, k % 2) * element(y, k % 2);
        }
    }
}

// ldmatrix.cuh
template <bool kTransposed>
inline void load_matrices(uint32 (&r)[4], uint32 address) {
    auto all = gather(address);
    int row = host_lane() / 4, column = host_lane() % 4 * 2;
    for (int i = 0; i < 4; ++i) {
        uint16 pair[2];
        for (int j = 0; j < 2; ++j) {
            int from = kTransposed ? column + j : row, at = kTransposed ? row : column + j;
            memcpy(&pair[j], host_shared(all[8 * i + from]) + 2 * at, 2);
        }
        r[i] = pair[0] | uint32(pair[1]) << 16;
    }
}
inline void ldmatrix_x4(uint32 (&r)[4], uint32 address) { load_matrices<false>(r, address); }
inline void ldmatrix_x4_trans(uint32 (&r)[4], uint32 address) { load_matrices<true>(r, address); }

// cp_async.cuh, l2.cuh: nothing is there before its group is waited for.
void host_copy(uint32 to, const void* from, uint32 size, uint32 bytes);
void host_commit();
void host_wait(int groups);
inline uint32 smem_addr_of(const void* p) { return uint32(__cvta_generic_to_shared(p)); }
inline void cp_async_16(uint32 to, const void* from, uint32 bytes, uint64) { host_copy(to, from, 16, bytes); }
inline void cp_async_16(uint32 to, const void* from, uint64) { host_copy(to, from, 16, 16); }
inline void cp_async_16(uint32 to, const void* from, uint32 bytes) { host_copy(to, from, 16, bytes); }
inline void cp_async_16(uint32 to, const void* from, int bytes) { host_copy(to, from, 16, bytes); }
template <int kBytes>
inline void cp_async_whole(uint32 to, const void* from) {
    host_copy(to, from, kBytes, kBytes);
}
inline void cp_async_4(uint32 to, const void* from, uint64) { host_copy(to, from, 4, 4); }
template <int kBytes>
inline void cp_async_small(uint32 to, const void* from, uint32 bytes, uint64) {
    host_copy(to, from, kBytes, bytes);
}
template <int kBytes>
inline void cp_async_small(uint32 to, const void* from, uint32 bytes) {
    host_copy(to, from, kBytes, bytes);
}
inline void cp_async_commit() { host_commit(); }
template <int kGroups>
inline void cp_async_wait() {
    host_wait(kGroups);
}
inline void prefetch_l2(const void*) {}
inline uint64 l2_policy(bool) { return 0; }
inline uint64 evict_first_policy() { return 0; }
inline uint64 evict_last_policy() { return 0; }
inline uint4 load_input(const void* p, uint64) { return *reinterpret_cast<const uint4*>(p); }
inline uint4 load_ahead4(const uint8* p) { return *reinterpret_cast<const uint4*>(p); }
inline uint32 load_ahead(const uint8* p) { return *reinterpret_cast<const uint32*>(p); }
inline float load_ahead(const float* p) { return *p; }

// shared.cuh
template <typename T>
inline T shared_at(uint32 address) {
    T x;
    memcpy(&x, host_shared(address), sizeof x);
    return x;
}
inline float load_shared_float(uint32 address) { return shared_at<float>(address); }
inline float2 load_shared_float2(uint32 address) { return shared_at<float2>(address); }
inline uint32 load_shared(uint32 address) { return shared_at<uint32>(address); }
inline uint2 load_shared2(uint32 address) { return shared_at<uint2>(address); }
inline uint4 load_shared4(uint32 address) { return shared_at<uint4>(address); }
template <typename T>
inline void store_shared(uint32 address, T x) {
    memcpy(host_shared(address), &x, sizeof x);
}
inline void store_shared4(uint32 address, uint4 x) { store_shared(address, x); }

// gpu_sync.cuh: kernels run one behind the other.
inline void launch_dependents() {}
inline void wait_for_kernel_ahead() {}
inline int32 atomic_add_relaxed(int32*, int32) { abort(); }
inline uint32 load_acquire(const uint32* p) { return *p; }
inline void store_release(uint32* p, uint32 v) { *p = v; }
inline uint32 atomic_add_acq_rel(uint32* p, uint32 v) { return (*p += v) - v; }
inline uint32 atomic_add_relaxed(uint32* p, uint32 v) { return (*p += v) - v; }
inline void reduce_add_release(uint32* p, uint32 v) { *p += v; }
inline void reduce_max_release(uint32* p, uint32 v) { *p = *p > v ? *p : v; }
inline void reduce_max_global(uint32* p, uint32 v) { *p = *p > v ? *p : v; }
inline void reduce_add_global(int64* p, int64 v) { *p += v; }
inline void reduce_max_shared(uint32* p, uint32 v) { *p = *p > v ? *p : v; }
inline void reduce_add_shared(int32* p, int32 v) { *p += v; }
template <typename T>
inline T load_gpu(const T* p) {
    return *p;
}
inline void nanosleep(uint32) {}

// tma.cuh
struct alignas(64) TensorMap {
    uint8 opaque[128];
};

// cluster.cuh: CTAs run one behind the other.
inline uint32 cluster_rank() { return 0; }
inline uint32 cluster_size() { return 1; }
inline void cluster_sync() { abort(); }
inline void cluster_arrive() { abort(); }
inline void cluster_wait() { abort(); }
inline uint32 load_cluster(uint32, uint32) { abort(); }
inline uint2 load_cluster2(uint32, uint32) { abort(); }
inline uint4 load_cluster4(uint32, uint32) { abort(); }
inline void cluster_arrive_relaxed() { abort(); }
inline void store_cluster_async4(uint32, uint4, uint32, uint32) { abort(); }

// mbarrier.cuh, for what only clusters do.
inline void mbarrier_init(uint32, uint32) { abort(); }
inline void fence_barrier_init() { abort(); }
inline void bulk_load(uint32, const void*, uint32, uint32) { abort(); }
inline void mbarrier_arrive_expect_tx(uint32, uint32) { abort(); }
inline void mbarrier_wait(uint32, uint32) { abort(); }
