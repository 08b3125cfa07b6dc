"""Even shares of packed sequences under compute-sanitizer."""

from __future__ import annotations

import os

import numpy as np
from sanitizer_arrays import check, poisoned, to_gpu

import omniattn as oa


def stream_k(rng: np.random.Generator) -> None:
    """Even shares of packed sequences: classes of one to four tiles, cut ones, rows of no sequence on both sides."""
    lengths_q, lengths_k = (3, 1, 17, 0, 40, 60, 200), (900, 1, 3000, 5, 500, 0, 700)
    q = to_gpu(rng.standard_normal((sum(lengths_q) + 7, 8, 128)))
    k, v = (to_gpu(rng.standard_normal((sum(lengths_k) + 7, 2, 128))) for _ in range(2))
    starts = {
        f"cu_seqlens_{x}": to_gpu(3 + np.cumsum([0, *n]), np.int32) for x, n in (("q", lengths_q), ("k", lengths_k))
    }
    sinks = to_gpu(rng.standard_normal(8), np.float32)
    tiles = ("m64n64_varlen_split", "m128n128_varlen_split", "m64n64_varlen_split_softcap")
    rows = [f"attn_fwd_sm90_fp16_d128_{tile}" for tile in tiles] + ["attn_int8_sm90_fp16_d128_m128n64_varlen_split"]
    for row in rows:
        os.environ["OMNIATTN_FORCE_KERNEL"] = row
        for options in ({"causal": True}, {"sinks": sinks}, {"window": (300, 9)}):
            more: dict[str, object] = {"softcap": 5.0} if row.endswith("softcap") else {}
            more |= {"precision": "int8"} if "int8" in row else {}
            longest = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
            out = poisoned(q.shape)
            check(*oa.attention_varlen(q, k, v, out=out, return_lse=True, **starts, **longest, **options, **more))
    del os.environ["OMNIATTN_FORCE_KERNEL"]
