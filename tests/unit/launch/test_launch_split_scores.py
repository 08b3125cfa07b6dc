"""Keys split over CTAs by the kernels of mma.sync and by Hopper's with scores: what they are told, without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from omniattn.errors import ArgumentError
from omniattn.launch import score_mods
from omniattn.launch.host_struct import At
from omniattn.launch.structs import (
    ATTN_FWD_SPLIT_MODS_SM80,
    ATTN_FWD_SPLIT_MODS_SM90,
    ATTN_FWD_SPLIT_SM80,
    ATTN_FWD_SPLIT_USER_MOD_SM80,
    ATTN_FWD_SPLIT_USER_MOD_SM90,
    MASK_LIST,
    MASK_PACK,
)
from omniattn.plan.attention import plan_attention
from omniattn.plan.stages import launches_of
from omniattn.problems import AttentionProblem, Target
from omniattn.problems.score_mod import BlockMaskProblem, ModArray, ScoreModProblem
from omniattn.problems.split import SplitKV, StreamK, gqa_packing_on_mma_sync
from omniattn.registry import by_name
from omniattn.runtime.record import TensorMap
from omniattn.select import Candidate, MaskInput, candidates, choices
from tests.unit.launch.launch_fakes import fields_of_merge, fields_of_record
from tests.unit.launch.test_launch_split import AMPERE, BLACKWELL, HOPPER, problem_of
from tests.unit.select.shape_plans import planned


def heads_in_tiles(heads: int, *, of_hopper: bool, more: Callable[[Candidate], bool] = lambda way: True) -> Any:
    """Ways with their keys in several parts, of tiles that so many heads share."""

    def is_one(way: Candidate) -> bool:
        divided = isinstance(way.schedule, StreamK) or (isinstance(way.schedule, SplitKV) and way.schedule.splits > 1)
        return divided and way.row.arch_specific == of_hopper and way.pack_gqa.heads == heads and more(way)

    return is_one


@pytest.mark.parametrize("target", [HOPPER, AMPERE, BLACKWELL], ids=lambda target: str(target.cc))
@pytest.mark.parametrize(
    "changes",
    [{}, {"varlen": True}, {"softcap": 30.0}, {"mask": "bool"}, {"softmax_scale": -1.0}, {"tensor_maps": False}],
    ids=str,
)
def test_on_mma_sync(changes: dict[str, Any], target: Target) -> None:
    """On other GPUs everything, on Hopper what tensor maps do not describe: a CTA a tile, head and split."""
    p = dataclasses.replace(problem_of(1, 16, 32768, 32, 8, d=128, dtype="bfloat16"), **changes)
    own = target == HOPPER and "tensor_maps" not in changes
    assert choices(p, target)[0].candidate.row.op == "attention_split"
    launches = planned(p, target, heads_in_tiles(4 if not p.varlen or own else 1, of_hopper=own))
    (record,) = (r for r in launches.records if r.spec.op == "attention_split")
    assert record.spec.arch_specific == own
    assert launches.records[-1].spec.op == "attention_combine" + "_packed" * (own and p.varlen)
    if own:
        return
    assert record.spec.score_mods == p.score_mods
    splits = record.grid[1]
    assert 2 <= splits <= 64
    pack = 1 if p.varlen else 4
    assert record.grid[0] == 32 // pack * (1 + (3 if p.varlen else 0))
    layout = ATTN_FWD_SPLIT_MODS_SM80 if p.score_mods else ATTN_FWD_SPLIT_SM80
    f, merged = fields_of_record(record, layout), fields_of_merge(launches.records[-1])
    assert [merged[name] for name in ("num_splits", "heads", "rows", "pack")] == [splits, 32 // pack, 16 * pack, pack]
    assert all(merged[name] == f[name] for name in ("partial_o", "partial_ml"))
    prefix = "call.fwd." if p.score_mods else "call."
    assert f["pack_log2"] == pack.bit_length() - 1
    assert [f[f"{prefix}{name}"] for name in ("seqlen_q", "num_q_heads")] == [16 * pack, 32 // pack]
    if p.mask != "none":
        assert f[f"{prefix}mask_rows"] == 16 * pack
    assert f[f"{prefix}lse"] is None
    assert f[f"{prefix}sinks"] is None
    needed = 4 * 32 * 16 * splits * 128
    assert f["partial_ml"].offset - f["partial_o"].offset >= needed
    assert launches.workspace_bytes >= f["partial_ml"].offset + 8 * 32 * 16 * splits


@pytest.mark.parametrize(
    ("queries", "heads", "changes", "expected"),
    [
        (16, (32, 8), {}, (4, 4)),
        (1, (32, 8), {}, (4, 4)),
        (56, (16, 2), {}, (8, 8)),
        (64, (32, 8), {}, (1, 1)),  # as many tiles either way
        (100, (32, 8), {}, (4, 4)),
        (16, (8, 8), {}, (1, 1)),
        (8, (7, 1), {}, (7, 8)),
        (16, (28, 4), {}, (7, 8)),
        (64, (28, 4), {}, (1, 1)),
        (16, (40, 8), {}, (5, 8)),
        (16, (24, 4), {}, (3, 4)),
        (8, (24, 4), {}, (6, 8)),
        (21, (24, 4), {}, (2, 2)),
        (4, (64, 2), {}, (8, 8)),
        (16, (32, 8), {"varlen": True}, (1, 1)),
        (16, (32, 8), {"block_mask": BlockMaskProblem((64, 64), (0, 0, 512, 1))}, (4, 4)),
        (16, (32, 8), {"block_mask": BlockMaskProblem((64, 64), (0, 512, 512, 1))}, (1, 1)),
        (16, (32, 8), {"score_mod": ScoreModProblem("score + h", "k > b", ())}, (4, 4)),
        (16, (32, 8), {"score_mod": ScoreModProblem("score", "k > h", ())}, (1, 1)),
    ],
    ids=str,
)
def test_heads_that_share_a_tile(
    queries: int, heads: tuple[int, int], changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    p = dataclasses.replace(problem_of(1, queries, 32768, *heads, d=128, dtype="bfloat16"), **changes)
    assert gqa_packing_on_mma_sync(p, 64) == expected


@pytest.mark.parametrize(
    ("extents", "pack_gqa"),
    [
        ((64, 32, 8, 1, 1024), (4, 4)),
        ((32, 32, 8, 4, 4096), (4, 4)),
        ((64, 28, 4, 4, 4096), (7, 8)),
        ((32, 64, 8, 8, 8192), (8, 8)),
    ],
)
@pytest.mark.parametrize("changes", [{}, {"softcap": 30.0}], ids=["plain", "softcap"])
def test_heads_share_tiles_where_the_gpu_is_busy(
    extents: tuple[int, ...], pack_gqa: tuple[int, int], changes: dict[str, Any]
) -> None:
    """One split: K and V are read once for the heads of a kv head."""
    b, hq, hk, sq, sk = extents
    p = dataclasses.replace(problem_of(b, sq, sk, hq, hk, d=128, dtype="bfloat16"), **changes)
    ways = [way for way in candidates(p, HOPPER) if way.row.op == "attention_split"]
    assert (pack_gqa, SplitKV(1)) in {(way.pack_gqa, way.schedule) for way in ways}


def test_heads_with_lists_of_their_own() -> None:
    """Bits are found by the head of a row; a list that two heads do not share would hide what one of them sees."""
    p = dataclasses.replace(problem_of(1, 16, 32768, 32, 8, d=128, dtype="bfloat16"), mask="bool")
    assert p.strides is not None
    for of_head, listed in ((0, True), (16 * 32768, False)):
        of_mask = dataclasses.replace(p.strides, mask=(0, of_head, 32768, 1))
        packed = heads_in_tiles(4, of_hopper=False, more=lambda way: way.mask is not MaskInput.IN_PLACE)
        *before, record, _ = planned(dataclasses.replace(p, strides=of_mask), AMPERE, packed).records
        assert [r.spec.op for r in before] == ["mask_pack", "mask_list"][: 1 + listed]
        if listed:  # of the queries of a tile, of which there are fewer than rows
            of_list = fields_of_record(before[1], MASK_LIST)
            assert (of_list["block_m"], of_list["num_m_blocks"]) == (16, 1)
        f = fields_of_record(record, ATTN_FWD_SPLIT_MODS_SM80)
        assert (f["call.mods.lists"] is not None) == listed
        assert (f["call.mods.tiles"] is not None, f["pack_log2"]) == (True, 2)
        assert (f["call.mods.tiles_stride_h"] != 0) != listed


@pytest.mark.parametrize(
    "changes", [{"varlen": True}, {"softcap": 30.0}, {"mask": "bool"}, {"softmax_scale": -1.0}, {"tensor_maps": False}]
)
def test_what_hopper_does_not_split(changes: dict[str, Any]) -> None:
    p = dataclasses.replace(problem_of(1, 16, 32768, 32, 8, d=128, dtype="bfloat16"), **changes)
    with pytest.raises(ArgumentError):
        plan_attention(p, HOPPER, "attn_fwd_sm90_bf16_d128_m128n128_split")


def keys_of_heads(sq: int, sk: int, **changes: Any) -> AttentionProblem:
    p = problem_of(1, sq, sk, 32, 4, d=80, dtype="bfloat16")
    assert p.strides is not None
    of_mask = dataclasses.replace(p.strides, mask=(0, sk, 0, 1))
    return dataclasses.replace(p, **({"mask": "io", "keys_map": True, "strides": of_mask} | changes))


@pytest.mark.parametrize(("sq", "sk"), [(32, 32768), (64, 4096), (2, 1024)])
def test_numbers_a_key_of_each_head_are_read_as_tiles(sq: int, sk: int) -> None:
    """So that heads share the rows of a tile; the map's stride between queries is 0."""
    shared = [way for way in candidates(keys_of_heads(sq, sk), HOPPER) if way.pack_gqa.heads == way.pack_gqa.pack > 1]
    as_tiles = [way for way in shared if way.mask is MaskInput.AS_TILES and way.row.head_dim == 96]
    launches = launches_of(as_tiles[0], keys_of_heads(sq, sk), HOPPER, None)
    main = next(r for r in launches.records if r.spec.op == "attention_split")
    assert main.spec.name.endswith("_split_bias16")
    f = fields_of_record(main, ATTN_FWD_SPLIT_MODS_SM90)
    heads = f["tiles.pack_heads"]
    assert heads == f["tiles.pack"] > 1
    assert f["mods.flags"] == score_mods.BIAS
    bias = next(m for m in main.tensor_maps if m.operand == "mask")
    assert bias.dims[1:] == (heads, sq, 32 // heads, 1)
    assert bias.strides_bytes[:3] == (2 * sk, 0, 2 * sk * heads)


@pytest.mark.parametrize(
    "changes", [{"keys_map": False}, {"mask": "bool"}, {"score_mod": ScoreModProblem("score", None, ())}], ids=str
)
def test_other_masks_of_keys_are_packed(changes: dict[str, Any]) -> None:
    for p, target in ((keys_of_heads(32, 32768, **changes), HOPPER), (keys_of_heads(32, 32768), AMPERE)):
        assert all(choice.candidate.mask is not MaskInput.AS_TILES for choice in choices(p, target))


def test_a_kernel_that_packs_them_can_be_forced() -> None:
    name = "attn_fwd_sm90_bf16_d96_m192n64_split_masks"
    launches = plan_attention(keys_of_heads(32, 32768), HOPPER, name)
    assert launches.selection.spec.name == name
    assert launches.records[0].spec.op == "mask_pack"


def test_maps_of_masks_without_a_stride_between_queries_have_none() -> None:
    """Were it 16 bytes, rows would be read that are others', and what lies behind the mask."""
    p = keys_of_heads(64, 1024, batch=64, keys_as_tiles=True, mask_map=True)
    spec = by_name("attn_fwd_sm90_bf16_d96_m192n64_bias16")
    found = score_mods.bias_map(spec, p, TensorMap("q", 0, p.dtype, (64,), (), (64,)))
    assert (found.dims, found.strides_bytes) == ((1024, 64, 32, 1), (0, 2048, 16))


_ALIBI = ScoreModProblem("score + x[h] * (k - q)", None, (ModArray("x", "float32", (32,), (1,)),))


@pytest.mark.parametrize(
    ("changes", "lists"),
    [
        ({"score_mod": _ALIBI}, False),
        ({"score_mod": dataclasses.replace(_ALIBI, mask="k % 3 == 0")}, True),
        ({"block_mask": BlockMaskProblem((1, 2), (0, 0, 256, 1))}, True),
        ({"block_mask": BlockMaskProblem((1, 2), (0, 0, 256, 1)), "score_mod": _ALIBI}, True),
        ({"score_mod": _ALIBI, "mask": "bool"}, True),
        ({"score_mod": _ALIBI, "varlen": True}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["Hopper", "Ampere"])
def test_modified_scores(changes: dict[str, Any], lists: bool, target: Target) -> None:
    """A CTA a tile, head and split; what is found out about tiles is listed before."""
    p = dataclasses.replace(problem_of(1, 16, 32768, 32, 8, d=128, dtype="bfloat16"), **changes)
    ways = heads_in_tiles(
        4 if not p.varlen else 1, of_hopper=False, more=lambda way: (way.mask is MaskInput.LISTED) == lists
    )
    launches = planned(p, target, ways)
    *before, record, merge = launches.records
    assert record.spec.name.startswith("attn_fwd_sm80_bf16_d128_split_mods")
    assert record.spec is launches.selection.spec
    assert merge.spec.op == "attention_combine"
    assert [r.spec.op for r in before][-1:] == (["mask_list"] if lists else [])
    modified = p.score_mod is not None
    assert bool(record.spec.generated) == modified
    assert all(bool(r.spec.generated) == modified for r in before if r.spec.op == "tile_kinds")
    f = fields_of_record(record, ATTN_FWD_SPLIT_USER_MOD_SM80 if modified else ATTN_FWD_SPLIT_MODS_SM80)
    call = "call.call." if modified else "call."
    assert (f[f"{call}mods.lists"] is not None) == lists
    assert f[f"{call}fwd.seqlen_k"] == 32768
    assert f["partial_ml"].offset - f["partial_o"].offset >= 4 * 32 * 16 * record.grid[1] * 128
    if lists:
        assert f["partial_o"].offset > f[f"{call}mods.lists"].offset
    if modified:
        assert f["call.arrays.data"][0] == At("score_mod.x")


@pytest.mark.parametrize(
    ("queries", "changes", "kernel", "pack_gqa"),
    [
        (16, {"softcap": 30.0}, "m192n64_split_softcap", (4, 4)),
        (16, {"mask": "bool"}, "m192n64_split_masks", (4, 4)),
        (64, {"softcap": 30.0}, "m192n64_split_softcap", (2, 2)),
        (192, {"softmax_scale": -1.0}, "m192n64_split_masks", (1, 1)),
        (128, {"mask": "bool"}, "m192n64_split_masks", (1, 1)),
        (512, {"mask": "bool", "softcap": 30.0}, "m192n64_split_softcap", (4, 4)),
        (256, {"mask": "io", "mask_map": True}, "m192n64_split_bias16", (2, 2)),
        (256, {"mask": "float32", "mask_map": True}, "m192n64_split_bias32", (2, 2)),
        (256, {"mask": "io", "mask_map": False}, "split_mods", (1, 1)),
        (128, {"score_mod": _ALIBI}, "m192n64_split_masks_mod", (1, 1)),
        (128, {"block_mask": BlockMaskProblem((128, 128), (0, 0, 256, 1))}, "m192n64_split_masks", (1, 1)),
        (16, {"score_mod": _ALIBI}, "split_mods", (4, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("by_head", [False, True], ids=["one mask", "a mask a head"])
def test_scores_on_wgmma(
    queries: int, changes: dict[str, Any], kernel: str, pack_gqa: tuple[int, int], by_head: bool
) -> None:
    """Lists and bits of the rows of a tile, or tiles of a bias, partial results in place of o and the LSE."""
    p = dataclasses.replace(problem_of(1, queries, 32768, 32, 8, d=128, dtype="bfloat16"), **changes)
    assert p.strides is not None
    of_head = queries * 32768 if by_head else 0
    if p.mask != "none":
        p = dataclasses.replace(p, strides=dataclasses.replace(p.strides, mask=(0, of_head, 32768, 1)))
    ways = heads_in_tiles(
        pack_gqa[0], of_hopper="m192" in kernel, more=lambda way: way.row.name.endswith(kernel.removesuffix("_mod"))
    )
    *before, record, merge = planned(p, HOPPER, ways).records
    assert kernel in record.spec.name
    assert merge.spec.op == "attention_combine"
    merged = fields_of_merge(merge)
    heads, pack = pack_gqa
    assert [merged[x] for x in ("heads", "rows", "pack", "pack_heads")] == [32 // heads, queries * pack, pack, heads]
    if not record.spec.arch_specific:
        return
    layout = ATTN_FWD_SPLIT_MODS_SM90 if p.score_mod is None else ATTN_FWD_SPLIT_USER_MOD_SM90
    f, rows = fields_of_record(record, layout), queries * pack
    assert [f[f"tiles.{x}"] for x in ("pack", "pack_heads", "num_queries", "lead_rows")] == [pack, heads, queries, 0]
    assert [f[f"fwd.{name}"] for name in ("seqlen_q", "num_q_heads", "lse")] == [rows, 32 // heads, None]
    assert all(merged[name] == f[name] for name in ("partial_o", "partial_ml"))
    assert f["tiles.num_splits"] == merged["num_splits"] > 1
    found = {r.spec.op: r for r in before}
    assert (f["mods.lists"] is not None) == ("mask_list" in found) == (p.mask == "bool" or p.block_mask is not None)
    if "mask_list" in found:
        listed = fields_of_record(found["mask_list"], MASK_LIST)
        assert [listed[name] for name in ("block_m", "seqlen_q", "pack")] == [192, rows, pack]
    if p.mask == "bool":
        packed = fields_of_record(found["mask_pack"], MASK_PACK)
        assert [packed[name] for name in ("mask_heads", "rows")] == [32 // heads if by_head else 1, rows]
        assert [packed[name] for name in ("pack_log2", "pack_heads")] == [pack.bit_length() - 1, heads]
        assert (f["mods.tiles_stride_h"] != 0) == by_head
    if p.mask in ("io", "float32"):
        bias = next(m for m in record.tensor_maps if m.operand == "mask")
        size = 2 if p.mask == "io" else 4
        assert bias.dims == (32768, heads, queries, 32 // heads if by_head else 1, 1)
        assert bias.box == (128 // size, pack, 192 // pack, 1, 1)
        assert bias.strides_bytes[:2] == (size * of_head, size * 32768)


@pytest.mark.parametrize("head_dim", [40, 64, 72, 96, 128, 192, 256])
def test_plain_calls_take_no_rows_with_scores(head_dim: int) -> None:
    """Which the model of times knows nothing against."""
    for queries, keys, heads in ((16, 32768, (32, 8)), (64, 1024, (24, 8)), (200, 8192, (8, 8)), (2048, 16384, (8, 8))):
        p = problem_of(1, queries, keys, *heads, d=head_dim, dtype="bfloat16")
        for target in (HOPPER, AMPERE):
            for record in plan_attention(p, target, None).records:
                assert not record.spec.score_mods
