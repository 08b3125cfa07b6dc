// Operands and sums of P V on mma.sync with fp16 or e4m3 P.
#pragma once
#include "ptx/cvt.cuh"
#include "ptx/cvt_e4m3.cuh"
#include "ptx/types.cuh"

// Packs P of 16 rows, from step kFirst on, as operand of P V: called for the two neighbouring columns of row r in
// column block n, blocks in order. A step has 16 keys (fp16) or 32 (e4m3, whose keys are permuted as those of V are).
template <bool kHalf, int kFirst, int kSteps>
struct OperandPacker {
    uint32 (&operands)[kSteps][4];
    float held[2][2];  // e4m3: P of the last even column block, in whose words the next one goes too
    OA_DEVICE void operator()(int n, int r, float p0, float p1) {
        if constexpr (kHalf) {
            operands[kFirst + n / 2][2 * (n & 1) + r] = pack2(Half{}, p0, p1);
        } else if (n & 1) {
            operands[kFirst + n / 4][(n & 2) + r] = pack4_e4m3(held[r][0], held[r][1], p0, p1);
        } else {
            held[r][0] = p0;
            held[r][1] = p1;
        }
    }
};

// Adds the sums of one tile, 16 rows by 8 channels, to those in fp32.
OA_DEVICE void add_part(float* o, const float (&part)[4]) {
#pragma unroll
    for (int x = 0; x < 4; ++x) o[x] += part[x];
}
OA_DEVICE void add_part(float* o, const uint32 (&part)[2]) {
#pragma unroll
    for (int x = 0; x < 4; ++x) o[x] += to_float(Half{}, uint16(part[x >> 1] >> 16 * (x & 1)));
}
