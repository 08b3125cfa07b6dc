"""Attention on quantized operands: the definition that the GPU kernels follow.

They round P against another base than the running maximum, and ``attn_int8_sm90`` divides O by sums of P as rounded,
not before; its LSE is of sums before rounding, as here. Where that kernel rounds P by its logarithm (plain calls of
int8: `Product.powers`), so does this, and divides by the same sums.

For a row i, key tile by key tile with a running maximum m:

    s_ij = scale (q_scale_i k_scale_j (q_int_i . k_int_j) + delta_s_ij [+ row_bias_i])
    p_ij = exp(s_ij - m);  l = sum p_ij;  o = v_scale sum e4m3(448 p_ij) v_j / (448 l) + v_mean sum p_ij / l

row_bias is a constant of its row: the softmax does not see it, but softcap, sinks and the LSE do.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.errors import ArgumentError
from omniattn.problems.precision import KNOBS, Fp8, Int4, Int8, Precision, check_choice, value_levels
from omniattn.problems.quantize import BLOCK_ROWS, QK_DTYPES, QuantizeProblem, row_bias_of
from omniattn.reference import checks
from omniattn.reference.ablation import FORMATS
from omniattn.reference.core import Array, Options, block_rows, key_range, outside_window
from omniattn.reference.dequantize import contents, head_of, rows_of, values_of
from omniattn.reference.e4m3 import E4M3_MAX, decode_e4m3, encode_by_logarithm, encode_e4m3
from omniattn.reference.quantize import Sequence, quantize, sequences
from omniattn.reference.varlen import check_cu_seqlens, check_max_seqlen

_NAME = "reference.low_precision.attention"
_F = np.float32
#: How the product of P and V is accumulated. Tensor cores that multiply 8-bit floats keep about 13 mantissa bits.
ACCUMULATORS = ("fp32", "two_level", "single_level", "fp16")
_STEP = 32  # keys of one tensor-core instruction on 8-bit operands
_STEP_FP16 = 16  # on fp16
_FP16_KEYS = 64  # whose products fp16 sums
#: What P is multiplied by where e4m3 products are summed in fp16: 64 times 28 times the 32 of V stay below 65504.
_P_LEVELS_FP16 = 28.0
#: Channels up to which the kernel has rows that round P by its logarithm.
_MOST_LOGARITHMS = 128
#: Up to these it does so where it may: `Int8.fast_exp`.
_MOST_LINEAR = 64
#: The least factor of V that P is rounded with.
_LEAST_FACTOR = 2.0**-90


@dataclass(frozen=True)
class Product:
    """How P V is computed.

    Attributes
    ----------
    pv : str
        "fp8", "fp16" or "exact", as in `omniattn.Int8`; or one of `ablation.FORMATS`, which no kernel has.
    key_tile : int
        Keys between two updates of the running maximum.
    accumulator : str
        "fp32": exact but for fp32 rounding. "two_level": 13 bits within a tile, fp32 across tiles, as the kernels do.
        "single_level": 13 bits throughout, to show why they do not. "fp16": fp16 over 64 keys, fp32 across them.
    fast_exp : bool
        `Int8`'s: `powers` becomes "linear" up to 64 channels, where it is "none" else.
    powers : str
        Which P become e4m3 by `encode_by_logarithm`, of rows that see all keys of the tile, but for the last tile:
        "none", "corrected" (all; no row has it), "half linear" (those of every second 16 keys) or "linear" (all).
        With one of these O is divided by sums of P as rounded. `attend` sets it, as ``attn_int8_sm90`` treats the call.
    """

    pv: str = "fp8"
    key_tile: int = 128
    accumulator: str = "fp32"
    fast_exp: bool = False
    powers: str = "none"


def truncate_to_13_bits(x: Array) -> Array:
    """Mantissas cut to 13 explicit bits, as the accumulators of 8-bit float products are."""
    bits = np.ascontiguousarray(x, dtype=_F).view(np.uint32) & np.uint32(0xFFFFFC00)
    return np.asarray(bits.view(_F))


def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    precision: Int8 | Int4 | Fp8 | Precision,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_k: npt.ArrayLike | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    grouping: str = "sm90",
    key_tile: int | None = None,
    accumulator: str = "fp32",
    pv: str | None = None,
) -> tuple[Array, Array]:
    """Quantize, then attend.

    Parameters
    ----------
    q, k, v : array_like, floating
        As in `omniattn.reference.attention`; packed, as in `attention_varlen`, when ``cu_seqlens_*`` are given.
    precision : Int8, Int4, Fp8 or Precision
    grouping : "sm90" or "sm80"
        Which GPU's groups of rows share scales.
    key_tile : int, optional
        Keys between two updates of the running maximum; by default the grouping's tile.
    accumulator : "fp32", "two_level" or "single_level"
        How the product of P and V keeps its sum; the last two are for studies, and for ``pv_accumulator="fp32"`` only.
    pv : "e5m2" or "int8", optional
        In place of ``precision.pv``: P and V in a format that no kernel has, summed in fp32.
    layout, causal, window, softmax_scale, softcap, mask, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in `omniattn.reference.attention` and `attention_varlen`.

    Returns
    -------
    o : ndarray, float32
        Shape and layout of q, with the head_dim of v.
    lse : ndarray, float32
        (batch, heads_q, seqlen_q), packed (heads_q, total_q); natural logarithm.
    """
    checks.check_layout(layout, _NAME)
    if isinstance(precision, KNOBS):
        precision = precision.precision
    if not isinstance(precision, Precision) or not precision.quantized:
        raise ArgumentError("precision", "an Int8, Int4 or Fp8", repr(precision), function=_NAME)
    precision = precision.on_cpu
    # Sums in fp16 change the levels of P and V as well, so that precision alone asks for them.
    check_choice(accumulator, "accumulator", tuple(name for name in ACCUMULATORS if name != "fp16"), _NAME)
    if precision.pv_accumulator == "fp16":
        if accumulator != "fp32":
            raise ArgumentError("accumulator", "'fp32' with pv_accumulator='fp16'", repr(accumulator), function=_NAME)
        accumulator = "fp16"
    if pv is None:
        pv = precision.pv
    else:
        check_choice(pv, "pv", tuple(FORMATS), _NAME)
        if accumulator != "fp32":
            raise ArgumentError("accumulator", f"'fp32' with pv={pv!r}", repr(accumulator), function=_NAME)
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    ndim, is_nhd = 3 if varlen else 4, layout == "NHD"
    qh, kh, vh = (checks.heads_first(x, name, _NAME, ndim, is_nhd) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    checks.check_heads(qh, kh, vh, _NAME)
    starts_q = starts_k = None
    if varlen:
        starts_q = np.array(check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", qh.shape[1]))
        starts_k = np.array(check_cu_seqlens(cu_seqlens_k, "cu_seqlens_k", kh.shape[1]))
    batch = qh.shape[0] if starts_k is None else len(starts_k) - 1
    longest = kh.shape[-2] if starts_k is None else int(np.diff(starts_k).max(initial=0))
    # Zeros behind the narrower of both change nothing: scores, and scales, which are those of other channels.
    head_dim, head_dim_v = qh.shape[-1], vh.shape[-1]
    qh, kh, vh = (widened(x, max(head_dim, head_dim_v)) for x in (qh, kh, vh))
    problem = QuantizeProblem(
        "float32", batch, qh.shape[-2], kh.shape[-2], qh.shape[-3], kh.shape[-3], qh.shape[-1], varlen,
        QK_DTYPES[precision.qk], precision.granularity, grouping, precision.smooth_q, precision.smooth_k,
        precision.smooth_v, row_bias_of(precision.qk == "fp8", precision.smooth_k, True),
        v=pv in ("fp8", "fp16"), v_dtype="float16" if pv == "fp16" else "float8_e4m3",
        max_seqlen_k=max(longest, max_seqlen_k or 0), v_levels=value_levels(pv, precision.pv_accumulator),
        hadamard=precision.hadamard, seed=precision.seed,
    )  # fmt: skip
    out = quantize(problem, qh, kh, vh, starts_q, starts_k)
    o, lse = attend(
        problem, out, None if problem.v else vh, starts_q, starts_k,
        options=checks.make_options(head_dim, causal, window, softmax_scale, softcap, _F, _NAME),
        product=Product(pv, key_tile or problem.key_tile, accumulator, precision.fast_exp),
        mask=mask, sinks=sinks, longest_q=max_seqlen_q, longest_k=max_seqlen_k,
    )  # fmt: skip
    o = o[..., :head_dim_v]
    return (np.ascontiguousarray(o.swapaxes(-3, -2)) if is_nhd else o), lse


def widened(x: Array, head_dim: int) -> Array:
    """Zeros behind the channels."""
    missing = head_dim - x.shape[-1]
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def attention_quantized(
    qk: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    key_tile: int | None = None,
    accumulator: str = "fp32",
) -> tuple[Array, Array]:
    """Attention of a `QuantizedQK` and a `QuantizedV` whose arrays are on the CPU.

    Returns
    -------
    o : ndarray, float32, (batch, heads_q, seqlen_q, head_dim), packed (heads_q, total_q, head_dim)
        Heads first.
    lse : ndarray, float32
        Without the part of ``row_bias`` unless ``qk`` was made ``with_bias``.
    """
    problem, out = contents(qk)
    of_v, values = contents(v)
    problem = dataclasses.replace(problem, v=True, v_dtype=of_v.v_dtype, smooth_v=of_v.smooth_v)
    options = checks.make_options(problem.head_dim, causal, window, softmax_scale, softcap, _F, _NAME)
    starts = [None if x is None else np.asarray(x) for x in (qk.cu_seqlens_q, qk.cu_seqlens_k)]
    product = Product("fp16" if of_v.v_dtype == "float16" else "fp8", key_tile or problem.key_tile, accumulator)
    return attend(
        problem, {**out, **values}, None, starts[0], starts[1], options=options, product=product, mask=mask, sinks=sinks
    )


def _extent(given: int | None, of: list[Sequence], argument: str) -> int:
    """Rows of the longest sequence, or what the caller says if no sequence is longer."""
    return check_max_seqlen(given, max((s.length for s in of), default=0), argument, _NAME)


def attend(
    problem: QuantizeProblem,
    out: dict[str, Array],
    exact_v: Array | None,
    starts_q: Array | None,
    starts_k: Array | None,
    *,
    options: Options,
    product: Product,
    mask: Any = None,
    sinks: Any = None,
    longest_q: int | None = None,
    longest_k: int | None = None,
    v_factor: Array | None = None,
) -> tuple[Array, Array]:
    """Attention from what `quantize` returns; ``exact_v``, heads first, takes the place of a v that `quantize` made.

    v_factor: what each 128 rows of v are to be multiplied by; shaped as ``k_scale`` with one scale a block.
    """
    check_choice(product.accumulator, "accumulator", ACCUMULATORS, _NAME)
    if mask is None and not options.softcap:
        product = dataclasses.replace(product, powers=_powers(problem, product))
    all_q, all_k = sequences(problem, problem.rows_q, starts_q), sequences(problem, problem.rows_k, starts_k)
    lead = (problem.heads_q,) if problem.varlen else (problem.batch, problem.heads_q)
    o = np.zeros((*lead, problem.rows_q, problem.head_dim), dtype=_F)
    lse = np.full((*lead, problem.rows_q), -np.inf, dtype=_F)
    rows, keys = problem.rows_q, problem.rows_k
    if problem.varlen:
        rows, keys = _extent(longest_q, all_q, "max_seqlen_q"), _extent(longest_k, all_k, "max_seqlen_k")
    full_mask = (
        None if mask is None else checks.broadcast_mask(mask, (problem.batch, problem.heads_q, rows, keys), _NAME)
    )
    logits = None if sinks is None else checks.check_sinks(sinks, problem.heads_q, _NAME)
    group = problem.heads_q // max(problem.heads_kv, 1)
    with np.errstate(all="ignore"):
        for of_q, of_k in zip(all_q, all_k, strict=True):
            span = slice(of_q.begin, of_q.begin + of_q.length)
            for head in range(problem.heads_q):
                head_mask = None if full_mask is None else full_mask[of_q.batch, head, : of_q.length, : of_k.length]
                sink = None if logits is None else _F(logits[head])
                operands = _operands(problem, out, exact_v, of_q, of_k, head, head // group, product.pv)
                if v_factor is not None:
                    block = of_k.slot(BLOCK_ROWS, problem.varlen) + np.arange(of_k.length) // BLOCK_ROWS
                    own = head_of(v_factor, problem, of_k, head // group)[block]
                    operands = dataclasses.replace(operands, v_factor=own)
                result = _attend_head(operands, head_mask, sink, options, product)
                head_of(o, problem, of_q, head)[span], head_of(lse, problem, of_q, head)[span] = result
    return o, lse


def _powers(problem: QuantizeProblem, product: Product) -> str:
    """Which P ``attn_int8_sm90`` makes of integers, of a call without masks and softcap: `Product.powers`."""
    plain = not (problem.varlen or problem.smooth_q) and problem.head_dim <= _MOST_LOGARITHMS
    is_int8 = problem.qk_dtype == QK_DTYPES["int8"] and problem.grouping == "sm90"
    if not (plain and is_int8 and product.pv == "fp8" and product.accumulator != "fp16"):
        return "none"
    if problem.head_dim > _MOST_LINEAR:
        return "half linear"
    return "linear" if product.fast_exp else "none"


@dataclass(frozen=True)
class _Operands:
    """One query head of one sequence and its keys."""

    q: Array
    q_scale: Array
    k: Array
    k_scale: Array
    bias: Array
    delta: Array | None
    v: Array
    v_scale: Array
    v_mean: Array
    v_factor: Array | None = None


def _operands(
    problem: QuantizeProblem,
    out: dict[str, Array],
    exact_v: Array | None,
    of_q: Sequence,
    of_k: Sequence,
    head: int,
    kv: int,
    pv: str,
) -> _Operands:
    q, k = (rows_of(out, problem, s, h, is_q=is_q) for s, h, is_q in ((of_q, head, True), (of_k, kv, False)))
    delta = None
    if problem.smooth_q:
        first = of_q.slot(BLOCK_ROWS, problem.varlen)
        delta = head_of(out["delta_s"], problem, of_q, head)[first:, : of_k.length]
    bias = np.zeros(of_q.length, dtype=_F)
    if "row_bias" in out:
        bias = head_of(out["row_bias"], problem, of_q, head)[of_q.begin : of_q.begin + of_q.length]
    if exact_v is not None:
        v = head_of(exact_v, problem, of_k, kv)[of_k.begin : of_k.begin + of_k.length].astype(_F)
        scale, mean = np.ones(problem.head_dim, dtype=_F), np.zeros(problem.head_dim, dtype=_F)
        if pv in FORMATS:
            v, scale, mean = FORMATS[pv].quantize_values(v, problem.smooth_v)
    else:
        v, scale, mean = values_of(out, problem, of_k, kv)
    return _Operands(q.integers, q.scale, k.integers, k.scale, bias, delta, v, scale, mean)


def _attend_head(
    x: _Operands, mask: Array | None, sink: Any, options: Options, product: Product
) -> tuple[Array, Array]:
    seqlen_q, seqlen_k = len(x.q), len(x.k)
    o, lse = np.zeros((seqlen_q, x.v.shape[1]), dtype=_F), np.full(seqlen_q, -np.inf, dtype=_F)
    step = max(BLOCK_ROWS, block_rows(seqlen_q, seqlen_k) // BLOCK_ROWS * BLOCK_ROWS)
    for begin in range(0, seqlen_q, step):
        end = min(begin + step, seqlen_q)
        lo, hi = key_range(begin, end, seqlen_q, seqlen_k, options)
        # Tiles count from key 0, as scales and kernels have them.
        lo = lo // product.key_tile * product.key_tile
        hidden = outside_window(begin, end, lo, hi, seqlen_q, seqlen_k, options)
        scores = x.q[begin:end] @ x.k[lo:hi].T
        scores *= x.q_scale[begin:end, None] * x.k_scale[None, lo:hi]
        if x.delta is not None:
            scores += x.delta[np.arange(begin, end) // BLOCK_ROWS, lo:hi]
        # A row's constant moves the scores only where something looks at their absolute size.
        absolute = options.softcap > 0 or sink is not None
        bias = x.bias[begin:end]
        if absolute:
            scores += bias[:, None]
        scores *= _F(options.softmax_scale)
        if options.softcap > 0:
            cap = _F(options.softcap)
            scores = np.tanh(scores / cap) * cap
        if mask is not None:
            part = mask[begin:end, lo:hi]
            off = ~part if part.dtype == np.bool_ else np.isneginf(part)
            if part.dtype != np.bool_:
                scores = scores + part.astype(_F)
            hidden = off if hidden is None else hidden | off
        if hidden is not None:
            scores[hidden] = -np.inf
        o[begin:end], lse[begin:end] = _softmax_times_v(scores, hidden, x, lo, hi, sink, product)
        if not absolute:
            lse[begin:end] += _F(options.softmax_scale) * np.where(np.isneginf(lse[begin:end]), _F(0), bias)
        bad = np.isnan(bias)
        sees = np.ones(end - begin, dtype=bool) if hidden is None else ~hidden.all(axis=1)
        o[begin:end][bad & sees & (hi > lo)] = np.nan
    return o, lse


def _softmax_times_v(
    scores: Array, hidden: Array | None, x: _Operands, lo: int, hi: int, sink: Any, product: Product
) -> tuple[Array, Array]:
    """Online softmax over tiles of keys, P rounded against the maximum of its time."""
    rows = len(scores)
    top = np.full(rows, -np.inf, dtype=_F)
    total, acc = np.zeros(rows, dtype=_F), np.zeros((rows, x.v.shape[1]), dtype=_F)
    as_rounded = np.zeros(rows, dtype=_F)
    for begin in range(lo, hi, product.key_tile):
        end = min(begin + product.key_tile, hi)
        tile = scores[:, begin - lo : end - lo]
        if x.v_factor is not None:
            tile = _with_factor(tile, x.v_factor[begin:end])
        new_top = np.maximum(top, tile.max(axis=1))
        shift = np.where(np.isneginf(new_top), _F(0), new_top)
        p = np.exp(tile - shift[:, None])
        rescale = np.exp(top - shift)
        part_hidden = None if hidden is None else hidden[:, begin - lo : end - lo]
        if x.v_factor is None:
            total = total * rescale + p.sum(axis=1, dtype=_F)
        else:
            shares = np.where(p == 0, p, p / _size(x.v_factor[begin:end]))
            total = total * rescale + shares.sum(axis=1, dtype=_F)
            p = np.where(p == 0, p, p * np.sign(x.v_factor[begin:end]))
        if product.powers != "none":
            p = _rounded(p, part_hidden, product.powers, last=end == hi)
            as_rounded = as_rounded * rescale + p.sum(axis=1, dtype=_F)
        acc = _accumulate(acc * rescale[:, None], p, x.v[begin:end], part_hidden, product)
        top = new_top
    shift = np.where(np.isneginf(top), _F(0), top)
    weights = total if product.powers == "none" else as_rounded  # what O is divided by
    denominator, of_o = total, weights
    if sink is not None:
        # The sink may exceed every score.
        larger = np.maximum(shift, sink)
        larger = np.where(np.isneginf(top), sink, larger)
        factor = np.exp(shift - larger)
        of_sink = np.exp(sink - larger)
        denominator, of_o = total * factor + of_sink, weights * factor + of_sink
        weights, acc, shift = weights * factor, acc * factor[:, None], larger
    lse = np.where(denominator == 0, -np.inf, shift + np.log(denominator)).astype(_F)
    safe = np.where(of_o == 0, _F(1), of_o)[:, None]
    # The mean of V counts with the weight that all keys have together: less than 1 when there is a sink.
    o = acc / safe * x.v_scale + x.v_mean * (weights[:, None] / safe)
    o[denominator == 0] = 0
    return o, lse


def _rounded(p: Array, hidden: Array | None, powers: str, last: bool) -> Array:
    """P of a tile, in [0, 1], to e4m3 as `Product.powers` has it, in the scale that it came in."""
    scaled = p * _F(E4M3_MAX)
    nearest, by_logarithm = encode_e4m3(scaled), encode_by_logarithm(scaled, "linear" in powers)
    chosen = np.full(len(p), not last)
    if hidden is not None:
        chosen &= ~hidden.any(axis=1)
    of_keys = np.arange(p.shape[1]) // 16 % 2 == 1 if powers == "half linear" else np.ones(p.shape[1], dtype=bool)
    codes = np.where(chosen[:, None] & of_keys, by_logarithm, nearest)
    return np.asarray(decode_e4m3(codes) * _F(1 / E4M3_MAX), dtype=_F)


def _size(factor: Array) -> Array:
    """Absolute values of factors of V, as many as the exponents of P have room for."""
    return np.asarray(np.maximum(np.abs(factor), _LEAST_FACTOR), dtype=_F)


def _with_factor(scores: Array, factor: Array) -> Array:
    """Scores whose exponentials have V's factor in them: P is rounded with it, against the largest of such products."""
    return np.asarray(np.where(np.isneginf(scores), scores, scores + np.log(_size(factor))), dtype=_F)


