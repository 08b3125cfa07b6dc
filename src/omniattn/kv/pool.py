"""Blocks of a paged cache: who has them, which of those that nobody has are still worth something."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .prefixes import Node, PrefixTree


class BlockPool:
    """Reference counts of blocks, and what they hold beyond them.

    A block is free, or held by sequences, or cached: held by none, with tokens that a prefix may still be matched to.
    Cached blocks go when no free one is left, the least recently used first. Whoever releases blocks of a sequence
    begins with the last one: so those behind go before those ahead of them.

    Attributes
    ----------
    references : list of int
        Sequences that hold a block.
    tree : PrefixTree
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        # Taken from the end: block 0 goes first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self.references = [0] * num_blocks
        self.tree = PrefixTree(block_size)
        self._nodes: list[Node | None] = [None] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Copies on the host that are what a block holds, by block and by slot.
        self._slot_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence holds and a prefix may be matched to."""
        return len(self._cached)

    def take(self) -> int:
        """A block to write to; the caller has made sure that there is one."""
        block = self._free.pop() if self._free else self._evict()
        self.references[block] = 1
        return block

    def hold(self, block: int) -> int:
        """One more sequence has this block, which is held or cached."""
        if not self.references[block]:
            del self._cached[block]
        self.references[block] += 1
        return block

    def release(self, block: int) -> None:
        """One sequence less."""
        self.references[block] -= 1
        if self.references[block]:
            return
        if self._nodes[block] is None:
            self.forget_copy(block)
            self._free.append(block)
        else:
            self._cached[block] = None

    def release_all(self, blocks: Sequence[int]) -> None:
        """Those of a sequence, in the order of its tokens."""
        for block in reversed(blocks):
            self.release(block)

    def evict(self, count: int) -> int:
        """Free up to ``count`` cached blocks; returns how many."""
        count = min(count, len(self._cached))
        for _ in range(count):
            self._free.append(self._evict())
        return count

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        node = self._nodes[block]
        assert node is not None
        self._nodes[block] = node.block = None
        self.tree.prune(node)
        self.forget_copy(block)
        return block

    def node(self, block: int) -> Node | None:
        """The prefix that a block ends, if it can be matched: nobody may write to it then."""
        return self._nodes[block]

    def attach(self, node: Node, block: int) -> None:
        """A held block has the tokens of a node without one."""
        node.block, self._nodes[block] = block, node

    def slot_of(self, block: int) -> int | None:
        """Slot on the host that holds what a block holds."""
        return self._slot_of.get(block)

    def block_of(self, slot: int) -> int | None:
        """Block, held or cached, that holds what a slot on the host holds."""
        return self._block_of.get(slot)

    def note_copy(self, block: int, slot: int) -> None:
        """Both hold the same."""
        self._slot_of[block], self._block_of[slot] = slot, block

    def forget_copy(self, block: int) -> None:
        """A block is about to be written, or free."""
        slot = self._slot_of.pop(block, None)
        if slot is not None:
            del self._block_of[slot]

    def forget_slot(self, slot: int) -> None:
        """A slot is free."""
        block = self._block_of.pop(slot, None)
        if block is not None:
            del self._slot_of[block]


class HostSlots:
    """Slots for blocks on the host: those of several sequences that share a block are one."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def next(self, count: int) -> list[int]:
        """The slots that `hold` would take; nothing has changed."""
        return self._free[len(self._free) - count :][::-1]

    def hold(self, slot: int) -> None:
        """One more sequence needs what is, or comes, there. A free one is the `next`."""
        if not self._references[slot]:
            taken = self._free.pop()
            assert taken == slot
        self._references[slot] += 1

    def is_held(self, slot: int) -> bool:
        """Whether a sequence needs what is there."""
        return self._references[slot] > 0

    def release(self, slot: int) -> bool:
        """One sequence less; returns whether it is free now."""
        self._references[slot] -= 1
        if not self._references[slot]:
            self._free.append(slot)
        return not self._references[slot]
