"""The kernel of an attention call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import UnsupportedError
from ..problems import UNLIMITED, AttentionProblem, Target
from ..problems.memory import ITEMSIZE
from ..registry import REGISTRY, KernelSpec
from ..registry.masks import MASK_TILE, MAX_TILES
from .advice import advise
from .choice import RowsOf, Selection, dotted, forced, unfit_target
from .short_forms import small_form_tile, small_plain_tile
from .tile import SMALL, best_tile

_BITS = {"int8": 8, "int4": 4, "fp8": 8}
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


class _Class(NamedTuple):
    """What rules most rows out, the same for calls of every length."""

    dtype: str
    quantized: bool
    precision: str
    head_dim: int
    head_dim_v: int
    own_head_dim_v: bool
    score_mods: bool
    lse: bool
    varlen: bool
    tensor_maps: bool
    target: Target


def _class_of(problem: AttentionProblem, target: Target) -> _Class:
    p = problem
    return _Class(
        p.dtype, p.precision.quantized, p.precision.name, p.head_dim, p.head_dim_v, bool(p.own_head_dim_v),
        p.score_mods, p.lse, p.varlen, p.tensor_maps, target,
    )  # fmt: skip


def _holds(spec: KernelSpec, problem: AttentionProblem) -> bool:
    """Whether the kernel's tiles are wide enough."""
    return spec.head_dim >= problem.head_dim and spec.head_dim_v >= problem.head_dim_v


def _unfit_class(spec: KernelSpec, of: _Class) -> str | None:
    """Why ``spec`` can serve no call of a class; None if it can."""
    if spec.dtype != of.dtype:
        return f"it is compiled for {spec.dtype}, the arrays are {of.dtype}"
    if spec.head_dim < of.head_dim:
        return f"it takes head_dim up to {spec.head_dim}, not {of.head_dim}"
    if spec.head_dim_v < of.head_dim_v:
        return f"it takes v of head_dim up to {spec.head_dim_v}, not {of.head_dim_v}"
    # Kernels with tensor maps fill the rows of each array with zeros, and so do quantizers. Others have one head_dim.
    if not (spec.arch_specific or spec.quantized) and of.own_head_dim_v != ("head_dim_v" in spec.features):
        return "it takes v of q's head_dim only" if of.own_head_dim_v else "it is for v of another head_dim than q"
    if of.score_mods and "score_mods" not in spec.features:
        return "it has no softcap, mask or non-positive softmax_scale"
    if of.lse and "lse" in spec.lacks:
        return "it makes no LSE"
    if of.varlen and "varlen" in spec.lacks:
        return "it takes no packed sequences"
    if not of.varlen and "dense" in spec.lacks:
        return "it takes packed sequences only"
    if not of.tensor_maps and "any_strides" in spec.lacks:
        return "tensor maps cannot describe these strides, or the driver in use cannot make them"
    if spec.quantized != of.quantized:
        return f"it multiplies {f'{spec.qk} operands' if spec.quantized else spec.dtype}, not {of.precision} ones"
    return unfit_target(spec, of.target)


def _unfit(spec: KernelSpec, problem: AttentionProblem, target: Target) -> str | None:
    """Why ``spec`` cannot serve ``problem``; None if it can."""
    return _unfit_class(spec, _class_of(problem, target)) or unfit_call(spec, problem, target)


def unfit_call(spec: KernelSpec, problem: AttentionProblem, target: Target) -> str | None:
    """Why ``spec``, which can serve calls of this class, cannot serve ``problem``; None if it can."""
    if problem.score_mod is not None and (spec.quantized or "lists" in spec.lacks):
        return "it takes no score_mod"
    if problem.block_mask is not None:
        if spec.quantized:
            return "it takes no block_mask"
        if "lists" in spec.lacks:
            return "it visits every tile of keys"
        if problem.seqlen_k > MASK_TILE * MAX_TILES:
            return f"lists count tiles of keys up to {MAX_TILES}"
    if problem.softcap > 0.0 and "softcap" in spec.lacks:
        return "it has no softcap"
    if (reason := _unfit_mask(spec, problem)) is not None:
        return reason
    if (reason := unfit_precision(spec, problem, target)) is not None:
        return reason
    if spec.arch_specific:
        # A bound: 64 rows are the smallest tile, and packed sequences add one each.
        blocks = problem.seqlen_q // 64 + (problem.batch + 3 if problem.varlen else 1)
        heads = problem.num_q_heads * (1 if problem.varlen else problem.batch)
        if heads * blocks >= 2**31 - 2**16:
            return "it counts tiles in 31 bits"
    return None


