"""Masks, biases and softcap on the mma.sync kernel, which any GPU has: how masks may lie in memory, skipped tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402

from .attention_cases import run_dense, to_gpu, to_numpy  # noqa: E402
from .softcap_mask_cases import DTYPES, hide_and_show_tiles, random_options, tensors  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS = [
    spec
    for spec in REGISTRY
    if spec.family == "attn_fwd_sm80" and spec.score_mods
    # Small tiles have test_short_score_mods_gpu.py.
    if spec.op == "attention_split" or spec.head_dim > 128 or spec.block_m == 128
]
KINDS = ("bool", "float32", "io")
#: How a mask lies in memory; "keys" and "number" are one row, and one element, that stand for all.
LAYOUTS = ("whole", "rows of odd length", "columns", "spread", "shifted", "row values", "number", "keys")


@pytest.fixture(autouse=True)
def only_these(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first that fits is taken: of a head_dim the newest tuning, as selection has it.
    names = [s.name for s in sorted(ROWS, key=lambda s: (s.head_dim, (-s.min_arch[0], -s.min_arch[1])))]
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", ",".join(names))


def values_of(kind: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A part hides whole tiles, another nothing."""
    visible = rng.random(shape) < 0.8
    hide_and_show_tiles(visible)
    if kind == "bool":
        return visible
    values = np.where(visible, 2 * rng.standard_normal(shape), -np.inf).astype(np.float32)
    return values if kind == "float32" else testing.round_to(values, dtype)


def laid_out(mask: torch.Tensor, layout: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The mask in memory that holds NaN (or True) everywhere else."""

    def memory(*extents: int) -> torch.Tensor:
        fill = True if mask.dtype == torch.bool else torch.nan
        return torch.full((*mask.shape[:2], *extents), fill, dtype=mask.dtype, device="cuda")

    rows, keys = mask.shape[2:]
    if layout == "rows of odd length":
        view = memory(rows, keys + 3 - keys % 2)[..., 1 : 1 + keys]
    elif layout == "columns":
        view = memory(keys + 1, rows + 1)[..., 1:, :-1].mT
    elif layout == "spread":
        view = memory(rows, 2 * keys)[..., ::2]
    elif layout == "shifted":
        view = memory(rows + 5, keys + 8 - keys % 8)[..., 5:, -keys:]
    else:
        view = memory(rows, keys)
    view.copy_(mask)
    return view.expand(shape)


def numbers(
    kind: str, layout: str, shape: tuple[int, int, int, int], dtype: str, seed: int
) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """A mask for the reference, and the same in the GPU's memory."""
    extents = {"row values": (shape[2], 1), "number": (1, 1), "keys": (1, shape[3])}.get(layout, shape[2:])
    mask = values_of(kind, (*shape[:2], *extents), dtype, np.random.default_rng(seed))
    on_gpu = to_gpu(mask, dtype) if kind == "io" else torch.from_numpy(mask).cuda()
    return np.broadcast_to(mask, shape), laid_out(on_gpu, layout, shape)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind: str, layout: str, head_dim: int) -> None:
    for seqlen_q, seqlen_k, options in ((200, 328, {}), (131, 195, {"causal": True, "softcap": 5.0})):
        mask, on_gpu = numbers(kind, layout, (2, 2, seqlen_q, seqlen_k), "bfloat16", 3)
        run_dense(
            *tensors(2, seqlen_q, seqlen_k, 2, head_dim, "bfloat16"), "bfloat16", f"{options}", mask=mask,
            gpu={"mask": on_gpu}, **options,
        )  # fmt: skip


