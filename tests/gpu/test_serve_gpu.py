"""examples/serve on a GPU, with SmolLM2's weights where they are installed: answers are those of a request alone.

In bf16 two ways to add give two results, and the larger of two scores that are nearly equal may be either. So a token
is right if, in one forward pass of its request alone over the same format, its score is within `TOLERANCE` of the
highest; and most tokens are the highest. With `deterministic`, and steps of one size, answers are equal exactly.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.examples import serve_fakes as fakes

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

#: By format: largest distance from the highest score in units of its own rounding, 2⁻⁸ of it; and the least part of
#: tokens that are the highest.
TOLERANCE = {"bf16": (12, 0.9), "fp8": (24, 0.8), "int8": (24, 0.8), "int4": (64, 0.6)}
BUCKETS = (8, 16, 32, 64, 128, 256, 512)


@pytest.fixture(scope="module")
def ex() -> Any:
    return fakes.load("bench_backends", "plot", "bench")


@pytest.fixture(scope="module")
def network(ex: Any) -> Any:
    """SmolLM2-135M, or four random layers of its shape."""
    try:
        found, tokenizer, _ = ex.network.load_smollm2(None, "cuda", 1024)
    except ImportError:
        tokenizer = None
    except ex.weights.WeightsNotFoundError:
        tokenizer = None
    if tokenizer is None:
        config = ex.model.Config(4, 576, 1536, 9, 3, 64, 512)
        found = ex.bench.random_network(config, "cuda", 1024)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 512, (20_000,), generator=generator).tolist()
    else:
        from pydoc_data.topics import topics

        tokens = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))[:200_000]).ids
    found.text = tokens
    return found


def prompts(network: Any, count: int, *, common: int = 70, longest: int = 200) -> list[list[int]]:
    """Pieces of unequal lengths of a text, behind its beginning."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    begins = torch.randint(common, len(network.text) - longest, (count,), generator=generator).tolist()
    return [
        network.text[:common] + network.text[begin : begin + n] for begin, n in zip(begins, lengths, strict=True)
    ]  # fmt: skip


def options(ex: Any, **changes: Any) -> Any:
    sizes = {"num_blocks": 2048, "max_tokens": 1024, "max_requests": 64, "max_rows": 512, "buckets": BUCKETS}
    return ex.engine.Options(**{**sizes, **changes})


def serve(ex: Any, network: Any, requests: list[Any], backend: str = "omniattn", **changes: Any) -> Any:
    """An engine that has run requests to their ends, and has all of its blocks back."""
    engine = ex.engine.Engine(network, options(ex, **changes), ex.bench_backends.ATTENTIONS[backend])
    fakes.run(engine, requests)
    blocks = engine.blocks
    assert (blocks.num_free, blocks.sequences, blocks.swapped) == (blocks.num_blocks, (), ())
    return engine


def requests_of(ex: Any, network: Any, count: int, **of_prompts: int) -> list[Any]:
    return [ex.scheduler.Request(p, 16 + i % 17) for i, p in enumerate(prompts(network, count, **of_prompts))]


