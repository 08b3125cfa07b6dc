"""``descale_v`` with a factor for each 128 rows of V, on a GPU, against fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402
from omniattn.select.choice import VARIABLE  # noqa: E402

from .low_precision_cases import check, check_expected, inputs, to_numpy  # noqa: E402

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 9), reason="e4m3 products need compute capability 8.9"),
]
E4M3 = torch.float8_e4m3fn
#: Kernels on mma.sync run on Hopper too, where nobody asks for them but for masks that tensor maps cannot describe.
FAMILIES = ["attn_fp8_sm90", "attn_fp8_sm89"] if CAPABILITY == (9, 0) else ["attn_fp8_sm89"]
#: Of e4m3: half a step, relative to a normal number, and absolute below the least one; the least P at the largest.
_RELATIVE, _ABSOLUTE, _LEAST_TOP = 2.0**-4, 2.0**-10, 13.5


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    PLANS.clear()


@pytest.fixture
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    if name != FAMILIES[0]:
        monkeypatch.setenv(VARIABLE, ",".join(
            f"{name}_{short}_d{width}_factors{mods}"
            for mods in ("", "_mods") for short in ("bf16", "fp16") for width in (64, 128, 256)
        ))  # fmt: skip
    return name


def factors(kind: str, shape: tuple[int, ...]) -> Any:
    """near: within a factor of four. wide: six decades, of both signs, one of them 0. tiny: all far below 1."""
    generator = torch.Generator().manual_seed(7)
    u = torch.rand(shape, generator=generator)
    if kind == "near":
        return 0.5 + 1.5 * u
    if kind == "tiny":
        return 1e-12 * (0.5 + u)
    made = 10.0 ** (6 * u - 4) * torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    made.view(-1)[-1] = 0.0
    return made


def _rows(factor: Any, rows: int, group: int = 1) -> Any:
    """(batch, heads, rows, 1) of (batch, heads, blocks)."""
    return factor.double().repeat_interleave(128, 2)[:, :, :rows, None].repeat_interleave(group, 1)


def _expected(
    q: Any, k: Any, v: Any, dq: Any, dk: Any, dv: Any, *, causal: bool = False, window: Any = None,
    softcap: float = 0.0, mask: Any = None, sinks: Any = None, softmax_scale: float | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(o, lse, bound of o's error by the rounding of P), fp64, heads first; q, k, v: (batch, rows, heads, channels)."""
    group, n, m = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    of_q, of_k, of_v = (x.double().transpose(1, 2) for x in (q, k, v))
    of_q = of_q * _rows(dq, n)
    of_k = of_k.repeat_interleave(group, 1) * _rows(dk, m, group)
    factor = _rows(dv, m, group)
    values = of_v.repeat_interleave(group, 1)
    s = of_q @ of_k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    rows, keys = torch.arange(n, device=q.device)[:, None] + m - n, torch.arange(m, device=q.device)[None]
    hidden = torch.zeros(n, m, dtype=torch.bool, device=q.device)
    if causal:
        hidden = hidden | (keys > rows)
    if window is not None:
        hidden = hidden | (keys < rows - window[0]) | (keys > rows + window[1])
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        hidden = hidden | (mask == -torch.inf)
        s = s + mask.double()
    s = s.masked_fill(hidden, -torch.inf)
    logits = s if sinks is None else torch.cat([s, sinks.double().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    p = torch.where(hidden.expand(p.shape), 0.0, p)
    o = p @ (values * factor)
    weights = p * factor.abs().mT
    top = weights.amax(-1, keepdim=True)
    error = torch.maximum(weights * _RELATIVE, (top * (_ABSOLUTE / _LEAST_TOP)).expand_as(weights))
    error = torch.where((hidden | (factor.mT == 0)).expand(error.shape), 0.0, error)
    return o, lse, error @ values.abs()


def drawn(rows_q: int, rows_k: int, head_dim: int, seed: int = 1, **more: Any) -> list[Any]:
    tensors = inputs(
        "bfloat16",
        batch=2,
        seqlen_q=rows_q,
        seqlen_k=rows_k,
        heads_q=4,
        heads_kv=2,
        head_dim=head_dim,
        seed=seed,
        **more,
    )
    return [x.to(E4M3).cuda() for x in tensors]


FEATURES: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"window": (200, 30)}, "sinks": {"sinks": True},
    "softcap": {"softcap": 4.0}, "softcap, far": {"softcap": 2.0, "softmax_scale": 1.0},
    "softcap, causal, window": {"softcap": 4.0, "causal": True, "window": (200, 0)},
    "mask": {"mask": "bool"}, "keys": {"mask": "keys", "causal": True},
    "softcap, mask": {"softcap": 4.0, "mask": "bool"},
    "key bias": {"mask": "key bias"}, "bias": {"mask": "float32", "sinks": True}, "any bias": {"mask": "any"},
    "half bias": {"mask": "io"}, "softcap, half bias": {"softcap": 4.0, "mask": "io", "causal": True},
    "negative scale": {"softmax_scale": -0.1}, "no scale": {"softmax_scale": 0.0, "mask": "bool"},
}  # fmt: skip


