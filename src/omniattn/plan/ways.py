"""Run a call of attention in a way that nobody chose: to measure the ways that there are, and to compare results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .. import runtime
from ..errors import ArgumentError
from ..problems import AttentionProblem, Target
from ..select import Candidate
from .engine import Call, Described, describing, execute, make_plan
from .stages import launches_of
from .tuning import target_of


@dataclass(frozen=True)
class DescribedCall:
    """A call that has been checked, and not run.

    Attributes
    ----------
    problem : AttentionProblem
    target : Target
        The GPU of its arrays.
    """

    problem: AttentionProblem
    target: Target
    _described: Described

    def in_way(self, candidate: Candidate) -> Callable[[], list[Any]]:
        """What runs the call as ``candidate`` says, and gives its results.

        Raises
        ------
        OmniattnError
            A kernel cannot be loaded.
        """
        asked, tensors = self._described.call, self._described.tensors

        def plan(problem: AttentionProblem, target: Target, force: str | None) -> Any:
            return launches_of(candidate, problem, target, force, ("the way that is measured",))

        call = Call(replace(asked.operation, plan=plan), asked.objects, asked.options, asked.stream, facts=asked.facts)
        call.subject = asked.subject
        return functools.partial(execute, make_plan(call, tensors, load=True), call, tensors)


def describe_call(function: Callable[..., Any], *arguments: Any, **options: Any) -> DescribedCall:
    """Check a call of ``attention`` or ``attention_varlen`` with arrays on a GPU. Raises as the call does."""
    found: Described | None = None
    try:
        with describing():
            function(*arguments, **options)
    except Described as described:
        found = described
    if found is None or found.plan.launches is None or not isinstance(found.plan.problem, AttentionProblem):
        raise ArgumentError("function", "attention or attention_varlen, of arrays on a GPU", repr(function))
    device = runtime.device_info(found.plan.ordinal)
    return DescribedCall(found.plan.problem, target_of(device), found)
