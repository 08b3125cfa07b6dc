"""Launches of the backward of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import ArgumentError, UnsupportedError
from ..launch import attn_bwd_sm80, attn_bwd_sm90, tile_kinds, used_rows
from ..launch.dropout import with_dropout
from ..launch.host_struct import At
from ..launch.masks import MaskPlaces
from ..launch.score_mod import with_score_mod
from ..problems import AttentionProblem, BackwardProblem, Target
from ..problems.memory import WORKSPACE_ALIGNMENT
from ..problems.tile_order import num_m_blocks, num_n_blocks
from ..runtime.record import LaunchRecord
from ..select import (
    Selection,
    order_of_keys,
    order_of_queries,
    select_backward_rows,
    select_clear,
    select_tile_kinds,
)
from ..select.backward_ways import BackwardWay, asked_of_backward
from ..select.ways import chosen_ways
from .available import first_that_loads
from .engine import Launches


def _check(problem: BackwardProblem) -> None:
    f = problem.forward
    function = "attention_varlen_backward" if f.varlen else "attention_backward"
    if f.precision.quantized:
        raise UnsupportedError(f"{function}(): no gradients of precision={f.precision.name!r}", instead="'exact'")
    if f.score_mod is not None and f.score_mod.grad is None:
        raise ArgumentError(
            "score_mod", "ScoreMod(..., grad=expression), the derivative of the new score by the old one",
            "a ScoreMod without grad", function=function,
        )  # fmt: skip
    if "dmask" in problem.wanted and f.mask in ("none", "bool"):
        raise ArgumentError("dmask", "an additive mask", f"mask of kind {f.mask!r}", function=function)
    if "dmask" in problem.wanted and problem.deterministic and _sums_into_dmask(problem):
        raise UnsupportedError(
            f"{function}(): with deterministic=True no gradient of a mask that is broadcast",
            instead="deterministic=False, or a mask of full shape",
        )


def _sums_into_dmask(problem: BackwardProblem) -> bool:
    """Whether an element of dmask gets more than one sum: the order of two would not be fixed."""
    f, s = problem.forward, problem.strides
    if s is None:
        return True
    extents = (f.batch, f.num_q_heads, *f.mask_extent)
    return any(extent > 1 and stride == 0 for extent, stride in zip(extents, s.dmask, strict=True))


def _compiled(selection: Selection, problem: BackwardProblem) -> Selection:
    mod, dropout = problem.forward.score_mod, problem.forward.dropout
    if dropout is not None:
        why = f"with dropout compiled in, which no wheel carries: {dropout.threshold} of 256 are dropped"
        return Selection(with_dropout(selection.spec, dropout), (*selection.why, why))
    if mod is None:
        return selection
    spec = with_score_mod(selection.spec, mod, backward=True)
    return Selection(spec, (*selection.why, "with score_mod compiled in, which no wheel carries"))


def _clear(
    problem: BackwardProblem, target: Target, force: str | None
) -> tuple[tuple[Selection, ...], tuple[LaunchRecord, ...]]:
    """What clears gradients of rows that are not used."""
    f, s = problem.forward, problem.strides
    if s is None:
        return (), ()
    arrays = (
        used_rows.Cleared("dq", "q", f.seqlen_q, f.num_q_heads, f.head_dim, s.dq),
        used_rows.Cleared("dk", "k", f.seqlen_k, f.num_kv_heads, f.head_dim, s.dk),
        used_rows.Cleared("dv", "k", f.seqlen_k, f.num_kv_heads, f.head_dim_v, s.dv),
    )
    cleared = [x for x in arrays if x.name in problem.wanted and f.used["qk".index(x.side)]]
    if not cleared:
        return (), ()
    selection = select_clear(target, force)
    return (selection,), used_rows.build_clear(selection.spec, f.batch, cleared)


class _Lists:
    """Lists of the tiles that a block mask leaves, made as kernels ask for them."""

    def __init__(self, problem: BackwardProblem, target: Target, force: str | None, end: int) -> None:
        self._problem = problem.forward
        self.end = end  # of the workspace, bytes
        self.records: tuple[LaunchRecord, ...] = ()
        self.selections: tuple[Selection, ...] = ()
        if self._problem.block_mask is not None:
            self.selections = select_tile_kinds(target, force)

    def of_keys(self, block_n: int) -> MaskPlaces | None:
        """For each tile of ``block_n`` keys: which tiles of 64 queries it visits. None without a block mask."""
        return self._make(tile_kinds.of_keys, block_n) if self.selections else None

    def of_queries(self, block_m: int) -> MaskPlaces | None:
        """For each tile of ``block_m`` queries: which tiles of 64 keys it visits. None without a block mask."""
        return self._make(tile_kinds.of_queries, block_m) if self.selections else None

    def _make(self, told: Callable[[AttentionProblem], AttentionProblem], block: int) -> MaskPlaces:
        kinds, listing = self.selections
        problem = told(self._problem)
        records, found = tile_kinds.build(
            kinds.spec, listing.spec, problem, block, 0, num_m_blocks(problem, block), At("workspace", self.end)
        )
        self.records += records
        self.end += -(-found.num_bytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        return found


def plan_backward(problem: BackwardProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``attention_backward`` and ``attention_varlen_backward``.

    Raises
    ------
    ArgumentError, UnsupportedError
        What no kernel can make gradients of.
    """
    _check(problem)
    ways = chosen_ways(asked_of_backward(problem, target), target, force)
    return first_that_loads(ways, lambda way: backward_launches(way, problem, target, force), target)


