"""Fixtures of the GPU tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from omniattn.plan.engine import PLANS

#: Bytes that a worker may keep for its next test: others run beside it, and one that needs 50 GB.
_KEPT = 1 << 30


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """Behind a large test, torch gives back what it has cached."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _KEPT:
        torch.cuda.empty_cache()


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
