// A block of 128 keys of V, behind a launch that has summed up samples (quantize/value_sums.cuh).
#pragma once
#include "quantize/value_sums.cuh"
#include "quantize/values.cuh"

// By a CTA of 2 * kHeadDim threads, which may be launched while the kernel ahead ends: until then it reads v alone. t:
// the block, with `rows` and `stride_bytes`. last: a word of shared memory.
template <typename Io, int kHeadDim>
OA_DEVICE void quantize_values_block(const QuantizeParams& p, const QuantizeItem& t, ValuesStorage<kHeadDim>& s,
                                     uint32* last) {
    int32 tid = threadIdx.x;
    ValuesTile tile = values_tile(p, t, t.index);
    uint4 raw[2][4];
    load_values<Io, kHeadDim>(p, tile, raw);
    // Whole warps decide alike, so that this is a branch: without it ptxas puts the wait ahead of the loads.
    if (tid / 32 < kHeadDim / 32) s.error[tid] = 0;
    __syncwarp();
    wait_for_kernel_ahead();
    bool bad = false, sampled = sample_log2(t.len) > 0;
    const int64 at = sequence_head(t, p.num_kv_heads);
    float mean = 0.0f, scale = 1.0f;
    if (tid < kHeadDim) {
        ChannelRange range = channel_range<kHeadDim>(p, t, tid);
        mean = range.mean, scale = range.scale, bad = range.bad;
        s.mean[tid] = mean;
        s.inverse[tid] = div_rn(1.0f, scale);
    }
    bad = __syncthreads_or(bad);
    uint32 addend = sampled ? overflow_addend(p) : 0, over;
    if (bad || tile.count < kBlockRows) {
        over = convert_values<Values::kAny, Io, kHeadDim>(Io{}, raw, s, tile.count, true, addend);
    } else {
        over = convert_values<Values::kRegularSmooth, Io, kHeadDim>(Io{}, raw, s, kBlockRows, true, addend);
    }
    __syncthreads();
    store_values<kHeadDim>(p, tile, s);
    if (sampled && over) reduce_max_global(p.v_bad + at, 1);
    int64 channel = at * p.head_dim_pad + tid;
    bool mine = tid < p.head_dim_pad;
    if (mine) reduce_add_global(p.v_error + channel, s.error[(tid & 7) * (kHeadDim / 8) + (tid >> 3)]);
    if (!arrive_is_last(p.v_done + at, uint32(blocks_of(t.len)), last)) return;

    if (tid == 0) s.bad = sampled && (bad || load_gpu(p.v_bad + at) != 0);
    int64 error = mine ? load_gpu(p.v_error + channel) : 0;
    __syncthreads();
    if (s.bad != 0) {
        // Copies, whose addresses that function is given: the block's own are registers.
        QuantizeItem head = t;
        head.rows -= int64(t.index) * kBlockRows * t.stride_bytes;
        head.slot -= t.index;
        head.index = 0;
        float fitting = scale;
        error = quantize_v_again<Io, kHeadDim>(p, head, s, &fitting);
        scale = fitting;
    }
    if (!mine) return;
    p.v_scale[channel] = scale;
    p.v_mean[channel] = mean + mul_rn(div_rn(mul_rn(float(error), 1.0f / kErrorUnits), float(t.len)), scale);
}
