"""Masks, additive masks and score_mod on Hopper's kernel for heads of 257 to 512 channels, attn_fwd_d512_sm90."""

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
LENGTHS = [(1, 1), (1, 300), (63, 64), (64, 65), (65, 127), (129, 128), (200, 513), (300, 77), (513, 1025)]
#: What rounding P and o to the type costs, of values from a normal distribution.
MOST = {"float16": 6e-3, "bfloat16": 4e-2}


@pytest.fixture(autouse=True)
def this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls so small that another kernel would be chosen, too."""
    rows = [spec.name for spec in REGISTRY if spec.family == FAMILY and spec.masks != "none"]
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", ",".join(rows))


def randn(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(getattr(torch, dtype))


def rand(*shape: int, seed: int = 0) -> Any:
    return torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def qkv(batch: int, rows: int, keys: int, heads: int = 4, heads_kv: int = 2, dims: tuple[int, int] = (512, 512),
        dtype: str = "bfloat16") -> list[Any]:  # fmt: skip
    shapes = (batch, rows, heads, dims[0]), (batch, keys, heads_kv, dims[0]), (batch, keys, heads_kv, dims[1])
    return [randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def exact(
    q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, softmax_scale: float | None = None, score: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """o and LSE in float64. score: what a score_mod does to scores, with the positions of queries and keys."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[-2:]
    row, key = torch.arange(rows, device="cuda")[:, None], torch.arange(keys, device="cuda")[None]
    if score is not None:
        scores = score(scores, row, key)
    if mask is not None:
        # A hidden key is hidden whatever its score is.
        hides = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        if mask.dtype != torch.bool:
            scores = scores + mask.double()
        scores = torch.where(hides, -torch.inf, scores)
    at, (left, right) = row + keys - rows, window
    right = 0 if causal else right
    hidden = (key > at + right) & (right >= 0) | (key < at - left) & (left >= 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    dead = torch.isneginf(scores).all(-1, keepdim=True)
    p = (scores - lse[..., None]).exp().masked_fill(dead, 0.0)
    return (p @ v.repeat_interleave(group, 1)).transpose(1, 2), lse


def assert_close(o: Any, lse: Any, wanted: tuple[Any, Any], dtype: str, what: str) -> None:
    assert o.shape == wanted[0].shape, what
    assert torch.equal(o.isnan(), wanted[0].isnan()), what
    assert torch.equal(lse.isnan(), wanted[1].isnan()), what
    assert torch.equal(torch.isneginf(lse), torch.isneginf(wanted[1])), what
    error = (o.double() - wanted[0]).nan_to_num().abs().max().item() if o.numel() else 0.0
    assert error <= MOST[dtype], f"{what}: o {error}"
    finite = wanted[1].isfinite()
    if finite.any():
        difference = (lse.double() - wanted[1])[finite].abs()
        most = 2e-3 + 2e-7 * wanted[1][finite].abs()
        assert (difference <= most).all(), f"{what}: lse {difference.max().item()}"


def check(q: Any, k: Any, v: Any, what: str = "", **options: Any) -> tuple[Any, Any]:
    """Run on this kernel, into outputs of NaN, and compare."""
    assert oa.explain(oa.attention, q, k, v, **options).kernel.startswith(FAMILY), what
    out = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), device="cuda", dtype=q.dtype)
    o, lse = oa.attention(q, k, v, out=out, return_lse=True, **options)
    assert_close(o, lse, exact(q, k, v, **options), str(q.dtype).removeprefix("torch."), what)
    return o, lse


