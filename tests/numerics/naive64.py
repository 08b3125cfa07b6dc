"""Attention by its definition, one query row at a time in float64: shares no code with the package.

Everything here is (heads, seq, dim) of one sequence; visible keys are collected in a list, so nothing is ever masked.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def is_visible(i: int, j: int, sq: int, sk: int, causal: bool, window: tuple[int, int] | None) -> bool:
    if causal and j > i + sk - sq:
        return False
    if window is None:
        return True
    left, right = window
    if left != -1 and j < i + sk - sq - left:
        return False
    return not (right != -1 and j > i + sk - sq + right)


def sequence(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    heads, sq, dim = q.shape
    sk = k.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    o = np.zeros((heads, sq, v.shape[2]))
    lse = np.full((heads, sq), -math.inf)
    for h in range(heads):
        source = h * k.shape[0] // heads
        for i in range(sq):
            visible = [j for j in range(sk) if is_visible(i, j, sq, sk, causal, window)]
            if mask is not None:
                row = mask[h, i].tolist()
                hides = False if mask.dtype == bool else -math.inf
                visible = [j for j in visible if row[j] != hides]
            with np.errstate(all="ignore"):
                logits = scale * (q[h, i] * k[source, visible]).sum(axis=1)
                if softcap > 0:
                    logits = softcap * np.tanh(logits / softcap)
                if mask is not None and mask.dtype != bool:
                    logits = logits + mask[h, i, visible].astype(np.float64)
            everything = logits if sinks is None else np.append(logits, float(sinks[h]))
            if not everything.size or np.all(everything == -math.inf):
                continue
            with np.errstate(all="ignore"):
                top = everything.max()
                total = np.exp(everything - top).sum()
                lse[h, i] = top + np.log(total)
                if visible:
                    weights = np.exp(logits - top) / total
                    o[h, i] = (weights[:, None] * v[source, visible]).sum(axis=0)
    return o, lse


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, layout: str = "NHD", mask: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(o in the layout of q, lse) for 4-dimensional arrays."""
    if layout == "NHD":
        q, k, v = (np.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
    batch, heads, sq, _ = q.shape
    o = np.zeros((batch, heads, sq, v.shape[3]))
    lse = np.zeros((batch, heads, sq))
    full = None if mask is None else np.broadcast_to(mask, (batch, heads, sq, k.shape[2]))
    for b in range(batch):
        o[b], lse[b] = sequence(q[b], k[b], v[b], mask=None if full is None else full[b], **options)
    return (np.transpose(o, (0, 2, 1, 3)) if layout == "NHD" else o), lse
