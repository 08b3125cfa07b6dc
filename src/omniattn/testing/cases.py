"""Calls of attention, merging and quantization: small, but each with something that kernels get wrong.

A `Case` has the facts of a call; `build` gives it numbers, and what must come out (`omniattn.testing.expected`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import omniattn
from omniattn import reference
from omniattn.reference import low_precision
from omniattn.registry import KernelSpec
from omniattn.testing.case_tables import CASES, Case
from omniattn.testing.expected import Exact, Expected, LowPrecision, Quantized, Values, outputs_of
from omniattn.testing.frameworks import Framework
from omniattn.testing.inputs import make_qkv
from omniattn.testing.naive import same_dtype_naive
from omniattn.testing.pages import pools

#: Added to the tolerance of the baseline: fp32 sums and a base-2 exponential of a few units in the last place.
LSE_ATOL = 1e-3
#: Of a kernel that makes e4m3 of q itself, with a scale for each row: its emulation has one for 128 rows.
_Q_ROUNDED_LSE_ATOL = 0.1


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
    expected : Expected
        What must come out, and how close.
    """

    positional: tuple[Values, ...]
    float32_positions: tuple[int, ...]
    arrays: dict[str, tuple[Values, str]]
    options: dict[str, Any]
    expected: Expected


def cases_for(op: str) -> tuple[Case, ...]:
    """The cases of one operation, by the name that `operation_of` gives."""
    return CASES[op]


def operation_of(spec: KernelSpec) -> str:
    """A row's operation; attention on quantized operands has cases of its own, on integers and on e4m3."""
    if spec.quantized:
        return "fp8_attention" if spec.qk == "fp8" else "quantized_attention"
    return spec.op


def call(function: Callable[..., Any], numbers: Problem, array: Callable[[Values, str], Any], dtype: str) -> Any:
    """Call a public function with a problem's numbers, which ``array`` turns into arrays of a framework."""
    positional = [
        array(values, "float32" if index in numbers.float32_positions else dtype)
        for index, values in enumerate(numbers.positional)
    ]
    arrays = {name: array(values, kind) for name, (values, kind) in numbers.arrays.items()}
    return function(*positional, **arrays, **numbers.options)


def flavour_of(spec: KernelSpec) -> tuple[str, str, str] | None:
    """Grouping, element type and accumulator of P V of a low-precision kernel, as its emulation wants them."""
    if not spec.quantized:
        return None
    return spec.grouping, spec.pv, spec.pv_accumulator


def build(
    case: Case, op: str, dtype: str, head_dim: int, flavour: tuple[str, str, str] | None = None, head_dim_v: int = 0
) -> Problem:
    """Numbers for a case.

    Parameters
    ----------
    case : Case
        Of `cases_for` this operation.
    dtype, head_dim, head_dim_v
        Of the kernel.
    flavour
        `flavour_of` the kernel; by default what the CPU does.
    """
    index, case = cases_for(op).index(case), dataclasses.replace(case, head_dim_v=head_dim_v)
    head_dim = head_dim - case.below if head_dim > 8 else head_dim
    if op == "merge_states":
        return _merge(case, dtype, head_dim, index)
    if op in ("quantize", "quantize_delta", "quantize_fp8"):
        return _quantize(case, dtype, head_dim, index)
    return (_packed if case.packed else _dense)(case, dtype, head_dim, index, flavour)


@functools.cache
def _cached(
    index: int, op: str, dtype: str, head_dim: int, flavour: tuple[str, str, str] | None, head_dim_v: int
) -> Problem:
    return build(cases_for(op)[index], op, dtype, head_dim, flavour, head_dim_v)


def problem(
    case: Case, op: str, dtype: str, head_dim: int, flavour: tuple[str, str, str] | None = None, head_dim_v: int = 0
) -> Problem:
    """As `build`; kept, because several kernels share the numbers."""
    return _cached(cases_for(op).index(case), op, dtype, head_dim, flavour, head_dim_v)


