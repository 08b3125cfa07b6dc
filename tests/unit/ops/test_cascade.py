"""``attention_with_kvcache(shared_prefix=...)`` in levels against the plain call, on the CPU."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import BlockManager, KVCache, PagedKVCache, SharedLevel, SharedPrefixes
from omniattn.errors import ArgumentError, OmniattnError, UnsupportedError
from omniattn.ops import cascade
from omniattn.plan.engine import Described, Plan
from omniattn.plan.others import plan_decode
from omniattn.problems import DecodeProblem, Target

SIZE, HEADS, KV, DIM = 4, 4, 2, 16
LIKE = np.zeros(1, dtype=np.float32)


class Step:
    """Requests of a random tree, their tokens in a cache, and what a call on them takes.

    ``rows``: new tokens of each request; a number: of all.
    """

    def __init__(self, seed: int, rows: Any = None, count: int = 9, **options: Any) -> None:
        self.random, draw = np.random.default_rng(seed), random.Random(seed)
        self.cache = PagedKVCache(300, SIZE, KV, DIM, like=LIKE, **options)
        self.blocks = BlockManager(300, SIZE)
        self.blocks.add(0)
        self.grow({0: 4 * draw.randrange(1, 5)})
        names = [0]
        for name in range(1, count):
            self.blocks.fork(draw.choice(names), name)
            names.append(name)
            self.grow({n: draw.randrange(1, 9) for n in draw.sample(names, draw.randrange(1, len(names)))})
        self.names = self.blocks.sharing_order(names)
        new = {name: draw.choice([1, 1, 2, 7]) if rows is None else rows for name in self.names}
        self.grow(new)
        self.runs = self.blocks.shared_runs(new)
        self.packed = rows is None
        total = sum(new.values())
        self.q = self.random.standard_normal((total, HEADS, DIM)).astype(np.float32)
        lens, table = self.blocks.seq_lens(self.names), self.blocks.block_table(self.names)
        self.places: dict[str, Any] = {"seq_lens": lens, "block_table": table}
        if self.packed:
            self.places["cu_seqlens_q"] = np.cumsum([0, *new.values()]).astype(np.int32)
            self.places["max_seqlen_q"] = max(new.values())
        else:
            self.q = self.q.reshape(len(names), rows, HEADS, DIM)

    def grow(self, new: dict[int, int]) -> None:
        oa.copy_blocks(self.cache, self.blocks.extend(new))
        starts = np.cumsum([0, *new.values()]).astype(np.int32)
        k, v = (self.random.standard_normal((starts[-1], KV, DIM)).astype(np.float32) for _ in range(2))
        places = {"seq_lens": self.blocks.seq_lens(new), "block_table": self.blocks.block_table(new)}
        oa.append(self.cache, k, v, cu_seqlens=starts, **places)

    def call(self, shared: Any = 0, **options: Any) -> Any:
        return oa.attention_with_kvcache(self.q, self.cache, **{**self.places, **options}, shared_prefix=shared)

    def check(self, shared: Any, **options: Any) -> None:
        expected, expected_lse = self.call(**options, return_lse=True)
        o, lse = self.call(shared, **options, return_lse=True)
        np.testing.assert_allclose(o, expected, rtol=0, atol=3e-6)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=3e-6)
        alone = self.call(shared, **options)
        np.testing.assert_array_equal(alone, o)


@pytest.mark.parametrize("seed", range(40))
def test_levels_give_what_the_plain_call_gives(seed: int) -> None:
    draw = random.Random(seed)
    step = Step(seed, rows=draw.choice([None, None, 1, 3]))
    options = draw.choice(
        [
            {},
            {"softcap": 3.0},
            {"causal": False},
            {"softmax_scale": 0.3},
            {"window": (-1, 2)},
            {"sinks": np.arange(HEADS, dtype=np.float32)},
            {"num_splits": 2},
        ]
    )
    runs = step.runs if draw.random() < 0.5 else step.runs.keep([r for r in step.runs.runs if draw.random() < 0.6])
    sizes = {"levels": 10, "groups": 25, "level_blocks": 20, "own_blocks": 20} if draw.random() < 0.5 else {}
    step.check(runs.arrays(**sizes), **options)


def test_there_are_levels_and_groups_among_these() -> None:
    runs = [Step(seed).runs for seed in range(10)]
    assert max(x.num_levels for x in runs) >= 3
    assert max(sum(run.level == 1 for run in x.runs) for x in runs) >= 2


def test_no_shared_keys_are_the_plain_call() -> None:
    step = Step(1)
    none = step.runs.keep(()).arrays()
    assert none.levels == ()
    np.testing.assert_array_equal(step.call(none), step.call())
    step.check(step.runs.keep(()).arrays(levels=2))


@pytest.mark.parametrize("rows", [None, 1, 3])
def test_rows_and_requests_of_nobody(rows: int | None) -> None:
    """As a captured graph has them: requests without tokens, and rows behind the last one."""
    step = Step(3, rows)
    batch, spare = len(step.names), 3
    places = step.places
    shape = (spare, HEADS, DIM) if step.packed else (spare, rows, HEADS, DIM)
    step.q = np.concatenate([step.q, np.full(shape, np.nan, np.float32)])
    lens, table = places["seq_lens"], places["block_table"]
    places["seq_lens"] = np.concatenate([lens, np.zeros(spare, np.int32)])
    places["block_table"] = np.concatenate([table, np.full((spare, table.shape[1]), -1, np.int32)])
    if step.packed:
        starts = places["cu_seqlens_q"]
        places["cu_seqlens_q"] = np.concatenate([starts, np.repeat(starts[-1:], spare)])
    shared = step.runs.arrays(batch=batch + spare, levels=4, groups=20)
    step.check(shared)
    o, lse = step.call(shared, return_lse=True)
    end = places["cu_seqlens_q"][-1] if step.packed else batch
    assert not o[end:].any()
    assert np.isneginf(lse[:, end:] if step.packed else lse[end:]).all()


@pytest.mark.parametrize("k_dtype", ["fp16", "int8", "int4", "fp8"])
def test_caches_of_every_kind(k_dtype: str) -> None:
    """Keys of a quantized cache are the same numbers for either call."""
    step = Step(5, k_dtype=k_dtype)
    step.check(step.runs.arrays())


def test_out_is_written() -> None:
    step = Step(6)
    out = np.full_like(step.q, np.nan)
    o, lse = step.call(step.runs.arrays(), out=out, return_lse=True)
    assert o is out
    expected, expected_lse = step.call(return_lse=True)
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=3e-6)


@pytest.mark.parametrize("rows", [None, 1, 3])
def test_out_may_be_q(rows: int | None) -> None:
    step = Step(6, rows)
    expected = step.call()
    for shared in (step.runs.arrays(), common(step)):
        again = Step(6, rows)
        again.q = again.q.copy()
        assert again.call(shared, out=again.q) is again.q
        np.testing.assert_allclose(again.q, expected, rtol=0, atol=3e-6)


def test_a_request_that_has_given_back_blocks_shares_none() -> None:
    step = Step(8)
    expected = step.call()
    name = next(n for n in step.names if step.blocks.length(n) > 2 * SIZE)
    # A window would hide these tokens: the call reads the block that entries lead to now in their place.
    step.blocks.free_before(name, SIZE)
    step.places["block_table"] = step.blocks.block_table(step.names)
    runs = step.blocks.shared_runs(dict(zip(step.runs.names, step.runs.rows, strict=True)))
    assert min(map(min, runs.tables)) >= 0
    at = step.names.index(name)
    begin, end = step.places["cu_seqlens_q"][at : at + 2]
    plain, found = step.call(), step.call(runs.arrays())
    np.testing.assert_allclose(found, plain, rtol=0, atol=3e-6)
    assert not np.array_equal(found[begin:end], expected[begin:end])


def common(step: Step) -> int:
    found = step.blocks.common_prefix(step.names)
    assert found
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rows", [None, 1, 3, 20])
def test_a_number_for_prompts_and_packed_rows(rows: int | None, seed: int) -> None:
    draw = random.Random(seed)
    step = Step(seed, rows, count=5)
    new = dict(zip(step.names, step.runs.rows, strict=True))
    least = min(step.blocks.length(name) - n for name, n in new.items()) // SIZE * SIZE
    shared = min(common(step), least)
    options = draw.choice([{}, {"causal": False}, {"softcap": 2.0}, {"sinks": np.ones(HEADS, np.float32)}])
    step.check(shared, **options)
    step.check(np.int64(SIZE), **options)


def test_requests_that_pause_see_no_shared_key() -> None:
    """In a batch, the first one too, whose blocks may be anything."""
    for paused in ([0], [0, 2], [3], [0, 1, 2, 3, 4]):
        step = Step(2, 20, count=5)
        shared = min(common(step), int(step.places["seq_lens"].min()) - 20) // SIZE * SIZE
        step.places["seq_lens"][paused] = 0
        step.places["block_table"][paused] = -1
        step.check(shared)
        o, lse = step.call(shared, return_lse=True)
        assert not o[paused].any()
        assert np.isneginf(lse[paused]).all()


def test_calls_of_decode_are_its() -> None:
    step = Step(7, 1)
    shared = min(common(step), int(step.places["seq_lens"].min()) - 1) // SIZE * SIZE
    np.testing.assert_array_equal(step.call(shared), oa.decode(step.q, step.cache, **step.places, shared_prefix=shared))


def test_no_queries() -> None:
    step = Step(8)
    q = step.q[:0]
    starts = np.zeros_like(step.places["cu_seqlens_q"])
    for shared in (SIZE, SharedPrefixes((), step.places["seq_lens"], step.places["block_table"])):
        o = oa.attention_with_kvcache(q, step.cache, **{**step.places, "cu_seqlens_q": starts}, shared_prefix=shared)
        assert o.shape == q.shape


def broken(step: Step, **parts: Any) -> SharedPrefixes:
    """Levels with something in place of the first one's arrays, or of those behind."""
    found = step.runs.arrays()
    of_level = {name: x for name, x in parts.items() if name in SharedLevel._fields and not name.startswith("own_")}
    own = {name.removeprefix("own_"): x for name, x in parts.items() if name.startswith("own_")}
    levels = (found.levels[0]._replace(**of_level), *found.levels[1:])
    return found._replace(levels=levels, **own)


