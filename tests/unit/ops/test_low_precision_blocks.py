"""Block masks at 8 bits: the CPU reference, the kernels that are chosen, what they are told, what raises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.launch.structs import ATTN_INT8_MODS_SM90
from omniattn.plan.attention import plan_attention
from omniattn.problems import Target
from omniattn.problems.score_mod import BlockMaskProblem
from omniattn.registry import REGISTRY, by_name
from omniattn.select.fit import fit
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.ops.test_score_mod import A100, H200, fields, problem, qkv

BLOCKS = BlockMaskProblem((2, 1), (0, 0, 16, 1))


@pytest.mark.parametrize("precision", ["int8", "fp8", "int4", oa.Int8(smooth_q=True), oa.Fp8(smooth_k=True)], ids=str)
def test_a_block_mask_is_the_same_as_a_mask(precision: Any) -> None:
    q, k, v = qkv(150, 200)
    rng = np.random.default_rng(2)
    for shape, size in (((2, 4, 3, 4), 64), ((2, 4), (128, 64)), ((2, 1, 2, 1), (128, 256))):
        blocks = rng.random(shape) < 0.6
        rows, keys = (size, size) if isinstance(size, int) else size
        full = blocks.repeat(rows, -2).repeat(keys, -1)[..., :150, :200]
        for causal in (False, True):
            options: dict[str, Any] = {"causal": causal, "return_lse": True, "precision": precision}
            got = oa.attention(q, k, v, block_mask=blocks, block_size=size, **options)
            want = oa.attention(q, k, v, mask=full, **options)
            assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_below_min_seqlen_it_is_exact() -> None:
    q, k, v = qkv(150, 200)
    blocks = np.random.default_rng(3).random((3, 4)) < 0.6
    given: dict[str, Any] = {"block_mask": blocks, "block_size": 64}
    assert np.array_equal(
        oa.attention(q, k, v, precision=oa.Int8(min_seqlen=1000), **given), oa.attention(q, k, v, **given)
    )


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_kernels_of_hopper(name: str, lse: bool) -> None:
    precision = {"int8": oa.Int8(), "fp8": oa.Fp8()}[name].precision
    call = problem(block_mask=BLOCKS, precision=precision, lse=lse)
    launches = plan_attention(call, H200, None)
    names = [record.spec.name for record in launches.records]
    assert names[:2] == ["tile_kinds_sm80", "mask_list_sm80"]
    assert names[-1] == f"attn_{name}_sm90_bf16_d128_m128n64_blocks" + "_lse" * lse
    listing, main = launches.records[1], launches.records[-1]
    told = dict(fields_of_record(main, ATTN_INT8_MODS_SM90))
    assert fields(listing)["block_m"] == main.spec.block_m
    assert told["mods.num_tiles"] == 16
    assert told["mods.lists"] is not None


def test_rows_are_for_block_masks_alone() -> None:
    row = by_name("attn_int8_sm90_bf16_d128_m128n64_blocks")
    int8 = oa.Int8().precision
    assert fit(row, problem(block_mask=BLOCKS, precision=int8), H200) is None
    assert fit(row, problem(precision=int8), H200) == "it is for calls with a block_mask"
    assert fit(row, problem(block_mask=BLOCKS, precision=int8, softcap=3.0), H200) == "it has no softcap"
    plain = by_name("attn_int8_sm90_bf16_d128")
    masks = by_name("attn_int8_sm90_bf16_d128_masks")
    for other in (plain, masks):
        assert fit(other, problem(block_mask=BLOCKS, precision=int8), H200) is not None
    assert fit(plain, problem(precision=int8), H200) is None
    assert {r.smooth_q for r in REGISTRY if r.block_masks} == {"never"}


@pytest.mark.parametrize(
    ("precision", "options", "said"),
    [
        (oa.Int8(smooth_q=True), {}, "smooth_q"),
        (oa.Int8(pv="fp16"), {}, "block_mask"),
        (oa.Int4(), {}, "block_mask"),
        (oa.Int8(), {"softcap": 5.0}, "softcap"),
    ],
    ids=str,
)
def test_what_has_no_kernel_raises(precision: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(oa.errors.UnsupportedError, match=said):
        plan_attention(problem(block_mask=BLOCKS, precision=precision.precision, **options), H200, None)


@pytest.mark.parametrize("target", [A100, Target((12, 0), 101376, 100)], ids=str)
def test_other_gpus_raise(target: Target) -> None:
    with pytest.raises(oa.errors.UnsupportedError, match="block_mask"):
        plan_attention(problem(block_mask=BLOCKS, precision=oa.Int8().precision), target, None)
