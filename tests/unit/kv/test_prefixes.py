"""Prefixes that are found again, blocks that a window leaves behind, and what a group of sequences has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, OutOfBlocksError, UnsupportedError
from omniattn.kv.blocks import BlockManager

#: Tokens that no test compares with others.
TEXT = list(range(100, 140))


def begin(manager: BlockManager, name: Any, tokens: Any, **options: Any) -> int:
    """As an engine does: match, make room for the rest, commit it."""
    there = manager.match_prefix(name, tokens, **options)
    assert manager.extend({name: len(tokens) - there}) == []
    manager.commit(name, tokens[there:])
    return there


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(16, 4)


def test_a_prompt_is_found_again_while_it_runs_and_when_it_is_done(manager: BlockManager) -> None:
    assert begin(manager, "a", TEXT[:10]) == 0
    assert begin(manager, "b", [*TEXT[:9], 0, 0]) == 8
    assert manager.blocks("b")[:2] == manager.blocks("a")[:2]
    assert [manager.references(block) for block in manager.blocks("b")] == [2, 2, 1]
    kept = manager.blocks("a")[:2]
    manager.free("a")
    manager.free("b")
    assert (manager.num_free, manager.num_cached) == (16, 2)
    assert begin(manager, "c", np.array(TEXT[:12], dtype=np.int32)) == 8
    assert manager.blocks("c")[:2] == kept
    assert manager.num_cached == 0


def test_the_last_token_is_left_to_be_computed(manager: BlockManager) -> None:
    begin(manager, "a", TEXT[:8])
    assert begin(manager, "b", TEXT[:8]) == 4
    assert begin(manager, "c", TEXT[:9]) == 8
    assert begin(manager, "d", []) == begin(manager, "e", TEXT[:1]) == 0


def test_several_levels(manager: BlockManager) -> None:
    """A system prompt, then conversations, then their next requests."""
    system = TEXT[:8]
    begin(manager, "first", system + [1] * 5)
    assert begin(manager, "second", system + [2] * 5) == 8
    assert begin(manager, "first again", system + [1] * 5 + [3] * 4) == 12
    assert manager.common_prefix(["first", "first again"]) == 12
    assert manager.common_prefix(["first", "first again", "second"]) == 8
    assert manager.common_prefix([]) == 0
    assert manager.common_prefix(["first"]) == manager.common_prefix(["first", "first"]) == 0
    manager.add("other")
    manager.extend({"other": 9})
    assert manager.common_prefix(["first", "other"]) == 0


def test_a_salt_keeps_prefixes_apart(manager: BlockManager) -> None:
    begin(manager, "a", TEXT[:9], salt="adapter")
    assert begin(manager, "b", TEXT[:9]) == 0
    assert begin(manager, "c", TEXT[:9], salt="other") == 0
    assert begin(manager, "d", TEXT[:9], salt="adapter") == 8
    manager.fork("d", "e")
    manager.extend({"e": 4})
    manager.commit("e", TEXT[9:12])
    assert begin(manager, "f", TEXT[:14], salt="adapter") == 12


class Colliding:
    """A token whose hash is that of all others."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Colliding) and other.number == self.number


def test_a_collision_of_hashes_is_no_match(manager: BlockManager) -> None:
    begin(manager, "a", [Colliding(i) for i in range(9)])
    assert begin(manager, "b", [Colliding(i) for i in (0, 1, 2, 4, 3, 5, 6, 7, 8)]) == 0
    assert begin(manager, "c", [Colliding(i) for i in (0, 1, 2, 3, 9, 5, 6, 7, 8)]) == 4
    assert begin(manager, "d", [Colliding(i) for i in range(9)], salt=Colliding(0)) == 0
    assert begin(manager, "e", [Colliding(i) for i in range(9)], salt=Colliding(1)) == 0


def test_the_least_recently_used_go_first_and_of_a_sequence_the_last_ones(manager: BlockManager) -> None:
    for name, first in (("a", 0), ("b", 20)):
        begin(manager, name, TEXT[first : first + 13])
        manager.free(name)
    begin(manager, "c", TEXT[:5])  # uses the first block of a
    manager.free("c")
    assert manager.num_cached == 6
    assert manager.evict(2) == 2
    found = {}
    for name, first in (("a", 0), ("b", 20)):
        found[name] = manager.match_prefix(name, TEXT[first : first + 13])
        manager.free(name)
    assert found == {"a": 4, "b": 12}
    assert manager.evict(100) == 4
    assert (manager.num_cached, manager.num_free) == (0, 16)


