"""``omniattn bench few`` and its kin: ratios, marks, tables; no device."""

from __future__ import annotations

import dataclasses
import json

import pytest

from build_tools import shape_tables
from omniattn.bench import Timing
from omniattn.bench.option_contenders import OURS
from omniattn.bench.option_report import BELOW_BEST, ERROR, Entry
from omniattn.bench.shape_cases import REFERENCES, SHAPE_CASES, Mark, ShapeCase
from omniattn.bench.shape_report import BELOW_FA3, REFERENCE, ShapeReport, ShapeResult

ALL = [(bench, case) for bench, cases in SHAPE_CASES.items() for case in cases]


def test_marks_follow_cudnn() -> None:
    case = SHAPE_CASES["few"][1]
    assert case.mark is not None
    assert case.mark.scaled_us(case.flops, 382.0) == pytest.approx(52.0)
    assert case.mark.scaled_us(case.flops, 191.0) == pytest.approx(26.0)
    assert case.mark.scaled_us(case.flops, None) is None
    for _, case in ALL:
        if case.mark is None:
            continue
        assert (case.mark.fa3_us > 0) != (case.mark.fa3_tflops > 0)
        assert (case.mark.cudnn_us > 0) + (case.mark.cudnn_tflops > 0) + bool(case.mark.reference) == 1
        # Where cuDNN is as fast as it was, FlashAttention-3 is.
        cudnn_us = case.mark.cudnn_us or case.flops / (case.mark.cudnn_tflops or 1.0) * 1e-6
        if case.mark.reference:
            shape, speed = REFERENCES[case.mark.reference]
            cudnn_us = shape.flops / speed * 1e-6
        found = case.mark.scaled_us(case.flops, cudnn_us)
        assert found == pytest.approx(case.mark.fa3_us or case.flops / case.mark.fa3_tflops * 1e-6)


def result_of(case: ShapeCase, own: float | None, **others: float | None) -> ShapeResult:
    times = {OURS: own, **others}
    entries = (Entry(key, us and Timing((us,)), reason="" if us else "why") for key, us in times.items())
    return ShapeResult(case, tuple(entries), "a_kernel", ("a_kernel", "another"), ("a reason",))


CASE = ShapeCase(128, 16, (4096,), (4096,), mark=Mark(fa3_tflops=700.0, reference="full"))
#: Time of the reference that it was measured with.
THEN = REFERENCES["full"][0].flops / REFERENCES["full"][1] * 1e-6


def test_ratios() -> None:
    fa3 = CASE.flops / 700e6
    found = result_of(CASE, fa3, cudnn=1.5 * fa3, fa2=1.2 * fa3, wgmma=0.5 * fa3, **{REFERENCE: 2 * THEN})
    assert (found.best, found.over_best) == ("fa2", pytest.approx(1.2))
    assert found.fa3_us == pytest.approx(2 * fa3)
    assert found.over_fa3 == pytest.approx(2.0)
    assert found.tflops(OURS) == pytest.approx(700.0)
    assert found.gb_per_s(OURS) == pytest.approx(CASE.bytes / fa3 * 1e-3)
    assert found.tflops(REFERENCE) is found.gb_per_s(REFERENCE) is None
    assert found.marks == []


@pytest.mark.parametrize(
    ("own", "best", "reference", "marks"),
    [
        (100.0, 95.0, 0.95, []),
        (100.0, 94.9, 0.95, [BELOW_BEST]),
        (100.0, 95.0, 0.949, [BELOW_FA3]),
        (100.0, 90.0, 0.9, [BELOW_BEST, BELOW_FA3]),
        (100.0, None, None, []),
        (None, 95.0, 1.0, [ERROR]),
    ],
)
def test_marks(own: float | None, best: float | None, reference: float | None, marks: list[str]) -> None:
    case = dataclasses.replace(CASE, mark=Mark(fa3_us=100.0, reference="full"))
    found = result_of(case, own, fa2=best, **{REFERENCE: reference and reference * THEN})
    assert found.marks == marks
    assert found.failed == (own is None)


def test_tables() -> None:
    bytes_case = dataclasses.replace(CASE, lengths_q=(1,), mark=None, both=True)
    results = (
        result_of(CASE, 1000.0, fa2=1200.0, **{REFERENCE: THEN}),
        result_of(bytes_case, 10.0, cudnn=8.0, wgmma=12.0, **{"mma.sync": 9.0}),
        result_of(dataclasses.replace(CASE, causal=True, mark=None), None, fa2=900.0),
    )
    facts = {"device": "TEST", "date": "2000-01-01", "driver": "1"}
    report = ShapeReport("few", facts, 800.0, 4.0, results, {"cudnn": "cuDNN", "fa2": "FA2"}, {"fa4": "not there"},
                         "omniattn bench few")  # fmt: skip
    header, (plain, few, failed) = report.table()
    assert len(header) == len(plain) == 11
    assert report.decides(CASE) == "arithmetic"
    assert plain[:4] == ["d128 b1 h16 s4096 full", "a_kernel", "1000.0 ±0.0%", "137 TFLOP/s"]
    assert plain[4:] == ["–", "–", "FA2", "1200.0", "1.20×", "0.20×", BELOW_FA3]
    assert few[3:] == ["3356 GB/s", "12.0", "9.0", "cuDNN", "8.0", "0.80×", "–", BELOW_BEST]
    assert failed[2:] == ["–", "–", "–", "–", "FA2", "900.0", "–", "–", "error"]
    assert report.notes() == ["not run: fa4: not there", "omniattn, d128 b1 h16 s4096 causal: why"]
    page = shape_tables.shapes(json.loads(report.to_json()))
    start = "| d128 b1 h16 s4096 full | `a_kernel` | 1000.0 | 137 TFLOP/s |"
    assert f"{start} – | – | FA2 | 1200.0 | 1.20× | 0.20× | {BELOW_FA3} |" in page
    assert "| 3356 GB/s | 12.0 | 9.0 | cuDNN | 8.0 | 0.80× | – | below best |" in page
    assert "Not run: fa4." in page
    assert "contenders interleaved, medians. Measured by `omniattn bench few`" in " ".join(page.split())
    (row, *_) = report.to_dict()["rows"]
    assert (row["kernel"], row["launches"], row["decides"]) == ("a_kernel", "a_kernel, another", "arithmetic")
    assert report.to_dict()["why"]["d128 b1 h16 s4096 full"] == ["a reason"]
