"""What was measured of low precisions on whole calls, for `explain`: advice, and no rule of selection."""

from __future__ import annotations

from ..problems import UNLIMITED, AttentionProblem, Target

#: By the narrowest head_dim that holds a call's: rows and keys from which on int8 with its quantization is faster than
#: exact attention, (full, causal or windowed). Of one H200 (docs/performance/results/int8.json, which a test compares);
#: where no measured length was faster, the next one.
FASTER_FROM: dict[int, tuple[int, int]] = {64: (16384, 32768), 128: (4096, 8192), 256: (4096, 8192)}


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
    head_dim = min(d for d in FASTER_FROM if d >= width)
    rows, keys = problem.seqlen_q, problem.seqlen_k
    if problem.varlen:
        rows, keys = (n // max(problem.batch, 1) for n in (rows, keys))
    least = FASTER_FROM[head_dim][hidden]
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
