"""Calls of ``sparse_blocks`` for rows of the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import omniattn
from omniattn.reference.sparse_blocks import sparse_blocks
from omniattn.registry import KernelSpec
from omniattn.testing.frameworks import Framework
from omniattn.testing.inputs import make_qkv

Values = npt.NDArray[Any]

BLOCK_OPS = ("block_means", "choose_blocks")
#: Queries, keys, heads of either; options.
_CALLS: tuple[tuple[int, int, int, int, dict[str, Any]], ...] = (
    (500, 700, 4, 2, {"topk": 0.4}),
    (129, 3000, 2, 1, {"cdf": 0.6, "keep_first": 1}),
    (700, 640, 2, 2, {"topk": 0.3, "causal": True, "block_size": 64}),
    (300, 1, 2, 2, {"cdf": 0.01, "layout": "HND"}),
    (260, 900, 4, 2, {"topk": (0.1, 0.4, 0.7, 1.0)}),
    (260, 900, 4, 2, {"cdf": (0.2, 0.5, 0.9, 1.0), "causal": True}),
)
#: Blocks that may differ, of all: float32 sums beside those in double precision.
_ALLOWED = 0.01


class Prepared(NamedTuple):
    """q and k, and the blocks that must come out."""

    q: Values
    k: Values
    wanted: Values


@dataclass(frozen=True)
class BlockCase:
    """A case for one row of the registry: `RowCase`.

    Attributes
    ----------
    index : int
        In the table of calls.
    dtype : str
    head_dim : int
    """

    index: int
    dtype: str
    head_dim: int

    @property
    def name(self) -> str:
        """What messages call it."""
        rows_q, rows_k, *_, options = _CALLS[self.index]
        return f"{rows_q} queries, {rows_k} keys, {options}"

    def prepare(self) -> Prepared:
        """Inputs, and what must come out."""
        rows_q, rows_k, heads_q, heads_kv, options = _CALLS[self.index]
        q, k, _ = make_qkv(
            batch=2, seqlen_q=rows_q, seqlen_k=rows_k, heads_q=heads_q, heads_kv=heads_kv, head_dim=self.head_dim,
            layout=options.get("layout", "NHD"), seed=self.index, dtype=self.dtype,
        )  # fmt: skip
        size = options.get("block_size", (128, 64))
        size = size if isinstance(size, tuple) else (size, size)
        return Prepared(q, k, sparse_blocks(q, k, **{**options, "block_size": size}))

    def check(self, framework: Framework, prepared: Prepared) -> tuple[float, str]:
        """Call the public function and compare."""
        q, k = (framework.array(x, self.dtype) for x in (prepared.q, prepared.k))
        got = framework.to_numpy(omniattn.sparse_blocks(q, k, **_CALLS[self.index][-1]))
        framework.synchronize()
        if got.shape != prepared.wanted.shape:
            return float("inf"), f"shape {got.shape}, expected {prepared.wanted.shape}"
        wrong = float(np.mean((got != 0) != prepared.wanted))
        ratio = wrong / _ALLOWED
        return ratio, "" if ratio <= 1.0 else f"{wrong:.2%} of the blocks differ"


def block_cases(spec: KernelSpec) -> tuple[BlockCase, ...]:
    """The cases of a row."""
    dtype, head_dim = (spec.dtype, spec.head_dim) if spec.op == "block_means" else ("float16", 64)
    return tuple(BlockCase(index, dtype, head_dim) for index in range(len(_CALLS)))
