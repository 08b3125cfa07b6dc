"""Factors of e4m3 arrays as users have them: a Python number, a scalar of any library, an array."""

from __future__ import annotations

import sys
from typing import Any

from .. import arguments, arrays
from ..checks.attention import DESCALES
from ..frameworks import compiling
from ..problems import OPERANDS

Factors = tuple[Any, Any, Any]

#: DLPack's number of the CPU.
_ON_CPU = 1


def as_arrays(q: Any, factors: Factors, function: str) -> Factors:
    """``descale_q``, ``descale_k`` and ``descale_v`` with float32 arrays of q's library in place of numbers.

    A number is put where q lies, and one that lies on a GPU is not read: nothing waits. Arrays with dimensions come as
    they are, and so does what is no number: the checks of the call say what is wrong.
    """
    if q.__class__ in OPERANDS:
        return factors
    a, b, c = (_as_array(x, q, name, function) for name, x in zip(DESCALES, factors, strict=True))
    return a, b, c


def _as_array(x: Any, q: Any, name: str, function: str) -> Any:
    if x is None or not (isinstance(x, (bool, int, float)) or arguments.shape_of(x) == ()):
        return x
    if compiling():
        from ..frameworks.torch.e4m3 import as_factor

        return as_factor(x, q)
    if hasattr(x, "__dlpack__"):
        if arrays.needs_gradient((x,)):  # it has none, which the call says
            return x
        if arrays.needs_operator((x,)) or x.__dlpack_device__()[0] != _ON_CPU:
            return _in_float32(x)
    return _beside(q, arguments.check_number(x, name, function, least=None if name == "descale_v" else 0.0))


def _beside(q: Any, value: float) -> Any:
    """A number as an array of q's library, on q's device; NumPy's for JAX's tracers, and beside other libraries'."""
    root = type(q).__module__.partition(".")[0]
    if root == "torch":
        return q.new_full((), value, dtype=sys.modules["torch"].float32)
    if root == "cupy":
        with q.device:
            return sys.modules["cupy"].full((), value, dtype="float32")
    if root in ("jax", "jaxlib") and not arrays.traced_by_jax((q,)) and len(q.devices()) == 1:
        return sys.modules["jax"].numpy.full((), value, dtype="float32", device=next(iter(q.devices())))
    import numpy as np

    return np.full((), value, dtype=np.float32)


def _in_float32(x: Any) -> Any:
    """An array of torch, CuPy or JAX in float32, by its library; itself if it is that already, or no real number."""
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype == "float32" or not dtype.startswith(("float", "bfloat", "int")):
        return x
    return x.float() if hasattr(x, "float") else x.astype("float32")
