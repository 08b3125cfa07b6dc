"""Seed and offset of dropout as an array of JAX: of a key, or the caller's numbers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from ...checks.dropout import NOTHING_DRAWN
from ...errors import ArgumentError
from ...problems.dropout import WORDS

_EXPECTED = f"a key of jax.random, (seed, offset), integers from 0 to 2**64 - 1, or a uint32 array of shape ({WORDS},)"


def rng_of(q: Any, rng: Any, function: str) -> Any:
    """Words of seed and offset, uint32 (4,), the lower ones first.

    Those of a key are the 128 bits that ``jax.random.bits`` makes of it.
    """
    if rng is None:
        example = "For example dropout_rng=jax.random.key(1234), or dropout_rng=(1234, 0)"
        raise ArgumentError("dropout_rng", _EXPECTED, NOTHING_DRAWN, function=function, hint=example)
    if isinstance(rng, (tuple, list)):
        if len(rng) != 2 or any(isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < 2**64 for x in rng):
            raise ArgumentError("dropout_rng", _EXPECTED, repr(rng), function=function)
        return _beside(q, np.array(rng, dtype=np.uint64).view(np.uint32))
    dtype = getattr(rng, "dtype", None)
    if dtype is None:
        raise ArgumentError("dropout_rng", _EXPECTED, type(rng).__name__, function=function)
    if not isinstance(rng, (jax.Array, np.ndarray)):
        return rng  # of another library, which the call takes or refuses as any other array
    is_old_key = dtype == jnp.uint32 and rng.shape != (WORDS,)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key) or is_old_key:
        try:
            return _beside(q, jax.random.bits(rng, (WORDS,), jnp.uint32))
        except (TypeError, ValueError) as error:
            raise ArgumentError("dropout_rng", _EXPECTED, f"{dtype} {rng.shape}", function=function) from error
    if isinstance(rng, np.ndarray) and rng.dtype in (np.int64, np.uint64) and rng.shape == (2,):
        return np.ascontiguousarray(rng).view(np.uint32)  # JAX would cut the upper words off
    return rng


def _beside(q: Any, words: Any) -> Any:
    """The words where q lies, as far as that is known."""
    if isinstance(q, jax.core.Tracer) or isinstance(words, jax.core.Tracer) or len(q.devices()) != 1:
        return jnp.asarray(words)
    return jax.device_put(words, next(iter(q.devices())))
