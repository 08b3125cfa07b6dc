"""The kernels that quantize."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..problems import QuantizeProblem, Target
from ..registry import REGISTRY, KernelSpec
from ..registry.targets import is_carried
from .choice import Selection, dotted, forced, only, the_one
from .fit import KV_OPS, fit

VALUES_OPS = ("quantize_fp8_sums", "quantize_values")


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


def select_fp8_quantizer(problem: QuantizeProblem, target: Target, force: str | None = None) -> Selection:
    """The kernel that makes e4m3 of Q and K where nothing but a rotation comes before; raises as `select_quantizer`."""
    return _select("quantize_fp8", problem, target, force)


def select_fp8_values(
    problem: QuantizeProblem, target: Target, force: str | None = None
) -> tuple[Selection, Selection] | None:
    """The kernels that make e4m3 of Q, K and V in two launches: one of Q, K and sums of V, one of V.

    None where ``force`` names other quantizers, and on GPUs for which the wheel carries none of them: none has been
    measured there. Raises as `select_quantizer`.
    """
    named = any(forced(force, (op,), lambda spec: fit(spec, problem, target)) for op in VALUES_OPS)
    others = forced(force, ("quantize_fp8",), lambda spec: fit(spec, problem, target))
    others = others or forced(force, ("quantize",), lambda spec: fit(spec, problem.of_values, target))
    carried = any(row.op in VALUES_OPS and is_carried(row, target.cc) for row in REGISTRY)
    if not named and (others is not None or not carried):
        return None
    first, second = (_select(op, problem, target, force) for op in VALUES_OPS)
    return first, second


def select_kv(problem: QuantizeProblem, target: Target, force: str | None = None) -> tuple[Selection, Selection] | None:
    """The kernels of the two launches that quantize K and V: sums of samples, and blocks of keys.

    None where ``force`` names another quantizer, and on GPUs for which the wheel carries none of them. Raises as
    `select_quantizer`.
    """
    named = any(forced(force, (op,), lambda spec: fit(spec, problem, target)) for op in KV_OPS)
    others = forced(force, ("quantize",), lambda spec: fit(spec, problem, target))
    carried = any(row.op in KV_OPS and is_carried(row, target.cc) for row in REGISTRY)
    if not named and (others is not None or not carried):
        return None
    first, second = (_select(op, problem, target, force) for op in KV_OPS)
    return first, second


def select_layout(head_dim: int, target: Target, force: str | None = None) -> Selection:
    """The kernel that lays V in e4m3 out by channels.

    Raises
    ------
    ArgumentError
        ``force`` names another one.
    UnsupportedError
        The GPU is too old.
    """
    width = min(s.head_dim for s in REGISTRY if s.op == "layout_fp8" and s.head_dim >= head_dim)
    spec = only("layout_fp8", lambda s: s.head_dim == width)
    return the_one(spec, f"lays V out by channels, {width} at most", target, force)


def fitting(op: str, problem: QuantizeProblem, target: Target) -> list[KernelSpec]:
    """The rows of an operation that can serve."""
    return [row for row in REGISTRY if row.op == op and fit(row, problem, target) is None]


def selected(op: str, row: KernelSpec, problem: QuantizeProblem) -> Selection:
    """A row, and what it is for."""
    why = [f"{problem.dtype}, head_dim {problem.head_dim} in a tile of {row.head_dim}"]
    if op == "quantize":
        why.append("made for the defaults of int8 attention" if row.specialization else "for any knobs")
    if op == "quantize_fp8":
        why.append("Q and K to e4m3, one scale for 128 rows")
    if op in VALUES_OPS:
        why.append("Q, K and V to e4m3 in two launches")
    if op in KV_OPS:
        why.append("K to integers and V to e4m3 in two launches")
    return Selection(row, tuple(why))


def _select(op: str, problem: QuantizeProblem, target: Target, force: str | None) -> Selection:
    if (chosen := forced(force, (op,), lambda spec: fit(spec, problem, target))) is not None:
        return chosen
    rows = fitting(op, problem, target)
    if not rows:
        others = [s for s in REGISTRY if s.op == op and s.dtype == problem.dtype]
        reasons = sorted({reason for s in others if (reason := fit(s, problem, target))})
        raise UnsupportedError(
            f"no quantizer serves {problem.dtype}, head_dim {problem.head_dim} on compute capability "
            f"{dotted(target.cc)}: " + "; ".join(reasons),
            instead="float16 or bfloat16, head_dim up to 256, compute capability 8.0 or newer",
        )
    return selected(op, min(rows, key=lambda s: (s.specialization is None, s.head_dim)), problem)
