"""What decides about kernels of attention besides time: which products a GPU has, and why none serves a call."""

from __future__ import annotations

from collections.abc import Iterable

from ..arguments import MAX_HEAD_DIM
from ..errors import UnsupportedError
from ..problems import AttentionProblem, Target
from ..problems.products import products_of
from ..registry import REGISTRY, KernelSpec
from .advice import advise
from .candidate import Candidate, MaskInput
from .choice import dotted
from .fit import fit


def preferred_products(rows: Iterable[KernelSpec], problem: AttentionProblem, target: Target) -> list[KernelSpec]:
    """Those with the element types of P V and of Q K^T that this GPU multiplies best; of exact attention all.

    Which products a call gets is a matter of accuracy too: it must not depend on how long the sequences are.
    """
    rows = list(rows)
    if not problem.precision.quantized or not rows:
        return rows
    choices, _ = products_of(target.cc)

    def rank(spec: KernelSpec) -> tuple[bool, int, bool]:
        int4_first = target.cc < (9, 0)
        return not spec.arch_specific, choices.index((spec.pv, spec.pv_accumulator)), (spec.qk == "int4") != int4_first

    best = min(map(rank, rows))
    return [spec for spec in rows if rank(spec) == best]


def _holds(spec: KernelSpec, problem: AttentionProblem) -> bool:
    """Whether the kernel's tiles are wide enough."""
    return spec.head_dim >= problem.head_dim and spec.head_dim_v >= problem.head_dim_v


def unserved(problem: AttentionProblem, target: Target) -> UnsupportedError:
    """The error of a call that no kernel serves: why not, and what is served in its place."""
    wanted = problem.precision
    rows = [spec for spec in REGISTRY if spec.op == "attention" and spec.quantized == wanted.quantized]
    # Of rows for other element types and narrower heads nobody wants to hear, unless there are no others.
    near = [s for s in rows if s.dtype == problem.dtype and _holds(s, problem)] or rows
    reasons = sorted({reason for spec in near if (reason := fit(spec, problem, target))})
    return UnsupportedError(
        f"no attention kernel serves {wanted.name} {problem.dtype}, {problem.head_dims} on compute "
        f"capability {dotted(target.cc)}: " + "; ".join(reasons),
        instead=f"float16 or bfloat16, head_dim up to {MAX_HEAD_DIM}, compute capability 8.0 or newer"
        if not wanted.quantized
        else "precision='int8' or 'exact'"
        if wanted.qk == "fp8" and problem.descales is None
        else "16-bit arrays, with precision='int8' or precision='exact'"
        if wanted.qk == "fp8" and problem.descales is not None
        else "precision='exact'"
        if problem.operands is None
        else "arrays that are not quantized, with precision='exact' where it has to be",
    )


#: What `explain` says of a row's integer_powers.
_POWERS = {
    "corrected": "P of tiles without hidden keys is made of integers, with a corrected mantissa",
    "half linear": "half of P of tiles without hidden keys is made of integers, with a linear mantissa",
    "linear": "P of tiles without hidden keys is made of integers, with a linear mantissa: fast_exp",
}


def facts(way: Candidate, problem: AttentionProblem, target: Target) -> tuple[str, ...]:
    """One sentence for each fact that decided about the kernel of a way, but for its time.

    Parameters
    ----------
    way : Candidate
    problem : AttentionProblem
        The call.
    target : Target
    """
    row, wanted, p = way.row, problem.precision, way.told(problem)
    widths = f"a tile of {row.head_dim}" + (f", {row.head_dim_v} of v" if row.own_head_dim_v else "")
    newer = "" if row.arch_specific else " and newer"
    said = [
        *([problem.note] if problem.note else []),
        f"{p.dtype}, {p.head_dims} in {widths}, for compute capability {dotted(row.min_arch)}{newer}; this GPU has "
        f"{dotted(target.cc)}",
    ]
    if p.score_mods:
        said.append("score modifiers: softcap, mask, score_mod or softmax_scale <= 0")
    if wanted.quantized:
        asked = "auto" not in (wanted.pv, wanted.pv_accumulator)
        _, why_pv = products_of(target.cc)
        reason = "as asked for" if asked else "two-level sums" if row.arch_specific else why_pv
        said.append(f"P V in {row.pv} with {row.pv_accumulator} accumulators: {reason}")
        if row.quantizes_q:
            said.append("q is read in 16 bits and quantized by this kernel; k and v are by those before it")
        if row.integer_powers != "none":
            said.append(_POWERS[row.integer_powers])
        if wanted.fast_exp and row.integer_powers != "linear":
            said.append("fast_exp changes nothing: kernels of plain batches with up to 64 channels have it")
    if way.heads_as_queries:
        said.append(f"one query: the {p.seqlen_q} query heads of a kv head are the rows of a tile")
    if way.mask is MaskInput.COPIED:
        said.append("tensor maps cannot describe this mask: it is copied to rows at multiples of 16 bytes")
    if (advice := advise(problem, target)) is not None:
        said.append(advice)
    if wanted.qk == "int4" and row.qk == "int8":
        said.append("this GPU has no 4-bit products: 4-bit values go through the 8-bit ones, no faster than int8")
    if not row.arch_specific:
        said += _unfit_of_this_gpu(p, target)
    return tuple(said)


def _unfit_of_this_gpu(problem: AttentionProblem, target: Target) -> list[str]:
    """Why kernels made for this very GPU do not serve a call; empty where one does."""
    reasons: set[str] = set()
    for spec in REGISTRY:
        if spec.op != "attention" or not spec.arch_specific or spec.min_arch != target.cc:
            continue
        if spec.quantized != problem.precision.quantized or spec.dtype != problem.dtype or not _holds(spec, problem):
            continue
        reason = fit(spec, problem, target)
        if reason is None:
            return []
        reasons.add(f"not {spec.family}: {reason}")
    return sorted(reasons)
