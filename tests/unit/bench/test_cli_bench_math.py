"""Benchmark arithmetic with synthetic timings: no device, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from omniattn.bench import FORWARD_SHAPES, ForwardShape, Measurement, Report, Timing, filter_shapes, geometric_mean
from omniattn.bench.ceilings import Ceilings
from omniattn.bench.host import time_calls
from omniattn.bench.plot import plot_report
from omniattn.bench.timing import measure
from omniattn.errors import ArgumentError

SHAPE_A = ForwardShape(batch=4, heads=16, seqlen=4096, head_dim=128, causal=False)
SHAPE_B = ForwardShape(batch=4, heads=16, seqlen=4096, head_dim=128, causal=True)


class FakeClock:
    """A clock whose calls take as long as they say, and that remembers what happened."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def flush(self) -> None:
        self.events.append("flush")

    def time(self, call: Callable[[], object]) -> Callable[[], float]:
        duration = call()
        assert isinstance(duration, float)
        self.events.append(f"call {duration}")
        return lambda: duration

    def synchronize(self) -> None:
        self.events.append("sync")


def _report() -> Report:
    def timing(microseconds: float) -> Timing:
        return Timing((microseconds,) * 3)

    return Report(
        anchor="cudnn",
        environment={"device": "TEST", "date": "2000-01-01"},
        matmul_tflops=800.0,
        copy_tb_per_s=4.0,
        measurements=(
            Measurement(SHAPE_A, "omniattn", timing(1000.0), 0.002),
            Measurement(SHAPE_A, "cudnn", timing(2000.0), 0.002),
            Measurement(SHAPE_B, "omniattn", timing(1000.0), 0.002),
            Measurement(SHAPE_B, "cudnn", timing(500.0), 0.002),
            Measurement(SHAPE_B, "fa3", None, None, "not for this shape"),
        ),
        labels={"cudnn": "torch cuDNN"},
        missing={"flashinfer": "flashinfer-python is not installed"},
    )


def test_the_shapes_are_those_of_the_targets() -> None:
    assert len(FORWARD_SHAPES) == 18
    for shape in FORWARD_SHAPES:
        assert shape.batch * shape.seqlen == 16384
        assert shape.heads * shape.head_dim == 2048
    assert {shape.head_dim for shape in FORWARD_SHAPES} == {64, 128, 256}
    assert {shape.seqlen for shape in FORWARD_SHAPES} == {1024, 4096, 16384}


def test_flops_count_both_products_and_half_of_them_when_causal() -> None:
    assert SHAPE_A.flops == 4 * 4 * 16 * 4096 * 4096 * 128
    assert SHAPE_B.flops * 2 == SHAPE_A.flops


@pytest.mark.parametrize(
    ("patterns", "count"),
    [([], 18), (["d64"], 6), (["d128 causal"], 3), (["d256,s1024,full"], 1), (["d64", "d64 full", "s1024 d128"], 8)],
)
def test_filter(patterns: list[str], count: int) -> None:
    assert len(filter_shapes(patterns)) == count


