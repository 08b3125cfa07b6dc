"""``choose_shared_runs``: which blocks that requests share are worth a call of their own."""

from __future__ import annotations

from .. import arguments, runtime
from ..checks.caches import check_cache
from ..checks.decode import why_not_shared
from ..errors import ArgumentError
from ..kv.cache import KVCache
from ..kv.formats import KV_ARRAY_DTYPES
from ..kv.runs import SharedRuns
from ..plan.tuning import target_of
from ..select.cascade import Keys, chosen

_NAME = "choose_shared_runs"


def choose_shared_runs(
    runs: SharedRuns, cache: KVCache, *, num_q_heads: int, max_levels: int = 2, max_groups: int | None = None
) -> SharedRuns:
    """Of the blocks that requests of a step share those that are worth a level of `attention_with_kvcache`.

    Parameters
    ----------
    runs : SharedRuns
        All that the step has: `BlockManager.shared_runs`.
    cache : PagedKVCache
        The cache of a layer; of layers that are alike any.
    num_q_heads : int
        Query heads of a call on it.
    max_levels : int
        Levels at most. Each is a call of attention and a merge more.
    max_groups : int, optional
        Groups of a level at most, those without shared keys included: what the arrays of a captured graph have room
        for. None: any number.

    Returns
    -------
    SharedRuns
        With the runs that make the step the fastest by the model of costs, of those that leave few keys to read; or
        none: then ``runs`` is empty, and the call is better off without ``shared_prefix``. Always none on the CPU,
        where every key is read for each request, and for caches whose calls have no ``shared_prefix``.

    Raises
    ------
    ArgumentError
        A cache of other blocks than the runs', and values that are none.

    Notes
    -----
    On the host alone; nothing is launched. Without levels a step reads the keys of each request, shared ones from L2;
    with them what is shared once, for all rows at a time, on kernels that multiply faster, but each level is two more
    launches. So they pay from some 10⁸ bytes on that are read again otherwise.
    """
    if not isinstance(runs, SharedRuns):
        raise ArgumentError("runs", "a SharedRuns, of BlockManager.shared_runs()", type(runs).__name__, function=_NAME)
    check_cache(cache, _NAME)
    if not cache.paged or cache.block_size != runs.block_size:
        expected = f"a PagedKVCache with blocks of {runs.block_size} tokens, as the runs have"
        raise ArgumentError("cache", expected, repr(cache), function=_NAME)
    heads = arguments.check_int(num_q_heads, "num_q_heads", _NAME, least=1, most=arguments.MAX_EXTENT)
    if heads % cache.num_kv_heads:
        expected = f"a multiple of the cache's {cache.num_kv_heads} heads"
        raise ArgumentError("num_q_heads", expected, f"{heads}", function=_NAME)
    levels = arguments.check_int(max_levels, "max_levels", _NAME, least=0)
    groups = None if max_groups is None else arguments.check_int(max_groups, "max_groups", _NAME, least=1)
    place = cache.tensors[0]
    if place.device == "cpu" or not runs.runs or not levels or why_not_shared(cache) is not None:
        return runs.keep(())
    return chosen(runs, keys_of(cache, heads), target_of(runtime.device_info(place.ordinal)), levels, groups)


def keys_of(cache: KVCache, num_q_heads: int) -> Keys:
    """What calls over a cache have in common."""
    k, v = cache.k_format, cache.v_format
    dtype = "bfloat16" if k.quantized else KV_ARRAY_DTYPES[k.dtype]
    return Keys(
        dtype, num_q_heads, cache.num_kv_heads, cache.head_dim, cache.block_size, k.token_bytes + v.token_bytes,
        k.quantized or v.quantized,
    )  # fmt: skip
