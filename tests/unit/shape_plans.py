"""GPUs that are not there, on which calls are planned."""

from __future__ import annotations

from omniattn.bench.shape_plan import problem_of
from omniattn.problems import Target

__all__ = ["GPUS", "problem_of"]

#: Shared memory that a CTA may have, and SMs, of one GPU of each compute capability.
GPUS: dict[str, Target] = {
    "A100": Target((8, 0), 163 << 10, 108),
    "L40S": Target((8, 9), 99 << 10, 142),
    "H200": Target((9, 0), 227 << 10, 132),
    "B200": Target((10, 0), 227 << 10, 148),
    "RTX 5090": Target((12, 0), 99 << 10, 170),
}
