// V of a dense batch to e4m3, transposed, with the mean and the scale of each channel; behind quantize_fp8 with SUMS.
//
//   v_out = e4m3((v - mean) / v_scale), v_mean = mean and the mean of the rounding errors (quantize/values.cuh)
//
// v: [batch, seqlen_k, num_kv_heads, head_dim], fp16 or bf16, any strides with 16-byte rows. Outputs and the order of
// every sum: docs/quantization.md; the bits are those of quantize_sm80.
//
// One CTA of 2 * HEAD_DIM threads takes 128 keys of a head:
//
//   load v -> [kernel ahead has ended] -> its chunks: mean, scale -> e4m3 in shared memory -> v_out -> arrive
//   the last CTA of a head: v_mean, v_scale; the head again where a sample's scale was too small
//
// It may start while the kernel ahead ends; until then it reads v alone.
// Shared memory (static): ValuesStorage | flag.
#include "quantize/value_sums.cuh"
#include "quantize/values.cuh"

constexpr int kHeadDim = HEAD_DIM, kThreads = 2 * kHeadDim;
static_assert(kCommon && V_TYPE::kBytes == 1, "smoothed V, to e4m3");

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) quantize_values_sm80(const
                                                                                  __grid_constant__ QuantizeParams p) {
    __shared__ ValuesStorage<kHeadDim> s;
    __shared__ uint32 last;
    int32 tid = threadIdx.x;
    // Heads of a block of keys are neighbours in v.
    QuantizeItem t;
    t.kind = kQuantizeV;
    uint32 rest = blockIdx.x / uint32(p.num_kv_heads);
    t.head = int32(blockIdx.x - rest * uint32(p.num_kv_heads));
    t.batch_idx = int32(rest / uint32(p.slots_k));
    t.slot = t.index = int32(rest - uint32(t.batch_idx) * uint32(p.slots_k));
    t.unit = t.batch_idx * p.num_kv_heads + t.head;
    t.begin = 0, t.len = p.seqlen_k;
    t.stride_bytes = 2 * p.v_stride_s;
    t.rows =
        p.v + 2 * (t.batch_idx * p.v_stride_b + t.head * p.v_stride_h) + int64(t.index) * kBlockRows * t.stride_bytes;
    ValuesTile tile = values_tile(p, t, t.index);
    uint4 raw[2][4];
    load_values<IO_TYPE, kHeadDim>(p, tile, raw);
    wait_for_kernel_ahead();
    bool bad = false, sampled = sample_log2(p.seqlen_k) > 0;
    float mean = 0.0f, scale = 1.0f;
    if (tid < kHeadDim) {
        ChannelRange range = channel_range<kHeadDim>(p, t.unit, tid);
        mean = range.mean, scale = range.scale, bad = range.bad;
        s.mean[tid] = mean;
        s.inverse[tid] = div_rn(1.0f, scale);
        s.error[tid] = 0;
    }
    bad = __syncthreads_or(bad);
    uint32 addend = sampled ? overflow_addend(p) : 0, over;
    if (bad || tile.count < kBlockRows) {
        over = convert_values<Values::kAny, IO_TYPE, kHeadDim>(IO_TYPE{}, raw, s, tile.count, true, addend);
    } else {
        over = convert_values<Values::kRegularSmooth, IO_TYPE, kHeadDim>(IO_TYPE{}, raw, s, kBlockRows, true, addend);
    }
    __syncthreads();
    store_values<kHeadDim>(p, tile, s);
    if (sampled && over) reduce_max_global(p.v_bad + t.unit, 1);
    int64 channel = int64(t.unit) * p.head_dim_pad + tid;
    bool mine = tid < p.head_dim_pad;
    if (mine) reduce_add_global(p.v_error + channel, s.error[(tid & 7) * (kHeadDim / 8) + (tid >> 3)]);
    if (!arrive_is_last(p.v_done + t.unit, uint32(p.slots_k), &last)) return;

    if (tid == 0) s.bad = sampled && (bad || load_gpu(p.v_bad + t.unit) != 0);
    int64 error = mine ? load_gpu(p.v_error + channel) : 0;
    __syncthreads();
    if (s.bad != 0) {
        t.rows -= int64(t.index) * kBlockRows * t.stride_bytes;
        t.slot = t.index = 0;
        error = quantize_v_again<IO_TYPE, kHeadDim>(p, t, s, &scale);
    }
    if (!mine) return;
    p.v_scale[channel] = scale;
    p.v_mean[channel] = mean + mul_rn(div_rn(mul_rn(float(error), 1.0f / kErrorUnits), float(t.len)), scale);
}