@dataclass(frozen=True)
class CallCase:
    """A case for one row of the registry: `RowCase`.

    Attributes
    ----------
    op : str
    index : int
        In `cases_for` this operation.
    dtype, head_dim, flavour, head_dim_v
        As in `build`.
    lse : bool
        Whether the call asks for the LSE; not a part of the numbers.
    paged : bool
        Whether keys of packed sequences lie in pages.
    lse_atol : float
        How far the LSE may be off; not a part of the numbers.
    """

    op: str
    index: int
    dtype: str
    head_dim: int
    flavour: tuple[str, str, str] | None = None
    lse: bool = field(default=True, compare=False)
    head_dim_v: int = 0
    paged: bool = False
    lse_atol: float = field(default=LSE_ATOL, compare=False)

    @property
    def case(self) -> Case:
        """The facts."""
        return cases_for(self.op)[self.index]

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.case.name

    def prepare(self) -> Problem:
        """Inputs, and what must come out."""
        made = build(self.case, self.op, self.dtype, self.head_dim, self.flavour, self.head_dim_v)
        if not (self.paged and self.case.packed):
            return made
        return _in_pages(made, _PAGE_SIZES[self.index % len(_PAGE_SIZES)], self.index)

    def check(self, framework: Framework, prepared: Problem) -> tuple[float, str]:
        """Call the public function and compare."""
        if not self.lse:
            prepared = dataclasses.replace(prepared, options={**prepared.options, "return_lse": False})
        result = call(getattr(omniattn, self.case.function), prepared, framework.array, self.dtype)
        framework.synchronize()
        got = {name: framework.to_numpy(array) for name, array in outputs_of(result).items()}
        grades = prepared.expected.grade(got, self.dtype, self.lse_atol)
        return max(grade.ratio for grade in grades), "; ".join(str(grade) for grade in grades if not grade.ok)


#: Copies of 16, of 8, of 1 and of 64 rows.
_PAGE_SIZES = (16, 24, 3, 256)


def own_head_dim_v(spec: KernelSpec) -> int:
    """The head_dim of v in a row's problems, before ``below`` is taken off; 0: that of q."""
    return spec.own_head_dim_v or (spec.head_dim - 16 if spec.other_head_dim_v else 0)


def call_cases(spec: KernelSpec) -> tuple[CallCase, ...]:
    """The cases of a row whose operation has a public function with arrays."""
    op, flavour, lse = operation_of(spec), flavour_of(spec), spec.lse
    head_dim_v = own_head_dim_v(spec)
    lse_atol = _Q_ROUNDED_LSE_ATOL if spec.quantizes_q and spec.qk == "fp8" else LSE_ATOL
    facts = (spec.dtype, spec.head_dim, flavour, lse, head_dim_v, spec.paged, lse_atol)
    return tuple(CallCase(op, index, *facts) for index in range(len(cases_for(op))))


def _emulated(precision: Any, flavour: tuple[str, str, str] | None) -> dict[str, Any]:
    """Options of the emulation of a kernel."""
    if flavour is None:
        return {"precision": precision}
    grouping, pv, accumulator = flavour
    low = dataclasses.replace(precision.precision, pv=pv, pv_accumulator=accumulator)
    return {"precision": low, "grouping": grouping}


def _qkv(
    case: Case, dtype: str, head_dim: int, seed: int, *, packed: bool, kind: str = "normal"
) -> tuple[Values, Values, Values]:
    total_q, total_k = sum(q for q, _ in case.lengths), sum(k for _, k in case.lengths)
    seqlen_q, seqlen_k = (total_q, total_k) if packed else case.lengths[0]
    head_dim_v = case.head_dim_v - case.below if case.head_dim_v else head_dim
    q, k, v = make_qkv(
        kind, batch=None if packed else len(case.lengths), seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=case.heads_q,
        heads_kv=case.heads_kv, head_dim=max(head_dim, head_dim_v), layout=case.layout, seed=seed, dtype=dtype,
    )  # fmt: skip
    return q[..., :head_dim], k[..., :head_dim], v[..., :head_dim_v]


