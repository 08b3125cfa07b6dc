"""Every way of running decode, append, gradients and quantizers, whether it is ever chosen or not, is right."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from omniattn.bench.backward_cases import BackwardShape
from omniattn.bench.candidates import run_candidates
from omniattn.bench.decode_report import DecodeShape
from omniattn.bench.shape_cases import ShapeCase
from omniattn.bench.way_cases import AppendCase, BackwardCase, DecodeCase, QuantizeCase, WayCase

pytestmark = pytest.mark.gpu

_QUANTIZED = ShapeCase(128, 8, (700,) * 3, (700,) * 3, group=2)
_E4M3 = {"dtype": "float8_e4m3", "granularity": "per_block", "smooth_k": False}

#: One of each kind, with lengths that are no multiples of a tile.
CASES: tuple[WayCase, ...] = (
    DecodeCase(DecodeShape(2, 32, 8, 5001)), DecodeCase(DecodeShape(5, 24, 2, 333, 64, block_size=16, ragged=True)),
    DecodeCase(DecodeShape(3, 71, 1, 700, 64)), DecodeCase(DecodeShape(2, 32, 2, 900, queries=5), "int8"),
    DecodeCase(DecodeShape(4, 16, 2, 1300), "int4g32"),
    DecodeCase(DecodeShape(9, 8, 1, 400, block_size=16, prefix=320)),
    DecodeCase(DecodeShape(3, 16, 2, 500), "int4w128"), DecodeCase(DecodeShape(3, 80, 2, 2000), "bf16det"),
    AppendCase(DecodeShape(3, 4, 4, 333, 64), "int8", 33), AppendCase(DecodeShape(3, 4, 4, 50, block_size=16)),
    BackwardCase(BackwardShape(4, 64, (333,) * 2, True, group=2)),
    BackwardCase(BackwardShape(4, 128, (300,) * 2, False)),
    BackwardCase(BackwardShape(2, 96, (130,) * 3, True), deterministic=True),
    BackwardCase(BackwardShape(2, 256, (200,), False)), BackwardCase(BackwardShape(2, 192, (200,), True), ("dq",)),
    BackwardCase(BackwardShape(4, 128, (300, 17, 513), True, packed=True)),
    BackwardCase(BackwardShape(4, 64, (300, 17, 513), False, packed=True), deterministic=True),
    BackwardCase(BackwardShape(2, 128, (300,) * 2, True, softcap=30.0), ("dk", "dv")),
    QuantizeCase("qk", _QUANTIZED), QuantizeCase("qk", _QUANTIZED, _E4M3), QuantizeCase("v", _QUANTIZED),
    QuantizeCase("qk", _QUANTIZED, {"granularity": "per_tensor"}),
    QuantizeCase("qkv", ShapeCase(128, 8, (700,) * 3, (700,) * 3, precision="int8")),
    QuantizeCase("qkv", ShapeCase(64, 8, (700,) * 3, (700,) * 3, precision="fp8")),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.long_name)
def test_all_ways(case: WayCase) -> None:
    (result,) = run_candidates([case], iters=1).results
    if result.refused:
        pytest.skip(result.refused)
    assert len(result.ways) >= 1
    assert [f"{way.way}: {way.reason}" for way in result.ways if way.reason] == []
    assert result.regret is not None
