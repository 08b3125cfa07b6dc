// Products of the one-pass backward on wgmma (entry/attn_bwd_sm90.cu), and their operands in registers.
//
// Config: Io, kHeadDim, kBlockM queries of a tile, kDqWidth columns of dQ that a warpgroup computes.
#pragma once
#include "attention/bwd_roles.cuh"
#include "ptx/cvt.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "ptx/wgmma_fp16.cuh"

template <typename Config>
struct BwdProducts {
    using Layout = BwdLayout<Config>;
    using Scores = float[Config::kBlockM / 2];  // 64 keys x kBlockM queries
    using Gradient = float[Config::kHeadDim / 2];  // 64 keys x head_dim
    using QueryGradient = float[Config::kDqWidth / 2];  // 64 queries x kDqWidth
    using Operand = uint32[Config::kBlockM / 16][4];  // P^T or dS^T
    static constexpr int kSteps = Config::kHeadDim / 16;
    using KeyOperand = uint32[kSteps][4];  // 16 rows of K or V a warp

    // D = A B^T of 64 keys and kBlockM queries.
    OA_DEVICE static void issue_scores(Scores& s, WgmmaDescriptor a, WgmmaDescriptor b) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32 panel = step >> 2, column = (step & 3) * 32;
            Wgmma<typename Config::Io, Config::kBlockM>::ss(s, a.at(panel * Layout::kKvPanelBytes + column),
                                                            b.at(panel * Layout::kQPanelBytes + column), step != 0);
        }
        wgmma_commit();
    }
    OA_DEVICE static void issue_scores(Scores& s, const KeyOperand& a, WgmmaDescriptor b) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Wgmma<typename Config::Io, Config::kBlockM>::template rs<kKMajor>(s, a[step], b.at(step * 32), step != 0);
        wgmma_commit();
    }
    // D += A^T B, A^T in registers.
    OA_DEVICE static void issue_gradient(Gradient& d, const Operand& a, WgmmaDescriptor b) {
#pragma unroll
        for (int step = 0; step < Config::kBlockM / 16; ++step)
            Wgmma<typename Config::Io, Config::kHeadDim>::template rs<kMnMajor>(d, a[step], b.at(step * 16 * 128), 1);
        wgmma_commit();
    }
    // The accumulator layout of a product is the operand layout of the next.
    OA_DEVICE static void pack(Operand& a, const Scores& s) {
#pragma unroll
        for (int j = 0; j < Config::kBlockM / 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                a[j >> 1][2 * (j & 1) + r] = pack2(typename Config::Io{}, s[4 * j + 2 * r], s[4 * j + 2 * r + 1]);
    }
};
