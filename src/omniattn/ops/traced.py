"""Calls of torch tensors that a trace, a transform or a dispatch mode has to see."""

from __future__ import annotations

from typing import Any

from ..plan.engine import Call


def run_traced(call: Call) -> list[Any]:
    """Run a call by its operator; results as `plan.engine.run`."""
    from ..frameworks.torch.tracing import run_call

    return run_call(call)