def bad_levels(step: Step) -> dict[str, tuple[Any, str]]:
    found = step.runs.arrays()
    first = found.levels[0]
    lens = first.seq_lens.copy()
    lens[0] -= 1
    table = first.block_table.copy()
    table[0, 0] += 1
    starts = step.places["cu_seqlens_q"]
    inside = first.cu_seqlens_q.copy()
    inside[1:] = starts[np.diff(starts).argmax()] + 1
    own = found.seq_lens.copy()
    own[2] += 1
    return {
        "a length that is no multiple": (broken(step, seq_lens=lens), "shared_prefix.levels[0].seq_lens"),
        "other blocks": (broken(step, block_table=table), "shared_prefix"),
        "rows of a request apart": (broken(step, cu_seqlens_q=inside), "shared_prefix.levels[0].cu_seqlens_q"),
        "starts that fall": (
            broken(step, cu_seqlens_q=first.cu_seqlens_q[::-1].copy()), "shared_prefix.levels[0].cu_seqlens_q",
        ),
        "rows that q has not": (
            broken(step, cu_seqlens_q=np.append(first.cu_seqlens_q[:-1], len(step.q) + 1).astype(np.int32)),
            "shared_prefix.levels[0].cu_seqlens_q",
        ),
        "a length beyond the table": (broken(step, own_seq_lens=own + 5000), "shared_prefix.seq_lens"),
        "a length too many": (broken(step, own_seq_lens=own), "shared_prefix.seq_lens"),
        "int64": (broken(step, seq_lens=first.seq_lens.astype(np.int64)), "shared_prefix.levels[0].seq_lens"),
        "too many groups": (broken(step, seq_lens=np.zeros(77, np.int32)), "shared_prefix.levels[0].seq_lens"),
        "too few requests": (broken(step, own_seq_lens=found.seq_lens[1:]), "shared_prefix.seq_lens"),
        "a table of one dimension": (broken(step, own_block_table=found.seq_lens), "shared_prefix.block_table"),
        "a list of levels": (found._replace(levels=list(found.levels)), "shared_prefix.levels"),
        "no array": (broken(step, seq_lens=3), "shared_prefix.levels[0].seq_lens"),
    }  # fmt: skip


