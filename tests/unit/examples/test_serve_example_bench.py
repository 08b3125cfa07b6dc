"""examples/serve/bench.py: what it measures and draws, on the CPU."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_tools import engine_tables
from omniattn.bench import document
from tests.unit.examples import serve_fakes as fakes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def ex() -> Any:
    return fakes.load("bench_backends", "plot", "bench")


def test_the_program(ex: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figure = tmp_path / "engine.json", tmp_path / "own.svg"
    arguments = ["--small", "--requests", "1", "3", "--contender", "omniattn", "omniattn, guesses", "SDPA"]
    report = ex.bench.main([*arguments, "--tokens", "8", "--out", str(out), "--plot", str(figure)])
    said = capsys.readouterr().out
    assert out.read_text(encoding="utf-8") == document.to_json(json.loads(out.read_text(encoding="utf-8"))) + "\n"
    assert [(row["contender"], row["requests"]) for row in report["rows"]] == [
        (name, n) for name in ("omniattn", "omniattn, guesses", "SDPA") for n in (1, 3)
    ]
    for row in report["rows"]:
        assert row["tokens"] == row["requests"] * 8 * row["bursts"]
        assert row["same_tokens"] == 1.0
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert 0 < row["first_token_ms_p50"] <= row["first_token_ms_p99"] < row["seconds"] * 1e3
        assert 0 <= row["token_ms_p50"] <= row["token_ms_p99"]
    assert said.count("100%") == 6
    assert (report["environment"]["device"], report["weights"]) == ("CPU", "random")
    ex.plot.main([str(out), str(tmp_path / "again.svg")])
    assert report["command"] == f"python examples/serve/bench.py {' '.join(arguments)} --tokens 8 --plot {figure}"
    text = figure.read_text(encoding="utf-8")
    assert text == (tmp_path / "again.svg").read_text(encoding="utf-8")
    assert text.count("<polyline") == 3 * 5
    assert text.count(">SDPA<") == 1


def test_what_cannot_run_is_said(ex: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ex.bench, "missing", lambda name: "no such module" if name == "FlashAttention-3" else "")

    def fail(network: Any, count: int) -> Any:
        raise ValueError("another version\nof it")

    monkeypatch.setattr(ex.bench, "continuous_batching", fail)
    names = ["FlashAttention-3", ex.bench.TRANSFORMERS]
    report = ex.bench.main(["--small", "--requests", "1", "--contender", *names])
    assert report["rows"] == []
    assert report["missing"] == {names[0]: "no such module", names[1]: "ValueError: another version"}
    assert "not run: transformers, ValueError: another version" in capsys.readouterr().out
    monkeypatch.setitem(ex.bench.LOOPS, "SDPA", ("sdpa", {"kv": "int8"}))
    with pytest.raises(ValueError, match="one of bf16, fp16 for Sdpa, received 'int8'"):
        ex.bench.main(["--small", "--requests", "1", "--contender", "SDPA"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--out", "no/such/folder/x.json"], "--out: expected"), (["--longest", "1000"], "1024 at most")],
)
def test_bad_arguments_are_found_first(ex: Any, capsys: Any, arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit):
        ex.bench.main(["--small", *arguments])
    assert said in capsys.readouterr().err


def test_prompts(ex: Any) -> None:
    prompts = ex.bench.Prompts(range(5000), 512)
    burst = prompts.burst(64, 1)
    assert burst == prompts.burst(64, 1) != prompts.burst(64, 2)
    lengths = sorted(map(len, burst))
    assert lengths[0] >= 32
    assert lengths[-1] <= 512
    assert lengths[32] == pytest.approx(128, abs=8)
    assert all(prompt == list(range(prompt[0], prompt[0] + len(prompt))) for prompt in burst)
    assert 32 <= len(prompts.burst(1, 1)[0]) <= 512


def test_numbers_of_a_point(ex: Any) -> None:
    calls: list[int] = []

    def run(prompts: list[list[int]], count: int) -> Any:
        calls.append(len(prompts))
        slow = 10.0 if len(calls) == 1 else 1.0  # the first burst is not timed
        times = [[slow * (i + 1 + 0.5 * j) for j in range(count)] for i in range(len(prompts))]
        return ex.bench.Burst(times, [[len(calls)] * count for _ in prompts])

    row, answers = ex.bench.measure(run, ex.bench.Prompts(range(100), 32), 4, 3, 0.0)
    assert calls == [4] * 3
    assert answers == [[1] * 3] * 4
    assert (row["bursts"], row["tokens"], row["seconds"]) == (2, 24, 10.0)
    assert (row["first_token_ms_p50"], row["token_ms_p50"], row["token_ms_p99"]) == (2500.0, 500.0, 500.0)
    assert row["first_token_ms_p99"] == pytest.approx(4000.0)
    assert ex.bench.common([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]) == pytest.approx(4 / 6)


def test_the_network_of_transformers_is_the_same(ex: Any) -> None:
    pytest.importorskip("transformers")
    network = fakes.tiny(ex)
    model = ex.bench.llama(network)
    tokens = np.array(fakes.prompts(1)[0])
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)[None]).logits[0]
        ours = network.alone.logits(network.alone.hidden(tokens[None])[0])
    assert (theirs - ours).abs().max() <= 1e-5 * ours.abs().max()


def test_tables_of_the_page() -> None:
    rows = [
        {"contender": name, "requests": n, "tokens_per_second": 1234.5 * n, "first_token_ms_p50": 1.0,
         "first_token_ms_p99": 2.25, "token_ms_p50": 0.5, "token_ms_p99": 0.75, "same_tokens": 0.984}
        for name, n in (("omniattn", 1), ("omniattn", 16), ("SDPA", 1))
    ]  # fmt: skip
    report = {"rows": rows, "missing": {"transformers": "it failed"}, "environment": {"device": "NVIDIA Test"},
              "date": "2026-01-02", "protocol": "engine", "command": "python examples/serve/bench.py"}  # fmt: skip
    page = engine_tables.engine(report)
    assert "| tokens/s; requests at once: | 1 | 16 |" in page
    assert "| omniattn | 1,234 | 19,752 |" in page
    assert "| SDPA | 1.0 / 2.2 | – |" in page
    assert "| omniattn | 98% | 98% |" in page
    assert "Not run: transformers, it failed." in page
    assert "bursts of requests" in page


def test_continuous_batching_of_transformers(ex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same weights it gives the same tokens, and a time for each."""
    transformers = pytest.importorskip("transformers")
    # Of a GPU it would take most of the memory; a CPU's is cleared first, which takes a minute.
    small = functools.partial(transformers.ContinuousBatchingConfig, num_blocks=8, max_batch_tokens=64)
    monkeypatch.setattr(transformers, "ContinuousBatchingConfig", small)
    network = ex.bench.random_network(ex.bench.SMALL, "cpu", 1024)
    prompts = fakes.prompts(4, common=2)
    with ex.bench.continuous_batching(network, 8) as run:
        burst = run(prompts, 8)
    with ex.bench.loop(network, fakes.options(ex), "omniattn") as run:
        assert run(prompts, 8).answers == burst.answers
    assert [len(times) for times in burst.times] == [8] * 4
    assert all(0 < times[0] < burst.seconds and times == sorted(times) for times in burst.times)
