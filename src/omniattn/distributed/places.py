"""Which rank holds which token of a sequence, where tokens go to the ranks in turn: by the host, and on the device.

Blocks of ``interleave`` tokens go round: token t of a sequence is on rank (t // interleave) % n, as its token
t // (interleave * n) * interleave + t % interleave.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from ..arguments import MAX_ROWS, check_int
from ..errors import ArgumentError, DtypeError, ShapeError
from ..problems.decode import MAX_Q_LEN
from .exchange import Group, group_of


def local_seqlen(seqlen: int, *, group: Any = None, interleave: int = 1) -> int:
    """How many of the first tokens of a sequence this rank holds: what a `BlockManager` here has to have room for.

    Parameters
    ----------
    seqlen : int
        Tokens of the whole sequence.
    group : ProcessGroup or DeviceMesh of one dimension, optional
        Whose ranks divide the tokens; the default group unless given.
    interleave : int
        Neighbouring tokens that are on one rank.

    Returns
    -------
    int

    Raises
    ------
    ArgumentError
        Names the argument, what was expected and what came.
    """
    name = "local_seqlen"
    at = group_of(group, name)
    seqlen = check_int(seqlen, "seqlen", name)
    interleave = check_int(interleave, "interleave", name, least=1, most=MAX_ROWS)
    period = interleave * at.size
    return seqlen // period * interleave + min(max(seqlen % period - at.rank * interleave, 0), interleave)


@dataclass(frozen=True, eq=False)
class LocalTokens:
    """Which tokens of each sequence this rank holds, on the device: computed once, and used by all layers of a step.

    `local_tokens` makes it. It is computed by torch's operators without a synchronization: within a CUDA graph a replay
    computes it from the lengths that are in ``seq_lens`` then.

    Attributes
    ----------
    seq_lens : torch.Tensor, (batch,), int32
        Tokens of each whole sequence, the new ones included.
    local : torch.Tensor, (batch, q_len), int32
        Tokens here that each of the newest q_len tokens sees, itself included.
    last : torch.Tensor, (batch,), int32
        Tokens here: the last column of ``local``.
    positions : torch.Tensor, (batch, q_len), int64
        Of the newest tokens in their sequence.
    places : torch.Tensor, (batch, q_len), int64
        Their places among the tokens here; -1 for tokens of other ranks.
    group : Group
    interleave : int
    """

    seq_lens: Any
    local: Any
    last: Any
    positions: Any
    places: Any
    group: Group
    interleave: int

    @property
    def q_len(self) -> int:
        """New tokens of each sequence."""
        return int(self.local.shape[1])


def local_tokens(seq_lens: Any, *, q_len: int = 1, group: Any = None, interleave: int = 1) -> LocalTokens:
    """Which tokens of each sequence this rank holds, for `append_sharded` and `decode_sharded` of all layers.

    Parameters
    ----------
    seq_lens : torch.Tensor, (batch,), int32
        Tokens of each whole sequence, the new ones included; the same on all ranks.
    q_len : int
        New tokens of each sequence.
    group, interleave
        As in `local_seqlen`.

    Returns
    -------
    LocalTokens

    Raises
    ------
    ArgumentError
        Or its subclasses: names the argument, what was expected and what came.
    """
    name = "local_tokens"
    at = group_of(group, name)
    q_len = check_int(q_len, "q_len", name, least=1, most=MAX_Q_LEN)
    return found_tokens(seq_lens, q_len, at, check_int(interleave, "interleave", name, least=1, most=MAX_ROWS), name)


def check_strided(x: Any, argument: str, function: str) -> None:
    """Refuse nested and sparse tensors."""
    if x.is_nested or x.layout is not torch.strided:
        received = "a nested tensor" if x.is_nested else f"one of layout {x.layout}"
        raise ArgumentError(argument, "a plain torch tensor", received, function=function)


def check_lengths(seq_lens: Any, function: str, argument: str = "seq_lens") -> None:
    """An int32 tensor of one dimension."""
    if not isinstance(seq_lens, torch.Tensor):
        raise ArgumentError(argument, "a torch tensor", type(seq_lens).__name__, function=function)
    check_strided(seq_lens, argument, function)
    if seq_lens.dtype is not torch.int32:
        raise DtypeError(argument, "int32", str(seq_lens.dtype).removeprefix("torch."), function=function)
    if seq_lens.dim() != 1:
        raise ShapeError(argument, "1 dimension (batch,)", f"shape {tuple(seq_lens.shape)}", function=function)


def check_new_tokens(seq_lens: Any, starts: list[int], rows: int, function: str) -> None:
    """Contents on the CPU, as `append` has them: ``starts`` of so many rows, and lengths, which have the new tokens or
    are 0.
    """
    if starts[0] != 0 or starts[-1] > rows or any(b < a for a, b in itertools.pairwise(starts)):
        expected = f"0 first, never decreasing, at most the {rows} rows at the end"
        raise ArgumentError("cu_seqlens", expected, str(starts), function=function)
    for b, (length, (begin, end)) in enumerate(zip(seq_lens.tolist(), itertools.pairwise(starts), strict=True)):
        if length and length < end - begin:
            expected = f"0, or at least the {end - begin} new tokens"
            raise ArgumentError("seq_lens", expected, f"{length} at {b}", function=function)


def found_tokens(seq_lens: Any, q_len: int, group: Group, interleave: int, function: str) -> LocalTokens:
    """`local_tokens` of checked numbers."""
    check_lengths(seq_lens, function)
    new = torch.arange(1 - q_len, 1, dtype=torch.int32, device=seq_lens.device)
    seen = seq_lens[:, None] + new
    local = _count(seen, group, interleave)
    positions = seen.to(torch.int64) - 1
    places = places_of(positions, group, interleave)
    last = local[:, -1].contiguous() if q_len else _count(seq_lens, group, interleave)
    return LocalTokens(seq_lens, local, last, positions, places, group, interleave)


def _count(seen: Any, group: Group, interleave: int) -> Any:
    """How many of the first tokens, so many each, are here; none of a number below 0."""
    seen = seen.clamp_min(0)
    if interleave == 1:
        return (seen + (group.size - 1 - group.rank)) // group.size
    period = interleave * group.size
    return seen // period * interleave + (seen % period - group.rank * interleave).clamp(0, interleave)


def places_of(positions: Any, group: Group, interleave: int) -> Any:
    """Place of each token among those here; -1 for tokens of other ranks, and for positions below 0."""
    block = positions // interleave
    places = block // group.size * interleave + positions % interleave
    return torch.where((block % group.size == group.rank) & (positions >= 0), places, -1)
