"""Calls on CPU arrays: the NumPy reference of the same operation. Everything is computed before anything is written."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

from .. import arrays
from ..arrays import Tensor
from ..checks.attention import DESCALES
from ..checks.caches import check_values, host_slots, host_table
from ..checks.decode import check_shared
from ..checks.operands import ARRAYS as OPERAND_ARRAYS
from ..checks.operands import STARTS, check_same_sequences
from ..checks.quantize import check_starts
from ..checks.sparse import host_lengths
from ..checks.with_cache import host_places
from ..errors import ArgumentError
from ..launch.dropout import RNG
from ..launch.score_mod import PREFIX
from ..plan.engine import Call, store_results
from ..problems import (
    AppendProblem,
    AttentionProblem,
    BackwardProblem,
    CopyProblem,
    DecodeProblem,
    MergeProblem,
    QuantizeCall,
    WithCacheProblem,
)
from ..registry.masks import MASK_TILE
from .dropout import reference_of

if TYPE_CHECKING:
    from ..reference.used import UsedRows

Tensors = dict[str, Tensor]


def attention(call: Call, problem: AttentionProblem, tensors: Tensors) -> list[Any]:
    """``attention`` and ``attention_varlen`` on arrays."""
    arrays.prepare([tensors["q"]], call.stream)  # refuses a stream
    try:
        used = _used(problem, tensors)
        o, lse = _attend(problem, tensors, used, call.options.max_seqlen_q, call.options.max_seqlen_k, call.subject)
    except ArgumentError as error:  # in the contents of an array
        raise error.named(call.operation.name) from None
    if used is not None:
        o, lse = used.spread_q(o, 0.0), used.spread_q(lse, -math.inf, rows=-1)
    return store_results(call, problem, tensors, [o, lse][: len(problem.outputs)])


def _used(problem: AttentionProblem, tensors: Tensors) -> UsedRows | None:
    """The used rows of packed sequences; None where all are."""
    if problem.used == (False, False) and problem.pages is None:
        return None
    from ..reference.used import UsedRows

    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table")
    given = (arrays.to_numpy(tensors[name]) if name in tensors else None for name in names)
    pages = problem.pages
    return UsedRows(
        *given, rows=(problem.seqlen_q, problem.seqlen_k), nhd=problem.layout == "NHD",
        pages=None if pages is None else (pages.num_pages, pages.page_size),
    )  # fmt: skip


def _attend(
    problem: AttentionProblem, tensors: Tensors, used: UsedRows | None, max_q: Any, max_k: Any, mod: Any
) -> tuple[Any, Any]:
    """o and LSE as NumPy arrays, of the used rows. mod: the `ScoreMod` of a call that has one."""
    from .. import reference

    options = _options(problem, tensors, max_q, max_k, used)
    if problem.descales is not None:
        from ..reference import e4m3_arrays

        options |= {name: arrays.to_numpy(tensors[name]) for name in DESCALES if name in tensors}
        q, k, v = (_rows_of(used, name, arrays.e4m3_bytes(tensors[name])) for name in ("q", "k", "v"))
        return e4m3_arrays.attention(q, k, v, **options)
    inputs = [_rows_of(used, name, arrays.to_numpy(tensors[name])) for name in ("q", "k", "v")]
    if problem.precision.quantized:
        from ..reference import low_precision

        return low_precision.attention(*inputs, precision=problem.precision, **options)
    if problem.score_mod is not None:
        options["score_mod"] = functools.partial(mod.reference, **_mod_arrays(mod, tensors))
    function = reference.attention_varlen if problem.varlen else reference.attention
    return function(*inputs, compute_dtype="float64" if problem.dtype == "float64" else "float32", **options)


def _rows_of(used: UsedRows | None, name: str, x: Any) -> Any:
    """The used rows of an array: of keys of k and v, else of queries."""
    if used is None:
        return x
    return used.take_k(x) if name in ("k", "v") else used.take_q(x, rows=-1 if name in ("lse", "dlse") else None)


def _options(
    problem: AttentionProblem, tensors: Tensors, max_q: Any, max_k: Any, used: UsedRows | None = None
) -> dict[str, Any]:
    """What the reference is told besides its arrays."""
    options: dict[str, Any] = {
        "layout": problem.layout,
        "window": (problem.window_left, problem.window_right),
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "mask": arrays.to_numpy(tensors["mask"]) if "mask" in tensors else None,
        "sinks": arrays.to_numpy(tensors["sinks"]) if "sinks" in tensors else None,
    }
    if problem.varlen:
        names = [name for name in ("cu_seqlens_q", "cu_seqlens_k") if name in tensors]
        starts: dict[str, Any] = {name: arrays.to_numpy(tensors[name]) for name in names}
        options |= starts if used is None else used.starts
        options |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    if problem.block_mask is not None:
        options["mask"] = _without_hidden_blocks(problem, _blocks(problem, tensors), options["mask"])
    own = {} if problem.dropout is None else {"dropout": reference_of(problem.dropout, tensors[RNG])}
    return options | own


def _mod_arrays(mod: Any, tensors: Tensors) -> dict[str, Any]:
    return {name: arrays.to_numpy(tensors[PREFIX + name]) for name in mod.arrays}


def attention_backward(call: Call, problem: BackwardProblem, tensors: Tensors) -> list[Any]:
    """``attention_backward`` and ``attention_varlen_backward``."""
    from .. import reference

    forward, mod = problem.forward, call.subject
    arrays.prepare([tensors["q"]], call.stream)  # refuses a stream
    try:
        used = _used(forward, tensors)
    except ArgumentError as error:  # in the contents of an array
        raise error.named(call.operation.name) from None
    options = _options(forward, tensors, call.options.max_seqlen_q, call.options.max_seqlen_k, used)
    if mod is not None:
        read = _mod_arrays(mod, tensors)
        options["score_mod"] = functools.partial(mod.reference, **read)
        options["score_mod_grad"] = functools.partial(mod.reference_grad, **read)
    function = reference.attention_varlen_backward if forward.varlen else reference.attention_backward
    try:
        made = function(
            *(_rows_of(used, name, arrays.to_numpy(tensors[name])) for name in ("do", "q", "k", "v", "o", "lse")),
            dlse=_rows_of(used, "dlse", arrays.to_numpy(tensors["dlse"])) if "dlse" in tensors else None,
            wanted=problem.wanted,
            compute_dtype="float64" if forward.dtype == "float64" else "float32",
            **options,
        )
    except ArgumentError as error:  # in the contents of an array
        raise error.named(call.operation.name) from None
    if forward.block_mask is not None and "dmask" in made:
        made["dmask"] = _summed_to(made["dmask"], tuple(tensors["mask"].shape))
    if used is not None:
        spread = {"dq": used.spread_q, "dk": used.spread_k, "dv": used.spread_k}
        made = {name: spread[name](x, 0.0) if name in spread else x for name, x in made.items()}
    return store_results(call, problem, tensors, [made[name] for name in problem.wanted])


def _blocks(problem: AttentionProblem, tensors: Tensors) -> Any:
    """The block mask of a call: the caller's, or what it predicts itself."""
    if problem.sparse is None:
        return arrays.to_numpy(tensors["block_mask"])
    from ..reference.sparse_blocks import blocks_of

    return blocks_of(problem.sparse, *(arrays.to_numpy(tensors[name]) for name in ("q", "k")))


