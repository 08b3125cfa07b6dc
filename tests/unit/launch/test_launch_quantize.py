"""Launches of the quantizers without a GPU: selection, problems, workspace, arguments."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import runtime
from omniattn.errors import UnsupportedError
from omniattn.launch import quantize as launch
from omniattn.launch.host_struct import At
from omniattn.launch.structs import QUANTIZE, QUANTIZE_DELTA
from omniattn.plan.others import plan_quantize
from omniattn.problems import AttentionProblem, QuantizeCall, QuantizeProblem, Target
from omniattn.runtime.device import DeviceInfo
from omniattn.runtime.driver_base import LaunchAttributes
from omniattn.select import select_delta, select_quantizer
from omniattn.testing.quantizer_cases import Fused
from tests.unit.launch.launch_fakes import Kernel, fields_of_record, unpacked


@pytest.mark.parametrize("grouping", ["sm90", "sm80"])
def test_delta_of_packed_sequences_is_never_empty(grouping: str) -> None:
    """Attention would have no column to read, and no address to tell smoothed queries by."""
    p = problem(varlen=True, smooth_q=True, max_seqlen_k=0, grouping=grouping)
    assert p.delta_columns == p.key_tile
    assert p.shapes()["delta_s"][0][-1] == p.key_tile


def problem(**changes: Any) -> QuantizeProblem:
    facts = {
        "dtype": "bfloat16",
        "batch": 2,
        "rows_q": 300,
        "rows_k": 500,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 72,
        "varlen": False,
    }
    return QuantizeProblem(**{**facts, **changes})


def call(p: QuantizeProblem) -> QuantizeCall:
    return QuantizeCall(p, ((0, 0, 0),) * 3, "NHD", 0)


def target(cc: tuple[int, int]) -> Target:
    return Target(cc, 99 << 10, 132)


HOPPER = target((9, 0))


def test_selection() -> None:
    for head_dim, tile in ((8, 64), (64, 64), (72, 128), (136, 256), (256, 256)):
        p = problem(dtype="float16", head_dim=head_dim)
        for op, select in (("quantize", select_quantizer), ("quantize_delta", select_delta)):
            spec = select(p, target((8, 6))).spec
            assert (spec.op, spec.dtype, spec.head_dim) == (op, "float16", tile)
    with pytest.raises(UnsupportedError, match=r"7\.5"):
        select_quantizer(problem(dtype="float16"), target((7, 5)))
    with pytest.raises(UnsupportedError, match="float32"):
        select_quantizer(problem(dtype="float32"), HOPPER)


def asked_by(precision: oa.Int8 | oa.Int4, grouping: str = "sm90", **changes: Any) -> QuantizeProblem:
    """What attention of this precision asks of the quantizer, for the arrays of `problem`."""
    attention = AttentionProblem(
        "bfloat16", 2, 300, 500, 4, 2, 72, -1, -1, 0.1, 0.0, "none", "none", False, precision.precision
    )
    attention = dataclasses.replace(attention, **changes)
    found = precision.precision.on_cpu
    return attention.quantization(
        grouping=grouping, pv=found.pv, pv_accumulator=found.pv_accumulator, unpacked=grouping == "sm90"
    )


def test_problem_of_a_precision() -> None:
    made = asked_by(oa.Int4(pv="fp16", smooth_v=True), "sm80", lse=True)
    assert (made.bits, made.v_dtype, made.row_bias, made.smooth_q, made.smooth_v) == (4, "float16", "full", True, True)
    assert made.stored_bits == 4
    assert (asked_by(oa.Int4()).bits, asked_by(oa.Int4()).stored_bits) == (4, 8)
    assert asked_by(oa.Int8()).row_bias == "marks"
    for absolute in ({"lse": True}, {"sinks": "io"}):
        assert asked_by(oa.Int8(), **absolute) == dataclasses.replace(asked_by(oa.Int8()), row_bias="full")
    assert asked_by(oa.Int8(pv="fp8", pv_accumulator="fp16")).v_levels == 32.0


def test_one_allocation_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    made = problem(smooth_q=True)
    kernels = []

    def load(spec: Any, ordinal: int) -> Any:
        kernels.append(Kernel((QUANTIZE if spec.op == "quantize" else QUANTIZE_DELTA).size, spec))
        return kernels[-1]

    info = DeviceInfo(0, "a GPU", (9, 0), 132, 99 << 10, 1, (13, 0))
    monkeypatch.setattr(runtime, "device_info", lambda ordinal: info)
    monkeypatch.setattr(runtime, "load", load)
    fused = Fused(call(made), 0)
    shapes = made.shapes()
    assert set(fused.offsets) == set(shapes)
    assert [kernel.spec.op for kernel in kernels] == ["quantize", "quantize", "quantize_delta"]
    sizes = {"int8": 1, "uint8": 1, "float16": 2, "float32": 4}
    spans = sorted((fused.offsets[n], fused.offsets[n] + int(np.prod(s)) * sizes[t]) for n, (s, t) in shapes.items())
    assert all(start % 256 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    room = launch.scratch(fused.specs[0], made)
    assert spans[-1][1] + room.size <= fused.num_bytes
    # Nothing of the scratch memory lies in the outputs or behind the end, and its parts lie apart.
    starts = (room.partials, room.items, room.size)
    assert 0 < 16 * room.clear_vectors <= room.starts <= starts[0] < starts[1] <= starts[2]
    base = 0x1000
    fused.launch(7, [1 << 20, 2 << 20, 3 << 20], base)
    for kernel, layout in zip(kernels, (QUANTIZE, QUANTIZE, QUANTIZE_DELTA), strict=True):
        ((_, _, _, stream, data, _),) = kernel.log
        found = unpacked(data, layout)
        prefix = "quantize." if layout is QUANTIZE_DELTA else ""
        assert stream == 7
        assert [found[prefix + x] for x in "qkv"] == [1 << 20, 2 << 20, 3 << 20]
        assert found[prefix + "q_int"] == base + fused.offsets["q_int"]
        assert found[prefix + "v_out"] == base + fused.offsets["v"]
        assert found[prefix + "cu_seqlens_q"] == 0
    assert found["delta_s"] == base + fused.offsets["delta_s"]
    # The first launch clears the counters; the others must not.
    cleared = [unpacked(kernel.log[0][4], QUANTIZE)["clear_vectors"] for kernel in kernels[:2]]
    assert cleared == [room.clear_vectors, 0]
    assert [kernel.log[0][5] for kernel in kernels] == [None, LaunchAttributes(overlap=True), None]


@pytest.mark.parametrize(
    "changes", [{"heads_q": 0, "heads_kv": 0}, {"batch": 0}, {"rows_q": 0, "rows_k": 0}, {"v": False}, {"qk": False}]
)
@pytest.mark.parametrize("varlen", [False, True])
def test_plans_of_little(changes: dict[str, Any], varlen: bool) -> None:
    made = problem(**changes, varlen=varlen)
    launches = plan_quantize(call(made), HOPPER, None)
    assert len(launches.records) in ((1, 2) if varlen else (0, 2))  # packed: cu_seqlens are copied in any case
    assert launches.workspace_bytes >= 1
    for record in launches.records:
        fields = fields_of_record(record, QUANTIZE)
        given = [fields[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
        copies = [fields[name] for name in ("starts_q", "starts_k")]
        if record is launches.records[0]:
            assert given == [At("cu_seqlens_q") if varlen and made.qk else None, At("cu_seqlens_k") if varlen else None]
        assert copies == [
            At("out.cu_seqlens_q") if varlen and made.qk else None, At("out.cu_seqlens_k") if varlen else None,
        ]  # fmt: skip


def test_the_kernel_for_what_int8_attention_asks_for_by_default() -> None:
    """One option changed, and it is the kernel for anything."""
    made = asked_by(oa.Int8())
    assert made.specialization == ("sm90", "float8_e4m3")
    spec = select_quantizer(made, HOPPER).spec
    assert (spec.name, spec.head_dim) == ("quantize_sm80_bf16_d128_common", 128)
    for changes in (
        {"varlen": True}, {"row_bias": "full"}, {"smooth_q": True}, {"smooth_k": False},
        {"smooth_v": False}, {"granularity": "per_token"}, {"v_dtype": "float16"},
        {"qk_dtype": "int4", "unpacked": False}, {"qk": False}, {"v": False}, {"qk_dtype": "int4", "unpacked": True},
    ):  # fmt: skip
        other = dataclasses.replace(made, **changes)
        assert other.specialization is None, changes
        assert select_quantizer(other, HOPPER).spec.specialization is None, changes
    for changes, cc, end in (
        ({"grouping": "sm80", "v_dtype": "float16"}, (8, 0), "_common_sm80_fp16"),
        ({"grouping": "sm80"}, (8, 9), "_common_sm80_fp8"),
        ({"grouping": "sm80"}, (8, 0), ""),  # no e4m3 there
    ):
        other = dataclasses.replace(made, dtype="float16", head_dim=64, **changes)
        assert other.specialization == ("sm80", other.v_dtype)
        assert select_quantizer(other, target(cc)).spec.name == "quantize_sm80_fp16_d64" + end
    # Its items lie behind the partial sums.
    general = select_quantizer(dataclasses.replace(made, row_bias="full"), HOPPER).spec
    sizes = [launch.scratch(s, made).size for s in (general, spec)]
    chunks, q_blocks, k_blocks = 2, 3, 4  # of 256 and 128 rows; heads: 4 of Q, 2 of K and of V, of 2 batch entries
    assert sizes[1] - sizes[0] == 48 * 2 * (4 * q_blocks + 2 * (2 * k_blocks + 2 * chunks + 1))
