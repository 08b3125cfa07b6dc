"""Few queries on many keys, which kernels split over CTAs: Hopper's plain calls, those of every GPU everything."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402
from omniattn.select import MaskInput  # noqa: E402

from .plans import only_rows, split_rows_with_scores  # noqa: E402
from .ways import in_way  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the Hopper kernel's"
    ),
]


def tensors(batch: int, heads: tuple[int, int], seqlens: tuple[int, int], head_dim: int, dtype: str) -> tuple[Any, ...]:
    torch.manual_seed(seqlens[1])
    kind = getattr(torch, dtype)
    shapes = [(batch, seqlens[0], heads[0], head_dim), *[(batch, seqlens[1], heads[1], head_dim)] * 2]
    return tuple(torch.randn(shape, device="cuda", dtype=kind) for shape in shapes)


def exact(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sinks: Any = None,
    softcap: float = 0.0,
    mask: Any = None,
) -> tuple[Any, Any]:
    """o and LSE in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    i = torch.arange(q.shape[2], device="cuda")[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device="cuda")[None]
    left, right = window or (-1, -1)
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device="cuda")
    if causal or right >= 0:
        hidden |= j > i + max(right, 0) * (not causal)
    if left >= 0:
        hidden |= j < i - left
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()[..., : k.shape[2]]
    return (p @ v.repeat_interleave(group, 1)).transpose(1, 2), lse


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 112, 128, 256])
@pytest.mark.parametrize(
    ("batch", "heads", "seqlens", "options"),
    [
        (1, (32, 8), (16, 8192), {}),
        (2, (6, 2), (77, 7003), {"causal": True}),
        (1, (8, 8), (33, 9000), {"window": (8500, 20)}),
        (1, (12, 1), (1, 5001), {"causal": True, "sinks": True}),
        (1, (14, 2), (300, 20000), {"causal": True}),
        (1, (1, 1), (1, 100000), {}),
        (8, (71, 1), (1, 4096), {}),
        # Heads that leave rows of a tile unused; and batches that fill the GPU, with one split.
        (1, (28, 4), (16, 8192), {}),
        (3, (40, 8), (3, 5000), {"causal": True, "sinks": True}),
        (48, (32, 8), (2, 640), {"causal": True}),
        (60, (14, 2), (1, 900), {}),
    ],
    ids=str,
)
def test_beside_float64(
    batch: int, heads: tuple[int, int], seqlens: tuple[int, int], options: dict[str, Any], head_dim: int, dtype: str
) -> None:
    q, k, v = tensors(batch, heads, seqlens, head_dim, dtype)
    options = dict(options)
    sinks = torch.randn(heads[0], device="cuda") if options.pop("sinks", False) else None
    call: dict[str, Any] = {**options, "sinks": sinks}
    o, lse = in_way(lambda way: way.row.op == "attention_split", oa.attention, q, k, v, return_lse=True, **call)
    want, want_lse = exact(q, k, v, options.get("causal", False), options.get("window"), sinks)
    unit = 2.0 ** (-11 if dtype == "float16" else -8)
    # A rounding of the result, and of the probabilities that it sums.
    bound = 1.5 * unit * (want.abs() + v.double().abs().max() / 16) + 1e-6
    assert bool(((o.double() - want).abs() <= bound).all())
    assert torch.allclose(lse.double(), want_lse, atol=2e-3)
    for _ in range(3):
        assert torch.equal(oa.attention(q, k, v, **call), o)


