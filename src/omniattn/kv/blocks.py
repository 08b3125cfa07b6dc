"""``BlockManager``: which blocks of a paged cache belong to which sequence. On the host; no arrays of any framework."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..arguments import check_int
from ..errors import ArgumentError, OutOfBlocksError, OutOfSlotsError, UnsupportedError
from .pool import BlockPool, HostSlots
from .prefixes import Node, ancestor, check_salt, first_needed, token_list
from .sharing import Sharing
from .swapping import GONE, SequenceState, Swapping, entries

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .swap import SwapSpace

#: (source, destination) block numbers.
Copy = tuple[int, int]
#: Tokens of a sequence at most, and any other count: `append` and `decode` take them as int32.
_MOST = 2**31 - 1


class BlockManager(Swapping, Sharing):
    """Blocks of a `PagedKVCache`: allocation, reference counts, shared prefixes, copy-on-write, swapping.

    A sequence is any hashable name with a length in tokens and the blocks that hold them. Blocks may be shared; a block
    that would be written while others see it is replaced first, and the copies to make are returned.

    Parameters
    ----------
    num_blocks : int
        Blocks of the cache, at most 2^31 - 1, because tables name them in int32. Each takes some tens of bytes here.
    block_size : int
        Tokens of a block, at most 2^31 - 1.
    num_slots : int
        Of a cache with a recent window its ``recent_slots``: each sequence then has a slot of its own, also while it is
        swapped out. 0: there are none. At most 2^31 - 1.
    swap_space : SwapSpace, optional
        Where `swap_out` moves sequences to; of this manager alone.

    Raises
    ------
    ArgumentError
        From every method: an unknown or a used name, one that is swapped out, a bad count. Nothing has changed then.
    OutOfBlocksError
        From `extend` and `swap_in`: more blocks are needed than no sequence has. Nothing has changed then.
    OutOfHostBlocksError
        From `swap_out`: the swap space has too little room. Nothing has changed then.
    MemoryError
        From the constructor: the host has too little memory for counts within these limits.
    OutOfSlotsError
        From `add` and `fork`: all slots belong to sequences. Nothing has changed then.

    Notes
    -----
    Full blocks whose tokens are known (`commit`) are found again by `match_prefix`, also when their sequence has ended:
    they stay until `extend` or `swap_in` needs blocks and no empty one is left (`evict`). Every method costs a constant
    time for each token and each block that it is about. One thread at a time.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_slots: int = 0, *, swap_space: SwapSpace | None = None
    ) -> None:
        self.num_blocks = check_int(num_blocks, "num_blocks", "BlockManager", least=1, most=_MOST)
        self.block_size = check_int(block_size, "block_size", "BlockManager", least=1, most=_MOST)
        self.num_slots = check_int(num_slots, "num_slots", "BlockManager", least=0, most=_MOST)
        self._pool = BlockPool(self.num_blocks, self.block_size)
        self._sequences: dict[Hashable, SequenceState] = {}
        self._swapped: dict[Hashable, SequenceState] = {}
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._slots: dict[Hashable, int] = {}
        self.swap_space = swap_space
        if swap_space is not None:
            if not hasattr(swap_space, "claim"):
                raise ArgumentError("swap_space", "a SwapSpace, or None", repr(swap_space), function="BlockManager")
            swap_space.claim(self)
        self._host = HostSlots(0 if swap_space is None else swap_space.num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that no sequence has: what `extend` can take."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Of the blocks that no sequence has those that `match_prefix` can find."""
        return self._pool.num_cached

    @property
    def num_free_host(self) -> int:
        """Blocks of the swap space that hold nothing; 0 without one."""
        return self._host.num_free

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """Names of all sequences, but for those that are swapped out."""
        return tuple(self._sequences)

    @property
    def swapped(self) -> tuple[Hashable, ...]:
        """Names of the sequences that are swapped out, the first one first."""
        return tuple(self._swapped)

    def length(self, sequence: Hashable) -> int:
        """Tokens of a sequence."""
        return self._any(sequence, "length").length

    def blocks(self, sequence: Hashable) -> tuple[int, ...]:
        """Blocks of a sequence, in the order of its tokens; see `free_before` for those that it has given back."""
        return tuple(entries(self._known(sequence, "blocks")))

    def references(self, block: int) -> int:
        """How many sequences have a block."""
        most = self.num_blocks - 1
        return self._pool.references[check_int(block, "block", "BlockManager.references", least=0, most=most)]

    def add(self, sequence: Hashable) -> None:
        """Begin an empty sequence."""
        self._unknown(sequence, "sequence", "add")
        self._take_slot(sequence)
        self._begin(sequence, self._pool.tree.root(None))

    def fork(self, parent: Hashable, child: Hashable) -> list[Copy]:
        """Begin a sequence with all tokens of another; no block is copied until one of them grows.

        Returns
        -------
        list of (source, destination)
            Slots to copy (`omniattn.copy_recent`) before either of them grows; empty without slots.
        """
        old = self._known(parent, "fork", "parent")
        self._unknown(child, "child", "fork")
        self._take_slot(child)
        new = self._begin(child, old.tip)
        new.table, new.pending = list(old.table), list(old.pending)
        new.length, new.first, new.depth = old.length, old.first, old.depth
        for block in new.table[new.first :]:
            self._pool.hold(block)
        return [(self._slots[parent], self._slots[child])] if self.num_slots else []

    def match_prefix(self, sequence: Hashable, tokens: Any, *, salt: Hashable = None, window: int | None = None) -> int:
        """Begin a sequence with the blocks that hold the first of its tokens already.

        Parameters
        ----------
        sequence : hashable
            A new name.
        tokens : sequence of hashable objects, or a one-dimensional array
            Of the whole prompt. What stands for an image shall be its own (its digest and a number, say).
        salt : hashable
            What keys and values depend on besides: an adapter, a tenant. Only prefixes of an equal one are found, by
            this sequence and by those that `fork` makes of it.
        window : int, optional
            Tokens that a query sees on its left, in all layers of the cache: blocks before them may be missing, as
            `free_before` leaves them. None: all are needed.

        Returns
        -------
        int
            Tokens that are there: whole blocks, and fewer than ``tokens`` has, because the last one's query is still to
            be computed. 0: the sequence is empty, as after `add`.

        Raises
        ------
        UnsupportedError
            With slots: a recent window has not the tokens of others.

        Notes
        -----
        The blocks belong to the sequence from now on, and are nobody's to evict. Tokens are compared themselves, and
        never by a hash alone. What was queued to write the blocks has to be ahead of what reads them: where one stream
        runs all steps it is; behind a `swap_in` see there.
        """
        function = "match_prefix"
        self._unknown(sequence, "sequence", function)
        self._refuse_slots(function)
        check_salt(salt, function)
        if window is not None:
            window = check_int(window, "window", f"BlockManager.{function}", least=0, most=_MOST)
        found = token_list(tokens, function)
        size, pool = self.block_size, self._pool
        path = pool.tree.find(salt, found[:-1], window)
        new = self._begin(sequence, path[-1] if path else pool.tree.root(salt))
        new.depth = len(path)
        new.length = new.depth * size
        if window is not None:
            new.first = first_needed(new.length - window, size)
        new.table = [GONE] * new.first
        for node in path[new.first :]:
            assert node.block is not None
            new.table.append(pool.hold(node.block))
        return new.length

    def commit(self, sequence: Hashable, tokens: Any) -> None:
        """Say which tokens a sequence has, so that `match_prefix` finds its full blocks.

        Parameters
        ----------
        sequence : hashable
        tokens : sequence of hashable objects, or a one-dimensional array
            The next ones: behind those that were matched or committed before. Only what is, or is queued to be, in the
            cache, in all layers: after `append`, and without guesses that may be dropped.

        Notes
        -----
        A block whose tokens another one holds already, behind the same ones, is given back for that one: read
        `block_table` anew before the next step. A sequence that is never committed shares by `fork` alone.
        """
        function = "commit"
        s = self._known(sequence, function)
        self._refuse_slots(function)
        new, size, pool = token_list(tokens, function), self.block_size, self._pool
        most = s.length - s.depth * size - len(s.pending)
        if len(new) > most:
            expected = f"at most {most}, of {s.length} tokens that have room"
            raise ArgumentError("tokens", expected, f"{len(new)}", function=f"BlockManager.{function}")
        if len(s.pending) + len(new) < size:
            s.pending += new
            return
        new = s.pending + new
        full = len(new) // size
        keys = [tuple(new[i * size : (i + 1) * size]) for i in range(full)]
        node: Node | None = s.tip
        for block, key in zip(s.table[s.depth : s.depth + full], keys, strict=True):
            node = None if node is None else node.children.get(key)
            if block != GONE and pool.node(block) not in (None, node):
                expected = "those that its blocks have been committed with by another sequence"
                raise ArgumentError("tokens", expected, f"others in block {block}", function=f"BlockManager.{function}")
        node = s.tip
        for index, key in enumerate(keys, s.depth):
            node, block = pool.tree.child(node, key), s.table[index]
            if block == GONE:
                continue
            if node.block is None:
                pool.attach(node, block)
            elif node.block != block:
                s.table[index] = pool.hold(node.block)
                pool.release(block)
        self._move(s, node, s.depth + full, new[full * size :])

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
        function, pool = "extend", self._pool
        if not isinstance(growth, Mapping):
            raise ArgumentError(
                "growth", "a mapping, {sequence: new tokens}", repr(growth), function=f"BlockManager.{function}"
            )
        # As Python's integers: sums of NumPy's would overflow, and an array's number may change later.
        counts = [(self._known(name, function), self._growth(name, count, function)) for name, count in growth.items()]
        # References as they will be: of two sequences that share a last block the second one need not copy.
        shared: dict[int, int] = {}
        to_copy: list[SequenceState] = []
        written: list[int] = []
        needed = 0
        for s, count in counts:
            if count == 0:
                continue
            needed += -(-(s.length + count) // self.block_size) - len(s.table)
            if s.length % self.block_size:
                last = s.table[-1]
                references = shared.get(last, pool.references[last])
                # A prefix that can be matched stays as it is.
                if references > 1 or pool.node(last) is not None:
                    shared[last] = references - 1
                    to_copy.append(s)
                    needed += 1
                else:
                    written.append(last)
        if needed > pool.num_free:
            raise OutOfBlocksError(needed, pool.num_free, self.num_blocks, self.block_size)
        for block in written:
            pool.forget_copy(block)
        copies = []
        for s in to_copy:
            copies.append((s.table[-1], pool.take()))
            s.table[-1] = copies[-1][1]
        for s, count in counts:
            s.length += count
            while len(s.table) * self.block_size < s.length:
                s.table.append(pool.take())
        # Last: none of them may be what another sequence takes.
        for source, _ in copies:
            pool.release(source)
        return copies

    def truncate(self, sequence: Hashable, length: int) -> None:
        """Drop the tokens from ``length`` on (rejected guesses of speculative decoding), and blocks without any."""
        s, size = self._known(sequence, "truncate"), self.block_size
        least = (s.first + 1) * size if s.first else 0
        s.length = check_int(length, "length", "BlockManager.truncate", least=least, most=s.length)
        while (len(s.table) - 1) * size >= s.length and len(s.table) > s.first:
            self._pool.release(s.table.pop())
        depth, rest = divmod(s.length, size)
        if depth >= s.depth:
            del s.pending[max(0, s.length - s.depth * size) :]
            return
        tip = ancestor(s.tip, s.depth - depth - 1)
        assert tip.parent is not None
        self._move(s, tip.parent, depth, list(tip.key[:rest]))

    def free_before(self, sequence: Hashable, position: int) -> int:
        """Give back blocks that a sliding window has left behind.

        Parameters
        ----------
        sequence : hashable
        position : int
            First token that any later query sees: the length, less ``window`` on the left. Up to the length, all tokens
            of which are in the cache; 0 and less gives back nothing.

        Returns
        -------
        int
            Blocks given back: those wholly left of ``position``, but for the nearest one.

        Notes
        -----
        Entries of `block_table` for the others lead to that one, so that every entry is a block of the sequence, also
        for kernels that read what they do not need. Lengths and positions are as before. `shared_prefix` does not go
        with a window, and `truncate` not behind it.
        """
        s = self._known(sequence, "free_before")
        position = check_int(position, "position", "BlockManager.free_before", least=-_MOST, most=s.length)
        first = max(s.first, first_needed(position, self.block_size))
        gone = s.table[s.first : first]
        s.table[s.first : first] = [GONE] * len(gone)
        s.first = first
        self._pool.release_all(gone)
        return len(gone)

    def evict(self, count: int) -> int:
        """Give up blocks that only `match_prefix` can find: the least recently used, of a sequence the last ones first.

        `extend` and `swap_in` do so by themselves. Returns how many: ``count``, or all that there are.
        """
        return self._pool.evict(check_int(count, "count", "BlockManager.evict", least=0))

    def free(self, sequence: Hashable) -> None:
        """End a sequence, also one that is swapped out. What `commit` has told of stays for `match_prefix`."""
        s = self._any(sequence, "free")
        if self._swapped.pop(sequence, None) is None:
            del self._sequences[sequence]
            self._pool.release_all(s.table[s.first :])
        else:
            self._give_back(s)
        self._pool.tree.unpin(s.tip)
        if self.num_slots:
            self._free_slots.append(self._slots.pop(sequence))

    def block_table(self, sequences: Iterable[Hashable], max_blocks: int | None = None) -> npt.NDArray[np.int32]:
        """Block table for `append` and `decode`, (sequences, max_blocks); 0 where a sequence has no block.

        ``max_blocks``: columns, at least those of the longest sequence, which is the default (at least 1).
        """
        import numpy as np

        found = [self._sequences[name] for name in self._all_known(sequences, "block_table")]
        longest = max((len(s.table) for s in found), default=0)
        columns = max(longest, 1)
        if max_blocks is not None:
            columns = check_int(max_blocks, "max_blocks", "BlockManager.block_table", least=columns, most=_MOST)
        table = np.zeros((len(found), columns), dtype=np.int32)
        for row, s in enumerate(found):
            table[row, : len(s.table)] = np.fromiter(entries(s), np.int32, len(s.table))
        return table

    def seq_lens(self, sequences: Iterable[Hashable]) -> npt.NDArray[np.int32]:
        """Lengths for `append` and `decode`, (sequences,)."""
        import numpy as np

        return np.array([self._sequences[s].length for s in self._all_known(sequences, "seq_lens")], dtype=np.int32)

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

    def _begin(self, sequence: Hashable, tip: Node) -> SequenceState:
        self._pool.tree.pin(tip)
        found = self._sequences[sequence] = SequenceState(tip)
        return found

    def _move(self, s: SequenceState, tip: Node, depth: int, pending: list[Any]) -> None:
        self._pool.tree.pin(tip, s.tip)
        s.tip, s.depth, s.pending = tip, depth, pending

    def _refuse_slots(self, function: str) -> None:
        if self.num_slots:
            raise UnsupportedError(
                f"BlockManager.{function}() with num_slots: a recent window, which holds one sequence's own tokens",
                instead="fork() and copy_recent(), or a cache without recent_window",
            )

    def _growth(self, sequence: Hashable, count: Any, function: str) -> int:
        length = self._sequences[sequence].length
        if type(count) is int and 0 <= count <= _MOST - length:
            return count  # without the name's text, which may be a long one
        argument, where = f"growth[{sequence!r}]", f"BlockManager.{function}"
        number = check_int(count, argument, where, least=0, most=_MOST)
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

    def _known(self, sequence: Hashable, function: str, argument: str = "sequence") -> SequenceState:
        try:
            return self._sequences[sequence]
        except (KeyError, TypeError):
            _check_name(sequence, argument, function)
        hint = f"There are {len(self._sequences)}; add() and fork() begin one"
        if sequence in self._swapped:
            hint = "It is swapped out; swap_in() brings it back"
        expected, where = "the name of a sequence", f"BlockManager.{function}"
        raise ArgumentError(argument, expected, repr(sequence), function=where, hint=hint)

    def _any(self, sequence: Hashable, function: str) -> SequenceState:
        _check_name(sequence, "sequence", function)
        return self._swapped.get(sequence) or self._known(sequence, function)

    def _unknown(self, sequence: Hashable, argument: str, function: str) -> None:
        _check_name(sequence, argument, function)
        if sequence in self._sequences or sequence in self._swapped:
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
