"""Quantized operands that a rank reads or sends: what kernels take, the numbers of their rows, plans of calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import omniattn as oa  # noqa: E402
from omniattn.distributed import quantized, ring_attention, shard, ulysses_attention  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("options", [{"dtype": "float8_e4m3", "granularity": "per_block"}, {}], ids=str)
def test_queries_begin_where_kernels_can_read(heads: int, options: dict[str, Any]) -> None:
    """At multiples of 16 bytes: a view of one head's scales is contiguous, and begins anywhere."""
    q, k = (torch.randn(1, 640, heads, 64) for _ in range(2))
    pair = oa.quantize_qk(q, k, smooth_k=False, **options)
    cut = quantized._cut_queries(pair, (128, 640))
    alone = oa.quantize_qk(q[:, 128:], k[:, 128:], smooth_k=False, **options)
    for name in ("q_int", "q_scale", "row_bias"):
        found, expected = getattr(cut, name), getattr(alone, name)
        assert (found is None) == (expected is None)
        if found is not None:
            assert found.is_contiguous()
            assert found.data_ptr() % 16 == 0
            assert torch.equal(found, expected)
    assert cut.problem.rows_q == 512


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_plans_of_a_repeated_ring_are_found() -> None:
    """By the same objects: a plan takes longer than the kernels of a short ring."""
    q, k, v = (torch.randn(1, 512, 2, 64) for _ in range(3))
    counts = []
    for _ in range(3):
        ring_attention(q, k, v, causal=True, precision="int8")
        counts.append(len(PLANS))
    assert counts[0] == counts[2]


@pytest.mark.usefixtures("alone")
def test_a_group_that_was_destroyed() -> None:
    group = dist.new_group([0])
    x = torch.randn(1, 8, 2, 16)
    ring_attention(x, x, x, group=group)
    dist.destroy_process_group(group)
    for call in (ring_attention, ulysses_attention):
        with pytest.raises(oa.errors.ArgumentError, match=r"'group': expected .* one that was destroyed"):
            call(x, x, x, group=group)
    with pytest.raises(oa.errors.ArgumentError, match=r"shard\(\).*destroyed"):
        shard(x, 1, group=group)
    assert ring_attention(x, x, x).shape == x.shape


def test_explain_names_the_plan_of_rings() -> None:
    with pytest.raises(oa.errors.ArgumentError, match=r"omniattn\.distributed\.plan\(\)"):
        oa.explain(ring_attention, *(torch.randn(1, 8, 2, 16) for _ in range(3)))
