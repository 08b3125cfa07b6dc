"""Launch of ``attn_int8_sm90``: attention on 8-bit operands in the sm90 grouping."""

from __future__ import annotations

from ..problems import AttentionProblem
from ..problems.quantize import Strides3
from ..problems.split import PackGQA, Whole
from ..problems.tile_order import num_m_blocks
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord, TensorMap
from .attn_fwd import forward_values
from .attn_fwd_sm90 import mapped, tile_values
from .attn_int8 import OperandPlaces
from .host_struct import At, member
from .masks import MaskPlaces
from .quantize import rotation_values
from .score_mods import bias_map, score_mod_values
from .structs import (
    ATTN_FP8_FACTORS_SM90,
    ATTN_FP8_MODS_FACTORS_SM90,
    ATTN_FP8_RAW_SM90,
    ATTN_INT8_MODS_SM90,
    ATTN_INT8_SM90,
)

#: Keys whose products with V the tensor cores sum by themselves, with 13 bits and by truncation. If V has one sign,
#: outputs shrink by 0.4 % over 256 keys, by 4 % over 2048. V without its mean has no such loss
#: (docs/performance/attn_int8_sm90.md).
FLUSH_KEYS = 256
FLUSH_KEYS_SMOOTH_V = 2048

#: Of a row of q in 16 bits in shared memory, where the kernel quantizes it.
_RAW_ROW_BYTES = 128

#: Arguments of rows with and without score modifications, with and without factors of V.
_LAYOUTS = {
    (False, False): ATTN_INT8_SM90,
    (True, False): ATTN_INT8_MODS_SM90,
    (False, True): ATTN_FP8_FACTORS_SM90,
    (True, True): ATTN_FP8_MODS_FACTORS_SM90,
}


def row_bytes(spec: KernelSpec) -> int:
    """Of a row of q or k in shared memory; further channels lie behind all rows."""
    return min(spec.head_dim, 128)


def flush_keys(places: OperandPlaces) -> int:
    """Keys whose products with V the tensor cores sum."""
    return FLUSH_KEYS_SMOOTH_V if places.problem.smooth_v else FLUSH_KEYS


def key_maps(
    spec: KernelSpec, problem: AttentionProblem, places: OperandPlaces, batch: int
) -> tuple[TensorMap, TensorMap]:
    """Of k and v, where there are keys."""
    operands, at, kv = places.problem, places.at, problem.num_kv_heads
    box = row_bytes(spec), spec.block_n
    k = _map(at["k_int"], (places.width, problem.seqlen_k, kv, batch), places.strides[1], box)
    pad, keys = operands.head_dim_pad, operands.shapes()["v"][0][-1]
    of_v = (keys * pad * kv, keys, keys * pad)
    return k, _map(at["v"], (keys, pad, kv, batch), of_v, (spec.block_n, spec.head_dim))


def packed_operands_map(
    spec: KernelSpec, problem: AttentionProblem, places: OperandPlaces, pack_gqa: PackGQA, batch: int
) -> TensorMap:
    """Of q, of which heads share the rows of a tile, as `attn_fwd_sm90.packed_gqa_map`."""
    (heads, pack), (b, seq, head) = pack_gqa, places.strides[0]
    return mapped(
        *places.at["q_int"], "uint8", (places.width, heads, problem.seqlen_q, problem.num_q_heads // heads, batch),
        (head, seq, heads * head, b), (row_bytes(spec), pack, spec.block_m // pack, 1, 1),
    )  # fmt: skip


def build(
    spec: KernelSpec,
    problem: AttentionProblem,
    order: Whole,
    places: OperandPlaces,
    masks: MaskPlaces | None = None,
) -> tuple[LaunchRecord, ...]:
    """The launch of a call; of its strides those of o, LSE and mask are used. None where there is no query.

    order: the list of tiles, and the CTAs that share it. masks: what was made of the mask.
    """
    blocks, batch = num_m_blocks(problem, spec.block_m), 1 if problem.varlen else problem.batch
    if blocks * batch * problem.num_q_heads == 0:
        return ()
    at = places.at
    assert order.tiles is not None, "persistent kernels have a list of tiles"
    extents = problem.seqlen_q, problem.num_q_heads, batch
    if spec.quantizes_q:
        assert problem.strides is not None
        batch_stride, row_stride, head_stride = problem.strides.q
        strides = 2 * batch_stride, 2 * row_stride, 2 * head_stride
        q = _map(At("q"), (2 * problem.head_dim, *extents), strides, (_RAW_ROW_BYTES, spec.block_m))
    else:
        q = _map(at["q_int"], (places.width, *extents), places.strides[0], (row_bytes(spec), spec.block_m))
    k = v = q  # without keys nothing is copied, but a map of zero rows cannot be made
    if problem.seqlen_k:
        k, v = key_maps(spec, problem, places, batch)
    forward = forward_values(
        problem, blocks, operands=(at["q_int"], at["k_int"], at["v"]), starts=places.starts
    )  # q, k, v and their strides are not used
    values = {"map_q": q, "map_k": k, "map_v": v, **tile_values(order.tiles), **member("fwd", forward)}
    values |= member("operands", _operands(spec, places))
    values |= {"reserved": 0, **member("scales", places.block_scales())}
    values["flush_keys"] = flush_keys(places)
    score_mods, factors = spec.score_mods, spec.value_factors
    if score_mods:
        values |= {"map_bias": bias_map(spec, problem, q), **member("mods", score_mod_values(problem, masks))}
    if factors:
        values |= member("factors", places.value_factors())
    layout = _LAYOUTS[score_mods, factors]
    if spec.quantizes_q and spec.qk == "fp8":
        values |= member("rotation", rotation_values(places.problem))
        layout = ATTN_FP8_RAW_SM90
    grid = (order.ctas, 1, 1)
    # Where it reads q as it comes, quantizers of k and v are ahead of it, and ahead of those what makes q has ended.
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *layout.pack(values), overlap=spec.quantizes_q),)


def _operands(spec: KernelSpec, places: OperandPlaces) -> dict[str, object]:
    """The fields of QuantizedOperands; a kernel that quantizes q multiplies it by K's mean, instead of reading that.

    To e4m3 there is no mean.
    """
    if not spec.quantizes_q:
        return places.values()
    return places.values() | {"row_bias": places.at.get("k_mean") if spec.qk == "int8" else None}


def _map(at: At, dims: tuple[int, int, int, int], strides: Strides3, box: tuple[int, int]) -> TensorMap:
    """Of bytes: (channels, rows, heads, batch), or rows and channels exchanged; strides (batch, row, head)."""
    batch, row, head = strides
    return mapped(*at, "uint8", dims, (row, head, batch), (*box, 1, 1))
