"""Calls in a way that a test is about, whether it is the one that is chosen or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omniattn.plan.ways import describe_call
from omniattn.select import Candidate, ranked


def in_way(of: Callable[[Candidate], bool], function: Callable[..., Any], *arrays: Any, **options: Any) -> list[Any]:
    """Results of a call, run in the fastest way by the model of those that ``of`` admits."""
    described = describe_call(function, *arrays, **options)
    way = next(way for _, way in ranked(described.problem, described.target) if of(way))
    return described.in_way(way)()
