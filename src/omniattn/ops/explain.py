"""``explain``: what a call would do, without doing it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import runtime
from ..arrays import Tensor
from ..errors import ArgumentError
from ..plan.engine import Call, Described, Plan, describing
from ..problems import AttentionProblem, BackwardProblem
from ..problems.memory import ITEMSIZE
from ..runtime.record import LaunchRecord
from .append import append, copy_blocks, copy_recent
from .attention import attention, attention_varlen
from .attention_backward import attention_backward, attention_varlen_backward
from .decode import decode
from .index_logits import index_logits
from .merge import merge_states
from .quantize import quantize_qk, quantize_v
from .sparse import attention_sparse
from .sparse_blocks import sparse_blocks
from .tiles import TileCounts, count_tiles, finding
from .top_k import top_k
from .with_cache import attention_with_kvcache

#: What can be explained.
OPERATIONS = (
    attention, attention_varlen, attention_backward, attention_varlen_backward, attention_with_kvcache, decode, append,
    copy_blocks, copy_recent, merge_states, quantize_qk, quantize_v, attention_sparse, index_logits, top_k,
    sparse_blocks,
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch of a call.

    Attributes
    ----------
    kernel : str
        Registry name.
    origin, arch : str
        As in `Explanation`.
    grid, threads, smem_bytes : int
        CTAs in all, threads per CTA, dynamic shared memory per CTA.
    """

    kernel: str
    origin: str
    arch: str
    grid: int
    threads: int
    smem_bytes: int