@pytest.mark.parametrize("pattern", ["d32", "s1024 d64 fast", ""])
def test_filter_that_matches_nothing_is_an_error_that_lists_the_words(pattern: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        filter_shapes([pattern])
    assert "--shapes" in str(caught.value)
    assert "causal, d128" in str(caught.value)
    assert repr(pattern) in str(caught.value)


def test_median_and_spread() -> None:
    timing = Timing(tuple(float(x) for x in range(1, 12)))
    assert timing.median_us == 6.0
    assert timing.spread == pytest.approx((10.0 - 2.0) / 2 / 6.0)


def test_spread_ignores_one_disturbed_run() -> None:
    assert Timing((10.0,) * 20 + (500.0,)).spread == 0.0


@pytest.mark.parametrize("samples", [(), (1.0, 0.0), (float("nan"),)])
def test_timing_rejects_what_is_no_duration(samples: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError, match="samples_us"):
        Timing(samples)


def test_measure_interleaves_rotates_flushes_and_rotates_inputs() -> None:
    clock = FakeClock()
    seen: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def candidate(name: str, duration: float) -> Callable[[int], float]:
        def run(round_number: int) -> float:
            seen[name].append(round_number)
            return duration

        return run

    candidates = {"a": candidate("a", 1.0), "b": candidate("b", 2.0), "c": candidate("c", 3.0)}
    timings = measure(candidates, clock, iters=3, warmup=1)
    assert {name: t.samples_us for name, t in timings.items()} == {"a": (1.0,) * 3, "b": (2.0,) * 3, "c": (3.0,) * 3}
    assert seen["a"] == [0, 0, 1, 2]
    calls = [event for event in clock.events if event.startswith("call")]
    assert calls == [f"call {x}" for x in (1.0, 2.0, 3.0, 2.0, 3.0, 1.0, 3.0, 1.0, 2.0)]
    flushes = [clock.events[i - 1] for i, event in enumerate(clock.events) if event.startswith("call")]
    assert flushes == ["flush"] * 9


def test_measure_without_flush_and_with_no_iterations() -> None:
    clock = FakeClock()
    measure({"a": lambda _: 1.0}, clock, iters=2, flush=False)
    assert "flush" not in clock.events
    with pytest.raises(ArgumentError, match="iters"):
        measure({"a": lambda _: 1.0}, clock, iters=0)


def test_ratios_shares_and_means() -> None:
    report = _report()
    ours = report.find(SHAPE_A, "omniattn")
    assert ours is not None
    assert ours.tflops == pytest.approx(SHAPE_A.flops / 1e-3 / 1e12)
    assert report.ratio(ours) == 2.0
    assert report.share_of_ceiling(ours) == pytest.approx(SHAPE_A.flops / 1e-3 / 1e12 / 800)
    assert report.mean_ratio("omniattn") == pytest.approx(1.0)  # sqrt(2 * 0.5)
    assert report.mean_ratio("cudnn") == pytest.approx(1.0)
    assert report.mean_ratio("fa3") is None
    absent = report.find(SHAPE_B, "fa3")
    assert absent is not None
    assert report.ratio(absent) is None
    assert report.share_of_ceiling(absent) is None


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)
    assert geometric_mean([]) is None


def test_table_and_markdown() -> None:
    header, rows = _report().table()
    assert header == ["shape", "omniattn", "torch cuDNN", "fa3", "omniattn, % of matmul"]
    assert [len(row) for row in rows] == [5, 5]
    assert rows[0][0] == "d128 s4096 full"
    assert "(2.00×)" in rows[0][1]
    assert rows[0][3] == "–"
    assert rows[0][4] == f"{100 * SHAPE_A.flops / 1e9 / 800:.0f} %"
    lines = _report().markdown().splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {6}


def test_json_holds_samples_ratios_and_reasons() -> None:
    data = json.loads(_report().to_json())
    assert data["ceilings"] == {"bf16_matmul_8192_tflops": 800.0, "copy_tb_per_s": 4.0}
    first = data["rows"][0]
    assert data["samples"][0] == {"samples_us": [1000.0] * 3, "sustained": None}
    assert len(data["samples"]) == len(data["rows"])
    assert first["ratio_to_anchor"] == 2.0
    assert data["rows"][-1]["reason"] == "not for this shape"
    assert data["missing"] == {"flashinfer": "flashinfer-python is not installed"}
    assert data["geometric_mean_ratio"]["omniattn"] == pytest.approx(1.0)


def test_ceilings_from_timings() -> None:
    ceilings = Ceilings.from_timings(Timing((1000.0,)), Timing((500.0,)))
    assert ceilings.matmul_tflops == pytest.approx(2 * 8192**3 / 1e-3 / 1e12)
    assert ceilings.copy_tb_per_s == pytest.approx(2 * 2**30 / 5e-4 / 1e12)


def test_host_timing_synchronizes_between_batches_only() -> None:
    calls, waits = [], []
    (timing,) = time_calls({"x": lambda: calls.append(1)}, lambda: waits.append(len(calls)), batches=3)
    assert waits == [100, 200, 300, 400]
    assert 0 < timing.p10_us <= timing.median_us <= timing.p90_us < 1e4


def test_plot_is_a_png_of_some_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.png"
    plot_report(_report(), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000
