// K and V for int8 attention on Hopper, by the defaults: K to integers, V to e4m3, both without their means.
// Source: SageAttention2 (Zhang et al. 2024), sections 3.1 to 3.3.
//
//   k_int = nearest_even((k - k_mean) / k_scale), one scale for each lane of a tile of 128 keys
//   v_out = e4m3((v - mean) / v_scale), v_mean = mean and the mean of the rounding errors (quantize/values.cuh)
//
// k, v: [batch, seqlen_k, num_kv_heads, head_dim], with PACKED [seqlen_k, num_kv_heads, head_dim] and sequences that
// cu_seqlens_k divides; fp16 or bf16, any strides with 16-byte rows. Outputs and the order
// of every sum: docs/quantization.md; the bits are those of quantize_sm80, without its tickets and flags.
//
// Two launches of one source, the second one while the first one ends, attention behind them while the second one does:
//
//   SUMS 1, CTAs of 4 * HEAD_DIM threads: a chunk of the samples of a head of K or V -> partial sums, ranges; PACKED,
//       the first one: starts_k and, for attention, which quantizes Q itself, starts_q
//   SUMS 0, CTAs of 2 * HEAD_DIM threads, those of K and V in turn: 128 keys of a head
//       load -> [kernel ahead has ended] -> its chunks: mean, scale -> codes
//       V: the last CTA of a head: v_mean, v_scale; the head again where a sample's scale was too small
//
// Shared memory (static): SUMS ? ValueSumsStorage : KeysStorage or ValuesStorage | flag.
#include "quantize/key_blocks.cuh"
#include "quantize/value_blocks.cuh"

constexpr int kHeadDim = HEAD_DIM, kThreads = (SUMS ? 4 : 2) * kHeadDim;
static_assert(kCommon && GROUPING == 90 && V_TYPE::kBytes == 1, "smoothed K and V, to int8 and e4m3");

union BlockStorage {
    KeysStorage<kHeadDim> keys;
    ValuesStorage<kHeadDim> values;
};

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) quantize_kv_sm90(const
                                                                              __grid_constant__ QuantizeParams p) {
    const bool of_values = blockIdx.x & 1;
    launch_dependents();
#if SUMS
    __shared__ ValueSumsStorage<kHeadDim> s;
    if (PACKED && blockIdx.x == 0) {
        if (threadIdx.x < 32) copy_starts(p.cu_seqlens_k, p.starts_k, p.batch, p.seqlen_k);
        if (threadIdx.x / 32 == 1) copy_starts(p.cu_seqlens_q, p.starts_q, p.batch, p.seqlen_q);
    }
    if (of_values) {
        sum_samples<true, IO_TYPE, kHeadDim>(p, int32(blockIdx.x >> 1), s);
    } else {
        sum_samples<false, IO_TYPE, kHeadDim>(p, int32(blockIdx.x >> 1), s);
    }
#else
    __shared__ BlockStorage s;
    __shared__ uint32 last;
    QuantizeItem t = slot_of_keys(p, blockIdx.x >> 1, of_values ? kQuantizeV : kQuantizeK);
    if (PACKED && t.batch_idx < 0) {
        wait_for_kernel_ahead();  // as all do: whoever waits for this kernel waits for both
        return;
    }
    if (of_values) {
        quantize_values_block<IO_TYPE, kHeadDim>(p, t, s.values, &last);
    } else {
        quantize_keys_block<IO_TYPE, kHeadDim>(p, t, s.keys);
    }
#endif
}
