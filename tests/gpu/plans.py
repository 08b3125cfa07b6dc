"""Plans of this process and the rows that attention chooses from, for tests that change either."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from omniattn.plan import attention as plan_attention
from omniattn.plan.engine import PLANS
from omniattn.registry import KernelSpec
from omniattn.select import attention as select_attention


def only_rows(monkeypatch: pytest.MonkeyPatch, rows: Iterable[KernelSpec]) -> None:
    """Attention chooses from these rows only, as if the registry had no others."""
    chosen = tuple(rows)
    for module in (select_attention, plan_attention):
        monkeypatch.setattr(module, "REGISTRY", chosen)
    PLANS.clear()
