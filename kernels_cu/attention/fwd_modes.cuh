// Arguments of the forward kernels by mode, how keys are divided among CTAs, and by what is done to scores: nothing,
// score modifications, or those and the user's expressions.
#pragma once
#include "attention/dropout_mode.cuh"
#include "params/attn_fwd.cuh"
#include "params/dropout.cuh"
#include "params/score_mod.cuh"

struct Nothing {};

// Of attn_fwd_sm90.
struct WholeKeys {
    using Plain = AttnFwdSm90Params;
    using ScoreMods = AttnFwdModsSm90Params;
    using UserMod = AttnFwdUserModSm90Params;
};
struct SplitKeys {
    using Plain = AttnFwdSplitSm90Params;
    using ScoreMods = AttnFwdSplitModsSm90Params;
    using UserMod = AttnFwdSplitUserModSm90Params;
};
struct StreamK {
    using Plain = AttnFwdStreamKSm90Params;
    using ScoreMods = AttnFwdStreamKModsSm90Params;
    using UserMod = AttnFwdStreamKModsSm90Params;  // which no row has
};

// Those of attn_fwd_sm90.
template <typename Config, bool kUserMod>
struct FwdSm90Params {
    using Mode = typename Select<Config::kSplitKeys, typename Select<Config::kVarlen, StreamK, SplitKeys>::Type,
                                 WholeKeys>::Type;
    using Mods = typename Select<kUserMod, typename Mode::UserMod, typename Mode::ScoreMods>::Type;
    using Scores = typename Select<Config::kScoreMods, Mods, typename Mode::Plain>::Type;
    using Type = typename Select<kHasDropout, AttnFwdDropoutSm90Params, Scores>::Type;
    static_assert(!kHasDropout || !(Config::kScoreMods || Config::kSplitKeys || Config::kPaged), "plain calls drop");
};

// Of attn_fwd_sm80: its arguments without partial results, those that all calls have, and the user's arrays.
OA_DEVICE const AttnFwdParams& call_of(const AttnFwdParams& params) { return params; }
OA_DEVICE const AttnFwdModsSm80Params& call_of(const AttnFwdModsSm80Params& params) { return params; }
OA_DEVICE const AttnFwdModsSm80Params& call_of(const AttnFwdUserModSm80Params& params) { return params.call; }
OA_DEVICE const AttnFwdParams& call_of(const AttnFwdDropoutSm80Params& params) { return params.call; }
OA_DEVICE const AttnFwdModsSm80Params& call_of(const AttnFwdModsDropoutSm80Params& params) { return params.call; }
OA_DEVICE const AttnFwdParams& forward_of(const AttnFwdParams& call) { return call; }
OA_DEVICE const AttnFwdParams& forward_of(const AttnFwdModsSm80Params& call) { return call.fwd; }
template <typename P>
OA_DEVICE const ScoreModArrays* arrays_of(const P&) {
    return nullptr;
}
OA_DEVICE const ScoreModArrays* arrays_of(const AttnFwdUserModSm80Params& params) { return &params.arrays; }
