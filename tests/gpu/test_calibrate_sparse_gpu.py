"""``calibrate_sparse`` on a GPU: the shares of the CPU, and calls at 8 bits with what it has found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.ops.calibrate_sparse import SHARES  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_plans"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

HEADS = 3


def local(rows: int, seed: int = 0) -> list[torch.Tensor]:
    """Queries that look at their neighbours, those of later heads less."""
    torch.manual_seed(seed)
    at = torch.arange(rows)[:, None] / 512 * torch.arange(1, 33)
    waves = torch.cat([at.cos(), at.sin()], 1)[None, :, None]
    strength = torch.linspace(4.0, 1.5, HEADS)[:, None]
    q = waves * strength + 0.3 * torch.randn(1, rows, HEADS, 64)
    k = waves + 0.3 * torch.randn(1, rows, HEADS, 64)
    return [x.to(torch.float16) for x in (q, k, torch.randn(1, rows, HEADS, 64))]


@pytest.mark.parametrize("by", ["topk", "cdf"])
def test_as_on_the_cpu(by: str) -> None:
    samples = [local(1024, seed) for seed in range(2)]
    want = oa.calibrate_sparse(samples, max_error=0.1, by=by).entries["attention"]
    found = oa.calibrate_sparse([[x.cuda() for x in one] for one in samples], max_error=0.1, by=by)
    one = found.entries["attention"]
    assert max(one.errors) <= 0.1
    assert len(set(one.shares)) > 1
    ladder = SHARES[by]
    # Rounding of o may decide at the bound.
    assert all(abs(ladder.index(a) - ladder.index(b)) <= 1 for a, b in zip(one.shares, want.shares, strict=True))


def test_arrays_of_others(tmp_path: Path) -> None:
    given = [x.numpy() for x in local(768)]
    want = oa.calibrate_sparse([torch.from_numpy(x).cuda() for x in given], max_error=0.1).entries["attention"]
    made: list[Any] = []
    cupy = pytest.importorskip("cupy")
    made.append([cupy.asarray(x) for x in given])
    jax = pytest.importorskip("jax")
    if jax.default_backend() == "gpu":
        made.append([jax.numpy.asarray(x) for x in given])
    for arrays in made:
        found = oa.calibrate_sparse({"a": [arrays]}, max_error=0.1, file=tmp_path / "a.json").entries["a"]
        assert (found.shares, found.kept) == (want.shares, want.kept)
        np.testing.assert_allclose(found.errors, want.errors, rtol=1e-3)
    low = oa.Sparse(file=tmp_path / "a.json")
    shares = oa.sparse_blocks(made[0][0], made[0][1], topk=cupy.asarray(low.topk))
    assert abs(float(shares.mean()) - np.mean(want.kept)) < 1e-6


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper has the kernels"
)
@pytest.mark.parametrize("causal", [False, True])
def test_calls_at_8_bits(causal: bool, tmp_path: Path) -> None:
    samples = [[x.cuda().bfloat16() for x in local(2048, seed)] for seed in range(2)]
    options: dict[str, Any] = {"causal": causal, "keep_first": int(causal)}
    file = tmp_path / "own.json"
    oa.calibrate_sparse({"layer": samples}, max_error=0.1, file=file, precision=oa.Int8(), **options)
    low = oa.Int8(sparse=oa.Sparse(file=file))
    for q, k, v in samples:
        o, exact = (oa.attention(q, k, v, causal=causal, precision=x).float() for x in (low, "exact"))
        errors = (o - exact).abs().sum((0, 1, 3)) / exact.abs().sum((0, 1, 3))
        assert float(errors.max()) <= 0.1
        blocks = oa.sparse_blocks(q, k, topk=low.sparse.topk, causal=causal, keep_first=int(causal))
        want = oa.attention(q, k, v, causal=causal, block_mask=blocks, block_size=(128, 64), precision="int8")
        assert torch.equal(o, want.float())
        assert float(blocks.float().mean()) < 0.8
    said = str(oa.explain(*samples[0], causal=causal, precision=low))
    assert f"kept share per head from file {str(file)!r}, 'layer'" in said
