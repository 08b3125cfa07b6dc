"""The quantizers on a GPU against NumPy: the same bits, whatever the format, the shape and the values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import arrays, testing  # noqa: E402
from omniattn.ops.quantize import MEAN_IS_READY, quantize_around  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.problems import AttentionProblem, QuantizeCall, QuantizeProblem  # noqa: E402
from omniattn.problems.precision import GRANULARITIES, GROUPINGS  # noqa: E402
from omniattn.reference import quantize as reference  # noqa: E402
from omniattn.testing.quantizer_cases import Fused  # noqa: E402

pytestmark = pytest.mark.gpu

#: fp32 sums of up to 256 products in another order.
BIAS_RTOL = 1e-5
#: bf16 split into two: 16 mantissa bits a factor.
DELTA_RTOL = 1e-4


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs and workspaces of the GPU begin as 0xff: NaN, and -1. No fast path, which allocates otherwise."""
    plain = arrays.empty_like_framework

    def allocate(ref: Any, shape: tuple[int, ...], dtype: str) -> Any:
        t = plain(ref, shape, dtype)
        if t.framework == "torch" and t.device == "cuda" and 0 not in shape:
            t.obj.view(torch.uint8).fill_(255)
        return t

    monkeypatch.setattr(arrays, "empty_like_framework", allocate)
    monkeypatch.setattr(arrays, "allocator", lambda ref, shape, dtype: None)
    PLANS.clear()
    yield
    PLANS.clear()


def tensor(values: Any, dtype: str, layout: str = "NHD") -> Any:
    """NHD values as a torch tensor of a layout."""
    x = torch.from_numpy(np.array(values, dtype=np.float32)).to(getattr(torch, dtype))
    return x if layout == "NHD" else x.transpose(-3, -2).contiguous()


def numpy(x: Any) -> np.ndarray[Any, Any]:
    return np.asarray(x.cpu().numpy())