def _without_hidden_blocks(problem: AttentionProblem, blocks: Any, mask: Any) -> Any:
    """The mask of a call with a block mask: -inf or False in hidden blocks."""
    import numpy as np

    assert problem.block_mask is not None
    rows, keys = (MASK_TILE * n for n in problem.block_mask.size)
    shape = (-(-problem.seqlen_q // rows), -(-problem.seqlen_k // keys))
    blocks = np.broadcast_to(blocks, (*(1,) * (4 - blocks.ndim), *blocks.shape)[:2] + shape)
    visible = blocks.repeat(rows, axis=2)[:, :, : problem.seqlen_q].repeat(keys, axis=3)[..., : problem.seqlen_k]
    return visible if mask is None else np.where(visible, mask, np.asarray(-np.inf, dtype=mask.dtype))


def _summed_to(x: Any, shape: tuple[int, ...]) -> Any:
    """The gradient of what has been broadcast from ``shape`` to x's shape."""
    axes = tuple(i for i, n in enumerate((1,) * (x.ndim - len(shape)) + shape) if n == 1 < x.shape[i])
    return x.sum(axis=axes, keepdims=True).reshape(shape)


def attention_on_operands(call: Call, problem: AttentionProblem, tensors: Tensors) -> list[Any]:
    """``attention`` and ``attention_varlen`` on quantized operands."""
    import numpy as np

    from ..reference import checks, low_precision

    operands, place = problem.operands, tensors["q_int"]
    assert operands is not None
    check_same_sequences(call.operation.name, call.subject[2], tensors)
    arrays.prepare([place], call.stream)  # refuses a stream
    values = {name: arrays.to_numpy(t) for name, t in tensors.items() if name != "out"}
    starts = [values.get(name) for name in STARTS]
    options = checks.make_options(
        problem.head_dim, False, (problem.window_left, problem.window_right), problem.softmax_scale, problem.softcap,
        np.float32, "attention",
    )  # fmt: skip
    precision = problem.precision.on_cpu
    try:
        o, lse = low_precision.attend(
            operands, {name: values[name] for name in OPERAND_ARRAYS if name in values}, None, starts[0], starts[1],
            options=options,
            product=low_precision.Product(precision.pv, operands.key_tile, precision.pv_accumulator),
            mask=values.get("mask"), sinks=values.get("sinks"), longest_q=call.options.max_seqlen_q,
            longest_k=call.options.max_seqlen_k,
        )  # fmt: skip
    except ArgumentError as error:  # in the contents of an array
        raise error.named(call.operation.name) from None
    o = o.swapaxes(-3, -2) if problem.layout == "NHD" else o
    return store_results(call, problem, tensors, [o, lse][: len(problem.outputs)])


def quantize(call: Call, problem: QuantizeCall, tensors: Tensors) -> list[Any]:
    """``quantize_qk`` and ``quantize_v``."""
    import numpy as np

    from ..reference import quantize as reference
    from ..reference.varlen import check_max_seqlen

    function, place, p = call.operation.name, next(iter(tensors.values())), problem.problem
    arrays.prepare([place], call.stream)  # refuses a stream
    given: dict[str, Any] = {name: arrays.to_numpy(t) for name, t in tensors.items()}
    for name, rows in (("cu_seqlens_q", p.rows_q), ("cu_seqlens_k", p.rows_k)):
        if name in given:
            check_starts([int(x) for x in given[name]], name, rows, function)
    for name, extent in (("q", problem.max_seqlen_q), ("k", p.max_seqlen_k)):
        if f"cu_seqlens_{name}" in given:
            longest = int(np.diff(given[f"cu_seqlens_{name}"]).max(initial=0))
            check_max_seqlen(extent, longest, f"max_seqlen_{name}", function)
    heads_first = {
        name: x.swapaxes(-3, -2) if problem.layout == "NHD" and name in ("q", "k", "v") else x
        for name, x in given.items()
    }
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    made = reference.quantize(p, *(heads_first.get(name) for name in (*names, "k_mean")))
    made |= {name: np.asarray(given[name], dtype=np.int32) for name in names[3:] if name in given}
    results = []
    for output in problem.outputs:
        source = np.ascontiguousarray(made[output.name])
        result = arrays.empty_like_framework(place, source.shape, source.dtype.name)
        # `arrays.store` rounds to floating types; these bytes are final.
        if source.nbytes:
            ctypes.memmove(result.ptr, source.ctypes.data, source.nbytes)
        results.append(arrays.finish(result, 0))
    return results


def decode(call: Call, problem: DecodeProblem, tensors: Tensors) -> list[Any]:
    """``decode``."""
    import numpy as np

    from ..reference import decode as reference

    q, cache, name = tensors["q"], call.cache, call.operation.name
    assert cache is not None
    arrays.prepare([q], call.stream)  # refuses a stream
    table = host_table(cache, tensors.get("block_table"), problem.batch)
    seq_lens = arrays.to_numpy(tensors["seq_lens"])
    first = reference.first_seen(seq_lens, problem.q_len, problem.window_left)
    check_values(cache, seq_lens, table, problem.capacity, name, first=first)
    if problem.shared_prefix:
        check_shared(table, seq_lens, problem, cache.block_size, name)
    slots = host_slots(cache, tensors.get("recent_slots"), seq_lens, name)
    with np.errstate(all="ignore"):  # keys that overflow are infinite, as on a GPU
        o, lse = reference.decode(
            arrays.to_numpy(q),
            reference.on_host(cache),
            seq_lens=seq_lens,
            block_table=table,
            recent_slots=slots,
            window_left=problem.window_left,
            softmax_scale=problem.softmax_scale,
            softcap=problem.softcap,
            sinks=arrays.to_numpy(tensors["sinks"]) if "sinks" in tensors else None,
            compute_dtype="float64" if q.dtype == "float64" else "float32",
        )
    return store_results(call, problem, tensors, [o, lse][: len(problem.outputs)])


def sparse(call: Call, problem: DecodeProblem, tensors: Tensors) -> list[Any]:
    """``attention_sparse``, and ``decode`` over lists of rows."""
    import numpy as np

    from ..reference import decode as reference

    q, cache = tensors["q"], call.cache
    assert cache is not None
    arrays.prepare([q], call.stream)  # refuses a stream
    heads, tokens = problem.num_q_heads, problem.tokens
    with np.errstate(all="ignore"):
        o, *of_rows = reference.sparse(
            arrays.to_numpy(q).reshape(-1, heads, problem.head_dim),
            reference.on_host(cache),
            indices=arrays.to_numpy(tensors["indices"]).reshape(-1, problem.topk),
            lengths=host_lengths(tensors, problem.topk, call.operation.name),
            softmax_scale=problem.softmax_scale,
            softcap=problem.softcap,
            sinks=arrays.to_numpy(tensors["sinks"]) if "sinks" in tensors else None,
            compute_dtype="float64" if q.dtype == "float64" else "float32",
        )
    if tokens:
        o = o.reshape(-1, tokens, heads, o.shape[-1])
        of_rows = [x.reshape(-1, tokens, heads).swapaxes(1, 2) for x in of_rows]
    wanted = [x for x, is_asked in zip(of_rows, (problem.lse, problem.maximum), strict=True) if is_asked]
    return store_results(call, problem, tensors, [o, *wanted])


def with_cache(call: Call, problem: WithCacheProblem, tensors: Tensors) -> list[Any]:
    """``attention_with_kvcache``: packed queries over the tokens that each sequence's cache holds."""
    import numpy as np

    from .. import reference
    from ..reference.decode import first_seen, on_host, read_tokens

    q, cache, name, kernels = tensors["q"], call.cache, call.operation.name, problem.kernels
    assert cache is not None
    arrays.prepare([q], call.stream)  # refuses a stream
    rows = arrays.to_numpy(q)
    packed, heads = rows.ndim == 3, rows.shape[-2]
    seq_lens = arrays.to_numpy(tensors["seq_lens"])
    batch = len(seq_lens)
    table = host_places(cache, tensors, batch)
    starts = arrays.to_numpy(tensors["cu_seqlens_q"]) if packed else np.arange(batch + 1) * rows.shape[1]
    first = first_seen(seq_lens, np.diff(starts), problem.window[0])
    pads = np.zeros(batch, np.int64)
    if "leftpad_k" in tensors:
        pads = np.clip(arrays.to_numpy(tensors["leftpad_k"]).astype(np.int64), 0, seq_lens)
        first = np.maximum(first, pads)
    check_values(cache, seq_lens, table, problem.capacity, name, first=first)
    if isinstance(kernels, DecodeProblem) and kernels.shared_prefix:
        check_shared(table, seq_lens, kernels, cache.block_size, name)
    slots = host_slots(cache, tensors.get("recent_slots"), seq_lens, name)
    host, compute = on_host(cache), np.dtype("float64" if q.dtype == "float64" else "float32")
    with np.errstate(all="ignore"):  # keys that overflow are infinite, as on a GPU
        found = [read_tokens(host, table[b], int(seq_lens[b]), int(slots[b]), b, int(first[b])) for b in range(batch)]
        k, v = (
            np.concatenate([np.zeros((0, cache.num_kv_heads, dim), np.float32), *(
                pair[i][n:] for pair, n in zip(found, pads, strict=True)
            )]) for i, dim in enumerate((cache.head_dim, cache.v_format.head_dim))
        )  # fmt: skip
        mod = call.subject
        if mod is not None:
            mod = functools.partial(mod.reference, **_mod_arrays(mod, tensors))
        try:
            o, lse = reference.attention_varlen(
                rows.reshape(-1, heads, cache.head_dim), k, v, cu_seqlens_q=starts,
                cu_seqlens_k=np.cumsum([0, *(seq_lens - pads)]), max_seqlen_q=call.options.max_seqlen_q,
                window=problem.window, softmax_scale=kernels.softmax_scale, softcap=kernels.softcap, score_mod=mod,
                sinks=arrays.to_numpy(tensors["sinks"]) if "sinks" in tensors else None, compute_dtype=compute,
            )  # fmt: skip
        except ArgumentError as error:  # in the contents of an array
            raise error.named(name) from None
    if problem.by_decode and not packed:
        lse = lse.reshape(heads, batch, rows.shape[1]).swapaxes(0, 1)
    return store_results(
        call, problem, tensors, [o.reshape(*rows.shape[:-1], o.shape[-1]), lse][: len(problem.outputs)]
    )


def append(call: Call, problem: AppendProblem, tensors: Tensors) -> list[Any]:
    """``append``; everything is checked before the first byte is written."""
    import numpy as np

    from ..reference.decode import append_tokens, on_host

    cache, function = call.cache, call.operation.name
    assert cache is not None
    arrays.prepare([tensors["k"]], call.stream)  # refuses a stream
    if problem.slots:
        return _append_by_slots(call, problem, tensors)
    (k, v), lengths = _new_tokens(problem, tensors), arrays.to_numpy(tensors["seq_lens"])
    if "cu_seqlens" in tensors:
        starts = [int(x) for x in arrays.to_numpy(tensors["cu_seqlens"])]
        if starts[0] != 0 or starts[-1] > problem.rows or any(b < a for a, b in itertools.pairwise(starts)):
            expected = f"0 first, never decreasing, at most the {problem.rows} rows at the end"
            raise ArgumentError("cu_seqlens", expected, str(starts), function=function)
    else:
        starts = [b * problem.tokens for b in range(problem.batch + 1)]
        k, v = (None if x is None else x.reshape(problem.rows, *x.shape[2:]) for x in (k, v))
    new, table = np.diff(starts), host_table(cache, tensors.get("block_table"), problem.batch)
    # Blocks without a new token are not written, and need not be the sequence's: a window may have left them behind.
    begins = np.where(new > 0, lengths - new, problem.capacity)
    check_values(cache, lengths, table, problem.capacity, function, new=new, first=begins)
    slots = host_slots(cache, tensors.get("recent_slots"), lengths, function)
    longest = int(lengths[new > 0].max(initial=0))
    if problem.rope != "none" and longest > problem.rope_rows:
        expected = f"a row for each position up to {longest - 1}"
        raise ArgumentError("cos", expected, f"{problem.rope_rows} rows", function=function)
    host = on_host(cache)
    # IEEE arithmetic without warnings, which somebody may have made errors: half the tokens would be written then.
    with np.errstate(all="ignore"):
        for b in range(problem.batch):
            if lengths[b] == 0:  # padding
                continue
            begin, end = starts[b], starts[b + 1]
            first = int(lengths[b]) - (end - begin)
            keys = np.asarray(k[begin:end])
            if problem.rope != "none":
                angles = slice(first, first + end - begin)
                cos, sin = (arrays.to_numpy(tensors[n])[angles, None] for n in ("cos", "sin"))
                keys = _rotated(problem, keys, cos, sin)
            append_tokens(host, keys, None if v is None else np.asarray(v[begin:end]), table[b], first, int(slots[b]))
    return []


def _new_tokens(problem: AppendProblem, tensors: Tensors) -> tuple[Any, Any]:
    """k and v of `append`, with heads; of a latent cache whole rows, and None."""
    import numpy as np

    if not problem.cache.is_latent:
        return arrays.to_numpy(tensors["k"]), arrays.to_numpy(tensors["v"])
    lead = 1 if problem.packed else 2
    found = [arrays.to_numpy(tensors[name]) for name in ("k", "k_pe") if name in tensors]
    return np.concatenate([x.reshape(*x.shape[:lead], 1, x.shape[-1]) for x in found], axis=-1), None


def _rotated(problem: AppendProblem, keys: Any, cos: Any, sin: Any) -> Any:
    """Keys in float32; of latent rows the channels behind V's are rotated."""
    import numpy as np

    from ..reference.kv_cache import rotate

    first = problem.cache.v_format.head_dim if problem.cache.is_latent else 0
    keys = np.asarray(keys, dtype=np.float32)
    turned = rotate(keys[..., first:], cos, sin, problem.rope == "interleaved")
    return np.concatenate([keys[..., :first], turned], axis=-1) if first else turned


def _append_by_slots(call: Call, problem: AppendProblem, tensors: Tensors) -> list[Any]:
    """``append`` with slot_mapping; everything is checked before the first byte is written."""
    import numpy as np

    from ..reference.decode import on_host, write_tokens

    cache, function = call.cache, call.operation.name
    assert cache is not None
    slots = arrays.to_numpy(tensors["slot_mapping"])
    count = cache.num_blocks * cache.block_size
    if problem.rows and int(slots.max()) >= count:
        raise ArgumentError("slot_mapping", f"slots below {count}", f"{int(slots.max())}", function=function)
    wanted = np.flatnonzero(slots >= 0)
    k, v = _new_tokens(problem, tensors)
    k, v = k[wanted], None if v is None else v[wanted]
    if problem.rope != "none":
        positions = arrays.to_numpy(tensors["positions"])[wanted]
        bad = positions[(positions < 0) | (positions >= problem.rope_rows)]
        if bad.size:
            expected = f"positions from 0 to {problem.rope_rows - 1}, for which there are angles"
            raise ArgumentError("positions", expected, f"{int(bad[0])}", function=function)
        cos, sin = (arrays.to_numpy(tensors[name])[positions, None] for name in ("cos", "sin"))
    with np.errstate(all="ignore"):  # IEEE arithmetic, as in `append`
        if problem.rope != "none":
            k = _rotated(problem, k, cos, sin)
        write_tokens(on_host(cache), k, v, slots[wanted] // cache.block_size, slots[wanted] % cache.block_size)
    return []


def copy(call: Call, problem: CopyProblem, tensors: Tensors) -> list[Any]:
    """``copy_blocks`` and ``copy_recent``."""
    from ..reference.decode import on_host

    cache = call.cache
    assert cache is not None
    arrays.prepare(cache.tensors, call.stream)  # refuses a stream
    host = on_host(cache)
    planes: tuple[Any, ...]
    if problem.recent:
        assert host.recent is not None
        planes = (host.recent.k, host.recent.v, host.recent.state)
    else:
        of_rows = (x for x in (host.k_scale, host.v_scale) if x is not None and x.ndim == 3)
        values = () if cache.facts.is_latent else (host.v,)
        planes = (host.k, *values, host.k_params, host.v_params, *of_rows)
    for plane in planes:
        plane[[d for _, d in problem.pairs]] = plane[[s for s, _ in problem.pairs]]
    return []


def merge(call: Call, problem: MergeProblem, tensors: Tensors) -> list[Any]:
    """``merge_states``."""
    from .. import reference

    a = tensors["o_a"]
    arrays.prepare([a], call.stream)  # refuses a stream
    o, lse = reference.merge_states(
        *(arrays.to_numpy(tensors[name]) for name in ("o_a", "lse_a", "o_b", "lse_b")),
        compute_dtype="float64" if a.dtype == "float64" else "float32",
    )
    return store_results(call, problem, tensors, [o, lse])
