"""compute-sanitizer over a few calls: accesses out of bounds, races in shared memory, reads of unset memory."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from omniattn.registry import REGISTRY
from omniattn.runtime.folder import default_folder

from .installations import ROOT, clean_environment, compile_missing
from .memory_turns import in_background
from .racecheck_rows import waits

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("sanitizer_cases.py")
#: Exit status that the tool is told to use when it has found something.
FOUND = 86
SUMMARY = {
    "memcheck": r"ERROR SUMMARY: 0 errors",
    "racecheck": r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)",
    "initcheck": r"ERROR SUMMARY: 0 errors",
}
#: What runs under which tool, and with which argument. Low precision not under initcheck: its operands lie in one
#: workspace with padding that nobody writes and copies read. Of the backward not the kernels whose first tile stores
#: its sums: initcheck takes what bulk stores have written for unset.
RUNS = {
    "memcheck": ("memcheck", ""),
    "racecheck": ("racecheck", "few_masks"),
    "initcheck": ("initcheck", ""),
    "memcheck_low": ("memcheck", "low_precision"),
    "racecheck_low": ("racecheck", "few_low_precision"),
    "memcheck_factors": ("memcheck", "factors"),
    "racecheck_factors": ("racecheck", "few_factors"),
    "memcheck_backward": ("memcheck", "backward"),
    "racecheck_backward": ("racecheck", "few_backward"),
    "initcheck_backward": ("initcheck", "cleared_backward"),
    "faulty": ("memcheck", "faulty"),
}


def find_tool(name: str) -> str | None:
    """Path of a program of the CUDA toolkit: on PATH, below CUDA_HOME, or where toolkits are installed."""
    folders = [os.environ.get("CUDA_HOME", ""), *sorted(glob.glob("/usr/local/cuda*"), reverse=True)]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{folder}/bin" for folder in folders if folder)])
    return shutil.which(name, path=path)


class Outcome(NamedTuple):
    """How a run under the tool ended."""

    status: int
    text: str


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All runs, started together: most of their time is the tool's own start."""
    tool = find_tool("compute-sanitizer")
    if tool is None and find_tool("nvcc") is None:
        pytest.skip("this machine has no CUDA toolkit, and so no compute-sanitizer")
    assert tool is not None, "there is a CUDA toolkit (nvcc), but no compute-sanitizer in it"
    assert importlib.util.find_spec("cupy") is not None, "sanitizer_cases.py needs CuPy"
    cache = tmp_path_factory.mktemp("cache")
    environment = clean_environment(ROOT / "src", OMNIATTN_CACHE_DIR=str(cache))
    fill_cache(cache)
    commands = {}
    for name, (which, argument) in RUNS.items():
        options = ["--tool", which, "--error-exitcode", str(FOUND)]
        if which == "memcheck":
            # Without padding an access behind one array may hit the next. Failed API calls raise in the script, where
            # they matter; frameworks make some on purpose, to find out what is there.
            options += ["--padding", "4096", "--report-api-errors", "no"]
        commands[name] = [tool, *options, sys.executable, str(SCRIPT), *argument.split()]
    with in_background():
        started = {
            name: subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for name, command in commands.items()
        }
        yield started
        for process in started.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def fill_cache(folder: Path) -> None:
    """What the script needs and no wheel has: all runs would each compile it. The user's cache may have some."""
    own = default_folder()
    for path in own.glob("??/*.nvrtc*") if own is not None else ():
        (folder / path.parent.name).mkdir(mode=0o700, exist_ok=True)
        shutil.copy2(path, folder / path.parent.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIATTN_CACHE_DIR", str(folder))
        rows = [spec for spec in REGISTRY if spec.dtype != "bfloat16" or "_656" in spec.name]
        compile_missing([*rows, *(waits(spec) for spec in rows if waits(spec) is not spec)])


def finish(process: subprocess.Popen[str]) -> Outcome:
    try:
        text, _ = process.communicate(timeout=480)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        raise AssertionError(f"compute-sanitizer did not end\n{text[-4000:]}") from None
    return Outcome(process.returncode, text)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "faulty"])
def test_clean(outcomes: dict[str, subprocess.Popen[str]], name: str) -> None:
    status, text = finish(outcomes[name])
    assert "all calls done" in text, text[-4000:]
    assert re.search(SUMMARY[RUNS[name][0]], text), text[-4000:]
    assert status == 0, text[-4000:]


def test_the_tool_sees_a_fault(outcomes: dict[str, subprocess.Popen[str]]) -> None:
    """Without this, a tool that watches nothing would pass for a clean result."""
    status, text = finish(outcomes["faulty"])
    assert status == FOUND, text[-4000:]
    assert re.search(r"Invalid __global__ read of size \d+ bytes", text), text[-4000:]
    assert "attn_fwd_sm80" in text, text[-4000:]
