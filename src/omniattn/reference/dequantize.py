"""Quantized operands back to numbers, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.problems.quantize import BLOCK_ROWS, QuantizeProblem
from omniattn.reference.e4m3 import decode_e4m3
from omniattn.reference.quantize import KEY_ORDER, Sequence, groups_of, slots_per_tile, unpack_int4
from omniattn.reference.rotation import rotate_back

Array = npt.NDArray[Any]
_F = np.float32


def contents(quantized: Any) -> tuple[QuantizeProblem, dict[str, Array]]:
    """(problem, arrays by name) of a `QuantizedQK` or `QuantizedV` whose arrays are on the CPU."""
    named = {
        name: np.asarray(getattr(quantized, name))
        for name in quantized.problem.shapes()
        if getattr(quantized, name, None) is not None
    }
    return quantized.problem, named


@dataclass(frozen=True)
class Rows:
    """Rows of one head: integers or e4m3 as float32, and their scale, (rows,)."""

    integers: Array
    scale: Array

    @property
    def values(self) -> Array:
        """Dequantized."""
        return np.asarray(self.integers * self.scale[:, None])


def rows_of(out: dict[str, Array], problem: QuantizeProblem, s: Sequence, head: int, *, is_q: bool) -> Rows:
    """One head of one sequence of q or k; rotated rows have all `head_dim_pad` channels."""
    name = "q" if is_q else "k"
    integers = head_of(out[name + "_int"], problem, s, head)[s.begin : s.begin + s.length]
    if problem.stored_bits == 4:
        integers = unpack_int4(integers)
    _, slot = groups_of(s.length, problem, is_q=is_q)
    tile = BLOCK_ROWS if is_q else problem.key_tile
    first = s.slot(tile, problem.varlen) * slots_per_tile(problem, is_q=is_q)
    scale = head_of(out[name + "_scale"], problem, s, head)[first + slot]
    numbers = decode_e4m3(integers) if problem.e4m3 else integers.astype(_F)
    return Rows(numbers if problem.hadamard else numbers[:, : problem.head_dim], scale)


def values_of(out: dict[str, Array], problem: QuantizeProblem, s: Sequence, head: int) -> tuple[Array, Array, Array]:
    """One head of v: (quantized values as float32 (keys, head_dim), scale, mean)."""
    d = problem.head_dim
    scale, mean = (out[name][s.batch, head, :d] for name in ("v_scale", "v_mean"))
    stored = head_of(out["v"], problem, s, head)
    if problem.v_dtype == "float16":
        return stored[s.begin : s.begin + s.length, :d].astype(_F), scale, mean
    first = s.slot(BLOCK_ROWS, problem.varlen) * BLOCK_ROWS
    tiles = -(-s.length // BLOCK_ROWS)
    codes = stored[:d, first : first + tiles * BLOCK_ROWS].reshape(d, -1, 16)
    ordered = np.empty_like(codes)
    ordered[:, :, KEY_ORDER] = codes
    return decode_e4m3(ordered.reshape(d, -1)[:, : s.length].T), scale, mean


def head_of(array: Array, problem: QuantizeProblem, s: Sequence, head: int) -> Array:
    """The part of an output that belongs to one head (of one batch entry, unless packed)."""
    part: Array = array[head] if problem.varlen else array[s.batch, head]
    return part


def _all(problem: QuantizeProblem, rows: int, cu_seqlens: Any) -> list[Sequence]:
    from omniattn.reference.quantize import sequences

    return sequences(problem, rows, None if cu_seqlens is None else np.asarray(cu_seqlens))


def dequantize_qk(qk: Any) -> tuple[Array, Array]:
    """Q and K as their integers and scales say, with the means that smoothing took away.

    Parameters
    ----------
    qk : QuantizedQK
        Arrays on the CPU.

    Returns
    -------
    q, k : ndarray, float32
        Heads first: (batch, heads, rows, head_dim), or (heads, rows, head_dim) for packed sequences, where rows of no
        sequence are 0.

    Notes
    -----
    Their products are the scores of attention on quantized operands, but for ``delta_s``, which uses K before its
    quantization.
    """
    problem, out = contents(qk)
    d = problem.head_dim
    results = []
    for is_q in (True, False):
        rows, heads = (problem.rows_q, problem.heads_q) if is_q else (problem.rows_k, problem.heads_kv)
        lead = (heads,) if problem.varlen else (problem.batch, heads)
        x = np.zeros((*lead, rows, d), dtype=_F)
        for s in _all(problem, rows, qk.cu_seqlens_q if is_q else qk.cu_seqlens_k):
            for head in range(heads):
                values = rows_of(out, problem, s, head, is_q=is_q).values
                if problem.hadamard:
                    values = rotate_back(values, problem.rotated_channels, problem.seed)[:, :d]
                if is_q and problem.smooth_q:
                    first = s.slot(BLOCK_ROWS, problem.varlen)
                    means = head_of(out["q_mean"], problem, s, head)[first:, :d]
                    values = values + means[np.arange(s.length) // BLOCK_ROWS]
                elif not is_q and problem.smooth_k:
                    values = values + out["k_mean"][s.batch, head, :d]
                head_of(x, problem, s, head)[s.begin : s.begin + s.length] = values
        results.append(x)
    return results[0], results[1]


def dequantize_v(v: Any) -> Array:
    """V as its bytes, scales and means say; shape as `dequantize_qk` gives k.

    Parameters
    ----------
    v : QuantizedV
        Arrays on the CPU.
    """
    problem, out = contents(v)
    lead = (problem.heads_kv,) if problem.varlen else (problem.batch, problem.heads_kv)
    x = np.zeros((*lead, problem.rows_k, problem.head_dim), dtype=_F)
    for s in _all(problem, problem.rows_k, v.cu_seqlens_k):
        for head in range(problem.heads_kv):
            values, scale, mean = values_of(out, problem, s, head)
            head_of(x, problem, s, head)[s.begin : s.begin + s.length] = values * scale + mean
    return x
