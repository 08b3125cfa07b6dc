"""Whether keys are copied out of their pages first, beside what was measured on one H100 (2026-11-27)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from omniattn.problems import AttentionProblem, AttentionStrides, Pages, Target
from omniattn.problems.with_cache import decode_of_pages, keys_of_pages
from omniattn.select.with_cache import is_copied

HOPPER, AMPERE = Target((9, 0), 227 << 10, 132), Target((8, 0), 163 << 10, 108)
#: Sequences, new tokens, those before them, head_dim, tokens of a page, softcap; µs over pages, and copied.
TIMES = (
    (1, 2048, 32768, 128, 1, 0.0, 1871, 1602), (1, 2048, 32768, 128, 8, 0.0, 1730, 1630),
    (1, 2048, 32768, 128, 16, 0.0, 1545, 1650), (1, 2048, 32768, 128, 64, 0.0, 1534, 1651),
    (1, 2048, 32768, 128, 256, 0.0, 1502, 1609), (4, 2048, 32768, 128, 64, 0.0, 6351, 6852),
    (4, 2048, 32768, 128, 1, 0.0, 8776, 6928), (1, 2048, 16384, 64, 16, 0.0, 645, 535),
    (1, 2048, 16384, 64, 16, 30.0, 1121, 863), (1, 2048, 16384, 96, 16, 0.0, 739, 718),
    (1, 2048, 16384, 96, 16, 30.0, 1238, 1018), (1, 2048, 16384, 192, 16, 0.0, 1285, 1177),
    (1, 2048, 16384, 192, 16, 30.0, 1667, 1533), (1, 2048, 16384, 256, 16, 0.0, 1559, 1677),
    (1, 2048, 16384, 256, 16, 30.0, 1760, 1787), (1, 2048, 16384, 64, 1, 30.0, 1375, 877),
    (1, 2048, 16384, 128, 1, 30.0, 1528, 1171), (1, 2048, 16384, 128, 16, 30.0, 1335, 1129),
    (16, 512, 4096, 64, 16, 0.0, 627, 615), (16, 512, 4096, 128, 16, 30.0, 1356, 1350),
    (4, 4096, 0, 64, 16, 0.0, 648, 541), (1, 8192, 0, 128, 16, 0.0, 790, 824),
    (1, 20, 32768, 128, 64, 0.0, 80, 177), (1, 128, 32768, 128, 64, 0.0, 118, 219),
    (1, 512, 32768, 128, 64, 0.0, 376, 476), (1, 1024, 32768, 128, 64, 0.0, 740, 848),
    (8, 64, 8192, 128, 1, 0.0, 158, 329), (8, 256, 8192, 128, 1, 0.0, 486, 593),
)  # fmt: skip


def call(batch: int, new: int, before: int, dim: int, page: int, softcap: float, **changes: Any) -> AttentionProblem:
    """32 heads on 8, causal."""
    length = before + new
    columns, rows = -(-length // page), batch * new
    kv, q = (8 * page * dim, 8 * dim, dim), (0, 32 * dim, dim)
    options: dict[str, Any] = {
        "max_seqlen_q": new, "strides": AttentionStrides(q, kv, kv, q, (0, rows), (0, 0, 0, 0)), "used": (False, True),
        "pages": Pages(page, batch * columns, columns, columns),
    }  # fmt: skip
    return AttentionProblem(
        "bfloat16", batch, rows, batch * length, 32, 8, dim, -1, 0, dim**-0.5, softcap, "none", "none", True,
        **{**options, **changes},
    )  # fmt: skip


def copied(problem: AttentionProblem, target: Target) -> bool:
    few = decode_of_pages(problem)
    assert few is not None
    return is_copied(problem, keys_of_pages(problem, few), target)


@pytest.mark.parametrize("times", TIMES, ids=str)
def test_what_is_chosen_is_the_faster_way(times: tuple[Any, ...]) -> None:
    *facts, over_pages, first = times
    chosen = first if copied(call(*facts), HOPPER) else over_pages
    assert chosen <= 1.07 * min(over_pages, first)


def test_what_is_never_copied() -> None:
    """Where the same kernel has to run whatever the batch is; where nothing was measured."""
    slow = 1, 2048, 16384, 64, 16, 30.0
    assert copied(call(*slow), HOPPER)
    assert not copied(call(*slow, deterministic=True), HOPPER)
    assert not copied(call(*slow), AMPERE)


def test_of_a_window_what_is_seen() -> None:
    """Keys left of all windows are neither copied nor counted."""
    whole = call(8, 1024, 65536, 64, 1, 30.0)
    windowed = replace(whole, window_left=1023)
    few = decode_of_pages(windowed)
    assert few is not None
    assert copied(windowed, HOPPER)
    assert keys_of_pages(whole, few).places()[1] > 1 << 30
    assert keys_of_pages(windowed, few).places()[1] < 1 << 28
