"""Calls of ``index_logits`` and ``top_k`` with what they have to give, by plain NumPy. For CPU and GPU tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
DIM = 128


@dataclass
class LogitsCall:
    """A call.

    Attributes
    ----------
    arguments : dict
        Of ``index_logits``, NumPy arrays.
    wanted, bound : ndarray, float64
        The logits, and the sum of the magnitudes of the products of each of them.
    """

    arguments: dict[str, Any]
    wanted: np.ndarray[Any, Any]
    bound: np.ndarray[Any, Any]


def _numbers(rng: np.random.Generator, *shape: int) -> Any:
    """e4m3 of all magnitudes, subnormal ones too."""
    return (rng.normal(size=shape) * np.exp2(rng.integers(-6, 3, (*shape[:-1], 1)))).astype(E4M3)


def _scores(q: Any, k: Any, weights: Any, scale: Any) -> tuple[Any, Any]:
    """Logits of (rows, heads, 128) on (keys, 128), and the sums of magnitudes."""
    q, k, weights, scale = (np.asarray(x, np.float64) for x in (q, k, weights, scale))
    products = np.einsum("thd,sd->ths", q, k)
    sizes = np.einsum("thd,sd->ths", np.abs(q), np.abs(k))
    with np.errstate(invalid="ignore"):
        logits = np.einsum("ths,th->ts", np.maximum(products, 0.0), weights) * scale
    return logits, np.einsum("ths,th->ts", sizes, np.abs(weights)) * np.abs(scale)


def paged_call(
    heads: int, next_n: int, block_size: int, fused: bool, *, lengths: Any = (0, 1, 5, 130, 257), seed: int = 0
) -> LogitsCall:
    """Sequences of these lengths in blocks in any order; what no sequence has is NaN, other entries are no blocks."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    batch, longest = len(lengths), int(max(lengths))
    columns = -(-max(longest, 1) // block_size) + 1
    blocks = int(sum(-(-int(n) // block_size) for n in lengths)) + 2
    order = iter(rng.permutation(blocks))
    table = np.full((batch, columns), 2**30, np.int32)
    values = np.full((blocks, block_size, DIM), 0x7F, np.uint8)
    scales = np.full((blocks, block_size), np.nan, np.float32)
    q, weights = _numbers(rng, batch, next_n, heads, DIM), rng.normal(size=(batch * next_n, heads)).astype(np.float32)
    width = columns * block_size
    wanted, bound = np.full((batch * next_n, width), -np.inf), np.zeros((batch * next_n, width))
    for b, n in enumerate(lengths):
        k, scale = _numbers(rng, n, DIM), rng.uniform(0.5, 2.0, n).astype(np.float32)
        for first in range(0, int(n), block_size):
            block = table[b, first // block_size] = next(order)
            own = slice(first, min(first + block_size, int(n)))
            values[block, : own.stop - first] = k[own].view(np.uint8)
            scales[block, : own.stop - first] = scale[own]
        rows = slice(b * next_n, (b + 1) * next_n)
        logits, sizes = _scores(q[b], k, weights[rows], scale)
        ends = np.arange(next_n)[:, None] + int(n) - next_n + 1
        wanted[rows, :n] = np.where(np.arange(n) < ends, logits, -np.inf)
        bound[rows, :n] = sizes
    arguments = {"q": q, "weights": weights, "seq_lens": lengths, "block_table": table}
    if fused:
        raw = np.concatenate([values.reshape(blocks, -1), scales.view(np.uint8).reshape(blocks, -1)], axis=1)
        arguments["k"] = raw.reshape(blocks, block_size, 1, DIM + 4)
    else:
        arguments |= {"k": values.view(E4M3), "k_scale": scales}
    return LogitsCall(arguments, wanted, bound)


def ranged_call(heads: int, rows: int, keys: int, seed: int = 0) -> LogitsCall:
    """Rows with ranges of contiguous keys, some of them empty."""
    rng = np.random.default_rng(seed)
    q, k = _numbers(rng, rows, heads, DIM), _numbers(rng, keys, DIM)
    weights = rng.normal(size=(rows, heads)).astype(np.float32)
    scale = rng.uniform(0.5, 2.0, keys).astype(np.float32)
    start, end = np.sort(rng.integers(0, keys + 1, (2, rows)), axis=0).astype(np.int32)
    start[0], end[0] = 0, keys
    if rows > 2:
        start[1], end[1] = keys // 2, keys // 2
        start[2], end[2] = keys, 0
    logits, bound = _scores(q, k, weights, scale)
    s = np.arange(keys)
    wanted = np.where((s >= start[:, None]) & (s < end[:, None]), logits, -np.inf)
    arguments = {"q": q, "k": k, "weights": weights, "k_scale": scale, "k_start": start, "k_end": end}
    return LogitsCall(arguments, wanted, bound)


def same_logits(got: Any, call: LogitsCall, error: float = 2.0**-20) -> float:
    """Check logits; ``error`` of the sum of magnitudes is allowed. Returns the largest share of it that was found."""
    assert got.shape == call.wanted.shape
    assert got.dtype == np.float32
    masked = np.isneginf(call.wanted)
    np.testing.assert_array_equal(np.isneginf(got), masked)
    with np.errstate(invalid="ignore"):
        difference = np.where(masked, 0.0, got - call.wanted)
    share = np.abs(difference) / np.where(masked, 1.0, call.bound + 1e-30)
    worst = float(share.max(initial=0.0))
    place = np.unravel_index(share.argmax(), share.shape) if share.size else ()
    assert worst <= error, f"{worst / error:.3g} times the error allowed, at {place}"
    return worst


#: Kinds of rows for ``top_k``.
ROWS = (
    "normal", "uniform", "one bin", "two values", "equal", "masked", "all masked", "nan", "infinities", "zeros",
    "ascending", "low bits", "subnormal", "few", "rounded", "crowded", "outliers",
)  # fmt: skip


def row_of(kind: str, n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """One row of a kind."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n).astype(np.float32)
    if kind == "uniform":
        x = rng.uniform(-1e3, 1e3, n).astype(np.float32)
    elif kind == "one bin":  # of the first digit, all of them
        x = rng.uniform(1.0, 1.03, n).astype(np.float32)
    elif kind == "two values":
        x = np.where(rng.random(n) < 0.5, np.float32(1.5), np.float32(-2.0))
    elif kind == "equal":
        x = np.full(n, -3.0, np.float32)
    elif kind == "masked":
        x[rng.random(n) < 0.9] = -np.inf
    elif kind == "all masked":
        x[:] = -np.inf
    elif kind == "nan":
        at = rng.random(n) < 0.01
        x[at] = np.where(rng.random(int(at.sum())) < 0.5, np.nan, -np.nan)
    elif kind == "infinities":
        x[rng.random(n) < 0.3] = np.inf
        x[rng.random(n) < 0.3] = -np.inf
    elif kind == "zeros":
        x = np.where(rng.random(n) < 0.5, np.float32(0.0), np.float32(-0.0))
    elif kind == "ascending":
        x = np.arange(n, dtype=np.float32) - n // 2
    elif kind == "low bits":  # the first two digits are the same
        x = (rng.integers(0, 600, n).astype(np.uint32) + np.uint32(0x3F800000)).view(np.float32)
    elif kind == "subnormal":
        x = rng.integers(0, 1 << 20, n).astype(np.uint32).view(np.float32) * np.where(rng.random(n) < 0.5, 1, -1)
        x = x.astype(np.float32)
    elif kind == "few":
        x[7:] = -np.inf
    elif kind == "rounded":  # some dozens are equal to the last one that is chosen
        x = x.astype(BF16).astype(np.float32)
    elif kind == "crowded":  # nearly all of the largest belong to a few threads of a CTA
        x[np.arange(n) // 4 % 512 < 24] += 6
    elif kind == "outliers":
        x[rng.random(n) < 0.002] *= np.float32(1e30)
    return x


def wanted_positions(logits: Any, k: int, starts: Any = None, lengths: Any = None) -> np.ndarray[Any, Any]:
    """By sorting, one row at a time."""
    out = np.full((len(logits), k), -1, np.int32)
    for t, row in enumerate(logits):
        first = 0 if starts is None else int(starts[t])
        part = row[first : len(row) if lengths is None else first + int(lengths[t])]
        nan = np.isnan(part)
        ranked = np.lexsort((np.arange(len(part)), -np.where(nan, np.float32(0), part), ~nan))
        chosen = np.sort([i for i in ranked[:k] if not np.isneginf(part[i])])
        out[t, : len(chosen)] = chosen
    return out


def logits_of(rows: int, width: int, next_n: int, seed: int = 0) -> tuple[Any, dict[str, Any], Any, Any]:
    """Rows with a stride of their own, starts and lengths: logits, options, and starts and lengths of each row."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, width + 3)).astype(np.float32)[:, 1 : 1 + width]
    starts = np.minimum(np.arange(rows), width).astype(np.int32)
    most = width - starts.reshape(-1, next_n).max(axis=1)
    given = np.minimum(rng.integers(0, width, rows // next_n), most).astype(np.int32)
    given[0], given[1] = 0, 1
    own = np.maximum(given[:, None] - next_n + 1 + np.arange(next_n), 0).reshape(-1)
    return logits, {"starts": starts, "lengths": given, "next_n": next_n}, starts, own


def pooled(sequences: int, width: int, block_size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """A block table."""
    columns = -(-width // block_size)
    order = np.random.default_rng(seed).permutation(sequences * columns)
    return order.reshape(sequences, columns).astype(np.int32)
