"""Which precision runs a call that leaves it open: the fastest by the model, of those that are accurate enough."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ArgumentError, UnsupportedError
from ..problems import AttentionProblem, Target
from ..problems.precision import EXACT, MEAN_ERRORS
from ..registry import KernelSpec
from .attention import unserved
from .candidate import Candidate
from .choice import VARIABLE
from .choose import forced_row, ranked
from .model import rules


@dataclass(frozen=True)
class Preference:
    """A precision in which a call may run.

    Attributes
    ----------
    problem : AttentionProblem
        The call in this precision.
    why : tuple of str
        What was predicted, and what was left out.
    """

    problem: AttentionProblem
    why: tuple[str, ...]


def preferences(problem: AttentionProblem, target: Target, force: str | None = None) -> tuple[Preference, ...]:
    """Precisions for a call with `alternatives`, the preferred one first, exact attention last.

    From the most accurate precision on, a less accurate one takes the place of the one before only if the model
    predicts it as much faster as `least_gain` says. The others are for where kernels of the preferred one cannot be
    had.

    Parameters
    ----------
    problem : AttentionProblem
    target : Target
    force : str, optional
        ``OMNIATTN_FORCE_KERNEL``: what the kernel that it names does not serve is left out.

    Raises
    ------
    ArgumentError, UnsupportedError
        As exact attention would, if nothing serves the call.
    """
    alternatives = problem.alternatives
    assert alternatives is not None, "a call that leaves its precision open"
    exact = replace(problem, alternatives=None)
    said: list[str] = []
    left_out: list[str] = []
    kept: list[AttentionProblem] = []
    best_us: float | None = None
    refusal: ArgumentError | UnsupportedError | None = None
    for one in (exact, *sorted(alternatives.problems, key=_error)):
        name, error = one.precision.name, _error(one)
        if error > alternatives.max_error:
            left_out.append(f"{name} has a mean error of {error:g}")
            continue
        try:
            us, way = _fastest(one, target, force)
        except (ArgumentError, UnsupportedError) as reason:
            refusal = refusal or reason
            left_out.append(f"{VARIABLE}={force} does not serve {name}" if force else f"no kernel serves {name}")
            continue
        text = f"{name} {us:.1f} µs"
        least = 1.0
        if best_us is not None:
            before = kept[-1].precision
            least = least_gain(one, way.row) if before == EXACT else rules().auto["least"]
            text += f", {best_us / us:.2f}× as fast as {before.name}, taken from {least:.2f}× on"
        said.append(text if one.precision == EXACT else f"{text} (mean error {error:g})")
        if best_us is None or us * least <= best_us:
            kept.append(one)
            best_us = us
    if not kept:
        assert refusal is not None
        raise refusal
    chosen = f"{kept[-1].precision.name} by precision=Auto(max_error={alternatives.max_error:g})"
    why = (
        f"{chosen}: predicted {'; '.join(said)}",
        *([f"left out: {'; '.join(left_out)}"] if left_out else []),
        "errors are means over the inputs of docs/precision.md, and no promise for the values of a call",
    )
    return tuple(Preference(one, why) for one in reversed(kept))


def least_gain(problem: AttentionProblem, row: KernelSpec) -> float:
    """How much faster than exact attention the model has to predict a low precision before it is taken.

    The model is too kind to 8 bits, by no more than that in any call that was measured with these options: what it
    counts of the quantization is bytes and launches. See `Rules.auto` for where the numbers are from.

    Parameters
    ----------
    problem : AttentionProblem
        The call in the low precision.
    row : KernelSpec
        The kernel that would run it.
    """
    factors = rules().auto
    encoding = problem.mask_encoding
    applies = {
        "least": True,
        "lse": problem.lse,
        "packed": problem.varlen,
        "masks": encoding in ("bits", "keys"),
        "functions": problem.score_mods and encoding == "none",
        "bias": encoding == "tiles",
        "padded": any(width not in rules().int8_from for width in (problem.head_dim, problem.head_dim_v)),
        "sync": not row.arch_specific,
    }
    found = 1.0
    for name, does in applies.items():
        if does:
            found *= factors[name]
    return found


def _error(problem: AttentionProblem) -> float:
    return MEAN_ERRORS[problem.precision.name]


def _fastest(problem: AttentionProblem, target: Target, force: str | None) -> tuple[float, Candidate]:
    """The fastest way to run a call and its microseconds, by the model."""
    ways = ranked(problem, target, forced_row(problem, target, force))
    if not ways:
        raise unserved(problem, target)
    return ways[0]