@dataclass(frozen=True)
class Explanation:
    """What a call would do.

    Attributes
    ----------
    kernel : str
        Registry name of the kernel that the call is about, or ``"reference (NumPy, CPU)"``.
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
        Of the kernel: CTAs in all, threads per CTA, dynamic shared memory per CTA.
    flops : int or None
        Of attention and its backward: operations of the two, or five, products over the visible (query, key) pairs;
        None if the lengths are on the device, and for other operations.
    min_bytes : int
        Bytes that have to move at least: every input read once, every output written once. Of operations on a cache:
        the arrays of the call, without the cache, whose lengths are on the device.
    problem : object
        The call as selection sees it (`omniattn.problems`).
    launches : tuple of Launch
        All launches in order; none on the CPU, and where there is nothing to do.
    workspace_bytes : int
        Scratch memory.
    mask_bytes : int
        What the kernels read that look for tiles which a mask hides: the call's mask. 0 where none do, and of a
        `ScoreMod`, whose mask is computed.
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
    problem: Any
    launches: tuple[Launch, ...] = ()
    workspace_bytes: int = 0
    mask_bytes: int = 0
    _count: Callable[[], TileCounts | None] = field(default=lambda: None, repr=False, compare=False)

    def tiles(self) -> TileCounts | None:
        """What a mask leaves: runs the kernels that find it, and waits for them.

        Returns
        -------
        TileCounts or None
            None where no kernel looks for hidden tiles. Of the arrays as they are now.
        """
        return self._count()

    def short(self) -> str:
        """One line: the kernel, where its binary comes from, how many CTAs run, the work.

        Returns
        -------
        str
            ``str`` of the explanation has the reasons, and the other launches.
        """
        parts = [f"{self.kernel} ({self.origin}, {self.arch}) on {self.device}"]
        if self.threads:
            parts.append(f"{self.grid} CTAs of {self.threads} threads")
        others = sum(x.kernel != self.kernel for x in self.launches)
        if others:
            parts.append(f"{others} more launch{'es' if others > 1 else ''}")
        if self.flops is not None and isinstance(self.problem, (AttentionProblem, BackwardProblem)):
            parts.append(f"{self.flops / 1e9:.3f} GFLOP")
        parts.append(f"{self.min_bytes / 1e6:.3f} MB")
        return ", ".join(parts)

    def __str__(self) -> str:
        lines = [
            f"kernel   {self.kernel}",
            *(f"         - {reason}" for reason in self.why),
            f"binary   {self.origin}, {self.arch}: {self.origin_reason}",
            f"device   {self.device}",
        ]
        if self.threads:
            lines.append(f"launch   {self.grid} CTAs of {self.threads} threads, {self.smem_bytes} B shared memory each")
        others = [x for x in self.launches if x.kernel != self.kernel]
        lines += [f"also     {x.kernel} ({x.origin}), {x.grid} CTAs of {x.threads} threads" for x in others]
        if any(x.kernel.startswith("mask_list") for x in others):
            lines.append(f"masks    {self.mask_bytes / 1e6:.3f} MB are read to find hidden tiles: tiles() counts them")
        if isinstance(self.problem, (AttentionProblem, BackwardProblem)):
            known = self.flops is not None
            flops = f"{(self.flops or 0) / 1e9:.3f} GFLOP" if known else "unknown (lengths are on the device)"
            lines.append(f"work     {flops}, at least {self.min_bytes / 1e6:.3f} MB of traffic")
        else:
            lines.append(f"work     at least {self.min_bytes / 1e6:.3f} MB of traffic")
        return "\n".join(lines)


def explain(function: Any, *arguments: Any, **options: Any) -> Explanation:
    """Say what a call would do with these arguments.

    ``explain(oa.decode, q, cache, seq_lens=lens)`` for any operation; ``explain(q, k, v, causal=True)`` for attention.
    Validates like the call itself, chooses the kernels and finds out where their binaries come from; launches and
    allocates nothing (of a backward, a contiguous copy of a ``do`` that needs one; of a number as ``shared_prefix`` of
    prompts or packed rows, the int32 arrays of its level).

    Parameters
    ----------
    function : callable
        `attention`, `attention_varlen`, `attention_backward`, `attention_varlen_backward`, `attention_with_kvcache`,
        `decode`, `append`, `copy_blocks`, `copy_recent`, `merge_states`, `quantize_qk`, `quantize_v`,
        `attention_sparse`, `index_logits`, `top_k` or `sparse_blocks`. An array or quantized operand in its place is q
        of `attention`, or with cu_seqlens of `attention_varlen`.
    arguments, options
        As the function takes them.

    Returns
    -------
    Explanation

    Raises
    ------
    ArgumentError, UnsupportedError, DriverError, TypeError
        As the call would.
    """
    if any(function is f for f in OPERATIONS):
        return _explain(function, arguments, options)
    if isinstance(function, str) or (callable(function) and not hasattr(function, "__dlpack__")):
        names = ", ".join(f.__name__ for f in OPERATIONS)
        several = str(getattr(function, "__module__", "")).startswith("omniattn.distributed")
        hint = "Ask omniattn.distributed.plan() what a ring computes and sends" if several else None
        raise ArgumentError("function", f"one of {names}, or q", repr(function), function="explain", hint=hint)
    packed = options.get("cu_seqlens_q") is not None or options.get("cu_seqlens_k") is not None
    pair = getattr(function, "pair", None)
    if packed or (pair is not None and pair.cu_seqlens_q is not None):
        return _explain(attention_varlen, (function, *arguments), options)
    for name in _OF_PACKED[2:]:
        if options.get(name) is not None:
            expected = "nothing, without cu_seqlens_q and cu_seqlens_k"
            raise ArgumentError(name, expected, repr(options[name]), function="explain")
    known = {
        name: x for name, x in options.items() if x is not None or name not in _OF_PACKED
    }  # None is what it is without
    return _explain(attention, (function, *arguments), known)


_OF_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")


def _explain(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Explanation:
    try:
        with describing():
            function(*arguments, **options)
    except Described as described:
        return _explanation(described.plan, described.tensors, described.call)
    # copy_blocks and copy_recent without copies.
    raise ArgumentError("copies", "at least one pair (source, destination)", "none", function="explain")


def _explanation(plan: Plan, tensors: dict[str, Tensor], call: Call) -> Explanation:
    problem, launches = plan.problem, plan.launches
    note = (problem.note,) if isinstance(problem, AttentionProblem) and problem.note else ()
    if isinstance(problem, AttentionProblem) and problem.sparse is not None and launches is None:
        note = (*note, problem.sparse.keeps)
    flops = problem.flops if isinstance(problem, (AttentionProblem, BackwardProblem)) else None
    min_bytes = _min_bytes(problem, tensors)
    if launches is None:
        return Explanation(
            "reference (NumPy, CPU)", (*note, "the arrays are on the CPU"), "python", "no binary is needed", "cpu",
            "cpu", 0, 0, 0, flops, min_bytes, problem,
        )  # fmt: skip
    device = runtime.device_info(plan.ordinal)
    spec = launches.selection.spec
    resolution = runtime.resolve(spec, device.cc)
    main = next((record for record in launches.records if record.spec is spec), None)
    return Explanation(
        spec.name,
        launches.selection.why,
        resolution.kind,
        resolution.reason,
        resolution.arch,
        f"cuda:{plan.ordinal} {device.name}",
        0 if main is None else main.num_ctas,
        32 * spec.num_warps,
        spec.smem_bytes,
        flops,
        min_bytes,
        problem,
        tuple(_launch(record, device.cc) for record in launches.records),
        launches.workspace_bytes,
        _bytes_of(tensors["mask"]) if finding(plan) and "mask" in tensors else 0,
        lambda: count_tiles(call, plan, tensors),
    )


def _bytes_of(t: Tensor) -> int:
    """Bytes of an array without what it repeats."""
    return t.itemsize * math.prod(n for n, stride in zip(t.shape, t.strides, strict=True) if stride)


def _launch(record: LaunchRecord, cc: tuple[int, int]) -> Launch:
    resolution = runtime.resolve(record.spec, cc)
    return Launch(
        record.spec.name, resolution.kind, resolution.arch, record.num_ctas, record.threads, record.smem_bytes
    )


def _min_bytes(problem: Any, tensors: dict[str, Tensor]) -> int:
    if isinstance(problem, BackwardProblem) or (isinstance(problem, AttentionProblem) and problem.operands is None):
        return problem.min_bytes
    # Of attention on operands, mask and sinks do not count either.
    read = sum(t.size * t.itemsize for name, t in tensors.items() if name not in ("out", "mask", "sinks"))
    return int(read + sum(math.prod(output.shape) * ITEMSIZE[output.dtype] for output in problem.outputs))
