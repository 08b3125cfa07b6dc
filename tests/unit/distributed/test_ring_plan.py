"""`omniattn.distributed.plan`: bytes, steps and balance, without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omniattn import Int8, distributed
from omniattn.distributed import plan
from omniattn.errors import ArgumentError, UnsupportedError

FACTS: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
#: K and V of a token.
ROW = 2 * 2 * 128 * 2


def test_causal_zigzag_is_balanced_and_sends_half_of_what_no_later_rank_reads() -> None:
    told = plan(4096, 4, causal=True, **FACTS)
    assert told.balance == 1.0
    assert told.rows_q == told.rows_k == (1024,) * 4
    assert [[step.rows for step in steps] for steps in told.ranks] == [
        [0, 1024, 1024, 1024], [0, 512, 1024, 1024], [0, 512, 512, 1024], [0, 512, 512, 512],
    ]  # fmt: skip
    assert told.bytes_forward == 3 * 1024 * ROW
    assert told.bytes_in_flight == 2 * 1024 * ROW
    assert sum(step.pairs for steps in told.ranks for step in steps) == 4096 * 4097 // 2
    assert sum(step.flops for steps in told.ranks for step in steps) == 4096 * 4097 // 2 * 8 * 4 * 128
    # Gradients of K and V go back the way that K and V came.
    everything = [step for steps in told.ranks for step in steps]
    assert sum(s.bytes_backward for s in everything) == 2 * sum(s.bytes_forward for s in everything)


def test_contiguous_is_not_balanced_and_windows_are_local() -> None:
    told = plan(4096, 4, causal=True, schedule="contiguous", **FACTS)
    assert told.balance < 0.6
    near = plan(4096, 4, causal=True, window=(100, -1), schedule="contiguous", **FACTS)
    assert [[step.rows for step in steps] for steps in near.ranks] == [[0, 0, 0, 0], *[[0, 100, 0, 0]] * 3]
    assert near.bytes_forward == 100 * ROW


def test_eight_bits_are_half_of_the_bytes() -> None:
    exact, low = (plan(65536, 4, precision=precision, **FACTS).bytes_forward for precision in ("exact", "int8"))
    assert 0.5 < low / exact < 0.52
    wider = plan(65536, 4, precision=Int8(pv="fp16"), **FACTS).bytes_forward
    assert 0.75 < wider / exact < 0.77


def test_documents_stay_where_they_are() -> None:
    told = plan(4096, 4, cu_seqlens=np.arange(0, 4097, 1024), causal=True, schedule="contiguous", **FACTS)
    assert told.bytes_forward == told.bytes_backward == 0
    assert [[step.calls for step in steps] for steps in told.ranks] == [[1, 0, 0, 0]] * 4


def test_seconds_are_those_of_work_or_of_the_link() -> None:
    told = plan(8192, 2, **FACTS)
    flops = sum(step.flops for step in told.ranks[0])
    fast, slow = told.seconds(tflops=1.0, link_gb_s=1e9), told.seconds(tflops=1e9, link_gb_s=1.0)
    assert fast == pytest.approx(flops / 1e12)
    assert slow == pytest.approx(told.bytes_forward / 1e9, rel=1e-3)
    both = told.seconds(tflops=1.0, link_gb_s=told.bytes_forward / (flops / 2e12) / 1e9)
    assert both == pytest.approx(fast, rel=1e-6)
    assert plan(0, 3, **FACTS).seconds(tflops=1.0, link_gb_s=1.0) == 0.0
    with pytest.raises(ArgumentError, match="tflops"):
        told.seconds(tflops=0, link_gb_s=1.0)


def test_overlap_is_what_nobody_waits_for() -> None:
    told = plan(8192, 2, **FACTS)
    step = told.ranks[0][0].flops / 1e12
    bytes_of = told.ranks[0][1].bytes_forward
    for part, hidden in ((0.5, 1.0), (1.0, 1.0), (4.0, 0.25)):
        found = told.overlap(tflops=1.0, link_gb_s=bytes_of / (part * step) / 1e9)
        assert found == pytest.approx(hidden)
    assert plan(8192, 1, **FACTS).overlap(tflops=1.0, link_gb_s=1.0) == 1.0
    assert plan(0, 3, **FACTS).overlap(tflops=1.0, link_gb_s=1.0) == 1.0
    with pytest.raises(ArgumentError, match=r"overlap.*link_gb_s"):
        told.overlap(tflops=1.0, link_gb_s=0.0)


def test_merges_and_transfers_take_time() -> None:
    """Two ranks merge once, in bf16; more convert to float32 and back."""
    told = plan(8192, 2, causal=True, **FACTS)
    row = FACTS["num_q_heads"] * FACTS["head_dim"]
    assert [[step.bytes_merged for step in steps] for steps in told.ranks] == [
        [0, 3 * 2 * 2048 * row], [0, 3 * 2 * 4096 * row],
    ]  # fmt: skip
    plain, merged = (told.seconds(tflops=1.0, link_gb_s=1e9, memory_gb_s=rate) for rate in (None, 1.0))
    assert merged - plain == pytest.approx(3 * 2 * 4096 * row / 1e9)
    first, last = (step.flops / 1e12 for step in told.ranks[0])
    # Kernels lack half of the SMs for as long as the transfer lasts, or for all of their time.
    link = told.ranks[0][1].bytes_forward / first / 1e9
    for part, lost in ((0.25, 0.125), (1.0, 0.5), (8.0, 1.0)):
        slower = told.seconds(tflops=1.0, link_gb_s=link / part, transfer_sms=0.5)
        assert slower == pytest.approx(max(1 + lost, part) * first + last)
    steps = plan(8192, 4, causal=True, **FACTS).ranks[3]
    full = 2048 * row
    assert [step.bytes_merged for step in steps] == [6 * full, 18 * full, 18 * full, 24 * full]
    for said in ({"memory_gb_s": 0}, {"transfer_sms": 1.0}):
        with pytest.raises(ArgumentError, match=next(iter(said))):
            told.seconds(tflops=1.0, link_gb_s=1.0, **said)


def test_the_table_has_a_line_for_each_step() -> None:
    lines = str(plan(100, 3, **FACTS)).splitlines()
    assert len(lines) == 1 + 9 + 1
    assert "work of the mean rank by the most: " in lines[-1]


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Its code of `plan` runs, and its picture of causal zigzag is the plan's."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "distributed.md").read_text(encoding="utf-8")
    code = next(c for c in re.findall(r"^```python\n(.*?)^```", page, re.M | re.DOTALL) if "plan(" in c)
    exec(code, {})
    assert "1.000" in capsys.readouterr().out
    told = plan(4096, 4, causal=True, **FACTS)
    for rank, steps in enumerate(told.ranks):
        cells = re.split(r" {2,}", next(x for x in page.splitlines() if x.startswith(f"rank {rank}  ")))
        assert cells[2:] == [f"{s.source}: {'all' if s.rows == 1024 else 'first half'}" for s in steps[1:]]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"world_size": 0}, "world_size"), ({"seqlen": -1}, "seqlen"), ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"dtype": "int8"}, "dtype"), ({"schedule": "ring"}, "schedule"), ({"cu_seqlens": [0, 9]}, "cu_seqlens"),
        ({"window": (-2, 0)}, "window"), ({"precision": "auto"}, "precision"), ({"causal": 1}, "causal"),
        ({"head_dim": 127}, "head_dim"), ({"head_dim_v": 520}, "head_dim_v"),
        ({"head_dim_v": 64, "precision": "int8"}, "head_dim_v"),
    ],
)  # fmt: skip
def test_wrong_arguments(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"argument '{name}'"):
        plan(**{"seqlen": 64, "world_size": 2, **FACTS, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": (4, 0)}, "window"), ({"causal": True, "seqlen_k": 32}, "causal with 64 queries"),
        ({"cu_seqlens": [0, 64]}, "cu_seqlens"), ({"head_dim": 264}, "head_dim of 264"),
    ],
)  # fmt: skip
def test_what_does_not_travel_in_eight_bits(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        plan(64, 2, precision="int8", **{**FACTS, **options})


def test_full_attention_in_eight_bits_takes_a_call_a_step() -> None:
    """At any length: it reads whole parts. Causal attention does so where chunks have whole groups of scales."""
    for seqlen, causal, calls in ((8191, False, 1), (1536, True, 1), (8191, True, 3)):
        told = plan(seqlen, 3, precision="int8", causal=causal, **FACTS)
        assert max(step.calls for steps in told.ranks for step in steps) == calls


def test_names() -> None:
    """A name that is none raises; `plan` needs no torch."""
    assert not hasattr(distributed, "ring_attn")
    program = "import sys, omniattn.distributed as d; d.plan(8, 2, num_q_heads=1, num_kv_heads=1, head_dim=8)"
    subprocess.run([sys.executable, "-c", program + "; assert 'torch' not in sys.modules"], check=True, timeout=120)


def test_a_short_sequence_travels_as_it_is() -> None:
    """As the ring does: below min_seqlen the call is exact."""
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "causal": True}
    short = plan(33, 3, precision=Int8(min_seqlen=50), **shape)
    assert short == plan(33, 3, **shape)
    assert plan(64, 2, seqlen_k=8, precision=Int8(min_seqlen=100), **shape) == plan(64, 2, seqlen_k=8, **shape)


def test_values_travel_in_the_operand_of_their_accumulator() -> None:
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    fp16 = plan(1536, 3, precision=Int8(pv="fp16"), **shape)
    assert plan(1536, 3, precision=Int8(pv_accumulator="fp16"), **shape) == fp16
    assert plan(1536, 3, precision=Int8(), **shape).bytes_forward < fp16.bytes_forward
