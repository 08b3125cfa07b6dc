"""``decode_sharded`` and ``append_sharded``: caches each of which holds a part of every sequence's tokens.

Each rank decodes all heads over its own tokens. What it found goes to the others in one collective operation, as one
record a head: o of all queries, then their LSEs in float32, rounded up to 16 bytes. Partial results are merged in
pairs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from .. import arrays
from ..arguments import MAX_ROWS, check_bool, check_int, kind_of
from ..checks import values
from ..checks.caches import check_cache
from ..errors import (
    ArgumentError,
    CommunicationError,
    DeviceError,
    DtypeError,
    OmniattnError,
    ShapeError,
    UnsupportedError,
)
from ..kv.cache import KVCache
from ..ops.append import append
from ..ops.decode import decode
from ..ops.merge import merge_states
from ..problems.decode import MAX_Q_LEN
from .exchange import Group, group_of, meet
from .parts import asks_to_agree, check_tensor, settle
from .places import LocalTokens, check_lengths, check_new_tokens, check_strided, found_tokens, places_of

_ALIGNMENT = 16
HEADS = ("all", "own")


@torch.compiler.disable
def decode_sharded(
    q: Any,
    cache: KVCache,
    *,
    seq_lens: Any,
    block_table: Any = None,
    group: Any = None,
    interleave: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    heads: str = "all",
    return_lse: bool = False,
    deterministic: bool = False,
    agree_first: bool | None = None,
) -> Any:
    """`decode` over sequences whose tokens are divided among the caches of the ranks of a group.

    ::

        decode_sharded(q, part of the cache) = decode(q, whole cache)        on every rank, up to rounding

    Parameters
    ----------
    q : torch.Tensor, (batch, q_len, num_q_heads, head_dim)
        As `omniattn.decode` takes it: 1 to 16 new tokens. The same on all ranks of the group.
    cache : KVCache or PagedKVCache
        This rank's, of any format and also latent, as `append_sharded` fills it: token t of a sequence is on rank
        (t // interleave) % n, in the order of the tokens. Not with a recent_window.
    seq_lens : torch.Tensor, (batch,), int32; or LocalTokens
        Tokens of each whole sequence, the new ones included; the same on all ranks. Of several layers `local_tokens`
        makes once what depends on it.
    block_table : torch.Tensor, (batch, max_blocks), int32
        With a `PagedKVCache`: this rank's blocks of this rank's tokens.
    group : ProcessGroup or DeviceMesh of one dimension, optional
        The default group unless given.
    interleave : int, optional
        Neighbouring tokens that are on one rank: 1, or what seq_lens says, unless given.
    softmax_scale, softcap, sinks, deterministic
        As in `omniattn.decode`. One rank counts the sinks.
    heads : "all" or "own"
        "all": every rank gets the result of all query heads, by an all-gather. "own": rank r of n gets heads r * H / n
        to (r + 1) * H / n, by an all-to-all of 1 / n of the bytes.
    return_lse : bool
    agree_first : bool, optional
        As in `ring_attention`.

    Returns
    -------
    o : torch.Tensor, (batch, q_len, num_q_heads or num_q_heads / n, head_dim)
        q's dtype; of a latent cache with head_dim_v channels. A row that attends to nothing is 0. The same bits on all
        ranks.
    lse : torch.Tensor, (batch, heads, q_len), float32, natural logarithm
        Only with ``return_lse``. A row that attends to nothing has -inf (with sinks: the sink).

    Raises
    ------
    ArgumentError
        Or its subclasses: names the argument, what was expected and what came.
    CommunicationError
        As in `ring_attention`.
    UnsupportedError
        A cache with a recent_window. There is no ``window``: it would be of another length on each rank, and its tokens
        are few enough for one.

    Notes
    -----
    Partial results have q's dtype; two are merged with one rounding, more in float32. With q_len > 1 each query token
    has its own number of keys here, and is decoded as a sequence of its own, which reads the cache q_len times; of a
    `KVCache` in q_len launches. With NCCL nothing waits on the host, and a call may be captured in a CUDA graph and
    replayed with other lengths. Sequences sharded over ranks: Flash-Decoding's split-KV (Dao et al. 2023) across GPUs.
    """
    function = "decode_sharded"
    at = _group_of(group, seq_lens, function)
    failure: OmniattnError | None = None
    mine: _Records | None = None
    facts: dict[str, Any] = dict.fromkeys(
        ("q", "sinks", "softmax_scale", "softcap", "heads", "interleave", "cache", "seq_lens")
    )
    try:
        agree_first = asks_to_agree(agree_first, q, at, function)
        check_bool(return_lse, "return_lse", function)
        check_tensor(q, "q", function)
        check_strided(q, "q", function)
        if not isinstance(heads, str) or heads not in HEADS:
            raise ArgumentError("heads", " or ".join(map(repr, HEADS)), repr(heads), function=function)
        _check_cache(cache, function)
        _check_queries(q, at, heads, function)
        interleave = _interleave_of(interleave, seq_lens, function)
        tokens = _tokens_of(seq_lens, q, at, interleave, function)
        options: dict[str, Any] = {
            "softmax_scale": softmax_scale, "softcap": softcap, "deterministic": deterministic, "return_lse": True,
        }  # fmt: skip
        if sinks is not None:
            described = arrays.describe_of(function, sinks, "sinks")
            arrays.require_same_device([arrays.describe_of(function, q, "q"), described])
            values.check_sinks(described, q.shape[2], str(q.dtype).removeprefix("torch."), function)
        # A sink is counted once; a rank without a token of the sequence may be the one that does.
        if at.rank == 0:
            options["sinks"] = sinks
        mine = _Records(q, cache.v_format.head_dim)
        _decode(q, cache, tokens, block_table, options, mine)
        if agree_first:
            facts = {
                "q": (tuple(q.shape), str(q.dtype)), "sinks": sinks is not None,
                "softmax_scale": _number(softmax_scale), "softcap": _number(softcap), "heads": heads,
                "interleave": interleave, "cache": mine.head_dim, "seq_lens": tokens.seq_lens.tolist(),
            }  # fmt: skip
    except ArgumentError as error:
        failure = error.named(function)
    except OmniattnError as error:
        failure = error
    settle(at, q, function, facts, failure, agree_first)
    assert mine is not None
    meet(at, q.device, function)
    o, lse = merged(*mine.of_all(at, heads, function))
    return (o, lse) if return_lse else o


def _number(x: Any) -> Any:
    """As a float, so that 0 and 0.0 are the same on two ranks; None stays None."""
    return x if x is None else float(x)


def append_sharded(
    cache: KVCache,
    k: Any,
    v: Any = None,
    *,
    k_pe: Any = None,
    seq_lens: Any,
    cu_seqlens: Any = None,
    block_table: Any = None,
    group: Any = None,
    interleave: int | None = None,
    cos: Any = None,
    sin: Any = None,
    rope: str = "half",
) -> None:
    """Write those of some new tokens that belong to this rank into its cache. No rank waits for another.

    Parameters
    ----------
    cache : KVCache or PagedKVCache
        This rank's.
    k, v, k_pe : torch.Tensor, (batch, tokens, num_kv_heads, head_dim)
        As `omniattn.append` takes them: all new tokens, the same on all ranks. Packed, (rows, num_kv_heads, head_dim),
        with ``cu_seqlens``.
    seq_lens : torch.Tensor, (batch,), int32; or LocalTokens
        As in `decode_sharded`: tokens of each whole sequence, the new ones included.
    cu_seqlens : torch.Tensor, (batch + 1,), int32, optional
        As in `omniattn.append`; with a seq_lens that is a tensor.
    block_table : torch.Tensor, (batch, max_blocks), int32
        With a `PagedKVCache`: blocks with room for ``local_seqlen`` tokens.
    group, interleave
        As in `decode_sharded`.
    cos, sin, rope
        As in `omniattn.append`; rows are positions in the whole sequence.

    Raises
    ------
    ArgumentError, UnsupportedError
        As in `decode_sharded`. A token whose place is outside the cache raises on the CPU; on a GPU it is not written.
    """
    function = "append_sharded"
    at = _group_of(group, seq_lens, function)
    _check_cache(cache, function)
    for name, x in (("k", k), ("v", v), ("k_pe", k_pe)):
        if x is not None or name == "k":
            check_tensor(x, name, function)
            check_strided(x, name, function)
    interleave = _interleave_of(interleave, seq_lens, function)
    packed = cu_seqlens is not None
    _check_device(seq_lens.seq_lens if isinstance(seq_lens, LocalTokens) else seq_lens, "seq_lens", k, function)
    fewest, most = (2, 3) if packed else (3, 4)  # a latent cache's keys may leave out their one head
    if not fewest <= k.dim() <= most or (k.dim() == fewest and not cache.facts.is_latent):
        raise ShapeError("k", f"{most} dimensions", f"shape {tuple(k.shape)}", function=function)
    for name, x in (("v", v), ("k_pe", k_pe)):
        # Flattened they would be as many rows in any order of batch and tokens.
        if x is not None and x.shape[: fewest - 1] != k.shape[: fewest - 1]:
            expected = f"{tuple(k.shape[: fewest - 1])} at the beginning, like k"
            raise ShapeError(name, expected, f"shape {tuple(x.shape)}", function=function)
    if packed:
        positions, sequences = _packed_positions(seq_lens, cu_seqlens, k.shape[0], function)
        places = places_of(positions, at, interleave)
    else:
        tokens = seq_lens
        if not isinstance(tokens, LocalTokens):
            tokens = found_tokens(seq_lens, k.shape[1], at, interleave, function)
        shape = (tokens.seq_lens.shape[0], tokens.q_len)
        if tuple(k.shape[:2]) != shape:
            expected = f"(batch, tokens) = {shape}, as seq_lens says"
            raise ShapeError("k", expected, f"shape {tuple(k.shape)}", function=function)
        if k.device.type == "cpu":
            starts = [b * shape[1] for b in range(shape[0] + 1)]
            check_new_tokens(tokens.seq_lens, starts, math.prod(shape), function)
        positions, places = tokens.positions.flatten(), tokens.places.flatten()
        sequences = torch.arange(shape[0], device=k.device).repeat_interleave(shape[1], output_size=math.prod(shape))
    batch = (seq_lens.seq_lens if isinstance(seq_lens, LocalTokens) else seq_lens).shape[0]
    slots = _slots(cache, places, sequences, block_table, batch, function)
    if not packed:
        k, v, k_pe = (None if x is None else x.flatten(0, 1) for x in (k, v, k_pe))
    rotation = {} if cos is None and sin is None else {"cos": cos, "sin": sin, "positions": positions.clamp_min(0)}
    try:
        append(cache, k, v, k_pe=k_pe, slot_mapping=slots, rope=rope, **rotation)
    except ArgumentError as error:
        raise error.named(function, positions="cos", slot_mapping="block_table") from None


def _group_of(group: Any, seq_lens: Any, function: str) -> Group:
    """The caller's group: that of `LocalTokens` is in them."""
    if isinstance(seq_lens, LocalTokens):
        if group is not None and group_of(group, function).handle is not seq_lens.group.handle:
            raise ArgumentError("group", "None, or the group of seq_lens", "another group", function=function)
        return seq_lens.group
    return group_of(group, function)


def _interleave_of(interleave: Any, seq_lens: Any, function: str) -> int:
    """The caller's, or that of `LocalTokens`."""
    of_tokens = seq_lens.interleave if isinstance(seq_lens, LocalTokens) else None
    if interleave is None:
        return of_tokens or 1
    found = check_int(interleave, "interleave", function, least=1, most=MAX_ROWS)
    if of_tokens not in (None, found):
        raise ArgumentError("interleave", f"None, or {of_tokens} as in seq_lens", f"{found}", function=function)
    return found


def _check_cache(cache: Any, function: str) -> None:
    check_cache(cache, function)
    if cache.recent_window:
        raise UnsupportedError(
            f"{function}(): a cache with a recent_window, whose newest tokens are on several ranks",
            instead="a cache without recent_window, whose formats are the same",
        )


def _check_device(x: Any, argument: str, like: Any, function: str) -> None:
    if isinstance(x, torch.Tensor) and x.device != like.device:
        raise DeviceError(argument, f"a tensor on {like.device}", f"one on {x.device}", function=function)


def _check_queries(q: Any, group: Group, heads: str, function: str) -> None:
    if q.dim() != 4:
        expected = "4 dimensions (batch, q_len, num_q_heads, head_dim)"
        raise ShapeError("q", expected, f"shape {tuple(q.shape)}", function=function)
    if not 1 <= q.shape[1] <= MAX_Q_LEN:
        raise ShapeError("q", f"q_len from 1 to {MAX_Q_LEN}", f"{q.shape[1]}", function=function)
    if heads == "own" and q.shape[2] % group.size:
        expected = f"a multiple of {group.size} heads, one for each rank, with heads='own'"
        raise ShapeError("q", expected, f"{q.shape[2]}", function=function)


def _tokens_of(seq_lens: Any, q: Any, group: Group, interleave: int, function: str) -> LocalTokens:
    if not isinstance(seq_lens, LocalTokens):
        seq_lens = found_tokens(seq_lens, q.shape[1], group, interleave, function)
    _check_device(seq_lens.seq_lens, "seq_lens", q, function)
    if q.device.type == "cpu":
        bad = [(b, n) for b, n in enumerate(seq_lens.seq_lens.tolist()) if n < 0]
        if bad:
            raise ArgumentError("seq_lens", "0 or more", f"{bad[0][1]} at {bad[0][0]}", function=function)
    if tuple(seq_lens.local.shape) != tuple(q.shape[:2]):
        batch, q_len = seq_lens.local.shape
        expected = f"shape ({batch}, {q_len}, heads, head_dim), as seq_lens says"
        raise ShapeError("q", expected, f"{tuple(q.shape)}", function=function)
    return seq_lens


def _decode(q: Any, cache: KVCache, tokens: LocalTokens, table: Any, options: dict[str, Any], mine: _Records) -> None:
    """o and LSE of all queries over this rank's tokens, into its records."""
    batch, q_len = tokens.local.shape
    if q_len == 1:
        lse = decode(q, cache, seq_lens=tokens.last, block_table=table, out=mine.o, **options)[1]
        mine.lse.copy_(lse)
        return
    per_sequence = cache.facts.scales is not None and bool(cache.facts.scales.sequences)
    if cache.paged and not per_sequence:
        # A query token as a sequence of its own: each has its own number of keys here.
        _check_table(table, batch, q, "decode_sharded")
        each = table.repeat_interleave(q_len, 0, output_size=batch * q_len)
        o, lse = decode(
            q.reshape(batch * q_len, 1, *q.shape[2:]), cache, seq_lens=tokens.local.flatten(), block_table=each,
            **options,
        )  # fmt: skip
        mine.o.copy_(o.view(mine.o.shape))
        mine.lse.copy_(lse.view(batch, q_len, q.shape[2]).transpose(1, 2))
        return
    for i in range(q_len):
        here = slice(i, i + 1)
        seq_lens = tokens.local[:, i].contiguous()
        _, lse = decode(q[:, here], cache, seq_lens=seq_lens, block_table=table, out=mine.o[:, here], **options)
        mine.lse[:, :, here].copy_(lse)


class _Records:
    """What a rank found, as it is sent.

    Parameters
    ----------
    q : torch.Tensor, (batch, q_len, num_q_heads, head_dim)
    head_dim : int
        Of o.
    """

    def __init__(self, q: Any, head_dim: int) -> None:
        self.batch, self.q_len, self.heads = q.shape[:3]
        self.head_dim, self.dtype = head_dim, q.dtype
        rows = self.batch * self.q_len
        self.lse_at = rows * head_dim * q.element_size()
        self.bytes = -(-(self.lse_at + 4 * rows) // _ALIGNMENT) * _ALIGNMENT
        self.buffer = torch.empty((self.heads, self.bytes), dtype=torch.uint8, device=q.device)
        o, lse = self._views(self.buffer[None])
        self.o, self.lse = o[0], lse[0]

    def _views(self, buffer: Any) -> tuple[Any, Any]:
        """o (ranks, batch, q_len, heads, head_dim) and LSE (ranks, batch, heads, q_len) in (ranks, heads, bytes)."""
        ranks, heads, size = buffer.shape
        if 0 in (heads, size):
            o = torch.empty(
                (ranks, self.batch, self.q_len, heads, self.head_dim), dtype=self.dtype, device=buffer.device
            )
            return o, o.new_empty((ranks, self.batch, heads, self.q_len), dtype=torch.float32)
        record = size // self.dtype.itemsize
        o = buffer.view(self.dtype).as_strided(
            (ranks, self.batch, self.q_len, heads, self.head_dim),
            (heads * record, self.q_len * self.head_dim, self.head_dim, record, 1),
        )
        words = size // 4
        lse = buffer.view(torch.float32).as_strided(
            (ranks, self.batch, heads, self.q_len), (heads * words, self.q_len, words, 1), self.lse_at // 4
        )
        return o, lse

    def of_all(self, group: Group, heads: str, function: str) -> tuple[Any, Any]:
        """What all ranks found of all heads, or of this rank's."""
        own = self.heads // group.size if heads == "own" else self.heads
        received = self.buffer.new_empty((group.size, own, self.bytes))
        if group.size == 1:
            return self._views(self.buffer[None])
        try:
            if not received.numel():
                pass
            elif heads == "own":
                dist.all_to_all_single(received.flatten(), self.buffer.flatten(), group=group.handle)
            else:
                dist.all_gather_into_tensor(received.flatten(), self.buffer.flatten(), group=group.handle)
        except RuntimeError as error:
            raise CommunicationError(
                f"{function}(): the exchange of partial results failed ({error})",
                "see whether another rank raised before, or was called with other arguments",
            ) from error
        return self._views(received)


def merged(o: Any, lse: Any) -> tuple[Any, Any]:
    """Partial results of disjoint keys, o (ranks, batch, rows, heads, head_dim) and LSE (ranks, batch, heads, rows).

    Two with one rounding. More in float32, halves with halves: log2(ranks) launches, in the same order on all ranks.
    """
    ranks = o.shape[0]
    if ranks == 1:
        return o[0].contiguous(), lse[0].contiguous()
    if ranks == 2:
        return merge_states(o[0], lse[0], o[1], lse[1])
    count = 1 << (ranks - 1).bit_length()
    total = o.new_empty((count, *o.shape[1:]), dtype=torch.promote_types(o.dtype, torch.float32))
    total[:ranks].copy_(o)
    total[ranks:].zero_()
    logs = lse.new_full((count, *lse.shape[1:]), -torch.inf)
    logs[:ranks].copy_(lse)
    while count > 1:
        count //= 2
        a, b = total[:count].flatten(0, 1), total[count : 2 * count].flatten(0, 1)
        _, found = merge_states(a, logs[:count].flatten(0, 1), b, logs[count : 2 * count].flatten(0, 1), out=a)
        logs = found.view(count, *logs.shape[1:])
    return total[0].to(o.dtype), logs[0]


def _packed_positions(seq_lens: Any, cu_seqlens: Any, rows: int, function: str) -> tuple[Any, Any]:
    """Position of each packed token in its sequence, -1 behind the last one, and the number of the sequence."""
    if isinstance(seq_lens, LocalTokens):
        expected = "a tensor with cu_seqlens: sequences have different numbers of new tokens"
        raise ArgumentError("seq_lens", expected, "LocalTokens", function=function)
    check_lengths(seq_lens, function)
    check_lengths(cu_seqlens, function, "cu_seqlens")
    _check_device(cu_seqlens, "cu_seqlens", seq_lens, function)
    batch = seq_lens.shape[0]
    if cu_seqlens.shape[0] != batch + 1:
        raise ShapeError("cu_seqlens", f"shape ({batch + 1},)", f"{tuple(cu_seqlens.shape)}", function=function)
    if seq_lens.device.type == "cpu":
        check_new_tokens(seq_lens, cu_seqlens.tolist(), rows, function)
    row = torch.arange(rows, dtype=torch.int32, device=seq_lens.device)
    if batch == 0:
        return torch.full((rows,), -1, dtype=torch.int64, device=seq_lens.device), row.to(torch.int64)
    sequences = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    inside = sequences < batch
    sequences = sequences.clamp_max(batch - 1)
    positions = (seq_lens[sequences] - cu_seqlens[sequences + 1] + row).to(torch.int64)
    return torch.where(inside, positions, -1), sequences


def _check_table(table: Any, batch: int, like: Any, function: str) -> None:
    """Shape, dtype and device of a paged cache's block table."""
    if not isinstance(table, torch.Tensor):
        expected = "an int32 tensor of shape (batch, max_blocks), with a PagedKVCache"
        raise ArgumentError("block_table", expected, type(table).__name__, function=function)
    check_strided(table, "block_table", function)
    if table.dtype is not torch.int32:
        raise DtypeError("block_table", "int32", str(table.dtype).removeprefix("torch."), function=function)
    if table.dim() != 2 or table.shape[0] != batch or table.shape[1] < 1:
        expected = f"shape ({batch}, max_blocks), max_blocks >= 1"
        raise ShapeError("block_table", expected, f"{tuple(table.shape)}", function=function)
    _check_device(table, "block_table", like, function)


def _slots(cache: KVCache, places: Any, sequences: Any, table: Any, batch: int, function: str) -> Any:
    """Slot of each token, int64; -1 for tokens of other ranks, and on a GPU for those that have no room here."""
    size = cache.block_size
    if cache.paged:
        _check_table(table, batch, places, function)
        room = table.shape[1] * size
    elif table is not None:
        raise ArgumentError("block_table", "None with a KVCache", kind_of(table), function=function)
    elif batch > cache.num_blocks:
        expected = f"at most the cache's {cache.num_blocks} sequences"
        raise ShapeError("seq_lens", expected, f"{batch}", function=function)
    else:
        room = size
    if places.device.type == "cpu" and places.numel() and int(places.max()) >= room:
        expected = f"at most {room} tokens of a sequence on this rank"
        raise ArgumentError("seq_lens", expected, f"{int(places.max()) + 1}", function=function)
    block = sequences
    if cache.paged:
        column = (places // size).clamp(0, table.shape[1] - 1)
        block = table[sequences, column].to(torch.int64)
        if places.device.type == "cpu":
            bad = ((places >= 0) & ((block < 0) | (block >= cache.num_blocks))).nonzero().flatten().tolist()
            if bad:
                received = f"{int(block[bad[0]])} at sequence {int(sequences[bad[0]])}"
                raise ArgumentError("block_table", f"blocks 0 to {cache.num_blocks - 1}", received, function=function)
        # A block that is not there has a negative number.
        places = torch.where(block < 0, -1, places)
    return torch.where((places >= 0) & (places < room), block * size + (places % size if cache.paged else places), -1)