def test_graph_replays() -> None:
    q, k, v = tensors(1, (32, 8), (16, 8192), 128, "bfloat16")
    expected = oa.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    out = torch.empty_like(q)
    with torch.cuda.graph(graph):
        oa.attention(q, k, v, out=out)
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def _masks(name: str, batch: int, heads: int, seqlens: tuple[int, int], dtype: Any) -> Any:
    sq, sk = seqlens
    if name == "boolean":  # a row that sees nothing, and tiles that nobody sees
        mask = torch.rand(batch, 1, sq, sk, device="cuda") < 0.7
        mask[:, :, 0] = False
        mask[..., sk // 8 : sk // 2] = False
        return mask
    if name == "boolean of keys and heads":
        return torch.rand(batch, heads, 1, sk, device="cuda") < 0.5
    if name == "boolean of keys":
        return torch.rand(batch, 1, 1, sk, device="cuda") < 0.5
    if name == "float32":
        return torch.randn(batch, heads, sq, sk, device="cuda")
    if name == "boolean of heads":  # each of which sees other tiles
        mask = torch.rand(batch, heads, sq, sk, device="cuda") < 0.7
        for h in range(heads):
            mask[:, h, :, sk * h // (2 * heads) : sk * (h + 1) // (2 * heads)] = False
        return mask
    if name == "of keys":
        return torch.randn(batch, 1, 1, sk, device="cuda")
    if name == "of keys and heads":
        return torch.randn(batch, heads, 1, sk, device="cuda")
    if name == "of queries":
        return torch.randn(batch, heads, sq, 1, device="cuda").to(dtype).expand(-1, -1, -1, sk)
    if name == "odd addresses":
        return torch.randn(batch, heads, sq, sk + 1, device="cuda").to(dtype)[..., 1:]
    if name == "transposed":
        return torch.randn(batch, heads, sk, sq, device="cuda").to(dtype).transpose(-1, -2)
    return torch.randn(1, 1, sq, sk, device="cuda").to(dtype)


def _close(o: Any, lse: Any, want: Any, want_lse: Any, dtype: str) -> bool:
    unit = 2.0 ** (-11 if dtype == "float16" else -8)
    error = (o.double() - want).norm() <= 1.5 * unit * want.norm() + 1e-6
    same = torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    seen = want_lse != -torch.inf
    return bool(error) and same and bool(((lse.double() - want_lse)[seen].abs() <= 2e-3).all())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "form",
    [
        "plain", "causal", "window", "softcap", "sinks", "boolean", "boolean, softcap, causal", "boolean of keys",
        "float32", "of keys", "io", "boolean of heads", "of keys and heads", "of queries", "odd addresses",
        "transposed", "boolean of keys and heads",
    ],
)  # fmt: skip
def test_on_mma_sync(form: str, head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced, because Hopper's own kernels take plain calls, and short ones need no split.

    Heads of a kv head share tiles where that makes fewer.
    """
    short = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    tile = next(width for width in (64, 96, 128, 192, 256) if width >= head_dim)
    mods = form not in ("plain", "causal", "window", "sinks")
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", f"attn_fwd_sm80_{short}_d{tile}_split" + "_mods" * mods)
    for batch, heads, seqlens in (
        (1, (8, 2), (16, 4000)),
        (2, (16, 2), (5, 3001)),
        (1, (14, 2), (3, 2000)),
        (2, (4, 4), (1, 3000)),
        (1, (4, 1), (130, 5000)),
        (1, (2, 2), (64, 129)),
    ):
        q, k, v = tensors(batch, heads, seqlens, head_dim, dtype)
        call: dict[str, Any] = {"softcap": 5.0} if "softcap" in form else {}
        if "causal" in form:
            call["causal"] = True
        if form == "window":
            call["window"] = (700, 3)
        if form == "sinks":
            call["sinks"] = torch.randn(heads[0], device="cuda")
        if mods and form != "softcap":
            call["mask"] = _masks(form.split(",")[0], batch, heads[0], seqlens, q.dtype)
        o, lse = oa.attention(q, k, v, return_lse=True, **call)
        assert _close(o, lse, *exact(q, k, v, **call), dtype)
        assert torch.equal(oa.attention(q, k, v, **call), o)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", [MaskInput.AS_TILES, MaskInput.LISTED])
@pytest.mark.parametrize(
    ("batch", "heads", "seqlens"),
    [
        (1, (32, 8), (16, 8192)),
        (2, (28, 4), (5, 4096)),
        (64, (32, 8), (64, 1024)),
        (16, (32, 4), (128, 2048)),
        (1, (8, 2), (1, 4096)),
    ],
)
def test_numbers_a_key_of_each_head(
    batch: int, heads: tuple[int, int], seqlens: tuple[int, int], how: MaskInput, kind: str
) -> None:
    """Read as tiles, so that heads can share the rows of a tile, and packed."""
    q, k, v = tensors(batch, heads, seqlens, 128, "bfloat16")
    mask = torch.randn(1, heads[0], 1, seqlens[1], device="cuda", dtype=getattr(torch, kind))
    o, lse = in_way(lambda way: way.mask is how, oa.attention, q, k, v, mask=mask, return_lse=True)
    some = slice(0, 2)
    assert _close(o[some], lse[some], *exact(q[some], k[some], v[some], mask=mask), "bfloat16")


def test_numbers_a_key_of_each_head_with_blocks() -> None:
    q, k, v = tensors(1, (8, 2), (256, 512), 128, "bfloat16")
    mask = torch.randn(1, 8, 1, 512, device="cuda", dtype=q.dtype)
    blocks = torch.rand(4, 8, device="cuda") < 0.7
    blocks[:, 0] = True
    o, lse = oa.attention(q, k, v, mask=mask, block_mask=blocks, block_size=64, return_lse=True)
    hidden = ~blocks.repeat_interleave(64, 0).repeat_interleave(64, 1)
    both = mask.double().expand(1, 8, 256, 512).masked_fill(hidden, -torch.inf)
    assert _close(o, lse, *exact(q, k, v, mask=both), "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "form",
    [
        "softcap", "boolean", "boolean, softcap, causal", "boolean, window", "boolean of keys", "float32", "of keys",
        "io", "boolean of heads", "of keys and heads", "odd addresses", "io, softcap, window", "of queries",
        "transposed", "boolean of keys and heads",
    ],
)  # fmt: skip
def test_scores_on_wgmma(form: str, head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits that find no keys, warpgroups without rows, heads that share tiles, several tiles; forced, as above."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", split_rows_with_scores(head_dim, dtype))
    for batch, heads, seqlens in (
        (1, (8, 2), (64, 4000)),
        (2, (16, 2), (5, 3001)),
        (1, (14, 2), (19, 2000)),
        (2, (4, 4), (130, 3001)),
        (1, (4, 1), (300, 5000)),
        (1, (2, 2), (16, 129)),
        (3, (2, 2), (1, 700)),
    ):
        q, k, v = tensors(batch, heads, seqlens, head_dim, dtype)
        call: dict[str, Any] = {"softcap": 5.0} if "softcap" in form else {}
        if "causal" in form:
            call["causal"] = True
        if "window" in form:
            call["window"] = (600, 3)
        if form != "softcap":
            call["mask"] = _masks(form.split(",")[0], batch, heads[0], seqlens, q.dtype)
        assert "_split_" in oa.explain(q, k, v, **call).kernel
        o, lse = oa.attention(q, k, v, return_lse=True, **call)
        assert _close(o, lse, *exact(q, k, v, **call), dtype)
        assert torch.equal(oa.attention(q, k, v, **call), o)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("form", ["plain", "causal", "softcap", "boolean"])
def test_packed_sequences(form: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence without queries, one without keys, rows of no sequence; splits that find no keys."""
    lengths = (3, 0, 40, 1, 16, 7), (3000, 100, 0, 4097, 555, 2)
    starts = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device="cuda") for n in lengths]
    q, _, _ = tensors(1, (4, 2), (sum(lengths[0]) + 5, 8), head_dim, "bfloat16")
    _, k, v = tensors(1, (4, 2), (8, sum(lengths[1]) + 7), head_dim, "bfloat16")
    q, k, v = q[0], k[0], v[0]
    mods = form in ("softcap", "boolean")
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", f"attn_fwd_sm80_bf16_d{head_dim}_split" + "_mods" * mods)
    call: dict[str, Any] = {"softcap": 5.0} if form == "softcap" else {"causal": True} if form == "causal" else {}
    if form == "boolean":
        call["mask"] = torch.rand(6, 1, 40, 4097, device="cuda") < 0.6
    o, lse = oa.attention_varlen(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=40, max_seqlen_k=4097, return_lse=True,
        **call,
    )  # fmt: skip
    for i, (sq, sk) in enumerate(zip(*lengths, strict=True)):
        rows, keys = (slice(int(s[i]), int(s[i]) + n) for s, n in zip(starts, (sq, sk), strict=True))
        own = {**call, "mask": call["mask"][i : i + 1, :, :sq, :sk]} if "mask" in call else call
        if sq:
            expected = exact(q[rows][None], k[keys][None], v[keys][None], **own)
            assert _close(o[rows][None], lse[:, rows][None], *expected, "bfloat16")
    assert not o[sum(lengths[0]) :].any()
    assert (lse[:, sum(lengths[0]) :] == -torch.inf).all()


