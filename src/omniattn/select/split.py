"""Whether the keys of a call are split over CTAs, and into how many, by a model (docs/performance/few_queries.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..problems import AttentionProblem, Target
from ..problems.split import (
    ONE_HEAD,
    PackGQA,
    Schedule,
    SplitKV,
    StreamK,
    gqa_packing,
    gqa_packing_on_mma_sync,
    gqa_packing_with_scores,
    tiles_of_group,
)
from ..registry import REGISTRY, KernelSpec
from .advice import advise
from .attention import reads_mask
from .choice import Selection, forced, named_ops, the_one
from .fit import RowsOf, fit, fitting_rows, unfit_for_splits
from .split_model import Walk, of_equal_lengths, of_two_lengths, shares_us, unsplit_us, whole_packed_us
from .tile import whole_sectors

_OF_DTYPE: RowsOf[tuple[str, str]] = RowsOf(lambda row, of: (row.op, row.dtype) == of)
#: `KernelSpec.tuned_for` of tiles that only tails take (select/tail.py).
TAIL = "tail"
#: What a split has to gain by the model: it is no better than a tenth. More where little has been measured: on mma.sync
#: many keys only, with scores of 8 bits nothing.
_GAIN, _LARGE_GAIN = 0.9, 0.8
#: The fewest keys of 8 bits: shorter calls have not been measured.
_INT8_KEYS = 1024
#: On mma.sync: the fewest keys, keys for each query. Splits of rows whose heads share no tiles, there and with scores
#: of 8 bits.
_SYNC_KEYS, _SYNC_RATIO, _FEWEST_SPLITS = 1024, 4, 2
#: Rounds of CTAs that a few splits make at most. A call with a few CTAs more than fit needs three, of two splits each.
_ROUNDS = 4
#: Tiles an SM, from which on a call without split keeps the GPU busy.
_BUSY = 4
#: The same of calls that stream.
_STREAM_TILES = 1.5
#: Of heads that share tiles in a call that does: rows that tiles are counted by, and the fewest keys.
_PACKED_TILE_ROWS, _SHARED_KEYS = 64, 64
#: The same rows of packed sequences; queries that are few whatever the keys; and rows of a kv head that are too many to
#: look at one by one.
_PACKED_ROWS, _FEW_QUERIES, _MOST_ROWS = 128, 8, 1 << 17
#: Keys a query that are many.
_MANY_KEYS = 16
#: What those gain.
_BETWEEN = 0.97
#: Of calls that do little but read, the fewest keys from which on mma.sync may be faster: it copies whole rows.
_STREAM_KEYS = 1024


@dataclass(frozen=True)
class SplitSelection:
    """A chosen split.

    Attributes
    ----------
    main : Selection
        The kernel that attends.
    pack_gqa : PackGQA
    schedule : Schedule
    """

    main: Selection
    pack_gqa: PackGQA
    schedule: Schedule


def _best_split(
    problem: AttentionProblem, spec: KernelSpec, target: Target, pack_gqa: PackGQA, fewest: int
) -> tuple[float, Schedule] | None:
    """The split that takes the shortest time, of those that make a few rounds of CTAs; None where there is none."""
    walk = Walk(problem, spec, pack_gqa, target.sm_count)
    items = walk.heads * len(walk.tiles)
    usual, most = (min(walk.longest, max(rounds * walk.ctas // max(items, 1), fewest)) for rounds in (2, _ROUNDS))
    most = most if usual < _ROUNDS else usual
    # More than two rounds have to gain a tenth over what was measured.
    times = [(walk.split_us(n) / (1.0 if n <= usual else _GAIN), n) for n in range(fewest, most + 1)]
    if not times:
        return None
    _, splits = min(times)
    return walk.split_us(splits), SplitKV(splits)


def _even_shares(
    batches: tuple[AttentionProblem, ...], spec: KernelSpec, target: Target, pack_gqa: PackGQA
) -> tuple[float, Schedule]:
    """Of packed sequences: a share for every CTA that runs at the same time."""
    return shares_us(batches, spec, pack_gqa, target), StreamK(target.sm_count * spec.ctas_per_sm)


def _heads_share(problem: AttentionProblem, rows: int) -> bool:
    """Whether tiles of so many rows that query heads share are so much fewer that one split of the keys may gain: K and
    V are read once for all heads of a tile.
    """
    p = problem
    fewest = tiles_of_group(p, rows, gqa_packing(p, rows))
    return 2 * fewest <= tiles_of_group(p, _PACKED_TILE_ROWS, ONE_HEAD)


def _streams(problem: AttentionProblem, target: Target) -> bool:
    """Whether mma.sync reads K and V faster than tensor maps do.

    That is of a call without scores whose heads share one tile, so that it does little but read.
    """
    p = problem
    if p.score_mods or p.varlen or p.precision.quantized or p.seqlen_k < _STREAM_KEYS or p.own_head_dim_v:
        return False
    heads = p.batch * p.num_kv_heads
    if p.head_dim > 128 or tiles_of_group(p, _PACKED_TILE_ROWS, gqa_packing_on_mma_sync(p, _PACKED_TILE_ROWS)) > 1:
        return False
    # Rows that end within a sector; no tile on wgmma but a wider one; or rows of two copies, by all SMs.
    many = heads >= _STREAM_TILES * target.sm_count and p.num_q_heads > p.num_kv_heads
    return not whole_sectors(p) or 64 < p.head_dim <= 96 or (p.head_dim > 96 and many)


class _Call:
    """A call as the choice of a split sees it.

    Attributes
    ----------
    problem, target
    unsplit : KernelSpec
        The kernel of the call without a split.
    is_forced : bool
        A row is named: it is taken with its best split, the one of all keys too.
    typical : AttentionProblem
        Of packed sequences as many of the mean length.
    batches : tuple of AttentionProblem
        The same, or two that stand for sequences of very unequal lengths.
    streams : bool
        Whether mma.sync reads K and V faster.
    """

    def __init__(self, problem: AttentionProblem, target: Target, unsplit: KernelSpec, is_forced: bool) -> None:
        self.problem, self.target, self.unsplit, self.is_forced = problem, target, unsplit, is_forced
        self.typical, self.batches = of_equal_lengths(problem), of_two_lengths(problem)
        self.streams = not is_forced and _streams(problem, target)

    @cached_property
    def heads_share(self) -> bool:
        """Whether query heads share tiles with a gain: of packed sequences, and on 8 bits, on wgmma alone."""
        p = self.problem
        if p.varlen:
            long = max(batch.seqlen_q for batch in self.batches) * p.num_q_heads > _MOST_ROWS * p.num_kv_heads
            few = [b for b in self.batches if b.seqlen_q <= max(_FEW_QUERIES, b.seqlen_k // _SYNC_RATIO)]
            return self.unsplit.arch_specific and not long and any(_heads_share(b, _PACKED_ROWS) for b in few)
        if p.seqlen_k < max(_SHARED_KEYS, _SYNC_RATIO * p.seqlen_q):
            return False
        return (self.unsplit.arch_specific or not p.precision.quantized) and _heads_share(p, _PACKED_TILE_ROWS)

    def has_work_enough(self) -> bool:
        """Whether there is no need to look at splits; before anything that takes time, as most calls have it."""
        p, block_m = self.problem, self.unsplit.block_m
        if p.precision.quantized and p.seqlen_k < _INT8_KEYS:
            return True
        blocks = max(-(-p.seqlen_q // block_m), p.sequences) if p.varlen else p.batch * -(-p.seqlen_q // block_m)
        busy = blocks * p.num_q_heads > _BUSY * self.target.sm_count
        return busy and not self.streams and not self.heads_share

    def may_take(self, spec: KernelSpec) -> bool:
        """Whether a row that fits is one to choose from."""
        if TAIL in spec.tuned_for or (spec.bias_bytes != 0 and reads_mask(self.problem, self.target)):
            return False
        # Where the kernel of every GPU was chosen, or forced, so it is here.
        if spec.arch_specific:
            return self.unsplit.arch_specific
        fewest_keys = _SHARED_KEYS if self.heads_share else _SYNC_KEYS
        return self.typical.seqlen_k >= max(fewest_keys, _SYNC_RATIO * self.typical.seqlen_q)

    def candidates(self, fitting: list[KernelSpec]) -> list[KernelSpec]:
        """Rows to compare, of each family the narrowest tile, nothing that is not needed.

        Those made for this very architecture; beside them the others with scores, whose heads may share no tiles
        there, and where a call does little but read.
        """

        def kind(spec: KernelSpec) -> tuple[bool, int, int]:
            return spec.score_mods, spec.head_dim, spec.options

        own, others = ([spec for spec in fitting if spec.arch_specific is specific] for specific in (True, False))
        beside = self.streams or (self.problem.score_mods and not self.problem.varlen)
        families = [own, others] if beside else [own or others]
        return [spec for family in families for spec in family if kind(spec) == min(map(kind, family))]

    def rows(self) -> list[KernelSpec]:
        """Rows to compare, of all that there are."""
        fitting = fitting_rows(REGISTRY, "attention_split", self.problem, self.target)
        return self.candidates([spec for spec in fitting if self.may_take(spec)])

    def packings(self, spec: KernelSpec) -> tuple[PackGQA, ...]:
        """The fewest tiles, and ways that leave fewer SMs idle, or fewer rows unused. A forced row has the fewest."""
        p, block_m = self.problem, spec.block_m
        if not spec.arch_specific:
            ways = [gqa_packing_on_mma_sync(p, block_m)]
        elif p.varlen and spec.score_mods:
            ways = [gqa_packing_with_scores(self.typical, block_m)]
        elif p.varlen:
            ways = [gqa_packing(self.typical, block_m)]
        elif spec.score_mods:
            # A lane's two rows of scores share one scale of quantized operands: those of one head do.
            ways = [ONE_HEAD] if spec.quantized else [gqa_packing_with_scores(p, block_m)]
        else:
            ways = [gqa_packing(p, block_m), gqa_packing(p, block_m, whole=True)]
        # Packed heads that share no tiles would read K and V at different times.
        if not p.varlen if spec.arch_specific else self.typical.seqlen_k >= _SYNC_KEYS:
            ways.append(ONE_HEAD)
        return tuple(dict.fromkeys(ways[:1] if self.is_forced else ways))

    def gain(self, spec: KernelSpec, way: PackGQA) -> float:
        """What a way has to gain over the first; with scores the model was measured on both."""
        least = 1.0 if spec.score_mods or way == self.packings(spec)[0] else _GAIN
        # The model knows nothing of CTAs that load while others of their SM are between two tiles.
        return least / _BETWEEN if spec.arch_specific and spec.ctas_per_sm > 1 and spec.head_dim == 128 else least

    def fewest(self, spec: KernelSpec, way: PackGQA) -> int:
        """Splits, at least.

        One split is the call without a split, unless heads share tiles that are fewer for it, or many keys long, or
        tiles are others: those of mma.sync where a call streams.
        """
        if self.is_forced or (self.streams and not spec.arch_specific):
            return 1
        many = self.typical.seqlen_k >= _MANY_KEYS * self.typical.seqlen_q
        return 1 if way.heads > 1 and (many or self.heads_share) else _FEWEST_SPLITS

    def best(self, spec: KernelSpec, way: PackGQA) -> tuple[float, Schedule] | None:
        """The fastest split of a way, and its time."""
        if self.problem.varlen and spec.arch_specific:
            return _even_shares(self.batches, spec, self.target, way)
        return _best_split(self.typical, spec, self.target, way, self.fewest(spec, way))

    def whole_us(self) -> float:
        """Time of the call without a split."""
        if self.problem.varlen and self.unsplit.arch_specific:
            return whole_packed_us(self.problem, self.batches, self.unsplit, self.target)
        return unsplit_us(self.typical, self.unsplit, self.target)

    def most_us(self, spec: KernelSpec, whole: float) -> float:
        """What a split may take, where the call without one takes ``whole``."""
        large = not spec.arch_specific or (spec.quantized and spec.score_mods)
        return (_LARGE_GAIN if large else _GAIN) * whole


def select_split(
    problem: AttentionProblem, target: Target, unsplit: Selection, force: str | None = None
) -> SplitSelection | None:
    """Choose a split of the keys, where that is faster than ``unsplit``, the kernel of the call without one.

    Parameters
    ----------
    problem : AttentionProblem
    target : Target
    unsplit : Selection
        From `select_attention`.
    force : str, optional
        ``OMNIATTN_FORCE_KERNEL``: a row of ``attention`` is used without a split, one of ``attention_split`` with the
        best of its splits.

    Returns
    -------
    SplitSelection or None
        None for no split.

    Raises
    ------
    ArgumentError
        ``force`` names a kernel that cannot serve the call.
    """
    chosen = forced(force, ("attention_split",), lambda spec: fit(spec, problem, target))
    if chosen is None and "attention" in named_ops(force):
        return None
    if chosen is None and unfit_for_splits(problem) is not None:
        return None
    call = _Call(problem, target, unsplit.spec, chosen is not None)
    if chosen is not None:
        rows = [chosen.spec]
    elif call.has_work_enough():
        return None
    else:
        rows = call.rows()
    ways = [
        (best[0] / call.gain(spec, way), *best, spec, way)
        for spec in rows
        for way in call.packings(spec)
        if (best := call.best(spec, way)) is not None
    ]
    whole = float("inf") if chosen is not None else call.whole_us()
    ways = [found for found in ways if found[1] < call.most_us(found[3], whole)]
    if call.streams and any(not found[3].arch_specific for found in ways):
        ways = [found for found in ways if not found[3].arch_specific]
    if not ways:
        return None
    _, time, schedule, spec, pack_gqa = min(ways, key=lambda found: found[0])
    model = f"{time:.0f} µs by the model, without a split {whole:.0f} µs"
    advice = advise(problem, target)
    if isinstance(schedule, SplitKV):
        parts = f"{schedule.splits} split{'s' * (schedule.splits > 1)} of the keys"
    else:
        parts = f"{target.sm_count * spec.ctas_per_sm} even shares of all keys"
    why = (
        *([problem.note] if problem.note else []),
        f"{problem.dtype}, {problem.head_dims} in a tile of {spec.head_dim}",
        f"{parts}, {pack_gqa.heads} query heads in the rows of a tile",
        *((f"few queries on many keys: {model}",) if chosen is None else chosen.why),
        *([advice] if advice is not None else []),
    )
    return SplitSelection(Selection(spec, why), pack_gqa, schedule)


def rows_to_compare(problem: AttentionProblem, target: Target, unsplit: Selection) -> list[KernelSpec]:
    """The rows that `select_split` compares; which of them is the fastest depends on lengths and numbers of heads."""
    return [] if unfit_for_splits(problem) is not None else _Call(problem, target, unsplit.spec, False).rows()


def combine_of(spec: KernelSpec, problem: AttentionProblem, target: Target, force: str | None) -> Selection:
    """The kernel that merges what the splits of ``spec`` leave."""
    own_lse = spec.quantized and problem.lse and not spec.value_factors
    merges = "attention_combine_lse" if own_lse else "attention_combine"
    if spec.arch_specific and spec.sequences == "packed":
        merges = "attention_combine_packed"
    (combine,) = _OF_DTYPE(REGISTRY, (merges, problem.dtype))
    return the_one(combine, "merges the splits' results", target, force)
