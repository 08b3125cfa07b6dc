"""Rules for the whole test suite: what runs where, and the record of GPU runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from build_tools.record import RECORD, ROOT, Recorder
from tests.skips import SkipRule, asks_for


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


def _share_gpus(process: int) -> None:
    """Let each test process see all GPUs, and another one of them first: that is where its tests run."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = sum(path.name[len("nvidia") :].isdigit() for path in Path("/dev").glob("nvidia*"))
    gpus = named.split(",") if named else [str(i) for i in range(count)]
    if len(gpus) > 1:
        first = process % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def pytest_configure(config: pytest.Config) -> None:
    """Record GPU runs, judge skips in others.

    The processes of pytest-xdist leave both to the one that started them, and share the cores and the GPUs.
    """
    processes = config.getoption("numprocesses", None)
    if isinstance(processes, int) and processes > 0 and hasattr(os, "sched_getaffinity"):
        _share_cores(processes)
    if hasattr(config, "workerinput"):
        _share_gpus(int(config.workerinput["workerid"].removeprefix("gw")))
        return
    if asks_for(config, "gpu"):
        if hasattr(config.option, "loadscopereorder"):  # by the number of tests, which says little
            config.option.loadscopereorder = False
        config.pluginmanager.register(Recorder(config, config.getoption("--record-out")), "gpu-recorder")
    else:
        config.pluginmanager.register(SkipRule(asked_for=asks_for(config, "frameworks")), "skip-rule")


def _longest_first(items: list[pytest.Item]) -> None:
    """Sort by files, those first that took longest when the record was written: a process runs a file as a whole."""
    try:
        tests = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))["tests"]
    except (OSError, ValueError, KeyError):
        return
    seconds: dict[str, float] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        _, duration = tests.get(item.nodeid, ("", 1.0))  # one that is not in the record may have to compile
        seconds[file] = seconds.get(file, 0.0) + duration
    items.sort(key=lambda item: -seconds[item.nodeid.partition("::")[0]])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder of GPU tests out of a run that did not name it or them: thousands, each deselected otherwise."""
    is_gpu = collection_path == Path(__file__).parent / "gpu"
    return True if is_gpu and not asks_for(config, "gpu") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave GPU tests out of a run that did not name them.

    They are deselected, not skipped: skips are for what is missing on a machine that could have it (tests/skips.py).
    ``-m gpu`` on such a machine does run them, and they fail: asked-for tests never pass by not running.
    """
    if asks_for(config, "gpu"):
        _longest_first(items)
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
