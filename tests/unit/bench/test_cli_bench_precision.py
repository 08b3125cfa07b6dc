"""``omniattn bench --precision``: contenders, ratios, forms; the kernel-alone device on a driver that computes here."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import omniattn
from omniattn.bench import (
    FORWARD_SHAPES,
    LOW_PRECISION_SHAPES,
    ForwardShape,
    Measurement,
    Report,
    Timing,
    forward,
    sustained,
)
from omniattn.bench import low_precision as low
from omniattn.bench.anchors import CONTENDERS
from omniattn.bench.ceilings import Ceilings
from omniattn.bench.plot import plot_report
from omniattn.bench.shapes import filter_shapes
from omniattn.cli import main
from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.ops.attention import call_of
from omniattn.plan.engine import Call, Launches, Plan, describe
from omniattn.problems.memory import WORKSPACE_ALIGNMENT
from omniattn.registry import REGISTRY
from omniattn.runtime.record import LaunchRecord
from omniattn.select import Selection
from tests.unit.bench.bench_fakes import StreamTorch, WallClock

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

SHAPES = (ForwardShape(1, 2, 48, 64, False), ForwardShape(1, 2, 48, 64, True))


class CpuHopper:
    """Launches of a Hopper GPU's plan, computing on the CPU.

    "Quantizing" writes the addresses of q, k, v into the workspace. "Attention" reads them back from there: on a
    workspace that nobody has filled it finds no addresses.
    """

    spec = next(s for s in REGISTRY if s.quantized and s.family == "attn_int8_sm90")
    quantizer = next(s for s in REGISTRY if s.op == "quantize")

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.streams: set[int] = set()
        self.broken = False

    def plan(self, call: Call) -> Plan:
        """As `make_plan` makes it for arrays on such a GPU."""
        options = call.options
        q_shape, causal, precision = tuple(call.objects[0].shape), options.causal, options.precision
        dtype = call.objects[0].dtype

        def quantize(stream: int, addresses: Sequence[int]) -> None:
            q, k, v, _, workspace = addresses
            assert workspace % WORKSPACE_ALIGNMENT == 0
            self.launched.append("quantize")
            self.streams.add(stream)
            ctypes.memmove(workspace, struct.pack("<4Q", 0x5EED, q, k, v), 32)

        def attention(stream: int, addresses: Sequence[int]) -> None:
            self.launched.append("attention")
            self.streams.add(stream)
            mark, *inputs = struct.unpack("<4Q", ctypes.string_at(addresses[4], 32))
            assert mark == 0x5EED, "attention on a workspace without quantized operands"
            if self.broken:
                return
            o = omniattn.attention(*(_at(x, q_shape, dtype) for x in inputs), causal=causal, precision=precision)
            _at(addresses[3], q_shape).copy_(o)

        records = tuple(LaunchRecord(spec, (1, 1, 1), 32, b"") for spec in (self.quantizer, self.spec))
        launches = Launches(Selection(self.spec, ()), records, 1024)
        program = _Program([quantize, attention])
        return Plan(None, launches, program, 0)  # type: ignore[arg-type]


class _Program:
    """A `Program` of functions."""

    operands = ("q", "k", "v", "o", "workspace")

    def __init__(self, launches: list[Callable[[int, Sequence[int]], None]]) -> None:
        self.launches = launches

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        for launch in self.launches:
            launch(stream, addresses)


def _at(address: int, shape: tuple[int, ...], dtype: Any = torch.bfloat16) -> Any:
    """The tensor that lies at an address."""
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    memory = (ctypes.c_char * count).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> CpuHopper:
    gpu = CpuHopper()

    def plan(alone: low.PartAlone, q: Any, k: Any, v: Any) -> Plan:
        call = call_of(q, k, v, causal=alone._causal, precision=alone._precision)
        assert set(describe(call, None)) == {"q", "k", "v"}
        return gpu.plan(call)

    monkeypatch.setattr(low.PartAlone, "_plan", plan)
    monkeypatch.setattr(forward, "require_torch", StreamTorch)
    monkeypatch.setattr(sustained, "TorchClock", WallClock)
    monkeypatch.setattr(forward, "measure_ceilings", lambda *_: Ceilings(100.0, 1.0))
    monkeypatch.setattr("omniattn.cli.bench.filter_shapes", lambda *_: SHAPES)
    return gpu


def _inputs(seed: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 48, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


# The kernel alone


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_kernel_alone_quantizes_an_input_set_once(precision: str, hopper: CpuHopper) -> None:
    alone = low.PartAlone(StreamTorch(), SHAPES[1], precision)
    first, second = _inputs(1), _inputs(2)
    for inputs in (first, second):
        hopper.launched.clear()
        o = alone(*inputs)
        assert hopper.launched == ["quantize", "attention", "attention"]
        assert torch.equal(o, omniattn.attention(*inputs, causal=True, precision=precision))
    hopper.launched.clear()
    for inputs in (first, second, first):
        o = alone(*inputs)
        assert torch.equal(o, omniattn.attention(*inputs, causal=True, precision=precision))
    assert hopper.launched == ["attention"] * 3
    assert hopper.streams == {77}


def test_what_kernel_alone_returns_is_not_left_from_the_whole_call(hopper: CpuHopper) -> None:
    alone = low.PartAlone(StreamTorch(), SHAPES[0], "int8")
    inputs = _inputs()
    prepare = alone._prepare

    def prepare_then_break(*tensors: Any) -> Any:
        prepared = prepare(*tensors)
        hopper.broken = True
        return prepared

    alone._prepare = prepare_then_break  # type: ignore[method-assign]
    assert torch.isnan(alone(*inputs)).all()


def test_there_is_no_kernel_alone_on_the_cpu() -> None:
    with pytest.raises(UnsupportedError, match="the int8 kernel alone can be timed on a GPU only"):
        low.PartAlone(StreamTorch(), SHAPES[0], "int8")(*_inputs())


# Contenders and shapes


def test_exact_has_the_contenders_it_had() -> None:
    assert low.contenders("exact") == CONTENDERS


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_low_precision_has_three_contenders_of_this_package(precision: str) -> None:
    own = [c for c in low.contenders(precision) if c.own]
    assert [c.key for c in own] == ["omniattn", f"omniattn_{precision}", f"omniattn_{precision}_kernel"]
    assert [c.label for c in own] == ["omniattn exact", f"omniattn {precision}", f"omniattn {precision} kernel"]
    assert own[0].error_limit < own[1].error_limit == own[2].error_limit < 0.5
    assert low.contenders(precision)[3:] == CONTENDERS[1:]


def test_unknown_precision_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="'exact' or 'int8' or 'int4' or 'fp8', received 'fp4'"):
        low.contenders("fp4")


def test_fp8_has_contenders_on_e4m3_arrays() -> None:
    own = [c for c in low.contenders("fp8") if c.own]
    names = ("", "_fp8", "_fp8_arrays", "_fp8_kernel", "_fp8_kernel_mean", "_int8")
    assert [c.key for c in own] == [f"omniattn{name}" for name in names]
    assert len({c.label for c in own}) == 6
    assert low.contenders("fp8")[6:] == CONTENDERS[1:]


def test_a_run_of_fp8_checks_and_times_all(hopper: CpuHopper) -> None:
    report = forward.run_forward(SHAPES, anchor="fa2", iters=2, contenders=[], precision="fp8")
    assert (report.end_to_end, len(report.own)) == ("omniattn_fp8", 6)
    for shape in SHAPES:
        found = {key: report.find(shape, key) for key in report.own}
        assert all(m is not None and m.timing is not None and m.reason == "" for m in found.values())
        errors = {key: m.relative_l1 for key, m in found.items() if m is not None and m.relative_l1 is not None}
        assert errors["omniattn"] < errors["omniattn_int8"] < errors["omniattn_fp8"] < 0.2
        # The kernel alone has the arrays of the whole call; a mean in V, which was added, is taken away for the check.
        assert errors["omniattn_fp8_kernel"] == errors["omniattn_fp8_arrays"]
        assert errors["omniattn_fp8_arrays"] < errors["omniattn_fp8_kernel_mean"] < 0.2
    # Two input sets of two shapes, once each for the kernel with a mean in V and without.
    assert hopper.launched.count("quantize") == 8
    assert low.OnArrays(SHAPES[0])(*_inputs()).dtype == torch.bfloat16


def test_low_precision_shapes_are_the_default_ones_and_those_of_the_goals() -> None:
    assert set(FORWARD_SHAPES) < set(LOW_PRECISION_SHAPES)
    assert len(LOW_PRECISION_SHAPES) == len(set(LOW_PRECISION_SHAPES)) == len(FORWARD_SHAPES) + 4
    goals = ("d128 b4 h16 s4096", "d128 b1 h16 s16384", "d128 b1 h16 s32768", "d128 b4 h32 s8192",
             "d64 b4 h32 s4096", "d64 b1 h32 s16384")  # fmt: skip
    for name in goals:
        pair = filter_shapes([name], LOW_PRECISION_SHAPES)
        assert [shape.long_name for shape in pair] == [f"{name} full", f"{name} causal"]
    assert len({shape.name for shape in LOW_PRECISION_SHAPES}) == len(LOW_PRECISION_SHAPES)
    with pytest.raises(ArgumentError, match="s32768"):
        filter_shapes(["s2048"], LOW_PRECISION_SHAPES)


# Runs


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_run_checks_and_times_all_three(precision: str, hopper: CpuHopper) -> None:
    report = forward.run_forward(SHAPES, anchor="fa2", iters=2, contenders=[], precision=precision)
    keys = ("omniattn", f"omniattn_{precision}", f"omniattn_{precision}_kernel")
    assert report.own == keys
    assert report.contenders == (*keys, "fa2")
    for shape in SHAPES:
        exact, whole, alone = (report.find(shape, key) for key in keys)
        assert exact is not None
        assert whole is not None
        assert alone is not None
        assert exact.reason == whole.reason == alone.reason == ""
        assert exact.relative_l1 is not None
        assert whole.relative_l1 == alone.relative_l1
        assert whole.relative_l1 is not None
        assert exact.relative_l1 < whole.relative_l1 < low._ERROR_LIMITS[precision]
    # A shape has two input sets, and each is quantized in the warm-up, never in a timed round.
    assert hopper.launched.count("quantize") == 2 * len(SHAPES)
    last = len(hopper.launched) - 1 - hopper.launched[::-1].index("quantize")
    assert hopper.launched[last + 1 :] == ["attention"] * (2 + 2)


def test_a_kernel_that_writes_nothing_gets_no_time_and_fails_the_command(
    hopper: CpuHopper, capsys: pytest.CaptureFixture[str]
) -> None:
    hopper.broken = True
    options = ["--anchor", "fa2", "--only", "fa2", "--iters", "1", "--json", "--precision", "int8"]
    assert main(["bench", *options]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    alone = [row for row in rows if row["contender"] == "omniattn_int8_kernel"]
    assert len(alone) == 2
    assert all("wrong result: relative L1 nan" in row["reason"] and row["median_us"] is None for row in alone)
    assert all(row["reason"] == "" for row in rows if row not in alone)


def test_own_low_precision_errors_are_not_hidden(hopper: CpuHopper, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = omniattn.attention

    def no_int8(*tensors: Any, precision: str = "exact", **options: Any) -> Any:
        if precision != "exact":
            raise UnsupportedError("no int8 here")
        return exact(*tensors, **options)

    monkeypatch.setattr(omniattn, "attention", no_int8)
    with pytest.raises(UnsupportedError, match="no int8 here"):
        forward.run_forward(SHAPES, anchor="fa2", iters=1, contenders=[], precision="int8")


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_tables_show_all_columns_side_by_side(
    form: str, hopper: CpuHopper, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    options = ["--markdown"] if form == "markdown" else []
    command = ["bench", "--precision", "int8", "--anchor", "fa2", "--only", "fa2", "--iters", "2", *options]
    assert main(command) == 0
    output = capsys.readouterr().out
    for words in (
        "omniattn exact", "omniattn int8 kernel", "torch FA2", "omniattn int8 / exact", "d64 b1 h2 s48 causal",
        "omniattn int8 / omniattn exact: geometric mean", "omniattn int8 / torch FA2: geometric mean",
        "quantization included", "Largest relative L1 error",
    ):  # fmt: skip
        assert words in output
    assert "% of matmul" not in output


@pytest.mark.parametrize(
    ("command", "word"), [("bench --precision fp4", "invalid choice"), ("bench host --precision int8", "--precision")]
)
def test_precisions_that_cannot_be_timed(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(command.split())
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert word in capsys.readouterr().err


# Arithmetic

A, B = (ForwardShape(4, 32, 8192, 128, causal) for causal in (False, True))


def _report() -> Report:
    def row(shape: ForwardShape, key: str, microseconds: float, error: float) -> Measurement:
        return Measurement(shape, key, Timing((microseconds,) * 3), error)

    return Report(
        anchor="cudnn",
        environment={"device": "TEST", "date": "2000-01-01"},
        matmul_tflops=800.0,
        copy_tb_per_s=4.0,
        measurements=(
            row(A, "omniattn", 6000.0, 0.002),
            row(A, "omniattn_int8", 4000.0, 0.04),
            row(A, "omniattn_int8_kernel", 3000.0, 0.04),
            row(A, "cudnn", 9000.0, 0.002),
            row(B, "omniattn", 3000.0, 0.002),
            Measurement(B, "omniattn_int8", None, 0.5, "wrong result"),
            row(B, "omniattn_int8_kernel", 1500.0, 0.05),
            row(B, "cudnn", 3000.0, 0.002),
        ),
        labels={"omniattn": "omniattn exact", "omniattn_int8": "omniattn int8"},
        precision="int8",
        own=("omniattn", "omniattn_int8", "omniattn_int8_kernel"),
    )


def test_ratios_to_the_anchor_and_to_exact() -> None:
    report = _report()
    header, (full, causal) = report.table()
    assert header == ["shape", "omniattn exact", "omniattn int8", "omniattn_int8_kernel", "cudnn",
                      "omniattn int8 / exact"]  # fmt: skip
    assert full[0] == "d128 b4 h32 s8192 full"
    assert full[2] == f"{A.flops / 4000e-6 / 1e12:.0f} ±0.0% (2.25×)"
    assert full[3].endswith("(3.00×)")
    assert full[-1] == "1.50×"
    assert causal[2] == causal[-1] == "–"
    assert report.mean_ratio("omniattn_int8", "omniattn") == pytest.approx(1.5)
    assert report.mean_ratio("omniattn_int8_kernel", "omniattn") == pytest.approx(2.0)
    assert report.largest_error("omniattn_int8_kernel") == 0.05
    assert report.largest_error("fa3") is None


def test_json_gains_keys_and_loses_none() -> None:
    data = json.loads(_report().to_json())
    assert {"anchor", "environment", "ceilings", "missing", "geometric_mean_ratio", "rows"} < data.keys()
    assert data["precision"] == "int8"
    assert data["geometric_mean_ratio_to_exact"] == pytest.approx(
        {"omniattn": 1.0, "omniattn_int8": 1.5, "omniattn_int8_kernel": 2.0}
    )
    whole = data["rows"][1]
    assert whole["ratio_to_anchor"] == 2.25
    assert whole["ratio_to_exact"] == 1.5
    assert (whole["batch"], whole["heads"], whole["shape"]) == (4, 32, "d128 s8192 full")
    assert data["rows"][5]["ratio_to_exact"] is None


def test_plot_of_a_low_precision_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.svg"
    plot_report(_report(), path)
    assert path.stat().st_size > 10_000
