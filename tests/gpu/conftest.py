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
