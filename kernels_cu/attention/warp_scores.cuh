// Products on mma.sync, the first of a sum or behind it; of Q and K by what a score is, 32 bytes of k each. Scores with
// delta_s.
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

// Scores of a tile in base 2. c: score units -> base-2 exponent; delta: from this lane's first column on, scale_log2:
// the softmax's scale times log2(e), which c has in it.
template <int kMTiles, int kScores, typename Score>
OA_DEVICE void shifted_scores(float (&f)[kMTiles][kScores], const Score (&s)[kMTiles][kScores], float c,
                              const float* delta, float scale_log2) {
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n) {
        float2 d = *reinterpret_cast<const float2*>(delta + 8 * n);
        d.x *= scale_log2;
        d.y *= scale_log2;
#pragma unroll
        for (int i = 0; i < kMTiles; ++i)
#pragma unroll
            for (int e = 4 * n; e < 4 * n + 4; ++e)
                f[i][e] = fmaf(score_of(s[i][e]) - kScoreBias<Score>, c, e & 1 ? d.y : d.x);
    }
}
