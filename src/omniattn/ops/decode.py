"""``decode``: attention of one or a few new tokens of each sequence over its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import arguments, arrays
from .arrays import Tensor
from .cache import KVCache
from .cache_arguments import (
    check_cache,
    check_int32,
    check_slots,
    check_table,
    check_values,
    host_slots,
    host_table,
)
from .errors import ArgumentError, DtypeError, ShapeError
from .kv_format import KV_ARRAY_DTYPES
from .runtime.driver import on_reset

_NAME = "decode"
_MAX_PLANS = 1024
#: New tokens of a sequence at most; longer ones are prompts.
MAX_Q_LEN = 16
_plans: dict[Any, _Plan] = {}
# A plan holds loaded kernels, which are worth nothing under another driver or in a forked child.
on_reset(_plans.clear)


@dataclass(frozen=True)
class DecodeProblem:
    """One call of ``decode`` after validation; pointers are not in it.

    Attributes
    ----------
    dtype : str
        Element type of q.
    batch, q_len, num_q_heads, num_kv_heads, head_dim : int
    capacity : int
        Tokens that a sequence can have at most.
    block_size, num_blocks, table_columns : int
        Of the cache; a contiguous one has a block for each sequence and no table (0 columns).
    window_left : int
        -1: unlimited.
    softmax_scale, softcap : float
    sinks : str
        ``"none"``, ``"float32"`` or ``"io"``.
    deterministic : bool
    shared_prefix : int
        First tokens that all sequences have in the same blocks, read once; 0: none.
    """

    dtype: str
    batch: int
    q_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int
    block_size: int
    num_blocks: int
    table_columns: int
    window_left: int
    softmax_scale: float
    softcap: float
    sinks: str
    deterministic: bool
    shared_prefix: int = 0

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_q_heads // self.num_kv_heads


class _Plan:
    """A validated call; ``launch`` is a plan of one of the modules ``launch.decode*``, or None on the CPU."""

    __slots__ = ("launch", "lse_shape", "problem", "q_shape")

    def __init__(self, problem: DecodeProblem, q: Tensor, launch: Any) -> None:
        self.problem = problem
        self.q_shape = tuple(q.shape)
        self.lse_shape = (problem.batch, problem.num_q_heads, problem.q_len)
        self.launch = launch


def decode(
    q: Any,
    cache: KVCache,
    *,
    seq_lens: Any,
    block_table: Any = None,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
    recent_slots: Any = None,
    stream: Any = None,
    deterministic: bool = False,
    shared_prefix: int = 0,
) -> Any:
    """Attention of the newest tokens of each sequence over all tokens that its cache holds.

    ::

        S = softmax_scale * q @ k.T;  if softcap: S = softcap * tanh(S / softcap)       over the keys that a query sees
        o = softmax(S) @ v            lse = log(sum(exp(S)))

    Parameters
    ----------
    q : array, (batch, q_len, num_q_heads, head_dim), float16 or bfloat16, on the CPU float32 and float64 too
        The last q_len tokens of each sequence, 1 to 16 (several in speculative decoding). head_dim is contiguous; the
        other strides are free (on a GPU multiples of 8 elements, addresses multiples of 16 bytes). Query head h reads
        kv head h // (num_q_heads // num_kv_heads). On a GPU a 16-bit cache and a recent window have to have q's own
        type.
    cache : KVCache or PagedKVCache
        With these tokens appended already.
    seq_lens : array, (batch,), int32, on q's device
        Tokens of each sequence, the new ones included: query i sees the keys j <= seq_lens[b] - q_len + i. Checked on
        the CPU; on a GPU that would need a synchronization, and lengths beyond the cache are taken as its end.
    block_table : array, (batch, max_blocks), int32, on q's device
        With a `PagedKVCache`: the block that holds tokens block_size * j and on of sequence b is block_table[b, j].
        Only the entries that seq_lens reaches are looked at.
    window : (left, right), optional
        A query sees at most ``left`` keys before its own; -1 is unlimited. right is 0 or -1: no key is in the future.
    softmax_scale : float, optional
        1 / sqrt(head_dim) unless given.
    softcap : float
        0 for none.
    sinks : array, (num_q_heads,), float32 or q's dtype, optional
        One more logit a head that takes part in the softmax and has no value; LSE counts it.
    return_lse : bool
        Also return the log-sum-exp.
    out : array, optional
        Where o goes; q's shape and dtype. On a GPU memory of its own, not that of q.
    recent_slots : array, (batch,), int32, on q's device
        With a `PagedKVCache` that has a recent_window, as in `append`.
    stream : optional
        As in `attention`.
    deterministic : bool
        The bits of a sequence's result depend on that sequence only, not on the batch it is in. Repeated calls give the
        same bits in any case. On a GPU it takes scratch memory for the whole capacity, not for the lengths: for each
        sequence, kv head and 512 tokens 4 * head_dim + 8 bytes a query row (q_len times the query heads of a kv head,
        rounded up to 8 or a multiple of 16).
    shared_prefix : int
        With a `PagedKVCache`: so many first tokens, a multiple of block_size, are in the same blocks for all sequences
        (`BlockManager.fork`), and no query is one of them. Their keys are read for the whole batch together, as those
        of one sequence, and the results merged (cascade): worth it where they do not fit L2, or sequences are many.
        The values are those without it, up to rounding. Blocks and lengths are checked on the CPU; on a GPU the blocks
        of sequence 0 are read for all. Not with ``window``, ``deterministic`` or a recent window. On a GPU, where
        q_len > 1, q's first two dimensions have to lie as one.

    Returns
    -------
    o : array
        Of q's framework, shape and dtype. A row that attends to nothing is 0.
    lse : array, (batch, num_q_heads, q_len), float32, natural logarithm
        Only with ``return_lse``. A row that attends to nothing has -inf (with sinks: the sink).

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    GPUs: compute capability 8.0 and newer; arrays on the CPU run the NumPy reference. Nothing is synchronized, and the
    work is divided on the device: a call captured in a CUDA graph may be replayed with other lengths in the same
    arrays. Flash-Decoding (Dao et al. 2023); PagedAttention (Kwon et al. 2023).
    """
    raw = None if stream is None else arrays.resolve_stream(stream)
    check_cache(cache, _NAME)
    tq = arrays.describe(q, "q", raw)
    lengths = arrays.describe(seq_lens, "seq_lens", raw)
    extra: dict[str, Tensor] = {}
    given_arrays = (("block_table", block_table), ("sinks", sinks), ("recent_slots", recent_slots), ("out", out))
    for name, value in given_arrays:
        if value is not None:
            extra[name] = arrays.describe(value, name, raw)
    options = (window, softmax_scale, softcap, return_lse, deterministic, shared_prefix)
    key: Any = (
        # True == 1 == 1.0, but not every one of them is valid everywhere.
        cache.facts, options, tuple(x.__class__ for x in options),
        tuple(x.__class__ for x in window) if isinstance(window, tuple) else None,
        tuple((n, t.dtype, t.device, t.ordinal, tuple(t.shape), tuple(t.strides)) for n, t in
              (("q", tq), ("seq_lens", lengths), *extra.items())),
    )  # fmt: skip
    try:
        plan = _plans.get(key)
    except TypeError:  # an unhashable option: validation has the last word
        plan, key = None, None
    if plan is None:
        plan = _make_plan(tq, cache, lengths, extra, *options)
        if key is not None:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    given = extra.get("out")
    if given is not None:
        arrays.require_writable(given)
        # Not part of the plan, which knows no addresses.
        if tq.device == "cuda" and given.ptr == tq.ptr and 0 not in tq.shape:
            raise ArgumentError("out", "memory of its own, not that of q", hex(tq.ptr), function=_NAME)
    if plan.launch is None:
        return _run_on_cpu(plan, tq, cache, lengths, extra, bool(return_lse), stream)

    for t in (tq, given):
        if t is not None:
            arguments.check_alignment(t, _NAME)
    for name, t in (("seq_lens", lengths), *extra.items()):
        if name != "out":
            arguments.check_alignment(t, _NAME, t.itemsize)
    o = given if given is not None else arrays.empty_like_framework(tq, plan.q_shape, tq.dtype)
    lse = arrays.empty_like_framework(tq, plan.lse_shape, "float32") if return_lse else None
    workspace = arrays.empty_like_framework(tq, (plan.launch.workspace_bytes,), "uint8")
    tensors = [tq, lengths, o, workspace, *cache.tensors, *(t for n, t in extra.items() if n != "out")]
    if lse is not None:
        tensors.append(lse)
    handle = arrays.prepare(tensors, stream)
    plan.launch.launch(
        handle,
        (
            tq.ptr, *(cache.address(n) for n in ("k", "v", "k_params", "v_params", "k_mean", "k_channel_scale")),
            lengths.ptr, extra["block_table"].ptr if "block_table" in extra else 0,
            extra["recent_slots"].ptr if "recent_slots" in extra else 0, cache.address("recent_state"),
            extra["sinks"].ptr if "sinks" in extra else 0, o.ptr, 0 if lse is None else lse.ptr, workspace.ptr,
        ),
        *(cache.address(n) for n in ("recent_k", "recent_v") if cache.recent_window),
    )  # fmt: skip
    arrays.retire(tensors, handle)
    result = arrays.finish(o, handle)
    return result if lse is None else (result, arrays.finish(lse, handle))


def _make_plan(
    q: Tensor,
    cache: KVCache,
    lengths: Tensor,
    extra: dict[str, Tensor],
    window: Any,
    softmax_scale: Any,
    softcap: Any,
    return_lse: Any,
    deterministic: Any,
    shared_prefix: Any,
) -> _Plan:
    arguments.check_bool(return_lse, "return_lse", _NAME)
    deterministic = arguments.check_bool(deterministic, "deterministic", _NAME)
    left, right = arguments.check_window(window, False, _NAME)
    if right > 0:
        raise ArgumentError("window", "(left, 0) or (left, -1): decode is causal", repr(window), function=_NAME)
    softcap = arguments.check_softcap(softcap, _NAME)
    arrays.require_same_device([q, lengths, *cache.tensors, *extra.values()])
    allowed = arguments.CPU_DTYPES if q.device == "cpu" else arguments.GPU_DTYPES
    if q.dtype not in allowed:
        raise DtypeError("q", f"{' or '.join(allowed)} on {q.device}", q.dtype, function=_NAME)
    if len(q.shape) != 4:
        expected = "4 dimensions (batch, q_len, num_q_heads, head_dim)"
        raise ShapeError("q", expected, f"shape {tuple(q.shape)}", function=_NAME)
    batch, q_len, heads, dim = q.shape
    if not 1 <= q_len <= MAX_Q_LEN:
        raise ShapeError(
            "q", f"q_len from 1 to {MAX_Q_LEN}", f"{q_len}", function=_NAME, hint="Prompts are for attention()"
        )
    if dim != cache.head_dim:
        raise ShapeError("q", f"head_dim {cache.head_dim}, like the cache", f"{dim}", function=_NAME)
    if heads < 1 or heads % cache.num_kv_heads:
        expected = f"a multiple of the cache's {cache.num_kv_heads} heads"
        raise ShapeError("q", expected, f"{heads} heads", function=_NAME)
    if q.device == "cuda":
        for fmt in (cache.k_format, cache.v_format, cache.recent_format):
            if fmt is not None and not fmt.quantized and KV_ARRAY_DTYPES[fmt.dtype] != q.dtype:
                raise DtypeError("q", f"{KV_ARRAY_DTYPES[fmt.dtype]}, like the cache", q.dtype, function=_NAME)
    check_int32(lengths, (batch,), f"({batch},)", _NAME)
    capacity = check_table(cache, extra.get("block_table"), batch, _NAME)
    check_slots(cache, extra.get("recent_slots"), batch, _NAME)
    scale = dim**-0.5 if softmax_scale is None else arguments.check_number(softmax_scale, "softmax_scale", _NAME)
    sinks = arguments.check_sinks(extra["sinks"], heads, q.dtype, _NAME) if "sinks" in extra else "none"
    arguments.check_strides(q, _NAME)
    if "out" in extra:
        arguments.check_like(extra["out"], q.shape, q.dtype, _NAME)
        arguments.check_strides(extra["out"], _NAME, written=True)
    shared = _check_prefix(shared_prefix, q, cache, capacity, left, deterministic)
    columns = extra["block_table"].shape[1] if "block_table" in extra else 0
    problem = DecodeProblem(
        q.dtype, batch, q_len, heads, cache.num_kv_heads, dim, capacity, cache.block_size, cache.num_blocks, columns,
        left, scale, softcap, sinks, deterministic, shared,
    )  # fmt: skip
    if q.device == "cpu":
        return _Plan(problem, q, None)
    o_strides = extra["out"].strides if "out" in extra else arrays.contiguous_strides(tuple(q.shape))
    if cache.recent_window:
        from .launch.decode_recent import plan_decode_recent

        return _Plan(problem, q, plan_decode_recent(problem, cache, q.strides, o_strides, q.ordinal))
    if shared and batch:
        from .launch.decode_prefix import plan_decode_prefix

        return _Plan(problem, q, plan_decode_prefix(problem, cache, q.strides, o_strides, q.ordinal))
    from .launch.decode import plan_decode

    formats = (cache.k_format, cache.v_format)
    return _Plan(problem, q, plan_decode(problem, formats, cache.hadamard, q.strides, o_strides, q.ordinal))


def _check_prefix(shared: Any, q: Tensor, cache: KVCache, capacity: int, window_left: int, deterministic: bool) -> int:
    """``shared_prefix``: whole blocks of a paged cache, and nothing beside it that needs the prefix's single keys."""
    size = cache.block_size if cache.paged else 1
    whole = f"a multiple of block_size {size}, an integer from 0 to {capacity // size * size}"
    try:
        tokens = arguments.check_int(shared, "shared_prefix", _NAME, least=0, most=arguments.MAX_ROWS)
    except ArgumentError as error:
        if not cache.paged:
            raise
        raise ArgumentError("shared_prefix", whole, error.received, function=_NAME) from None
    if tokens == 0:
        return 0
    received = f"{tokens}"
    if not cache.paged:
        expected = "0 with a KVCache, whose sequences have memory of their own"
        raise ArgumentError("shared_prefix", expected, received, function=_NAME)
    if tokens % size or tokens > capacity:
        raise ArgumentError("shared_prefix", whole, received, function=_NAME)
    if cache.recent_window:
        raise ArgumentError("shared_prefix", "0 with a cache that has a recent_window", received, function=_NAME)
    if window_left >= 0:
        raise ArgumentError("shared_prefix", "0 with a window", received, function=_NAME)
    if deterministic:
        # Rows of several sequences are computed together: when one takes a new maximum, the others do.
        raise ArgumentError("shared_prefix", "0 with deterministic=True", received, function=_NAME)
    batch, q_len = q.shape[:2]
    if q.device == "cuda" and min(batch, q_len) > 1 and q.strides[0] != q_len * q.strides[1]:
        expected = f"q's first two dimensions as one with shared_prefix, strides ({q_len} * s, s, ...)"
        raise ArgumentError("q", expected, f"strides {tuple(q.strides)}", function=_NAME)
    return tokens


