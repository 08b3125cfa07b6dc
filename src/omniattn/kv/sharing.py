"""What sequences have in the same blocks: `BlockManager.common_prefix`, ``shared_runs`` and ``sharing_order``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from ..arguments import check_int
from ..errors import ArgumentError
from .runs import SharedRuns, order_of, runs_of
from .swapping import SequenceState, entries


class Sharing(ABC):
    """What finds shared blocks among the sequences of a `BlockManager`."""

    block_size: int
    _sequences: dict[Hashable, SequenceState]

    def common_prefix(self, sequences: Iterable[Hashable]) -> int:
        """Tokens at the beginning that sequences have in the same blocks: ``shared_prefix`` of a call on all of them.

        A multiple of block_size. Behind `extend` no new token is one of them. 0 for fewer than two sequences, and
        where a window has given back the first block.
        """
        found = [self._sequences[name] for name in {*self._all_known(sequences, "common_prefix")}]
        if len(found) < 2 or any(s.first for s in found):
            return 0
        shortest = min(found, key=lambda s: s.length)
        same = shortest.table[: shortest.length // self.block_size]
        for s in found:
            if s.table[: len(same)] != same:
                same = same[: next(i for i, (a, b) in enumerate(zip(s.table, same)) if a != b)]
        return len(same) * self.block_size

    def shared_runs(self, new: Mapping[Any, int]) -> SharedRuns:
        """The blocks that sequences of a step have in common, in as many levels as there are.

        Parameters
        ----------
        new : mapping
            New tokens by sequence, one at least, in the order of the step; behind `extend`, which has the same. Only
            sequences side by side share a run: see `sharing_order`.

        Returns
        -------
        SharedRuns
            As it is now: of whole blocks in which no new token is. A sequence that has given back blocks
            (`free_before`) shares none.
        """
        function = "shared_runs"
        if not isinstance(new, Mapping):
            raise ArgumentError(
                "new", "a mapping, {sequence: new tokens}", repr(new), function=f"BlockManager.{function}"
            )
        names = tuple(self._all_known(new, function))
        found = [self._sequences[name] for name in names]
        rows = tuple(
            # The name's text, which may be a long one, is for errors alone.
            count
            if type(count) is int and 1 <= count <= s.length
            else check_int(count, f"new[{name!r}]", f"BlockManager.{function}", least=1, most=s.length)
            for s, (name, count) in zip(found, new.items(), strict=True)
        )
        tables = tuple(list(entries(s)) for s in found)
        limits = [0 if s.first else (s.length - n) // self.block_size for s, n in zip(found, rows, strict=True)]
        lengths = tuple(s.length for s in found)
        return SharedRuns(names, rows, lengths, tables, self.block_size, runs_of(tables, limits))

    def sharing_order(self, sequences: Iterable[Hashable]) -> list[Hashable]:
        """Sequences in an order in which those that have their first blocks in common stand side by side.

        Otherwise as they are given. It can change where a sequence comes or goes, `extend` copies a shared block, or
        `commit` and `free_before` give blocks back.
        """
        names = self._all_known(sequences, "sharing_order")
        found = [self._sequences[name] for name in names]
        limits = [0 if s.first else len(s.table) for s in found]
        return [names[i] for i in order_of([s.table for s in found], limits)]

    @abstractmethod
    def _all_known(self, sequences: Iterable[Hashable], function: str) -> list[Hashable]:
        """Return names of sequences that have blocks, or raise."""
