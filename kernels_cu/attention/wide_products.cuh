// Products on mma.sync of heads of more than 256 channels, whose sums of 16 rows do not fit into the registers of a
// warp: warps that have the same rows have channels of their own (kChannelWarps), and each makes a part of the scores.
// Panels of 64 channels that a call does not have are passed over.
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/types.cuh"
#include "tile/panel.cuh"

// Warps that have the same rows.
OA_DEVICE constexpr int channel_warps(int head_dim) { return head_dim > 256 ? 2 : 1; }
// Which chunk of 8 channels of a row is number `own` of one of kWarps warps that have panels of it in turn.
template <int kWarps>
OA_DEVICE constexpr int channel_chunk(int own, int channel_warp) {
    return kWarps == 1 ? own : (own >> 3) * (8 * kWarps) + channel_warp * 8 + (own & 7);
}

// S = A B^T of 16 rows of A and kColumns rows of B, 8 or a multiple of 16, over the channels of both.
template <typename Io, int kRowsA, int kRowsB, int kHeadDim, int kColumns>
struct WideScores {
    using LaneA = PanelLane<kRowsA, kHeadDim>;
    using LaneB = PanelLane<kRowsB, kHeadDim>;
    using Scores = float[kColumns / 2];
    // Whole panels and MMA tiles. Kernels of narrower heads name this and do not call it: those that do assert it.
    static constexpr bool kIsWhole = kHeadDim % 64 == 0 && (kColumns == 8 || kColumns % 16 == 0);

    // ldmatrix lanes of B: 8 rows by 4 chunks where there are no more rows, else 2 x 8 rows by 2 chunks.
    OA_DEVICE static LaneB lane_b(int lane) {
        return kColumns == 8 ? LaneB(lane & 7, lane >> 3) : LaneB((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    }
    // smem_a, smem_b: the first row; they are multiples of 8 rows in their tiles.
    OA_DEVICE static void multiply(Scores& s, uint32 smem_a, const LaneA& lane_a, uint32 smem_b, const LaneB& lane_b,
                                   int32 channels) {
#pragma unroll
        for (int x = 0; x < kColumns / 2; ++x) s[x] = 0.0f;
#pragma unroll
        for (int panel = 0; panel < kHeadDim / 64; ++panel) {
            if (panel * 64 >= channels) break;
#pragma unroll
            for (int pair = 2 * panel; pair < 2 * panel + 2; ++pair) {
                uint32 a[2][4];
                ldmatrix_x4(a[0], smem_a + lane_a.at(0, 2 * pair));
                ldmatrix_x4(a[1], smem_a + lane_a.at(0, 2 * pair + 1));
                if constexpr (kColumns == 8) {
                    uint32 b[4];
                    ldmatrix_x4(b, smem_b + lane_b.at(0, 2 * pair));
                    mma_m16n8k16(Io{}, s, a[0], b[0], b[1]);
                    mma_m16n8k16(Io{}, s, a[1], b[2], b[3]);
                } else {
#pragma unroll
                    for (int half = 0; half < 2; ++half)
#pragma unroll
                        for (int n = 0; n < kColumns / 8; n += 2) {
                            uint32 b[4];
                            ldmatrix_x4(b, smem_b + lane_b.at(n * 8, 2 * pair + half));
                            mma_m16n8k16(Io{}, s + 4 * n, a[half], b[0], b[1]);
                            mma_m16n8k16(Io{}, s + 4 * (n + 1), a[half], b[2], b[3]);
                        }
                }
            }
        }
    }
};

// O += A B of 16 rows and 16 rows of B, row_b and on, of every kPanelStep-th panel. smem_b: of the first one; lane_b:
// (lane & 15, lane >> 4); channels: from there on. O has whole panels.
template <typename Io, int kPanelStep, int kRowsB, int kHeadDim, int kOutputs>
OA_DEVICE void add_wide_output(float (&o)[kOutputs], const uint32 (&a)[4], uint32 smem_b,
                               const PanelLane<kRowsB, kHeadDim>& lane_b, int row_b, int32 channels) {
#pragma unroll
    for (int panel = 0; panel < kOutputs / 32; ++panel) {
        if (panel * kPanelStep * 64 >= channels) break;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            uint32 b[4];
            ldmatrix_x4_trans(b, smem_b + lane_b.at(row_b, panel * kPanelStep * 4 + step));
            mma_m16n8k16(Io{}, o + 32 * panel + 8 * step, a, b[0], b[1]);
            mma_m16n8k16(Io{}, o + 32 * panel + 8 * step + 4, a, b[2], b[3]);
        }
    }
}
