"""Whether a call's keys are split over CTAs, and into how many: a model of both (docs/performance/few_queries.md).

Times in microseconds on an H200, the GPU that the constants were measured on. On others of its compute capability the
model compares the same two ways, with the same ratio between memory and products to within a third.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..problems import AttentionProblem, Target
from ..problems.memory import ITEMSIZE
from ..problems.split import (
    ONE_HEAD,
    KeySplit,
    SharedRows,
    is_final,
    shared_rows,
    shared_rows_on_mma_sync,
    shared_rows_with_scores,
    tile_keys,
    tiles_of_group,
)
from ..registry import REGISTRY, KernelSpec
from .advice import advise
from .attention import reads_mask, unfit_call
from .choice import RowsOf, Selection, forced, named_ops, the_one, unfit_target
from .tile import whole_sectors

ROWS: RowsOf[tuple[str, str]] = RowsOf(lambda spec, of: (spec.op, spec.dtype) == of)
#: A step's softmax and waiting, per key of its tile; what two or more warpgroups wait for each other, per key.
_CHAIN_US, _MEET_US = 0.0044, 0.0016
#: Products of 64 rows, one key and one channel, both of them: 64 * 4 operations at an SM's share of 934 TFLOP/s.
_PRODUCT_US = 64 * 4 * 132 / 934e6
#: On 8 bits products take half of that, and a warpgroup's softmax keeps the SM busy for so long, per key. Of sums for
#: the LSE the model knows nothing: O has the same bits with it and without.
_INT8_SOFTMAX_US = 0.0014
#: The same on mma.sync, per key of a tile; operations of one SM a microsecond there. With scores, and with one stage
#: then. Rows of a warp's product.
_SYNC_CHAIN_US, _SYNC_FLOPS, _SYNC_ROWS = 0.012, 2.6e6, 16
_SCORES_CHAIN_US, _SCORES_ONE_STAGE_US, _SCORES_FLOPS = 0.023, 0.046, 1.95e6
#: All SMs together, under the power limit; memory; L2. Operations and bytes a microsecond.
_FLOPS, _INT8_FLOPS, _MEMORY, _L2 = 800e6, 1150e6, 4.3e6, 6.0e6
#: Memory and L2 where rows end within a sector and tensor maps bring them.
_PARTS = 2.5e6, 2.3e6
#: What one SM gets of the memory's rate, in shares of an SM; with tiles of half the bytes.
_SM_SHARE, _INT8_SM_SHARE = 1.25, 1.0
#: To begin and end a tile; a launch; the second launch; partial results, written and read.
ITEM_US, LAUNCH_US, COMBINE_US, PARTIAL_BYTES = 1.5, 2.5, 3.0, 3.0e6
#: `KernelSpec.tuned_for` of tiles that only tails take (select/tail.py).
TAIL = "tail"
#: What a split has to gain by the model: it is no better than a tenth. More where little has been measured: on mma.sync
#: many keys only, with scores of 8 bits nothing.
_GAIN, _LARGE_GAIN = 0.9, 0.8
#: The fewest keys of 8 bits: shorter calls have not been measured.
_INT8_KEYS = 1024
#: With scores a step of theirs takes so many times as long: masks 1.0 to 1.3, softcap 1.3 to 1.6, in long sequences.
_INT8_SCORES = 1.3
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
_SHARED_ROWS, _SHARED_KEYS = 64, 64
#: Keys a query that are many.
_MANY_KEYS = 16
#: What those gain.
_BETWEEN = 0.97
#: Of calls that do little but read, the fewest keys from which on mma.sync may be faster: it copies whole rows.
_STREAM_KEYS = 1024
#: What offsets of partial results are counted in.
_MAX_COLUMNS = 2**31 - 2**10


@dataclass(frozen=True)
class SplitSelection:
    """A chosen split.

    Attributes
    ----------
    main : Selection
        The kernel that attends.
    combine : Selection, optional
        The one that merges its results; None where there is nothing to merge.
    split : KeySplit
    """

    main: Selection
    combine: Selection | None
    split: KeySplit

    @property
    def merging(self) -> tuple[Selection, ...]:
        """The kernels behind the one that attends."""
        return () if self.combine is None else (self.combine,)


def step_us(spec: KernelSpec, rows: int, ctas: int) -> float:
    """A step of the ``ctas`` CTAs of an SM, a tile of keys each, of which ``rows`` query rows exist."""
    if not spec.arch_specific:
        tiles = -(-min(rows, spec.block_m) // _SYNC_ROWS)
        chain, flops = _SYNC_CHAIN_US, _SYNC_FLOPS
        if "score_mods" in spec.features:
            chain, flops = _SCORES_CHAIN_US if spec.head_dim <= 128 else _SCORES_ONE_STAGE_US, _SCORES_FLOPS
        product = 2 * _SYNC_ROWS * spec.block_n * (spec.head_dim + spec.head_dim_v) / flops
        own = -(-tiles // spec.num_warps) * product + chain * spec.block_n
        return max(own, ctas * tiles * product)
    groups = -(-min(rows, spec.block_m) // 64)
    products = _PRODUCT_US * spec.block_n * (spec.head_dim + spec.head_dim_v) / 2
    waits = (_CHAIN_US + (_MEET_US if groups > 1 else 0.0)) * spec.block_n
    busy = products
    if spec.quantized:
        products /= 2
        busy = products + _INT8_SOFTMAX_US * spec.block_n
    scores = _INT8_SCORES if spec.quantized and "score_mods" in spec.features else 1.0
    return scores * max(products + waits, groups * ctas * busy)


class _Walk:
    """What a kernel does with a problem, however its keys are split: tiles of queries, and the keys of each."""

    def __init__(self, problem: AttentionProblem, spec: KernelSpec, shared: SharedRows, sm_count: int) -> None:
        p = self.problem = problem
        self.sm_count, self.ctas = sm_count, sm_count * spec.ctas_per_sm
        self.tiles = tile_keys(p, spec.block_m, spec.block_n, shared.pack)
        self.sm_share = _INT8_SM_SHARE if spec.quantized else _SM_SHARE
        self.rows, self.heads = p.seqlen_q * shared.pack, p.batch * p.num_q_heads // shared.heads
        self.longest = max(self.tiles, default=0)
        # Of K and V; quantized ones are as wide as the tile.
        key_bytes = 2 * spec.head_dim if spec.quantized else ITEMSIZE[p.dtype] * (p.head_dim + p.head_dim_v)
        steps = self.heads * sum(self.tiles)
        self.steps = [step_us(spec, self.rows, n) for n in range(1, spec.ctas_per_sm + 1)]
        seen = max(tile_keys(p, max(p.seqlen_q, 1), 1, 1), default=0)
        memory, l2 = _MEMORY, _L2
        if spec.arch_specific and not spec.quantized and not whole_sectors(p):
            memory, l2 = _PARTS
        self.memory = p.batch * p.num_kv_heads * seen * key_bytes / memory
        flops = _INT8_FLOPS if spec.quantized else _FLOPS
        self.floor = max((p.flops or 0) / flops, steps * spec.block_n * key_bytes / l2)
        self.partial = 2 * 4 * self.heads * self.rows * (p.head_dim_v + 2) / PARTIAL_BYTES

    def _time(self, splits: int, steps: float) -> float:
        """Of ``steps`` one after the other on the busiest SM."""
        items = self.heads * len(self.tiles) * splits
        ctas = max(min(-(-items // self.sm_count), len(self.steps)), 1)
        # A few SMs do not get all of the memory's rate.
        share = min(self.sm_share * items / self.sm_count, 1.0)
        return (
            LAUNCH_US
            + self._rounds(splits) * ITEM_US
            + max(steps * self.steps[ctas - 1], self.floor, self.memory / max(share, 1e-9))
        )

    def _rounds(self, splits: int = 1) -> int:
        """Items of the busiest CTA."""
        return -(-self.heads * len(self.tiles) * splits // self.ctas)

    def split_us(self, splits: int) -> float:
        """Time of a split, the kernel that merges it included."""
        steps = self._rounds(splits) * -(-self.longest // splits)
        merge = 0.0 if is_final(self.problem, splits) else COMBINE_US + splits * self.partial
        return self._time(splits, steps) + merge

    def whole_us(self) -> float:
        """Time of a kernel that has all keys of a tile in one CTA."""
        steps = float(self._rounds() * self.longest)
        if min(self.tiles, default=0) != self.longest:
            # Of different lengths they are handed out such that all SMs end together, but no sooner than the longest.
            steps = max(self.longest, self.heads * sum(self.tiles) / self.ctas)
        return self._time(1, steps)


def unsplit_us(problem: AttentionProblem, spec: KernelSpec, target: Target) -> float:
    """Time of the kernel ``spec``, which does not split keys."""
    return _Walk(problem, spec, ONE_HEAD, target.sm_count).whole_us()


def split_us(problem: AttentionProblem, spec: KernelSpec, split: KeySplit, target: Target) -> float:
    """Time of ``spec`` and of the kernel behind it, if there is one."""
    return _Walk(problem, spec, split.shared, target.sm_count).split_us(split.num_splits)


def _best_split(
    problem: AttentionProblem, spec: KernelSpec, target: Target, shared: SharedRows, fewest: int
) -> tuple[float, KeySplit] | None:
    """The split that takes the shortest time, of those that make a few rounds of CTAs; None where there is none."""
    walk = _Walk(problem, spec, shared, target.sm_count)
    items = walk.heads * len(walk.tiles)
    usual, most = (min(walk.longest, max(rounds * walk.ctas // max(items, 1), fewest)) for rounds in (2, _ROUNDS))
    most = most if usual < _ROUNDS else usual
    # More than two rounds have to gain a tenth over what was measured.
    times = [(walk.split_us(n) / (1.0 if n <= usual else _GAIN), n) for n in range(fewest, most + 1)]
    if not times:
        return None
    _, splits = min(times)
    return walk.split_us(splits), KeySplit(shared, splits, len(walk.tiles))


def _of_equal_lengths(problem: AttentionProblem) -> AttentionProblem:
    """Packed sequences as a batch of sequences of the mean length: what a choice on the host can know of them."""
    p = problem
    if not p.varlen or p.batch == 0:
        return p
    n = p.sequences
    return replace(p, varlen=False, batch=n, parts=1, seqlen_q=-(-p.seqlen_q // n), seqlen_k=-(-p.seqlen_k // n))


def _heads_share(problem: AttentionProblem) -> bool:
    """Whether tiles that query heads share are so much fewer that one split of the keys may gain: K and V are read once
    for all heads of a tile."""
    p, rows = problem, _SHARED_ROWS
    if p.varlen or p.precision.quantized or p.seqlen_k < max(_SHARED_KEYS, _SYNC_RATIO * p.seqlen_q):
        return False
    fewest, own = (tiles_of_group(p, rows, way) for way in (shared_rows(p, rows), ONE_HEAD))
    return 2 * fewest <= own


def _streams(problem: AttentionProblem, target: Target) -> bool:
    """Whether mma.sync reads K and V faster than tensor maps do.

    That is of a call without scores whose heads share one tile, so that it does little but read.
    """
    p = problem
    if p.score_mods or p.varlen or p.precision.quantized or p.seqlen_k < _STREAM_KEYS or p.own_head_dim_v:
        return False
    heads = p.batch * p.num_kv_heads
    if p.head_dim > 128 or tiles_of_group(p, _SHARED_ROWS, shared_rows_on_mma_sync(p, _SHARED_ROWS)) > 1:
        return False
    # Rows that end within a sector; no tile on wgmma but a wider one; or rows of two copies, by all SMs.
    many = heads >= _STREAM_TILES * target.sm_count and p.num_q_heads > p.num_kv_heads
    return not whole_sectors(p) or 64 < p.head_dim <= 96 or (p.head_dim > 96 and many)


def _unfit_problem(problem: AttentionProblem) -> str | None:
    """Why no kernel that splits keys can serve ``problem``; None if one may."""
    if not problem.scratch:
        return "the arrays' library can give no memory for partial results"
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_q_heads):
        return "there is nothing to attend to"
    # Four channels a column; 64 rows more for the last tile, and rows of no head.
    batch = 1 if problem.varlen else problem.batch
    if batch * problem.num_q_heads * (problem.seqlen_q + 64) * problem.head_dim_v // 2 >= _MAX_COLUMNS:
        return "it counts rows in 31 bits"
    return None


def unfit_split(spec: KernelSpec, problem: AttentionProblem, target: Target) -> str | None:
    if (reason := _unfit_problem(problem)) is not None:
        return reason
    if spec.dtype != problem.dtype:
        return f"it is compiled for {spec.dtype}, the arrays are {problem.dtype}"
    if spec.quantized != problem.precision.quantized:
        return f"it multiplies {spec.qk if spec.quantized else 'exact'} operands, not {problem.precision.name} ones"
    if (reason := unfit_call(spec, problem, target)) is not None:
        return reason
    if spec.head_dim < max(problem.head_dim, problem.head_dim_v):
        return f"it takes head_dim up to {spec.head_dim}, not {max(problem.head_dim, problem.head_dim_v)}"
    if problem.lse and "lse" in spec.lacks:
        return "it makes no LSE"
    if problem.score_mods and "score_mods" not in spec.features:
        return "it has no softcap, mask or non-positive softmax_scale"
    if spec.arch_specific:
        if problem.varlen:
            return "it takes no packed sequences"
        if not problem.tensor_maps:
            return "tensor maps cannot describe these strides, or the driver in use cannot make them"
    elif problem.own_head_dim_v:
        return "it takes v of q's head_dim only"
    return unfit_target(spec, target)


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
    streams : bool
    """

    def __init__(self, problem: AttentionProblem, target: Target, unsplit: KernelSpec, is_forced: bool) -> None:
        self.problem, self.target, self.unsplit, self.is_forced = problem, target, unsplit, is_forced
        self.typical = _of_equal_lengths(problem)
        self.streams = not is_forced and _streams(problem, target)

    def has_work_enough(self) -> bool:
        """Whether there is no need to look at splits; before anything that takes time, as most calls have it."""
        p, block_m = self.problem, self.unsplit.block_m
        if p.precision.quantized and p.seqlen_k < _INT8_KEYS:
            return True
        blocks = max(-(-p.seqlen_q // block_m), p.sequences) if p.varlen else p.batch * -(-p.seqlen_q // block_m)
        busy = blocks * p.num_q_heads > _BUSY * self.target.sm_count
        return busy and not self.streams and not _heads_share(p)

    def may_take(self, spec: KernelSpec) -> bool:
        """Whether a row that fits is one to choose from."""
        if TAIL in spec.tuned_for or (spec.bias_bytes != 0 and reads_mask(self.problem, self.target)):
            return False
        # Where the kernel of every GPU was chosen, or forced, so it is here.
        if spec.arch_specific:
            return self.unsplit.arch_specific
        fewest_keys = _SHARED_KEYS if _heads_share(self.problem) else _SYNC_KEYS
        return self.typical.seqlen_k >= max(fewest_keys, _SYNC_RATIO * self.typical.seqlen_q)

    def candidates(self, fitting: list[KernelSpec]) -> list[KernelSpec]:
        """Rows to compare, of each family the narrowest tile, nothing that is not needed.

        Those made for this very architecture; beside them the others with scores, whose heads may share no tiles
        there, and where a call does little but read.
        """

        def kind(spec: KernelSpec) -> tuple[bool, int, int]:
            return "score_mods" in spec.features, spec.head_dim, len(spec.features) - len(spec.lacks)

        own, others = ([spec for spec in fitting if spec.arch_specific is specific] for specific in (True, False))
        families = [own, others] if self.problem.score_mods or self.streams else [own or others]
        return [spec for family in families for spec in family if kind(spec) == min(map(kind, family))]

    def shared(self, spec: KernelSpec) -> tuple[SharedRows, ...]:
        """The fewest tiles, and ways that leave fewer SMs idle, or fewer rows unused. A forced row has the fewest."""
        p, block_m = self.problem, spec.block_m
        if not spec.arch_specific:
            ways = [shared_rows_on_mma_sync(p, block_m)]
        elif "score_mods" in spec.features:
            # A lane's two rows of scores share one scale of quantized operands: those of one head do.
            ways = [ONE_HEAD] if spec.quantized else [shared_rows_with_scores(p, block_m)]
        else:
            # Scales of quantized operands are found by whole groups of heads.
            whole = shared_rows(p, block_m, whole=True)
            ways = [whole] if spec.quantized else [shared_rows(p, block_m), whole]
        if spec.arch_specific or self.typical.seqlen_k >= _SYNC_KEYS:
            ways.append(ONE_HEAD)
        return tuple(dict.fromkeys(ways[:1] if self.is_forced else ways))

    def gain(self, spec: KernelSpec, way: SharedRows) -> float:
        """What a way has to gain over the first; with scores the model was measured on both."""
        least = 1.0 if "score_mods" in spec.features or way == self.shared(spec)[0] else _GAIN
        # The model knows nothing of CTAs that load while others of their SM are between two tiles.
        return least / _BETWEEN if spec.arch_specific and spec.ctas_per_sm > 1 and spec.head_dim == 128 else least

    def fewest(self, spec: KernelSpec, way: SharedRows) -> int:
        """Splits, at least.

        One split is the call without a split, unless heads share tiles that are fewer for it, or many keys long, or
        tiles are others: those of mma.sync where a call streams.
        """
        if self.is_forced or (self.streams and not spec.arch_specific):
            return 1
        many = self.typical.seqlen_k >= _MANY_KEYS * self.typical.seqlen_q
        return 1 if way.heads > 1 and (many or _heads_share(self.problem)) else _FEWEST_SPLITS

    def most_us(self, spec: KernelSpec, whole: float) -> float:
        """What a split may take, where the call without one takes ``whole``."""
        large = not spec.arch_specific or (spec.quantized and "score_mods" in spec.features)
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
    chosen = forced(force, ("attention_split",), lambda spec: unfit_split(spec, problem, target))
    if chosen is None and "attention" in named_ops(force):
        return None
    call = _Call(problem, target, unsplit.spec, chosen is not None)
    if chosen is not None:
        rows = [chosen.spec]
    elif call.has_work_enough() or _unfit_problem(problem) is not None:
        return None
    else:
        alike = ROWS(REGISTRY, ("attention_split", problem.dtype))
        fitting = [spec for spec in alike if unfit_split(spec, problem, target) is None and call.may_take(spec)]
        rows = call.candidates(fitting)
    ways = [
        (best[0] / call.gain(spec, way), *best, spec)
        for spec in rows
        for way in call.shared(spec)
        if (best := _best_split(call.typical, spec, target, way, call.fewest(spec, way))) is not None
    ]
    whole = float("inf") if chosen is not None else unsplit_us(call.typical, unsplit.spec, target)
    ways = [found for found in ways if found[1] < call.most_us(found[3], whole)]
    if call.streams and any(not found[3].arch_specific for found in ways):
        ways = [found for found in ways if not found[3].arch_specific]
    if not ways:
        return None
    _, time, split, spec = min(ways, key=lambda found: found[0])
    number, model = split.num_splits, f"{time:.0f} µs by the model, without a split {whole:.0f} µs"
    advice = advise(problem, target)
    why = (
        *([problem.note] if problem.note else []),
        f"{problem.dtype}, {problem.head_dims} in a tile of {spec.head_dim}",
        f"{number} split{'s' * (number > 1)} of the keys, {split.shared.heads} query heads in the rows of a tile",
        *((f"few queries on many keys: {model}",) if chosen is None else chosen.why),
        *([advice] if advice is not None else []),
    )
    merge = None if is_final(problem, number) else combine_of(spec, problem, target, force)
    return SplitSelection(Selection(spec, why), merge, split)


def combine_of(spec: KernelSpec, problem: AttentionProblem, target: Target, force: str | None) -> Selection:
    """The kernel that merges what the splits of ``spec`` leave."""
    own_lse = spec.quantized and problem.lse and "value_factors" not in spec.features
    merges = "attention_combine_lse" if own_lse else "attention_combine"
    (combine,) = ROWS(REGISTRY, (merges, problem.dtype))
    return the_one(combine, "merges the splits' results", target, force)
