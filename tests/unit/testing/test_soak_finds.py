"""``omniattn verify --soak`` finds what is wrong: faults put into the library, in this process and in others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn
from omniattn.errors import ArgumentError, KernelNotFoundError, UnsupportedError
from omniattn.testing.soak import outcome, program
from omniattn.testing.soak.machines import Machine, NotHereError
from omniattn.testing.soak.operations import OPERATIONS, problem
from omniattn.testing.soak.problem import Problem

pytest.importorskip("ml_dtypes")

SEED = 1


def problems(operation: str, fits: Callable[[dict[str, Any]], bool] = lambda _: True) -> Iterator[Problem]:
    for number in range(10000):
        found = problem(SEED, number, cpu=True)
        if found.operation == operation and fits(found.facts):
            yield found


def first(operation: str, fits: Callable[[dict[str, Any]], bool] = lambda _: True) -> Problem:
    return next(problems(operation, fits))


def changed(
    name: str, monkeypatch: pytest.MonkeyPatch, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    monkeypatch.setattr(omniattn, name, change(getattr(omniattn, name)))


def _filled(facts: dict[str, Any]) -> bool:
    """Whether there are queries, keys and no option that makes a key count for nothing."""
    shapes = [facts["arrays"][name]["shape"] for name in "qk"]
    plain = not {"softmax_scale", "softcap"} & set(facts["options"])
    return all(0 not in shape for shape in shapes) and plain and "out" not in facts


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_right_passes(operation: str) -> None:
    found = outcome.run(Machine(), first(operation))
    assert (found.status, found.text) == (outcome.PASSED, "")
    assert found.worst <= 1.0


def _with_results(change: Callable[[list[np.ndarray[Any, Any]]], None]) -> Callable[[Any], Any]:
    """A function whose results are changed."""

    def wrap(function: Any) -> Any:
        def wrong(*arguments: Any, **options: Any) -> Any:
            results = function(*arguments, **options)
            found = results if isinstance(results, tuple) else (results,)
            change(list(found))
            return results

        return wrong

    return wrap


def _one_off(results: list[Any]) -> None:
    results[0][(-1,) * results[0].ndim] += 0.25


def _nan(results: list[Any]) -> None:
    results[0][(0,) * results[0].ndim] = np.nan


def _infinity(results: list[Any]) -> None:
    results[-1][(0,) * results[-1].ndim] = np.inf


def _lse_off(results: list[Any]) -> None:
    results[1][(-1,) * results[1].ndim] += 1e-3


def _larger(results: list[Any]) -> None:
    results[0][...] = 1.02 * results[0].astype(np.float64)


FAULTS: dict[str, tuple[str, str, Callable[[list[Any]], None], str]] = {
    "o, one element": ("attention", "attention", _one_off, "o: "),
    "o, NaN": ("attention", "attention", _nan, "o: "),
    "packed o, NaN": ("attention_varlen", "attention_varlen", _nan, "o: "),
    "lse": ("attention", "attention", _lse_off, "lse: "),
    "lse, infinity": ("attention_varlen", "attention_varlen", _infinity, "lse: "),
    "dq, 2 %": ("attention_backward", "attention_backward", _larger, "dq: "),
    "gradients, NaN": ("attention_varlen_backward", "attention_varlen_backward", _nan, "dq: "),
    "merged o": ("merge_states", "merge_states", _one_off, "o: "),
    "decoded o": ("caches", "decode", _one_off, "o: "),
    "decoded lse": ("caches", "decode", _lse_off, "lse: "),
    "e4m3 o, NaN": ("e4m3 arrays", "attention", _nan, "o: "),
    "low precision, LSE": ("low precision", "attention", _lse_off, "lse: "),
}


def _wants(fault: str) -> Callable[[dict[str, Any]], bool]:
    def fits(facts: dict[str, Any]) -> bool:
        arrays, options = facts["arrays"], facts["options"]
        if any(0 in arrays[name]["shape"] for name in arrays if name[0] in "qkvo"):
            return False
        if "lse" in fault.lower() and not (options.get("return_lse") or "lse_a" in arrays):
            return False
        if "mask" in arrays or (facts.get("packed") and "low" in fault + "e4m3" * ("e4m3" in fault)):
            return False
        if "decoded" in fault and 0 in facts["lengths"]:
            return False
        if "%" in fault and facts["dtype"] not in ("float32", "float64"):
            return False  # the tolerance of single elements in 16 bits is wider
        if "gradient" in fault or "dq" in fault:
            return "wanted" not in options and not facts["given"]
        return not facts.get("packed") or "packed" in fault or "infinity" in fault

    return fits


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_result_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation, function, change, text = FAULTS[fault]
    one = first(operation, _wants(fault))
    assert outcome.run(Machine(), one).status == outcome.PASSED
    changed(function, monkeypatch, _with_results(change))
    found = outcome.run(Machine(), one)
    assert found.status == outcome.FAILED
    assert not found.worst <= 1.0
    assert not found.raised
    assert any(line.startswith(text) for line in found.text.splitlines()), found.text
    assert "worst at" in found.text


def test_a_key_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last key of hundreds changes o by less than its rounding to 16 bits; the LSE shows it."""
    long = first(
        "attention",
        lambda f: _filled(f) and len(f["arrays"]) == 3 and f["arrays"]["k"]["shape"][1] > 100
        and f["options"].get("layout", "NHD") == "NHD" and f["options"].get("return_lse")
        and f["dtype"] == "bfloat16" and not f["options"].get("causal") and "window" not in f["options"]
        and f["arrays"]["k"]["scale"] <= 1 and "score_mod" not in f,
    )  # fmt: skip
    assert outcome.run(Machine(), long).status == outcome.PASSED
    changed("attention", monkeypatch, lambda f: lambda q, k, v, **o: f(q, k[:, :-1], v[:, :-1], **o))
    assert "lse: " in outcome.run(Machine(), long).text


