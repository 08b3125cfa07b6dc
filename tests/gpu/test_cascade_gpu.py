"""``attention_with_kvcache(shared_prefix=...)`` in levels on a GPU beside the plain call of each request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402

from .attention_cases import TORCH_DTYPES, to_numpy  # noqa: E402

pytestmark = pytest.mark.gpu

HEADS, KV = 8, 2
#: Of o, and relative of the LSE: each level is rounded once more than the plain call.
ATOL = {"bfloat16": 3e-2, "float16": 4e-3}
NAMES = {"bfloat16": "bf16", "float16": "fp16"}
#: Of the LSE, of the same keys, and of a quantized cache, whose levels have keys rounded to 16 bits.
LSE_ATOL, LSE_ATOL_OF_CODES = 1e-4, 2e-2
DEVICE = "cuda"


def to_gpu(x: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(x)).to(DEVICE)


class Engine:
    """A cache of random tokens, and requests that share the first of them: of a system prompt, of conversations.

    ``rows``: new tokens of each request, in turn; a request that shares nothing comes last.
    """

    def __init__(
        self, rows: Sequence[int], system: int = 300, talk: int = 130, *, page: int = 16, dim: int = 64,
        dtype: str = "bfloat16", k_dtype: str | None = None, heads: tuple[int, int] = (HEADS, KV), systems: int = 2,
        talks: int | None = None, own: Sequence[int] = (5, 40, 133), seed: int = 1,
    ) -> None:  # fmt: skip
        self.dtype, self.dim, self.heads, self.page = dtype, dim, heads, page
        count, talks = len(rows), talks or 1 + (len(rows) > 12)
        tokens = [*[system] * systems, *[talk] * (systems * talks), *(max(own) + n for n in rows)]
        num_blocks = 8 + sum(-(-n // page) + 2 for n in tokens)
        self.quantized = k_dtype is not None
        self.generator = torch.Generator(device=DEVICE).manual_seed(seed)
        like = torch.empty(0, dtype=TORCH_DTYPES[dtype], device=DEVICE)
        self.cache = oa.PagedKVCache(num_blocks, page, heads[1], dim, like=like, k_dtype=k_dtype or NAMES[dtype])
        if not self.quantized:
            self.cache.k.fill_(float("nan"))
            self.cache.v.fill_(float("nan"))
        self.blocks = oa.BlockManager(num_blocks, page)
        for s in range(systems):
            self.blocks.add(("system", s))
            self.grow({("system", s): system})
            for t in range(talks):
                self.blocks.fork(("system", s), ("talk", s, t))
                if talk:
                    self.grow({("talk", s, t): talk})
        names: list[Any] = []
        for i in range(count):
            parent = ("talk", i % systems, i // systems % talks) if i % 4 else ("system", i % systems)
            if i == count - 1 and count > 1:
                self.blocks.add(i)
            else:
                self.blocks.fork(parent, i)
            self.grow({i: own[i % len(own)]})
            names.append(i)
        self.names = self.blocks.sharing_order(names)
        self.new = {name: rows[name] for name in self.names}
        self.grow(self.new)
        self.runs = self.blocks.shared_runs(self.new)

    def random(self, *shape: int) -> Any:
        return torch.randn(shape, device=DEVICE, generator=self.generator).to(TORCH_DTYPES[self.dtype])

    def grow(self, new: dict[Any, int]) -> None:
        oa.copy_blocks(self.cache, self.blocks.extend(new))
        k, v = (self.random(sum(new.values()), self.heads[1], self.dim) for _ in "kv")
        starts = np.cumsum([0, *new.values()]).astype(np.int32)
        lens, table = self.blocks.seq_lens(new), self.blocks.block_table(new)
        oa.append(self.cache, k, v, cu_seqlens=to_gpu(starts), seq_lens=to_gpu(lens), block_table=to_gpu(table))

    def places(self, *, packed: bool) -> dict[str, Any]:
        found: dict[str, Any] = {
            "seq_lens": to_gpu(self.blocks.seq_lens(self.names)),
            "block_table": to_gpu(self.blocks.block_table(self.names)),
        }
        if packed:
            found["cu_seqlens_q"] = to_gpu(np.cumsum([0, *self.new.values()]).astype(np.int32))
            found["max_seqlen_q"] = max(self.new.values())
        return found

    def queries(self, *, packed: bool, spare: int = 0) -> Any:
        q = self.random(sum(self.new.values()) + spare, self.heads[0], self.dim)
        return q if packed else q.view(len(self.names), -1, self.heads[0], self.dim)

    def shared(self, runs: Any = None, **extents: int) -> oa.SharedPrefixes:
        return (self.runs if runs is None else runs).arrays(**extents).map(to_gpu)

    def check(self, shared: Any, *, packed: bool, spare: int = 0, **options: Any) -> None:
        q, places = self.queries(packed=packed, spare=spare), self.places(packed=packed)
        expected = oa.attention_with_kvcache(q, self.cache, **places, **options, return_lse=True)
        out = torch.full_like(q, float("nan"))
        o, lse = oa.attention_with_kvcache(
            q, self.cache, **places, **options, return_lse=True, shared_prefix=shared, out=out
        )
        assert o is out
        self.compare((o, lse), expected)
        if spare:
            assert not o[-spare:].any()
            assert torch.isneginf(lse[:, -spare:]).all()
        alone = oa.attention_with_kvcache(q, self.cache, **places, **options, shared_prefix=shared)
        assert torch.equal(alone, o)

    def compare(self, found: Any, expected: Any) -> None:
        testing.assert_close(to_numpy(found[0]), to_numpy(expected[0]), atol=ATOL[self.dtype])
        lse, of_lse = (x[1].cpu().numpy() for x in (found, expected))
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(of_lse))
        there, atol = ~np.isneginf(of_lse), LSE_ATOL_OF_CODES if self.quantized else LSE_ATOL
        np.testing.assert_allclose(lse[there], of_lse[there], rtol=0, atol=atol)


SINGLE = (1,) * 23
MIXED = (1, 1, 70, 1, 3, 1, 128, 1, 1, 1, 9, 1, 33)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_levels(page: int, dim: int, dtype: str) -> None:
    for rows, packed in ((SINGLE, False), (SINGLE, True), ((3,) * 9, False), ((40,) * 9, False), (MIXED, True)):
        engine = Engine(rows, page=page, dim=dim, dtype=dtype)
        assert engine.runs.num_levels >= 2
        engine.check(engine.shared(), packed=packed, spare=3 if packed else 0)


@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (32, 2), (24, 1)], ids=str)
def test_heads(heads: tuple[int, int]) -> None:
    for rows, packed in ((SINGLE, False), (MIXED, True)):
        engine = Engine(rows, dim=128, heads=heads)
        engine.check(engine.shared(), packed=packed)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False}, {"softcap": 5.0}, {"softmax_scale": -0.1}, {"num_splits": 3}, {"window": (-1, 4)},
        {"sinks": np.linspace(-1, 2, HEADS, dtype=np.float32)},
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_options(options: dict[str, Any]) -> None:
    given = {name: to_gpu(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    for rows, packed in ((SINGLE, False), (MIXED, True), ((40,) * 9, False)):
        engine = Engine(rows)
        engine.check(engine.shared(), packed=packed, **given)


@pytest.mark.parametrize("k_dtype", ["fp8", "int8", "int4"])
def test_quantized_caches(k_dtype: str) -> None:
    """Levels have their keys made in 16 bits first, as prompts do."""
    for rows, packed in ((SINGLE, False), (MIXED, True), ((5,) * 9, False)):
        engine = Engine(rows, dim=128, k_dtype=k_dtype)
        engine.check(engine.shared(), packed=packed)


@pytest.mark.parametrize("seed", range(6))
def test_any_part_of_the_runs_and_arrays_that_are_larger(seed: int) -> None:
    draw = random.Random(seed)
    rows = [draw.choice([1, 1, 1, 4, 20]) for _ in range(draw.randrange(2, 30))]
    engine = Engine(rows, systems=draw.randrange(1, 4), talks=draw.randrange(1, 4), seed=seed)
    for _ in range(3):
        runs = engine.runs.keep([run for run in engine.runs.runs if draw.random() < 0.6])
        engine.check(engine.shared(runs), packed=True, spare=2)
        engine.check(engine.shared(runs, levels=3, groups=40, level_blocks=90, own_blocks=120), packed=True)


def test_long_prefixes_of_many_requests() -> None:
    """Keys of a level are split among CTAs; of the sequences' own they are not."""
    for system, talk, dim in ((8192, 2048, 128), (16384, 0, 64)):
        engine = Engine((1,) * 64, system, talk, page=64, dim=dim, systems=1, talks=4, own=(100, 513))
        engine.check(engine.shared(), packed=False)
        engine.check(engine.shared(), packed=True)


