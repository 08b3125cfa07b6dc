"""Packed sequences of which only the first rows count, divided into sequences that count whole."""

from __future__ import annotations

from dataclasses import dataclass

from .outputs import Output


@dataclass(frozen=True)
class PartsProblem:
    """One division after validation; pointers are not in it.

    Attributes
    ----------
    batch : int
        Sequences.
    cu_strides : (int, int)
        Of cu_seqlens_q and cu_seqlens_k, in elements.
    used_strides : (int or None, int or None)
        Of seqused_q and seqused_k; None: not given, all rows count.
    """

    batch: int
    cu_strides: tuple[int, int]
    used_strides: tuple[int | None, int | None]

    @property
    def parts(self) -> int:
        """Of a sequence."""
        return 1 + sum(x is not None for x in self.used_strides)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call returns."""
        shape = (self.parts * self.batch + 1,)
        return Output("parts_q", shape, "int32"), Output("parts_k", shape, "int32")
