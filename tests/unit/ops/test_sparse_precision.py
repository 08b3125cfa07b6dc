"""``Int8(sparse=Sparse(...))`` without a GPU: the CPU's results, launches, what is said, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.launch.structs import CHOOSE_BLOCKS, TILE_KINDS
from omniattn.plan.attention import plan_attention
from omniattn.problems import Sparse
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.ops.test_score_mod import A100, H200, problem, qkv


@pytest.mark.parametrize("kind", [oa.Int8, oa.Fp8, oa.Int4])
@pytest.mark.parametrize("sparse", [Sparse(topk=0.4), Sparse(cdf=0.6, block_size=64, keep_first=1)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"layout": "HND"}], ids=str)
def test_it_is_the_block_mask_that_is_predicted(kind: Any, sparse: Sparse, options: dict[str, Any]) -> None:
    q, k, v = qkv(300, 500)
    if "layout" in options:
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    blocks = oa.sparse_blocks(
        q, k, topk=sparse.topk, cdf=sparse.cdf, block_size=sparse.block_size, keep_first=sparse.keep_first, **options
    )
    assert not blocks.all()
    got = oa.attention(q, k, v, precision=kind(sparse=sparse), return_lse=True, **options)
    want = oa.attention(
        q, k, v, precision=kind(), block_mask=blocks, block_size=sparse.block_size, return_lse=True, **options
    )
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_below_min_seqlen_nothing_is_left_out() -> None:
    q, k, v = qkv(150, 200)
    low = oa.Int8(min_seqlen=1000, sparse=Sparse(topk=0.1))
    assert np.array_equal(oa.attention(q, k, v, precision=low), oa.attention(q, k, v))


def test_launches() -> None:
    low = oa.Int8(sparse=Sparse(topk=0.25, keep_first=2)).precision
    plain = problem(precision=low, window_right=0)
    call = plain.with_sparse(Sparse(topk=0.25, keep_first=2))
    assert call.precision == oa.Int8().precision
    launches = plan_attention(call, H200, None)
    names = [record.spec.name for record in launches.records]
    assert names[:4] == ["block_means_sm80_bf16_d128", "choose_blocks_sm80", "tile_kinds_sm80", "mask_list_sm80"]
    assert names[-1] == "attn_int8_sm90_bf16_d128_m128n64_blocks"
    choosing = dict(fields_of_record(launches.records[1], CHOOSE_BLOCKS))
    kinds = dict(fields_of_record(launches.records[2], TILE_KINDS))
    assert choosing["blocks"] == kinds["blocks"]
    assert choosing["blocks"] is not None
    assert (choosing["by_count"], choosing["causal"], choosing["keep_first"]) == (1, 1, 2)
    assert choosing["shares"][:2] == (4.0, 0.0)
    assert (kinds["block_rows"], kinds["block_keys"], kinds["heads"], kinds["batch"]) == (2, 1, 2, 2)
    assert any(
        "each block of 128 queries keeps 4 of 16 blocks of keys (topk=0.25)" in x for x in launches.selection.why
    )
    of_weights = plan_attention(plain.with_sparse(Sparse(cdf=0.9)), H200, None)
    assert any("a share of 0.9 of the weights" in x for x in of_weights.selection.why)
    with pytest.raises(oa.errors.UnsupportedError, match="block_mask"):
        plan_attention(replace(call), A100, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "neither"),
        ({"topk": 0.5, "cdf": 0.5}, "both"),
        ({"topk": 0.0}, "'topk'"),
        ({"cdf": 1.5}, "'cdf'"),
        ({"topk": True}, "'topk'"),
        ({"topk": 0.5, "similarity": float("nan")}, "'similarity'"),
        ({"topk": 0.5, "block_size": (128, 100)}, "'block_size'"),
        ({"topk": 0.5, "block_size": 0}, "'block_size'"),
        ({"topk": 0.5, "keep_first": -1}, "'keep_first'"),
    ],
)
def test_knobs_that_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(oa.errors.ArgumentError, match=said):
        Sparse(**given)
    for kind in (oa.Int8, oa.Fp8):
        with pytest.raises(oa.errors.ArgumentError, match="'sparse'"):
            kind(sparse=0.5)


def test_calls_that_are_refused() -> None:
    q, k, v = qkv(150, 200)
    low = oa.Int8(sparse=Sparse(topk=0.5))
    unsupported, argument = oa.errors.UnsupportedError, oa.errors.ArgumentError
    for options, error, said in (
        ({"window": (50, 50)}, unsupported, "window"),
        ({"mask": np.ones((150, 200), dtype=np.bool_)}, unsupported, "boolean mask"),
        ({"score_mod": oa.ScoreMod("score", reference=lambda s, *_: s)}, unsupported, "score_mod"),
        ({"block_mask": np.ones((2, 4), dtype=np.bool_), "block_size": (128, 64)}, argument, "'block_mask'"),
    ):
        with pytest.raises(error, match=said):
            oa.attention(q, k, v, precision=low, **options)
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, q, q)]
    starts = np.array([0, 150, 300], np.int32)
    with pytest.raises(unsupported, match="packed sequences"):
        oa.attention_varlen(
            *packed, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=150, max_seqlen_k=150, precision=low
        )
    wide = np.zeros((1, 9, 1, 264), np.float32)
    with pytest.raises(unsupported, match="264"):
        oa.attention(wide, wide, wide, precision=low)
    of_q, of_v = oa.quantize_qk(q, k), oa.quantize_v(v)
    with pytest.raises(argument, match="'precision'"):
        oa.attention(of_q.q, of_q.k, of_v, precision=low)


def test_explain_says_what_is_known() -> None:
    q, k, v = qkv(300, 640)
    said = oa.explain(q, k, v, precision=oa.Int8(sparse=Sparse(topk=0.5)))
    assert "each block of 128 queries keeps 5 of 10 blocks of keys (topk=0.5)" in str(said)
