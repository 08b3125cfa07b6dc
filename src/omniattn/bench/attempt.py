"""Contenders on the inputs that results are checked on, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from omniattn.bench.anchors import EXACT_ERROR, INT4_ERROR, QUANTIZED_ERROR, InputSet
from omniattn.bench.option_contenders import UnfitError
from omniattn.bench.option_problem import Forward, Result
from omniattn.bench.timing import Candidate
from omniattn.errors import OmniattnError, UnsupportedError

#: Largest relative L1 error of this package against fp64. Of others: the exact one.
ERROR_LIMITS = {"exact": EXACT_ERROR, "int8": QUANTIZED_ERROR, "int4": INT4_ERROR, "fp8": QUANTIZED_ERROR}
#: Largest error of the LSE; 4-bit scores cost a few hundredths.
_LSE_LIMIT = 0.1


class Checked(Protocol):
    """What an attempt needs of a problem (`option_problem.Problem`)."""

    torch: Any
    check: InputSet
    sets: list[InputSet]

    def errors(self, result: Result) -> tuple[float, float | None]:
        """Errors of o and of the LSE against fp64."""


class Attempt:
    """A contender on the inputs that results are checked on: its call if that was right, and what is said of it.

    Parameters
    ----------
    key : str
    build : callable
        As `Other.build`.
    problem : Checked
    limit : float
        Largest relative L1 error against fp64.
    beside : Attempt, optional
        This package's, which all of o is compared with, by a limit of the sum of both.
    own : bool
        It is a call of this package.
    """

    def __init__(
        self, key: str, build: Callable[[Any], Forward], problem: Checked, limit: float, beside: Attempt | None = None,
        *, own: bool = False,
    ) -> None:  # fmt: skip
        self.key = key
        self.problem = problem
        self.limit = limit
        self.forward: Forward | None = None
        self.o: Any = None
        self.facts: dict[str, Any] = {}
        self.reason = ""
        try:
            forward = build(problem)
            result = forward(problem.check)
            problem.torch.cuda.synchronize()
        except UnfitError as error:
            self.reason = str(error)
            return
        except Exception as error:
            # Other packages raise whatever they like. Where this one refuses a case its row says so, and the other rows
            # are still worth having; anything else of it is a fault and not hidden.
            if own and not isinstance(error, OmniattnError):
                raise
            self.reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            if own:
                self.facts["unsupported"] = isinstance(error, UnsupportedError)
            return
        self.reason = self._judge(result, beside)
        if not self.reason:
            self.forward, self.o = forward, result.o

    def _judge(self, result: Result, beside: Attempt | None) -> str:
        """Why the result is wrong; empty if it is right. NaN is wrong."""
        error, lse = self.problem.errors(result)
        self.facts = {"relative_l1": error, "lse_error": lse}
        if not error <= self.limit:
            return f"wrong result: relative L1 {error:.3g} against fp64, limit {self.limit}"
        if lse is not None and not lse <= _LSE_LIMIT:
            return f"wrong result: LSE off by {lse:.3g}, limit {_LSE_LIMIT}"
        if beside is not None and beside.o is not None:
            own = beside.o.float()
            difference = float((result.o.float() - own).abs().sum() / own.abs().sum())
            self.facts["difference"] = difference
            apart = self.limit + beside.limit
            if not difference <= apart:
                # One of the two is wrong in rows that are not sampled.
                return f"wrong result: relative L1 {difference:.3g} from omniattn, limit {apart:.3g}"
        return ""


def candidate(forward: Forward, problem: Checked) -> Candidate:
    """What a timer calls: the contender on the problem's input sets in turn."""
    return lambda number: forward(problem.sets[number % len(problem.sets)])