def test_extend_evicts_what_nobody_has_and_nothing_else(manager: BlockManager) -> None:
    begin(manager, "a", TEXT[:17])
    begin(manager, "b", [*TEXT[:8], *range(13)])
    manager.free("b")
    assert (manager.num_free, manager.num_cached) == (11, 3)
    before = manager.blocks("a")
    manager.add("c")
    with pytest.raises(OutOfBlocksError) as caught:
        manager.extend({"c": 45})
    assert (caught.value.needed, caught.value.free) == (12, 11)
    assert manager.num_cached == 3
    assert manager.extend({"c": 44}) == []
    assert (manager.num_free, manager.num_cached) == (0, 0)
    assert manager.blocks("a") == before
    assert not set(before) & set(manager.blocks("c"))
    assert manager.match_prefix("d", TEXT[:17]) == 16


def test_equal_blocks_become_one(manager: BlockManager) -> None:
    """Two requests with one prompt in one step: nothing is found for the second one, and it shares afterwards."""
    for name in "ab":
        assert manager.match_prefix(name, TEXT[:9]) == 0
    manager.extend({"a": 9, "b": 9})
    assert manager.num_free == 10
    manager.commit("a", TEXT[:9])
    manager.commit("b", TEXT[:9])
    assert manager.blocks("b")[:2] == manager.blocks("a")[:2]
    assert manager.blocks("b")[2] != manager.blocks("a")[2]
    assert (manager.num_free, manager.common_prefix("ab")) == (12, 8)


def test_tokens_come_in_any_portions(manager: BlockManager) -> None:
    manager.add("a")
    manager.extend({"a": 11})
    for first, last in ((0, 1), (1, 3), (3, 6), (6, 6), (6, 11)):
        manager.commit("a", TEXT[first:last])
    assert begin(manager, "b", TEXT[:11]) == 8


def test_tokens_are_any_sequence(manager: BlockManager) -> None:
    for name, tokens in (("a", np.str_("half a text")), ("b", "half a text"), ("c", tuple("half a text"))):
        assert begin(manager, name, tokens) == (0 if name == "a" else 8)


def test_a_block_that_can_be_matched_is_not_written_to(manager: BlockManager) -> None:
    begin(manager, "a", TEXT[:8])
    manager.truncate("a", 6)
    ((source, to),) = manager.extend({"a": 1})
    assert manager.blocks("a")[1] == to != source
    manager.commit("a", [0])
    assert manager.num_cached == 1
    assert begin(manager, "b", TEXT[:9]) == 8
    assert manager.blocks("b")[1] == source
    manager.extend({"a": 1})
    manager.commit("a", [0])
    assert begin(manager, "c", [*TEXT[:6], 0, 0, 0]) == 8
    assert manager.blocks("c")[1] == to


def test_dropped_guesses_are_not_found(manager: BlockManager) -> None:
    begin(manager, "a", TEXT[:6])
    manager.extend({"a": 5})
    manager.truncate("a", 8)  # three of the five are rejected
    manager.commit("a", TEXT[6:8])
    manager.extend({"a": 4})
    assert begin(manager, "b", TEXT[:20]) == 8
    manager.truncate("a", 2)
    manager.extend({"a": 2})
    manager.commit("a", [0, 0])
    assert begin(manager, "c", [*TEXT[:2], 0, 0, 0]) == 4


def test_beams(manager: BlockManager) -> None:
    """Forks share, one that goes on alone writes in place, and what two of them find out alike is one block."""
    begin(manager, "a", TEXT[:6])
    manager.fork("a", "b")
    ((_, to),) = manager.extend({"a": 2, "b": 2})
    assert to in manager.blocks("a")
    manager.commit("a", [0, 0])
    manager.commit("b", [0, 0])
    assert manager.blocks("a") == manager.blocks("b")
    manager.fork("b", "c")
    manager.free("a")
    manager.free("b")
    assert manager.match_prefix("d", [*TEXT[:6], 0, 0, 0]) == 8
    assert manager.blocks("d") == manager.blocks("c")


