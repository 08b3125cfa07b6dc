// Shared memory of attn_int8_sm90, and its products. The map: entry/attn_int8_sm90.cu.
#pragma once
#include "attention/mask_copies.cuh"
#include "attention/p_e4m3.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "scheduler/persistent_roles.cuh"
#include "tile/int8_queries.cuh"
#include "tile/raw_queries.cuh"
#include "tile/raw_queries_fp8.cuh"

struct NoMasks {};
// q . k_mean of the rows of a tile, where the kernel that attends makes them.
struct NoRawBias {
    static constexpr bool kMade = false;
};
template <typename Config, bool kPresent = Config::kRawQ && Config::kLse && !Config::kBlockScales>
struct RawBias : NoRawBias {};
template <typename Config>
struct RawBias<Config, true> {
    static constexpr bool kMade = true;
    float of_row[Config::kBlockM];
};
template <typename Config, bool kPresent = Config::kScoreMods && !Config::kVarlen && !Config::kBlocks>
struct MaskStorage : NoMasks {};
template <typename Config>
struct MaskStorage<Config, true> : MaskTiles<Config>::Storage {};

template <typename Config>
struct Int8Storage : MaskStorage<Config> {
    alignas(1024) uint8 q[Config::kOuterStages][Config::kBlockM * Config::kHeadDim * Config::kQueryBytes];
    alignas(1024) uint8 k[Config::kInnerStages][Config::kBlockN * Config::kHeadDim];
    alignas(1024) uint8 v[Config::kInnerStages][Config::kBlockN * Config::kHeadDim];
    alignas(Config::kOnesBytes) uint8 ones[Config::kOnesBytes];  // 8 rows of e4m3
    alignas(16) float delta[Config::kDelta ? Config::kInnerStages : 1][Config::kDeltaRows][Config::kBlockN];
    float4 o[Config::kConsumers][Config::kOutputs / 4][128];  // each thread's own, in its order
    alignas(16) float k_scale[Config::kInnerStages][4];
    float channels[Config::kConsumers][2][Config::kOwnChannels];  // v_scale and v_mean
    RawBias<Config> raw_bias;
    // With score modifications every byte counts (head_dim 256): dense batches use the barriers only.
    typename Select<Config::kScoreMods && !Config::kVarlen, RoleBarrierStorage<Config>, RoleStorage<Config>>::Type
        roles;

    OA_DEVICE RoleStorage<Config>& role_storage() { return static_cast<RoleStorage<Config>&>(roles); }
};

template <typename Config>
struct Int8Tile {
    static constexpr uint32 kQBytes = Config::kBlockM * Config::kHeadDim * Config::kQueryBytes;
    static constexpr uint32 kKBytes = Config::kBlockN * Config::kHeadDim;
    static constexpr uint32 kDeltaBytes = Config::kBlockN * 4;
    using IntQueries = typename Select<Config::kRegisterQ, RegisterQueries<Config>, SharedQueries<Config>>::Type;
    using RawOnes = typename Select<Config::kBlockScales, RawFp8Queries<Config>, RawQueries<Config>>::Type;
    using Queries = typename Select<Config::kRawQ && !Config::kRingQ, RawOnes, IntQueries>::Type;
    using Scores = typename Config::Score[Config::kNTiles * 4];
    using Output = float[Config::kOutputs];
    using RowSums = float[4];
    // P as operand. Keys are permuted inside each 16, as those of V are: a register holds columns x of blocks n and n +
    // 1.
    using Probabilities = uint32[Config::kBlockN / 32][4];

    // S = Q K^T, asynchronous.
    OA_DEVICE static void issue_qk(Scores& s, const Queries& q, WgmmaDescriptor k) {
        wgmma_pin(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 32; ++step) {
            uint32 panel = step * 32 / Config::kRowBytes, column = step * 32 % Config::kRowBytes;
            q.multiply(s, step, k.at(panel * Config::kBlockN * Config::kRowBytes + column));
        }
        wgmma_commit();
        wgmma_pin(s);
    }

    // A += P V, and (not with factors of V) sums = P 1: elements 0 and 2 are the tile's sums of this lane's two rows.
    // Asynchronous.
    OA_DEVICE static void issue_pv(Output& acc, RowSums& sums, const Probabilities& probs, WgmmaDescriptor v) {
        const WgmmaDescriptor ones =
            wgmma_descriptor<Config::kOnesBytes / 8>(smem_addr_at(&Int8Storage<Config>::ones), 16, Config::kOnesBytes);
        wgmma_pin(acc);
        if (!Config::kFactors) wgmma_pin(sums);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kBlockN / 32; ++step)
            Wgmma<E4m3, Config::kHeadDim>::rs(acc, probs[step], v.at(step * 32), 1);
        // After the product with V, which takes longer: the other way round costs 2 %.
#pragma unroll
        for (int step = 0; step < Config::kBlockN / 32 && !Config::kFactors; ++step)
            Wgmma<E4m3, 8>::rs(sums, probs[step], ones.at(0), step != 0);
        wgmma_commit();
        wgmma_pin(acc);
        if (!Config::kFactors) wgmma_pin(sums);
    }
};