@given(
    data=st.data(),
    kind=st.sampled_from(("none", *KINDS)),
    layout=st.sampled_from(LAYOUTS),
    head_dim=st.sampled_from([16, 64, 72, 128, 160, 256]),
    seqlen_q=st.integers(1, 300),
    seqlen_k=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_random_problems(
    data: st.DataObject, kind: str, layout: str, head_dim: int, seqlen_q: int, seqlen_k: int, dtype: str
) -> None:
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    options = random_options(data, heads, 200)
    gpu = {}
    if kind != "none":
        shape = (data.draw(st.sampled_from([1, batch])), data.draw(st.sampled_from([1, heads])), seqlen_q, seqlen_k)
        options["mask"], gpu["mask"] = numbers(kind, layout, shape, dtype, data.draw(st.integers(0, 99)))
    q, k, v = tensors(batch, seqlen_q, seqlen_k, heads, head_dim, dtype)
    run_dense(q, k, v, dtype, f"{kind} {layout} {options}", gpu=gpu, **options)


@pytest.mark.parametrize(("kind", "layout"), [("bool", "whole"), ("bool", "keys"), ("float32", "keys")])
def test_tiles_that_nobody_sees_are_never_loaded(kind: str, layout: str) -> None:
    """NaN in V there reaches nobody: not even as 0 times NaN."""
    _, mask = numbers(kind, layout, (1, 1, 300, 640), "bfloat16", 0)
    hidden = slice(128, 320)
    mask = mask[:, :, :1].clone() if layout == "keys" else mask.clone()
    mask[..., hidden] = False if kind == "bool" else -torch.inf
    q, k, v = (to_gpu(x, "bfloat16") for x in tensors(1, 300, 640, 2, 128, "bfloat16"))
    want = oa.attention(q, k, v, mask=mask)
    for x in (k, v):
        x[:, hidden] = torch.nan
    got = oa.attention(q, k, v, mask=mask)
    assert torch.equal(got, want)
    assert not got.isnan().any()


@pytest.mark.parametrize("layout", ["whole", "rows of odd length", "keys"])
@pytest.mark.parametrize("kind", ["float32", "io"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -3.0e38, 1.0e30, 9000.0])
def test_special_values(kind: str, layout: str, value: float) -> None:
    """In one key's column: NaN reaches every row, infinity as the reference says, large numbers decide."""
    values, on_gpu = numbers(kind, layout, (1, 1, 130, 264), "bfloat16", 1)
    values = values.copy()
    values[..., 100] = value if kind == "float32" else testing.round_to(np.float32(value), "bfloat16")
    on_gpu[..., 100] = value
    run_dense(*tensors(1, 130, 264, 1, 64, "bfloat16"), "bfloat16", mask=values, gpu={"mask": on_gpu})


def test_nan_of_hidden_keys_stays_there() -> None:
    """In Q K^T, of keys whose tile others see."""
    for kind in KINDS:
        _, mask = numbers(kind, "whole", (1, 1, 130, 264), "bfloat16", 1)
        mask[..., 100] = False if kind == "bool" else -torch.inf
        q, k, v = (to_gpu(x, "bfloat16") for x in tensors(1, 130, 264, 1, 128, "bfloat16"))
        want = oa.attention(q, k, v, mask=mask)
        k[:, 100] = torch.nan
        assert torch.equal(oa.attention(q, k, v, mask=mask), want)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: str) -> None:
    """Their masks begin at each sequence's first row and key; rows of K and V beyond a sequence are another's."""
    lengths, heads = [5, 0, 300, 129, 64], 2
    starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(sum(lengths), heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for layout in ("whole", "rows of odd length", "keys"):
        _, mask = numbers(kind, layout, (len(lengths), heads, 300, 300), "bfloat16", 2)
        packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 300, "max_seqlen_k": 300}
        got = to_numpy(oa.attention_varlen(q, k, v, mask=mask, causal=True, **packed))
        for i, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            if begin < end:
                own = mask[i : i + 1, :, : end - begin, : end - begin]
                want = oa.attention(*(x[None, begin:end] for x in (q, k, v)), mask=own, causal=True)[0]
                np.testing.assert_allclose(got[begin:end], to_numpy(want), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("layout", ["whole", "rows of odd length", "row values"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_every_time(kind: str, layout: str) -> None:
    q, k, v = (to_gpu(x, "bfloat16") for x in tensors(2, 500, 700, 4, 128, "bfloat16"))
    _, mask = numbers(kind, layout, (1, 4, 500, 700), "bfloat16", 0)
    want = oa.attention(q, k, v, mask=mask, softcap=20.0)
    for _ in range(20):
        assert torch.equal(oa.attention(q, k, v, mask=mask, softcap=20.0), want)