def test_a_window_gives_back_what_it_has_left_behind(manager: BlockManager) -> None:
    manager.add("a")
    manager.extend({"a": 23})
    whole = manager.blocks("a")
    assert manager.free_before("a", 23 - 9) == 2  # 14 is in block 3; block 2 stays, for tiles that begin left of 14
    assert manager.free_before("a", 14) == manager.free_before("a", 2) == manager.free_before("a", -5) == 0
    assert manager.num_free == 12
    assert manager.blocks("a") == (whole[2], whole[2], *whole[2:])
    np.testing.assert_array_equal(manager.block_table(["a"]), [manager.blocks("a")])
    assert manager.length("a") == 23
    manager.fork("a", "b")
    assert [manager.references(block) for block in whole] == [0, 0, 2, 2, 2, 2]
    assert manager.common_prefix("ab") == 0
    manager.free("a")
    manager.extend({"b": 5})
    assert manager.free_before("b", 24) == 3
    assert manager.blocks("b") == (whole[5],) * 5 + manager.blocks("b")[5:]
    manager.truncate("b", 24)
    with pytest.raises(ArgumentError, match="an integer from 24 to 24"):
        manager.truncate("b", 23)
    manager.free("b")
    assert manager.num_free == 16


def test_a_windowed_prompt_is_found_by_windows_alone(manager: BlockManager) -> None:
    begin(manager, "a", TEXT[:23], window=9)
    manager.free_before("a", 23 - 9)
    assert manager.num_cached == 2, "what is left behind can still be found"
    assert manager.match_prefix("b", TEXT[:23], window=9) == 20
    assert manager.blocks("b")[2:] == manager.blocks("a")[2:5]
    assert manager.free_before("b", 20 - 9) == 0
    manager.free("b")
    assert manager.evict(2) == 2
    assert manager.match_prefix("c", TEXT[:23], window=9) == 0, "block 1, left of 20 - 9, has gone"
    assert manager.match_prefix("d", TEXT[:23], window=7) == 20
    assert manager.match_prefix("e", TEXT[:23]) == 0
    for name in "acde":
        manager.free(name)
    manager.evict(16)
    assert begin(manager, "a", TEXT[:23]) == 0


def test_blocks_that_have_gone_are_found_again_when_another_computes_them(manager: BlockManager) -> None:
    begin(manager, "a", TEXT[:23], window=9)
    manager.free_before("a", 23 - 9)
    manager.evict(2)
    assert begin(manager, "b", TEXT[:13]) == 0
    assert manager.match_prefix("c", TEXT[:23]) == 20
    assert manager.blocks("c")[:2] == manager.blocks("b")[:2]
    assert manager.blocks("c")[2] == manager.blocks("a")[2] == manager.blocks("b")[2]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda m: m.match_prefix("a", TEXT), "sequence"),
        (lambda m: m.match_prefix("b", [[1], [2]]), "tokens"),
        (lambda m: m.match_prefix("b", 5), "tokens"),
        (lambda m: m.match_prefix("b", np.zeros((2, 2))), "tokens"),
        (lambda m: m.match_prefix("b", np.array(5)), "tokens"),
        (lambda m: m.match_prefix("b", TEXT, salt=[1]), "salt"),
        (lambda m: m.match_prefix("b", TEXT, window=-1), "window"),
        (lambda m: m.commit("x", [1]), "sequence"),
        (lambda m: m.commit("a", TEXT[:3]), "tokens"),
        (lambda m: m.commit("a", [[], []]), "tokens"),
        (lambda m: m.free_before("a", 12), "position"),
        (lambda m: m.free_before("x", 0), "sequence"),
        (lambda m: m.common_prefix(["a", "x"]), "sequence"),
        (lambda m: m.evict(-1), "count"),
        (lambda m: m.swap_out("a"), "swap_space"),
        (lambda m: m.swap_in("a"), "sequence"),
        (lambda m: BlockManager(4, 4, swap_space=5), "swap_space"),  # type: ignore[arg-type]
    ],
)
def test_errors_name_the_argument_and_change_nothing(call: Callable[[BlockManager], Any], argument: str) -> None:
    manager = BlockManager(8, 4)
    begin(manager, "a", TEXT[:9])
    manager.extend({"a": 2})
    state = manager.blocks("a"), manager.length("a"), manager.num_free, manager.sequences
    with pytest.raises(ArgumentError) as caught:
        call(manager)
    assert caught.value.argument == argument
    assert (manager.blocks("a"), manager.length("a"), manager.num_free, manager.sequences) == state
    manager.commit("a", TEXT[9:11])
    assert begin(manager, "b", TEXT[:12]) == 8


