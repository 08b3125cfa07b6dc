"""The guard of the GPU record: what it lets pass, what it does not, and what a run writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from build_tools import record

from .conftest import inner_pytest

ROOT = Path(__file__).resolve().parents[2]


#: The way of a call, from the public function to the driver, and what it reads.
STAIR = (
    "ops", "checks", "problems", "select", "plan", "launch", "runtime", "registry", "kv", "arrays", "frameworks",
    "compat", "integrations", "distributed",
)  # fmt: skip
CODE = {
    ".py": '"""What it is for."""\n\n\ndef f():\n    """What it gives."""\n    return "one"  # why\n',
    ".cu": '/* What it is for. */\n#define N 1  // why\nextern "C" void k() { asm("one"); }\n',
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    rooms = [f"src/omniattn/{room}/k.py" for room in (*STAIR, *record.UNWATCHED) if "." not in room]
    names = ("kernels_cu/entry/k.cu", "src/omniattn/__init__.py", "src/omniattn/version.py", "tests/gpu/test_k.py")
    for name in (*names, *rooms):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(CODE[Path(name).suffix], encoding="utf-8")
    return tmp_path


def write_record(checkout: Path, **changes: Any) -> None:
    data: dict[str, Any] = {
        "format": 1,
        "digest": record.digest(checkout),
        "complete": True,
        "device": [{"name": "NVIDIA H200", "compute_capability": "9.0"}],
        "tests": {"a": ["passed", 0.1], f"{record.MAY_SKIP[0]}::b": ["skipped", 0.0]},
    }
    (checkout / record.RECORD).write_text(record.render({**data, **changes}), encoding="utf-8")


def test_a_good_record_passes(checkout: Path) -> None:
    write_record(checkout)
    verdict = record.check(checkout)
    assert verdict.ok, verdict.text
    assert not verdict.warning


def test_what_did_not_pass_is_named(checkout: Path) -> None:
    skipped = f"{record.MAY_SKIP[0]}::one[x]"
    tests = {"a": ["passed", 0.1], skipped: ["skipped", 0.0]}
    write_record(checkout, tests=tests)
    verdict = record.check(checkout)
    assert verdict.ok, verdict.text
    assert verdict.text.endswith("1 passed, 1 skipped (test_several_gpus.py)")
    for outcome in ("xfailed", "xpassed", "failed", "error"):
        write_record(checkout, tests={**tests, "d": [outcome, 0.1]})
        assert not record.check(checkout).ok
    write_record(checkout, tests={**tests, "tests/gpu/test_b.py::two": ["skipped", 0.0]})
    verdict = record.check(checkout)
    assert not verdict.ok
    assert "1 skipped test(s) that one GPU can run, first tests/gpu/test_b.py::two" in verdict.text


def test_a_missing_record_fails_and_says_what_to_do(checkout: Path) -> None:
    verdict = record.check(checkout)
    assert not verdict.ok
    assert "does not exist" in verdict.text
    assert "pytest -m gpu" in verdict.text
    assert record.digest(checkout) in verdict.text


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["kernels_cu/entry/k.cu", "src/omniattn/__init__.py", *(f"src/omniattn/{room}/k.py" for room in STAIR)]
)
def test_a_change_of_what_is_watched_makes_it_stale(checkout: Path, name: str) -> None:
    """A string, of which nothing but the meaning is known: it may be an option or PTX."""
    write_record(checkout)
    edit(checkout / name, '"one"', '"two"')
    verdict = record.check(checkout)
    assert not verdict.ok
    assert "of other code" in verdict.text


def test_new_removed_and_renamed_files_make_it_stale(checkout: Path) -> None:
    before = record.digest(checkout)
    added = checkout / "kernels_cu/ptx/new.cuh"
    added.parent.mkdir()
    added.write_text("", encoding="utf-8")
    with_new = record.digest(checkout)
    added.rename(added.with_name("other.cuh"))
    renamed = record.digest(checkout)
    assert len({before, with_new, renamed}) == 3


@pytest.mark.parametrize("name", [n if "." in n else f"{n}/k.py" for n in record.UNWATCHED])
def test_what_measures_and_shows_does_not_matter(checkout: Path, name: str) -> None:
    write_record(checkout)
    edit(checkout / "src/omniattn" / name, '"one"', '"two"')
    assert record.check(checkout).ok


@pytest.mark.parametrize("name", ["kernels_cu/entry/k.cu", "src/omniattn/plan/k.py"])
def test_comments_docstrings_and_layout_do_not_matter(checkout: Path, name: str) -> None:
    write_record(checkout)
    for old, new in (("What it is for", "Something else"), ("why", "because"), ("\n\n\n", "\n\n"), (") {", ")\n\n{")):
        if old in (checkout / name).read_text(encoding="utf-8"):
            edit(checkout / name, old, new)
    if name.endswith(".py"):
        edit(checkout / name, '"""What it gives."""', "pass")
        assert not record.check(checkout).ok, "a statement in place of the docstring is code"
        edit(checkout / name, "pass", '"""Another."""\n    # A comment.')
    assert record.check(checkout).ok


def test_every_module_of_this_package_is_watched_but_tools_and_oracle() -> None:
    """Named one by one where the record was once blind, by the folder for the rest."""
    package = ROOT / "src/omniattn"
    seen = {path.relative_to(package).as_posix() for path in record.watched(ROOT) if path.is_relative_to(package)}
    modules = {path.relative_to(package).as_posix() for path in package.glob("**/*.py")}
    left_out = {name.partition("/")[0] for name in modules - seen}
    assert left_out == {"cli", "bench", "tune", "testing", "reference", "version.py"}
    for room in ("ops", "checks", "problems", "select", "plan", "launch", "runtime", "registry", "kv", "arrays"):
        inside = {name for name in modules if name.startswith(f"{room}/")}
        assert len(inside) > 1, f"{room}/ is empty"
        assert inside <= seen
    sources = {path for pattern in ("**/*.cu", "**/*.cuh") for path in (ROOT / "kernels_cu").glob(pattern)}
    assert sources <= set(record.watched(ROOT))


def test_tests_documents_and_line_ends_do_not_matter(checkout: Path) -> None:
    before = record.digest(checkout)
    (checkout / "tests/gpu/test_k.py").write_text("changed", encoding="utf-8")
    (checkout / "kernels_cu/README.md").write_text("changed", encoding="utf-8")
    source = checkout / "kernels_cu/entry/k.cu"
    source.write_bytes(source.read_bytes().replace(b"\n", b"\r\n"))
    assert record.digest(checkout) == before


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tests": {"a": ["passed", 0.1], "b": ["failed", 0.1]}}, "1 failed test(s), first b"),
        ({"tests": {"a": ["passed", 0.1], "b": ["error", 0.1]}}, "1 failed test(s), first b"),
        ({"tests": {"a": ["skipped", 0.1]}}, "no passed test"),
        ({"tests": {}}, "no passed test"),
        ({"complete": False}, "partial run"),
        ({"device": []}, "names no device"),
        ({"format": 99}, "another format"),
    ],
)
def test_a_record_that_vouches_for_nothing_fails(checkout: Path, changes: dict[str, Any], complaint: str) -> None:
    write_record(checkout, **changes)
    verdict = record.check(checkout)
    assert not verdict.ok
    assert complaint in verdict.text


def test_a_damaged_record_fails(checkout: Path) -> None:
    (checkout / record.RECORD).write_text('{"format": 1,', encoding="utf-8")
    verdict = record.check(checkout)
    assert not verdict.ok
    assert "not JSON" in verdict.text


def test_unverified_needs_this_digest_and_a_reason(checkout: Path) -> None:
    excuse = checkout / record.UNVERIFIED
    for line in ("0" * 64 + " no GPU was free", record.digest(checkout), record.digest(checkout) + "  "):
        excuse.write_text(line + "\n", encoding="utf-8")
        assert not record.check(checkout).ok, line
    excuse.write_text(f"# comment\n{record.digest(checkout)} no GPU was free\n", encoding="utf-8")
    verdict = record.check(checkout)
    assert verdict.ok
    assert verdict.warning
    assert "NOT VERIFIED" in verdict.text
    assert "no GPU was free" in verdict.text


def test_unverified_beside_a_good_record_is_pointed_out(checkout: Path) -> None:
    write_record(checkout)
    (checkout / record.UNVERIFIED).write_text("old\n", encoding="utf-8")
    verdict = record.check(checkout)
    assert verdict.ok
    assert verdict.warning
    assert "remove it" in verdict.text


def test_tests_that_ran_again_replace_what_did_not_pass(checkout: Path) -> None:
    write_record(checkout, tests={"a::x": ["passed", 1.0], "a::y": ["failed", 1.0], "a::z": ["error", 1.0]})
    path = checkout / record.RECORD
    whole = json.loads(path.read_text(encoding="utf-8"))
    part = {**whole, "complete": False, "date": "later", "tests": {"a::x": ["failed", 2.0], "a::y": ["passed", 2.0]}}
    made = record.run_again(whole, part, "the bound was too small")
    assert made["tests"] == {"a::x": ["passed", 1.0], "a::y": ["passed", 2.0], "a::z": ["error", 1.0]}
    (entry,) = made["again"]
    assert (entry["before"], entry["date"], entry["reason"]) == ({"a::y": "failed"}, "later", "the bound was too small")
    assert made["summary"] == {"passed": 2, "error": 1}
    path.write_text(record.render(made), encoding="utf-8")
    assert "holds 1 failed test(s), first a::z" in record.check(checkout).text
    last = {**part, "tests": {"a::z": ["passed", 3.0]}}
    path.write_text(record.render(record.run_again(made, last, "as y")), encoding="utf-8")
    verdict = record.check(checkout)
    assert verdict.ok
    assert "3 passed (2 of them when they ran again)" in verdict.text


@pytest.mark.parametrize(
    ("changes", "reason", "complaint"),
    [
        ({"digest": "other"}, "why", "of other code"),
        ({"tests": {"a::x": ["passed", 1.0]}}, "why", "none of the tests"),
        ({"tests": {"a::y": ["skipped", 1.0]}}, "why", "none of the tests"),
        ({"tests": {"a::y": ["failed", 1.0]}}, "why", "none of the tests"),
        ({}, " ", "without a reason"),
    ],
)
def test_what_ran_again_has_to_fit(checkout: Path, changes: dict[str, Any], reason: str, complaint: str) -> None:
    write_record(checkout, tests={"a::x": ["passed", 1.0], "a::y": ["failed", 1.0]})
    whole = json.loads((checkout / record.RECORD).read_text(encoding="utf-8"))
    part = {**whole, "tests": {"a::y": ["passed", 1.0]}, **changes}
    with pytest.raises(ValueError, match=complaint):
        record.run_again(whole, part, reason)


# A run inside a run: the plugin is tested on a suite of its own, with its root set there.
CONFTEST = """
from pathlib import Path
from build_tools.record import Recorder
def pytest_addoption(parser):
    parser.addoption("--record-out", type=Path)
