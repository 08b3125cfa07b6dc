"""One way to run an attention call, as a value: what selection chooses, and the only thing that stages are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ..problems import UNLIMITED, AttentionProblem
from ..problems.attention import READ_WHOLE
from ..problems.split import ONE_HEAD, WHOLE, PackGQA, Schedule, SplitKV, StreamK, TailSplit, Whole
from ..registry import KernelSpec
from ..registry.masks import MASK_TILE, MAX_TILES


class MaskInput(Enum):
    """How a kernel gets what hides keys: a mask, a block mask, a mask expression."""

    #: It reads the mask itself, or there is none.
    IN_PLACE = "in place"
    #: Another kernel packs it: a bit, or a number a key.
    PACKED = "packed"
    #: Besides, or of what needs no packing, kernels list the tiles of keys that are left to visit.
    LISTED = "listed"
    #: Another kernel copies an additive mask to rows that a tensor map can describe.
    COPIED = "copied"
    #: Numbers a key, which differ between heads, are read by a tensor map that repeats them for every query.
    AS_TILES = "as tiles"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a call.

    Attributes
    ----------
    row : KernelSpec
        The kernel that attends.
    pack_gqa : PackGQA
        Query heads that share the rows of a tile.
    schedule : Schedule
        How keys are divided among CTAs; of a persistent kernel also the order of its tiles.
    mask : MaskInput
    heads_as_queries : bool
        The query heads of a kv head, with one query each, are told to the kernel as queries of one head.
    """

    row: KernelSpec
    pack_gqa: PackGQA = ONE_HEAD
    schedule: Schedule = WHOLE
    mask: MaskInput = MaskInput.IN_PLACE
    heads_as_queries: bool = False

    @property
    def text(self) -> str:
        """The way in one line: kernel, heads that share a tile, schedule, mask; what is as usual is left out."""
        words = [self.row.name]
        if self.pack_gqa != ONE_HEAD:
            words.append("{} heads in {} rows".format(*self.pack_gqa))
        if isinstance(self.schedule, SplitKV):
            words.append(f"{self.schedule.splits} splits")
        elif isinstance(self.schedule, StreamK):
            words.append(f"Stream-K over {self.schedule.ctas} CTAs")
        elif isinstance(self.schedule, TailSplit):
            words.append(f"last {self.schedule.num_tiles} tiles in {self.schedule.splits} splits")
        else:
            words += _unusual(self.schedule)
        if self.mask is not MaskInput.IN_PLACE:
            words.append(f"mask {self.mask.value}")
        if self.heads_as_queries:
            words.append("heads as queries")
        return ", ".join(words)

    def told(self, problem: AttentionProblem) -> AttentionProblem:
        """The call as its kernels are told of it."""
        told = heads_as_queries(problem) if self.heads_as_queries else problem
        return keys_as_tiles(told) if self.mask is MaskInput.AS_TILES else told


def _unusual(order: Whole) -> list[str]:
    """What an order of tiles has that the usual ones have not."""
    tiles = order.tiles
    if tiles is None:
        return []
    words = []
    if tiles.num_tail_heads:
        heads = f"last {tiles.num_tail_heads} heads" if tiles.num_pairs else "heads"
        words.append(f"{heads} interleaved")
    if order.spare:
        words.append(f"{order.ctas} CTAs")
    return words


def can_have_heads_as_queries(problem: AttentionProblem) -> bool:
    """Whether a call is the same one with the query heads of a kv head as queries of one head."""
    p = problem
    alike = p.window_left == p.window_right == UNLIMITED and p.sinks == "none"
    alike = alike and p.score_mod is None and p.block_mask is None and not p.precision.quantized
    alike = alike and p.dropout is None  # it drops by head and row
    return alike and not p.varlen and p.strides is not None and p.seqlen_q == 1 and p.num_q_heads > p.num_kv_heads > 0


