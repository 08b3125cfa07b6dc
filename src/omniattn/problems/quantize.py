"""What is quantized, and how: extents, formats, and the arrays that come of it. Formats: docs/quantization.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from .memory import ITEMSIZE, WORKSPACE_ALIGNMENT
from .outputs import Output

BLOCK_ROWS, CHUNK_ROWS, MAX_CHUNKS = 128, 256, 64
#: Means and ranges of a sequence come from one key of 2^`sample_log2`, of at least LEAST_SAMPLE keys.
LEAST_SAMPLE, MOST_SAMPLE_LOG2 = 256, 5
KEY_TILES = {"sm90": 128, "sm80": 64}
QUERY_SLICES = {"sm90": 16, "sm80": 32}
#: Groupings and formats of V of what int8 attention asks for by default.
SPECIALIZATIONS = (("sm90", "float8_e4m3"), ("sm80", "float16"), ("sm80", "float8_e4m3"))

_BITS = {"int8": 8, "int4": 4, "float8_e4m3": 8}
#: Of `Precision.qk`: what Q and K become.
QK_DTYPES = {"int8": "int8", "int4": "int4", "fp8": "float8_e4m3"}

Strides3 = tuple[int, int, int]


class UnitItems(NamedTuple):
    """Work items of a head of K and V and the heads of Q that read it.

    Attributes
    ----------
    sums, ranges : int
        That read chunks for means and ranges, and blocks for the range of whole tensors.
    queries, keys : int
        That quantize blocks of Q, and of K and V.
    ends : int
        Behind V.
    """

    sums: int
    ranges: int
    queries: int
    keys: int
    ends: int


@dataclass(frozen=True)
class QuantizeProblem:
    """What is quantized, and how; no pointers.

    Attributes
    ----------
    dtype : str
        Element type of the inputs.
    batch, rows_q, rows_k, heads_q, heads_kv, head_dim : int
        Extents; rows of the packed tensors when ``varlen``.
    varlen : bool
    qk_dtype : str
        ``"int8"``, ``"int4"`` or ``"float8_e4m3"``: what q and k become. e4m3 has one scale for each `BLOCK_ROWS` rows
        of q and k, in whatever grouping.
    granularity, grouping : str
    smooth_q, smooth_k, smooth_v : bool
    row_bias : str
        ``"none"``, ``"marks"`` (zeros, NaN for rows with NaN or infinity) or ``"full"`` (q . k_mean).
    qk, v : bool
        What there is to quantize.
    v_dtype : str
        ``"float8_e4m3"`` or ``"float16"``.
    unpacked : bool
        4-bit values one to a byte, for tensor cores that have no 4-bit products.
    v_levels : float
        What the largest magnitude of a channel of v becomes in e4m3.
    max_seqlen_k : int
        Of packed sequences: extent of ``delta_s``.
    least_pad : int
        Least `head_dim_pad`: where v has a head_dim of its own, q, k and v are padded alike.
    hadamard : bool
        Q and K are rotated, all `head_dim_pad` channels of them, before they are rounded.
    seed : int
        Of the rotation's signs.
    used : (bool, bool)
        Whether the call says how many rows of each packed sequence are used, of queries and of keys.
    given_mean : bool
        smooth_k takes away what the call says, in place of K's mean.
    """

    dtype: str
    batch: int
    rows_q: int
    rows_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    varlen: bool
    qk_dtype: str = "int8"
    granularity: str = "per_thread"
    grouping: str = "sm90"
    smooth_q: bool = False
    smooth_k: bool = True
    smooth_v: bool = False
    row_bias: str = "marks"
    qk: bool = True
    v: bool = True
    v_dtype: str = "float8_e4m3"
    max_seqlen_k: int = 0
    unpacked: bool = False
    v_levels: float = 448.0
    least_pad: int = 0
    hadamard: bool = False
    seed: int = 0
    used: tuple[bool, bool] = (False, False)
    given_mean: bool = False

    @property
    def sums_keys(self) -> bool:
        """Whether K's mean is made."""
        return self.qk and self.smooth_k and not self.given_mean

    @property
    def e4m3(self) -> bool:
        """Whether q and k become 8-bit floats."""
        return self.qk_dtype == "float8_e4m3"

    @property
    def of_values(self) -> QuantizeProblem:
        """What is left of it without q and k; of the same width."""
        return replace(
            self, qk=False, rows_q=0, heads_q=0, smooth_q=False, smooth_k=False, row_bias="none",
            least_pad=self.head_dim_pad,
        )  # fmt: skip

    @property
    def units(self) -> int:
        """Heads of K and V, of every sequence of a batch."""
        return self.heads_kv * (1 if self.varlen else self.batch)

    @property
    def unit_items(self) -> UnitItems:
        """Work items of one of `units` in the kernel for any knobs."""
        slots_k = self.slots(self.rows_k, BLOCK_ROWS)
        per_kv = self.heads_q // self.heads_kv if self.heads_kv else 0
        of_queries = per_kv * self.slots(self.rows_q, BLOCK_ROWS)
        return UnitItems(
            self.slots_r * (int(self.sums_keys) + int(self.v)),
            of_queries + slots_k if self.qk and self.granularity == "per_tensor" else 0,
            of_queries if self.qk else 0,
            slots_k * (int(self.qk) + int(self.v)),
            (self.batch if self.varlen else 1) if self.v else 0,
        )

    @property
    def num_items(self) -> int:
        """Of all units."""
        return self.units * sum(self.unit_items) if self.batch else 0  # rows without a sequence are nobody's

    @property
    def is_of_rows(self) -> bool:
        """Whether a kernel that knows no means can quantize Q and K, row by row: a batch in e4m3."""
        return self.e4m3 and self.qk and not (self.varlen or self.smooth_k) and self.granularity == "per_block"

    @property
    def has_values(self) -> bool:
        """Whether besides there is V, in e4m3 around its mean, and something of K and V."""
        rows = self.batch * self.heads_kv * self.rows_k
        return self.v and self.smooth_v and self.v_dtype == "float8_e4m3" and rows > 0

    @property
    def is_of_keys(self) -> bool:
        """Whether it is K and V alone, and something of both, by the defaults of int8 attention on Hopper."""
        as_batch = replace(self, varlen=False) if self.varlen else self
        return (
            self.rows_q == 0
            and as_batch.specialization == ("sm90", "float8_e4m3")
            and self.batch * self.heads_kv * self.rows_k > 0
        )

    @property
    def rotated(self) -> bool:
        """Whether rows are rotated, or become e4m3: quantizers of their own do that."""
        return self.qk and (self.hadamard or self.e4m3)

    @property
    def rotated_channels(self) -> int:
        """Channels that one Hadamard transform mixes: the largest power of two that divides `head_dim_pad`."""
        return self.head_dim_pad & -self.head_dim_pad

    @property
    def bits(self) -> int:
        """Bits of an element of q and k."""
        return _BITS[self.qk_dtype]

    @property
    def head_dim_pad(self) -> int:
        """head_dim rounded up to 32, `least_pad` at least."""
        return max(-(-self.head_dim // 32) * 32, self.least_pad)

    @property
    def stored_bits(self) -> int:
        """Bits of an element of q_int and k_int in memory."""
        return 8 if self.unpacked else self.bits

    @property
    def key_tile(self) -> int:
        """Keys of one tile of scales."""
        return BLOCK_ROWS if self.e4m3 else KEY_TILES[self.grouping]

    @property
    def specialization(self) -> tuple[str, str] | None:
        """One of `SPECIALIZATIONS` if it is what int8 attention asks for by default, which has its own kernels."""
        asked = (
            self.qk, self.v, self.smooth_k, self.smooth_v, self.smooth_q, self.varlen, self.stored_bits, self.qk_dtype
        )  # fmt: skip
        if asked != (True, True, True, True, False, False, 8, "int8") or self.row_bias == "full" or self.hadamard:
            return None
        formats = (self.grouping, self.v_dtype)
        return formats if self.granularity == "per_thread" and formats in SPECIALIZATIONS else None

    @property
    def scales_per_tile(self) -> tuple[int, int]:
        """Scales of a block of queries, and of a tile of keys."""
        if self.e4m3:
            return 1, 1
        if self.granularity == "per_token":
            return BLOCK_ROWS, self.key_tile
        return BLOCK_ROWS // QUERY_SLICES[self.grouping] * 8, 4

    def slots(self, rows: int, of: int) -> int:
        """Blocks of ``of`` rows of one head: of a sequence, or for packed ones a bound that holds for any lengths."""
        return -(-rows // of) + (self.batch if self.varlen else 0)

    @property
    def slots_r(self) -> int:
        """Chunks of keys of one head."""
        if self.varlen:
            return self.slots(self.rows_k, CHUNK_ROWS)
        return num_chunks(num_samples(self.rows_k))

    @property
    def delta_columns(self) -> int:
        """Extent of ``delta_s`` along the keys; of packed sequences one tile at least, so that it is never empty."""
        longest = max(self.max_seqlen_k, 1) if self.varlen else self.rows_k
        return -(-longest // self.key_tile) * self.key_tile

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that a call returns: those of `shapes`, and copies of cu_seqlens of packed sequences."""
        found = [Output(name, shape, dtype) for name, (shape, dtype) in self.shapes().items()]
        if self.varlen:
            names = ("cu_seqlens_q", "cu_seqlens_k") if self.qk else ("cu_seqlens_k",)
            found += [Output(name, (self.batch + 1,), "int32") for name in names]
        return tuple(found)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output that this problem has."""
        lead_q = (self.heads_q,) if self.varlen else (self.batch, self.heads_q)
        lead_k = (self.heads_kv,) if self.varlen else (self.batch, self.heads_kv)
        d, blocks = self.head_dim_pad, self.slots(self.rows_q, BLOCK_ROWS)
        tiles, values = self.slots(self.rows_k, self.key_tile), self.slots(self.rows_k, BLOCK_ROWS) * BLOCK_ROWS
        per_kv = (self.batch, self.heads_kv, d)
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        if self.qk:
            width = d if self.stored_bits == 8 else d // 2
            element = "int8" if self.stored_bits == 8 and not self.e4m3 else "uint8"
            q_slots, k_slots = self.scales_per_tile
            found["q_int"] = (*lead_q, self.rows_q, width), element
            found["k_int"] = (*lead_k, self.rows_k, width), element
            found["q_scale"] = (*lead_q, blocks * q_slots), "float32"
            found["k_scale"] = (*lead_k, tiles * k_slots), "float32"
            if self.row_bias != "none":
                found["row_bias"] = (*lead_q, self.rows_q), "float32"
            if self.sums_keys:
                found["k_mean"] = per_kv, "float32"
            if self.smooth_q:
                found["q_mean"] = (*lead_q, blocks, d), "float32"
                found["delta_s"] = (*lead_q, blocks, self.delta_columns), "float32"
        if self.v:
            if self.v_dtype == "float16":
                found["v"] = (*lead_k, self.rows_k, d), "float16"
            else:
                found["v"] = (*lead_k, d, values), "uint8"
            found["v_scale"] = found["v_mean"] = per_kv, "float32"
        return found


def row_bias_of(e4m3: bool, smooth_k: bool, absolute: bool) -> str:
    """`QuantizeProblem.row_bias`: e4m3 has a NaN, so that rows with NaN or infinity need no marks."""
    if e4m3:
        return "full" if smooth_k and absolute else "none"
    return "full" if absolute else "marks"


def operand_strides(problem: QuantizeProblem) -> tuple[Strides3, Strides3, Strides3]:
    """Strides (batch, row, head) of q_int, k_int and v in bytes; of e4m3 v a row is a channel."""
    shapes = problem.shapes()
    found: list[Strides3] = []
    for name in ("q_int", "k_int", "v"):
        shape, dtype = shapes[name]
        row = shape[-1] * ITEMSIZE[dtype]
        head = shape[-2] * row
        found.append((0 if problem.varlen else shape[-3] * head, row, head))
    return found[0], found[1], found[2]


def sample_log2(rows: int) -> int:
    """Means and ranges of a sequence of ``rows`` keys are those of one key of 2 to the power of this."""
    return 0 if rows < 2 * LEAST_SAMPLE else min((rows // LEAST_SAMPLE).bit_length() - 1, MOST_SAMPLE_LOG2)


def num_samples(rows: int) -> int:
    """Keys of a sequence of ``rows`` that means and ranges are taken of."""
    return rows >> sample_log2(rows)


def num_chunks(samples: int) -> int:
    """Partial sums of a sequence with that many sampled keys; one for an empty sequence."""
    return max(-(-samples // chunk_rows(samples)), 1)


def chunk_rows(samples: int) -> int:
    """Sampled keys of one partial sum: 256, more where that would be more than 64 of them."""
    return max(-(-samples // (CHUNK_ROWS * MAX_CHUNKS)), 1) * CHUNK_ROWS


def carve(shapes: dict[str, tuple[tuple[int, ...], str]]) -> tuple[dict[str, int], int]:
    """Offsets of arrays in one allocation, each at a multiple of 256 bytes, and the allocation's size."""
    offsets, end = {}, 0
    for name, (shape, dtype) in shapes.items():
        offsets[name] = end
        end += -(-math.prod(shape) * ITEMSIZE[dtype] // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return offsets, end


@dataclass(frozen=True, slots=True)
class QuantizeGrid:
    """How the work of the kernel for any knobs is ordered.

    Attributes
    ----------
    units : int
        Heads of K and V (`QuantizeProblem.units`) that are summed up before any of them is quantized.
    ctas_per_sm : int
        CTAs of an SM.
    """

    units: int
    ctas_per_sm: int


@dataclass(frozen=True)
class QuantizeCall:
    """One call of ``quantize_qk`` or ``quantize_v``, after validation.

    Attributes
    ----------
    problem : QuantizeProblem
    strides : (Strides3, Strides3, Strides3)
        Element strides (batch, seq, head) of q, k, v; 0 for an extent of 1 and for what is absent.
    layout : str
    max_seqlen_q : int
    """

    problem: QuantizeProblem
    strides: tuple[Strides3, Strides3, Strides3]
    layout: str
    max_seqlen_q: int

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call returns."""
        return self.problem.outputs
