"""``omniattn bench append`` and ``bench quantize``: what is timed, bytes, checks, forms; on the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

import omniattn
from omniattn.bench import ForwardShape, Timing, beside_copy, sustained
from omniattn.bench.beside_copy import CopyMeasurement, CopyReport
from omniattn.bench.ceilings import Ceilings
from omniattn.bench.decode_report import DecodeShape
from omniattn.cli import main
from tests.unit.bench.bench_fakes import DecodeTorch, WallClock

APPEND = (DecodeShape(2, 2, 2, 32, 64), DecodeShape(2, 2, 2, 32, 64, block_size=16))
QUANTIZE = (ForwardShape(1, 2, 48, 64, False),)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(beside_copy, "require_torch", DecodeTorch)
    monkeypatch.setattr(sustained, "TorchClock", WallClock)
    monkeypatch.setattr(beside_copy, "measure_ceilings", lambda *_: Ceilings(100.0, 2.0))
    monkeypatch.setattr(beside_copy, "APPEND_SHAPES", APPEND)
    monkeypatch.setattr(beside_copy, "QUANTIZE_SHAPES", QUANTIZE)


@pytest.mark.frameworks
def test_append_is_timed_and_checked_in_every_format(on_the_cpu: None) -> None:
    report = beside_copy.run_append(iters=1)
    cases = [f"{name}{kind}" for name in ("bf16", "fp8", "int8", "int4")
             for kind in ("", ", rotary embedding", ", one token")]  # fmt: skip
    for shape in APPEND:
        found = {m.case: m for m in report.measurements if m.shape == shape.name}
        assert list(found) == cases
        for case, m in found.items():
            written = shape.cache_bytes(case.partition(",")[0])
            assert m.num_bytes == (shape.cache_bytes("bf16") + written) // (32 if "one token" in case else 1)
            assert (m.relative_l1 is None) == ("one token" in case)
            assert m.timing.median_us > 0


@pytest.mark.frameworks
@pytest.mark.parametrize("lost", ["tokens", "angles"])
def test_what_is_not_appended_is_not_timed(
    lost: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append = omniattn.append

    def wrong(cache: Any, k: Any, v: Any, **options: Any) -> None:
        if lost == "angles":
            options.pop("cos", None), options.pop("sin", None)
        append(cache, k, v * 0 if lost == "tokens" else v, **options)

    monkeypatch.setattr(omniattn, "append", wrong)
    assert main(["bench", "append", "--iters", "1", "--json"]) == 2
    assert ("append, bf16" + ", rotary embedding" * (lost == "angles")) in capsys.readouterr().err


@pytest.mark.frameworks
def test_the_quantizers_are_timed(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, str]] = []

    class Part:
        def __init__(self, torch: Any, shape: ForwardShape, precision: Any, part: str) -> None:
            seen.append((precision, part))

        def __call__(self, q: Any, k: Any, v: Any) -> None:
            assert q.shape == (1, 48, 2, 64)

    monkeypatch.setattr(beside_copy, "PartAlone", Part)
    report = beside_copy.run_quantize(iters=1)
    assert seen == [(omniattn.Int8(), "quantization"), (omniattn.Int8(smooth_q=True), "quantization")]
    elements = 48 * 2 * 64
    assert {m.case: m.num_bytes // elements for m in report.measurements} == {
        'attention(precision="int8")': 9, "the same, smooth_q=True": 9, "quantize_qk": 6, "quantize_v": 3
    }  # fmt: skip


@pytest.mark.frameworks
@pytest.mark.parametrize("form", ["--markdown", "--json", ""])
def test_forms(
    form: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["bench", "append", "--iters", "1", *form.split()]) == 0
    output = capsys.readouterr().out
    if form == "--json":
        data = json.loads(output)
        assert data["bench"] == "append"
        row = data["rows"][0]
        assert row["of_a_copy"] == pytest.approx(row["num_bytes"] / row["median_us"] * 1e-6 / 2.0)
        return
    for words in ("b2 h2/2 t32 d64 p16", "int4, rotary embedding", "Copy in this run: 2.00 TB/s"):
        assert words in output


def test_arithmetic() -> None:
    m = CopyMeasurement("append", "shape", Timing((10.0, 10.0)), 20_000_000)
    assert m.tb_per_s == pytest.approx(2.0)
    header, rows = CopyReport("append", {}, 4.0, (m,)).table()
    assert header == ["shape", "append"]
    assert rows == [["shape", "10.0 ±0.0% (0.50)"]]


@pytest.mark.parametrize("what", ["append", "quantize"])
@pytest.mark.parametrize("option", ["--shapes d64", "--only fa2", "--plot x.png", "--sustained 1", "--precision int8",
                                    "--format int4", "--iters 0"])  # fmt: skip
def test_options_that_do_not_fit(what: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", what, *option.split()]) == 2
    assert option.partition(" ")[0] in capsys.readouterr().err