def test_tokens_that_contradict_another_sequence_are_refused(manager: BlockManager) -> None:
    manager.add("a")
    manager.extend({"a": 8})
    manager.fork("a", "b")
    manager.commit("a", TEXT[:8])
    with pytest.raises(ArgumentError, match="committed with by another sequence"):
        manager.commit("b", [0, *TEXT[1:8]])
    with pytest.raises(ArgumentError, match="committed with by another sequence"):
        manager.commit("b", [*TEXT[:7], 0])
    manager.commit("b", TEXT[:8])
    assert manager.blocks("a") == manager.blocks("b")


def test_a_recent_window_has_one_sequences_own_tokens() -> None:
    manager = BlockManager(4, 4, num_slots=2)
    manager.add("a")
    for call in (lambda: manager.match_prefix("b", TEXT), lambda: manager.commit("a", [])):
        with pytest.raises(UnsupportedError, match="num_slots"):
            call()
    assert manager.sequences == ("a",)


def test_what_is_shared_is_the_prefix_of_one_call() -> None:
    """Keys that a request never wrote: it finds them, and `shared_prefix` reads them for all."""
    rng = np.random.default_rng(0)
    cache = oa.PagedKVCache(16, 4, 2, 16, like=np.zeros(0, np.float32), k_dtype="fp16")
    manager = oa.BlockManager(16, 4)
    keys = {token: rng.standard_normal((2, 16), dtype=np.float32) for token in range(200)}
    prompts = {"a": [*TEXT[:8], 1, 2], "b": [*TEXT[:8], 3], "c": [*TEXT[:8], 4, 5, 6]}
    for name, tokens in prompts.items():
        there = manager.match_prefix(name, tokens)
        assert there == (8 if name != "a" else 0)
        oa.copy_blocks(cache, manager.extend({name: len(tokens) - there}))
        rows = np.stack([keys[token] for token in tokens[there:]])[None]
        places = {"seq_lens": manager.seq_lens([name]), "block_table": manager.block_table([name])}
        oa.append(cache, rows, -rows, **places)
        manager.commit(name, tokens[there:])
    q = rng.standard_normal((3, 1, 2, 16), dtype=np.float32)
    places = {"seq_lens": manager.seq_lens(prompts), "block_table": manager.block_table(prompts)}
    o = oa.decode(q, cache, **places, shared_prefix=manager.common_prefix(prompts))
    for i, tokens in enumerate(prompts.values()):
        k = np.stack([keys[token] for token in tokens])[None].astype(np.float16).astype(np.float32)
        np.testing.assert_allclose(o[i], oa.attention(q[i : i + 1], k, -k)[0], atol=1e-5)


def test_a_window_does_not_see_who_has_its_old_blocks() -> None:
    rng = np.random.default_rng(0)
    cache = oa.PagedKVCache(16, 4, 2, 16, like=np.zeros(0, np.float32), k_dtype="fp16")
    manager = oa.BlockManager(16, 4)
    manager.add("a")
    manager.extend({"a": 30})
    k, v = rng.standard_normal((2, 1, 30, 2, 16), dtype=np.float32)
    q = rng.standard_normal((1, 2, 4, 16), dtype=np.float32)

    def places() -> dict[str, Any]:
        return {"seq_lens": manager.seq_lens(["a"]), "block_table": manager.block_table(["a"])}

    oa.append(cache, k, v, **places())
    before = oa.decode(q, cache, **places(), window=(7, 0))
    old = manager.blocks("a")
    manager.free_before("a", 30 - 2 - 7)
    for block in set(old) - set(manager.blocks("a")):
        cache.k[block] = cache.v[block] = np.nan
    np.testing.assert_array_equal(oa.decode(q, cache, **places(), window=(7, 0)), before)
    np.testing.assert_allclose(oa.attention_with_kvcache(q, cache, **places(), window=(7, 0)), before)
