"""One call of ``merge_states``."""

from __future__ import annotations

from dataclasses import dataclass

from .outputs import Output
from .quantize import Strides3


@dataclass(frozen=True)
class MergeProblem:
    """One call of ``merge_states`` after validation; pointers are not in it.

    Attributes
    ----------
    dtype : str
        Element type of o.
    shape : tuple of int
        Of o: (batch, seq, heads, head_dim), or packed (rows, heads, head_dim).
    o_strides : (Strides3, Strides3, Strides3)
        Element strides (batch, seq, head) of o_a, o_b, o.
    lse_strides : (Strides3, Strides3, Strides3)
        Element strides (batch, head, seq) of lse_a, lse_b, lse.
    """

    dtype: str
    shape: tuple[int, ...]
    o_strides: tuple[Strides3, Strides3, Strides3]
    lse_strides: tuple[Strides3, Strides3, Strides3]

    @property
    def head_dim(self) -> int:
        """Channels of o."""
        return self.shape[-1]

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call returns."""
        lse = (*self.shape[:-3], self.shape[-2], self.shape[-3])
        return Output("o", self.shape, self.dtype), Output("lse", lse, "float32")
