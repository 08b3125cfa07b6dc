"""What calls take whose keys are split over CTAs, and the same calls whose keys are not: a model of both.

Times in microseconds on an H200, the GPU that the constants were measured on; those of packed sequences were fitted to
calls on an H100, with its rate of memory in the place of the H200's. On others of its compute capability the
model compares the same two ways, with the same ratio between memory and products to within a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..problems import UNLIMITED, AttentionProblem, Target
from ..problems.memory import ITEMSIZE
from ..problems.split import ONE_HEAD, PackGQA, is_final, tile_keys
from ..registry import KernelSpec
from . import tile

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
#: With scores a step of theirs takes so many times as long: masks 1.0 to 1.3, softcap 1.3 to 1.6, in long sequences.
_INT8_SCORES = 1.3
#: Tiles of rows that read the same keys at the same time, at most, and how much longer their products take.
_MOST_GANG, _GANG = 4, 1.1
#: The same of more tiles, each at its own time; and where L2 does not hold their K and V, so many bytes, in between.
_APART, _LOST, _HELD = 1.4, 2.0, 36e6
#: What a tile takes longer to begin and end with even shares; what kernels with one CTA an SM take longer.
_SHARE_ITEM_US, _ONE_CTA_US = 2.4, 3.0
#: How much longer sequences of several such classes take.
_MIXED = 1.6
#: How much longer the call without a split takes where the longest sequence has so many times the keys of the mean.
_UNEVEN, _UNEVEN_KEYS = 1.25, 2
#: Tiles of which half is never used.
_WIDE = 1.05
#: A step with softcap.
_SCORES = 1.4
#: What the walk over the lengths of packed sequences takes before the first copy.
_WALK_US = 8.0
#: Of packed sequences the longest takes so many times the queries of the mean, where lengths are told to differ.
_UNEQUAL = 1.6


def step_us(spec: KernelSpec, rows: int, ctas: int) -> float:
    """A step of the ``ctas`` CTAs of an SM, a tile of keys each, of which ``rows`` query rows exist."""
    if not spec.arch_specific:
        tiles = -(-min(rows, spec.block_m) // _SYNC_ROWS)
        chain, flops = _SYNC_CHAIN_US, _SYNC_FLOPS
        if spec.score_mods:
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
    scores = _INT8_SCORES if spec.quantized and spec.score_mods else 1.0
    return scores * max(products + waits, groups * ctas * busy)


class Walk:
    """What a kernel does with a problem, however its keys are split: tiles of queries, and the keys of each."""

    def __init__(self, problem: AttentionProblem, spec: KernelSpec, pack_gqa: PackGQA, sm_count: int) -> None:
        p = self.problem = problem
        self.sm_count, self.ctas, self.block_m = sm_count, sm_count * spec.ctas_per_sm, spec.block_m
        self.tiles = tile_keys(p, spec.block_m, spec.block_n, pack_gqa.pack)
        self.sm_share = _INT8_SM_SHARE if spec.quantized else _SM_SHARE
        self.rows, self.heads = p.seqlen_q * pack_gqa.pack, p.batch * p.num_q_heads // pack_gqa.heads
        self.longest = max(self.tiles, default=0)
        # Of K and V; quantized ones are as wide as the tile.
        key_bytes = 2 * spec.head_dim if spec.quantized else ITEMSIZE[p.dtype] * (p.head_dim + p.head_dim_v)
        steps = self.heads * sum(self.tiles)
        self.steps = [step_us(spec, self.rows, n) for n in range(1, spec.ctas_per_sm + 1)]
        seen = max(tile_keys(p, max(p.seqlen_q, 1), 1, 1), default=0)
        memory, l2 = _MEMORY, _L2
        if spec.arch_specific and not spec.quantized and not tile.whole_sectors(p):
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
    return Walk(problem, spec, ONE_HEAD, target.sm_count).whole_us()


def of_equal_lengths(problem: AttentionProblem) -> AttentionProblem:
    """Packed sequences as a batch of sequences of the mean length: what a choice on the host can know of them."""
    p = problem
    if not p.varlen or p.batch == 0:
        return p
    n = p.sequences
    return replace(p, varlen=False, batch=n, parts=1, seqlen_q=-(-p.seqlen_q // n), seqlen_k=-(-p.seqlen_k // n))


def of_two_lengths(problem: AttentionProblem) -> tuple[AttentionProblem, ...]:
    """The same as two batches, one as long as the longest sequence and one of single queries, where that is far from
    the mean: prompts among sequences that decode.
    """
    p, mean = problem, of_equal_lengths(problem)
    longest = min(p.max_seqlen_q, p.seqlen_q)
    if mean is p or p.sequences == 1 or longest <= _UNEQUAL * mean.seqlen_q:
        return (mean,)
    long = min(max(round((p.seqlen_q - p.sequences) / (longest - 1)), 1), p.sequences - 1)
    return (
        replace(mean, batch=long, seqlen_q=longest, seqlen_k=max(mean.seqlen_k, longest)),
        replace(mean, batch=p.sequences - long, seqlen_q=1),
    )


def _item_us(problem: AttentionProblem, spec: KernelSpec, ctas: int) -> float:
    return ITEM_US if spec.quantized else tile.item_us(problem, spec, ctas)


def _short_step_us(problem: AttentionProblem, spec: KernelSpec, rows: int, ctas: int) -> float:
    """A step by the model of short sequences, which knows how CTAs share an SM; on 8 bits by this one."""
    return step_us(spec, rows, ctas) if spec.quantized else tile.step_us(problem, spec, rows, ctas)


def shares_us(batches: Sequence[AttentionProblem], spec: KernelSpec, pack_gqa: PackGQA, target: Target) -> float:
    """Time of packed sequences with even shares of all keys, the kernel that merges them included."""
    n, ctas = spec.ctas_per_sm, target.sm_count * spec.ctas_per_sm
    work = read = reread = 0.0
    for p in batches:
        row_bytes = 2 * spec.head_dim if spec.quantized else 2 * ITEMSIZE[p.dtype] * p.head_dim
        heads, rows = p.batch * p.num_q_heads // pack_gqa.heads, p.seqlen_q * pack_gqa.pack
        tiles = tile_keys(p, spec.block_m, spec.block_n, pack_gqa.pack)
        steps, apart = heads * sum(tiles), len(tiles) > _MOST_GANG
        own = sum(
            _item_us(p, spec, n) + _SHARE_ITEM_US + keys * _short_step_us(p, spec, rows - i * spec.block_m, n)
            for i, keys in enumerate(tiles)
        )
        of_head, heads_k = max(tiles, default=0) * spec.block_n, p.batch * p.num_kv_heads
        lost = apart and min(ctas, heads_k) * of_head * row_bytes > _HELD
        own *= _LOST if lost else _APART if apart else _GANG if len(tiles) > 1 else 1.0
        work += heads * own * (_SCORES if spec.score_mods else 1.0)
        keys = heads_k * of_head * (len(tiles) if lost else 1)
        read += row_bytes * (keys + p.batch * p.num_q_heads * p.seqlen_q)
        reread += row_bytes * steps * spec.block_n
    rows = min(max(p.seqlen_q for p in batches) * pack_gqa.pack, spec.block_m) * ctas
    partial = 2 * 4 * rows * (batches[0].head_dim_v + 2) / PARTIAL_BYTES
    begins = tile.LAUNCH_US + _WALK_US + _item_us(batches[0], spec, n)
    busy = max(work / ctas, read / tile.MEMORY, reread / tile.l2_rate(batches[0]))
    is_wide = all(2 * p.seqlen_q * pack_gqa.pack <= spec.block_m for p in batches)
    busy *= _WIDE if is_wide else 1.0
    longest = -(-batches[0].max_seqlen_q * pack_gqa.pack // spec.block_m)
    is_mixed = batches[0].max_seqlen_q > batches[0].seqlen_q and 1 < longest <= _MOST_GANG
    busy *= _MIXED if is_mixed else 1.0
    return begins + busy + COMBINE_US + partial + (_ONE_CTA_US if n == 1 else 0.0)


def whole_packed_us(
    problem: AttentionProblem, batches: Sequence[AttentionProblem], spec: KernelSpec, target: Target
) -> float:
    """Time of packed sequences without a split; at least that of the longest."""
    p = problem
    seen = p.max_seqlen_k if p.window_left == UNLIMITED else min(p.max_seqlen_k, p.window_left + 1)
    step = _short_step_us(p, spec, max(p.max_seqlen_q, 1), 1)
    longest = tile.LAUNCH_US + _item_us(p, spec, 1) + -(-seen // spec.block_n) * step
    if spec.quantized:
        whole = LAUNCH_US + sum(unsplit_us(batch, spec, target) - LAUNCH_US for batch in batches)
    else:
        apart = sum(tile.tile_us(batch, spec, target) - tile.LAUNCH_US for batch in batches) + tile.LAUNCH_US
        whole = apart if len(batches) > 1 else tile.tile_us(p, spec, target)
    is_uneven = p.max_seqlen_k * p.sequences > _UNEVEN_KEYS * p.seqlen_k
    return max(whole * (_UNEVEN if is_uneven else 1.0), longest)