def masks(kind: str, rows: int, keys: int) -> Any:
    """Of two sequences and four heads; a row without keys, tiles that all rows of a tile see, or none."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    # Rows at multiples of 16 bytes, which tensor maps describe; `any`: others.
    row = keys if kind == "any" else -(-keys // 8) * 8
    dtype = torch.bfloat16 if kind == "io" else torch.float32
    values = torch.randn(2, 4, rows, row, device="cuda", generator=generator).to(dtype)[..., :keys]
    if kind in ("keys", "key bias"):
        values = values[:, :1, :1]
        return values > -0.5 if kind == "keys" else values
    if kind == "bool":
        shown = values > -0.5
        shown[:, :, :, 64:192] = True
        shown[:, :, :, 320:384] = False
        shown[:, :, 7] = False
        return shown
    values[:, :, 7] = -torch.inf
    values[:, :, :, :64] -= 1e6
    return values


@pytest.mark.parametrize("kind", ["near", "wide", "tiny"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_dense(family: str, head_dim: int, feature: str, kind: str) -> None:
    q, k, v = drawn(333, 590, head_dim)
    options = dict(FEATURES[feature])
    generator = torch.Generator(device="cuda").manual_seed(3)
    own = family if options.get("mask") != "any" else "attn_fp8_sm89"
    if "mask" in options:
        options["mask"] = masks(options["mask"], 333, 590)
    if "sinks" in options:
        options["sinks"] = torch.randn(4, device="cuda", generator=generator)
    dq, dk = (factors("near", (2, heads, blocks)).cuda() for heads, blocks in ((4, 3), (2, 5)))
    dv = factors(kind, (2, 2, 5)).cuda()
    given = {"descale_q": dq, "descale_k": dk, "descale_v": dv, "out_dtype": torch.bfloat16}
    kernel = oa.explain(q, k, v, **given, **options).kernel
    assert kernel.startswith(own)
    assert "_factors" in kernel
    o, lse = oa.attention(q, k, v, **given, **options, return_lse=True)
    assert torch.equal(oa.attention(q, k, v, **given, **options), o)
    want = _expected(q, k, v, dq, dk, dv, **options)
    # Relative to the largest value that a row sees, which may be tiny.
    scale = float(want[0].abs().max())
    check_expected(
        o.double().transpose(1, 2) / scale, lse, (want[0] / scale, want[1], want[2] / scale), 0.5, lse_atol=5e-3
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_rows_of_small_factors_are_as_accurate(family: str, head_dim: int) -> None:
    """P is rounded against what counts in its own row, not against the largest factor of the head."""
    q, k, v = drawn(256, 256, head_dim)
    dv = torch.ones(2, 2, 2, device="cuda")
    dv[:, :, 0] = 1e-6
    ones = torch.ones(2, 4, 2, device="cuda")
    o = oa.attention(q, k, v, descale_v=dv, causal=True)
    want = _expected(q, k, v, ones, ones[:, :2], dv, causal=True)[0].transpose(1, 2)
    for rows in (slice(0, 128), slice(128, 256)):
        error = (o.double() - want)[:, rows].abs().sum() / want[:, rows].abs().sum()
        assert error <= 0.05


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"softcap": 4.0}, {"softcap": 4.0, "causal": True, "window": (250, 0)},
                {"softmax_scale": -0.2}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_packed(family: str, head_dim: int, options: dict[str, Any]) -> None:
    of_q, of_k = [140, 1, 0, 300], [130, 300, 5, 700]
    starts = [torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32) for x in (of_q, of_k)]
    torch.manual_seed(2)
    q, k, v = (torch.randn(sum(n), h, head_dim).to(E4M3).cuda() for n, h in ((of_q, 4), (of_k, 2), (of_k, 2)))
    dq, dk, dv = factors("near", (4, 4, 3)).cuda(), factors("near", (4, 2, 6)).cuda(), factors("wide", (4, 2, 6)).cuda()
    o, lse = oa.attention_varlen(
        q, k, v, cu_seqlens_q=starts[0].cuda(), cu_seqlens_k=starts[1].cuda(), max_seqlen_q=300, max_seqlen_k=700,
        descale_q=dq, descale_k=dk, descale_v=dv, **options, return_lse=True,
    )  # fmt: skip
    for b in range(4):
        rows, keys = (slice(int(s[b]), int(s[b + 1])) for s in starts)
        if of_q[b] == 0:
            continue
        one = [x[None, r] for x, r in ((q, rows), (k, keys), (v, keys))]
        want = _expected(*one, dq[b : b + 1], dk[b : b + 1], dv[b : b + 1], **options)
        scale = float(want[0].abs().max()) or 1.0
        check_expected(
            o[None, rows].double().transpose(1, 2) / scale, lse[None, :, rows],
            (want[0] / scale, want[1], want[2] / scale), 0.5, lse_atol=5e-3,
        )  # fmt: skip


@pytest.mark.parametrize("max_seqlen_k", [128, 0])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_sequences_longer_than_their_factors_are_nan(family: str, softcap: float, max_seqlen_k: int) -> None:
    q, k, v = (x[0] for x in drawn(400, 400, 64))
    starts = torch.tensor([0, 100, 400], dtype=torch.int32, device="cuda")
    o = oa.attention_varlen(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=128, max_seqlen_k=max_seqlen_k,
        descale_v=torch.ones(2, 2, -(-max_seqlen_k // 128), device="cuda"), softcap=softcap,
    )  # fmt: skip
    assert o[100:].isnan().all()
    assert o[:100].isnan().any() == (max_seqlen_k == 0)


@pytest.mark.parametrize("how", ["causal", "mask", "bias", "softcap", "scale"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_signs_zeros_and_what_is_no_number(family: str, head_dim: int, how: str) -> None:
    q, k, v = drawn(384, 384, head_dim)
    dv = factors("near", (2, 2, 3)).cuda()
    seen = torch.ones(384, 384, dtype=torch.bool, device="cuda").tril()
    options: dict[str, Any] = {
        "causal": {"causal": True}, "mask": {"mask": seen}, "softcap": {"causal": True, "softcap": 4.0},
        "bias": {"mask": torch.where(seen, 1.0, -torch.inf)}, "scale": {"causal": True, "softmax_scale": -0.1},
    }[how]  # fmt: skip
    o = oa.attention(q, k, v, descale_v=dv, **options)
    assert torch.equal(oa.attention(q, k, v, descale_v=-dv, **options), -o)
    dv[:, :, 0] = 0.0
    o = oa.attention(q, k, v, descale_v=dv, **options)
    assert not o[:, :128].any()
    assert o[:, 128:].float().abs().amax(-1).gt(0).all()
    for bad in (math.nan, math.inf, -math.inf):
        dv[1, 1, 2] = bad
        o, lse = oa.attention(q, k, v, descale_v=dv, **options, return_lse=True)
        seen = torch.zeros(o.shape, dtype=torch.bool, device="cuda")
        seen[1, 256:, 2:] = True
        assert torch.equal(o.isnan(), seen)
        assert torch.equal(lse.isnan(), seen[..., 0].transpose(1, 2))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_as_on_the_cpu(family: str, head_dim: int) -> None:
    """Strided factors, and a head_dim of v of its own."""
    q, k, v = (x.cpu() for x in drawn(200, 330, head_dim))
    v = v[..., : head_dim // 2]
    dv = factors("near", (3, 2, 2)).permute(1, 2, 0)
    got = oa.attention(q.cuda(), k.cuda(), v.cuda(), descale_v=dv.cuda(), causal=True, return_lse=True)
    want = oa.attention(q, k, v, descale_v=dv, causal=True, return_lse=True)
    check(got, tuple(to_numpy(x) for x in want), lse_atol=2e-2)


def test_long_sequences_and_other_streams() -> None:
    """More blocks than lanes, launches again with other factors, a graph."""
    q, k, v = (torch.randn(1, n, 2, 128, device="cuda").to(E4M3) for n in (64, 9000, 9000))
    dv = torch.rand(1, 2, 71, device="cuda") + 0.5
    ones = [torch.ones(1, 2, n, device="cuda") for n in (1, 71)]
    graph = torch.cuda.CUDAGraph()
    oa.attention(q, k, v, descale_v=dv)
    with torch.cuda.graph(graph):
        o = oa.attention(q, k, v, descale_v=dv)
    for _ in range(2):
        dv.copy_(torch.rand(1, 2, 71, device="cuda") + 0.5)
        graph.replay()
        want = _expected(q, k, v, *ones, dv)[0].transpose(1, 2)
        assert (o.double() - want).abs().sum() / want.abs().sum() <= 0.05


@pytest.mark.parametrize("options", [{"softcap": 8.0}, {"mask": True}, {"mask": True, "softcap": 8.0}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences_with_a_mean_in_v(head_dim: int, options: dict[str, Any]) -> None:
    """Sums are flushed every few keys; steps leave the common loop and come back to it."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, n, 2, head_dim, device="cuda") for n in (130, 3000, 3000))
    # Most scores lie near 0, those of a few keys far from it.
    q, k, v = (
        x.to(E4M3) for x in (q, torch.where(torch.rand(3000, 1, 1, device="cuda") < 0.01, 8.0, 1.0) * k, v + 1.0)
    )
    dv = factors("near", (1, 2, 24)).cuda()
    ones = [torch.ones(1, 2, n, device="cuda") for n in (2, 24)]
    if "mask" in options:
        shown = torch.rand(130, 3000, device="cuda") < 0.8
        shown[:, 512:1400] = True
        shown[:, 1408:1600] = False
        options = options | {"mask": shown}
    o, lse = oa.attention(q, k, v, descale_v=dv, **options, return_lse=True, out_dtype=torch.bfloat16)
    want = _expected(q, k, v, *ones, dv, **options)
    check_expected(o.double().transpose(1, 2), lse, want, 0.5, lse_atol=5e-3)


