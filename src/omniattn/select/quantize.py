"""The kernels that quantize."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..problems import QuantizeProblem, Target
from ..registry import REGISTRY, KernelSpec
from .choice import Selection, dotted, forced, unfit_target


def _unfit(spec: KernelSpec, problem: QuantizeProblem, target: Target) -> str | None:
    if spec.dtype != problem.dtype:
        return f"it is compiled for {spec.dtype}, the arrays are {problem.dtype}"
    if spec.head_dim < problem.head_dim_pad:
        return f"it takes head_dim up to {spec.head_dim}, not {problem.head_dim_pad}"
    if spec.op == "quantize":
        if problem.e4m3 and problem.qk and "e4m3" not in spec.features:
            return "it makes integers of q and k, not e4m3"
        if problem.hadamard and problem.qk and "hadamard" not in spec.features:
            return "it has no Hadamard transform"
        if spec.features and not problem.rotated:
            return "it is for what is rotated, or becomes e4m3"
    if spec.specialization is not None and spec.specialization != problem.specialization:
        return "it is made for the defaults of int8 attention in the {} grouping with {} values only".format(
            *spec.specialization
        )
    return unfit_target(spec, target)


def select_quantizer(problem: QuantizeProblem, target: Target, force: str | None = None) -> Selection:
    """The quantizer: one made for this very problem where there is one; then the narrowest tile that holds head_dim.

    Raises
    ------
    ArgumentError
        ``force`` names a quantizer that cannot serve the problem, or no kernel.
    UnsupportedError
        There is none for this element type, or for the GPU.
    """
    return _select("quantize", problem, target, force)


def select_delta(problem: QuantizeProblem, target: Target, force: str | None = None) -> Selection:
    """The kernel that computes ``delta_s``; raises as `select_quantizer`."""
    return _select("quantize_delta", problem, target, force)


def _select(op: str, problem: QuantizeProblem, target: Target, force: str | None) -> Selection:
    if (chosen := forced(force, (op,), lambda spec: _unfit(spec, problem, target))) is not None:
        return chosen
    fitting = [s for s in REGISTRY if s.op == op and _unfit(s, problem, target) is None]
    if not fitting:
        rows = [s for s in REGISTRY if s.op == op and s.dtype == problem.dtype]
        reasons = sorted({reason for s in rows if (reason := _unfit(s, problem, target))})
        raise UnsupportedError(
            f"no quantizer serves {problem.dtype}, head_dim {problem.head_dim} on compute capability "
            f"{dotted(target.cc)}: " + "; ".join(reasons),
            instead="float16 or bfloat16, head_dim up to 256, compute capability 8.0 or newer",
        )
    best = min(fitting, key=lambda s: (s.specialization is None, s.head_dim))
    why = [f"{problem.dtype}, head_dim {problem.head_dim} in a tile of {best.head_dim}"]
    if op == "quantize":
        why.append("made for the defaults of int8 attention" if best.specialization else "for any knobs")
    return Selection(best, tuple(why))
