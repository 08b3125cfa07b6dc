"""Launch of ``decode_sm80`` and ``decode_combine_sm80`` (arguments: ``kernels_cu/scheduler/decode_params.cuh``)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import runtime
from ..errors import UnsupportedError
from ..registry import KernelSpec, decode_combine_spec, decode_spec
from ..runtime import LoadedKernel
from .params import MAX_GRID_X, PARAMS, WORKSPACE_ALIGNMENT, quotient_factors

if TYPE_CHECKING:
    from ..decode import DecodeProblem
    from ..kv_format import KVFormat

# DecodeParams, little-endian, no padding.
_POINTERS = struct.Struct(
    "<16Q"  # q k v k_params v_params k_mean k_channel_scale seq_lens block_table
)  # recent_slots recent_state sinks o lse partials
_REST = struct.Struct(
    "<6q"  # strides of q and o: batch, seq, head
    "4i"  # batch, q_len, num_q_heads, num_kv_heads
    "3i"  # group, num_row_blocks, head_dim
    "4i"  # capacity, block_size, num_blocks, table_columns
    "3i"  # window_left, sinks_kind, hadamard
    "3i"  # granule_log2, whole_granules, num_workers
    "4i"  # recent_window, recent_ring, recent_num_slots, recent_side
    "2f"  # softmax_scale, softcap
    "iIiIi"  # combine_split, multipliers and shifts of block_size and num_workers
    "Ii"  # two_1024, first_key
)
_ARGUMENTS = struct.Struct(f"<16Q{_REST.size}s")
#: `RecentSide` of device code.
OLDER, NEWEST = 1, 2
_SINKS_KINDS = {"none": 0, "float32": 1, "io": 2}
#: `kAllSeePrefix` of device code.
ALL_SEE_PREFIX = -1
#: CTAs of the main kernel at most: the kernels compute with their square in 31 bits.
_MAX_WORKERS = 46340
#: Keys of the smallest part of a sequence that work is divided into; and with ``deterministic`` of every part.
GRANULE, WHOLE_GRANULE = 128, 512
_COMBINE_WARPS = 8
#: fp16 1024 twice; the kernels must not know it at compile time (kernels_cu/attention/kv_dequant.cuh).
_TWO_1024 = 0x64006400


def workers(most: int, segments: int, granules: int) -> int:
    """CTAs of the main kernel.

    As many as are on the GPU at a time, ``most``, or a few less where sequences of one length then end where CTAs end:
    each piece more that a CTA has costs it the time of filling its pipeline once more.
    """
    most = max(1, min(most, granules))
    if segments == 0 or granules <= most:
        return most
    aligned = segments * (most // segments) if segments <= most else -(-segments // -(-segments // most))
    return aligned if 10 * aligned >= 9 * most else most


def combine_split(deterministic: bool, num_workers: int, segments: int) -> int:
    """Warps of the second kernel that share a row: as many as ask for all partial results of a segment at once.

    Parameters
    ----------
    deterministic : bool
        One number for all batches then: the order of the sum depends on it.
    num_workers, segments : int
        About ``num_workers / segments`` partial results are a segment's.
    """
    if deterministic:
        return 4
    results = -(-num_workers // max(segments, 1))
    return next(split for split in (1, 2, 4, 8) if results <= 8 * split or split == 8)


@dataclass(frozen=True)
class Recent:
    """The part of a decode launch that computes one side of a cache with a recent window.

    Attributes
    ----------
    window, ring, slots : int
        Of the cache.
    side : int
        `OLDER`: the quantized tokens before the window. `NEWEST`: those of the window; the problem's blocks are slots.
    """

    window: int = 0
    ring: int = 0
    slots: int = 0
    side: int = 0


class DecodePlan:
    """Everything about a call but its pointers.

    Parameters
    ----------
    spec, combine_spec : KernelSpec
    kernel, combine : LoadedKernel or None
        None: the plan describes a call, it cannot run one.
    problem : DecodeProblem
    hadamard : bool
        Of the cache.
    q_strides, o_strides : (batch, seq, head, ...) in elements
    sm_count, max_smem : int
        Of the GPU.
    recent : Recent
    first_key : int
        Keys before it are another launch's. `ALL_SEE_PREFIX`: every query sees all keys of this one.
    """

    __slots__ = (
        "_cluster", "_combine_grid", "_grid", "_ml_offset", "_rest", "_threads", "combine", "kernel", "num_slots",
        "num_workers", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self,
        spec: KernelSpec,
        combine_spec: KernelSpec,
        kernel: LoadedKernel | None,
        combine: LoadedKernel | None,
        problem: DecodeProblem,
        hadamard: bool,
        q_strides: tuple[int, ...],
        o_strides: tuple[int, ...],
        sm_count: int,
        max_smem: int,
        recent: Recent = Recent(),
        first_key: int = 0,
    ) -> None:
        p = problem
        self.kernel, self.combine = kernel, combine
        rows = spec.block_m
        row_blocks = -(-p.group * p.q_len // rows)
        segments = p.batch * p.num_kv_heads * row_blocks
        granule = WHOLE_GRANULE if p.deterministic else GRANULE
        most_keys = min(p.capacity, recent.window) if recent.side == NEWEST else p.capacity
        granules = segments * -(-most_keys // granule)
        if granules >= 2**31 or segments > MAX_GRID_X:
            raise UnsupportedError(
                f"decode(): {p.batch} sequences of up to {p.capacity} tokens, {p.num_kv_heads} heads and {row_blocks} "
                f"blocks of query rows are more than the kernels count in 31 bits",
                instead="a smaller batch",
            )
        # As many CTAs as are on the GPU at a time: 1 KiB of each CTA's shared memory is the system's.
        at_a_time = min(int(dict(spec.defines)["MIN_CTAS"]), (max_smem + 1024) // (spec.smem_bytes + 1024))
        self.num_workers = workers(min(sm_count * max(at_a_time, 1), _MAX_WORKERS), segments, granules)
        self.num_slots = granules if p.deterministic else 2 * self.num_workers
        values = self.num_slots * rows
        self._ml_offset = -(-4 * values * spec.head_dim // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        self.workspace_bytes = max(self._ml_offset + 8 * values, 1)
        split = combine_split(p.deterministic, self.num_workers, segments)
        self._rest = _REST.pack(
            *(0 if n == 1 else s for n, s in zip((p.batch, p.q_len, p.num_q_heads), q_strides, strict=False)),
            *(0 if n == 1 else s for n, s in zip((p.batch, p.q_len, p.num_q_heads), o_strides, strict=False)),
            p.batch, p.q_len, p.num_q_heads, p.num_kv_heads, p.group, row_blocks, p.head_dim, p.capacity, p.block_size,
            p.num_blocks, p.table_columns, p.window_left, _SINKS_KINDS[p.sinks], int(hadamard),
            granule.bit_length() - 1, int(p.deterministic), self.num_workers,
            recent.window, recent.ring, recent.slots, recent.side,
            p.softmax_scale, p.softcap, split, *quotient_factors(p.block_size),
            *quotient_factors(self.num_workers), _TWO_1024, first_key,
        )  # fmt: skip
        self._threads = 32 * spec.num_warps
        self._cluster = combine.overlap if combine else None
        self._grid = (self.num_workers, 1, 1) if segments else (0, 1, 1)
        self._combine_grid = (segments, -(-min(rows, p.group * p.q_len) * split // _COMBINE_WARPS), 1)

    def launch(self, stream: int, pointers: tuple[int, ...]) -> None:
        """Queue both kernels on ``stream``; ``pointers`` in the order of `_POINTERS`, the workspace last."""
        if self._grid[0] == 0:
            return
        if self.kernel is None or self.combine is None:
            raise RuntimeError("a plan without loaded kernels describes a call, it cannot run one")
        _ARGUMENTS.pack_into(PARAMS.buffer, 0, *pointers, pointers[-1] + self._ml_offset, self._rest)
        self.kernel.launch(self._grid, self._threads, stream, PARAMS.address)
        self.combine.launch(self._combine_grid, 32 * _COMBINE_WARPS, stream, PARAMS.address, self._cluster)


def plan_decode(
    problem: DecodeProblem,
    formats: tuple[KVFormat, KVFormat],
    hadamard: bool,
    q_strides: tuple[int, ...],
    o_strides: tuple[int, ...],
    ordinal: int,
    recent: Recent = Recent(),
    first_key: int = 0,
) -> DecodePlan:
    """The plan for K and V of these formats on GPU ``ordinal``, with its kernels loaded."""
    device = runtime.device_info(ordinal)
    n_tiles = 1 if problem.group * problem.q_len <= 8 else 2
    spec = decode_spec(problem.dtype, *formats, n_tiles)
    combine = decode_combine_spec(problem.dtype, formats[0].row_dim, n_tiles)
    return DecodePlan(
        spec, combine, runtime.load(spec, ordinal), runtime.load(combine, ordinal), problem, hadamard, q_strides,
        o_strides, device.sm_count, device.max_smem_optin, recent, first_key,
    )  # fmt: skip
