"""Launch of ``kv_append_sm80`` (arguments: ``kernels_cu/scheduler/kv_append_params.cuh``) and ``kv_copy_sm80``."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from .. import runtime
from ..errors import DtypeError, UnsupportedError
from ..kv_format import KV_ARRAY_DTYPES
from ..registry import append_spec, by_name
from .params import MAX_GRID_X, PARAMS, quotient_factors

if TYPE_CHECKING:
    from ..append import AppendProblem
    from ..cache import KVCache, PagedKVCache
    from ..runtime import LoadedKernel

_REST = struct.Struct(
    "<6q"  # strides of k and v: batch, seq, head
    "q"  # rows
    "4i"  # batch, tokens, num_kv_heads, head_dim
    "4i"  # capacity, block_size, num_blocks, table_columns
    "3i"  # rope, rope_pairs, rope_rows
    "4i"  # hadamard, zero_point, recent_ring, recent_num_slots
    "IiIiIii"  # multipliers and shifts of num_kv_heads, tokens and block_size, reserved
)
# k v seq_lens cu_seqlens block_table cos sin | planes k v k_params v_params | k_mean k_channel_scale
# | recent: slots k v state
_ARGUMENTS = struct.Struct(f"<17Q{_REST.size}s")
_ROPE = {"none": 0, "half": 1, "interleaved": 2}
_THREADS, _COPY_THREADS = 128, 256
#: Pairs of blocks that one launch copies.
MAX_PAIRS = 112
_COPY = struct.Struct(f"<4Q4q{2 * MAX_PAIRS}i")


class AppendPlan:
    """Everything about a call but its pointers."""

    __slots__ = ("_grid", "_rest", "kernel")

    def __init__(
        self,
        kernel: LoadedKernel | None,
        problem: AppendProblem,
        cache: KVCache,
        k_strides: tuple[int, ...],
        v_strides: tuple[int, ...],
    ) -> None:
        p = problem
        self.kernel = kernel
        # A thread has 16 channels of a token and head, a CTA tokens of one head.
        blocks = -(-p.rows * (cache.k_format.row_dim // 16) // _THREADS) * p.num_kv_heads
        if blocks > MAX_GRID_X:
            received = f"{p.rows} tokens of {p.num_kv_heads} heads"
            raise UnsupportedError(f"append(): {received} are more than one launch takes", instead="several calls")

        def three(strides: tuple[int, ...]) -> tuple[int, int, int]:
            return (0, strides[0], strides[1]) if len(strides) == 3 else (strides[0], strides[1], strides[2])

        self._grid = (blocks, 1, 1)
        self._rest = _REST.pack(
            *three(k_strides), *three(v_strides), p.rows, p.batch, p.tokens, p.num_kv_heads, p.head_dim, p.capacity,
            p.block_size, p.num_blocks, p.table_columns, _ROPE[p.rope], p.rope_pairs, p.rope_rows, int(cache.hadamard),
            int(cache.k_format.zero_point or cache.v_format.zero_point), cache.recent_ring, cache.recent_slots,
            *(f for n in (p.num_kv_heads, p.tokens, p.block_size) for f in quotient_factors(max(n, 1))), 0,
        )  # fmt: skip

    def launch(self, stream: int, pointers: tuple[int, ...]) -> None:
        """Queue the kernel on ``stream``; ``pointers`` in the order of `_ARGUMENTS`, 0 for what is absent."""
        if self._grid[0] == 0:
            return
        if self.kernel is None:
            raise RuntimeError("a plan without a loaded kernel describes a call, it cannot run one")
        _ARGUMENTS.pack_into(PARAMS.buffer, 0, *pointers, self._rest)
        self.kernel.launch(self._grid, _THREADS, stream, PARAMS.address)


def plan_append(
    problem: AppendProblem, cache: KVCache, k_strides: tuple[int, ...], v_strides: tuple[int, ...], ordinal: int
) -> AppendPlan:
    """The plan for GPU ``ordinal``, with its kernel loaded."""
    for fmt in (cache.k_format, cache.v_format, cache.recent_format):
        if fmt is not None and not fmt.quantized and KV_ARRAY_DTYPES[fmt.dtype] != problem.dtype:
            raise DtypeError("k", f"{KV_ARRAY_DTYPES[fmt.dtype]}, like the cache", problem.dtype, function="append")
    spec = append_spec(problem.dtype, cache.k_format, cache.v_format)
    return AppendPlan(runtime.load(spec, ordinal), problem, cache, k_strides, v_strides)


def launch_copies(cache: PagedKVCache, pairs: list[tuple[int, int]], stream: int) -> None:
    """Queue copies of blocks on ``stream``."""
    rows = cache.num_kv_heads * cache.block_size
    formats = (cache.k_format, cache.v_format)
    sizes = [*(rows * f.row_bytes for f in formats), *(rows * 4 * f.plane_words for f in formats)]
    _launch_copies(cache, [cache.address(name) for name in ("k", "v", "k_params", "v_params")], sizes, pairs, stream)


def launch_recent_copies(cache: KVCache, pairs: list[tuple[int, int]], stream: int) -> None:
    """Queue copies of slots of the recent window on ``stream``."""
    assert cache.recent_format is not None
    ring = cache.num_kv_heads * cache.recent_ring * cache.recent_format.row_bytes
    addresses = [cache.address(name) for name in ("recent_k", "recent_v", "recent_state")]
    _launch_copies(cache, [*addresses, 0], [ring, ring, 8, 0], pairs, stream)


def _launch_copies(
    cache: KVCache, addresses: list[int], sizes: list[int], pairs: list[tuple[int, int]], stream: int
) -> None:
    kernel = runtime.load(by_name("kv_copy_sm80"), cache.tensors[0].ordinal)
    parts = max(1, min(32, max(sizes) // (16 * _COPY_THREADS)))
    for first in range(0, len(pairs), MAX_PAIRS):
        some = pairs[first : first + MAX_PAIRS]
        flat = [x for pair in some for x in pair]
        data = _COPY.pack(*addresses, *sizes, *flat, *[0] * (2 * MAX_PAIRS - len(flat)))
        kernel.launch((len(some), 4, parts), _COPY_THREADS, stream, PARAMS.write(data))
