"""Errors of INT8 and INT4 attention on this GPU, for docs/precision.md: ``python -m tests.gpu.accuracy_table``.

Cosine similarity / relative L1 against double precision. Synthetic inputs: 4096 tokens, 2 heads, d128, full, mean of
four draws; SmolLM2-135M: 320 tokens of text, d64, causal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

import omniattn as oa
from omniattn import data
from omniattn.bench.document import environment
from tests.numerics.accuracy_report import Row, row, run
from tests.numerics.low_precision_accuracy import PRECISIONS, PUBLISHED, PUBLISHED_SOURCE

from .test_low_precision_accuracy_gpu import draw, exact, figures

DRAWS = 4


def _rows(label: str, inputs: list[list[torch.Tensor]], causal: bool) -> Iterator[Row]:
    """Means over the draws of one input, by precision."""
    references = [exact(*x, causal=causal) for x in inputs]
    for name, precision in PRECISIONS.items():
        found = [
            figures(oa.attention(*x, causal=causal, precision=precision), ref)
            for x, ref in zip(inputs, references, strict=True)
        ]
        yield row("precisions", label, name, *np.mean(found, axis=0).tolist(), draws=len(inputs))


def measure() -> Iterator[Row]:
    """All rows."""
    for kind in PUBLISHED:
        inputs = [draw(kind, seed, seqlen_q=4096, heads_q=2, head_dim=128) for seed in range(DRAWS)]
        yield from _rows(kind.replace("_", " "), inputs, False)
    for x in data.load_activations():
        tensors = [torch.from_numpy(t).to(torch.bfloat16).cuda() for t in (x.q, x.k, x.v)]
        yield from _rows(x.name, [tensors], True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and show."""
    others = [row("precisions", kind.replace("_", " "), "SageAttention2", *found) for kind, found in PUBLISHED.items()]
    run(
        "accuracy_gpu", "python -m tests.gpu.accuracy_table", lambda: environment(torch), measure, arguments,
        published={"source": PUBLISHED_SOURCE, "rows": others},
    )  # fmt: skip


if __name__ == "__main__":
    main()
