"""`omniattn.compat.spas_sage_attn` on the CPU: what the functions compute, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.compat import spas_sage_attn as spas  # noqa: E402
from omniattn.errors import ArgumentError, ShapeError, UnsupportedError  # noqa: E402

pytestmark = pytest.mark.frameworks


def qkv(rows_q: int = 300, rows_k: int = 300, layout: str = "HND") -> list[Any]:
    torch.manual_seed(1)
    made = [torch.randn(2, h, n, 64) for n, h in ((rows_q, 4), (rows_k, 2), (rows_k, 2))]
    return [x.transpose(1, 2) if layout == "NHD" else x for x in made]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("causal", [False, True])
def test_predicted_blocks(causal: bool, layout: str) -> None:
    q, k, v = qkv(layout=layout)
    given: dict[str, Any] = {"causal": causal, "layout": layout}
    common: dict[str, Any] = {"is_causal": causal, "tensor_layout": layout}
    blocks = oa.sparse_blocks(q, k, topk=0.35, **given)
    want = oa.attention(q, k, v, block_mask=blocks, block_size=(128, 64), precision="int8", **given)
    assert torch.equal(spas.spas_sage2_attn_meansim_topk_cuda(q, k, v, **common), want)
    o, sparsity = spas.spas_sage2_attn_meansim_topk_cuda(q, k, v, return_sparsity=True, **common)
    visible = oa.sparse_blocks(q, k, topk=1.0, **given)
    assert torch.equal(o, want)
    assert sparsity == pytest.approx(1 - blocks.sum().item() / visible.sum().item())
    o, lse = spas.spas_sage2_attn_meansim_topk_cuda(q, k, v, return_lse=True, scale=0.1, smooth_k=False, **common)
    other = oa.attention(
        q, k, v, block_mask=blocks, block_size=(128, 64), precision=oa.Int8(smooth_k=False), softmax_scale=0.1,
        return_lse=True, **given,
    )  # fmt: skip
    assert torch.equal(o, other[0])
    assert torch.equal(lse, other[1])


def test_by_weights_with_the_mean_of_k_taken_away() -> None:
    q, k, v = qkv()
    k = k + 3  # similar, unless the mean is taken away
    for smooth in (True, False):
        centred = k - k.mean(2, keepdim=True) if smooth else k
        blocks = oa.sparse_blocks(q, centred, cdf=0.5, similarity=0.014, keep_first=1, layout="HND")
        want = oa.attention(
            q, k, v, block_mask=blocks, block_size=(128, 64), layout="HND", precision=oa.Int8(smooth_k=smooth)
        )
        got = spas.spas_sage2_attn_meansim_cuda(
            q, k, v, simthreshd1=0.014, cdfthreshd=0.5, attention_sink=True, smooth_k=smooth
        )
        assert torch.equal(got, want)


def test_a_share_of_each_head() -> None:
    q, k, v = qkv()
    shares = (0.2, 0.4, 0.7, 1.0)
    for name, call in (("topk", spas.spas_sage2_attn_meansim_topk_cuda), ("cdf", spas.spas_sage2_attn_meansim_cuda)):
        blocks = oa.sparse_blocks(q, k, **{name: shares}, layout="HND")
        want = oa.attention(q, k, v, block_mask=blocks, block_size=(128, 64), layout="HND", precision="int8")
        given = {"topk": "topk", "cdf": "cdfthreshd"}[name]
        for same in (shares, torch.tensor(shares)):
            assert torch.equal(call(q, k, v, **{given: same}, simthreshd1=-0.1), want)


def test_blocks_of_the_caller() -> None:
    q, k, v = qkv(300, 500)
    blocks = torch.rand(2, 4, 3, 8) < 0.5
    want = oa.attention(q, k, v, block_mask=blocks, block_size=(128, 64), layout="HND", precision="int8")
    for mask in (blocks, blocks.int()):
        o, sparsity = spas.block_sparse_sage2_attn_cuda(q, k, v, mask, return_sparsity=True)
        assert torch.equal(o, want)
        assert sparsity == pytest.approx(1 - blocks.float().mean().item())
    _, sparsity = spas.block_sparse_sage2_attn_cuda(q, k, v, blocks[:1, :1], return_sparsity=True)
    assert sparsity == pytest.approx(1 - blocks[:1, :1].float().mean().item())
    first = blocks.clone()
    first[..., 0] = True
    want = oa.attention(q, k, v, block_mask=first, block_size=(128, 64), layout="HND", precision="int8")
    assert torch.equal(spas.block_sparse_sage2_attn_cuda(q, k, v, blocks, attention_sink=True), want)


def test_first_block_of_a_mask_that_broadcasts() -> None:
    q, k, v = qkv(300, 500)
    none = torch.zeros(2, 4, 3, 8, dtype=torch.bool)
    want = spas.block_sparse_sage2_attn_cuda(q, k, v, none, attention_sink=True)
    assert not torch.equal(want, spas.block_sparse_sage2_attn_cuda(q, k, v, ~none))
    for shape in ((1, 1, 1, 1), (4, 1, 1), ()):
        mask = torch.zeros(shape, dtype=torch.bool)
        assert torch.equal(spas.block_sparse_sage2_attn_cuda(q, k, v, mask, attention_sink=True), want), shape
        assert torch.equal(mask, torch.zeros_like(mask))
    o, sparsity = spas.block_sparse_sage2_attn_cuda(
        q, k, v, torch.zeros((), dtype=torch.int32), attention_sink=True, return_sparsity=True
    )
    assert torch.equal(o, want)
    assert sparsity == pytest.approx(7 / 8)


def test_what_is_no_argument() -> None:
    q, k, v = qkv()
    of_share, of_weights = spas.spas_sage2_attn_meansim_topk_cuda, spas.spas_sage2_attn_meansim_cuda
    of_blocks = spas.block_sparse_sage2_attn_cuda
    mask = torch.ones(2, 4, 3, 5, dtype=torch.bool)
    for call, arguments, options, named in (
        (of_share, (q, k, v), {"cdfthreshd": 0.5}, "topk"),
        (of_share, (q, k, v), {"topk": None}, "topk"),
        (of_weights, (q, k, v), {"cdfthreshd": None}, "cdfthreshd"),
        (of_share, (q, k.int(), v), {}, "k"),
        (of_share, (q, k, v.to(torch.complex64)), {}, "v"),
        (of_share, (q, k, v), {"output_dtype": numpy.array([1, 2])}, "output_dtype"),
        (of_share, (q, k, v), {"tensor_layout": numpy.array([1, 2])}, "tensor_layout"),
        (of_blocks, (q, k, v, mask.float()), {}, "mask_id"),
        (of_blocks, (q, k, v, mask.numpy()), {}, "mask_id"),
    ):
        with pytest.raises(ArgumentError) as caught:
            call(*arguments, **options)
        assert caught.value.argument == named
        assert caught.value.function == call.__name__
    for arguments in ((q, k.to_sparse(), v), (q, k, v, mask.to_sparse())):
        call = of_share if len(arguments) == 3 else of_blocks
        with pytest.raises(UnsupportedError, match=rf"^{call.__name__}\(\): argument '\w+' has layout sparse_coo"):
            call(*arguments)
    # Of other floating point types k and v become q's.
    assert torch.equal(of_share(q, k.double(), v.double()), of_share(q, k, v))


def test_what_is_refused() -> None:
    q, k, v = qkv()
    call = spas.spas_sage2_attn_meansim_topk_cuda
    for options, error, said in (
        ({"attn_mask": torch.ones(300, 300, dtype=torch.bool)}, UnsupportedError, "attn_mask"),
        ({"dropout_p": 0.1}, UnsupportedError, "dropout_p"),
        ({"topk": None}, ArgumentError, "neither"),
        ({"cdfthreshd": 0.5}, ArgumentError, "both"),
        ({"topk": 1.5}, ArgumentError, "'topk'"),
        ({"topk": None, "cdfthreshd": 0.0}, ArgumentError, "'cdfthreshd'"),
        ({"topk": torch.full((3,), 0.5)}, ArgumentError, "'topk'.*4 of them"),
        ({"simthreshd1": torch.full((4,), 0.5)}, UnsupportedError, "simthreshd1 for each head"),
        ({"simthreshd1": float("nan")}, ArgumentError, "'simthreshd1'"),
        ({"pvthreshd": "x"}, ArgumentError, "'pvthreshd'"),
        ({"tensor_layout": "BSHD"}, ArgumentError, "'tensor_layout'"),
        ({"output_dtype": torch.int8}, ArgumentError, "'output_dtype'"),
        ({"return_lse": True, "return_sparsity": True}, ArgumentError, "'return_lse'"),
        ({"scale": "x"}, ArgumentError, "'scale'"),
    ):
        with pytest.raises(error, match=said):
            call(q, k, v, **options)
    with pytest.raises(UnsupportedError, match="300 queries and 500 keys"):
        call(*qkv(300, 500), is_causal=True)
    with pytest.raises(ShapeError, match="'q'"):
        call(q[0], k, v)
    with pytest.raises(ArgumentError, match="'mask_id'"):
        spas.block_sparse_sage2_attn_cuda(q, k, v)
    with pytest.raises(ShapeError, match="'mask_id'"):
        spas.block_sparse_sage2_attn_cuda(q, k, v, torch.ones(2, 4, 3, 3, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="gradient"):
        call(q.requires_grad_(), k, v)
