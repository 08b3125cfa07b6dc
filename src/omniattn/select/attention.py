"""The kernel of an attention call."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import UnsupportedError
from ..problems import UNLIMITED, AttentionProblem, Target
from ..problems.memory import ITEMSIZE
from ..registry import REGISTRY, KernelSpec
from .advice import advise
from .choice import Selection, dotted, forced
from .fit import fit, fitting_rows
from .short_forms import small_form_tile, small_plain_tile
from .tile import SMALL, best_tile

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


def tile_words(spec: KernelSpec) -> str:
    """The widths of a kernel's tiles."""
    return f"a tile of {spec.head_dim}" + (f", {spec.head_dim_v} of v" if spec.own_head_dim_v else "")


def _holds(spec: KernelSpec, problem: AttentionProblem) -> bool:
    """Whether the kernel's tiles are wide enough."""
    return spec.head_dim >= problem.head_dim and spec.head_dim_v >= problem.head_dim_v


#: Queries and keys up to which softcap is faster on mma.sync than in the large tiles that Hopper's kernel has for it;
#: widest head_dim of these, for which there are no small tiles (docs/performance/short.md).
_TINY, _TINY_HEAD_DIM = 64, 32


def _is_tiny(p: AttentionProblem, target: Target) -> bool:
    """Whether it is a large batch of tiny sequences with softcap or a scale <= 0, but without any mask."""
    if p.varlen or not p.score_mods or p.mask != "none" or p.score_mod is not None or p.block_mask is not None:
        return False
    if p.own_head_dim_v or p.head_dim > _TINY_HEAD_DIM:
        return False
    return max(p.seqlen_q, p.seqlen_k) <= _TINY and p.batch * p.num_q_heads > 4 * target.sm_count


#: Keys a query up to which an additive mask that no tensor map describes is copied for Hopper's kernel
#: (docs/performance/short.md). With more of them keys are split, on mma.sync, which reads any mask.
COPY_RATIO = 16
#: Heads an SM, of all batches, up to which they are split.
_SPLIT_HEADS = 4


def reads_mask(p: AttentionProblem, target: Target) -> bool:
    """Whether an additive mask that no tensor map describes is read where it is, which is for mma.sync."""
    if not p.aligns_mask or p.seqlen_k <= COPY_RATIO * p.seqlen_q:
        return False
    few = p.batch * p.num_q_heads <= _SPLIT_HEADS * target.sm_count
    # A copy is to be no larger than what there is besides.
    keys = p.batch * p.num_kv_heads * p.seqlen_k * (p.head_dim + p.head_dim_v)
    return few or p.mask_elements * ITEMSIZE[p.mask_dtype] > keys * ITEMSIZE[p.dtype]


def _is_wider(spec: KernelSpec, p: AttentionProblem) -> bool:
    """Whether it is the large tile of two warpgroups, whose columns heads of 72 to 96 do not fill.

    Of short sequences it has fewer unused rows than their own of three (docs/performance/short.md).
    """
    two = (spec.head_dim, spec.head_dim_v, spec.block_m) == (128, 128, 128)
    return two and p.head_dim > 64 and not p.varlen and p.window_left == p.window_right == UNLIMITED


def preferred_products(rows: Iterable[KernelSpec], problem: AttentionProblem, target: Target) -> list[KernelSpec]:
    """Those with the element types of P V and of Q K^T that this GPU multiplies best; of exact attention all."""
    rows = list(rows)
    if not problem.precision.quantized or not rows:
        return rows
    choices, _ = PV_CHOICES.get(target.cc, _PV_OTHERWISE)

    def rank(spec: KernelSpec) -> tuple[bool, int, bool]:
        int4_first = target.cc < (9, 0)
        return not spec.arch_specific, choices.index((spec.pv, spec.pv_accumulator)), (spec.qk == "int4") != int4_first

    best = min(map(rank, rows))
    return [spec for spec in rows if rank(spec) == best]


