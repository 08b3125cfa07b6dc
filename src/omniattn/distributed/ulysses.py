"""``ulysses_attention``: tokens divided among ranks become heads divided among ranks, and back, by two all-to-alls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..arguments import check_bool
from ..errors import ArgumentError, OmniattnError, ShapeError
from ..ops.attention import attention
from ..problems import Auto, Fp8, Int4, Int8
from .exchange import Group, exchange, group_of, meet
from .parts import asks_to_agree, settle
from .ring import Asked, as_tensors, check, facts_of, no_facts, ring_attention
from .schedule import SCHEDULES, Range, check_schedule, chunks_of, length_of

#: Behind those of a ring's steps.
_TAG = 1 << 20


@dataclass(frozen=True)
class Split:
    """Of a tensor (batch, seq, heads, dim): who has which tokens before, and which heads after.

    Attributes
    ----------
    tokens, heads : tuple of (int, int)
        Ranges by rank. Heads may overlap: a kv head that query heads of several ranks read.
    """

    tokens: tuple[Range, ...]
    heads: tuple[Range, ...]


@torch.compiler.disable
def ulysses_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any = None,
    ring_group: Any = None,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    precision: str | Int8 | Int4 | Fp8 | Auto = "exact",
    schedule: str = "zigzag",
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    agree_first: bool | None = None,
) -> Any:
    """Attention over sequences whose tokens are divided among ranks; each rank computes some of the heads.

    ::

        unshard(ulysses_attention(shard(q), shard(k), shard(v))) = attention(q, k, v)      with schedule "contiguous"

    Parameters
    ----------
    q : torch.Tensor, (batch, seqlen_q of this rank, num_q_heads, head_dim) for "NHD", heads before seqlen for "HND"
        As `omniattn.attention` takes it. num_q_heads is a multiple of the group's ranks.
    k, v : torch.Tensor
        The same with seqlen_k of this rank and num_kv_heads: a multiple of the group's ranks, or a divisor, in which
        case a kv head goes to each rank that reads it.
    group : ProcessGroup or DeviceMesh of one dimension, optional
        Whose ranks divide the heads: the default group unless given. They hold the tokens in order, as
        ``shard(x, dim, group=group, schedule="contiguous")`` gives them.
    ring_group : ProcessGroup or DeviceMesh of one dimension, optional
        The other dimension of a mesh: its ranks divide the sequence by ``schedule``, and `ring_attention` runs between
        them on the heads of each. The tokens of a rank are those of ``shard(shard(x, dim, group=ring_group,
        schedule=schedule), dim, group=group, schedule="contiguous")``.
    layout, causal, window, softmax_scale, softcap
        As in `omniattn.attention`, of the whole sequence.
    sinks : torch.Tensor, (num_q_heads,), optional
        The same on all ranks. Their gradient is that of what this rank computed: its sum over ranks is the whole one.
    precision : str, Int8, Int4, Fp8 or Auto
        As `omniattn.attention` takes it, which quantizes the whole sequence of its heads; with a ring as
        `ring_attention` takes it. What travels between ``group`` has its own dtype.
    schedule : "zigzag" or "contiguous"
        Of ``ring_group``; without one it says nothing.
    seqlen_q, seqlen_k : int, optional
        Tokens of the whole sequence. Unless given all ranks have as many as this one.
    return_lse, deterministic, agree_first
        As in `ring_attention`.

    Returns
    -------
    o : torch.Tensor
        Of this rank's queries and all heads: q's dtype and layout. With "HND" a view whose memory is that of "NHD".
    lse : torch.Tensor, (batch, num_q_heads, seqlen_q of this rank), float32
        Only with ``return_lse``.

    Raises
    ------
    ArgumentError, CommunicationError, UnsupportedError
        As in `ring_attention`.

    Notes
    -----
    DeepSpeed-Ulysses (Jacobs et al. 2023); with a ring: USP (Fang and Zhao 2024). The all-to-alls are messages between
    pairs of ranks. Backward has to run on all ranks.
    """
    function = "ulysses_attention"
    at = group_of(group, function)
    across = None if ring_group is None else group_of(ring_group, function, "ring_group")
    said = {
        "layout": layout, "causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap,
        "precision": precision, "schedule": "contiguous", "deterministic": deterministic,
        "seqlen_q": _part(seqlen_q, across, schedule), "seqlen_k": _part(seqlen_k, across, schedule),
    }  # fmt: skip
    asked: Asked | None = None
    facts = no_facts()
    failure: OmniattnError | None = None
    try:
        agree_first = asks_to_agree(agree_first, q, at, function)
        said["return_lse"] = check_bool(return_lse, "return_lse", function)
        check_schedule(schedule, function)
        _check_ring_group(at, across, function)
        q, k, v = as_tensors(q, k, v, sinks, function)
        asked = check(function, q, k, v, sinks, at, said, None, across is not None)
        splits = _splits(q, k, asked, at)
        facts = facts_of(q, k, v, sinks, asked, across is not None)
    except OmniattnError as error:
        failure = error
    # A refusal reaches the ranks of one dimension of a mesh first, and by these all of the other one.
    of_ring = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "schedule": schedule}
    for there, own in ((at, {"ring_group": across and across.size}), (across, of_ring)):
        try:
            if there is not None:
                settle(there, q, function, facts | own, failure, agree_first)
        except OmniattnError as error:
            failure = error
    if failure is not None:
        raise failure
    assert asked is not None
    meet(at, q.device, function)
    if layout == "HND":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    of_q, of_k = splits
    q, k, v = _ToHeads.apply(at, (of_q, of_k, of_k), q, k, v)
    sinks = None if sinks is None else sinks[slice(*of_q.heads[at.rank])].contiguous()
    options: dict[str, Any] = {
        "causal": causal, "window": window, "softmax_scale": asked.common.softmax_scale, "softcap": softcap,
        "sinks": sinks, "precision": precision, "return_lse": True, "deterministic": deterministic,
    }  # fmt: skip
    if across is None:
        o, lse = attention(q, k, v, **options)
    else:
        o, lse = ring_attention(
            q, k, v, group=across.handle, schedule=schedule, seqlen_q=seqlen_q, seqlen_k=seqlen_k, agree_first=False,
            **options,
        )  # fmt: skip
    # The LSE as (batch, seq, heads, 1) goes the same way back.
    o, lse = _ToTokens.apply(at, (of_q, of_q), o, lse.transpose(1, 2)[..., None])
    o = o.transpose(1, 2) if layout == "HND" else o
    return (o, lse[..., 0].transpose(1, 2).contiguous()) if return_lse else o


def _check_ring_group(at: Group, across: Group | None, function: str) -> None:
    """Two dimensions of a mesh meet in one rank."""
    if across is None:
        return
    both = set(dist.get_process_group_ranks(at.handle)) & set(dist.get_process_group_ranks(across.handle))
    if len(both) > 1:
        expected = "a group that has no rank but this one in common with group"
        raise ArgumentError("ring_group", expected, f"ranks {sorted(both)} in both", function=function)


def _part(seqlen: Any, across: Group | None, schedule: Any) -> Any:
    """Tokens of the ranks of one heads' group: those of one rank of the ring. What is no number a check refuses."""
    if (
        across is None
        or isinstance(seqlen, bool)
        or not isinstance(seqlen, int)
        or not isinstance(schedule, str)
        or schedule not in SCHEDULES
    ):
        return seqlen
    return length_of(seqlen, across.size, across.rank, schedule)


