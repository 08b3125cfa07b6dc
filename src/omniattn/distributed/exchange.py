"""Ranks of a group, and what they send each other: torch.distributed's point-to-point operations, and no others.

With NCCL the transfers run on a stream of its own. `Transfer.wait` lets the current stream wait for them, not the host.
With gloo it waits on the host.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ArgumentError, CommunicationError, OmniattnError

#: Groups whose ranks have all met in a collective operation. NCCL makes its communicator there; the first exchange of
#: a ring may leave ranks out, which must not be the first operation of a group.
_MET: weakref.WeakSet[Any] = weakref.WeakSet()
#: Within so many cycles a transfer begins, of streams and of CUDA graphs (8 µs; half of that was enough on two H200).
BEGIN_CYCLES = 16000


@dataclass(frozen=True)
class Group:
    """A process group, and this rank's place in it.

    Attributes
    ----------
    handle : ProcessGroup
    rank, size : int
        Of this process in the group; ranks of the group.
    """

    handle: Any
    rank: int
    size: int

    def peer(self, rank: int) -> int:
        """The global rank of a rank of the group."""
        return dist.get_global_rank(self.handle, rank)


def group_of(group: Any, function: str, argument: str = "group") -> Group:
    """The group that a caller means: None is the default one; a device mesh of one dimension is the group of that."""
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            argument, "a group of torch.distributed", "no initialized process group", function=function,
            hint="Call torch.distributed.init_process_group() first",
        )  # fmt: skip
    handle = dist.group.WORLD if group is None else group
    if not isinstance(handle, dist.ProcessGroup) and callable(getattr(handle, "get_group", None)):
        if getattr(handle, "ndim", 1) != 1:
            expected = "a process group, or a device mesh of one dimension"
            raise ArgumentError(argument, expected, f"a mesh of {handle.ndim} dimensions", function=function)
        handle = handle.get_group()
    if not isinstance(handle, dist.ProcessGroup):
        expected = "None, a process group, or a device mesh of one dimension"
        raise ArgumentError(argument, expected, type(handle).__name__, function=function)
    try:
        rank = dist.get_rank(handle)
    except ValueError:  # torch does not know it any more
        raise ArgumentError(argument, "a group that is there", "one that was destroyed", function=function) from None
    if rank < 0:
        raise ArgumentError(argument, "a group that this process is a rank of", "another group", function=function)
    return Group(handle, rank, dist.get_world_size(handle))


class Transfer:
    """Messages under way.

    Parameters
    ----------
    works : sequence
        Handles of torch.distributed.
    received : list of tensor
        Filled once `wait` has returned, in the order of the current stream.
    kept : sequence of tensor
        What is being sent: it has to live until then.
    what : str
        For an error: which function and step.
    device : torch.device, optional
        The GPU on whose SMs it runs.
    """

    def __init__(
        self, works: Sequence[Any], received: list[Any], kept: Sequence[Any], what: str, device: Any = None
    ) -> None:
        self.works, self.received, self.kept, self.what, self.device = works, received, kept, what, device

    def begin_first(self) -> bool:
        """Let the transfer begin before what the current stream gets from here on; the host does not wait.

        False of one that takes no SMs. Both are ready at the same time, and where a kernel that takes all SMs begins
        first, the transfer waits for its end, and with it the other rank's, which has SMs that its own kernels then
        lack. So the current stream waits some microseconds, on one SM.
        """
        if self.device is None:
            return False
        with torch.cuda.device(self.device):
            torch.cuda._sleep(BEGIN_CYCLES)
        return True

    def wait(self) -> list[Any]:
        """What was received. Raises CommunicationError where a rank is gone or does not answer in the group's time."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise _failed(self.what, error) from error
        self.works, self.kept = (), ()
        return self.received


def _failed(what: str, error: Exception) -> CommunicationError:
    return CommunicationError(
        f"{what}: the exchange between ranks failed ({error})",
        "see whether another rank raised before: it is gone, or still computes, or was called with other arguments. "
        "init_process_group(timeout=) says how long ranks wait for each other",
    )


def exchange(
    group: Group, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]], tag: int, what: str
) -> Transfer:
    """Begin to send and to receive.

    Parameters
    ----------
    sends, receives : sequence of (tensor, rank)
        Contiguous tensors, and ranks of the group. Empty tensors are left out, on both sides.
    tag : int
        The same for all messages of one exchange; between two ranks they keep their order.
    what : str
        For an error: which function and step.
    """
    operations = [
        dist.P2POp(operation, x, group.peer(rank), group.handle, tag)
        for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
        for x, rank in messages
        if x.numel()
    ]
    received, kept = [x for x, _ in receives], [x for x, _ in sends]
    device = operations[0].tensor.device if operations and operations[0].tensor.is_cuda else None
    try:
        return Transfer(dist.batch_isend_irecv(operations) if operations else (), received, kept, what, device)
    except RuntimeError as error:
        raise _failed(what, error) from error


def device_of(x: Any, group: Group) -> Any:
    """Where a tensor lies; of what is none, where the group's messages do."""
    if isinstance(x, torch.Tensor):
        return x.device
    on_gpu = dist.get_backend(group.handle) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def meet(group: Group, device: Any, function: str) -> None:
    """Let NCCL make the communicator of a group, at its first call. All ranks have to come here."""
    if device.type != "cuda" or group.handle in _MET:
        return
    try:
        dist.all_reduce(torch.zeros(1, device=device), group=group.handle)
    except RuntimeError as error:
        raise _failed(f"{function}(): first exchange of a group", error) from error
    _MET.add(group.handle)


def agree(group: Group, device: Any, function: str, facts: Mapping[str, Any], error: OmniattnError | None) -> None:
    """Raise on all ranks if one of them refuses the call, or if an argument differs that has to be the same.

    Parameters
    ----------
    facts : mapping
        Values by argument, of which every rank has the same names; after an error they may be anything.
    error : OmniattnError or None
        Why this rank refuses the call: what it raises, once the others know.
    """
    marks = [zlib.crc32(repr(value).encode()) for value in facts.values()]
    mine = torch.tensor([error is None, *marks], dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(group.size)]
    try:
        dist.all_gather(every, mine, group=group.handle)
    except RuntimeError as failure:
        raise error or _failed(f"{function}(): comparing the arguments of all ranks", failure) from failure
    if error is not None:
        raise error
    rows = [x.tolist() for x in every]
    refused = [rank for rank, row in enumerate(rows) if not row[0]]
    if refused:
        raise CommunicationError(
            f"{function}(): this rank's arguments are right, but rank {', '.join(map(str, refused))} refused its own",
            "read the error of that rank",
        )
    for column, (name, value) in enumerate(facts.items(), 1):
        others = [rank for rank, row in enumerate(rows) if row[column] != rows[group.rank][column]]
        if others:
            expected = "the same on all ranks of the group"
            received = f"{value!r}, and something else on rank {', '.join(map(str, others))}"
            raise ArgumentError(name, expected, received, function=function)
