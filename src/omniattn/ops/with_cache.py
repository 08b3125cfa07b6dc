"""``attention_with_kvcache``: attention of any number of new tokens of each sequence over its KV cache."""

from __future__ import annotations

import functools
import operator
from typing import Any

from .. import arguments
from ..checks import with_cache as checks
from ..checks.caches import check_cache
from ..checks.cascade import is_of_decode
from ..checks.memory import check_memory
from ..checks.with_cache import WithCacheOptions
from ..errors import ArgumentError
from ..frameworks import FUNCTIONS, compiling
from ..kv.cache import KVCache
from ..kv.runs import SharedPrefixes
from ..launch.score_mod import PREFIX
from ..plan.engine import Call, Operation, repeated, run
from ..plan.with_cache import plan_with_cache
from ..runtime import env
from . import on_cpu
from .cascade import in_levels
from .score_mod import ScoreMod
from .traced import run_traced

_NAME = "attention_with_kvcache"


@functools.lru_cache(maxsize=256)
def _with_arrays(more: tuple[str, ...]) -> Operation:
    """The operation on the arrays of a score modification besides."""
    return Operation(
        _NAME, (*checks.ARRAYS, *more), checks.check_with_cache, check_memory, plan_with_cache, on_cpu.with_cache,
        ("q", "seq_lens", *more), checks.ALIGNED, traced=run_traced,
    )  # fmt: skip


_WITH_CACHE = _with_arrays(())


def attention_with_kvcache(
    q: Any,
    cache: KVCache,
    *,
    seq_lens: Any,
    block_table: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
    out: Any = None,
    recent_slots: Any = None,
    batch_index: Any = None,
    leftpad_k: Any = None,
    stream: Any = None,
    deterministic: bool = False,
    shared_prefix: int | SharedPrefixes = 0,
    num_splits: int | None = None,
) -> Any:
    """Attention of the newest tokens of each sequence, prompts and single ones, over all tokens that its cache holds.

    ::

        S = softmax_scale * q @ k.T;  if softcap: S = softcap * tanh(S / softcap);  S = score_mod(S)
        o = softmax(S) @ v            lse = log(sum(exp(S)))       over the keys that a query sees

    Parameters
    ----------
    q : array, (rows, num_q_heads, head_dim) with cu_seqlens_q, or (batch, q_len, num_q_heads, head_dim)
        The last tokens of each sequence: as many as cu_seqlens_q says, or q_len. float16 or bfloat16, on the CPU
        float32 and float64 too. head_dim is contiguous; the other strides are free (on a GPU multiples of 8 elements,
        addresses multiples of 16 bytes; a batch that goes over pages has its first two dimensions as one). Query head h
        reads kv head h // (num_q_heads // num_kv_heads). On a GPU a 16-bit cache and a recent window have to have q's
        own type.
    cache : KVCache or PagedKVCache
        With these tokens appended already. Of one that `append` quantizes, keys and values of prompts are made in 16
        bits first, in scratch memory: see Notes.
    seq_lens : array, (batch,), int32, on q's device
        Tokens of each sequence, the new ones included: query i of n sees the keys j <= seq_lens[b] - n + i. Checked on
        the CPU; on a GPU that would need a synchronization, and lengths beyond the cache are taken as its end.
    block_table : array, (batch, max_blocks), int32, on q's device
        With a `PagedKVCache`: the block that holds tokens block_size * j and on of sequence b is block_table[b, j].
        Only the entries that seq_lens reaches are looked at.
    cu_seqlens_q : array, (batch + 1,), int32, on q's device, optional
        Packed queries: sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], which may be none. 0 first,
        never decreasing; checked on the CPU. Rows that belong to no sequence are 0, with an LSE of -inf.
    max_seqlen_q : int, with cu_seqlens_q
        At least the most rows of a sequence; less raises on the CPU, and gives NaN for that sequence on a GPU where the
        kernels of `decode` run (Notes).
    causal : bool
        Aligned at the bottom right; False: each query sees all keys of its sequence.
    window : (left, right), optional
        A query sees at most ``left`` keys before its own and ``right`` behind it; -1 is unlimited.
    softmax_scale : float, optional
        1 / sqrt(head_dim) unless given.
    softcap : float
        0 for none.
    sinks : array, (num_q_heads,), float32 or q's dtype, optional
        One more logit a head that takes part in the softmax and has no value; LSE counts it.
    score_mod : ScoreMod, optional
        A function of yours of each score, compiled into the kernel. Query i is the i-th new token of its sequence.
    return_lse : bool
        Also return the log-sum-exp.
    out : array, optional
        Where o goes; o's shape and q's dtype, by q's rules. On a GPU it shares no element with q, the cache or another
        array. A torch tensor counts as changed in place.
    recent_slots : array, (batch,), int32, on q's device
        With a `PagedKVCache` that has a recent_window, as in `append`.
    batch_index : array, (batch,), int32, on q's device, optional
        With a `KVCache`: the sequence of the cache that each sequence of the call reads, b unless given. Numbers may
        repeat. Checked on the CPU; on a GPU the results of others are unspecified.
    leftpad_k : array, (batch,), int32, on q's device, optional
        Tokens in front of each sequence that are padding: seq_lens counts them, no query sees them, and key 0 of a
        score modification is the first behind them. With it keys and values are copied first, whatever the queries
        are. More than seq_lens counts as that, less than 0 as 0.
    stream : optional
        As in `attention`.
    deterministic : bool
        The bits of a sequence do not depend on the rest of the batch, nor on max_seqlen_q. Repeated calls give the same
        bits in any case. Not for packed prompts over a cache with a recent_window.
    shared_prefix : int or SharedPrefixes
        Keys that sequences have in the same blocks of a `PagedKVCache` are attended once for all their queries, and
        results merged (cascade); seq_lens and block_table are as without it, and so are the values, up to rounding.
        An int: so many first tokens of all sequences, as in `decode`, here of prompts and packed rows too. A packed
        sequence that pauses (seq_lens 0) has no rows. `SharedPrefixes`: several levels, groups of sequences in each,
        made by `SharedRuns.arrays`; they are what is read on a GPU, and checked against seq_lens and block_table on the
        CPU. `choose_shared_runs` says whether it pays. Not with ``window`` on the left, ``deterministic``,
        ``score_mod``, ``leftpad_k`` or a recent window. On a GPU the first two dimensions of a batch lie as one.
    num_splits : int, optional
        Parts at most into which the keys of a sequence are divided among CTAs; for few queries a part has 128, 256, 512
        ... keys. Unless given, selection finds how many are fastest. Not with deterministic, whose parts have 512 keys,
        of latent caches 1024.

    Returns
    -------
    o : array
        Of q's framework, shape and dtype; of a latent cache with head_dim_v channels. A row that attends to nothing is
        0.
    lse : array, (num_q_heads, rows) of packed queries, (batch, num_q_heads, q_len) of a batch, float32, natural log
        Only with ``return_lse``; it may be a view with other strides than a contiguous array's. A row that attends to
        nothing has -inf (with sinks: the sink).

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`. UnsupportedError names what the cache or an option does not have, and what is served.

    Notes
    -----
    A few new tokens a sequence (16; of a quantized cache but a latent one up to 128 rows a kv head) run the kernels of
    `decode`, prompts and score_mod attention over pages, which a latent cache has not; where packed queries are few
    beside batch times max_seqlen_q, both run at the same time: `explain` says which. The shape of the call alone
    decides. Scratch memory of prompts over quantized caches: up to 1 GiB, one sequence's keys and values at least
    (those of a window, where there is one), or a 64th of those of the whole batch; sequences that do not fit together
    go through it one after the other.

    Shared keys of a level are those of attention over pages, of packed queries that see them all; then come the calls
    over the sequences' own keys, and a `merge_states` a level. Which groups there are lies on the device.

    GPUs: compute capability 8.0 and newer; arrays on the CPU run the NumPy reference. Nothing is synchronized: a call
    captured in a CUDA graph may be replayed with other lengths, starts and tables in the same arrays. PagedAttention
    (Kwon et al. 2023).
    """
    check_cache(cache, _NAME)
    said = (max_seqlen_q, causal, window, softmax_scale, softcap, return_lse, deterministic, shared_prefix, num_splits)
    objects = (q, seq_lens, block_table, cu_seqlens_q, sinks, recent_slots, batch_index, leftpad_k, out)
    if shared_prefix.__class__ is not int or shared_prefix:
        shared = _levels(q, cache, shared_prefix, causal, packed=cu_seqlens_q is not None)
        if shared is not None:
            return in_levels(attention_with_kvcache, cache, shared, objects, WithCacheOptions(*said), score_mod, stream)
    if compiling():
        results = run_traced(Call(_WITH_CACHE, objects, WithCacheOptions(*said), stream, cache, None, score_mod))
    elif score_mod is None:
        known = repeated(_WITH_CACHE, objects, said, stream, cache)
        results = (
            run(Call(_WITH_CACHE, objects, WithCacheOptions(*said), stream, cache), is_asked=True)
            if known is None
            else known
        )
    else:
        results = run(_with_score_mod(objects, WithCacheOptions(*said), stream, cache, score_mod))
    if len(results) == 1:
        return results[0]
    return results[0], _as_queries_lie(results[1], None if cu_seqlens_q is not None else q.shape)


