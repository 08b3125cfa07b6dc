// Scale and mean of each channel of V, through shared memory: with no registers to load ahead into, a warpgroup's loads
// at the end of a tile would wait for L2 one after the other (5 us of a tile's 60 at head_dim 128).
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/types.cuh"

template <int kHeadDim>
struct ChannelScales {
    float* shared;  // kHeadDim scales, then kHeadDim means

    // The 128 threads of a warpgroup. mean: null for zeros; `count` channels, the others are zeros. Complete for
    // everybody after cp_async_wait<0> and a barrier.
    OA_DEVICE void fetch(const float* scale, const float* mean, int32 count) const {
#pragma unroll
        for (int i = 0; i < (kHeadDim + 127) / 128; ++i) {
            int32 c = (threadIdx.x & 127) + 128 * i;
            if (c >= kHeadDim) continue;
            int32 from = c < count ? c : 0;
            bool has_mean = mean != nullptr;
            cp_async_small<4>(smem_addr_of(shared + c), scale + from, c < count ? 4 : 0);
            cp_async_small<4>(smem_addr_of(shared + kHeadDim + c), (has_mean ? mean : scale) + from,
                              has_mean && c < count ? 4 : 0);
        }
        cp_async_commit();
    }

    // Of channels `column` and column + 1.
    OA_DEVICE void get(int32 column, float2& scale, float2& mean) const {
        scale = *reinterpret_cast<const float2*>(shared + column);
        mean = *reinterpret_cast<const float2*>(shared + kHeadDim + column);
    }

    // O = A scale + l mean, of a lane's two rows of wgmma accumulators; l: sums of P.
    OA_DEVICE void undo(float (&acc)[kHeadDim / 2], const float (&l)[2], int lane) const {
#pragma unroll
        for (int d = 0; d < kHeadDim / 8; ++d) {
            float2 scale, mean;
            get(8 * d + 2 * (lane & 3), scale, mean);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float* o = acc + 4 * d + 2 * r;
                o[0] = fmaf(o[0], scale.x, l[r] * mean.x);
                o[1] = fmaf(o[1], scale.y, l[r] * mean.y);
            }
        }
    }
};
