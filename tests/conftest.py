"""Rules for the whole test suite: what runs where, and the record of GPU runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from build_tools.record import Recorder


def _asks_for_gpu(config: pytest.Config) -> bool:
    expression = config.getoption("markexpr") or ""
    return "gpu" in expression and "not gpu" not in expression


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite."""
    parser.addoption(
        "--record-out",
        metavar="PATH",
        type=Path,
        help="write the results of a -m gpu run to PATH as well, also if the run is partial",
    )


def _share_cores(processes: int) -> None:
    """Leave each test process its share of the cores: BLAS threads that wait for others take many times as long."""
    threads = str(max(1, min(2, len(os.sched_getaffinity(0)) // processes)))
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", threads)


def pytest_configure(config: pytest.Config) -> None:
    """Record GPU runs; the processes of pytest-xdist leave that to the one that started them, and share the cores."""
    processes = config.getoption("numprocesses", None)
    if isinstance(processes, int) and processes > 0 and hasattr(os, "sched_getaffinity"):
        _share_cores(processes)
    if _asks_for_gpu(config) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config, config.getoption("--record-out")), "gpu-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave GPU tests out of a run that did not name them.

    They are deselected, not skipped: a plain run on a machine without a GPU shows no skips, so that any skip is news.
    ``-m gpu`` on such a machine does run them, and they fail: asked-for tests never pass by not running.
    """
    if _asks_for_gpu(config):
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
