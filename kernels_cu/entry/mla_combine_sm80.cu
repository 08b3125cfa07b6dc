// Merge of the partial results that mla_decode_sm90 and mla_decode_sm80 leave, as decode_combine_sm80 does, whose
// comment has the equation and the design. A slot has the rows of all blocks of a sequence's queries.
#include "decode/combine.cuh"
#include "decode/latent.cuh"
#include "params/mla_decode.cuh"

using Config = CombineConfig<IO_TYPE, HEAD_DIM, kAllRows>;

extern "C" __global__ void __launch_bounds__(Config::kThreads) mla_combine_sm80(
    const __grid_constant__ MlaDecodeParams params) {
    __shared__ CombineStorage<Config> smem;
    combine(params.decode, params.slot_rows, smem,
            [&](int32 sequence, int32 head, int32 first, int32 token, float maximum, float lse) {
                note_row(params, sequence, head, first, token, maximum, lse);
            });
}
