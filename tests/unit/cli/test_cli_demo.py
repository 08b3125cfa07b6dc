"""``omniattn demo`` and ``omniattn verify --cpu`` on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import omniattn
from omniattn.cli import console, demo, main
from omniattn.data import load_activations
from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.problems import Pages, Target
from omniattn.problems.score_mod import BlockMaskProblem
from omniattn.reference import low_precision
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.registry import REGISTRY
from omniattn.select import choices
from omniattn.testing.cases import CASES, Case, call, cases_for, operation_of, own_head_dim_v, problem
from omniattn.testing.expected import outputs_of
from omniattn.testing.frameworks import NumpyFramework


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel workers of pytest have 80 columns, in which a table's words break."""
    monkeypatch.setenv("COLUMNS", "160")


def test_demo_json_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "demo.png"
    assert main(["demo", "--device", "cpu", "--repeats", "1", "--json", "--plot", str(plot)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["device"] == "CPU"
    layers = [sample.name for sample in load_activations()]
    assert list(dict.fromkeys(row["layer"] for row in data["rows"])) == [layers[0], layers[-1]]
    assert {row["precision"] for row in data["rows"]} == set(omniattn.PRECISIONS)
    assert data["note"] == ""
    # docs/precision.md has what the formats cost on these very activations.
    limits = {"int8": (0.04, 0.999), "int4": (0.22, 0.97), "fp8": (0.08, 0.996)}
    for row in data["rows"]:
        exact = (1e-5 if row["dtype"] == "float32" else 2e-3, 1 - 1e-5)
        relative_l1, cosine = limits.get(row["precision"], exact)
        assert 0 < row["relative_l1"] < relative_l1
        assert row["cosine"] > cosine
        assert row["milliseconds"] > 0
        assert row["kernel"]
    content = plot.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_demo_leaves_out_precisions_without_a_kernel_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU that has no kernel for them."""
    explain = omniattn.explain

    def refuse(*arrays: object, precision: str, **options: object) -> omniattn.Explanation:
        if precision != "exact":
            raise UnsupportedError(f"no attention kernel serves {precision}", instead="precision='exact'")
        return explain(*arrays, precision=precision, **options)

    monkeypatch.setattr(omniattn, "explain", refuse)
    assert main(["demo", "--device", "cpu", "--repeats", "1", "--layers", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["precision"] for row in data["rows"]} == {"exact"}
    for precision in ("int8", "int4"):
        assert f"without {precision}: no attention kernel serves {precision}" in data["note"]


def test_demo_table_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--repeats", "1", "--layers", "1"]) == 0
    output = capsys.readouterr().out
    assert "relative L1" in output
    assert "SmolLM2 layer 0 " in output
    assert "1 of 4 recorded layers; all of them: --layers 4." in output


def test_demo_spreads_layers_over_the_model() -> None:
    recorded = load_activations()
    assert [[s.layer for s in demo.spread(recorded, count)] for count in range(1, 5)] == [
        [0], [0, 29], [0, 19, 29], [0, 11, 19, 29],
    ]  # fmt: skip


class Gpu(NumpyFramework):
    """Stands in for a GPU."""

    name, device = "torch", "NVIDIA Test"

    def array(self, values: np.ndarray, dtype: str) -> np.ndarray:
        return super().array(values, dtype.replace("bfloat16", "float32"))


@pytest.mark.parametrize(
    ("gpu", "options", "layers"),
    [
        (True, [], [0, 11, 19, 29]), (True, ["--layers", "2"], [0, 29]), (False, [], [0, 29]),
        (False, ["--layers", "4"], [0, 11, 19, 29]),
    ],
)  # fmt: skip
def test_demo_runs_all_layers_on_a_gpu(
    gpu: bool, options: list[str], layers: list[int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    ran: list[int] = []
    monkeypatch.setattr(demo, "choose_framework", lambda device: (Gpu() if gpu else NumpyFramework(), ""))
    monkeypatch.setattr(demo, "run_samples", lambda _, samples, *__: ran.extend(s.layer for s in samples) or [])
    assert main(["demo", *options]) == 0
    assert ran == layers
    assert ("all of them: --layers 4" in capsys.readouterr().out) == (len(layers) < 4)


def demo_rows(errors: dict[str, float], layers: int = 2) -> list[demo.Row]:
    """Each precision in each layer, the second one twice as wrong and twice as slow."""
    return [
        demo.Row(f"layer {layer}", name, "bfloat16", "k", 1.0, error * (layer + 1), 0.0, 0.0, 0.5 * i * (layer + 1))
        for layer in range(layers)
        for i, (name, error) in enumerate(errors.items(), 1)
    ]


def bars_of(output: str) -> dict[str, tuple[str, str, str, str]]:
    """Bars and numbers of the picture by the name of their row."""
    found = re.findall(r"^(\w+, \w+) +([█▉-▏#]+) (\S+) +([█▉-▏#]+) (\S+) ms *$", output, re.MULTILINE)
    return {name: (error, number, time, ms) for name, error, number, time, ms in found}


@pytest.mark.parametrize("gpu", [True, False])
def test_demo_draws_bars_on_a_gpu_alone(
    gpu: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = demo_rows({"exact": 0.001, "int8": 0.01, "fp8": 0.1})
    monkeypatch.setattr(demo, "choose_framework", lambda device: (Gpu() if gpu else NumpyFramework(), ""))
    monkeypatch.setattr(demo, "run_samples", lambda *_: rows)
    assert main(["demo", "--layers", "2"]) == 0
    output = capsys.readouterr().out
    assert "relative L1" in output  # the table
    bars = bars_of(output)
    if not gpu:
        assert bars == {}
        return
    # Means of 1 and 2 times the error and the time. Logarithmic: 1, 2 and 3 decades above a tenth of the least error.
    assert {name: (error, ms) for name, (_, error, _, ms) in bars.items()} == {
        "exact, bfloat16": ("1.5e-03", "0.750"), "int8, bfloat16": ("1.5e-02", "1.500"),
        "fp8, bfloat16": ("1.5e-01", "2.250"),
    }  # fmt: skip
    assert [len(bar) for bar, *_ in bars.values()] == [12, 24, 36]
    assert [len(bar) for _, _, bar, _ in bars.values()] == [12, 24, 36]
    assert "Mean of 2 layers" in output
    assert main(["demo", "--layers", "2", "--json"]) == 0
    json.loads(capsys.readouterr().out)  # nothing besides


def test_demo_bars_of_real_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "choose_framework", lambda device: (Gpu(), ""))
    assert main(["demo", "--layers", "1", "--repeats", "1"]) == 0
    bars = bars_of(capsys.readouterr().out)
    assert list(bars) == [f"{name}, {dtype}" for dtype in ("bfloat16", "float16") for name in omniattn.PRECISIONS]
    exact, int8, int4 = (len(bars[f"{name}, bfloat16"][0]) for name in ("exact", "int8", "int4"))
    assert exact < int8 < int4


@pytest.mark.parametrize("columns", [60, 80, 100, 300])
def test_demo_bars_fit_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    demo.show_bars(demo_rows({"exact": 0.0, "int8": 0.01}), 2)
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= columns
    assert "…" not in output
    # Without any error there is the shortest bar.
    assert bars_of(output)["exact, bfloat16"][:2] == ("▏", "0.0e+00")
    assert len(bars_of(output)["int8, bfloat16"][2]) == min(36, (columns - 17) // 2 - 14)


def test_bars_of_text() -> None:
    assert [console.bar(share, 4) for share in (0.0, 0.25, 0.3125, 1.0, 7.0)] == ["▏", "█", "█▎", "████", "████"]
    assert [console.bar(share, 4, blocks=False) for share in (0.0, 0.5, 1.0)] == ["#", "##", "####"]


def test_bars_without_block_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(buffer, encoding="ascii", write_through=True))
    demo.show_bars(demo_rows({"exact": 0.001, "int8": 0.01}), 2)
    assert [len(bar) for bar, *_ in bars_of(buffer.getvalue().decode("ascii")).values()] == [18, 36]


class OneThread(NumpyFramework):
    """Says in which process it ran, and with how many threads."""

    def synchronize(self) -> None:
        raise RuntimeError(f"{os.getpid()} {os.environ['OPENBLAS_NUM_THREADS']}")


def test_demo_on_the_cpu_runs_in_processes_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    with pytest.raises(RuntimeError) as raised, console.progress(1, enabled=False) as bar:
        demo.run_samples(OneThread(), load_activations()[:1], ("float32",), ("exact",), 1, bar)
    process, threads = str(raised.value).split()
    assert int(process) != os.getpid()
    assert threads == "1"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "2"


def test_demo_on_a_gpu_runs_in_this_process() -> None:
    with console.progress(1, enabled=False) as bar:
        rows = demo.run_samples(Gpu(), load_activations()[:1], ("bfloat16",), ("exact",), 1, bar)
    assert [(row.layer, row.precision, row.dtype) for row in rows] == [("SmolLM2 layer 0", "exact", "bfloat16")]


@pytest.mark.parametrize(
    ("words", "argument"),
    [
        (["verify", "--cpu", "--kernel", "attn_fwd_sm80_bf16_d64"], "--kernel"),
        (["info", "--markdown", "--json"], "--json"),
        (["bench", "--markdown", "--json"], "--json"),
    ],
    ids=str,
)
def test_options_that_exclude_each_other(words: list[str], argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert argument in shown.err
    assert shown.out == ""


def test_verify_cpu_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    assert [row["kernel"] for row in data["kernels"]] == [
        f"{op}, NumPy {dtype}"
        for op in ("attention", "quantized_attention", "merge_states")
        for dtype in ("float16", "float32")
    ]
    assert all(row["status"] == "passed" and row["worst"] <= 1 for row in data["kernels"])


@pytest.mark.parametrize("wrong", ["nan", "mask", "lse"])
def test_verify_finds_wrong_results(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = omniattn.attention

    def attention(*arrays: object, **options: object) -> tuple[np.ndarray, np.ndarray]:
        if wrong == "mask":
            options = {**options, "mask": None, "causal": False}
        o, lse = right(*arrays, **options)
        if wrong == "nan":
            o[0, 0, 0, 0] = np.nan
        if wrong == "lse":
            lse = lse * np.float32(np.log2(np.e))
        return o, lse

    monkeypatch.setattr(omniattn, "attention", attention)
    assert main(["verify", "--cpu"]) == 1
    output = capsys.readouterr().out
    assert "FAILED" in output
    assert re.search(r"quantized_attention, NumPy float16 .*FAILED", output)
    assert {"nan": "NaN at different places", "mask": "causal", "lse": "lse: max abs"}[wrong] in output


#: Arrays of a case to kinds of masks.
MASKS = {"mask": "bool", "bias": "float32", "keys": "float32", "io": "io"}


def test_every_kernel_has_a_problem_that_it_takes() -> None:
    """Each row of attention, forced, against selection itself: none is verified with nothing."""
    target = Target((9, 0), 227 << 10)
    for spec in REGISTRY:
        if operation_of(spec) not in CASES:  # cases of their own
            continue
        cases = cases_for(operation_of(spec))
        assert cases
        if spec.op != "attention" or spec.value_factors:  # calls of their own
            continue
        taken = []
        for case in cases:
            own = own_head_dim_v(spec) or spec.head_dim
            described = omniattn.explain(*_arrays(case, spec.head_dim, own)).problem
            problem = dataclasses.replace(
                described,
                dtype=spec.dtype,
                precision=case.options["precision"].precision if spec.quantized else described.precision,
                varlen=case.packed,
                pages=Pages(16, 9999, 999, 999) if spec.paged and case.packed else None,
                tensor_maps=True,
                softcap=case.options.get("softcap", 0.0),
                mask=next((kind for name, kind in MASKS.items() if name in case.arrays), "none"),
                block_mask=BlockMaskProblem((2, 1), (0, 0, 16, 1)) if "blocks" in case.arrays else None,
                mask_map=True,
                strides=dataclasses.replace(
                    described.strides, mask=(0, 256, 16, 1) if {"bias", "io"} & set(case.arrays) else (0, 0, 0, 1)
                ),
                lse=spec.lse,
            )
            with contextlib.suppress(ArgumentError):
                choices(problem, target, spec.name)
                taken.append(case.name)
        assert len(taken) >= 1, spec.name
        if spec.quantized and spec.qk != "fp8":  # e4m3 has no delta_s
            assert spec.smooth_q == "never" or any("smooth" in name or "int4" in name for name in taken)


def _arrays(case: Case, head_dim: int, head_dim_v: int) -> tuple[np.ndarray, ...]:
    q, v = (np.zeros((1, 4, case.heads_q, n - case.below), np.float32) for n in (head_dim, head_dim_v))
    return q, q, v


QUANTIZERS = [
    (op, case, dtype)
    for op in ("quantize", "quantize_delta")
    for case in cases_for(op)
    for dtype in ("float16", "float32")
]


@pytest.mark.parametrize(("op", "case", "dtype"), QUANTIZERS, ids=lambda x: x.name if isinstance(x, Case) else x)
def test_verify_of_quantizers_finds_every_wrong_output(op: str, case: Case, dtype: str) -> None:
    numbers = problem(case, op, dtype, 64)
    framework = NumpyFramework()
    result = call(getattr(omniattn, case.function), numbers, framework.array, dtype)
    right = {name: np.array(array) for name, array in outputs_of(result).items()}
    assert all(grade.ok for grade in numbers.expected.grade(right, dtype, 1e-3))
    for name, array in right.items():
        wrong = {**right, name: array + 1 if array.dtype.kind == "f" else array ^ 0x41}
        assert not all(grade.ok for grade in numbers.expected.grade(wrong, dtype, 1e-3)), name
        missing = {other: x for other, x in right.items() if other != name}
        assert not all(grade.ok for grade in numbers.expected.grade(missing, dtype, 1e-3)), name
        short = {**right, name: array[..., :-1]}
        assert not all(grade.ok for grade in numbers.expected.grade(short, dtype, 1e-3)), name


@pytest.mark.parametrize("case", cases_for("quantized_attention"), ids=lambda case: case.name)
def test_verify_of_low_precision_has_room_for_rounding_and_none_for_faults(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels round P against a base that is a power of two, the emulation against the row's maximum."""
    numbers = problem(case, "quantized_attention", "float16", 64)
    framework = NumpyFramework()
    rng = np.random.default_rng(0)

    def accumulate(acc: np.ndarray, p: np.ndarray, v: np.ndarray, *_: object) -> np.ndarray:
        factor = (2 ** rng.uniform(3.75, 4.75, size=(len(p), 1))).astype(np.float32)
        return np.asarray(acc + decode_e4m3(encode_e4m3(p * factor)) / factor @ v)

    function = getattr(omniattn, case.function)
    with monkeypatch.context() as patch:
        patch.setattr(low_precision, "_accumulate", accumulate)
        o, lse = call(function, numbers, framework.array, "float16")
    grades = numbers.expected.grade({"o": o.astype(np.float32), "lse": lse}, "float16", 1e-3)
    assert all(grade.ok for grade in grades), grades
    o, lse = (x.astype(np.float32) for x in call(function, numbers, framework.array, "float16"))
    axis = -3 if case.layout == "NHD" else -2
    for fault, wrong in {
        "another row": {"o": np.roll(o, 1, axis=axis) if o.shape[axis] > 1 else np.roll(o, 1, axis=-2), "lse": lse},
        "scale": {"o": o * np.float32(1.1), "lse": lse},
        "base of the logarithm": {"o": o, "lse": lse * np.float32(np.log2(np.e))},
        "NaN": {"o": np.where(np.arange(o.shape[-1]) == 3, np.float32(np.nan), o), "lse": lse},
    }.items():
        assert not all(grade.ok for grade in numbers.expected.grade(wrong, "float16", 1e-3)), fault
    # Of kernels that make no LSE.
    for got, right in ((o, True), (o * np.float32(1.1), False)):
        (grade,) = numbers.expected.grade(outputs_of(got) if right else {"o": got}, "float16", 1e-3)
        assert (grade.name, grade.ok) == ("o", right)
