"""Who holds which tokens, and who computes what in which step of a ring: pure arithmetic, without arrays.

A sequence is cut into chunks. With the schedule ``"contiguous"`` there is one a rank, in order. With ``"zigzag"`` there
are two: rank r of n holds chunks r and 2 n - 1 - r, so that causal attention gives every rank the same work (Llama 3,
Grattafiori et al. 2024, section 3.3.2). Chunk c of m has the tokens seqlen * c // m to seqlen * (c + 1) // m: lengths
differ by one token at most, and a sequence may have fewer tokens than there are chunks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ..errors import ArgumentError
from ..problems.quantize import BLOCK_ROWS

SCHEDULES = ("zigzag", "contiguous")
UNLIMITED = -1

#: Half-open range of rows or tokens.
Range = tuple[int, int]


def check_schedule(schedule: object, function: str) -> str:
    """The name of a schedule."""
    if isinstance(schedule, str) and schedule in SCHEDULES:
        return schedule
    raise ArgumentError("schedule", " or ".join(map(repr, SCHEDULES)), repr(schedule), function=function)


def chunks_of(seqlen: int, world_size: int, rank: int, schedule: str) -> tuple[Range, ...]:
    """Token ranges of a rank, in the order in which it holds them."""
    count = world_size if schedule == "contiguous" else 2 * world_size
    mine = (rank,) if schedule == "contiguous" else (rank, count - 1 - rank)
    return tuple((seqlen * c // count, seqlen * (c + 1) // count) for c in mine)


def length_of(seqlen: int, world_size: int, rank: int, schedule: str) -> int:
    """Tokens of a rank."""
    return sum(end - begin for begin, end in chunks_of(seqlen, world_size, rank, schedule))


@dataclass(frozen=True, slots=True)
class Task:
    """One call of attention: a rectangle of a rank's queries and of the keys of one rank.

    Attributes
    ----------
    q, k : (int, int)
        Rows of the rank's queries, and of the part of K and V that it got. Half-open.
    window : (left, right)
        Keys that a query sees around the diagonal, which ends at the rectangle's bottom right; -1 is unlimited.
    starts : tuple of int
        Of packed documents that lie as a whole in q and in k, which are the same rows then: where each begins, counted
        from the first row, and where the last one ends. Empty for one rectangle.
    """

    q: Range
    k: Range
    window: tuple[int, int]
    starts: tuple[int, ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return not self.starts and self.window == (UNLIMITED, UNLIMITED)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        if self.starts:
            lengths = [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]
            return sum(_pairs(n, n, self.window) for n in lengths)
        return _pairs(self.q[1] - self.q[0], self.k[1] - self.k[0], self.window)


def _pairs(rows_q: int, rows_k: int, window: tuple[int, int]) -> int:
    """Pairs that a window shows, which is counted from the bottom right."""
    (left, right), diagonal = window, rows_k - rows_q
    within = rows_q * rows_k if right < 0 else _below(rows_q, rows_k, diagonal + right)
    return within - (0 if left < 0 else _below(rows_q, rows_k, diagonal - left - 1))


def _below(rows_q: int, rows_k: int, offset: int) -> int:
    """Pairs with key <= query + offset."""

    def up_to(x: int) -> int:
        """Sum of all numbers up to x, each at least 0 and at most rows_k."""
        x = max(x, 0)
        inside = min(x, rows_k)
        return inside * (inside + 1) // 2 + (x - inside) * rows_k

    return up_to(offset + rows_q) - up_to(offset)


def clip(rows_q: int, rows_k: int, offset: int, window: tuple[int, int]) -> Task | None:
    """The smallest rectangle with all pairs of which the query sees the key; None without such a pair.

    Query i stands at key i + offset, and sees the keys from there - left to there + right. offset may have any value:
    rows that see nothing, and keys that nobody sees, are cut off, so that the window of the rest, counted from its
    bottom right, is not negative.
    """
    left, right = window
    q0, q1, k0, k1 = 0, rows_q, 0, rows_k
    if right >= 0:
        q0 = max(0, -(offset + right))
    if left >= 0:
        q1 = min(rows_q, rows_k - offset + left)
        k0 = max(0, q0 + offset - left)
    if right >= 0:
        k1 = min(rows_k, q1 + offset + right)
    if q0 >= q1 or k0 >= k1:
        return None
    new_left = UNLIMITED if left < 0 else left - offset + k1 - q1
    new_right = UNLIMITED if right < 0 else right + offset + q1 - k1
    return Task((q0, q1), (k0, k1), hiding((new_left, new_right), q1 - q0, k1 - k0))


def hiding(window: tuple[int, int], rows_q: int, rows_k: int) -> tuple[int, int]:
    """A window with -1 for each side that hides nothing."""
    left, right = window
    return UNLIMITED if left >= rows_k - 1 else left, UNLIMITED if right >= rows_q - 1 else right


def _moved(task: Task, q: int, k: int) -> Task:
    return replace(task, q=(task.q[0] + q, task.q[1] + q), k=(task.k[0] + k, task.k[1] + k))


def _union(a: Task, b: Task) -> Task | None:
    """One rectangle with the pairs of both; None if there is none."""
    if a.starts or b.starts or a.window[0] != UNLIMITED or b.window[0] != UNLIMITED:
        return None
    if a.q == b.q and a.k[1] == b.k[0] and a.is_full:
        # The diagonal ends at the bottom right of b, whose window counts from there.
        return Task(a.q, (a.k[0], b.k[1]), b.window)
    if a.q[1] != b.q[0] or a.k[0] != b.k[0]:
        return None
    if a.is_full and b.is_full:
        return Task((a.q[0], b.q[1]), a.k, a.window) if a.k == b.k else None
    # Both diagonals are one line, and no key behind a's is one that a's rows would see below it.
    lines = [task.k[1] - task.q[1] + task.window[1] for task in (a, b)]
    shown = UNLIMITED not in (a.window[1], b.window[1]) and lines[0] == lines[1]
    shown = shown and (a.k[1] == b.k[1] or (a.window[1] == 0 and a.k[1] < b.k[1]))
    return Task((a.q[0], b.q[1]), (a.k[0], b.k[1]), b.window) if shown else None


def united(tasks: list[Task]) -> tuple[Task, ...]:
    """The same pairs in fewer rectangles, where neighbours make one."""
    found = sorted(tasks, key=lambda task: (task.q, task.k))
    again = True
    while again:
        again = False
        for i, a in enumerate(found):
            for j, b in enumerate(found):
                union = None if i == j else _union(a, b)
                if union is not None:
                    found = [union if n == i else task for n, task in enumerate(found) if n != j]
                    again = True
                    break
            if again:
                break
    return tuple(found)


@dataclass(frozen=True)
class Step:
    """What a rank does with the keys of one rank.

    Attributes
    ----------
    source : int
        The rank whose K and V they are.
    rows : (int, int)
        Of its rows, those that are sent: from the first to the last one that a task reads. Empty: nothing is sent.
    tasks : tuple of Task
        Rows of ``k`` are counted in the source's part, not from ``rows``.
    ranges : tuple of (int, int)
        Of its rows, what is quantized apart: ``rows``, or chunks that do not unite.
    """

    source: int
    rows: Range
    tasks: tuple[Task, ...]
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Ring:
    """A sequence, or packed documents, over ranks. Equal rings have equal steps.

    Attributes
    ----------
    seqlen_q, seqlen_k : int
        Tokens of the whole sequence, or of all documents.
    world_size : int
    schedule : str
    window : (left, right)
        With causal folded in; -1 is unlimited.
    starts : tuple of int
        Tokens at which documents begin, and the end of the last one; empty for one sequence.
    unite : bool
        Whether chunks of a rank may share a call. Quantized ones do not where a group of scales would have rows of two.
    """

    seqlen_q: int
    seqlen_k: int
    world_size: int
    schedule: str
    window: tuple[int, int]
    starts: tuple[int, ...] = ()
    unite: bool = True
    #: Steps by rank, once made.
    _steps: dict[tuple[int, int], Step] = field(default_factory=dict, compare=False, repr=False)

    def chunks_q(self, rank: int) -> tuple[Range, ...]:
        """Queries of a rank."""
        return chunks_of(self.seqlen_q, self.world_size, rank, self.schedule)

    def chunks_k(self, rank: int) -> tuple[Range, ...]:
        """Keys of a rank."""
        return chunks_of(self.seqlen_k, self.world_size, rank, self.schedule)

    def step(self, rank: int, step: int) -> Step:
        """Step ``step`` of a rank: 0 is its own keys, then those of the rank so many places before it."""
        known = self._steps.get((rank, step))
        if known is None:
            source = (rank - step) % self.world_size
            tasks = self._tasks(rank, source)
            rows = (min(t.k[0] for t in tasks), max(t.k[1] for t in tasks)) if tasks else (0, 0)
            ranges = (rows,) if self.unite and tasks else tuple(sorted({task.k for task in tasks}))
            known = self._steps[rank, step] = Step(source, rows, tasks, ranges)
        return known

    def steps(self, rank: int) -> tuple[Step, ...]:
        """All steps of a rank, in order, those without a task too."""
        return tuple(self.step(rank, step) for step in range(self.world_size))

    def _tasks(self, rank: int, source: int) -> tuple[Task, ...]:
        found: list[Task] = []
        row_q = 0
        for chunk_q in self.chunks_q(rank):
            row_k = 0
            for chunk_k in self.chunks_k(source):
                found += [_moved(task, row_q, row_k) for task in self._pair(chunk_q, chunk_k)]
                row_k += chunk_k[1] - chunk_k[0]
            row_q += chunk_q[1] - chunk_q[0]
        if not self.unite:
            return tuple(found)
        return united(found)

    def _pair(self, chunk_q: Range, chunk_k: Range) -> list[Task]:
        """Tasks of two chunks, rows counted from the begin of each."""
        if not self.starts:
            offset = chunk_q[0] + self.seqlen_k - self.seqlen_q - chunk_k[0]
            task = clip(chunk_q[1] - chunk_q[0], chunk_k[1] - chunk_k[0], offset, self.window)
            return [] if task is None else [task]
        documents = [
            (max(a, chunk_q[0]), min(b, chunk_q[1]), max(a, chunk_k[0]), min(b, chunk_k[1]))
            for a, b in self._documents(chunk_q, chunk_k)
        ]
        documents = [(a, b, c, d) for a, b, c, d in documents if a < b and c < d]
        if chunk_q == chunk_k and len(documents) > 1:
            begin, end = documents[0][0], documents[-1][1]
            starts = (*(a - begin for a, *_ in documents), end - begin)
            rows = (begin - chunk_q[0], end - chunk_q[0])
            longest = max(b - a for a, b, *_ in documents)
            return [Task(rows, rows, hiding(self.window, longest, longest), starts)]
        found = []
        for a, b, c, d in documents:
            task = clip(b - a, d - c, a - c, self.window)
            if task is not None:
                found.append(_moved(task, a - chunk_q[0], c - chunk_k[0]))
        return found

    def _documents(self, *chunks: Range) -> list[Range]:
        """Tokens of the documents that may have some in every chunk: few of many, between chunks that differ."""
        if any(a >= b for a, b in chunks):
            return []
        first = max(bisect_right(self.starts, a) - 1 for a, _ in chunks)
        end = min(bisect_left(self.starts, b) for _, b in chunks)
        return [(self.starts[n], self.starts[n + 1]) for n in range(first, min(end, len(self.starts) - 1))]


def unites(seqlen: int, world_size: int, schedule: str, window: tuple[int, int]) -> bool:
    """Whether a rank's chunks can be quantized as one part, of full attention or of causal with ``seqlen`` keys.

    Full attention reads whole parts, and so does a schedule with one chunk a rank; else chunks need whole groups of
    rows.
    """
    whole = window == (UNLIMITED, UNLIMITED) or schedule == "contiguous"
    return whole or seqlen % (2 * world_size * BLOCK_ROWS) == 0


@lru_cache(maxsize=32)
def ring_of(
    seqlen_q: int,
    seqlen_k: int,
    world_size: int,
    schedule: str,
    window: tuple[int, int],
    starts: tuple[int, ...] = (),
    unite: bool = True,
) -> Ring:
    """A `Ring`; the same object for the same facts, so that a training loop makes its steps once."""
    return Ring(seqlen_q, seqlen_k, world_size, schedule, window, starts, unite)
