"""Kernels that quantize Q themselves, and K and V in two launches: the bits of the quantizers for anything."""

from __future__ import annotations

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
    (1, 2049, 4100, 6, 2, 128), (1, 8200, 8200, 3, 1, 128),
]  # fmt: skip
KINDS = ["normal", "nan", "inf", "zeros", "huge", "tiny", "odd keys", "outlier"]


def same_bits(*arrays: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Q, K and V quantized ahead, by one launch with flags; Q inside; K and V without flags besides."""
    dtype, head_dim = str(arrays[0].dtype).removeprefix("torch."), arrays[0].shape[-1]
    width = f"{IO_TYPES[dtype][0]}_d{64 if head_dim <= 64 else 128}"
    base, common = f"attn_int8_sm90_{width}", f"quantize_sm80_{width}_common"
    found = []
    for names in (f"{base},{common}", f"{base}_q16,{common}", f"{base}_q16"):
        monkeypatch.setenv(VARIABLE, names)
        PLANS.clear()
        found.append(oa.attention(*arrays, precision="int8", **options).view(torch.int16))
    assert "quantize_kv" in str(oa.explain(*arrays, precision="int8", **options))
    for o in found[1:]:
        assert torch.equal(o, found[0]), int((o != found[0]).sum())


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
        for causal in (False, True):
            same_bits(*arrays, causal=causal, monkeypatch=monkeypatch)


@pytest.mark.parametrize("options", [{"window": (99, 3)}, {"softmax_scale": 0.3, "causal": True}, {"layout": "HND"}])
def test_options(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = inputs((2, 700, 1200, 4, 4, 128), torch.bfloat16)
    if options.get("layout") == "HND":
        arrays = [x.transpose(1, 2) for x in arrays]  # strides as they were
    same_bits(*arrays, monkeypatch=monkeypatch, **options)


def test_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q, K and V as parts of the same rows, and Q the same for all of a batch."""
    rows = torch.randn(2, 900, 4, 3 * 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = rows.split(64, dim=-1)
    same_bits(q, k, v, monkeypatch=monkeypatch)
    same_bits(q[:1].expand(2, -1, -1, -1), k, v, monkeypatch=monkeypatch)


def test_no_keys_and_no_queries() -> None:
    q, k, v = inputs((1, 70, 70, 2, 2, 64), torch.bfloat16)
    assert not oa.attention(q, k[:, :0], v[:, :0], precision="int8").any()
    assert oa.attention(q[:, :0], k, v, precision="int8").shape == (1, 0, 2, 64)


def test_what_it_is_not_for() -> None:
    """What needs Q quantized ahead: a scale elsewhere, a mean, a rotation, an LSE."""
    arrays = inputs((4, 2048, 2048, 16, 16, 128), torch.bfloat16)

    def kernels(**options: Any) -> str:
        return str(oa.explain(*arrays, **({"precision": "int8"} | options)))

    assert "_q16" in kernels()
    for precision in (oa.Int8(granularity="per_block"), oa.Int8(smooth_q=True), oa.Int8(hadamard=True), "int4"):
        assert "_q16" not in kernels(precision=precision)
    assert "_q16" not in kernels(return_lse=True)
