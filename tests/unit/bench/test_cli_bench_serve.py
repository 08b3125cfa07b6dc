"""``omniattn bench serve``: contenders, checks, arithmetic, forms; on the CPU, beside this package as another one."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import pytest

from build_tools import serve_tables
from omniattn.bench import serve, sustained
from omniattn.bench.ceilings import Ceilings
from omniattn.bench.serve import CASES, FA3, OURS, Case, cases_of, run_serve, table_of
from omniattn.cli import main
from omniattn.errors import ArgumentError
from tests.unit.bench.bench_fakes import DecodeTorch, WallClock

SMALL = (
    Case("decode", (1, 1), (40, 40), 4, 2, 16), Case("decode", (1, 1), (40, 40), 4, 2, 16, True),
    Case("prompts", (20, 20), (50, 50), 4, 2, 4), Case("mixed", (1, 1, 18, 30), (9, 40, 18, 33), 4, 2, 16),
    Case("drafts", (3, 3), (40, 40), 4, 2, 16), Case("graph", (1,), (21,), 4, 2, 16, planned=100),
    Case("shared", (1,) * 6, (60,) * 6, 4, 2, 16, shared=((32, 6), (16, 3))),
    Case("chunks", (18,) * 3, (67,) * 3, 4, 2, 16, shared=((48, 3),)),
)  # fmt: skip
BESIDE = {other for section in serve.BESIDE.values() for other in section} - {FA3}


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(serve, "require_torch", DecodeTorch)
    monkeypatch.setattr(sustained, "TorchClock", WallClock)
    monkeypatch.setattr(serve, "captured", lambda _, step: step)
    monkeypatch.setattr(serve, "measure_ceilings", lambda *_: Ceilings(100.0, 2.0))
    monkeypatch.setattr(serve, "CASES", SMALL)


@pytest.fixture
def with_fa3(monkeypatch: pytest.MonkeyPatch, on_the_cpu: None) -> Any:
    own = importlib.import_module("omniattn.compat.flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", own)
    return own


@pytest.mark.frameworks
def test_every_case_with_what_stands_beside_it(with_fa3: Any) -> None:
    report = run_serve(SMALL, iters=2)
    assert report.missing == {}
    assert report.notes() == []
    for case in SMALL:
        found = [m for m in report.measurements if m.case == case]
        assert [m.contender for m in found] == [OURS, *serve.BESIDE[case.section]]
        for m in found:
            assert m.us is not None
            assert m.relative_l1 is not None
            assert m.relative_l1 < (0.2 if case.e4m3 and m.contender == "own cache" else 0.02)
    rows = report.to_dict()["rows"]
    assert {row["contender"] for row in rows} == {OURS, FA3} | BESIDE
    own, other = rows[0], rows[2]
    assert own["over_best_other"] == pytest.approx(other["median_us"] / own["median_us"])
    assert own["tb_per_s"] == pytest.approx(SMALL[0].bytes / own["median_us"] * 1e-6)
    lines = table_of(rows)[1]
    assert [line[0] for line in lines[:3]] == ["decode b2 h4/2 t40 p16", "decode b2 h4/2 t40 p16 e4m3",
                                               "prompts b2 h4/2 t50 p4 q20"]  # fmt: skip
    assert all(line[2].endswith("TFLOP/s" if line[0][:2] in ("pr", "mi", "ch") else "TB/s") for line in lines)


@pytest.mark.frameworks
@pytest.mark.parametrize("wrong", ["result", "error"])
def test_what_is_wrong_is_not_timed(wrong: str, with_fa3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = with_fa3.flash_attn_with_kvcache

    def other(*tensors: Any, **options: Any) -> Any:
        if wrong == "error":
            raise RuntimeError("no such kernel\nmore")
        return attend(*tensors, **options) * float("nan")

    monkeypatch.setattr(with_fa3, "flash_attn_with_kvcache", other)
    report = run_serve(SMALL[:1], iters=1)
    last = report.measurements[-1]
    assert (last.contender, last.timing) == (FA3, None)
    assert last.reason.startswith(
        "wrong result: relative L1 nan" if wrong == "result" else "RuntimeError: no such kernel"
    )
    assert table_of(report.to_dict()["rows"])[1][0][4:] == ["–", "–"]


@pytest.mark.frameworks
@pytest.mark.parametrize("form", ["--markdown", "--json", ""])
def test_forms(
    form: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    """Without FlashAttention-3, which is said; the file is what the page is made from."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "serve.json"
    words = ["--iters", "1", "--quick", "--case", "decode", "--case", "graph", "--out", str(path), *form.split()]
    assert main(["bench", "serve", *words]) == 0
    output = capsys.readouterr().out
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["bench"] == "serve"
    assert data["missing"] == {FA3: "flash_attn_interface cannot be imported"}
    assert f"Not run: {FA3}." in serve_tables.serve(data)
    if form == "--json":
        assert json.loads(output) == data
        return
    for words in (
        "decode b2 h4/2 t40 p16 e4m3",
        "own cache",
        "not run: FlashAttention-3, flash_attn_interface",
        "2.00 TB/s",
    ):
        assert words in output


def test_cases_and_arithmetic() -> None:
    assert Case("mixed", (1, 4), (10, 4), 4, 2, 16).pairs == 10 + (1 + 2 + 3 + 4)
    assert Case("decode", (1,), (10,), 4, 2, 16).bytes == 2 * (2 * 10 * 2 * 128) + 2 * 2 * 4 * 128
    assert Case("decode", (1,), (10,), 4, 2, 16, True).bytes == 2 * (10 * 2 * 128) + 2 * 2 * 4 * 128
    assert len({(case.name, case.e4m3) for case in CASES}) == len(CASES)
    case = Case("shared", (1,) * 4, (70,) * 4, 4, 2, 16, shared=((32, 4), (16, 2)))
    assert case.tables == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 1, 7, 8, 9], [0, 1, 7, 10, 11]]
    assert case.once == 32 + 2 * 16 + 4 * 22
    assert case.name == "shared b4 h4/2 t70 p16 32 of 4 16 of 2"
    assert case.bytes == 2 * 128 * (2 * case.once * 2 + 2 * 4 * 4)
    quick = cases_of((), quick=True)
    assert [(case.section, case.e4m3) for case in quick] == [
        ("decode", False), ("decode", True), ("prompts", False), ("prompts", True), ("mixed", False), ("mixed", True),
        ("drafts", False), ("graph", False), ("shared", False), ("chunks", False),
    ]  # fmt: skip
    assert {case.section for case in cases_of(["drafts"], quick=False)} == {"drafts"}
    with pytest.raises(ArgumentError, match="--case"):
        cases_of(["nothing"], quick=False)


@pytest.mark.parametrize("option", ["--shapes d64", "--only fa2", "--anchor fa2", "--sustained 1", "--precision int8",
                                    "--format int4", "--iters 0", "--op decode"])  # fmt: skip
def test_options_that_do_not_fit(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *option.split()]) == 2
    assert option.partition(" ")[0] in capsys.readouterr().err


def test_quick_is_of_this_bench_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--quick"]) == 2
    assert "--quick" in capsys.readouterr().err