def flat(shared: oa.SharedPrefixes) -> list[Any]:
    return [*(x for level in shared.levels for x in level), shared.seq_lens, shared.block_table]


@pytest.mark.parametrize("packed", [True, False])
def test_a_graph_replayed_with_other_groups(packed: bool) -> None:
    """One graph for steps of unlike groups, levels and requests: all is in arrays of one size."""
    engine = Engine((1,) * 40, systems=3, talks=2, own=(40, 70, 133))
    batch, rows = 20, 60 if packed else 20
    extents = {"levels": 2, "groups": 16, "batch": batch, "level_blocks": 40, "own_blocks": 60}
    places = {
        "seq_lens": torch.zeros(batch, dtype=torch.int32, device=DEVICE),
        "block_table": torch.zeros((batch, 60), dtype=torch.int32, device=DEVICE),
    }
    more: dict[str, Any] = {}
    if packed:
        places["cu_seqlens_q"] = torch.zeros(batch + 1, dtype=torch.int32, device=DEVICE)
        more["max_seqlen_q"] = 30
    q = engine.random(*((rows,) if packed else (rows, 1)), HEADS, 64)
    shared = engine.blocks.shared_runs({engine.names[0]: 1}).arrays(**extents).map(to_gpu)

    def write(draw: random.Random) -> int:
        """Some of the requests, whose last tokens are taken for new ones; returns how many levels there are."""
        names = draw.sample(engine.names, draw.randrange(1, batch + 1))
        names = engine.blocks.sharing_order(names) if draw.random() < 0.8 else names
        new = dict.fromkeys(names, 1)
        if packed:
            new |= {name: draw.choice([1, 3, 20]) for name in names[:2]}
        count, ends = len(names), np.cumsum([0, *new.values()])
        places["seq_lens"].zero_()[:count].copy_(to_gpu(engine.blocks.seq_lens(names)))
        places["block_table"].fill_(-1)[:count].copy_(to_gpu(engine.blocks.block_table(names, 60)))
        if packed:
            places["cu_seqlens_q"].fill_(int(ends[-1]))[: count + 1].copy_(to_gpu(ends.astype(np.int32)))
        runs = engine.blocks.shared_runs(new)
        runs = runs.keep([run for run in runs.runs if run.level < 2])
        for have, want in zip(flat(shared), flat(runs.arrays(**extents)), strict=True):
            have.copy_(to_gpu(want))
        q.copy_(engine.random(*q.shape))
        return runs.num_levels

    def call(shared: Any) -> Any:
        return oa.attention_with_kvcache(q, engine.cache, **places, **more, shared_prefix=shared, return_lse=True)

    write(random.Random(0))
    replay = captured(lambda: call(shared))
    levels = set()
    for seed in range(12):
        levels.add(write(random.Random(seed)))
        engine.compare(replay(), call(0))
    assert levels >= {0, 1, 2} or levels >= {1, 2}


