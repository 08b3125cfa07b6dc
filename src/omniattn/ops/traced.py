"""Calls that a framework has to see: of torch tensors under a trace, a transform or a dispatch mode, of JAX tracers."""

from __future__ import annotations

from typing import Any

from .. import arrays
from ..frameworks import compiling
from ..plan.engine import Call


def run_traced_rows(call: Call, kv: Any, head_dim_v: int) -> list[Any]:
    """The same of a call over an array of latent rows, whose cache is made within the operator."""
    from ..frameworks.torch.caches import run_rows

    return run_rows(call, kv, head_dim_v)


def run_traced(call: Call) -> list[Any]:
    """Run a call by its operator or its primitive, on DTensors by its parts; results as `plan.engine.run`."""
    # torch.compile's front end would read the dictionary of all modules, which may grow meanwhile, to look for JAX's.
    cache = call.cache
    if not compiling() and (arrays.traced_by_jax(call.objects) or (cache is not None and cache.traced)):
        from ..frameworks.jax.tracing import run_call as run_primitive

        return run_primitive(call)
    if not compiling() and arrays.is_sharded(call.objects):
        from ..frameworks.torch.sharded import run_sharded

        return run_sharded(call)
    from ..frameworks.torch.tracing import run_call

    return run_call(call)