def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: test")
    config.pluginmanager.register(Recorder(config, config.getoption("--record-out"), Path(__file__).parents[1]))
"""
SUITE = """
import pytest
@pytest.mark.gpu
def test_good(): pass
@pytest.mark.gpu
def test_other(): assert not OTHER_FAILS
@pytest.mark.gpu
def test_skipped(): pytest.skip("no JAX")
def test_cpu(): pass
"""


def run_suite(
    checkout: Path, *arguments: str, other_fails: bool = False, more: str = ""
) -> tuple[dict[str, Any] | None, str]:
    (checkout / "tests/conftest.py").write_text(CONFTEST, encoding="utf-8")
    (checkout / "tests/gpu/test_k.py").write_text(f"OTHER_FAILS = {other_fails}\n{SUITE}{more}", encoding="utf-8")
    (checkout / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n", encoding="utf-8")
    shown = inner_pytest(checkout, *arguments).stdout
    path = checkout / record.RECORD
    return (json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None), shown


@pytest.mark.parametrize("arguments", [(), ("tests",), ("tests/gpu",), ("-n", "2", "--dist", "loadfile")], ids=str)
def test_a_complete_run_writes_the_record(checkout: Path, arguments: tuple[str, ...]) -> None:
    data, shown = run_suite(checkout, "-m", "gpu", *arguments)
    assert data is not None, shown
    assert data["complete"] is True
    assert data["digest"] == record.digest(checkout)
    assert data["summary"] == {"passed": 2, "skipped": 1}
    assert {name.split("::")[1]: outcome for name, (outcome, _) in data["tests"].items()} == {
        "test_good": "passed",
        "test_other": "passed",
        "test_skipped": "skipped",
    }
    assert data["versions"]["python"]
    assert "GPU record: wrote" in shown


def test_a_failure_is_recorded_and_then_fails_the_check(checkout: Path) -> None:
    data, shown = run_suite(checkout, "-m", "gpu", other_fails=True)
    assert data is not None, shown
    assert data["summary"] == {"passed": 1, "failed": 1, "skipped": 1}
    # Without nvidia-smi the device is unknown, which is a complaint of its own.
    write_record(checkout, tests=data["tests"])
    assert "failed test(s)" in record.check(checkout).text


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "gpu", "-k", "good"),
        ("-m", "gpu", "tests/gpu/test_k.py"),
        ("-m", "gpu", "tests/gpu/test_k.py::test_good"),
        ("-m", "gpu", "--deselect", "tests/gpu/test_k.py::test_other"),
        ("-m", "gpu and not slow"),
        ("-m", "gpu", "-x"),
        ("-m", "gpu", "-n", "2", "-k", "good"),
        ("-m", "gpu", "--collect-only"),
        (),
    ],
)
def test_a_partial_run_writes_no_record(checkout: Path, arguments: tuple[str, ...]) -> None:
    data, shown = run_suite(checkout, *arguments, other_fails="-x" in arguments)
    assert data is None, shown


def test_record_out_takes_partial_runs_too(checkout: Path) -> None:
    out = checkout / "out/partial.json"
    data, shown = run_suite(checkout, "-m", "gpu", "-k", "good", "--record-out", str(out))
    assert data is None
    partial = json.loads(out.read_text(encoding="utf-8"))
    assert partial["complete"] is False
    assert next(iter(partial["tests"].values()))[0] == "passed"
    assert "partial run: option keyword='good'" in shown


def test_plain_runs_leave_gpu_tests_out(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/conftest.py").write_text(
        (ROOT / "tests/conftest.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / "tests/test_k.py").write_text(SUITE.replace("OTHER_FAILS", "True"), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nmarkers = gpu: test\n", encoding="utf-8")
    # Those of the folder are not even imported.
    (tmp_path / "tests/gpu").mkdir()
    (tmp_path / "tests/gpu/test_l.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    shown = inner_pytest(tmp_path).stdout
    assert "1 passed, 3 deselected in" in shown
    for named in (["tests/gpu/test_l.py"], ["-m", "gpu"]):
        assert "RuntimeError: imported" in inner_pytest(tmp_path, *named).stdout


EXPECTED_TO_FAIL = """
@pytest.mark.gpu
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a goal")
def test_goal(): {body}
"""


@pytest.mark.parametrize(
    ("body", "outcome"), [("assert False", "xfailed"), ("pass", "failed"), ("raise OSError", "failed")], ids=str
)
def test_an_expected_failure_has_not_passed(checkout: Path, body: str, outcome: str) -> None:
    """Whatever is expected of it: a record vouches for code that did what its tests ask for."""
    data, shown = run_suite(checkout, "-m", "gpu", more=EXPECTED_TO_FAIL.format(body=body))
    assert data is not None, shown
    assert data["tests"]["tests/gpu/test_k.py::test_goal"][0] == outcome
    ran = {name: found for name, found in data["tests"].items() if found[0] != "skipped"}
    write_record(checkout, tests=ran)  # as if there had been a GPU
    assert not record.check(checkout).ok


def test_a_test_whose_end_nobody_heard_of_has_not_passed(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    recorder = record.Recorder(None, None, tmp_path)
    recorder.pytest_runtest_logreport(SimpleNamespace(nodeid="a", when="setup", outcome="passed", duration=0.1))
    assert recorder.record(complete=True)["tests"] == {"a": ["error", 0.1]}
