"""Rows of exact attention. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .attention_512 import rows_to_512
from .spec import IO_TYPES, KernelSpec, Masks


@dataclass(frozen=True)
class _FwdTile:
    """Tile shape of ``attn_fwd_sm80`` for one padded head_dim (tuning record: docs/performance/attn_fwd_sm80.md)."""

    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    q_in_registers: bool
    min_ctas: int
    suffix: str = ""
    min_arch: tuple[int, int] = (8, 0)


# Every tile fits into the 99 KB of sm_86, sm_89 and sm_120, so that one row serves all GPUs.
_FWD_SM80_TILES: tuple[_FwdTile, ...] = (
    _FwdTile(32, 128, 64, 4, 2, True, 2),
    _FwdTile(64, 128, 64, 4, 2, True, 2),
    _FwdTile(96, 128, 48, 4, 2, False, 2),
    # 48 keys spill registers on sm_80 and sm_89, and are 4 % faster than 32 on sm_90.
    _FwdTile(128, 128, 32, 4, 2, False, 2),
    _FwdTile(128, 128, 48, 4, 2, False, 2, suffix="_n48", min_arch=(9, 0)),
    _FwdTile(192, 64, 64, 4, 1, False, 2),
    _FwdTile(256, 64, 64, 4, 1, False, 2),
)

# Score modifiers take shared memory for the tile of a mask, and registers: fewer keys.
_FWD_SM80_MODS_TILES: tuple[_FwdTile, ...] = (
    _FwdTile(32, 128, 32, 4, 2, True, 2),
    # 64 keys are 8 % faster on sm_90, and leave sm_86 and sm_89 one CTA an SM.
    _FwdTile(64, 128, 32, 4, 2, True, 2),
    _FwdTile(64, 128, 64, 4, 2, False, 2, suffix="_n64", min_arch=(9, 0)),
    _FwdTile(96, 128, 32, 4, 2, False, 2),
    _FwdTile(128, 128, 32, 4, 2, False, 2),
    _FwdTile(192, 64, 32, 4, 2, False, 2),
    _FwdTile(256, 64, 32, 4, 1, False, 2),
    # 112 KB: not for sm_120.
    _FwdTile(256, 64, 64, 4, 1, False, 2, suffix="_n64", min_arch=(9, 0)),
)

# Of K and V in pages: tiles that serve all GPUs. With scores, 128 rows of 128 channels would spill registers.
_FWD_SM80_PAGED_TILES = tuple(tile for tile in _FWD_SM80_TILES if tile.min_arch == (8, 0))
_FWD_SM80_PAGED_MODS_TILES = tuple(
    replace(tile, block_m=64) if tile.head_dim == 128 else tile
    for tile in _FWD_SM80_MODS_TILES
    if tile.min_arch == (8, 0)
)

# Of short sequences, several CTAs an SM (docs/performance/short.md).
_FWD_SM80_SMALL_MODS_TILES: tuple[_FwdTile, ...] = tuple(
    _FwdTile(
        head_dim, block_m, block_n, num_warps, 2, head_dim == 64, ctas, suffix=f"_m{block_m}n{block_n}",
        min_arch=(9, 0),
    )
    for head_dim, block_m, block_n, num_warps, ctas in (
        (64, 64, 64, 4, 3), (128, 64, 64, 4, 2), (64, 16, 16, 1, 16), (128, 16, 16, 1, 10),
    )
)  # fmt: skip

# Without scores: one warp. 64 rows are Hopper's own kernel's.
_FWD_SM80_SMALL_TILES: tuple[_FwdTile, ...] = tuple(tile for tile in _FWD_SM80_SMALL_MODS_TILES if tile.num_warps == 1)

# More than 256 channels, v of any number of them: a tile for 163 KB, and one for the 99 KB of sm_86, sm_89 and sm_120.
_FWD_SM80_WIDE_MODS_TILES: tuple[_FwdTile, ...] = (
    _FwdTile(512, 64, 32, 8, 1, False, 1),
    _FwdTile(512, 32, 16, 4, 1, False, 1, suffix="_m32"),
)
# And for 227 KB, where score modifiers would take 32 KB more than there are.
_FWD_SM80_WIDE_TILES: tuple[_FwdTile, ...] = (
    *_FWD_SM80_WIDE_MODS_TILES,
    _FwdTile(512, 64, 64, 8, 1, False, 1, suffix="_n64", min_arch=(9, 0)),
)

# Keys split over CTAs (docs/performance/few_queries.md). Few queries: 64 rows a CTA, and as many keys under way as fit.
_FWD_SM80_SPLIT_TILES: tuple[_FwdTile, ...] = (
    _FwdTile(64, 64, 64, 4, 2, True, 3),
    _FwdTile(96, 64, 64, 4, 2, False, 2),
    _FwdTile(128, 64, 64, 4, 2, False, 2),
    _FwdTile(192, 64, 64, 4, 1, False, 2),
    _FwdTile(256, 64, 32, 4, 1, False, 2),
    *_FWD_SM80_WIDE_MODS_TILES,
)


def _attn_fwd_sm80(
    tile: _FwdTile,
    dtype: str,
    score_mods: bool,
    own_head_dim_v: bool = False,
    split: bool = False,
    paged: bool = False,
) -> KernelSpec:
    """own_head_dim_v: v has a head_dim of its own; split: keys are split over CTAs; paged: K and V lie in pages."""
    wide = tile.head_dim > 256  # two warps have the same rows
    own_head_dim_v = own_head_dim_v or wide
    # Tiles of 16 rows search cu_seqlens_k for their sequence, and splits are of calls without pages.
    assert not paged or (tile.block_m >= 32 and not split)
    short, tag = IO_TYPES[dtype]
    smem_bytes = 2 * tile.head_dim * (tile.block_m + 2 * tile.num_stages * tile.block_n)
    if score_mods:
        smem_bytes += 4 * tile.block_m * tile.block_n * (1 + wide)
    smem_bytes += 4 * tile.block_m * tile.block_n * wide
    return KernelSpec(
        name=f"attn_fwd_sm80_{short}_d{tile.head_dim}{tile.suffix}"
        + "_v" * (own_head_dim_v and not wide)
        + "_paged" * paged
        + "_split" * split
        + "_mods" * score_mods,
        family="attn_fwd_sm80",
        op="attention_split" if split else "attention",
        source="entry/attn_fwd_sm80.cu",
        symbol="attn_fwd_sm80",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(tile.head_dim)),
            ("BLOCK_M", str(tile.block_m)),
            ("BLOCK_N", str(tile.block_n)),
            ("NUM_WARPS", str(tile.num_warps)),
            ("NUM_STAGES", str(tile.num_stages)),
            ("Q_IN_REGISTERS", str(int(tile.q_in_registers))),
            ("MIN_CTAS", str(tile.min_ctas)),
            ("SCORE_MODS", str(int(score_mods))),
            ("OWN_HEAD_DIM_V", str(int(own_head_dim_v))),
            ("SPLIT_KEYS", str(int(split))),
            ("PAGED", str(int(paged))),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=tile.head_dim,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        smem_bytes=smem_bytes,
        ctas_per_sm=tile.min_ctas,
        min_arch=tile.min_arch,
        sequences="packed" if paged else "any",
        paged=paged,
        softcap="any" if score_mods else "never",
        masks="any" if score_mods else "none",
        score_mod=score_mods,
        dropout=not (wide or split or paged),
        lists=score_mods,
        other_head_dim_v=own_head_dim_v,
        any_head_dim_v=wide,
    )


@dataclass(frozen=True)
class _FwdSm90Tile:
    """Tile shape of ``attn_fwd_sm90`` for one padded head_dim (tuning record: docs/performance/attn_fwd_sm90.md)."""

    head_dim: int
    num_consumers: int
    block_n: int
    num_stages: int = 2
    num_q_stages: int = 1
    bias_bytes: int = 0
    softcap: bool = True
    ctas_per_sm: int = 1
    head_dim_v: int = 0  # 0: head_dim

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim


_FWD_SM90_TILES: tuple[_FwdSm90Tile, ...] = (
    _FwdSm90Tile(64, 4, 64, 4, 2),
    _FwdSm90Tile(96, 3, 96),
    _FwdSm90Tile(128, 2, 128, 2, 2),
    _FwdSm90Tile(128, 3, 64, 3, 1),
    _FwdSm90Tile(192, 2, 64, 3),
    _FwdSm90Tile(256, 2, 64),
)

# Of K and V in pages: tiles whose CTA has four warps that copy (docs/performance/packed.md).
_FWD_SM90_PAGED_TILES: tuple[_FwdSm90Tile, ...] = (
    _FwdSm90Tile(64, 2, 128, 3),
    _FwdSm90Tile(96, 3, 96),
    _FwdSm90Tile(128, 2, 128, 3),
    _FwdSm90Tile(192, 2, 64, 3),
    _FwdSm90Tile(256, 2, 64),
)

# Of v with a head_dim of its own; other pairs are padded to the next of these or of the tiles above.
_FWD_SM90_HEAD_DIM_V_TILES: tuple[_FwdSm90Tile, ...] = (
    _FwdSm90Tile(192, 2, 128, 2, 1, head_dim_v=128),
    _FwdSm90Tile(192, 3, 64, 3, 1, head_dim_v=128),
    _FwdSm90Tile(128, 4, 64, 3, 2, head_dim_v=64),
    _FwdSm90Tile(64, 2, 128, 3, 2, head_dim_v=128),
    _FwdSm90Tile(64, 3, 64, 4, 1, head_dim_v=128),
    _FwdSm90Tile(96, 4, 64, 4, 1, head_dim_v=64),
)

# Several CTAs an SM, for short sequences (docs/performance/short.md).
_FWD_SM90_SMALL_TILES: tuple[_FwdSm90Tile, ...] = (
    _FwdSm90Tile(64, 1, 64, 3, 2, ctas_per_sm=3),
    _FwdSm90Tile(64, 1, 32, 4, 2, ctas_per_sm=4),
    _FwdSm90Tile(128, 1, 32, 3, 1, ctas_per_sm=3),
    _FwdSm90Tile(128, 1, 64, 3, 1, ctas_per_sm=2),
)


# With score modifications (softcap, masks): 64 keys, as masks are packed.
_FWD_SM90_MODS_TILES: tuple[_FwdSm90Tile, ...] = (
    _FwdSm90Tile(64, 4, 64, 4),
    _FwdSm90Tile(96, 3, 64, 3),
    _FwdSm90Tile(128, 3, 64, 3),
    _FwdSm90Tile(192, 2, 64, 2),
    _FwdSm90Tile(256, 2, 64, 2),
)
# Of packed sequences, whose state takes registers that a fourth warpgroup does not have.
_FWD_SM90_VARLEN_MODS_TILES: tuple[_FwdSm90Tile, ...] = (_FwdSm90Tile(64, 3, 64, 4), *_FWD_SM90_MODS_TILES[1:])
# And tiles of an additive mask beside K.
_FWD_SM90_BIAS_TILES: tuple[_FwdSm90Tile, ...] = (
    _FwdSm90Tile(64, 4, 64, 3, bias_bytes=2),
    *(replace(tile, bias_bytes=2) for tile in _FWD_SM90_MODS_TILES[1:]),
    _FwdSm90Tile(64, 3, 64, 3, bias_bytes=4),
    _FwdSm90Tile(96, 3, 64, 2, bias_bytes=4),
    _FwdSm90Tile(128, 3, 64, 2, bias_bytes=4),
    _FwdSm90Tile(192, 2, 64, 2, bias_bytes=4),
    _FwdSm90Tile(256, 2, 64, 1, bias_bytes=4),
)
_FWD_SM90_VARLEN_BIAS_TILES: tuple[_FwdSm90Tile, ...] = (
    _FwdSm90Tile(64, 3, 64, 3, bias_bytes=2),
    *_FWD_SM90_BIAS_TILES[1:],
)


# Short sequences with score modifications, several CTAs an SM (docs/performance/short.md).
_FWD_SM90_SMALL_MODS_TILES: tuple[_FwdSm90Tile, ...] = tuple(
    _FwdSm90Tile(head_dim, consumers, 64, stages, q_stages, bias_bytes, softcap, ctas)
    for head_dim, consumers, stages, q_stages, bias_bytes, softcap, ctas in (
        (64, 1, 3, 2, 0, False, 3),
        (64, 1, 3, 2, 0, True, 3),
        (64, 1, 2, 2, 2, True, 3),
        (64, 1, 2, 1, 4, True, 3),
        (128, 1, 2, 2, 0, False, 2),
        (128, 1, 2, 2, 0, True, 2),
        (128, 1, 2, 1, 2, True, 2),
        (128, 1, 2, 1, 4, True, 2),
    )
)

# Keys split over CTAs (docs/performance/few_queries.md): many stages, because memory is what such calls wait for.
_FWD_SM90_SPLIT_TILES: tuple[_FwdSm90Tile, ...] = (
    _FwdSm90Tile(64, 2, 128, 5),
    _FwdSm90Tile(128, 2, 128, 3),
    _FwdSm90Tile(128, 3, 64, 3),
    _FwdSm90Tile(192, 2, 64, 3),
    _FwdSm90Tile(256, 2, 64),
    # Up to 64 rows. Several CTAs an SM: one loads while the other is between two tiles.
    _FwdSm90Tile(64, 1, 64, 3, 2, ctas_per_sm=3),
    _FwdSm90Tile(128, 1, 64, 3, 1, ctas_per_sm=2),
    # Of long sequences, for the tiles that do not fill a round (docs/performance/tail.md).
    _FwdSm90Tile(64, 4, 64, 4),
)
# The same of packed sequences, each CTA with an even share of all keys.
_FWD_SM90_PACKED_SPLIT_TILES: tuple[_FwdSm90Tile, ...] = (
    _FwdSm90Tile(64, 1, 64, 3, 1, ctas_per_sm=3),
    _FwdSm90Tile(64, 2, 128, 5),
    _FwdSm90Tile(128, 1, 64, 3, 1, ctas_per_sm=2),
    _FwdSm90Tile(128, 2, 128, 3),
    _FwdSm90Tile(256, 2, 64),
)
# With softcap.
_FWD_SM90_PACKED_SPLIT_MODS_TILES: tuple[_FwdSm90Tile, ...] = (
    _FwdSm90Tile(64, 1, 64, 3, 1, ctas_per_sm=2),
    _FwdSm90Tile(128, 1, 64, 2, 1, ctas_per_sm=2),
    _FwdSm90Tile(256, 2, 64),
)


def _attn_fwd_sm90(
    tile: _FwdSm90Tile,
    dtype: str,
    varlen: bool,
    score_mods: bool = False,
    lists: bool = False,
    split: bool = False,
    paged: bool = False,
) -> KernelSpec:
    """score_mods: softcap, masks, any scale. lists: masks of packed sequences; large tiles of batches always have them.

    split: keys are split over CTAs. paged: K and V of packed queries lie in pages, without masks.
    """
    short, tag = IO_TYPES[dtype]
    softcap = score_mods and tile.softcap
    small = tile.ctas_per_sm > 1
    lists = score_mods and (lists or not (varlen or small))
    masks: Masks = "tiles" if tile.bias_bytes else "packed" if score_mods and (lists or not varlen) else "none"
    kind = f"_bias{8 * tile.bias_bytes}" if tile.bias_bytes else "_masks" if score_mods and not softcap else ""
    if softcap and not tile.bias_bytes:
        kind = "_masks_softcap" if varlen and lists else "_softcap"
    if split:
        kind = f"_split{kind}"
    block_m = 64 * tile.num_consumers
    num_q_stages = 1 if varlen else tile.num_q_stages  # a second one costs packed sequences registers
    row_bytes, row_bytes_v = (-(-width // 64) * 128 for width in (tile.head_dim, tile.width_v))
    tiles_bytes = row_bytes * num_q_stages * block_m + (row_bytes + row_bytes_v) * tile.num_stages * tile.block_n
    if score_mods:
        # Of each stage: the tile of an additive mask, or 512 bytes of bits a warpgroup.
        mask = block_m * tile.block_n * tile.bias_bytes if tile.bias_bytes else 512 * tile.num_consumers
        tiles_bytes += -(-tile.num_stages * mask // 1024) * 1024
    barriers_bytes = 16 * (num_q_stages + tile.num_stages)
    # And for packed sequences a tile of 36 bytes with each Q, 80 with splits, and 32 sequences of 20 bytes.
    of_tile = 80 if varlen and split else 36
    smem_bytes = -(-(tiles_bytes + barriers_bytes + of_tile * num_q_stages + 640) // 1024) * 1024
    own_v = tile.width_v != tile.head_dim
    width = f"d{tile.head_dim}" + (f"v{tile.width_v}" if own_v else "")
    return KernelSpec(
        name=f"attn_fwd_sm90_{short}_{width}_m{block_m}n{tile.block_n}"
        + ("_varlen" if varlen else "")
        + ("_paged" if paged else "")
        + kind,
        family="attn_fwd_sm90",
        op="attention_split" if split else "attention",
        source="entry/attn_fwd_sm90.cu",
        symbol="attn_fwd_sm90",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(tile.head_dim)),
            ("HEAD_DIM_V", str(tile.width_v)),
            ("NUM_CONSUMERS", str(tile.num_consumers)),
            ("BLOCK_N", str(tile.block_n)),
            ("NUM_STAGES", str(tile.num_stages)),
            ("NUM_Q_STAGES", str(num_q_stages)),
            ("VARLEN", str(int(varlen))),
            ("PAGED", str(int(paged))),
            ("SCORE_MODS", str(int(score_mods))),
            ("MASK_LISTS", str(int(lists))),
            ("SOFTCAP", str(int(softcap))),
            ("BIAS_BYTES", str(tile.bias_bytes)),
            ("SPLIT_KEYS", str(int(split))),
            ("CTAS_PER_SM", str(tile.ctas_per_sm)),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=tile.head_dim,
        block_m=block_m,
        block_n=tile.block_n,
        num_warps=4 * tile.num_consumers + (4 if tile.ctas_per_sm == 1 else 1),
        smem_bytes=smem_bytes,
        ctas_per_sm=tile.ctas_per_sm,
        min_arch=(9, 0),
        arch_specific=True,
        sequences="packed" if varlen else "dense",
        paged=paged,
        tensor_maps=True,
        mask_maps=True,
        softcap="any" if softcap else "never",
        masks=masks,
        # Small tiles have no lists of what it hides, nor have splits of packed sequences.
        score_mod=score_mods and not (small or (split and varlen)),
        dropout=not (score_mods or split or paged or small),
        lists=lists,
        own_head_dim_v=tile.head_dim_v,
        bias_bytes=tile.bias_bytes,
    )


def attention_rows() -> Iterator[KernelSpec]:
    """Rows of exact attention."""
    yield from rows_to_512()
    yield from (
        _attn_fwd_sm80(tile, dtype, score_mods)
        for score_mods, tiles in ((False, _FWD_SM80_TILES), (True, _FWD_SM80_MODS_TILES))
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_sm80(tile, dtype, score_mods)
        for score_mods, tiles in ((True, _FWD_SM80_SMALL_MODS_TILES), (False, _FWD_SM80_SMALL_TILES))
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_sm90(tile, dtype, varlen)
        for tiles in ((*_FWD_SM90_TILES, *_FWD_SM90_SMALL_TILES), _FWD_SM90_HEAD_DIM_V_TILES)
        for varlen in (False, True)
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_sm80(tile, dtype, score_mods, own_head_dim_v=True)
        for score_mods, tiles in ((False, _FWD_SM80_TILES), (True, _FWD_SM80_MODS_TILES))
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_sm80(tile, dtype, score_mods)
        for score_mods, tiles in ((False, _FWD_SM80_WIDE_TILES), (True, _FWD_SM80_WIDE_MODS_TILES))
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_sm90(tile, dtype, varlen, score_mods=True)
        for varlen, tiles in (
            (False, tuple(replace(tile, softcap=False) for tile in _FWD_SM90_MODS_TILES)),
            (False, _FWD_SM90_MODS_TILES),
            (True, _FWD_SM90_VARLEN_MODS_TILES),
            (False, _FWD_SM90_BIAS_TILES),
            (False, _FWD_SM90_SMALL_MODS_TILES),
        )
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_sm90(tile, dtype, varlen=True, score_mods=True, lists=True)
        for tiles in (
            tuple(replace(tile, softcap=False) for tile in _FWD_SM90_VARLEN_MODS_TILES),
            _FWD_SM90_VARLEN_MODS_TILES,
            _FWD_SM90_VARLEN_BIAS_TILES,
        )
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )


def paged_rows() -> Iterator[KernelSpec]:
    """Rows of exact attention over K and V in pages."""
    yield from (
        _attn_fwd_sm80(tile, dtype, score_mods, paged=True)
        for score_mods, tiles in (
            (False, (*_FWD_SM80_PAGED_TILES, *_FWD_SM80_WIDE_TILES)),
            (True, (*_FWD_SM80_PAGED_MODS_TILES, *_FWD_SM80_WIDE_MODS_TILES)),
        )
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_sm90(tile, dtype, varlen=True, score_mods=score_mods, split=split, paged=True)
        for tiles, score_mods, split in (
            (_FWD_SM90_PAGED_TILES, False, False),
            (_FWD_SM90_VARLEN_MODS_TILES, True, False),
            (tuple(tile for tile in _FWD_SM90_PACKED_SPLIT_TILES if tile.ctas_per_sm == 1), False, True),
            (_FWD_SM90_PACKED_SPLIT_MODS_TILES, True, True),
        )
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )


def split_rows() -> Iterator[KernelSpec]:
    """Rows of exact attention with the keys split over CTAs."""
    yield from (
        _attn_fwd_sm90(tile, dtype, varlen=False, split=True)
        for tile in _FWD_SM90_SPLIT_TILES
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_sm90(tile, dtype, varlen=True, split=True)
        for tile in _FWD_SM90_PACKED_SPLIT_TILES
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_sm90(tile, dtype, varlen=True, score_mods=True, split=True)
        for tile in _FWD_SM90_PACKED_SPLIT_MODS_TILES
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_sm90(tile, dtype, varlen=False, score_mods=True, split=True)
        for tiles in (
            tuple(replace(tile, softcap=False) for tile in _FWD_SM90_MODS_TILES),
            _FWD_SM90_MODS_TILES,
            _FWD_SM90_BIAS_TILES,
        )
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_sm80(tile, dtype, score_mods, split=True)
        for score_mods in (False, True)
        for tile in _FWD_SM80_SPLIT_TILES
        for dtype in ("float16", "bfloat16")
    )
