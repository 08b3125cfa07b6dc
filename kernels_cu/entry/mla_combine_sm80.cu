// Merge of the partial results that mla_decode_sm90 and mla_decode_sm80 leave, by the equation of decode_combine_sm80.
// A slot has the rows of all blocks of a sequence's queries, the channels in the order of `pair_of_blocks`.
//
// As many CTAs as the GPU has at a time, or fewer. Each works out the plan, lists the sequences that more than one CTA
// had, or that have no keys, and takes rows of theirs.
#include "decode/latent_combine.cuh"
#include "params/mla_decode.cuh"
#include "ptx/types.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr int kHeadDim = HEAD_DIM;
    static constexpr int kWarps = 8, kThreads = kWarps * 32;
    static_assert(kHeadDim == 512, "a lane has 16 channels of a row, or 4 of a quarter");
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 4) mla_combine_sm80(
    const __grid_constant__ MlaDecodeParams params) {
    __shared__ LatentCombineStorage<Config> smem;
    LatentCombine<Config>(params, smem).run();
}
