"""Rows of ``latent_append_sm80``: new tokens of latent caches. Standard library only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .decode import LATENT_DIMS, LATENT_FORMATS
from .spec import IO_TYPES, KernelSpec

#: Tokens of a CTA; it has a warp for each, and one for the channels behind V's.
_TOKENS = 4


def latent_append_row(dtype: str, fmt: str) -> KernelSpec:
    """One ``latent_append_sm80`` kernel.

    Parameters
    ----------
    dtype : str
        Of the tokens, and of rows in 16 bits.
    fmt : str
        A key of `LATENT_FORMATS`.
    """
    short, tag = IO_TYPES[dtype]
    width, width_v = LATENT_DIMS
    return KernelSpec(
        name=f"latent_append_sm80_{short}_d{width}v{width_v}{fmt.removeprefix('latent')}",
        family="latent_append_sm80",
        op="latent_append",
        source="entry/latent_append_sm80.cu",
        symbol="latent_append_sm80",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(width)),
            ("HEAD_DIM_V", str(width_v)),
            ("CACHE_FORMAT", str(LATENT_FORMATS[fmt])),
        ),
        dtype=dtype,
        head_dim=width,
        own_head_dim_v=width_v,
        block_m=_TOKENS,
        block_n=1,
        num_warps=_TOKENS + 1,
        smem_bytes=0,
        cache=(fmt, fmt),
    )


def latent_append_rows() -> Iterator[KernelSpec]:
    """Rows that the registry lists."""
    for dtype, fmt in itertools.product(("float16", "bfloat16"), LATENT_FORMATS):
        yield latent_append_row(dtype, fmt)
