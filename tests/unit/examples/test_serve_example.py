"""examples/serve: answers are those of one request at a time, whatever runs beside it and wherever it has been."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omniattn.kv.blocks import BlockManager
from tests.unit.examples import serve_fakes as fakes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

ENGINE = ("network", "scheduler", "engine", "server")
PROMPTS = fakes.prompts(64)
COUNTS = [3 + i % 8 for i in range(64)]


@pytest.fixture(scope="module")
def ex() -> Any:
    return fakes.load("bench_backends")


@pytest.fixture(scope="module")
def network(ex: Any) -> Any:
    return fakes.tiny(ex)


@pytest.fixture(scope="module")
def alone(ex: Any, network: Any) -> list[list[int]]:
    """Answers of the other example, one request after the other, without pages."""
    return [
        ex.greedy(network.alone, np.array(p), n, stop=-1) for p, n in zip(PROMPTS, COUNTS, strict=True)
    ]  # fmt: skip


def serve(ex: Any, network: Any, count: int = 64, backend: Any = None, **changes: Any) -> tuple[Any, list[list[int]]]:
    attention = ex.network.PagedAttention if backend is None else backend
    engine = ex.engine.Engine(network, fakes.options(ex, **changes), attention)
    requests = [ex.scheduler.Request(p, n) for p, n in zip(PROMPTS[:count], COUNTS, strict=False)]
    return engine, fakes.run(engine, requests)


def test_the_engine_can_be_read() -> None:
    lines = {name: len((fakes.FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) for name in ENGINE}
    assert sum(lines.values()) <= 600, lines


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"drafts": 0}, {"block_size": 16, "num_blocks": 160}, {"max_rows": 64}, {"max_requests": 5},
        {"buckets": (8, 24, 96)}, {"num_blocks": 60}, {"num_blocks": 60, "swap_blocks": 100},
        {"num_blocks": 60, "swap_blocks": 11, "max_rows": 64}, {"attention": {"deterministic": True}},
    ],
    ids=str,
)  # fmt: skip
def test_many_requests_answer_as_one_at_a_time(ex: Any, network: Any, alone: Any, changes: dict[str, Any]) -> None:
    engine, answers = serve(ex, network, **changes)
    assert answers == alone
    scheduler, blocks = engine.scheduler, engine.blocks
    assert (blocks.num_free, blocks.sequences, blocks.swapped) == (blocks.num_blocks, (), ())
    assert (scheduler.preemptions > 0) == (changes.get("num_blocks") == 60)
    assert (scheduler.accepted > 0) == (scheduler.drafted > 0) == (changes.get("drafts") != 0)


def test_a_prefix_is_computed_once(ex: Any, network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    forward = ex.network.Network.__call__
    monkeypatch.setattr(
        ex.network.Network, "__call__", lambda self, step, x: rows.append(len(step.tokens)) or forward(self, step, x)
    )
    engine = ex.engine.Engine(network, fakes.options(ex, drafts=0))
    first, *others = [ex.scheduler.Request(p, 4) for p in PROMPTS]
    fakes.run(engine, [first])
    fakes.run(engine, others)
    # Of 21 common tokens 20 are whole blocks.
    assert [r.cached for r in (first, *others)] == [0] + [20] * 63
    assert sum(rows) == sum(len(r.prompt) + 3 - r.cached for r in (first, *others))


def test_prompts_and_tokens_share_steps(ex: Any, network: Any) -> None:
    """A long prompt goes in chunks, and those that are answered get a token from each step meanwhile."""
    engine = ex.engine.Engine(network, fakes.options(ex, max_rows=20, max_requests=4, drafts=0))
    short = [ex.scheduler.Request(PROMPTS[i][:5], 30) for i in range(3)]
    for request in short:
        engine.scheduler.submit(request)
    engine.step()
    assert [len(r.answer) for r in short] == [1, 1, 1]
    long = ex.scheduler.Request([*range(50), 1], 2)
    engine.scheduler.submit(long)
    for step, computed in enumerate((17, 34, 51), 2):
        engine.step()
        assert (long.computed, [len(r.answer) for r in short]) == (computed, [step] * 3)
    assert len(long.answer) == 1


@pytest.mark.parametrize("kv", ["bf16", "fp8", "int8", "int4"])
def test_formats_answer_as_alone(ex: Any, network: Any, kv: str) -> None:
    """What is quantized is the same alone and among others, and after a swap."""
    engine, answers = serve(ex, network, 24, kv=kv, num_blocks=60, swap_blocks=60)
    assert engine.scheduler.preemptions > 0
    assert answers == [
        fakes.run(ex.engine.Engine(network, fakes.options(ex, kv=kv)), [ex.scheduler.Request(p, n)])[0]
        for p, n in zip(PROMPTS[:24], COUNTS, strict=False)
    ]


@pytest.mark.parametrize("name", ["sdpa", "fa3"])
def test_other_attentions_answer_alike(ex: Any, network: Any, alone: Any, name: str, monkeypatch: Any) -> None:
    def flash_attn_with_kvcache(q: Any, k: Any, v: Any, *, cache_seqlens: Any, page_table: Any, **rows: Any) -> Any:
        """FlashAttention-3's, of which only the interface is known on the CPU."""
        import omniattn as oa

        cache = oa.PagedKVCache.from_arrays(k, v)
        return oa.attention_with_kvcache(q, cache, seq_lens=cache_seqlens, block_table=page_table, **rows)

    monkeypatch.setattr(ex.bench_backends, "flash_attn_with_kvcache", flash_attn_with_kvcache)
    engine, answers = serve(ex, network, 16, ex.bench_backends.ATTENTIONS[name], num_blocks=60, swap_blocks=60,
                            buckets=(8, 96))  # fmt: skip
    assert answers == alone[:16]
    assert engine.scheduler.preemptions > 0


