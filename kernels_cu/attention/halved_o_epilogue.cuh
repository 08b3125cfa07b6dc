// Results of attn_fwd_d512_sm90 (entry/) from accumulators to global memory.
#pragma once
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "params/attn_fwd.cuh"
#include "ptx/cvt.cuh"
#include "ptx/types.cuh"
#include "scheduler/fwd_tile.cuh"

// O of the channels of CTA `rank`, half of them, and from CTA 0 the LSE. As store_rows (attention/warp_epilogue.cuh): a
// transpose inside the quad gives each lane 16 contiguous bytes of a row. m, l: base in base 2 and denominator. lane:
// not known to the compiler, which would keep what is computed of it in registers from the first tile on.
template <typename Io, int kOutputs>
OA_DEVICE void store_half(const float (&o)[kOutputs], const float (&m)[2], const float (&l)[2], const AttnFwdParams& p,
                          const FwdTile& t, int32 warp_row, int32 rank, int32 lane) {
    const float sink2 = sink_log2<Io>(p, t);
    // Computed here: the compiler would keep it in registers from the first tile on.
    const int32 quad_lane = lane & 3, row0 = warp_row + (lane >> 2);
    const int32 first = rank * 2 * kOutputs;
    uint16* const to = p.o + t.batch_idx * p.o_stride_b + t.head_idx * p.o_stride_h +
                       (int64(t.q_begin) + row0) * p.o_stride_s + first + quad_lane * 8;
    float by[2];
    bool exists[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowResult result = finish_row(m[r], l[r], sink2);
        by[r] = result.o_scale;
        // unsigned: rows before row 0 (FwdTile::m0) are none either
        exists[r] = uint32(row0 + 8 * r) < uint32(t.seqlen_q);
        if (rank == 0 && quad_lane == 0 && exists[r] && p.lse != nullptr)
            p.lse[t.batch_idx * p.lse_stride_b + t.head_idx * p.lse_stride_h + t.q_begin + row0 + 8 * r] = result.lse;
    }
#pragma unroll
    for (int d = 0; d < kOutputs / 4; d += 4)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32 w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                w[j] = pack2(Io{}, o[4 * (d + j) + 2 * r] * by[r], o[4 * (d + j) + 2 * r + 1] * by[r]);
            const bool odd = quad_lane & 1, upper = quad_lane & 2;
            const uint32 x0 = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1);
            const uint32 x1 = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
            const uint32 a0 = odd ? x0 : w[0], a1 = odd ? w[1] : x0, b0 = odd ? x1 : w[2], b1 = odd ? w[3] : x1;
            const uint32 y0 = __shfl_xor_sync(0xffffffffu, upper ? a0 : b0, 2);
            const uint32 y1 = __shfl_xor_sync(0xffffffffu, upper ? a1 : b1, 2);
            if (exists[r] && first + (d + quad_lane) * 8 < p.head_dim)
                *reinterpret_cast<uint4*>(to + 8 * r * p.o_stride_s + d * 8) =
                    upper ? make_uint4(y0, y1, b0, b1) : make_uint4(a0, a1, y0, y1);
        }
}
