"""Exact attention on a GPU against the NumPy reference: the whole feature grid, shapes, strides, special values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import omniattn as oa  # noqa: E402
from omniattn import data, reference, testing  # noqa: E402
from omniattn.launch import attn_fwd  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402

from .attention_cases import check_lse, poisoned, run_dense, to_gpu, to_numpy  # noqa: E402
from .plans import only_rows  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16")


@pytest.fixture(autouse=True, params=["selected", "generic"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every test with the kernels that this GPU gets, and with those that every GPU gets."""
    only_rows(monkeypatch, (spec for spec in REGISTRY if request.param == "selected" or not spec.arch_specific))
    yield str(request.param)
    PLANS.clear()


def _same(got: torch.Tensor, want: torch.Tensor, family: str) -> None:
    """The same bits from one kernel; one rounding apart where selection may take different ones for the two calls."""
    if family == "generic":
        assert torch.equal(got, want)
    else:
        step = torch.finfo(got.dtype).eps * max(1.0, float(want.abs().max()))  # of the largest values
        testing.assert_close(to_numpy(got), to_numpy(want), atol=step)


RNG = np.random.default_rng(7)


def _mask(kind: str, shape: tuple[int, ...], seed: int = 3) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    visible = rng.random(shape) < 0.7
    if kind == "bool":
        return visible
    return np.where(visible, rng.standard_normal(shape), -np.inf).astype(np.float32)


FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (37, 11)},
    "window_left": {"window": (20, -1)},
    "window_causal": {"window": (64, -1), "causal": True},
    "window_empty_rows": {"window": (0, 0)},
    "softcap": {"softcap": 3.0},
    "softcap_causal": {"softcap": 20.0, "causal": True},
    "scale": {"softmax_scale": 0.37},
    "scale_zero": {"softmax_scale": 0.0},
    "scale_negative": {"softmax_scale": -0.2, "causal": True},
    "deterministic": {"deterministic": True, "causal": True},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_features(head_dim: int, feature: str, dtype: str) -> None:
    q, k, v = testing.make_qkv(
        batch=2, seqlen_q=150, seqlen_k=203, heads_q=4, heads_kv=2, head_dim=head_dim, dtype=dtype, seed=head_dim
    )
    run_dense(q, k, v, dtype, f"{feature} d{head_dim}", **FEATURES[feature])


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(head_dim: int) -> None:
    q, k, v = testing.make_qkv(seqlen_q=70, seqlen_k=133, head_dim=head_dim, dtype="bfloat16", seed=1)
    run_dense(q, k, v, "bfloat16", f"d{head_dim}", causal=True)
    run_dense(q, k, v, "bfloat16", f"d{head_dim} softcap", softcap=5.0)


@pytest.mark.parametrize("seqlen_q", [1, 63, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("seqlen_k", [1, 47, 48, 49, 64, 96, 97, 257])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tile_edges(seqlen_q: int, seqlen_k: int, causal: bool, head_dim: int) -> None:
    """Causal with more queries than keys has rows that attend to nothing."""
    q, k, v = testing.make_qkv(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, dtype="float16", heads_q=1)
    run_dense(q, k, v, "float16", causal=causal)


@pytest.mark.parametrize("kind", ["bool", "float32", "io"])
@pytest.mark.parametrize("broadcast", [(2, 4, 90, 111), (1, 4, 1, 111), (90, 111), (111,), (2, 1, 90, 1), ()])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(kind: str, broadcast: tuple[int, ...], layout: str, dtype: str) -> None:
    q, k, v = testing.make_qkv(batch=2, seqlen_q=90, seqlen_k=111, heads_q=4, heads_kv=1, layout=layout, dtype=dtype)
    mask = _mask(kind, broadcast)
    gpu = {}
    if kind == "io":
        mask = testing.round_to(mask, dtype)
        gpu["mask"] = to_gpu(mask, dtype) if broadcast else to_gpu(mask.reshape(1), dtype).reshape(())
    run_dense(q, k, v, dtype, layout=layout, mask=np.asarray(mask), causal=True, softcap=10.0, gpu=gpu)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_mask_every_tile(head_dim: int) -> None:
    q, k, v = testing.make_qkv(seqlen_q=200, seqlen_k=260, heads_q=2, head_dim=head_dim)
    run_dense(q, k, v, "bfloat16", mask=_mask("float32", (1, 2, 200, 260)), window=(150, 20))
    hidden = np.zeros((200, 260), dtype=bool)  # every row attends to nothing
    run_dense(q, k, v, "bfloat16", mask=hidden)


def test_mask_hides_nan() -> None:
    """A key that -inf hides is gone even if its score is not a number."""
    q, k, v = testing.make_qkv(seqlen_q=64, seqlen_k=80)
    k[:, 5] = np.nan
    mask = np.zeros((64, 80), dtype=np.float32)
    mask[:, 5] = -np.inf
    run_dense(q, k, v, "bfloat16", mask=mask)


@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, -1e30])
def test_mask_of_lowest_numbers(lowest: float) -> None:
    """Frameworks mask with the lowest finite number: a row that has nothing else is the mean of v, not 0."""
    q, k, v = testing.make_qkv(seqlen_q=64, seqlen_k=80)
    mask = np.full((64, 80), lowest, dtype=np.float32)
    mask[10:, :40] = 0.0
    out = oa.attention(*(to_gpu(x, "bfloat16") for x in (q, k, v)), mask=torch.from_numpy(mask).cuda())
    ref, _ = reference.attention(q, k, v, mask=mask)
    testing.assert_close(to_numpy(out), ref, atol=2e-2)
    assert np.abs(ref[:, :10]).max() > 0.1


