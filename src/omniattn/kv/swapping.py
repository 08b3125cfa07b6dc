"""Sequences that leave a paged cache for a while, and come back: `BlockManager.swap_out` and ``swap_in``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, OutOfBlocksError, OutOfHostBlocksError, telling
from .pool import BlockPool, HostSlots
from .prefixes import Node, path_to

if TYPE_CHECKING:
    from .swap import SwapEvent, SwapSpace

#: In place of blocks that a window has left behind.
GONE = -1


class SequenceState:
    """What there is of a sequence.

    Attributes
    ----------
    table : list of int
        Its blocks, `GONE` before ``first``. Empty while it is swapped out.
    length, first : int
        Tokens, and the first block that it still has.
    tip : Node
        The last full block of committed tokens, ``depth`` of which there are; ``pending`` are those behind it.
    slots : list of int
        Where it is on the host while it is swapped out: from the block ``first`` on.
    """

    __slots__ = ("depth", "first", "length", "pending", "slots", "table", "tip")

    def __init__(self, tip: Node) -> None:
        self.table: list[int] = []
        self.length = self.first = self.depth = 0
        self.tip = tip
        self.pending: list[Any] = []
        self.slots: list[int] = []


def entries(s: SequenceState) -> list[int]:
    """A sequence's blocks as kernels take them: in place of those given back, the first one that is there."""
    return s.table if not s.first else [s.table[s.first]] * s.first + s.table[s.first :]


class Swapping(ABC):
    """What moves the sequences of a `BlockManager` to its swap space and back."""

    num_blocks: int
    block_size: int
    swap_space: SwapSpace | None
    _pool: BlockPool
    _host: HostSlots
    _sequences: dict[Hashable, SequenceState]
    _swapped: dict[Hashable, SequenceState]

    def swap_out(self, sequence: Hashable, *, stream: Any = None) -> SwapEvent:
        """Move a sequence to the host, and give its blocks back.

        Blocks that other sequences have too stay theirs. One copy on the host serves all sequences that share a block,
        whichever of them are swapped out. The other way to make room is ``free(sequence)``, and later `match_prefix`
        and computing again what is no longer there.

        Parameters
        ----------
        sequence : hashable
            Until `swap_in` it can only be freed, and asked for its length.
        stream : optional
            As in `attention`: the stream that the caches are written on. Copies begin behind all that is queued there;
            None: on the current stream of the caches' library.

        Returns
        -------
        SwapEvent
            The end of the copies. **Order, on a GPU**: what writes to the caches from now on (`append`, `copy_blocks`)
            may write to the blocks that were given back, and has to wait for it: ``event.wait(stream)`` before the next
            step. What only reads need not. Another `swap_out` or `swap_in` keeps the order by itself.

        Raises
        ------
        OutOfHostBlocksError
            Too little room in the swap space.
        ArgumentError
            There is no swap space.
        UnsupportedError
            The stream captures a graph.

        Notes
        -----
        Whatever is raised, also by a copy: the sequence is in the cache as before, and no copy is under way. Blocks go
        as they are then: copies that `extend` has asked for have to be queued before.
        """
        s = self._known(sequence, "swap_out")
        space, pool, host = self._space("swap_out"), self._pool, self._host
        blocks = s.table[s.first :]
        known = [pool.slot_of(block) for block in blocks]
        needed = known.count(None)
        if needed > host.num_free:
            raise OutOfHostBlocksError(needed, host.num_free, space.num_blocks)
        new = iter(host.next(needed))
        slots = [next(new) if slot is None else slot for slot in known]
        pairs = [(block, slot) for block, slot, old in zip(blocks, slots, known, strict=True) if old is None]
        event = telling("BlockManager.swap_out", space.copy_out, pairs, stream)
        for block, slot in zip(blocks, slots, strict=True):
            host.hold(slot)
            pool.note_copy(block, slot)
        pool.release_all(blocks)
        s.table, s.slots = [], slots
        self._swapped[sequence] = self._sequences.pop(sequence)
        return event

    def swap_in(self, sequence: Hashable, *, stream: Any = None) -> SwapEvent:
        """Bring a sequence back from the host. Blocks that are in the cache still, or again, are shared, not copied.

        Parameters
        ----------
        sequence : hashable
            One of `swapped`.
        stream : optional
            As in `swap_out`.

        Returns
        -------
        SwapEvent
            The end of the copies. **Order, on a GPU**: what reads or writes the blocks of this sequence, or of one that
            `fork` or `match_prefix` begins with them, has to wait for it: ``event.wait(stream)`` before the first step
            that has one of these, and before `free` gives them to others. Steps without them may run meanwhile.

        Raises
        ------
        OutOfBlocksError
            Too few blocks that no sequence has.
        ArgumentError
            The sequence is not swapped out.
        UnsupportedError
            The stream captures a graph.

        Notes
        -----
        Whatever is raised, also by a copy: the sequence is on the host as before, and no copy is under way. Prefixes
        that only `match_prefix` could find may have gone for it.
        """
        self._any(sequence, "swap_in")
        s = self._swapped.get(sequence)
        if s is None:
            expected, where = "a sequence that is swapped out", "BlockManager.swap_in"
            raise ArgumentError("sequence", expected, repr(sequence), function=where)
        space, pool = self._space("swap_in"), self._pool
        path = path_to(s.tip)
        there = [
            pool.block_of(slot) if i >= s.depth or path[i].block is None else path[i].block
            for i, slot in enumerate(s.slots, s.first)
        ]
        held = [block for block in there if block is not None]
        needed = len(there) - len(held)
        free = pool.num_free - sum(not pool.references[block] for block in held)
        if needed > free:
            raise OutOfBlocksError(needed, free, self.num_blocks, self.block_size)
        for block in held:
            pool.hold(block)
        new = [pool.take() for _ in range(needed)]
        rest = iter(new)
        table = [next(rest) if block is None else block for block in there]
        try:
            pairs = [(b, slot) for b, slot, old in zip(table, s.slots, there, strict=True) if old is None]
            event = telling("BlockManager.swap_in", space.copy_in, pairs, stream)
        except BaseException:
            pool.release_all(new)
            pool.release_all(held)
            raise
        self._give_back(s)
        for block, slot, old in zip(table, s.slots, there, strict=True):
            if old is None and self._host.is_held(slot):
                pool.note_copy(block, slot)
        for node, block in zip(path[s.first :], table):
            if node.block is None and pool.node(block) is None:
                pool.attach(node, block)
        s.table, s.slots = [GONE] * s.first + table, []
        self._sequences[sequence] = self._swapped.pop(sequence)
        return event

    def _give_back(self, s: SequenceState) -> None:
        """Release a sequence's slots on the host."""
        for slot in reversed(s.slots):
            if self._host.release(slot):
                self._pool.forget_slot(slot)

    def _space(self, function: str) -> SwapSpace:
        if self.swap_space is None:
            where, hint = f"BlockManager.{function}", "It is an argument of BlockManager()"
            raise ArgumentError("swap_space", "a SwapSpace", "None", function=where, hint=hint)
        return self.swap_space

    @abstractmethod
    def _known(self, sequence: Hashable, function: str, argument: str = "sequence") -> SequenceState:
        """Return a sequence that has blocks, or raise."""

    @abstractmethod
    def _any(self, sequence: Hashable, function: str) -> SequenceState:
        """Return a sequence, swapped out or not, or raise."""
