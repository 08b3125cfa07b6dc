"""``shard`` and ``unshard``: a rank's part of a tensor, and the whole one again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..arguments import check_int
from ..errors import ArgumentError, CommunicationError, ShapeError
from .exchange import Group, group_of
from .schedule import check_schedule, chunks_of, length_of


def shard(x: Any, dim: int, *, group: Any = None, schedule: str = "zigzag") -> Any:
    """This rank's part of a tensor that every rank has as a whole.

    Parameters
    ----------
    x : torch.Tensor
        Any dtype and device; the same on all ranks of the group.
    dim : int
        The dimension of the sequence. Any length, 0 too: parts then differ by a few rows.
    group : ProcessGroup or DeviceMesh of one dimension, optional
        The default group unless given.
    schedule : "zigzag" or "contiguous"
        That of the attention that follows. "contiguous": part r of n. "zigzag": chunks r and 2 n - 1 - r of 2 n.

    Returns
    -------
    torch.Tensor
        A contiguous copy. It has a gradient if x has one: that of x is 0 in the rows of other ranks.

    Raises
    ------
    ArgumentError
        Names the argument, what was expected and what came.
    """
    at = _group_and_dim("shard", x, dim, group, schedule)
    chunks = chunks_of(x.shape[dim], at.size, at.rank, schedule)
    return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in chunks], dim)


def unshard(x: Any, dim: int, *, group: Any = None, schedule: str = "zigzag", seqlen: int | None = None) -> Any:
    """The whole tensor, on every rank, from the parts that `shard` made or a call on them returned.

    Parameters
    ----------
    x : torch.Tensor
        This rank's part.
    dim : int
        The dimension of the sequence.
    group, schedule
        As in `shard`.
    seqlen : int, optional
        Rows of the whole tensor; unless given all ranks have as many as this one.

    Returns
    -------
    torch.Tensor
        Its gradient: the sum of what all ranks have for this rank's part, by an all-reduce.

    Raises
    ------
    ArgumentError
        Names the argument, what was expected and what came.
    CommunicationError
        A rank is gone or does not answer.
    """
    at = _group_and_dim("unshard", x, dim, group, schedule)
    whole = check_seqlen(seqlen, x.shape[dim], at, schedule, "unshard", "seqlen", "x")
    return _Unshard.apply(x, dim, at, schedule, whole)


def _group_and_dim(function: str, x: Any, dim: Any, group: Any, schedule: Any) -> Group:
    if not isinstance(x, torch.Tensor):
        raise ArgumentError("x", "a torch tensor", type(x).__name__, function=function)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ArgumentError("dim", f"a dimension of x, which has {x.dim()}", repr(dim), function=function)
    check_schedule(schedule, function)
    return group_of(group, function)


def check_seqlen(seqlen: Any, rows: int, group: Group, schedule: str, function: str, argument: str, of: str) -> int:
    """Tokens of the whole sequence, of which a rank's part has ``rows``; ``of`` is the tensor that an error names."""
    whole = rows * group.size if seqlen is None else check_int(seqlen, argument, function)
    expected = length_of(whole, group.size, group.rank, schedule)
    if rows != expected:
        raise ShapeError(
            of, f"{expected} rows: rank {group.rank} of {group.size} of {whole}, schedule {schedule!r}", f"{rows}",
            function=function, hint=f"{argument}= says how long the whole is where parts differ; shard() cuts it",
        )  # fmt: skip
    return whole


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, dim: int, group: Group, schedule: str, seqlen: int) -> Any:
        ctx.at = dim, group, schedule
        chunks = [chunks_of(seqlen, group.size, rank, schedule) for rank in range(group.size)]
        rows = max(sum(end - begin for begin, end in own) for own in chunks)
        # All parts of one length: collective operations of NCCL take no others.
        shape = list(x.shape)
        shape[dim] = rows
        mine = x.new_zeros(shape)
        mine.narrow(dim, 0, x.shape[dim]).copy_(x)
        every = [torch.empty_like(mine) for _ in range(group.size)]
        _checked("unshard", lambda: dist.all_gather(every, mine, group=group.handle))
        shape[dim] = seqlen
        whole = x.new_empty(shape)
        for own, part in zip(chunks, every, strict=True):
            row = 0
            for begin, end in own:
                whole.narrow(dim, begin, end - begin).copy_(part.narrow(dim, row, end - begin))
                row += end - begin
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        dim, group, schedule = ctx.at
        total = grad.clone(memory_format=torch.contiguous_format)
        _checked("unshard", lambda: dist.all_reduce(total, group=group.handle))
        chunks = chunks_of(total.shape[dim], group.size, group.rank, schedule)
        return torch.cat([total.narrow(dim, begin, end - begin) for begin, end in chunks], dim), None, None, None, None


def _checked(function: str, collective: Any) -> None:
    try:
        collective()
    except RuntimeError as error:
        raise CommunicationError(
            f"{function}(): the exchange between ranks failed ({error})",
            "see whether another rank raised before, or was called with other arguments",
        ) from error
