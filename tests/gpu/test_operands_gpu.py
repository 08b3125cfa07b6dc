"""Quantized operands in the places of q, k and v on a GPU: the bits of ``precision=``, and random problems of both."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.errors import ArgumentError, DeviceError, DtypeError, UnsupportedError  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402

from .low_precision_cases import expected, quantize  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="low precision has a kernel for compute capability 9.0 only",
    ),
]

PRECISIONS: dict[str, oa.Int8 | oa.Int4] = {
    "int8": oa.Int8(),
    "int4": oa.Int4(),
    "all_smooth": oa.Int8(smooth_q=True, smooth_v=True),
    "plain": oa.Int8(granularity="per_block", smooth_k=False),
}
LENGTHS_Q, LENGTHS_K = [70, 0, 1, 129, 300, 2], [131, 5, 0, 66, 300, 700]


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    PLANS.clear()


def inputs(rows_q: int = 150, rows_k: int = 203, head_dim: int = 64, dtype: str = "bfloat16") -> list[torch.Tensor]:
    made = testing.make_qkv(
        "channel_bias", batch=2, seqlen_q=rows_q, seqlen_k=rows_k, heads_q=4, heads_kv=2, head_dim=head_dim
    )
    return [torch.from_numpy(np.asarray(x, dtype=np.float32)).to(getattr(torch, dtype)).cuda() for x in made]


def same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True) if isinstance(want, tuple) else ((got, want),):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "return_lse": True},
    "window": {"window": (37, 11), "softmax_scale": 0.2},
    "sinks": {"sinks": True, "causal": True},
    "softcap": {"softcap": 5.0},
    "mask": {"mask": True, "return_lse": True},
}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("head_dim", [64, 72, 256])
def test_the_bits_of_precision(head_dim: int, name: str, option: str, layout: str) -> None:
    q, k, v = inputs(head_dim=head_dim, dtype="float16" if head_dim == 256 else "bfloat16")
    if layout == "HND":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    options = {**OPTIONS[option], "layout": layout}
    if "sinks" in options:
        options["sinks"] = torch.tensor([0.0, 3.0, -2.0, 30.0], device="cuda")
    if "mask" in options:
        options["mask"] = torch.rand(150, 203, generator=torch.Generator().manual_seed(0)).cuda() < 0.7
    qk, values = quantize(PRECISIONS[name], q, k, v, layout=layout, with_bias=True)
    want = oa.attention(q, k, v, precision=PRECISIONS[name], **options)
    for _ in range(2):  # the second call takes the fast path
        same(oa.attention(qk.q, qk.k, values, **options), want)
    out = torch.full_like(q, float("nan"))
    got = oa.attention(qk.q, qk.k, values, out=out, **options)
    same(got, want)
    assert (got[0] if isinstance(got, tuple) else got) is out


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(head_dim: int, name: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(n + 3, heads, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n, heads in ((sum(LENGTHS_Q), 4), (sum(LENGTHS_K), 2), (sum(LENGTHS_K), 2))
    )
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(x)], dtype=torch.int32, device="cuda") for x in (LENGTHS_Q, LENGTHS_K))
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 300, "max_seqlen_k": 700}
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    want = oa.attention_varlen(q, k, v, precision=PRECISIONS[name], **packed, **options)
    qk, values = quantize(PRECISIONS[name], q, k, v, with_bias=True, **packed)
    assert torch.equal(qk.cu_seqlens_q, cu_q)
    assert torch.equal(values.cu_seqlens_k, cu_k)
    cu_q.fill_(7), cu_k.fill_(7)
    for _ in range(2):
        same(oa.attention_varlen(qk.q, qk.k, values, **options), want)


def test_cu_seqlens_that_go_backwards() -> None:
    q, k, v = (torch.randn(1000, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    padded, plain = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 400, 2000, 0, 0], [0, 400, 1000]))
    results = []
    for cu in (padded, plain):
        packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 600, "max_seqlen_k": 600}
        qk, values = quantize(oa.Int4(), q, k, v, **packed)
        results.append(oa.attention_varlen(qk.q, qk.k, values, causal=True))
    assert qk.cu_seqlens_q.tolist() == [0, 400, 1000]
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["int4", "all_smooth"])
def test_a_max_seqlen_k_of_0_is_not_a_number(name: str) -> None:
    """What lies behind the first tile of delta_s becomes NaN; nothing outside it is read."""
    q, k, v = (torch.randn(700, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 700], dtype=torch.int32, device="cuda")
    results = []
    for longest in (700, 0):
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 700, "max_seqlen_k": longest}
        qk, values = quantize(PRECISIONS[name], q, k, v, with_bias=True, **lengths)
        results.append(oa.attention_varlen(qk.q, qk.k, values, causal=True))
    torch.cuda.synchronize()
    want, got = results
    assert torch.equal(got[:128], want[:128])
    assert got[128:].isnan().all()


def test_no_sequences() -> None:
    q, k, v = (torch.randn(30, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    packed = {"cu_seqlens_q": none, "cu_seqlens_k": none, "max_seqlen_q": 0, "max_seqlen_k": 0}
    qk, values = quantize(oa.Int8(), q, k, v, with_bias=True, **packed)
    assert qk.cu_seqlens_q.tolist() == values.cu_seqlens_k.tolist() == [0]
    o, lse = oa.attention_varlen(qk.q, qk.k, values, return_lse=True)
    assert not o.any()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize(("rows_q", "rows_k"), [(0, 70), (70, 0)])
def test_nothing_there(rows_q: int, rows_k: int) -> None:
    q, k, v = inputs(70, 70)
    qk, values = quantize(oa.Int4(), q[:, :rows_q], k[:, :rows_k], v[:, :rows_k], with_bias=True)
    o, lse = oa.attention(qk.q, qk.k, values, return_lse=True)
    assert o.shape == (2, rows_q, 4, 64)
    assert not o.any()
    assert torch.isneginf(lse).all()


def test_operands_made_on_the_cpu_serve_a_gpu() -> None:
    q, k, v = inputs(head_dim=128)
    qk, values = quantize(oa.Int8(smooth_v=True), q.cpu(), k.cpu(), v.cpu())
    with pytest.raises(DeviceError, match=r"q\.q_scale.*cuda:0.*cpu|q\.q_scale.*cpu"):
        oa.attention(dataclasses.replace(qk, q_int=qk.q_int.cuda()).q, qk.k, values)

    def moved(x: Any) -> Any:
        return dataclasses.replace(x, **{n: a.cuda() for n, a in vars(x).items() if isinstance(a, torch.Tensor)})

    there, of_v = moved(qk), moved(values)
    want = oa.attention(q, k, v, causal=True, precision=oa.Int8(smooth_v=True))
    same(oa.attention(there.q, there.k, of_v, causal=True), want)


def test_keys_quantized_once() -> None:
    q, k, v = inputs(head_dim=128)
    fixed, values = oa.quantize_qk(k[:, :0], k), oa.quantize_v(v)
    for queries in (q, q.flip(1)):
        qk = oa.quantize_qk(queries, k[:, :0])
        same(oa.attention(qk.q, fixed.k, values), oa.attention(queries, k, v, precision="int8"))


def test_streams_and_graphs() -> None:
    q, k, v = inputs(300, 300)
    want = oa.attention(q, k, v, precision="int8")
    stream = torch.cuda.Stream()
    qk, values = quantize(oa.Int8(), q, k, v)
    got = oa.attention(qk.q, qk.k, values, stream=stream)
    stream.synchronize()
    same(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = oa.attention(qk.q, qk.k, values)
    for seed in range(3):
        torch.manual_seed(seed)
        new, of_v = quantize(oa.Int8(), torch.randn_like(q), torch.randn_like(k), torch.randn_like(v))
        for a, b in ((qk, new), (values, of_v)):
            for name, x in vars(a).items():
                if isinstance(x, torch.Tensor):
                    x.copy_(getattr(b, name))
        graph.replay()
        same(out, oa.attention(new.q, new.k, of_v))


def test_cupy_and_jax() -> None:
    cupy = pytest.importorskip("cupy")
    jax = pytest.importorskip("jax")
    jax.devices()  # of several GPUs its first use leaves the last one current
    torch.cuda.set_device(0)
    tensors = inputs(dtype="float16")
    want = oa.attention(*tensors, causal=True, precision="int8").cpu().numpy()
    for own, kind in ((cupy.from_dlpack, cupy.ndarray), (jax.dlpack.from_dlpack, jax.Array)):
        qk, values = quantize(oa.Int8(), *(own(x) for x in tensors))
        counts = []
        for _ in range(2):
            got = oa.attention(qk.q, qk.k, values, causal=True)
            counts.append(len(PLANS))
            assert isinstance(got, kind)
            assert np.array_equal(np.asarray(got.get() if kind is cupy.ndarray else got), want)
        assert counts[0] == counts[1] > 0


def test_what_the_gpu_cannot_do() -> None:
    q, k, v = inputs()
    qk, values = quantize(oa.Int8(), q, k, v, with_bias=True)
    with pytest.raises(ArgumentError, match=r"'precision'.*fp16 sums need"):
        oa.attention(qk.q, qk.k, values, precision=oa.Int8(pv_accumulator="fp16"))
    token = oa.quantize_qk(q, k, granularity="per_token")
    with pytest.raises(UnsupportedError, match="token"):
        oa.attention(token.q, token.k, values)
    with pytest.raises(UnsupportedError, match="fp16"):
        oa.attention(qk.q, qk.k, oa.quantize_v(v, dtype="float16"))
    with pytest.raises(ArgumentError, match=r"'q'.*not quantized, with score_mod"):
        oa.attention(qk.q, qk.k, values, score_mod=oa.ScoreMod("score * 2.0f"))
    wide, of_v = quantize(oa.Int8(), *(x.float().cpu() for x in (q, k, v)))
    arrays = {n: a.cuda() for n, a in vars(wide).items() if isinstance(a, torch.Tensor)}
    on_gpu = dataclasses.replace(wide, **arrays)
    of_v = dataclasses.replace(of_v, v=of_v.v.cuda(), v_scale=of_v.v_scale.cuda(), v_mean=of_v.v_mean.cuda())
    with pytest.raises(DtypeError, match=r"'q'.*float16 or bfloat16.*float32"):
        oa.attention(on_gpu.q, on_gpu.k, of_v)
    with pytest.raises(ArgumentError, match=r"'out'.*memory of its own"):
        oa.attention(qk.q, qk.k, values, out=_overlaid(qk.k_int, q.shape))
    assert oa.explain(qk.q, qk.k, values).kernel.startswith("attn_int8_sm90_bf16_d64")


def _overlaid(x: torch.Tensor, shape: Any) -> torch.Tensor:
    """A bf16 tensor at x's address."""
    count = int(np.prod(shape))
    storage = x.untyped_storage()
    storage.resize_(max(storage.nbytes(), 2 * count))
    return torch.empty(0, dtype=torch.bfloat16, device="cuda").set_(storage).as_strided(tuple(shape), _steps(shape))


