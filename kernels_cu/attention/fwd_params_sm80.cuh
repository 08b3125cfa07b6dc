// Arguments of attn_fwd_sm80: by what is done to scores, how keys are divided among CTAs, and what K and V are.
#pragma once
#include "attention/score_mod.cuh"
#include "params/attn_fwd.cuh"
#include "params/kv_codes.cuh"
#include "params/score_mod.cuh"

template <typename Config>
struct Sm80Params {
    using Mods = typename Select<kHasScoreMod, AttnFwdUserModSm80Params, AttnFwdModsSm80Params>::Type;
    using SplitMods = typename Select<kHasScoreMod, AttnFwdSplitUserModSm80Params, AttnFwdSplitModsSm80Params>::Type;
    using CodesMods = typename Select<kHasScoreMod, AttnFwdUserModCodesSm80Params, AttnFwdModsCodesSm80Params>::Type;
    using Call = typename Select<Config::kScoreMods, Mods, AttnFwdParams>::Type;
    using Split = typename Select<Config::kScoreMods, SplitMods, AttnFwdSplitSm80Params>::Type;
    using Codes = typename Select<Config::kScoreMods, CodesMods, AttnFwdCodesSm80Params>::Type;
    using Whole = typename Select<Config::kCodes, Codes, Call>::Type;
    using Type = typename Select<Config::kSplitKeys, Split, Whole>::Type;
};
// Those of a call without split keys and codes.
template <typename Config, typename P>
OA_DEVICE const auto& call_without(const P& params) {
    if constexpr (Config::kSplitKeys || Config::kCodes)
        return params.call;
    else
        return params;
}
