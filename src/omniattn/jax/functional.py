"""``dot_product_attention``: ``jax.nn.dot_product_attention`` on this package's kernels."""

from __future__ import annotations

import operator
from typing import Any

import jax
from jax import numpy as jnp

from .. import arguments, ops
from ..errors import ArgumentError, DtypeError, ShapeError, UnsupportedError, told_of
from ..problems import Auto, Fp8, Int4, Int8

_NAME = "dot_product_attention"
_IMPLEMENTATIONS = ("omniattn", "xla", "cudnn")
#: What it calls arguments of `attention`.
_ARGUMENTS = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    precision: str | Int8 | Int4 | Fp8 | Auto = "exact",
) -> Any:
    """``jax.nn.dot_product_attention`` with its arguments, defaults and results.

    ::

        S = scale * query @ key.T + bias;   o = softmax(S where mask) @ value

    Parameters
    ----------
    query : array, (batch, T, num_q_heads, head_dim) or (T, num_q_heads, head_dim)
        float16 or bfloat16, on the CPU float32 and float64 too; head_dim a multiple of 8 from 8 to 512. Arrays of JAX
        or NumPy, traced or not.
    key, value : array, (batch, S, num_kv_heads, head_dim) or (S, num_kv_heads, head_dim)
        num_kv_heads divides num_q_heads.
    bias : array, optional
        Added to the scores; floating, broadcastable to (batch, num_q_heads, T, S). It is differentiated.
    mask : array, bool, optional
        True: visible. Broadcastable to (batch, num_q_heads, T, S).
    scale : float, optional
        1 / sqrt(head_dim) unless given.
    is_causal : bool
        Query i sees the keys j <= i: aligned at the top left, whatever T and S are.
    query_seq_lengths, key_value_seq_lengths : array, (batch,), int32, optional
        Rows of o from a sequence's own length on are 0, and keys from it on are hidden.
    local_window_size : int or (left, right), optional
        Query i sees the keys i - left to i + right; one number is both.
    implementation : "omniattn", "xla" or "cudnn", optional
        "omniattn" unless given. The others are those of ``jax.nn.dot_product_attention``, which is called then.
    return_residual : bool
        Also return the log-sum-exp.
    precision : str, Int8, Int4, Fp8 or Auto
        As in `omniattn.attention`.

    Returns
    -------
    o : array
        Query's shape and dtype. A row that sees no key is 0 (JAX's own: the mean of all values).
    residual : array, (batch, T, num_q_heads) or (T, num_q_heads), o's dtype
        Only with ``return_residual``: the natural log-sum-exp, without a gradient, as JAX's own is. A row that sees no
        key has -inf.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `omniattn.attention`.

    Notes
    -----
    GPUs: compute capability 8.0 and newer; on the CPU NumPy computes. Masks that are the same for all queries, those of
    key_value_seq_lengths too, are packed to bits before the kernel.
    """
    if implementation is not None and str(implementation) not in _IMPLEMENTATIONS:  # str: an array is equal to none
        expected = "None, 'omniattn', 'xla' or 'cudnn'"
        raise ArgumentError("implementation", expected, repr(implementation), function=_NAME)
    if implementation in ("xla", "cudnn"):
        if precision != "exact":
            expected = f"'exact' with implementation={implementation!r}"
            raise ArgumentError("precision", expected, repr(precision), function=_NAME)
        more = {"return_residual": True} if return_residual else {}  # not in JAX 0.7
        return jax.nn.dot_product_attention(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
            implementation=implementation, **more,
        )  # fmt: skip
    is_causal = arguments.check_bool(is_causal, "is_causal", _NAME)
    return_residual = arguments.check_bool(return_residual, "return_residual", _NAME)
    q, k, v = (_rows(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    shape = jnp.shape(query)
    rows, keys = q.shape[1], k.shape[1]
    left, right = _window(local_window_size)
    if is_causal:
        right = 0
    # Windows of this package are aligned at the end of the sequences: queries and keys that see nothing, or that nobody
    # sees, are cut off until the two ends have the distance that a window can express.
    seen = keys if right is None else min(keys, rows + right)
    seeing = rows if left is None else min(rows, seen + left)
    shift = seen - seeing
    window = (-1 if left is None else left + shift, -1 if right is None else right - shift)
    scores = (q.shape[0], q.shape[2], rows, keys)
    visible = _visible(mask, key_value_seq_lengths, scores, seeing, seen)
    added = _with_bias(bias, visible, q.dtype, scores, seeing, seen)
    try:
        results = ops.attention(
            q[:, :seeing], k[:, :seen], v[:, :seen], window=None if window == (-1, -1) else window,
            softmax_scale=scale, mask=added, precision=precision, return_lse=return_residual,
        )  # fmt: skip
    except (ArgumentError, UnsupportedError) as error:
        raise told_of(error, _NAME, _ARGUMENTS) from None
    o = results[0] if return_residual else results
    if seeing < rows:
        o = jnp.pad(o, ((0, 0), (0, rows - seeing), (0, 0), (0, 0)))
    if query_seq_lengths is not None:
        lengths = _lengths(query_seq_lengths, "query_seq_lengths", q.shape[0])
        o = jnp.where(jnp.arange(rows)[:, None, None] < lengths[:, None, None, None], o, 0)
    o = o.reshape(*shape[:-1], o.shape[-1])
    if not return_residual:
        return o
    lse = jnp.pad(results[1], ((0, 0), (0, 0), (0, rows - seeing)), constant_values=-jnp.inf)
    residual = jnp.transpose(lse, (0, 2, 1)).astype(o.dtype).reshape(shape[:-1])
    return o, jax.lax.stop_gradient(residual)


def _array(x: Any, name: str) -> Any:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise ArgumentError(name, "an array", type(x).__name__, function=_NAME) from None


def _rows(x: Any, name: str) -> Any:
    """An operand with its batch."""
    x = _array(x, name)
    if x.ndim not in (3, 4):
        expected = "4 dimensions (batch, seq, heads, head_dim), or 3 without the batch"
        raise ShapeError(name, expected, f"shape {tuple(x.shape)}", function=_NAME)
    return x if x.ndim == 4 else x[None]


def _window(size: Any) -> tuple[int | None, int | None]:
    """Keys that are visible left and right of the diagonal; None for all."""
    if size is None:
        return None, None
    expected = "None, an integer >= 0, or two of them (left, right)"
    pair = size if isinstance(size, (tuple, list)) else (size, size)
    try:
        numbers = [operator.index(x) for x in pair]
    except TypeError:
        raise ArgumentError("local_window_size", expected, repr(size), function=_NAME) from None
    if len(numbers) != 2 or min(numbers) < 0 or any(isinstance(x, bool) for x in pair):
        raise ArgumentError("local_window_size", expected, repr(size), function=_NAME)
    return numbers[0], numbers[1]


def _lengths(lengths: Any, name: str, batch: int) -> Any:
    lengths = _array(lengths, name)
    if lengths.dtype != jnp.int32:
        raise DtypeError(name, "int32", str(lengths.dtype), function=_NAME)
    if lengths.shape != (batch,):
        raise ShapeError(name, f"shape ({batch},)", f"{tuple(lengths.shape)}", function=_NAME)
    return lengths


def _broadcastable(x: Any, name: str, scores: tuple[int, ...], seeing: int, seen: int) -> Any:
    """A mask or bias in four dimensions, cut to the queries and keys that are looked at."""
    x = _array(x, name)
    if x.ndim > 4:
        raise ShapeError(name, "at most 4 dimensions", f"shape {tuple(x.shape)}", function=_NAME)
    own = tuple(x.shape)
    x = x.reshape((1,) * (4 - x.ndim) + own)
    if any(n not in (1, of_scores) for n, of_scores in zip(x.shape, scores, strict=True)):
        expected = f"a shape that broadcasts to (batch, num_q_heads, T, S) = {scores}"
        raise ShapeError(name, expected, f"{own}", function=_NAME)
    if x.shape[2] > 1:
        x = x[:, :, :seeing]
    return x[..., :seen] if x.shape[3] > 1 else x


def _visible(mask: Any, lengths: Any, scores: tuple[int, ...], seeing: int, seen: int) -> Any:
    """Which keys are visible: the mask and the lengths together; None for all."""
    visible = None
    if mask is not None:
        visible = _broadcastable(mask, "mask", scores, seeing, seen)
        if visible.dtype != jnp.bool_:
            raise DtypeError("mask", "bool (True: visible); bias= is added", str(visible.dtype), function=_NAME)
    if lengths is not None:
        lengths = _lengths(lengths, "key_value_seq_lengths", scores[0])
        there = jnp.arange(seen) < lengths[:, None, None, None]
        visible = there if visible is None else visible & there
    return visible


def _with_bias(bias: Any, visible: Any, dtype: Any, scores: tuple[int, ...], seeing: int, seen: int) -> Any:
    """The mask of `omniattn.attention`: bool, or the bias with -inf where nothing is visible."""
    if bias is None:
        return visible
    bias = _broadcastable(bias, "bias", scores, seeing, seen)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise DtypeError("bias", "a floating type; mask= takes booleans", str(bias.dtype), function=_NAME)
    if bias.dtype not in (dtype, jnp.float32):
        bias = bias.astype(jnp.float32)
    return bias if visible is None else jnp.where(visible, bias, jnp.asarray(-jnp.inf, bias.dtype))
