"""The command ``omniattn verify --soak``: counts, seeds, exit codes, and processes that hang or die."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import omniattn
from omniattn.cli import main, verify
from omniattn.testing.soak import outcome, watch
from omniattn.testing.soak.operations import problem
from omniattn.testing.soak.tally import Tally

pytest.importorskip("ml_dtypes")

SEED = 5


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes find this package, and programs go into a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    source = str(Path(omniattn.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), source]))


def fault(tmp_path: Path, code: str) -> None:
    """Have other processes run this when they start."""
    (tmp_path / "sitecustomize.py").write_text(f"import os, time, omniattn\n{code}\n")


def seed_of(text: str) -> int:
    found = re.search(r"^seed (\d+): ", text, re.MULTILINE)
    assert found
    return int(found[1])


def test_a_soak_counts_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--cpu", "--soak", "0.02", "--seed", str(SEED)]) == 0
    text = capsys.readouterr().out
    assert "NumPy" in text
    assert "worst error / tolerance" in text
    # In a pipe: a line at once, and one every half minute.
    assert re.search(r"^\d+:\d\d 1 problems, 0 failed, 0 refused: \w", text, re.MULTILINE)
    last = text.strip().splitlines()[-1]
    assert re.fullmatch(rf"seed {SEED}: \d+ problems in \d+ s, \d+ passed, 0 failed, \d+ refused", last)


def test_without_a_seed_there_is_another_one_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    seeds = set()
    for _ in range(2):
        assert main(["verify", "--cpu", "--soak", "0.0001"]) == 0
        seeds.add(seed_of(capsys.readouterr().out))
    assert len(seeds) == 2


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--cpu", "--soak", "0.01", "--seed", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["seed"], data["ok"], data["program"], data["failures"]) == (2, True, None, [])
    assert data["library"] == "numpy"
    count = sum(row["problems"] for row in data["counts"])
    assert count > 0
    first = problem(2, 0, cpu=True)
    assert any(row["operation"] == first.operation for row in data["counts"])


def test_some_operations(capsys: pytest.CaptureFixture[str]) -> None:
    """Problems of others are passed over; those that remain keep their numbers."""
    names = ["attention_backward", "merge_states"]
    command = ["verify", "--cpu", "--soak", "0.03", "--seed", "2", "--json"]
    assert main([*command, "--op", names[0], "--op", names[1]]) == 0
    counts = json.loads(capsys.readouterr().out)["counts"]
    assert counts
    assert {row["operation"] for row in counts} <= {*names}


@pytest.mark.parametrize("number", [0, 12])
def test_only_one(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--cpu", "--seed", str(SEED), "--only", str(number), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["counts"]
    one = problem(SEED, number, cpu=True)
    assert [(row["operation"], row["precision"], row["problems"]) for row in counts] == [
        (one.operation, one.precision, 1)
    ]


def seed_with(*operations: str) -> int:
    """A seed whose first problems are of these operations."""
    wanted = list(operations)
    return next(s for s in range(9999) if [problem(s, n, cpu=True).operation for n in range(len(wanted))] == wanted)


FIRST_OF_ATTENTION = next(n for n in range(99) if problem(SEED, n, cpu=True).operation == "attention")


def test_the_first_failure_is_a_program_that_fails(tmp_path: Path) -> None:
    fault(
        tmp_path,
        "right = omniattn.attention\n"
        "def wrong(*a, **o):\n"
        "    result = right(*a, **o)\n"
        "    for x in result if isinstance(result, tuple) else (result,): x[...] = float('nan')\n"
        "    return result\n"
        "omniattn.attention = wrong",
    )
    seed = seed_with("attention_varlen", "attention", "attention")
    result = watch.run(watch.Soak(600.0, seed, count=3, cpu=True, folder=tmp_path))
    assert [failure.number for failure in result.tally.failures] == [1, 2]
    assert result.tally.passed == 1
    path = tmp_path / f"omniattn_soak_{seed}_1.py"
    assert [path] == [result.program] == list(tmp_path.glob("omniattn_soak_*.py"))
    command = [sys.executable, str(path)]
    assert subprocess.run(command, capture_output=True).returncode == 1
    (tmp_path / "sitecustomize.py").write_text("")
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_a_failure_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault(tmp_path, "omniattn.attention = lambda *a, **o: 1 / 0")
    assert main(["verify", "--cpu", "--seed", str(SEED), "--only", str(FIRST_OF_ATTENTION)]) == 1
    text = capsys.readouterr().out
    assert f"FAILED, problem {FIRST_OF_ATTENTION}, attention, exact:" in text
    assert "raised ZeroDivisionError" in text
    assert f"the first failure as a program: {tmp_path}" in text.replace("\n", "")


def test_a_process_that_dies_is_a_failure_and_another_goes_on(tmp_path: Path) -> None:
    fault(tmp_path, "omniattn.attention = lambda *a, **o: os._exit(7)")
    seed = seed_with("attention", "merge_states")
    result = watch.run(watch.Soak(600.0, seed, count=2, cpu=True, folder=tmp_path))
    (failure,) = result.tally.failures
    assert "ended the process with exit code 7" in failure.text
    assert result.tally.passed == 1
    assert result.program is not None
    assert "ended the process" in result.program.read_text(encoding="utf-8")


def test_a_hang_ends_with_its_limit(tmp_path: Path) -> None:
    fault(tmp_path, "omniattn.attention = lambda *a, **o: time.sleep(600)")
    start = time.perf_counter()
    soak = watch.Soak(1.0, SEED, only=FIRST_OF_ATTENTION, cpu=True, hang=5.0, folder=tmp_path)
    result = watch.run(soak)
    assert time.perf_counter() - start < 500
    (failure,) = result.tally.failures
    assert failure.text.startswith("hangs: no result after ")
    assert failure.number == FIRST_OF_ATTENTION
    assert result.program is not None


def test_after_an_error_a_new_process_goes_on(tmp_path: Path) -> None:
    """A GPU may take no calls of a process any more whose kernel has failed."""
    fault(
        tmp_path,
        "broken = []\n"
        "right = omniattn.attention\n"
        "def wrong(*a, **o):\n"
        "    broken.append(1)\n"
        "    raise RuntimeError('illegal address')\n"
        "omniattn.attention = wrong\n"
        "merge = omniattn.attention_varlen\n"
        "def sick(*a, **o):\n"
        "    assert not broken, 'this process is broken'\n"
        "    return merge(*a, **o)\n"
        "omniattn.attention_varlen = sick",
    )
    seed = seed_with("attention", "attention_varlen")
    result = watch.run(watch.Soak(600.0, seed, count=2, cpu=True, folder=tmp_path))
    assert ["illegal address" in failure.text for failure in result.tally.failures] == [True]
    assert result.tally.passed == 1


def test_control_c_ends_a_soak_with_its_counts(tmp_path: Path) -> None:
    def interrupt(tally: Tally) -> None:
        if tally.total("problems") == 2:
            raise KeyboardInterrupt

    result = watch.run(watch.Soak(600.0, SEED, cpu=True, folder=tmp_path), interrupt)
    assert result.tally.total("problems") == 2


def test_no_gpu_is_exit_code_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["verify", "--soak", "0.01"]) == 2
    assert "no GPU can be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--soak", "0"], "--soak"),
        (["--soak", "nan"], "--soak"),
        (["--soak", "1", "--seed", "-1"], "--seed"),
        (["--only", "3"], "--only"),
        (["--only", "-3", "--seed", "1"], "--only"),
        (["--soak", "1", "--kernel", "x"], "--kernel"),
        (["--soak", "1", "--all"], "--all"),
        (["--soak", "1", "--jobs", "2"], "--jobs"),
        (["--seed", "1", "--cpu"], "--seed"),
        (["--framework", "torch"], "--framework"),
        (["--cpu", "--soak", "1", "--framework", "cupy"], "--framework"),
        (["--soak", "1", "--framework", "numpy"], "--framework"),
        (["--soak", "1", "--cpu", "--op", "attentions"], "--op"),
        (["--only", "1", "--seed", "1", "--cpu", "--op", "attention"], "--op"),
        (["--cpu", "--op", "attention"], "--op"),
    ],
    ids=" ".join,
)
def test_options_that_do_not_go_together(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert name in capsys.readouterr().err


def test_refusals_are_listed_by_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fault(tmp_path, "def refuse(*a, **o): raise omniattn.errors.UnsupportedError('no')\nomniattn.attention = refuse")
    # Where everything is refused nothing has passed.
    only = ["verify", "--cpu", "--seed", str(SEED), "--only", str(FIRST_OF_ATTENTION)]
    assert main(only) == 1
    text = capsys.readouterr().out
    assert "refused, 1: no" in text
    assert "0 passed, 0 failed, 1 refused" in text


def test_counts() -> None:
    tally = Tally()
    common: dict[str, Any] = {"operation": "decode", "precision": "int4", "seconds": 0.1, "raised": False}
    for number, (status, worst) in enumerate([("passed", 0.5), ("passed", 0.25), ("failed", 7.0), ("refused", 0.0)]):
        tally.add(outcome.Outcome(number=number, status=status, worst=worst, text=f"text {number}", **common))
    assert tally.rows() == [["decode", "int4", "4", "1", "1", "0.50"]]
    assert tally.passed == 2
    assert tally.reasons == {"text 3": 1}
    assert tally.line(75.0) == "1:15 4 problems, 1 failed, 1 refused: decode int4 4"
    assert [failure["number"] for failure in tally.as_json()["failures"]] == [2]


def test_on_a_terminal_one_line_is_rewritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    clock = iter([0.0, 0.1, 1.0])
    monkeypatch.setattr("omniattn.cli.verify.time.perf_counter", lambda: next(clock))
    shown = verify._Shown(enabled=True)
    for text in ("first, long", "too soon", "second"):
        shown.step(text)
    shown.end()
    out = capsys.readouterr().out
    assert out.startswith("\rfirst, long\rsecond     \r")
    assert "\n" not in out
