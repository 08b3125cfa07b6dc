"""Values of the caller's arrays that change K."""

from __future__ import annotations

from .. import arrays
from ..arrays import Tensor
from ..errors import ArgumentError


def check_values(t: Tensor, function: str) -> None:
    """Numbers of ``k_mean`` or ``k_channel_scale``, on the CPU."""
    import numpy as np

    values = arrays.to_numpy(t)
    positive = t.argument == "k_channel_scale"
    bad = values[~(np.isfinite(values) & ((values > 0) | (not positive)))]
    if bad.size:
        expected = "finite numbers" + (" above 0" if positive else "")
        raise ArgumentError(t.argument, expected, f"{bad[0]}", function=function)
