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
#include "quantize/value_blocks.cuh"

constexpr int kHeadDim = HEAD_DIM, kThreads = 2 * kHeadDim;
static_assert(kCommon && V_TYPE::kBytes == 1, "smoothed V, to e4m3");

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) quantize_values_sm80(const
                                                                                  __grid_constant__ QuantizeParams p) {
    __shared__ ValuesStorage<kHeadDim> s;
    __shared__ uint32 last;
    QuantizeItem t = slot_of_keys(p, blockIdx.x, kQuantizeV);
    quantize_values_block<IO_TYPE, kHeadDim>(p, t, s, &last);
}
