"""The problems of ``omniattn verify``: small, but each with something that kernels get wrong."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn import reference, testing

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One call of a public function.

    Attributes
    ----------
    name : str
    function : str
        ``"attention"``, ``"attention_varlen"`` or ``"merge_states"``.
    lengths : tuple of (seqlen_q, seqlen_k)
        One a sequence; for ``attention`` all the same.
    heads_q, heads_kv : int
    below : int
        How far head_dim lies below the kernel's own: not every head_dim fills a tile.
    layout : str
    options : mapping
        Plain keyword arguments of the call.
    arrays : tuple of str
        Which array arguments to make: ``"mask"``, ``"bias"``, ``"sinks"``.
    """

    name: str
    function: str
    lengths: tuple[tuple[int, int], ...]
    heads_q: int = 4
    heads_kv: int = 2
    below: int = 0
    layout: str = "NHD"
    options: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()


ATTENTION_CASES: tuple[Case, ...] = (
    Case("full", "attention", ((257, 257),) * 2),
    Case("causal, seqlen_q < seqlen_k", "attention", ((77, 300),), 6, 2, options={"causal": True}),
    Case("causal, rows without keys, HND", "attention", ((190, 60),), layout="HND", options={"causal": True}),
    Case("one query row", "attention", ((1, 513),), 8, 1, options={"causal": True}),
    Case("window", "attention", ((200, 200),), below=8, options={"window": (64, 17)}),
    Case("sinks, causal", "attention", ((70, 40),), options={"causal": True}, arrays=("sinks",)),
    Case("softcap and sinks", "attention", ((130, 140),), options={"softcap": 20.0}, arrays=("sinks",)),
    Case("boolean mask with an empty row", "attention", ((100, 150),), below=8, arrays=("mask",)),
    Case("additive mask", "attention", ((65, 129),), arrays=("bias",)),
    Case(
        "varlen, causal, empty sequences",
        "attention_varlen",
        ((5, 70), (0, 3), (130, 130), (9, 0)),
        options={"causal": True},
    ),
)

MERGE_CASES: tuple[Case, ...] = (
    Case("merge", "merge_states", ((100, 100),) * 2),
    Case("merge, one side empty", "merge_states", ((33, 33),), below=8),
)


@dataclass(frozen=True)
class Problem:
    """A case with numbers: what to call and what must come out.

    Attributes
    ----------
    positional : tuple of ndarray
        float32, holding values of the kernel's dtype.
    float32_positions : tuple of int
        Positional arguments that stay float32 (LSE).
    arrays : dict
        Array keyword arguments with their dtypes.
    options : dict
        Other keyword arguments.
    o, lse : ndarray
        fp64 reference.
    naive_o, naive_lse : ndarray or None
        The same operation as a plain framework computes it in this dtype: the yardstick of the tolerance.
    """

    positional: tuple[Values, ...]
    float32_positions: tuple[int, ...]
    arrays: dict[str, tuple[Values, str]]
    options: dict[str, Any]
    o: Values
    lse: Values
    naive_o: Values | None
    naive_lse: Values | None


def cases_for(op: str) -> tuple[Case, ...]:
    """The cases of one operation of the registry."""
    return {"attention": ATTENTION_CASES, "merge_states": MERGE_CASES}[op]


@functools.cache
def _cached(index: int, op: str, dtype: str, head_dim: int) -> Problem:
    case = cases_for(op)[index]
    builders = {"attention": _dense, "attention_varlen": _varlen, "merge_states": _merge}
    return builders[case.function](case, dtype, head_dim - case.below if head_dim > 8 else head_dim, index)


def problem(case: Case, op: str, dtype: str, head_dim: int) -> Problem:
    """Numbers for a case; computed once per dtype and head_dim, because several kernels share them."""
    return _cached(cases_for(op).index(case), op, dtype, head_dim)


