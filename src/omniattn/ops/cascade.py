"""A call in levels (cascade): keys that sequences share are attended once for all their queries, and results merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from .. import arrays, runtime
from ..arrays import Tensor
from ..checks import cascade as checks
from ..checks.cascade import ARRAYS
from ..checks.with_cache import WithCacheOptions
from ..errors import UnsupportedError, telling
from ..frameworks import compiling
from ..kv.cache import KVCache
from ..kv.runs import SharedLevel, SharedPrefixes
from ..plan.engine import Described, Launches, Plan, is_describing
from ..plan.others import plan_merge
from ..plan.tuning import target_of
from ..problems import MergeProblem
from ..runtime.env import forced_kernels
from .merge import merge_states

_NAME = "attention_with_kvcache"


def in_levels(
    attend: Callable[..., Any],
    cache: KVCache,
    shared: int | SharedPrefixes,
    objects: tuple[Any, ...],
    options: WithCacheOptions,
    score_mod: Any,
    stream: Any,
) -> Any:
    """`attention_with_kvcache` with ``shared_prefix``.

    Parameters
    ----------
    attend : callable
        `attention_with_kvcache`.
    cache : KVCache
    shared : int or SharedPrefixes
    objects : tuple
        The caller's arrays, as `checks.with_cache.ARRAYS` names them.
    options : WithCacheOptions
    score_mod, stream : optional
    """
    q, seq_lens, block_table, cu_seqlens_q, sinks, recent_slots, batch_index, leftpad_k, out = objects
    others = {
        "score_mod": score_mod, "recent_slots": recent_slots, "batch_index": batch_index, "leftpad_k": leftpad_k,
    }  # fmt: skip
    checks.check_levels(shared, cache, others, options)
    packed = cu_seqlens_q is not None
    given = (q, seq_lens, block_table, cu_seqlens_q, sinks, out)
    traced = compiling() or cache.traced or arrays.needs_operator(given)
    if not traced:
        seq_lens, block_table, cu_seqlens_q = _check(given, cache, shared, options.max_seqlen_q, stream)
    rows = q if packed else q.reshape(-1, *q.shape[2:])
    batch = seq_lens.shape[0]
    paused = None
    if not isinstance(shared, SharedPrefixes):
        if rows.shape[0] == 0 or batch == 0:
            shared = SharedPrefixes((), seq_lens, block_table)
        else:
            if not packed:
                _refuse_stream(stream)
                paused = seq_lens
            shared = _as_levels(shared, cache.block_size, seq_lens, block_table, cu_seqlens_q)
    own = {
        "seq_lens": shared.seq_lens, "block_table": shared.block_table, "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": options.max_seqlen_q, "causal": options.causal, "window": options.window, "sinks": sinks,
        "out": out,
    }  # fmt: skip
    more = {
        "return_lse": True, "stream": stream, "softmax_scale": options.softmax_scale, "softcap": options.softcap,
        "num_splits": options.num_splits,
    }  # fmt: skip
    of_own, of_levels = partial(attend, q, cache, **own, **more), []
    for level in reversed(shared.levels if rows.shape[0] else ()):
        places = {"seq_lens": level.seq_lens, "block_table": level.block_table, "causal": False}
        if level.cu_seqlens_q is None:
            of_levels.append(partial(attend, rows[None], cache, **places, **more))
        else:
            places |= {"cu_seqlens_q": level.cu_seqlens_q, "max_seqlen_q": rows.shape[0]}
            of_levels.append(partial(attend, rows, cache, **places, **more))
    if is_describing():
        raise _described([of_own, *of_levels])
    found = None
    for call in of_levels:
        o, lse = call()
        if not packed:
            o, lse = o.reshape(q.shape), lse.reshape(-1, *q.shape[:2]).swapaxes(0, 1)
            if paused is not None:
                # What pauses has seen no shared key either.
                lse = _hidden(lse, (paused == 0)[:, None, None])
        found = (o, lse) if found is None else merge_states(o, lse, *found, stream=stream)
    # Last, since it writes ``out``, which may be q itself.
    o, lse = of_own()
    if found is not None:
        o, lse = merge_states(*found, o, lse, out=out, stream=stream)
    return (o, lse) if options.return_lse else o


def _check(given: tuple[Any, ...], cache: KVCache, shared: Any, longest: Any, stream: Any) -> tuple[Any, Any, Any]:
    """Everything but addresses; on the CPU contents too.

    Returns seq_lens, block_table and cu_seqlens_q; those of several libraries, which a level of a number is made of
    together, as NumPy's.
    """
    raw = None if stream is None else telling(_NAME, arrays.resolve_stream, stream)
    tensors = {
        name: arrays.describe_of(_NAME, x, name, raw)
        for name, x in zip(ARRAYS, given, strict=True)
        if x is not None or name in ("q", "seq_lens")
    }
    q = tensors["q"]
    queries = checks.check_arrays(q, tensors, cache, longest, shared)
    levels: SharedPrefixes | None = None
    found = list(tensors.values())
    if isinstance(shared, SharedPrefixes):
        levels = checks.describe_levels(shared, raw)
        checks.check_own(levels, queries.batch)
        found += [levels.seq_lens, levels.block_table, *(t for level in levels.levels for t in level)]
    arrays.require_same_device([*found, *cache.tensors])
    if q.device != "cpu":
        return given[1:4]
    import numpy as np

    def host(t: Tensor) -> Any:
        return arrays.to_numpy(t)

    starts = host(tensors["cu_seqlens_q"]) if queries.packed else np.arange(queries.batch + 1) * queries.q_len
    lens, table = host(tensors["seq_lens"]), host(tensors["block_table"])
    if levels is not None:
        checks.check_contents(levels.map(host), starts, lens, table, cache.block_size, queries.rows)
        return given[1:4]
    checks.check_prefix_contents(shared, starts, lens, table, cache.block_size, packed=queries.packed)
    if len(checks.libraries(tensors)) > 1:
        return lens, table, starts if queries.packed else None
    return given[1:4]


def _refuse_stream(stream: Any) -> None:
    if stream is not None:
        raise UnsupportedError(
            f"{_NAME}(): a number as shared_prefix with a batch of prompts, on a stream of its own",
            instead="SharedPrefixes, packed queries, or the current stream of the arrays' library",
        )


def _as_levels(tokens: int, size: int, seq_lens: Any, block_table: Any, cu_seqlens_q: Any) -> SharedPrefixes:
    """One level of ``tokens`` for all, made by the arrays' own library: on its stream, in a captured graph too."""
    blocks, columns = tokens // size, block_table.shape[1]
    owner = seq_lens.argmax().reshape(1)  # it has the prefix, unless all pause: then there is none
    lens = seq_lens[owner].clip(0, tokens)
    starts = None if cu_seqlens_q is None else cu_seqlens_q[:: cu_seqlens_q.shape[0] - 1] + 0
    level = SharedLevel(starts, lens, block_table[owner][:, :blocks] + 0)
    return SharedPrefixes((level,), (seq_lens - tokens).clip(0), block_table[:, min(blocks, columns - 1) :] + 0)


