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
from omniattn.kv.runs import SharedRun, SharedRuns, runs_of
from omniattn.ops import choose_runs
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
    for levels, most in enumerate(most_saving(runs.runs, runs.num_levels + 1)):
        found = runs.keep(most)
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
        assert {price.runs.num_levels for price in found} <= {0, 1, 2}
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


def tree(branches: tuple[int, ...], tokens: tuple[int, ...], own: int = 512) -> SharedRuns:
    """Requests that share tokens level by level: ``branches`` of each run, the last ones of which are requests."""
    count = itertools.count()
    tables: list[list[int]] = [[*itertools.islice(count, tokens[0] // SIZE)]]
    for of, more in zip(branches, (*tokens[1:], own), strict=True):
        tables = [[*table, *itertools.islice(count, more // SIZE)] for table in tables for _ in range(of)]
    length = len(tables[0]) * SIZE
    runs = runs_of(tables, [(length - 1) // SIZE] * len(tables))
    names = tuple(range(len(tables)))
    return SharedRuns(names, (1,) * len(tables), (length,) * len(tables), tuple(tables), SIZE, runs)


@pytest.mark.parametrize("max_groups", [None, 1, 2, 4])
@pytest.mark.parametrize(
    ("branches", "tokens"),
    [
        ((64, 4), (32000, 38400)), ((2,) * 7, (12800,) * 7), ((16, 2), (8192, 4096)), ((3, 3, 3), (4096, 8192, 16384)),
        ((64, 2), (0, 8192)), ((4, 16), (1024, 16384)),
    ],
)  # fmt: skip
def test_no_cut_by_levels_is_much_faster(
    branches: tuple[int, ...], tokens: tuple[int, ...], max_groups: int | None
) -> None:
    """Of every way to take all runs of one or two levels: the chosen one takes up to a seventh longer."""
    runs = tree(branches, tokens)
    found = chosen(runs, keys(), HOPPER, 2, max_groups)
    cuts = itertools.chain.from_iterable(itertools.combinations(range(runs.num_levels), n) for n in (0, 1, 2))
    every = [runs.keep([run for run in runs.runs if run.level in cut]) for cut in cuts]
    allowed = [x for x in every if max_groups is None or x.num_groups <= max_groups]
    assert max_groups is None or found.num_groups <= max_groups
    best = min(step_us(runs, x.runs, keys(), HOPPER) for x in allowed)
    assert step_us(runs, found.runs, keys(), HOPPER) <= 1.15 * best


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


@pytest.mark.parametrize("kind", ["plain", "scales of sequences", "recent window", "latent"])
def test_caches_whose_calls_have_no_shared_prefix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = step(128, 32768)
    pool = np.zeros((4, SIZE, 8, 128), np.int8)
    scales = np.ones((128, 8), np.float32)
    found: Any = {
        "plain": lambda: cache(),
        "scales of sequences": lambda: oa.PagedKVCache.from_arrays(pool, pool.copy(), k_scale=scales, v_scale=scales),
        "recent window": lambda: cache(k_dtype="int8", v_dtype="int8", recent_window=64, recent_slots=2),
        "latent": lambda: oa.PagedKVCache.from_arrays(np.zeros((4, SIZE, 1, 128), np.float16), head_dim_v=64),
    }[kind]()
    for t in found.tensors:
        monkeypatch.setattr(t, "device", "cuda")
    monkeypatch.setattr(choose_runs.runtime, "device_info", lambda _: None)
    monkeypatch.setattr(choose_runs, "target_of", lambda _: HOPPER)
    assert bool(oa.choose_shared_runs(runs, found, num_q_heads=32).runs) == (kind == "plain")


def test_runs_of_another_step_are_not_kept() -> None:
    runs = step(4, 640)
    assert runs.keep(runs.runs) == runs
    other = SharedRun(0, 2, 0, 7, 0)
    for wrong in ([other], [1]):
        with pytest.raises(ArgumentError, match="some of the runs that there are"):
            runs.keep(wrong)  # type: ignore[arg-type]