@pytest.mark.parametrize("name", bad_levels(Step(9)))
def test_levels_that_are_not_those_of_the_call(name: str) -> None:
    step = Step(9)
    assert step.runs.runs[0].count > 1
    shared, argument = bad_levels(step)[name]
    out = np.full_like(step.q, 7)
    with pytest.raises(ArgumentError) as caught:
        step.call(shared, out=out)
    assert (out == 7).all()
    assert caught.value.argument == argument
    assert "attention_with_kvcache" in str(caught.value) or name == "no array"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"window": (5, 0)}, ArgumentError, "0 with a window"),
        ({"deterministic": True}, ArgumentError, "0 with deterministic=True"),
        ({"leftpad_k": np.zeros(9, np.int32)}, UnsupportedError, "leftpad_k with shared_prefix"),
        ({"batch_index": np.zeros(9, np.int32)}, UnsupportedError, "batch_index with shared_prefix"),
        ({"recent_slots": np.zeros(9, np.int32)}, UnsupportedError, "recent_slots with shared_prefix"),
        ({"score_mod": oa.ScoreMod("score + 1.0f")}, UnsupportedError, "score_mod with shared_prefix"),
        ({"max_seqlen_q": None}, ArgumentError, "max_seqlen_q"),
        ({"block_table": None}, ArgumentError, "block_table"),
        ({"causal": 2}, ArgumentError, "causal"),
        ({"seq_lens": np.zeros(3, np.int32)}, ArgumentError, "seq_lens"),
        ({"max_seqlen_q": 1}, ArgumentError, "max_seqlen_q"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
@pytest.mark.parametrize("levels", [True, False])
def test_what_it_does_not_go_with(
    options: dict[str, Any], error: type[OmniattnError], words: str, levels: bool
) -> None:
    step = Step(10)
    with pytest.raises(error, match=words) as caught:
        step.call(step.runs.arrays() if levels else SIZE, **options)
    assert "attention_with_kvcache" in str(caught.value)


def test_caches_it_is_not_for() -> None:
    q, lens = np.zeros((1, 1, KV, DIM), np.float32), np.array([9], np.int32)
    none = SharedPrefixes((), lens, lens[:, None])
    with pytest.raises(ArgumentError, match="0 with a KVCache"):
        oa.attention_with_kvcache(q, KVCache(1, 16, KV, DIM, like=LIKE), seq_lens=lens, shared_prefix=none)
    cache = PagedKVCache(4, 8, KV, DIM, like=LIKE, k_dtype="int8", recent_window=8, recent_slots=1)
    with pytest.raises(ArgumentError, match="recent_window"):
        oa.attention_with_kvcache(q, cache, seq_lens=lens, block_table=lens[:, None], shared_prefix=none)


def test_queries_that_are_none() -> None:
    step = Step(10)
    for shared in (step.runs.arrays(), SIZE):
        for q in (step.q[0], step.q[None], [[1.0]], step.q[..., :8], step.q.astype(np.int32)):
            with pytest.raises(ArgumentError) as caught:
                oa.attention_with_kvcache(q, step.cache, **step.places, shared_prefix=shared)
            assert caught.value.argument == "q"
        for name in ("seq_lens", "cu_seqlens_q"):
            with pytest.raises(ArgumentError):
                step.call(shared, **{name: None})


def test_numbers_that_do_not_fit() -> None:
    step = Step(11)
    for shared, words in ((3, "a multiple of block_size 4"), (4000, "from 0 to"), (-4, "from 0"), (True, "an integer")):
        with pytest.raises(ArgumentError, match=words) as caught:
            step.call(shared)
        assert caught.value.argument == "shared_prefix"
    with pytest.raises(ArgumentError, match="at least") as caught:
        step.call(step.places["block_table"].shape[1] * SIZE)
    assert caught.value.argument == "seq_lens"
    step.places["seq_lens"][0] = 0  # it has rows: only a batch can pause
    with pytest.raises(ArgumentError, match=": expected at least"):
        step.call(SIZE)
    step = Step(12)
    step.places["block_table"][1, 0] = 299
    with pytest.raises(ArgumentError, match="the same first 1 blocks"):
        step.call(SIZE)


@pytest.mark.parametrize("rows", [None, 20])
@pytest.mark.parametrize("levels", [True, False])
def test_an_out_of_another_shape_is_named(rows: int | None, levels: bool) -> None:
    step = Step(13, rows=rows)
    for out in (np.array(1.0), step.q[0], step.q[None], step.q[:-1], step.q.astype(np.float64)):
        with pytest.raises(ArgumentError) as caught:
            step.call(step.runs.arrays() if levels else SIZE, out=out.copy())
        assert caught.value.argument == "out"


@pytest.mark.frameworks
@pytest.mark.parametrize("rows", [None, 20])
@pytest.mark.parametrize("names", [("q",), ("seq_lens",), ("block_table", "q"), ("cu_seqlens_q", "block_table")])
def test_arrays_of_several_libraries(rows: int | None, names: tuple[str, ...]) -> None:
    torch = pytest.importorskip("torch")
    step = Step(13, rows=rows)
    for shared in (SIZE, step.runs.arrays()):
        expected = step.call(shared, return_lse=True)
        given = {"q": step.q, **step.places}
        given |= {name: torch.from_numpy(given[name]) for name in names if name in given}
        found = oa.attention_with_kvcache(given.pop("q"), step.cache, **given, shared_prefix=shared, return_lse=True)
        assert all(np.array_equal(np.asarray(a), b) for a, b in zip(found, expected, strict=True))


def test_explain_on_the_cpu() -> None:
    step = Step(13)
    for shared in (SIZE, step.runs.arrays()):
        got = oa.explain(oa.attention_with_kvcache, step.q, step.cache, **step.places, shared_prefix=shared)
        assert "CPU" in got.kernel


@pytest.mark.frameworks
@pytest.mark.parametrize("rows", [None, 3, 20])
def test_torch_also_compiled(rows: int | None) -> None:
    torch = pytest.importorskip("torch")
    step = Step(14, rows, count=5)
    q = torch.from_numpy(step.q)
    cache = PagedKVCache.from_arrays(*(torch.from_numpy(np.asarray(x, np.float16)) for x in exact_pages(step)))
    places = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in step.places.items()}
    levels = step.runs.arrays(levels=3).map(torch.from_numpy)
    least = int(min(n - r for n, r in zip(step.runs.lengths, step.runs.rows, strict=True))) // SIZE * SIZE
    number = min(common(step), least)
    expected, expected_lse = oa.attention_with_kvcache(q, cache, **places, return_lse=True)

    def function(q: Any, shared: Any) -> Any:
        return oa.attention_with_kvcache(q, cache, **places, shared_prefix=shared, return_lse=True)

    for run in (function, torch.compile(function, backend="eager", fullgraph=True)):
        for shared in (levels, number):
            o, lse = run(q, shared)
            torch.testing.assert_close(o, expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)


