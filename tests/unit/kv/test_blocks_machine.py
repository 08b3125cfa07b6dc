"""Everything that a block manager does, in random order, against a model in which nobody shares anything.

A real cache and a real swap space, some of whose copies fail. A token's key is a mark, made of all that attention would
have it depend on: the salt and the tokens up to it. So a block that is shared by mistake has wrong marks, and a matched
prefix the very ones that would have been computed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from omniattn.errors import OutOfBlocksError, OutOfHostBlocksError
from omniattn.kv.blocks import BlockManager
from omniattn.kv.cache import PagedKVCache
from omniattn.kv.swap import SwapSpace
from omniattn.ops import copy_blocks

BLOCKS, SIZE, SLOTS = 24, 4, 14
#: Tokens that a query sees on its left, of the sequences with a window.
WINDOW = 5
STEPS, SEEDS = 10_000, 10


class CopyFailed(RuntimeError):
    """What the driver would raise."""


class FailingSpace(SwapSpace):
    """Copies that end in the middle when they are told to."""

    fails_at: int | None = None

    def copy_plane(self, index: int, pairs: Sequence[tuple[int, int]], side: int, to_host: bool) -> None:
        if self.fails_at is not None and index >= self.fails_at:
            super().copy_plane(index, pairs[: len(pairs) // 2], side, to_host)
            raise CopyFailed
        super().copy_plane(index, pairs, side, to_host)


@dataclass
class Model:
    """A sequence that has its tokens for itself.

    Attributes
    ----------
    salt : object
        Of its marks; one of its own if its tokens are never told.
    marks : list of int
        Keys that it has written.
    committed : int
        Tokens that the manager knows.
    given_back : int
        Tokens before this one are not needed any more.
    """

    salt: Any
    told: bool
    windowed: bool
    tokens: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    committed: int = 0
    given_back: int = 0

    def write(self, token: int) -> int:
        self.tokens.append(token)
        self.marks.append(hash((self.salt, self.marks[-1] if self.marks else None, token)))
        return self.marks[-1]

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.marks[length:]
        self.committed = min(self.committed, length)

    def copy(self) -> Model:
        return Model(
            self.salt, self.told, self.windowed, list(self.tokens), list(self.marks), self.committed, self.given_back
        )


class Machine:
    """A manager, its cache, and what should be in it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cache = PagedKVCache(BLOCKS, SIZE, 1, 8, like=np.zeros(1, np.float16), k_dtype="fp16")
        self.space = FailingSpace(self.cache, SLOTS)
        self.manager = BlockManager(BLOCKS, SIZE, swap_space=self.space)
        self.keys = self.cache.k.view(np.int64)[:, 0, :, 0]
        self.values = self.cache.v.view(np.int64)[:, 0, :, 0]
        self.models: dict[int, Model] = {}
        self.away: dict[int, Model] = {}
        self.count = 0
        self.seen: Counter[str] = Counter()
        names = "add fork match match free commit truncate window swap_out swap_in evict" + 3 * " extend decode"
        self.actions: list[tuple[str, Callable[[], None]]] = [
            (name, getattr(self, f"do_{name}")) for name in names.split()
        ]

    def some(self, models: dict[int, Model]) -> int:
        return self.random.choice(list(models))

    def step(self) -> None:
        name, action = self.random.choice(self.actions)
        if not self.models and name not in ("add", "match", "swap_in"):
            return
        self.seen[name] += 1
        action()

    def do_add(self) -> None:
        if len(self.models) + len(self.away) > 12:
            return
        self.count += 1
        self.manager.add(self.count)
        told = self.random.random() < 0.6
        self.models[self.count] = Model(None if told else ("own", self.count), told, self.random.random() < 0.3)

    def do_fork(self) -> None:
        if len(self.models) + len(self.away) > 12:
            return
        parent = self.some(self.models)
        self.count += 1
        assert self.manager.fork(parent, self.count) == []
        self.models[self.count] = self.models[parent].copy()

    def prompt(self) -> list[int]:
        """One of a few, with a tail: several levels that prompts have in common."""
        system, talk = self.random.randrange(2), self.random.randrange(3)
        whole = [system] * 6 + [talk] * 7 + [self.random.randrange(2) for _ in range(6)]
        return whole[: self.random.randrange(1, len(whole) + 1)]

    def do_match(self) -> None:
        if len(self.models) + len(self.away) > 12:
            return
        self.count += 1
        tokens, salt = self.prompt(), self.random.choice([None, None, "adapter"])
        windowed = self.random.random() < 0.3
        there = self.manager.match_prefix(self.count, tokens, salt=salt, window=WINDOW if windowed else None)
        assert there % SIZE == 0
        assert there < len(tokens)
        model = Model(salt, True, windowed)
        for token in tokens[:there]:
            model.write(token)
        model.committed = there
        if windowed:
            model.given_back = max(0, there - WINDOW)
        self.models[self.count] = model
        self.seen["matched"] += there > 0
        try:
            self.grow({self.count: tokens[there:]})
        except OutOfBlocksError:
            self.seen["full"] += 1
            return
        if self.random.random() < 0.9:
            self.tell(self.count, len(tokens))

    def grow(self, new: dict[int, list[int]]) -> None:
        before = self.state()
        try:
            copies = self.manager.extend({name: len(tokens) for name, tokens in new.items()})
        except OutOfBlocksError:
            assert self.state() == before
            raise
        written = [to for _, to in copies]
        assert len(set(written)) == len(written)
        assert not set(written) & {source for source, _ in copies}
        copy_blocks(self.cache, copies)
        for name, tokens in new.items():
            blocks, model = self.manager.blocks(name), self.models[name]
            for token in tokens:
                at, mark = len(model.tokens), model.write(token)
                self.keys[blocks[at // SIZE], at % SIZE] = mark
                self.values[blocks[at // SIZE], at % SIZE] = -mark
                assert self.manager.references(blocks[at // SIZE]) == 1

    def do_extend(self, most: int = 7) -> None:
        names = self.random.sample(list(self.models), min(len(self.models), self.random.randrange(1, 4)))
        names = [name for name in names if len(self.models[name].tokens) < 40]
        try:
            self.grow({n: [self.random.randrange(2) for _ in range(self.random.randrange(most))] for n in names})
        except OutOfBlocksError:
            self.seen["full"] += 1
            if self.random.random() < 0.5:
                self.do_free()

    def do_decode(self) -> None:
        self.do_extend(2)

    def tell(self, name: int, to: int) -> None:
        model = self.models[name]
        tokens: Any = model.tokens[model.committed : to]
        self.manager.commit(name, np.array(tokens, dtype=np.int32) if self.random.random() < 0.5 else tokens)
        model.committed = max(model.committed, to)

    def do_commit(self) -> None:
        told = {name: model for name, model in self.models.items() if model.told}
        if told:
            name = self.some(told)
            left = len(told[name].tokens) - told[name].committed
            self.tell(name, told[name].committed + self.random.choice([left, self.random.randint(0, left)]))

    def do_truncate(self) -> None:
        name = self.some(self.models)
        model = self.models[name]
        first = max(0, model.given_back // SIZE - 1)
        least = (first + 1) * SIZE if first else 0
        least = max(least, len(model.tokens) - self.random.choice([2, 40]))
        length = self.random.randint(least, len(model.tokens))
        self.manager.truncate(name, length)
        model.cut(length)

    def do_window(self) -> None:
        windowed = {name: model for name, model in self.models.items() if model.windowed}
        if not windowed:
            return
        name = self.some(windowed)
        model = windowed[name]
        before, position = self.manager.num_free, len(model.tokens) - WINDOW
        given = self.manager.free_before(name, position)
        model.given_back = max(model.given_back, position)
        assert given >= self.manager.num_free - before >= 0
        self.seen["windows"] += given > 0

    def do_free(self) -> None:
        both = self.models | self.away
        if both:
            name = self.some(both)
            self.manager.free(name)
            self.models.pop(name, None)
            self.away.pop(name, None)

    def do_evict(self) -> None:
        count = self.random.randrange(4)
        cached, free = self.manager.num_cached, self.manager.num_free
        assert self.manager.evict(count) == min(count, cached)
        assert (self.manager.num_cached, self.manager.num_free) == (max(0, cached - count), free)

    def swap(self, call: Callable[[int], Any], name: int, error: type[Exception]) -> bool:
        before = self.state()
        self.space.fails_at = self.random.randrange(2) if self.random.random() < 0.2 else None
        try:
            assert call(name).done()
        except (CopyFailed, error) as caught:
            self.seen["failed copies" if isinstance(caught, CopyFailed) else "no room"] += 1
            # What nobody held may have been evicted for the copies; the rest is as it was.
            assert self.state() == before
            return False
        finally:
            self.space.fails_at = None
        return True

    def do_swap_out(self) -> None:
        name = self.some(self.models)
        if self.swap(self.manager.swap_out, name, OutOfHostBlocksError):
            self.away[name] = self.models.pop(name)

    def do_swap_in(self) -> None:
        if self.away:
            name = self.some(self.away)
            if self.swap(self.manager.swap_in, name, OutOfBlocksError):
                self.models[name] = self.away.pop(name)

    def state(self) -> Any:
        manager = self.manager
        return (
            {name: (manager.blocks(name), manager.length(name)) for name in manager.sequences}, manager.swapped,
            manager.num_free, manager.num_free_host, [manager.references(i) for i in range(BLOCKS)],
        )  # fmt: skip

    def check(self) -> None:
        manager = self.manager
        assert set(manager.sequences) == set(self.models)
        assert set(manager.swapped) == set(self.away)
        used: Counter[int] = Counter()
        for name, model in self.models.items():
            blocks, length = manager.blocks(name), len(model.tokens)
            assert manager.length(name) == length
            assert len(blocks) == -(-length // SIZE)
            used.update(set(blocks))
            needed = np.arange(max(0, model.given_back), length)
            places = np.array(blocks, dtype=int)[needed // SIZE], needed % SIZE
            marks = model.marks[max(0, model.given_back) :]
            assert self.keys[places].tolist() == marks
            assert self.values[places].tolist() == [-mark for mark in marks]
            own = sorted(set(blocks), key=blocks.index)
            assert blocks == (*[own[0]] * (len(blocks) - len(own)), *own) if own else not blocks
        assert all(manager.references(block) == used[block] for block in range(BLOCKS))
        assert manager.num_free == BLOCKS - len(used)
        assert manager.num_cached <= manager.num_free
        if not self.away:
            assert manager.num_free_host == SLOTS
        group = self.random.sample(list(self.models), min(len(self.models), 3))
        same = manager.common_prefix(group)
        if group and not any(manager.blocks(name)[:1] == manager.blocks(name)[1:2] for name in group):
            tables = [manager.blocks(name)[: len(self.models[name].tokens) // SIZE] for name in group]
            expected = next((i for i, row in enumerate(zip(*tables)) if len(set(row)) > 1), min(map(len, tables)))
            assert same == (expected * SIZE if len(group) > 1 else 0)
        assert len({tuple(self.models[name].tokens[:same]) for name in group}) <= 1

        self.check_runs()

    def check_runs(self) -> None:
        """What some sequences share, as a step in levels has it: the marks of each, and none of its newest token."""
        some = self.random.sample(list(self.models), min(len(self.models), 6))
        order = self.manager.sharing_order([name for name in some if self.models[name].marks])
        runs = self.manager.shared_runs(dict.fromkeys(order, 1))
        for run in runs.runs:
            names = order[run.first : run.first + run.count]
            assert not any(-1 in runs.tables[i] for i in range(run.first, run.first + run.count))
            assert len({tuple(self.models[name].marks[: run.end * SIZE]) for name in names}) == 1
            assert all(run.end * SIZE < len(self.models[name].marks) for name in names)
        self.seen["runs"] += runs.num_levels > 0
        self.seen["levels"] += runs.num_levels > 1
        found = runs.arrays()
        for b, (name, gone) in enumerate(zip(order, runs.shared(), strict=True)):
            assert found.seq_lens[b] + gone * SIZE == self.manager.length(name)

    def end(self) -> None:
        """Nothing has leaked: everything is free again, and of the tree nothing is left."""
        for name in (*self.models, *self.away):
            self.manager.free(name)
        self.models.clear()
        self.away.clear()
        self.check()
        self.manager.evict(BLOCKS)
        assert (self.manager.num_free, self.manager.num_cached, self.manager.num_free_host) == (BLOCKS, 0, SLOTS)
        assert self.manager._pool.tree.num_roots == 0
        assert not self.manager._pool._slot_of
        assert not self.manager._pool._block_of


@pytest.mark.parametrize("seed", range(SEEDS))
def test_contents_are_what_each_sequence_wrote(seed: int) -> None:
    machine = Machine(seed)
    for i in range(STEPS):
        machine.step()
        if i % 3 == 0:
            machine.check()
    machine.end()
    names = "matched, windows, full, failed copies, no room, swap_in, runs, levels"
    rare = {name: machine.seen[name] for name in names.split(", ")}
    assert min(rare.values()) > STEPS // 200, rare
