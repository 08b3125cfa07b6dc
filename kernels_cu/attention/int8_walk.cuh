// What the steps of a tile of queries share in the consumers of attn_int8_sm90, with score modifications and without,
// and what is done to these registers alone. Waits, barriers and scales are the consumers' (attention/int8_roles.cuh).
#pragma once
#include "attention/int8_roles.cuh"
#include "attention/p_e4m3.cuh"
#include "attention/value_factors.cuh"
#include "attention/warp_softmax.cuh"

// References: the registers are variables of the function that walks, because the compiler makes other code of a struct
// that holds them.
template <typename Config, typename Consumer>
struct Int8Walk {
    using Tile = Int8Tile<Config>;
    using Rows = typename Consumer::Rows;
    using Packer = E4m3Packer<Config::kBlockN / 32, Config::kLse, Config::kFactors>;
    using Factor = typename Select<Config::kFactors, ValueFactor, NoValueFactor>::Type;  // of V

    const TileOf<Config>& t;
    const typename Consumer::Span& keys;
    const int32& warp_row;
    Rows& state;
    const bool (&own)[2];  // whether this lane's two rows are the sequence's
    typename Tile::Queries& q;
    typename Tile::Scores& s;
    typename Tile::Probabilities& probs;  // P(i - 1), operand of the product that runs: not to be written
    typename Tile::Probabilities& fresh;  // P(i), which is computed meanwhile; may be the same where it waits instead
    const uint32& opaque;  // Factor::opaque()
    typename Tile::RowSums& sums;  // of P(i - 1) as rounded, made by the product
    float (&alpha)[2];
    float (&sum)[2];  // kLse: of P(i) before rounding
    Factor& factor;  // of the step's keys
    int32& i;  // the step
    bool& is_full;  // whether the next stage was seen to be

    // The end of A += P(i - 1) V(i - 1): its operands may be written, and its sums are there.
    OA_DEVICE void finish_pv() const {
        wgmma_wait<0>();
        wgmma_pin(state.acc);
        if (!Config::kFactors) wgmma_pin(sums);
#pragma unroll
        for (int k = 0; k < Config::kBlockN / 32; ++k) wgmma_pin(probs[k]);
        if (Config::kFactors) return;
        state.softmax.l[0] += sums[0];
        state.softmax.l[1] += sums[2];
    }
    // P(i) becomes the operand.
    OA_DEVICE void renew_probs() const {
#pragma unroll
        for (int k = 0; k < Config::kBlockN / 32; ++k)
#pragma unroll
            for (int x = 0; x < 4; ++x) probs[k][x] = factor.copy_of_operand(fresh[k][x], opaque);
    }
    // Where P(i) goes.
    OA_DEVICE Packer packer() const { return Packer{{fresh, {}}, sum}; }
    // Not 0 if a P of this lane's rows exceeds what e4m3 has. In packed tensors a tile's last rows may be the next
    // sequence's; they must not take part in the vote, or a result would depend on its neighbour.
    OA_DEVICE uint32 signs_past_largest() const { return signs_past_largest(fresh); }
    OA_DEVICE uint32 signs_past_largest(const typename Tile::Probabilities& p) const {
        uint32 signs[2];
        past_largest(p, signs);
        return ((own[0] ? signs[0] : 0) | (own[1] ? signs[1] : 0)) & kSigns;
    }
    // The base was raised: what was summed so far is that much smaller.
    OA_DEVICE void rescale_sums() const {
        rescale(state.acc, alpha);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            state.shrink[r] *= alpha[r];
            state.lse_sum[r] *= alpha[r];
        }
    }
    // The sums of P(i) before rounding, once it stays as it is.
    OA_DEVICE void add_sums() const {
        if (!Config::kLse) return;
        factor.add(state.lse_sum, sum);
    }
};
