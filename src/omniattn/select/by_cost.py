"""Choose the way of running a call that the model of costs finds fastest."""

from __future__ import annotations

from ..problems import AttentionProblem, Target
from ..problems.target import Coefficients
from .advice import advise
from .attention import tile_words
from .candidate import Candidate
from .candidates import candidates
from .cost import cost_us
from .features import Kept, features


def ranked(problem: AttentionProblem, target: Target, coefficients: Coefficients) -> list[tuple[float, Candidate]]:
    """The ways to run a call with the microseconds that they take by the model, the fastest first.

    Of equally fast ones the first of `candidates` comes first.
    """
    kept: Kept = {}
    ways = candidates(problem, target)
    found = [(cost_us(features(way, problem, target, kept), coefficients), way) for way in ways]
    return sorted(found, key=lambda pair: pair[0])


def reasons(
    problem: AttentionProblem, target: Target, of_all: list[tuple[float, Candidate]], us: float, way: Candidate
) -> tuple[str, ...]:
    """Why ``way``, which takes ``us``, was chosen of all that there are."""
    others = [f"{other.text}: {time:.1f} µs" for time, other in of_all[:3] if other != way][:2]
    tuning, advice = target.tuning, advise(problem, target)
    return (
        *([problem.note] if problem.note else []),
        f"{problem.dtype}, {problem.head_dims} in {tile_words(way.row)}",
        f"the fastest of {len(of_all)} ways by the model: {way.text}, {us:.1f} µs",
        *([f"next: {'; '.join(others)}"] if others else []),
        *([f"tuned on this GPU: {tuning.device}, digest {tuning.digest[:12]}"] if tuning is not None else []),
        *([advice] if advice is not None else []),
    )
