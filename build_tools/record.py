"""The record of GPU test results, and the check that it is about this code: ``python -m build_tools.record --check``.

Hosted CI has no GPU. ``pytest -m gpu`` on a machine that has one writes ``tests/gpu/record.json`` with a digest of all
code that can change a kernel's result or its launch; CI recomputes the digest, so that no such change lands that has
not run on silicon.

Tests that did not pass because the tests were wrong need no second run of all others: ``pytest -m gpu --record-out
PART FILE ..`` runs them again on the same code, and ``python -m build_tools.record --again PART --why REASON`` puts
their outcomes into the record, which keeps what they were before, the reason, and the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .code_text import device_code, python_code

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path("tests/gpu/record.json")
UNVERIFIED = Path("tests/gpu/unverified.txt")
FORMAT = 1

#: Below src/omniattn, what cannot change a kernel's result or its launch: tools that measure and show, the NumPy
#: oracle; and the version, because a release of tested code is tested code.
UNWATCHED: tuple[str, ...] = ("cli", "bench", "tune", "testing", "reference", "version.py")

#: Files whose tests need more than the one GPU that writes a record, or the C module, which is optional: the record is
#: of runs without it. All others have to run.
MAY_SKIP: tuple[str, ...] = (
    "tests/gpu/test_several_gpus.py", "tests/gpu/test_native_gpu.py", "tests/gpu/test_native_jax_gpu.py",
)  # fmt: skip

_PACKAGES = ("omniattn", "numpy", "cuda-bindings", "torch", "cupy", "jax", "pytest")
_OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def watched(root: Path = ROOT) -> list[Path]:
    """Return the files that decide what a GPU computes: device code, the package but for `UNWATCHED`, and the numbers
    by which ways of running a call are chosen.
    """
    package = root / "src/omniattn"
    device = [path for pattern in ("**/*.cu", "**/*.cuh") for path in (root / "kernels_cu").glob(pattern)]
    host = [path for path in package.glob("**/*.py") if path.relative_to(package).parts[0] not in UNWATCHED]
    numbers = package.glob("select/coefficients/*.json")
    return sorted(path for path in (*device, *host, *numbers) if path.is_file())


def digest(root: Path = ROOT) -> str:
    """Return the sha256 over names and code of all watched files; comments, docstrings and layout do not count."""
    total = hashlib.sha256()
    for path in watched(root):
        text = path.read_text(encoding="utf-8")
        code = text if path.suffix == ".json" else (python_code if path.suffix == ".py" else device_code)(text)
        total.update(f"{path.relative_to(root).as_posix()}\0{hashlib.sha256(code.encode()).hexdigest()}\n".encode())
    return total.hexdigest()


@dataclass(frozen=True)
class Verdict:
    """Outcome of the check: ``ok`` decides, ``warning`` says that it passed on the strength of ``unverified.txt``."""

    ok: bool
    warning: bool
    text: str


def check(root: Path = ROOT) -> Verdict:
    """Judge the record below ``root`` against the code below ``root``."""
    now = digest(root)
    complaint = _complaint(root / RECORD, now)
    excuse = _excuse(root / UNVERIFIED, now)
    if complaint is None:
        text = f"{RECORD}: complete and of this code (digest {now[:12]}), {_outcomes(root / RECORD)}"
        if (root / UNVERIFIED).is_file():
            return Verdict(True, True, f"{text}. {UNVERIFIED} is out of date: remove it")
        return Verdict(True, False, text)
    if excuse is not None:
        return Verdict(
            True, True, f"NOT VERIFIED ON A GPU: {complaint}. Reason given: {excuse}. Clear it by running pytest -m gpu"
        )
    return Verdict(
        False,
        False,
        f"{complaint}. Run pytest -m gpu on a machine with a GPU and commit {RECORD}; where no GPU can be had, "
        f"write the line '{now} REASON' into {UNVERIFIED}",
    )


def _complaint(path: Path, now: str) -> str | None:
    """Say what is wrong with the record; None if it vouches for the code whose digest is ``now``."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{RECORD} does not exist"
    except ValueError as error:
        return f"{RECORD} is not JSON: {error}"
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return f"{RECORD} has another format than {FORMAT}"
    if record.get("digest") != now:
        return f"{RECORD} is of other code (its digest {str(record.get('digest'))[:12]}, this code's {now[:12]})"
    if record.get("complete") is not True:
        return f"{RECORD} is of a partial run"
    if not record.get("device"):
        return f"{RECORD} names no device"
    tests = record.get("tests")
    if not isinstance(tests, dict) or not any(outcome == "passed" for outcome, _ in tests.values()):
        return f"{RECORD} holds no passed test"
    bad = sorted(name for name, (outcome, _) in tests.items() if outcome not in ("passed", "skipped"))
    if bad:
        return f"{RECORD} holds {len(bad)} failed test(s), first {bad[0]}"
    missed = sorted(name for name, (outcome, _) in tests.items() if outcome == "skipped")
    news = [name for name in missed if name.partition("::")[0] not in MAY_SKIP]
    if news:
        return f"{RECORD} holds {len(news)} skipped test(s) that one GPU can run, first {news[0]}"
    return None


