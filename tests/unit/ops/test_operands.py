"""Quantized operands in the places of q, k and v: the bits of ``precision=``, and what does not fit together."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import testing
from omniattn.checks.operands import check_precision, combine
from omniattn.errors import ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionProblem, AttentionStrides, Target
from omniattn.problems.quantize import QK_DTYPES

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

PRECISIONS: dict[str, oa.Int8 | oa.Int4 | oa.Fp8] = {
    "int8": oa.Int8(),
    "int4": oa.Int4(),
    "all_smooth": oa.Int8(smooth_q=True, smooth_v=True),
    "plain": oa.Int4(granularity="per_block", smooth_k=False, smooth_q=False),
    "per_token": oa.Int8(granularity="per_token", pv="fp16"),
    "rotated": oa.Int4(hadamard=True, seed=5),
    "fp8": oa.Fp8(),
    "fp8_smooth": oa.Fp8(smooth_k=True, smooth_v=False, seed=2**32 - 1),
    "fp8_plain": oa.Fp8(hadamard=False, granularity="per_tensor"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "softmax_scale": 0.2},
    "window": {"window": (37, 11), "return_lse": True},
    "sinks": {"sinks": True, "causal": True, "return_lse": True},
    "softcap": {"softcap": 5.0},
    "mask": {"mask": True},
}


def quantize(
    knobs: oa.Int8 | oa.Int4 | oa.Fp8, q: Any, k: Any, v: Any, **more: Any
) -> tuple[oa.QuantizedQK, oa.QuantizedV]:
    precision = knobs.precision
    of_k = {name: more[name] for name in ("layout", "cu_seqlens_k", "max_seqlen_k") if name in more}
    qk = oa.quantize_qk(
        q, k, dtype=QK_DTYPES[precision.qk], granularity=precision.granularity, smooth_k=precision.smooth_k,
        smooth_q=precision.smooth_q, hadamard=precision.hadamard, seed=precision.seed, **{"with_bias": True} | more,
    )  # fmt: skip
    dtype = "float16" if precision.pv == "fp16" else "float8_e4m3"
    return qk, oa.quantize_v(v, dtype=dtype, smooth_v=precision.smooth_v, **of_k)


def inputs(layout: str = "NHD", dtype: str = "bfloat16", head_dim: int = 72) -> list[Any]:
    made = testing.make_qkv(
        "channel_bias", batch=2, seqlen_q=150, seqlen_k=200, heads_q=4, heads_kv=2, head_dim=head_dim
    )
    tensors = [torch.from_numpy(np.asarray(x, dtype=np.float32)).to(getattr(torch, dtype)) for x in made]
    return [x.transpose(1, 2).contiguous() for x in tensors] if layout == "HND" else tensors


def same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True) if isinstance(want, tuple) else ((got, want),):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_bits_of_precision(option: str, name: str, layout: str) -> None:
    q, k, v = inputs(layout)
    options = {**OPTIONS[option], "layout": layout}
    if "sinks" in options:
        options["sinks"] = torch.tensor([0.5, 3.0, -1.0, 20.0])
    if "mask" in options:
        options["mask"] = torch.rand(2, 1, 150, 200, generator=torch.Generator().manual_seed(0)) < 0.7
    precision = PRECISIONS[name]
    qk, values = quantize(precision, q, k, v, layout=layout)
    want = oa.attention(q, k, v, precision=precision, **options)
    same(oa.attention(qk.q, qk.k, values, **options), want)
    same(oa.attention(qk.q, qk.k, values, precision=precision, **options), want)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtype_of_what_was_quantized(dtype: str) -> None:
    q, k, v = inputs(dtype=dtype)
    qk, values = quantize(oa.Int8(), q, k, v)
    want = oa.attention(q, k, v, precision="int8", causal=True)
    same(oa.attention(qk.q, qk.k, values, causal=True, precision="int8"), want)
    out = torch.empty_like(q)
    assert oa.attention(qk.q, qk.k, values, causal=True, out=out) is out
    same(out, want)


def test_numpy_stays_numpy() -> None:
    q, k, v = testing.make_qkv(seqlen_q=40, seqlen_k=50, head_dim=64)
    qk, values = quantize(oa.Int4(), q, k, v)
    got = oa.attention(qk.q, qk.k, values)
    assert isinstance(got, np.ndarray)
    assert np.array_equal(got, oa.attention(q, k, v, precision="int4"))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_packed_sequences(name: str, layout: str) -> None:
    of_q, of_k = [100, 1, 0, 57], [130, 30, 5, 0]
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (of_q, of_k))
    q, k, v = (torch.randn(n, h, 64).to(torch.float16) for n, h in ((160, 4), (170, 2), (170, 2)))
    if layout == "HND":
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 100, "max_seqlen_k": 130, "layout": layout}
    qk, values = quantize(PRECISIONS[name], q, k, v, **packed)
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    want = oa.attention_varlen(q, k, v, precision=PRECISIONS[name], **packed, **options)
    # What the caller does to theirs afterwards does not matter.
    cu_q.fill_(7), cu_k.fill_(7)
    same(oa.attention_varlen(qk.q, qk.k, values, layout=layout, **options), want)
    same(oa.attention_varlen(qk.q, qk.k, values, layout=layout, max_seqlen_q=100, max_seqlen_k=130, **options), want)
    mask = torch.zeros(4, 1, 100, 130)
    got = oa.attention_varlen(
        qk.q, qk.k, values, layout=layout, mask=mask, max_seqlen_q=100, max_seqlen_k=130, **options
    )
    same(got, want)
    with pytest.raises(ArgumentError, match=r"max_seqlen_q.*integer.*None"):
        oa.attention_varlen(qk.q, qk.k, values, layout=layout, mask=mask, **options)


@pytest.mark.parametrize("rows", [(0, 5), (5, 0), (0, 0)])
def test_nothing_there(rows: tuple[int, int]) -> None:
    q, k = torch.ones(2, rows[0], 2, 64), torch.ones(2, rows[1], 2, 64)
    qk, values = quantize(oa.Int4(), q, k, k)
    o, lse = oa.attention(qk.q, qk.k, values, return_lse=True)
    assert o.shape == q.shape
    assert not o.any()
    assert torch.isneginf(lse).all() == (lse.numel() == 0 or rows[1] == 0)


def test_keys_quantized_once_serve_other_queries() -> None:
    q, k, v = inputs()
    first, values = quantize(oa.Int8(), q, k, v)
    other = q.flip(1)
    # Without bias and delta_s nothing of q's depends on K; no keys will do.
    second = oa.quantize_qk(other, k[:, :0])
    same(oa.attention(second.q, first.k, values), oa.attention(other, k, v, precision="int8"))
    tied = oa.quantize_qk(other, k, smooth_q=True)
    with pytest.raises(ArgumentError, match=r"'k'.*own quantize_qk call.*delta_s.*another call"):
        oa.attention(tied.q, first.k, values)
    with pytest.raises(ArgumentError, match=r"'k'.*own quantize_qk call.*row_bias.*another call"):
        oa.attention(first.q, second.k, values)


def test_operands_do_not_outlive_their_use() -> None:
    q, k, v = inputs()
    qk, values = quantize(oa.Int8(), q, k, v)
    oa.attention(qk.q, qk.k, values)
    gone = weakref.ref(qk)
    gc.disable()
    try:
        del qk
        assert gone() is None
    finally:
        gc.enable()


def of(**more: Any) -> tuple[oa.QuantizedQK, oa.QuantizedV]:
    q, k, v = inputs()
    return oa.quantize_qk(q, k, **more), oa.quantize_v(v)


def batches(n: int, rows: int = 200, heads: int = 2, head_dim: int = 72) -> Any:
    return torch.ones(n, rows, heads, head_dim, dtype=torch.bfloat16)


def packed_values() -> oa.QuantizedV:
    cu = torch.tensor([0, 200, 400], dtype=torch.int32)
    return oa.quantize_v(batches(1, 400)[0], cu_seqlens_k=cu, max_seqlen_k=200)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"'q'.*QuantizedQ, from quantize_qk\(...\).q.*QuantizedQK", lambda qk, v: oa.attention(qk, qk.k, v)),
        (r"'k'.*QuantizedK.*Tensor", lambda qk, v: oa.attention(qk.q, inputs()[1], v)),
        (r"'q'.*QuantizedQ.*Tensor", lambda qk, v: oa.attention(inputs()[0], qk.k, v)),
        (r"'v'.*QuantizedV.*Tensor", lambda qk, v: oa.attention(qk.q, qk.k, inputs()[2])),
        (r"'k'.*QuantizedK.*QuantizedQ", lambda qk, v: oa.attention(qk.q, qk.q, v)),
        (r"'q'.*layout 'HND'.*'NHD'", lambda qk, v: oa.attention(qk.q, qk.k, v, layout="HND")),
        (r"'q'.*packed sequences.*a batch", lambda qk, v: oa.attention_varlen(qk.q, qk.k, v)),
        (r"'v'.*a batch.*packed sequences", lambda qk, v: oa.attention(qk.q, qk.k, packed_values())),
        (r"'v'.*batch 2.*3", lambda qk, v: oa.attention(qk.q, qk.k, oa.quantize_v(batches(3)))),
        (r"'v'.*rows 200.*201", lambda qk, v: oa.attention(qk.q, qk.k, oa.quantize_v(batches(2, 201)))),
        (r"'v'.*heads 2.*4", lambda qk, v: oa.attention(qk.q, qk.k, oa.quantize_v(batches(2, 200, 4)))),
        (
            r"'v'.*head_dim 72.*96",
            lambda qk, v: oa.attention(qk.q, qk.k, oa.quantize_v(batches(2, 200, 2, 96))),
        ),
        (
            r"'v'.*dtype.*bfloat16.*float16",
            lambda qk, v: oa.attention(qk.q, qk.k, oa.quantize_v(batches(2).half())),
        ),
        (r"'k'.*grouping sm90.*sm80", lambda qk, v: oa.attention(qk.q, of(grouping="sm80")[0].k, v)),
        (r"'k'.*dtype int8, like q, received int4", lambda qk, v: oa.attention(qk.q, of(dtype="int4")[0].k, v)),
        (r"'k'.*granularity.*per_token", lambda qk, v: oa.attention(qk.q, of(granularity="per_token")[0].k, v)),
        (
            r"'k'.*divides q's 4.*3",
            lambda qk, v: oa.attention(qk.q, oa.quantize_qk(batches(2, 9, 3), batches(2, 9, 3)).k, v),
        ),
        (r"'q'.*with_bias=True.*with_bias=False", lambda qk, v: oa.attention(qk.q, qk.k, v, return_lse=True)),
        (r"'q'.*with_bias=True", lambda qk, v: oa.attention(qk.q, qk.k, v, softcap=3.0)),
        (r"'q'.*with_bias=True", lambda qk, v: oa.attention(qk.q, qk.k, v, sinks=torch.zeros(4))),
        (r"'precision'.*Int8\(.*int4", lambda qk, v: oa.attention(qk.q, qk.k, v, precision="int4")),
        (r"'precision'.*smooth_v=False", lambda qk, v: oa.attention(qk.q, qk.k, v, precision=oa.Int8(smooth_v=False))),
        (r"'out'.*float32", lambda qk, v: oa.attention(qk.q, qk.k, v, out=torch.empty(2, 150, 4, 72))),
        (r"'stream'.*CPU", lambda qk, v: oa.attention(qk.q, qk.k, v, stream=7)),
        (r"'window'", lambda qk, v: oa.attention(qk.q, qk.k, v, window=[3, "x"])),
        (
            r"'cu_seqlens_q'.*None, because quantized operands bring their sequences",
            lambda qk, v: oa.attention_varlen(qk.q, qk.k, v, cu_seqlens_q=torch.zeros(2, dtype=torch.int32)),
        ),
    ],
)
def test_what_does_not_fit(message: str, call: Any) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(*of())


@pytest.mark.parametrize(
    ("error", "message", "name", "change"),
    [
        (ShapeError, r"'q.q_int'.*\(2, 4, 150, 96\).*\(2, 4, 150, 72\)", "q_int", lambda x: x[..., :72].contiguous()),
        (DtypeError, r"'k.k_int'.*int8.*uint8", "k_int", lambda x: x.view(torch.uint8)),
        (StrideError, r"'k.k_scale'.*contiguous.*strides", "k_scale", lambda x: torch.cat([x, x], -1)[..., ::2]),
        (ArgumentError, r"'q.row_bias'.*an array.*None", "row_bias", lambda x: None),
        (ArgumentError, r"'q.delta_s'.*None.*an array", "delta_s", lambda x: torch.zeros(2)),
        (ArgumentError, r"array.*str", "q_scale", lambda x: "scales"),
    ],
)
def test_arrays_that_were_changed(error: type[Exception], message: str, name: str, change: Any) -> None:
    qk, values = of()
    broken = dataclasses.replace(qk, **{name: change(getattr(qk, name))})
    with pytest.raises(error, match=message):
        oa.attention(broken.q, broken.k, values)


def test_other_sequences_in_v() -> None:
    q, k, v = (torch.ones(40, 2, 64) for _ in range(3))
    a, b = (torch.tensor(x, dtype=torch.int32) for x in ([0, 10, 40], [0, 20, 40]))
    qk = oa.quantize_qk(q, k, cu_seqlens_q=a, cu_seqlens_k=a, max_seqlen_q=30, max_seqlen_k=30)
    with pytest.raises(ArgumentError, match=r"'v'.*\[0, 10, 40\].*\[0, 20, 40\]"):
        oa.attention_varlen(qk.q, qk.k, oa.quantize_v(v, cu_seqlens_k=b, max_seqlen_k=20))
    with pytest.raises(ArgumentError, match=r"'q'.*a batch.*packed sequences"):
        oa.attention(qk.q, qk.k, oa.quantize_v(v, cu_seqlens_k=a, max_seqlen_k=30))


def test_errors_in_the_lengths_name_the_function() -> None:
    q, k, v = (torch.ones(40, 2, 64) for _ in range(3))
    cu = torch.tensor([0, 10, 40], dtype=torch.int32)
    qk = oa.quantize_qk(q, k, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=30, max_seqlen_k=30)
    values = oa.quantize_v(v, cu_seqlens_k=cu, max_seqlen_k=30)
    with pytest.raises(ArgumentError, match=r"^attention_varlen\(\): argument 'max_seqlen_q'.*30"):
        oa.attention_varlen(qk.q, qk.k, values, max_seqlen_q=2)
    with pytest.raises(ArgumentError, match="'max_seqlen_k': expected an integer from 0 to"):  # kernels have 32 bits
        oa.attention_varlen(qk.q, qk.k, values, max_seqlen_q=30, max_seqlen_k=2**31)


def test_explain() -> None:
    qk, values = of(with_bias=True)
    said = oa.explain(qk.q, qk.k, values, causal=True, return_lse=True)
    assert said.kernel == "reference (NumPy, CPU)"
    assert said.problem.precision == oa.Int8(pv="fp8", pv_accumulator="fp32").precision
    assert said.flops == oa.explain(*inputs(), causal=True, precision="int8").flops
    read = (qk.q_int, qk.k_int, qk.q_scale, qk.k_scale, qk.row_bias, values.v, values.v_scale, values.v_mean)
    assert said.min_bytes == sum(x.nbytes for x in read) + 2 * 4 * 150 * (2 * 72 + 4)
    with pytest.raises(ArgumentError, match="with_bias"):
        oa.explain(*(lambda x, y: (x.q, x.k, y))(*of()), return_lse=True)
    packed = packed_values()
    assert packed.cu_seqlens_k.tolist() == [0, 200, 400]


# Which kernel reads them


def chosen(cc: tuple[int, int], qk: oa.QuantizedQK, v: oa.QuantizedV, **changes: Any) -> Any:
    """What a GPU takes for these operands, described as if they were there."""
    both = combine("attention", qk, qk, v, "NHD")
    precision = check_precision("attention", changes.pop("precision", "exact"), both)
    unused = (0, 0, 0)
    p = AttentionProblem(
        both.dtype, both.batch, both.rows_q, both.rows_k, both.heads_q, both.heads_kv, both.head_dim, -1, -1, 0.125,
        changes.pop("softcap", 0.0), "none", "none", False, precision, operands=both,
        strides=AttentionStrides(unused, unused, unused, unused, (0, 0), (0, 0, 0, 0)), **changes,
    )  # fmt: skip
    launches = plan_attention(p, Target(cc, 99 << 10 if cc != (9, 0) else 227 << 10, 132), None)
    # Keys that are split over CTAs are merged by a second kernel; nothing quantizes anything.
    kernels = [record.spec for record in launches.records]
    assert kernels[0] == launches.selection.spec
    assert all(spec.op.startswith("attention_combine") for spec in kernels[1:])
    return launches.selection.spec


@pytest.mark.parametrize("cc", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("bits", [8, 4])
def test_grouping_and_packing_choose_the_kernel(cc: tuple[int, int], bits: int) -> None:
    qk, _ = of(grouping="sm80", dtype=f"int{bits}", smooth_q=bits == 4)
    v = inputs()[2]
    half, small, full = (
        oa.quantize_v(v, dtype="float16"), oa.quantize_v(v, pv_accumulator="fp16"), oa.quantize_v(v),
    )  # fmt: skip
    spec = chosen(cc, qk, half)
    family = "attn_int8_mbarrier_sm90" if bits == 8 and cc in ((9, 0), (10, 0)) else f"attn_int{bits}_sm80"
    assert (spec.family, spec.qk, spec.grouping) == (family, f"int{bits}", "sm80")
    for softcap in (0.0, 5.0):
        if cc < (8, 9):
            with pytest.raises(UnsupportedError, match=r"needs compute capability 8\.9"):
                chosen(cc, qk, full, softcap=softcap)
            continue
        assert chosen(cc, qk, full, softcap=softcap).pv_accumulator == "fp32"
        found = chosen(cc, qk, small, softcap=softcap)
        assert found.pv_accumulator == ("fp16" if cc in ((8, 9), (12, 0)) else "fp32")
        kind = oa.Int8 if bits == 8 else oa.Int4
        for acc in ("fp32", "fp16"):
            precision = kind(smooth_q=bits == 4, pv_accumulator=acc)
            assert chosen(cc, qk, small, softcap=softcap, precision=precision).pv_accumulator == acc
            assert chosen(cc, qk, half, softcap=softcap, precision=precision).pv_accumulator == acc


def test_operands_of_hopper_stay_there() -> None:
    qk, v = of(with_bias=True)
    assert chosen((9, 0), qk, v).family == "attn_int8_sm90"
    assert chosen((9, 0), of(dtype="int4")[0], v).family == "attn_int8_sm90"
    with pytest.raises(ArgumentError, match=r"'q'.*grouping='sm80'.*grouping='sm90'"):
        chosen((8, 9), qk, v)
    assert chosen((9, 0), qk, v, softcap=3.0).family == "attn_int8_sm90"
    with pytest.raises(UnsupportedError, match=r"tensor maps.*grouping='sm80'"):
        chosen((9, 0), qk, v, tensor_maps=False)
    spec = chosen((9, 0), of(grouping="sm80")[0], v, tensor_maps=False)
    assert spec.grouping == "sm80"


def test_sums_in_fp16_need_values_that_are_small() -> None:
    q, k, v = inputs()
    wanted = oa.Int8(pv_accumulator="fp16")
    qk = oa.quantize_qk(q, k)
    with pytest.raises(ArgumentError, match=r"'precision'.*fp16 sums need values of quantize_v\(pv_accumulator='fp16'"):
        oa.attention(qk.q, qk.k, oa.quantize_v(v), precision=wanted)
    small = oa.quantize_v(v, pv_accumulator="fp16")
    assert small.problem.v_levels == 32
    assert torch.equal(oa.attention(qk.q, qk.k, small, precision=wanted), oa.attention(q, k, v, precision=wanted))
    with pytest.raises(ArgumentError, match=r"'pv_accumulator'.*'fp32' or 'fp16'.*'bf16'"):
        oa.quantize_v(v, pv_accumulator="bf16")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("precision", ["exact", "int8", "int4", "operands"])
def test_a_longest_sequence_that_is_none(precision: str, name: str, masked: bool) -> None:
    """On the CPU, where the lengths can be seen: the same error for every precision, with a mask and without."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((30, 2, 16)).astype(np.float32) for _ in range(3))
    starts = np.array([0, 10, 30], np.int32)
    packed: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    extents: dict[str, Any] = {"max_seqlen_q": 20, "max_seqlen_k": 20, name: 19}
    mask = np.ones((extents["max_seqlen_q"], extents["max_seqlen_k"]), bool) if masked else None
    if precision == "operands":
        qk = oa.quantize_qk(q, k, **packed, max_seqlen_q=20, max_seqlen_k=20)
        q, k, v = qk.q, qk.k, oa.quantize_v(v, cu_seqlens_k=starts, max_seqlen_k=20)
        options: dict[str, Any] = extents
    else:
        options = {**packed, **extents, "precision": precision}
    with pytest.raises(ArgumentError, match=f"'{name}': expected at least 20, the longest sequence, received 19"):
        oa.attention_varlen(q, k, v, mask=mask, **options)


def test_a_longest_sequence_that_is_none_in_quantization() -> None:
    q, k, v = (np.ones((30, 2, 16), np.float32) for _ in range(3))
    starts = np.array([0, 10, 30], np.int32)
    packed: dict[str, Any] = {"cu_seqlens_k": starts, "max_seqlen_k": 19}
    calls = {
        "quantize_qk": lambda: oa.quantize_qk(q, k, cu_seqlens_q=starts, max_seqlen_q=20, smooth_q=True, **packed),
        "quantize_v": lambda: oa.quantize_v(v, **packed),
    }
    for function, call in calls.items():
        wanted = rf"^{function}\(\): argument 'max_seqlen_k': expected at least 20, the longest sequence, received 19"
        with pytest.raises(ArgumentError, match=wanted):
            call()
