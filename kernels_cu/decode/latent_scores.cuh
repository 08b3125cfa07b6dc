// Scores in shared memory of the kernels over latent caches that compute by mma.sync.
#pragma once
#include "ptx/shared.cuh"
#include "ptx/types.cuh"

// Where 16 bytes of a row of scores are: rows 0 to 3 that are written at once, two places of each, and rows 2i and
// 2i + 1 that are read at once are apart in the banks.
OA_DEVICE uint32 place_of_scores(int row, int unit) { return (unit ^ ((row & 3) << 1 | (row & 1))) << 4; }

// Adds kWidth scores from column `column` on, of row number `own` at `row`.
template <int kWidth>
OA_DEVICE void add_scores(float (&s)[kWidth], uint32 row, int32 own, int32 column) {
    if constexpr (kWidth == 2) {
        const float2 x = load_shared_float2(row + place_of_scores(own, column >> 2) + (column & 2) * 4);
        s[0] += x.x, s[1] += x.y;
    } else {
#pragma unroll
        for (int i = 0; i < kWidth; i += 4) {
            const uint4 x = load_shared4(row + place_of_scores(own, (column + i) >> 2));
            s[i] += __uint_as_float(x.x), s[i + 1] += __uint_as_float(x.y);
            s[i + 2] += __uint_as_float(x.z), s[i + 3] += __uint_as_float(x.w);
        }
    }
}
