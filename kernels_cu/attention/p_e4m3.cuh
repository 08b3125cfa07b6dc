// P in e4m3 as operand of a product with V: its value at the base of the softmax, its sums, and the test for P out of
// range.
#pragma once
#include "attention/p_operands.cuh"
#include "ptx/types.cuh"

// P at the base of the softmax.
struct PRange {
    static constexpr float kBaseLog2 = 4.8068f;  // just below log2(28)
};

// Four e4m3 of 1; an addend that sets the sign of bytes of 448, the largest e4m3, and of NaN; the signs of four bytes.
constexpr uint32 kOnes = 0x38383838, kToSign = 0x02020202, kSigns = 0x80808080;

// Packs P as operand of the product with V (OperandPacker); kSum: and adds it, before it is rounded, to this lane's
// sums. kNew: those begin with column block 0.
template <int kSteps, bool kSum, bool kNew = false>
struct E4m3Packer {
    OperandPacker<false, 0, kSteps> operands;
    float (&sum)[2];
    OA_DEVICE void operator()(int n, int r, float p0, float p1) {
        if (kSum) sum[r] = kNew && n == 0 ? p0 + p1 : sum[r] + (p0 + p1);
        operands(n, r, p0, p1);
    }
};

// Of either row, kSigns of the bytes that are 448, as all P beyond it are, or NaN; other bits mean nothing.
template <int kSteps>
OA_DEVICE void past_largest(const uint32 (&probs)[kSteps][4], uint32 (&signs)[2]) {
    signs[0] = signs[1] = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int x = 0; x < 4; ++x) signs[x & 1] |= probs[k][x] + kToSign;
}
