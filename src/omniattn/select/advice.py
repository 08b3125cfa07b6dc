"""What was measured of low precisions on whole calls, for `explain`: advice, and no rule of selection."""

from __future__ import annotations

from ..problems import UNLIMITED, AttentionProblem, Target
from .model import rules


def advise(problem: AttentionProblem, target: Target) -> str | None:
    """When exact attention is the faster choice: one sentence, or None where it is not, or where nobody measured.

    Quantization costs as much as a few hundred keys do, whatever is attended to; with few queries more than attention,
    because it reads all of K and V in 16 bits, which is all that exact attention has to do. Operands that come
    quantized, and arrays in e4m3, do not pay it.
    """
    given = problem.operands is not None or problem.descales is not None
    if not problem.precision.quantized or given or target.cc != (9, 0):
        return None
    hidden = problem.window_left != UNLIMITED or problem.window_right != UNLIMITED
    width = max(problem.head_dim, problem.head_dim_v)
    faster_from = rules().int8_from
    head_dim = min(d for d in faster_from if d >= width)
    rows, keys = problem.seqlen_q, problem.seqlen_k
    if problem.varlen:
        rows, keys = (n // max(problem.batch, 1) for n in (rows, keys))
    least = faster_from[head_dim][hidden]
    if min(rows, keys) >= least:
        return None
    said = (
        f"with its quantization exact attention is the faster choice below about {least} queries and keys at head_dim "
        f"{head_dim}{', causal or windowed' if hidden else ''}, as int8 was measured on an H200: "
    )
    if keys < least:
        return f"{said}min_seqlen={least} takes it there"
    # min_seqlen counts keys, and these are enough.
    return (
        f"{said}precision='exact' for few queries on many keys, or K and V quantized once for many calls (quantize_qk, "
        "quantize_v)"
    )
