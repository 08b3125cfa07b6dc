"""Rows of the kernels that prepare masks for attention. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from .spec import IO_TYPES, KernelSpec

#: Rows and keys of a tile of a mask, and tiles of keys that a CTA of ``mask_pack_sm80`` takes.
MASK_TILE, PACK_TILES = 64, 4
#: Tiles of keys that an entry of a list can number.
MAX_TILES = 1 << 22


def _mask_pack(dtype: str) -> KernelSpec:
    short, tag = IO_TYPES[dtype]
    return KernelSpec(
        name=f"mask_pack_sm80_{short}",
        family="mask_pack_sm80",
        op="mask_pack",
        source="entry/mask_pack_sm80.cu",
        symbol="mask_pack_sm80",
        defines=(("IO_TYPE", tag),),
        dtype=dtype,
        head_dim=256,
        block_m=MASK_TILE,
        block_n=MASK_TILE * PACK_TILES,
        num_warps=4,
        smem_bytes=0,
    )


def _of_tiles(op: str) -> KernelSpec:
    """A kernel that takes one tile a warp."""
    return KernelSpec(
        name=f"{op}_sm80",
        family=f"{op}_sm80",
        op=op,
        source=f"entry/{op}_sm80.cu",
        symbol=f"{op}_sm80",
        defines=(),
        dtype="uint8",
        head_dim=256,
        block_m=MASK_TILE,
        block_n=MASK_TILE,
        num_warps=4,
        smem_bytes=0,
    )


def _mask_align() -> KernelSpec:
    return KernelSpec(
        name="mask_align_sm80",
        family="mask_align_sm80",
        op="mask_align",
        source="entry/mask_align_sm80.cu",
        symbol="mask_align_sm80",
        defines=(),
        dtype="uint8",
        head_dim=256,
        block_m=1,
        block_n=1,
        num_warps=8,
        smem_bytes=0,
    )


def mask_rows() -> Iterator[KernelSpec]:
    """Rows of ``mask_pack``, ``mask_align``, ``mask_list`` and ``tile_kinds``."""
    yield from (_mask_pack(dtype) for dtype in ("float16", "bfloat16"))
    yield _mask_align()
    yield from (_of_tiles(op) for op in ("mask_list", "tile_kinds"))
