// O and LSE of quantized attention, of 16 rows of one warp, from accumulators to global memory.
#pragma once
#include "attention/quantized_operands.cuh"
#include "attention/wgmma_epilogue.cuh"
#include "scheduler/fwd_params.cuh"
#include "scheduler/fwd_tile.cuh"

// rows: a RowState. lacks_bias: whether the scores lack what smoothing took from them (with a softcap they have had it before).
template <typename Io, int kOutputs, typename Rows>
OA_DEVICE void store_quantized(float (&o)[kOutputs], Rows& rows, bool lacks_bias, const AttnFwdParams& p,
                               const QuantizedOperands& x, const FwdTile& t, int32 first_row, int lane) {
    rows.reduce();
    float bias[2] = {0.0f, 0.0f};
    if (t.seqlen_k > 0) {  // rows of no sequence have no channels to look up, and nothing to scale
        int32 kv_head = t.head_idx / (p.num_q_heads / p.num_kv_heads);
        restore_values(o, rows.m2, rows.l, x, int64(t.sequence) * p.num_kv_heads + kv_head, lane);
        if (lacks_bias) {
            bias[0] = row_bias_of(p, x, t, first_row + (lane >> 2)) * p.softmax_scale;
            bias[1] = row_bias_of(p, x, t, first_row + (lane >> 2) + 8) * p.softmax_scale;
        }
    }
    store_rows<Io>(o, rows.m2, rows.l, bias, p, t, first_row, lane);
}
