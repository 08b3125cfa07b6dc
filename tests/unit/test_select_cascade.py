"""Which shared blocks are worth a call of their own: fewest blocks against every choice, and times by the model."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError
from omniattn.kv.blocks import BlockManager
from omniattn.kv.runs import SharedRuns, runs_of
from omniattn.ops.choose_runs import keys_of
from omniattn.problems import Target
from omniattn.select.cascade import Keys, chosen, most_saving, prices, step_us

HOPPER = Target((9, 0), 232448, 132, None, 1980.0, 3352.0)
AMPERE = Target((8, 0), 167936, 108, None, 1410.0, 1555.0)
SIZE = 64


def keys(heads: tuple[int, int] = (32, 8), *, quantized: bool = False) -> Keys:
    return Keys("bfloat16", *heads, 128, SIZE, 256.0 if quantized else 512.0, quantized)


def step(batch: int, tokens: int, own: int = 512, *, talk: int = 0, of: int = 8, rows: int = 1) -> SharedRuns:
    """Requests behind one prompt, in groups of ``of`` behind a conversation of ``talk`` tokens, too."""
    count = itertools.count()
    system = list(itertools.islice(count, tokens // SIZE))
    tables: list[list[int]] = []
    for b in range(batch):
        if b % of == 0:
            conversation = list(itertools.islice(count, talk // SIZE))
        tables.append([*system, *conversation, *itertools.islice(count, own // SIZE)])
    length = len(tables[0]) * SIZE
    limits = [(length - rows) // SIZE] * batch
    names = tuple(range(batch))
    return SharedRuns(names, (rows,) * batch, (length,) * batch, tuple(tables), SIZE, runs_of(tables, limits))


def blocks_read(runs: SharedRuns) -> int:
    """Blocks that levels and requests read."""
    return sum(run.end - run.begin for run in runs.runs) + sum(
        len(table) - gone for table, gone in zip(runs.tables, runs.shared(), strict=True)
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_runs_that_save_most_are_those_of_every_choice(seed: int) -> None:
    draw = random.Random(seed)
    blocks = BlockManager(3000, 4)
    blocks.add(0)
    names = [0]
    for i in range(1, 9):
        grown = draw.sample(names, draw.randrange(1, len(names) + 1))
        blocks.extend({name: draw.randrange(1, 40) for name in grown})
        blocks.fork(draw.choice(names), i)
        names.append(i)
    blocks.extend(dict.fromkeys(names, 1))
    runs = blocks.shared_runs(dict.fromkeys(blocks.sharing_order(names), 1))
    subsets = itertools.chain.from_iterable(itertools.combinations(runs.runs, n) for n in range(len(runs.runs) + 1))
    every = [runs.keep(subset) for subset in subsets]
    for levels in range(runs.num_levels + 2):
        found = runs.keep(most_saving(runs.runs, levels))
        assert found.num_levels <= levels
        assert blocks_read(found) == min(blocks_read(x) for x in every if x.num_levels <= levels)
        assert runs.keep(found.runs) == found


def test_many_requests_behind_a_long_prompt_run_in_levels_and_few_do_not() -> None:
    for batch, tokens, wanted in ((1, 32768, 0), (4, 2048, 0), (8, 8192, 0), (128, 8192, 1), (32, 32768, 1)):
        found = chosen(step(batch, tokens), keys(), HOPPER, 2)
        assert found.num_levels == wanted, (batch, tokens)
    two = chosen(step(128, 16384, talk=16384), keys(), HOPPER, 2)
    assert two.num_levels == 2
    assert chosen(step(128, 16384, talk=16384), keys(), HOPPER, 1).num_levels == 1
    assert not chosen(step(128, 16384), keys(), HOPPER, 0).runs


@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["H100", "A100"])
@pytest.mark.parametrize("quantized", [False, True])
def test_what_is_chosen_is_the_fastest(target: Target, quantized: bool) -> None:
    of = keys(quantized=quantized)
    for batch, tokens, talk, rows in itertools.product((2, 32, 128), (2048, 32768), (0, 8192), (1, 300)):
        runs = step(batch, tokens, talk=talk, rows=rows)
        found = prices(runs, of, target, 2)
        assert [price.runs.num_levels for price in found] == list(range(len(found)))
        assert all(0 < price.us < float("inf") for price in found)
        assert found[0].us == step_us(runs, (), of, target)
        assert chosen(runs, of, target, 2) == min(found, key=lambda price: price.us).runs


def test_the_measured_steps() -> None:
    """Plain calls of decode as measured (docs/performance/decode.md, an H200): within a fifth."""
    h200 = Target((9, 0), 232448, 132, None, 1980.0, 4800.0)
    for batch, tokens, heads, measured in (
        (64, 8192, (8, 1), 36.7), (256, 8192, (8, 1), 110.8), (64, 32768, (64, 8), 779.3),
    ):  # fmt: skip
        us = step_us(step(batch, tokens, 256), (), keys(heads), h200)
        assert us == pytest.approx(measured, rel=0.2)


def test_more_to_read_takes_longer() -> None:
    for batch, tokens in ((16, 4096), (128, 4096)):
        few, more = step(batch, tokens), step(batch, 2 * tokens)
        for kept in (False, True):
            times = [step_us(x, x.runs if kept else (), keys(), HOPPER) for x in (few, more)]
            assert times[0] < times[1]


def test_groups_that_arrays_have_no_room_for() -> None:
    runs = step(64, 16384, talk=16384, of=4)
    assert runs.num_groups == 16
    found = chosen(runs, keys(), HOPPER, 2, 4)
    assert 0 < found.num_groups <= 4
    assert found.arrays(groups=4).levels[0].seq_lens.shape == (4,)


def test_a_gpu_without_kernels_over_pages() -> None:
    turing = Target((7, 5), 64 << 10, 68)
    assert not chosen(step(128, 32768), keys(), turing, 2).runs


def cache(**options: Any) -> oa.PagedKVCache:
    return oa.PagedKVCache(4, SIZE, 8, 128, like=np.zeros(1, np.float16), **options)


def test_what_calls_have_in_common() -> None:
    assert keys_of(cache(k_dtype="fp16"), 32) == Keys("float16", 32, 8, 128, SIZE, 512.0, False)
    assert keys_of(cache(k_dtype="int8"), 16)[-2:] == (cache(k_dtype="int8").k_format.token_bytes * 2, True)


def test_the_cpu_has_no_levels() -> None:
    runs = step(128, 32768)
    assert not oa.choose_shared_runs(runs, cache(), num_q_heads=32).runs
    assert not oa.choose_shared_runs(step(1, 64), cache(), num_q_heads=32, max_levels=0, max_groups=1).runs


@pytest.mark.parametrize(
    ("arguments", "options", "argument"),
    [
        (((), cache()), {"num_q_heads": 8}, "runs"), ((step(2, 64), 3), {"num_q_heads": 8}, "cache"),
        ((step(2, 64), oa.KVCache(2, 64, 8, 128, like=np.zeros(1, np.float16))), {"num_q_heads": 8}, "cache"),
        ((step(2, 64), oa.PagedKVCache(4, 16, 8, 128, like=np.zeros(1, np.float16))), {"num_q_heads": 8}, "cache"),
        ((step(2, 64), cache()), {"num_q_heads": 12}, "num_q_heads"),
        ((step(2, 64), cache()), {"num_q_heads": 8.0}, "num_q_heads"),
        ((step(2, 64), cache()), {"num_q_heads": 8, "max_levels": -1}, "max_levels"),
        ((step(2, 64), cache()), {"num_q_heads": 8, "max_groups": 0}, "max_groups"),
    ],
)  # fmt: skip
def test_errors(arguments: tuple[Any, ...], options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError, match=r"choose_shared_runs\(\)") as caught:
        oa.choose_shared_runs(*arguments, **options)
    assert caught.value.argument == argument
