"""Quantization of Q, K and V in NumPy: the kernels' bits (``row_bias`` and ``delta_s``: the same up to rounding).

Every sum is taken in the order of ``kernels_cu/quantize/reduce.cuh``. Formats: docs/quantization.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.problems.quantize import (
    BLOCK_ROWS,
    CHUNK_ROWS,
    QUERY_SLICES,
    QuantizeProblem,
    chunk_rows,
    num_chunks,
    num_samples,
    sample_log2,
)
from omniattn.reference.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3
from omniattn.reference.rotation import rotate

Array = npt.NDArray[Any]

_F = np.float32
_SUM_SCALE, _SUM_UNSCALE = _F(2.0**-32), _F(2.0**32)
#: A group whose largest magnitude is below this has scale 1 and becomes zeros.
LEAST_AMAX = _F(2.0**-100)
#: A channel of V keeps its mean below 1 / MEAN_COUNTS of its range (docs/quantization.md says why).
MEAN_COUNTS = _F(16)
#: Sums of what rounding takes away from V, which is stored as v / v_scale, are kept in 1 / ERROR_UNITS of that.
ERROR_UNITS = _F(256)
#: Position p of 16 keys of the transposed V holds this key.
KEY_ORDER = np.array([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])


@dataclass(frozen=True)
class Sequence:
    """Rows of one sequence in a tensor (batch entry of a dense one)."""

    batch: int
    begin: int
    length: int

    def slot(self, of: int, varlen: bool) -> int:
        """First block of ``of`` rows in arrays that are laid out by blocks."""
        return -(-self.begin // of) + self.batch if varlen else 0


def sequences(problem: QuantizeProblem, rows: int, cu_seqlens: Array | None) -> list[Sequence]:
    """All sequences; lengths that do not fit into the tensor are clamped to it, as on the GPU."""
    if cu_seqlens is None:
        return [Sequence(b, 0, rows) for b in range(problem.batch)]
    found = []
    for b in range(problem.batch):
        begin = min(max(int(cu_seqlens[b]), 0), rows)
        found.append(Sequence(b, begin, min(max(int(cu_seqlens[b + 1]), begin), rows) - begin))
    return found


def tree_sum(rows: Array) -> Array:
    """Sum over axis 0 in the kernels' order: row r in lane r % 32, lanes in a binary tree."""
    steps = max(-(-len(rows) // 32), 1)
    padded = np.zeros((steps * 32, *rows.shape[1:]), dtype=_F)
    padded[: len(rows)] = rows
    lanes = np.zeros((32, *rows.shape[1:]), dtype=_F)
    for step in padded.reshape(steps, 32, *rows.shape[1:]):
        lanes = lanes + step
    half = 16
    while half:
        lanes = lanes[:half] + lanes[half : 2 * half]
        half //= 2
    return np.asarray(lanes[0])


def scaled_sum(rows: Array) -> Array:
    """`tree_sum` times 2^-32; channels whose sum is not finite again, finite values only, each times 2^-32."""
    plain = tree_sum(rows)
    careful = tree_sum(np.where(np.isfinite(rows), rows, _F(0)) * _SUM_SCALE)
    return np.where(np.isfinite(plain), plain * _SUM_SCALE, careful)


def sampled(rows: Array) -> Array:
    """The keys of one head that means and ranges are taken of: one of each 2^n neighbours, following no period."""
    log2 = sample_log2(len(rows))
    i = np.arange(num_samples(len(rows)))
    return np.asarray(rows[(i << log2) + ((i * 0x9E3779B1 & 0xFFFFFFFF) >> 16 & (1 << log2) - 1)])


def channel_mean(rows: Array) -> Array:
    """Sum of the finite values over the number of all rows, (rows, dim) to (dim,); `sampled` rows of one head."""
    if len(rows) == 0:
        return np.zeros(rows.shape[1:], dtype=_F)
    size = chunk_rows(len(rows))
    total = np.zeros(rows.shape[1:], dtype=_F)
    for c in range(num_chunks(len(rows))):
        total = total + scaled_sum(rows[c * size : (c + 1) * size])
    return np.asarray(total / _F(len(rows)) * _SUM_UNSCALE)


def groups_of(rows: int, problem: QuantizeProblem, *, is_q: bool) -> tuple[Array, Array]:
    """Group (of one scale) and slot (where it is stored, counted from the sequence's first) of each row."""
    row = np.arange(rows)
    granularity = problem.granularity
    tile = BLOCK_ROWS if is_q else problem.key_tile
    if granularity == "per_token":
        return row, row
    if problem.e4m3:
        return row // tile if granularity == "per_block" else np.zeros_like(row), row // tile
    if is_q:
        slice_rows = QUERY_SLICES[problem.grouping]
        slot = row // slice_rows * 8 + (row & 7)
    else:
        slice_rows = tile
        slot = row // tile * 4 + (row & 7) // 2
    group = {
        "per_thread": slot,
        "per_warp": row // slice_rows,
        "per_block": row // tile,
        "per_tensor": np.zeros_like(row),
    }[granularity]
    return group, slot


def slots_per_tile(problem: QuantizeProblem, *, is_q: bool) -> int:
    """Scales that a block of queries or a tile of keys has."""
    return problem.scales_per_tile[0 if is_q else 1]


def quantize_rows(t: Array, problem: QuantizeProblem, *, is_q: bool) -> tuple[Array, Array, Array]:
    """Rows of one head as they are to be rounded: (integers or e4m3 bytes, scales of all slots, bad rows)."""
    rows = len(t)
    most = E4M3_MAX if problem.e4m3 else 127 if problem.bits == 8 else 7
    bad: Array = np.logical_not(np.isfinite(t).all(axis=1))
    row_amax = np.where(bad, _F(0), np.abs(t).max(axis=1, initial=0)).astype(_F)
    tile = BLOCK_ROWS if is_q else problem.key_tile
    padded = -(-rows // tile) * tile
    group, slot = groups_of(padded, problem, is_q=is_q)
    amax = np.zeros(padded, dtype=_F)  # at most one group a row
    np.maximum.at(amax, group[:rows], row_amax)
    scale = np.where(amax >= LEAST_AMAX, amax / _F(most), _F(1)).astype(_F)
    inverse = (_F(1) / scale)[group[:rows]]
    scales = np.ones(padded // tile * slots_per_tile(problem, is_q=is_q), dtype=_F)
    scales[slot] = scale[group]
    if problem.e4m3:
        scaled = np.where(t == 0, _F(0), t * inverse[:, None])  # a zero is positive
        return np.where(bad[:, None], np.uint8(0x7F), encode_e4m3(scaled)), scales, bad
    # A fused multiply-add to 1.5 * 2^23 rounds the exact product once; so does float64, which holds it exactly.
    integers = np.rint(np.where(bad[:, None], 0, t).astype(np.float64) * inverse[:, None].astype(np.float64))
    if not is_q:
        scales[slot[:rows][bad]] = np.nan
    return integers.astype(np.int8), scales, bad


def pack_int4(integers: Array) -> npt.NDArray[np.uint8]:
    """Two's complement nibbles: element 2j in the low half of byte j."""
    nibbles = integers.astype(np.uint8) & np.uint8(15)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << np.uint8(4)


def unpack_int4(packed: Array) -> npt.NDArray[np.int8]:
    """The inverse of `pack_int4`."""
    both = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    signed = (both ^ np.uint8(8)).astype(np.int8) - np.int8(8)
    return signed.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _empty(problem: QuantizeProblem) -> dict[str, Array]:
    """Outputs as they are where nothing belongs: zeros, scales 1."""
    return {
        name: np.full(shape, 1 if "scale" in name else 0, dtype=dtype)
        for name, (shape, dtype) in problem.shapes().items()
    }


def quantize(
    problem: QuantizeProblem,
    q: Array | None,
    k: Array | None,
    v: Array | None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    k_mean: Array | None = None,
) -> dict[str, Array]:
    """What the kernels write, by name.

    Parameters
    ----------
    problem : QuantizeProblem
        The same that describes a launch.
    q, k, v : ndarray or None
        Heads first: (batch, heads, rows, head_dim), or (heads, rows, head_dim) for packed sequences.
    cu_seqlens_q, cu_seqlens_k : ndarray, optional
    k_mean : ndarray, optional
        (batch, heads of K, channels): what is taken away where `QuantizeProblem.given_mean` says so.

    Returns
    -------
    dict of ndarray
        Names and shapes of `QuantizeProblem.shapes`. Rows and slots that belong to no sequence are zeros (scales 1).
    """
    out = _empty(problem)
    with np.errstate(all="ignore"):
        all_k = sequences(problem, problem.rows_k, cu_seqlens_k)
        if problem.qk:
            assert q is not None
            assert k is not None
            all_q = sequences(problem, problem.rows_q, cu_seqlens_q)
            for of_q, of_k in zip(all_q, all_k, strict=True):
                for head in range(problem.heads_kv):
                    _quantize_qk_head(problem, q, k, of_q, of_k, head, out, k_mean)
        if problem.v:
            assert v is not None
            for of_k in all_k:
                for head in range(problem.heads_kv):
                    _quantize_v_head(problem, v, of_k, head, out)
    return out


def _rows(x: Array, problem: QuantizeProblem, s: Sequence, head: int) -> Array:
    """Rows of one head of one sequence as float32."""
    rows = x[head, s.begin : s.begin + s.length] if problem.varlen else x[s.batch, head]
    return np.asarray(rows, dtype=_F)


def _at(array: Array, problem: QuantizeProblem, s: Sequence, head: int) -> Array:
    """The part of an output that belongs to one head (of one batch entry, unless packed)."""
    part: Array = array[head] if problem.varlen else array[s.batch, head]
    return part


def _quantize_qk_head(
    problem: QuantizeProblem,
    q: Array,
    k: Array,
    of_q: Sequence,
    of_k: Sequence,
    head: int,
    out: dict[str, Array],
    k_mean: Array | None,
) -> None:
    varlen, d = problem.varlen, problem.head_dim
    keys = _rows(k, problem, of_k, head)
    mean = np.zeros(d, dtype=_F)
    if problem.given_mean:
        assert k_mean is not None
        mean = k_mean[of_k.batch, head, :d]
    elif problem.smooth_k:
        mean = channel_mean(sampled(keys))
        out["k_mean"][of_k.batch, head, :d] = mean
    smooth_keys = keys - mean
    _store_rows(problem, smooth_keys, of_k, head, out, is_q=False)

    group = problem.heads_q // problem.heads_kv
    for head_q in range(head * group, (head + 1) * group):
        queries = _rows(q, problem, of_q, head_q)
        t = queries
        if problem.smooth_q:
            blocks = -(-of_q.length // BLOCK_ROWS)
            parts = [queries[i * BLOCK_ROWS : (i + 1) * BLOCK_ROWS] for i in range(blocks)]
            means = np.zeros((blocks, d), dtype=_F)
            for i, part in enumerate(parts):
                means[i] = scaled_sum(part) / _F(len(part)) * _SUM_UNSCALE
            if blocks:
                t = np.concatenate([part - m for part, m in zip(parts, means, strict=True)])
            first = of_q.slot(BLOCK_ROWS, varlen)
            _at(out["q_mean"], problem, of_q, head_q)[first : first + blocks, :d] = means
            columns = min(of_k.length, problem.delta_columns)
            delta = means.astype(np.float64) @ smooth_keys[:columns].astype(np.float64).T
            delta[:, ~np.isfinite(smooth_keys[:columns]).all(axis=1)] = np.nan
            _at(out["delta_s"], problem, of_q, head_q)[first : first + blocks, :columns] = delta
        bad = _store_rows(problem, t, of_q, head_q, out, is_q=True)
        if problem.row_bias != "none":
            bias = np.zeros(of_q.length, dtype=_F)
            if problem.row_bias == "full" and problem.smooth_k:
                bias = (queries.astype(np.float64) @ mean.astype(np.float64)).astype(_F)
            bias[bad] = np.nan
            _at(out["row_bias"], problem, of_q, head_q)[of_q.begin : of_q.begin + of_q.length] = bias


def _store_rows(
    problem: QuantizeProblem, t: Array, s: Sequence, head: int, out: dict[str, Array], *, is_q: bool
) -> Array:
    padded = np.zeros((len(t), problem.head_dim_pad), dtype=_F)
    padded[:, : problem.head_dim] = t
    if problem.hadamard:
        padded = rotate(padded, problem.rotated_channels, problem.seed)
    codes, scales, bad = quantize_rows(padded, problem, is_q=is_q)
    name = "q" if is_q else "k"
    target = _at(out[name + "_int"], problem, s, head)
    target[s.begin : s.begin + s.length] = codes if problem.stored_bits == 8 else pack_int4(codes)
    tile = BLOCK_ROWS if is_q else problem.key_tile
    first = s.slot(tile, problem.varlen) * slots_per_tile(problem, is_q=is_q)
    _at(out[name + "_scale"], problem, s, head)[first : first + len(scales)] = scales
    return bad


def value_range(
    values: Array, smooth: bool, half: bool, levels: float = E4M3_MAX, *, every_key: bool = False
) -> tuple[Array, Array]:
    """(mean, scale) of the channels of one head; levels: what the largest magnitude becomes in e4m3.

    Both are of a sample of the keys (unless ``every_key``), the scale with headroom; a channel that it is too small for
    has one of all its keys.
    """
    sample = values if every_key else sampled(values)
    finite = np.isfinite(sample)
    mean = channel_mean(sample) if smooth else np.zeros(values.shape[1], dtype=_F)
    most = np.where(finite, sample, -np.inf).max(axis=0, initial=-np.inf).astype(_F)
    least = np.where(finite, sample, np.inf).min(axis=0, initial=np.inf).astype(_F)
    real = most >= least
    mean = np.where(real, mean, _F(0))
    with np.errstate(over="ignore", invalid="ignore"):
        counts = np.abs(mean) * MEAN_COUNTS > np.maximum(most - mean, mean - least)
        mean = np.where(counts, mean, _F(0))
        amax = np.where(real, np.maximum(most - mean, mean - least), _F(0)).astype(_F)
        if len(sample) == len(values):
            return mean, _value_scale(amax, half, levels)
        headroom = _F(4) if not half and levels < E4M3_MAX else _F(16)
        scale = _value_scale(np.maximum(amax, LEAST_AMAX) * headroom, half, levels)
        magnitudes = np.abs(values - mean)
        largest = np.where(np.isfinite(magnitudes), magnitudes, _F(0)).max(axis=0)
        stored = largest * (_F(1) / scale)
        over = stored.astype(np.float16) >= 256 if half else encode_e4m3(stored) >= encode_e4m3(np.array([levels], _F))
    return mean, np.where(over, _value_scale(largest, half, levels), scale)


def _value_scale(amax: Array, half: bool, levels: float) -> Array:
    """Scale of a channel of V of which nothing exceeds ``amax``; fp16: a power of two."""
    amax = np.minimum(amax, np.finfo(_F).max)
    if half:
        scale = ((amax.view(np.uint32) & np.uint32(0x7F800000)) - np.uint32(7 << 23)).view(_F)
    else:
        scale = amax / _F(levels)
    return np.where(amax >= LEAST_AMAX, scale, _F(1)).astype(_F)


def rounding_error(y: Array, codes: Array) -> Array:
    """Sum over the keys of y - e4m3(y), (keys, dim) to (dim,): the kernels' fp16 sums of 8 keys, added as integers."""
    rows = -(-len(y) // BLOCK_ROWS) * BLOCK_ROWS
    errors = np.zeros((rows, y.shape[1]), dtype=np.float16)
    errors[: len(y)] = y.astype(np.float16) - decode_e4m3(codes).astype(np.float16)
    # A thread has the words w and w + 16 of a tile of 32; word w has 4 keys, a key's parity is its half of a register.
    # Axes: tile, word / 16, word / 4 % 4, key / 8 % 2, word % 4, key % 2.
    tiles = errors.reshape(-1, 2, 4, 2, 4, 2, y.shape[1])
    of_word = tiles[:, :, :, 0] + tiles[:, :, :, 1]
    of_thread = (of_word[:, 0] + of_word[:, 1]).astype(_F)
    of_thread[~np.isfinite(of_thread)] = 0
    units = np.rint((of_thread[:, :, :, 0] + of_thread[:, :, :, 1]) * ERROR_UNITS)
    return np.asarray(units.astype(np.int64).sum(axis=(0, 1, 2)))


def _quantize_v_head(problem: QuantizeProblem, v: Array, s: Sequence, head: int, out: dict[str, Array]) -> None:
    values, d = _rows(v, problem, s, head), problem.head_dim
    half = problem.v_dtype == "float16"
    mean, scale = value_range(values, problem.smooth_v, half, problem.v_levels)
    out["v_mean"][s.batch, head, :d] = mean
    out["v_scale"][s.batch, head, :d] = scale
    y = (values - mean) * (_F(1) / scale) if problem.smooth_v else values * (_F(1) / scale)
    target = _at(out["v"], problem, s, head)
    if half:
        target[s.begin : s.begin + s.length, :d] = y.astype(np.float16)
        return
    tiles = -(-s.length // BLOCK_ROWS)
    codes = np.zeros((d, tiles * BLOCK_ROWS), dtype=np.uint8)
    codes[:, : s.length] = encode_e4m3(y).T
    if problem.smooth_v and s.length:
        error = rounding_error(y, codes[:, : s.length].T).astype(_F) * (_F(1) / ERROR_UNITS)
        out["v_mean"][s.batch, head, :d] = mean + error / _F(s.length) * scale
    permuted = codes.reshape(d, -1, 16)[:, :, KEY_ORDER].reshape(d, -1)
    first = s.slot(BLOCK_ROWS, problem.varlen) * BLOCK_ROWS
    target[:d, first : first + tiles * BLOCK_ROWS] = permuted


__all__ = ["BLOCK_ROWS", "CHUNK_ROWS", "KEY_ORDER", "Sequence", "pack_int4", "quantize", "sequences", "unpack_int4"]
