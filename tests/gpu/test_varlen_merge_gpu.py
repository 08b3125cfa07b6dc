"""Packed sequences and merged partial results on a GPU against the NumPy reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import reference, testing  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402

from .attention_cases import check_lse, poisoned, to_gpu, to_numpy  # noqa: E402
from .plans import only_rows  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=["selected", "generic"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every test with the kernels that this GPU gets, and with those that every GPU gets."""
    only_rows(monkeypatch, (spec for spec in REGISTRY if request.param == "selected" or not spec.arch_specific))
    yield str(request.param)
    PLANS.clear()


LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "mixed": ([100, 1, 0, 257, 64], [130, 300, 5, 257, 0]),
    "single": ([200], [200]),
    "all_empty": ([0, 0], [0, 0]),
    "many": ([3, 0, 17] * 30, [5, 9, 1] * 30),  # more than one step of 32 sequences
}


def _cu(lengths: list[int]) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _run(
    lengths_q: list[int],
    lengths_k: list[int],
    *,
    extra_rows: int = 0,
    head_dim: int = 64,
    dtype: str = "bfloat16",
    layout: str = "NHD",
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Any,
) -> None:
    q, _, _ = testing.make_qkv(
        batch=None, seqlen_q=sum(lengths_q) + extra_rows, heads_q=4, head_dim=head_dim, dtype=dtype, layout=layout
    )
    k, v, _ = testing.make_qkv(
        batch=None,
        seqlen_q=sum(lengths_k) + extra_rows,
        heads_q=2,
        head_dim=head_dim,
        dtype=dtype,
        layout=layout,
        seed=9,
    )
    cu_q, cu_k = _cu(lengths_q), _cu(lengths_k)
    maxima = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max_seqlen_k or max(lengths_k)}
    given = {name: torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out = poisoned(q.shape, dtype)
    _, lse = oa.attention_varlen(
        *(to_gpu(x, dtype) for x in (q, k, v)),
        cu_seqlens_q=torch.from_numpy(cu_q).cuda(),
        cu_seqlens_k=torch.from_numpy(cu_k).cuda(),
        max_seqlen_q=maxima["max_seqlen_q"] if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_k=maxima["max_seqlen_k"],
        layout=layout,
        out=out,
        return_lse=True,
        **given,
    )
    ref, ref_lse = reference.attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **maxima, layout=layout, **options
    )
    # Relative to |o| <= 4: two roundings of P and O in the dtype.
    testing.assert_close(to_numpy(out), ref, atol=3e-2 if dtype == "bfloat16" else 4e-3)
    mean = np.abs(to_numpy(out) - ref).mean() if ref.size else 0.0
    assert mean <= (2e-3 if dtype == "bfloat16" else 3e-4), mean
    check_lse(lse.cpu().numpy(), ref_lse, "varlen")


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (40, 3)}, {"softcap": 5.0, "causal": True}], ids=str
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("extra_rows", [0, 70])
def test_varlen(lengths: str, options: dict[str, Any], layout: str, extra_rows: int) -> None:
    """Rows behind the last sequence are written too: O = 0, LSE = -inf."""
    _run(*LENGTHS[lengths], extra_rows=extra_rows, layout=layout, **options)


@pytest.mark.parametrize("head_dim", [8, 40, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_varlen_head_dims(head_dim: int, dtype: str) -> None:
    _run(*LENGTHS["mixed"], head_dim=head_dim, dtype=dtype, causal=True)


def test_varlen_sinks_and_mask() -> None:
    lengths_q, lengths_k = LENGTHS["mixed"]
    sinks = np.array([0.5, -1.0, 2.0, 0.0], dtype=np.float32)
    _run(lengths_q, lengths_k, extra_rows=10, sinks=sinks)
    mask = np.random.default_rng(0).random((5, 1, max(lengths_q), max(lengths_k))) < 0.6
    _run(lengths_q, lengths_k, mask=mask)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0, "window": (40, 3)}], ids=str)
