"""Kernels that quantize Q themselves, and K and V in two launches: the bits of the quantizers for anything.

To e4m3 Q has a scale for each row, ahead of attention one for 128 rows: the same bits where those are equal.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry.spec import IO_TYPES  # noqa: E402
from omniattn.select.choice import VARIABLE  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's kernels"
    ),
]

#: Batch, queries, keys, query heads, kv heads, head_dim: ends of tiles and of slices of 16 rows, several of each.
SHAPES = [
    (1, 1, 1, 2, 1, 64), (1, 64, 300, 2, 2, 128), (2, 129, 128, 4, 2, 128), (1, 257, 63, 2, 1, 64),
    (2, 150, 203, 4, 2, 72), (1, 700, 511, 3, 3, 128), (3, 333, 1000, 8, 2, 64), (2, 513, 700, 4, 4, 96),
    (1, 2049, 4100, 6, 2, 128), (1, 8200, 8200, 3, 1, 128), (1, 1, 1, 2, 1, 256), (2, 150, 203, 4, 2, 136),
    (1, 700, 511, 3, 3, 256), (3, 333, 1000, 8, 2, 224), (1, 2049, 4100, 6, 2, 256),
]  # fmt: skip
KINDS = ["normal", "nan", "inf", "zeros", "huge", "tiny", "odd keys", "outlier"]


def width_of(array: Any) -> str:
    """Of names of kernels."""
    d = array.shape[-1]
    dtype = IO_TYPES[str(array.dtype).removeprefix("torch.")][0]
    return f"{dtype}_d{64 if d <= 64 else 128 if d <= 128 else 256}"


def same_bits(*arrays: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Q, K and V quantized ahead, by one launch with flags; Q inside; K and V without flags besides."""
    width, packed = width_of(arrays[0]), "cu_seqlens_q" in options
    call = oa.attention_varlen if packed else oa.attention
    absolute = options.get("return_lse") or options.get("sinks") is not None
    base, kind, end = f"attn_int8_sm90_{width}", "_lse" * bool(absolute), "_varlen" * packed
    general, pair = f"quantize_sm80_{width}", f"quantize_kv_sm90_{width}{end}"
    raw = f"{base}_q16{kind}{end}"
    found = []
    for names in (f"{base}{kind}{end},{general}", f"{raw},{general}", f"{raw},{pair}"):
        monkeypatch.setenv(VARIABLE, names)
        PLANS.clear()
        results = call(*arrays, precision="int8", **options)
        results = results if isinstance(results, tuple) else (results,)
        found.append([x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32) for x in results])
    assert "quantize_kv" in str(oa.explain(call, *arrays, precision="int8", **options))
    for results in found[1:]:
        for x, expected in zip(results, found[0], strict=True):
            assert torch.equal(x, expected), int((x != expected).sum())


