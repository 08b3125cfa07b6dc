"""Orders of tiles and numbers of CTAs as ways of a call: which are compared, what they cost, what is launched."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import omniattn as oa
from omniattn.bench.candidate_cases import candidate_cases
from omniattn.bench.shape_plan import problem_of
from omniattn.launch.structs import ATTN_FWD_SM90
from omniattn.plan.stages import launches_of
from omniattn.problems import AttentionProblem, Target
from omniattn.problems.split import Whole
from omniattn.problems.tile_order import TileList, in_pairs, interleave
from omniattn.select import Candidate, candidates, choices, ranked
from omniattn.select.cost import cost_us
from omniattn.select.features import features
from omniattn.select.model import coefficients_of
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.select.every_call import call

H100 = Target((9, 0), 227 << 10, 132, clock_mhz=1980.0, memory_gb_s=3352.0)
H200 = dataclasses.replace(H100, memory_gb_s=4916.0)


def causal(batch: int, heads: int, kv_heads: int, length: int, **changes: Any) -> AttentionProblem:
    problem: AttentionProblem = call((batch, length, length, heads, kv_heads), (128, 0), right=0, **changes)
    return problem


@pytest.mark.parametrize("target", [H100, H200], ids=["H100", "H200"])
@pytest.mark.parametrize("case", candidate_cases()[::7], ids=lambda case: case.long_name)
def test_the_fastest_of_all_ways_is_ranked_first(case: Any, target: Target) -> None:
    """Orders are looked for of kernels alone that could come first with one."""
    problem, found = problem_of(case), coefficients_of(target)
    ways = candidates(problem, target)
    times = {way: cost_us(features(way, problem, target), found) for way in ways}
    in_order = ranked(problem, target)
    assert in_order[0][0] == min(times.values())
    assert all(times[way] == us for us, way in in_order)
    kinds: dict[Any, int] = {}
    for way in ways:
        if isinstance(way.schedule, Whole):
            key = way.row.name, way.mask, way.heads_as_queries
            kinds[key] = kinds.get(key, 0) + 1
    assert max(kinds.values()) <= 3


def with_order(problem: AttentionProblem, text: str) -> Candidate:
    return next(way for way in candidates(problem, H100) if way.text == text)


@pytest.mark.parametrize(
    ("problem", "text", "tiles", "ctas"),
    [
        (causal(16, 16, 16, 640), "m128n128", in_pairs(256, 5), 132),
        (causal(16, 16, 16, 640), "m128n128, 131 CTAs", in_pairs(256, 5), 131),
        (causal(16, 16, 16, 1024), "m192n64, last 48 heads interleaved", in_pairs(256, 6, 48, 128), 132),
        (causal(1, 16, 16, 16384, window_left=4095), "m192n64, heads interleaved", interleave(16, 86), 132),
        (call((16, 1024, 1024, 16, 16), (128, 0)), "m192n64, 131 CTAs", TileList(256 * 6, 0, 0), 131),
    ],
    ids=str,
)
def test_a_launch_is_what_its_way_says(problem: AttentionProblem, text: str, tiles: TileList, ctas: int) -> None:
    way = with_order(problem, f"attn_fwd_sm90_bf16_d128_{text}")
    assert way.schedule == Whole(tiles, ctas, 132 - ctas)
    (record,) = launches_of(way, problem, H100, None).records
    assert record.grid == (ctas, 1, 1)
    fields = fields_of_record(record, ATTN_FWD_SM90)
    assert {name: fields[f"tiles.{name}"] for name in dataclasses.asdict(tiles)} == dataclasses.asdict(tiles)


@pytest.mark.parametrize(
    ("problem", "tiles", "places"),
    [
        (causal(1, 16, 16, 16384), in_pairs(16, 86, 0, 128), 100),
        (causal(1, 4, 4, 16384), in_pairs(4, 86, 3, 128), 100),
        (call((1, 8192, 16384, 16, 16), (128, 0)), TileList(16 * 43, 0, 0), 100),
        (call((1, 8192, 8192, 16, 16), (512, 0), right=0), in_pairs(16, 64, 1), 50),
    ],
    ids=["causal", "few heads", "full", "clusters"],
)
def test_a_shared_gpu_hands_out_tiles(problem: AttentionProblem, tiles: TileList, places: int) -> None:
    """A CTA for each item, so that none has much left when the others have ended."""
    shared = dataclasses.replace(H100, sm_count=100, is_shared=True)
    way = choices(problem, shared, None)[0].candidate
    assert way.schedule == Whole(tiles, places)
    (record,) = launches_of(way, problem, shared, None).records
    assert record.grid == (way.row.cluster * tiles.num_items, 1, 1)
    fields = fields_of_record(record, ATTN_FWD_SM90)
    assert {name: fields[f"tiles.{name}"] for name in dataclasses.asdict(tiles)} == dataclasses.asdict(tiles)


def test_a_named_kernel_has_its_best_order() -> None:
    problem = causal(16, 16, 16, 640)
    chosen = choices(problem, H100, "attn_fwd_sm90_bf16_d128_m128n128")[0]
    assert chosen.candidate.text == "attn_fwd_sm90_bf16_d128_m128n128, 131 CTAs"
    assert any("131 CTAs" in reason for reason in chosen.why)


#: Of `docs/performance/records/windows.toml`, one H200, µs: (batch, heads, kv heads, length, window on the left, on
#: the right), tiles of 128 rows head by head and with interleaved heads, of 192 rows the same, of 64 rows head by head.
WINDOWS = [
    ((1, 16, 16, 16384, 4095, 0), (738, 673, 736, 639, 803)),
    ((2, 16, 16, 8192, 4095, 0), (581, 608, 670, 577, 635)),
    ((1, 16, 16, 16384, 2047, 0), (412, 388, 419, 384, 436)),
    ((1, 16, 16, 16384, 1023, 0), (248, 240, 257, 242, 259)),
    ((1, 16, 16, 16384, 511, 0), (166, 165, 175, 169, 167)),
    ((1, 32, 8, 16384, 4095, 0), (1436, 1395, 1567, 1370, 1526)),
    ((1, 32, 8, 16384, 1023, 0), (486, 480, 496, 477, 498)),
    ((1, 32, 32, 16384, 4095, 0), (1542, 1545, 1686, 1488, 1624)),
    ((1, 64, 64, 16384, 4095, 0), (3228, 3353, 3225, 3101, 3365)),
    ((8, 16, 16, 4096, 2047, 0), (767, 871, 966, 772, 803)),
    ((4, 16, 16, 4096, 1023, 0), (249, 254, 285, 249, 256)),
    ((8, 16, 16, 2048, 1023, 0), (206, 249, 240, 218, 211)),
    ((16, 16, 16, 2048, 1023, 0), (381, 505, 460, 419, 402)),
    ((1, 16, 16, 16384, 2047, 2047), (729, 740, 771, 703, 779)),
    ((1, 16, 16, 16384, 511, 511), (271, 271, 280, 267, 275)),
    ((1, 16, 16, 16384, 63, 63), (131, 130, 110, 108, 96)),
]


@pytest.mark.parametrize(("extents", "measured"), WINDOWS)
def test_windows_take_an_order_that_was_fast(extents: tuple[int, ...], measured: tuple[int, ...]) -> None:
    batch, heads, kv_heads, length, left, right = extents
    problem = call((batch, length, length, heads, kv_heads), (128, 0), right=right, window_left=left)
    names = "m128n128", "m128n128, heads interleaved", "m192n64", "m192n64, heads interleaved", "m64n64"
    times = {f"attn_fwd_sm90_bf16_d128_{name}": us for name, us in zip(names, measured, strict=True)}
    chosen = next(way.text for _, way in ranked(problem, H200) if way.text in times)
    assert times[chosen] <= 1.05 * min(times.values())


def test_v_counts_by_its_own_width() -> None:
    """Quantization reads 16-bit operands, and writes a byte of each element, or two of v."""
    shape, elements = (2, 300, 500, 8, 2), (2 * 300 * 8, 2 * 500 * 2)
    for width, v_width in ((128, 0), (128, 64)):
        for pv, target, written in (("fp8", H100, 1), ("fp16", H100, 2)):
            problem = call(shape, (width, v_width), precision=oa.Int8(pv=pv).precision)
            ways = candidates(problem, target)
            assert ways or v_width
            for way in ways:
                of_q = 0 if way.row.quantizes_q else elements[0]
                of_qk, of_v = width * (of_q + elements[1]) * 3, (v_width or width) * elements[1] * (2 + written)
                assert features(way, problem, target).quantized == of_qk + of_v
