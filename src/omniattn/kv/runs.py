"""Runs of blocks that several requests of a step have in common, and the arrays that say so to a call (cascade).

On the host; no arrays of any framework but NumPy's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arguments import check_int
from ..errors import ArgumentError

if TYPE_CHECKING:
    pass

#: Extents of arrays at most, which kernels count in 32 bits.
_MOST = 2**31 - 1
#: Blocks that are compared first; each comparison behind it has twice as many.
_FIRST_SLICE = 16


class SharedLevel(NamedTuple):
    """Keys that groups of queries see all of: one level of `SharedPrefixes`.

    Attributes
    ----------
    cu_seqlens_q : array, (groups + 1,), int32
        Group g has the rows cu_seqlens_q[g] to cu_seqlens_q[g + 1] of the packed queries, which may be none. Rows
        behind the last group see nothing of this level.
    seq_lens : array, (groups,), int32
        Keys of each group, a multiple of block_size; 0: none, its rows see nothing of this level.
    block_table : array, (groups, max_blocks), int32
        The blocks that hold them.
    """

    cu_seqlens_q: Any
    seq_lens: Any
    block_table: Any


class SharedPrefixes(NamedTuple):
    """Where the keys of a step lie that requests share: ``shared_prefix`` of `attention_with_kvcache`.

    A request sees the keys of its group in each level, the first level first, and then its own. All arrays are int32
    and contiguous, on q's device, and may be written between replays of a captured graph; `SharedRuns.arrays` makes
    them.

    Attributes
    ----------
    levels : tuple of SharedLevel
        The shared keys: what all have first (a system prompt), then what some of these have (a conversation).
    seq_lens : array, (batch,), int32
        Tokens of each request behind those that it shares, the new ones included; 0: it sees nothing and has no rows.
    block_table : array, (batch, max_blocks), int32
        The blocks that hold them.
    """

    levels: tuple[SharedLevel, ...]
    seq_lens: Any
    block_table: Any

    def map(self, function: Callable[[Any], Any]) -> SharedPrefixes:
        """The same with ``function`` of each array, which takes them to a device, say."""
        levels = tuple(SharedLevel(*map(function, level)) for level in self.levels)
        return SharedPrefixes(levels, function(self.seq_lens), function(self.block_table))


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Blocks that consecutive requests have in common.

    Attributes
    ----------
    first, count : int
        The requests, by their places in a step; at least two.
    begin, end : int
        The blocks, by their places in the table of each of them.
    level : int
        How many other runs these requests share before it.
    """

    first: int
    count: int
    begin: int
    end: int
    level: int


