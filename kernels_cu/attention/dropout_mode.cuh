// Whether a kernel has dropout. With it, the compiler gets a text of this name that says so
// (src/omniattn/launch/dropout.py).
#pragma once

constexpr bool kHasDropout = false;