def _unfit_mask(spec: KernelSpec, problem: AttentionProblem) -> str | None:
    """Why ``spec``, which has score modifiers if the problem wants them, cannot take its mask; None if it can."""
    if not spec.arch_specific or "score_mods" not in spec.features:
        return None
    if problem.seqlen_k > MASK_TILE * MAX_TILES:
        return f"it counts tiles of keys up to {MAX_TILES}"
    if problem.mask_form == "tiles":
        if spec.bias_bytes == 0:
            return "it takes no additive mask that differs between queries"
        if spec.bias_bytes != ITEMSIZE[problem.mask_dtype]:
            return f"it takes additive masks of {8 * spec.bias_bytes} bits"
        if not (problem.mask_map or (spec.family == "attn_fwd_sm90" and problem.aligns_mask)):
            return "tensor maps cannot describe this mask: its address and strides are no multiples of 16 bytes"
    elif spec.bias_bytes != 0:
        return "it is for additive masks that differ between queries"
    elif problem.mask_form == "bits" and problem.one_mask_for_all_keys:
        return "it packs masks key by key, and this one is the same for all keys"
    if problem.mask != "none" and "masks" in spec.lacks:
        return "it takes no masks of packed sequences"
    return None


def unfit_precision(spec: KernelSpec, problem: AttentionProblem, target: Target) -> str | None:
    """Why ``spec`` cannot multiply what ``problem`` wants multiplied; None if it can."""
    wanted = problem.precision
    if not wanted.quantized:
        return None
    by_block = problem.descales is not None and problem.descales.v.granularity == "per_block"
    if by_block != ("value_factors" in spec.features):
        return (
            "it takes no factor for each 128 rows of v" if by_block else "it is for v with a factor for each 128 rows"
        )
    if (wanted.qk == "fp8") != (spec.qk == "fp8"):
        return f"it multiplies {spec.qk} operands, not {wanted.qk} ones"
    operands = problem.operands
    if (
        operands is not None
        and not operands.e4m3
        and (operands.grouping, operands.stored_bits) != (spec.grouping, _BITS[spec.qk])
    ):
        return (
            f"it reads {_BITS[spec.qk]}-bit operands in the {spec.grouping} grouping, these are "
            f"{operands.stored_bits}-bit ones in the {operands.grouping} grouping"
        )
    if problem.descales is not None and not spec.arch_specific and problem.head_dim % 16:
        return "it reads rows of e4m3 in units of 16, and head_dim is no multiple of that"
    if wanted.pv not in ("auto", spec.pv):
        return f"it multiplies P and V in {spec.pv}, not {wanted.pv}"
    if wanted.pv_accumulator not in ("auto", spec.pv_accumulator):
        return f"it sums P V in {spec.pv_accumulator}, not {wanted.pv_accumulator}"
    if spec.qk == "int4" and wanted.qk == "int8":
        return "it multiplies 4-bit integers"
    if spec.qk == "int8" and wanted.qk == "int4" and target.cc < (9, 0) and operands is None:
        return "it multiplies 8-bit integers, and this GPU has 4-bit products"
    if wanted.smooth_q != ("smooth_q" in spec.features) and "score_mods" not in spec.features:
        return f"it is compiled with{'out' if wanted.smooth_q else ''} smooth_q"
    if wanted.granularity == "per_token":
        return "it has one scale a lane, not one a token"
    return None


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


_ROWS: RowsOf[_Class] = RowsOf(lambda spec, of: spec.op == "attention" and _unfit_class(spec, of) is None)


def _is_wider(spec: KernelSpec, p: AttentionProblem) -> bool:
    """Whether it is the large tile of two warpgroups, whose columns heads of 72 to 96 do not fill.

    Of short sequences it has fewer unused rows than their own of three (docs/performance/short.md).
    """
    two = (spec.head_dim, spec.head_dim_v, spec.block_m) == (128, 128, 128)
    return two and p.head_dim > 64 and not p.varlen and p.window_left == p.window_right == UNLIMITED


def fitting_rows(problem: AttentionProblem, target: Target) -> list[KernelSpec]:
    """The rows of attention without a split that can serve a call, in the registry's order."""
    alike = _ROWS(REGISTRY, _class_of(problem, target))
    return [spec for spec in alike if unfit_call(spec, problem, target) is None]


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
    if (chosen := forced(force, ("attention",), lambda spec: _unfit(spec, problem, target))) is not None:
        return chosen
    fitting = fitting_rows(problem, target)
    if reads_mask(problem, target):
        fitting = [spec for spec in fitting if spec.bias_bytes == 0]
    if not fitting:
        rows = [spec for spec in REGISTRY if spec.op == "attention" and spec.quantized == wanted.quantized]
        # Of rows for other element types and narrower heads nobody wants to hear, unless there are no others.
        near = [s for s in rows if s.dtype == problem.dtype and _holds(s, problem)] or rows
        reasons = sorted({reason for spec in near if (reason := _unfit(spec, problem, target))})
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
            "score_mods" in s.features,
            problem.packed_lists and "masks" in s.lacks,
            len(s.features) - len(s.lacks),
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
        best = min(generic, key=lambda s: (s.head_dim, len(s.features), (-s.min_arch[0], -s.min_arch[1])))
    usual = best
    if small is not None:
        best = small
    if of_hopper and not problem.score_mods and not best.own_head_dim_v:
        kind, widths = (best.family, best.features), (best.head_dim, best.head_dim_v)
        kin = [s for s in fitting if (s.family, s.features) == kind]
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
    if problem.packs_mask and "lists" in best.lacks:
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
                and (reason := _unfit(spec, problem, target))
            }
        )
    return Selection(best, tuple(why))