def _steps(shape: Any) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))


@given(
    data=st.data(),
    head_dim=st.integers(1, 32).map(lambda x: 8 * x),
    bits=st.sampled_from([8, 8, 4]),
    granularity=st.sampled_from(["per_tensor", "per_block", "per_warp", "per_thread", "per_thread"]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    layout=st.sampled_from(["NHD", "HND"]),
    packed=st.booleans(),
)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_random_problems(
    data: st.DataObject, head_dim: int, bits: int, granularity: str, dtype: str, layout: str, packed: bool
) -> None:
    """Both ways give the same bits, and these are a softmax on the dequantized operands but for the rounding of P."""
    draw = data.draw
    group, heads_kv, batch = (draw(st.integers(1, 3)) for _ in range(3))
    smooth_q, smooth_k, smooth_v, return_lse, use_sinks, causal = (draw(st.booleans()) for _ in range(6))
    knobs = {"granularity": granularity, "smooth_q": smooth_q, "smooth_k": smooth_k, "smooth_v": smooth_v}
    precision = oa.Int8(**knobs) if bits == 8 else oa.Int4(**knobs)
    side = st.one_of(st.just(-1), st.integers(0, 450))
    options: dict[str, Any] = {
        "causal": causal,
        "window": draw(st.one_of(st.none(), st.tuples(side, side))),
        "softmax_scale": draw(st.sampled_from([None, None, 0.05, 0.4])),
    }
    torch.manual_seed(draw(st.integers(0, 1000)))
    heads_q = group * heads_kv
    if use_sinks:
        options["sinks"] = torch.randn(heads_q, device="cuda")
    length = st.integers(0, 400)
    more: dict[str, Any] = {}
    if packed:
        lengths = [[draw(length) for _ in range(batch)] for _ in range(2)]
        cu_q, cu_k = (torch.tensor([0, *np.cumsum(x)], dtype=torch.int32, device="cuda") for x in lengths)
        more = {
            "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max(lengths[0]),
            "max_seqlen_k": max(lengths[1]),
        }  # fmt: skip
        shapes = [(sum(n) + draw(st.integers(0, 5)), h, head_dim) for n, h in zip(lengths, (heads_q, heads_kv))]
    else:
        shapes = [(batch, draw(length), h, head_dim) for h in (heads_q, heads_kv)]
    q, k, v = (torch.randn(x, device="cuda") for x in (*shapes, shapes[1]))
    k = k + 2 * torch.randn(head_dim, device="cuda")
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v + 0.5))
    if layout == "HND":
        q, k, v = (x.transpose(-3, -2).contiguous() for x in (q, k, v))

    call = oa.attention_varlen if packed else oa.attention
    qk, values = quantize(precision, q, k, v, layout=layout, with_bias=True, **more)
    raw = call(q, k, v, layout=layout, precision=precision, return_lse=return_lse, **options, **more)
    same(call(qk.q, qk.k, values, layout=layout, return_lse=return_lse, **options), raw)
    o, lse = call(qk.q, qk.k, values, layout=layout, return_lse=True, **options)
    if return_lse or packed or smooth_q or head_dim > 128:
        same(o, raw[0] if return_lse else raw)
    elif v.numel() and raw.numel():  # without an LSE P is made of integers
        assert (o.double() - raw.double()).abs().max() <= 0.13 * float(v.abs().max())

    want, want_lse, bound = expected(qk, values, **options)
    o = o.double() if layout == "HND" else o.double().transpose(-3, -2)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    seen = ~torch.isneginf(want_lse)
    error = (lse.double() - want_lse)[seen].abs()
    assert bool((error <= 2e-3 * (1 + want_lse[seen].abs())).all()), error.max()
    nothing = ~seen if not use_sinks else torch.zeros_like(seen)
    assert not o[nothing].any()
    # Scores and the sums of 13 bits are off by less than a 256th; o is rounded to its own type.
    error = (o - want).abs()
    allowed = 1.1 * bound + (2.0**-8 + 2.0**-8) * want.abs() + 2e-3 * v.double().abs().max().item() if v.numel() else 0
    assert bool((error <= allowed).all()), (error - allowed).max()
    if want.numel() >= 4096 and want.abs().sum() > 0:
        assert float(error.sum() / want.abs().sum()) <= 0.05
