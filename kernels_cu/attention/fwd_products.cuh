// The two products of a step of the forward on wgmma, and P between them.
#pragma once
#include "attention/warp_softmax.cuh"
#include "pipeline/ping_pong.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "ptx/wgmma_fp16.cuh"

// Config: Io, kHeadDim, kHeadDimV, kBlockM, kBlockN, kPanelsV, kNTiles, kDTiles, kPassStep (after how many of a
// product's k steps the next warpgroup may issue). Tiles in shared memory are panels of 64 columns with the 128-byte
// swizzle.
template <typename Config>
struct FwdProducts {
    using Scores = float[Config::kNTiles * 4];
    using Output = float[Config::kDTiles * 4];
    using Probabilities = uint32[Config::kBlockN / 16][4];
    using Pv = Wgmma<typename Config::Io, Config::kHeadDimV>;
    static constexpr uint32 kKvPanelBytes = Config::kBlockN * 128;

    // S = Q K^T, asynchronous. q: this warpgroup's 64 rows.
    OA_DEVICE static void issue_qk(Scores& s, WgmmaDescriptor q, WgmmaDescriptor k) {
        wgmma_pin(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            uint32 panel = step >> 2, column = (step & 3) * 32;  // inside a panel's 128-byte rows
            Wgmma<typename Config::Io, Config::kBlockN>::ss(s, q.at(panel * Config::kBlockM * 128 + column),
                                                            k.at(panel * kKvPanelBytes + column), step != 0);
        }
        wgmma_commit();
        wgmma_pin(s);
    }

    // O += P V, asynchronous. pass_on: called when the next warpgroup may issue.
    template <typename PassOn>
    OA_DEVICE static void issue_pv(Output& o, const Probabilities& probs, WgmmaDescriptor v, PassOn pass_on) {
        wgmma_pin(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kBlockN / 16; ++step) {
            if (step == Config::kPassStep) pass_on();
            Pv::template rs<kMnMajor>(o, probs[step], v.at(step * 16 * 128), 1);
        }
        wgmma_commit();
        if (Config::kPassStep == Config::kBlockN / 16) pass_on();
        wgmma_pin(o);
    }

    // Clears the rows of V from `valid_rows` on: in packed tensors they belong to the next sequence, and 0 times its
    // NaN would be NaN. Every warpgroup clears all of them before its own product; they write the same zeros.
    OA_DEVICE static void clear_tail(uint32 smem_v, int32 valid_rows, int32 group) {
        int32 words = (Config::kBlockN - valid_rows) * 8;  // 16 bytes each, in one panel
        for (int32 i = threadIdx.x & 127; i < words; i += 128)
#pragma unroll
            for (int c = 0; c < Config::kPanelsV; ++c)
                asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem_v + c * kKvPanelBytes +
                                                                              valid_rows * 128 + i * 16),
                             "r"(0)
                             : "memory");
        fence_proxy_async();
        named_barrier_sync(kFirstFreeBarrier + group, 128);
    }

    // P, packed: the accumulator layout of S is the operand layout of P.
    struct Put {
        Probabilities& probs;
        OA_DEVICE void operator()(int n, int r, float p0, float p1) const {
            probs[n >> 1][2 * (n & 1) + r] = pack2(typename Config::Io{}, p0, p1);
        }
    };
    OA_DEVICE static void probabilities(const RowState<>& rows, const Scores& s, const float (&c)[2],
                                        Probabilities& probs, float (&sum)[2]) {
        rows.exponentiate(s, c, sum, Put{probs});
    }
};
