"""Kernels with a user's score modification: the text that they are compiled with, and what they are told."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from ..problems.score_mod import ScoreModProblem
from ..registry import KernelSpec
from .host_struct import At
from .structs import MAX_MOD_ARRAYS, MAX_MOD_DIMS

#: The header whose place the text takes.
HEADER = "attention/score_mod_user.cuh"
#: What an array's name is as an operand of a call.
PREFIX = "score_mod."
#: What the compiler calls the user's lines.
FILES = {"expression": "score_mod expression", "mask": "score_mod mask", "grad": "score_mod grad"}

_ELEMENTS = {
    "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int32": "int32", "int64": "int64",
    "int8": "signed char", "uint8": "uint8", "bool": "bool",
}  # fmt: skip
#: Between the name of a row and the digest of the text.
_MARK = "_mod_"
#: Element types of arrays.
DTYPES = tuple(_ELEMENTS)


def _function(signature: str, arrays: str, result: str, label: str, text: str) -> str:
    # The user's text has lines of its own: the compiler's messages name them. What follows stays under their name,
    # because that is where the compiler places errors in what the text makes of templates.
    return f'OA_DEVICE {signature} {{\n{arrays}    return static_cast<{result}>(\n#line 1 "{label}"\n{text}\n);\n}}\n'


def user_text(mod: ScoreModProblem, *, backward: bool = False) -> str:
    """The text of `HEADER` for a score modification; ``backward``: with its derivative."""
    checked = "true" if mod.checked else "false"
    arrays = "".join(
        f'    const ScoreArray<{_ELEMENTS[a.dtype]}, {len(a.shape)}, {checked}> {a.name}(oa_arrays, {i}, "{a.name}");\n'
        for i, a in enumerate(mod.arrays)
    )
    places = "const int b, const int h, const ScorePosition q, const ScorePosition k, const ScoreModArrays& oa_arrays"
    return (
        '#pragma once\n#include "attention/score_mod_types.cuh"\n'
        f"constexpr bool kHasScoreMod = true, kHasScoreMask = {'false' if mod.mask is None else 'true'};\n"
        + _function(f"float user_score(const float score, {places})", arrays, "float", FILES["expression"],
                    mod.expression)
        + _function(f"bool user_mask({places})", arrays, "bool", FILES["mask"], mod.mask or "true")
        + ("" if not backward else _function(f"float user_grad(const float score, {places})", arrays, "float",
                                             FILES["grad"], mod.grad or "1.0f"))
    )  # fmt: skip


def with_score_mod(spec: KernelSpec, mod: ScoreModProblem | None, *, backward: bool = False) -> KernelSpec:
    """A registry row with a score modification compiled in: a kernel that no wheel carries."""
    if mod is None:
        return spec
    text = user_text(mod, backward=backward)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return replace(spec, name=f"{spec.name}{_MARK}{digest}", prebuild=(), generated=((HEADER, text),))


def row_of(spec: KernelSpec) -> str:
    """Name of the registry row that a kernel was made of, with a score modification or without."""
    return spec.name.rpartition(_MARK)[0] if spec.generated else spec.name


def array_values(mod: ScoreModProblem) -> dict[str, object]:
    """The fields of ScoreModArrays."""
    data: list[At | None] = [At(PREFIX + a.name) for a in mod.arrays]
    data += [None] * (MAX_MOD_ARRAYS - len(data))
    strides, extents = ([0] * (MAX_MOD_ARRAYS * MAX_MOD_DIMS) for _ in range(2))
    for i, a in enumerate(mod.arrays):
        first = i * MAX_MOD_DIMS
        strides[first : first + len(a.strides)] = a.strides
        extents[first : first + len(a.shape)] = (min(n, 2**31 - 1) for n in a.shape)
    return {"data": data, "strides": tuple(strides), "extents": tuple(extents)}
