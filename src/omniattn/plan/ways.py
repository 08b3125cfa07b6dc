"""Run a call in a way that nobody chose: to measure the ways that there are, and to compare results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .. import runtime
from ..errors import ArgumentError
from ..problems import AppendProblem, AttentionProblem, BackwardProblem, DecodeProblem, QuantizeCall, Target
from ..select import Candidate
from ..select.backward_ways import BackwardWay, asked_of_backward
from ..select.decode_ways import DecodeWay, asked_of_decode
from ..select.quantize_ways import QuantizeWay, asked_of_quantizer
from ..select.ways import Asked, OnlyWay, asked_of_append
from .backward import backward_launches
from .engine import Call, Described, Launches, describing, execute, make_plan
from .others import decode_launches, plan_append, quantize_launches
from .stages import launches_of, quantizer_launches
from .tuning import target_of

_WHY = ("the way that is measured",)
#: Problems of operations beside attention.
OtherProblem = BackwardProblem | DecodeProblem | QuantizeCall | AppendProblem


@dataclass(frozen=True)
class QuantizedCandidate:
    """A way to run a call of attention on operands that it quantizes, and one of quantizing them.

    Attributes
    ----------
    candidate : Candidate
    quantizer : QuantizeWay
        Of q, k and v together.
    alone : bool
        Nothing but the quantizers is launched: results are not written.
    """

    candidate: Candidate
    quantizer: QuantizeWay
    alone: bool = False


AnyWay = Candidate | QuantizedCandidate | BackwardWay | DecodeWay | QuantizeWay | OnlyWay


def asked_of(problem: OtherProblem, target: Target) -> Asked[Any]:
    """What there is to choose among in a call of an operation beside attention."""
    if isinstance(problem, BackwardProblem):
        return asked_of_backward(problem, target)
    if isinstance(problem, DecodeProblem):
        return asked_of_decode(problem, target)
    if isinstance(problem, QuantizeCall):
        return asked_of_quantizer(problem.problem, target)
    return asked_of_append(problem, target)


def launches_in(way: AnyWay, problem: Any, target: Target) -> Launches:
    """The launches of a call, run as ``way`` says, which is one of its problem's."""
    if isinstance(way, Candidate):
        return launches_of(way, problem, target, None, _WHY)
    if isinstance(way, QuantizedCandidate):
        if way.alone:
            return quantizer_launches(way.candidate, problem, target, (way.quantizer,))
        return launches_of(way.candidate, problem, target, None, _WHY, (way.quantizer,))
    if isinstance(way, BackwardWay):
        return backward_launches(way, problem, target, None)
    if isinstance(way, DecodeWay):
        return decode_launches(way, problem, target, None)
    if isinstance(way, QuantizeWay):
        return quantize_launches(way, problem, target, None)
    return plan_append(problem, target, None)


@dataclass(frozen=True)
class DescribedCall:
    """A call that has been checked, and not run.

    Attributes
    ----------
    problem : AttentionProblem or OtherProblem
    target : Target
        The GPU of its arrays.
    """

    problem: Any
    target: Target
    _described: Described

    def in_way(self, way: AnyWay) -> Callable[[], list[Any]]:
        """What runs the call as ``way`` says, and gives its results.

        Raises
        ------
        OmniattnError
            A kernel cannot be loaded.
        """
        asked, tensors = self._described.call, self._described.tensors

        def plan(problem: Any, target: Target, force: str | None) -> Launches:
            return launches_in(way, problem, target)

        operation = replace(asked.operation, plan=plan)
        call = Call(operation, asked.objects, asked.options, asked.stream, asked.cache, asked.facts)
        call.subject = asked.subject
        return functools.partial(execute, make_plan(call, tensors, load=True), call, tensors)


def describe_call(function: Callable[..., Any], *arguments: Any, **options: Any) -> DescribedCall:
    """Check a call of an operation that has ways, with arrays on a GPU. Raises as the call does."""
    found: Described | None = None
    try:
        with describing():
            function(*arguments, **options)
    except Described as described:
        found = described
    has_ways = found is not None and isinstance(found.plan.problem, AttentionProblem | OtherProblem)
    if found is None or not has_ways or found.plan.launches is None:
        expected = "attention, its backward, decode, append or a quantizer, of arrays on a GPU"
        raise ArgumentError("function", expected, repr(function))
    device = runtime.device_info(found.plan.ordinal)
    return DescribedCall(found.plan.problem, target_of(device), found)