def _outcomes(path: Path) -> str:
    """Say of a good record what passed, and which files have skipped tests."""
    tests: dict[str, tuple[str, float]] = json.loads(path.read_text(encoding="utf-8"))["tests"]
    of: dict[str, list[str]] = {}
    for name, (outcome, _) in tests.items():
        of.setdefault(outcome, []).append(name)
    entries = json.loads(path.read_text(encoding="utf-8")).get("again", [])
    again = len({name for entry in entries for name in entry["before"]})
    parts = [f"{len(of['passed'])} passed" + (f" ({again} of them when they ran again)" if again else "")]
    if "skipped" in of:
        files = sorted({name.partition("::")[0].rpartition("/")[2] for name in of["skipped"]})
        parts.append(f"{len(of['skipped'])} skipped ({', '.join(files)})")
    return ", ".join(parts)


def _excuse(path: Path, now: str) -> str | None:
    """Return the reason that ``unverified.txt`` gives for the code whose digest is ``now``, if it gives one."""
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8").splitlines():
        named, _, reason = line.strip().partition(" ")
        if named == now and reason.strip():
            return reason.strip()
    return None


def machine() -> tuple[list[dict[str, str]], str]:
    """Return (GPUs, driver version) by ``nvidia-smi``, which needs no CUDA context; ([], "") where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [], ""
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.count(",") == 2]
    return [{"name": name, "compute_capability": cc} for name, cc, _ in rows], rows[0][2] if rows else ""


def tuning() -> str:
    """Return the digest of the file that ``OMNIATTN_TUNING`` names; empty without one."""
    path = Path(os.environ.get("OMNIATTN_TUNING", ""))
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of every package that a GPU test may meet, those that are installed."""
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    found = {"python": platform.python_version()}
    homes = packages_distributions()
    for package in _PACKAGES:
        # CuPy's distribution is cupy-cuda12x or cupy-cuda13x; its import name finds it.
        for name in (package, *homes.get(package, [])):
            try:
                found[package] = version(name)
                break
            except PackageNotFoundError:
                continue
    return found