def scores(ex: Any, network: Any, request: Any, kv: str) -> Any:
    """Logits (answer, vocab) that a forward pass of the request alone gives for each token of its answer."""
    tokens = request.tokens[:-1]
    n, wanted, blocks = len(tokens), len(request.answer), -(-len(tokens) // 16)
    attention = ex.network.PagedAttention(network.config, blocks, 16, 1024, network.like, kv)

    def int32(values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    rows = int32(range(n - wanted, n))
    step = ex.network.Step(
        int32([list(range(blocks))]), int32(tokens), int32(range(n)), rows, int32([n]), int32([0, n]), n
    )  # fmt: skip
    with torch.no_grad():
        return network(step, attention).float()


def judge(ex: Any, network: Any, requests: list[Any], kv: str = "bf16") -> None:
    """Fail if a token of an answer is not what the request alone would have got."""
    most, part = TOLERANCE[kv]
    highest = total = 0
    for request in requests:
        logits = scores(ex, network, request, kv)
        chosen = logits.gather(1, torch.tensor(request.answer, device="cuda")[:, None])[:, 0]
        best = logits.amax(-1)
        assert (best - chosen <= most * 2**-8 * logits.abs().amax(-1)).all()
        highest += int((best == chosen).sum())
        total += len(request.answer)
    assert highest >= part * total, f"{highest} of {total} tokens have the highest score"


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("kv", list(TOLERANCE))
def test_formats(ex: Any, network: Any, kv: str, graphs: bool) -> None:
    requests = requests_of(ex, network, 64)
    engine = serve(ex, network, requests, kv=kv, graphs=graphs)
    assert all(len(request.answer) == request.limit for request in requests)
    assert sum(request.cached for request in requests) >= 32 * len(requests)
    assert engine.scheduler.drafted > 0
    judge(ex, network, requests, kv)


def test_graphs_change_nothing(ex: Any, network: Any) -> None:
    """The same steps, padded alike: the same bits."""
    answers = []
    for graphs in (True, False):
        requests = requests_of(ex, network, 48)
        serve(ex, network, requests, graphs=graphs)
        answers.append([request.answer for request in requests])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("kv", "drafts"), [("bf16", 3), ("int8", 1)])
def test_deterministic_answers_are_equal(ex: Any, network: Any, kv: str, drafts: int) -> None:
    """Whole prompts, and steps of one size: a request's bits are those that it has alone."""
    more = {"max_rows": 4096, "buckets": (4096,), "kv": kv, "drafts": drafts, "attention": {"deterministic": True}}
    requests = requests_of(ex, network, 24, common=0, longest=120)
    serve(ex, network, requests, **more)
    for request in requests[:6]:
        alone = ex.scheduler.Request(request.prompt, request.limit)
        serve(ex, network, [alone], **more)
        assert alone.answer == request.answer


@pytest.mark.parametrize("swap_blocks", [0, 40, 400])
@pytest.mark.parametrize("kv", ["bf16", "int4"])
def test_preemption(ex: Any, network: Any, kv: str, swap_blocks: int) -> None:
    """A pool for a few of them: requests leave for the host, for good, or either."""
    requests = requests_of(ex, network, 64)
    engine = serve(ex, network, requests, kv=kv, num_blocks=80, swap_blocks=swap_blocks)
    assert engine.scheduler.preemptions > 0
    assert engine.blocks.num_free_host == swap_blocks
    judge(ex, network, requests, kv)


def test_cancelled_requests(ex: Any, network: Any) -> None:
    requests = requests_of(ex, network, 64)
    engine = ex.engine.Engine(network, options(ex, num_blocks=80, swap_blocks=400))
    for request in requests:
        engine.scheduler.submit(request)
    for step in range(20):
        engine.step()
        engine.scheduler.cancel(requests[3 * step])
    fakes.run(engine, [])
    assert (engine.blocks.num_free, engine.blocks.num_free_host) == (80, 400)
    judge(ex, network, [request for request in requests if request.reason == "length"])


def test_sampling_repeats(ex: Any, network: Any) -> None:
    def sampled() -> list[list[int]]:
        requests = [ex.scheduler.Request(p, 24, 0.8, 0.9, i) for i, p in enumerate(prompts(network, 32))]
        serve(ex, network, requests)
        return [request.answer for request in requests]

    answers = sampled()
    assert answers == sampled()
    assert len({*map(tuple, answers)}) == 32


@pytest.mark.parametrize("backend", ["sdpa", "fa3"])
def test_other_attentions(ex: Any, network: Any, backend: str) -> None:
    """What bench.py compares with gives the same answers; FlashAttention-3 where it is installed, else SDPA again."""
    if backend == "fa3" and ex.bench_backends.flash_attn_with_kvcache is None:
        backend = "sdpa"
    more: dict[str, Any] = {"graphs": False, "buckets": ()} if backend == "sdpa" else {}
    requests = requests_of(ex, network, 32)
    serve(ex, network, requests, backend, **more)
    judge(ex, network, requests)


def test_one_by_one_generation_of_the_other_example(ex: Any, network: Any) -> None:
    """examples/smollm2 on the same weights, with `omniattn.attention`: its scores judge the answers likewise."""
    backend = ex.array_backend.TorchBackend("cuda", "bfloat16")
    alone = ex.model.Model(network.config, network.weights, backend, ex.model.omniattn_attention())
    requests = requests_of(ex, network, 16)
    serve(ex, network, requests)
    most, part = TOLERANCE["bf16"]
    highest = total = 0
    for request in requests:
        tokens = torch.tensor(request.tokens[:-1]).numpy()
        logits = alone.logits(alone.hidden(tokens[None])[0])[-len(request.answer) :]
        chosen = logits.gather(1, torch.tensor(request.answer, device="cuda")[:, None])[:, 0]
        assert (logits.amax(-1) - chosen <= most * 2**-8 * logits.abs().amax(-1)).all()
        highest += int((logits.amax(-1) == chosen).sum())
        total += len(request.answer)
    assert highest >= part * total
