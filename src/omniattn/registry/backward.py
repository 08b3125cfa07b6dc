"""Rows of the backward of attention. Standard library only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .spec import IO_TYPES, KernelSpec, Masks, Use

#: Rows to which the workspaces' rows of a sequence are padded, which are those of a CTA before and behind the backward.
PADDED_ROWS = 128


@dataclass(frozen=True)
class _BwdTile:
    """Tile shape of ``attn_bwd_sm80`` for one padded head_dim.

    dq_warps_m: warps side by side along the queries of dQ. joint: a warp makes P and dS, and dV and dK
    of half of the queries (``attn_bwd_joint_sm80``). without_dmask: with a third tile of scores it fits into no GPU
    that a larger one does not fit into.
    """

    head_dim: int
    block_m: int
    block_n: int
    num_stages: int
    dq_warps_m: int
    suffix: str = ""
    num_warps: int = 8
    min_ctas: int = 1
    joint: bool = False
    without_dmask: bool = False

    @property
    def wide(self) -> bool:
        """dV and dK of 16 keys are those of two warps (``attn_bwd_wide_sm80``)."""
        return self.head_dim > 256

    def smem_bytes(self, dmask: bool) -> int:
        """Shared memory of a CTA."""
        tiles = 2 * self.head_dim * 2 * (self.block_n + self.num_stages * self.block_m)
        tiles += (3 if dmask and not (self.joint or self.wide) else 2) * 2 * self.block_n * self.block_m
        return -(-(tiles + 8 * self.num_stages * self.block_m) // 1024) * 1024


# The larger tile of a head_dim first; the others fit into the 99 KB of sm_86, sm_89 and sm_120, or the 163 KB of sm_80.
_BWD_SM80_TILES: tuple[_BwdTile, ...] = (
    _BwdTile(64, 128, 128, 2, 4, joint=True),
    _BwdTile(64, 64, 128, 2, 2, "_m64", without_dmask=True),
    _BwdTile(96, 64, 128, 2, 4),
    _BwdTile(96, 64, 64, 2, 4, "_n64"),
    _BwdTile(128, 64, 128, 2, 2),
    _BwdTile(128, 32, 64, 2, 2, "_m32"),
    _BwdTile(192, 64, 64, 2, 2),
    _BwdTile(192, 32, 64, 1, 2, "_m32"),
    _BwdTile(256, 64, 64, 2, 2),
    _BwdTile(256, 32, 64, 2, 2, "_m32"),
    _BwdTile(256, 16, 64, 1, 1, "_m16"),
    _BwdTile(512, 32, 32, 2, 1),
    _BwdTile(512, 32, 32, 1, 1, "_s1"),
    _BwdTile(512, 16, 32, 1, 1, "_m16"),
)


def _attn_bwd_sm80(tile: _BwdTile, dtype: str, score_mods: bool, dmask: bool) -> KernelSpec:
    short, tag = IO_TYPES[dtype]
    smem_bytes = tile.smem_bytes(dmask)
    family = "attn_bwd_joint_sm80" if tile.joint else "attn_bwd_wide_sm80" if tile.wide else "attn_bwd_sm80"
    return KernelSpec(
        name=f"{family}_{short}_d{tile.head_dim}{tile.suffix}" + ("_dmask" if dmask else "_mods" if score_mods else ""),
        family=family,
        op="attention_backward",
        source=f"entry/{family}.cu",
        symbol=family,
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(tile.head_dim)),
            ("BLOCK_M", str(tile.block_m)),
            ("BLOCK_N", str(tile.block_n)),
            ("NUM_WARPS", str(tile.num_warps)),
            ("NUM_STAGES", str(tile.num_stages)),
            ("DQ_WARPS_M", str(tile.dq_warps_m)),
            ("MIN_CTAS", str(tile.min_ctas)),
            ("SCORE_MODS", str(int(score_mods))),
            ("DMASK", str(int(dmask))),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=tile.head_dim,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        smem_bytes=smem_bytes,
        ctas_per_sm=tile.min_ctas,
        softcap="any" if score_mods else "never",
        masks="any" if score_mods else "none",
        score_mod=score_mods,
        dropout=not tile.wide,
        lists=score_mods and not tile.joint,
        dq=True,
        dmask=dmask,
    )


@dataclass(frozen=True)
class _DqTile:
    """Tile shape of ``attn_bwd_dq_sm80`` for one padded head_dim."""

    head_dim: int
    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    min_ctas: int
    suffix: str = ""

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        of_ds = 2 * self.block_m * self.block_n if self.head_dim > 256 else 0  # two warps have the same rows
        return 4 * self.head_dim * (self.block_m + self.num_stages * self.block_n) + of_ds


_DQ_SM80_TILES: tuple[_DqTile, ...] = (
    _DqTile(64, 128, 64, 2, 8, 1),
    _DqTile(96, 64, 64, 2, 4, 1),
    _DqTile(128, 64, 32, 2, 4, 2),
    _DqTile(192, 64, 32, 2, 4, 1),
    _DqTile(256, 64, 32, 1, 4, 1),
    _DqTile(512, 64, 32, 1, 8, 1),
    _DqTile(512, 64, 16, 1, 8, 1, "_n16"),
    _DqTile(512, 32, 16, 1, 4, 1, "_m32"),
)


def _attn_bwd_dq_sm80(tile: _DqTile, dtype: str, score_mods: bool) -> KernelSpec:
    short, tag = IO_TYPES[dtype]
    return KernelSpec(
        name=f"attn_bwd_dq_sm80_{short}_d{tile.head_dim}{tile.suffix}" + ("_mods" if score_mods else ""),
        family="attn_bwd_dq_sm80",
        op="attention_backward_dq",
        source="entry/attn_bwd_dq_sm80.cu",
        symbol="attn_bwd_dq_sm80",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(tile.head_dim)),
            ("BLOCK_M", str(tile.block_m)),
            ("BLOCK_N", str(tile.block_n)),
            ("NUM_WARPS", str(tile.num_warps)),
            ("NUM_STAGES", str(tile.num_stages)),
            ("MIN_CTAS", str(tile.min_ctas)),
            ("SCORE_MODS", str(int(score_mods))),
            ("SMEM_BYTES", str(tile.smem_bytes)),
        ),
        dtype=dtype,
        head_dim=tile.head_dim,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        smem_bytes=tile.smem_bytes,
        ctas_per_sm=tile.min_ctas,
        softcap="any" if score_mods else "never",
        masks="any" if score_mods else "none",
        score_mod=score_mods,
        dropout=tile.head_dim <= 256,
        lists=score_mods,
        dq=True,
    )


def _up(num_bytes: int) -> int:
    """Rounded up to what tiles in shared memory are aligned to."""
    return -(-num_bytes // 1024) * 1024


#: Score modifications of ``attn_bwd_sm90``: softcap and masks.
_BWD_SM90_MODS: dict[str, tuple[Use, Masks]] = {
    "": ("never", "none"),
    "softcap": ("always", "none"),
    "keys": ("never", "keys"),
}


def _attn_bwd_sm90(
    head_dim: int, dtype: str, varlen: bool, mod: str, ordered: bool = False, lists: bool = False
) -> KernelSpec:
    """mod: ``"softcap"``, ``"keys"`` (a mask that is the same for all queries), or empty.

    ordered: additions to dq in a fixed order, so that it has the same bits in every run. lists: of tiles of queries,
    which a block mask leaves.
    """
    short, tag = IO_TYPES[dtype]
    softcap, masks = _BWD_SM90_MODS[mod]
    block_m, block_n, ds_stages, q_stages = 64, 128, 3, 3
    do_stages = 3 if head_dim == 64 else 2
    # K and V, Q and dO, dS, dQ on its way, a number a row of Q and of dO, barriers.
    smem_bytes = 2 * 2 * block_n * head_dim + (q_stages + do_stages) * block_m * (2 * head_dim + 4)
    dq_tiles = 2 if head_dim == 64 else 1  # on their way, or two halves of one
    smem_bytes += 2 * ds_stages * block_m * block_n + 4 * block_m * head_dim * dq_tiles
    smem_bytes += 8 * (3 + 2 * q_stages + 2 * do_stages + 2 * ds_stages + 5)
    # And where a warp walks over tiles a tile of 36 bytes, 32 sequences of 20 bytes, barriers, entries of a list.
    smem_bytes = _up(smem_bytes) + (1024 if varlen or ordered or lists else 0)
    return KernelSpec(
        name=f"attn_bwd_sm90_{short}_d{head_dim}"
        + "_varlen" * varlen
        + "_ordered" * ordered
        + f"_{mod}" * bool(mod)
        + "_blocks" * lists,
        family="attn_bwd_sm90",
        op="attention_backward",
        source="entry/attn_bwd_sm90.cu",
        symbol="attn_bwd_sm90",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(head_dim)),
            ("NUM_DO_STAGES", str(do_stages)),
            ("VARLEN", str(int(varlen))),
            ("ORDERED", str(int(ordered))),
            ("SOFTCAP", str(int(mod == "softcap"))),
            ("KEY_MASK", str(int(mod == "keys"))),
            ("LISTS", str(int(lists))),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=head_dim,
        block_m=block_m,
        block_n=block_n,
        num_warps=12,
        smem_bytes=smem_bytes,
        min_arch=(9, 0),
        arch_specific=True,
        sequences="packed" if varlen else "dense",
        tensor_maps=True,
        waits_ahead=True,
        softcap=softcap,
        masks=masks,
        dropout=not (mod or lists),  # with lists a step has a head that the list alone knows
        dq=True,
        ordered_dq=ordered,
        lists=lists,
        block_masks=lists,
        any_scale=False,
    )


def _attn_bwd_dkdv_sm90(head_dim: int, dtype: str, lists: bool) -> KernelSpec:
    """dk and dv alone, where sums of dq in global memory would take too long. lists: as of `_attn_bwd_sm90`."""
    short, tag = IO_TYPES[dtype]
    block, num_stages = 64, 2
    tile = 2 * block * head_dim
    # K and V, Q and dO, P of two steps, numbers of the rows of Q and dO, barriers, entries of a list.
    smem_bytes = _up(2 * tile + 2 * num_stages * tile + 4 * block * block + 8 * num_stages * block + 144)
    return KernelSpec(
        name=f"attn_bwd_dkdv_sm90_{short}_d{head_dim}" + "_blocks" * lists,
        family="attn_bwd_dkdv_sm90",
        op="attention_backward",
        source="entry/attn_bwd_dkdv_sm90.cu",
        symbol="attn_bwd_dkdv_sm90",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(head_dim)),
            ("CLUSTER", "1"),
            ("LISTS", str(int(lists))),
            ("NUM_STAGES", str(num_stages)),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=head_dim,
        block_m=block,
        block_n=block,
        num_warps=12,
        smem_bytes=smem_bytes,
        min_arch=(9, 0),
        arch_specific=True,
        sequences="dense",
        tensor_maps=True,
        lists=lists,
        block_masks=lists,
        any_scale=False,
    )


def _attn_bwd_dq_sm90(head_dim: int, dtype: str, lists: bool) -> KernelSpec:
    """dq alone. lists: of tiles of keys, which a block mask leaves."""
    short, tag = IO_TYPES[dtype]
    k_stages, v_stages = {64: (4, 4), 128: (3, 3), 192: (3, 2), 256: (2, 1)}[head_dim]
    tile = 2 * 64 * head_dim
    smem_bytes = _up(4 * tile + (k_stages + v_stages) * tile + 8 * (4 + 2 * k_stages + 2 * v_stages) + 4 * k_stages)
    return KernelSpec(
        name=f"attn_bwd_dq_sm90_{short}_d{head_dim}" + "_blocks" * lists,
        family="attn_bwd_dq_sm90",
        op="attention_backward_dq",
        source="entry/attn_bwd_dq_sm90.cu",
        symbol="attn_bwd_dq_sm90",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(head_dim)),
            ("NUM_K_STAGES", str(k_stages)),
            ("NUM_V_STAGES", str(v_stages)),
            ("LISTS", str(int(lists))),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=head_dim,
        block_m=128,
        block_n=64,
        num_warps=12,
        smem_bytes=smem_bytes,
        min_arch=(9, 0),
        arch_specific=True,
        sequences="dense",
        tensor_maps=True,
        dq=True,
        lists=lists,
        block_masks=lists,
        any_scale=False,
    )


def _of_rows(
    op: str, name: str, dtype: str, defines: tuple[tuple[str, str], ...], of_family: str = "attn_bwd_sm80"
) -> KernelSpec:
    """A kernel that takes padded rows, before the backward or behind that of a family."""
    short, tag = IO_TYPES[dtype]
    family = f"attn_bwd_{name}_sm80"
    return KernelSpec(
        name=f"{family}_{short}" + ("" if of_family == "attn_bwd_sm80" else "_fragments"),
        family=family,
        op=op,
        source=f"entry/{family}.cu",
        symbol=family,
        defines=(("IO_TYPE", tag), *defines),
        dtype=dtype,
        head_dim=256,
        block_m=PADDED_ROWS,
        block_n=1,
        num_warps=8,
        smem_bytes=0,
        fragments=of_family != "attn_bwd_sm80",
    )


def backward_rows() -> Iterator[KernelSpec]:
    """Rows of ``attention_backward`` and of the kernels beside it."""
    for dtype in ("float16", "bfloat16"):
        for score_mods, dmask in ((False, False), (True, False), (True, True)):
            tiles = (tile for tile in _BWD_SM80_TILES if not (dmask and tile.without_dmask))
            yield from (_attn_bwd_sm80(tile, dtype, score_mods, dmask) for tile in tiles)
        for score_mods in (False, True):
            yield from (_attn_bwd_dq_sm80(tile, dtype, score_mods) for tile in _DQ_SM80_TILES)
        for mod, varlen, ordered in itertools.product(_BWD_SM90_MODS, (False, True), (True, False)):
            if mod == "keys" and varlen:  # consumers would spill 300 bytes at d128
                continue
            yield from (_attn_bwd_sm90(head_dim, dtype, varlen, mod, ordered) for head_dim in (64, 128))
        for mod in ("", "softcap"):
            yield from (_attn_bwd_sm90(head_dim, dtype, False, mod, lists=True) for head_dim in (64, 128))
        for lists in (False, True):
            yield from (_attn_bwd_dkdv_sm90(head_dim, dtype, lists) for head_dim in (192, 256))
            yield from (_attn_bwd_dq_sm90(head_dim, dtype, lists) for head_dim in (64, 128, 192, 256))
        yield _of_rows("attention_backward_prepare", "prepare", dtype, ())
        for family, quads in (("attn_bwd_sm80", 1), ("attn_bwd_sm90", 0)):
            layout = (("QUADS", str(quads)), ("FRAGMENTS", str(1 - quads)))
            yield _of_rows("attention_backward_finish", "finish", dtype, layout, family)
