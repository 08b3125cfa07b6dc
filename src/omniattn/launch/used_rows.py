"""Packed sequences whose first rows alone are used: what kernels are told, and the launch that clears the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..problems.quantize import Strides3
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .host_struct import At
from .structs import CLEAR_UNUSED, MAX_CLEARED

#: Rows of a CTA.
_ROWS = 64


def used_rows(used: tuple[bool, bool]) -> dict[str, object]:
    """The fields of seqused_q and seqused_k, null where the call does not say how many rows are used."""
    return {name: At(name) if there else None for name, there in zip(("seqused_q", "seqused_k"), used, strict=True)}


class Cleared(NamedTuple):
    """A packed array of a call's results.

    Attributes
    ----------
    name : str
    side : str
        ``"q"`` or ``"k"``: whose sequences its rows are.
    rows, heads, head_dim : int
    strides : (int, int, int)
        Batch, row, head; in elements.
    """

    name: str
    side: str
    rows: int
    heads: int
    head_dim: int
    strides: Strides3


def build_clear(
    spec: KernelSpec, batch: int, cleared: Sequence[Cleared], lse_stride_h: int | None = None
) -> tuple[LaunchRecord, ...]:
    """The launch that clears rows which are not used.

    Parameters
    ----------
    cleared : sequence of Cleared
        At most `MAX_CLEARED`, all of them of sequences whose used rows the call names.
    lse_stride_h : int, optional
        Elements between heads of ``lse``, which belongs to the first of them; None: there is none.
    """
    assert len(cleared) <= MAX_CLEARED
    slots = max((-(-x.rows // _ROWS) + batch for x in cleared if x.rows * x.heads), default=0)
    if slots == 0 or batch == 0:
        return ()
    rest = MAX_CLEARED - len(cleared)

    def each(numbers: Iterable[int]) -> tuple[int, ...]:
        return (*numbers, *(0,) * rest)

    values: dict[str, object] = {
        "x": [*(At(x.name) for x in cleared), *(None,) * rest],
        "cu_seqlens": [*(At(f"cu_seqlens_{x.side}") for x in cleared), *(None,) * rest],
        "seqused": [*(At(f"seqused_{x.side}") for x in cleared), *(None,) * rest],
        "lse": None if lse_stride_h is None else At("lse"),
        "stride_s": each(x.strides[1] for x in cleared),
        "stride_h": each(x.strides[2] for x in cleared),
        "lse_stride_h": lse_stride_h or 0,
        "rows": each(x.rows for x in cleared),
        "heads": each(x.heads for x in cleared),
        "head_dim": each(x.head_dim for x in cleared),
        "batch": batch,
    }
    return (LaunchRecord(spec, (slots, len(cleared), 1), 32 * spec.num_warps, *CLEAR_UNUSED.pack(values)),)
