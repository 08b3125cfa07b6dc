"""Small tiles of Hopper's kernel with scores: what is launched, which calls they take. No GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from omniattn.errors import ArgumentError
from omniattn.launch.structs import ATTN_FWD_MODS_SM90
from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionProblem
from omniattn.problems.score_mod import BlockMaskProblem, ScoreModProblem
from omniattn.registry import REGISTRY
from omniattn.select import choices
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.launch.test_launch_score_mods import BATCH, FULL, HEADS, HOPPER, KEYS, ROWS, problem

#: Mask, its strides, kind of the row.
CALLS = [
    ("bool", FULL, "masks"),
    ("bool", (KEYS, 0, 0, 1), "softcap"),
    ("io", (KEYS, 0, 0, 1), "masks"),
    ("io", FULL, "bias16"),
    ("float32", FULL, "bias32"),
    ("none", (0, 0, 0, 0), "softcap"),
]


def name_of(kind: str) -> str:
    return f"attn_fwd_sm90_bf16_d128_m64n64_{kind}"


def call(mask: str, strides: tuple[int, int, int, int], kind: str, **changes: Any) -> AttentionProblem:
    capped = {"softcap": 5.0} if kind == "softcap" else {}
    return problem(strides, mask=mask, mask_map=True, **{**capped, **changes})


@pytest.mark.parametrize(("mask", "strides", "kind"), CALLS)
def test_a_mask_is_packed_and_not_listed(mask: str, strides: tuple[int, int, int, int], kind: str) -> None:
    one = call(mask, strides, kind)
    launches = plan_attention(one, HOPPER, name_of(kind))
    packs = one.packs_mask
    assert [record.spec.op for record in launches.records] == ["mask_pack"] * packs + ["attention"]
    assert [spec.spec.op for spec in launches.others] == ["mask_pack"] * packs
    record = launches.records[-1]
    assert (record.threads, record.overlap) == (160, packs)
    assert record.grid == (min(BATCH * HEADS * -(-ROWS // 64), 2 * 132), 1, 1)
    fields = fields_of_record(record, ATTN_FWD_MODS_SM90)
    assert fields["mods.lists"] is None
    assert (fields["mods.tiles"] is not None) == packs
    if packs:
        assert fields["mods.tiles"].operand == "workspace"
        assert launches.workspace_bytes > fields["mods.tiles"].offset


def test_without_keys_nothing_overlaps() -> None:
    one = call("bool", FULL, "masks", seqlen_k=0)
    (record,) = plan_attention(one, HOPPER, name_of("masks")).records
    assert not record.overlap


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_mask": BlockMaskProblem((1, 1), (0, 0, 0, 0))}, "visits every tile"),
        ({"score_mod": ScoreModProblem("score", None, ())}, "no score_mod"),
        ({"varlen": True}, "no packed sequences"),
    ],
    ids=str,
)
def test_what_they_do_not_take(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        choices(dataclasses.replace(call("none", (0,) * 4, "softcap"), **changes), HOPPER, name_of("softcap"))


def test_they_lack_lists_alone() -> None:
    for spec in REGISTRY:
        if spec.masks in ("packed", "tiles") and not spec.lists:
            large = next(
                row
                for row in REGISTRY
                if row.lists and (row.op, row.sequences) == (spec.op, "dense")
                if (row.family, row.dtype, row.head_dim, row.own_head_dim_v, row.softcap, row.masks, row.bias_bytes)
                == (spec.family, spec.dtype, spec.head_dim, 0, spec.softcap, spec.masks, spec.bias_bytes)
            )
            assert large.block_m > spec.block_m == 64
            assert dict(spec.defines)["MASK_LISTS"] == "0"