@pytest.mark.parametrize("form", ["bool", "keys", "key values", "bias", "bias, aligned"])
def test_varlen_masks(lengths: str, options: dict[str, Any], form: str) -> None:
    """Of each sequence, of all of them, of all heads; tiles hidden and shown; NaN beyond the ends."""
    lengths_q, lengths_k = LENGTHS[lengths]
    rng, batch = np.random.default_rng(0), len(lengths_q)
    longest = -(-max(*lengths_k, 1) // 8) * 8 if form == "bias, aligned" else max(*lengths_k, 1)
    rows = 1 if form.startswith("key") else max(*lengths_q, 1)
    for extents in ((batch, 1), (1, 4), (batch, 4)):
        visible = rng.random((*extents, rows, longest)) < 0.8
        visible[..., : rows // 2, : longest // 3] = False
        visible[..., rows // 2 :, longest // 3 :] = True
        mask: np.ndarray[Any, Any] = visible
        if form not in ("bool", "keys"):
            mask = np.where(visible, rng.standard_normal(visible.shape), -np.inf).astype(np.float32)
            for b, (seqlen_q, seqlen_k) in enumerate(zip(lengths_q, lengths_k, strict=True) if extents[0] > 1 else ()):
                mask[b, ..., seqlen_k:] = np.nan
                if rows > 1:
                    mask[b, :, seqlen_q:] = np.nan
        if max(lengths_q) == max(lengths_k) == 0:
            continue
        _run(lengths_q, lengths_k, mask=mask, max_seqlen_k=longest, extra_rows=7, **options)


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_varlen_masks_of_head_dims(head_dim: int, dtype: str) -> None:
    lengths_q, lengths_k = [100, 1, 0, 257, 64], [136, 304, 5, 257, 0]
    rng = np.random.default_rng(1)
    for shape in ((5, 1, 257, 304), (1, 4, 257, 304)):
        values = rng.standard_normal(shape).astype(np.float32)
        _run(lengths_q, lengths_k, head_dim=head_dim, dtype=dtype, mask=values > -0.8, causal=True)
        _run(lengths_q, lengths_k, head_dim=head_dim, dtype=dtype, mask=values)


def test_masks_with_lengths_that_decrease() -> None:
    """Results are unspecified; nothing hangs, and nobody reads or writes elsewhere."""
    rng = np.random.default_rng(2)
    q, k, v = (torch.randn(500, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.rand(4, 1, 200, 200, device="cuda") < 0.5
    for _ in range(10):
        starts = [torch.from_numpy(rng.integers(-9, 600, 5).astype(np.int32)).cuda() for _ in range(2)]
        sizes = {"max_seqlen_q": 200, "max_seqlen_k": 200}
        oa.attention_varlen(q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], mask=mask, **sizes)
    torch.cuda.synchronize()


@pytest.mark.parametrize("max_seqlen_q", [0, 1, 100_000])
def test_result_does_not_depend_on_max_seqlen(max_seqlen_q: int) -> None:
    """A wrong bound cannot leave rows unwritten."""
    _run(*LENGTHS["mixed"], max_seqlen_q=max_seqlen_q, causal=True)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_neighbours_do_not_leak(head_dim: int) -> None:
    """What lies in the rows of the next sequence, NaN included, is not seen."""
    lengths = [100, 150, 37]
    cu = torch.from_numpy(_cu(lengths)).cuda()
    sizes = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 150, "max_seqlen_k": 150}
    q, k, v = (torch.randn(287, 2, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = oa.attention_varlen(q, k, v, **sizes)
    for x in (q, k, v):
        x[100:250] = float("nan")
    got = oa.attention_varlen(q, k, v, **sizes)
    assert torch.isnan(got[100:250]).all()
    assert torch.equal(got[:100], want[:100])
    assert torch.equal(got[250:], want[250:])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bits_do_not_depend_on_neighbours(head_dim: int) -> None:
    """Rows of the next sequence share a tile, but have no say in it; so o may take q's place here too."""
    cu = torch.tensor([0, 100, 612, 1124], dtype=torch.int32, device="cuda")
    sizes = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 512, "max_seqlen_k": 512}
    q = 10 * torch.randn(1124, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1124, 2, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    want = oa.attention_varlen(q, k, v, **sizes)
    other = q.clone()
    other[100:612] = 0
    got = oa.attention_varlen(other, k, v, **sizes)
    assert torch.equal(got[:100], want[:100])
    for _ in range(10):
        in_place = q.clone()
        oa.attention_varlen(in_place, k, v, out=in_place, **sizes)
        assert torch.equal(in_place, want)


def test_cu_seqlens_outside_the_tensors_are_clamped() -> None:
    q = torch.randn(64, 2, 64, device="cuda", dtype=torch.float16)
    bad = torch.tensor([-5, 40, 4000], dtype=torch.int32, device="cuda")
    good = torch.tensor([0, 40, 64], dtype=torch.int32, device="cuda")
    sizes = {"max_seqlen_q": 64, "max_seqlen_k": 64}
    got = oa.attention_varlen(q, q, q, cu_seqlens_q=bad, cu_seqlens_k=bad, **sizes)
    want = oa.attention_varlen(q, q, q, cu_seqlens_q=good, cu_seqlens_k=good, **sizes)
    assert torch.equal(got, want)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_equals_dense(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows through both calls give the same bits, where the same kernel serves both."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "attn_fwd_sm80_bf16_d128")
    q, k, v = (torch.randn(3, 200, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.arange(0, 601, 200, dtype=torch.int32, device="cuda")
    dense, dense_lse = oa.attention(q, k, v, causal=causal, return_lse=True)
    packed, packed_lse = oa.attention_varlen(
        *(x.reshape(600, 4, 128) for x in (q, k, v)),
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=200,
        max_seqlen_k=200,
        causal=causal,
        return_lse=True,
    )
    assert torch.equal(dense.reshape(600, 4, 128), packed)
    assert torch.equal(dense_lse.transpose(0, 1).reshape(4, 600), packed_lse)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [8, 64, 136, 256])
def test_merge_states(dtype: str, packed: bool, head_dim: int) -> None:
    shape = (97, 3, head_dim) if packed else (2, 97, 3, head_dim)
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    rng = np.random.default_rng(head_dim)
    o_a, o_b = (testing.round_to(rng.standard_normal(shape).astype(np.float32), dtype) for _ in range(2))
    lse_a, lse_b = ((20 * rng.standard_normal(lse_shape)).astype(np.float32) for _ in range(2))
    lse_a[..., :10] = -np.inf
    lse_b[..., 5:15] = -np.inf
    o_a[..., :10, :, :] = np.nan  # a side without keys is not looked at
    lse_b[..., 8] = np.nan  # and NaN is not hidden by the other side's -inf
    torch_dtype = getattr(torch, dtype)
    args = [
        torch.from_numpy(o_a).to("cuda", torch_dtype),
        torch.from_numpy(lse_a).cuda(),
        torch.from_numpy(o_b).to("cuda", torch_dtype),
        torch.from_numpy(lse_b).cuda(),
    ]
    out = torch.full(shape, float("nan"), device="cuda", dtype=torch_dtype)
    o, lse = oa.merge_states(*args, out=out)
    assert o is out
    ref, ref_lse = reference.merge_states(o_a, lse_a, o_b, lse_b)
    testing.assert_close(to_numpy(o), ref, dtype=dtype, atol=1e-5)
    check_lse(lse.cpu().numpy(), ref_lse, "merge")
    in_place, _ = oa.merge_states(*args, out=args[2])
    assert torch.equal(in_place.view(torch.uint8), o.view(torch.uint8))


def test_merge_of_split_keys_is_the_whole() -> None:
    q = torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    parts = [oa.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 120), slice(120, 300))]
    o, lse = oa.merge_states(*parts[0], *parts[1])
    want, want_lse = oa.attention(q, k, v, return_lse=True)
    testing.assert_close(to_numpy(o), to_numpy(want), atol=2e-3)
    check_lse(lse.cpu().numpy(), want_lse.cpu().numpy(), "merged")