@pytest.mark.parametrize("softcap", [1e3, 1e5, 1e8])
def test_large_softcap_is_no_softcap(softcap: float) -> None:
    q, k, v = testing.make_qkv(seqlen_q=64, seqlen_k=80, dtype="float16")
    run_dense(q, k, v, "float16", softcap=softcap)


@pytest.mark.parametrize("kind", ["float32", "io"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 4.0}], ids=str)
def test_sinks(kind: str, dtype: str, options: dict[str, Any]) -> None:
    q, k, v = testing.make_qkv(seqlen_q=130, seqlen_k=70, heads_q=4, heads_kv=2, dtype=dtype)
    sinks = testing.round_to(np.array([-3.0, 0.0, 4.0, -np.inf], dtype=np.float32), dtype)
    gpu = {"sinks": to_gpu(sinks, dtype)} if kind == "io" else {}
    run_dense(q, k, v, dtype, sinks=sinks, gpu=gpu, **options)


@pytest.mark.parametrize("kind", sorted(testing.GENERATORS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_inputs(kind: str, dtype: str, head_dim: int) -> None:
    q, k, v = testing.make_qkv(kind, seqlen_q=256, seqlen_k=512, head_dim=head_dim, dtype=dtype, seed=5)
    run_dense(q, k, v, dtype, kind, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_activations(dtype: str) -> None:
    for sample in data.load_activations():
        q, k, v = (testing.round_to(x, dtype) for x in (sample.q, sample.k, sample.v))
        run_dense(q, k, v, dtype, sample.name, causal=True)


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}], ids=str)
def test_empty(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    batch, sq, sk = shape
    q, k, v = testing.make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads_q=2)
    run_dense(q, k, v, "bfloat16", **options)


def test_no_heads() -> None:
    q, k, v = (torch.empty(2, 5, 0, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    o, lse = oa.attention(q, k, v, return_lse=True)
    assert o.shape == (2, 5, 0, 64)
    assert lse.shape == (2, 0, 5)


def test_tail_of_v_is_not_read() -> None:
    """Memory behind the last key is not a number; a kernel that multiplies it by P = 0 shows it."""
    q, k, v = testing.make_qkv(seqlen_q=40, seqlen_k=70, dtype="float16")
    storage = torch.full((2, 1, 256, 2, 64), float("nan"), device="cuda", dtype=torch.float16)
    storage[0, :, :70], storage[1, :, :70] = to_gpu(k, "float16"), to_gpu(v, "float16")
    out = poisoned(q.shape, "float16")
    oa.attention(to_gpu(q, "float16"), storage[0, :, :70], storage[1, :, :70], out=out)
    ref, _ = reference.attention(q, k, v)
    naive, _ = testing.same_dtype_naive(q, k, v, dtype="float16")
    testing.assert_close(to_numpy(out), ref, naive=naive, dtype="float16")


def test_nan_stays_in_its_row() -> None:
    q, k, v = testing.make_qkv(seqlen_q=128, seqlen_k=128, heads_q=1)
    q[0, 17] = np.nan
    run_dense(q, k, v, "bfloat16")
    got = oa.attention(*(to_gpu(x, "bfloat16") for x in (q, k, v)))
    bad = torch.isnan(got).any(-1)[0, :, 0]
    assert bad.nonzero().flatten().tolist() == [17]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_strides(layout: str, family: str) -> None:
    """Packed QKV, a transposed view, a broadcast kv head, and a strided out: no copies, same numbers."""
    b, s, h, d = 2, 100, 4, 64
    packed = torch.randn(b, s, 3, h, d, device="cuda", dtype=torch.bfloat16)
    views = list(packed.unbind(2))
    views[1] = views[1][:, :, :1].expand(b, s, h, d)
    out_storage = torch.full((b, h, s, 2 * d), float("nan"), device="cuda", dtype=torch.bfloat16)
    out = out_storage[..., :d].transpose(1, 2)
    if layout == "HND":
        views, out = [x.transpose(1, 2) for x in views], out.transpose(1, 2)
    got = oa.attention(*views, layout=layout, causal=True, out=out)
    assert got is out
    assert torch.isnan(out_storage[..., d:]).all(), "written outside of out"
    want = oa.attention(*(x.contiguous() for x in views), layout=layout, causal=True)
    _same(out, want, family)


def test_out_in_place_of_q() -> None:
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    want = oa.attention(q, k, v, causal=True)
    got = oa.attention(q, k, v, causal=True, out=q)
    assert got is q
    assert torch.equal(got, want)
    with pytest.raises(oa.errors.ArgumentError, match="out"):
        oa.attention(q, k, v, out=k)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}], ids=str)
