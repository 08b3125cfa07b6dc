"""Calls of ``sparse_blocks``."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .outputs import Output
from .quantize import Strides3
from .sparse import Shares


@dataclass(frozen=True)
class SparseBlocksProblem:
    """One call of ``sparse_blocks`` after validation; pointers are not in it.

    Attributes
    ----------
    dtype : str
        Of q and k.
    batch, seqlen_q, seqlen_k, num_q_heads, num_kv_heads, head_dim : int
    block_size : (int, int)
        Queries and keys of a block.
    topk, cdf : float or tuple of float, optional
        One of them: a share of the blocks of a row, or of their weights; of all heads, or one of each query head.
    similarity : float
    causal : bool
    keep_first : int
        Blocks of keys.
    layout : str
    q_strides, k_strides : (int, int, int)
        Batch, row, head; elements.
    source : str
        The file that the shares are from, in words.
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: tuple[int, int]
    topk: Shares | None
    cdf: Shares | None
    similarity: float
    causal: bool
    keep_first: int
    layout: str
    q_strides: Strides3
    k_strides: Strides3
    source: str = ""

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of queries and of keys of a head."""
        return -(-self.seqlen_q // self.block_size[0]), -(-self.seqlen_k // self.block_size[1])

    @property
    def keeps(self) -> str:
        """What of each row of blocks is kept, in words, as far as it is known without values."""
        n = self.blocks[1]
        name, of = ("topk", self.topk) if self.topk is not None else ("cdf", self.cdf)
        assert of is not None
        shares = of if isinstance(of, tuple) else (of,)
        if name == "topk":
            found = f"{_range(*(count_of_share(x, n) for x in shares))} of {n} blocks of keys"
        else:
            found = f"of {n} blocks of keys those that make up a share of {_range(*shares)} of the weights"
        if isinstance(of, tuple):
            where = f" from file {self.source}" if self.source else ""
            how = f"{name}, kept share per head{where}: {_range(*shares)}, mean {sum(shares) / len(shares):.3g}"
        else:
            how = f"topk={of:g}" if name == "topk" else "cdf"
        return f"each block of {self.block_size[0]} queries keeps {found} ({how}), and those that are always kept"

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call returns."""
        return (Output("blocks", (self.batch, self.num_q_heads, *self.blocks), "bool"),)


def visible_count(seqlen_q: int, seqlen_k: int, size: tuple[int, int], causal: bool) -> int:
    """Blocks of a head in which some query sees some key, aligned at the bottom right."""
    rows, keys = -(-seqlen_q // size[0]), -(-seqlen_k // size[1])
    if not causal:
        return rows * keys
    last = (min((i + 1) * size[0], seqlen_q) - 1 + seqlen_k - seqlen_q for i in range(rows))
    return sum(min(max(x // size[1] + 1, 0), keys) for x in last)


def _range(*values: float) -> str:
    """The least and the largest number."""
    least, most = min(values), max(values)
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def count_of_share(topk: float, blocks: int) -> int:
    """Blocks of a row that a share of ``blocks`` is: rounded down, as float32 numbers, and at least one."""
    one, other = (struct.unpack("<f", struct.pack("<f", x))[0] for x in (topk, blocks))
    # The product of two float32 numbers is exact in double precision.
    return max(int(struct.unpack("<f", struct.pack("<f", one * other))[0]), 1)
