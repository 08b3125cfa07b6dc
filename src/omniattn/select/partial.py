"""The kernels beside one whose keys are divided: what has the last tiles of a call, and what merges partial results."""

from __future__ import annotations

from ..problems import AttentionProblem, Target
from ..registry import REGISTRY, KernelSpec
from .choice import Selection, the_one
from .fit import RowsOf, fitting_rows

_OF_DTYPE: RowsOf[tuple[str, str]] = RowsOf(lambda row, of: (row.op, row.dtype) == of)


def tail_row(spec: KernelSpec, problem: AttentionProblem, target: Target) -> KernelSpec | None:
    """The row that splits the keys of the tiles that ``spec`` leaves; None where there is none."""
    fitting = fitting_rows(REGISTRY, "attention_split", problem, target)
    return min((row for row in fitting if _goes_on(row, spec)), key=lambda row: row.options, default=None)


def _goes_on(row: KernelSpec, spec: KernelSpec) -> bool:
    """Whether ``row`` has the tiles of ``spec``, to which a tail is counted, and its operands."""
    same = (row.family, row.block_m, row.head_dim, row.head_dim_v)
    return not (row.score_mods or spec.quantizes_q) and same == (
        spec.family,
        spec.block_m,
        spec.head_dim,
        spec.head_dim_v,
    )


def merge_op(spec: KernelSpec, problem: AttentionProblem) -> str:
    """The operation that merges what the splits of ``spec`` leave."""
    if spec.arch_specific and spec.sequences == "packed":
        return "attention_combine_packed"
    own_lse = spec.quantized and problem.lse and not spec.value_factors
    return "attention_combine_lse" if own_lse else "attention_combine"


def combine_of(spec: KernelSpec, problem: AttentionProblem, target: Target, force: str | None) -> Selection:
    """The kernel that merges what the splits of ``spec`` leave."""
    (combine,) = _OF_DTYPE(REGISTRY, (merge_op(spec, problem), problem.dtype))
    return the_one(combine, "merges the splits' results", target, force)