@dataclass(frozen=True)
class SharedRuns:
    """What the requests of a step have in common: `BlockManager.shared_runs`.

    Attributes
    ----------
    names : tuple of hashable
        The requests in the order of the step.
    rows : tuple of int
        New tokens of each.
    lengths : tuple of int
        All of its tokens.
    tables : tuple of list of int
        Its blocks.
    block_size : int
    runs : tuple of SharedRun
        From the first request on; those of a level before those within them.
    """

    names: tuple[Hashable, ...]
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    tables: tuple[list[int], ...] = field(repr=False)
    block_size: int
    runs: tuple[SharedRun, ...]

    @property
    def num_levels(self) -> int:
        """Levels that these runs are in."""
        return max((run.level + 1 for run in self.runs), default=0)

    @property
    def num_groups(self) -> int:
        """Groups of the level that has most of them, requests without a run between others included."""
        starts = [0] * (len(self.names) + 1)
        return max((len(list(self._groups(level, starts))) for level in range(self.num_levels)), default=0)

    def shared(self) -> list[int]:
        """Blocks at the beginning of each request that runs have."""
        found = [0] * len(self.names)
        for run in self.runs:  # those within others come later, and end later
            found[run.first : run.first + run.count] = [run.end] * run.count
        return found

    def keep(self, runs: Collection[SharedRun]) -> SharedRuns:
        """The same with these runs alone; blocks of others go to the runs within them, or to the requests.

        Of a run its requests and its end count, whichever level it is in.

        Raises
        ------
        ArgumentError
            A run that is none of these.
        """
        expected, function = "some of the runs that there are", "SharedRuns.keep"
        try:
            wanted = {(run.first, run.count, run.end) if isinstance(run, SharedRun) else run for run in runs}
        except TypeError:  # nothing to go through, or an element that is no key
            raise ArgumentError("runs", expected, repr(runs), function=function) from None
        bounds = [place for run in self.runs if (place := (run.first, run.count, run.end)) in wanted]
        if len(bounds) != len(wanted):
            received = ", ".join(map(str, wanted - {*bounds}))
            raise ArgumentError("runs", expected, received, function=function)
        return SharedRuns(self.names, self.rows, self.lengths, self.tables, self.block_size, tuple(_nested(bounds)))

    def arrays(
        self,
        *,
        levels: int | None = None,
        groups: int | None = None,
        batch: int | None = None,
        level_blocks: int | None = None,
        own_blocks: int | None = None,
    ) -> SharedPrefixes:
        """NumPy arrays of a step, for ``shared_prefix`` of `attention_with_kvcache` behind `SharedPrefixes.map`.

        Their extents are those of this step, or larger ones: a captured graph has arrays for the largest step.

        Parameters
        ----------
        levels : int, optional
            Levels; those that the step has not are empty.
        groups : int, optional
            Of each level. Requests without a run between others are a group too, without keys.
        batch : int, optional
            Requests; those behind the last have no tokens.
        level_blocks, own_blocks : int, optional
            Columns of the tables of levels, and of requests.

        Raises
        ------
        ArgumentError
            The step needs more.
        """
        import numpy as np

        starts, size = [0, *itertools.accumulate(self.rows)], self.block_size
        parts = [list(self._groups(level, starts)) for level in range(self.num_levels)]
        shared = self.shared()
        own = [-(-n // size) - gone for n, gone in zip(self.lengths, shared, strict=True)]
        of_levels = [run.end - run.begin for run in self.runs]
        num_levels = _extent(levels, len(parts), "levels")
        num_groups = _extent(groups, max([len(found) for found in parts], default=0), "groups", least=1)
        num_requests = _extent(batch, len(self.names), "batch")
        columns = _extent(level_blocks, max(of_levels, default=0), "level_blocks", least=1)
        own_columns = _extent(own_blocks, max(own, default=0), "own_blocks", least=1)
        made = []
        for found in (*parts, *[[] for _ in range(num_levels - len(parts))]):
            rows = np.full(num_groups + 1, starts[-1], np.int32)
            rows[0] = 0
            lens, table = np.zeros(num_groups, np.int32), np.zeros((num_groups, columns), np.int32)
            for g, (end, run) in enumerate(found):
                rows[g + 1] = end
                if run is not None:
                    lens[g] = (run.end - run.begin) * size
                    table[g, : run.end - run.begin] = self.tables[run.first][run.begin : run.end]
            made.append(SharedLevel(rows, lens, table))
        lens, table = np.zeros(num_requests, np.int32), np.zeros((num_requests, own_columns), np.int32)
        for b, (length, gone, count) in enumerate(zip(self.lengths, shared, own, strict=True)):
            lens[b] = length - gone * size
            table[b, :count] = self.tables[b][gone : gone + count]
        return SharedPrefixes(tuple(made), lens, table)

    def _groups(self, level: int, starts: list[int]) -> Iterator[tuple[int, SharedRun | None]]:
        """Groups of a level by the row that each ends before; None: requests without a run."""
        at = 0
        for run in self.runs:
            if run.level == level:
                if run.first > at:
                    yield starts[run.first], None
                at = run.first + run.count
                yield starts[at], run


def _extent(given: int | None, needed: int, name: str, least: int = 0) -> int:
    needed = max(needed, least)
    if given is None:
        return needed
    found = check_int(given, name, "SharedRuns.arrays", least=0, most=_MOST)
    if found < needed:
        raise ArgumentError(name, f"at least {needed}, which this step needs", f"{found}", function="SharedRuns.arrays")
    return found


def _nested(bounds: Iterable[tuple[int, int, int]]) -> Iterator[SharedRun]:
    """Runs of (first request, requests, end); those that others are within come before them."""
    around: list[SharedRun] = []
    for first, count, end in bounds:
        while around and around[-1].first + around[-1].count <= first:
            around.pop()
        run = SharedRun(first, count, around[-1].end if around else 0, end, len(around))
        yield run
        around.append(run)


def common(a: Sequence[int], b: Sequence[int], begin: int, end: int) -> int:
    """The first place from ``begin`` to ``end`` where two tables differ; ``end`` if they do not.

    Slices are compared whole, which is a hundred times as fast as block by block.
    """
    step = _FIRST_SLICE
    while begin < end:
        stop = min(begin + step, end)
        if a[begin:stop] != b[begin:stop]:
            if step == 1:
                return begin
            step = max(1, (stop - begin) // 2)
        else:
            begin = stop
            step *= 2
    return end


class _Part(NamedTuple):
    """Requests that have the same blocks up to ``begin``; ``known``: up to where each has those of ``longest``."""

    requests: list[int]
    begin: int
    longest: int = -1
    known: list[int] | None = None


def _parts(
    tables: Sequence[Sequence[int]], limits: Sequence[int], divide: Callable[[list[int], list[Any]], list[list[int]]]
) -> Iterator[tuple[list[int], int, int]]:
    """(requests, begin, end) of the blocks that requests share, and of requests that share no more (end = begin).

    Those of a part come before those within it. What is known of a block is not compared again.
    """
    todo = [_Part(list(range(len(tables))), 0)] if tables else []
    while todo:
        part = todo.pop()
        if len(part.requests) == 1:
            yield part.requests, part.begin, part.begin
            continue
        longest, known = part.longest, part.known
        if known is None:
            # One that goes on where others end, so that what is known of them lasts.
            longest = max(part.requests, key=limits.__getitem__)
            known = [common(tables[longest], tables[i], part.begin, limits[i]) for i in part.requests]
        end = min(known)
        if end > part.begin:
            yield part.requests, part.begin, end
        # What comes next: the block at ``end``; a request that has none to share there stands alone.
        keys = [tables[i][end] if limits[i] > end else ("alone", i) for i in part.requests]
        known_of = dict(zip(part.requests, known, strict=True))
        todo += reversed([
            _Part(requests, end, longest, [known_of[i] for i in requests]) if longest in requests
            else _Part(requests, end)
            for requests in divide(part.requests, keys)
        ])  # fmt: skip


def _side_by_side(requests: list[int], keys: list[Any]) -> list[list[int]]:
    """Requests of one key that stand side by side."""
    pairs = itertools.groupby(zip(keys, requests, strict=True), key=lambda pair: pair[0])
    return [[request for _, request in found] for _, found in pairs]


def _anywhere(requests: list[int], keys: list[Any]) -> list[list[int]]:
    """Requests of one key, in the order in which keys come first."""
    found: dict[Any, list[int]] = {}
    for key, request in zip(keys, requests, strict=True):
        found.setdefault(key, []).append(request)
    return list(found.values())


def runs_of(tables: Sequence[Sequence[int]], limits: Sequence[int]) -> tuple[SharedRun, ...]:
    """The runs of requests in their order; ``limits``: blocks of each that may be shared."""
    found = _parts(tables, limits, _side_by_side)
    return tuple(_nested((requests[0], len(requests), end) for requests, begin, end in found if end > begin))


def order_of(tables: Sequence[Sequence[int]], limits: Sequence[int]) -> list[int]:
    """An order in which requests that have blocks in common stand side by side; else as they are."""
    return [requests[0] for requests, begin, end in _parts(tables, limits, _anywhere) if end == begin]