def test_stop_tokens_and_limits(ex: Any, network: Any, alone: Any) -> None:
    whole = alone[3]
    engine = ex.engine.Engine(network, fakes.options(ex))
    request = ex.scheduler.Request(PROMPTS[3], COUNTS[3], stop=frozenset([whole[2]]))
    assert fakes.run(engine, [request])[0] == whole[: whole.index(whole[2])]
    assert request.reason == "stop"
    for prompt, limit, message in (
        ([], 3, "2 to 128"), ([1], 0, "received 1 and 0"), ([1], 128, "1 and 128"), ([1] * 128, 1, "received 128 and 1")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            engine.scheduler.submit(ex.scheduler.Request(prompt, limit))
    for odd in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match="temperature"):
            engine.scheduler.submit(ex.scheduler.Request([1], 1, **odd))
    with pytest.raises(ValueError, match="max_rows"):
        ex.engine.Engine(network, fakes.options(ex, max_rows=63))
    with pytest.raises(ValueError, match="buckets"):
        ex.engine.Engine(network, fakes.options(ex, buckets=(8, 64)))


def test_cancelled_requests_give_back_their_blocks(ex: Any, network: Any, alone: Any) -> None:
    engine = ex.engine.Engine(network, fakes.options(ex, num_blocks=60, swap_blocks=60))
    requests = [ex.scheduler.Request(p, n) for p, n in zip(PROMPTS, COUNTS, strict=True)]
    for request in requests:
        engine.scheduler.submit(request)
    for _ in range(8):
        engine.step()
    assert engine.blocks.swapped
    gone = [r for r in requests if not r.reason][::3]
    gone.append(next(r for r in requests if r in engine.blocks.swapped))
    for request in {*gone}:
        engine.scheduler.cancel(request)
        engine.scheduler.cancel(request)
    fakes.run(engine, [])
    assert [r.reason for r in requests] == ["cancelled" if r in gone else "length" for r in requests]
    assert [r.answer for r in requests if r not in gone] == [
        a for r, a in zip(requests, alone, strict=True) if r not in gone
    ]
    assert (engine.blocks.num_free, engine.blocks.num_free_host) == (60, 60)


def test_sampling_depends_on_seed_and_position_alone(ex: Any, network: Any) -> None:
    def sampled(count: int, **changes: Any) -> list[list[int]]:
        engine = ex.engine.Engine(network, fakes.options(ex, **changes))
        kinds = itertools.cycle([(0.7, 0.9), (1.3, 1.0), (0.0, 1.0)])
        return fakes.run(
            engine, [ex.scheduler.Request(p, 12, *next(kinds), seed=i) for i, p in enumerate(PROMPTS[:count])]
        )

    answers = sampled(24)
    assert sampled(24, drafts=0, num_blocks=60, max_rows=64) == answers
    assert sampled(1) == answers[:1]
    engine = ex.engine.Engine(network, fakes.options(ex))
    seeds = fakes.run(engine, [ex.scheduler.Request(PROMPTS[0], 12, 1.0, 1.0, seed) for seed in range(8)])
    assert len({*map(tuple, seeds)}) > 4


