"""Launch of ``packed_parts_sm80``."""

from __future__ import annotations

from ..problems import PartsProblem
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .host_struct import At
from .structs import PACKED_PARTS


def build(spec: KernelSpec, problem: PartsProblem) -> tuple[LaunchRecord, ...]:
    """The launch of a call: a thread for each sequence, and one for the end of the last."""
    values: dict[str, object] = {"batch": problem.batch, "parts": problem.parts}
    for side, cu, used in zip("qk", problem.cu_strides, problem.used_strides, strict=True):
        values |= {
            f"cu_seqlens_{side}": At(f"cu_seqlens_{side}"),
            f"seqused_{side}": None if used is None else At(f"seqused_{side}"),
            f"parts_{side}": At(f"parts_{side}"),
            f"cu_{side}_stride": cu,
            f"used_{side}_stride": used or 0,
        }
    threads = 32 * spec.num_warps
    grid = (problem.batch // threads + 1, 1, 1)
    return (LaunchRecord(spec, grid, threads, *PACKED_PARTS.pack(values)),)
