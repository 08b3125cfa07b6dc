"""The JSON of ``omniattn bench``: what documents are made from has one form, whatever was timed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from omniattn.bench import ForwardShape, beside_copy, decode, document, forward, host, sustained
from omniattn.bench.ceilings import Ceilings
from omniattn.bench.decode_report import DecodeShape
from omniattn.cli import bench, main
from omniattn.runtime.device import DeviceInfo
from tests.unit.bench.bench_fakes import CpuTorch, DecodeTorch, WallClock

KEYS = {"schema", "bench", "protocol", "command", "date", "environment", "rows"}
FACTS = {"date", "device", "compute_capability", "sm_count", "driver", "cuda", "torch", "torch_cuda", "cudnn", "python",
         "omniattn", "numpy"}  # fmt: skip


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    for module, torch in ((forward, CpuTorch), (decode, DecodeTorch), (beside_copy, DecodeTorch), (host, CpuTorch),
                          (bench, CpuTorch)):  # fmt: skip
        monkeypatch.setattr(module, "require_torch", torch)
    monkeypatch.setattr(sustained, "TorchClock", WallClock)
    for module in (forward, decode, beside_copy):
        monkeypatch.setattr(module, "measure_ceilings", lambda *_: Ceilings(100.0, 1.0))
    monkeypatch.setattr(beside_copy, "APPEND_SHAPES", (DecodeShape(2, 2, 1, 16, 32, block_size=16),))
    monkeypatch.setattr(bench, "filter_shapes", lambda *_: (ForwardShape(1, 2, 32, 32, True),))
    monkeypatch.setattr(bench, "filter_decode_shapes", lambda *_: (DecodeShape(2, 2, 1, 16, 32, block_size=16),))
    monkeypatch.setattr(bench, "first_jit", lambda: ("kernel", None, "not here"))
    monkeypatch.setattr(host, "_IMPORT_RUNS", 1)
    monkeypatch.setattr(host, "_CALLS_PER_BATCH", 1)


def _check(data: dict[str, Any]) -> None:
    assert data.keys() >= KEYS
    assert data["schema"] == document.SCHEMA == 1
    assert data["date"] == data["environment"]["date"]
    assert data["environment"].keys() >= FACTS
    assert all(isinstance(value, str) for value in data["environment"].values())
    for row in data["rows"]:
        assert all(value is None or isinstance(value, (str, int, float)) for value in row.values()), row


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("what", "options", "names", "numbers"),
    [
        ("forward", "--anchor fa2 --only fa2 --iters 1", {"omniattn", "fa2"}, {"seqlen", "tflops", "ratio_to_anchor"}),
        ("decode", "--anchor fa2 --format int8 --iters 1", {"int8", "fa2"}, {"block_size", "tb_per_s", "cache_bytes"}),
        ("append", "--iters 1", {"int8", "int4, one token"}, {"num_bytes", "tb_per_s", "of_a_copy", "relative_l1"}),
        ("host", "", {"attention", "append", "torch SDPA"}, {"p10_us", "p90_us", "ratio_to_sdpa"}),
    ],
)
def test_every_bench_has_the_same_head_and_flat_rows(
    what: str, options: str, names: set[str], numbers: set[str], on_the_cpu: None, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "result.json"
    timed = ["bench", what, *options.split()]
    command = [*timed, "--out", str(path)]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr().out
    assert path.read_text(encoding="utf-8") == printed
    data = json.loads(printed)
    assert printed == document.to_json(data) + "\n"
    _check(data)
    assert data["bench"] == what
    # The command that makes these rows, whatever file the reader's machine keeps them in.
    assert data["command"] == shlex.join(["omniattn", *timed, "--json"])
    assert data["environment"]["device"] == "CPU"
    column = {"forward": "contender", "decode": "format", "append": "case", "host": "name"}[what]
    assert {row[column] for row in data["rows"]} >= names
    assert all(row["median_us"] > 0 and row.keys() >= numbers for row in data["rows"])
    # Beside a table the file is written too.
    path.unlink()
    assert main([*timed, f"--out={path}", "--markdown"]) == 0
    assert "| --- |" in capsys.readouterr().out.replace("|---|", "| --- |")
    data = json.loads(path.read_text(encoding="utf-8"))
    _check(data)
    assert data["command"] == shlex.join(["omniattn", *timed, "--markdown"])


def test_host_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_torch() -> Any:
        raise bench.BenchError("no GPU here")

    monkeypatch.setattr(host, "require_torch", no_torch)
    monkeypatch.setattr(bench, "first_jit", lambda: ("kernel", None, "not here"))
    monkeypatch.setattr(host, "_IMPORT_RUNS", 1)
    assert main(["bench", "host", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    _check(data)
    assert data["rows"] == []
    assert data["warm_calls_note"] == "no GPU here"
    assert data["environment"]["device"] == "unknown"


def test_low_precision_reports_have_names_of_their_own() -> None:
    from omniattn.bench import Report

    assert Report("cudnn", {}, 1.0, 1.0, (), precision="int8").to_dict()["bench"] == "int8"


def test_a_report_of_the_reference_names_no_gpu() -> None:
    facts = document.reference_environment()
    assert facts.keys() == {"date", "device", "python", "omniattn", "numpy"}
    assert facts["device"] == "CPU"
    assert document.UNKNOWN not in facts.values()


def test_driver_and_its_cuda_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from omniattn import runtime

    version = tmp_path / "version"
    version.write_text("580.95.05\n", encoding="ascii")
    monkeypatch.setattr(document, "_KERNEL_MODULE_VERSION", version)
    fields = dict.fromkeys(DeviceInfo.__dataclass_fields__, 0) | {"driver_version": (13, 0)}
    monkeypatch.setattr(runtime, "device_info", lambda _: DeviceInfo(**fields))
    torch = type("Torch", (), {"cuda": CpuTorch.cuda})
    torch.version = type("Version", (), {"cuda": "13.0"})
    torch.backends = type("Backends", (), {"cudnn": type("Cudnn", (), {"version": staticmethod(lambda: 91900)})})
    facts = document.environment(torch)
    assert (facts["driver"], facts["cuda"], facts["torch_cuda"], facts["cudnn"]) == (
        "580.95.05",
        "13.0",
        "13.0",
        "91900",
    )


def test_a_file_has_a_row_a_line(tmp_path: Path) -> None:
    """Rows and what is like them; what describes the run has a line a fact."""
    made = document.document(
        "forward", protocol="interleaved", command="", environment={"date": "2026-01-02"}, missing={}, slower=[],
        why={"a": ["µ", "2"]}, runs=({"losses": [0.1, 1e-9]}, {"losses": []}), sizes={"prompt": [8, 512]},
        rows=[{"shape": "a", "us": 0.1 + 0.2, "more": {"x": [1]}}, {"shape": "b", "us": None, "more": {}}],
    )  # fmt: skip
    path = tmp_path / "made.json"
    document.write(made, path)
    text = path.read_bytes().decode("ascii")
    assert json.loads(text) == {**made, "runs": list(made["runs"])}
    assert text == document.to_json(made) + "\n"
    assert text.splitlines() == [
        "{",
        '  "schema": 1,',
        '  "bench": "forward",',
        '  "protocol": "interleaved",',
        '  "command": "",',
        '  "date": "2026-01-02",',
        '  "environment": {',
        '    "date": "2026-01-02"',
        "  },",
        '  "missing": {},',
        '  "slower": [],',
        '  "why": {',
        '    "a": [',
        '      "\\u00b5",',
        '      "2"',
        "    ]",
        "  },",
        '  "runs": [',
        '    {"losses": [0.1, 1e-09]},',
        '    {"losses": []}',
        "  ],",
        '  "sizes": {',
        '    "prompt": [8, 512]',
        "  },",
        '  "rows": [',
        '    {"shape": "a", "us": 0.30000000000000004, "more": {"x": [1]}},',
        '    {"shape": "b", "us": null, "more": {}}',
        "  ]",
        "}",
    ]


def test_out_has_to_be_in_a_folder_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json", "--out", str(tmp_path / "none" / "x.json")]) == 2
    assert "'--out': expected a file in an existing folder" in capsys.readouterr().err