def run_again(record: dict[str, Any], part: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Return ``record`` with what passed of ``part`` in place of what had neither passed nor been skipped.

    Raises
    ------
    ValueError
        ``part`` is of other code, or has passed none of those tests; the reason is empty.
    """
    if part.get("digest") != record.get("digest") or part.get("format") != FORMAT:
        raise ValueError(f"what ran again is of other code than {RECORD}, or has another format")
    if not reason.strip():
        raise ValueError("without a reason why the tests are to be believed now")
    tests: dict[str, list[Any]] = dict(record["tests"])
    before = {
        name: outcome
        for name, (outcome, _) in tests.items()
        if outcome not in ("passed", "skipped") and part["tests"].get(name, ("",))[0] == "passed"
    }
    if not before:
        raise ValueError("none of the tests that did not pass has passed when it ran again")
    tests.update({name: part["tests"][name] for name in before})
    entry = {
        "reason": reason.strip(),
        **{key: part[key] for key in ("date", "device", "driver", "tuning", "versions") if key in part},
        "before": before,
    }
    made = {**record, "summary": _summary(tests), "again": [*record.get("again", []), entry], "tests": tests}
    return {key: made[key] for key in (*(key for key in made if key != "tests"), "tests")}


def _summary(tests: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    """Return how many tests had each outcome that some had."""
    counts = {kind: sum(outcome == kind for outcome, _ in tests.values()) for kind in _OUTCOMES}
    return {kind: count for kind, count in counts.items() if count}


class Recorder:
    """pytest plugin: collects outcomes of a ``-m gpu`` run and writes the record at its end.

    Only a complete run becomes ``tests/gpu/record.json``: every GPU test, none left out by ``-k``, paths, ``-x`` or
    ``--lf``; processes of pytest-xdist may share them. ``out`` receives the results of any run, complete or not.
    """

    def __init__(self, config: Any, out: Path | None, root: Path = ROOT) -> None:
        self.config = config
        self.out = out
        self.root = root
        self.tests: dict[str, tuple[str, float]] = {}
        self.started = time.time()
        self.digest_at_start = digest(root)
        self.message = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst outcome of a test's phases, and their total time."""
        outcome = report.outcome
        if outcome == "failed" and report.when != "call":
            outcome = "error"
        elif hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        elif report.when != "call" and outcome == "passed":
            outcome = ""
        held, seconds = self.tests.get(report.nodeid, ("", 0.0))
        if outcome in ("failed", "error") or not held:
            held = outcome
        self.tests[report.nodeid] = (held, seconds + report.duration)

    def partial_because(self, session: Any, exitstatus: int) -> str:
        """Say why this run is not the complete one; empty if it is."""
        option = self.config.getoption
        if option("markexpr") != "gpu":
            return f"-m {option('markexpr')!r} instead of -m gpu"
        for flag in ("keyword", "deselect", "ignore", "ignore_glob", "lf", "last_failed_no_failures"):
            value = option(flag, None)
            if value and not (flag == "last_failed_no_failures" and value == "all"):
                return f"option {flag}={value!r} leaves tests out"
        whole = {self.root, self.root / "tests", self.root / "tests/gpu"}
        here = Path(str(self.config.invocation_params.dir))
        for argument in self.config.args:
            if "::" in argument or (here / argument).resolve() not in whole:
                return f"it ran {argument} only"
        if exitstatus not in (0, 1):
            return f"pytest ended with status {exitstatus}"
        if session.shouldstop or session.shouldfail or session.testscollected != len(self.tests):
            return f"it stopped after {len(self.tests)} of {session.testscollected} tests"
        if digest(self.root) != self.digest_at_start:
            return "the code changed while it ran"
        return ""

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        """Write the record, or say why not."""
        if option_set(self.config, "collectonly"):
            return
        reason = self.partial_because(session, int(exitstatus))
        record = self.record(complete=not reason)
        targets = [self.out] if self.out else []
        if not reason:
            targets.append(self.root / RECORD)
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(render(record), encoding="utf-8")
        written = ", ".join(str(target) for target in targets) or "nothing"
        self.message = f"GPU record: wrote {written}" + (f" (partial run: {reason})" if reason else "")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show where the record went."""
        if self.message:
            terminalreporter.write_line(self.message)

    def record(self, *, complete: bool) -> dict[str, Any]:
        """Return the record as JSON data."""
        gpus, driver = machine()
        tests = {
            # Without an outcome: the test began, and nobody heard of its end.
            name: [outcome or "error", round(seconds, 3)]
            for name, (outcome, seconds) in sorted(self.tests.items())
        }
        return {
            "format": FORMAT,
            # Of code that changed while it ran nothing can be said.
            "digest": self.digest_at_start if digest(self.root) == self.digest_at_start else "",
            "complete": complete,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "duration_s": round(time.time() - self.started, 1),
            "device": gpus,
            "driver": driver,
            "tuning": tuning(),
            "versions": versions(),
            "summary": _summary(tests),
            "tests": tests,
        }


def option_set(config: Any, name: str) -> bool:
    """Return whether a pytest option is there and true (plugins that define it may be missing)."""
    return bool(config.getoption(name, None))


def render(record: Mapping[str, Any]) -> str:
    """Return the record as JSON with one line a test, so that a diff of two records can be read."""
    head = {key: value for key, value in record.items() if key != "tests"}
    lines = [f"  {json.dumps(name)}: {json.dumps(result)}" for name, result in record["tests"].items()]
    text = json.dumps(head, indent=1)[: -len("\n}")]
    return text + ',\n "tests": {\n' + ",\n".join(lines) + ("\n" if lines else "") + " }\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: print the digest, or check the record."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.record", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="fail unless the record is of this code and without failures"
    )
    parser.add_argument("--again", metavar="PART", type=Path, help="put the outcomes of tests that ran again in")
    parser.add_argument("--why", metavar="REASON", default="", help="why what did not pass is to be believed now")
    options = parser.parse_args(argv)
    if options.again:
        try:
            record, part = (json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / RECORD, options.again))
            made = run_again(record, part, options.why)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            parser.error(f"{type(error).__name__}: {error}")
        (ROOT / RECORD).write_text(render(made), encoding="utf-8")
    elif not options.check:
        print(digest())
        return 0
    verdict = check()
    if verdict.warning and "GITHUB_ACTIONS" in os.environ:
        print(f"::warning::{verdict.text}")
    print(verdict.text, file=sys.stderr if verdict.warning or not verdict.ok else sys.stdout)
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
