"""Launch of the quantizers: outputs, workspace, arguments (``kernels_cu/attention/quantize_params.cuh``).

The byte-exact formats are in docs/quantization.md.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass

from ..registry import KernelSpec
from ..runtime import LoadedKernel
from .params import PARAMS, WORKSPACE_ALIGNMENT

BLOCK_ROWS, CHUNK_ROWS, MAX_CHUNKS = 128, 256, 64
#: Means and ranges of a sequence come from one key of 2^`sample_log2`, of at least LEAST_SAMPLE keys.
LEAST_SAMPLE, MOST_SAMPLE_LOG2 = 256, 5
KEY_TILES = {"sm90": 128, "sm80": 64}
QUERY_SLICES = {"sm90": 16, "sm80": 32}
#: In the order of `Granularity` in the device code.
GRANULARITIES = ("per_tensor", "per_block", "per_warp", "per_thread", "per_token")
#: Groupings and formats of V that have a kernel of their own; the index is the kernel's COMMON. First: the kernel for
#: anything.
COMMON = (None, ("sm90", "float8_e4m3"), ("sm80", "float16"), ("sm80", "float8_e4m3"))

_SMOOTH_Q, _SMOOTH_K, _SMOOTH_V, _FULL_BIAS, _HAS_QK, _HAS_V, _HALF_V = (1 << i for i in range(7))

#: Bytes of K and V of the heads that are summed up before any of them is quantized: all, or a part of the L2 cache
#: where the whole of them is read twice (short sequences, per_tensor), because Q and the outputs pass through it in
#: between.
GROUP_BYTES, CACHED_GROUP_BYTES = 1 << 62, 16 << 20
_MAX_GRID = 1 << 20
_ITEM_BYTES = 48

# The fields of QuantizeParams in order, little-endian, no padding.
_POINTERS = struct.Struct("<29Q")
_REST = struct.Struct("<9q 29i f")

Strides3 = tuple[int, int, int]

#: Outputs in the order of their pointers in QuantizeParams.
OUTPUTS = ("q_int", "k_int", "q_scale", "k_scale", "row_bias", "q_mean", "k_mean", "v", "v_scale", "v_mean")


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
    bits : int
        8 or 4.
    granularity, grouping : str
    smooth_q, smooth_k, smooth_v : bool
    row_bias : str
        ``"none"``, ``"marks"`` (zeros, NaN for rows with NaN or infinity) or ``"full"`` (q . k_mean).
    qk, v : bool
        What there is to quantize.
    v_dtype : str
        ``"float8_e4m3"`` or ``"float16"``.
    wide : bool
        4-bit values one to a byte, for tensor cores that have no 4-bit products.
    v_levels : float
        What the largest magnitude of a channel of v becomes in e4m3.
    max_seqlen_k : int
        Of packed sequences: extent of ``delta_s``.
    """

    dtype: str
    batch: int
    rows_q: int
    rows_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    varlen: bool
    bits: int = 8
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
    wide: bool = False
    v_levels: float = 448.0

    @property
    def head_dim_pad(self) -> int:
        """head_dim rounded up to 32."""
        return -(-self.head_dim // 32) * 32

    @property
    def stored_bits(self) -> int:
        """Bits of an element of q_int and k_int in memory."""
        return 8 if self.wide else self.bits

    @property
    def key_tile(self) -> int:
        """Keys of one tile of scales."""
        return KEY_TILES[self.grouping]

    @property
    def common(self) -> int:
        """Index in `COMMON` if it is what int8 attention asks for by default, which has its own kernels; else 0."""
        asked = (self.qk, self.v, self.smooth_k, self.smooth_v, self.smooth_q, self.varlen, self.stored_bits, self.bits)
        if asked != (True, True, True, True, False, False, 8, 8) or self.row_bias == "full":
            return 0
        formats = (self.grouping, self.v_dtype)
        return COMMON.index(formats) if self.granularity == "per_thread" and formats in COMMON else 0

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

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output that this problem has."""
        lead_q = (self.heads_q,) if self.varlen else (self.batch, self.heads_q)
        lead_k = (self.heads_kv,) if self.varlen else (self.batch, self.heads_kv)
        d, blocks = self.head_dim_pad, self.slots(self.rows_q, BLOCK_ROWS)
        tiles, values = self.slots(self.rows_k, self.key_tile), self.slots(self.rows_k, BLOCK_ROWS) * BLOCK_ROWS
        per_kv = (self.batch, self.heads_kv, d)
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        if self.qk:
            element, width = ("int8", d) if self.stored_bits == 8 else ("uint8", d // 2)
            per_token = self.granularity == "per_token"
            q_slots = BLOCK_ROWS if per_token else BLOCK_ROWS // QUERY_SLICES[self.grouping] * 8
            found["q_int"] = (*lead_q, self.rows_q, width), element
            found["k_int"] = (*lead_k, self.rows_k, width), element
            found["q_scale"] = (*lead_q, blocks * q_slots), "float32"
            found["k_scale"] = (*lead_k, tiles * (self.key_tile if per_token else 4)), "float32"
            if self.row_bias != "none":
                found["row_bias"] = (*lead_q, self.rows_q), "float32"
            if self.smooth_k:
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
    sizes = {"int8": 1, "uint8": 1, "float16": 2, "float32": 4}
    offsets, end = {}, 0
    for name, (shape, dtype) in shapes.items():
        offsets[name] = end
        end += -(-math.prod(shape) * sizes[dtype] // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return offsets, end


class QuantizePlan:
    """Everything about a call but its pointers.

    Parameters
    ----------
    spec, delta_spec : KernelSpec
        Rows of the operations ``"quantize"`` and ``"quantize_delta"``; the second is used with ``smooth_q`` only.
    kernel, delta_kernel : LoadedKernel or None
        The loaded kernels.
    problem : QuantizeProblem
    strides : (Strides3, Strides3, Strides3)
        Element strides (batch, seq, head) of q, k, v; 0 for an extent of 1 and for what is absent.
    sm_count : int
    group_bytes : int
        See `GROUP_BYTES`.
    """

    __slots__ = (
        "_clear", "_cluster", "_delta", "_delta_grid", "_errors", "_grid", "_items", "_rest", "_table", "_threads",
        "_words", "counters_bytes", "delta_kernel", "kernel", "problem", "spec", "starts_bytes", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self,
        spec: KernelSpec,
        kernel: LoadedKernel | None,
        delta_kernel: LoadedKernel | None,
        problem: QuantizeProblem,
        strides: tuple[Strides3, Strides3, Strides3],
        sm_count: int,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        p = self.problem = problem
        self.spec = spec
        self.kernel, self.delta_kernel = kernel, delta_kernel
        self._threads = 32 * spec.num_warps
        self._cluster = kernel.overlap if kernel else None
        units = p.heads_kv * (1 if p.varlen else p.batch)
        per_kv = p.heads_q // p.heads_kv if p.heads_kv else 0
        slots_q, slots_k = p.slots(p.rows_q, BLOCK_ROWS), p.slots(p.rows_k, BLOCK_ROWS)
        per_r = p.slots_r * (int(p.qk and p.smooth_k) + int(p.v))
        per_a = per_kv * slots_q + slots_k if p.qk and p.granularity == "per_tensor" else 0
        per_q = per_kv * slots_q if p.qk else 0
        per_pass = slots_k * (int(p.qk) + int(p.v))
        unit_bytes = max(2 * p.rows_k * p.head_dim * (int(p.qk) + int(p.v)), 1)
        usual_rows = p.rows_k // max(p.batch, 1) if p.varlen else p.rows_k
        most_bytes = min(group_bytes, CACHED_GROUP_BYTES) if per_a or sample_log2(usual_rows) == 0 else group_bytes
        per_group = max(1, min(most_bytes // unit_bytes, units))
        groups = -(-units // per_group)
        last = units - (groups - 1) * per_group
        per_end = (p.batch if p.varlen else 1) if p.v else 0
        rest = per_a + per_q + per_pass + per_end
        last_base = (groups - 2) * per_group * (per_r + rest) + last * per_r + per_group * rest if groups > 1 else 0
        self._items = units * (per_r + rest) if p.batch else 0  # rows without a sequence are nobody's
        if self._items >= 2**31 - 2**24:
            raise ValueError(f"{self._items} blocks to quantize: more than any memory holds")
        flags = (
            (_SMOOTH_Q if p.smooth_q else 0)
            | (_SMOOTH_K if p.smooth_k and p.qk else 0)
            | (_SMOOTH_V if p.smooth_v else 0)
            | (_FULL_BIAS if p.row_bias == "full" and p.smooth_k else 0)
            | (_HAS_QK if p.qk else 0)
            | (_HAS_V if p.v else 0)
            | (_HALF_V if p.v_dtype == "float16" else 0)
        )
        # Words that are zeroed: the ticket, four kinds for each kv head, for per_tensor two more of each head, and the
        # errors of V, two words a channel, at an even one.
        kv, qs = p.batch * p.heads_kv, p.batch * p.heads_q
        counts = [kv, kv, kv, kv, *((kv, kv, qs, qs) if per_a else (0, 0, 0, 0))]
        self._words = tuple(itertools.accumulate(counts[:-1], initial=1))
        self._errors = -(-(1 + sum(counts)) // 2) * 2
        corrected = p.v and p.smooth_v and p.v_dtype != "float16"
        clear = -(-(self._errors + (2 * kv * p.head_dim_pad if corrected else 0)) // 4)  # of 16 bytes
        tile = spec.head_dim

        def pack(clear_vectors: int) -> bytes:
            return _REST.pack(
                *strides[0], *strides[1], *strides[2],
                p.batch, p.heads_q, p.heads_kv, p.rows_q, p.rows_k, p.head_dim, p.head_dim_pad,
                slots_q, slots_k, p.slots_r, p.key_tile, p.slots(p.rows_k, p.key_tile), p.stored_bits,
                QUERY_SLICES[p.grouping], GRANULARITIES.index(p.granularity), flags, int(p.varlen),
                units, per_group, groups, per_r, per_a, per_q, per_pass, last_base, self._items, clear_vectors,
                p.delta_columns, 127 if p.bits == 8 else 7, p.v_levels,
            )  # fmt: skip

        self._rest, self._clear = pack(0), pack(clear)
        self.counters_bytes = -(-16 * clear // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        #: Of each copy of cu_seqlens, behind the counters.
        self.starts_bytes = -(-4 * (p.batch + 1) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT if p.varlen else 0
        #: Partial sums, behind the copies.
        self._table = self.counters_bytes + 2 * self.starts_bytes + 16 * units * p.slots_r * tile
        # Items decoded ahead of time, behind the partial sums: of the kernels for common problems.
        table_bytes = _ITEM_BYTES * self._items if "common" in spec.features else 0
        self.workspace_bytes = self._table + table_bytes
        self._grid = (
            (min(self._items, sm_count * int(dict(spec.defines)["CTAS"])), 1, 1),
            (min(-(-max(clear, self._items if table_bytes else 0) // self._threads), _MAX_GRID), 1, 1),
        )
        self._delta_grid = (units * p.slots(p.rows_k, p.key_tile), 1, 1)
        self._delta = p.smooth_q and p.qk and p.rows_q > 0 and self._delta_grid[0] > 0

    def starts(self, workspace: int) -> tuple[int, int]:
        """Addresses of the copies of cu_seqlens_q and cu_seqlens_k that `launch` makes: clamped, never decreasing."""
        if not self.starts_bytes:
            return 0, 0
        return workspace + self.counters_bytes, workspace + self.counters_bytes + self.starts_bytes

    @property
    def num_launches(self) -> int:
        """Kernels of a call."""
        return 0 if self._items == 0 else 3 if self._delta else 2

    def launch(
        self,
        stream: int,
        inputs: tuple[int, int, int, int, int],
        outputs: dict[str, int],
        workspace: int,
        copies: tuple[int, int] | None = None,
    ) -> None:
        """Queue everything on ``stream``.

        Parameters
        ----------
        stream : int
        inputs : tuple of int
            Addresses of q, k, v, cu_seqlens_q, cu_seqlens_k; 0 for what is absent.
        outputs : dict
            Addresses by the names of `QuantizeProblem.shapes`.
        workspace : int
            Address of `workspace_bytes` bytes, at a multiple of 256.
        copies : tuple of int, optional
            Where copies of cu_seqlens_q and cu_seqlens_k go, as `starts` describes them; there unless given. They are
            made even if there is nothing to quantize.
        """
        if self._items == 0 and not (copies and any(copies)):
            return
        kernel = self.kernel
        if kernel is None:
            raise RuntimeError("a plan without a loaded kernel describes a call, it cannot run one")
        get = outputs.get
        if copies is None:
            copies = self.starts(workspace)
        starts = tuple(copy if given else 0 for copy, given in zip(copies, inputs[3:], strict=True))
        rest = (
            *(get(name, 0) for name in OUTPUTS),
            workspace + self.counters_bytes + 2 * self.starts_bytes,
            workspace + 4 * self._errors,
            workspace,
            *(workspace + 4 * at for at in self._words),
            *starts,
            workspace + self._table,
        )
        grid, clear_grid = self._grid
        pointers = _POINTERS.pack(*inputs[:3], *starts, *rest)
        given = pointers if inputs[3:] == starts else _POINTERS.pack(*inputs, *rest)
        kernel.launch(clear_grid, self._threads, stream, PARAMS.write(given + self._clear))
        if self._items == 0:
            return
        kernel.launch(grid, self._threads, stream, PARAMS.write(pointers + self._rest), self._cluster)
        if self._delta:
            delta = self.delta_kernel
            if delta is None:
                raise RuntimeError("smooth_q needs the kernel of delta_s")
            data = pointers + self._rest + struct.pack("<Q", outputs["delta_s"])
            delta.launch(self._delta_grid, 128, stream, PARAMS.write(data))
