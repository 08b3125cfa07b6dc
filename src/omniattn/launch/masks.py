"""Launches of ``mask_pack_sm80`` and ``mask_list_sm80``, and where attention finds what they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..problems import AttentionProblem
from ..problems.memory import ITEMSIZE, WORKSPACE_ALIGNMENT
from ..problems.quantize import carve
from ..problems.split import ONE_HEAD, PackGQA
from ..registry import KernelSpec
from ..registry.masks import MASK_TILE, MAX_TILES, PACK_TILES
from ..runtime.record import LaunchRecord
from .host_struct import At
from .structs import MASK_ALIGN, MASK_LIST, MASK_PACK
from .used_rows import used_rows

#: Numbers of the kinds in device code (``kernels_cu/params/attn_fwd.cuh``).
MASK_KINDS = {"none": 0, "bool": 1, "float32": 2, "io": 3}
#: What a thread of ``mask_align_sm80`` copies: a tensor map wants rows at multiples of it.
_CHUNK_BYTES = 16
#: Threads of a warpgroup: words of a tile of bits.
_WORDS = 128


@dataclass(frozen=True)
class MaskExtents:
    """Extents of a mask as the kernels have it: 1 where it is broadcast.

    Attributes
    ----------
    batch, heads, rows, cols : int
        ``rows`` is 1 where the mask is the same for every query; ``cols`` is always seqlen_k, of packed sequences that
        of the longest one.
    """

    batch: int
    heads: int
    rows: int
    cols: int

    @classmethod
    def of(cls, problem: AttentionProblem, pack_gqa: PackGQA = ONE_HEAD) -> MaskExtents:
        """Those of a call's mask, as the rows of a tile have it that heads share."""
        b, h, q, _ = _strides(problem)
        rows, cols = problem.mask_extent
        one_row = not q and (pack_gqa.pack == 1 or not h)
        heads = problem.num_q_heads // pack_gqa.heads
        return cls(problem.batch if b else 1, heads if h else 1, 1 if one_row else rows * pack_gqa.pack, cols)

    @property
    def m_tiles(self) -> int:
        """Tiles of rows."""
        return -(-self.rows // MASK_TILE)

    @property
    def n_tiles(self) -> int:
        """Tiles of keys."""
        return -(-self.cols // MASK_TILE)


@dataclass(frozen=True)
class MaskPlaces:
    """What the kernels make, as attention reads it. Strides in elements, 0 where the mask is broadcast.

    Attributes
    ----------
    bits, key_bias : At, optional
        Words, of a boolean mask, or fp32 values, of an additive one; the other is None.
    kinds : At
        What each tile is.
    lists : At, optional
        Which tiles of keys each tile of query rows has to visit; None for kernels that visit all.
    tiles_stride_b, tiles_stride_h : int
        Of bits or key_bias.
    tiles_stride_m : int
        Of bits, from one tile of 64 rows to the next.
    lists_stride_b, lists_stride_h : int
        Of lists; of packed sequences one behind the other.
    num_tiles : int
        One less than the elements of a list: tiles of 64 keys, and one more of packed sequences, whose lists say whose
        they are.
    num_bytes : int
        Memory of all of it.
    bias : At, optional
        A copy of an additive mask that a tensor map can describe; None: the mask itself.
    bias_strides : (int, int, int)
        Of that copy: batch, head, query.
    """

    bits: At | None
    key_bias: At | None
    kinds: At
    lists: At | None
    tiles_stride_b: int
    tiles_stride_h: int
    tiles_stride_m: int
    lists_stride_b: int
    lists_stride_h: int
    num_tiles: int
    num_bytes: int
    bias: At | None = None
    bias_strides: tuple[int, int, int] = (0, 0, 0)


def takes(problem: AttentionProblem) -> bool:
    """Whether the kernels take the mask of a call: booleans, or values that are the same for every query."""
    return problem.packs_mask


def memory_of(problem: AttentionProblem) -> tuple[int, int]:
    """First byte and end of the memory that a call's mask lies in, from its first element on."""
    if problem.mask == "none":
        return 0, 0
    extents = (problem.batch, problem.num_q_heads, *problem.mask_extent)
    if 0 in extents:
        return 0, 0
    reach = [stride * (n - 1) for stride, n in zip(_strides(problem), extents, strict=True)]
    itemsize = ITEMSIZE[problem.mask_dtype]
    return itemsize * sum(min(x, 0) for x in reach), itemsize * (sum(max(x, 0) for x in reach) + 1)


def pay(problem: AttentionProblem) -> bool:
    """Whether a kernel that could read the mask of a call itself had better have it packed; it reads no lists of packed
    sequences."""
    if problem.varlen:
        return False
    if problem.mask_encoding == "bits" and problem.one_mask_for_all_keys:
        return False  # larger than the mask
    return takes(problem) and problem.seqlen_k <= MASK_TILE * MAX_TILES


def shapes(
    problem: AttentionProblem, num_m_blocks: int, *, listed: bool = True, pack_gqa: PackGQA = ONE_HEAD
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of what the kernels make, by name: ``bits`` or ``key_bias``, ``kinds``, and ``lists``."""
    e = MaskExtents.of(problem, pack_gqa)
    tiles = (e.batch, e.heads, e.m_tiles, e.n_tiles)
    packed: dict[str, tuple[tuple[int, ...], str]] = (
        {"bits": ((*tiles, _WORDS), "uint32")}
        if problem.mask == "bool"
        else {"key_bias": ((e.batch, e.heads, MASK_TILE * e.n_tiles), "float32")}
    )
    found = {**packed, "kinds": (tiles, "uint8")}
    return {**found, "lists": (list_shape(problem, e, num_m_blocks), "int32")} if listed else found


def list_shape(problem: AttentionProblem, e: MaskExtents, num_m_blocks: int) -> tuple[int, ...]:
    """Shape of the lists; num_m_blocks: of a head, of all packed sequences together."""
    if problem.varlen:
        return (e.heads, num_m_blocks, 2 + e.n_tiles)
    return (e.batch, e.heads, num_m_blocks, 1 + e.n_tiles)


def list_strides(problem: AttentionProblem, e: MaskExtents, num_m_blocks: int) -> dict[str, Any]:
    """What `MaskPlaces` says of lists, for those of every mask: 0 for extents of 1."""
    *_, length = list_shape(problem, e, num_m_blocks)
    per_head = num_m_blocks * length
    return {
        "lists_stride_b": 0 if problem.varlen or e.batch == 1 else per_head * e.heads,
        "lists_stride_h": 0 if e.heads == 1 else per_head,
        "num_tiles": length - 1,
    }


def workspace_bytes(problem: AttentionProblem, num_m_blocks: int) -> int:
    """Bytes of memory that `build` needs, with lists."""
    return carve(shapes(problem, num_m_blocks))[1]


def places(
    problem: AttentionProblem, num_m_blocks: int, memory: At, *, listed: bool = True, pack_gqa: PackGQA = ONE_HEAD
) -> MaskPlaces:
    """Where everything is, from ``memory`` on, every array at a multiple of `WORKSPACE_ALIGNMENT`."""
    assert memory.offset % WORKSPACE_ALIGNMENT == 0
    e = MaskExtents.of(problem, pack_gqa)
    offsets, num_bytes = carve(shapes(problem, num_m_blocks, listed=listed, pack_gqa=pack_gqa))
    at = {name: At(memory.operand, memory.offset + offset) for name, offset in offsets.items()}
    per_m = _WORDS * e.n_tiles if problem.mask == "bool" else 0
    per_head = per_m * e.m_tiles if problem.mask == "bool" else MASK_TILE * e.n_tiles
    by_batch, by_head, _ = (stride != 0 for stride in _strides(problem)[:3])
    return MaskPlaces(
        at.get("bits"),
        at.get("key_bias"),
        at["kinds"],
        at.get("lists"),
        tiles_stride_b=per_head * e.heads if by_batch else 0,
        tiles_stride_h=per_head if by_head else 0,
        tiles_stride_m=per_m if e.rows > 1 else 0,
        num_bytes=num_bytes,
        **list_strides(problem, e, num_m_blocks),
    )


def build(
    pack: KernelSpec,
    listing: KernelSpec | None,
    problem: AttentionProblem,
    block_m: int,
    lead_rows: int,
    num_m_blocks: int,
    memory: At,
    pack_gqa: PackGQA = ONE_HEAD,
) -> tuple[tuple[LaunchRecord, ...], MaskPlaces]:
    """The launches before attention, and where it finds what they make.

    Parameters
    ----------
    pack, listing : KernelSpec
        Rows of the operations ``"mask_pack"`` and ``"mask_list"``; no listing for kernels that visit all tiles.
    problem : AttentionProblem
        Of a call with a mask that the kernels take (`takes`); the operand is ``"mask"``.
    block_m : int
        Query rows of a tile of the attention kernel: a multiple of 64, or a part of it.
    lead_rows : int
        Rows of a head's first tile that lie before row 0, a multiple of 64.
    num_m_blocks : int
        Tiles of query rows of a head; of packed sequences as `attn_fwd.num_m_blocks` bounds them.
    memory : At
        At a multiple of `WORKSPACE_ALIGNMENT`, `workspace_bytes` long.
    pack_gqa : PackGQA
        Heads that share the rows of a tile; rows above are such then. At most 8 a query.

    Returns
    -------
    records : tuple of LaunchRecord
        None without queries, and no packing without keys.
    places : MaskPlaces
    """
    assert takes(problem), "attention reads this mask itself"
    assert block_m % MASK_TILE == 0 or MASK_TILE % block_m == 0
    assert lead_rows % MASK_TILE == 0
    found = places(problem, num_m_blocks, memory, listed=listing is not None, pack_gqa=pack_gqa)
    if problem.batch * problem.num_q_heads * num_m_blocks == 0:
        return (), found
    e = MaskExtents.of(problem, pack_gqa)
    masks = e.batch * e.heads
    records = []
    # A grid of 2^31 CTAs would write terabytes: one launch is enough.
    ctas = masks * e.m_tiles * -(-e.n_tiles // PACK_TILES)
    if ctas:
        packing = MASK_PACK.pack(_pack_values(problem, e, found, pack_gqa))
        records.append(LaunchRecord(pack, (ctas, 1, 1), 32 * pack.num_warps, *packing))
    if listing is None:
        return tuple(records), found
    # It begins while the kernel ahead ends, and waits for its kinds by itself.
    lists = list_record(
        listing, problem, e, found, block_m, lead_rows, num_m_blocks, broadcast_rows=e.rows == 1, overlap=bool(records),
        pack=pack_gqa.pack,
    )  # fmt: skip
    return (*records, lists), found


def _row_chunks(problem: AttentionProblem, e: MaskExtents) -> int:
    return -(-e.cols * ITEMSIZE[problem.mask_dtype] // _CHUNK_BYTES)


def build_aligned(
    align: KernelSpec, problem: AttentionProblem, memory: At
) -> tuple[tuple[LaunchRecord, ...], MaskPlaces]:
    """The launch that copies an additive mask (`AttentionProblem.aligns_mask`) for tensor maps, and where the copy is.

    Parameters
    ----------
    align : KernelSpec
        The row of the operation ``"mask_align"``.
    problem : AttentionProblem
    memory : At
        At a multiple of `WORKSPACE_ALIGNMENT`.
    """
    assert memory.offset % WORKSPACE_ALIGNMENT == 0
    e = MaskExtents.of(problem)
    row_chunks = _row_chunks(problem, e)
    chunks = e.batch * e.heads * e.rows * row_chunks
    itemsize = ITEMSIZE[problem.mask_dtype]
    row = row_chunks * _CHUNK_BYTES // itemsize
    by_batch, by_head, by_row = (stride != 0 for stride in _strides(problem)[:3])
    strides = (row * e.rows * e.heads * by_batch, row * e.rows * by_head, row * by_row)
    found = MaskPlaces(None, None, memory, None, 0, 0, 0, 0, 0, 0, _CHUNK_BYTES * chunks, memory, strides)
    if not chunks:
        return (), found
    first_byte, end_byte = memory_of(problem)
    values: dict[str, object] = {
        "mask": At("mask"),
        "copy": memory,
        **dict(zip((f"mask_stride_{x}" for x in "bhqk"), _strides(problem), strict=True)),
        "first_byte": first_byte,
        "end_byte": end_byte,
        "mask_heads": e.heads,
        "rows": e.rows,
        "cols": e.cols,
        "row_chunks": row_chunks,
        "element_bytes": itemsize,
        "chunks": chunks,
    }
    threads = 32 * align.num_warps
    return (LaunchRecord(align, (-(-chunks // threads), 1, 1), threads, *MASK_ALIGN.pack(values)),), found


def list_record(
    listing: KernelSpec,
    problem: AttentionProblem,
    e: MaskExtents,
    found: MaskPlaces,
    block_m: int,
    lead_rows: int,
    num_m_blocks: int,
    *,
    broadcast_rows: bool,
    overlap: bool,
    kinds_of_slots: bool = False,
    pack: int = 1,
) -> LaunchRecord:
    """The launch that lists tiles by their kinds.

    broadcast_rows: one tile of rows stands for all. kinds_of_slots: of packed sequences, kinds are those of their own
    tiles, not of the mask's. pack: rows of a query.
    """
    values: dict[str, object] = {
        "kinds": found.kinds,
        "lists": found.lists,
        **sequences(problem, given=problem.varlen),
        "mask_batch": e.batch,
        "mask_heads": e.heads,
        "m_tiles": e.m_tiles,
        "n_tiles": e.n_tiles,
        "broadcast_rows": int(broadcast_rows),
        "num_m_blocks": num_m_blocks,
        "block_m": block_m,
        "lead_rows": lead_rows,
        "seqlen_q": problem.seqlen_q * pack,
        "seqlen_k": problem.seqlen_k,
        "window_left": problem.window_left,
        "window_right": problem.window_right,
        "pack": pack,
        "batch": problem.batch,
        "kinds_of_slots": int(kinds_of_slots),
        "zero": 0,
    }
    lists = (1 if problem.varlen else e.batch) * e.heads * num_m_blocks
    grid = (-(-lists // listing.num_warps), 1, 1)
    return LaunchRecord(listing, grid, 32 * listing.num_warps, *MASK_LIST.pack(values), overlap=overlap)


def _strides(problem: AttentionProblem) -> tuple[int, int, int, int]:
    assert problem.strides is not None, "a problem without strides describes a call, it cannot be launched"
    return problem.strides.mask


def sequences(problem: AttentionProblem, *, given: bool) -> dict[str, object]:
    """The fields of cu_seqlens and of the rows that are used, or null."""
    starts = {name: At(name) if given else None for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return starts | used_rows(problem.used if given else (False, False))


def _pack_values(problem: AttentionProblem, e: MaskExtents, found: MaskPlaces, pack_gqa: PackGQA) -> dict[str, object]:
    """The fields of MaskPackParams."""
    strides = _strides(problem)
    first_byte, end_byte = memory_of(problem)
    return {
        "mask": At("mask"),
        "bits": found.bits,
        "key_bias": found.key_bias,
        "kinds": found.kinds,
        **dict(zip((f"mask_stride_{x}" for x in "bhqk"), strides, strict=True)),
        "first_byte": first_byte,
        "end_byte": end_byte,
        # A mask that is the same for all sequences is packed as far as the longest one reaches.
        **sequences(problem, given=problem.varlen and strides[0] != 0),
        "mask_kind": MASK_KINDS[problem.mask],
        "mask_heads": e.heads,
        "rows": e.rows,
        "cols": e.cols,
        "pack_log2": pack_gqa.pack.bit_length() - 1,
        "pack_heads": pack_gqa.heads,
        "m_tiles": e.m_tiles,
        "n_tiles": e.n_tiles,
        "total_q": problem.seqlen_q,
        "total_k": problem.seqlen_k,
    }
