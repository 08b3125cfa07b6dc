"""The block manager: by hand, and against a model that shares nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from omniattn.errors import ArgumentError, OutOfBlocksError
from omniattn.kv.blocks import BlockManager
from omniattn.kv.cache import PagedKVCache
from omniattn.ops import append, copy_blocks
from omniattn.reference.decode import on_host, read_tokens


def test_a_sequence_takes_and_gives_back_blocks() -> None:
    manager = BlockManager(4, 16)
    manager.add("a")
    assert manager.extend({"a": 17}) == []
    assert manager.blocks("a") == (0, 1)
    assert (manager.length("a"), manager.num_free) == (17, 2)
    assert manager.extend({"a": 15}) == []
    assert manager.num_free == 2
    manager.truncate("a", 16)
    assert manager.blocks("a") == (0,)
    manager.free("a")
    assert (manager.num_free, manager.sequences) == (4, ())


def test_growing_a_shared_block_copies_it_once() -> None:
    manager = BlockManager(8, 4)
    manager.add("a")
    manager.extend({"a": 6})
    manager.fork("a", "b")
    assert manager.num_free == 6
    assert manager.references(manager.blocks("a")[1]) == 2
    # Both grow in one call: one copies, the other one may keep the block.
    (copy,) = manager.extend({"a": 1, "b": 1})
    assert copy == (1, manager.blocks("a")[1])
    assert manager.blocks("b") == (0, 1)
    assert manager.extend({"a": 1, "b": 1}) == []
    np.testing.assert_array_equal(manager.block_table(["b", "a"]), [[0, 1], [0, copy[1]]])
    np.testing.assert_array_equal(manager.seq_lens(["b", "a"]), [8, 8])


def test_full_blocks_are_not_copied() -> None:
    manager = BlockManager(8, 4)
    manager.add("a")
    manager.extend({"a": 8})
    manager.fork("a", "b")
    assert manager.extend({"a": 1, "b": 1}) == []
    manager.truncate("b", 5)
    assert len(manager.extend({"b": 1})) == 1


def test_running_out_changes_nothing() -> None:
    manager = BlockManager(3, 4)
    manager.add("a")
    manager.extend({"a": 6})
    manager.fork("a", "b")
    before = [manager.blocks(s) for s in "ab"], manager.num_free, [manager.references(i) for i in range(3)]
    with pytest.raises(OutOfBlocksError) as caught:
        manager.extend({"a": 1, "b": 4})
    assert (caught.value.needed, caught.value.free) == (2, 1)
    after = [manager.blocks(s) for s in "ab"], manager.num_free, [manager.references(i) for i in range(3)]
    assert before == after
    assert manager.length("a") == 6


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda m: m.length("x"), "sequence"),
        (lambda m: m.add("a"), "sequence"),
        (lambda m: m.fork("x", "b"), "parent"),
        (lambda m: m.fork("a", "a"), "child"),
        (lambda m: m.extend({"x": 1}), "sequence"),
        (lambda m: m.extend({"a": -1}), "growth['a']"),
        (lambda m: m.extend({"a": 1.0}), "growth['a']"),
        (lambda m: m.truncate("a", 9), "length"),
        (lambda m: m.block_table(["a"], 0), "max_blocks"),
        (lambda m: m.references(4), "block"),
        (lambda m: BlockManager(0, 4), "num_blocks"),
        (lambda m: BlockManager(4, True), "block_size"),
    ],
)
def test_errors_name_the_argument(call: Any, argument: str) -> None:
    manager = BlockManager(4, 4)
    manager.add("a")
    manager.extend({"a": 5})
    with pytest.raises(ArgumentError) as caught:
        call(manager)
    assert caught.value.argument == argument
    assert manager.blocks("a") == (0, 1)


class Sharing(RuleBasedStateMachine):
    """Sequences that share blocks of a real cache, beside plain copies of their tokens."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12, 3)
        self.cache = PagedKVCache(12, 3, 1, 8, like=np.zeros(1, np.float16), k_dtype="fp16")
        self.tokens: dict[int, list[float]] = {}
        self.count = 0

    @rule(target=names)
    def add(self) -> int:
        self.count += 1
        self.manager.add(self.count)
        self.tokens[self.count] = []
        return self.count

    @rule(target=names, parent=names)
    def fork(self, parent: int) -> int:
        self.count += 1
        self.manager.fork(parent, self.count)
        self.tokens[self.count] = list(self.tokens[parent])
        return self.count

    @rule(name=consumes(names))
    def free(self, name: int) -> None:
        self.manager.free(name)
        del self.tokens[name]

    @rule(name=names, share=st.floats(0, 1))
    def truncate(self, name: int, share: float) -> None:
        length = int(share * len(self.tokens[name]))
        self.manager.truncate(name, length)
        del self.tokens[name][length:]

    @rule(target=names, chosen=st.lists(names, min_size=1, max_size=3, unique=True), data=st.data())
    def extend(self, chosen: list[int], data: st.DataObject) -> Any:
        growth = {name: data.draw(st.integers(0, 7)) for name in chosen}
        before = {name: self.manager.blocks(name) for name in self.tokens}, self.manager.num_free
        try:
            copies = self.manager.extend(growth)
        except OutOfBlocksError:
            assert before == ({name: self.manager.blocks(name) for name in self.tokens}, self.manager.num_free)
            return multiple()
        copy_blocks(self.cache, copies)
        starts = np.cumsum([0, *growth.values()]).astype(np.int32)
        values = np.array([float(data.draw(st.integers(0, 2000))) for _ in range(starts[-1])])
        rows = np.repeat(values.astype(np.float16)[:, None, None], 8, axis=2)
        append(
            self.cache, rows, -rows, seq_lens=self.manager.seq_lens(growth), cu_seqlens=starts,
            block_table=self.manager.block_table(growth),
        )  # fmt: skip
        for i, name in enumerate(growth):
            self.tokens[name] += list(values[starts[i] : starts[i + 1]])
        return multiple()

    @invariant()
    def contents_are_those_of_unshared_copies(self) -> None:
        host = on_host(self.cache)
        for name, expected in self.tokens.items():
            assert self.manager.length(name) == len(expected)
            k, v = read_tokens(host, np.array(self.manager.blocks(name), dtype=int), len(expected))
            np.testing.assert_array_equal(k[:, 0, 0], np.array(expected))
            np.testing.assert_array_equal(v[:, 0, 7], -np.array(expected))

    @invariant()
    def nothing_leaks_and_nothing_is_free_twice(self) -> None:
        used = [block for name in self.tokens for block in self.manager.blocks(name)]
        for block in range(12):
            assert self.manager.references(block) == used.count(block)
        assert self.manager.num_free == 12 - len(set(used))
        for name, expected in self.tokens.items():
            assert len(self.manager.blocks(name)) == -(-len(expected) // 3)


Sharing.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestSharing = Sharing.TestCase


def test_names_are_spelled_out_in_errors_alone() -> None:
    """A name may be an object with all tokens of a request: its text takes longer than the call."""

    class Name:
        spelled = 0

        def __repr__(self) -> str:
            Name.spelled += 1
            return "<a request>"

    manager, name = BlockManager(4, 2), Name()
    manager.match_prefix(name, [1, 2, 3])
    for count in (3, np.int64(1)):
        manager.extend({name: count})
    manager.commit(name, [1, 2, 3])
    manager.truncate(name, 3)
    manager.block_table([name])
    manager.shared_runs({name: 1})
    manager.sharing_order([name])
    assert Name.spelled <= 1  # of NumPy's integer
    with pytest.raises(ArgumentError, match="growth\\[<a request>\\]"):
        manager.extend({name: -1})
    with pytest.raises(ArgumentError, match="new\\[<a request>\\]"):
        manager.shared_runs({name: 4})
