"""Kernels with dropout: the text that they are compiled with, and what they are told."""

from __future__ import annotations

from dataclasses import replace

from ..problems.dropout import LEVELS, DropoutProblem
from ..registry import KernelSpec
from .host_struct import At

#: The header whose place the text takes.
_HEADER = "attention/dropout_mode.cuh"
_TEXT = "#pragma once\n\nenum : bool { kHasDropout = true };\n"
#: What seed and offset are as an operand of a call.
RNG = "dropout_rng"
#: Bytes of a word.
_EACH_BYTE = 0x01010101


def with_dropout(spec: KernelSpec, dropout: DropoutProblem | None) -> KernelSpec:
    """A registry row with dropout compiled in: a kernel that no wheel carries."""
    if dropout is None:
        return spec
    return replace(spec, name=f"{spec.name}_dropout", prebuild=(), generated=((_HEADER, _TEXT),))


def dropout_values(dropout: DropoutProblem) -> dict[str, object]:
    """The fields of DropoutParams."""
    below = dropout.threshold <= LEVELS // 2
    return {
        "rng": At(RNG),
        "threshold": dropout.threshold,
        "addend": ((LEVELS // 2 if below else LEVELS) - dropout.threshold) * _EACH_BYTE,
        "either": 0xFFFFFFFF if below else 0,
        "scale": dropout.scale,
    }
