"""Heads of 257 to 512 channels on Hopper's own kernel, attn_fwd_d512_sm90: forward, dense and packed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="a kernel of sm_90a"
    ),
]

FAMILY = "attn_fwd_d512_sm90"
PAIRS = [(512, 512), (264, 264), (320, 320), (384, 384), (512, 256), (256, 512), (320, 512), (512, 64), (8, 512)]
LENGTHS = [(1, 1), (1, 300), (63, 64), (64, 65), (65, 127), (129, 128), (200, 513), (300, 77), (513, 1025)]
#: What rounding P and o to the type costs, of values from a normal distribution.
MOST = {"float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls so small that another kernel would be chosen, too."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", ",".join(spec.name for spec in REGISTRY if spec.family == FAMILY))


def randn(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(getattr(torch, dtype))


def exact(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    sinks: Any = None,
) -> tuple[Any, Any]:
    """o and LSE in float64, of one batch in the layout NHD."""
    group = q.shape[2] // max(k.shape[2], 1)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[-2:]
    at = torch.arange(rows, device="cuda")[:, None] + keys - rows
    key = torch.arange(keys, device="cuda")[None]
    left, right = window
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device="cuda")
    if causal:
        right = 0
    if right >= 0:
        hidden |= key > at + right
    if left >= 0:
        hidden |= key < at - left
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)[..., :keys]
    return (p @ v.repeat_interleave(group, 1)).transpose(1, 2), lse


def assert_close(o: Any, lse: Any, wanted: tuple[Any, Any], dtype: str = "bfloat16", scale: float = 1.0) -> None:
    assert o.shape == wanted[0].shape
    error = (o.double() - wanted[0]).abs().max().item() if o.numel() else 0.0
    assert error <= scale * MOST[dtype], f"o: {error}"
    finite = wanted[1].isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(wanted[1]))
    error = (lse.double() - wanted[1])[finite].abs().max().item() if finite.any() else 0.0
    assert error <= 2e-3 * scale, f"lse: {error}"


def check(q: Any, k: Any, v: Any, dtype: str = "bfloat16", **options: Any) -> tuple[Any, Any]:
    """Run on this kernel, into outputs of NaN, and compare."""
    assert oa.explain(oa.attention, q, k, v, **options).kernel.startswith(FAMILY)
    out = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), device="cuda", dtype=q.dtype)
    o, lse = oa.attention(q, k, v, out=out, return_lse=True, **options)
    assert_close(o, lse, exact(q, k, v, **options), dtype)
    return o, lse


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), PAIRS)
def test_head_dims(head_dim: int, head_dim_v: int, dtype: str) -> None:
    q = randn(2, 200, 4, head_dim, dtype=dtype)
    k, v = (randn(2, 333, 2, d, dtype=dtype, seed=d) for d in (head_dim, head_dim_v))
    for causal in (False, True):
        check(q, k, v, dtype, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(lengths: tuple[int, int], causal: bool) -> None:
    q, k, v = (randn(2, n, 3, 512, seed=i) for i, n in enumerate((lengths[0], *lengths[1:] * 2)))
    check(q, k, v, causal=causal)


def test_many_tiles() -> None:
    # More tiles than clusters, and a length that is no multiple of a tile's rows.
    q, k, v = (randn(3, 1100, 8, 512, seed=i) for i in range(3))
    for causal in (False, True):
        first = check(q, k, v, causal=causal)
        for _ in range(3):
            again = oa.attention(q, k, v, causal=causal, return_lse=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, 0)},
        {"window": (0, 0)},
        {"window": (65, 130)},
        {"window": (-1, 20)},
        {"softcap": 2.0},
        {"softcap": 30.0, "causal": True},
        {"softmax_scale": 0.3},
        {"softmax_scale": 0.0},
        {"softmax_scale": -0.05, "causal": True},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    q, k, v = (randn(2, n, h, 512, seed=n) for n, h in ((400, 6), (450, 2), (450, 2)))
    check(q, k, v, **options)


@pytest.mark.parametrize("sinks_dtype", ["float32", "bfloat16"])
def test_sinks(sinks_dtype: str) -> None:
    q, k, v = (randn(2, 190, 4, 512, seed=i) for i in range(3))
    sinks = randn(4, dtype=sinks_dtype, seed=9)
    check(q, k, v, sinks=sinks)
    check(q[:, :100], k[:, :50], v[:, :50], sinks=sinks, causal=True)


def test_growing_scores() -> None:
    # Bases that rise from step to step, in one CTA's keys and the other's: keys 64 apart in turn.
    q, k, v = (randn(1, 700, 2, 512, seed=i) for i in range(3))
    q = q.abs()
    for period in (64, 128, 192):
        size = 1 + (torch.arange(700, device="cuda") // period % 7).flip(0).float()
        grown = (k.abs() * size[None, :, None, None]).bfloat16()
        for causal in (False, True):
            options = {"causal": causal, "softmax_scale": 0.05}
            o, lse = oa.attention(q, grown, v, return_lse=True, **options)
            assert_close(o, lse, exact(q, grown, v, **options), scale=4.0)


def test_strides_and_layouts() -> None:
    q, k, v = (randn(2, 4, 150, 512, seed=i) for i in range(3))
    o, lse = oa.attention(q, k, v, layout="HND", return_lse=True)
    wanted = exact(*(x.transpose(1, 2) for x in (q, k, v)))
    assert_close(o.transpose(1, 2), lse, wanted)
    wide = randn(2, 150, 4, 1104)
    check(wide[..., :512], wide[..., 552:1064], wide[..., 8:520])
    one = randn(2, 150, 1, 512)
    check(q.transpose(1, 2), one.expand(-1, -1, 4, -1), one.expand(-1, -1, 4, -1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (320, 384), (512, 128)])
def test_packed(head_dim: int, head_dim_v: int, causal: bool) -> None:
    lengths_q, lengths_k = [5, 0, 130, 64, 257, 1, 0], [70, 33, 130, 0, 300, 129, 0]
    # Rows before, between and behind the sequences are NaN, and belong to nobody.
    check_packed(head_dim, head_dim_v, lengths_q, lengths_k, causal=causal)
    check_packed(head_dim, head_dim_v, lengths_q, lengths_k, causal=causal, window=(50, 0))
    check_packed(head_dim, head_dim_v, [90] * 40, [100] * 40, causal=causal)


def check_packed(head_dim: int, head_dim_v: int, lengths_q: list[int], lengths_k: list[int], **options: Any) -> None:
    group, heads = 2, 4
    starts_q, starts_k = ([sum(n[:i]) for i in range(len(n) + 1)] for n in (lengths_q, lengths_k))
    q = randn(starts_q[-1] + 3, heads, head_dim)
    k, v = (randn(starts_k[-1] + 5, heads // group, d, seed=d) for d in (head_dim, head_dim_v))
    for x, end in ((q, starts_q[-1]), (k, starts_k[-1]), (v, starts_k[-1])):
        x[end:] = torch.nan
    arrays = {
        f"cu_seqlens_{name}": torch.tensor(starts, dtype=torch.int32, device="cuda")
        for name, starts in (("q", starts_q), ("k", starts_k))
    }
    sizes = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
    assert oa.explain(oa.attention_varlen, q, k, v, **arrays, **sizes, **options).kernel.startswith(FAMILY)
    out = torch.full((*q.shape[:-1], head_dim_v), float("nan"), device="cuda", dtype=q.dtype)
    o, lse = oa.attention_varlen(q, k, v, out=out, return_lse=True, **arrays, **sizes, **options)
    for i, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        of_q, of_k = slice(starts_q[i], starts_q[i] + rows), slice(starts_k[i], starts_k[i] + keys)
        # NaN in the other sequences is not seen.
        assert_close(o[None, of_q], lse[None, :, of_q], exact(q[None, of_q], k[None, of_k], v[None, of_k], **options))
    assert (o[starts_q[-1] :] == 0).all()
    assert torch.isneginf(lse[:, starts_q[-1] :]).all()


def test_packed_neighbours_of_nan() -> None:
    q, k, v = (randn(300, 2, 512, seed=i) for i in range(3))
    starts = torch.tensor([0, 100, 170, 300], dtype=torch.int32, device="cuda")
    call = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 130, "max_seqlen_k": 130}
    clean = oa.attention_varlen(q, k, v, **call)
    for x in (q, k, v):
        x[100:170] = torch.nan
    soiled = oa.attention_varlen(q, k, v, **call)
    assert torch.equal(clean[:100], soiled[:100])
    assert torch.equal(clean[170:], soiled[170:])
    assert soiled[100:170].isnan().all()


def test_packed_seqused() -> None:
    q, k, v = (randn(300, 2, 512, seed=i) for i in range(3))
    starts = torch.tensor([0, 100, 170, 300], dtype=torch.int32, device="cuda")
    used = torch.tensor([40, 0, 129], dtype=torch.int32, device="cuda")
    call = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 130, "max_seqlen_k": 130}
    o, lse = oa.attention_varlen(q, k, v, seqused_k=used, return_lse=True, **call)
    for begin, end, count in ((0, 100, 40), (100, 170, 0), (170, 300, 129)):
        wanted = exact(q[None, begin:end], *(x[None, begin : begin + count] for x in (k, v)))
        assert_close(o[None, begin:end], lse[None, :, begin:end], wanted)


@pytest.mark.parametrize(("head_dim", "is_here"), [(256, False), (264, True), (512, True)])
def test_chosen(head_dim: int, is_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNIATTN_FORCE_KERNEL")
    q, k, v = (randn(1, 4096, 4, head_dim, seed=i) for i in range(3))
    for causal in (False, True):
        assert oa.explain(oa.attention, q, k, v, causal=causal).kernel.startswith(FAMILY) == is_here
