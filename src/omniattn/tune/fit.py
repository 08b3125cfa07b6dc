"""Coefficients that explain measured times, and how good the choices are that they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..problems.costs import OperationCosts
from ..problems.target import Coefficients
from ..select.cost import cost_us

#: Coefficients of attention, or of another operation.
C = TypeVar("C", bound=Coefficients | OperationCosts)

#: Relative error from which on a time counts by its size and not by its square: some ways are measured that no call
#: should ever take, and need not be right.
_USUAL_ERROR = 0.1
#: Ways that take more than so many times as long as the fastest one of their call are left out.
_FAR = 2.5
#: Coefficients are held to where they came from by so much for each factor of e: what the data say nothing about stays.
_HOLD = 0.002
#: Step of a numerical derivative, in logarithms.
_STEP = 1e-4
#: Not fitted: what results have of it are the orders that were compared on the day of the run, which are those that it
#: finds good. It comes from measurements of orders alone (docs/performance/records/attn_fwd_sm90.toml).
HELD = frozenset({"apart"})
#: Kernels with a factor of their own, at most, and by how much each has to lessen the mean regret, as a part of it.
_MOST_ROWS, _GAIN = 24, 0.03
#: Calls that a factor has to help at least, and the regret that counts as help.
_FEWEST_HELPED, _FELT = 2, 0.005
#: Part of the largest gain of a kernel's factors from which on a factor counts as one that chooses as well.
_AS_WELL = 0.9
#: What a factor is multiplied by at a time.
_FACTORS = (0.8, 0.85, 0.88, 0.9, 0.92, 0.94, 0.96, 0.98, 1.02, 1.04, 1.06, 1.08, 1.1, 1.13, 1.18, 1.25)


class Measured(NamedTuple):
    """The ways of one call, and what they took.

    Attributes
    ----------
    name : str
    ways : tuple
        What each has to do: `Features`, or what another operation counts.
    us : tuple of float
    fastest : float
        The shortest time that was measured, of ways too that are no candidates any more.
    """

    name: str
    ways: tuple[Any, ...]
    us: tuple[float, ...]
    fastest: float


@dataclass(frozen=True)
class Quality:
    """How good choices are.

    Attributes
    ----------
    regrets : dict of str to float
        By call: how much longer what is chosen takes than the fastest way, as a fraction.
    error : float
        Median of the relative error of all times.
    """

    regrets: dict[str, float]
    error: float

    @property
    def mean(self) -> float:
        """Mean regret."""
        return sum(self.regrets.values()) / max(len(self.regrets), 1)

    @property
    def worst(self) -> tuple[float, str]:
        """The largest regret, and its call."""
        return max(((regret, name) for name, regret in self.regrets.items()), default=(0.0, ""))


def judge(
    calls: Sequence[Measured], coefficients: Coefficients | OperationCosts, cost: Callable[[Any, Any], float] = cost_us
) -> Quality:
    """What choosing by these coefficients gives. cost: (what a way has to do, coefficients) -> µs."""
    regrets, errors = {}, []
    for call in calls:
        times = [cost(way, coefficients) for way in call.ways]
        chosen = min(range(len(times)), key=times.__getitem__)
        regrets[call.name] = call.us[chosen] / call.fastest - 1.0
        errors += [abs(math.log(time / us)) for time, us in zip(times, call.us, strict=True)]
    return Quality(regrets, float(np.median(errors)) if errors else 0.0)


def fit(calls: Sequence[Measured], start: C, rounds: int = 40, cost: Callable[[Any, Any], float] = cost_us) -> C:
    """The coefficients near ``start`` that explain the times best.

    Least squares of logarithms, by Levenberg's and Marquardt's method (Marquardt 1963, doi:10.1137/0111030), with
    Huber's weights (1964, doi:10.1214/aoms/1177703732). A way counts the less, the longer it takes beside the fastest
    one of its call.

    Parameters
    ----------
    calls : sequence of Measured
    start : Coefficients
        All positive.
    rounds : int
        Attempts to improve, at most.
    cost : callable
        As `judge` takes it.
    """
    names = [field.name for field in fields(start) if field.type in ("float", float) and field.name not in HELD]
    ways: list[Any] = []
    logs: list[float] = []
    near: list[float] = []
    for call in calls:
        fastest = min(call.us)
        kept = [(way, us) for way, us in zip(call.ways, call.us, strict=True) if us <= _FAR * fastest]
        ways += [way for way, _ in kept]
        logs += [math.log(us) for _, us in kept]
        near += [fastest / us / len(kept) ** 0.5 for _, us in kept]
    times, weight = np.array(logs), np.array(near)
    origin = np.log([getattr(start, name) for name in names])

    def coefficients(x: np.ndarray) -> C:
        values: dict[str, Any] = dict(zip(names, map(float, np.exp(x)), strict=True))
        return replace(start, **values)

    def errors(x: np.ndarray) -> np.ndarray:
        c = coefficients(x)
        return np.log([cost(way, c) for way in ways]) - times

    def loss(error: np.ndarray, x: np.ndarray) -> float:
        size = np.abs(error) / _USUAL_ERROR
        huber = np.where(size <= 1, size**2, 2 * size - 1)
        return float((weight * huber).sum() / weight.sum() + (_HOLD * (x - origin) ** 2).sum())

    x, damping = origin.copy(), 1e-2
    error = errors(x)
    best = loss(error, x)
    for _ in range(rounds):
        slopes = np.empty((len(ways), len(names)))
        for i in range(len(names)):
            moved = x.copy()
            moved[i] += _STEP
            slopes[:, i] = (errors(moved) - error) / _STEP
        weights = weight / weight.sum() / _USUAL_ERROR**2 / np.maximum(1.0, np.abs(error) / _USUAL_ERROR)
        curvature = (slopes * weights[:, None]).T @ slopes + _HOLD * np.eye(len(names))
        downhill = -(slopes * weights[:, None]).T @ error - _HOLD * (x - origin)
        improved = False
        while damping < 1e6:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
            moved = x + np.clip(step, -1.0, 1.0)
            new = errors(moved)
            if loss(new, moved) < best:
                gain = 1 - loss(new, moved) / best
                x, error, best, improved, damping = moved, new, loss(new, moved), True, damping / 4
                break
            damping *= 4
        if not improved or gain < 1e-5:
            break
    return coefficients(x)


def fit_rows(calls: Sequence[Measured], found: Coefficients) -> Coefficients:
    """Factors of the kernels for which the model is far off, the one with the largest gain first.

    What of a kernel no feature counts (its stages, what its loops wait for) shows in its times only. A factor is kept
    if choices get better by it: regrets that it adds count twice, and it has to help several calls. Of factors that
    choose as well the one nearest to the kernel's times is taken, as it counts in calls too that nobody has measured.

    Parameters
    ----------
    calls : sequence of Measured
    found : Coefficients
        Without factors.
    """
    slower = [np.array(call.us) / call.fastest - 1.0 for call in calls]
    times = [np.log(call.us) for call in calls]
    logs = [np.log([cost_us(way, found) for way in call.ways]) for call in calls]
    is_row = [{name: np.array([way.row == name for way in call.ways]) for name in _rows(call)} for call in calls]
    of_row: dict[str, list[int]] = {}
    for i, names in enumerate(is_row):
        for name in names:
            of_row.setdefault(name, []).append(i)
    regrets = np.array([us[int(log.argmin())] for us, log in zip(slower, logs, strict=True)])
    factors: dict[str, float] = {}

    def with_factor(name: str, factor: float) -> np.ndarray:
        log = math.log(factor)
        return np.array([slower[i][int((logs[i] + is_row[i][name] * log).argmin())] for i in of_row[name]])

    def gain(name: str, factor: float) -> float:
        less = regrets[of_row[name]] - with_factor(name, factor)
        helped = int((less > _FELT).sum()) >= _FEWEST_HELPED
        return float(less.sum() + np.minimum(less, 0.0).sum()) if helped else 0.0

    def error(name: str) -> float:
        return float(np.median(np.concatenate([(times[i] - logs[i])[is_row[i][name]] for i in of_row[name]])))

    while len(factors) < _MOST_ROWS:
        tries = []
        for name in of_row:
            off = error(name)
            gains = {factor: gain(name, factor) for factor in _FACTORS if _is_nearer(factor, off)}
            most = max(gains.values(), default=0.0)
            if most > 0.0:
                alike = [factor for factor, own in gains.items() if own >= _AS_WELL * most]
                tries.append((most, name, min(alike, key=lambda factor: abs(math.log(factor) - off))))
        best, name, factor = max(tries, default=(0.0, "", 1.0))
        if best <= _GAIN * regrets.sum():
            break
        regrets[of_row[name]] = with_factor(name, factor)
        for i in of_row[name]:
            logs[i] = logs[i] + is_row[i][name] * math.log(factor)
        factors[name] = factors.get(name, 1.0) * factor
    return replace(found, rows=dict(sorted(factors.items())))


def _is_nearer(factor: float, off: float) -> bool:
    """Whether a factor brings times nearer that are off by ``off``, in logarithms."""
    return abs(math.log(factor) - off) < abs(off)


def _rows(call: Measured) -> list[str]:
    return sorted({way.row for way in call.ways})
