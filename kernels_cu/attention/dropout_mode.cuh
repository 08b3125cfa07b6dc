// Whether a kernel has dropout. With it, the compiler gets a text of this name that says so
// (src/omniattn/launch/dropout.py).
#pragma once

enum : bool { kHasDropout = false };  // no variable, which every binary would have