@pytest.mark.frameworks
@pytest.mark.parametrize("rows", [None, 3, 20])
def test_jax_also_under_jit(rows: int | None) -> None:
    jax = pytest.importorskip("jax")
    import omniattn.jax  # noqa: F401 - makes pytrees of caches

    step = Step(14, rows, count=5)
    with jax.default_device(jax.devices("cpu")[0]):
        pages = (jax.numpy.asarray(x, "float16") for x in exact_pages(step))
        q, cache = jax.numpy.asarray(step.q), PagedKVCache.from_arrays(*pages)
        places = {n: jax.numpy.asarray(x) for n, x in step.places.items() if isinstance(x, np.ndarray)}
        fixed = {n: x for n, x in step.places.items() if isinstance(x, int)}
        levels = step.runs.arrays(levels=3).map(jax.numpy.asarray)
        least = int(min(n - r for n, r in zip(step.runs.lengths, step.runs.rows, strict=True))) // SIZE * SIZE
        number = min(common(step), least)
        expected = oa.attention_with_kvcache(q, cache, **places, **fixed, return_lse=True)

        def function(q: Any, cache: Any, places: Any, shared: Any) -> Any:
            return oa.attention_with_kvcache(q, cache, **places, **fixed, shared_prefix=shared, return_lse=True)

        in_levels = jax.jit(function)(q, cache, places, levels)
        by_number = jax.jit(lambda q, cache, places: function(q, cache, places, number))(q, cache, places)
        for found in (function(q, cache, places, levels), function(q, cache, places, number), in_levels, by_number):
            for x, y in zip(found, expected, strict=True):
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


