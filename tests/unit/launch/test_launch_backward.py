"""Launches of the backward without a GPU: which kernels run, on which memory, with which numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.launch.host_struct import At
from omniattn.launch.structs import ATTN_BWD, ATTN_BWD_MODS_SM90, ATTN_BWD_SM90, ATTN_BWD_USER_MOD
from omniattn.plan.backward import plan_backward
from omniattn.plan.engine import Launches
from omniattn.problems import AttentionStrides, Int8, Target
from omniattn.problems.backward import BackwardProblem, BackwardStrides
from omniattn.problems.score_mod import BlockMaskProblem, ScoreModProblem
from omniattn.runtime.record import LaunchRecord
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.select.test_select_backward import FORWARD, GPUS

AMPERE, HOPPER = GPUS[8, 0], GPUS[9, 0]
STRIDES = AttentionStrides((1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12), (13, 14), (0, 0, 0, 0))
MANY_ROWS = dataclasses.replace(STRIDES, mask=(0, 0, 15, 1))
OWN = BackwardStrides((21, 22, 23), (24, 25, 26), (27, 28, 29), (30, 31, 32), (33, 34), (0, 35, 36, 1))
ALL = ("dq", "dk", "dv")
MOD = ScoreModProblem("score", None, (), grad="1.0f")


def problem(wanted: tuple[str, ...] = ALL, *, deterministic: bool = False, dlse: bool = False, **fields: Any) -> Any:
    shape = {"batch": 2, "seqlen_q": 300, "seqlen_k": 500, "num_q_heads": 4, "num_kv_heads": 2, "strides": STRIDES}
    forward = dataclasses.replace(FORWARD, **{**shape, "head_dim": 120, **fields})
    return BackwardProblem(forward, wanted, dlse=dlse, deterministic=deterministic, strides=OWN)


def names(launches: Launches) -> list[str]:
    return [record.spec.name.replace("_bf16", "") for record in launches.records]


def of(record: LaunchRecord) -> dict[str, Any]:
    """Fields of AttnBwdParams, those of the forward as ``fwd.``."""
    if len(record.arguments) == ATTN_BWD.size:
        return fields_of_record(record, ATTN_BWD)
    layout, prefix = (ATTN_BWD_SM90, "bwd.") if record.tensor_maps else (ATTN_BWD_USER_MOD, "call.")
    if len(record.arguments) == ATTN_BWD_MODS_SM90.size:
        layout = ATTN_BWD_MODS_SM90
    return {name.removeprefix(prefix): value for name, value in fields_of_record(record, layout).items()}


PREPARE, FINISH = "attn_bwd_prepare_sm80", "attn_bwd_finish_sm80"
LISTS, BLOCKS = ("tile_kinds_sm80", "mask_list_sm80"), BlockMaskProblem((2, 1), (40, 0, 8, 1))


@pytest.mark.parametrize(
    ("target", "wanted", "more", "expected"),
    [
        (AMPERE, ALL, {}, [PREPARE, "attn_bwd_sm80_d128", FINISH]),
        (AMPERE, ("dk", "dv"), {}, [PREPARE, "attn_bwd_sm80_d128"]),
        (AMPERE, ("dq",), {}, [PREPARE, "attn_bwd_dq_sm80_d128"]),
        (AMPERE, ALL, {"deterministic": True}, [PREPARE, "attn_bwd_sm80_d128", "attn_bwd_dq_sm80_d128"]),
        (AMPERE, ("dsinks",), {"sinks": "float32"}, [PREPARE, FINISH]),
        (AMPERE, (*ALL, "dsinks"), {"sinks": "io", "deterministic": True},
         [PREPARE, "attn_bwd_sm80_d128", "attn_bwd_dq_sm80_d128", FINISH]),
        (GPUS[8, 9], ALL, {"head_dim": 64}, [PREPARE, "attn_bwd_sm80_d64_m64", FINISH]),
        (HOPPER, ALL, {}, [PREPARE, "attn_bwd_sm90_d128", f"{FINISH}_fragments"]),
        (HOPPER, ALL, {"varlen": True}, [PREPARE, "attn_bwd_sm90_d128_varlen", f"{FINISH}_fragments"]),
        (HOPPER, ("dk",), {"varlen": True}, [PREPARE, "attn_bwd_sm90_d128_varlen"]),
        (HOPPER, ALL, {"varlen": True, "deterministic": True},
         [PREPARE, "attn_bwd_sm90_d128_varlen_ordered", f"{FINISH}_fragments"]),
        (HOPPER, ALL, {"deterministic": True}, [PREPARE, "attn_bwd_sm90_d128_ordered", f"{FINISH}_fragments"]),
        (HOPPER, ALL, {"deterministic": True, "window_right": 0}, [PREPARE, "attn_bwd_sm90_d128_ordered"]),
        # Some query may see no key.
        (HOPPER, ALL, {"deterministic": True, "window_right": 0, "seqlen_k": 200},
         [PREPARE, "attn_bwd_sm90_d128_ordered", f"{FINISH}_fragments"]),
        (HOPPER, ("dk", "dv"), {"deterministic": True}, [PREPARE, "attn_bwd_sm90_d128"]),
        (HOPPER, ALL, {"deterministic": True, "softcap": 5.0},
         [PREPARE, "attn_bwd_sm90_d128_ordered_softcap", f"{FINISH}_fragments"]),
        (HOPPER, ALL, {"deterministic": True, "head_dim": 256},
         [PREPARE, "attn_bwd_dkdv_sm90_d256", "attn_bwd_dq_sm90_d256"]),
        (HOPPER, ALL, {"deterministic": True, "seqlen_q": 0}, [PREPARE, "attn_bwd_sm90_d128_ordered"]),
        (HOPPER, ALL, {"varlen": True, "head_dim": 256}, [PREPARE, "attn_bwd_sm80_d256", FINISH]),
        (HOPPER, ALL, {"varlen": True, "seqlen_q": 0}, [PREPARE, "attn_bwd_sm90_d128_varlen", f"{FINISH}_fragments"]),
        (HOPPER, ALL, {"varlen": True, "seqlen_k": 0}, [PREPARE, f"{FINISH}_fragments"]),
        (HOPPER, ALL, {"varlen": True, "batch": 0}, [PREPARE, "attn_bwd_sm90_d128_varlen", f"{FINISH}_fragments"]),
        (HOPPER, ALL, {"mask": "bool", "strides": MANY_ROWS}, [PREPARE, "attn_bwd_sm80_d128_mods", FINISH]),
        (HOPPER, ALL, {"mask": "io"}, [PREPARE, "attn_bwd_sm90_d128_keys", f"{FINISH}_fragments"]),
        (HOPPER, (*ALL, "dmask"), {"mask": "float32"}, [PREPARE, "attn_bwd_sm80_d128_dmask", FINISH]),
        (HOPPER, ALL, {"block_mask": BLOCKS}, [*LISTS, PREPARE, "attn_bwd_sm90_d128_blocks", f"{FINISH}_fragments"]),
        (HOPPER, ALL, {"block_mask": BLOCKS, "softcap": 5.0},
         [*LISTS, PREPARE, "attn_bwd_sm90_d128_softcap_blocks", f"{FINISH}_fragments"]),
        (HOPPER, ALL, {"block_mask": BLOCKS, "deterministic": True},
         [*LISTS, *LISTS, PREPARE, "attn_bwd_sm90_d128_blocks", "attn_bwd_dq_sm90_d128_blocks"]),
        (HOPPER, ALL, {"block_mask": BLOCKS, "head_dim": 256},
         [*LISTS, *LISTS, PREPARE, "attn_bwd_dkdv_sm90_d256_blocks", "attn_bwd_dq_sm90_d256_blocks"]),
        (HOPPER, ALL, {"block_mask": BLOCKS, "mask": "io"}, [*LISTS, PREPARE, "attn_bwd_sm80_d128_mods", FINISH]),
        (AMPERE, ALL, {"block_mask": BLOCKS, "head_dim": 64}, [*LISTS, PREPARE, "attn_bwd_sm80_d64_m64_mods", FINISH]),
        (AMPERE, ("dq",), {"block_mask": BLOCKS}, [*LISTS, PREPARE, "attn_bwd_dq_sm80_d128_mods"]),
        (AMPERE, ("dk",), {"block_mask": BLOCKS, "head_dim": 512},
         [*LISTS, PREPARE, "attn_bwd_wide_sm80_d512_s1_mods"]),
        (HOPPER, ALL, {"block_mask": BLOCKS, "seqlen_k": 0}, [PREPARE, f"{FINISH}_fragments"]),
        (HOPPER, ALL, {"block_mask": BLOCKS, "seqlen_q": 0}, [LISTS[1], PREPARE, "attn_bwd_sm90_d128_blocks"]),
        (AMPERE, ALL, {"seqlen_q": 0}, ["attn_bwd_sm80_d128"]),
        (AMPERE, ALL, {"seqlen_k": 0}, [PREPARE, FINISH]),
        (AMPERE, ALL, {"batch": 0}, []),
    ],
)  # fmt: skip
def test_which_kernels_run(target: Target, wanted: tuple[str, ...], more: dict[str, Any], expected: list[str]) -> None:
    launches = plan_backward(problem(wanted, **more), target, None)
    assert names(launches) == expected
    if launches.records:
        chosen = {selection.spec.name for selection in (launches.selection, *launches.others)}
        assert {record.spec.name for record in launches.records} <= chosen


def test_memory() -> None:
    launches = plan_backward(problem(dlse=True), AMPERE, None)
    prepare, main, finish = (of(record) for record in launches.records)
    rows = 2 * 384 * 4  # padded rows of all heads
    assert launches.workspace_bytes == 4 * rows * (2 + 128)
    for fields in (prepare, main, finish):
        assert [fields[name] for name in ("lse2", "delta", "dq_accum", "sink_partials")] == [
            At("workspace", 0), At("workspace", 4 * rows), At("workspace", 8 * rows), None,
        ]  # fmt: skip
        assert [fields[name] for name in ("d_o", "dlse", "dq", "dk", "dv", "dsinks", "dmask")] == [
            At("do"), At("dlse"), At("dq"), At("dk"), At("dv"), None, None,
        ]  # fmt: skip
        assert [fields[f"fwd.{name}"] for name in ("q", "k", "v", "o", "lse")] == [
            At(name) for name in ("q", "k", "v", "o", "lse")
        ]
        assert [fields[f"do_stride_{x}"] for x in "bsh"] == [21, 22, 23]
        assert [fields[f"dq_stride_{x}"] for x in "bsh"] == [24, 25, 26]
        assert [fields[f"dk_stride_{x}"] for x in "bsh"] == [27, 28, 29]
        assert [fields[f"dv_stride_{x}"] for x in "bsh"] == [30, 31, 32]
        assert (fields["dlse_stride_b"], fields["dlse_stride_h"]) == (33, 34)
        assert (fields["rows_stride_h"], fields["dq_columns"]) == (2 * 384, 128)
    assert main["num_n_blocks"] == 4
    assert [record.grid for record in launches.records] == [(24, 1, 1), (4 * 2 * 2, 1, 1), (24, 1, 1)]
    assert {record.threads for record in launches.records} == {256}


@pytest.mark.parametrize("more", [
    {"window_right": 0, "seqlen_k": 200}, {"window_left": 5, "window_right": 5, "seqlen_k": 200}, {"mask": "bool"},
    {"varlen": True}, {"seqlen_k": 0},
])  # fmt: skip
def test_rows_that_may_attend_to_nothing_have_a_place(more: dict[str, Any]) -> None:
    launches = plan_backward(problem(**more), HOPPER, None)
    without = plan_backward(problem(), HOPPER, None)
    assert all(of(record)["stray_do"] is not None for record in launches.records)
    assert all(of(record)["stray_do"] is None for record in without.records)


def test_memory_of_other_calls() -> None:
    rows = 2 * 384 * 4
    for wanted, more, columns, blocks in (
        (("dk", "dv"), {}, 0, 0),
        (("dq",), {}, 0, 0),
        (ALL, {"deterministic": True}, 0, 0),
        ((*ALL, "dsinks"), {"sinks": "float32"}, 128, rows // 128),
        (ALL, {"head_dim": 48}, 64, 0),
    ):
        launches = plan_backward(problem(wanted, **more), AMPERE, None)
        assert launches.workspace_bytes == 4 * rows * (2 + columns) + -(-4 * blocks // 256) * 256
    # Packed: 128 rows more a sequence, whatever their lengths are.
    launches = plan_backward(problem(varlen=True), AMPERE, None)
    rows = (384 + 2 * 128) * 4
    # And a counter behind delta, and a number for each 64 rows.
    assert launches.workspace_bytes == 4 * rows * (2 + 128) + 256 + -(-4 * rows // 64 // 256) * 256
    assert of(launches.records[1])["dq_accum"] == At("workspace", 8 * rows + 256)
    main = launches.records[1]
    assert main.grid == ((4 + 2 + 2) * 2, 1, 1)  # no batch: tiles of all sequences
    assert of(main)["fwd.cu_seqlens_k"] == At("cu_seqlens_k")


@pytest.mark.parametrize("target", [AMPERE, HOPPER], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("wanted", "more"),
    [(ALL, {"varlen": True}), ((*ALL, "dmask"), {"mask": "float32"}), (ALL, {"deterministic": True, "head_dim": 64})],
)
def test_without_heads_no_row_is_prepared(target: Target, wanted: tuple[str, ...], more: dict[str, Any]) -> None:
    """The kernel clears counters and gradients of masks, and reads neither LSE nor o, which have no elements."""
    launches = plan_backward(problem(wanted, num_q_heads=0, num_kv_heads=0, **more), target, None)
    prepared = [of(record) for record in launches.records if record.spec.name.startswith(PREPARE)]
    assert all(fields["rows_stride_h"] == 0 for fields in prepared)
    assert prepared or not (more.get("varlen") or "dmask" in wanted)
    some = plan_backward(problem(wanted, **more), target, None)
    assert of(next(r for r in some.records if r.spec.name.startswith(PREPARE)))["rows_stride_h"] > 0


def test_hopper_has_the_layout_of_its_accumulators() -> None:
    launches = plan_backward(problem(), HOPPER, None)
    _, main, _ = launches.records
    fields = of(main)
    assert fields["dq_columns"] == 128
    assert [fields[f"map_{name}"].operand for name in ("q", "k", "v", "do")] == ["q", "k", "v", "do"]
    assert main.grid[0] <= HOPPER.sm_count


def test_a_shared_gpu_hands_out_tiles() -> None:
    """Those of a list; others are drawn by the CTAs, of which there are as many as SMs."""
    shared = dataclasses.replace(HOPPER, sm_count=100, is_shared=True)
    more = {"batch": 1, "seqlen_q": 16384, "seqlen_k": 16384, "num_q_heads": 16, "num_kv_heads": 16, "head_dim": 128}
    for window in ({"window_right": 0}, {}):
        for deterministic in (False, True):
            record = plan_backward(problem(deterministic=deterministic, **more, **window), shared, None).records[1]
            items = fields_of_record(record, ATTN_BWD_SM90)["tiles.num_items"]
            assert items >= 16 * 64
            assert record.grid == ((100 if deterministic else items), 1, 1)


def test_launches_that_overlap() -> None:
    """The one-pass kernel and what follows it wait by themselves; nothing begins before what came before the call."""
    for fields, expected in (
        ({}, [False, True, True]),
        ({"deterministic": True}, [False, True, True]),
        ({"deterministic": True, "window_right": 0}, [False, True]),
        ({"deterministic": True, "softcap": 3.0}, [False, True, True]),
        ({"seqlen_q": 0}, [False]),
        ({"head_dim": 256}, [False, False, False]),
    ):
        launches = plan_backward(problem(**fields), HOPPER, None)
        assert [record.overlap for record in launches.records] == expected
    assert not any(record.overlap for record in plan_backward(problem(), AMPERE, None).records)


def test_order_of_dq() -> None:
    """deterministic=True: counters behind delta; sums are cleared only where a query may see no key."""
    rows = 2 * 384 * 4
    for fields, tiles, cleared in (
        ({}, 4 * 2 * 2, False),
        ({"window_right": 0}, 4 * 2 * 2, False),
        ({"window_left": 100, "window_right": 3}, 4 * 2 * 2, False),
        ({"seqlen_k": 120}, 1 * 2 * 2, False),
        ({"seqlen_k": 120, "window_right": 0}, 1 * 2 * 2, True),
        ({"varlen": True}, (4 + 2 + 2) * 2, True),
    ):
        launches = plan_backward(problem(deterministic=True, **fields), HOPPER, None)
        prepare, main, *finish = (of(record) for record in launches.records)
        # With causality, where every query sees a key, the kernel rounds its sums itself.
        finishes = "window_right" in fields and not cleared
        assert len(finish) == int(not finishes)
        assert main["dq"] == (At("dq") if finishes else None)
        if "varlen" in fields:
            rows = (384 + 2 * 128) * 4
        sums = At("workspace", 4 * rows + -(-4 * (rows + 1 + 2 * tiles) // 256) * 256)
        stray = -(-4 * rows // 64 // 256) * 256 if cleared else 0
        assert launches.workspace_bytes == sums.offset + 4 * rows * 128 + stray
        assert [x["dq_accum"] for x in (prepare, main)] == [sums if cleared else None, sums]
        assert all(x["dq_accum"] == sums for x in finish)
        assert {x["num_n_blocks"] * 2 * (1 if "varlen" in fields else 2) for x in (prepare, main)} == {tiles}
        assert launches.records[1].grid == (tiles, 1, 1)
        # All four heads are drawn in turn: there are few.
        assert [main[f"tiles.{name}"] for name in ("num_items", "num_pairs")] == [tiles, 0]
        assert main["tiles.num_tail_heads"] == (0 if "varlen" in fields else 4)
    plain, _, _ = (of(record) for record in plan_backward(problem(), HOPPER, None).records)
    assert plain["num_n_blocks"] == 0
    assert plain["dq_accum"] is not None


def test_copies_of_packed_sequences_end_with_them() -> None:
    """What a copy reads, worked out from the map and the coordinates of attention/bwd_roles.cuh."""
    launches = plan_backward(problem(varlen=True, window_right=0), HOPPER, None)
    main = launches.records[1]
    fields = of(main)
    blocks = 4 + 2 + 2
    assert [fields[f"tiles.{name}"] for name in ("num_items", "num_pairs", "num_tail_heads")] == [2 * blocks, 0, 0]
    assert main.grid == (2 * blocks, 1, 1)
    for name, rows, total, heads, (row_stride, head_stride) in (
        ("q", 64, 300, 4, (2, 3)), ("k", 128, 500, 2, (5, 6)), ("v", 128, 500, 2, (8, 9)), ("do", 64, 300, 4, (22, 23)),
    ):  # fmt: skip
        of_operand = fields[f"map_{name}"]
        assert (of_operand.operand, of_operand.box) == (name, (64, rows, 1, 1))
        strides = tuple(2 * stride for stride in (row_stride, head_stride))
        assert of_operand.strides_bytes == (strides[0], strides[1], strides[0])
        assert of_operand.dims == (120, rows, heads, total + 1)
        for begin, end in ((0, total), (0, 1), (17, 17 + rows), (3, 100), (total - 1, total)):
            for first in range(begin, end, rows):
                last = min(first + rows, end)
                along, at = first + rows - last, last
                assert at < of_operand.dims[3]
                read = [
                    of_operand.add + row * of_operand.strides_bytes[0] + at * of_operand.strides_bytes[2]
                    if row < of_operand.dims[1]
                    else None
                    for row in range(along, along + rows)
                ]
                kept = [row * strides[0] for row in range(first, last)]
                assert read == [*kept, *[None] * (rows - len(kept))]


@pytest.mark.parametrize("varlen", [False, True])
def test_softcap_on_hopper(varlen: bool) -> None:
    _, main, _ = plan_backward(problem(softcap=30.0, softmax_scale=-0.5, varlen=varlen), HOPPER, None).records
    assert main.spec.name == "attn_bwd_sm90_bf16_d128" + "_varlen" * varlen + "_softcap"
    fields = of(main)
    factor2 = 30.0 * math.log2(math.e)
    assert fields["mods.factor2"] == pytest.approx(factor2)
    assert fields["inv_factor2"] == pytest.approx(1 / factor2)
    assert fields["mods.cap_scale"] == pytest.approx(-0.5 / 30.0)
    # cap * log2(e) * tanh(s * scale / cap), beside the polynomial.
    for s in (0.0, 0.7, -12.0, fields["mods.cap_limit"]):
        odd = sum(a * s ** (2 * i + 1) for i, a in enumerate(fields["mods.cap_poly"]))
        assert odd == pytest.approx(factor2 * math.tanh(-0.5 * s / 30.0), rel=2e-6)


def test_strides_that_no_tensor_map_describes_and_scales() -> None:
    for fields in ({"tensor_maps": False}, {"softmax_scale": 0.0}, {"softmax_scale": 1e-60}):
        assert names(plan_backward(problem(**fields), HOPPER, None))[1] == "attn_bwd_sm80_d128"
    fields = of(plan_backward(problem(softmax_scale=0.0), AMPERE, None).records[1])
    assert fields["fwd.softmax_scale"] == 0.0


def test_score_mods_are_compiled_in() -> None:
    launches = plan_backward(problem(score_mod=MOD), HOPPER, None)
    _, main, _ = launches.records
    assert len(main.arguments) == ATTN_BWD_USER_MOD.size
    assert "_mods" in main.spec.name
    assert main.spec.prebuild == ()
    assert "with score_mod compiled in, which no wheel carries" in launches.selection.why
    deterministic = plan_backward(problem(score_mod=MOD, deterministic=True), HOPPER, None)
    assert [len(r.arguments) == ATTN_BWD_USER_MOD.size for r in deterministic.records] == [False, True, True]


def test_what_is_refused() -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"precision": Int8().precision}, UnsupportedError, "no gradients of precision='int8'"),
        ({"score_mod": dataclasses.replace(MOD, grad=None)}, ArgumentError, "argument 'score_mod': expected ScoreMod"),
        ({"wanted": ("dmask",)}, ArgumentError, "argument 'dmask': expected an additive mask"),
        ({"wanted": ("dmask",), "mask": "bool"}, ArgumentError, "mask of kind 'bool'"),
        ({"wanted": ("dmask",), "mask": "io", "deterministic": True}, UnsupportedError, "a mask that is broadcast"),
        ({"batch": 1 << 24, "seqlen_q": 1, "num_q_heads": 128, "num_kv_heads": 128}, UnsupportedError, "padded rows"),
    ]
    for fields, error, text in cases:
        with pytest.raises(error, match="attention_backward") as raised:
            plan_backward(problem(**fields), AMPERE, None)
        assert text in str(raised.value)
    with pytest.raises(UnsupportedError, match="attention_varlen_backward"):
        plan_backward(problem(varlen=True, precision=Int8().precision), AMPERE, None)


def test_dmask_of_full_shape_is_deterministic() -> None:
    own = dataclasses.replace(OWN, dmask=(600000, 150000, 500, 1))
    call = dataclasses.replace(problem(("dmask",), mask="float32", deterministic=True), strides=own)
    _, main = plan_backward(call, AMPERE, None).records
    fields = of(main)
    assert fields["dmask"] == At("dmask")
    assert [fields[f"dmask_stride_{x}"] for x in "bhqk"] == [600000, 150000, 500, 1]
