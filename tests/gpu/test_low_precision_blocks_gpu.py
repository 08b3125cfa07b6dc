"""Block masks of int8 and fp8 attention on Hopper: against fp64 on the quantized operands, and the same as a mask."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.problems import Fp8, Int8  # noqa: E402

from .low_precision_cases import check_expected, expected, growing_scores, inputs, quantize, to_numpy  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_plans"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the kernels are for compute capability 9.0",
    ),
]

#: Query rows of the tiles of each head_dim.
TILES = {64: (192,), 128: (128,), 256: (128,)}
SIZES = ((64, 64), (128, 64), (128, 128), (192, 128), (64, 256))


def tensors(batch: int, seqlen_q: int, seqlen_k: int, heads: int, head_dim: int, dtype: str) -> list[torch.Tensor]:
    made = inputs(
        dtype, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads, heads_kv=1, head_dim=head_dim,
        seed=head_dim,
    )  # fmt: skip
    made[1] = made[1] + 1  # a mean, which the LSE has to get back
    return [x.cuda() for x in made]


def blocks_of(
    shape: tuple[int, int, int, int], size: tuple[int, int], share: float = 0.5, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(block mask, the same for each query and key) of (batch, heads, queries, keys): random, with an empty row."""
    batch, heads, rows, keys = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    counts = -(-rows // size[0]), -(-keys // size[1])
    blocks = torch.rand((batch, heads, *counts), generator=generator, device="cuda") < share
    if counts[0] > 2:
        blocks[:, 0, 1] = False
        blocks[:, 0, 2] = True
    full = blocks.repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)[:, :, :rows, :keys]
    return blocks, full


def force(monkeypatch: pytest.MonkeyPatch, qk: str, dtype: str, head_dim: int, rows: int) -> None:
    width = next(w for w in TILES if w >= head_dim)
    short = "bf16" if dtype == "bfloat16" else "fp16"
    name = f"attn_{qk}_sm90_{short}_d{width}_m{rows}n64_blocks"
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", f"{name},{name}_lse")
    PLANS.clear()


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: tuple[int, int], share: float = 0.5, seed: int = 0,
    precision: Any = None, heads: bool = True, **options: Any,
) -> None:  # fmt: skip
    """O and LSE against fp64 on the quantized operands; the same bits without LSE, and again."""
    precision = precision or Int8()
    batch, rows, num_heads, _ = q.shape
    blocks, full = blocks_of((batch if heads else 1, num_heads if heads else 1, rows, k.shape[1]), size, share, seed)
    given = {"block_mask": blocks, "block_size": size, "precision": precision, **options}
    assert "_blocks" in oa.explain(q, k, v, **given).kernel
    qk, v8 = quantize(precision, q, k, v, with_bias=True)
    want = expected(qk, v8, mask=full, **options)
    o, lse = oa.attention(q, k, v, return_lse=True, **given)
    check_expected(
        o.transpose(1, 2), lse, want, v.double().abs().max().item() if v.numel() else 0.0, "sinks" not in options
    )
    assert torch.equal(oa.attention(q, k, v, **given), o)
    assert torch.equal(oa.attention(q, k, v, **given), o)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("head_dim", "rows"), [(d, rows) for d, tiles in TILES.items() for rows in tiles])
def test_sizes(head_dim: int, rows: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "int8", "bfloat16", head_dim, rows)
    q, k, v = tensors(2, 650, 1100, 2, head_dim, "bfloat16")
    for seed, options in enumerate(({}, {"causal": True}, {"window": (150, 40)}, {"softmax_scale": -0.1})):
        check(q, k, v, size, 0.4, seed, heads=seed % 2 == 0, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_head_dims(head_dim: int, dtype: str) -> None:
    q, k, v = tensors(1, 300, 520, 3, head_dim, dtype)
    sinks = torch.tensor([0.5, -torch.inf, 4.0], device="cuda")
    for options in ({}, {"causal": True, "sinks": sinks}, {"softmax_scale": 0.0}):
        check(q, k, v, (128, 64), **options)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.9, 1.0])
