"""Few queries on many keys on 8-bit operands with masks, biases, softcap or smoothed queries: split, beside float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.problems import Int4, Int8  # noqa: E402

from .low_precision_cases import check_expected, expected, growing_scores, quantize  # noqa: E402
from .test_few_queries_gpu import exact, tensors  # noqa: E402
from .test_fp8_factors_gpu import _expected as expected_with_factors  # noqa: E402
from .test_fp8_factors_gpu import factors  # noqa: E402
from .test_low_precision_score_mods_gpu import mask_of  # noqa: E402
from .test_low_precision_split_gpu import FORCE, descales, far, scaled  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_plans"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the Hopper kernel's"
    ),
]

_BOTH = ("masks", "softcap")
#: What is done to scores: (mask, options, kinds of rows that take it).
FORMS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "bool": ("bool", {}, _BOTH),
    "bool keys": ("bool keys", {}, _BOTH),
    "keys": ("keys", {}, _BOTH),
    "float32": ("float32", {}, ("bias32",)),
    "io": ("io", {}, ("bias16",)),
    "softcap": ("", {"softcap": 6.0}, ("softcap",)),
    "scale": ("", {"softmax_scale": -0.1}, _BOTH),
    "bool, softcap": ("bool", {"softcap": 20.0}, ("softcap",)),
    "io, softcap": ("io", {"softcap": 3.0}, ("bias16",)),
}
#: Calls: (batch, heads, lengths, options). Rows of additive masks are whole units of 16 bytes.
CALLS: dict[str, tuple[int, tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "full": (1, (8, 2), (16, 5000), {}),
    "causal": (2, (6, 2), (77, 3000), {"causal": True}),
    "window, sinks": (1, (4, 4), (33, 4008), {"window": (3500, 20), "sinks": True}),
    "narrow window, tiles of queries": (2, (4, 2), (200, 3000), {"window": (100, 3)}),
    "one query": (1, (12, 1), (1, 4096), {"causal": True, "sinks": True}),
    "rows without keys": (1, (4, 1), (150, 96), {"causal": True}),
}
WIDTHS = [(64, "bfloat16"), (72, "float16"), (128, "bfloat16"), (256, "bfloat16")]
#: Calls of arrays in e4m3, whose kernels differ in what they multiply and by which scale.
FEW = ("full", "causal", "window, sinks", "rows without keys")


def row_of(kind: str, head_dim: int, dtype: str, qk: str = "int8") -> str:
    """The kernel that splits keys."""
    tile = min(d for d in (64, 128, 256) if d >= head_dim)
    return f"attn_{qk}_sm90_{'fp16' if dtype == 'float16' else 'bf16'}_d{tile}_m128n64_split_{kind}"


def whole(row: str) -> str:
    """The kernel of the same forms that does not split them."""
    name = row.replace("_m128n64_split", "")
    return name + "_lse" * name.endswith(_BOTH)


def hidden_by(form: str, batch: int, heads: int, lengths: tuple[int, int], dtype: str) -> Any:
    """A mask that hides whole tiles from a part of the rows and others from all, and one row from everything."""
    rows, keys = lengths
    mask = mask_of(form, (batch, heads, rows, keys), dtype)
    nothing = False if form.startswith("bool") else -torch.inf
    mask[..., keys // 2 : 5 * keys // 8] = nothing
    if "keys" not in form and rows > 1:
        mask[..., rows // 3, :] = nothing
    return mask


def kinds_of(form: str, name: str) -> tuple[str, ...]:
    """Of rows that take a form of a call. Numbers that one query has are numbers of keys."""
    mask, options, kinds = FORMS[form]
    if CALLS[name][2][0] == 1 and mask in ("float32", "io"):
        return ("softcap",) if "softcap" in options else _BOTH
    return kinds


def options_of(form: str, name: str, dtype: str) -> dict[str, Any]:
    """Of a form and a call."""
    batch, heads, lengths, options = CALLS[name]
    mask, more, _ = FORMS[form]
    found = options | more
    if found.get("sinks"):
        found["sinks"] = torch.randn(heads[0], device="cuda")
    if mask:
        found["mask"] = hidden_by(mask, batch, heads[0], lengths, dtype)
    return found


def check(monkeypatch: pytest.MonkeyPatch, row: str, q: Any, k: Any, v: Any, precision: Any, **options: Any) -> None:
    """O and LSE on quantized operands beside float64; the same bits without LSE, and from the arrays themselves."""
    monkeypatch.setenv(FORCE, row)
    qk, v8 = quantize(precision, q, k, v, with_bias=True)
    assert oa.explain(qk.q, qk.k, v8, **options).kernel == row
    o, lse = oa.attention(qk.q, qk.k, v8, return_lse=True, **options)
    want = expected(qk, v8, **options)
    check_expected(o.transpose(1, 2), lse, want, float(v.double().abs().max()))
    assert torch.equal(oa.attention(qk.q, qk.k, v8, **options), o)
    direct, direct_lse = oa.attention(q, k, v, precision=precision, return_lse=True, **options)
    assert torch.equal(direct, o)
    assert torch.equal(direct_lse, lse)
    assert torch.equal(oa.attention(q, k, v, precision=precision, **options), o)


@pytest.mark.parametrize(("head_dim", "dtype"), WIDTHS)
@pytest.mark.parametrize("form", FORMS)
def test_int8(form: str, head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (batch, heads, lengths, _) in CALLS.items():
        q, k, v = tensors(batch, heads, lengths, head_dim, dtype)
        v[..., :3] += 5.0  # a mean for v_mean
        k[..., 5] += 3.0  # and for row_bias, which softcap has to get back
        options = options_of(form, name, dtype)
        for kind in kinds_of(form, name):
            check(monkeypatch, row_of(kind, head_dim, dtype), q, k, v, Int8(), **options)


@pytest.mark.parametrize(
    "precision", [Int8(smooth_q=True), Int4(), Int8(smooth_k=False, smooth_v=False, granularity="per_block")], ids=str
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_knobs(head_dim: int, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smoothed queries have delta_s of their block of 128 rows and their head, with a mask and without."""
    q, k, v = tensors(2, (4, 2), (200, 3000), head_dim, "bfloat16")
    q[..., 2] += 2.0
    q[:, 128:, :, 3] -= 3.0
    k[..., 5] += 3.0
    row = row_of("masks", head_dim, "bfloat16")
    if precision.smooth_q:
        check(monkeypatch, row, q, k, v, precision, causal=True)
        check(monkeypatch, row_of("softcap", head_dim, "bfloat16"), q, k, v, precision)
    for form in ("bool", "keys", "io", "softcap", "scale"):
        mask, options, kinds = FORMS[form]
        given = {"mask": hidden_by(mask, 2, 4, (200, 3000), "bfloat16")} if mask else {}
        for kind in kinds:
            check(monkeypatch, row_of(kind, head_dim, "bfloat16"), q, k, v, precision, **options, **given)


