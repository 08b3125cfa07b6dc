"""Score modifications as tests use them: the `ScoreMod` of an example on a GPU, and the same by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import omniattn as oa

from .attention_cases import run_dense

Mod = dict[str, Any]  # expression, mask, arrays (NumPy), reference


def mod_and_reference(mod: Mod) -> tuple[oa.ScoreMod, Any]:
    """The `ScoreMod` on GPU arrays, and the same for `omniattn.reference`."""
    arrays = mod.get("arrays", {})
    on = {name: torch.from_numpy(x).cuda() for name, x in arrays.items()}
    made = oa.ScoreMod(mod["expression"], mask=mod.get("mask"), **on)

    def function(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return mod["reference"](score, b, h, q, k, **arrays)

    return made, function


def run_both(mod: Mod, q: Any, k: Any, v: Any, dtype: str, **options: Any) -> None:
    made, function = mod_and_reference(mod)
    run_dense(q, k, v, dtype, score_mod=function, gpu={"score_mod": made}, **options)


def hide(score: Any, visible: Any) -> Any:
    return np.where(visible, score, -np.inf)


def examples(seqlen_q: int, seqlen_k: int, heads: int, batch: int) -> dict[str, Mod]:
    """The examples of docs/score_mods.md, and expressions that use every type and way to index."""
    rng = np.random.default_rng(5)
    slopes = (2.0 ** -np.arange(1, heads + 1)).astype(np.float32)
    table = rng.standard_normal((heads, 65)).astype(np.float32)
    doc_q = np.sort(rng.integers(0, 4, (batch, seqlen_q)), axis=1).astype(np.int32)
    doc_k = np.sort(rng.integers(0, 4, (batch, seqlen_k)), axis=1).astype(np.int64)
    prefix = rng.integers(1, max(2, seqlen_k), batch).astype(np.int32)
    is_global = (rng.random(seqlen_k) < 0.02).astype(np.bool_)
    odd = rng.standard_normal((heads, 2, seqlen_k)).astype(np.float16)[:, 1]
    return {
        "alibi": {
            "expression": "score + slopes[h] * (k - q)", "arrays": {"slopes": slopes},
            "reference": lambda s, b, h, q, k, slopes: s + slopes[h] * (k - q),
        },
        "table": {
            "expression": "score + table(h, min(max(k - q, -32), 32) + 32)", "arrays": {"table": table},
            "reference": lambda s, b, h, q, k, table: s + table[h, np.clip(k - q, -32, 32) + 32],
        },
        "documents": {
            "expression": "score", "mask": "doc_q(b, q) == doc_k(b, k)", "arrays": {"doc_q": doc_q, "doc_k": doc_k},
            "reference": lambda s, b, h, q, k, doc_q, doc_k: hide(s, doc_q[b, q] == doc_k[b, k]),
        },
        "prefix": {
            "expression": "score", "mask": "k <= q || k < prefix[b]", "arrays": {"prefix": prefix},
            "reference": lambda s, b, h, q, k, prefix: hide(s, (k <= q) | (k < prefix[b])),
        },
        "global": {
            "expression": "score", "mask": "abs(q - k) <= 40 || is_global[k]", "arrays": {"is_global": is_global},
            "reference": lambda s, b, h, q, k, is_global: hide(s, (abs(q - k) <= 40) | is_global[k]),
        },
        "softcap": {
            "expression": "4.0f * tanhf(score / 4.0f)",
            "reference": lambda s, b, h, q, k: 4 * np.tanh(s / 4),
        },
        "by head": {
            "expression": "score * 0.5 + float(odd(h, k))", "mask": "(q + k + h) % 3 != 0 && !(q / 64 == 1 && k >= 64)",
            "arrays": {"odd": odd},
            "reference": lambda s, b, h, q, k, odd: hide(
                s * 0.5 + odd[h, k].astype(np.float32), ((q + k + h) % 3 != 0) & ~((q // 64 == 1) & (k >= 64))
            ),
        },
        "hides all": {
            "expression": "q % 2 == 0 ? score : -INFINITY", "mask": "q < 70 || b == 1",
            "reference": lambda s, b, h, q, k: hide(s, (q % 2 == 0) & ((q < 70) | (b == 1))),
        },
        "causal by hand": {
            "expression": "k <= q + 40 ? score : -1e30f",
            "reference": lambda s, b, h, q, k: np.where(k <= q + 40, s, np.float32(-1e30)),
        },
        "lowest": {
            "expression": "k % 3 == 0 ? score : -3.4e38f",
            "reference": lambda s, b, h, q, k: np.where(k % 3 == 0, s, np.float32(-3.4e38)),
        },
    }  # fmt: skip
