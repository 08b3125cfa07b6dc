"""``omniattn bench --sustained``: the protocol on a simulated device, readings, forms, whole runs on the CPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omniattn.bench import ForwardShape, Measurement, Report, Timing, decode, forward, power, sustained
from omniattn.bench.decode_report import DecodeShape
from omniattn.bench.power import NvidiaSmi, PowerSample
from omniattn.bench.sustained import Load, SustainedTiming, check_seconds, sustain
from omniattn.bench.timing import cold_bytes
from omniattn.cli import main
from omniattn.errors import ArgumentError
from tests.unit.bench.bench_fakes import CpuTorch, DecodeTorch


class FakeGpu:
    """A device with a queue, a host whose calls take time, and a clock rate that is the running kernel's own.

    A call of ``work`` megacycles takes work / MHz seconds. The clock moves from where the last kernel left it to
    ``settles_at[work]`` with a time constant; the chip gets slower by ``aging`` a second.
    """

    def __init__(self, settles_at: dict[float, float], *, host_s: float = 1e-6, aging: float = 0.0) -> None:
        self.settles_at, self.host_s, self.aging = settles_at, host_s, aging
        self.host = self.device = 0.0
        self.mhz = 2000.0
        self.ran: list[float] = []
        self.waited = 0

    def candidate(self, work: float) -> Callable[[int], None]:
        def run(_: int) -> None:
            self.host += self.host_s
            begin = max(self.host, self.device)
            duration = work / self.mhz * (1 + self.aging * begin)
            self.mhz += (self.settles_at[work] - self.mhz) * min(1.0, duration / 0.02)
            self.device = begin + duration
            self.ran.append(work)

        return run

    def batch(self, candidate: Callable[[int], object], calls: int) -> Callable[[], object]:
        return lambda: [candidate(number) for number in range(calls)]

    def mark(self) -> float:
        return max(self.host, self.device)

    def passed(self, mark: float) -> bool:
        return self.host >= mark

    def wait(self, mark: float) -> None:
        self.waited += 1
        self.host = max(self.host, mark)

    def elapsed_us(self, begin: float, end: float) -> float:
        return (end - begin) * 1e6

    def now(self) -> float:
        return self.host


class FakeMeter:
    """Readings every 10 ms of what the device would show; remembers what it was asked for."""

    def __init__(self, mhz: float | None = 1500.0, watts: float | None = 700.0) -> None:
        self.mhz, self.watts = mhz, watts
        self.asked: list[tuple[float, float]] = []

    def between(self, begin_s: float, end_s: float) -> list[PowerSample]:
        self.asked.append((begin_s, end_s))
        return [PowerSample(begin_s, self.mhz, self.watts)] * int((end_s - begin_s) / 0.01)


def _sustained(timing: Timing) -> SustainedTiming:
    assert isinstance(timing, SustainedTiming)
    return timing


# The protocol


def test_each_runs_at_the_clock_that_it_settles_at() -> None:
    gpu, meter = FakeGpu({1.0: 1800.0, 2.0: 1200.0}), FakeMeter()
    found = sustain({"cool": gpu.candidate(1.0), "hot": gpu.candidate(2.0)}, gpu, meter, seconds=1.0)
    assert list(found) == ["cool", "hot"]
    for name, expected in (("cool", 1e6 / 1800), ("hot", 2e6 / 1200)):
        timing = _sustained(found[name])
        assert timing.median_us == pytest.approx(expected, rel=1e-4)
        assert len(timing.samples_us) == 2
        assert abs(timing.drift) < 1e-4
        assert not timing.host_limited
        assert timing.doubts() == []
        # The warm-up is in the profile, and not in the time.
        assert len(timing.profile_us) == 2
        assert all(12 <= len(stretch) <= 26 for stretch in timing.profile_us)
        assert all(stretch[-1] == pytest.approx(expected, rel=1e-4) for stretch in timing.profile_us)
    assert _sustained(found["hot"]).profile_us[0][0] < 0.9 * found["hot"].median_us
    assert gpu.device == pytest.approx(2.0, rel=0.2)


def test_order_is_there_and_back() -> None:
    gpu = FakeGpu({1.0: 1000.0, 2.0: 1000.0, 3.0: 1000.0})
    sustain({str(w): gpu.candidate(w) for w in (1.0, 2.0, 3.0)}, gpu, FakeMeter(), seconds=0.4, warmup=1)
    passes = [work for work, before in zip(gpu.ran, [0.0, *gpu.ran], strict=False) if work != before]
    assert passes == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 2.0, 1.0]  # warm-up, there, back: 3.0 follows itself


def test_what_changes_steadily_falls_on_all_alike() -> None:
    gpu = FakeGpu({1.0: 2000.0, 1.0000001: 2000.0, 1.0000002: 2000.0}, aging=0.05)
    works = (1.0, 1.0000001, 1.0000002)
    found = sustain({str(w): gpu.candidate(w) for w in works}, gpu, FakeMeter(), seconds=1.0)
    first, *others = (found[str(w)].median_us for w in works)
    assert others == pytest.approx([first] * 2, rel=2e-3)
    # One pass alone would have told them apart.
    assert found[str(works[2])].samples_us[0] > 1.03 * found[str(works[0])].samples_us[0]


def test_readings_are_those_of_the_timed_parts() -> None:
    gpu, meter = FakeGpu({1.0: 2000.0}), FakeMeter()
    timing = _sustained(sustain({"a": gpu.candidate(1.0)}, gpu, meter, seconds=1.0)["a"])
    assert len(meter.asked) == 2
    for begin, end in meter.asked:
        assert 0.15 < end - begin < 0.28
    assert timing.load.sm_mhz == (1500.0, 1500.0, 1500.0)
    assert timing.load.watts == pytest.approx(700.0)
    assert timing.load.samples == sum(int((end - begin) / 0.01) for begin, end in meter.asked)


def test_a_host_that_is_too_slow_is_told() -> None:
    gpu = FakeGpu({1.0: 2000.0}, host_s=600e-6)
    timing = _sustained(sustain({"a": gpu.candidate(1.0)}, gpu, FakeMeter(), seconds=0.5)["a"])
    assert timing.host_limited
    assert timing.doubts() == ["the device was waiting for the host at times"]


def test_a_host_that_is_barely_fast_enough_is_not() -> None:
    gpu = FakeGpu({1.0: 2000.0}, host_s=450e-6)
    assert not _sustained(sustain({"a": gpu.candidate(1.0)}, gpu, FakeMeter(), seconds=0.5)["a"]).host_limited


def test_a_clock_that_has_not_settled_is_told() -> None:
    gpu = FakeGpu({1.0: 2000.0}, aging=1.0)
    timing = _sustained(sustain({"a": gpu.candidate(1.0)}, gpu, FakeMeter(), seconds=1.0)["a"])
    assert timing.drift > 0.02
    assert "the clock had not settled (+" in timing.doubts()[0]


def test_calls_longer_than_the_stretch_are_timed_all_the_same() -> None:
    gpu = FakeGpu({1000.0: 1000.0})
    gpu.mhz = 1000.0
    timing = _sustained(sustain({"a": gpu.candidate(1000.0)}, gpu, FakeMeter(), seconds=0.1)["a"])
    assert timing.median_us == pytest.approx(1e6)


@pytest.mark.parametrize("wrong", ["x", "", "nan", "0", "-1", "inf", 0.05, 61.0])
def test_seconds_out_of_bounds(wrong: float | str) -> None:
    with pytest.raises(ArgumentError) as caught:
        check_seconds(wrong, "--sustained")
    assert str(caught.value) == (
        f"argument '--sustained': expected a number of seconds from 0.1 to 60, received {wrong!r}"
    )
    gpu = FakeGpu({})
    if isinstance(wrong, float):
        with pytest.raises(ArgumentError, match="seconds"):
            sustain({}, gpu, FakeMeter(), seconds=wrong)
    with pytest.raises(ArgumentError, match="warmup"):
        sustain({}, gpu, FakeMeter(), seconds=1.0, warmup=0)


def test_load_of_partial_readings() -> None:
    samples = [PowerSample(0.0, 1400.0, None), PowerSample(0.0, 1600.0, 650.0), PowerSample(0.0, None, 750.0)]
    assert Load.of(samples) == Load(3, (1400.0, 1500.0, 1600.0), 700.0)
    assert Load.of([]) == Load(0, None, None)
    assert SustainedTiming((1.0,)).text == "– MHz – W"
    assert SustainedTiming((1.0,), load=Load.of(samples)).text == "1500 MHz 700 W"


# nvidia-smi


def _program(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\nimport sys, time\nline = ' '.join(sys.argv[1:])\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def _readings(gpu: str | None = "GPU-1") -> list[PowerSample]:
    begin = time.monotonic()
    with NvidiaSmi(gpu) as meter:
        deadline = begin + 600  # a machine with work may take long to start a process
        while len(meter.between(begin, time.monotonic())) == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert meter.between(0.0, begin) == []
        return meter.between(begin, time.monotonic())


_LOOP = "while True: print('1545, 698.21', flush=True); time.sleep(0.01)"


def test_readings_while_it_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path, monkeypatch, f"assert '--id=GPU-1' in line and 'power.draw.instant' in line\n{_LOOP}")
    samples = _readings()
    assert len(samples) > 1
    assert {(s.sm_mhz, s.watts) for s in samples} == {(1545.0, 698.21)}


def test_drivers_without_the_momentary_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path, monkeypatch, f"if 'instant' in line: sys.exit('Field is not a valid field to query.')\n{_LOOP}")
    assert len(_readings()) > 1


@pytest.mark.parametrize("body", ["sys.exit(9)", "print('No devices were found')", "print('[N/A], [N/A]')"])
def test_nothing_known_is_no_error(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path, monkeypatch, body)
    assert _readings() == []
    assert power.limits("GPU-1") == {}


def test_no_program_and_no_identity_are_no_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _readings() == []
    assert power.limits("GPU-1") == {}
    _program(tmp_path, monkeypatch, _LOOP)
    assert _readings(None) == []
    assert power.limits(None) == {}
    assert power.device_id(CpuTorch()) is None


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path, monkeypatch, "assert 'clocks.max.sm,power.limit' in line\nprint('1980, 700.00')")
    assert power.limits("GPU-1") == {"max_sm_mhz": "1980", "power_limit_w": "700"}


def test_lines() -> None:
    assert power.parse("1545, [N/A]\n", 2.0) == PowerSample(2.0, 1545.0, None)
    assert power.parse("[N/A], 70.5", 2.0) == PowerSample(2.0, None, 70.5)
    for line in ("", "1545", "No devices, found", "1, 2, 3"):
        assert power.parse(line, 2.0) is None


# Whole runs, on the CPU

FORWARD = (ForwardShape(1, 2, 48, 32, False), ForwardShape(1, 2, 48, 32, True))
DECODE = (DecodeShape(2, 4, 1, 40, 64),)


class WallLoad:
    """The CPU's own clock: what is enqueued is done."""

    made: list[bool] = []  # noqa: RUF012

    def __init__(self, _: object, *, graphs: bool = False) -> None:
        self.made.append(graphs)

    def batch(self, candidate: Callable[[int], object], calls: int) -> Callable[[], object]:
        return lambda: [candidate(number) for number in range(calls)]

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return False

    def wait(self, mark: float) -> None:
        return

    def elapsed_us(self, begin: float, end: float) -> float:
        return (end - begin) * 1e6

    def now(self) -> float:
        return time.monotonic()


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(forward, "require_torch", CpuTorch)
    monkeypatch.setattr(decode, "require_torch", DecodeTorch)
    monkeypatch.setattr(decode, "cold_bytes", lambda _: 100_000)
    monkeypatch.setattr(sustained, "TorchLoad", WallLoad)
    monkeypatch.setattr(WallLoad, "made", [])
    for module in (forward, decode):
        monkeypatch.setattr(module, "measure_ceilings", lambda *_: forward_ceilings())
    monkeypatch.setattr("omniattn.cli.bench.filter_shapes", lambda *_: FORWARD)
    monkeypatch.setattr("omniattn.cli.bench.filter_decode_shapes", lambda _: DECODE)
    monkeypatch.setenv("COLUMNS", "250")


