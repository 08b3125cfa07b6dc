"""v with a head_dim of its own, and arrays expanded by strides of 0, on every kernel of this GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402

pytestmark = pytest.mark.gpu

TUNED = [(192, 128), (128, 64), (64, 128), (96, 64)]
PAIRS = [*TUNED, (8, 256), (256, 8), (72, 40), (200, 136), (24, 16)]
#: Rows for v of another head_dim that any GPU runs, the narrowest first.
GENERAL = {
    dtype: ",".join(
        spec.name
        for spec in sorted(REGISTRY, key=lambda spec: spec.head_dim)
        if spec.other_head_dim_v and spec.dtype == dtype
    )
    for dtype in ("float16", "bfloat16")
}


@pytest.fixture(params=["chosen", "general"])
def kernels(request: pytest.FixtureRequest) -> str:
    """The kernels that selection chooses, and those that any GPU runs."""
    return str(request.param)


def force(kernels: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "general":
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", GENERAL[dtype])


def tensors(
    head_dim: int, head_dim_v: int, dtype: str = "bfloat16", seqlens: tuple[int, int] = (257, 300), batch: int = 2
) -> list[Any]:
    torch.manual_seed(head_dim + head_dim_v)
    shapes = ((batch, seqlens[0], 6, head_dim), *((batch, seqlens[1], 2, d) for d in (head_dim, head_dim_v)))
    return [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for shape in shapes]


def exact(q: Any, k: Any, v: Any, causal: bool = False, softcap: float = 0.0, mask: Any = None) -> tuple[Any, Any]:
    """o and LSE in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        rows, keys = scores.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool, device="cuda").triu(keys - rows + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    o = scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1)
    return o.transpose(1, 2), lse


def check(got: Any, wanted: Any, dtype: str) -> None:
    """o and LSE within what rounding P and o to the dtype costs."""
    most = {"float16": 4e-3, "bfloat16": 2e-2}[dtype]
    assert got[0].shape == wanted[0].shape
    assert (got[0].double() - wanted[0]).abs().max().item() <= most
    finite = wanted[1].isfinite()
    assert torch.equal(got[1].isfinite(), finite)
    assert (got[1].double() - wanted[1])[finite].abs().max().item() <= 2e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), PAIRS)
def test_dense(head_dim: int, head_dim_v: int, dtype: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force(kernels, dtype, monkeypatch)
    q, k, v = tensors(head_dim, head_dim_v, dtype)
    options: list[dict[str, Any]] = [
        {}, {"causal": True}, {"softcap": 20.0, "causal": True},
        {"mask": torch.rand(2, 1, 257, 300, device="cuda") < 0.6},
        {"mask": torch.randn(1, 6, 257, 304, device="cuda")[..., :300]},
    ]  # fmt: skip
    for given in options:
        check(oa.attention(q, k, v, return_lse=True, **given), exact(q, k, v, **given), dtype)
    few = tensors(head_dim, head_dim_v, dtype, (5, 6000), 1)
    check(oa.attention(*few, return_lse=True), exact(*few), dtype)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), PAIRS)
