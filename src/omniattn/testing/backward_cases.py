"""Calls of ``attention_backward``: small, with what its kernels get wrong, for each row that has a part in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import omniattn
from omniattn import reference
from omniattn.registry import KernelSpec
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework
from omniattn.testing.inputs import make_qkv
from omniattn.testing.rounding import round_to

BACKWARD_OPS = tuple("attention_backward" + part for part in ("", "_dq", "_prepare", "_finish"))
#: Largest relative L2 error of a gradient: P, dS, o and the gradient itself are rounded, each by half a unit.
LIMITS = {"float16": 0.003, "bfloat16": 0.02}


@dataclass(frozen=True)
class _Facts:
    name: str
    lengths: tuple[tuple[int, int], ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False
    mask: bool = False


_CALLS: tuple[_Facts, ...] = (
    _Facts("full", ((257, 257),) * 2),
    _Facts("causal, seqlen_q < seqlen_k", ((77, 300),), {"causal": True}),
    _Facts("causal, rows without keys", ((190, 60),), {"causal": True}),
    _Facts("window", ((200, 200),), {"window": (64, 17)}),
    _Facts("softcap", ((130, 140),), {"softcap": 5.0}),
    _Facts("additive mask and its gradient", ((65, 129),), mask=True),
    _Facts("packed, causal, empty sequences", ((5, 70), (0, 3), (130, 130), (9, 0)), {"causal": True}, packed=True),
)


@dataclass(frozen=True)
class BackwardCase:
    """A call for one row: `RowCase`.

    Attributes
    ----------
    index : int
        In the calls of this module.
    dtype, head_dim
        Of the row.
    wanted : tuple of str
    deterministic : bool
    """

    index: int
    dtype: str
    head_dim: int
    wanted: tuple[str, ...] = ("dq", "dk", "dv")
    deterministic: bool = False

    @property
    def facts(self) -> _Facts:
        """Of the call."""
        return _CALLS[self.index]

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.facts.name + (", deterministic" if self.deterministic else "")

    def prepare(self) -> tuple[dict[str, Values], dict[str, Values]]:
        """Arrays of the call, and its gradients in double precision."""
        facts, dim = self.facts, self.head_dim - 8 * (self.index % 2)
        queries, keys = (sum(n[side] for n in facts.lengths) for side in (0, 1)) if facts.packed else facts.lengths[0]
        batch = None if facts.packed else len(facts.lengths)
        q, k, v = make_qkv(
            batch=batch, seqlen_q=queries, seqlen_k=keys, heads_q=4, heads_kv=2, head_dim=dim, dtype=self.dtype,
            seed=self.index,
        )  # fmt: skip
        do = make_qkv(batch=batch, seqlen_q=queries, heads_q=4, head_dim=dim, dtype=self.dtype, seed=100)[0]
        found: dict[str, Any] = {"q": q, "k": k, "v": v, "do": do}
        options: dict[str, Any] = {"compute_dtype": np.float64, **facts.options}
        forward: Any = reference.attention
        backward: Any = reference.attention_backward
        if facts.mask:
            found["mask"] = np.random.default_rng(7).standard_normal((1, 1, queries, keys)).astype(np.float32)
            options["mask"] = found["mask"]
        if facts.packed:
            forward, backward = reference.attention_varlen, reference.attention_varlen_backward
            for side, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
                starts = np.cumsum([0, *(n[side] for n in facts.lengths)]).astype(np.int32)
                found[name] = options[name] = starts
        o, lse = forward(q, k, v, **options)
        expected = backward(do, q, k, v, o, lse, wanted=self.wanted, **options)
        return {**found, "o": round_to(o, self.dtype), "lse": np.asarray(lse, np.float32)}, expected

    def check(self, framework: Framework, prepared: Any) -> tuple[float, str]:
        """Call the public function and compare."""
        numbers, expected = prepared
        kinds = {"lse": "float32", "mask": "float32", "cu_seqlens_q": "int32", "cu_seqlens_k": "int32"}
        arrays: dict[str, Any] = {name: framework.array(x, kinds.get(name, self.dtype)) for name, x in numbers.items()}
        positional: list[Any] = [arrays.pop(name) for name in ("do", "q", "k", "v", "o", "lse")]
        if self.facts.packed:
            for side, name in enumerate(("max_seqlen_q", "max_seqlen_k")):
                arrays[name] = max(n[side] for n in self.facts.lengths)
        function: Any = omniattn.attention_varlen_backward if self.facts.packed else omniattn.attention_backward
        found = function(
            *positional, **arrays, **self.facts.options, wanted=self.wanted, deterministic=self.deterministic
        )
        framework.synchronize()
        worst, wrong = 0.0, []
        for name, gradient in zip(self.wanted, found, strict=True):
            right = np.asarray(expected[name], np.float64)
            apart = np.asarray(framework.to_numpy(gradient), np.float64) - right
            error = float(np.linalg.norm(apart) / np.linalg.norm(right))
            ratio = error / LIMITS[self.dtype] if np.isfinite(error) else float("inf")
            worst = max(worst, ratio)
            if not ratio <= 1:
                wrong.append(f"{name}: relative L2 error {error:.3g}, limit {LIMITS[self.dtype]}")
        return worst, "; ".join(wrong)


def backward_cases(spec: KernelSpec) -> tuple[BackwardCase, ...]:
    """The cases of a row: of kernels for dq alone deterministic calls, with all gradients and with dq alone."""
    made = []
    for index, facts in enumerate(_CALLS):
        if spec.op == "attention_backward_dq":
            made.append(BackwardCase(index, spec.dtype, _width(spec), ("dq",), deterministic=True))
        else:
            wanted = ("dq", "dk", "dv", *(("dmask",) if facts.mask and "dmask" in spec.features else ()))
            made.append(BackwardCase(index, spec.dtype, _width(spec), wanted))
    return tuple(made)


def _width(spec: KernelSpec) -> int:
    """head_dim of the calls; kernels of rows, which take any, stand beside the others of 64."""
    return 64 if spec.op.endswith(("_prepare", "_finish")) else spec.head_dim
