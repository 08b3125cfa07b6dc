"""Every way to run an attention call that could be the fastest, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..problems import UNLIMITED, AttentionProblem, Target
from ..problems.attention import READ_WHOLE
from ..problems.split import (
    ONE_HEAD,
    PackGQA,
    Schedule,
    SplitKV,
    StreamK,
    TailSplit,
    gqa_packing,
    gqa_packing_on_mma_sync,
    gqa_packing_with_scores,
    of_equal_lengths,
    tiles_of_group,
)
from ..registry import REGISTRY, KernelSpec
from ..registry.masks import MASK_TILE
from ..registry.targets import is_carried
from .attention import preferred_products
from .candidate import (
    Candidate,
    MaskInput,
    can_have_heads_as_queries,
    can_have_keys_as_tiles,
    heads_as_queries,
    keys_as_tiles,
    mask_inputs,
)
from .features import sequences, tile_steps
from .fit import MAX_CLASSES, fit, fitting_rows
from .orders import other_orders, usual_order
from .partial import tail_row

#: Rounds of CTAs that a split makes, that of a tail's tiles whole ones: more were never faster by half a percent.
_ROUNDS = 0.5, 0.75, 1, 2
#: Rounds of CTAs from which on whole tiles keep the GPU busy: no split of them was the fastest way.
_FULL = 1.5
#: Tiles that heads which share them have to save, as a fraction.
_SAVED = 0.05
#: Tiles of a sequence's queries, in the mean, up to which CTAs of Stream-K read keys that others have just read.
_MOST_TILES = 4
#: What part of the keys that usual tiles load narrower ones may load: with more they are slower
#: (docs/performance/selection.md).
_PART = 0.75


def candidates(
    problem: AttentionProblem, target: Target, row: KernelSpec | None = None, *, every_order: bool = True
) -> tuple[Candidate, ...]:
    """The ways to run a call.

    Of rows that differ in nothing but what the call has no use for (columns beyond its head_dim, options) the smallest
    one is among them; of splits that take equally many rounds of equally many steps, the one with the fewest parts.

    Parameters
    ----------
    problem : AttentionProblem
    target : Target
    row : KernelSpec, optional
        Only the ways of this one, which need not be worth a look; one that splits keys has more than one part of a tile
        where there are several tiles of keys.
    every_order : bool
        False: of persistent kernels only the usual order of tiles, as others take time to find.

    Returns
    -------
    tuple of Candidate
        Empty where no kernel serves the call.
    """
    found: list[Candidate] = []
    for view in _with_tiles(problem):
        found += (*_whole(view, target, row, every_order), *_split(view, target, row))
    if can_have_heads_as_queries(problem):
        for view in _with_tiles(heads_as_queries(problem)):
            ways = list(_whole(view, target, row, every_order))
            if not _shares_all_heads(problem):
                ways += _split(view, target, row)
            found += [replace(way, heads_as_queries=True) for way in ways]
    if row is not None:
        return tuple([way for way in found if way.schedule != SplitKV(1)] or found)
    listed = problem.packed_lists and any(way.mask is MaskInput.LISTED for way in found)
    return tuple(way for way in found if not _reads_hidden(way, problem, listed))


def _reads_hidden(way: Candidate, p: AttentionProblem, listed: bool) -> bool:
    """Whether a way reads keys that a mask hides from all queries, of a call that has to pass over them.

    listed: that is one of packed sequences, for which there is a way with a list.
    """
    if way.mask is MaskInput.PACKED:
        return not way.row.lists and p.seqlen_k > READ_WHOLE
    return listed and way.mask is MaskInput.IN_PLACE


def views(problem: AttentionProblem) -> tuple[AttentionProblem, ...]:
    """A call as kernels may be told of it: as it is, with numbers a key as tiles, with heads as queries."""
    folded = can_have_heads_as_queries(problem)
    return (*_with_tiles(problem), *(_with_tiles(heads_as_queries(problem)) if folded else ()))


def rows_of(problem: AttentionProblem, target: Target) -> tuple[KernelSpec, ...]:
    """The rows that calls like this one may take, whatever their lengths and numbers of heads."""
    ops = "attention", "attention_split"
    return tuple(dict.fromkeys(row for view in views(problem) for op in ops for row in _rows(op, view, target)))


def _with_tiles(p: AttentionProblem) -> tuple[AttentionProblem, ...]:
    """The call, and with numbers a key as tiles where it can have them."""
    return (p, keys_as_tiles(p)) if can_have_keys_as_tiles(p) else (p,)


def _shares_all_heads(p: AttentionProblem) -> bool:
    """Whether kernels that split keys have all query heads of a kv head in one tile, as they come."""
    return not p.score_mods and gqa_packing(p, MASK_TILE).heads * p.num_kv_heads == p.num_q_heads


def _whole(p: AttentionProblem, target: Target, only: KernelSpec | None, every_order: bool) -> Iterator[Candidate]:
    for row in _rows("attention", p, target, only):
        if only is None and _is_too_narrow(row, p):
            continue
        schedules: list[Schedule] = [usual_order(row, p, target)]
        if every_order:
            schedules += other_orders(row, p, target)
        if only is None:
            schedules += _tails(row, p, target)
        for mask in mask_inputs(row, p):
            yield from (Candidate(row, schedule=schedule, mask=mask) for schedule in schedules)


def _tails(row: KernelSpec, p: AttentionProblem, target: Target) -> Iterator[TailSplit]:
    """Tiles have to be equal, and one to an SM."""
    if p.varlen or p.score_mods or not (p.window_left == p.window_right == UNLIMITED) or p.seqlen_k == 0:
        return
    if not row.arch_specific or row.ctas_per_sm > 1:
        return
    tiles = p.batch * p.num_q_heads * -(-p.seqlen_q // row.block_m)
    rounds, rest = divmod(tiles, target.sm_count)
    if rounds == 0 or rest == 0 or tail_row(row, p, target) is None:
        return
    steps = -(-p.seqlen_k // row.block_n)
    for splits in sorted({min(int(n) * target.sm_count // rest, steps) for n in _ROUNDS if n >= 1}):
        if splits > 1:
            yield TailSplit(splits, rounds * target.sm_count, rest)


def _is_too_narrow(row: KernelSpec, p: AttentionProblem) -> bool:
    """Whether a kernel on wgmma loads few keys a step for nothing."""
    if row.block_n >= MASK_TILE or not row.arch_specific or p.varlen or p.score_mods:
        return False
    narrow, usual = (-(-p.seqlen_k // n) * n for n in (row.block_n, MASK_TILE))
    return narrow > _PART * usual


def _split(p: AttentionProblem, target: Target, only: KernelSpec | None) -> Iterator[Candidate]:
    typical = of_equal_lengths(p)
    for row in _rows("attention_split", p, target, only):
        for pack_gqa in _packings(row, p, typical):
            schedules: Iterable[Any] = ()
            if not (p.varlen and row.arch_specific):
                schedules = _numbers(row, pack_gqa, typical, target, is_forced=only is not None)
            elif only is not None or _shares_keys(row, pack_gqa, p, target):
                schedules = (StreamK(target.sm_count * row.ctas_per_sm),)
            for mask in mask_inputs(row, p, pack_gqa):
                yield from (Candidate(row, pack_gqa, schedule, mask) for schedule in schedules)


def _shares_keys(row: KernelSpec, pack_gqa: PackGQA, p: AttentionProblem, target: Target) -> bool:
    """Whether tiles of a sequence's queries read its keys at the same time: they are few, or all run at once."""
    lengths = sequences(p)
    tiles = sum(-(-queries * pack_gqa.pack // row.block_m) for queries, _ in lengths) / len(lengths)
    heads = p.batch * p.num_q_heads // pack_gqa.heads
    return tiles <= _MOST_TILES or tiles * heads <= target.sm_count * row.ctas_per_sm


def _packings(row: KernelSpec, p: AttentionProblem, typical: AttentionProblem) -> tuple[PackGQA, ...]:
    """Heads that share the rows of a tile: as many as make the fewest tiles, the same without unused rows, one."""
    if not row.arch_specific:
        ways = [gqa_packing_on_mma_sync(p, row.block_m)]
    elif row.score_mods:
        # A lane's two rows of scores share one scale of quantized operands: those of one head do.
        ways = [] if row.quantized else [gqa_packing_with_scores(typical, row.block_m)]
    else:
        ways = [gqa_packing(typical, row.block_m), gqa_packing(typical, row.block_m, whole=True)]
    # Packed heads that share no tiles would read K and V at different times.
    if p.varlen and row.arch_specific:
        return tuple(dict.fromkeys(ways)) or (ONE_HEAD,)
    most = (1 - _SAVED) * tiles_of_group(p, row.block_m, ONE_HEAD)
    ways = [way for way in ways if tiles_of_group(p, row.block_m, way) <= most]
    return tuple(dict.fromkeys((*ways, ONE_HEAD)))


def _numbers(
    row: KernelSpec, pack_gqa: PackGQA, p: AttentionProblem, target: Target, *, is_forced: bool
) -> tuple[SplitKV, ...]:
    """Numbers of parts that keep a part of the SMs busy, or make a few rounds of CTAs.

    One part only where heads share tiles: kernels that split nothing store o faster, and have tiles in a better order.
    """
    tiles, _, steps = tile_steps(
        p.seqlen_q * pack_gqa.pack, p.seqlen_k, pack_gqa.pack, row.block_m, row.block_n, p.window_left, p.window_right
    )
    items, longest = p.batch * p.num_q_heads // pack_gqa.heads * tiles, int(steps)
    ctas = target.sm_count * row.ctas_per_sm
    if items == 0 or longest == 0:
        return ()
    fewest = 1 if is_forced or pack_gqa.heads > 1 else 2
    if items >= _FULL * ctas and not is_forced:
        return (SplitKV(1),) if fewest == 1 else ()
    numbers = {fewest, 2, *(int(rounds * ctas) // items for rounds in _ROUNDS)}
    found: dict[tuple[int, int], int] = {}
    for n in sorted(n for n in numbers if fewest <= n <= longest):
        found.setdefault((-(-items * n // ctas), -(-longest // n)), n)
    return tuple(SplitKV(n) for n in found.values())


def _rows(op: str, p: AttentionProblem, target: Target, only: KernelSpec | None = None) -> tuple[KernelSpec, ...]:
    """The rows of an operation that can serve a call and are worth a look; of ``only`` that it can serve it.

    Kept by the rows that fit, which are those of the registry: they are the same for calls of most lengths.
    """
    if only is not None:
        return (only,) if only.op == op and fit(only, p, target) is None else ()
    fitting = fitting_rows(REGISTRY, op, p, target)
    modified = p.score_mod is not None or p.dropout is not None
    key = op, target.cc, p.score_mods, modified, p.own_head_dim_v, p.packed_lists, *map(id, fitting)
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= MAX_CLASSES:
            _kept.clear()
        # Where the wheel carries nothing for a GPU, all have to be compiled.
        rows = [row for row in fitting if is_carried(row, target.cc)] or fitting
        rows = rows if op == "attention_split" else preferred_products(rows, p, target)
        # The fitting rows stay alive with their ids.
        found = _kept[key] = tuple(_smallest(rows, p)), fitting
    return found[0]


_kept: dict[tuple[Any, ...], tuple[tuple[KernelSpec, ...], list[KernelSpec]]] = {}


def _smallest(rows: Iterable[KernelSpec], p: AttentionProblem) -> list[KernelSpec]:
    """Of each kind of tile the row with the least that the call has no use for, and none that has far more of it."""
    rows = list(rows)
    # Tiles of the next width may have a better shape. In 8 bits none has, and a score_mod, or dropout, is compiled for
    # each row.
    most = 1 if p.score_mod is not None or p.dropout is not None or p.precision.quantized else 2
    widest: dict[bool, int] = {}
    for is_specific in (False, True):
        widths = sorted({_columns(row) for row in rows if row.arch_specific == is_specific})
        widest[is_specific] = max(widths[:most], default=0)
    plain = {row.arch_specific for row in rows if not row.score_mods}
    of_width = {(row.arch_specific, _columns(row)) for row in rows if not row.score_mods}
    kinds: dict[Any, KernelSpec] = {}
    for row in rows:
        if _columns(row) > widest[row.arch_specific]:
            continue
        for_nothing = not p.score_mods and row.score_mods and row.arch_specific in plain
        if row.masks == "none":  # of heads above 256 channels there are rows with softcap and without it
            for_nothing = for_nothing and (row.arch_specific, _columns(row)) in of_width
        if for_nothing or (row.own_head_dim_v and not p.own_head_dim_v):
            continue
        kind = row.family, row.block_m, row.block_n, row.num_warps, row.ctas_per_sm, row.quantizes_q
        best = kinds.get(kind)
        if best is None or _size(row, p) < _size(best, p):
            kinds[kind] = row
    return list(kinds.values())


def _columns(row: KernelSpec) -> int:
    return row.head_dim + row.head_dim_v


def _size(row: KernelSpec, p: AttentionProblem) -> tuple[Any, ...]:
    slow = p.precision.fast_exp and row.integer_powers != "linear"
    return _columns(row), row.score_mods, p.packed_lists and not row.lists, slow, row.options
