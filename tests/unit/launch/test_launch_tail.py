"""Tiles that do not fill a round, whose keys are split, without a GPU: what is launched for them, and when."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.launch.structs import ATTN_FWD_SM90, ATTN_FWD_SPLIT_SM90, ATTN_INT8_SPLIT_SM90
from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionProblem
from omniattn.problems.split import TailSplit
from omniattn.problems.tile_order import head_by_head, most_rows
from omniattn.registry import by_name
from omniattn.select import Candidate, candidates, choices
from omniattn.select.orders import other_orders
from tests.unit.launch.launch_fakes import fields_of_merge, fields_of_record
from tests.unit.launch.test_launch_split import AMPERE, HOPPER, items_of, problem_of
from tests.unit.select.shape_plans import fastest, is_whole, planned

#: Calls with a tail: (batch, heads, kv heads, queries, keys, head_dim).
TAILS = [
    (1, 16, 16, 16384, 16384, 128), (1, 24, 8, 4608, 4608, 128), (5, 12, 4, 2300, 9000, 128),
    (1, 18, 18, 4096, 6000, 256), (1, 20, 20, 3000, 8000, 192), (1, 21, 7, 8000, 9000, 64),
]  # fmt: skip


def long(extents: tuple[int, ...], **changes: Any) -> AttentionProblem:
    b, hq, hk, sq, sk, d = extents
    return problem_of(b, sq, sk, hq, hk, d=d, **{"dtype": "bfloat16", "lse": False, **changes})


def has_tail(way: Candidate) -> bool:
    return isinstance(way.schedule, TailSplit)


@pytest.mark.parametrize("extents", TAILS)
@pytest.mark.parametrize("precision", ["exact", "int8", "fp8"])
def test_every_tile_is_attended_and_merged_once(extents: tuple[int, ...], precision: str) -> None:
    low = {"int8": {"precision": oa.Int8().precision}, "fp8": {"precision": oa.Fp8().precision}}
    p = long(extents, lse=precision == "exact", **low.get(precision, {}))
    plan = planned(p, HOPPER, has_tail)
    main, split, merge = plan.records[-3:]
    assert [r.spec.op for r in (main, split, merge)] == ["attention", "attention_split", "attention_combine"]
    assert plan.selection.spec is main.spec
    assert split.spec.block_m == main.spec.block_m
    assert (split.overlap, merge.overlap) == (False, True)
    assert {split.spec, merge.spec} <= {x.spec for x in plan.others}
    f = fields_of_record(split, ATTN_FWD_SPLIT_SM90 if precision == "exact" else ATTN_INT8_SPLIT_SM90)
    m, rows = fields_of_merge(merge), split.spec.block_m
    heads, blocks = p.batch * p.num_q_heads, -(-p.seqlen_q // rows)
    tiles, first, splits = (f[f"tiles.{name}"] for name in ("num_tiles", "first_tile", "num_splits"))
    # Whole rounds of the other kernel, which takes a head's last tile first.
    if precision == "exact":
        assert fields_of_record(main, ATTN_FWD_SM90)["tiles.num_items"] == first
    assert main.grid == (HOPPER.sm_count, 1, 1)
    assert first % HOPPER.sm_count == 0
    assert first + tiles == heads * blocks
    assert (f["tiles.pack"], f["fwd.num_q_heads"], f["fwd.seqlen_q"]) == (1, p.num_q_heads, p.seqlen_q)
    # SplitTiles::next and first_partial_row of split_tiles.cuh.
    written = {}
    for item in items_of(f, split.grid[0]):
        s, rest = divmod(item, tiles)
        tile = first + tiles - 1 - rest
        head, block = tile // blocks, blocks - 1 - tile % blocks
        place = (head + 1) * blocks - 1 - block
        partial = (s * tiles + place - first) * rows - block * rows
        for row in range(block * rows, min((block + 1) * rows, p.seqlen_q)):
            written[s, head, row] = partial + row
    assert len(written) == len(set(written.values()))
    assert {(head, row // rows) for _, head, row in written} == {
        (tile // blocks, blocks - 1 - tile % blocks) for tile in range(first, heads * blocks)
    }
    # attn_combine_sm80.
    assert (m["rows"], m["tile_rows"], m["first_tile"], m["blocks"]) == (tiles * rows, rows, first, blocks)
    assert m["num_columns"] == tiles * rows * p.head_dim_v // 4
    merged = {}
    for at in range(m["rows"]):
        tile = m["first_tile"] + at // rows
        head, query = tile // blocks, (blocks - 1 - tile % blocks) * rows + at % rows
        if query < m["num_queries"]:
            merged.update({(s, head, query): s * m["rows"] + at for s in range(splits)})
    assert merged == written
    # Memory: partial O, then bases and denominators of the LSE's own where it has them.
    assert max(written.values()) < splits * tiles * rows
    assert m["partial_ml"].offset - m["partial_o"].offset >= 4 * splits * tiles * rows * p.head_dim_v
    assert plan.workspace_bytes >= m["partial_ml"].offset + 8 * splits * tiles * rows


def test_lse_of_quantized_operands() -> None:
    plan = planned(long(TAILS[0], precision=oa.Int8().precision, lse=True), HOPPER, has_tail)
    assert [r.spec.op for r in plan.records[-3:]] == ["attention", "attention_split", "attention_combine_lse"]
    assert plan.records[-2].spec.lse


@pytest.mark.parametrize(
    "changes",
    [
        {"right": 0},
        {"left": 4000, "right": 4000},
        {"softcap": 30.0},
        {"softmax_scale": -1.0},
        {"mask": "bool"},
        {"precision": oa.Int8(smooth_q=True).precision},
    ],
    ids=str,
)
def test_calls_without_a_tail(changes: dict[str, Any]) -> None:
    """Tiles of other calls differ in length, or no kernel splits their keys."""
    p = long(TAILS[0])
    right, left = changes.pop("right", -1), changes.pop("left", -1)
    p = dataclasses.replace(p, window_left=left, window_right=right, **changes)
    assert not any(map(has_tail, candidates(p, HOPPER)))


def test_what_can_have_none() -> None:
    for extents in (
        (1, 66, 66, 192, 4096, 128),  # less than a round
        (3, 44, 44, 4 * 384, 4096, 128),  # whole rounds, of tiles of every size
    ):
        assert not any(map(has_tail, candidates(long(extents), HOPPER)))
    assert not any(map(has_tail, candidates(long(TAILS[0]), AMPERE)))


def test_a_long_call_has_its_tail_split() -> None:
    """56 tiles of 132 would take a round: by the model a split of theirs takes a part of it."""
    assert has_tail(choices(long(TAILS[0]), HOPPER)[0].candidate)


def test_a_forced_kernel_has_all_tiles() -> None:
    p = long(TAILS[0])
    name = "attn_fwd_sm90_bf16_d128_m192n64"
    for force in (name, f" {name}", f"attn_combine_sm80_bf16, {name}", f"layout_fp8_sm80_d64,{name}"):
        assert [r.spec.name for r in plan_attention(p, HOPPER, force).records] == [name]
    # A name of another operation is nothing to it; one that merges leaves nothing to merge.
    assert choices(p, HOPPER, "layout_fp8_sm80_d64")[0].candidate == choices(p, HOPPER)[0].candidate
    for force in ("attn_combine_sm80_fp16", "attn_combine_sm80_bf16"):
        assert not any(has_tail(choice.candidate) for choice in choices(p, HOPPER, force))


@pytest.mark.parametrize("heads", [132, 256, 512])
@pytest.mark.parametrize("rows", [64, 128])
def test_ctas_with_the_most_rows(heads: int, rows: int) -> None:
    """Of six tiles a head every CTA of 132 takes the same ones; 131 take them in turn."""

    def walked(count: int) -> int:
        """As PersistentItems walks: a head's last tile first, every second round backwards."""
        times, spans = [rows, 192, 192, 192, 192, 192] * heads, []
        for cta in range(count):
            places = (cta, count - 1 - cta)
            rounds = range(-(-len(times) // count))
            items = [n * count + places[n % 2] for n in rounds]
            spans.append(sum(times[item] for item in items if item < len(times)))
        return max(spans)

    for ctas in (129, 130, 131, 132):
        tiles, short = most_rows(heads, 6, rows, 192, ctas)
        assert 192 * tiles - (192 - rows) * short == walked(ctas)
    problem = long((heads, 1, 1, 5 * 192 + rows, 1000, 128))
    orders = list(other_orders(by_name("attn_fwd_sm90_bf16_d128_m192n64"), problem, HOPPER))
    assert orders == ([orders[0]] if orders else [])
    for order in orders:
        assert order.tiles == head_by_head(heads, 6)
        assert (order.ctas, order.spare) in ((131, 1), (130, 2), (129, 3))
        assert walked(order.ctas) == min(walked(n) for n in (129, 130, 131)) < 0.98 * walked(132)
    assert bool(orders) == (min(walked(n) for n in (129, 130, 131)) < 0.98 * walked(132))


def test_tiles_that_are_alike_take_all_ctas() -> None:
    row = by_name("attn_fwd_sm90_bf16_d128_m192n64")
    for queries in (192, 100, 6 * 192, 6 * 192 - 20):
        assert not list(other_orders(row, long((256, 1, 1, queries, 1000, 128)), HOPPER))


def test_short_sequences_are_shared_evenly() -> None:
    p = long((16, 16, 16, 1024, 1024, 128), precision=oa.Int8().precision)
    launches = planned(p, HOPPER, is_whole)
    assert next(r for r in launches.records if r.spec.op == "attention").grid == (131, 1, 1)
    assert fastest(p, HOPPER, is_whole).text.endswith(", 131 CTAs")
    assert np.prod(plan_attention(long((1, 4, 4, 192, 4096, 128)), HOPPER, None).records[0].grid) <= 132
