"""dq with the same bits from one pass: tiles of keys add to it in their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.launch import attn_bwd_sm90  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402

from .backward_cases import check, make  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="Hopper's"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (200, 60)},
    "window left": {"window": (300, 0)},
    "one key": {"window": (0, 0)},
}
SHAPES = {
    "heads": {"batch": 2, "seqlen_q": 150, "seqlen_k": 203, "heads_q": 4, "heads_kv": 2},
    "many tiles": {"seqlen_q": 1000, "seqlen_k": 1000, "heads_q": 3},
    "more keys": {"batch": 2, "seqlen_q": 520, "seqlen_k": 1100, "heads_q": 4, "heads_kv": 1},
    "more queries": {"seqlen_q": 900, "seqlen_k": 129},
    "one": {"seqlen_q": 1, "seqlen_k": 1},
}
LENGTHS = ([100, 1, 0, 257, 640], [130, 300, 5, 257, 700])


@pytest.fixture
def on_ctas(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make launches of that many CTAs."""
    build = attn_bwd_sm90.build

    def choose(count: int) -> None:
        def fewer(spec: Any, problem: Any, at: Any, columns: int, target: Any, **more: Any) -> Any:
            return build(spec, problem, at, columns, dataclasses.replace(target, sm_count=count), **more)

        monkeypatch.setattr(attn_bwd_sm90, "build", fewer)
        PLANS.clear()

    yield choose
    PLANS.clear()


def test_selected() -> None:
    q, lse = torch.zeros(1, 300, 2, 128, device="cuda", dtype=torch.bfloat16), torch.zeros(1, 2, 300, device="cuda")
    told = oa.explain(oa.attention_backward, q, q, q, q, q, lse, deterministic=True)
    assert "attn_bwd_sm90_bf16_d128_ordered" in str(told)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients(head_dim: int, shape: str, options: str) -> None:
    check(make(head_dim=head_dim, **SHAPES[shape], **OPTIONS[options]), deterministic=True)


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(head_dim: int, causal: bool) -> None:
    problem = make(lengths=LENGTHS, rest=37, heads_q=4, heads_kv=2, head_dim=head_dim, causal=causal)
    check(problem, deterministic=True)


def _mask_of_keys(seqlen_k: int, heads: int = 1) -> Any:
    mask = np.random.default_rng(seqlen_k).random((1, heads, 1, seqlen_k)) < 0.8
    mask[..., 128:300] = False  # a whole tile of keys, and part of another one
    return mask


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_forms_of_scores(head_dim: int, causal: bool) -> None:
    """Softcap and masks of keys, in the same bits at every run, by one pass."""
    shape: dict[str, Any] = {"batch": 2, "seqlen_q": 520, "seqlen_k": 600, "heads_q": 4, "heads_kv": 2}
    packed: dict[str, Any] = {"lengths": LENGTHS, "rest": 37, "heads_q": 4, "heads_kv": 2}
    for made, suffix in (
        (shape | {"softcap": 3.0}, "ordered_softcap"),
        (shape | {"mask": _mask_of_keys(600)}, "ordered_keys"),
        (shape | {"mask": _mask_of_keys(600, heads=4)}, "ordered_keys"),
        (packed | {"softcap": 3.0}, "varlen_ordered_softcap"),
    ):
        problem = make(head_dim=head_dim, causal=causal, **made)
        check(problem, deterministic=True)
        q, lse = torch.zeros(1, 300, 2, head_dim, device="cuda").bfloat16(), torch.zeros(1, 2, 300, device="cuda")
        options = {name: made[name] for name in ("softcap",) if name in made}
        if "mask" in made:
            heads = made["mask"].shape[1] // 2  # q has half as many heads
            options["mask"] = torch.ones(1, max(heads, 1), 1, 300, device="cuda", dtype=torch.bool)
        if "lengths" not in made:
            told = oa.explain(oa.attention_backward, q, q, q, q, q, lse, deterministic=True, **options)
            assert suffix in str(told)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen_q", [60, 65, 130, 300])
