"""Rows of the kernels that predict which blocks of attention are worth computing. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from .spec import IO_TYPES, KernelSpec

#: Rows of blocks that a CTA of ``choose_blocks_sm80`` takes at most, and scores that it has room for.
CHOSEN_ROWS, CHOSEN_SCORES = 4, 12288
#: Shares of what is kept that its arguments have room for: one of each query head.
MAX_SHARES = 256
#: Channels of a mean at most.
MEAN_DIM = 256


def _block_means(dtype: str, head_dim: int) -> KernelSpec:
    short, tag = IO_TYPES[dtype]
    return KernelSpec(
        name=f"block_means_sm80_{short}_d{head_dim}", family="block_means_sm80", op="block_means",
        source="entry/block_means_sm80.cu", symbol="block_means_sm80",
        defines=(("IO_TYPE", tag), ("HEAD_DIM", str(head_dim))), dtype=dtype, head_dim=head_dim, block_m=1, block_n=1,
        num_warps=4, smem_bytes=0,
    )  # fmt: skip


def sparse_blocks_rows() -> Iterator[KernelSpec]:
    """Rows of ``block_means`` and ``choose_blocks``."""
    yield from (_block_means(dtype, head_dim) for head_dim in (64, 128, 256) for dtype in ("float16", "bfloat16"))
    smem_bytes = 4 * (CHOSEN_ROWS * MEAN_DIM + CHOSEN_SCORES)
    yield KernelSpec(
        name="choose_blocks_sm80", family="choose_blocks_sm80", op="choose_blocks",
        source="entry/choose_blocks_sm80.cu", symbol="choose_blocks_sm80",
        defines=(("KEYS", str(CHOSEN_SCORES)), ("SMEM_BYTES", str(smem_bytes))), dtype="uint8", head_dim=MEAN_DIM,
        block_m=CHOSEN_ROWS, block_n=1, num_warps=8, smem_bytes=smem_bytes,
    )  # fmt: skip