def _splits(q: Any, k: Any, asked: Asked, group: Group) -> tuple[Split, Split]:
    """Of q, and of k and v."""
    (rows_q, rows_k), size = (asked.ring.seqlen_q, asked.ring.seqlen_k), group.size
    heads_q, heads_kv = asked.inside(q).shape[2], asked.inside(k).shape[2]
    function = asked.common.function
    if heads_q % size:
        raise ShapeError("q", f"a multiple of {size} heads, one for each rank", f"{heads_q}", function=function)
    if heads_kv % size and size % heads_kv:
        expected = f"a multiple or a divisor of {size} heads, the ranks of the group"
        raise ShapeError("k", expected, f"{heads_kv}", function=function)
    tokens = [tuple(chunks_of(n, size, rank, "contiguous")[0] for rank in range(size)) for n in (rows_q, rows_k)]
    each = max(heads_kv // size, 1)
    of_q = tuple((rank * heads_q // size, (rank + 1) * heads_q // size) for rank in range(size))
    of_k = tuple((rank * heads_kv // size, rank * heads_kv // size + each) for rank in range(size))
    return Split(tokens[0], of_q), Split(tokens[1], of_k)


def to_heads(group: Group, splits: tuple[Split, ...], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """All tokens of this rank's heads, from this rank's tokens of all heads."""
    sends, receives, found, copies = [], [], [], []
    for split, x in zip(splits, tensors, strict=True):
        begin, end = split.heads[group.rank]
        made = x.new_empty((x.shape[0], split.tokens[-1][1], end - begin, x.shape[3]))
        found.append(made)
        for rank, (first, last) in enumerate(split.tokens):
            there = made[:, first:last]
            if rank == group.rank:
                there.copy_(x[:, :, begin:end])
                continue
            sends.append((x[:, :, slice(*split.heads[rank])].contiguous(), rank))
            buffer = there if there.is_contiguous() else torch.empty_like(there, memory_format=torch.contiguous_format)
            receives.append((buffer, rank))
            copies.append((there, buffer))
    exchange(group, sends, receives, _TAG, "ulysses_attention(): all-to-all of tokens").wait()
    for there, buffer in copies:
        if there is not buffer:
            there.copy_(buffer)
    return tuple(found)


def to_tokens(group: Group, splits: tuple[Split, ...], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """This rank's tokens of all heads, from all tokens of its heads; what several ranks have of one head is added."""
    sends, receives, parts = [], [], []
    for split, x in zip(splits, tensors, strict=True):
        begin, end = split.tokens[group.rank]
        own: list[Any] = []
        for rank, (first, last) in enumerate(split.heads):
            if rank == group.rank:
                own.append(x[:, begin:end])
                continue
            sends.append((x[:, slice(*split.tokens[rank])].contiguous(), rank))
            own.append(x.new_empty((x.shape[0], end - begin, last - first, x.shape[3])))
            receives.append((own[-1], rank))
        parts.append(own)
    exchange(group, sends, receives, _TAG + 1, "ulysses_attention(): all-to-all of heads").wait()
    return tuple(_joined(split, own) for split, own in zip(splits, parts, strict=True))


def _joined(split: Split, parts: list[Any]) -> Any:
    if all(a[1] == b[0] for a, b in zip(split.heads, split.heads[1:], strict=False)):
        return torch.cat(parts, 2)
    first = parts[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    total = first.new_zeros((*first.shape[:2], split.heads[-1][1], first.shape[3]), dtype=wide)
    for heads, x in zip(split.heads, parts, strict=True):
        total[:, :, slice(*heads)] += x
    return total.to(first.dtype)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, splits: tuple[Split, ...], *tensors: Any) -> tuple[Any, ...]:
        ctx.at = group, splits
        return to_heads(group, splits, tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, None, *_needed(ctx, grads, to_tokens)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, splits: tuple[Split, ...], *tensors: Any) -> tuple[Any, ...]:
        ctx.at = group, splits
        return to_tokens(group, splits, tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, None, *_needed(ctx, grads, to_heads)


def _needed(ctx: Any, grads: tuple[Any, ...], move: Any) -> list[Any]:
    """Gradients of what needs one, which is the same on all ranks."""
    group, splits = ctx.at
    needs = ctx.needs_input_grad[2:]
    chosen = [(split, x) for split, x, needed in zip(splits, grads, needs, strict=True) if needed]
    found = iter(move(group, tuple(split for split, _ in chosen), tuple(x for _, x in chosen)))
    return [next(found) if needed else None for needed in needs]
