"""``explain``: what a call would do, without doing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import arrays, operands
from .arrays import Tensor
from .errors import ArgumentError
from .operand_checks import ARRAYS
from .planning import Plan, make_plan
from .precision import Int8
from .problem import Problem
from .quantized import OPERANDS


@dataclass(frozen=True)
class Explanation:
    """What a call of ``attention`` or ``attention_varlen`` would do.

    Attributes
    ----------
    kernel : str
        Registry name of the kernel, or ``"reference (NumPy, CPU)"``.
    why : tuple of str
        One sentence for each fact that decided.
    origin : str
        ``"prebuilt"``, ``"cache"``, ``"jit"``, or ``"python"`` on the CPU.
    origin_reason : str
        Why the binary comes from there.
    arch : str
        Target of the binary, ``"cpu"`` on the CPU.
    device : str
        Where it runs.
    grid, threads, smem_bytes : int
        CTAs in all, threads per CTA, dynamic shared memory per CTA.
    flops : int or None
        Operations of both products over the visible (query, key) pairs; None if the lengths are on the device.
    min_bytes : int
        Bytes that have to move at least: every input read once, every output written once.
    problem : Problem
        The call as selection sees it.
    """

    kernel: str
    why: tuple[str, ...]
    origin: str
    origin_reason: str
    arch: str
    device: str
    grid: int
    threads: int
    smem_bytes: int
    flops: int | None
    min_bytes: int
    problem: Problem

    def __str__(self) -> str:
        flops = "unknown (lengths are on the device)" if self.flops is None else f"{self.flops / 1e9:.3f} GFLOP"
        lines = [
            f"kernel   {self.kernel}",
            *(f"         - {reason}" for reason in self.why),
            f"binary   {self.origin}, {self.arch}: {self.origin_reason}",
            f"device   {self.device}",
        ]
        if self.threads:
            lines.append(f"launch   {self.grid} CTAs of {self.threads} threads, {self.smem_bytes} B shared memory each")
        lines.append(f"work     {flops}, at least {self.min_bytes / 1e6:.3f} MB of traffic")
        return "\n".join(lines)


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: Any = None,
    sinks: Any = None,
    precision: str | Int8 = "exact",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    deterministic: bool = False,
) -> Explanation:
    """Say what ``attention`` (or, with cu_seqlens, ``attention_varlen``) would do with these arguments.

    Validates like the call itself, chooses the kernel and finds out where its binary comes from; launches and allocates
    nothing.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in `attention` and `attention_varlen`; quantized operands too.
    layout, causal, window, softmax_scale, softcap, mask, sinks, precision, return_lse, out, stream, deterministic
        As in `attention`.

    Returns
    -------
    Explanation

    Raises
    ------
    ArgumentError, UnsupportedError, DriverError
        As the call would.
    """
    if any(x.__class__ in OPERANDS for x in (q, k, v)):
        return _explain_quantized(
            q, k, v, cu_seqlens_q, cu_seqlens_k, mask, sinks, out, stream,
            (layout, causal, window, softmax_scale, softcap, precision, return_lse, deterministic,
             max_seqlen_q, max_seqlen_k),
        )  # fmt: skip
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    function = "attention_varlen" if varlen else "attention"
    if not varlen:
        for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if value is not None:
                raise ArgumentError(
                    name, "nothing, without cu_seqlens_q and cu_seqlens_k", repr(value), function="explain"
                )
    raw = None if stream is None else arrays.resolve_stream(stream)
    tq, tk, tv = (arrays.describe(x, n, raw) for x, n in ((q, "q"), (k, "k"), (v, "v")))
    named = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "mask": mask, "sinks": sinks, "out": out}
    extra = {name: arrays.describe(x, name, raw) for name, x in named.items() if x is not None}
    plan = make_plan(
        function, tq, tk, tv, extra, max_seqlen_q, max_seqlen_k, layout, causal, window, softmax_scale, softcap,
        precision, return_lse, deterministic, run=False,
    )  # fmt: skip
    if "out" in extra:
        arrays.require_writable(extra["out"])
    return _explanation(plan, tq, plan.problem.min_bytes, stream)


def _explain_quantized(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    mask: Any,
    sinks: Any,
    out: Any,
    stream: Any,
    options: tuple[Any, ...],
) -> Explanation:
    of_q = getattr(q, "pair", None)
    function = "attention" if of_q is None or of_q.cu_seqlens_q is None else "attention_varlen"
    raw = None if stream is None else arrays.resolve_stream(stream)
    tensors = operands.describe(function, q, k, v, cu_q, cu_k, (out, mask, sinks), raw)
    plan = operands.make_plan(function, q, k, v, tensors, options, run=False)
    if "out" in tensors:
        arrays.require_writable(tensors["out"])
    # Operands as they are; o and the LSE once.
    written = plan.problem.num_q_heads * plan.problem.seqlen_q * (1 if plan.problem.varlen else plan.problem.batch)
    itemsize = {"float32": 4, "float64": 8}.get(plan.problem.dtype, 2)
    min_bytes = sum(t.size * t.itemsize for name, t in tensors.items() if name in ARRAYS)
    return _explanation(plan, tensors["q_int"], min_bytes + written * (itemsize * plan.problem.head_dim + 4), stream)


def _explanation(plan: Plan | operands.OperandsPlan, ref: Tensor, min_bytes: int, stream: Any) -> Explanation:
    problem = plan.problem
    if plan.selection is None or plan.forward is None:
        arrays.prepare([ref], stream)  # refuses a stream
        return Explanation(
            "reference (NumPy, CPU)", ("the arrays are on the CPU",), "python", "no binary is needed", "cpu", "cpu",
            0, 0, 0, problem.flops, min_bytes, problem,
        )  # fmt: skip
    from . import runtime

    device = runtime.device_info(ref.ordinal)
    resolution = runtime.resolve(plan.selection.spec, device.cc)
    return Explanation(
        plan.selection.spec.name,
        plan.selection.why,
        resolution.kind,
        resolution.reason,
        resolution.arch,
        f"cuda:{ref.ordinal} {device.name}",
        plan.forward.num_ctas,
        plan.forward.threads,
        plan.selection.spec.smem_bytes,
        problem.flops,
        min_bytes,
        problem,
    )