def exact_pages(step: Step) -> tuple[Any, Any]:
    """Keys and values of the cache as (blocks, tokens, heads, channels)."""
    from omniattn.reference.decode import on_host, read_tokens

    host, count = on_host(step.cache), step.cache.num_blocks
    k, v = read_tokens(host, np.arange(count), count * SIZE, 0, 0, 0)
    return tuple(np.clip(np.nan_to_num(x), -9, 9).reshape(count, SIZE, KV, DIM) for x in (k, v))  # type: ignore[return-value]


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_explain_has_the_launches_of_all_levels(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of described calls as on a GPU: the own keys' plan, and behind it each level's and a merge."""
    cache = PagedKVCache(64, 16, 2, 64, like=np.zeros(1, np.float16), k_dtype="fp16")
    row = 4 * 64
    target = Target((9, 0), 232448, 132)
    problem = DecodeProblem(
        "float16", cache.facts, 3, 1, 4, 2, 64, 320, 16, 64, 20, -1, 0.125, 0.0, "none", False, 0, True,
        (row, row, 64, 1), (row, row, 64, 1),
    )  # fmt: skip
    launches = plan_decode(problem, target, None)
    q = SimpleNamespace(dtype="float16", shape=(3, 1, 4, 64))
    calls = []

    def described() -> None:
        calls.append(None)
        raise Described(
            SimpleNamespace(operation=SimpleNamespace(name="x")), Plan(problem, launches, None, 0), {"q": q}
        )  # type: ignore[arg-type, dict-item]

    monkeypatch.setattr(
        cascade.runtime,
        "device_info",
        lambda _: SimpleNamespace(
            cc=target.cc, max_smem_optin=target.max_smem, sm_count=132, clock_mhz=0.0, memory_gb_s=0.0, name="H100"
        ),
    )
    monkeypatch.setattr(cascade, "target_of", lambda _: target)
    got = cascade._described([described] * (1 + levels))
    assert len(calls) == 1 + levels
    found = got.plan.launches
    assert found is not None
    ops = [record.spec.op for record in found.records]
    assert ops == ["decode", "decode_combine"] + levels * ["decode", "decode_combine", "merge_states"]
    assert found.workspace_bytes == launches.workspace_bytes
    assert any("levels of shared keys" in reason for reason in found.selection.why) == (levels > 0)
