"""``sparse_blocks`` on the CPU: the rule, and arguments that are refused; its launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.launch.structs import BLOCK_MEANS, CHOOSE_BLOCKS
from omniattn.plan.others import plan_sparse_blocks
from omniattn.problems import Target
from omniattn.problems.sparse_blocks import SparseBlocksProblem, count_of_share
from omniattn.reference.sparse_blocks import block_means, visible_blocks
from omniattn.registry.sparse_blocks import MAX_SHARES
from omniattn.select.blocks import select_blocks
from tests.unit.launch.launch_fakes import fields_of_record


def qk(batch: int = 2, rows_q: int = 500, rows_k: int = 700, heads: int = 4, heads_kv: int = 2) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((batch, n, h, 32)).astype(np.float32) for n, h in ((rows_q, heads), (rows_k, heads_kv))]


def by_the_rule(q: Any, k: Any, topk: float | None, cdf: float | None, similarity: float, causal: bool) -> Any:
    """Of one head, block by block."""
    rows_q, rows_k = len(q), len(k)
    blocks_q, blocks_k = (range(0, n, size) for n, size in ((rows_q, 128), (rows_k, 64)))

    def resembles(x: Any) -> bool:
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        return bool((unit @ unit.T).mean() > similarity)

    kept = np.zeros((len(blocks_q), len(blocks_k)), dtype=np.bool_)
    for i, at_q in enumerate(blocks_q):
        own = q[at_q : at_q + 128]
        seen = [not causal or at <= at_q + len(own) - 1 + rows_k - rows_q for at in blocks_k]
        similar = [resembles(k[at : at + 64]) for at in blocks_k]
        scores = {
            j: own.mean(0) @ k[at : at + 64].mean(0) / np.sqrt(q.shape[1])
            for j, at in enumerate(blocks_k)
            if seen[j] and similar[j]
        }
        order = sorted(scores, key=lambda j: -scores[j])
        if topk is not None:
            order = order[: max(int(np.float32(topk) * np.float32(len(blocks_k))), 1)]
        elif order:
            weights = np.exp([scores[j] - scores[order[0]] for j in order])
            count = int((np.cumsum(weights) <= cdf * weights.sum()).sum())
            order = order[: max(count, 1)]
        kept[i, order] = True
        kept[i] |= ~np.array(similar)
        kept[i] |= not resembles(own)
        kept[i] &= seen
    return kept


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("similarity", [-0.1, 0.0157])
@pytest.mark.parametrize(("topk", "cdf"), [(0.3, None), (0.01, None), (1.0, None), (None, 0.9), (None, 0.1)])
def test_the_rule(topk: float | None, cdf: float | None, similarity: float, causal: bool) -> None:
    q, k = (x.astype(np.float64) for x in qk())
    found = oa.sparse_blocks(q, k, topk=topk, cdf=cdf, similarity=similarity, causal=causal)
    assert found.shape == (2, 4, 4, 11)
    assert found.dtype == np.bool_
    for b in range(2):
        for h in range(4):
            want = by_the_rule(q[b, :, h], k[b, :, h // 2], topk, cdf, similarity, causal)
            np.testing.assert_array_equal(found[b, h], want)
    swapped = oa.sparse_blocks(
        *(x.swapaxes(1, 2) for x in (q, k)), topk=topk, cdf=cdf, similarity=similarity, causal=causal, layout="HND"
    )
    np.testing.assert_array_equal(swapped, found)


@pytest.mark.parametrize("name", ["topk", "cdf"])
def test_a_share_of_each_head(name: str) -> None:
    q, k = qk()
    shares = (0.1, 0.9, 0.5, 1.0)
    found = oa.sparse_blocks(q, k, **{name: shares}, causal=True, keep_first=1)
    for h, share in enumerate(shares):
        alone = oa.sparse_blocks(
            q[:, :, h : h + 1], k[:, :, h // 2 : h // 2 + 1], **{name: share}, causal=True, keep_first=1
        )
        np.testing.assert_array_equal(found[:, h : h + 1], alone)
    for same in (list(shares), np.array(shares)):
        np.testing.assert_array_equal(oa.sparse_blocks(q, k, **{name: same}, causal=True, keep_first=1), found)
    for wrong in (shares[:3], (), (0.5, 0.5, 0.5, float("nan")), [[0.5] * 4], (0.5, 0.5, 0.5, True), "0.5"):
        with pytest.raises(oa.errors.ArgumentError, match=f"'{name}'"):
            oa.sparse_blocks(q, k, **{name: wrong})
    with pytest.raises(oa.errors.ArgumentError, match="4 of them, one for each query head, received 3 numbers"):
        oa.sparse_blocks(q, k, **{name: shares[:3]})


def test_means_and_similarities() -> None:
    x = np.random.default_rng(1).standard_normal((3, 150, 16))
    means, similar = block_means(x, 64)
    assert means.shape == (3, 3, 16)
    for i in range(3):
        part = x[1, 64 * i : 64 * i + 64]
        unit = part / np.linalg.norm(part, axis=1, keepdims=True)
        np.testing.assert_allclose(means[1, i], part.mean(0))
        np.testing.assert_allclose(similar[1, i], (unit @ unit.T).mean())
    assert block_means(np.zeros((64, 8)), 64)[1] == 0.0
    assert block_means(np.ones((1, 8)), 64)[1] == pytest.approx(1.0)


def test_what_is_not_finite_is_kept() -> None:
    q, k = qk(1, 384, 640, 1, 1)
    q[0, 130, 0, 3], k[0, 70, 0, 0], k[0, 200] = np.nan, np.nan, np.inf
    found = oa.sparse_blocks(q, k, topk=0.1)[0, 0]
    assert found[1].all()
    assert found[:, [1, 3]].all()
    assert list(found.sum(-1)) == [3, 10, 3]


def test_first_blocks_and_rows_that_see_nothing() -> None:
    q, k = qk(1, 640, 320, 1, 1)
    found = oa.sparse_blocks(q, k, topk=0.2, causal=True, keep_first=2)[0, 0]
    assert not found[:2].any()
    assert found[3:, :2].all()
    assert not (found & ~visible_blocks(640, 320, (128, 64), True)).any()
    every = oa.sparse_blocks(q, k, topk=1.0, causal=True, keep_first=99)[0, 0]
    np.testing.assert_array_equal(every, visible_blocks(640, 320, (128, 64), True))


def test_nothing_at_all() -> None:
    q, k = qk()
    assert oa.sparse_blocks(q[:, :0], k, topk=0.5).shape == (2, 4, 0, 11)
    assert oa.sparse_blocks(q, k[:, :0], topk=0.5).shape == (2, 4, 4, 0)
    assert oa.sparse_blocks(q[:0], k[:0], cdf=0.5).shape == (0, 4, 4, 11)


def test_shares_are_float32() -> None:
    assert [count_of_share(0.35, n) for n in (1, 2, 3, 20, 100, 256)] == [1, 1, 1, 7, 35, 89]
    for share in (0.1, 0.35, 1 / 3, 0.7, 1.0):
        for n in (1, 7, 10, 100, 256, 12288):
            assert count_of_share(share, n) == max(int(np.float32(share) * np.float32(n)), 1)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, oa.errors.ArgumentError, "neither"),
        ({"topk": 0.5, "cdf": 0.5}, oa.errors.ArgumentError, "both"),
        ({"topk": 0.0}, oa.errors.ArgumentError, "'topk'"),
        ({"topk": 1.01}, oa.errors.ArgumentError, "'topk'"),
        ({"cdf": float("nan")}, oa.errors.ArgumentError, "'cdf'"),
        ({"topk": True}, oa.errors.ArgumentError, "'topk'"),
        ({"topk": 0.5, "similarity": None}, oa.errors.ArgumentError, "'similarity'"),
        ({"topk": 0.5, "block_size": 100}, oa.errors.ArgumentError, "'block_size'"),
        ({"topk": 0.5, "keep_first": -1}, oa.errors.ArgumentError, "'keep_first'"),
        ({"topk": 0.5, "causal": 1}, oa.errors.ArgumentError, "'causal'"),
        ({"topk": 0.5, "layout": "BHSD"}, oa.errors.ArgumentError, "'layout'"),
        ({"topk": 0.5, "stream": 0}, oa.errors.ArgumentError, "stream"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        oa.sparse_blocks(*qk(), **options)


def test_arrays_that_are_refused() -> None:
    q, k = qk()
    with pytest.raises(oa.errors.ShapeError, match="'k'"):
        oa.sparse_blocks(q, k[:1], topk=0.5)
    with pytest.raises(oa.errors.ShapeError, match="divides"):
        oa.sparse_blocks(q[:, :, :3], k, topk=0.5)
    with pytest.raises(oa.errors.DtypeError, match="'k'"):
        oa.sparse_blocks(q, k.astype(np.float64), topk=0.5)
    with pytest.raises(oa.errors.DtypeError, match="'q'"):
        oa.sparse_blocks(q.astype(np.int32), k, topk=0.5)


def problem(**changes: Any) -> SparseBlocksProblem:
    own = {
        "dtype": "bfloat16", "batch": 2, "seqlen_q": 1000, "seqlen_k": 3000, "num_q_heads": 8, "num_kv_heads": 2,
        "head_dim": 128, "block_size": (128, 64), "topk": 0.35, "cdf": None, "similarity": -0.1, "causal": True,
        "keep_first": 1, "layout": "NHD", "q_strides": (1, 2, 3), "k_strides": (4, 5, 6),
    }  # fmt: skip
    return SparseBlocksProblem(**{**own, **changes})


def test_launches() -> None:
    target = Target((9, 0), 227 << 10, 132)
    launches = plan_sparse_blocks(problem(), target, None)
    means, choosing = launches.records
    assert (means.spec.name, choosing.spec.name) == ("block_means_sm80_bf16_d128", "choose_blocks_sm80")
    assert means.grid == (2 * (8 * 8 + 2 * 47), 1, 1)
    assert choosing.grid == (2 * 8 * 2, 1, 1)
    first, second = (
        dict(fields_of_record(r, layout)) for r, layout in zip((means, choosing), (BLOCK_MEANS, CHOOSE_BLOCKS))
    )
    assert (first["q_ctas"], first["k_stride_h"], second["rows"]) == (128, 6, 4)
    assert (second["by_count"], second["num_shares"], second["causal"], second["keep_first"]) == (1, 1, 1, 1)
    assert second["shares"][:2] == (16.0, 0.0)
    assert all(first[n] == second[n] for n in ("q_means", "k_means", "q_similar", "k_similar"))
    assert launches.workspace_bytes >= 4 * 129 * 2 * (8 * 8 + 2 * 47)
    many = plan_sparse_blocks(problem(seqlen_k=64 * 6145, topk=None, cdf=0.5), target, None).records[1]
    told = dict(fields_of_record(many, CHOOSE_BLOCKS))
    assert (told["rows"], told["by_count"], told["shares"][0]) == (1, 0, 0.5)
    shares = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0)
    for name, want in (("topk", (4, 9, 14, 18, 23, 28, 32, 47)), ("cdf", np.float32(shares))):
        record = plan_sparse_blocks(problem(**{"topk": None, name: shares}), target, None).records[1]
        told = dict(fields_of_record(record, CHOOSE_BLOCKS))
        assert (told["by_count"], told["num_shares"]) == (name == "topk", 8)
        np.testing.assert_array_equal(told["shares"][:9], (*want, 0))
    assert len(told["shares"]) == MAX_SHARES
    assert plan_sparse_blocks(problem(seqlen_k=0), target, None).records == ()
    assert select_blocks(problem(head_dim=72, dtype="float16"), target)[0].spec.name == "block_means_sm80_fp16_d128"
    with pytest.raises(oa.errors.UnsupportedError, match="block_means"):
        plan_sparse_blocks(problem(), Target((7, 5), 64 << 10, 40), None)