def test_draw(ex: Any) -> None:
    """Frequencies of a distribution; top_p cuts its tail, and keeps one token at least."""
    odds = torch.tensor([0.05, 0.5, 0.15, 0.3])
    uniform = (torch.arange(1000) + 0.5) / 1000

    def counts(temperature: float, top_p: float) -> list[int]:
        logits = odds.log().expand(1000, -1)
        tokens = ex.engine.draw(logits, torch.full((1000,), temperature), torch.full((1000,), top_p), uniform)
        return torch.bincount(tokens, minlength=4).tolist()

    assert counts(1.0, 1.0) == [50, 500, 150, 300]
    assert counts(1.0, 0.7) == [0, 625, 0, 375]
    assert counts(1.0, 0.5) == counts(0.01, 1.0) == counts(1e-45, 1.0) == counts(1.0, 1e-6) == [0, 1000, 0, 0]
    squared = (odds**2 / (odds**2).sum() * 1000).tolist()
    assert counts(0.5, 1.0) == pytest.approx(squared, abs=1)
    last = ex.engine.draw(odds.log()[None], *torch.tensor([[1.0], [1.0], [1.0]]))
    assert last.tolist() == [0]  # a draw of 1 is the least likely one, none behind it


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("top_p", [1e-46, 1e-12, 0.5, 1.0])
def test_draw_is_a_token_that_can_be(ex: Any, uniform: float, top_p: float) -> None:
    """Whatever the odds are: masked ones, all at one token, none that is a number."""
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, 2.0, 1.0], [-inf, 0.0, -inf], [-inf, -1.0, 0.5], [0.0, 1e5, -1e5], [7.0, 7.0, 7.0],
                           [-inf, -inf, -inf], [nan, 0.0, 1.0], [0.0, inf, 0.0]])  # fmt: skip
    n = len(logits)
    tokens = ex.engine.draw(logits, *torch.tensor([[0.7, top_p, uniform]]).expand(n, -1).unbind(1)).tolist()
    possible = [{0, 1, 2}, {1}, {1, 2}, {1}, {0, 1, 2}] + [{0, 1, 2}] * 3
    assert all(token in p for token, p in zip(tokens, possible, strict=True)), tokens
    if top_p < 1e-9 or uniform == 0:
        assert tokens[:5] == [1, 1, 2, 1, 0]


def test_draw_does_not_wait_for_the_gpu(ex: Any) -> None:
    """Tensors of the device "meta" have no values, so that whatever reads one on the host raises."""
    numbers = torch.empty(3, 4, device="meta").unbind(0)
    assert ex.engine.draw(torch.empty(4, 50, device="meta"), *numbers).shape == (4,)


def test_drafts_come_from_where_the_last_tokens_were_last_seen(ex: Any) -> None:
    request = ex.scheduler.Request([1, 2, 3, 7, 8, 1, 2, 3, 9, 4, 1, 2, 3], 8)
    assert request.draft(2) == [9, 4]
    assert request.draft(9) == [9, 4, 1, 2, 3]
    assert request.draft(0) == []
    request.tokens += [9, 4]
    assert request.draft(3) == [1, 2, 3]
    request.tokens += [5]
    assert request.draft(3) == []
    assert ex.scheduler.Request([1, 2], 8).draft(3) == []


class Space:
    """Swap space of marks in place of tokens' keys."""

    def __init__(self, num_blocks: int, marks: list[list[Any]]) -> None:
        self.num_blocks, self.marks = num_blocks, marks
        self.memory: list[Any] = [None] * num_blocks

    def claim(self, manager: Any) -> None:
        pass

    def copy_out(self, pairs: Sequence[tuple[int, int]], stream: Any = None) -> None:
        for block, slot in pairs:
            self.memory[slot] = list(self.marks[block])

    def copy_in(self, pairs: Sequence[tuple[int, int]], stream: Any = None) -> None:
        for block, slot in pairs:
            self.marks[block] = list(self.memory[slot])


