// Products on mma.sync, the first of a sum or behind it; of Q and K by what a score is, 32 bytes of k each.
#pragma once
#include "attention/warp_softmax.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/types.cuh"

template <typename Operand, typename Word>
OA_DEVICE void mma_pv_step(Operand op, Word* d, const uint32 (&a)[4], uint32 b0, uint32 b1, bool first) {
    if (first) {
        mma_pv_first(op, d, a, b0, b1);
    } else {
        mma_pv_more(op, d, a, b0, b1);
    }
}

template <int kBits>
OA_DEVICE void mma_scores(SeededScore<kBits>* d, const uint32 (&a)[4], uint32 b0, uint32 b1, bool first) {
    constexpr int32 kSeed = 0x4b400000;
    if (first) {
        mma_integers<kBits>(d[0].bits, d[1].bits, d[2].bits, d[3].bits, a, b0, b1, kSeed);
    } else {
        mma_integers<kBits>(d[0].bits, d[1].bits, d[2].bits, d[3].bits, a, b0, b1);
    }
}
OA_DEVICE void mma_scores(float* d, const uint32 (&a)[4], uint32 b0, uint32 b1, bool first) {
    mma_pv_step(E4m3{}, d, a, b0, b1, first);
}
