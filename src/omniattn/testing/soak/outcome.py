"""What became of a problem."""

from __future__ import annotations

import dataclasses
import math
import re
import time
import traceback
from typing import Any

import numpy as np

from omniattn.errors import KernelNotFoundError, UnsupportedError
from omniattn.testing.soak import operations
from omniattn.testing.soak.machines import Machine, NotHereError
from omniattn.testing.soak.problem import Problem

PASSED, FAILED, REFUSED = "passed", "failed", "refused"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One problem.

    Attributes
    ----------
    number : int
    operation, precision : str
        What it is counted under.
    status : str
        ``"passed"``, ``"failed"`` or ``"refused"``: the library, or the framework, said that it lacks something.
    worst : float
        Largest error as a fraction of its tolerance; infinite if it has none.
    text : str
        What failed, with figures; why it was refused.
    raised : bool
        Whether an error ended it: a GPU may be of no use to this process afterwards.
    seconds : float
    """

    number: int
    operation: str
    precision: str
    status: str
    worst: float
    text: str
    raised: bool
    seconds: float


#: What selection says where no row serves a call: head dims and each row's reason differ between problems.
_NO_ROW = re.compile(r"(no .* serves .*?), head_dim .*? (on compute capability [\d.]+)(?::.*)?", re.DOTALL)
#: Knobs that GPUs lack values of.
_LACKING = ("granularity", "pv", "pv_accumulator")


def _reason(error: Exception, problem: Problem) -> str:
    """Why something was refused, without what differs between two problems of the same kind."""
    if isinstance(error, KernelNotFoundError):
        return f"no binary of a kernel could be had: {error.advice}"
    if not isinstance(error, UnsupportedError):
        return str(error)
    found = _NO_ROW.fullmatch(error.what)
    if found is None:
        return error.what
    precision = problem.facts.get("options", {}).get("precision")
    knobs = precision[1] if isinstance(precision, tuple) else {}
    asked = ", ".join(f"{name}={knobs[name]!r}" for name in _LACKING if name in knobs)
    return f"{found[1]} {found[2]}" + (f" with {asked}" if asked else "")


def run(m: Machine, problem: Problem) -> Outcome:
    """Run a problem; whatever it raises is an outcome."""
    start = time.perf_counter()

    def outcome(status: str, worst: float, text: str, raised: bool = False) -> Outcome:
        seconds = time.perf_counter() - start
        return Outcome(
            problem.number, problem.operation, problem.precision, status, worst, text, raised, seconds
        )  # fmt: skip

    try:
        with np.errstate(all="ignore"):
            grades = operations.check(m, problem)
            m.synchronize()
    except (NotHereError, UnsupportedError, KernelNotFoundError) as error:
        return outcome(REFUSED, 0.0, _reason(error, problem))
    except Exception as error:  # noqa: BLE001 - a legal call raises nothing, whatever its class is
        frames = "".join(traceback.format_tb(error.__traceback__)[-3:])
        return outcome(FAILED, math.inf, f"raised {type(error).__name__}: {error}\n{frames}", True)
    wrong = [grade for grade in grades if not grade.ok]
    worst = max((grade.ratio for grade in grades), default=0.0)
    return outcome(FAILED if wrong else PASSED, worst, "\n".join(map(str, wrong)))


def as_json(outcome: Outcome) -> dict[str, Any]:
    """As JSON has it."""
    return dataclasses.asdict(outcome)