def _levels(q: Any, cache: KVCache, shared: Any, causal: Any, *, packed: bool) -> int | SharedPrefixes | None:
    """What ``shared_prefix`` is of a call that runs in levels; None of one that does not, or that its check refuses."""
    if isinstance(shared, SharedPrefixes):
        return shared
    try:
        tokens = operator.index(shared)
    except TypeError:
        return None
    shape = arguments.shape_of(q) or ()
    by_decode = isinstance(shared, bool) or tokens <= 0 or is_of_decode(shape, cache, causal, packed=packed)
    return None if by_decode or compiling() else tokens


def _with_score_mod(objects: tuple[Any, ...], options: WithCacheOptions, stream: Any, cache: KVCache, mod: Any) -> Call:
    """A call with a score modification."""
    if not isinstance(mod, ScoreMod):
        raise ArgumentError("score_mod", "an omniattn.ScoreMod", type(mod).__name__, function=_NAME)
    operation = _with_arrays(tuple(PREFIX + name for name in mod.arrays))
    texts = (mod.expression, mod.mask, env.get("OMNIATTN_CHECK_SCORE_MOD"), mod.reference is None)
    return Call(operation, (*objects, *mod.arrays.values()), options, stream, cache, texts, mod)


def _as_queries_lie(lse: Any, batch: Any) -> Any:
    """The LSE as the caller's queries lie; batch: their shape where they are one, None where they are packed.

    Kernels of `decode` write (batch, heads, q_len), those over pages (heads, rows).
    """
    if batch is None or len(lse.shape) == 3:
        return lse
    return lse.reshape(lse.shape[0], batch[0], batch[1]).swapaxes(0, 1)


FUNCTIONS[_NAME] = attention_with_kvcache