def test_what_gets_chosen() -> None:
    """Few queries with a mask, packed or not, are split without being asked."""
    q, k, v = tensors(1, (32, 8), (16, 32768), 128, "bfloat16")
    mask = torch.ones(1, 1, 16, 32768, dtype=torch.bool, device="cuda")
    for call in ({"mask": mask}, {"softcap": 20.0}):
        assert "_split_" in oa.explain(q, k, v, **call).kernel
    mod = oa.ScoreMod("score + 0.1f * (float)h")
    assert "_split_" in oa.explain(q, k, v, score_mod=mod).kernel
    starts = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (16, 32768)]
    packed: dict[str, Any] = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    packed |= {"max_seqlen_q": 16, "max_seqlen_k": 32768}
    assert "split" in oa.explain(oa.attention_varlen, q[0], k[0], v[0], **packed).kernel


def test_graph_of_a_masked_call_replays() -> None:
    q, k, v = tensors(1, (8, 2), (16, 20000), 64, "bfloat16")
    mask = _masks("boolean", 1, 8, (16, 20000), q.dtype)
    out = torch.empty_like(q)
    expected = oa.attention(q, k, v, mask=mask, softcap=9.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        oa.attention(q, k, v, mask=mask, softcap=9.0, out=out)
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("generic", [False, True], ids=["selected", "generic"])
@pytest.mark.parametrize("head_dim", [64, 128, 136])
@pytest.mark.parametrize(
    "form", ["softcap", "boolean of keys", "boolean of heads", "of keys", "of heads", "io of heads"]
)
def test_one_query_whose_heads_share_a_tile(
    form: str, head_dim: int, generic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stride of q, o, the LSE and the mask, beside float64; split over keys and not."""
    only_rows(monkeypatch, (spec for spec in REGISTRY if not (generic and spec.arch_specific)))
    for batch, heads, keys, layout in (
        (1, (32, 8), 9000, "NHD"), (3, (6, 2), 200, "HND"), (2, (7, 1), 2500, "NHD"), (5, (16, 4), 1030, "HND"),
    ):  # fmt: skip
        q, k, v = tensors(batch, heads, (1, keys), head_dim, "bfloat16")
        wide = torch.full((*q.shape[:-1], 2 * head_dim), torch.nan, device="cuda", dtype=q.dtype)
        wide[..., :head_dim] = q  # heads that lie apart
        q = wide[..., :head_dim]
        call: dict[str, Any] = {"softcap": 5.0}
        if form != "softcap":
            shape = (batch, heads[0] if "heads" in form else 1, 1, keys)
            mask = torch.randn(shape, device="cuda")
            if "boolean" in form:
                mask = mask < 0.3
                mask[0, :, :, keys // 8 : keys // 2] = False
                mask[-1, -1] = False
            elif "io" in form:
                mask = mask.bfloat16()
            call = {"mask": mask}
        given = [x if layout == "NHD" else x.transpose(1, 2) for x in (q, k, v)]
        o, lse = in_way(lambda way: way.heads_as_queries, oa.attention, *given, layout=layout, return_lse=True, **call)
        found = o if layout == "NHD" else o.transpose(1, 2)
        assert _close(found, lse, *exact(q, k, v, **call), "bfloat16")
        assert torch.equal(in_way(lambda way: way.heads_as_queries, oa.attention, *given, layout=layout, **call)[0], o)
    PLANS.clear()


@pytest.mark.parametrize("option", ["sinks", "window", "score_mod"])
def test_one_query_that_keeps_its_heads(option: str) -> None:
    """What counts by heads or queries; right as before."""
    q, k, v = tensors(2, (8, 2), (1, 3000), 64, "bfloat16")
    call: dict[str, Any] = {"mask": torch.rand(2, 1, 1, 3000, device="cuda") < 0.7}
    others: dict[str, Any] = {"sinks": {"sinks": torch.randn(8, device="cuda")}, "window": {"window": (500, 0)}}.get(
        option, {}
    )
    if option == "score_mod":
        mod = oa.ScoreMod("score + 0.25f * (float)h", reference=lambda score, b, h, q, k: score + 0.25 * h)
        o = oa.attention(q, k, v, **call, score_mod=mod)
        bias = 0.25 * torch.arange(8, device="cuda")[None, :, None, None].expand(2, 8, 1, 3000)
        want, _ = exact(q, k, v, mask=bias.masked_fill(~call["mask"], -torch.inf))
        assert (o.double() - want).norm() <= 1.5 * 2.0**-8 * want.norm()
        return
    o, lse = oa.attention(q, k, v, return_lse=True, **call, **others)
    assert "are the rows of a tile" not in str(oa.explain(q, k, v, **call, **others))
    assert _close(o, lse, *exact(q, k, v, **call, **others), "bfloat16")
