"""``BlockManager``: which blocks of a paged cache belong to which sequence. Host only, no arrays of any framework."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..arguments import check_int
from ..errors import ArgumentError, OutOfBlocksError, OutOfSlotsError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: (source, destination) block numbers.
Copy = tuple[int, int]
#: Tokens of a sequence at most, and any other count: `append` and `decode` take them as int32.
_MOST = 2**31 - 1


class BlockManager:
    """Blocks of a `PagedKVCache`: allocation, reference counts, shared prefixes, copy-on-write.

    A sequence is any hashable name with a length in tokens and the blocks that hold them. Blocks may be shared; a block
    that would be written while others see it is replaced first, and the copies to make are returned.

    Parameters
    ----------
    num_blocks : int
        Blocks of the cache.
    block_size : int
        Tokens of a block.
    num_slots : int
        Of a cache with a recent window its ``recent_slots``: each sequence then has a slot of its own. 0: there are
        none.

    Raises
    ------
    ArgumentError
        From every method: an unknown or a used name, a bad count. Nothing has changed then.
    OutOfBlocksError
        From `extend`: more blocks are needed than are free. Nothing has changed then.
    OutOfSlotsError
        From `add` and `fork`: all slots belong to sequences. Nothing has changed then.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int = 0) -> None:
        self.num_blocks = check_int(num_blocks, "num_blocks", "BlockManager", least=1, most=_MOST)
        self.block_size = check_int(block_size, "block_size", "BlockManager", least=1, most=_MOST)
        # Taken from the end: block 0 goes first.
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._references = [0] * self.num_blocks
        self._tables: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}
        self.num_slots = check_int(num_slots, "num_slots", "BlockManager", least=0, most=_MOST)
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._slots: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no sequence has."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """Names of all sequences."""
        return tuple(self._tables)

    def length(self, sequence: Hashable) -> int:
        """Tokens of a sequence."""
        self._known(sequence, "length")
        return self._lengths[sequence]

    def blocks(self, sequence: Hashable) -> tuple[int, ...]:
        """Blocks of a sequence, in the order of its tokens."""
        self._known(sequence, "blocks")
        return tuple(self._tables[sequence])

    def references(self, block: int) -> int:
        """How many sequences have a block."""
        return self._references[check_int(block, "block", "BlockManager.references", least=0, most=self.num_blocks - 1)]

    def add(self, sequence: Hashable) -> None:
        """Begin an empty sequence."""
        self._unknown(sequence, "sequence", "add")
        self._take_slot(sequence)
        self._tables[sequence] = []
        self._lengths[sequence] = 0

    def fork(self, parent: Hashable, child: Hashable) -> list[Copy]:
        """Begin a sequence with all tokens of another; no block is copied until one of them grows.

        Returns
        -------
        list of (source, destination)
            Slots to copy (`omniattn.copy_recent`) before either of them grows; empty without slots.
        """
        self._known(parent, "fork", "parent")
        self._unknown(child, "child", "fork")
        self._take_slot(child)
        self._tables[child] = list(self._tables[parent])
        self._lengths[child] = self._lengths[parent]
        for block in self._tables[child]:
            self._references[block] += 1
        return [(self._slots[parent], self._slots[child])] if self.num_slots else []

    def extend(self, growth: Mapping[Any, int]) -> list[Copy]:
        """Make room for new tokens, for all sequences named or for none.

        Parameters
        ----------
        growth : mapping
            New tokens by sequence.

        Returns
        -------
        list of (source, destination)
            Blocks to copy, all at once (`omniattn.copy_blocks`), before the new tokens are appended.
        """
        function = "extend"
        if not isinstance(growth, Mapping):
            raise ArgumentError(
                "growth", "a mapping, {sequence: new tokens}", repr(growth), function=f"BlockManager.{function}"
            )
        # As Python's integers: sums of NumPy's would overflow, and an array's number may change later.
        growth = {name: self._growth(name, count, function) for name, count in growth.items()}
        # References as they will be: of two sequences that share a last block the second one need not copy.
        shared: dict[int, int] = {}
        to_copy: list[tuple[Hashable, int]] = []
        needed = 0
        for sequence, count in growth.items():
            if count == 0:
                continue
            table, length = self._tables[sequence], self._lengths[sequence]
            needed += -(-(length + count) // self.block_size) - len(table)
            if length % self.block_size:
                last = table[length // self.block_size]
                references = shared.get(last, self._references[last])
                if references > 1:
                    shared[last] = references - 1
                    to_copy.append((sequence, length // self.block_size))
                    needed += 1
        if needed > len(self._free):
            raise OutOfBlocksError(needed, len(self._free), self.num_blocks, self.block_size)
        copies = []
        for sequence, index in to_copy:
            source = self._tables[sequence][index]
            self._references[source] -= 1
            self._tables[sequence][index] = self._take()
            copies.append((source, self._tables[sequence][index]))
        for sequence, count in growth.items():
            table = self._tables[sequence]
            self._lengths[sequence] += count
            while len(table) * self.block_size < self._lengths[sequence]:
                table.append(self._take())
        return copies

    def truncate(self, sequence: Hashable, length: int) -> None:
        """Drop the tokens from ``length`` on (rejected guesses of speculative decoding), and blocks without any."""
        self._known(sequence, "truncate")
        length = check_int(length, "length", "BlockManager.truncate", least=0, most=self._lengths[sequence])
        table = self._tables[sequence]
        while (len(table) - 1) * self.block_size >= length and table:
            self._release(table.pop())
        self._lengths[sequence] = length

    def free(self, sequence: Hashable) -> None:
        """End a sequence."""
        self._known(sequence, "free")
        for block in reversed(self._tables.pop(sequence)):
            self._release(block)
        del self._lengths[sequence]
        if self.num_slots:
            self._free_slots.append(self._slots.pop(sequence))

    def block_table(self, sequences: Iterable[Hashable], max_blocks: int | None = None) -> npt.NDArray[np.int32]:
        """Block table for `append` and `decode`, (sequences, max_blocks); 0 where a sequence has no block.

        ``max_blocks``: columns, at least those of the longest sequence, which is the default (at least 1).
        """
        import numpy as np

        names = self._all_known(sequences, "block_table")
        longest = max((len(self._tables[s]) for s in names), default=0)
        columns = max(longest, 1)
        if max_blocks is not None:
            columns = check_int(max_blocks, "max_blocks", "BlockManager.block_table", least=columns, most=_MOST)
        table = np.zeros((len(names), columns), dtype=np.int32)
        for row, sequence in enumerate(names):
            table[row, : len(self._tables[sequence])] = self._tables[sequence]
        return table

    def seq_lens(self, sequences: Iterable[Hashable]) -> npt.NDArray[np.int32]:
        """Lengths for `append` and `decode`, (sequences,)."""
        import numpy as np

        return np.array([self._lengths[s] for s in self._all_known(sequences, "seq_lens")], dtype=np.int32)

    def slots(self, sequences: Iterable[Hashable]) -> npt.NDArray[np.int32]:
        """Slots of the recent window for `append` and `decode`, (sequences,)."""
        import numpy as np

        names = self._all_known(sequences, "slots")
        if not self.num_slots:
            raise ArgumentError("num_slots", "at least 1 for slots", "0", function="BlockManager.slots")
        return np.array([self._slots[s] for s in names], dtype=np.int32)

    def _take_slot(self, sequence: Hashable) -> None:
        if self.num_slots:
            if not self._free_slots:
                raise OutOfSlotsError(self.num_slots)
            self._slots[sequence] = self._free_slots.pop()

    def _growth(self, sequence: Hashable, count: Any, function: str) -> int:
        self._known(sequence, function)
        argument, where = f"growth[{sequence!r}]", f"BlockManager.{function}"
        number = check_int(count, argument, where, least=0, most=_MOST)
        length = self._lengths[sequence]
        if length + number > _MOST:
            # What the int32 arrays of append and decode can hold.
            expected = f"at most {_MOST - length} tokens more than the {length} there are"
            raise ArgumentError(argument, expected, repr(count), function=where)
        return number

    def _all_known(self, sequences: Iterable[Hashable], function: str) -> list[Hashable]:
        try:
            names = list(sequences)
        except TypeError:
            raise ArgumentError(
                "sequences", "an iterable of names", repr(sequences), function=f"BlockManager.{function}"
            ) from None
        for sequence in names:
            self._known(sequence, function)
        return names

    def _take(self) -> int:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)

    def _known(self, sequence: Hashable, function: str, argument: str = "sequence") -> None:
        _check_name(sequence, argument, function)
        if sequence not in self._tables:
            raise ArgumentError(
                argument, "the name of a sequence", repr(sequence), function=f"BlockManager.{function}",
                hint=f"There are {len(self._tables)}; add() and fork() begin one",
            )  # fmt: skip

    def _unknown(self, sequence: Hashable, argument: str, function: str) -> None:
        _check_name(sequence, argument, function)
        if sequence in self._tables:
            raise ArgumentError(
                argument, "a name that no sequence has", repr(sequence), function=f"BlockManager.{function}"
            )


def _check_name(name: Any, argument: str, function: str) -> None:
    try:
        hash(name)
    except TypeError:
        raise ArgumentError(
            argument, "a hashable name", f"{type(name).__name__} {name!r}", function=f"BlockManager.{function}"
        ) from None
