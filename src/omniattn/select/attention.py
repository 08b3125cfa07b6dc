"""Problem + GPU -> kernel. Pure: no driver, no arrays; testable without a GPU, and able to explain itself."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ArgumentError, UnsupportedError
from .problem import Problem
from .registry import REGISTRY, KernelSpec, by_name

_FP8_FIRST = (
    (("fp8", "fp16"), ("fp8", "fp32"), ("fp16", "fp16"), ("fp16", "fp32")),
    "fp8 products are twice as fast as fp16 ones, and on GeForce cards twice as fast again with fp16 sums",
)
#: Element type and accumulator of P V by compute capability, best first, for kernels on mma.sync: (choices, why). The
#: rates are the vendor's (docs/precision.md cites them). Other GPUs take `_PV_OTHERWISE`.
PV_CHOICES: dict[tuple[int, int], tuple[tuple[tuple[str, str], ...], str]] = {
    (8, 0): ((("fp16", "fp32"), ("fp16", "fp16")), "fp16 products are as fast with fp32 sums as with fp16 ones"),
    (8, 6): ((("fp16", "fp16"), ("fp16", "fp32")), "fp16 products are twice as fast with fp16 sums as with fp32 ones"),
    (8, 9): _FP8_FIRST,
    (12, 0): _FP8_FIRST,
}
_PV_OTHERWISE = (
    (("fp16", "fp32"), ("fp16", "fp16"), ("fp8", "fp32"), ("fp8", "fp16")),
    "fp16 products run on every GPU at full rate; mma.sync on fp8 may be converted to them first, as on Hopper",
)


@dataclass(frozen=True)
class Target:
    """What selection looks at of a GPU.

    Attributes
    ----------
    cc : (major, minor)
        Compute capability.
    max_smem : int
        Bytes of shared memory that one CTA can opt in to.
    """

    cc: tuple[int, int]
    max_smem: int


@dataclass(frozen=True)
class Selection:
    """A chosen kernel.

    Attributes
    ----------
    spec : KernelSpec
        The registry row.
    why : tuple of str
        One sentence for each fact that decided.
    """

    spec: KernelSpec
    why: tuple[str, ...]


def _unfit(spec: KernelSpec, problem: Problem, target: Target) -> str | None:
    """Why ``spec`` cannot serve ``problem``; None if it can."""
    if spec.dtype != problem.dtype:
        return f"it is compiled for {spec.dtype}, the arrays are {problem.dtype}"
    if spec.head_dim < problem.head_dim:
        return f"it takes head_dim up to {spec.head_dim}, not {problem.head_dim}"
    if problem.score_mods and "score_mods" not in spec.features:
        return "it has no softcap, mask or non-positive softmax_scale"
    if problem.low is not None:
        low = problem.low
        if problem.operands not in (None, (spec.grouping, spec.bits)):
            return "it reads {1}-bit operands in the {0} grouping, these are {3}-bit ones in the {2} grouping".format(
                spec.grouping, spec.bits, *problem.operands
            )
        if low.pv not in ("auto", spec.pv):
            return f"it multiplies P and V in {spec.pv}, not {low.pv}"
        if low.pv_accumulator not in ("auto", spec.pv_accumulator):
            return f"it sums P V in {spec.pv_accumulator}, not {low.pv_accumulator}"
        if spec.bits == 4 and low.bits == 8:
            return "it multiplies 4-bit integers"
        if spec.bits == 8 and low.bits == 4 and target.cc < (9, 0) and problem.operands is None:
            return "it multiplies 8-bit integers, and this GPU has 4-bit products"
        if low.smooth_q != ("smooth_q" in spec.features) and "score_mods" not in spec.features:
            return f"it is compiled with{'out' if low.smooth_q else ''} smooth_q"
        if low.granularity == "per_token":
            return "it has one scale a lane, not one a token"
    if problem.lse and "lse" in spec.lacks:
        return "it makes no LSE"
    if problem.varlen and "varlen" in spec.lacks:
        return "it takes no packed sequences"
    if not problem.varlen and "dense" in spec.lacks:
        return "it takes packed sequences only"
    if not problem.tensor_maps and "any_strides" in spec.lacks:
        return "tensor maps cannot describe these strides, or the driver in use cannot make them"
    if spec.arch_specific:
        # A bound: 64 rows are the smallest tile, and packed sequences add one each.
        blocks = problem.seqlen_q // 64 + (problem.batch + 3 if problem.varlen else 1)
        heads = problem.num_q_heads * (1 if problem.varlen else problem.batch)
        if heads * blocks >= 2**31 - 2**16:
            return "it counts tiles in 31 bits"
    if spec.arch_specific and target.cc != spec.min_arch:
        return f"it is for compute capability {_dotted(spec.min_arch)} only, this GPU has {_dotted(target.cc)}"
    if target.cc < spec.min_arch:
        return f"it needs compute capability {_dotted(spec.min_arch)}, this GPU has {_dotted(target.cc)}"
    if spec.smem_bytes > target.max_smem:
        return f"it needs {spec.smem_bytes} bytes of shared memory, this GPU gives {target.max_smem}"
    return None


def _dotted(cc: tuple[int, int]) -> str:
    return f"{cc[0]}.{cc[1]}"


def select_attention(problem: Problem, target: Target, force: str | None = None) -> Selection:
    """Choose the kernel of an attention problem.

    Parameters
    ----------
    problem : Problem
        The call.
    target : Target
        The GPU.
    force : str, optional
        Name of a registry row that has to be used (``OMNIATTN_FORCE_KERNEL``).

    Returns
    -------
    Selection

    Raises
    ------
    ArgumentError
        ``force`` names no attention kernel, or one that cannot serve the problem.
    UnsupportedError
        No kernel serves the problem on this GPU.
    """
    op = "attention" if problem.low is None else "attention_int8"
    if force:
        try:
            spec = by_name(force)
        except KeyError as error:
            raise ArgumentError("OMNIATTN_FORCE_KERNEL", "the name of a registered kernel", error.args[0]) from None
        reason = f"it is no kernel of {op}" if spec.op != op else _unfit(spec, problem, target)
        if reason:
            raise ArgumentError("OMNIATTN_FORCE_KERNEL", "a kernel that can serve this call", f"{force!r}: {reason}")
        return Selection(spec, (f"OMNIATTN_FORCE_KERNEL={force}",))

    rows = [spec for spec in REGISTRY if spec.op == op]
    fitting = [spec for spec in rows if _unfit(spec, problem, target) is None]
    if not fitting:
        # Of rows for other element types and narrower heads nobody wants to hear, unless there are no others.
        near = [s for s in rows if s.dtype == problem.dtype and s.head_dim >= problem.head_dim] or rows
        reasons = sorted({reason for spec in near if (reason := _unfit(spec, problem, target))})
        raise UnsupportedError(
            f"no attention kernel serves {problem.precision} {problem.dtype}, head_dim {problem.head_dim} on compute "
            f"capability {_dotted(target.cc)}: " + "; ".join(reasons),
            instead="float16 or bfloat16, head_dim up to 256, compute capability 8.0 or newer"
            if problem.low is None
            else "precision='exact'"
            if problem.operands is None
            else "arrays that are not quantized, with precision='exact' where it has to be",
        )
    # A kernel made for this very architecture; then the narrowest tile that holds head_dim; no features that are not
    # needed; tuned for such a problem, or else for all; among equals the newest tuning.
    choices, why_pv = PV_CHOICES.get(target.cc, _PV_OTHERWISE)
    best = min(
        fitting,
        key=lambda s: (
            not s.arch_specific,
            (s.pv, s.pv_accumulator) != ("", "") and choices.index((s.pv, s.pv_accumulator)),
            s.bits == 4 and target.cc >= (9, 0),
            s.head_dim,
            len(s.features),
            0 if problem.workload in s.tuned_for else 2 if s.tuned_for else 1,
            (-s.min_arch[0], -s.min_arch[1]),
        ),
    )
    why = [
        f"{problem.dtype}, head_dim {problem.head_dim} in a tile of {best.head_dim}",
        "score modifiers (softcap, mask or softmax_scale <= 0)" if problem.score_mods else "no score modifiers",
        f"tuned for compute capability {_dotted(best.min_arch)}{'' if best.arch_specific else ' and newer'}, this GPU "
        f"has {_dotted(target.cc)}",
    ]
    if problem.low is not None:
        asked = "auto" not in (problem.low.pv, problem.low.pv_accumulator)
        reason = "as asked for" if asked else "two-level sums" if best.arch_specific else why_pv
        why.append(f"P V in {best.pv} with {best.pv_accumulator} accumulators: {reason}")
    if problem.low is not None and problem.low.bits == 4 and best.bits == 8:
        why.append("this GPU has no 4-bit products: 4-bit values go through the 8-bit ones, no faster than int8")
    if best.tuned_for:
        why.append(f"tile of {best.block_m} query rows and {best.block_n} keys, tuned for {problem.workload} problems")
    if not best.arch_specific:
        # Why the faster kernel of this GPU does not serve the call.
        why += sorted(
            {
                f"not {spec.family}: {reason}"
                for spec in rows
                if spec.arch_specific
                and spec.min_arch == target.cc
                and spec.dtype == problem.dtype
                and spec.head_dim >= problem.head_dim
                and (reason := _unfit(spec, problem, target))
            }
        )
    return Selection(best, tuple(why))


def select_merge_states(dtype: str, target: Target | None = None) -> Selection:
    """Choose the kernel that merges partial results of element type ``dtype``.

    Raises
    ------
    UnsupportedError
        There is none for that element type, or for the GPU ``target``.
    """
    for spec in REGISTRY:
        if spec.op == "merge_states" and spec.dtype == dtype:
            if target is not None and target.cc < spec.min_arch:
                raise UnsupportedError(
                    f"merge_states needs compute capability {_dotted(spec.min_arch)}, "
                    f"this GPU has {_dotted(target.cc)}",
                    instead="arrays on the CPU, or a newer GPU",
                )
            return Selection(spec, (f"merges {dtype} outputs",))
    raise UnsupportedError(
        f"merge_states has no kernel for {dtype}",
        instead=", ".join(s.dtype for s in REGISTRY if s.op == "merge_states"),
    )
