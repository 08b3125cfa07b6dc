"""Attention of e4m3 arrays whose v has a factor for each 128 rows, against the emulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import omniattn
from omniattn.reference import e4m3_arrays
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.registry import KernelSpec
from omniattn.testing.cases import LSE_ATOL
from omniattn.testing.expected import LowPrecision, Values, outputs_of
from omniattn.testing.frameworks import Framework
from omniattn.testing.inputs import make_qkv

_HEADS, _HEADS_KV, _BLOCK = 4, 2, 128
#: Queries and keys of each packed sequence: one without queries, one without keys.
_RAGGED = ((140, 130), (0, 300), (57, 0), (200, 391))


@dataclass(frozen=True)
class FactorCase:
    """One call: `RowCase`.

    Attributes
    ----------
    name : str
    lengths : tuple of (int, int)
        Queries and keys of each sequence.
    dtype, head_dim
        Of the kernel.
    below : int
        How far head_dim lies below the kernel's own.
    wide : bool
        Factors over six decades, of both signs, one of them 0; else within a factor of four.
    options : tuple of (str, object)
    mask : str
        dtype of a mask, and of sinks in fp32 with it; empty: neither.
    packed : bool
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    dtype: str
    head_dim: int
    below: int = 0
    wide: bool = False
    options: tuple[tuple[str, object], ...] = ()
    mask: str = ""
    packed: bool = False

    def prepare(self) -> tuple[dict[str, Values], dict[str, tuple[Values, str]], LowPrecision]:
        """q, k and v, other arrays with their dtypes, and what must come out."""
        rng = np.random.default_rng(len(self.name))
        batch, longest = len(self.lengths), [max(pair[side] for pair in self.lengths) for side in (0, 1)]
        total = [sum(pair[side] for pair in self.lengths) for side in (0, 1)] if self.packed else longest
        made = make_qkv(
            batch=None if self.packed else batch, seqlen_q=total[0], seqlen_k=total[1], heads_q=_HEADS,
            heads_kv=_HEADS_KV, head_dim=self.head_dim - self.below, seed=3,
        )  # fmt: skip
        codes: dict[str, Any] = {name: encode_e4m3(x.astype(np.float32)) for name, x in zip("qkv", made, strict=True)}
        blocks = [-(-n // _BLOCK) for n in longest]
        given: dict[str, tuple[Values, str]] = {}
        for name, heads, count in (("q", _HEADS, blocks[0]), ("k", _HEADS_KV, blocks[1]), ("v", _HEADS_KV, blocks[1])):
            factors: Values = rng.uniform(0.5, 2.0, (batch, heads, count)).astype(np.float32)
            if name == "v" and self.wide:
                factors = (10.0 ** rng.uniform(-4, 2, factors.shape)).astype(np.float32)
                factors *= rng.choice(np.array([-1, 1], np.float32), factors.shape)
                factors[0, 0, 0] = 0.0
            given[f"descale_{name}"] = (factors, "float32")
        options: dict[str, Any] = dict(self.options)
        if self.mask:
            shown, biases = rng.random((batch, 1, *longest)) < 0.7, rng.standard_normal((1, *longest))
            # Numbers that every element type has.
            additive = np.where(shown[:, 0], np.round(4 * biases) / 4, -np.inf)[:, None].astype(np.float32)
            given["mask"] = (shown if self.mask == "bool" else additive, self.mask)
            given["sinks"] = (rng.standard_normal(_HEADS).astype(np.float32), "float32")
        if self.packed:
            for side, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
                given[name] = (np.cumsum([0, *(pair[side] for pair in self.lengths)]).astype(np.int32), "int32")
            options |= self._longest
        options |= {name: values for name, (values, _) in given.items()}
        low = e4m3_arrays.attention(**codes, **options)
        # Numbers that e4m3 has: every library rounds them alike.
        return {name: decode_e4m3(x) for name, x in codes.items()}, given, LowPrecision(*low)

    @property
    def _longest(self) -> dict[str, int]:
        if not self.packed:
            return {}
        return {f"max_seqlen_{'qk'[side]}": max(pair[side] for pair in self.lengths) for side in (0, 1)}

    def check(self, framework: Framework, prepared: Any) -> tuple[float, str]:
        """Call the public function and compare."""
        values, given, expected = prepared
        function: Any = omniattn.attention_varlen if self.packed else omniattn.attention
        more: dict[str, Any] = {name: framework.array(x, dtype) for name, (x, dtype) in given.items()}
        more |= dict(self.options) | self._longest | {"out_dtype": self.dtype, "return_lse": True}
        result = function(*(framework.array(values[name], "float8_e4m3fn") for name in "qkv"), **more)
        framework.synchronize()
        got = {name: framework.to_numpy(array) for name, array in outputs_of(result).items()}
        grades = expected.grade(got, self.dtype, LSE_ATOL)
        return max(grade.ratio for grade in grades), "; ".join(str(grade) for grade in grades if not grade.ok)


def factor_cases(spec: KernelSpec) -> tuple[FactorCase, ...]:
    """The cases of a row."""
    of = spec.dtype, spec.head_dim
    return (
        FactorCase("full", ((200, 333),) * 2, *of),
        FactorCase("causal, six decades", ((300, 390),), *of, below=16, wide=True, options=(("causal", True),)),
        FactorCase("softcap, mask and sinks", ((130, 264),), *of, wide=True, options=(("softcap", 20.0),), mask="bool"),
        FactorCase("mask and a negative scale", ((200, 270),), *of, options=(("softmax_scale", -0.1),), mask="bool"),
        FactorCase("bias and sinks", ((130, 264),), *of, wide=True, mask="float32"),
        FactorCase("softcap, half bias, causal", ((140, 264),), *of,
                   options=(("softcap", 5.0), ("causal", True)), mask=spec.dtype),
        FactorCase("packed, causal", _RAGGED, *of, options=(("causal", True),), packed=True),
        FactorCase("packed, six decades", _RAGGED, *of, below=16, wide=True, packed=True),
        FactorCase("packed, softcap", _RAGGED, *of, wide=True, options=(("softcap", 4.0),), packed=True),
    )  # fmt: skip