def forward_ceilings() -> Any:
    from omniattn.bench.ceilings import Ceilings

    return Ceilings(100.0, 1.0)


@pytest.mark.frameworks
def test_forward_json(on_the_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--anchor", "fa2", "--only", "fa2", "--json", "--sustained", "0.1"]
    assert main(command) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["sustained_seconds"] == 0.1
    assert len(data["rows"]) == 4
    assert data["protocol"] == "sustained"
    assert all(row["watts"] is None and row["host_limited"] is False for row in data["rows"])
    for samples in data["samples"]:
        assert len(samples["samples_us"]) == 2
        load = samples["sustained"]
        assert load.keys() == {"sm_mhz", "watts", "power_samples", "drift", "host_limited", "profile_us"}
        assert (load["sm_mhz"], load["watts"], load["power_samples"]) == (None, None, 0)
        assert all(sum(stretch) > 0 for stretch in load["profile_us"])
    assert WallLoad.made == [False]


@pytest.mark.frameworks
@pytest.mark.parametrize("form", [[], ["--markdown"]])
def test_forward_tables(form: list[str], on_the_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--anchor", "fa2", "--only", "fa2", "--sustained", "0.1", *form]) == 0
    output = capsys.readouterr().out
    assert output.count("– MHz – W") == 4
    assert "0.1 s in two passes" in output
    assert ("under load" in output) == (not form)


@pytest.mark.frameworks
def test_decode_goes_around_copies_of_the_caches(
    on_the_cpu: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    own, torch_step = decode.own_step, decode._torch_step

    def count(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda torch, tokens, name: made.append(name) or make(torch, tokens, name)  # type: ignore[func-returns-value]

    monkeypatch.setattr(decode, "own_step", count(own))
    monkeypatch.setattr(decode, "_torch_step", count(torch_step))
    captures: list[int] = []
    monkeypatch.setattr(decode, "captured", lambda torch, step: captures.append(1) or step)
    command = ["bench", "decode", "--anchor", "fa2", "--format", "bf16", "--format", "int4", "--sustained", "0.1"]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["sustained_seconds"] == 0.1
    assert [(s["sustained"] or {}).keys() >= {"watts"} for s in data["samples"]] == [
        not row["reason"] for row in data["rows"]
    ]
    sizes = {row["format"]: row["cache_bytes"] for row in data["rows"]}
    assert {name: made.count(name) for name in sizes} == {name: -(-100_000 // size) for name, size in sizes.items()}
    assert made.count("int4") > made.count("bf16") > 1
    # Calls shorter than they take to enqueue are captured into graphs.
    assert WallLoad.made == [True]
    assert len(captures) == sum(row["format"] == "fa2" for row in data["rows"]) > 0
    assert main(command) == 0
    output = capsys.readouterr().out
    assert output.count("– MHz – W") == 3
    assert "under load" in output


@pytest.mark.frameworks
def test_an_anchor_that_cannot_be_captured_is_a_reason(
    on_the_cpu: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(torch: Any, step: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(decode, "captured", refuse)
    command = ["bench", "decode", "--anchor", "fa2", "--format", "bf16", "--sustained", "0.1", "--json"]
    main(command)
    rows = json.loads(capsys.readouterr().out)["rows"]
    reasons = {row["format"]: row["reason"] for row in rows}
    assert "stream is capturing" in reasons["fa2"]
    assert reasons["bf16"] == ""


@pytest.mark.frameworks
def test_copies_of_what_torch_reads_do_not_share_memory(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = DecodeTorch()
    tokens = decode.Tokens(torch, DECODE[0])
    seen: list[int] = []
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, **_: seen.append(k.data_ptr()) or q
    )  # type: ignore[func-returns-value]
    for step in [decode._torch_step(torch, tokens, "fa2") for _ in range(2)]:
        step()
    assert len({*seen, tokens.k.data_ptr()}) == 3


def test_bytes_that_leave_nothing_in_l2() -> None:
    class Device:
        L2_cache_size = 1 << 30

    torch: Any = CpuTorch()
    assert cold_bytes(torch) == 512 << 20
    torch.cuda = type("Cuda", (), {"get_device_properties": lambda _: Device, "current_device": lambda: 0})
    assert cold_bytes(torch) == 4 << 30


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench --sustained zero", "'--sustained': expected a number of seconds from 0.1 to 60, received 'zero'"),
        ("bench --sustained 0", "received '0'"),
        ("bench --sustained decode", "received 'decode'"),
        ("bench decode --sustained nan", "received 'nan'"),
        ("bench --sustained --iters 5", "'--iters': expected to be used without --sustained"),
        ("bench host --sustained", "'--sustained': expected to be left out: 'bench host'"),
        ("bench --iters 0", "'--iters': expected an integer >= 1, received 0"),
    ],
)
def test_options_that_do_not_fit(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    assert words in capsys.readouterr().err


def test_doubts_stand_below_the_table() -> None:
    shape = FORWARD[0]
    report = Report(
        "fa2", {}, 100.0, 1.0,
        (
            Measurement(shape, "omniattn", SustainedTiming((2.0, 2.0), drift=-0.05, host_limited=True)),
            Measurement(shape, "fa2", SustainedTiming((3.0, 3.0))),
        ),
        sustained_s=1.0,
    )  # fmt: skip
    assert report.doubts() == [
        "omniattn, d32 b1 h2 s48 full: the clock had not settled (-5.0 % within the timed part): give more seconds",
        "omniattn, d32 b1 h2 s48 full: the device was waiting for the host at times",
    ]
