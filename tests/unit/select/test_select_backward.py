"""Selection of the kernels of the backward, with no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.problems import UNLIMITED, AttentionProblem, AttentionStrides, Target
from omniattn.problems.backward import BackwardProblem
from omniattn.problems.score_mod import ScoreModProblem
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.select import select_backward, select_backward_rows, select_dq
from omniattn.select.orders import order_of_keys, order_of_queries

GPUS = {
    (8, 0): Target((8, 0), 163 << 10, 108),
    (8, 6): Target((8, 6), 99 << 10, 84),
    (8, 9): Target((8, 9), 99 << 10, 142),
    (9, 0): Target((9, 0), 227 << 10, 132),
    (10, 0): Target((10, 0), 227 << 10, 148),
    (12, 0): Target((12, 0), 99 << 10, 170),
}
FORWARD = AttentionProblem(
    dtype="bfloat16",
    batch=1,
    seqlen_q=8,
    seqlen_k=8,
    num_q_heads=1,
    num_kv_heads=1,
    head_dim=64,
    window_left=UNLIMITED,
    window_right=UNLIMITED,
    softmax_scale=0.125,
    softcap=0.0,
    mask="none",
    sinks="none",
    varlen=False,
    lse=True,
)
#: Masks with one row for all queries, and with a row for each.
ONE_ROW = AttentionStrides((0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0), (8, 0, 0, 1))
MANY_ROWS = dataclasses.replace(ONE_ROW, mask=(64, 0, 8, 1))
MODS: list[dict[str, Any]] = [
    {"softcap": 30.0},
    {"mask": "bool"},
    {"mask": "float32"},
    {"mask": "io"},
    {"score_mod": ScoreModProblem("score", None, (), grad="1.0f")},
]
NO_MODS: list[dict[str, Any]] = [
    {},
    {"window_right": 0},
    {"sinks": "float32"},
    {"varlen": True},
    {"tensor_maps": False},
    {"softmax_scale": 0.0},
    {"softmax_scale": -0.5},
]


def problem(wanted: tuple[str, ...] = ("dq", "dk", "dv"), **fields: Any) -> BackwardProblem:
    return BackwardProblem(dataclasses.replace(FORWARD, **fields), wanted)


@pytest.mark.parametrize("target", GPUS.values(), ids=lambda t: f"sm_{t.cc[0]}{t.cc[1]}")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_problem_gets_rows_that_serve_it(target: Target, dtype: str) -> None:
    for head_dim in range(8, 257, 8):
        for fields in (*NO_MODS, *MODS):
            call = problem(dtype=dtype, head_dim=head_dim, **fields)
            for select in (select_backward, select_dq):
                found = select(call, target)
                spec = found.spec
                assert spec.dtype == dtype
                assert spec.head_dim >= head_dim
                assert spec.smem_bytes <= target.max_smem
                assert spec.min_arch == target.cc if spec.arch_specific else spec.min_arch <= target.cc
                assert spec.score_mods == (fields in MODS)
                assert not spec.dmask
                assert str(head_dim) in "".join(found.why)


@pytest.mark.parametrize(
    ("cc", "head_dim", "fields", "name"),
    [
        ((8, 0), 64, {}, "attn_bwd_joint_sm80_bf16_d64"),
        ((8, 0), 128, {}, "attn_bwd_sm80_bf16_d128"),
        ((8, 6), 64, {}, "attn_bwd_sm80_bf16_d64_m64"),
        ((8, 9), 128, {}, "attn_bwd_sm80_bf16_d128_m32"),
        ((12, 0), 128, {}, "attn_bwd_sm80_bf16_d128_m32"),
        ((12, 0), 72, {}, "attn_bwd_sm80_bf16_d96_n64"),
        ((9, 0), 64, {}, "attn_bwd_sm90_bf16_d64"),
        ((9, 0), 128, {"dtype": "float16"}, "attn_bwd_sm90_fp16_d128"),
        ((9, 0), 128, {"varlen": True}, "attn_bwd_sm90_bf16_d128_varlen"),
        ((9, 0), 40, {"varlen": True, "window_right": 0, "dtype": "float16"}, "attn_bwd_sm90_fp16_d64_varlen"),
        ((9, 0), 128, {"varlen": True, "tensor_maps": False}, "attn_bwd_sm80_bf16_d128"),
        ((9, 0), 64, {"varlen": True, "softcap": 5.0}, "attn_bwd_sm90_bf16_d64_varlen_softcap"),
        ((9, 0), 128, {"softcap": 5.0, "softmax_scale": -1.0}, "attn_bwd_sm90_bf16_d128_softcap"),
        ((9, 0), 192, {"softcap": 5.0}, "attn_bwd_sm80_bf16_d192_mods"),
        ((9, 0), 64, {"softcap": 5.0, "mask": "bool"}, "attn_bwd_joint_sm80_bf16_d64_mods"),
        ((9, 0), 64, {"softcap": 5.0, "softmax_scale": 0.0}, "attn_bwd_joint_sm80_bf16_d64_mods"),
        ((9, 0), 64, {"varlen": True, "batch": 1 << 30, "num_q_heads": 2}, "attn_bwd_joint_sm80_bf16_d64"),
        ((9, 0), 128, {"tensor_maps": False}, "attn_bwd_sm80_bf16_d128"),
        ((9, 0), 128, {"softmax_scale": 0.0}, "attn_bwd_sm80_bf16_d128"),
        ((9, 0), 128, {"softmax_scale": -1.0}, "attn_bwd_sm90_bf16_d128"),
        ((9, 0), 64, {"softcap": 5.0}, "attn_bwd_sm90_bf16_d64_softcap"),
        ((9, 0), 64, {"mask": "bool", "window_right": 0}, "attn_bwd_joint_sm80_bf16_d64_mods"),
        ((9, 0), 64, {"mask": "bool", "strides": ONE_ROW}, "attn_bwd_sm90_bf16_d64_keys"),
        ((9, 0), 96, {"mask": "io", "strides": ONE_ROW, "window_right": 0}, "attn_bwd_sm90_bf16_d128_keys"),
        ((9, 0), 64, {"mask": "bool", "strides": MANY_ROWS}, "attn_bwd_joint_sm80_bf16_d64_mods"),
        ((9, 0), 64, {"mask": "bool", "strides": ONE_ROW, "softcap": 5.0}, "attn_bwd_joint_sm80_bf16_d64_mods"),
        ((9, 0), 64, {"mask": "bool", "strides": ONE_ROW, "varlen": True}, "attn_bwd_joint_sm80_bf16_d64_mods"),
        ((9, 0), 256, {"varlen": True}, "attn_bwd_sm80_bf16_d256"),
        ((10, 0), 128, {}, "attn_bwd_sm80_bf16_d128"),
    ],
)
def test_which_kernel(cc: tuple[int, int], head_dim: int, fields: dict[str, Any], name: str) -> None:
    assert select_backward(problem(head_dim=head_dim, **fields), GPUS[cc]).spec.name == name


@pytest.mark.parametrize("cc", GPUS)
def test_the_gradient_of_a_mask_has_rows_of_its_own(cc: tuple[int, int]) -> None:
    for head_dim in (64, 96, 128, 192, 256):
        spec = select_backward(problem(("dmask",), head_dim=head_dim, mask="float32"), GPUS[cc]).spec
        assert spec.dmask
        assert spec.score_mods
        assert not select_dq(problem(("dq", "dmask"), head_dim=head_dim, mask="io"), GPUS[cc]).spec.dmask


MAIN = [s for s in REGISTRY if s.op in ("attention_backward", "attention_backward_dq") and not s.arch_specific]


@pytest.mark.parametrize("spec", MAIN, ids=lambda s: s.name)
def test_every_row_of_every_gpu_is_chosen_or_can_be_forced(spec: KernelSpec) -> None:
    mods = {"mask": "float32"} if spec.score_mods else {}
    wanted = ("dq", "dk", "dv", "dmask") if spec.dmask else ("dq", "dk", "dv")
    call = problem(wanted, dtype=spec.dtype, head_dim=spec.head_dim, **mods)
    select = select_backward if spec.op == "attention_backward" else select_dq
    chosen = {select(call, target).spec.name for target in GPUS.values()}
    assert spec.name in chosen or spec.smem_bytes > 99 << 10 or spec.head_dim == 256
    assert select(call, GPUS[9, 0], spec.name).spec is spec
    assert select(call, GPUS[9, 0], f"attn_fwd_sm80_bf16_d64,{spec.name}").spec is spec


def test_force_that_cannot_serve() -> None:
    for force, fields, shows in (
        ("attn_bwd_sm90_bf16_d64", {"varlen": True}, "it takes no packed sequences"),
        ("attn_bwd_sm90_bf16_d64_varlen", {}, "it takes packed sequences only"),
        ("attn_bwd_sm90_bf16_d64_softcap", {}, "it is for softcap"),
        ("attn_bwd_sm90_bf16_d64_softcap", {"softcap": 5.0, "mask": "io"}, "it takes no mask and no score_mod"),
        ("attn_bwd_sm90_bf16_d64_keys", {}, "it takes masks that are the same for all queries"),
        ("attn_bwd_sm90_bf16_d64_keys", {"softcap": 1.0, "mask": "bool", "strides": ONE_ROW}, "it has no softcap"),
        ("attn_bwd_sm90_bf16_d64", {"batch": 1 << 25, "num_q_heads": 64}, "it counts tiles in 31 bits"),
        ("attn_bwd_sm90_bf16_d64", {"head_dim": 72}, "it takes head_dim up to 64, not 72"),
        ("attn_bwd_sm90_bf16_d64", {"dtype": "float16"}, "it is compiled for bfloat16"),
        ("attn_bwd_sm80_bf16_d128", {"mask": "bool"}, "it has no softcap, mask or score_mod"),
        ("attn_bwd_nothing", {}, "attn_bwd_nothing"),
    ):
        with pytest.raises(ArgumentError, match="OMNIATTN_FORCE_KERNEL") as error:
            select_backward(problem(**fields), GPUS[9, 0], force)
        assert shows in str(error.value)
    with pytest.raises(ArgumentError, match="it makes no gradient of a mask"):
        select_backward(problem(("dmask",), mask="float32"), GPUS[9, 0], "attn_bwd_joint_sm80_bf16_d64_mods")
    with pytest.raises(ArgumentError, match="shared memory"):
        select_backward(problem(head_dim=128), GPUS[8, 9], "attn_bwd_sm80_bf16_d128")


def test_nothing_serves() -> None:
    for target, shows in ((Target((7, 5), 64 << 10, 68), "7.5"), (Target((8, 0), 16 << 10, 108), "8.0")):
        with pytest.raises(UnsupportedError, match=f"no backward kernel serves bfloat16.*{shows}"):
            select_backward(problem(), target)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fragments", [False, True])
def test_kernels_before_and_behind(dtype: str, fragments: bool) -> None:
    before, behind = select_backward_rows(problem(dtype=dtype), GPUS[9, 0], fragments=fragments)
    assert (before.spec.op, before.spec.dtype) == ("attention_backward_prepare", dtype)
    assert (behind.spec.op, behind.spec.dtype) == ("attention_backward_finish", dtype)
    assert behind.spec.fragments == fragments
    assert dict(behind.spec.defines)["FRAGMENTS"] == str(int(fragments))


@pytest.mark.parametrize("heads", [(0, 0), (0, 2)])
@pytest.mark.parametrize("window", [(UNLIMITED, UNLIMITED), (UNLIMITED, 0), (5, 200)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_orders_of_no_heads(heads: tuple[int, int], window: tuple[int, int], head_dim: int) -> None:
    forward = dataclasses.replace(
        FORWARD, batch=3, seqlen_q=4096, seqlen_k=128, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim,
        window_left=window[0], window_right=window[1],
    )  # fmt: skip
    problem, target = BackwardProblem(forward, ("dq", "dk", "dv")), GPUS[9, 0]
    for row in (spec for spec in REGISTRY if spec.arch_specific and spec.op.startswith("attention_backward")):
        assert order_of_queries(row, problem, target).num_items == 0, row.name
        assert (order_of_keys(row, problem, target).num_items == 0) == (heads[1] == 0), row.name


def test_short_calls_add_in_an_order() -> None:
    """Where that was measured to be faster, as with deterministic=True."""
    fields: dict[str, Any] = {"head_dim": 128, "batch": 16, "seqlen_q": 1024, "seqlen_k": 1024, "window_right": 0}
    fields |= {"num_q_heads": 16, "num_kv_heads": 16}
    shared = {"num_q_heads": 32, "num_kv_heads": 8}
    grouped = {**shared, "seqlen_q": 4096, "seqlen_k": 4096}
    pairs = {"num_q_heads": 32, "num_kv_heads": 16}
    longer = {"seqlen_q": 8192, "seqlen_k": 8192}
    short, shorter = {"seqlen_q": 384, "seqlen_k": 384}, {"seqlen_q": 256, "seqlen_k": 256}
    full, narrow = {"window_right": UNLIMITED}, {"head_dim": 64}
    for more, ordered in (
        ({}, True), ({"seqlen_q": 4096, "seqlen_k": 4096}, False), ({"batch": 1}, False), (full, False),
        ({"seqlen_k": 2048}, False), ({"softcap": 3.0}, False), ({"window_left": 512}, False),
        ({"batch": 4, **grouped}, True), ({"batch": 2, **grouped}, False), ({**grouped, **longer}, False),
        ({"batch": 32, "seqlen_q": 512, "seqlen_k": 512}, True), ({**short, "seqlen_q": 0}, False),
        ({**pairs, "seqlen_q": 2048, "seqlen_k": 2048}, True), ({**pairs, "seqlen_q": 4096, "seqlen_k": 4096}, False),
        (shorter, True), ({**shorter, "batch": 1}, True), ({**shorter, **full}, True),
        ({**shorter, **full, "batch": 4}, False), ({**short, "batch": 2}, True), (narrow, True),
        ({**short, **shared, "batch": 4}, False), ({**short, **shared, "batch": 42}, True),
        ({**narrow, **shared}, False),
        ({**narrow, "seqlen_q": 2048, "seqlen_k": 2048}, False), ({**narrow, **short, **full, "batch": 42}, True),
        ({**narrow, **short, **full, "batch": 10}, False), ({**shorter, "head_dim": 256}, False),
    ):  # fmt: skip
        chosen = select_backward(problem(**fields | more), GPUS[9, 0])
        assert chosen.spec.ordered_dq == ordered
        assert any("such a length" in text for text in chosen.why) == ordered
