// Arguments of attn_fwd_sm90 by mode, how keys are divided among CTAs, and by what is done to scores: nothing, score
// modifications, or those and the user's expressions.
#pragma once
#include "params/attn_fwd.cuh"
#include "params/score_mod.cuh"

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