def written(call: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    """The reference's result, and for each array where it says anything: where two different backgrounds agree."""
    results = []
    for fill in (3, 5):

        def empty(problem: Any, fill: int = fill) -> dict[str, np.ndarray[Any, Any]]:
            return {name: np.full(shape, fill, dtype) for name, (shape, dtype) in problem.shapes().items()}

        with monkeypatch.context() as patch:
            patch.setattr(reference, "_empty", empty)
            results.append(call())
    names = [n for n, x in vars(results[0]).items() if isinstance(x, torch.Tensor) and "cu_" not in n]
    masks = {}
    for name in names:
        a, b = (numpy(getattr(r, name)) for r in results)
        masks[name] = (a == b) | ((a != a) & (b != b))
    return results[0], masks


def assert_same(got: Any, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, masks = written(call, monkeypatch)
    for name, mask in masks.items():
        a, b = numpy(getattr(got, name))[mask], numpy(getattr(expected, name))[mask]
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if name in ("row_bias", "delta_s"):
            assert np.array_equal(np.isnan(a), np.isnan(b)), name
            a, b = np.nan_to_num(a.astype(np.float64)), np.nan_to_num(b.astype(np.float64))
            tolerance = BIAS_RTOL if name == "row_bias" else DELTA_RTOL
            error = np.abs(a - b).max(initial=0)
            assert error <= tolerance * max(1.0, np.abs(b).max(initial=0)), (name, error)
            continue
        same = (a == b) | ((a != a) & (b != b))
        assert same.all(), f"{name}: {(~same).sum()} of {same.size} differ, first {a[~same][:4]} and {b[~same][:4]}"


def check_qk(q: Any, k: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    on_gpu = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    got = oa.quantize_qk(q.cuda(), k.cuda(), **on_gpu)
    if got.k_mean is not None:  # padding, of which `written` knows nothing
        assert (numpy(got.k_mean)[..., k.shape[-1] :] == 0).all()
    assert_same(got, lambda: oa.quantize_qk(q, k, **options), monkeypatch)
    return got


def check_v(v: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    on_gpu = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    got = oa.quantize_v(v.cuda(), **on_gpu)
    assert (numpy(got.v_scale)[..., v.shape[-1] :] == 1).all()
    assert (numpy(got.v_mean)[..., v.shape[-1] :] == 0).all()
    assert_same(got, lambda: oa.quantize_v(v, **options), monkeypatch)
    return got


def inputs(dtype: str, head_dim: int, rows_q: int, rows_k: int, kind: str = "channel_bias", **shape: int) -> Any:
    layout = str(shape.pop("layout", "NHD"))
    q, k, v = testing.make_qkv(
        kind, batch=2, seqlen_q=rows_q, seqlen_k=rows_k, heads_q=4, heads_kv=2, head_dim=head_dim, dtype=dtype
    )
    return tuple(tensor(x, dtype, layout) for x in (q, k, v))


def problem_for(
    precision: oa.Int8 | oa.Int4,
    *,
    dtype: str,
    rows_q: int,
    rows_k: int,
    head_dim: int,
    varlen: bool,
    grouping: str,
    full_bias: bool,
    max_seqlen_k: int = 0,
    unpacked: bool = False,
) -> QuantizeProblem:
    """What attention of this precision asks of the quantizer; ``full_bias``: as where it returns the LSE."""
    call = AttentionProblem(
        dtype, 2, rows_q, rows_k, 4, 2, head_dim, -1, -1, 0.1, 0.0, "none", "none", varlen, precision.precision,
        lse=full_bias, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    pv, accumulator = call.precision.on_cpu.pv, call.precision.on_cpu.pv_accumulator
    return call.quantization(grouping=grouping, pv=pv, pv_accumulator=accumulator, unpacked=unpacked)


def strides_of(*tensors: Any) -> Any:
    """Strides (batch, seq, head) of q, k and v in the NHD layout."""
    return tuple((0, *x.stride())[-4:-1] for x in tensors)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_formats(dtype: str, granularity: str, grouping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for smooth_q, smooth_k, with_bias in ((False, True, True), (True, True, False), (True, False, True)):
        q, k, _ = inputs("bfloat16", 64, 333, 517)
        check_qk(
            q, k, monkeypatch, dtype=dtype, granularity=granularity, grouping=grouping,
            smooth_q=smooth_q, smooth_k=smooth_k, with_bias=with_bias,
        )  # fmt: skip


@pytest.mark.parametrize("io", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 128, 136, 192, 256])
def test_head_dims(head_dim: int, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(io, head_dim, 130, 300 if io == "float16" else 600)
    check_qk(q, k, monkeypatch, smooth_q=True, with_bias=True)
    check_qk(q, k, monkeypatch, dtype="int4", grouping="sm80")
    for dtype in ("float8_e4m3", "float16"):
        for smooth_v in (False, True):
            check_v(v, monkeypatch, dtype=dtype, smooth_v=smooth_v)


@pytest.mark.parametrize(
    ("dtype", "grouping"), [*((x, g) for x in ("int8", "int4") for g in GROUPINGS), ("float8_e4m3", "sm90")]
)
@pytest.mark.parametrize(("head_dim", "rows"), [(128, 517), (72, 1200), (64, 5000)])
def test_around_a_given_mean(
    grouping: str, dtype: str, head_dim: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    e4m3 = dtype == "float8_e4m3"
    said = {"dtype": dtype, "granularity": "per_block" if e4m3 else "per_thread", "grouping": grouping}
    said |= {"hadamard": e4m3, "seed": 3}
    q, k, _ = inputs("bfloat16", head_dim, 300, rows)
    mean = torch.zeros(2, 2, -(-head_dim // 32) * 32)
    mean[..., :head_dim] = k.float().mean(1) + 0.1
    ready = torch.full((4,), MEAN_IS_READY, dtype=torch.int32)
    got = quantize_around(*(x.cuda() for x in (q, k, mean, ready)), **said)
    assert got.k_mean is None
    assert not got.problem.smooth_k
    assert_same(got, lambda: quantize_around(q, k, mean, ready, **said), monkeypatch)


@pytest.mark.parametrize("rows", [1, 2, 15, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000])
def test_lengths(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs("float16", 64, rows, rows + 1, layout="HND")
    for grouping in GROUPINGS:
        check_qk(q, k, monkeypatch, grouping=grouping, layout="HND", smooth_q=True)
    check_v(v, monkeypatch, layout="HND", smooth_v=True)


@pytest.mark.parametrize(("rows_q", "rows_k", "batch"), [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 5, 0)])
def test_nothing_there(rows_q: int, rows_k: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.ones(batch, rows_q, 2, 64, dtype=torch.bfloat16)
    k = torch.ones(batch, rows_k, 2, 64, dtype=torch.bfloat16)
    check_qk(q, k, monkeypatch, smooth_q=True, with_bias=True)
    check_v(k, monkeypatch, smooth_v=True)


@pytest.mark.parametrize("kind", sorted(testing.GENERATORS))
def test_kinds_of_values(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs("bfloat16", 128, 200, 700, kind)
    check_qk(q, k, monkeypatch, smooth_q=True)
    check_v(v, monkeypatch, smooth_v=True)


@pytest.mark.parametrize("io", ["float16", "bfloat16"])
def test_extreme_values(io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(io, 64, 200, 700)
    least, most = (6e-8, 65504.0) if io == "float16" else (1e-40, 3.3e38)
    for x in (q, k, v):
        x[0, :, 0] = 0
        x[0, :, 1] = least
        x[1, :, 0] = most
        x[1, 100:, 1] = -most
    for granularity in GRANULARITIES:
        check_qk(q, k, monkeypatch, granularity=granularity, smooth_q=True)
    check_qk(q, k, monkeypatch, smooth_k=False)
    for dtype in ("float8_e4m3", "float16"):
        for smooth_v in (False, True):
            check_v(v, monkeypatch, dtype=dtype, smooth_v=smooth_v)


def test_not_a_number_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    nan, inf = float("nan"), float("inf")
    q, k, v = inputs("bfloat16", 64, 300, 700)
    for x in (q, k, v):
        x[0, 5, 0, 3], x[0, 5, 0, 4] = nan, inf
        x[0, 77, 1, 0] = -inf
        x[0, 200, 1, :] = inf
        x[1, :, 0, 7] = nan
        x[1, :, 1, 9] = -inf
    for granularity in GRANULARITIES:
        for grouping in GROUPINGS:
            for smooth in (False, True):
                check_qk(
                    q, k, monkeypatch, granularity=granularity, grouping=grouping, smooth_q=smooth, smooth_k=smooth,
                )  # fmt: skip
    got = check_qk(q, k, monkeypatch, with_bias=True)
    bad = np.isnan(numpy(got.row_bias))
    assert bad[0, 0].nonzero()[0].tolist() == [5]
    assert bad[0, 1].nonzero()[0].tolist() == [77, 200]
    assert not bad[0, 2:].any()
    for dtype in ("float8_e4m3", "float16"):
        for smooth_v in (False, True):
            check_v(v, monkeypatch, dtype=dtype, smooth_v=smooth_v)


def odd_values(v: Any, kind: str) -> None:
    """What a sample of the keys of (batch, keys, heads, channels) does not show, in the first head."""
    from omniattn.reference.quantize import sampled

    chosen = sampled(np.arange(v.shape[1])[:, None])[:, 0]
    hidden = np.setdiff1d(np.arange(v.shape[1]), chosen)
    if kind == "beyond the headroom":
        v[0, hidden[7], 0, 3], v[0, hidden[-2], 0, 11] = 1000.0, -3e4
    elif kind == "at the headroom":
        # A range of 1 without a mean: up to 15.4 (e4m3), 3.8 (for fp16 sums) and below 32 (fp16) the scale stays.
        v[:, chosen[0::2], 0, :8], v[:, chosen[1::2], 0, :8] = 1.0, -1.0
        v[0, hidden, 0, :8] = torch.tensor([15.0, 16.5, 3.7, 4.1, 31.9, 32.0, -31.9, -32.0], dtype=v.dtype)
    elif kind == "zeros in the sample":
        v[0, :, 0, 2], v[0, hidden[5], 0, 2] = 0.0, 1e-3
        v[0, :, 0, 4] = 0.0
    elif kind == "not a number":
        v[0, hidden[9], 0, 5], v[0, hidden[10], 0, 6], v[0, hidden[3], 0, 3] = float("nan"), float("inf"), 1000.0


@pytest.mark.parametrize(
    "kind", ["none", "beyond the headroom", "at the headroom", "zeros in the sample", "not a number"]
)
@pytest.mark.parametrize("rows", [512, 1300, 8192 + 70])
def test_samples_of_long_sequences(rows: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, k, v = inputs("bfloat16", 64, 1, rows)
    odd_values(v, kind)
    for options in (
        {"dtype": "float8_e4m3"}, {"dtype": "float8_e4m3", "smooth_v": False}, {"dtype": "float16"},
        {"dtype": "float8_e4m3", "pv_accumulator": "fp16"},
    ):  # fmt: skip
        got = check_v(v, monkeypatch, **options)
        assert kind == "not a number" or torch.isfinite(got.v_mean).all()
    check_qk(k[:, :1], k, monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["none", "beyond the headroom", "not a number"])
@pytest.mark.parametrize(
    ("precision", "grouping"),
    [(oa.Int8(), "sm90"), (oa.Int8(pv="fp16"), "sm80"), (oa.Int8(pv="fp8", pv_accumulator="fp16"), "sm80")],
)
def test_kernels_for_defaults(
    precision: oa.Int8, grouping: str, kind: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q, K and V in one call by the kernels for defaults: the same bits as apart, by the kernel for anything."""
    q, k, v = (x.cuda() for x in inputs("float16", head_dim, 300, 2100))
    odd_values(v, kind)
    made = problem_for(
        precision, dtype="float16", rows_q=300, rows_k=2100, head_dim=head_dim, varlen=False, grouping=grouping,
        full_bias=False,
    )  # fmt: skip
    tensors = [arrays.describe(x, "x") for x in (q, k, v)]
    fused = Fused(QuantizeCall(made, strides_of(q, k, v), "NHD", 0), 0)
    assert made.specialization == (grouping, made.v_dtype)
    assert fused.specs[0].specialization == made.specialization
    buffer = fused.allocate(tensors[0])
    fused.launch(torch.cuda.current_stream().cuda_stream, [t.ptr for t in tensors], buffer.ptr)
    qk = oa.quantize_qk(q, k, grouping=grouping)
    values = oa.quantize_v(v, dtype=made.v_dtype, pv_accumulator="fp16" if made.v_levels < 448 else "fp32")
    raw = numpy(buffer.obj)
    for name, (shape, dtype) in made.shapes().items():
        wanted = numpy(getattr(values if name.startswith("v") else qk, name))
        got = raw[fused.offsets[name] :][: wanted.nbytes].view(dtype).reshape(shape)
        assert np.array_equal(got, wanted.view(dtype), equal_nan=got.dtype.kind == "f"), name


LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "mixed": ([100, 1, 0, 257, 64], [130, 300, 5, 257, 0]),
    "single": ([200], [200]),
    "all_empty": ([0, 0], [0, 0]),
    "many": ([3, 0, 17] * 400, [5, 9, 1] * 400),
    "long": ([128, 256], [5000, 20000]),
    "sampled": ([100, 1, 0, 257, 64], [511, 512, 513, 0, 1300]),
}


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("lengths", list(LENGTHS))
def test_packed_sequences(lengths: str, grouping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_q, of_k = LENGTHS[lengths]
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (of_q, of_k))
    q, _, _ = testing.make_qkv("channel_bias", batch=None, seqlen_q=sum(of_q) + 7, heads_q=4, head_dim=64)
    k, _, v = testing.make_qkv("channel_bias", batch=None, seqlen_q=sum(of_k) + 7, heads_q=2, head_dim=64, seed=1)
    q, k, v = (tensor(x, "bfloat16") for x in (q, k, v))
    if lengths == "sampled":  # sequences that are done again, and some that are not
        for first, last in ((511, 1023), (1536, 2836)):
            odd_values(v[None, first:last], "beyond the headroom")
    common = {"cu_seqlens_k": cu_k, "max_seqlen_k": max(of_k)}
    both = {**common, "cu_seqlens_q": cu_q, "max_seqlen_q": max(of_q), "grouping": grouping}
    check_qk(q, k, monkeypatch, smooth_q=True, with_bias=True, **both)
    check_qk(q, k, monkeypatch, granularity="per_tensor", **both)
    check_qk(q, k, monkeypatch, granularity="per_token", dtype="int4", **both)
    for dtype in ("float8_e4m3", "float16"):
        check_v(v, monkeypatch, dtype=dtype, smooth_v=True, **common)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("precision", "unpacked", "full_bias"),
    [
        (oa.Int8(), False, False),  # dense: the kernel for the defaults
        (oa.Int8(), False, True),
        (oa.Int8(smooth_v=True, pv="fp16"), False, True),
        (oa.Int4(), False, True),
        (oa.Int4(granularity="per_tensor"), True, True),
    ],
)
def test_everything_of_a_call_in_one_allocation(
    precision: oa.Int8 | oa.Int4, unpacked: bool, full_bias: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `attention` runs first: q, k and v together, groups of heads one after the other."""
    q, k, v = inputs("bfloat16", 72, 300, 700)
    odd_values(v, "beyond the headroom")
    starts = []
    if packed:
        q, k, v = q[0], k[0], v[0]
        starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 130, 300], [0, 411, 700])]
    made = problem_for(
        precision, dtype="bfloat16", rows_q=300, rows_k=700, head_dim=72, varlen=packed, grouping="sm90",
        full_bias=full_bias, max_seqlen_k=411, unpacked=unpacked,
    )  # fmt: skip
    on_gpu = [x.cuda() for x in (q, k, v, *starts)]
    tensors = [arrays.describe(x, "x") for x in on_gpu]
    fused = Fused(QuantizeCall(made, strides_of(*on_gpu[:3]), "NHD", 0), 0, units=1)
    assert fused.specs[0].specialization == made.specialization
    assert (made.specialization is not None) == (not packed and not full_bias)
    buffer = fused.allocate(tensors[0])
    fused.launch(torch.cuda.current_stream().cuda_stream, [t.ptr for t in tensors], buffer.ptr)
    assert len(fused.program.launches) == (3 if precision.smooth_q else 2)
    expected = []
    heads_first = [x.float().numpy().swapaxes(-3, -2) for x in (q, k, v)]
    for fill in (3, 5):

        def empty(problem: Any, fill: int = fill) -> dict[str, np.ndarray[Any, Any]]:
            return {name: np.full(shape, fill, dtype) for name, (shape, dtype) in problem.shapes().items()}

        monkeypatch.setattr(reference, "_empty", empty)
        expected.append(reference.quantize(made, *heads_first, *(x.numpy() for x in starts)))
    for name, (shape, dtype) in made.shapes().items():
        a, b = (x[name] for x in expected)
        said = a == b
        offset = fused.offsets[name]
        raw = numpy(buffer.obj)[offset : offset + a.nbytes]
        got = raw.view(dtype).reshape(shape)[said]
        if name in ("row_bias", "delta_s"):
            assert np.abs(got - a[said]).max() <= DELTA_RTOL * np.abs(a[said]).max(), name
        else:
            assert np.array_equal(got, a[said]), name


def test_sequences_that_do_not_fit_stay_inside() -> None:
    """Values of cu_seqlens outside the tensors are clamped; nothing is read or written elsewhere."""
    q, k, v = (x[0].cuda() for x in inputs("bfloat16", 64, 300, 300))
    for starts in ([0, 1000, 2000], [-5, 300, 10], [400, 2**31 - 1, -(2**31)], [0, 200, 100]):
        cu = torch.tensor(starts, dtype=torch.int32).cuda()
        oa.quantize_qk(
            q, k, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=300, max_seqlen_k=300, smooth_q=True, with_bias=True
        )
        oa.quantize_v(v, cu_seqlens_k=cu, max_seqlen_k=300, smooth_v=True)
    torch.cuda.synchronize()


def test_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of wider arrays, expanded and reversed ones."""
    q, k, v = inputs("bfloat16", 128, 300, 300)
    check_qk(q[..., 32:104], k[..., 32:104], monkeypatch)
    check_qk(q[:, 3:200:2, 1:3], k[:, 5:, 1:], monkeypatch)
    check_qk(q[:1].expand(3, -1, -1, -1), k[:, :, :1].expand(-1, -1, 2, -1)[:1].expand(3, -1, -1, -1), monkeypatch)
    check_v(v[:, ::3, 1:, 8:80], monkeypatch)


def test_same_bits_every_time() -> None:
    q, k, v = (x.cuda() for x in inputs("bfloat16", 128, 3000, 5000))
    runs = [(oa.quantize_qk(q, k, smooth_q=True, with_bias=True), oa.quantize_v(v, smooth_v=True)) for _ in range(5)]
    for qk, values in runs[1:]:
        for name in ("q_int", "k_int", "q_scale", "k_scale", "row_bias", "k_mean", "q_mean", "delta_s"):
            assert torch.equal(getattr(qk, name), getattr(runs[0][0], name)), name
        for name in ("v", "v_scale", "v_mean"):
            assert torch.equal(getattr(values, name), getattr(runs[0][1], name)), name


def test_on_another_stream() -> None:
    q, k, v = (x.cuda() for x in inputs("bfloat16", 64, 300, 400))
    expected = oa.quantize_qk(q, k), oa.quantize_v(v)
    stream = torch.cuda.Stream()
    got = oa.quantize_qk(q, k, stream=stream), oa.quantize_v(v, stream=stream)
    stream.synchronize()
    assert torch.equal(got[0].k_int, expected[0].k_int)
    assert torch.equal(got[1].v, expected[1].v)


@pytest.mark.parametrize("rows", [400, 1300])
def test_under_a_cuda_graph(rows: int) -> None:
    q, k, v = (x.cuda() for x in inputs("bfloat16", 64, 300, rows))
    oa.quantize_qk(q, k, smooth_q=True), oa.quantize_v(v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qk, values = oa.quantize_qk(q, k, smooth_q=True), oa.quantize_v(v)
    for turn in range(4):
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        if rows > 512 and turn & 1:
            odd_values(v, "beyond the headroom")
        graph.replay()
        expected = oa.quantize_qk(q, k, smooth_q=True), oa.quantize_v(v)
        assert torch.equal(qk.q_int, expected[0].q_int)
        assert torch.equal(qk.delta_s, expected[0].delta_s)
        for name in ("v", "v_scale", "v_mean"):
            assert torch.equal(getattr(values, name), getattr(expected[1], name)), name


def test_cupy_and_jax_arrays_stay_theirs() -> None:
    cupy = pytest.importorskip("cupy")
    jax = pytest.importorskip("jax")
    jax.devices()  # of several GPUs its first use leaves the last one current
    torch.cuda.set_device(0)
    q, k, v = (x.cuda() for x in inputs("float16", 64, 100, 200))
    expected = oa.quantize_qk(q, k), oa.quantize_v(v)
    for own, kind in ((cupy.from_dlpack, cupy.ndarray), (jax.dlpack.from_dlpack, jax.Array)):
        a, b, c = own(q), own(k), own(v)
        qk, values = oa.quantize_qk(a, b), oa.quantize_v(c)
        assert isinstance(qk.q_int, kind)
        assert isinstance(values.v, kind)
        for got, want in ((qk.q_int, expected[0].q_int), (qk.k_scale, expected[0].k_scale), (values.v, expected[1].v)):
            assert np.array_equal(np.asarray(got.get() if kind is cupy.ndarray else got), numpy(want))
