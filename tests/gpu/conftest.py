"""Fixtures of the GPU tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omniattn.plan.engine import PLANS


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