def _accumulate(acc: Array, p: Array, v: Array, hidden: Array | None, product: Product) -> Array:
    """acc + P V with P rounded as the product wants it, in the scale of p."""
    unscale = _F(1)
    if product.pv == "fp8":
        levels = _P_LEVELS_FP16 if product.accumulator == "fp16" else E4M3_MAX
        p = np.where(np.isnan(p), _F(np.nan), decode_e4m3(encode_e4m3(p * _F(levels))))
        unscale = _F(1 / levels)
    elif product.pv == "fp16":
        p = p.astype(np.float16).astype(_F)
    elif product.pv in FORMATS:
        p, unscale = FORMATS[product.pv].round_probabilities(p), _F(1 / FORMATS[product.pv].levels)
    finite = np.isfinite(v)
    poison = None
    if not finite.all():
        # A key that a row does not see adds nothing, whatever its value is.
        seen = np.ones(p.shape, dtype=_F) if hidden is None else (~hidden).astype(_F)
        poison = seen @ (~finite).astype(_F) > 0
        v = np.where(finite, v, _F(0))
    if product.accumulator == "fp32":
        result = acc + (p @ v) * unscale
    elif product.accumulator == "fp16":
        step = _STEP_FP16 if product.pv == "fp16" else _STEP
        result = acc
        for first in range(0, len(v), _FP16_KEYS):
            half = np.zeros(acc.shape, dtype=np.float16)
            for begin in range(first, min(first + _FP16_KEYS, len(v)), step):
                half = (half + p[:, begin : begin + step] @ v[begin : begin + step]).astype(np.float16)
            result = result + half.astype(_F) * unscale
    else:
        single = product.accumulator == "single_level"
        part = truncate_to_13_bits(acc / unscale) if single else np.zeros_like(acc)
        for begin in range(0, len(v), _STEP):
            part = truncate_to_13_bits(part + p[:, begin : begin + _STEP] @ v[begin : begin + _STEP])
        result = part * unscale if single else acc + part * unscale
    if poison is not None:
        result = np.where(poison, _F(np.nan), result)
    return np.asarray(result, dtype=_F)
