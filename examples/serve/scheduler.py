"""Who runs: which tokens of which requests a step computes, and what becomes of what it chose. Without arrays."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import omniattn as oa
from omniattn.errors import OutOfBlocksError, OutOfHostBlocksError

NGRAM = 3  # tokens that guesses are looked up by


@dataclass(eq=False)
class Request:
    """A prompt and what has been generated for it. A token depends on its logits, the seed and its position alone."""

    prompt: Sequence[int]
    limit: int  # tokens to generate at most
    temperature: float = 0.0  # 0: the likeliest token
    top_p: float = 1.0
    seed: int = 0
    stop: frozenset[int] = frozenset()  # tokens that end the answer, and are no part of it
    reason: str = ""  # why it has ended: "stop", "length" or "cancelled"
    computed: int = 0  # tokens that are in the cache,
    committed: int = 0  # that others can find there,
    cached: int = 0  # and that were there when the request came

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)  # the prompt, then the answer
        self._seen: dict[tuple[int, ...], int] = {}
        self._noted = NGRAM

    @property
    def answer(self) -> list[int]:
        """Generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def rest(self) -> int:
        """Tokens that are not in the cache: 1 between two tokens of the answer."""
        return len(self.tokens) - self.computed

    def draft(self, count: int) -> list[int]:
        """Up to ``count`` tokens that followed the last n-gram where it was last seen (prompt lookup)."""
        for end in range(self._noted, len(self.tokens)):
            self._seen[tuple(self.tokens[end - NGRAM : end])] = end
        self._noted = max(self._noted, len(self.tokens))
        at = self._seen.get(tuple(self.tokens[-NGRAM:]))
        return [] if at is None else self.tokens[at : at + count]


class Part(NamedTuple):
    """A request's rows in a step: ``tokens`` from position ``begin`` on. Logits are asked for the last ``wanted``."""

    request: Request
    tokens: list[int]
    begin: int
    wanted: int


