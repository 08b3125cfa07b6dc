"""Calls of one query: heads of a kv head as queries of one head."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionProblem, AttentionStrides, Target
from omniattn.problems.dropout import DropoutProblem
from omniattn.problems.precision import Int8
from omniattn.problems.score_mod import BlockMaskProblem, ScoreModProblem
from omniattn.select import candidates, choices
from omniattn.select.attention import facts
from omniattn.select.candidate import can_have_heads_as_queries, heads_as_queries
from tests.unit.select.shape_plans import fastest, planned

HOPPER, AMPERE = Target((9, 0), 227 << 10, 132), Target((8, 0), 163 << 10, 108)
BATCH, HEADS, KV_HEADS, KEYS, DIM = 3, 8, 2, 5000, 64


def problem_of(mask: str = "bool", mask_heads: int = 1, heads_kv: int = KV_HEADS, **changes: Any) -> AttentionProblem:
    of_head = KEYS if mask_heads > 1 else 0
    strides = AttentionStrides(
        (HEADS * DIM, 0, DIM), (KEYS * DIM, DIM, BATCH * KEYS * DIM), (KEYS * DIM, DIM, BATCH * KEYS * DIM),
        (HEADS * 2 * DIM, 0, 2 * DIM), (HEADS, 1), (mask_heads * KEYS, of_head, 0, 1),
    )  # fmt: skip
    made = AttentionProblem(
        "bfloat16", BATCH, 1, KEYS, HEADS, heads_kv, DIM, -1, -1, 0.125, 0.0, mask, "none", False, lse=True,
        strides=strides,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def elements(strides: tuple[int, ...], *at: np.ndarray) -> np.ndarray:
    return np.asarray(sum(s * x for s, x in zip(strides, at, strict=True)))


@pytest.mark.parametrize("mask_heads", [1, HEADS])
@pytest.mark.parametrize("heads_kv", [1, 2])
def test_every_head_finds_its_own_elements(heads_kv: int, mask_heads: int) -> None:
    whole = problem_of(mask_heads=mask_heads, heads_kv=heads_kv)
    folded = heads_as_queries(whole)
    group = HEADS // heads_kv
    assert (folded.seqlen_q, folded.num_q_heads, folded.num_kv_heads) == (group, heads_kv, heads_kv)
    a, b = whole.strides, folded.strides
    assert a is not None
    assert b is not None
    batch, head = np.meshgrid(np.arange(BATCH), np.arange(HEADS), indexing="ij")
    zero, kv_head, row = np.zeros_like(head), head // group, head % group
    for name in ("q", "o"):
        own, other = getattr(a, name), getattr(b, name)
        np.testing.assert_array_equal(elements(own, batch, zero, head), elements(other, batch, row, kv_head))
    np.testing.assert_array_equal(elements((*a.lse, 1), batch, head, zero), elements((*b.lse, 1), batch, kv_head, row))
    for key in (0, KEYS - 1):
        own, other = (batch, head, zero, zero + key), (batch, kv_head, row, zero + key)
        np.testing.assert_array_equal(elements(a.mask, *own), elements(b.mask, *other))
    assert (b.k, b.v) == (a.k, a.v)


@pytest.mark.parametrize(
    "changes",
    [
        {"seqlen_q": 2}, {"num_kv_heads": HEADS}, {"mask": "none"}, {"sinks": "float32"}, {"window_left": 100},
        {"window_right": 0}, {"varlen": True}, {"strides": None}, {"precision": Int8().precision},
        {"score_mod": ScoreModProblem("score + h", None, ())}, {"block_mask": BlockMaskProblem((1, 1), (0, 0, 0, 0))},
        {"dropout": DropoutProblem(26)},  # of other heads and rows other probabilities are dropped
    ],
    ids=str,
)  # fmt: skip
def test_others_stay_as_they_are(changes: dict[str, Any]) -> None:
    p = problem_of(**changes)
    plain = p.precision.quantized or "strides" in changes  # cannot be planned here
    assert can_have_heads_as_queries(p) == ("mask" in changes)
    # Without a mask kernels share tiles among heads by themselves: of one query that may be as fast.
    assert plain or "mask" in changes or not any(choice.candidate.heads_as_queries for choice in choices(p, HOPPER))


def test_softcap_and_scales_too() -> None:
    for changes in ({"softcap": 20.0}, {"softmax_scale": -1.0}, {"softmax_scale": 0.0}):
        assert any(way.heads_as_queries for way in candidates(problem_of(mask="none", **changes), HOPPER))


@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=lambda target: str(target.cc))
@pytest.mark.parametrize("keys", [100, KEYS, 32768])
def test_plans(keys: int, target: Target) -> None:
    """A CTA a kv head, not a query head; the reasons say so."""
    problem = problem_of(seqlen_k=keys, batch=1)
    launches = planned(problem, target, lambda way: way.heads_as_queries)
    way = fastest(problem, target, lambda way: way.heads_as_queries)
    assert "one query: the 4 query heads of a kv head are the rows of a tile" in facts(way, problem, target)
    attention = [r for r in launches.records if r.spec.op in ("attention", "attention_split")]
    assert len(attention) == 1
    if attention[0].spec.op == "attention_split" and not attention[0].spec.arch_specific:
        assert attention[0].grid[0] == KV_HEADS
    apart = dataclasses.replace(problem, num_kv_heads=HEADS)
    assert not any("are the rows of a tile" in reason for reason in choices(apart, target)[0].why)


def test_heads_of_plain_calls_that_could_share_no_tiles() -> None:
    """71 heads of one kv head are queries: no number of rows divides them."""
    p = dataclasses.replace(problem_of("none", heads_kv=2), num_q_heads=2 * 71)
    first = choices(p, HOPPER)[0].candidate
    assert first.heads_as_queries
    assert (first.told(p).seqlen_q, first.told(p).num_q_heads) == (71, 2)
    assert plan_attention(p, HOPPER, None).records[0].spec.op == "attention_split"


def test_a_mask_of_heads_and_keys_has_a_map_as_rows_of_queries() -> None:
    p = problem_of("io", mask_heads=HEADS, keys_map=True)
    assert not p.mask_map
    folded = heads_as_queries(p)
    assert (folded.mask_map, folded.mask_encoding) == (True, "tiles")
    assert not heads_as_queries(problem_of("io", mask_heads=HEADS)).mask_map
