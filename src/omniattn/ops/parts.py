"""Packed sequences of which only the first rows count, divided into sequences that count whole. Not public."""

from __future__ import annotations

from typing import Any

from ..checks import parts as checks
from ..checks.memory import check_memory
from ..plan.engine import Call, Operation, repeated, run
from ..plan.others import plan_parts
from ..problems import PartsProblem, Target
from ..runtime.record import LaunchRecord
from . import on_cpu

_PARTS = Operation(
    "packed_parts", checks.ARRAYS, checks.check_parts, check_memory, plan_parts, on_cpu.parts,
    ("cu_seqlens_q", "cu_seqlens_k"), given={},
)  # fmt: skip


def packed_parts(
    cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any, stream: Any = None
) -> tuple[Any, Any]:
    """Starts of the parts, of queries and of keys.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : array, (batch + 1,), int32
    seqused_q, seqused_k : array, (batch,), int32, or None
        One beyond its sequence counts as the whole of it, a negative one as none.
    stream : optional
        As in `attention`.

    Returns
    -------
    array, array
        (parts * batch + 1,), int32, of cu_seqlens_q's library: `omniattn.reference.parts`.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.
    """
    objects = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    known = repeated(_PARTS, objects, (), stream)
    q, k = run(Call(_PARTS, objects, (), stream), is_asked=True) if known is None else known
    return q, k


def launches_of(sequences: int, parts: int, target: Target) -> tuple[LaunchRecord, ...]:
    """What a division of so many sequences launches."""
    return plan_parts(PartsProblem(sequences, (1, 1), (1, 1 if parts == 3 else None)), target, None).records
