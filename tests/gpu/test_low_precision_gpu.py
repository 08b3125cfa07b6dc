"""INT8 and INT4 attention on Hopper against the NumPy emulation of the same quantization."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.errors import UnsupportedError  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.problems import Int4, Int8  # noqa: E402

from .low_precision_cases import (  # noqa: E402
    check,
    check_against_integers,
    growing_scores,
    inputs,
    softmax_on_integers,
    to_numpy,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the tests of the kernel for compute capability 9.0; test_low_precision_sm80_gpu.py has the others",
    ),
]

SMOOTH = Int8(smooth_q=True, smooth_v=True)
PRECISIONS = {"int8": "int8", "int4": "int4", "smooth": SMOOTH}
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (37, 11)},
    "window_empty_rows": {"window": (0, 0)},
    "scale": {"softmax_scale": 0.2, "causal": True},
}


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    PLANS.clear()


def _both(tensors: list[torch.Tensor], **options: Any) -> tuple[Any, Any]:
    on_gpu = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    call = oa.attention_varlen if "cu_seqlens_q" in options else oa.attention
    got = call(*(t.cuda() for t in tensors), return_lse=True, **on_gpu)
    # Whether somebody asks for the LSE makes no difference to O, though it is a kernel of its own that makes both, but
    # for kernels that make P of integers.
    alone = call(*(t.cuda() for t in tensors), **on_gpu)
    if _is_of_integers(options["precision"], tensors[0]):
        near(alone, got[0], tensors[2])
    else:
        assert torch.equal(alone.view(torch.int16), got[0].view(torch.int16))
    want = call(*tensors, return_lse=True, **options)
    return got, tuple(to_numpy(x) for x in want)


def _is_of_integers(precision: Any, q: torch.Tensor) -> bool:
    """Whether calls without an LSE may run rows with integer_powers."""
    knobs = Int8() if precision == "int8" else precision
    return isinstance(knobs, Int8) and not knobs.smooth_q and q.ndim == 4 and q.shape[-1] <= 128


def near(a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> None:
    """The same but for P that became the e4m3 beside the nearest one: weights are off by 6 %, and sum to 1."""
    assert torch.equal(a.isnan(), b.isnan())
    assert (a.double() - b.double()).abs().nan_to_num().max() <= 0.13 * float(v.float().nan_to_num().abs().max())


def _lse_atol(precision: Any) -> float:
    return 5e-3 if precision == "int8" else 2e-2


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
def test_features(head_dim: int, name: str, feature: str) -> None:
    dtype = "float16" if head_dim == 192 else "bfloat16"
    tensors = inputs(
        dtype, batch=2, seqlen_q=150, seqlen_k=203, heads_q=4, heads_kv=2, head_dim=head_dim, seed=head_dim
    )
    got, want = _both(tensors, precision=PRECISIONS[name], **FEATURES[feature])
    check(got, want, lse_atol=_lse_atol(PRECISIONS[name]))


@pytest.mark.parametrize("granularity", ["per_tensor", "per_block", "per_warp"])
@pytest.mark.parametrize("smooth_k", [False, True])
def test_granularities(granularity: str, smooth_k: bool) -> None:
    tensors = inputs(batch=1, seqlen_q=300, seqlen_k=300, heads_q=2, heads_kv=1, head_dim=128, seed=2)
    got, want = _both(tensors, precision=Int8(granularity=granularity, smooth_k=smooth_k), causal=True)
    check(got, want, lse_atol=5e-3)


@pytest.mark.parametrize("name", PRECISIONS)
def test_sinks(name: str) -> None:
    tensors = inputs(batch=2, seqlen_q=90, seqlen_k=140, heads_q=4, heads_kv=2, head_dim=64, seed=5)
    # A common offset of K makes the term that smoothing removes large: sinks and LSE need it back.
    tensors[1] = tensors[1] + 2
    sinks = torch.tensor([0.0, 3.0, -2.0, 30.0])
    got, want = _both(tensors, precision=PRECISIONS[name], causal=True, sinks=sinks)
    check(got, want, lse_atol=_lse_atol(PRECISIONS[name]))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lengths_around_tiles(head_dim: int) -> None:
    for seqlen_q in (1, 64, 129, 257):
        for seqlen_k in (1, 63, 128, 129, 300):
            tensors = inputs(
                batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=2, heads_kv=1, head_dim=head_dim, seed=seqlen_k
            )
            for causal in (False, True):
                got, want = _both(tensors, precision="int8", causal=causal)
                check(got, want, lse_atol=5e-3)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_q_in_the_other_direction(name: str) -> None:
    """Rows of q at a step below zero, which no tensor map has."""
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.asarray(x.numpy()) for x in inputs("float16", batch=2, seqlen_q=300, seqlen_k=300, heads_q=4,
                                                       heads_kv=4, head_dim=128, seed=3))  # fmt: skip
    got = oa.attention(q[:, ::-1], k, v, precision=name).astype("float32")
    want = oa.attention(cupy.ascontiguousarray(q[:, ::-1]), k, v, precision=name).astype("float32")
    # To e4m3 the kernel that reads q by a tensor map rounds it with a scale for each row, the other for 128 rows.
    assert cupy.linalg.norm(got - want) <= (0.05 if name == "int8" else 0.08) * cupy.linalg.norm(want)


def test_no_keys_and_no_queries() -> None:
    q, k, v = (t.cuda() for t in inputs(batch=1, seqlen_q=70, seqlen_k=70, heads_q=2, heads_kv=2, head_dim=64))
    o, lse = oa.attention(q, k[:, :0], v[:, :0], precision="int8", return_lse=True)
    assert not o.any()
    assert torch.isneginf(lse).all()
    assert oa.attention(q[:, :0], k, v, precision="int8").shape == (1, 0, 2, 64)


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(head_dim: int, causal: bool, name: str) -> None:
    lengths_q, lengths_k = [70, 0, 1, 129, 300, 2], [131, 5, 0, 66, 300, 700]
    tensors = [
        torch.randn(n + 3, heads, head_dim, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16)
        for n, heads in ((sum(lengths_q), 4), (sum(lengths_k), 2), (sum(lengths_k), 2))
    ]
    starts = [torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (lengths_q, lengths_k)]
    got, want = _both(
        tensors, precision=PRECISIONS[name], causal=causal, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
        max_seqlen_q=300, max_seqlen_k=700,
    )  # fmt: skip
    check(got, want, lse_atol=_lse_atol(PRECISIONS[name]))
    # Rows that belong to no sequence.
    assert not got[0][sum(lengths_q) :].any()


@pytest.mark.parametrize("seed", range(6))
def test_large_logits_raise_the_base(seed: int) -> None:
    q, k, v = growing_scores(seed, (64, 128, 256)[seed % 3], 5)
    o, lse = oa.attention(q, k, v, causal=True, precision="int8", return_lse=True)
    check_against_integers(o, lse, softmax_on_integers(q, k, v, grouping="sm90"), 0.998)
    alone = oa.attention(q, k, v, causal=True, precision="int8")
    if q.shape[-1] <= 128:
        check_against_integers(alone, lse, softmax_on_integers(q, k, v, grouping="sm90"), 0.998)
    else:
        assert torch.equal(alone, o)


def test_nan_stays_with_the_rows_that_meet_it() -> None:
    q, k, v = (t.cuda() for t in inputs(batch=1, seqlen_q=400, seqlen_k=400, heads_q=2, heads_kv=2, head_dim=128))
    bad = q.clone()
    bad[0, 77, 1, 5] = float("nan")
    o, lse = oa.attention(bad, k, v, causal=True, precision="int8", return_lse=True)
    expected = torch.zeros(1, 400, 2, dtype=torch.bool, device="cuda")
    expected[0, 77, 1] = True
    assert torch.equal(o.isnan().any(-1), expected)
    assert torch.equal(o.isnan().all(-1), expected)
    assert torch.equal(lse.isnan(), expected.transpose(1, 2))

    bad = k.clone()
    bad[0, 300, 0, 9] = float("inf")  # its group: keys 256 + {8i + 4, 8i + 5}
    o = oa.attention(q, bad, v, causal=True, precision="int8")
    nan = o.isnan().any(-1)[0]
    assert nan[300:, 0].all()
    assert not nan[:260, 0].any()
    assert not nan[:, 1].any()

    bad = v.clone()
    bad[0, 350, 1, 3] = float("nan")
    o = oa.attention(q, k, bad, precision="int8")
    assert o[0, :, 1, 3].isnan().all()
    assert not o[0, :, 1, 4:].isnan().any()
    assert not o[0, :, 0].isnan().any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_several_tiles_of_queries_a_cta(head_dim: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of Q are used again: the kernel that makes the LSE reads Q there at every step, the others once."""
    q, k, v = (torch.randn(4, 4096, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def attend(row: str, **options: Any) -> Any:
        # One schedule for all: split keys give other bits.
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", f"attn_int8_sm90_bf16_d{head_dim}{row}")
        PLANS.clear()
        return oa.attention(q, k, v, causal=causal, precision="int8", **options)

    o, _ = attend("_lse", return_lse=True)
    if head_dim <= 128:
        plain = attend("")
        near(plain, o, v)
        o = plain
    for row in ("", "_q16") if head_dim <= 128 else ("",):
        for _ in range(3):
            assert torch.equal(attend(row), o)


@pytest.mark.parametrize("name", PRECISIONS)
def test_same_bits_every_time(name: str) -> None:
    q, k, v = (t.cuda() for t in inputs(batch=2, seqlen_q=1000, seqlen_k=1000, heads_q=8, heads_kv=2, head_dim=128))
    first = oa.attention(q, k, v, causal=True, precision=PRECISIONS[name], return_lse=True)
    for _ in range(6):
        again = oa.attention(q, k, v, causal=True, precision=PRECISIONS[name], return_lse=True)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


@pytest.mark.parametrize("spread", [5.0, 15.0, 200.0])
@pytest.mark.parametrize("name", PRECISIONS)
def test_coarse_scores(name: str, spread: float) -> None:
    """Large scales, where the constant that integer scores carry would not leave a sum of 24 bits exactly."""
    torch.manual_seed(3)
    tensors = [(torch.randn(1, 200, 2, 128) * (spread if i < 2 else 1.0)).to(torch.bfloat16) for i in range(3)]
    got, want = _both(tensors, precision=PRECISIONS[name], causal=True)
    # Softmaxes this sharp choose one key or two; equal scores may come out in another order.
    report = testing.compare(to_numpy(got[0]), want[0])
    assert report.cosine >= 0.97, report
    assert (np.abs(to_numpy(got[1]) - want[1]) <= 1e-3 * (1 + np.abs(want[1]))).all()


def test_cu_seqlens_that_go_backwards_neither_hang_nor_touch_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # More sequences may take another way.
    rows = "attn_int8_sm90_bf16_d64_varlen,attn_int8_sm90_bf16_d64_smoothq_varlen"
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", rows)
    q, k, v = (torch.randn(1000, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    padded = torch.tensor([0, 400, 1000, 0, 0], dtype=torch.int32, device="cuda")
    plain = torch.tensor([0, 400, 1000], dtype=torch.int32, device="cuda")
    for precision in ("int8", "int4"):
        options = {"max_seqlen_q": 600, "max_seqlen_k": 600, "precision": precision, "causal": True}
        got = oa.attention_varlen(q, k, v, cu_seqlens_q=padded, cu_seqlens_k=padded, **options)
        assert torch.equal(got, oa.attention_varlen(q, k, v, cu_seqlens_q=plain, cu_seqlens_k=plain, **options))


def test_too_small_a_max_seqlen_k_is_not_a_number() -> None:
    q, k, v = (torch.randn(1000, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 1000], dtype=torch.int32, device="cuda")
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 1000, "precision": "int4", "causal": True}
    want = oa.attention_varlen(q, k, v, max_seqlen_k=1000, **options)
    for short in (0, 128):
        got = oa.attention_varlen(q, k, v, max_seqlen_k=short, **options)
        assert torch.equal(got[:128], want[:128])
        assert got[128:].isnan().all()


def test_many_sequences_that_go_backwards_once() -> None:
    """More than one step of 32 entries; the running maximum goes from one to the next."""
    lengths = [7 * (i % 5) for i in range(70)]
    plain = torch.tensor([5, *(5 + np.cumsum(lengths))], dtype=torch.int32, device="cuda")
    total = int(plain[-1]) + 9
    q, k, v = (torch.randn(total, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    backwards = torch.cat([plain[:41], plain[40:41].clone().zero_(), plain[41:]])
    options = {"max_seqlen_q": 28, "max_seqlen_k": 28, "precision": "int8"}
    want = oa.attention_varlen(q, k, v, cu_seqlens_q=plain, cu_seqlens_k=plain, **options)
    got = oa.attention_varlen(q, k, v, cu_seqlens_q=backwards, cu_seqlens_k=backwards, **options)
    assert torch.equal(got, want)


def test_rows_without_any_sequence_are_zero() -> None:
    q, k, v = (torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    o, lse = oa.attention_varlen(
        q, k, v, cu_seqlens_q=none, cu_seqlens_k=none, max_seqlen_q=0, max_seqlen_k=0, precision="int8", return_lse=True
    )
    assert not o.any()
    assert torch.isneginf(lse).all()


def test_threads_on_one_stream_do_not_share_a_workspace() -> None:
    tensors = [[t.cuda() for t in inputs(batch=1, seqlen_q=512, head_dim=64, seed=s)] for s in range(4)]
    want = [oa.attention(*t, precision="int8") for t in tensors]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not torch.equal(oa.attention(*tensors[i], precision="int8"), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_layouts_and_strides_give_the_same_bits() -> None:
    q, k, v = (t.cuda() for t in inputs(batch=2, seqlen_q=200, seqlen_k=260, heads_q=4, heads_kv=4, head_dim=64))
    want = oa.attention(q, k, v, causal=True, precision="int8")
    hnd = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    assert torch.equal(oa.attention(*hnd, layout="HND", causal=True, precision="int8").transpose(1, 2), want)
    one = k[:, :, :1].expand(-1, -1, 4, -1)
    got = oa.attention(q, one, v, precision="int8")
    assert torch.equal(got, oa.attention(q, one.contiguous(), v, precision="int8"))
    out = torch.full((2, 200, 4, 80), float("nan"), dtype=q.dtype, device="cuda")
    assert oa.attention(q, k, v, causal=True, precision="int8", out=out[..., :64]) is not None
    assert torch.equal(out[..., :64], want)
    assert out[..., 64:].isnan().all()


def test_long_context_is_no_less_accurate() -> None:
    """Sums of 131072 products, 13 bits wide in the tensor cores, are kept in parts that fp32 adds up."""
    errors = []
    for seqlen in (4096, 131072):
        torch.manual_seed(seqlen)
        q, k, v = (torch.randn(1, seqlen, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        q, v = q[:, -2048:], v + 1
        low, exact = (oa.attention(q, k, v, precision=p).float() for p in ("int8", "exact"))
        assert testing.compare(to_numpy(low), to_numpy(exact)).cosine >= 0.998
        errors.append(abs((low.mean() / exact.mean()).item() - 1))
    assert errors[1] <= errors[0] + 2e-3


def test_graph_capture_and_replay() -> None:
    q, k, v = (t.cuda() for t in inputs(batch=1, seqlen_q=300, seqlen_k=300, heads_q=4, heads_kv=4, head_dim=128))
    oa.attention(q, k, v, precision="int8")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = oa.attention(q, k, v, precision="int8")
    for seed in range(3):
        torch.manual_seed(seed)
        q.copy_(torch.randn_like(q))
        k.copy_(torch.randn_like(k))
        graph.replay()
        assert torch.equal(out, oa.attention(q, k, v, precision="int8"))


def test_cupy_arrays_come_back_as_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    tensors = [t.cuda() for t in inputs("float16", batch=1, seqlen_q=130, seqlen_k=130, head_dim=64)]
    want = oa.attention(*tensors, precision="int8")
    got = oa.attention(*(cupy.asarray(t) for t in tensors), precision="int8")
    assert isinstance(got, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(got), want.cpu().numpy())


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"precision": Int8(granularity="per_token")}, "token"),
        ({"precision": Int4(pv="exact")}, "exact"),
    ],
)
def test_what_no_kernel_can_do_is_an_error(options: dict[str, Any], names: str) -> None:
    q, k, v = (t.cuda() for t in inputs(batch=1, seqlen_q=64, seqlen_k=64, head_dim=64))
    with pytest.raises(UnsupportedError, match=names):
        oa.attention(q, k, v, **{"precision": "int8", **options})


def test_explain_names_the_kernel_and_4_bit_speed() -> None:
    q, k, v = (t.cuda() for t in inputs(batch=1, seqlen_q=64, seqlen_k=64, head_dim=64))
    assert oa.explain(q, k, v, precision="int8").kernel.startswith("attn_int8_sm90_bf16_d64")
    why = " ".join(oa.explain(q, k, v, precision="int4").why)
    assert "no faster" in why


@pytest.mark.parametrize("precision", ["int4", "int8", "fp8"])
def test_packed_softcap_does_not_depend_on_what_the_workspace_held(precision: str) -> None:
    """Rows and keys that nobody uses have no say in how the softcap of a tile is computed."""
    q, k, v = (torch.randn(10, 2, 192, device="cuda", generator=_seeded(i)).half() for i in range(3))
    k[:, :, 7] *= 100.0
    starts, used = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 4], [1]))
    options = {
        "cu_seqlens_q": starts, "cu_seqlens_k": starts, "seqused_q": used, "max_seqlen_q": 4, "max_seqlen_k": 4,
        "causal": True, "softcap": 1000.0, "return_lse": True, "precision": precision,
    }  # fmt: skip
    found = []
    for byte in (0, 1, 0x3F, 0x7F, 0x80, 0xFF):
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):  # of the blocks that torch keeps for results and workspaces
            torch.full((size,), byte, dtype=torch.uint8, device="cuda")
        found.append(oa.attention_varlen(16 * q[:4], k, v, **options))
    for o, lse in found[1:]:
        assert torch.equal(o, found[0][0])
        assert torch.equal(lse, found[0][1])


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)
