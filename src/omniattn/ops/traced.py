"""Calls that a framework has to see: of torch tensors under a trace, a transform or a dispatch mode, of JAX tracers."""

from __future__ import annotations

from typing import Any

from .. import arrays
from ..plan.engine import Call


def run_traced(call: Call) -> list[Any]:
    """Run a call by its operator or its primitive; results as `plan.engine.run`."""
    if arrays.traced_by_jax(call.objects) or (call.cache is not None and call.cache.traced):
        from ..frameworks.jax.tracing import run_call as run_primitive

        return run_primitive(call)
    from ..frameworks.torch.tracing import run_call

    return run_call(call)