def _qkv(case: Case, dtype: str, head_dim: int, seed: int, *, packed: bool) -> tuple[Values, Values, Values]:
    total_q, total_k = sum(q for q, _ in case.lengths), sum(k for _, k in case.lengths)
    seqlen_q, seqlen_k = (total_q, total_k) if packed else case.lengths[0]
    return testing.make_qkv(
        "normal",
        batch=None if packed else len(case.lengths),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=case.heads_q,
        heads_kv=case.heads_kv,
        head_dim=head_dim,
        layout=case.layout,
        seed=seed,
        dtype=dtype,
    )


def _dense(case: Case, dtype: str, head_dim: int, seed: int) -> Problem:
    q, k, v = _qkv(case, dtype, head_dim, seed, packed=False)
    rng = np.random.default_rng(1000 + seed)
    seqlen_q, seqlen_k = case.lengths[0]
    arrays: dict[str, tuple[Values, str]] = {}
    if "sinks" in case.arrays:
        arrays["sinks"] = (rng.standard_normal(case.heads_q).astype(np.float32), "float32")
    if "mask" in case.arrays:
        mask = rng.random((1, 1, seqlen_q, seqlen_k)) < 0.7
        mask[..., seqlen_q // 2, :] = False
        arrays["mask"] = (mask, "bool")
    if "bias" in case.arrays:
        arrays["mask"] = (rng.standard_normal((case.heads_q, seqlen_q, seqlen_k)).astype(np.float32), "float32")
    options = {**case.options, "layout": case.layout}
    given = {**options, **{name: values for name, (values, _) in arrays.items()}}
    o, lse = reference.attention(q, k, v, compute_dtype=np.float64, **given)
    naive_o, naive_lse = testing.same_dtype_naive(q, k, v, dtype=dtype, **given)
    return Problem((q, k, v), (), arrays, options, o, lse, naive_o, naive_lse)


def _varlen(case: Case, dtype: str, head_dim: int, seed: int) -> Problem:
    q, k, v = _qkv(case, dtype, head_dim, seed, packed=True)
    starts_q, starts_k = (np.cumsum([0, *(pair[side] for pair in case.lengths)]).astype(np.int32) for side in (0, 1))
    parts = []
    for b in range(len(case.lengths)):
        rows_q, rows_k = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        one = (q[None, rows_q], k[None, rows_k], v[None, rows_k])
        exact = reference.attention(*one, compute_dtype=np.float64, **case.options)
        parts.append((*exact, *testing.same_dtype_naive(*one, dtype=dtype, **case.options)))
    o, lse, naive_o, naive_lse = (np.concatenate([x[0] for x in xs], axis=i % 2) for i, xs in enumerate(zip(*parts)))
    options = {
        **case.options,
        "max_seqlen_q": max(pair[0] for pair in case.lengths),
        "max_seqlen_k": max(pair[1] for pair in case.lengths),
    }
    arrays: dict[str, tuple[Values, str]] = {"cu_seqlens_q": (starts_q, "int32"), "cu_seqlens_k": (starts_k, "int32")}
    return Problem((q, k, v), (), arrays, options, o, lse, naive_o, naive_lse)


def _merge(case: Case, dtype: str, head_dim: int, seed: int) -> Problem:
    o_a, o_b, _ = _qkv(Case("", "", case.lengths, case.heads_q, case.heads_q), dtype, head_dim, seed, packed=False)
    shape = (len(case.lengths), case.heads_q, case.lengths[0][0])
    lse_a, lse_b = (np.random.default_rng(seed + i).standard_normal(shape).astype(np.float32) * 4 for i in (0, 1))
    if "empty" in case.name:
        lse_a[:, 0], lse_b[:, 1] = -np.inf, -np.inf
        lse_a[:, 2, ::2], lse_b[:, 2, ::2] = -np.inf, -np.inf
    o, lse = reference.merge_states(o_a, lse_a, o_b, lse_b, compute_dtype=np.float64)
    return Problem((o_a, lse_a, o_b, lse_b), (1, 3), {}, {}, o, lse, None, None)
