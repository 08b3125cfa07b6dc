"""``sparse_blocks`` on a GPU: the CPU's blocks, but for scores that are nearly equal; with attention at 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_plans"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

OPTIONS: tuple[dict[str, Any], ...] = (
    {"topk": 0.5}, {"topk": 0.01}, {"topk": 1.0}, {"cdf": 0.9}, {"cdf": 0.3}, {"cdf": 1e-6},
    {"topk": 0.3, "causal": True}, {"cdf": 0.7, "causal": True, "keep_first": 2}, {"topk": 0.3, "similarity": 0.08},
    {"cdf": 0.5, "block_size": 64}, {"topk": 0.4, "block_size": (192, 128), "similarity": 0.06},
)  # fmt: skip


def arrays(batch: int, rows_q: int, rows_k: int, heads: int, heads_kv: int, d: int, dtype: Any) -> list[torch.Tensor]:
    """Rows that resemble their neighbours, more or less."""
    torch.manual_seed(d)
    made = []
    for rows, n in ((rows_q, heads), (rows_k, heads_kv)):
        walk = torch.randn(batch, -(-rows // 64), 1, n, d).repeat(1, 1, 64, 1, 1).flatten(1, 2)[:, :rows]
        share = torch.rand(batch, -(-rows // 64), 1, n, 1).repeat(1, 1, 64, 1, 1).flatten(1, 2)[:, :rows]
        made.append((share * walk + torch.randn(batch, rows, n, d)).to(dtype))
    return made


def check(q: torch.Tensor, k: torch.Tensor, **options: Any) -> None:
    want = oa.sparse_blocks(q, k, **options).numpy()
    got = oa.sparse_blocks(q.cuda(), k.cuda(), **options)
    assert got.dtype == torch.bool
    assert got.is_cuda
    assert torch.equal(oa.sparse_blocks(q.cuda(), k.cuda(), **options), got)
    found = got.cpu().numpy()
    assert found.shape == want.shape
    wrong = found != want
    # Of float32 and double precision: sums at the border of a share, similarities at the threshold.
    assert wrong.mean() <= (2e-3 if wrong.size > 2000 else 0.01), wrong.mean()
    if "topk" in options and "similarity" not in options:
        np.testing.assert_array_equal(found.sum(-1), want.sum(-1))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_options(dtype: Any, options: dict[str, Any]) -> None:
    check(*arrays(2, 1500, 2100, 4, 2, 128, dtype), **options)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 136, 256])
def test_head_dims(head_dim: int) -> None:
    q, k = arrays(1, 700, 900, 3, 1, head_dim, torch.bfloat16)
    for options in OPTIONS:
        check(q, k, **options)
    check(q.transpose(1, 2), k.transpose(1, 2), topk=0.3, layout="HND")


@pytest.mark.parametrize("keys", [1, 63, 65, 70_000, 400_000])
def test_numbers_of_blocks(keys: int) -> None:
    """Up to what one CTA has room for, one row at a time."""
    q, k = arrays(1, 1100, keys, 1, 1, 64, torch.bfloat16)
    check(q, k, topk=0.2)
    check(q, k, cdf=0.4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["topk", "cdf"])
def test_a_share_of_each_head(name: str, causal: bool) -> None:
    q, k = arrays(2, 1500, 2100, 6, 2, 128, torch.bfloat16)
    shares = (0.05, 1.0, 0.5, 0.3, 0.9, 0.1)
    check(q, k, **{name: shares}, causal=causal)
    found = oa.sparse_blocks(q.cuda(), k.cuda(), **{name: shares}, causal=causal)
    for h, share in enumerate(shares):
        every = oa.sparse_blocks(q.cuda(), k.cuda(), **{name: share}, causal=causal)
        assert torch.equal(found[:, h], every[:, h])
    many = oa.sparse_blocks(*(x[:, :, :1].repeat(1, 1, 256, 1).cuda() for x in (q, k)), **{name: (0.2, 0.7) * 128})
    assert torch.equal(many[:, ::2], many[:, :1].expand_as(many[:, ::2]))
    assert not torch.equal(many[:, 0], many[:, 255])
    with pytest.raises(oa.errors.UnsupportedError, match="256"):
        oa.sparse_blocks(*(x[:, :, :1].repeat(1, 1, 257, 1).cuda() for x in (q, k)), **{name: (0.5,) * 257})


def test_nan_infinity_and_zeros_are_kept() -> None:
    q, k = (x.cuda() for x in arrays(1, 640, 640, 1, 1, 64, torch.bfloat16))
    q[0, 130], k[0, 70], k[0, 200, 0, 3] = torch.nan, torch.nan, torch.inf
    k[0, 320:384] = 0
    found = oa.sparse_blocks(q, k, topk=0.1)[0, 0]
    assert found[1].all()
    assert found[:, [1, 3]].all()
    assert int(found[0].sum()) == 3
    assert oa.sparse_blocks(q, k, topk=0.1, similarity=0.0)[0, 0, :, 5].all()


def test_equal_scores_are_taken_in_their_order() -> None:
    q, k = (torch.zeros(1, n, 1, 64, dtype=torch.float16).cuda() for n in (256, 640))
    for options, count in (({"topk": 0.35}, 3), ({"cdf": 0.35}, 3), ({"topk": 0.05}, 1), ({"cdf": 0.05}, 1)):
        found = oa.sparse_blocks(q, k, **options)[0, 0]
        assert found[:, :count].all(), options
        assert not found[:, count:].any(), options


def test_in_a_graph_and_nothing_at_all() -> None:
    q, k = (x.cuda() for x in arrays(1, 640, 640, 2, 1, 64, torch.bfloat16))
    want = oa.sparse_blocks(q, k, cdf=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = oa.sparse_blocks(q, k, cdf=0.5)
    graph.replay()
    assert torch.equal(got, want)
    assert oa.sparse_blocks(q[:, :0], k, topk=0.5).shape == (1, 2, 0, 10)
    assert oa.sparse_blocks(q, k[:, :0], topk=0.5).shape == (1, 2, 5, 0)


def test_attention_with_what_is_predicted() -> None:
    """Queries that look at few keys: half of the blocks lose little."""
    q, k = (x.cuda() for x in arrays(1, 2048, 2048, 2, 2, 128, torch.bfloat16))
    q = (q + 2 * k).contiguous()
    v = torch.randn_like(k)
    blocks = oa.sparse_blocks(q, k, topk=0.5)
    assert abs(blocks.float().mean().item() - 0.5) < 0.01
    want = oa.attention(q, k, v).float()
    for precision in ("exact", "int8") if torch.cuda.get_device_capability() == (9, 0) else ("exact",):
        o = oa.attention(q, k, v, block_mask=blocks, block_size=(128, 64), precision=precision).float()
        assert float((o - want).abs().sum() / want.abs().sum()) < 0.1


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper has the kernels"
)
@pytest.mark.parametrize("kind", [oa.Int8, oa.Fp8], ids=str)
@pytest.mark.parametrize(("head_dim", "heads_kv"), [(64, 4), (128, 2), (80, 1), (256, 4)])
def test_in_one_call(head_dim: int, heads_kv: int, kind: Any) -> None:
    """The same bits as with the block mask that is predicted by itself, in a graph too."""
    q, k = (x.cuda() for x in arrays(2, 900, 1300, 4, heads_kv, head_dim, torch.bfloat16))
    v = torch.randn_like(k)
    given: tuple[dict[str, Any], ...] = (
        {"topk": 0.4}, {"cdf": 0.8, "block_size": 64, "keep_first": 1}, {"topk": (0.1, 0.9, 0.5, 0.3)},
    )  # fmt: skip
    for own in given:
        for options in ({}, {"causal": True}):
            blocks = oa.sparse_blocks(q, k, **own, **options)
            want = oa.attention(
                q, k, v, block_mask=blocks, block_size=own.get("block_size", (128, 64)), precision=kind(),
                return_lse=True, **options,
            )  # fmt: skip
            low = kind(sparse=oa.Sparse(**own))
            got = oa.attention(q, k, v, precision=low, return_lse=True, **options)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = oa.attention(q, k, v, precision=low, return_lse=True, **options)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(again, want, strict=True))
    said = oa.explain(q, k, v, precision=kind(sparse=oa.Sparse(topk=0.4)))
    assert "keeps 8 of 21 blocks of keys (topk=0.4)" in str(said)
    counts = said.tiles()
    assert counts is not None
    assert counts.cut + counts.whole == 2 * 4 * 15 * 8