def _dense(case: Case, dtype: str, head_dim: int, seed: int, flavour: tuple[str, str, str] | None) -> Problem:
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
    if "io" in case.arrays:
        # Quarters: every type has them. -inf hides a key, in whole rows too.
        values = (np.round(4 * rng.standard_normal((case.heads_q, seqlen_q, seqlen_k))) / 4).astype(np.float32)
        values[rng.random(values.shape) < 0.2] = -np.inf
        values[:, seqlen_q // 2] = -np.inf
        arrays["mask"] = (values, dtype)
    if "keys" in case.arrays:
        values = rng.standard_normal((2, 1, 1, seqlen_k)).astype(np.float32)[: len(case.lengths)]
        values[..., seqlen_k // 2 :] = -np.inf
        arrays["mask"] = (values, "float32")
    options = {**case.options, "layout": case.layout}
    given = {**options, **{name: values for name, (values, _) in arrays.items()}}
    if "blocks" in case.arrays:
        blocks, given["mask"] = _blocks(given.pop("block_size"), (case.heads_q, seqlen_q, seqlen_k), rng)
        arrays["block_mask"] = (blocks, "bool")
    options["return_lse"] = True
    if "precision" in given:
        given |= _emulated(given["precision"], flavour)
        return Problem((q, k, v), (), arrays, options, LowPrecision(*low_precision.attention(q, k, v, **given)))
    exact = reference.attention(q, k, v, compute_dtype=np.float64, **given)
    naive = same_dtype_naive(q, k, v, dtype=dtype, **given)
    return Problem((q, k, v), (), arrays, options, Exact(*exact, *naive))


def _blocks(size: int | tuple[int, int], extents: tuple[int, int, int], rng: Any) -> tuple[Values, Values]:
    """A block mask that hides half of the blocks, and all of some queries; the same for each query and key."""
    rows, keys = size if isinstance(size, tuple) else (size, size)
    heads, seqlen_q, seqlen_k = extents
    blocks: Values = rng.random((1, heads, -(-seqlen_q // rows), -(-seqlen_k // keys))) < 0.5
    blocks[:, 0, 1] = False
    return blocks, blocks.repeat(rows, axis=2)[:, :, :seqlen_q].repeat(keys, axis=3)[..., :seqlen_k]


def _starts(case: Case, side: int) -> Values:
    """cu_seqlens of the queries (0) or the keys (1)."""
    return np.cumsum([0, *(pair[side] for pair in case.lengths)]).astype(np.int32)


def _packed(case: Case, dtype: str, head_dim: int, seed: int, flavour: tuple[str, str, str] | None) -> Problem:
    q, k, v = _qkv(case, dtype, head_dim, seed, packed=True)
    starts_q, starts_k = _starts(case, 0), _starts(case, 1)
    arrays: dict[str, tuple[Values, str]] = {"cu_seqlens_q": (starts_q, "int32"), "cu_seqlens_k": (starts_k, "int32")}
    longest: dict[str, Any] = {
        "max_seqlen_q": max(pair[0] for pair in case.lengths),
        "max_seqlen_k": max(pair[1] for pair in case.lengths),
    }
    mask: Values | None = None
    if case.arrays:
        mask, kind = _packed_mask(case, dtype, np.random.default_rng(1000 + seed))
        arrays["mask"] = (mask, kind)
    options = {**case.options, **longest, "return_lse": True}
    if "precision" in case.options:
        given = {**case.options, **longest, **_emulated(case.options["precision"], flavour)}
        low = low_precision.attention(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **given)
        return Problem((q, k, v), (), arrays, options, LowPrecision(*low))
    parts = []
    for b in range(len(case.lengths)):
        rows_q, rows_k = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        one = (q[None, rows_q], k[None, rows_k], v[None, rows_k])
        given = dict(case.options)
        if mask is not None:
            own = mask[b if len(mask) > 1 else 0]
            given["mask"] = own[None, :, : case.lengths[b][0], : case.lengths[b][1]]
        exact = reference.attention(*one, compute_dtype=np.float64, **given)
        parts.append((*exact, *same_dtype_naive(*one, dtype=dtype, **given)))
    o, lse, naive_o, naive_lse = (np.concatenate([x[0] for x in xs], axis=i % 2) for i, xs in enumerate(zip(*parts)))
    return Problem((q, k, v), (), arrays, options, Exact(o, lse, naive_o, naive_lse))


def _packed_mask(case: Case, dtype: str, rng: Any) -> tuple[Values, str]:
    """A mask of packed sequences and its dtype. Of those with one each, what lies beyond their ends is NaN."""
    batch, rows, keys = len(case.lengths), *(max(pair[side] for pair in case.lengths) for side in (0, 1))
    if "mask" in case.arrays:
        mask: Values = rng.random((batch, 1, rows, keys)) < 0.7
        mask[:, :, rows // 2] = False
        mask[:, :, :, :64] &= rng.random((batch, 1, rows, 1)) < 0.5
        return mask, "bool"
    shape = {"keys": (batch, 1, 1, keys), "bias": (1, case.heads_q, rows, keys), "io": (batch, 1, rows, keys)}
    kind = case.arrays[0]
    # Quarters: every type has them.
    values = (np.round(4 * rng.standard_normal(shape[kind])) / 4).astype(np.float32)
    values[rng.random(values.shape) < 0.2] = -np.inf
    for b, (seqlen_q, seqlen_k) in enumerate(case.lengths if kind != "bias" else ()):
        values[b, :, :, seqlen_k:] = np.nan
        if kind == "io":
            values[b, :, seqlen_q:] = np.nan
    return values, dtype if kind == "io" else "float32"


def _merge(case: Case, dtype: str, head_dim: int, seed: int) -> Problem:
    o_a, o_b, _ = _qkv(Case("", "", case.lengths, case.heads_q, case.heads_q), dtype, head_dim, seed, packed=False)
    shape = (len(case.lengths), case.heads_q, case.lengths[0][0])
    lse_a, lse_b = (np.random.default_rng(seed + i).standard_normal(shape).astype(np.float32) * 4 for i in (0, 1))
    if "empty" in case.name:
        lse_a[:, 0], lse_b[:, 1] = -np.inf, -np.inf
        lse_a[:, 2, ::2], lse_b[:, 2, ::2] = -np.inf, -np.inf
    o, lse = reference.merge_states(o_a, lse_a, o_b, lse_b, compute_dtype=np.float64)
    return Problem((o_a, lse_a, o_b, lse_b), (1, 3), {}, {}, Exact(o, lse, None, None))


def _quantize(case: Case, dtype: str, head_dim: int, seed: int) -> Problem:
    # Means that are far from 0: there is something to smooth.
    q, k, v = _qkv(case, dtype, head_dim, seed, packed=case.packed, kind="channel_bias")
    of_v = case.function == "quantize_v"
    positional = (v,) if of_v else (q, k)
    options = {**case.options, "layout": case.layout}
    arrays: dict[str, tuple[Values, str]] = {}
    if case.packed:
        for name, side in (("k", 1),) if of_v else (("q", 0), ("k", 1)):
            arrays[f"cu_seqlens_{name}"] = (_starts(case, side), "int32")
            options[f"max_seqlen_{name}"] = max(pair[side] for pair in case.lengths)
    on_cpu: Callable[..., Any] = omniattn.quantize_v if of_v else omniattn.quantize_qk
    given = {name: values for name, (values, _) in arrays.items()}
    return Problem(positional, (), arrays, options, Quantized(on_cpu(*positional, **given, **options)))


def _in_pages(problem: Problem, page_size: int, seed: int) -> Problem:
    """A problem of packed sequences over pages."""
    q, k, v = problem.positional
    lengths = np.diff(problem.arrays["cu_seqlens_k"][0])
    made, table = pools((k, v), lengths.tolist(), page_size, seed)
    arrays: dict[str, tuple[Any, str]] = {name: x for name, x in problem.arrays.items() if name != "cu_seqlens_k"}
    arrays |= {"seqused_k": (lengths.astype(np.int32), "int32"), "block_table": (table, "int32")}
    return dataclasses.replace(problem, positional=(q, *made), arrays=arrays)
