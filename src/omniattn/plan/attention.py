"""Plans of attention calls: the first way of those that are chosen whose kernels this GPU gets."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ArgumentError, UnsupportedError
from ..problems import AttentionProblem, Target
from ..problems.precision import GROUPINGS
from ..registry import REGISTRY, KernelSpec
from ..select import choices, preferences
from ..select.advice import advise
from ..select.choice import names_in
from .binaries import without_binary
from .engine import Launches
from .stages import launches_of


def plan_attention(problem: AttentionProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``attention`` and ``attention_varlen``."""
    if problem.alternatives is not None:
        return _plan_auto(problem, target, force)
    if problem.operands is not None:
        _check_grouping(problem, target)
    ways = choices(problem, target, force)
    named = set(names_in(force))
    first: Launches | None = None
    missing: KernelSpec | None = None
    for way in ways:
        launches = launches_of(way.candidate, problem, target, force, way.why)
        # A call with one way does not look for its kernels before it loads them, and forced kernels run, or raise.
        if len(ways) == 1 or named.intersection(record.spec.name for record in launches.records):
            return launches
        lacking = without_binary(launches, target.cc)
        if lacking is not None:
            first, missing = first or launches, missing or lacking
        elif missing is None:
            return launches
        else:
            reason = f"not the fastest way: {missing.name} is not prebuilt and cannot be compiled here"
            return replace(launches, selection=replace(launches.selection, why=(*launches.selection.why, reason)))
    assert first is not None, "there is a way to run a call, or an error"
    return first  # whose kernels cannot be loaded: the error says why


def _plan_auto(problem: AttentionProblem, target: Target, force: str | None) -> Launches:
    """The launches in the preferred precision whose kernels this GPU gets; of the last one, as if it was asked for."""
    reasons: tuple[str, ...] = ()
    preferred = preferences(problem, target, force)
    for way in preferred:
        own, launches = way.problem, None
        if own.precision.quantized and not force and way is not preferred[-1]:
            # Slower ways of a low precision may be slower than exact attention, which is taken in their place.
            first = choices(own, target, force)[0]
            launches = launches_of(first.candidate, own, target, force, first.why)
            lacking = without_binary(launches, target.cc)
            if lacking is not None:
                reasons += (f"not {own.precision.name}: {lacking.name} is not prebuilt and cannot be compiled here",)
                continue
        break
    launches = launches or plan_attention(own, target, force)
    # Whoever leaves the precision open needs no advice about it.
    others = (reason for reason in launches.selection.why if reason != advise(own, target))
    why = (*way.why, *reasons, *others)
    return replace(launches, selection=replace(launches.selection, why=why), problem=own)


def _check_grouping(problem: AttentionProblem, target: Target) -> None:
    """Whether the GPU has kernels for operands in this grouping at all; without any kernel, selection says so."""
    operands = problem.operands
    assert operands is not None

    def serves(spec: KernelSpec) -> bool:
        return spec.quantized and (spec.min_arch == target.cc or not spec.arch_specific)

    read = {spec.grouping for spec in REGISTRY if serves(spec)}
    function = "attention_varlen" if problem.varlen else "attention"
    if read and operands.grouping not in read and not operands.e4m3:
        wanted = " or ".join(f"grouping={g!r}" for g in GROUPINGS if g in read)
        raise ArgumentError(
            "q", f"operands of quantize_qk({wanted}), which the kernels of this GPU read",
            f"grouping={operands.grouping!r}", function=function,
        )  # fmt: skip
    if not problem.tensor_maps and operands.grouping == "sm90" and not operands.e4m3:
        raise UnsupportedError(
            f"{function}(): quantized operands of this grouping need tensor maps, which CuPy cannot make",
            instead="quantize_qk(grouping='sm80'), or cuda-bindings as the driver",
        )
