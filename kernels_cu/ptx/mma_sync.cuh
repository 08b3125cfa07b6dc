// mma.sync.aligned.m16n8k16.row.col.f32.{bf16,f16}.{bf16,f16}.f32 (PTX ISA, "mma"): D = A·B + D.
// Issued by all 32 lanes of a warp. Register-only: orders nothing, so no "memory" clobber.
// Lane l holds: A rows l/4 and l/4+8, columns 2(l%4)+{0,1} and +8 (four packed registers);
// B rows (k) 2(l%4)+{0,1} and +8, column l/4 (two packed registers);
// D rows l/4 (d0, d1) and l/4+8 (d2, d3), columns 2(l%4)+{0,1}.
#pragma once
#include "ptx/types.cuh"

OA_DEVICE void mma_m16n8k16(BFloat16, float* d, const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
OA_DEVICE void mma_m16n8k16(Half, float* d, const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 and m16n8k64 with s4 (PTX ISA, "mma"): D = A·B + D on integers, or
// A·B + seed in every element. Counted in bytes of k, operands lie as those of m16n8k16 do: lane l holds bytes 4(l%4)
// .. +3 and 16 further; of two 4-bit elements in a byte the first is in the low half. sm_80 and newer; where there are
// no 4-bit products (from sm_90 on) ptxas unpacks to 8 bits.
template <int kBits>
OA_DEVICE void mma_integers(int32& d0, int32& d1, int32& d2, int32& d3, const uint32 (&a)[4], uint32 b0, uint32 b1) {
    static_assert(kBits == 8 || kBits == 4, "s8 or s4");
    if constexpr (kBits == 8) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d0), "+r"(d1), "+r"(d2), "+r"(d3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d0), "+r"(d1), "+r"(d2), "+r"(d3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}
template <int kBits>
OA_DEVICE void mma_integers(int32& d0, int32& d1, int32& d2, int32& d3, const uint32 (&a)[4], uint32 b0, uint32 b1,
                            int32 seed) {
    static_assert(kBits == 8 || kBits == 4, "s8 or s4");
    if constexpr (kBits == 8) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(seed));
    } else {
        asm("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(seed));
    }
}

// P V with a fresh accumulator (D = A·B) or a running one (D = A·B + D). Half: m16n8k16 on f16; E4m3: m16n8k32 (sm_89
// and newer; sm_90 converts to f16 first). float d[4]: fp32 accumulator; uint32 d[2]: fp16 accumulator, of row l/4 in
// d[0], of row l/4+8 in d[1], two columns a register, every sum rounded to nearest.
OA_DEVICE void mma_pv(Half, float* d, const uint32 (&a)[4], uint32 b0, uint32 b1, float c0, float c1, float c2,
                      float c3) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
OA_DEVICE void mma_pv(E4m3, float* d, const uint32 (&a)[4], uint32 b0, uint32 b1, float c0, float c1, float c2,
                      float c3) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
OA_DEVICE void mma_pv(Half, uint32* d, const uint32 (&a)[4], uint32 b0, uint32 b1, uint32 c0, uint32 c1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%9};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1));
}
OA_DEVICE void mma_pv(E4m3, uint32* d, const uint32 (&a)[4], uint32 b0, uint32 b1, uint32 c0, uint32 c1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%9};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1));
}
template <typename Operand>
OA_DEVICE void mma_pv_first(Operand op, float* d, const uint32 (&a)[4], uint32 b0, uint32 b1) {
    mma_pv(op, d, a, b0, b1, 0.0f, 0.0f, 0.0f, 0.0f);
}
template <typename Operand>
OA_DEVICE void mma_pv_first(Operand op, uint32* d, const uint32 (&a)[4], uint32 b0, uint32 b1) {
    mma_pv(op, d, a, b0, b1, 0u, 0u);
}
template <typename Operand>
OA_DEVICE void mma_pv_more(Operand op, float* d, const uint32 (&a)[4], uint32 b0, uint32 b1) {
    mma_pv(op, d, a, b0, b1, d[0], d[1], d[2], d[3]);
}
template <typename Operand>
OA_DEVICE void mma_pv_more(Operand op, uint32* d, const uint32 (&a)[4], uint32 b0, uint32 b1) {
    mma_pv(op, d, a, b0, b1, d[0], d[1]);
}