def _run_on_cpu(
    plan: _Plan,
    q: Tensor,
    cache: KVCache,
    lengths: Tensor,
    extra: dict[str, Tensor],
    return_lse: bool,
    stream: Any,
) -> Any:
    """The NumPy reference; computes all before it writes anything."""
    import numpy as np

    from .reference import decode as reference

    arrays.prepare([q], stream)  # refuses a stream
    problem = plan.problem
    table = host_table(cache, extra.get("block_table"), problem.batch)
    seq_lens = arrays.to_numpy(lengths)
    check_values(cache, seq_lens, table, problem.capacity, _NAME)
    if problem.shared_prefix:
        _check_shared(table, seq_lens, problem, cache.block_size)
    slots = host_slots(cache, extra.get("recent_slots"), problem.batch, _NAME)
    with np.errstate(all="ignore"):  # keys that overflow are infinite, as on a GPU
        o, lse = reference.decode(
            arrays.to_numpy(q),
            cache.on_host(),
            seq_lens=seq_lens,
            block_table=table,
            recent_slots=slots,
            window_left=problem.window_left,
            softmax_scale=problem.softmax_scale,
            softcap=problem.softcap,
            sinks=arrays.to_numpy(extra["sinks"]) if "sinks" in extra else None,
            compute_dtype="float64" if q.dtype == "float64" else "float32",
        )
    result = extra["out"] if "out" in extra else arrays.empty_like_framework(q, plan.q_shape, q.dtype)
    arrays.store(result, o)
    if not return_lse:
        return arrays.finish(result, 0)
    lse_out = arrays.empty_like_framework(q, plan.lse_shape, "float32")
    arrays.store(lse_out, lse)
    return arrays.finish(result, 0), arrays.finish(lse_out, 0)


def _check_shared(table: Any, seq_lens: Any, problem: DecodeProblem, block_size: int) -> None:
    """What ``shared_prefix`` says of blocks and lengths."""
    shared, least = problem.shared_prefix, problem.shared_prefix + problem.q_len
    for b in range(problem.batch):
        if seq_lens[b] < least:
            expected = f"at least {least}: shared_prefix and the {problem.q_len} new tokens"
            raise ArgumentError("seq_lens", expected, f"{seq_lens[b]} at {b}", function=_NAME)
        if (table[b, : shared // block_size] != table[0, : shared // block_size]).any():
            expected = f"the same first {shared // block_size} blocks for all sequences, with shared_prefix"
            raise ArgumentError("block_table", expected, f"others at sequence {b}", function=_NAME)
