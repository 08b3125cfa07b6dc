"""generate_batch of transformers on a GPU: 64 requests of unequal length, with graphs and without, against SDPA."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from omniattn.integrations import transformers as integration  # noqa: E402
from tests import batches  # noqa: E402
from tests.batches import check_same, generate, generate_batch, prompts, record_calls, sdpa_of_batches  # noqa: E402

pytestmark = pytest.mark.gpu

#: Memory is said, because by itself a manager takes nearly all of the GPU's.
SIZES: dict[str, Any] = {"num_blocks": 400, "max_batch_tokens": 512}

integration.register()


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Calls of the package's functions, and their options."""
    return record_calls(monkeypatch)


#: Experts one by one, in any dtype, and chosen on the host: without graphs.
_WITH_EXPERTS = ("phimoe", "gpt_oss")


def model_of(name: str, dtype: Any) -> Any:
    changes: dict[str, Any] = {"head_dim": 64, "num_hidden_layers": 2}
    if name != "llama":
        changes["sliding_window"] = 100
    model = batches.model_of(name, **changes).cuda().to(dtype)
    if name in _WITH_EXPERTS:
        model.set_experts_implementation("eager")
    return model


def requests_of() -> list[list[int]]:
    """Up to 700 tokens: chunks, and several pages of 256."""
    return prompts(64, 400, 300)


def reference(name: str, model: Any, requests: list[list[int]]) -> Any:
    """SDPA in batches; eager attention one by one where SDPA has no softcap, no sinks."""
    if name in ("gemma2", "gpt_oss"):
        return generate(model, "eager", requests)
    return generate_batch(model, sdpa_of_batches(), requests, **SIZES)


@pytest.mark.parametrize(
    ("name", "graphs"),
    [(name, graphs) for name in batches.names() for graphs in (False, True) if not (graphs and name in _WITH_EXPERTS)],
)
def test_tokens(name: str, graphs: bool, calls: list[tuple[str, dict[str, Any]]]) -> None:
    model, requests = model_of(name, torch.float16), requests_of()
    want = reference(name, model, requests)
    calls.clear()
    got = generate_batch(model, "omniattn", requests, use_cuda_graph=graphs, **SIZES)
    ran = {made for made, _ in calls}
    assert ran & {"attention_varlen", "attention_with_kvcache"}  # prompts, the latter over pages
    # Where all layers see everything, single tokens go over pages.
    assert ("decode" in ran) == (name == "llama")
    check_same(model_of(name, torch.float32), requests, want, got, 0.01)


def test_bfloat16() -> None:
    """As it comes: with graphs, and batches prepared beside the ones that run."""
    model, requests = model_of("llama", torch.bfloat16), requests_of()
    want = reference("llama", model, requests)
    got = generate_batch(model, "omniattn", requests, **SIZES)
    check_same(model_of("llama", torch.float32), requests, want, got, 0.08, most=0.4)


@pytest.mark.parametrize("graphs", [False, True])
def test_late_clearing(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a manager's inputs, on a stream for which copies of its first batch do not wait."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

    clear = ContinuousBatchingIOs._reset_static_tensors

    def late(self: Any, *arguments: Any, **keywords: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(100_000_000)  # cycles, about 60 ms
        clear(self, *arguments, **keywords)

    model, requests = model_of("llama", torch.float16), requests_of()[:8]
    want = reference("llama", model, requests)
    monkeypatch.setattr(ContinuousBatchingIOs, "_reset_static_tensors", late)
    got = generate_batch(model, "omniattn", requests, use_cuda_graph=graphs, use_async_batching=True, **SIZES)
    check_same(model_of("llama", torch.float32), requests, want, got, 0.01)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_graphs_of_other_requests(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """A manager that stays replays its graphs with other lengths, tables and tokens."""
    model, first = model_of(name, torch.float16), requests_of()
    exact = model_of(name, torch.float32)
    generate_batch(model, "omniattn", first, use_cuda_graph=True, keep=True, **SIZES)
    captured = len(calls)
    second = [tokens[: 1 + (7 * i) % len(tokens)] for i, tokens in enumerate(reversed(first))]
    got = generate_batch(model, "omniattn", second, use_cuda_graph=True, keep=True, **SIZES)
    assert len(calls) - captured < captured
    model.destroy_cached_continuous_batching_manager()
    check_same(exact, second, reference(name, model, second), got, 0.01)


def test_compiled() -> None:
    import transformers

    model, requests = model_of("llama", torch.float16), requests_of()
    config = transformers.CompileConfig(mode="default", fullgraph=False, dynamic=True)
    got = generate_batch(
        model, "omniattn", requests, decode_compile_config=config, max_requests_per_batch=64, **SIZES
    )  # fmt: skip
    check_same(model_of("llama", torch.float32), requests, reference("llama", model, requests), got, 0.01)


def test_int8(calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Steps with prompts are in 8 bits: the tokens that follow prompts are mostly the same."""
    model, requests = model_of("llama", torch.float16), requests_of()
    want = generate_batch(model, "omniattn", requests, 1, **SIZES)
    calls.clear()
    got = generate_batch(model, "omniattn_int8", requests, 1, **SIZES)
    assert "int8" in {options.get("precision") for _, options in calls}
    assert sum(a == b for a, b in zip(want, got, strict=True)) >= 48
