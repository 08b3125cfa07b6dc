"""examples/paged_generation: answers are those of one request at a time; blocks are shared, taken away, given back."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.examples.smollm2_fakes import tiny_weights

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FOLDERS = [str(EXAMPLES / name) for name in ("paged_generation", "smollm2")]
MODULES = ("array_backend", "model", "weights", "tokenizer", "serving")


def load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ex() -> Any:
    """The modules of both examples, which import each other by bare names: these must not leak into other tests."""
    before = list(sys.path)
    sys.path[:0] = FOLDERS
    try:
        found = {name: importlib.import_module(name) for name in MODULES}
        # Two programs have one name.
        found["greedy"] = load("one_request", EXAMPLES / "smollm2" / "generate.py").greedy
        found["generate"] = load("paged_generation", EXAMPLES / "paged_generation" / "generate.py")
        return SimpleNamespace(**found)
    finally:
        sys.path[:] = before
        for name in MODULES:
            sys.modules.pop(name, None)


def make(ex: Any, backend: Any, attention: str = "plain") -> Any:
    config = ex.model.Config(2, 24, 40, 6, 2, 16, 50, 10000.0, 1e-5)
    return ex.model.Model(config, tiny_weights(ex, config, backend), backend, ex.model.plain_attention(backend))


@pytest.fixture(scope="module")
def tiny(ex: Any) -> Any:
    return make(ex, ex.array_backend.NumpyBackend())


RNG = np.random.default_rng(3)
SYSTEM = RNG.integers(0, 50, 21).tolist()
PROMPTS = [RNG.integers(0, 50, n).tolist() for n in (5, 40, 1, 17)]
COUNTS = (6, 3, 9, 1)


def serve(ex: Any, model: Any, *, blocks: int = 64, block_size: int = 4, dtype: str = "fp16", stop: int = -1) -> Any:
    server = ex.serving.Server(ex.serving.PagedModel(model, blocks, block_size, 128, dtype), SYSTEM, stop)
    for prompt, count in zip(PROMPTS, COUNTS, strict=True):
        server.submit(prompt, count)
    server.run()
    return server


def alone(ex: Any, model: Any) -> list[list[int]]:
    return [ex.greedy(model, np.array(SYSTEM + p), n, stop=-1) for p, n in zip(PROMPTS, COUNTS, strict=True)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_batch_answers_as_one_request_at_a_time(block_size: int, ex: Any, tiny: Any) -> None:
    server = serve(ex, tiny, block_size=block_size, blocks=256 // block_size)
    assert [r.answer for r in sorted(server.done, key=lambda r: r.number)] == alone(ex, tiny)
    assert server.steps == max(COUNTS) - 1
    manager = server.paged.manager
    # Only the common prompt is left.
    assert manager.sequences == (ex.serving.COMMON,)
    assert manager.num_blocks - manager.num_free == -(-len(SYSTEM) // block_size)


def test_the_common_prompt_is_computed_and_held_once(ex: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    step = ex.serving.PagedModel.step
    monkeypatch.setattr(
        ex.serving.PagedModel, "step", lambda self, names, tokens: fed.append(tokens.size) or step(self, names, tokens)
    )
    server = serve(ex, tiny)
    assert sum(fed) == len(SYSTEM) + sum(map(len, PROMPTS)) + sum(COUNTS) - len(COUNTS)
    # 21 tokens are 5 whole blocks of 4, which nobody copies, and one token in a sixth.
    held = [len(SYSTEM) % 4 + len(p) + n - 1 for p, n in zip(PROMPTS, COUNTS, strict=True)]
    assert server.most_blocks <= 6 + sum(-(-n // 4) for n in held)


def test_a_full_cache_pauses_the_youngest(ex: Any, tiny: Any) -> None:
    # All four together need more; the longest alone just fits.
    server = serve(ex, tiny, blocks=17)
    assert [r.answer for r in sorted(server.done, key=lambda r: r.number)] == alone(ex, tiny)
    assert server.most_blocks <= 17
    steps_when_all_fit = max(COUNTS) - 1
    assert server.steps > steps_when_all_fit


def test_a_request_that_never_fits_is_an_error(ex: Any, tiny: Any) -> None:
    with pytest.raises(MemoryError, match="request 1 alone"):
        serve(ex, tiny, blocks=14)


def test_a_paused_request_goes_on_where_it_was(ex: Any, tiny: Any) -> None:
    paged = ex.serving.PagedModel(tiny, 9, 4, 128, "fp16")
    server = ex.serving.Server(paged, SYSTEM)
    prompts = ([1, 2, 3], [4, 5, 6])
    for prompt in prompts:
        server.submit(prompt, 6)
    done = server.run()
    assert [r.answer for r in done] == [ex.greedy(tiny, np.array(SYSTEM + p), 6, stop=-1) for p in prompts]
    assert [r.pauses for r in done] == [0, 1]


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_quantized_caches_generate(dtype: str, ex: Any, tiny: Any) -> None:
    server = serve(ex, tiny, dtype=dtype)
    assert [len(r.answer) for r in sorted(server.done, key=lambda r: r.number)] == list(COUNTS)
    # What shared blocks hold is what a request computes alone: its answer does not depend on the others.
    lone = ex.serving.Server(ex.serving.PagedModel(tiny, 64, 4, 128, dtype), SYSTEM)
    lone.submit(PROMPTS[0], COUNTS[0])
    assert lone.run()[0].answer == next(r.answer for r in server.done if r.number == 0)


def test_a_stop_token_ends_an_answer(ex: Any, tiny: Any) -> None:
    whole = alone(ex, tiny)[0]
    server = serve(ex, tiny, stop=whole[2])
    first = next(r for r in server.done if r.number == 0)
    assert first.answer == whole[: whole.index(whole[2])]


@pytest.mark.frameworks
def test_torch_generates_the_same(ex: Any, tiny: Any) -> None:
    pytest.importorskip("torch")
    server = serve(ex, make(ex, ex.array_backend.make_backend("torch-cpu")))
    assert [r.answer for r in sorted(server.done, key=lambda r: r.number)] == alone(ex, tiny)


def test_bad_requests_are_named(ex: Any, tiny: Any) -> None:
    paged = ex.serving.PagedModel(tiny, 16, 4, 128, "fp16")
    with pytest.raises(ValueError, match="common"):
        ex.serving.Server(paged, [])
    server = ex.serving.Server(paged, SYSTEM)
    for prompt, count in (([], 3), ([1], 0)):
        with pytest.raises(ValueError, match="expected a prompt"):
            server.submit(prompt, count)


def test_command_line(ex: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def encode(text: str) -> Any:
        return SimpleNamespace(ids=[ord(c) % 50 for c in text[-30:]])

    for name, value in (
        ("locate_gguf", lambda path: path),
        ("open_gguf", lambda path: path),
        ("read_config", lambda reader: tiny.config),
        ("load_weights", lambda reader, config, backend: tiny.weights),
        ("load_tokenizer", lambda reader: SimpleNamespace(encode=encode, decode=lambda ids: f"{len(ids)} tokens")),
        ("metadata", lambda reader, key: -1),
    ):
        monkeypatch.setattr(ex.generate, name, value)
    monkeypatch.setattr(sys, "argv", ["generate.py", "Why?", "How?", "--tokens", "5", "--cache", "int4"])
    assert ex.generate.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["Why?", "  5 tokens", "How?", "  5 tokens"]
    assert "30 tokens of system prompt computed once; 4 steps" in lines[-1]