def captured(call: Any) -> Any:
    """A function that replays a call, with its results."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()

    def replay() -> Any:
        graph.replay()
        return found

    return replay


def of_one_system(rows: Sequence[int], **options: Any) -> Engine:
    """Requests that all share the system prompt."""
    engine = Engine((*rows, 1), systems=1, talks=1, **options)
    engine.names.remove(len(rows))
    engine.new.pop(len(rows))
    return engine


#: Whole blocks of the system prompt.
SYSTEM = 288


@pytest.mark.parametrize("k_dtype", [None, "int8"])
@pytest.mark.parametrize(
    ("rows", "packed"), [(SINGLE, True), (MIXED, True), ((40,) * 7, False), ((3,) * 7, False), ((200,) * 3, False)]
)
def test_a_number(rows: Sequence[int], packed: bool, k_dtype: str | None) -> None:
    """Of packed rows and prompts, whose levels its arrays' own library makes; also in a graph."""
    engine = of_one_system(rows, k_dtype=k_dtype, dim=128)
    engine.check(SYSTEM, packed=packed, spare=2 if packed else 0)
    engine.check(SYSTEM, packed=packed, causal=False)
    q, places = engine.queries(packed=packed), engine.places(packed=packed)

    def call(shared: int) -> Any:
        return oa.attention_with_kvcache(q, engine.cache, **places, shared_prefix=shared, return_lse=True)

    replay = captured(lambda: call(SYSTEM))
    places["seq_lens"] -= 2
    q.copy_(q.flip(0))
    engine.compare(replay(), call(0))


