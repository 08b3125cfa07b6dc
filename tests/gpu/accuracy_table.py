"""Prints the accuracy table of docs/precision.md, measured on this GPU: ``python -m tests.gpu.accuracy_table``.

Cosine similarity / relative L1 against double precision. Synthetic inputs: 4096 tokens, 2 heads, d128, full, mean of
four draws; SmolLM2-135M: 320 tokens of text, d64, causal.
"""

from __future__ import annotations

import numpy as np
import torch

import omniattn as oa
from omniattn import data

from .test_low_precision_accuracy_gpu import PUBLISHED, draw, exact, figures

COLUMNS: dict[str, oa.Int8] = {
    "int8": oa.Int8(),
    "int8, smooth V": oa.Int8(smooth_v=True),
    "int8, smooth Q": oa.Int8(smooth_q=True),
    "int4": oa.Int4(),
    "int4, smooth K": oa.Int4(smooth_q=False),
    "int4, none": oa.Int4(smooth_q=False, smooth_k=False),
}


def row(inputs: list[list[torch.Tensor]], causal: bool) -> list[str]:
    cells = []
    references = [exact(*x, causal=causal) for x in inputs]
    for precision in COLUMNS.values():
        found = [
            figures(oa.attention(*x, causal=causal, precision=precision), ref)
            for x, ref in zip(inputs, references, strict=True)
        ]
        cosine, l1 = np.mean(found, axis=0)
        cells.append(f"{cosine:.5f} / {l1:.3f}".replace("0.", "."))
    return cells


def main() -> None:
    print("| input | " + " | ".join(COLUMNS) + " |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for kind in PUBLISHED:
        inputs = [draw(kind, seed, seqlen_q=4096, heads_q=2, head_dim=128) for seed in range(4)]
        print(f"| {kind.replace('_', ' ')} | " + " | ".join(row(inputs, False)) + " |")
    for x in data.load_activations():
        tensors = [torch.from_numpy(t).to(torch.bfloat16).cuda() for t in (x.q, x.k, x.v)]
        print(f"| {x.name} | " + " | ".join(row([tensors], True)) + " |")


if __name__ == "__main__":
    main()