def test_queries_of_another_sequence_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows that are one off."""
    one = first(
        "attention_with_kvcache",
        lambda f: f["packed"] and len(f["lengths"]) > 1 and f["queries"][0] % 2 and f["queries"][1] > 1
        and min(f["lengths"][:2]) > 9 and "out" not in f,
    )  # fmt: skip
    assert outcome.run(Machine(), one).status == outcome.PASSED

    def shifted(function: Any) -> Any:
        # Shifted, the longest sequence can have one query more.
        return lambda q, cache, *, cu_seqlens_q, max_seqlen_q, **o: function(
            q, cache, cu_seqlens_q=cu_seqlens_q // 2 * 2, max_seqlen_q=max_seqlen_q + 1, **o
        )

    changed("attention_with_kvcache", monkeypatch, shifted)
    assert "o: " in outcome.run(Machine(), one).text


def test_appended_bytes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    one = first(
        "caches",
        lambda f: f["cache"]["k_dtype"] == "int8" and min(f["lengths"]) > 0 and not {"rope", "pool"} & set(f),
    )

    calls: list[int] = []

    def flip(function: Any) -> Any:
        def wrong(cache: Any, *arguments: Any, **options: Any) -> None:
            function(cache, *arguments, **options)
            if not calls:
                cache.k[tuple(np.argwhere(cache.k != 0xFF)[0])] ^= 0x40
            calls.append(1)

        return wrong

    changed("append", monkeypatch, flip)
    assert "cache.k" in outcome.run(Machine(), one).text


def test_quantized_integers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    one = first("quantize", lambda f: f["counted"] == "int8" and 0 not in f["arrays"]["q"]["shape"])

    def shift(function: Any) -> Any:
        def wrong(*arguments: Any, **options: Any) -> Any:
            made = function(*arguments, **options)
            made.q_int[(0,) * made.q_int.ndim] ^= 2
            return made

        return wrong

    changed("quantize_qk", monkeypatch, shift)
    assert "q codes: " in outcome.run(Machine(), one).text


def test_a_write_outside_of_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = first(
        "attention",
        lambda f: isinstance(f.get("out"), dict) and f["out"].get("before") and 0 not in f["arrays"]["q"]["shape"],
    )

    def spill(function: Any) -> Any:
        def wrong(*arguments: Any, out: Any, **options: Any) -> Any:
            result = function(*arguments, out=out, **options)
            base = out
            while base.base is not None:
                base = base.base
            base.reshape(-1).view(np.uint8)[-1] = 0
            return result

        return wrong

    room = Machine().room(one.facts["arrays"]["q"]["shape"], one.dtype, one.facts["out"])
    assert room.base.size > room.array.size
    changed("attention", monkeypatch, spill)
    assert "written outside of out" in outcome.run(Machine(), one).text


def test_a_write_into_an_operand_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = first("attention", lambda f: _filled(f) and not f["arrays"]["k"]["view"])

    def scribble(function: Any) -> Any:
        def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
            result = function(q, k, v, **options)
            k[(0,) * k.ndim] += 1
            return result

        return wrong

    changed("attention", monkeypatch, scribble)
    assert "has written into k" in outcome.run(Machine(), one).text


def test_other_bits_in_a_repeated_call_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = first("attention", lambda f: _filled(f) and f["dtype"] == "float32")
    calls: list[int] = []

    def drift(function: Any) -> Any:
        def wrong(*arguments: Any, **options: Any) -> Any:
            calls.append(1)
            results = function(*arguments, **options)
            o = results[0] if isinstance(results, tuple) else results
            for _ in calls:
                o[...] = np.nextafter(o, np.float32(9))
            return results

        return wrong

    changed("attention", monkeypatch, drift)
    assert "other bits in a repeated call" in outcome.run(Machine(), one).text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnsupportedError("softcap", instead="none"), outcome.REFUSED),
        (KernelNotFoundError("k", "sm_80", [("disk", "none")], "install it"), outcome.REFUSED),
        (NotHereError("no bfloat16"), outcome.REFUSED),
        (ArgumentError("q", "that", "this"), outcome.FAILED),
        (ZeroDivisionError("x"), outcome.FAILED),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exception) else x,
)
def test_errors_are_failures_and_refusals_are_counted_apart(
    error: Exception, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(omniattn, "attention", fail)
    found = outcome.run(Machine(), first("attention"))
    assert found.status == status
    assert found.raised == (status == outcome.FAILED)
    assert found.text.startswith(
        {"UnsupportedError": "softcap", "NotHereError": "no bfloat16"}.get(type(error).__name__, "")
    )


def test_refusals_of_a_kind_have_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    one = first("low precision", lambda f: f["options"]["precision"] == ("Int8", {"granularity": "per_token"}))
    for dims in ("64", "216 and 256 of v"):
        what = f"no attention kernel serves int8 float16, head_dim {dims} on compute capability 9.0: it has {dims}; x"
        error = UnsupportedError(what, instead="another one")
        assert outcome._reason(error, one) == (
            "no attention kernel serves int8 float16 on compute capability 9.0 with granularity='per_token'"
        )


#: Put into other processes by the environment: adds to one element of every o of attention.
FAULTY = """\
import os
import omniattn

