// Exact attention forward of head dims up to 512 on Hopper's wgmma, sm_90a only. A warpgroup of each of two CTAs has
// half of O's channels, as the two of FlashMLA's CTA have (DeepSeek 2025).
//
//   S = softmax_scale * Q K^T;  P = softmax([S, sink]);  O = P V;  LSE = log(sum(exp(S)) + exp(sink))
//
// with S = softcap * tanh(S / softcap) before the softmax (SOFTCAP). q, k, v, o, lse as of attn_fwd_sm90 (VARLEN:
// packed), with head dims up to HEAD_DIM (q, k) and HEAD_DIM_V (v, o), below which TMA fills with zeros. MASKS:
// softcap, masks, a user's expressions and any scale (attention/halved_o_mods.cuh); BIAS_BYTES: tiles of an additive
// mask, of elements of so many bytes.
//
// A persistent kernel: a cluster of two CTAs, each with an SM of its own, walks over tiles of 128 query rows of one
// head. A step is 128 keys, from the last visible ones to the first. CTA r has all 128 rows of Q; of each step's K the
// 64 keys from 64 r on, of its V all keys and the channels of half r. Warpgroup g of either CTA has rows 64 g on:
//
//   CTA 0                                                 CTA 1
//   warpgroup 0: copies Q, K, V                           the same
//   warpgroup 1 + g:                                      warpgroup 1 + g:
//     S0(i) = Q K(i)[0:64]^T                                S1(i) = Q K(i)[64:128]^T
//     O[:, left] += P0(i-1) V(i-1)[0:64, left]              O[:, right] += P1(i-1) V(i-1)[64:128, right]
//     P0(i) = softmax(S0(i)), under that product            P1(i) = softmax(S1(i))
//     wait p_full: P1(i-1)                                  wait p_full: P0(i-1)
//     O[:, left] += P1(i-1) V(i-1)[64:128, left]            O[:, right] += P0(i-1) V(i-1)[0:64, right]
//     P1(i-1) has been loaded ----- arrive -------------> p_empty
//     p_empty <------------------------------------------ arrive: P0(i-1) has been loaded
//     wait p_empty; P0(i) --------- st.async -----------> p_full
//     p_full <------------------------------------------- wait p_empty; P1(i)
//
//   producer                                        consumers, in the order of use
//   wait empty  <---------------------------------- arrive empty: the products of a unit are done
//   TMA of a unit of K or V -> full --------------> wait full
//   TMA Q -> q_full[unit of channels] ------------> first step;  q_empty[unit] after the last S
//
// Shared memory, bytes: Q [HEAD_DIM / 64][128 * 128] | units of K and V [NUM_STAGES][16384] | P from the other CTA
// [2][8192], base and sum of its rows [2][512] | barriers, tiles. Panels of 64 channels, 128-byte swizzle. A unit: 64
// keys and two panels of K, or 32 keys and the CTA's panels of V, or 128 bytes of each row of an additive mask's tile.
//
// With masks a step is two tiles of 64 keys of a list, one each CTA; the producer tells both CTAs' consumers which.
#include "attention/halved_o_consumer.cuh"
#include "attention/halved_o_producer.cuh"
#include "attention/score_mod_user.cuh"
#include "params/attn_fwd.cuh"
#include "params/score_mod.cuh"
#include "ptx/gpu_sync.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

struct Config {
    using Io = IO_TYPE;
    static constexpr bool kScoreMods = MASKS;  // masks, biases, a user's expressions; softcap and any scale too
    static constexpr bool kSoftcap = SOFTCAP;  // softcap and any scale
    static constexpr int kBiasBytes = BIAS_BYTES;  // of an element of an additive mask's tiles; 0: none
    using Params = Select<kScoreMods, Select<kHasScoreMod, AttnFwdUserModSm90Params, AttnFwdModsSm90Params>::Type,
                          AttnFwdSm90Params>::Type;
    static constexpr int kPanels = HEAD_DIM / 64, kPanelsV = HEAD_DIM_V / 128;
    static constexpr int kHeadDimV = HEAD_DIM_V / 2;  // of a CTA
    static constexpr bool kVarlen = VARLEN;
    static constexpr int kStages = NUM_STAGES;
    static constexpr int kThreads = 384;
    // Of a thread: what the launch gives, 168, redistributed.
    static constexpr int kConsumerRegisters = HEAD_DIM_V > 384 ? 232 : 224;
    static constexpr int kProducerRegisters = 3 * 168 - 2 * kConsumerRegisters;
    static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM_V % 128 == 0 && HEAD_DIM_V <= 512, "whole panels in either half");
    static_assert(kStages >= 5, "the last unit of K and all of V of a step");
};
using SharedStorage = HalvedOStorage<Config>;
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "the registry's smem_bytes must be this struct's size");

extern "C" __global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(Config::kThreads, 1)
attn_fwd_d512_sm90(const __grid_constant__ Config::Params params) {
    extern __shared__ __align__(1024) uint8 smem_raw[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_raw);
    HalvedOBarriers<Config> bars;
    if (threadIdx.x == 0) {
        check_smem_base(smem_raw, bars.base);
        bars.init();
    }
    cluster_sync();
    const int32 warpgroup = __shfl_sync(0xffffffffu, int32(threadIdx.x) >> 7, 0);
    if (warpgroup == 0) {
        registers_release<Config::kProducerRegisters>();
        if (threadIdx.x < 32) HalvedOProducer<Config>(params, smem, bars).run(int32(threadIdx.x));
    } else {
        registers_claim<Config::kConsumerRegisters>();
        HalvedOConsumer<Config>(params, bars, warpgroup - 1).run();
    }
    __syncwarp();
    // No CTA leaves while the other one still sends to it, or arrives at its barriers.
    cluster_sync();
}
