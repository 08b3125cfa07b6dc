"""The tile of short sequences: what the model chooses, and when it is not asked."""

from __future__ import annotations

import dataclasses

import pytest

from omniattn.problems import AttentionProblem, Target
from omniattn.registry import REGISTRY, by_name
from omniattn.select import select_attention
from omniattn.select.tile import SMALL, best_tile, tile_us

HOPPER = Target((9, 0), 227 << 10, 132)


def problem_of(batch: int, heads: int, sq: int, sk: int, d: int, causal: bool = False) -> AttentionProblem:
    right = 0 if causal else -1
    return AttentionProblem("bfloat16", batch, sq, sk, heads, heads, d, -1, right, 0.1, 0.0, "none", "none", False)


#: (batch, heads, queries, keys, head_dim, causal), tile, and what it was measured to gain over the one of long
#: sequences (docs/performance/short.md).
MEASURED = [
    ((2048, 16, 16, 16, 64, False), "m64n32", 3.4),
    ((2048, 16, 16, 16, 128, True), "m64n32", 2.7),
    ((1024, 16, 64, 64, 64, False), "m64n64", 2.0),
    ((256, 16, 128, 128, 64, True), "m64n64", 1.5),
    ((1, 12, 577, 577, 64, False), "m64n64", 1.5),
    ((2, 16, 1000, 1000, 128, False), "m128n128", 1.2),
    ((1, 8, 1024, 1024, 128, True), "m64n64", 1.34),
]


@pytest.mark.parametrize(("call", "tile", "gain"), MEASURED)
def test_measured_calls_get_their_tile(call: tuple[int, int, int, int, int, bool], tile: str, gain: float) -> None:
    problem = problem_of(*call)
    chosen = select_attention(problem, HOPPER)
    assert chosen.spec.name == f"attn_fwd_sm90_bf16_d{call[4]}_{tile}"
    assert any("short sequences" in reason for reason in chosen.why)
    long = by_name("attn_fwd_sm90_bf16_d64_m256n64" if call[4] == 64 else "attn_fwd_sm90_bf16_d128_m192n64")
    assert tile_us(problem, long, HOPPER) / tile_us(problem, chosen.spec, HOPPER) == pytest.approx(gain, rel=0.2)


@pytest.mark.parametrize("extents", [(16, 32, 1024, 1024), (4, 32, 4096, 4096), (1, 8, 1025, 60), (1, 8, 16, 5000)])
def test_long_sequences_keep_theirs(extents: tuple[int, int, int, int]) -> None:
    assert select_attention(problem_of(*extents, 64), HOPPER).spec.name == "attn_fwd_sm90_bf16_d64_m256n64"


def test_packed_sequences_count_by_their_mean() -> None:
    dense = problem_of(64, 16, 100, 100, 64)
    packed = dataclasses.replace(dense, varlen=True, seqlen_q=6400, seqlen_k=6400)
    chosen = select_attention(packed, HOPPER).spec
    assert chosen.name == select_attention(dense, HOPPER).spec.name + "_varlen"
    assert SMALL in chosen.tuned_for
    assert tile_us(packed, chosen, HOPPER) == tile_us(dense, by_name(chosen.name.removesuffix("_varlen")), HOPPER)


@pytest.mark.parametrize("changes", [{"seqlen_q": 0}, {"seqlen_k": 0}, {"batch": 0}, {"num_q_heads": 0}])
def test_nothing_to_do(changes: dict[str, int]) -> None:
    """No division by zero, and the usual tile."""
    rows = [s for s in REGISTRY if SMALL in s.tuned_for]
    usual = by_name("attn_fwd_sm90_bf16_d64_m256n64")
    assert best_tile(dataclasses.replace(problem_of(2, 4, 9, 9, 64), **changes), HOPPER, usual, rows) is usual


def test_small_tiles_share_an_sm() -> None:
    for spec in REGISTRY:
        if SMALL in spec.tuned_for:
            assert spec.ctas_per_sm > 1
            assert spec.ctas_per_sm * (spec.smem_bytes + 1024) <= 228 << 10, spec.name
            # Registers are handed out to four warps at a time.
            assert spec.ctas_per_sm * (-(-spec.num_warps // 4) * 4) * 32 <= 2048