class Scheduler:
    """First come, first served: each running request has a row of a step, guesses and prompts have what is left.

    ``max_requests`` and ``max_rows`` are of a step, ``max_tokens`` of a request, ``drafts`` guesses of a request and
    step. Where blocks run out the youngest leaves: to the host if ``blocks`` has a swap space with room, else its
    tokens are computed again.
    """

    def __init__(self, blocks: oa.BlockManager, max_requests: int, max_rows: int, max_tokens: int, drafts: int) -> None:
        if not 1 <= max_requests <= max_rows:
            raise ValueError(f"max_rows: expected at least max_requests, received {max_rows} and {max_requests}")
        self.blocks, self.max_tokens, self.drafts = blocks, max_tokens, drafts
        self.max_requests, self.max_rows = max_requests, max_rows
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps = self.drafted = self.accepted = self.preemptions = 0

    def submit(self, request: Request) -> None:
        """Queue a request; ValueError for one that could never run."""
        self.check(request)
        self.waiting.append(request)

    def check(self, r: Request) -> None:
        """Raise what `submit` would raise."""
        most = min(self.max_tokens, self.blocks.num_blocks * self.blocks.block_size)
        if not (r.prompt and 1 <= r.limit <= most - len(r.prompt)):
            raise ValueError(f"prompt, max_tokens: expected 2 to {most} in all, received {len(r.prompt)} and {r.limit}")
        if not (0 <= r.temperature <= 100 and 0 < r.top_p <= 1):
            raise ValueError(f"temperature: expected 0 to 100, top_p: 0 to 1, received {r.temperature} and {r.top_p}")

    def cancel(self, request: Request) -> None:
        """End a request, wherever it is, and give back its blocks; between two steps. Nothing if it has ended."""
        if request in self.running or request in self.waiting:
            self._end(request, "cancelled")

    def plan(self) -> tuple[list[Part], list[tuple[int, int]], list[Any]]:
        """The next step: its parts, block copies to make before it, and swaps that it has to wait for."""
        rows: dict[Request, int] = {}
        drafts: dict[Request, list[int]] = {}
        left = self.max_rows - len(self.running)
        for r in self.running:
            rows[r] = min(r.rest, 1 + left)
            left -= rows[r] - 1
            if r.rest == 1 and self.drafts:
                drafts[r] = r.draft(min(self.drafts, left, r.limit - len(r.answer) - 1))
                left -= len(drafts[r])
        events, preemptions = [], self.preemptions
        copies = self._make_room(rows, drafts, events)
        while self.waiting and left and len(self.running) < self.max_requests and self.preemptions == preemptions:
            r = self.waiting[0]
            if not self._admit(r, events):
                break
            self.running.append(self.waiting.popleft())
            rows[r] = min(r.rest, left)
            left -= rows[r]
            copies += self.blocks.extend({r: rows[r]})
        parts = []
        for r, n in rows.items():
            tokens, guesses = r.tokens[r.computed : r.computed + n], drafts.get(r, [])
            parts.append(Part(r, tokens + guesses, r.computed, 1 + len(guesses) if n == r.rest else 0))
        return parts, copies, events

    def finish(self, parts: Sequence[Part], chosen: Iterable[int]) -> list[tuple[Request, list[int]]]:
        """Take what the model chose for each row that was wanted; returns the new tokens of each request."""
        self.steps += 1
        tokens, news = iter(chosen), []
        for r, rows, begin, wanted in parts:
            picks = [next(tokens) for _ in range(wanted)]
            guesses = rows[len(rows) - wanted + 1 :] if picks else []
            good = 0
            # A guess is right if it is what the model chose, so answers are those without guesses.
            while good < len(guesses) and guesses[good] == picks[good]:
                good += 1
            self.drafted, self.accepted = self.drafted + len(guesses), self.accepted + good
            new = picks[: good + 1]
            end = next((i for i, token in enumerate(new) if token in r.stop), None)
            reason = "stop" if end is not None else "length" if len(r.answer) + len(new) == r.limit else ""
            r.tokens += new[:end]
            r.computed = min(begin + len(rows) - len(guesses) + good, len(r.tokens))
            if good < len(guesses):
                self.blocks.truncate(r, r.computed)
            if r.computed // self.blocks.block_size > r.committed // self.blocks.block_size:
                self.blocks.commit(r, r.tokens[r.committed : r.computed])
                r.committed = r.computed
            if reason:
                self._end(r, reason)
            if picks:
                news.append((r, new[:end]))
        return news

    def _make_room(self, rows: dict[Request, int], drafts: dict[Request, list[int]], events: list[Any]) -> Any:
        """Blocks for a step; guesses go first for it, then the youngest requests."""
        while True:
            try:
                return self.blocks.extend({r: n + len(drafts.get(r, ())) for r, n in rows.items()})
            except OutOfBlocksError:
                if any(drafts.values()):
                    drafts.clear()
                else:
                    rows.pop(self._preempt(events))

    def _preempt(self, events: list[Any]) -> Request:
        self.waiting.appendleft(r := self.running.pop())
        self.preemptions += 1
        if self.blocks.swap_space is not None:
            with contextlib.suppress(OutOfHostBlocksError):
                events.append(self.blocks.swap_out(r))
                return r
        self.blocks.free(r)
        r.computed = r.committed = 0
        return r

    def _admit(self, r: Request, events: list[Any]) -> bool:
        """Give a request its first blocks, if all of its tokens have room, and one more block where others run."""
        need = -(-len(r.tokens) // self.blocks.block_size) + bool(self.running)
        if r in self.blocks.swapped:
            if fits := need <= self.blocks.num_free:
                events.append(self.blocks.swap_in(r))
            return fits
        there = self.blocks.match_prefix(r, r.tokens)
        if need - there // self.blocks.block_size > self.blocks.num_free:
            self.blocks.free(r)
            return False
        r.computed = r.committed = there
        r.cached = max(r.cached, there)
        return True

    def _end(self, r: Request, reason: str) -> None:
        r.reason = reason
        (self.running if r in self.running else self.waiting).remove(r)
        if r in self.blocks.sequences or r in self.blocks.swapped:
            self.blocks.free(r)