def select_attention(problem: AttentionProblem, target: Target, force: str | None = None) -> Selection:
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
    wanted = problem.precision
    if (chosen := forced(force, ("attention",), lambda spec: fit(spec, problem, target))) is not None:
        return chosen
    fitting = fitting_rows(REGISTRY, "attention", problem, target)
    if reads_mask(problem, target):
        fitting = [spec for spec in fitting if spec.bias_bytes == 0]
    if not fitting:
        rows = [spec for spec in REGISTRY if spec.op == "attention" and spec.quantized == wanted.quantized]
        # Of rows for other element types and narrower heads nobody wants to hear, unless there are no others.
        near = [s for s in rows if s.dtype == problem.dtype and _holds(s, problem)] or rows
        reasons = sorted({reason for spec in near if (reason := fit(spec, problem, target))})
        raise UnsupportedError(
            f"no attention kernel serves {wanted.name} {problem.dtype}, {problem.head_dims} on compute "
            f"capability {dotted(target.cc)}: " + "; ".join(reasons),
            instead="float16 or bfloat16, head_dim up to 256, compute capability 8.0 or newer"
            if not wanted.quantized
            else "precision='int8' or 'exact'"
            if wanted.qk == "fp8" and problem.descales is None
            else "16-bit arrays, with precision='int8' or precision='exact'"
            if wanted.qk == "fp8" and problem.descales is not None
            else "precision='exact'"
            if problem.operands is None
            else "arrays that are not quantized, with precision='exact' where it has to be",
        )
    # A kernel made for this very architecture; then the narrowest tile that holds head_dim; nothing taken that is not
    # needed; one that skips hidden tiles; tuned for such a problem, or else for all; among equals the newest tuning.
    choices, why_pv = PV_CHOICES.get(target.cc, _PV_OTHERWISE)
    best = min(
        (s for s in fitting if SMALL not in s.tuned_for),
        key=lambda s: (
            not s.arch_specific,
            s.quantized and choices.index((s.pv, s.pv_accumulator)),
            s.qk == "int4" and target.cc >= (9, 0),
            s.head_dim + s.head_dim_v,
            s.score_mods,
            problem.packed_lists and not s.lists,
            s.options,
            0 if problem.workload in s.tuned_for else 2 if s.tuned_for else 1,
            (-s.min_arch[0], -s.min_arch[1]),
        ),
    )
    generic = [s for s in fitting if not s.arch_specific and SMALL not in s.tuned_for]
    of_hopper = best.family == "attn_fwd_sm90"
    exact_mods = problem.score_mods and not best.quantized
    small = small_form_tile(problem, target, best, fitting) if exact_mods else None
    tiny = small is None and of_hopper and bool(generic) and _is_tiny(problem, target)
    if tiny:
        best = min(generic, key=lambda s: (s.head_dim, (-s.min_arch[0], -s.min_arch[1])))
    usual = best
    if small is not None:
        best = small
    if of_hopper and not problem.score_mods and not best.own_head_dim_v:
        widths = best.head_dim, best.head_dim_v
        kin = [s for s in fitting if (s.family, s.score_mods) == (best.family, best.score_mods)]
        # Not every head_dim has small tiles: wider ones do, in which columns are left over.
        kin = [s for s in kin if (s.head_dim, s.head_dim_v) == widths or SMALL in s.tuned_for or _is_wider(s, problem)]
        small = small_plain_tile(problem, target, fitting)
        best = small or best_tile(problem, target, usual, kin)
    why = [
        *([problem.note] if problem.note else []),
        f"{problem.dtype}, {problem.head_dims} in {tile_words(best)}",
        "score modifiers (softcap, mask, score_mod or softmax_scale <= 0)"
        if problem.score_mods
        else "no score modifiers",
        f"tuned for compute capability {dotted(best.min_arch)}{'' if best.arch_specific else ' and newer'}, this GPU "
        f"has {dotted(target.cc)}",
    ]
    if wanted.quantized:
        asked = "auto" not in (wanted.pv, wanted.pv_accumulator)
        reason = "as asked for" if asked else "two-level sums" if best.arch_specific else why_pv
        why.append(f"P V in {best.pv} with {best.pv_accumulator} accumulators: {reason}")
    if best.bias_bytes and problem.aligns_mask:
        why.append("tensor maps cannot describe this mask: it is copied to rows at multiples of 16 bytes")
    if problem.packs_mask and best.masks == "packed" and not best.lists:
        why.append("so few keys are all visited: nobody looks for tiles that the mask hides")
    if (advice := advise(problem, target)) is not None:
        why.append(advice)
    if wanted.qk == "int4" and best.qk == "int8":
        why.append("this GPU has no 4-bit products: 4-bit values go through the 8-bit ones, no faster than int8")
    if tiny:
        why.append("tiny sequences: the large tiles that the kernel of this GPU has for scores would be nearly empty")
    if best is not usual:
        ctas = f"{best.ctas_per_sm} CTAs an SM" if best.ctas_per_sm > 1 else "one CTA an SM"
        why.append(
            f"tile of {best.block_m} query rows and {best.block_n} keys, {ctas}: the fastest "
            + ("of those measured with so few queries and keys" if small else "by the model of short sequences")
        )
    elif best.tuned_for:
        why.append(f"tile of {best.block_m} query rows and {best.block_n} keys, tuned for {problem.workload} problems")
    if not best.arch_specific:
        # Why the faster kernel of this GPU does not serve the call.
        why += sorted(
            {
                f"not {spec.family}: {reason}"
                for spec in REGISTRY
                if spec.op == "attention"
                and spec.quantized == wanted.quantized
                and spec.arch_specific
                and spec.min_arch == target.cc
                and spec.dtype == problem.dtype
                and _holds(spec, problem)
                and (reason := fit(spec, problem, target))
            }
        )
    return Selection(best, tuple(why))