def backward_launches(way: BackwardWay, problem: BackwardProblem, target: Target, force: str | None) -> Launches:
    """The launches of gradients, made as ``way`` says."""
    main = None if way.main is None else _compiled(way.main, problem)
    alone = None if way.dq is None else _compiled(way.dq, problem)
    # Its CTAs draw tiles from a counter.
    draws = main is not None and main.spec.dq and (main.spec.ordered_dq or main.spec.block_masks)
    on_wgmma = main is not None and main.spec.arch_specific
    before, behind = select_backward_rows(problem, target, force, fragments=on_wgmma)
    with_dq = "dq" in problem.wanted and alone is None
    dq_columns = main.spec.head_dim if main is not None and with_dq else 0
    n_blocks = num_n_blocks(problem.forward, main.spec.block_n) if main is not None and draws else 0
    at = attn_bwd_sm80.places(problem, dq_columns, n_blocks)
    lists = _Lists(problem, target, force, at.end)
    records = attn_bwd_sm80.build_prepare(before.spec, problem, at, dq_columns, n_blocks)
    if main is not None:
        listed = lists.of_keys(main.spec.block_n)
        if on_wgmma:
            tiles = order_of_keys(main.spec, problem, target)
            records += attn_bwd_sm90.build(
                main.spec, problem, at, dq_columns, target, tiles=tiles, overlap=bool(records), lists=listed
            )
        else:
            records += attn_bwd_sm80.build(main.spec, problem, at, dq_columns, listed)
    if alone is not None:
        listed = lists.of_queries(alone.spec.block_m)
        if alone.spec.arch_specific:
            tiles = order_of_queries(alone.spec, problem, target)
            records += attn_bwd_sm90.build_dq(alone.spec, problem, at, target, tiles=tiles, lists=listed)
        else:
            records += attn_bwd_sm80.build_dq(alone.spec, problem, at, listed)
    # Sums of dq: the kernel ahead is that of all gradients.
    has_sums = dq_columns > 0 and not (main is not None and attn_bwd_sm90.finishes_dq(main.spec, problem))
    overlap = on_wgmma and has_sums and bool(records)
    left = at if has_sums else replace(at, dq_accum=None)
    records += attn_bwd_sm80.build_finish(behind.spec, problem, left, dq_columns, overlap=overlap)
    clear, cleared = _clear(problem, target, force)
    chosen = tuple(selection for selection in (main, alone) if selection is not None)
    others = (*lists.selections, before, *chosen[1:], behind, *clear)
    return Launches((chosen or (before,))[0], lists.records + records + cleared, lists.end, others)
