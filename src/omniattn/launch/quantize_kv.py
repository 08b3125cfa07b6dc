"""Launches that quantize K and V for int8 attention on Hopper (``kernels_cu/entry/quantize_kv_sm90.cu``)."""

from __future__ import annotations

from ..problems import QuantizeProblem
from ..problems.quantize import BLOCK_ROWS, Strides3
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from . import host_struct
from .host_struct import At
from .structs import QUANTIZE

#: Copies of cu_seqlens that never decrease, behind all other scratch memory.
_STARTS = ("starts_q", "starts_k")


def scratch_bytes(spec: KernelSpec, p: QuantizeProblem) -> int:
    """Bytes that `build` needs besides its outputs; spec: one of the two kernels."""
    return sum(_scratch(spec, p).values())


def build(
    sums: KernelSpec, blocks: KernelSpec, p: QuantizeProblem, strides: tuple[Strides3, Strides3],
    outputs: dict[str, At], memory: At, queries: int = 0,
) -> tuple[LaunchRecord, LaunchRecord]:  # fmt: skip
    """The two launches: sums of samples of K and V; blocks of 128 keys, which begin while the first one ends.

    strides: of k and v, (batch, seq, head). memory: place of the scratch memory, at a multiple of 256 bytes. queries:
    rows of packed queries, which nobody quantizes; of their cu_seqlens there is a copy as of those of keys.
    """
    places, end = {}, memory.offset
    for name, size in _scratch(sums, p).items():
        places[name] = At(memory.operand, end)
        end += size
    values: dict[str, object] = {name: None if code == "P" else 0 for name, code in QUANTIZE.fields}
    values |= places | host_struct.strides("k", strides[0]) | host_struct.strides("v", strides[1])
    values |= {
        "k": At("k"), "v": At("v"), "k_int": outputs["k_int"], "k_scale": outputs["k_scale"],
        "k_mean": outputs["k_mean"], "v_out": outputs["v"], "v_scale": outputs["v_scale"], "v_mean": outputs["v_mean"],
        "batch": p.batch, "num_kv_heads": p.heads_kv, "seqlen_k": p.rows_k, "head_dim": p.head_dim,
        "head_dim_pad": p.head_dim_pad, "slots_k": p.slots(p.rows_k, BLOCK_ROWS), "slots_r": p.slots_r,
        "tiles_k": p.slots(p.rows_k, p.key_tile), "units": p.units, "v_levels": p.v_levels,
    }  # fmt: skip
    if p.varlen:
        values |= {name: At(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        values |= {"seqlen_q": queries, "seqused_k": At("seqused_k") if p.used[1] else None}
    arguments = QUANTIZE.pack(values)
    chunks, tiles = p.units * p.slots_r, p.units * p.slots(p.rows_k, BLOCK_ROWS)
    return (
        LaunchRecord(sums, (2 * chunks, 1, 1), 32 * sums.num_warps, *arguments),
        LaunchRecord(blocks, (2 * tiles, 1, 1), 32 * blocks.num_warps, *arguments, overlap=True),
    )


def _scratch(spec: KernelSpec, p: QuantizeProblem) -> dict[str, int]:
    """Bytes of arrays by their names in QuantizeParams, one behind the other; of a chunk five rows of partial sums."""
    heads = p.batch * p.heads_kv  # of all sequences
    sizes = {
        "v_error": 8 * heads * p.head_dim_pad, "partials": 20 * p.units * p.slots_r * spec.head_dim,
        "v_bad": 4 * heads, "v_done": 4 * heads,
    }  # fmt: skip
    return sizes | (dict.fromkeys(_STARTS, 4 * (p.batch + 1)) if p.varlen else {})


def starts_in(spec: KernelSpec, p: QuantizeProblem, memory: At) -> tuple[At, At]:
    """Places of the copies of cu_seqlens_q and cu_seqlens_k that never decrease; ``memory`` as for `build`."""
    sizes = _scratch(spec, p)
    assert tuple(sizes)[-2:] == _STARTS
    of_k = memory.offset + sum(sizes.values()) - sizes["starts_k"]
    return At(memory.operand, of_k - sizes["starts_q"]), At(memory.operand, of_k)