def test_masks_of_each_head(seqlen_q: int, head_dim: int, deterministic: bool) -> None:
    """Each tile of queries has the mask of its own head, first and last ones too."""
    for heads_q, heads_kv in ((2, 1), (4, 4), (6, 2)):
        mask = np.zeros((1, heads_q, 1, 150), bool)
        mask[:, ::2] = True
        problem = make(
            seqlen_q=seqlen_q, seqlen_k=150, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, mask=mask
        )
        check(problem, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("form", ["softcap", "mask of keys"])
def test_bits_of_forms(head_dim: int, form: str) -> None:
    generator = torch.Generator("cuda").manual_seed(head_dim)
    shape = (2, 2048, 8, head_dim)
    do, q, k, v = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4))
    options: dict[str, Any] = {"softcap": 20.0}
    if form == "mask of keys":
        options = {"mask": torch.randn(2, 1, 1, 2048, device="cuda", generator=generator)}
    o, lse = oa.attention(q, k, v, causal=True, return_lse=True, **options)
    call = (do, q, k, v, o, lse)
    first = oa.attention_backward(*call, causal=True, deterministic=True, **options)
    for _ in range(60):
        again = oa.attention_backward(*call, causal=True, deterministic=True, **options)
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(again, first, strict=True))
    for a, b in zip(oa.attention_backward(*call, causal=True, **options), first, strict=True):
        assert (a.double() - b.double()).norm() <= 2e-3 * b.double().norm()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_ctas(head_dim: int, count: int, on_ctas: Callable[[int], None]) -> None:
    """However few tiles are under way at a time, none waits for one that has not begun."""
    on_ctas(count)
    for options in OPTIONS.values():
        problem = make(seqlen_q=520, seqlen_k=600, heads_q=4, heads_kv=2, head_dim=head_dim, **options)
        check(problem, deterministic=True)
    check(make(lengths=LENGTHS, heads_q=4, heads_kv=2, head_dim=head_dim, causal=True), deterministic=True)


@pytest.mark.parametrize(
    ("head_dim", "batch", "seqlen", "heads_q", "heads_kv", "causal"),
    [
        (128, 2, 1024, 8, 8, True),
        (128, 1, 4096, 8, 8, False),
        (64, 1, 4096, 16, 4, True),
        (64, 2, 1024, 16, 16, False),
        (128, 4, 4096, 32, 8, True),  # as plain calls take it
        (128, 1, 20000, 1, 1, False),  # a head has more tiles of keys than the GPU has SMs
    ],
)
def test_bits_under_load(head_dim: int, batch: int, seqlen: int, heads_q: int, heads_kv: int, causal: bool) -> None:
    """With other kernels on the GPU, which keep CTAs from starting together."""
    generator = torch.Generator("cuda").manual_seed(seqlen)

    def normal(heads: int) -> Any:
        return torch.randn(batch, seqlen, heads, head_dim, device="cuda", generator=generator).bfloat16()

    do, q, k, v = normal(heads_q), normal(heads_q), normal(heads_kv), normal(heads_kv)
    o, lse = oa.attention(q, k, v, causal=causal, return_lse=True)
    call = (do, q, k, v, o, lse)
    first = oa.attention_backward(*call, causal=causal, deterministic=True)
    factor, stream = torch.randn(2048, 2048, device="cuda").bfloat16(), torch.cuda.Stream()
    torch.cuda.synchronize()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for run in range(300 if seqlen < 10000 else 60):
        if run % 3 == 0:
            with torch.cuda.stream(stream):
                for _ in range(1 + run % 5):
                    factor @ factor
        for a, b in zip(oa.attention_backward(*call, causal=causal, deterministic=True), first, strict=True):
            differing += (a.view(torch.int16) != b.view(torch.int16)).sum()
    assert int(differing) == 0
    for a, b in zip(oa.attention_backward(*call, causal=causal), first, strict=True):
        assert (a.double() - b.double()).norm() <= 2e-3 * b.double().norm()
