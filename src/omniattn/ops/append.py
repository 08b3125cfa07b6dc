"""``append``: new tokens into a KV cache; and copies of blocks inside one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from . import arguments, arrays
from .arrays import Tensor
from .cache import KVCache, PagedKVCache
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
from .precision import check_choice
from .runtime.driver import on_reset

_NAME = "append"
_MAX_PLANS = 1024
_RECENT = ("recent_k", "recent_v", "recent_state")
#: Which channels make a pair of the rotary embedding.
ROPE_STYLES: tuple[str, ...] = ("half", "interleaved")
_plans: dict[Any, _Plan] = {}
# A plan holds loaded kernels, which are worth nothing under another driver or in a forked child.
on_reset(_plans.clear)


@dataclass(frozen=True)
class AppendProblem:
    """One call of ``append`` after validation; pointers are not in it.

    Attributes
    ----------
    dtype : str
        Element type of k and v.
    batch, rows, tokens, head_dim, num_kv_heads : int
        ``rows`` new tokens in all; ``tokens`` a sequence, 0 for packed ones.
    capacity, block_size, num_blocks, table_columns : int
        As in `decode.DecodeProblem`.
    rope : str
        ``"none"`` or one of `ROPE_STYLES`.
    rope_pairs, rope_rows : int
        Extents of cos and sin.
    """

    dtype: str
    batch: int
    rows: int
    tokens: int
    head_dim: int
    num_kv_heads: int
    capacity: int
    block_size: int
    num_blocks: int
    table_columns: int
    rope: str
    rope_pairs: int
    rope_rows: int


class _Plan:
    __slots__ = ("launch", "problem")

    def __init__(self, problem: AppendProblem, launch: Any) -> None:
        self.problem = problem
        self.launch = launch


def append(
    cache: KVCache,
    k: Any,
    v: Any,
    *,
    seq_lens: Any,
    cu_seqlens: Any = None,
    block_table: Any = None,
    cos: Any = None,
    sin: Any = None,
    rope: str = "half",
    recent_slots: Any = None,
    stream: Any = None,
) -> None:
    """Write new tokens into a cache: rotary embedding of K (optional), quantization and scatter in one kernel.

    Token i of the n new ones of sequence b goes to position seq_lens[b] - n + i.

    Parameters
    ----------
    cache : KVCache or PagedKVCache
        Written in place.
    k, v : array, (batch, tokens, num_kv_heads, head_dim), or packed (rows, num_kv_heads, head_dim) with cu_seqlens
        float16 or bfloat16, on the CPU float32 and float64 too; head_dim contiguous, the other strides free (on a GPU
        multiples of 8 elements, addresses multiples of 16 bytes).
    seq_lens : array, (batch,), int32, on k's device
        Tokens of each sequence, the new ones included: what `decode` takes afterwards. Checked on the CPU; on a GPU
        that would need a synchronization, and tokens whose place is outside the cache are not written.
    cu_seqlens : array, (batch + 1,), int32, optional
        Packed k and v: row at which each sequence's tokens begin, and the end of the last one's.
    block_table : array, (batch, max_blocks), int32
        With a `PagedKVCache`, as in `decode`. Blocks that are written must belong to one sequence only:
        `BlockManager.extend` sees to that.
    cos, sin : array, (positions, pairs), float32, contiguous, optional
        Both: K's first 2 * pairs channels are rotated by the angle of their position. A position without a row raises
        on the CPU; on a GPU its key is NaN.
    rope : "half" or "interleaved"
        Pairs are channels (i, i + pairs), or (2i, 2i + 1). Looked at with cos and sin only.
    recent_slots : array, (batch,), int32
        With a `PagedKVCache` that has a recent_window: each sequence's slot in it, the same as long as it lives, and
        nobody else's (`BlockManager.slots`). A sequence that begins with tokens of another one needs a copy of its slot
        (`copy_recent`).
    stream : optional
        As in `attention`.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    The rotation is computed in fp32 and rounded once, by the cache's format. With a recent_window the same kernel keeps
    the newest tokens in 16 bits; the quantized ones are the same with and without it. GPUs: compute capability 8.0 and
    newer; on the CPU NumPy writes the same bytes.
    """
    raw = None if stream is None else arrays.resolve_stream(stream)
    check_cache(cache, _NAME)
    tensors = {"k": arrays.describe(k, "k", raw), "v": arrays.describe(v, "v", raw)}
    others = {"seq_lens": seq_lens, "cu_seqlens": cu_seqlens, "block_table": block_table, "cos": cos, "sin": sin}
    others["recent_slots"] = recent_slots
    for name, value in others.items():
        if value is not None or name == "seq_lens":
            tensors[name] = arrays.describe(value, name, raw)
    key: Any = (
        cache.facts, rope, rope.__class__,
        tuple((n, t.dtype, t.device, t.ordinal, tuple(t.shape), tuple(t.strides)) for n, t in tensors.items()),
    )  # fmt: skip
    try:
        plan = _plans.get(key)
    except TypeError:
        plan, key = None, None
    if plan is None:
        plan = _make_plan(cache, tensors, rope)
        if key is not None:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    if plan.launch is None:
        _run_on_cpu(plan.problem, cache, tensors, stream)
        return
    for t in tensors.values():
        arguments.check_alignment(t, _NAME, 16 if t.argument in ("k", "v") else t.itemsize)
    everything = [*tensors.values(), *cache.tensors]
    handle = arrays.prepare(everything, stream)
    names = ("k", "v", "seq_lens", "cu_seqlens", "block_table", "cos", "sin")
    planes = ("k", "v", "k_params", "v_params", "k_mean", "k_channel_scale")
    recent = (tensors["recent_slots"].ptr if "recent_slots" in tensors else 0, *(cache.address(n) for n in _RECENT))
    pointers = (*(tensors[n].ptr if n in tensors else 0 for n in names), *(cache.address(n) for n in planes), *recent)
    plan.launch.launch(handle, pointers)
    arrays.retire(everything, handle)


def _make_plan(cache: KVCache, tensors: dict[str, Tensor], rope: Any) -> _Plan:
    k, v = tensors["k"], tensors["v"]
    check_choice(rope, "rope", ROPE_STYLES, _NAME)
    arrays.require_same_device([k, *(t for n, t in tensors.items() if n != "k"), *cache.tensors])
    packed = "cu_seqlens" in tensors
    allowed = arguments.CPU_DTYPES if k.device == "cpu" else arguments.GPU_DTYPES
    if k.dtype not in allowed:
        raise DtypeError("k", f"{' or '.join(allowed)} on {k.device}", k.dtype, function=_NAME)
    if len(k.shape) != (3 if packed else 4):
        names = "(rows, num_kv_heads, head_dim)" if packed else "(batch, tokens, num_kv_heads, head_dim)"
        raise ShapeError("k", f"{3 if packed else 4} dimensions {names}", f"shape {tuple(k.shape)}", function=_NAME)
    if tuple(k.shape[-2:]) != (cache.num_kv_heads, cache.head_dim):
        expected = f"the cache's (num_kv_heads, head_dim) = {(cache.num_kv_heads, cache.head_dim)} at the end"
        raise ShapeError("k", expected, f"shape {tuple(k.shape)}", function=_NAME)
    arguments.check_like(v, k.shape, k.dtype, _NAME)
    lengths = tensors["seq_lens"]
    # The batch of packed rows is that of seq_lens, 0 included.
    extent = None if packed and len(lengths.shape) != 1 else lengths.shape[0] if packed else k.shape[0]
    check_int32(lengths, (extent,), "(batch,)" if packed else f"({extent},)", _NAME)
    batch = lengths.shape[0]
    if packed:
        check_int32(tensors["cu_seqlens"], (batch + 1,), f"({batch + 1},)", _NAME)
    capacity = check_table(cache, tensors.get("block_table"), batch, _NAME)
    check_slots(cache, tensors.get("recent_slots"), batch, _NAME)
    for t in (k, v):
        arguments.check_strides(t, _NAME)
    style, pairs, positions = "none", 0, 0
    if ("cos" in tensors) != ("sin" in tensors):
        missing, there = ("sin", "cos") if "cos" in tensors else ("cos", "sin")
        raise ArgumentError(missing, f"an array, like {there}", "None", function=_NAME)
    if "cos" in tensors:
        style, cos = rope, tensors["cos"]
        if cos.dtype != "float32":
            raise DtypeError("cos", "float32", cos.dtype, function=_NAME)
        if len(cos.shape) != 2 or not 1 <= cos.shape[1] <= cache.head_dim // 2 or cos.shape[0] < 1:
            expected = f"(positions, pairs) with 1 to {cache.head_dim // 2} pairs"
            raise ShapeError("cos", expected, f"shape {tuple(cos.shape)}", function=_NAME)
        arguments.check_like(tensors["sin"], cos.shape, "float32", _NAME)
        for name in ("cos", "sin"):
            if tuple(tensors[name].strides) != arrays.contiguous_strides(tuple(cos.shape)):
                received = f"strides {tuple(tensors[name].strides)}"
                raise ArgumentError(name, "a contiguous array", received, function=_NAME)
        positions, pairs = cos.shape
    rows = k.shape[0] if packed else k.shape[0] * k.shape[1]
    if batch == 0:
        rows = 0  # packed rows of no sequence
    if rows > arguments.MAX_ROWS:
        raise ShapeError("k", f"at most {arguments.MAX_ROWS} tokens", f"{rows}", function=_NAME)
    problem = AppendProblem(
        k.dtype, batch, rows, 0 if packed else k.shape[1], cache.head_dim, cache.num_kv_heads, capacity,
        cache.block_size, cache.num_blocks, tensors["block_table"].shape[1] if "block_table" in tensors else 0, style,
        pairs, positions,
    )  # fmt: skip
    if k.device == "cpu":
        return _Plan(problem, None)
    from .launch.kv_append import plan_append

    return _Plan(problem, plan_append(problem, cache, k.strides, v.strides, k.ordinal))


def _run_on_cpu(problem: AppendProblem, cache: KVCache, tensors: dict[str, Tensor], stream: Any) -> None:
    """The NumPy reference; everything is checked before the first byte is written."""
    import numpy as np

    from .reference.decode import append_tokens
    from .reference.kv_cache import rotate

    arrays.prepare([tensors["k"]], stream)  # refuses a stream
    k, v, lengths = (arrays.to_numpy(tensors[n]) for n in ("k", "v", "seq_lens"))
    if "cu_seqlens" in tensors:
        starts = [int(x) for x in arrays.to_numpy(tensors["cu_seqlens"])]
        if starts[0] != 0 or starts[-1] > problem.rows or any(b < a for a, b in itertools.pairwise(starts)):
            expected = f"0 first, never decreasing, at most the {problem.rows} rows at the end"
            raise ArgumentError("cu_seqlens", expected, str(starts), function=_NAME)
    else:
        starts = [b * problem.tokens for b in range(problem.batch + 1)]
        k, v = (x.reshape(problem.rows, *x.shape[2:]) for x in (k, v))
    new = [end - begin for begin, end in itertools.pairwise(starts)]
    table = host_table(cache, tensors.get("block_table"), problem.batch)
    check_values(cache, lengths, table, problem.capacity, _NAME, new=new)
    slots = host_slots(cache, tensors.get("recent_slots"), problem.batch, _NAME)
    if problem.rope != "none" and problem.rows and int(lengths.max()) > problem.rope_rows:
        raise ArgumentError(
            "cos",
            f"a row for each position up to {int(lengths.max()) - 1}",
            f"{problem.rope_rows} rows",
            function=_NAME,
        )
    host = cache.on_host()
    # IEEE arithmetic without warnings, which somebody may have made errors: half the tokens would be written then.
    with np.errstate(all="ignore"):
        for b in range(problem.batch):
            begin, end = starts[b], starts[b + 1]
            first = int(lengths[b]) - (end - begin)
            keys = np.asarray(k[begin:end])
            if problem.rope != "none":
                angles = slice(first, first + end - begin)
                cos, sin = (arrays.to_numpy(tensors[n])[angles, None] for n in ("cos", "sin"))
                keys = rotate(keys, cos, sin, problem.rope == "interleaved")
            append_tokens(host, keys, np.asarray(v[begin:end]), table[b], first, int(slots[b]))


def copy_blocks(cache: PagedKVCache, copies: Any, *, stream: Any = None) -> None:
    """Copy blocks of a paged cache, as `BlockManager.extend` wishes: partly filled ones as they are.

    Parameters
    ----------
    cache : PagedKVCache
    copies : sequence of (source, destination)
        Block numbers on the host. No destination may come twice or be a source.
    stream : optional
        As in `attention`.

    Raises
    ------
    ArgumentError
        Something else than a paged cache, bad block numbers.
    """
    function = "copy_blocks"
    if not isinstance(cache, PagedKVCache):
        raise ArgumentError("cache", "a PagedKVCache", type(cache).__name__, function=function)
    pairs = _check_pairs(copies, cache.num_blocks, "blocks", function)
    handle = arrays.prepare(cache.tensors, stream)
    if not pairs:
        return
    if cache.tensors[0].device == "cpu":
        host = cache.on_host()
        source, destination = ([p[i] for p in pairs] for i in (0, 1))
        for plane in (host.k, host.v, host.k_params, host.v_params):
            plane[destination] = plane[source]
        return
    from .launch.kv_append import launch_copies

    launch_copies(cache, pairs, handle)
    arrays.retire(cache.tensors, handle)


def copy_recent(cache: KVCache, copies: Any, *, stream: Any = None) -> None:
    """Copy slots of a cache's recent window, as `BlockManager.fork` wishes.

    Parameters
    ----------
    cache : KVCache or PagedKVCache
        With a recent_window.
    copies : sequence of (source, destination)
        Numbers of slots on the host. No destination may come twice or be a source.
    stream : optional
        As in `attention`.

    Raises
    ------
    ArgumentError
        A cache without recent window, bad numbers.
    """
    function = "copy_recent"
    check_cache(cache, function)
    if cache.recent_format is None:
        raise ArgumentError("cache", "one with a recent_window", "one without", function=function)
    pairs = _check_pairs(copies, cache.recent_slots, "slots", function)
    handle = arrays.prepare(cache.tensors, stream)
    if not pairs:
        return
    if cache.tensors[0].device == "cpu":
        recent = cache.on_host().recent
        assert recent is not None
        for plane in (recent.k, recent.v, recent.state):
            plane[[d for _, d in pairs]] = plane[[s for s, _ in pairs]]
        return
    from .launch.kv_append import launch_recent_copies

    launch_recent_copies(cache, pairs, handle)
    arrays.retire(cache.tensors, handle)


def _check_pairs(copies: Any, count: int, what: str, function: str) -> list[tuple[int, int]]:
    """Pairs (source, destination) of numbers below ``count``."""
    pairs: list[tuple[int, int]] = []
    try:
        given = list(copies)
    except TypeError:
        expected = "a sequence of pairs (source, destination)"
        raise ArgumentError("copies", expected, repr(copies), function=function) from None
    for pair in given:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentError("copies", "pairs (source, destination)", repr(pair), function=function)
        numbers = [arguments.check_int(x, "copies", function) for x in pair]
        if max(numbers) >= count:
            raise ArgumentError("copies", f"{what} 0 to {count - 1}", repr(pair), function=function)
        pairs.append((numbers[0], numbers[1]))
    destinations = {d for _, d in pairs}
    if len(destinations) < len(pairs) or destinations & {s for s, _ in pairs}:
        expected = "destinations that come once and are no sources"
        raise ArgumentError("copies", expected, repr(pairs), function=function)
    return pairs