def masks(batch: int, heads: int, rows: int, keys: int, dtype: str = "bfloat16") -> dict[str, Any]:
    """Of every kind and form."""
    seen = rand(batch, heads, rows, keys, seed=1) < 0.6
    # Whole tiles that are hidden from all queries, or from 64 of 128; a row that sees nothing.
    tiles = seen.clone()
    tile_of_row, tile_of_key = torch.arange(rows, device="cuda")[:, None] // 64, torch.arange(keys, device="cuda") // 64
    tiles &= (tile_of_row // 2 + tile_of_key) % 3 != 1
    tiles &= (tile_of_row + 2 * tile_of_key) % 5 != 2
    tiles |= (tile_of_row + tile_of_key) % 4 == 3  # and some that are not cut
    tiles[:, :, rows // 2] = False
    number = randn(batch, heads, rows, keys, dtype="float32", seed=2)
    hiding = number.masked_fill(~tiles, -torch.inf)
    far = number * torch.where(rand(batch, heads, rows, 1, seed=3) < 0.5, 1.0, 20000.0)
    padding = torch.arange(keys, device="cuda") < torch.randint(0, keys + 1, (batch, 1, 1, 1), device="cuda")
    return {
        "bool": seen,
        "bool of a batch": seen[:, :1],
        "bool of all": tiles[:1, :1],
        "tiles": tiles,
        "tiles of a head": tiles[:1],
        "nothing seen": torch.zeros_like(seen[:1, :1]),
        "everything seen": torch.ones_like(seen[:1, :1]),
        "padding": padding,
        "keys": (number * 3)[:, :, :1],
        "keys of all": number[:1, :1, :1].masked_fill(~padding[:1], -torch.inf),
        "far keys": (number * 20000.0)[:, :1, :1],
        "fp32": number,
        "fp32 of all": number[:1, :1],
        "fp32 that hides": hiding,
        "fp32 far": far,
        "lowest": torch.where(seen, number, torch.finfo(torch.float32).min)[:, :1],
        "16 bits": number.to(getattr(torch, dtype)),
        "16 bits of a head": number[:1].to(getattr(torch, dtype)),
        "16 bits that hide": hiding.to(getattr(torch, dtype)),
        "16 bits far": (far if dtype == "bfloat16" else far / 2).to(getattr(torch, dtype)),
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masks(dtype: str, causal: bool) -> None:
    q, k, v = qkv(2, 330, 420, dtype=dtype)
    failed = []
    for name, mask in masks(2, 4, 330, 420, dtype).items():
        try:
            check(q, k, v, name, mask=mask, causal=causal)
        except AssertionError as error:
            failed.append(f"{name}: {error!s:.120}")
    assert not failed, failed


@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(lengths: tuple[int, int]) -> None:
    q, k, v = qkv(2, *lengths)
    for name, mask in masks(2, 4, *lengths).items():
        if name in ("bool", "tiles", "padding", "keys", "fp32", "16 bits"):
            for options in ({}, {"causal": True}, {"window": (70, 20)}):
                check(q, k, v, f"{name} {options}", mask=mask, **options)


@pytest.mark.parametrize("dims", [(264, 264), (384, 384), (512, 64), (8, 512), (320, 512)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    q, k, v = qkv(2, 200, 333, dims=dims)
    given = masks(2, 4, 200, 333)
    for name in ("tiles", "padding", "fp32", "16 bits"):
        check(q, k, v, name, mask=given[name], causal=True)


@pytest.mark.parametrize(
    "options", [{"softcap": 2.0}, {"softcap": 30.0, "causal": True}, {"softmax_scale": 0.0}, {"softmax_scale": -0.05}],
    ids=str,
)  # fmt: skip
def test_with_other_options(options: dict[str, Any]) -> None:
    q, k, v = qkv(2, 200, 333)
    given = masks(2, 4, 200, 333)
    for name in ("tiles", "padding", "keys", "fp32", "16 bits"):
        check(q, k, v, name, mask=given[name], **options)


def test_strides() -> None:
    q, k, v = qkv(2, 200, 333)
    wide = randn(2, 4, 200, 361, dtype="float32", seed=4)
    for mask in (wide[..., 3:336], wide[..., 28:].flip(-1), wide.bfloat16()[..., 1:334], (wide > 0)[..., 5:338]):
        check(q, k, v, mask=mask)
        check(q, k, v, mask=mask[:, :1].expand(-1, 4, -1, -1), causal=True)


def test_nan_of_a_mask() -> None:
    q, k, v = qkv(1, 200, 333)
    for dtype in (torch.float32, torch.bfloat16):
        mask = randn(1, 1, 200, 333, dtype="float32", seed=5).to(dtype)
        mask[..., 77, 200] = torch.nan
        o, _ = check(q, k, v, str(dtype), mask=mask)
        assert o[:, 77].isnan().all()
        assert o.isnan().sum() == o[:, 77].numel()


def test_growing_scores() -> None:
    """Bases that rise from step to step, with tiles that are passed over, and the same bits each time."""
    q, k, v = qkv(1, 300, 1100)
    size = 1 + (torch.arange(1100, device="cuda") // 64 % 7).flip(0).float()
    q, k = q.abs() / 4, (k.abs() * size[None, :, None, None] / 4).bfloat16()
    mask = masks(1, 4, 300, 1100)["tiles"]
    first = check(q, k, v, mask=mask)
    for _ in range(3):
        again = oa.attention(q, k, v, mask=mask, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_many_tiles() -> None:
    q, k, v = qkv(3, 1100, 1100, heads=8)
    for name, mask in masks(3, 8, 1100, 1100).items():
        if name in ("tiles", "keys", "fp32", "16 bits that hide"):
            for causal in (False, True):
                check(q, k, v, name, mask=mask, causal=causal)


def test_block_mask() -> None:
    q, k, v = qkv(2, 400, 600)
    blocks = rand(2, 4, 4, 5, seed=6) < 0.5
    seen = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :400, :600]
    for options in ({}, {"causal": True}):
        o, lse = oa.attention(q, k, v, block_mask=blocks, return_lse=True, **options)
        assert_close(o, lse, exact(q, k, v, mask=seen, **options), "bfloat16", str(options))
    bias = randn(1, 1, 400, 600, seed=7)
    o, lse = oa.attention(q, k, v, block_mask=blocks, mask=bias, return_lse=True)
    wanted = exact(q, k, v, mask=bias.float().masked_fill(~seen, -torch.inf))
    assert_close(o, lse, wanted, "bfloat16", "with a bias")


def test_score_mod() -> None:
    q, k, v = qkv(2, 200, 333)
    slopes = torch.tensor([0.5, 0.1, 0.02, 1e5], device="cuda")
    alibi = oa.ScoreMod("score - slopes[h] * fabsf(q + 133.0f - k)", slopes=slopes)

    def modify(scores: Any, row: Any, key: Any) -> Any:
        return scores - slopes.double()[None, :, None, None] * (row + 133 - key).abs()

    near = oa.ScoreMod("score * 2.0f", mask="k % 3 != 1 && k < q + 100")

    def double_near(scores: Any, row: Any, key: Any) -> Any:
        return (scores * 2).masked_fill((key % 3 == 1) | (key >= row + 100), -torch.inf)

    mask = masks(2, 4, 200, 333)["tiles"]
    for name, mod, score in (("alibi", alibi, modify), ("near", near, double_near)):
        for options in ({}, {"causal": True}, {"mask": mask}, {"softcap": 5.0}):
            o, lse = oa.attention(q, k, v, score_mod=mod, return_lse=True, **options)
            assert_close(o, lse, exact(q, k, v, score=score, **options), "bfloat16", f"{name} {list(options)}")


def packed(lengths: list[tuple[int, int]], form: str, **options: Any) -> None:
    """Sequences with a mask each; NaN before, between and behind them is not seen."""
    heads, group, rows, keys = 4, 2, max(x for x, _ in lengths), max(x for _, x in lengths)
    starts = [torch.tensor([0, *(x[i] for x in lengths)], device="cuda").cumsum(0).int() for i in range(2)]
    q = randn(int(starts[0][-1]) + 3, heads, 512)
    k, v = (randn(int(starts[1][-1]) + 5, heads // group, 512, seed=i) for i in (1, 2))
    for x, end in zip((q, k, v), (starts[0][-1], starts[1][-1], starts[1][-1]), strict=True):
        x[end:] = torch.nan
    mask = masks(len(lengths), heads, rows, keys)[form]
    call = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": rows, "max_seqlen_k": keys}
    assert oa.explain(oa.attention_varlen, q, k, v, mask=mask, **call, **options).kernel.startswith(FAMILY)
    out = torch.full_like(q, float("nan"))
    o, lse = oa.attention_varlen(q, k, v, mask=mask, out=out, return_lse=True, **call, **options)
    for i, (m, n) in enumerate(lengths):
        of_q, of_k = (slice(int(s[i]), int(s[i + 1])) for s in starts)
        of_mask = mask[i if mask.shape[0] > 1 else 0][None]
        of_mask = of_mask[:, :, :m] if of_mask.shape[2] > 1 else of_mask
        wanted = exact(q[None, of_q], k[None, of_k], v[None, of_k], of_mask[..., :n], **options)
        assert_close(o[None, of_q], lse[None, :, of_q], wanted, "bfloat16", f"{form} {options} sequence {i}")
    assert (o[starts[0][-1] :] == 0).all()


@pytest.mark.parametrize("form", ["bool", "tiles", "padding", "keys"])
def test_packed(form: str) -> None:
    for options in ({}, {"causal": True}, {"softcap": 5.0}):
        packed([(5, 70), (0, 33), (130, 130), (64, 0), (257, 300), (1, 129), (0, 0)], form, **options)
    packed([(90, 100)] * 20, form)


def test_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNIATTN_FORCE_KERNEL")
    q, k, v = qkv(1, 4096, 4096)
    for mask in (rand(4096, 4096) < 0.5, randn(4096, 4096), randn(4096, 4096, dtype="float32"), rand(1, 1, 1, 4096)):
        assert oa.explain(oa.attention, q, k, v, mask=mask).kernel.startswith(FAMILY)
