"""``shard`` and ``unshard``: a rank's part of a tensor, and the whole one again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..arguments import check_bool, check_int
from ..errors import ArgumentError, CommunicationError, OmniattnError, ShapeError
from .exchange import Group, agree, device_of, group_of
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
    _check_dim("shard", x, dim, schedule)
    at = group_of(group, "shard")
    chunks = chunks_of(x.shape[dim], at.size, at.rank, schedule)
    return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in chunks], dim).contiguous()


def unshard(
    x: Any,
    dim: int,
    *,
    group: Any = None,
    schedule: str = "zigzag",
    seqlen: int | None = None,
    agree_first: bool | None = None,
) -> Any:
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
    agree_first : bool, optional
        As in `ring_attention`. Where ranks do not compare and parts differ, messages of unequal sizes meet.

    Returns
    -------
    torch.Tensor
        Its gradient: the sum of what all ranks have for this rank's part, by an all-reduce.

    Raises
    ------
    ArgumentError
        Names the argument, what was expected and what came.
    CommunicationError
        A rank is gone, refused its arguments (``agree_first``), or does not answer.
    """
    at = group_of(group, "unshard")
    facts: dict[str, Any] = dict.fromkeys(("x", "dim", "schedule", "seqlen"))
    failure: OmniattnError | None = None
    try:
        agree_first = asks_to_agree(agree_first, x, at, "unshard")
        _check_dim("unshard", x, dim, schedule)
        whole = check_seqlen(seqlen, x.shape[dim], at, schedule, "unshard", "seqlen", "x")
        others = tuple(n for i, n in enumerate(x.shape) if i != dim % x.dim())
        facts = {"x": (others, str(x.dtype)), "dim": dim % x.dim(), "schedule": schedule, "seqlen": whole}
    except OmniattnError as error:
        failure = error
    settle(at, x, "unshard", facts, failure, agree_first)
    return _Unshard.apply(x, dim, at, schedule, whole)


def asks_to_agree(agree_first: Any, x: Any, group: Group, function: str) -> bool:
    """``agree_first``, and what it is unless given: ranks on CPUs compare their arguments."""
    if agree_first is None:
        return bool(device_of(x, group).type == "cpu")
    return check_bool(agree_first, "agree_first", function)


def settle(
    group: Group, x: Any, function: str, facts: dict[str, Any], failure: OmniattnError | None, agree_first: Any
) -> None:
    """Raise what this rank found; where ranks compare, on all of them, and where they differ. agree_first: checked."""
    device = device_of(x, group)
    if agree_first if isinstance(agree_first, bool) else device.type == "cpu":
        agree(group, device, function, facts, failure)
    if failure is not None:
        raise failure


def check_tensor(x: Any, name: str, function: str) -> None:
    """A plain torch tensor."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(name, "a torch tensor", type(x).__name__, function=function)
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        hint = "A DTensor's part of this rank is to_local()"
        raise ArgumentError(name, "a plain torch tensor", type(x).__name__, function=function, hint=hint)


def _check_dim(function: str, x: Any, dim: Any, schedule: Any) -> None:
    check_tensor(x, "x", function)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ArgumentError("dim", f"a dimension of x, which has {x.dim()}", repr(dim), function=function)
    check_schedule(schedule, function)


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
        # As bytes: gloo has not all dtypes.
        into = [_bytes_of(part) for part in every]
        _checked("unshard", lambda: dist.all_gather(into, _bytes_of(mine), group=group.handle))
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


def _bytes_of(x: Any) -> Any:
    """A view of a contiguous tensor."""
    return x.reshape(-1).view(torch.uint8)


def _checked(function: str, collective: Any) -> None:
    try:
        collective()
    except RuntimeError as error:
        raise CommunicationError(
            f"{function}(): the exchange between ranks failed ({error})",
            "see whether another rank raised before, or was called with other arguments",
        ) from error
