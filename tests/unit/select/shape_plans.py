"""GPUs that are not there, on which calls are planned: as they are, and in ways that a test wants."""

from __future__ import annotations

from collections.abc import Callable

from omniattn.bench.shape_plan import problem_of
from omniattn.plan.engine import Launches
from omniattn.plan.stages import launches_of
from omniattn.problems import AttentionProblem, Target
from omniattn.problems.split import Whole
from omniattn.registry import KernelSpec
from omniattn.select import Candidate, choices, ranked

__all__ = ["GPUS", "fastest", "is_whole", "planned", "problem_of", "row_of", "unsplit"]

#: Shared memory that a CTA may have, and SMs, of one GPU of each compute capability.
GPUS: dict[str, Target] = {
    "A100": Target((8, 0), 163 << 10, 108),
    "L40S": Target((8, 9), 99 << 10, 142),
    "H200": Target((9, 0), 227 << 10, 132),
    "B200": Target((10, 0), 227 << 10, 148),
    "RTX 5090": Target((12, 0), 99 << 10, 170),
}


def row_of(problem: AttentionProblem, target: Target, force: str | None = None) -> KernelSpec:
    """The kernel that a call takes."""
    return choices(problem, target, force)[0].candidate.row


def fastest(problem: AttentionProblem, target: Target, of: Callable[[Candidate], bool]) -> Candidate:
    """The fastest way of those that a test is about, by the model; whether it is the one that is taken or not."""
    return next(way for _, way in ranked(problem, target) if of(way))


def planned(problem: AttentionProblem, target: Target, of: Callable[[Candidate], bool]) -> Launches:
    """What is launched in that way."""
    return launches_of(fastest(problem, target, of), problem, target, None)


def is_whole(way: Candidate) -> bool:
    """Whether every CTA has all keys of its tile."""
    return isinstance(way.schedule, Whole)


def unsplit(problem: AttentionProblem, target: Target) -> Launches:
    """What is launched where every CTA has all keys of its tile."""
    return planned(problem, target, is_whole)
