// A factor for each 128 rows of V in e4m3. Tensor cores sum over all keys, so the factor goes into P before it is
// rounded, by way of the exponent, and the sums that O is divided by leave it out again:
//
//   P'_ij = exp2(s_ij + log2|f_j| - m_i)       m_i: base of P', so that what is rounded is what counts in O
//   O_i = sum_j e4m3(P'_ij) sign(f_j) v_j / l_i      l_i = sum_j P'_ij / |f_j|
//
// A factor below 2^-90 counts as that much, except that the products with V of one that is 0 are none. One that is not
// finite makes O and LSE of the rows that see its keys not a number.
#pragma once
#include "attention/quantized_operands.cuh"
#include "attention/warp_softmax.cuh"
#include "params/attn_int8.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// What is added to the exponents of all scores of a tile (attention/warp_softmax.cuh, "shift").
struct ValueShift {
    static constexpr bool kPresent = true;
    float log2;
    OA_DEVICE float operator()(int, int) const { return log2; }
};

// Of the keys of a tile.
struct ValueFactor {
    static constexpr bool kPresent = true;
    using Shift = ValueShift;
    static constexpr uint32 kNoSigns = 0x7f7f7f7f;  // of four bytes
    float log2, inverse;  // of the absolute value
    uint32 mask;  // of four bytes of P, which have no sign: with it where the factor is negative, nothing where it is 0

    OA_DEVICE void set(float factor) {
        constexpr float kLeast = 8.077935669e-28f;  // 2^-90
        float size = fabsf(factor);
        log2 = log2_normal(max_nan(size, kLeast));
        inverse = rcp_approx(fmaxf(size, kLeast));  // a number, for rows that see none of the tile
        mask = factor == 0.0f ? 0 : factor < 0.0f ? 0xffffffffu : kNoSigns;
    }
    // What a lane of the warp has.
    OA_DEVICE ValueFactor of_lane(int32 lane) const {
        return {__shfl_sync(0xffffffffu, log2, lane), __shfl_sync(0xffffffffu, inverse, lane),
                __shfl_sync(0xffffffffu, mask, lane)};
    }
    OA_DEVICE Shift shift() const { return {log2}; }
    // Four bytes of P as operand.
    OA_DEVICE uint32 operand(uint32 probs) const { return mask & (probs | ~kNoSigns); }
    // opaque: of opaque().
    OA_DEVICE uint32 copy_of_operand(uint32 probs, uint32 opaque) const { return masked_copy_of(probs, mask, opaque); }
    // kNoSigns, in a register of each lane: an instruction takes one uniform register, which the mask lies in.
    OA_DEVICE static uint32 opaque() { return kNoSigns | __shfl_xor_sync(0xffffffffu, threadIdx.y, 1); }
    // Sums of P from those of P'.
    OA_DEVICE void add(float (&sums)[2], const float (&of_tile)[2]) const {
        sums[0] = fmaf(of_tile[0], inverse, sums[0]);
        sums[1] = fmaf(of_tile[1], inverse, sums[1]);
    }
};
// V has none, or is multiplied by it behind the sums.
struct NoValueFactor {
    static constexpr bool kPresent = false;
    using Shift = NoShift;
    OA_DEVICE void set(float) {}
    OA_DEVICE Shift shift() const { return {}; }
    OA_DEVICE uint32 operand(uint32 probs) const { return probs; }
    OA_DEVICE uint32 copy_of_operand(uint32 probs, uint32 opaque) const { return copy_of(probs, opaque); }
    OA_DEVICE static uint32 opaque() { return opaque_zero(); }
    OA_DEVICE void add(float (&sums)[2], const float (&of_tile)[2]) const {
        sums[0] += of_tile[0];
        sums[1] += of_tile[1];
    }
};

// Those of a kv head of the tile's sequence, from its first on.
OA_DEVICE const float* value_factors(const ValueFactors& x, const FwdTile& t, int32 kv_head) {
    if (x.factors == nullptr) return &kNoScale;  // strides are 0
    return x.factors + t.sequence * x.stride_b + kv_head * x.stride_h;
}
// That of tile n of kKeys keys.
template <int kKeys>
OA_DEVICE float value_factor(const float* factors, const ValueFactors& x, int32 blocks, int32 n) {
    return block_scale(factors, x.stride_block, blocks, uint32(n) / (kBlockRows / kKeys));
}

// What attn_int8_sm80 keeps of them besides TileFacts.
struct FactorFacts : TileFacts {
    const float* v_factors;
};
OA_DEVICE void find_value_factors(TileFacts&, const AttnInt8Sm80Params&, const FwdTile&) {}
OA_DEVICE void find_value_factors(FactorFacts& facts, const AttnFp8FactorsSm89Params& p, const FwdTile& t) {
    facts.v_factors = value_factors(p.factors, t, t.head_idx / (p.fwd.num_q_heads / p.fwd.num_kv_heads));
}
// In place of the arguments, which a worker without factors does not keep: they would cost it instructions.
struct NoFactors {
    OA_DEVICE NoFactors(const AttnInt8Sm80Params&) {}
};
template <int kKeys>
OA_DEVICE NoValueFactor factor_of_tile(const TileFacts&, const NoFactors&, int32) {
    return {};
}
template <int kKeys>
OA_DEVICE ValueFactor factor_of_tile(const FactorFacts& facts, const AttnFp8FactorsSm89Params& p, int32 n) {
    ValueFactor factor;
    factor.set(value_factor<kKeys>(facts.v_factors, p.factors, p.scales.k_blocks, n));
    return factor;
}
