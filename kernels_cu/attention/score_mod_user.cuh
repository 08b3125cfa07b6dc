// The user's score modification. With one, the run-time compiler gets a text of this name that the host has made of the
// user's expressions (src/omniattn/launch/score_mod.py); this one stands for none.
#pragma once
#include "attention/score_mod_types.cuh"

constexpr bool kHasScoreMod = false, kHasScoreMask = false;

OA_DEVICE float user_score(float score, int32, int32, ScorePosition, ScorePosition, const ScoreModArrays&) {
    return score;
}
OA_DEVICE bool user_mask(int32, int32, ScorePosition, ScorePosition, const ScoreModArrays&) { return true; }
