"""Calls of ``index_logits`` and ``top_k`` for rows of the registry: small, each with what kernels get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import omniattn
from omniattn.reference import indexer as reference
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.registry import KernelSpec
from omniattn.testing.frameworks import Framework

Values = npt.NDArray[Any]

INDEXER_OPS = ("index_logits", "top_k")
#: Error of a logit as a fraction of the magnitudes of its products: what the tensor cores of Hopper keep of sums of
#: e4m3, and fp32 sums.
_ERRORS = {True: 2.0**-12, False: 2.0**-20}
_DIM = 128
#: Tokens of each sequence; heads, new tokens, block size. Block sizes of 0: keys one behind the other, with ranges.
_LENGTHS = (700, 0, 65, 1, 128)
_LOGITS = ((64, 1, 64), (32, 2, 7), (128, 3, 16), (5, 5, 0))
#: Elements, k, and what the rows are like.
_TOP_K = (
    (3001, 40, "normal"), (30000, 2048, "normal"), (20000, 2048, "one bin"), (5000, 300, "equal"),
    (777, 800, "special"), (3001, 100, "pool"),
)  # fmt: skip


class Prepared(NamedTuple):
    """A call: arrays with their dtypes, other arguments, what must come out, and how close (0: the same)."""

    arrays: dict[str, tuple[Values, str]]
    options: dict[str, Any]
    wanted: Values
    allowed: Values | None


@dataclass(frozen=True)
class IndexerCase:
    """A case for one row of the registry: `RowCase`.

    Attributes
    ----------
    op : str
    index : int
    hopper : bool
        Whether the products are those of Hopper's tensor cores.
    """

    op: str
    index: int
    hopper: bool = False

    @property
    def name(self) -> str:
        """What messages call it."""
        if self.op == "top_k":
            return "{2} rows of {0}, k {1}".format(*_TOP_K[self.index])
        heads, new, size = _LOGITS[self.index]
        return f"{heads} heads, {new} queries, " + (f"blocks of {size}" if size else "ranges of keys")

    def prepare(self) -> Prepared:
        """Inputs, and what must come out."""
        if self.op == "top_k":
            return _top_k(*_TOP_K[self.index], self.index)
        heads, new, size = _LOGITS[self.index]
        return _paged(heads, new, size, self) if size else _ranges(heads, new, self)

    def check(self, framework: Framework, prepared: Prepared) -> tuple[float, str]:
        """Call the public function and compare."""
        arrays = {}
        for name, (values, dtype) in prepared.arrays.items():
            is_e4m3 = dtype == "float8_e4m3fn"
            array = framework.array(values, "uint8" if is_e4m3 else dtype)
            arrays[name] = framework.as_dtype(array, dtype) if is_e4m3 else array
        got = framework.to_numpy(getattr(omniattn, self.op)(**arrays, **prepared.options))
        framework.synchronize()
        if got.shape != prepared.wanted.shape:
            return float("inf"), f"shape {got.shape}, expected {prepared.wanted.shape}"
        if prepared.allowed is None:
            different = int(np.count_nonzero(got != prepared.wanted))
            return (float("inf"), f"{different} of {got.size} positions differ") if different else (0.0, "")
        seen = ~np.isneginf(prepared.wanted)
        if not np.array_equal(~np.isneginf(got), seen):
            return float("inf"), "-inf at other places"
        errors = np.abs(np.where(seen, got, 0.0) - np.where(seen, prepared.wanted, 0.0))
        worst = float(np.max(errors / prepared.allowed, initial=0.0))
        return worst, "" if worst <= 1.0 else f"an error of {worst:.3g} times what is allowed"


def indexer_cases(spec: KernelSpec) -> tuple[IndexerCase, ...]:
    """The cases of a row."""
    table: tuple[Any, ...] = _TOP_K if spec.op == "top_k" else _LOGITS
    hopper = spec.op == "index_logits" and spec.arch_specific
    return tuple(IndexerCase(spec.op, index, hopper) for index in range(len(table)))


def _codes(rng: np.random.Generator, *shape: int) -> Values:
    magnitudes = np.exp2(rng.integers(-5, 3, (*shape[:-1], 1)))
    return encode_e4m3((rng.standard_normal(shape) * magnitudes).astype(np.float32))


def _wanted(
    q: Values, k: Values, weights: Values, scale: Values, starts: Values, ends: Values
) -> tuple[Values, Values]:
    """Logits in float64, and the magnitudes of their products."""
    q, k = decode_e4m3(q).astype(np.float64), decode_e4m3(k).astype(np.float64)
    logits = reference.index_logits(q, k, weights, scale, starts, ends, compute_dtype=np.float64)
    whole = np.zeros(len(q), np.int64), np.full(len(q), len(k), np.int64)
    sizes = reference.index_logits(np.abs(q), np.abs(k), np.abs(weights), scale, *whole, compute_dtype=np.float64)
    return logits, sizes


def _paged(heads: int, new: int, size: int, case: IndexerCase) -> Prepared:
    rng = np.random.default_rng(case.index)
    columns = -(-max(_LENGTHS) // size)
    blocks = len(_LENGTHS) * columns
    table = rng.permutation(blocks).reshape(-1, columns).astype(np.int32)
    rows = len(_LENGTHS) * new
    q, weights = _codes(rng, rows, heads, _DIM), rng.standard_normal((rows, heads)).astype(np.float32)
    cache = np.full((blocks, size * (_DIM + 4)), 0xFF, np.uint8)
    values = cache[:, : size * _DIM].reshape(blocks, size, _DIM)
    scales = np.full((blocks, size), np.nan, np.float32)
    wanted = np.full((rows, columns * size), -np.inf)
    allowed = np.ones_like(wanted)
    for b, length in enumerate(_LENGTHS):
        at = table[b, np.arange(length) // size], np.arange(length) % size
        k, scale = _codes(rng, length, _DIM), rng.uniform(0.5, 2.0, length).astype(np.float32)
        values[at], scales[at] = k, scale
        own = slice(b * new, (b + 1) * new)
        ends = length - new + 1 + np.arange(new)
        logits, sizes = _wanted(q[own], k, weights[own], scale, np.zeros(new, np.int64), ends)
        wanted[own, :length], allowed[own, :length] = logits, _ERRORS[case.hopper] * sizes + 1e-30
    cache[:, : size * _DIM] = values.reshape(blocks, -1)
    cache[:, size * _DIM :] = scales.view(np.uint8)
    arrays = {
        "q": (q.reshape(len(_LENGTHS), new, heads, _DIM), "float8_e4m3fn"),
        "k": (cache.reshape(blocks, size, 1, _DIM + 4), "uint8"), "weights": (weights, "float32"),
        "seq_lens": (np.array(_LENGTHS, np.int32), "int32"), "block_table": (table, "int32"),
    }  # fmt: skip
    return Prepared(arrays, {}, wanted, allowed)


def _ranges(heads: int, rows: int, case: IndexerCase) -> Prepared:
    rng = np.random.default_rng(case.index)
    keys = 500
    q, k = _codes(rng, rows, heads, _DIM), _codes(rng, keys, _DIM)
    weights = rng.standard_normal((rows, heads)).astype(np.float32)
    scale = rng.uniform(0.5, 2.0, keys).astype(np.float32)
    starts = np.linspace(0, keys, rows).astype(np.int32)
    ends = np.minimum(starts + 200, keys).astype(np.int32)
    logits, sizes = _wanted(q, k, weights, scale, starts, ends)
    arrays = {
        "q": (q, "float8_e4m3fn"), "k": (k, "float8_e4m3fn"), "weights": (weights, "float32"),
        "k_scale": (scale, "float32"), "k_start": (starts, "int32"), "k_end": (ends, "int32"),
    }  # fmt: skip
    return Prepared(arrays, {}, logits, _ERRORS[case.hopper] * sizes + 1e-30)


def _top_k(width: int, k: int, kind: str, seed: int) -> Prepared:
    rng = np.random.default_rng(seed)
    rows = 4
    logits = rng.standard_normal((rows, width)).astype(np.float32)
    if kind == "one bin":
        logits = rng.uniform(1.0, 1.03, logits.shape).astype(np.float32)
    elif kind == "equal":
        logits[:] = np.where(rng.random(logits.shape) < 0.5, 0.0, -0.0)
    elif kind == "special":
        logits[rng.random(logits.shape) < 0.1] = np.nan
        logits[rng.random(logits.shape) < 0.2] = np.inf
        logits[rng.random(logits.shape) < 0.5] = -np.inf
    starts = np.array([0, 1, 2, 3], np.int32)
    lengths = np.array([width, 0, width // 2, width - 3], np.int32)
    wanted = reference.top_k(logits, k, starts, lengths)
    arrays: dict[str, tuple[Values, str]] = {
        "logits": (logits, "float32"), "starts": (starts, "int32"), "lengths": (lengths, "int32"),
    }  # fmt: skip
    options: dict[str, Any] = {"k": k}
    if kind == "pool":
        size = 24
        table = rng.permutation(rows * -(-width // size)).reshape(rows, -1).astype(np.int32)
        arrays["block_table"], options["block_size"] = (table, "int32"), size
        wanted = reference.pool_rows(wanted, table, size)
    return Prepared(arrays, options, wanted, None)
