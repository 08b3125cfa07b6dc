"""Plans of this process and the rows that attention chooses from, for tests that change either."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import pytest

from omniattn.plan import attention as plan_attention
from omniattn.plan.engine import PLANS
from omniattn.registry import REGISTRY, KernelSpec


def only_rows(monkeypatch: pytest.MonkeyPatch, rows: Iterable[KernelSpec]) -> None:
    """Attention chooses from these rows only, as if the registry had no others."""
    chosen = tuple(rows)
    for module in (importlib.import_module("omniattn.select.candidates"), plan_attention):
        monkeypatch.setattr(module, "REGISTRY", chosen)
    PLANS.clear()


def split_rows_with_scores(head_dim: int, dtype: str) -> str:
    """Hopper's split rows with scores, those for the fewest forms first."""
    tile = next(width for width in (64, 96, 128, 192, 256) if width >= head_dim)
    rows = [
        spec
        for spec in REGISTRY
        if spec.op == "attention_split" and spec.family == "attn_fwd_sm90" and spec.score_mods
        if (spec.head_dim, spec.dtype) == (tile, dtype)
    ]
    return ",".join(spec.name for spec in sorted(rows, key=lambda spec: spec.options))
