"""Rows of exact attention on Hopper for heads of 257 to 512 channels. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from .spec import IO_TYPES, KernelSpec, Masks, Use

#: Of ``attn_fwd_d512_sm90``: head_dim, head_dim_v, units of K and V under way (docs/performance/attn_fwd_d512_sm90.md).
#: The first one has rows with masks and score_mod, which take calls with a softcap.
_WITH_MODS = (512, 512, 5)
_TILES: tuple[tuple[int, int, int], ...] = (
    _WITH_MODS,
    (384, 384, 7),
    (512, 256, 5),
    (256, 512, 9),
)


def _attn_fwd_d512_sm90(
    head_dim: int, head_dim_v: int, stages: int, dtype: str, varlen: bool, mods: bool = False, bias_bytes: int = 0
) -> KernelSpec:
    """A tile is that of a cluster, and so are the keys of a step.

    mods: with masks and score_mod; bias_bytes: with tiles of an additive mask. Of a width that has a row with mods this
    one takes calls with a softcap, too, as it is faster.
    """
    short, tag = IO_TYPES[dtype]
    units = -(-head_dim // 128)
    softcap: Use = "any" if mods or (head_dim, head_dim_v) != _WITH_MODS[:2] else "never"
    masks: Masks = "tiles" if bias_bytes else "packed" if mods else "none"
    # P that the other CTA sends, with base and sum of each row; behind the barriers two tiles, and 32 packed sequences.
    tiles_bytes = 256 * head_dim + 16384 * stages + 2 * (8192 + 512)
    handed_bytes = 2 * (80 if mods else 44)
    smem_bytes = -(-(tiles_bytes + 16 * (units + stages + 3) + handed_bytes + (640 if varlen else 20)) // 1024) * 1024
    return KernelSpec(
        name=f"attn_fwd_d512_sm90_{short}_d{head_dim}"
        + (f"v{head_dim_v}" if head_dim_v != head_dim else "")
        + "_varlen" * varlen
        + (f"_bias{8 * bias_bytes}" if bias_bytes else "_mods" * mods),
        family="attn_fwd_d512_sm90",
        op="attention",
        source="entry/attn_fwd_d512_sm90.cu",
        symbol="attn_fwd_d512_sm90",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(head_dim)),
            ("HEAD_DIM_V", str(head_dim_v)),
            ("NUM_STAGES", str(stages)),
            ("VARLEN", str(int(varlen))),
            ("SOFTCAP", str(int(softcap == "any"))),
            ("MASKS", str(int(mods))),
            ("BIAS_BYTES", str(bias_bytes)),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=head_dim,
        block_m=128,
        block_n=128,
        num_warps=12,
        smem_bytes=smem_bytes,
        cluster=2,
        min_arch=(9, 0),
        arch_specific=True,
        sequences="packed" if varlen else "dense",
        tensor_maps=True,
        mask_maps=True,
        softcap=softcap,
        masks=masks,
        score_mod=mods,
        lists=mods,
        bias_bytes=bias_bytes,
        own_head_dim_v=head_dim_v if head_dim_v != head_dim else 0,
        above_head_dim=256,
    )


def rows_to_512() -> Iterator[KernelSpec]:
    """Rows of ``attn_fwd_d512_sm90``."""
    yield from (
        _attn_fwd_d512_sm90(*tile, dtype, varlen)
        for varlen in (False, True)
        for tile in _TILES
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_fwd_d512_sm90(*_WITH_MODS, dtype, varlen=varlen, mods=True, bias_bytes=bias_bytes)
        for varlen, bias_bytes in ((False, 0), (False, 2), (False, 4), (True, 0))
        for dtype in ("float16", "bfloat16")
    )
