// O and LSE of one warp's 16 rows from accumulators of wgmma or mma.sync to global memory; layout as in
// attention/warp_softmax.cuh.
#pragma once
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/cvt.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

// Scales and stores this thread's two rows. The four lanes of a quad hold 4 x 4 words of one row (four 8-column
// blocks); a transpose inside the quad gives each lane 16 contiguous bytes. m2, l: base and denominator of either row;
// lse_l: what the LSE is of, where that is something else. bias: what the scores lack, in natural-log units; a row
// whose bias is NaN becomes NaN.
template <typename Io, int kOutputs>
OA_DEVICE void store_rows(const float (&o)[kOutputs], const float (&m2)[2], const float (&l)[2],
                          const float (&lse_l)[2], const float (&bias)[2], const AttnFwdParams& p, const FwdTile& t,
                          int32 warp_row, int lane) {
    static_assert(kOutputs % 16 == 0, "whole groups of four column blocks");
    const float sink2 = sink_log2<Io>(p, t);
    const int quad_lane = lane & 3;
    const int32 row0 = warp_row + (lane >> 2);
    // unsigned: rows before row 0 (FwdTile::m0) are none either
    const bool row_ok[2] = {uint32(row0) < uint32(t.seqlen_q), uint32(row0 + 8) < uint32(t.seqlen_q)};
    // A row that attends to nothing gives 0, whatever its bias.
    const float lacks[2] = {l[0] == 0.0f ? 0.0f : bias[0], l[1] == 0.0f ? 0.0f : bias[1]};
    float scale[2];
    if (sink2 == neg_inf()) {
        reciprocals(l, scale);
    } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) scale[r] = finish_row(m2[r], l[r], sink2 - lacks[r] * kLog2e).o_scale;
    }
    if (p.lse != nullptr) {
        float* lse = p.lse + t.batch_idx * p.lse_stride_b + t.head_idx * p.lse_stride_h + t.q_begin;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float value = finish_row(m2[r], lse_l[r], sink2 - lacks[r] * kLog2e).lse + lacks[r];
            if (quad_lane == 0 && row_ok[r]) lse[row0 + 8 * r] = value;
        }
    }
    uint16* go = p.o + t.batch_idx * p.o_stride_b + t.head_idx * p.o_stride_h +
                 (int64(t.q_begin) + row0) * p.o_stride_s + quad_lane * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (lacks[r] != lacks[r]) scale[r] = lacks[r];
    // Both rows side by side: the shuffles of one run under those of the other.
#pragma unroll
    for (int d = 0; d < kOutputs / 4; d += 4) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32 w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                w[j] = pack2(Io{}, o[4 * (d + j) + 2 * r] * scale[r], o[4 * (d + j) + 2 * r + 1] * scale[r]);
            // Two butterfly steps: afterwards lane q holds the words of lanes 0..3 of block d + q.
            bool odd = quad_lane & 1, upper = quad_lane & 2;
            uint32 x0 = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1);
            uint32 x1 = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
            uint32 a0 = odd ? x0 : w[0], a1 = odd ? w[1] : x0, b0 = odd ? x1 : w[2], b1 = odd ? w[3] : x1;
            uint32 y0 = __shfl_xor_sync(0xffffffffu, upper ? a0 : b0, 2);
            uint32 y1 = __shfl_xor_sync(0xffffffffu, upper ? a1 : b1, 2);
            uint4 out = upper ? make_uint4(y0, y1, b0, b1) : make_uint4(a0, a1, y0, y1);
            if (row_ok[r] && (d + quad_lane) * 8 < p.head_dim)
                *reinterpret_cast<uint4*>(go + 8 * r * p.o_stride_s + d * 8) = out;
        }
    }
}
template <typename Io, int kOutputs>
OA_DEVICE void store_rows(const float (&o)[kOutputs], const float (&m2)[2], const float (&l)[2], const float (&bias)[2],
                          const AttnFwdParams& p, const FwdTile& t, int32 warp_row, int lane) {
    store_rows<Io>(o, m2, l, l, bias, p, t, warp_row, lane);
}