def inputs(shape: tuple[int, ...], dtype: Any, kind: str = "normal") -> list[Any]:
    batch, queries, keys, heads, kv_heads, d = shape
    torch.manual_seed(queries + keys + d)
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    q, k, v = (torch.randn(batch, n, h, d, device="cuda").to(dtype) for n, h in sizes)
    k += 2 * torch.randn(d, device="cuda").to(dtype)
    if kind in ("nan", "inf"):
        q[0, queries // 2, 0, d - 1] = float(kind)
        q[-1, 0, -1, 0] = -float(kind)
        q[-1, queries - 1] = float(kind)
    elif kind == "zeros":
        q[:, ::3], k[:, ::2] = 0, 0
        q[0, :64] = 0
    elif kind == "huge":
        q *= 1000
        q[0, queries // 2] *= 30
        v[..., :3] = torch.finfo(dtype).max
    elif kind == "tiny":  # below what a scale is made for
        q *= 2.0**-14 if dtype == torch.float16 else 2.0**-110
    elif kind == "odd keys":
        k[0, keys // 2, 0, 1] = float("nan")
        v[-1, keys - 1, -1, 2] = float("inf")
        k[-1, 0, -1, 0] = -float("inf")
    elif kind == "outlier":  # beyond what a sample has
        v[:, keys // 2, :, d // 3] = 3000.0
        v[-1, keys - 1, :, 0] = -2000.0
    return [q, k, v]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits(shape: tuple[int, ...], dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        arrays = inputs(shape, dtype, kind)
        for causal, lse in itertools.product((False, True), (False, True)):
            same_bits(*arrays, causal=causal, return_lse=lse, monkeypatch=monkeypatch)


#: Where sequences of queries and of keys begin, query heads, kv heads, head_dim, rows that are used of each.
PACKED: list[tuple[list[int], list[int], int, int, int, tuple[list[int], list[int]] | None]] = [
    ([0, 130, 130, 131, 900], [0, 300, 300, 700, 1500], 4, 2, 128, None),
    ([0, 1, 65, 700], [0, 5, 133, 900], 2, 1, 256, None),
    ([0, 200, 457, 1100], [0, 200, 457, 1100], 4, 2, 64, ([100, 257, 0], [100, 0, 643])),
    ([0, 64, 900], [0, 2500, 5000], 3, 3, 128, ([64, 700], [2400, 2500])),
    ([0, 333, 1400], [0, 333, 1400], 4, 4, 192, ([333, 1000], [300, 1067])),
    ([*range(0, 2000, 50)], [*range(0, 2000, 50)], 2, 2, 96, None),
    ([0, 4000, 9000], [0, 4000, 9000], 2, 1, 256, None),
    # Backwards: empty, and the sequence behind begins where those before it have ended.
    ([3, 200, 0, 900, 700, 950], [3, 200, 150, 900, 0, 1000], 2, 2, 64, None),
    ([*range(0, 2000, 50), 0, 2100], [*range(0, 2000, 50), 5, 2100], 2, 2, 128, None),
]


@pytest.mark.parametrize("case", PACKED, ids=lambda case: str(case[:1]))
def test_packed(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    starts_q, starts_k, heads, kv_heads, d, used = case

    def on_gpu(numbers: list[int]) -> Any:
        return torch.tensor(numbers, device="cuda", dtype=torch.int32)

    options: dict[str, Any] = {}
    for name, starts in (("q", starts_q), ("k", starts_k)):
        longest = max(end - begin for begin, end in itertools.pairwise(itertools.accumulate(starts, max)))
        options |= {f"cu_seqlens_{name}": on_gpu(starts), f"max_seqlen_{name}": longest}
    if used is not None:
        options |= {"seqused_q": on_gpu(used[0]), "seqused_k": on_gpu(used[1])}
    for kind in ("normal", "nan", "huge", "odd keys"):
        arrays = [x[0] for x in inputs((1, starts_q[-1], starts_k[-1], heads, kv_heads, d), torch.bfloat16, kind)]
        for causal, lse in itertools.product((False, True), (False, True)):
            same_bits(*arrays, causal=causal, return_lse=lse, monkeypatch=monkeypatch, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{"window": (99, 3)}, {"softmax_scale": 0.3, "causal": True}, {"layout": "HND"}])
def test_options(options: dict[str, Any], head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = inputs((2, 700, 1200, 4, 4, head_dim), torch.bfloat16)
    if options.get("layout") == "HND":
        arrays = [x.transpose(1, 2) for x in arrays]  # strides as they were
    same_bits(*arrays, monkeypatch=monkeypatch, **options)
    same_bits(*arrays, monkeypatch=monkeypatch, return_lse=True, sinks=torch.linspace(-3, 3, 4).cuda(), **options)


def test_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q, K and V as parts of the same rows, and Q the same for all of a batch."""
    rows = torch.randn(2, 900, 4, 3 * 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = rows.split(64, dim=-1)
    same_bits(q, k, v, monkeypatch=monkeypatch)
    same_bits(q[:1].expand(2, -1, -1, -1), k, v, monkeypatch=monkeypatch)


def both_fp8(arrays: list[Any], monkeypatch: pytest.MonkeyPatch, fp8: Any, **options: Any) -> list[tuple[Any, Any]]:
    """(o, LSE) with Q in e4m3 ahead of attention, and inside; the second one's O has the same bits without an LSE."""
    base, found = f"attn_fp8_sm90_{width_of(arrays[0])}", []
    for inside in ("", "_q16"):
        monkeypatch.setenv(VARIABLE, f"{base}{inside}_lse")
        PLANS.clear()
        found.append(oa.attention(*arrays, precision=fp8, return_lse=True, **options))
    monkeypatch.setenv(VARIABLE, f"{base}_q16")
    PLANS.clear()
    alone = oa.attention(*arrays, precision=fp8, **options)
    assert torch.equal(alone.view(torch.int16), found[1][0].view(torch.int16))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[-1] <= 128], ids=str)
def test_e4m3_of_rows_with_one_scale(shape: tuple[int, ...], dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("normal", "nan", "odd keys"):
        arrays = inputs(shape, dtype, kind)
        q = arrays[0]
        q.copy_(torch.where(q.isfinite(), q.clamp(-3, 3), q))
        q[..., shape[-1] // 2] = torch.where(q[..., shape[-1] // 2] < 0, -3.0, 3.0)
        for causal in (False, True):
            ahead, inside = both_fp8(arrays, monkeypatch, oa.Fp8(hadamard=False), causal=causal)
            for x, expected in zip(inside, ahead, strict=True):
                assert torch.equal(torch.nan_to_num(x, nan=77.0), torch.nan_to_num(expected, nan=77.0))


@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[-1] <= 128 and shape[2] >= 128], ids=str)
def test_e4m3_is_no_less_accurate(shape: tuple[int, ...], hadamard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("normal", "nan", "inf", "zeros", "tiny"):
        arrays = inputs(shape, torch.bfloat16, kind)
        monkeypatch.delenv(VARIABLE, raising=False)
        exact = oa.attention(*arrays, causal=True).float()
        ahead, inside = both_fp8(arrays, monkeypatch, oa.Fp8(hadamard=hadamard, seed=5), causal=True)
        for x, expected in zip(inside, ahead, strict=True):
            assert torch.equal(torch.isnan(x), torch.isnan(expected))
        good = ~(torch.isnan(exact) | torch.isnan(ahead[0]))
        assert good.sum() > good.numel() / 2
        errors = [float((o.float() - exact)[good].abs().sum() / exact[good].abs().sum()) for o, _ in (ahead, inside)]
        assert errors[1] <= 1.1 * errors[0] + 1e-3, (kind, errors)


def test_no_keys_and_no_queries() -> None:
    q, k, v = inputs((1, 70, 70, 2, 2, 64), torch.bfloat16)
    assert not oa.attention(q, k[:, :0], v[:, :0], precision="int8").any()
    assert oa.attention(q[:, :0], k, v, precision="int8").shape == (1, 0, 2, 64)


def test_what_it_is_not_for() -> None:
    """What needs Q quantized ahead: a scale elsewhere, a mean, a rotation."""
    arrays = inputs((4, 2048, 2048, 16, 16, 128), torch.bfloat16)

    def kernels(**options: Any) -> str:
        return str(oa.explain(oa.attention, *arrays, **({"precision": "int8"} | options)))

    assert "_q16" in kernels()
    for precision in (oa.Int8(granularity="per_block"), oa.Int8(smooth_q=True), oa.Int8(hadamard=True), "int4"):
        assert "_q16" not in kernels(precision=precision)
    assert "_q16_lse" in kernels(return_lse=True)
