"""Rows of what follows attention: merging partial results, clearing unused rows. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from .spec import IO_TYPES, KernelSpec


def _merge_states(dtype: str) -> KernelSpec:
    short, tag = IO_TYPES[dtype]
    return KernelSpec(
        name=f"merge_states_sm80_{short}", family="merge_states_sm80", op="merge_states",
        source="entry/merge_states_sm80.cu", symbol="merge_states_sm80", defines=(("IO_TYPE", tag),), dtype=dtype,
        head_dim=256, block_m=1, block_n=1, num_warps=8, smem_bytes=0,
    )  # fmt: skip


def _attn_combine_packed(dtype: str) -> KernelSpec:
    short, tag = IO_TYPES[dtype]
    return KernelSpec(
        name=f"attn_combine_packed_sm90_{short}", family="attn_combine_packed_sm90", op="attention_combine_packed",
        source="entry/attn_combine_packed_sm90.cu", symbol="attn_combine_packed_sm90", defines=(("IO_TYPE", tag),),
        dtype=dtype, head_dim=256, block_m=8, block_n=1, num_warps=8, smem_bytes=0, min_arch=(9, 0),
        arch_specific=True,
    )  # fmt: skip


def _attn_combine(dtype: str, own_lse: bool = False) -> KernelSpec:
    """own_lse: for Hopper's kernels on quantized operands, whose LSE is of other sums than O is divided by."""
    short, tag = IO_TYPES[dtype]
    family = f"attn_combine_{'lse_sm90' if own_lse else 'sm80'}"
    return KernelSpec(
        name=f"{family}_{short}",
        family=family,
        op="attention_combine_lse" if own_lse else "attention_combine",
        source="entry/attn_combine_sm80.cu",
        symbol="attn_combine_sm80",
        defines=(("IO_TYPE", tag), ("OWN_LSE", str(int(own_lse)))),
        dtype=dtype,
        head_dim=256,
        block_m=1,
        block_n=1,
        num_warps=8,
        smem_bytes=0,
        min_arch=(9, 0) if own_lse else (8, 0),
        arch_specific=own_lse,
    )


def combine_rows() -> Iterator[KernelSpec]:
    """Rows of what merges the results of keys split over CTAs."""
    yield from (_attn_combine(dtype, own_lse) for own_lse in (False, True) for dtype in ("float16", "bfloat16"))
    yield from (_attn_combine_packed(dtype) for dtype in ("float16", "bfloat16"))


def merge_rows() -> Iterator[KernelSpec]:
    """Rows of ``merge_states``."""
    yield from (_merge_states(dtype) for dtype in ("float16", "bfloat16", "float32"))


def packed_rows() -> Iterator[KernelSpec]:
    """The row that clears what packed sequences do not use of their rows."""
    yield KernelSpec(
        name="clear_unused_sm80",
        family="clear_unused_sm80",
        op="clear_unused",
        source="entry/clear_unused_sm80.cu",
        symbol="clear_unused_sm80",
        defines=(),
        dtype="int32",
        head_dim=256,
        block_m=64,
        block_n=1,
        num_warps=4,
        smem_bytes=0,
    )
