"""Launches of the backward of attention."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..problems import BackwardProblem, Target
from .engine import Launches


def plan_backward(problem: BackwardProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``attention_backward`` and ``attention_varlen_backward``."""
    raise UnsupportedError("attention_backward: no kernel in this version", instead="arrays on the CPU")
