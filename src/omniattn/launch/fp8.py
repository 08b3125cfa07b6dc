"""Launches of the kernels beside attention on e4m3: quantizers of rows and of V, and the layout of V in e4m3."""

from __future__ import annotations

from ..problems import AttentionProblem, QuantizeProblem
from ..problems.quantize import BLOCK_ROWS, Strides3
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from . import host_struct
from .host_struct import At, member
from .quantize import rotation_values
from .structs import LAYOUT_FP8, QUANTIZE, QUANTIZE_FP8, QUANTIZE_FP8_SUMS


def build_quantizer(
    spec: KernelSpec, p: QuantizeProblem, strides: tuple[Strides3, Strides3], outputs: dict[str, At]
) -> tuple[LaunchRecord, ...]:
    """The launch that makes q_int, q_scale, k_int and k_scale; none where there are no rows.

    strides: of q and k, (batch, seq, head).
    """
    items, values = _rows(p, strides, outputs)
    if items == 0:
        return ()
    return (LaunchRecord(spec, (items, 1, 1), 32 * spec.num_warps, *QUANTIZE_FP8.pack(values)),)


def values_scratch(spec: KernelSpec, p: QuantizeProblem) -> int:
    """Bytes that `build_with_values` needs besides its outputs; spec: the kernel that sums up V."""
    return sum(_scratch(spec, p).values())


def build_with_values(
    sums: KernelSpec, values: KernelSpec, p: QuantizeProblem, strides: tuple[Strides3, Strides3, Strides3],
    outputs: dict[str, At], memory: At,
) -> tuple[LaunchRecord, LaunchRecord]:  # fmt: skip
    """The two launches that quantize Q, K and V: Q, K and sums of V; and V, which begins while the first one ends.

    strides: of q, k and v, (batch, seq, head). memory: place of the scratch memory, at a multiple of 256 bytes.
    """
    items, rows = _rows(p, strides[:2], outputs)
    places, end = {}, memory.offset
    for name, size in _scratch(sums, p).items():
        places[name] = At(memory.operand, end)
        end += size
    of_v: dict[str, object] = {name: None if code == "P" else 0 for name, code in QUANTIZE.fields}
    of_v |= places | host_struct.strides("v", strides[2])
    of_v |= {
        "v": At("v"), "v_out": outputs["v"], "v_scale": outputs["v_scale"], "v_mean": outputs["v_mean"],
        "batch": p.batch, "num_kv_heads": p.heads_kv, "seqlen_k": p.rows_k, "head_dim": p.head_dim,
        "head_dim_pad": p.head_dim_pad, "slots_k": p.slots(p.rows_k, BLOCK_ROWS), "slots_r": p.slots_r,
        "units": p.batch * p.heads_kv, "v_levels": p.v_levels,
    }  # fmt: skip
    units, chunks = p.batch * p.heads_kv, p.batch * p.heads_kv * p.slots_r
    first = QUANTIZE_FP8_SUMS.pack(member("rows", rows) | member("values", of_v) | {"chunks": chunks, "reserved": 0})
    blocks = units * p.slots(p.rows_k, BLOCK_ROWS)
    return (
        LaunchRecord(sums, (chunks + items, 1, 1), 32 * sums.num_warps, *first),
        LaunchRecord(values, (blocks, 1, 1), 32 * values.num_warps, *QUANTIZE.pack(of_v), overlap=True),
    )


def _scratch(spec: KernelSpec, p: QuantizeProblem) -> dict[str, int]:
    """Bytes of arrays by their names in QuantizeParams, one behind the other."""
    units = p.batch * p.heads_kv
    return {
        "v_error": 8 * units * p.head_dim_pad, "partials": 16 * units * p.slots_r * spec.head_dim,
        "v_bad": 4 * units, "v_done": 4 * units,
    }  # fmt: skip


def _rows(
    p: QuantizeProblem, strides: tuple[Strides3, Strides3], outputs: dict[str, At]
) -> tuple[int, dict[str, object]]:
    """Blocks of Q and K, and the fields of QuantizeFp8Params."""
    values: dict[str, object] = {"head_dim": p.head_dim, "head_dim_pad": p.head_dim_pad}
    items = 0
    for name, rows, heads, steps in (("q", p.rows_q, p.heads_q, strides[0]), ("k", p.rows_k, p.heads_kv, strides[1])):
        blocks = p.slots(rows, BLOCK_ROWS)
        count = p.batch * heads * blocks
        items += count
        values |= member(name, {
            "x": At(name), "out": outputs[f"{name}_int"], "scale": outputs[f"{name}_scale"], "stride_b": steps[0],
            "stride_s": steps[1], "stride_h": steps[2], "heads": heads, "rows": rows, "blocks": blocks, "items": count,
        })  # fmt: skip
    return items, values | member("rotation", rotation_values(p))


def layout_shapes(whole: QuantizeProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of what ``layout_fp8_sm80`` makes; ``drift`` is a byte for each block of 128 keys."""
    shapes = whole.shapes()
    drift = (*shapes["v"][0][:-2], whole.slots(whole.rows_k, BLOCK_ROWS))
    return {"v": shapes["v"], "v_scale": shapes["v_scale"], "drift": (drift, "uint8")}


def build_layout(
    spec: KernelSpec, problem: AttentionProblem, whole: QuantizeProblem, outputs: dict[str, At]
) -> tuple[LaunchRecord, ...]:
    """The launch that makes the arrays of `layout_shapes` in a call on e4m3; none where there are no keys.

    Factors of 128 rows each are left to the kernel behind it. whole: what describes that kernel's operands.
    """
    assert problem.strides is not None
    assert problem.descales is not None
    slots, steps = whole.slots(whole.rows_k, BLOCK_ROWS), problem.strides.v
    count = slots * problem.num_kv_heads * (1 if problem.varlen else problem.batch)
    if count == 0 or problem.batch == 0 or problem.seqlen_k == 0:
        return ()
    descale = problem.descales.v
    values: dict[str, object] = {
        "v": At("v"), "descale": At("descale_v") if descale.granularity in ("scalar", "per_head") else None,
        "cu_seqlens_k": At("cu_seqlens_k") if problem.varlen else None,
        "seqused_k": At("seqused_k") if problem.used[1] else None, "v_out": outputs["v"],
        "v_scale": outputs["v_scale"], "drift": outputs["drift"],
        "v_stride_b": steps[0], "v_stride_s": steps[1], "v_stride_h": steps[2],
        "descale_stride_b": descale.strides[0], "descale_stride_h": descale.strides[1], "batch": problem.batch,
        "num_kv_heads": problem.num_kv_heads, "seqlen_k": problem.seqlen_k, "head_dim": problem.head_dim_v,
        "head_dim_pad": whole.head_dim_pad, "slots": slots,
    }  # fmt: skip
    return (LaunchRecord(spec, (count, 1, 1), 32 * spec.num_warps, *LAYOUT_FP8.pack(values)),)