@pytest.mark.parametrize(("head_dim", "rows"), [(d, rows) for d, tiles in TILES.items() for rows in tiles])
def test_shares(head_dim: int, rows: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps: more than a window of entries, and flushes; V of one sign, which is summed in short periods."""
    force(monkeypatch, "int8", "bfloat16", head_dim, rows)
    q, k, v = tensors(1, 385, 5000, 2, head_dim, "bfloat16")
    check(q, k, v, (64, 64), share, precision=Int8(smooth_v=False))
    check(q, k, v, (128, 64), share)


@pytest.mark.parametrize(("head_dim", "rows"), [(d, rows) for d, tiles in TILES.items() for rows in tiles])
@pytest.mark.parametrize("seed", [0, 3])
def test_bases_that_rise(head_dim: int, rows: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "int8", "bfloat16", head_dim, rows)
    q, k, v = growing_scores(seed, head_dim, 2.0)
    check(q, k, v, (64, 64), 0.6, seed)
    check(q * 30, k, v, (64, 64), 0.6, seed)  # scales that integers do not take


@pytest.mark.parametrize(("head_dim", "rows"), [(d, rows) for d, tiles in TILES.items() for rows in tiles])
def test_fp8(head_dim: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as the mask, up to the bases of P.

    Two bases round P differently: measured 0.023 to 0.031 apart, each 0.055 to 0.058 away from fp64.
    """
    q, k, v = tensors(2, 450, 900, 2, head_dim, "bfloat16")
    for size in SIZES:
        blocks, full = blocks_of((2, 2, 450, 900), size)
        for options in ({}, {"causal": True}):
            monkeypatch.delenv("OMNIATTN_FORCE_KERNEL", raising=False)
            PLANS.clear()
            want, want_lse = oa.attention(q, k, v, mask=full, precision=Fp8(), return_lse=True, **options)
            force(monkeypatch, "fp8", "bfloat16", head_dim, rows)
            given: dict[str, Any] = {"block_mask": blocks, "block_size": size, "precision": Fp8(), **options}
            o, lse = oa.attention(q, k, v, return_lse=True, **given)
            assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
            seen = ~torch.isneginf(lse)
            assert float((lse - want_lse)[seen].abs().max()) <= 2e-3
            report = testing.compare(to_numpy(o), to_numpy(want))
            assert report.rel_l1 <= 0.035, report
            assert torch.equal(oa.attention(q, k, v, **given), o)


@given(
    data=st.data(), head_dim=st.sampled_from([16, 64, 72, 128, 256]), seqlen_q=st.integers(1, 700),
    seqlen_k=st.integers(1, 700), dtype=st.sampled_from(["bfloat16", "float16"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_random_problems(data: st.DataObject, head_dim: int, seqlen_q: int, seqlen_k: int, dtype: str) -> None:
    options: dict[str, Any] = {"causal": data.draw(st.booleans())}
    if not options["causal"] and data.draw(st.booleans()):
        options["window"] = data.draw(st.integers(-1, 300)), data.draw(st.integers(-1, 300))
    share, seed = data.draw(st.sampled_from([0.1, 0.5, 0.9])), data.draw(st.integers(0, 99))
    q, k, v = tensors(data.draw(st.integers(1, 2)), seqlen_q, seqlen_k, data.draw(st.integers(1, 3)), head_dim, dtype)
    check(q, k, v, data.draw(st.sampled_from(SIZES)), share, seed, heads=data.draw(st.booleans()), **options)


def test_hidden_blocks_reach_nobody() -> None:
    """NaN and infinity in keys whose block is hidden from all queries of a head, and in no others' group."""
    q, k, v = tensors(1, 300, 640, 2, 128, "bfloat16")
    blocks = torch.ones((1, 1, 3, 5), dtype=torch.bool, device="cuda")
    blocks[..., 2] = False
    blocks[..., 2, :] = True  # the last queries see all
    k[:, 256:384] = torch.nan
    o = oa.attention(q, k, v, block_mask=blocks, precision=Int8(smooth_k=False))
    assert not o[:, :256].isnan().any()
    assert o[:, 256:].isnan().all()


def test_what_has_no_kernel_raises_by_name() -> None:
    q, k, v = tensors(1, 300, 640, 2, 128, "bfloat16")
    blocks = torch.ones((3, 5), dtype=torch.bool, device="cuda")
    for options, said in (
        ({"precision": "int8", "softcap": 5.0}, "softcap"),
        ({"precision": Int8(smooth_q=True)}, "smooth_q"),
        ({"precision": Int8(pv="fp16")}, "block_mask"),
        ({"precision": "int8", "mask": torch.zeros((300, 640), device="cuda")}, "mask"),
    ):
        with pytest.raises(oa.errors.UnsupportedError, match=said):
            oa.attention(q, k, v, block_mask=blocks, **options)