@pytest.mark.parametrize("seed", range(12))
def test_random_histories(ex: Any, seed: int) -> None:
    """Requests come, stop and are cancelled at random, in a small pool; a token's key is a mark of all before it."""
    rng = random.Random(seed)
    size, blocks = rng.choice([1, 3, 4, 16]), rng.choice([12, 20, 40])
    marks: list[list[Any]] = [[None] * size for _ in range(blocks)]
    space = Space(rng.choice([3, 30]), marks) if seed % 3 else None
    manager = BlockManager(blocks, size, swap_space=space)  # type: ignore[arg-type]
    requests = rng.randint(1, 8)
    scheduler = ex.scheduler.Scheduler(manager, requests, rng.randint(requests, 24), 60, rng.randint(0, 4))

    def next_token(tokens: tuple[int, ...]) -> int:
        return hash(tokens[-3:]) % 7

    everyone: list[Any] = []
    for step in itertools.count():
        if step >= 250 and not (scheduler.running or scheduler.waiting):
            break
        assert step < 5000
        if step < 250 and rng.random() < 0.4:
            most = min(60, blocks * size)
            prompt = [1, 2, 3, 4] * 2 + [rng.randrange(7) for _ in range(rng.randint(1, 30))]
            prompt = prompt[-rng.randint(1, most - 1) :]
            request = ex.scheduler.Request(
                prompt, rng.randint(1, most - len(prompt)), stop=frozenset([rng.randrange(9)])
            )
            scheduler.submit(request)
            everyone.append(request)
        if everyone and rng.random() < 0.05:
            scheduler.cancel(rng.choice(everyone))
        parts, copies, _ = scheduler.plan()
        for source, destination in copies:
            marks[destination] = list(marks[source])
        rows = sum(len(part.tokens) for part in parts)
        assert rows <= scheduler.max_rows
        assert len(parts) <= scheduler.max_requests
        assert parts or not (scheduler.running or scheduler.waiting)
        chosen = []
        for r, tokens, begin, wanted in parts:
            held, table = tuple(r.tokens[:begin] + tokens), manager.blocks(r)
            for i in range(begin, len(held)):
                assert manager.references(table[i // size]) == 1
                marks[table[i // size]][i % size] = held[: i + 1]
            assert all(marks[table[i // size]][i % size] == held[: i + 1] for i in range(len(held)))
            chosen += [next_token(held[: i + 1]) for i in range(len(held) - wanted, len(held))]
        scheduler.finish(parts, chosen)
        assert {*manager.sequences} == {*scheduler.running}
        assert {*manager.swapped} <= {*scheduler.waiting}
    assert (scheduler.running, len(scheduler.waiting)) == ([], 0)
    assert manager.num_free == blocks
    assert {r.reason for r in everyone} <= {"stop", "length", "cancelled"}
    for r in everyone:
        tokens = list(r.prompt)
        while len(tokens) < len(r.tokens):
            tokens.append(next_token(tuple(tokens)))
        assert r.tokens == tokens
        following = next_token(tuple(tokens))
        assert (r.reason == "cancelled") or (following in r.stop if r.reason == "stop" else len(r.answer) == r.limit)


def test_real_weights(ex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers of SmolLM2: the file's matrices, its heads and its tokenizer."""
    read_config = ex.weights.read_config
    monkeypatch.setattr(ex.network, "read_config", lambda reader: replace(read_config(reader), num_layers=3))
    try:
        network, tokenizer, stop = ex.network.load_smollm2(None, "cpu", 128)
    except ex.weights.WeightsNotFoundError:
        pytest.skip("SmolLM2's weights are not installed")
    backend = ex.array_backend.TorchBackend("cpu", "float32")
    model = ex.model.Model(network.config, network.weights, backend, ex.model.plain_attention(backend))
    prompts = [tokenizer.encode(text).ids for text in ("Bees make", "The capital of France is", "The capital of Italy")]
    engine = ex.engine.Engine(network, fakes.options(ex))
    answers = fakes.run(engine, [ex.scheduler.Request(p, 6, stop=frozenset([stop])) for p in prompts])
    assert answers == [ex.greedy(model, np.array(p), 6, stop=stop) for p in prompts]