def heads_as_queries(problem: AttentionProblem) -> AttentionProblem:
    """The same call with the query heads of a kv head as queries of one head.

    A kernel that forms scores one by one has a head's queries in a tile: of one query it would read K and V for each
    query head, with one row in a tile.
    """
    p, s = problem, problem.strides
    assert s is not None
    group, heads = p.num_q_heads // p.num_kv_heads, p.num_kv_heads

    def rows(strides: tuple[int, int, int]) -> tuple[int, int, int]:
        """(batch, seq, head) of the rows."""
        return strides[0], strides[2], strides[2] * group if heads > 1 else 0

    of_batch, of_head, _, of_key = s.mask
    told = replace(
        s, q=rows(s.q), o=rows(s.o), lse=(s.lse[0], group if heads > 1 else 0),
        mask=(of_batch, of_head * group if heads > 1 else 0, of_head, of_key),
    )  # fmt: skip
    # Rows of a mask that differs between heads are those of a head's queries now.
    return replace(
        p, seqlen_q=group, num_q_heads=heads, strides=told, mask_map=p.mask_map or p.keys_map, keys_map=False
    )


def can_have_keys_as_tiles(problem: AttentionProblem) -> bool:
    """Whether an additive mask of numbers a key, which differ between heads, can be read as tiles of queries and keys.

    Heads with other numbers a key cannot share the rows of a tile; those with other tiles of a bias can.
    """
    p = problem
    return (
        p.mask_encoding == "keys" and p.keys_map and p.score_mod is None and not p.varlen and p.strides is not None
        and not p.precision.quantized and p.operands is None
    )  # fmt: skip


def keys_as_tiles(problem: AttentionProblem) -> AttentionProblem:
    """The same call with such a mask as one that a tensor map repeats for every query."""
    return replace(problem, keys_as_tiles=True, mask_map=True)


def mask_inputs(row: KernelSpec, problem: AttentionProblem, pack_gqa: PackGQA = ONE_HEAD) -> tuple[MaskInput, ...]:
    """The ways in which ``row`` can get the mask of a call, the usual one first; none, if it gets it in another form.

    ``problem`` is as the kernel is told of it: with numbers a key as tiles where that is wanted.
    """
    p = problem
    if p.keys_as_tiles:
        return (MaskInput.AS_TILES,) if row.bias_bytes else ()
    can_pack = p.packs_mask
    if row.block_masks:
        return (MaskInput.LISTED,)
    if row.quantized:
        return (_packed(row, p, pack_gqa),) if row.arch_specific and can_pack else (MaskInput.IN_PLACE,)
    if p.varlen and not (row.lists and row.arch_specific):
        return (MaskInput.IN_PLACE,)
    if not row.mask_maps:
        # They read any mask themselves. One that is the same for all keys is smaller than its bits.
        can_pack = can_pack and p.seqlen_k <= MASK_TILE * MAX_TILES
        can_pack = can_pack and not (p.mask_encoding == "bits" and p.one_mask_for_all_keys)
    elif p.aligns_mask:
        return (MaskInput.COPIED,)
    if can_pack:
        packed = _packed(row, p, pack_gqa)
        may_read = row.min_arch >= (9, 0) and p.seqlen_k <= READ_WHOLE
        return (packed, MaskInput.IN_PLACE) if may_read and not row.mask_maps else (packed,)
    return (MaskInput.LISTED if p.finds_tiles else MaskInput.IN_PLACE,)


def _packed(row: KernelSpec, problem: AttentionProblem, pack_gqa: PackGQA) -> MaskInput:
    """Of a mask that is packed: whether what it leaves is listed."""
    if not row.lists:
        return MaskInput.PACKED
    # Heads that share a tile by queries, as on mma.sync, have no list in common where the mask is another for each.
    by_head = problem.strides is not None and problem.strides.mask[1] != 0 and problem.num_q_heads > 1
    alone = not row.arch_specific and pack_gqa.heads > 1 and by_head
    return MaskInput.PACKED if alone else MaskInput.LISTED
