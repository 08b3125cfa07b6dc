"""Fixtures of the GPU tests."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from omniattn.plan.engine import PLANS
from omniattn.select import cache as select_cache
from omniattn.select import decode_ways

from .memory_turns import Turn

# Garbage of other tests (CuPy's streams, JAX's arrays) that Python frees in the middle of a capture ends the capture,
# and later tests of the process that draw random numbers fail: torch collects it before, as it once always did.
os.environ.setdefault("TORCH_CUDAGRAPH_GC", "1")

#: Bytes that a worker may keep for its next test: others run beside it, and one that needs 35 GB.
_KEPT = 1 << 30
RECORD = Path(__file__).with_name("record.json")
_TURN = Turn()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that took long when the record was made come first, so that no process waits for one at the end.

    With pytest-xdist: ``--dist loadfile --no-loadscope-reorder``.
    """
    try:
        tests = json.loads(RECORD.read_text("utf-8"))["tests"]
    except (OSError, ValueError, KeyError):
        return
    took: Counter[str] = Counter()
    for name, (_, seconds) in tests.items():
        took[name.partition("::")[0]] += seconds
    items.sort(key=lambda item: -took[item.nodeid.partition("::")[0]])  # stable: in a file as they stand there


def _runs_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


@pytest.fixture(autouse=True)
def memory_for_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test waits for its turn; behind a large one torch gives back what it has cached."""
    # Here, and not before: fixtures of modules, which are made first, may compile for minutes, for which nobody waits.
    _TURN.take(by_itself=_runs_alone(request.node))
    yield
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    torch.cuda.set_device(0)  # of several GPUs JAX's first use leaves the last one current
    if torch.cuda.memory_reserved() > _KEPT:
        # Of a test that has failed Python keeps the frames, with all arrays, until the next one fails.
        traceback.clear_frames(getattr(sys, "last_traceback", None))
        torch.cuda.empty_cache()


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The turn ends behind everything else. Tests of a file that run alone one after the other have one together."""
    yield
    if not (_runs_alone(item) and nextitem is not None and nextitem.path == item.path and _runs_alone(nextitem)):
        _TURN.end()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A capture that has failed is this test's failure alone.

    torch's generator stays in it, and later tests of the process could draw no numbers: a capture that succeeds takes
    the generator out.
    """
    yield
    torch = sys.modules.get("torch")
    failed = call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception)
    if not failed or torch is None or not torch.cuda.is_initialized():
        return
    torch.cuda.set_stream(torch.cuda.default_stream())  # the capture's is still the current one
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """Plans of other tests are not used, and those of this one leave no trace."""
    PLANS.clear()
    yield
    PLANS.clear()


@pytest.fixture(params=["selected", "generic"])
def backward_family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every test with the kernels that this GPU gets, and with those that every GPU gets."""
    from .backward_cases import choose_from  # needs torch

    choose_from(monkeypatch, request.param)
    yield str(request.param)
    PLANS.clear()


@pytest.fixture(params=["few", "hopper", "blocks", "generic"])
def latent_family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every test over latent caches with Hopper's kernels, of however few rows, and with those that every GPU gets.

    "few": by the kernel for up to 16 query rows, where they are. "blocks": where pages have whole blocks of keys, by
    the kernel that is for 64 query rows and more.
    """
    torch = pytest.importorskip("torch")
    if request.param == "generic":
        monkeypatch.setattr(select_cache, "has_latent_row", lambda *_: False)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel of Hopper")
    if request.param != "few":
        monkeypatch.setattr(select_cache, "FEW_LATENT_ROWS", 0)
        monkeypatch.setattr(decode_ways, "few_at_a_time", lambda *_: False)
    if request.param == "blocks":
        monkeypatch.setattr(select_cache, "LATENT_ROWS", 0)
    PLANS.clear()
    yield str(request.param)
    PLANS.clear()