def test_same_bits_every_time(options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, 777, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    first = oa.attention(q, k, v, return_lse=True, **options)
    for _ in range(20):
        again = oa.attention(q, k, v, return_lse=True, **options)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.alone  # 10 GB
def test_more_than_2_31_elements() -> None:
    """Offsets beyond 32 bits in q, k, v and o: the last batch of a tensor with 2.4e9 elements."""
    b, s, h, d = 9, 16384, 128, 128
    assert b * s * h * d > 2**31
    base = torch.empty(b, s, h, d, device="cuda", dtype=torch.float16)
    base[-1].normal_()
    base[:-1].zero_()
    out = torch.full_like(base, float("nan"))
    oa.attention(base, base, base, causal=True, out=out)
    small = base[-1:, :, -2:].contiguous()
    want = oa.attention(small, small, small, causal=True)
    _same(out[-1:, :, -2:], want, "selected")  # few heads may take another tile
    assert not out[0].any()


def test_many_heads() -> None:
    """Batch times heads beyond the 65535 of a grid's y and z."""
    q = torch.randn(1, 8, 70_000, 8, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, 1, 8, 70_000, 8, device="cuda", dtype=torch.float16)
    o = oa.attention(q, k, v)
    tail = slice(69_990, 70_000)
    want = oa.attention(*(x[:, :, tail].contiguous() for x in (q, k, v)))
    _same(o[:, :, tail], want, "selected")  # few heads may take another tile


def test_launches_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than one grid takes go to several launches, without a tile lost or done twice."""
    only_rows(monkeypatch, (spec for spec in REGISTRY if not spec.arch_specific))
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "attn_fwd_sm80_bf16_d64")
    q, k, v = (torch.randn(3, 500, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = oa.attention(q, k, v, causal=True)
    PLANS.clear()
    monkeypatch.setattr(attn_fwd, "MAX_GRID_X", 7)
    out = poisoned(q.shape, "bfloat16")
    assert len(oa.explain(q, k, v, causal=True, out=out).launches) == -(-48 // 7)
    oa.attention(q, k, v, causal=True, out=out)
    assert torch.equal(out, want)


@given(
    data=st.data(),
    head_dim=st.integers(1, 32).map(lambda x: 8 * x),
    seqlen_q=st.integers(0, 400),
    seqlen_k=st.integers(0, 400),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["NHD", "HND"]),
)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_random_problems(
    data: st.DataObject, head_dim: int, seqlen_q: int, seqlen_k: int, dtype: str, layout: str
) -> None:
    group, heads_kv, batch = (data.draw(st.integers(1, 3)) for _ in range(3))
    side = st.one_of(st.just(-1), st.integers(0, 450))
    options: dict[str, Any] = {
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.one_of(st.none(), st.tuples(side, side))),
        "softcap": data.draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        "softmax_scale": data.draw(st.sampled_from([None, None, 0.05, 0.6])),
    }
    if data.draw(st.booleans()):
        options["sinks"] = RNG.standard_normal(group * heads_kv).astype(np.float32)
    if data.draw(st.integers(0, 3)) == 0:
        options["mask"] = _mask(data.draw(st.sampled_from(["bool", "float32"])), (seqlen_q, seqlen_k))
    q, k, v = testing.make_qkv(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=group * heads_kv,
        heads_kv=heads_kv,
        head_dim=head_dim,
        layout=layout,
        dtype=dtype,
        seed=data.draw(st.integers(0, 1000)),
    )
    if data.draw(st.integers(0, 2)) == 0:
        narrower = 8 * data.draw(st.integers(1, head_dim // 8))
        if data.draw(st.booleans()):
            v = v[..., :narrower]
        else:
            q, k = q[..., :narrower], k[..., :narrower]
    run_dense(q, k, v, dtype, str(options), layout=layout, **options)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long(head_dim: int) -> None:
    """16 thousand keys: the error of the sums does not grow with the length."""
    q, k, v = testing.make_qkv(seqlen_q=64, seqlen_k=16384, heads_q=1, head_dim=head_dim)
    run_dense(q, k, v, "bfloat16")


def test_lse_against_torch_flash() -> None:
    """Another implementation on the same input, as a check of the reference itself."""
    q, k, v = (torch.randn(2, 512, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    o, lse = oa.attention(q, k, v, causal=True, return_lse=True)
    hnd = [x.transpose(1, 2) for x in (q, k, v)]
    theirs = torch.ops.aten._scaled_dot_product_flash_attention(*hnd, 0.0, True, False, scale=None)
    testing.assert_close(to_numpy(o), to_numpy(theirs[0].transpose(1, 2)), atol=2e-3)
    check_lse(lse.cpu().numpy(), theirs[1].cpu().numpy(), "torch flash")
