"""Calls under JAX's transformations: primitives, their rules and lowerings. `omniattn.ops` comes here with tracers."""

from __future__ import annotations

import jax

from ...errors import UnsupportedError

#: What has all that is used here: buffer callbacks, `jax.shard_map`, types of values that vary along a mesh.
OLDEST = (0, 7)

if jax.__version_info__ < OLDEST:
    raise UnsupportedError(
        f"calls under JAX's transformations with JAX {jax.__version__}",
        instead=f"JAX {'.'.join(map(str, OLDEST))} or newer, or calls outside of jit",
    )
