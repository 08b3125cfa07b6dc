"""Small calls of every tile class, for compute-sanitizer: ``python sanitizer_cases.py [low_precision | faulty]``.

CuPy arrays in memory of their own (no pool), so that an access behind any of them is seen; moved by copies alone, so
that no kernel runs but omniattn's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np

import omniattn as oa
from omniattn import runtime, select

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
#: Below the tile: the last 8 channels of every row are outside.
BELOW = 8
HEADS, HEADS_KV = 2, 1
SEQLEN_Q, SEQLEN_K = 131, 195

#: What each call adds to a plain one; arrays are made by `options_for`.
CALLS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (40, 9)},
    "sinks": {"causal": True, "sinks": True},
    "softcap": {"softcap": 5.0},
    "mask": {"mask": "bool"},
    "bias": {"mask": "float32", "causal": True},
}


def to_gpu(x: Any, dtype: Any = np.float16) -> Any:
    return cupy.asarray(np.ascontiguousarray(x, dtype=dtype))


def poisoned(shape: tuple[int, ...]) -> Any:
    return to_gpu(np.full(shape, np.nan))


def check(o: Any, lse: Any = None) -> None:
    """Everything has been written; values are compared elsewhere."""
    assert not np.isnan(cupy.asnumpy(o)).any()
    assert lse is None or not np.isnan(cupy.asnumpy(lse)).any()


def options_for(call: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    options = dict(call)
    if "sinks" in options:
        options["sinks"] = to_gpu(rng.standard_normal(HEADS), np.float32)
    if options.get("mask") == "bool":
        options["mask"] = to_gpu(rng.random((SEQLEN_Q, SEQLEN_K)) < 0.7, np.bool_)
    elif options.get("mask") == "float32":
        options["mask"] = to_gpu(rng.standard_normal((HEADS, SEQLEN_Q, SEQLEN_K)), np.float32)
    return options


def dense(head_dim: int, rng: np.random.Generator) -> None:
    for width, names in ((head_dim - BELOW, tuple(CALLS)), (head_dim, ("full", "mask"))):
        q = to_gpu(rng.standard_normal((1, SEQLEN_Q, HEADS, width)))
        k, v = (to_gpu(rng.standard_normal((1, SEQLEN_K, HEADS_KV, width))) for _ in range(2))
        for name in names:
            check(*oa.attention(q, k, v, out=poisoned(q.shape), return_lse=True, **options_for(CALLS[name], rng)))


def varlen(head_dim: int, rng: np.random.Generator, precisions: tuple[oa.Int8, ...] = ()) -> None:
    lengths_q, lengths_k = (70, 0, 1, 129), (131, 5, 0, 66)
    q = to_gpu(rng.standard_normal((sum(lengths_q) + 3, HEADS, head_dim)))
    k, v = (to_gpu(rng.standard_normal((sum(lengths_k) + 3, HEADS_KV, head_dim))) for _ in range(2))
    starts = {
        "cu_seqlens_q": to_gpu([0, *np.cumsum(lengths_q)], np.int32),
        "cu_seqlens_k": to_gpu([0, *np.cumsum(lengths_k)], np.int32),
    }
    options_of_calls: list[dict[str, Any]] = [{"causal": True}, {"causal": True, "softcap": 5.0}]
    if precisions:
        options_of_calls = [{"causal": causal, "precision": p} for p in precisions for causal in (False, True)]
    for options in options_of_calls:
        check(
            *oa.attention_varlen(
                q,
                k,
                v,
                **starts,
                max_seqlen_q=max(lengths_q),
                max_seqlen_k=max(lengths_k),
                out=poisoned(q.shape),
                return_lse=True,
                **options,
            )
        )


def merge(head_dim: int, rng: np.random.Generator) -> None:
    for dtype in (np.float16, np.float32):
        a, b = (to_gpu(rng.standard_normal((2, 77, 3, head_dim)), dtype) for _ in range(2))
        lse_a, lse_b = rng.standard_normal((2, 2, 3, 77))
        lse_a[0, 0, ::2] = lse_b[0, 0, ::4] = -np.inf
        check(*oa.merge_states(a, to_gpu(lse_a, np.float32), b, to_gpu(lse_b, np.float32)))


def quantizers(head_dim: int, rng: np.random.Generator) -> None:
    """Every format; outputs are checked elsewhere."""
    for width in (head_dim - BELOW, head_dim):
        q = to_gpu(rng.standard_normal((1, SEQLEN_Q, HEADS, width)))
        k = to_gpu(rng.standard_normal((1, SEQLEN_K, HEADS_KV, width)))
        oa.quantize_qk(q, k, smooth_q=True, with_bias=True)
        oa.quantize_qk(q, k, dtype="int4", granularity="per_tensor", grouping="sm80")
        oa.quantize_qk(q, k, granularity="per_token")
        oa.quantize_v(k, smooth_v=True)
        oa.quantize_v(k, dtype="float16")
        cupy.cuda.runtime.deviceSynchronize()


def low_precision(head_dim: int, rng: np.random.Generator) -> None:
    """Quantization and attention together, in one workspace."""
    precisions = (oa.Int8(), oa.Int8(smooth_q=True, smooth_v=True), oa.Int4())
    generic = not any(spec.arch_specific for spec in select.REGISTRY)
    if generic:  # every product of the kernel on mma.sync that this GPU has
        newer = runtime.device_info(0).cc >= (8, 9)
        kinds = [(pv, acc) for pv in ("fp16", "fp8")[: 1 + newer] for acc in ("fp32", "fp16")]
        precisions += tuple(oa.Int8(pv=pv, pv_accumulator=acc) for pv, acc in kinds)
    for width in (head_dim - BELOW, head_dim):
        q = to_gpu(rng.standard_normal((1, SEQLEN_Q, HEADS, width)))
        k, v = (to_gpu(rng.standard_normal((1, SEQLEN_K, HEADS_KV, width))) for _ in range(2))
        for precision in precisions:
            for name in ("full", "causal", "window", "sinks") + generic * ("softcap", "mask"):
                options = options_for(CALLS[name], rng)
                check(*oa.attention(q, k, v, out=poisoned(q.shape), return_lse=True, precision=precision, **options))
    varlen(head_dim, rng, precisions)


def faulty() -> None:
    """k says that it has twice the rows that its memory holds: proof that the tool sees what it has to."""
    q = to_gpu(np.zeros((1, 64, 1, 64)))
    v = to_gpu(np.zeros((1, 128, 1, 64)))
    out = poisoned(q.shape)
    half = to_gpu(np.zeros((1, 64, 1, 64)))
    k = cupy.ndarray((1, 128, 1, 64), np.float16, memptr=half.data)
    # A softcap runs the generic kernel on every GPU; a bulk copy of a Hopper kernel reads whole boxes unwatched.
    cupy.asnumpy(oa.attention(q, k, v, out=out, softcap=1.0))


if __name__ == "__main__":
    cupy.cuda.set_allocator(None)
    if sys.argv[1:] == ["faulty"]:
        faulty()
    else:
        everything = select.REGISTRY
        # What this GPU gets, then what every GPU gets.
        for rows in (everything, tuple(spec for spec in everything if not spec.arch_specific)):
            select.REGISTRY = rows
            sys.modules["omniattn.attention"].__dict__["_plans"].clear()
            for width in HEAD_DIMS:
                generator = np.random.default_rng(width)
                dense(width, generator)
                varlen(width, generator)
                merge(width, generator)
        select.REGISTRY = everything
    if sys.argv[1:] == ["low_precision"]:
        for width in (64, 128, 256):
            quantizers(width, np.random.default_rng(width))
        for rows in (everything, tuple(spec for spec in everything if not spec.arch_specific)):
            select.REGISTRY = rows
            sys.modules["omniattn.attention"].__dict__["_plans"].clear()
            for width in (64, 128, 256):
                low_precision(width, np.random.default_rng(width))
    print("all calls done")