#: Calls with few queries: (batch, heads, lengths, options). Some splits begin within a block of 128 keys.
FEW: dict[str, tuple[int, tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "full": (1, (32, 8), (16, 8192), {}),
    "causal": (2, (6, 2), (77, 7003), {"causal": True}),
    "window": (1, (8, 8), (33, 9000), {"window": (8500, 20)}),
    "one query, sinks": (1, (12, 1), (1, 5001), {"causal": True, "sinks": True}),
    "tiles of queries": (1, (14, 2), (300, 12000), {"causal": True}),
    "rows without keys": (1, (4, 1), (150, 90), {"causal": True}),
}


@pytest.mark.skipif(CAPABILITY != (9, 0), reason="the Hopper kernel's")
@pytest.mark.parametrize("kind", ["near", "wide", "tiny"])
@pytest.mark.parametrize("head_dim", [64, 112, 128, 256])
@pytest.mark.parametrize("name", FEW)
def test_few_queries(name: str, head_dim: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, heads, (rows, keys), options = FEW[name]
    torch.manual_seed(4)
    q, k, v = (
        torch.randn(batch, n, h, head_dim, device="cuda").to(E4M3)
        for n, h in ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]))
    )
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.randn(heads[0], device="cuda")
    blocks = [-(-n // 128) for n in (rows, keys)]
    dq, dk = (factors("near", (batch, h, n)).cuda() for h, n in zip(heads, blocks, strict=True))
    dv = factors(kind, (batch, heads[1], blocks[1])).cuda()
    given = {"descale_q": dq, "descale_k": dk, "descale_v": dv, "out_dtype": torch.bfloat16, **options}
    want = _expected(q, k, v, dq, dk, dv, **options)
    scale = float(want[0].abs().max()) or 1.0
    own = [s for s in REGISTRY if s.op == "attention_split" and s.value_factors and not s.score_mods]
    tile = min(d for d in (64, 128, 256) if d >= head_dim)
    own = [s for s in own if (s.dtype, s.head_dim) == ("bfloat16", tile)]
    assert own
    for spec in own:
        monkeypatch.setenv(VARIABLE, spec.name)
        assert oa.explain(q, k, v, **given).kernel == spec.name
        o, lse = oa.attention(q, k, v, **given, return_lse=True)
        assert torch.equal(oa.attention(q, k, v, **given), o)
        check_expected(
            o.double().transpose(1, 2) / scale, lse, (want[0] / scale, want[1], want[2] / scale), 0.5, lse_atol=5e-3
        )