def _hidden(lse: Any, where: Any) -> Any:
    """An LSE with -inf in some places."""
    if hasattr(lse, "masked_fill"):
        # seq_lens, which say where, may be another library's.
        where = where if hasattr(where, "masked_fill") else import_module("torch").as_tensor(where)
        return lse.masked_fill(where, -math.inf)
    library = import_module("jax.numpy" if "jax" in type(lse).__module__ else type(lse).__module__.partition(".")[0])
    return library.where(library.asarray(where), -math.inf, lse)


def _described(calls: Sequence[Callable[[], Any]]) -> Described:
    """The plan of all calls as one: that of the sequences' own keys, with the launches of the levels and the merges."""
    found: list[Described] = []
    for call in calls:
        try:
            call()
        except Described as one:
            found.append(one)
    first, *rest = found
    launches = first.plan.launches
    if launches is None or not rest:
        return first
    device = runtime.device_info(first.plan.ordinal)
    merge = plan_merge(_merge_problem(first), target_of(device), forced_kernels())
    parts = [launches, *(part for one in rest for part in (one.plan.launches, merge) if part is not None)]
    why = f"{len(rest)} levels of shared keys, each attended for all its queries; results are merged"
    whole = Launches(
        replace(launches.selection, why=(*launches.selection.why, why)),
        tuple(record for part in parts for record in part.records),
        max(part.workspace_bytes for part in parts),
        (*launches.others, *(selection for part in parts[1:] for selection in (part.selection, *part.others))),
    )
    return Described(first.call, Plan(first.plan.problem, whole, None, first.plan.ordinal), first.tensors)


def _merge_problem(one: Described) -> MergeProblem:
    """The merge of two results of a call, contiguous ones."""
    q = one.tensors["q"]
    *batch, rows, heads, dim = q.shape
    of_o = (rows * heads * dim if batch else 0, heads * dim, dim)
    of_lse = (heads * rows if batch else 0, rows, 1)
    return MergeProblem(q.dtype, tuple(q.shape), (of_o,) * 3, (of_lse,) * 3)
