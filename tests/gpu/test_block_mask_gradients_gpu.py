"""Gradients of calls with a block mask on a GPU: against float64, hidden rows and keys, bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

from .backward_cases import Problem, check, equal_bits, make, run  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("backward_family")]

Array = np.ndarray[Any, Any]
SIZES = ((64, 64), (128, 128), (128, 64), (64, 128), (192, 256))


def blocks_of(
    shape: tuple[int, int, int, int], size: tuple[int, int], share: float = 0.5, seed: int = 0
) -> tuple[Array, tuple[int, int]]:
    """A random block mask of (batch, heads, queries, keys), without a block in one row and one column; and its size."""
    counts = -(-shape[2] // size[0]), -(-shape[3] // size[1])
    shown = np.random.default_rng(seed).random((*shape[:2], *counts)) < share
    if counts[0] > 1:
        shown[:, :, 1] = False
    if counts[1] > 2:
        shown[..., 2] = False
    return shown, size


def masked(
    batch: int = 2, seqlen_q: int = 517, seqlen_k: int = 700, heads_q: int = 6, heads_kv: int = 2,
    size: tuple[int, int] = (64, 64), share: float = 0.5, by: tuple[bool, bool] = (True, True), **options: Any,
) -> Problem:  # fmt: skip
    extent = (batch if by[0] else 1, heads_q if by[1] else 1, seqlen_q, seqlen_k)
    return make(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q, heads_kv=heads_kv,
        blocks=blocks_of(extent, size, share), **options,
    )  # fmt: skip


def hidden_of(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of (batch, heads) that no block shows a key to, and keys of (batch, heads) that none shows."""
    assert problem.blocks is not None
    shown, (rows, keys) = problem.blocks
    x = problem.arrays
    of_rows = shown.any(-1).repeat_interleave(rows, -1)[..., : x["q"].shape[1]]
    of_keys = shown.any(-2).repeat_interleave(keys, -1)[..., : x["k"].shape[1]]
    extent = (x["q"].shape[0], x["q"].shape[2])
    of_keys = of_keys.expand(*extent, -1).unflatten(1, (x["k"].shape[2], -1)).any(2)
    return ~of_rows.expand(*extent, -1), ~of_keys


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_sizes(head_dim: int, size: tuple[int, int]) -> None:
    problem = masked(head_dim=head_dim, size=size, dlse=True)
    made = check(problem, f"{size} d{head_dim}")
    rows, keys = hidden_of(problem)
    assert not made["dq"].transpose(1, 2)[rows].any()
    for name in ("dk", "dv"):
        assert not made[name].transpose(1, 2)[keys].any()


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (150, 40)},
    "softcap": {"softcap": 3.0, "causal": True},
    "sinks": {"sinks": [-1.0, 0.5, 4.0, 0.0, 2.0, 1.0]},
    "negative scale": {"softmax_scale": -0.2},
    "scale 0": {"softmax_scale": 0.0},
    "the same for all": {"by": (False, False)},
    "the same for all batches": {"by": (False, True)},
    "nothing": {"share": -1.0},
    "everything": {"share": 2.0},
    "few": {"share": 0.1},
    "one query": {"seqlen_q": 1},
    "one key": {"seqlen_k": 1},
    "HND": {"layout": "HND", "causal": True},
    "many heads of one": {"batch": 1, "heads_q": 40, "heads_kv": 1, "seqlen_q": 260},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_options(head_dim: int, option: str, dtype: str) -> None:
    check(masked(head_dim=head_dim, dtype=dtype, **OPTIONS[option]), f"{option} d{head_dim}")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_and_score_mods_beside(head_dim: int) -> None:
    bias = np.random.default_rng(1).standard_normal((1, 6, 517, 700)).astype(np.float32)
    check(masked(head_dim=head_dim, mask=bias), f"bias d{head_dim}")
    keys = np.random.default_rng(2).standard_normal((2, 1, 1, 700)).astype(np.float32)
    check(masked(head_dim=head_dim, mask=keys), f"keys d{head_dim}")
    mod = oa.ScoreMod("1.5f * score + 0.25f", grad="1.5f")
    check(masked(head_dim=head_dim, mod=(mod, lambda s, *_: (1.5 * s + 0.25, torch.tensor(True, device=s.device)))))


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_parts_and_bits(head_dim: int) -> None:
    problem = masked(head_dim=head_dim, causal=True)
    whole = run(problem, deterministic=True)
    for _ in range(3):
        assert equal_bits(run(problem, deterministic=True), whole)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(run(problem, (name,), deterministic=True)[name], whole[name])
    usual = run(problem)
    assert torch.equal(usual["dk"], whole["dk"])
    assert torch.equal(usual["dv"], whole["dv"])
    check(problem, f"deterministic d{head_dim}", deterministic=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_that_attend_to_nothing_may_have_nan(head_dim: int) -> None:
    problem = masked(head_dim=head_dim, size=(128, 128))
    clean = run(problem, deterministic=True)
    rows, _ = hidden_of(problem)
    problem.arrays["do"].transpose(1, 2)[rows] = torch.nan
    assert equal_bits(run(problem, deterministic=True), clean)


def test_all_visible_is_the_same_call() -> None:
    for head_dim in (64, 128):
        problem = masked(head_dim=head_dim, causal=True, share=2.0)
        assert problem.blocks is not None
        problem.blocks[0].fill_(True)
        plain = Problem(problem.arrays, problem.options)
        made, want = run(problem), run(plain)
        for name in ("dk", "dv"):
            torch.testing.assert_close(made[name], want[name], rtol=2e-2, atol=2e-2)


def test_autograd_and_graphs() -> None:
    problem = masked(head_dim=128, causal=True)
    want = run(problem, deterministic=True)
    x, options = problem.arrays, {**problem.forward_options, "deterministic": True}
    q, k, v = (x[name].detach().requires_grad_() for name in "qkv")
    oa.attention(q, k, v, **options).backward(x["do"])
    assert all(torch.equal(t.grad, want[f"d{name}"]) for name, t in zip("qkv", (q, k, v), strict=True))
    o, lse = oa.attention(x["q"], x["k"], x["v"], return_lse=True, **options)

    def call() -> Any:
        return oa.attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, **options)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    for _ in range(2):
        for t in made:
            t.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(t, want[name]) for name, t in zip(("dq", "dk", "dv"), made, strict=True))


def test_kernels() -> None:
    problem = masked(head_dim=128)
    x = problem.arrays
    o, lse = oa.attention(x["q"], x["k"], x["v"], return_lse=True, **problem.forward_options)
    said = str(oa.explain(oa.attention_backward, x["do"], x["q"], x["k"], x["v"], o, lse, **problem.forward_options))
    assert "tile_kinds" in said
    assert "mask_list" in said
