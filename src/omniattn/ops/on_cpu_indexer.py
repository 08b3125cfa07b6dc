"""``index_logits`` and ``top_k`` on CPU arrays, by the NumPy reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import arrays
from ..arrays import Tensor
from ..errors import ArgumentError
from ..plan.engine import Call, store_results
from ..problems import IndexLogitsProblem, TopKProblem
from ..registry.indexer import INDEX_DIM

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Tensors = dict[str, Tensor]


def index_logits(call: Call, problem: IndexLogitsProblem, tensors: Tensors) -> list[Any]:
    """``index_logits``."""
    import numpy as np

    from ..reference import indexer as reference
    from ..reference.e4m3 import decode_e4m3

    arrays.prepare([tensors["q"]], call.stream)  # refuses a stream
    p = problem
    q = decode_e4m3(arrays.e4m3_bytes(tensors["q"])).reshape(p.rows, p.num_heads, INDEX_DIM)
    weights = arrays.to_numpy(tensors["weights"])
    if "seq_lens" not in tensors:
        k, scale = decode_e4m3(arrays.e4m3_bytes(tensors["k"])), arrays.to_numpy(tensors["k_scale"])
        ranges = [_range(tensors, name, p) for name in ("k_start", "k_end")]
        return store_results(call, p, tensors, [reference.index_logits(q, k, weights, scale, *ranges)])
    out = np.full((p.rows, p.max_keys), -np.inf, dtype=np.float32)
    lengths, table = arrays.to_numpy(tensors["seq_lens"]), arrays.to_numpy(tensors["block_table"])
    codes, scales = _blocks(p, tensors)
    _check_blocks(p, lengths, table)
    for b, length in enumerate(lengths):
        if length <= 0:
            continue
        rows = slice(b * p.queries, (b + 1) * p.queries)
        used = table[b, : -(-int(length) // p.block_size)]
        k = decode_e4m3(codes[used].reshape(-1, INDEX_DIM)[:length])
        ends = length - p.queries + 1 + np.arange(p.queries)
        found = reference.index_logits(
            q[rows], k, weights[rows], scales[used].reshape(-1)[:length], np.zeros(p.queries, np.int64), ends
        )
        out[rows, :length] = found
    return store_results(call, p, tensors, [out])


def _range(tensors: Tensors, name: str, problem: IndexLogitsProblem) -> npt.NDArray[np.int64]:
    """k_start or k_end, checked; the whole of the keys where it is not given."""
    import numpy as np

    most = problem.max_keys
    if name not in tensors:
        return np.full(problem.rows, most if name == "k_end" else 0, np.int64)
    found = arrays.to_numpy(tensors[name]).astype(np.int64)
    bad = found[(found < 0) | (found > most)]
    if bad.size:
        raise ArgumentError(name, f"0 to {most}", f"{bad[0]}", function="index_logits")
    return found


def _blocks(problem: IndexLogitsProblem, tensors: Tensors) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Values (blocks, block_size, 128), as bytes, and scales (blocks, block_size) of a cache."""
    p = problem
    if p.scale_offset < 0:
        codes = arrays.e4m3_bytes(tensors["k"]).reshape(p.num_blocks, p.block_size, INDEX_DIM)
        return codes, arrays.to_numpy(tensors["k_scale"])
    raw = arrays.to_numpy(tensors["k"]).reshape(p.num_blocks, -1)
    values, scales = raw[:, : p.scale_offset], raw[:, p.scale_offset :]
    import numpy as np

    return values.reshape(p.num_blocks, p.block_size, INDEX_DIM), np.ascontiguousarray(scales).view(np.float32)


def _check_blocks(problem: IndexLogitsProblem, lengths: Any, table: Any) -> None:
    """Lengths and block numbers; on a GPU that would need a synchronization."""
    p = problem
    for b, length in enumerate(lengths):
        if not 0 <= length <= p.max_keys:
            raise ArgumentError("seq_lens", f"0 to {p.max_keys}", f"{length} at {b}", function="index_logits")
        used = table[b, : -(-int(length) // p.block_size)]
        bad = used[(used < 0) | (used >= p.num_blocks)]
        if bad.size:
            expected = f"blocks 0 to {p.num_blocks - 1}"
            raise ArgumentError("block_table", expected, f"{bad[0]} at sequence {b}", function="index_logits")


def top_k(call: Call, problem: TopKProblem, tensors: Tensors) -> list[Any]:
    """``top_k``."""
    import numpy as np

    from ..reference import indexer as reference

    arrays.prepare([tensors["logits"]], call.stream)  # refuses a stream
    p = problem
    starts = np.zeros(p.rows, np.int64)
    if "starts" in tensors:
        starts = arrays.to_numpy(tensors["starts"]).astype(np.int64)
        bad = starts[(starts < 0) | (starts > p.width)]
        if bad.size:
            raise ArgumentError("starts", f"0 to {p.width}", f"{bad[0]}", function="top_k")
    lengths = p.width - starts
    if "lengths" in tensors:
        given = arrays.to_numpy(tensors["lengths"]).astype(np.int64)
        if given.size and given.min() < 0:
            raise ArgumentError("lengths", "0 or more", f"{given.min()}", function="top_k")
        own = (given[:, None] - p.next_n + 1 + np.arange(p.next_n)).reshape(-1)
        if (bad := np.flatnonzero(own > lengths)).size:
            row = int(bad[0])
            expected = f"at most the {lengths[row]} elements of row {row}, from {starts[row]} on"
            raise ArgumentError("lengths", expected, f"{own[row]}", function="top_k")
        lengths = np.maximum(own, 0)
    found = reference.top_k(arrays.to_numpy(tensors["logits"]), p.k, starts, lengths)
    if p.block_size:
        table = np.repeat(arrays.to_numpy(tensors["block_table"]), p.next_n, axis=0)
        _check_rows(found, table, p.block_size)
        found = reference.pool_rows(found, table, p.block_size)
    return store_results(call, p, tensors, [found])


def _check_rows(positions: Any, table: Any, block_size: int) -> None:
    """Blocks of chosen positions; on a GPU that would need a synchronization."""
    import numpy as np

    row, column = np.nonzero(positions >= 0)
    if not row.size:
        return
    blocks = table[row, positions[row, column] // block_size].astype(np.int64)
    most = 2**31 // block_size - 1
    if (bad := np.flatnonzero((blocks < 0) | (blocks > most))).size:
        expected, received = f"blocks 0 to {most}, whose rows int32 can count", f"{blocks[bad[0]]} at row {row[bad[0]]}"
        raise ArgumentError("block_table", expected, received, function="top_k")
