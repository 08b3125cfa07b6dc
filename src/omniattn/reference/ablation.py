"""What the papers compare and no kernel of this package has: other formats of P and V; and rotation apart.

Tools of the numerics tests and of docs/precision.md. `omniattn.Int8` does not know the formats, so no GPU call reaches
them.

P V with P in the scale of its running maximum and V with one scale a channel, as `low_precision` has it for e4m3:

    o = v_scale sum round(L p_ij) round(v_j / v_scale) / (L l)

L is the format's largest number: 57344 (e5m2) or 127 (int8). Rotation, with H the orthonormal Hadamard matrix and D a
diagonal of signs: (q D H) . (k D H) = q . k, and what one channel has is spread over all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.errors import ArgumentError
from omniattn.reference.kv_cache import hadamard
from omniattn.reference.quantize import value_range

Array = npt.NDArray[Any]
_F = np.float32
#: Largest finite value of the 8-bit float with 5 exponent and 2 mantissa bits.
E5M2_MAX = 57344.0


def round_e5m2(x: Array) -> npt.NDArray[np.float32]:
    """Nearest e5m2 of float32 values, ties to even; beyond the range 57344, NaN and infinity NaN."""
    x = np.asarray(x, dtype=_F)
    finite = np.isfinite(x)
    magnitude = np.where(finite, np.abs(x), _F(0)).astype(np.float64)
    _, exponent = np.frexp(magnitude)  # magnitude is below 2^exponent
    # Three significant bits; below 2^-14 the steps stay 2^-16.
    step = np.ldexp(1.0, np.maximum(exponent - 3, -16))
    nearest = np.minimum(np.rint(magnitude / step) * step, E5M2_MAX)
    return np.where(finite, np.copysign(nearest, x), np.nan).astype(_F)


def round_int8(x: Array) -> npt.NDArray[np.float32]:
    """Nearest integer from -127 to 127, ties to even; NaN and infinity NaN."""
    x = np.asarray(x, dtype=_F)
    return np.where(np.isfinite(x), np.clip(np.rint(x), _F(-127), _F(127)), _F(np.nan)).astype(_F)


@dataclass(frozen=True)
class Format:
    """Element type of P and V.

    Attributes
    ----------
    levels : float
        What the largest P and the largest magnitude of a channel of V become.
    round : callable
        To the nearest number of the format.
    """

    levels: float
    round: Callable[[Array], npt.NDArray[np.float32]]

    def quantize_values(self, values: Array, smooth: bool) -> tuple[Array, Array, Array]:
        """One head of v, (keys, head_dim): (quantized values as float32, scale, mean), the latter (head_dim,)."""
        mean, scale = value_range(values, smooth, False, self.levels, every_key=True)
        return self.round((values - mean) * (_F(1) / scale)), scale, mean

    def round_probabilities(self, p: Array) -> Array:
        """P in [0, 1] times ``levels``, rounded."""
        return self.round(p * _F(self.levels))


#: By the name that `low_precision.attention` takes as ``pv``.
FORMATS: dict[str, Format] = {"e5m2": Format(E5M2_MAX, round_e5m2), "int8": Format(127.0, round_int8)}


def rotate(q: npt.ArrayLike, k: npt.ArrayLike, *, seed: int | None = 0) -> tuple[Array, Array]:
    """Q and K times random signs and the orthonormal Hadamard matrix: the same scores from spread channels.

    The rotation of QuaRot (Ashkboos et al. 2024) and of FlashAttention-3's "incoherent processing" (Shah et al. 2024).

    Parameters
    ----------
    q, k : array_like, floating, (..., head_dim)
        Any layout whose last dimension is the channel, a power of two.
    seed : int or None
        Of the signs, one for each channel, the same for q and k. None: no signs.

    Returns
    -------
    q, k : ndarray, float32
        Same shapes; their scores are those of the arguments up to fp32 rounding.
    """
    rotated = []
    dim = None
    for name, x in (("q", q), ("k", k)):
        x = np.asarray(x, dtype=_F)
        last = x.shape[-1] if x.ndim else 0
        if last < 1 or last & (last - 1):
            raise ArgumentError(name, "a power of two channels", f"shape {x.shape}", function="ablation.rotate")
        if dim not in (None, last):
            raise ArgumentError(name, f"as many channels as q, {dim}", f"shape {x.shape}", function="ablation.rotate")
        dim = last
        signs = np.ones(last) if seed is None else np.random.default_rng(seed).integers(0, 2, last) * 2 - 1
        rotated.append(hadamard(x * signs.astype(_F)))
    return rotated[0], rotated[1]