right = omniattn.attention

def wrong(*arguments, **options):
    results = right(*arguments, **options)
    o = results[0] if isinstance(results, tuple) else results
    if o.size:
        o[(0,) * o.ndim] += 0.25
    return results

omniattn.attention = wrong
"""


def environment(folder: Path, code: str) -> dict[str, str]:
    """Variables of a process that runs ``code`` when it starts, and finds this package."""
    (folder / "sitecustomize.py").write_text(code)
    source = str(Path(omniattn.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), source])}


def test_the_program_of_a_failure_reproduces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = first("attention", lambda f: _filled(f) and f["dtype"] == "float16" and f["arrays"]["q"]["view"])
    changed("attention", monkeypatch, _with_results(lambda x: x[0].__setitem__((0,) * x[0].ndim, x[0].flat[0] + 0.25)))
    found = outcome.run(Machine(), one)
    assert found.status == outcome.FAILED
    path = program.write(one, found.text, library="numpy", cpu=True, where="NumPy on CPU", folder=tmp_path)
    text = path.read_text(encoding="utf-8")
    assert found.text.splitlines()[0] in text
    assert f"--seed {SEED} --only {one.number} --cpu" in text

    def run(code: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(path)]
        return subprocess.run(command, env=environment(tmp_path, code), cwd=tmp_path, capture_output=True, text=True)

    bad = run(FAULTY)
    assert bad.returncode == 1, bad.stderr
    assert found.text.splitlines()[0] in bad.stdout
    good = run("")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "passed" in good.stdout


def test_a_program_is_a_program_for_every_operation(tmp_path: Path) -> None:
    for operation in OPERATIONS:
        one = first(operation)
        text = program.text_of(one, 'a \\ and """quotes"""', library="numpy", cpu=True, where="here")
        names: dict[str, Any] = {"__name__": "imported"}
        exec(compile(text, operation, "exec"), names)
        assert names["PROBLEM"] == one


def test_a_program_goes_elsewhere_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    missing = tmp_path / "missing"
    path = program.write(first("attention"), "x", library="numpy", cpu=True, where="here", folder=missing)
    assert path.parent == tmp_path