def in_float64(q: Any, k: Any, v: Any, softmax_scale: float | None = None, **options: Any) -> tuple[Any, Any]:
    """`exact` with any scale."""
    return exact(q if softmax_scale is None else q * (softmax_scale * q.shape[-1] ** 0.5), k, v, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("form", FORMS)
def test_arrays_in_e4m3(form: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside float64 on the same numbers, and as near to it as the kernel without a split."""
    for name, scales in zip(FEW, ("per_block", "per_head", "none", "per_block"), strict=True):
        batch, heads, lengths, _ = CALLS[name]
        q, k, v = tensors(batch, heads, lengths, head_dim, "bfloat16")
        v[..., :3] += 2.0  # drifts: sums are flushed more often
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
        options = options_of(form, name, "bfloat16")
        of = {
            "descale_q": descales(scales, batch, heads[1 if scales == "per_head" else 0], lengths[0], 1),
            "descale_k": descales(scales, batch, heads[1], lengths[1], 2),
            "descale_v": descales("none" if scales == "none" else "per_head", batch, heads[1], lengths[1], 3),
        }
        want, want_lse = in_float64(*map(scaled, (q, k, v), of.values()), **options)
        call = options | {"out_dtype": torch.bfloat16, "return_lse": True}
        call |= {key: factor for key, factor in of.items() if factor is not None}
        seen = want_lse != -torch.inf
        for kind in FORMS[form][2]:
            row = row_of(kind, head_dim, "bfloat16", "fp8")
            monkeypatch.setenv(FORCE, whole(row))
            o_whole, lse_whole = oa.attention(q, k, v, **call)
            monkeypatch.setenv(FORCE, row)
            assert oa.explain(q, k, v, **call).kernel == row
            o, lse = oa.attention(q, k, v, **call)
            assert far(o, want) <= 1.15 * far(o_whole, want) + 3e-3, (name, row)
            assert torch.equal(lse == -torch.inf, ~seen), (name, row)
            # A softcap's series is off by a thousandth, not in the same tiles of both.
            assert bool(((lse - lse_whole)[seen].abs() <= 3e-3).all()), (name, row)
            assert bool(((lse - want_lse)[seen].abs() <= 2e-2).all()), (name, row)
            assert not o.transpose(1, 2)[~seen].any()
            assert torch.equal(oa.attention(q, k, v, **call | {"return_lse": False}), o)


@pytest.mark.parametrize("head_dim", [64, 112, 256])
@pytest.mark.parametrize("form", FORMS)
def test_a_factor_for_each_128_rows_of_v(form: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in zip(FEW, ("wide", "near", "wide", "tiny"), strict=True):
        batch, heads, lengths, _ = CALLS[name]
        q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors(batch, heads, lengths, head_dim, "bfloat16"))
        options = options_of(form, name, "bfloat16")
        blocks = [-(-n // 128) for n in lengths]
        dq, dk = (factors("near", (batch, h, n)).cuda() for h, n in zip(heads, blocks, strict=True))
        dv = factors(size, (batch, heads[1], blocks[1])).cuda()
        want = expected_with_factors(q, k, v, dq, dk, dv, **options)
        scale = float(want[0].abs().max()) or 1.0
        given = options | {"descale_q": dq, "descale_k": dk, "descale_v": dv, "out_dtype": torch.bfloat16}
        for kind in FORMS[form][2]:
            row = row_of(f"{kind}_factors", head_dim, "bfloat16", "fp8")
            monkeypatch.setenv(FORCE, row)
            assert oa.explain(q, k, v, **given).kernel == row
            o, lse = oa.attention(q, k, v, **given, return_lse=True)
            assert torch.equal(oa.attention(q, k, v, **given), o)
            relative = (want[0] / scale, want[1], want[2] / scale)
            check_expected(o.double().transpose(1, 2) / scale, lse, relative, 0.5, lse_atol=5e-3)


@pytest.mark.parametrize("extents", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
@pytest.mark.parametrize("form", ["bool", "bool keys", "keys", "float32", "io"])
def test_whose_mask_it_is(form: str, extents: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all batches and heads, of each, or of one of both."""
    q, k, v = tensors(2, (4, 2), (140, 2000), 128, "bfloat16")
    mask = hidden_by(form, *extents, (140, 2000), "bfloat16")
    for kind in FORMS[form][2]:
        check(monkeypatch, row_of(kind, 128, "bfloat16"), q, k, v, Int8(), mask=mask)


@pytest.mark.parametrize("visible", [(), (0,), (78,), (3, 40), (5, 6, 7, 30, 77)], ids=str)
def test_few_tiles_are_left(visible: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than there are splits, or none: splits without keys, and rows that see nothing."""
    q, k, v = tensors(1, (4, 2), (20, 5000), 128, "bfloat16")
    mask = torch.zeros(1, 1, 20, 5000, dtype=torch.bool, device="cuda")
    for n in visible:
        mask[..., 64 * n : 64 * n + 64] = True
    for form in (mask, torch.where(mask, 1.5, -torch.inf)[:, :, :1]):
        for kind in _BOTH:
            check(monkeypatch, row_of(kind, 128, "bfloat16"), q, k, v, Int8(), mask=form, causal=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_that_nobody_sees_are_never_loaded(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in scales and values there reaches nobody: not even as 0 times NaN."""
    q, k, v = tensors(1, (4, 2), (16, 4000), head_dim, "bfloat16")
    mask = torch.rand(1, 1, 16, 4000, device="cuda") < 0.8
    mask[..., 1024:2048] = False
    qk, v8 = quantize(Int8(), q, k, v)
    monkeypatch.setenv(FORCE, row_of("masks", head_dim, "bfloat16"))
    want = oa.attention(qk.q, qk.k, v8, mask=mask)
    k_scale, values = qk.k_scale.clone(), v8.v.clone()
    k_scale[..., 32:64] = torch.nan
    values[..., 1024:2048] = 0x7F
    spoilt = dataclasses.replace(qk, k_scale=k_scale)
    got = oa.attention(spoilt.q, spoilt.k, dataclasses.replace(v8, v=values), mask=mask)
    assert torch.equal(got, want)
    assert not got.isnan().any()


@pytest.mark.parametrize("form", ["bool", "keys", "io", "softcap"])
def test_nan_stays_in_its_rows(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(1, (4, 2), (16, 4000), 128, "bfloat16")
    q[0, 5, 3, 7] = torch.nan
    k[0, 3990, 0, 0] = torch.nan
    mask, options, kinds = FORMS[form]
    if mask:
        options = options | {"mask": torch.zeros(1, 1, 1 if mask == "keys" else 16, 4000, device="cuda")}
        options["mask"] = options["mask"] == 0 if mask == "bool" else options["mask"]
        options["mask"] = options["mask"].bfloat16() if mask == "io" else options["mask"]
    for kind in kinds:
        monkeypatch.setenv(FORCE, row_of(kind, 128, "bfloat16"))
        bad = oa.attention(q, k, v, precision="int8", causal=True, **options).isnan()
        # Of kv head 0: queries that see key 3990, or its group of scales, stand at 3984 and later.
        assert bad[0, 6:, :2].all()
        assert bad[0, 5, 3].all()
        bad[0, :, :2] = False
        bad[0, 5, 3] = False
        assert not bad.any()


@pytest.mark.parametrize("seed", range(3))
def test_large_logits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores beyond what P has room for, and scales that integers have no exact sums for."""
    head_dim = (64, 128, 256)[seed]
    q, k, v = growing_scores(seed, head_dim, 5)
    for form, kind in (("bool", "masks"), ("keys", "masks"), ("float32", "bias32"), ("io", "bias16")):
        mask = mask_of(form, (1, 1, q.shape[1], 904), "bfloat16")[..., :900]
        check(monkeypatch, row_of(kind, head_dim, "bfloat16"), q, k, v, Int8(), mask=mask)
    check(monkeypatch, row_of("softcap", head_dim, "bfloat16"), q, k, v, Int8(), softcap=50.0, causal=True)


@pytest.mark.parametrize("form", ["bool", "io", "softcap"])
def test_the_same_bits_again_and_in_a_graph(form: str) -> None:
    q, k, v = tensors(1, (32, 8), (16, 8192), 128, "bfloat16")
    mask, options, kinds = FORMS[form]
    call: dict[str, Any] = {"precision": "int8", **options}
    if mask:
        call["mask"] = hidden_by(mask, 1, 1, (16, 8192), "bfloat16")
    assert oa.explain(q, k, v, **call).kernel in [row_of(kind, 128, "bfloat16") for kind in kinds]
    want = oa.attention(q, k, v, **call)
    for _ in range(20):
        assert torch.equal(oa.attention(q, k, v, **call), want)
    graph = torch.cuda.CUDAGraph()
    out = torch.empty_like(q)
    with torch.cuda.graph(graph):
        oa.attention(q, k, v, out=out, **call)
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


def test_what_gets_chosen() -> None:
    """Few queries on many keys are split without being asked, however the operands come; many are not."""
    q, k, v = tensors(1, (32, 8), (16, 32768), 128, "bfloat16")
    made, v8 = oa.quantize_qk(q, k, with_bias=True), oa.quantize_v(v)
    e4m3 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    mask = torch.rand(1, 1, 16, 32768, device="cuda") < 0.9
    blocks = 1.0 + torch.rand(1, 8, 256, device="cuda")
    calls: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ((q, k, v), {"precision": "int8"}, "attn_int8_sm90"), ((made.q, made.k, v8), {}, "attn_int8_sm90"),
        ((q, k, v), {"precision": "fp8"}, "attn_fp8_sm90"), (e4m3, {}, "attn_fp8_sm90"),
        (e4m3, {"descale_v": blocks}, "attn_fp8_sm90"), ((q, k, v), {"precision": "int4"}, "attn_int8_sm90"),
    )  # fmt: skip
    for arrays, call, family in calls:
        for more, kind in (
            ({"mask": mask}, "masks"),
            ({"mask": mask.bfloat16()}, "bias16"),
            ({"softcap": 9.0}, "softcap"),
        ):
            found = oa.explain(*arrays, **call, **more)
            assert found.kernel.startswith(family)
            assert found.kernel.removesuffix("_factors").endswith(f"_split_{kind}")
            assert " splits" in str(found)
    assert oa.explain(q, k, v, precision="int4").kernel.endswith("_split_masks")
    q, k, v = tensors(4, (16, 16), (1024, 1024), 128, "bfloat16")
    assert "split" not in oa.explain(q, k, v, precision="int8", softcap=9.0).kernel