@pytest.mark.parametrize("paused", [(0,), (0, 3), (2,), (0, 1, 2, 3, 4)], ids=str)
def test_requests_of_a_batch_that_pause(paused: tuple[int, ...]) -> None:
    engine = of_one_system((40,) * 5)
    q, places = engine.queries(packed=False), engine.places(packed=False)
    for b in paused:
        places["seq_lens"][b] = 0
        places["block_table"][b] = -1
    expected = oa.attention_with_kvcache(q, engine.cache, **places, return_lse=True)
    found = oa.attention_with_kvcache(q, engine.cache, **places, return_lse=True, shared_prefix=SYSTEM)
    engine.compare(found, expected)
    for b in paused:
        assert not found[0][b].any()
        assert torch.isneginf(found[1][b]).all()


@pytest.mark.parametrize("levels", [True, False])
def test_a_stream_of_the_callers(levels: bool) -> None:
    """Behind what torch has queued for the arrays on its own."""
    engine = of_one_system(MIXED, dim=128)
    q, places = engine.queries(packed=True), engine.places(packed=True)
    expected = oa.attention_with_kvcache(q, engine.cache, **places, return_lse=True)
    side, shared = torch.cuda.Stream(), SYSTEM
    if levels:
        shared = engine.shared(engine.blocks.shared_runs(engine.new))
    found = oa.attention_with_kvcache(q, engine.cache, **places, return_lse=True, shared_prefix=shared, stream=side)
    torch.cuda.current_stream().wait_stream(side)
    engine.compare(found, expected)


@pytest.mark.parametrize("library", ["cupy", "jax"])
def test_arrays_of_other_libraries(library: str) -> None:
    module = pytest.importorskip(library)
    of = module.from_dlpack if library == "cupy" else module.dlpack.from_dlpack
    if library == "jax":
        module.devices()  # of several GPUs its first use leaves the last one current
        torch.cuda.set_device(0)
    for rows, packed in (((40,) * 5, False), (MIXED, True)):
        engine = of_one_system(rows, dtype="float16")
        q, places = engine.queries(packed=packed), engine.places(packed=packed)
        expected = oa.attention_with_kvcache(q, engine.cache, **places, return_lse=True)
        torch.cuda.synchronize()
        cache = oa.PagedKVCache.from_arrays(of(engine.cache.k), of(engine.cache.v), layout="HND")
        their = {name: of(x) if isinstance(x, torch.Tensor) else x for name, x in places.items()}
        for shared in (SYSTEM, engine.shared(engine.blocks.shared_runs(engine.new)).map(of)):
            found = oa.attention_with_kvcache(of(q), cache, **their, shared_prefix=shared, return_lse=True)
            engine.compare([torch.from_dlpack(x) for x in found], expected)


def test_compiled() -> None:
    engine = Engine(SINGLE, dim=128)
    q, places, shared = engine.queries(packed=False), engine.places(packed=False), engine.shared()

    def call(q: Any, shared: Any) -> Any:
        return oa.attention_with_kvcache(q, engine.cache, **places, shared_prefix=shared, return_lse=True)

    expected = oa.attention_with_kvcache(q, engine.cache, **places, return_lse=True)
    engine.compare(torch.compile(call, backend="eager", fullgraph=True)(q, shared), expected)


def test_explain_and_choice() -> None:
    """All launches of all levels; and a step in which many requests share much is worth levels."""
    engine = Engine(MIXED)
    q, places = engine.queries(packed=True), engine.places(packed=True)
    plain = oa.explain(oa.attention_with_kvcache, q, engine.cache, **places)
    got = oa.explain(oa.attention_with_kvcache, q, engine.cache, **places, shared_prefix=engine.shared())
    assert sum("merge_states" in launch.kernel for launch in got.launches) == engine.runs.num_levels
    assert len(got.launches) > len(plain.launches)
    assert any("levels of shared keys" in reason for reason in got.why)
    few = oa.choose_shared_runs(engine.runs, engine.cache, num_q_heads=HEADS)
    assert not few.runs
    many = Engine((1,) * 128, 8192, 0, page=64, dim=128, heads=(32, 8), systems=1, talks=1)
    chosen = oa.choose_shared_runs(many.runs, many.cache, num_q_heads=32)
    assert chosen.num_levels == 1
    many.check(many.shared(chosen), packed=False)
