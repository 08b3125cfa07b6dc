"""The quantizer of V behind ``quantize_fp8`` with sums: attention from 16 bits has the bits of the one for anything."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402
from omniattn.select.choice import VARIABLE  # noqa: E402

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (9, 0), reason="these kernels start before the one ahead has ended"),
]

BF16, FP16 = torch.bfloat16, torch.float16
#: dtype, head_dim, batch, query heads, kv heads, keys: one key, ends of blocks, chunks of a sample, more of them.
SHAPES = [
    (BF16, 128, 2, 4, 2, 1), (BF16, 64, 3, 2, 2, 127), (BF16, 128, 1, 2, 1, 300), (FP16, 128, 2, 2, 2, 511),
    (BF16, 128, 2, 4, 2, 512), (BF16, 64, 1, 8, 2, 1000), (BF16, 128, 3, 3, 3, 1024), (BF16, 72, 2, 4, 2, 1500),
    (FP16, 64, 1, 2, 2, 4096), (BF16, 256, 1, 2, 1, 2049), (BF16, 128, 1, 2, 2, 20011), (BF16, 80, 2, 2, 1, 640),
    (FP16, 256, 1, 2, 2, 777), (BF16, 64, 1, 2, 1, 70001),
]  # fmt: skip

#: The quantizers that take all else.
FOR_ANYTHING = ",".join(spec.name for spec in REGISTRY if spec.op == "quantize_fp8")


def _both(*arrays: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Any]:
    """Outputs by the quantizer for anything, and by this one."""
    outputs = []
    for taken in (False, True):
        monkeypatch.setenv(VARIABLE, "" if taken else FOR_ANYTHING)
        PLANS.clear()
        chosen = oa.explain(*arrays, precision="fp8", **options)
        assert ("quantize_values" in str(chosen)) == taken
        outputs.append(oa.attention(*arrays, precision="fp8", **options))
    return outputs[0], outputs[1]


def _same(a: Any, b: Any) -> None:
    assert torch.equal(a.view(torch.int16), b.view(torch.int16)), int((a != b).sum())


def _inputs(dtype: Any, d: int, batch: int, heads: int, kv_heads: int, keys: int, queries: int = 130) -> list[Any]:
    torch.manual_seed(keys + d)
    shapes = (batch, queries, heads, d), (batch, keys, kv_heads, d), (batch, keys, kv_heads, d)
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "mean", "outlier", "zeros", "huge", "nan", "inf"])
def test_same_bits(shape: tuple[Any, ...], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _inputs(*shape)
    d, keys = shape[1], shape[-1]
    if kind == "mean":
        v += 3 * torch.randn(d, device="cuda", dtype=v.dtype)
    elif kind == "outlier":  # beyond what a sample has: the head is quantized again
        v[:, keys // 2, :, d // 3] = 3000.0
        v[-1, keys - 1, :, 0] = -2000.0
    elif kind == "zeros":
        v[..., 1::3] = 0
        v[0, keys // 3] = 1.0
    elif kind == "huge":  # sums and differences beyond fp32
        v[..., :4] = torch.finfo(v.dtype).max
        v[:, ::2, :, 1] = -torch.finfo(v.dtype).max
    elif kind in ("nan", "inf"):
        v[0, keys // 2, 0, d - 1] = float(kind)
        v[-1, 0, -1, 2] = -float(kind)
    _same(*_both(q, k, v, monkeypatch=monkeypatch))


@pytest.mark.parametrize("options", [{"causal": True}, {"layout": "HND"}, {"return_lse": False, "window": (99, 3)}])
def test_layouts_and_masks(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = _inputs(BF16, 128, 2, 4, 4, 1200, 700)
    if options.get("layout") == "HND":
        arrays = [x.transpose(1, 2) for x in arrays]  # strides as they were
    _same(*_both(*arrays, monkeypatch=monkeypatch, **options))


def test_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """V as a part of wider rows, and the same head for all."""
    q, k, v = _inputs(BF16, 64, 2, 4, 4, 900)
    wide = torch.randn(2, 900, 4, 192, device="cuda", dtype=BF16)
    _same(*_both(q, k, wide[..., 64:128], monkeypatch=monkeypatch))
    _same(*_both(q, k, v[:, :, :1].expand(-1, -1, 4, -1), monkeypatch=monkeypatch))


def test_repeated_calls_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call zeroes what it counts in."""
    arrays = _inputs(BF16, 128, 4, 8, 8, 2048, 512)
    wanted, first = _both(*arrays, monkeypatch=monkeypatch)
    _same(wanted, first)
    for _ in range(50):
        _same(wanted, oa.attention(*arrays, precision="fp8"))
    PLANS.clear()


def test_every_row_has_run() -> None:
    rows = {spec.name for spec in REGISTRY if spec.op in ("quantize_values", "quantize_fp8_sums")}
    short = {BF16: "bf16", FP16: "fp16"}
    seen = set()
    for dtype, d, *_ in SHAPES:
        width = next(w for w in (64, 128, 256) if d <= w)
        seen |= {f"quantize_values_sm80_{short[dtype]}_d{width}", f"quantize_fp8_sm80_{short[dtype]}_d{width}_sums"}
    assert rows == seen
