"""``decode``: attention of one or a few new tokens of each sequence over its KV cache."""

from __future__ import annotations

from typing import Any

from .. import arguments
from ..checks import decode as checks
from ..checks.caches import check_cache
from ..checks.decode import DecodeOptions
from ..checks.memory import check_memory
from ..checks.sparse import SparseOptions
from ..errors import ArgumentError
from ..frameworks import FUNCTIONS, compiling
from ..kv.cache import KVCache
from ..plan.engine import Call, Operation, repeated, run
from ..plan.others import plan_decode
from . import on_cpu
from .sparse import decode_listed
from .traced import run_traced

_DECODE = Operation(
    "decode", checks.ARRAYS, checks.check_decode, check_memory, plan_decode, on_cpu.decode,
    ("q", "seq_lens"), checks.ALIGNED, traced=run_traced,
)  # fmt: skip


def decode(
    q: Any,
    cache: KVCache,
    *,
    seq_lens: Any = None,
    block_table: Any = None,
    indices: Any = None,
    topk_length: Any = None,
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
        The last q_len tokens of each sequence, 1 to 16 (several in speculative decoding; with ``indices`` any number).
        head_dim is contiguous; the other strides are free (on a GPU multiples of 8 elements, addresses multiples of 16
        bytes). Query head h reads kv head h // (num_q_heads // num_kv_heads). On a GPU a 16-bit cache and a recent
        window have to have q's own type.
    cache : KVCache or PagedKVCache
        With these tokens appended already.
    seq_lens : array, (batch,), int32, on q's device
        Required, but with ``indices``, which take its place.
        Tokens of each sequence, the new ones included: query i sees the keys j <= seq_lens[b] - q_len + i. Checked on
        the CPU; on a GPU that would need a synchronization, and lengths beyond the cache are taken as its end.
    block_table : array, (batch, max_blocks), int32, on q's device
        With a `PagedKVCache`: the block that holds tokens block_size * j and on of sequence b is block_table[b, j].
        Only the entries that seq_lens reaches are looked at.
    indices : array, (batch, q_len, topk), int32, on q's device
        With a latent cache, in the place of seq_lens and block_table: each query token attends to the rows of the cache
        that its list names, block * block_size + token (DeepSeek sparse attention, DeepSeek-V3.2 2025). Contiguous,
        topk 1 or more. Numbers below 0 or beyond the cache are no keys, and a row that is named twice counts twice.
        q_len is any from 1 on; on a GPU the first two dimensions of q, and of out, have to lie as one.
    topk_length : array, (batch, q_len), or (batch,) where q_len is 1, int32, on q's device, optional
        Entries of each list that count, from the first on; all unless given. From 0 to topk: checked on the CPU; on a
        GPU more than topk count as topk, and less than 0 as 0.
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
        Where o goes; o's shape and q's dtype. On a GPU it shares no element with q, the cache or another array. A torch
        tensor counts as changed in place.
    recent_slots : array, (batch,), int32, on q's device
        With a `PagedKVCache` that has a recent_window, as in `append`.
    stream : optional
        As in `attention`.
    deterministic : bool
        The bits of a sequence's result depend on that sequence only, not on the batch it is in. Repeated calls give the
        same bits in any case. On a GPU it takes scratch memory for the whole capacity, not for the lengths: for each
        sequence, kv head and 512 tokens (of latent caches 1024) 4 * head_dim + 8 bytes a query row (q_len times the
        query heads of a kv head, rounded up to whole tiles of 8 to 72).
    shared_prefix : int
        With a `PagedKVCache`: so many first tokens, a multiple of block_size, are in the same blocks for all sequences
        (`BlockManager.fork`), and no query is one of them. Their keys are read for the whole batch together, as those
        of one sequence, and the results merged (cascade): worth it where they do not fit L2, or sequences are many.
        The values are those without it, up to rounding. A sequence with seq_lens 0 pauses: it sees nothing, and its
        blocks are not looked at. Blocks and lengths are checked on the CPU; on a GPU the blocks of the first sequence
        that has the whole prefix are read for all. Not with ``window``, ``deterministic`` or a recent window. On a
        GPU, where q_len > 1, q's first two dimensions have to lie as one.

    Returns
    -------
    o : array, (batch, q_len, num_q_heads, head_dim)
        Of q's framework and dtype; of a latent cache with head_dim_v channels. A row that attends to nothing is 0.
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
    check_cache(cache, "decode")
    if indices is not None:
        _refuse_with_lists(
            seq_lens=seq_lens, block_table=block_table, window=window, recent_slots=recent_slots,
            shared_prefix=_given_prefix(shared_prefix),
        )  # fmt: skip
        options = SparseOptions(softmax_scale, softcap, return_lse, False, deterministic)
        return decode_listed(q, cache, (indices, topk_length, sinks, out), options, stream)
    if topk_length is not None:
        raise ArgumentError("topk_length", "None without indices", type(topk_length).__name__, function="decode")
    if seq_lens is None:
        expected = "an array, int32 of shape (batch,), or indices with a latent cache"
        raise ArgumentError("seq_lens", expected, "NoneType", function="decode")
    said = (window, softmax_scale, softcap, return_lse, deterministic, shared_prefix)
    objects = (q, seq_lens, block_table, sinks, recent_slots, out)
    if compiling():
        results = run_traced(Call(_DECODE, objects, DecodeOptions(*said), stream, cache))
    else:
        known = repeated(_DECODE, objects, said, stream, cache)
        results = (
            run(Call(_DECODE, objects, DecodeOptions(*said), stream, cache), is_asked=True) if known is None else known
        )
    return results[0] if len(results) == 1 else tuple(results)


def _given_prefix(shared_prefix: Any) -> int | None:
    """Tokens of a prefix, None for 0."""
    return arguments.check_int(shared_prefix, "shared_prefix", "decode") or None


def _refuse_with_lists(**given: Any) -> None:
    """What says which keys a query sees, where lists say it."""
    for name, x in given.items():
        if x is not None:
            # An array is not printed: that would read it.
            received = repr(x) if isinstance(x, int | float | tuple) else type(x).__name__
            raise ArgumentError(name, "None with indices, which name each key", received, function="decode")


FUNCTIONS["decode"] = decode
