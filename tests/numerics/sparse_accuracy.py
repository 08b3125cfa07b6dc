"""Errors of attention without the blocks that `sparse_blocks` leaves out: table and figure of docs/precision.md.

``PYTHONPATH=src:. python -m tests.numerics.sparse_accuracy`` prints the table; it takes some minutes. NumPy reference
against double precision, relative L1 and cosine over the share of the visible blocks that is kept, similarity as it is
by default. Inputs:

- grids: tokens of an image (64 x 64) or of a video (12 frames of 20 x 20), in raster order, 2 heads, d64, full. Tokens
  look at their neighbours: q . k is a Gaussian of their distance (random Fourier features, Rahimi and Recht 2007) and
  noise. "cubes": the same tokens in the order of cubes of 4 x 4 x 4, which are blocks of keys then.
- normal: 4096 tokens without any structure, in which no choice of blocks is better than another.
- SmolLM2-135M: 320 tokens of text, d64, causal, blocks of 64 queries and 64 keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import omniattn as oa
from build_tools import sparse_tables
from omniattn import testing
from omniattn.bench.document import reference_environment
from omniattn.problems.sparse_blocks import visible_count
from omniattn.testing import compare
from tests.numerics.ablations import LAYERS, Inputs, layer_name, recorded
from tests.numerics.accuracy_report import Row, row, run

Array = npt.NDArray[Any]

IMAGE, VIDEO, CUBE = (64, 64), (12, 20, 20), 4
HEAD_DIM = 64
#: Of each head: how far a token looks, in tokens, and the largest score.
HEADS = ((2.0, 14.0), (5.0, 10.0))
#: Shares that are tried.
TOPK = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
CDF = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
#: Of one share: with 8 bits too.
INT8_TOPK = 0.5


def features(places: Array, reach: float, rng: np.random.Generator) -> Array:
    """Rows whose products are exp(-distance^2 / (2 reach^2)), nearly."""
    waves = places @ (rng.standard_normal((places.shape[1], HEAD_DIM // 2)) / reach)
    return np.concatenate([np.cos(waves), np.sin(waves)], 1) / np.sqrt(HEAD_DIM // 2)


@functools.cache
def grid(shape: tuple[int, ...], cubes: bool = False) -> Inputs:
    """Tokens of a grid that look at their neighbours."""
    rng = np.random.default_rng(0)
    places = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1).reshape(-1, len(shape))
    heads = []
    for reach, most in HEADS:
        near = features(places.astype(np.float64), reach, rng)
        q = most * np.sqrt(HEAD_DIM) * near + 0.5 * rng.standard_normal(near.shape)
        k = near + 0.05 * rng.standard_normal(near.shape)
        # What neighbours have in common, and what is a token's own.
        v = np.sqrt(HEAD_DIM) * features(places.astype(np.float64), 3.0, rng) + rng.standard_normal(near.shape)
        heads.append((q, k, v))
    order = np.arange(len(places))
    if cubes:
        cube = places // CUBE
        order = np.lexsort((*places.T[::-1], *cube.T[::-1]))
    q, k, v = (np.stack([head[i] for head in heads], 1)[None, order].astype(np.float32) for i in range(3))
    return Inputs(q, k, v)


def normal() -> Inputs:
    """Random numbers."""
    return Inputs(*testing.make_qkv("normal", seqlen_q=4096, seqlen_k=4096, heads_q=2, head_dim=HEAD_DIM))


def inputs() -> Iterator[tuple[str, Inputs, tuple[int, int]]]:
    """Names, inputs and blocks."""
    usual = (128, 64)
    yield "image, 64 × 64", grid(IMAGE), usual
    yield "video, 12 × 20 × 20", grid(VIDEO), usual
    yield "video, in cubes", grid(VIDEO, cubes=True), usual
    for index in LAYERS:
        yield layer_name(index), recorded(index), (64, 64)
    yield "normal", normal(), usual


def error(x: Inputs, size: tuple[int, int], precision: Any, **shares: float) -> dict[str, float]:
    """Blocks that are kept, cosine and relative L1."""
    causal = x.options.get("causal", False)
    # The first queries of a block may see none of the blocks it keeps, unless it keeps the first one.
    blocks = oa.sparse_blocks(x.q, x.k, block_size=size, causal=causal, keep_first=int(causal), **shares)
    o = oa.attention(x.q, x.k, x.v, block_mask=blocks, block_size=size, precision=precision, causal=causal)
    found = compare(o, x.exact)
    visible = visible_count(x.q.shape[1], x.k.shape[1], size, causal) * blocks.shape[0] * blocks.shape[1]
    return {"kept": int(blocks.sum()) / visible, "cosine": found.cosine, "rel_l1": found.rel_l1}


def measure() -> Iterator[Row]:
    """All rows."""
    for label, x, size in inputs():
        for rule, shares in (("topk", TOPK), ("cdf", CDF)):
            for share in shares:
                found = error(x, size, "exact", **{rule: share})
                yield row(rule, label, f"{share:g}", found["cosine"], found["rel_l1"], kept=found["kept"])
        found = error(x, size, "int8", topk=INT8_TOPK)
        yield row("topk, int8", label, f"{INT8_TOPK:g}", found["cosine"], found["rel_l1"], kept=found["kept"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and show."""
    command = "python -m tests.numerics.sparse_accuracy"
    run("sparse_accuracy", command, reference_environment, measure, arguments, sparse_tables.accuracy)


if __name__ == "__main__":
    main()
