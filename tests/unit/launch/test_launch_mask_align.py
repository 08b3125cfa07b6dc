"""Additive masks that no tensor map describes: when they are copied, the launch, arithmetic of the kernel. No GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omniattn.launch import masks
from omniattn.launch.host_struct import At
from omniattn.launch.structs import MASK_ALIGN
from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionProblem, Target
from omniattn.problems.memory import ITEMSIZE
from omniattn.problems.score_mod import BlockMaskProblem
from omniattn.registry import by_name
from omniattn.testing.align_cases import AlignCase, align_cases
from omniattn.testing.mask_cases import MaskShape
from tests.unit.launch.launch_fakes import fields_of_record

ALIGN = by_name("mask_align_sm80")
HOPPER = Target((9, 0), 227 << 10, 132)
SMALL, LARGE = "attn_fwd_sm90_bf16_d64_m64n64_bias16", "attn_fwd_sm90_bf16_d64_m256n64_bias16"


def problem(shape: MaskShape, **changes: Any) -> AttentionProblem:
    changes = {"num_kv_heads": shape.heads, **changes}
    return replace(shape.problem("bfloat16"), **changes)


ODD = MaskShape("io", 2, 3, 300, 577)


def test_which_masks_are_copied() -> None:
    assert problem(ODD).aligns_mask
    assert problem(replace(ODD, kind="float32")).aligns_mask
    for shape, changes in (
        (ODD, {"mask_map": True}),
        (ODD, {"varlen": True}),
        (ODD, {"block_mask": BlockMaskProblem((1, 1), (0, 0, 0, 0))}),
        (replace(ODD, broadcast="q"), {}),
        (replace(ODD, kind="bool"), {}),
        (replace(ODD, seqlen_q=1 << 15, seqlen_k=1 << 15), {}),
    ):
        assert not problem(shape, **changes).aligns_mask


@pytest.mark.parametrize("broadcast", ["", "b", "h", "bh"])
@pytest.mark.parametrize("kind", ["io", "float32"])
def test_attention_reads_the_copy(kind: str, broadcast: str) -> None:
    one = problem(replace(ODD, kind=kind, broadcast=broadcast, offset=3))
    item = ITEMSIZE[one.mask_dtype]
    row = -(-577 * item // 16) * 16
    for name in (SMALL, LARGE.replace("m256", "m192")):
        name = name if kind == "io" else name.replace("bias16", "bias32")
        name = name.replace("m192n64_bias16", "m256n64_bias16")
        launches = plan_attention(one, HOPPER, name)
        copy, attention = launches.records
        assert [spec.spec.op for spec in launches.others] == ["mask_align"]
        assert (copy.spec.op, attention.spec.name) == ("mask_align", name)
        assert attention.overlap == ("m64n64" in name)
        masks_made = (1 if "b" in broadcast else 2) * (1 if "h" in broadcast else 3)
        assert launches.workspace_bytes == masks_made * 300 * row
        bias = attention.tensor_maps[-1]
        assert (bias.operand, bias.add) == ("workspace", 0)
        assert bias.dims == (577, 300, 1 if "h" in broadcast else 3, 1 if "b" in broadcast else 2)
        head, batch = 300 * row, 300 * row * (1 if "h" in broadcast else 3)
        assert bias.strides_bytes == (row, 16 if "h" in broadcast else head, 16 if "b" in broadcast else batch)
        assert copy.grid[0] == -(-masks_made * 300 * row // 16 // copy.threads)


def test_without_queries_or_keys_nothing_is_copied() -> None:
    for changes in ({"seqlen_q": 0}, {"batch": 0}):
        records, places = masks.build_aligned(ALIGN, problem(replace(ODD, **changes)), At("workspace", 256))
        assert (records, places.num_bytes) == ((), 0)


def emulated(case: AlignCase) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What mask_align_sm80.cu stores, thread by thread, and what it should."""
    prepared = case.prepare()
    kind = "float32" if case.shape.kind == "float32" else case.dtype
    (record,), _ = masks.build_aligned(ALIGN, case.shape.problem(case.dtype), At("workspace"))
    p = fields_of_record(record, MASK_ALIGN)
    size = p["element_bytes"]
    bits = prepared.memory.view(np.uint32)
    if kind == "bfloat16":
        memory = (bits >> 16).astype(np.uint16).view(np.uint8)
    else:
        memory = (bits if kind == "float32" else prepared.memory.astype(np.float16)).view(np.uint8)
    base, per_chunk = prepared.first * size, 16 // size
    first, end = base + p["first_byte"], base + p["end_byte"]
    assert first >= 0
    assert end <= memory.size
    made = np.zeros((p["chunks"], 16), dtype=np.uint8)
    by_words = 0
    for chunk in range(p["chunks"]):
        row, part = divmod(chunk, p["row_chunks"])
        mask, q = divmod(row, p["rows"])
        batch, head = divmod(mask, p["mask_heads"])
        key = part * per_chunk
        strides = [p[f"mask_stride_{x}"] for x in "bhqk"]
        at = base + size * sum(n * s for n, s in zip((batch, head, q, key), strides, strict=True))
        count = min(p["cols"] - key, per_chunk)
        begin, behind = at & ~3, (at + 19) & ~3
        if strides[3] == 1 and count == per_chunk and begin >= first and behind <= end:
            words = memory[begin : begin + 20]  # of which the last is read where the address is no multiple of 4
            assert at % 4 == 0 or begin + 20 <= end
            made[chunk] = words[at % 4 :][:16]
            by_words += 1
        else:
            for i in range(count):
                element = memory[at + i * strides[3] * size :][:size]
                assert at + i * strides[3] * size >= first
                assert at + i * strides[3] * size + size <= end
                made[chunk, size * i : size * (i + 1)] = element
    assert (by_words > 0) == (strides[3] == 1 and p["cols"] >= per_chunk)
    return made.reshape(-1), np.ascontiguousarray(prepared.wanted["copy"]).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("number", range(7))
def test_what_a_thread_copies(number: int) -> None:
    made, wanted = emulated(align_cases(ALIGN)[number])
    assert np.array_equal(made, wanted)
