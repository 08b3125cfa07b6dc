"""Pools of keys and values as other engines have them: which memory, and where K and V are in it."""

from __future__ import annotations

from typing import Any

#: Physical orders. B: blocks, N: tokens of a block, H: heads, C: K and V side by side in a row, L: layers.
ORDERS = (
    "two pools", "pairs of blocks", "BNHC", "BHNC", "BLNHC", "BHLNC", "HBNC", "one memory", "padded rows",
)  # fmt: skip
_LAYERS, _LAYER = 3, 1


def memory_shape(order: str, blocks: int, size: int, heads: int, dim: int) -> tuple[int, ...]:
    """Shape of the memory of one pool."""
    row = 2 * dim
    return {
        "two pools": (2, blocks, size, heads, dim),
        "pairs of blocks": (blocks, 2, size, heads, dim),
        "BNHC": (blocks, size, heads, row),
        "BHNC": (blocks, heads, size, row),
        "BLNHC": (blocks, _LAYERS, size, heads, row),
        "BHLNC": (blocks, heads, _LAYERS, size, row),
        "HBNC": (heads, blocks, size, row),
        "one memory": (16 + (2 * blocks + 1) * size * heads * dim,),
        "padded rows": (2, blocks, size, heads, dim + 24),
    }[order]


def planes(order: str, memory: Any, blocks: int, size: int, heads: int, dim: int) -> tuple[Any, Any]:
    """K and V of a pool, (blocks, tokens, heads, dim): views of NumPy's or torch's memory."""
    if order in ("two pools", "pairs of blocks"):
        return (memory[0], memory[1]) if order == "two pools" else (memory[:, 0], memory[:, 1])
    if order == "padded rows":
        return memory[0][..., :dim], memory[1][..., 8 : 8 + dim]
    if order == "one memory":  # shifted by blocks that are another layer's
        count = blocks * size * heads * dim
        shape = (blocks, size, heads, dim)
        begin = 16 + count + size * heads * dim
        return memory[16 : 16 + count].reshape(shape), memory[begin : begin + count].reshape(shape)
    rows = {
        "BNHC": lambda: memory,
        "BHNC": lambda: memory.swapaxes(1, 2),
        "BLNHC": lambda: memory[:, _LAYER],
        "BHLNC": lambda: memory[:, :, _LAYER].swapaxes(1, 2),
        "HBNC": lambda: memory.swapaxes(0, 1).swapaxes(1, 2),
    }[order]()
    return rows[..., :dim], rows[..., dim:]
