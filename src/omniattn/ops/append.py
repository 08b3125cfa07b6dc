"""``append``: new tokens into a KV cache; and copies of blocks and slots inside one."""

from __future__ import annotations

from typing import Any

from .. import arrays
from ..arrays import Tensor
from ..checks import append as checks
from ..checks.append import AppendOptions, check_pairs
from ..checks.caches import check_cache
from ..checks.memory import check_memory
from ..errors import ArgumentError, UnsupportedError, telling
from ..frameworks import FUNCTIONS, compiling
from ..kv.cache import KVCache, PagedKVCache
from ..plan.engine import Call, Operation, repeated, run
from ..plan.others import plan_append, plan_copy
from ..problems import CopyProblem
from . import on_cpu
from .traced import run_traced

_APPEND = Operation(
    "append", checks.ARRAYS, checks.check_append, check_memory, plan_append, on_cpu.append,
    ("k",), checks.ALIGNED, writes_cache=True, traced=run_traced,
)  # fmt: skip


def _check_copy(call: Call, tensors: dict[str, Tensor]) -> CopyProblem:
    assert call.cache is not None
    return CopyProblem(call.cache.facts, *call.options)


_COPIES = {
    name: Operation(name, (), _check_copy, check_memory, plan_copy, on_cpu.copy, keep=False, writes_cache=True)
    for name in ("copy_blocks", "copy_recent")
}


def append(
    cache: KVCache,
    k: Any,
    v: Any = None,
    *,
    k_pe: Any = None,
    seq_lens: Any = None,
    cu_seqlens: Any = None,
    block_table: Any = None,
    slot_mapping: Any = None,
    positions: Any = None,
    cos: Any = None,
    sin: Any = None,
    rope: str = "half",
    recent_slots: Any = None,
    stream: Any = None,
) -> None:
    """Write new tokens into a cache: rotary embedding of K (optional), quantization and scatter in one kernel.

    Token i of the n new ones of sequence b goes to position seq_lens[b] - n + i; or, with slot_mapping, token i to slot
    slot_mapping[i].

    Parameters
    ----------
    cache : KVCache or PagedKVCache
        Written in place, as which torch counts it.
    k, v : array, (batch, tokens, num_kv_heads, head_dim)
        Packed, (rows, num_kv_heads, head_dim), with cu_seqlens or slot_mapping.
        float16 or bfloat16, on the CPU float32 and float64 too; head_dim contiguous, the other strides free (on a GPU
        multiples of 8 elements, addresses multiples of 16 bytes). Nothing of them lies in the cache.
        Of a latent cache (``head_dim_v``) k alone: rows of head_dim channels, or with k_pe of head_dim_v; the dimension
        of the one head may be left out.
    k_pe : array, optional
        Latent caches: the channels behind the first head_dim_v, which cos and sin rotate; shape and dtype like k's.
    seq_lens : array, (batch,), int32, on k's device; with slot_mapping left out
        Tokens of each sequence, the new ones included: what `decode` takes afterwards. Checked on the CPU; on a GPU
        that would need a synchronization, and tokens whose place is outside the cache are not written.
    cu_seqlens : array, (batch + 1,), int32, optional
        Packed k and v: row at which each sequence's tokens begin, and the end of the last one's.
    block_table : array, (batch, max_blocks), int32
        With a `PagedKVCache`, as in `decode`; only the entries of blocks with new tokens are looked at. These blocks
        must belong to one sequence only: `BlockManager.extend` sees to that.
    slot_mapping : array, (slots,), int32 or int64, on k's device, optional
        Where packed tokens go, in place of seq_lens, cu_seqlens and block_table: row slot % block_size of block slot //
        block_size (of a `KVCache`, of a sequence). A token with a negative slot is not written, nor those of k and v
        behind the last slot. A slot beyond the cache raises on the CPU; on a GPU its token is not written. Of tokens
        with one slot any may be the one that stays. Not with a recent_window.
    positions : array, (positions,), int32 or int64, on k's device
        With slot_mapping and cos: position of each token, which its key is rotated by; at least as many as there are
        slots.
    cos, sin : array, (positions, pairs), float32, contiguous, optional
        Both: K's first 2 * pairs channels (of a latent cache the first ones behind V's) are rotated by the angle of
        their position. A position without a row raises on the CPU; on a GPU what is rotated is NaN.
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

    Latent rows in e4m3 are codes of x / scale, rounded to nearest, and beyond the largest code that one. In rows of 656
    bytes ("fp8_ds_mla") the scale of 128 channels is max(max|x| / 448, 2^-126), and NaN, with codes of 0, where one is
    not finite; the last 64 channels are rounded to bfloat16.
    """
    check_cache(cache, "append")
    objects = (k, v, seq_lens, cu_seqlens, block_table, cos, sin, recent_slots, slot_mapping, positions, k_pe)
    if compiling():
        run_traced(Call(_APPEND, objects, AppendOptions(rope), stream, cache))
    elif repeated(_APPEND, objects, (rope,), stream, cache) is None:
        run(Call(_APPEND, objects, AppendOptions(rope), stream, cache), is_asked=True)


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
    pairs = check_pairs(copies, cache.num_blocks, "blocks", function)
    _copy(function, cache, False, pairs, stream)


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
    pairs = check_pairs(copies, cache.recent_slots, "slots", function)
    _copy(function, cache, True, pairs, stream)


def _copy(function: str, cache: KVCache, recent: bool, pairs: list[tuple[int, int]], stream: Any) -> None:
    if cache.traced:
        raise UnsupportedError(
            f"{function}(): a KV cache of JAX in a function that JAX traces", instead=f"{function}() outside of it"
        )
    if not pairs:
        telling(function, arrays.prepare, cache.tensors, stream)  # refuses a stream that is none
        return
    run(Call(_COPIES[function], (), (recent, tuple(pairs)), stream, cache))


FUNCTIONS["append"] = append