def test_packed(head_dim: int, head_dim_v: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of which one is empty; NaN behind each one's keys does not reach it."""
    force(kernels, "bfloat16", monkeypatch)
    q, k, v = (x[0] for x in tensors(head_dim, head_dim_v, seqlens=(333, 333), batch=1))
    ends = (0, 70, 70, 200, 333)
    v[200:] = torch.nan
    starts = torch.tensor(ends, device="cuda", dtype=torch.int32)
    o, lse = oa.attention_varlen(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=133, max_seqlen_k=133, causal=True,
        return_lse=True,
    )  # fmt: skip
    assert o[200:].isnan().all()
    for begin, end in ((0, 70), (70, 200)):
        wanted = exact(*(x[None, begin:end] for x in (q, k, v)), causal=True)
        check((o[None, begin:end], lse[None, :, begin:end]), wanted, "bfloat16")


def test_out_and_layout(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force(kernels, "bfloat16", monkeypatch)
    q, k, v = tensors(96, 64)
    memory = torch.full((2, 6, 257, 80), 7.0, device="cuda", dtype=q.dtype)
    hnd = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    got = oa.attention(*hnd, layout="HND", out=memory[..., :64])
    assert torch.equal(got.transpose(1, 2), oa.attention(q, k, v))
    assert (memory[..., 64:] == 7.0).all(), "written behind the rows"


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [*TUNED, (40, 16), (8, 200)])
def test_low_precision(
    head_dim: int, head_dim_v: int, varlen: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of v filled up with zeros, or q and k, by the same kernel: fewer bytes may want another split."""
    q, k, v = tensors(head_dim, head_dim_v)
    wide = max(head_dim, head_dim_v)
    padded = [torch.nn.functional.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v)]
    options: dict[str, Any] = {"precision": precision, "return_lse": True, "softmax_scale": head_dim**-0.5}
    function = oa.attention
    if varlen:
        q, k, v, *padded = (x.flatten(0, 1) for x in (q, k, v, *padded))
        for name, rows in (("q", 257), ("k", 300)):
            options[f"cu_seqlens_{name}"] = torch.arange(3, device="cuda", dtype=torch.int32) * rows
            options[f"max_seqlen_{name}"] = rows
        function = oa.attention_varlen
    wanted = function(*padded, **options)
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", oa.explain(function, *padded, **options).kernel)
    got = function(q, k, v, **options)
    assert torch.equal(got[0], wanted[0][..., :head_dim_v])
    assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 128)])
def test_gradients_by_autograd(head_dim: int, head_dim_v: int) -> None:
    inputs = [x.requires_grad_() for x in tensors(head_dim, head_dim_v)]
    o = oa.attention(*inputs, causal=True)
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, inputs, do)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(exact(*wide, causal=True)[0], wide, do.double())
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).abs().max().item() <= 2e-2 * b.abs().max().item()
    q, k, v = (x.detach() for x in inputs)
    o, lse = oa.attention(q, k, v, return_lse=True)
    with pytest.raises(oa.errors.UnsupportedError, match="one head_dim"):
        oa.attention_backward(do, q, k, v, o, lse)


EXPANDED = ["heads", "batch", "both", "k alone", "q", "keys"]


def expanded(kind: str, head_dim: int, head_dim_v: int) -> list[Any]:
    q, k, v = (torch.randn(3, 257, 6, d, device="cuda", dtype=torch.bfloat16) for d in (head_dim, head_dim, head_dim_v))
    if kind in ("heads", "both"):
        k, v = (x[:, :, :1].expand(x.shape) for x in (k, v))
    if kind in ("batch", "both"):
        k, v = (x[:1].expand(x.shape) for x in (k, v))
    if kind == "k alone":
        k = k[:1].expand(k.shape)
    if kind == "q":
        q = q[:1].expand(q.shape)
    if kind == "keys":
        v = v[:, :1].expand(v.shape)
    return [q, k, v]


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "kernels"),
    [(64, 64, "chosen"), (128, 128, "chosen"), (192, 128, "chosen"), (192, 128, "general")],
)
@pytest.mark.parametrize("kind", EXPANDED)
def test_expanded_arrays(
    kind: str, head_dim: int, head_dim_v: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run the kernels of contiguous ones, with the same bits, forward and backward."""
    force(kernels, "bfloat16", monkeypatch)
    torch.manual_seed(len(kind))
    arrays = expanded(kind, head_dim, head_dim_v)
    copies = [x.contiguous() for x in arrays]
    for options in ({}, {"causal": True}):
        assert str(oa.explain(*arrays, **options)) == str(oa.explain(*copies, **options))
        got, wanted = (oa.attention(*x, return_lse=True, **options) for x in (arrays, copies))
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1], wanted[1])
    if head_dim == head_dim_v:
        do = torch.randn_like(got[0])
        o, lse = got
        backward = [oa.attention_backward(do, *x, o, lse, causal=True, deterministic=True) for x in (arrays, copies)]
        assert all(map(torch.equal, *backward))


@pytest.mark.parametrize("kind", ["heads", "keys"])
def test_expanded_packed_arrays(kind: str) -> None:
    arrays = [x[0] for x in expanded(kind, 128, 128)]
    copies = [x.contiguous() for x in arrays]
    starts = torch.tensor([0, 100, 257], device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {
        "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 157, "max_seqlen_k": 157, "causal": True,
    }  # fmt: skip
    got, wanted = (oa.attention_varlen(*x, return_lse=True, **options) for x in (arrays, copies))
    assert torch.equal(got[0], wanted[0])
    do = torch.randn_like(got[0])
    backward = [oa.attention_varlen_backward(do, *x, *got, deterministic=True, **options) for x in (arrays, copies)]
    assert all(map(torch.equal, *backward))
