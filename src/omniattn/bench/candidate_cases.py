"""The calls whose every way is measured by ``omniattn bench candidates``: what selection is fitted to and judged by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from omniattn.bench.backward_cases import lognormal_lengths
from omniattn.bench.shape_cases import SHAPE_CASES, ShapeCase

#: (batch, heads, heads of k and v, queries and keys): one sequence and many, from a part of a round of CTAs to many.
_DENSE = (
    (1, 8, 8, 512), (1, 12, 12, 577), (2, 16, 16, 1000), (1, 16, 16, 1024), (8, 16, 16, 1024), (4, 32, 8, 1536),
    (1, 24, 24, 2048), (4, 16, 4, 2048), (1, 16, 16, 4096), (3, 11, 11, 4096), (1, 32, 8, 8192), (1, 5, 5, 16384),
)  # fmt: skip
_SHORT = ((2048, 16, 16), (512, 16, 48), (1024, 16, 64), (256, 16, 100), (256, 16, 128), (64, 16, 197), (64, 16, 256),
          (32, 12, 384), (16, 16, 640))  # fmt: skip
#: (batch, query heads, kv heads, queries, keys).
_FEW = (
    (1, 32, 8, 1, 1024), (1, 32, 8, 1, 8192), (1, 32, 32, 1, 8192), (8, 32, 8, 1, 4096), (64, 32, 8, 1, 2048),
    (256, 32, 8, 1, 512), (1, 71, 1, 1, 16384), (1, 28, 4, 4, 8192), (16, 32, 8, 4, 8192), (1, 32, 8, 16, 32768),
    (2, 16, 16, 32, 4096), (8, 32, 8, 32, 8192), (1, 16, 2, 64, 65536), (4, 16, 16, 128, 16384), (1, 32, 8, 256, 32768),
    (1, 8, 8, 512, 16384), (2, 16, 16, 77, 4096), (4, 16, 16, 4096, 77),
)  # fmt: skip
_WIDTHS = (40, 72, 80, 96, 112, 160, 192)


def _dense(head_dim: int, batch: int, heads: int, kv_heads: int, queries: int, keys: int, **more: Any) -> ShapeCase:
    group = heads // kv_heads
    return ShapeCase(head_dim, heads, (queries,) * batch, (keys,) * batch, group=group, **more)


def _packed(name: str, head_dim: int, lengths: tuple[int, ...], heads: int = 16, **more: Any) -> ShapeCase:
    return ShapeCase(head_dim, heads, lengths, more.pop("keys", lengths), packed=name, **more)


def _plain() -> Iterator[ShapeCase]:
    for head_dim in (64, 128, 256):
        for batch, heads, kv_heads, length in _DENSE:
            case = _dense(head_dim, batch, heads, kv_heads, length, length)
            yield case
            if length >= 1000 and head_dim != 256:
                yield replace(case, causal=True)
    for head_dim in (64, 128):
        for batch, heads, length in _SHORT:
            case = _dense(head_dim, batch, heads, heads, length, length)
            yield from (case, replace(case, causal=True))
        yield from (_dense(head_dim, *call) for call in _FEW)
    yield from (_dense(256, *call) for call in _FEW[::3])
    for head_dim in _WIDTHS:
        yield _dense(head_dim, 2, 16, 16, 2048, 2048)
        yield _dense(head_dim, 128, 16, 16, 128, 128)
        yield _dense(head_dim, 1, 32, 8, 16, 16384)
    for head_dim, own in ((192, 128), (64, 128), (128, 64)):
        yield _dense(head_dim, 2, 16, 16, 2048, 2048, own_head_dim_v=own)


def _with_options() -> Iterator[ShapeCase]:
    options: tuple[dict[str, Any], ...] = (
        {"softcap": 30.0}, {"mask": "mixed"}, {"mask": "padding"}, {"mask": "bias_heads"},
    )  # fmt: skip
    calls = ((512, 16, 16, 32, 32), (256, 16, 16, 128, 128), (32, 12, 12, 384, 384), (1, 16, 16, 1024, 1024),
             (2, 16, 16, 4096, 4096), (1, 32, 8, 16, 16384), (8, 32, 8, 128, 4096))  # fmt: skip
    for head_dim in (64, 128):
        for option in options:
            yield from (_dense(head_dim, *call, **option) for call in calls[:: 1 if head_dim == 128 else 2])
    for window in ((127, 0), (1023, 0), (4095, 0)):
        yield _dense(128, 1, 16, 16, 16384, 16384, causal=True, window=window)
        yield _dense(64, 4, 16, 16, 4096, 4096, causal=True, window=window)
    yield _dense(128, 1, 16, 16, 16384, 16384, window=(512, 512))


def _of_packed() -> Iterator[ShapeCase]:
    lognormal, tokens = lognormal_lengths(16, 16384), tuple(n * 4 for n in lognormal_lengths(64, 65536))
    prompts = tuple(17 + 4079 * (i * 20 % 33) // 32 for i in range(33))
    for head_dim in (64, 128):
        yield _packed("2048x16", head_dim, (16,) * 2048)
        yield _packed("128x128-256", head_dim, tuple(128 + i * 37 % 129 for i in range(128)))
        for name, lengths in (("lognormal", lognormal), ("33x17-4096", prompts), ("10x1536", (1536,) * 10)):
            yield _packed(name, head_dim, lengths)
            yield _packed(name, head_dim, lengths, causal=True, group=4, heads=32)
        yield _packed("64x1onlognormal", head_dim, (1,) * 64, 32, keys=tokens, group=4, causal=True)
        yield _packed("32x4onlognormal", head_dim, (4,) * 32, 32, keys=tokens[:32], group=4, causal=True)
        yield _packed("8x32on8192", head_dim, (32,) * 8, 32, keys=(8192,) * 8, group=4)


def _on_8_bits() -> Iterator[ShapeCase]:
    calls = ((2, 16, 16, 2048, 2048), (1, 16, 16, 8192, 8192), (1, 32, 8, 16, 32768), (4, 32, 8, 256, 8192))
    for head_dim in (64, 128):
        for precision in ("int8", "fp8"):
            yield from (_dense(head_dim, *call, precision=precision) for call in calls)


def candidate_cases() -> tuple[ShapeCase, ...]:
    """The calls, each once: those of the other benches of shapes, whose results stand in docs, and a grid of more."""
    of_benches = [replace(case, mark=None, both=False, flex=False) for cases in SHAPE_CASES.values() for case in cases]
    cases = (*_plain(), *_with_options(), *_of_packed(), *_on_8_bits(), *of_benches)
    return tuple({case.long_name: case for case in cases}.values())
