"""What ``index_logits`` and ``top_k`` may be given."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import arguments, arrays
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError, StrideError
from ..plan.engine import Call
from ..problems import IndexLogitsProblem, TopKProblem
from ..registry.indexer import INDEX_DIM
from . import values
from .caches import check_int32

_LOGITS, _TOP_K = "index_logits", "top_k"
#: The caller's arrays, in the order of a call.
LOGITS_ARRAYS = ("q", "k", "weights", "k_scale", "seq_lens", "block_table", "k_start", "k_end", "out")
TOP_K_ARRAYS = ("logits", "lengths", "starts", "block_table", "out")
#: Those that kernels access 16 bytes at a time.
LOGITS_ALIGNED = frozenset({"q", "k"})
TOP_K_ALIGNED: frozenset[str] = frozenset()
#: Bytes: rows of logits that begin at multiples of them have no elements of others in front.
ROWS_ALIGNMENT = 16
#: Heads of a query at most.
MAX_INDEX_HEADS = 128
#: Bytes of a key and its scale in one array.
_FUSED = INDEX_DIM + 4


class LogitsOptions(NamedTuple):
    """Everything that is no array, as the caller gave it."""

    max_keys: Any


class TopKOptions(NamedTuple):
    """Everything that is no array, as the caller gave it."""

    k: Any
    next_n: Any
    block_size: Any


class _Keys(NamedTuple):
    """How keys and their scales lie; strides in bytes, as in `IndexLogitsProblem`."""

    blocks: int
    block_size: int
    strides: tuple[int, int]
    scale_strides: tuple[int, int]
    scale_offset: int


def check_index_logits(call: Call, tensors: dict[str, Tensor]) -> IndexLogitsProblem:
    """The problem of a call."""
    q, _k, weights = tensors["q"], tensors["k"], tensors["weights"]
    arrays.require_same_device([q, *(t for name, t in tensors.items() if name != "q")])
    if q.dtype != values.E4M3:
        raise DtypeError("q", values.E4M3, q.dtype, function=_LOGITS)
    paged = "seq_lens" in tensors
    names = "(batch, next_n, heads, 128), with seq_lens" if paged else "(rows, heads, 128), without seq_lens"
    if len(q.shape) != (4 if paged else 3) or q.shape[-1] != INDEX_DIM:
        raise ShapeError("q", names, f"shape {tuple(q.shape)}", function=_LOGITS)
    heads = q.shape[-2]
    if not 1 <= heads <= MAX_INDEX_HEADS:
        raise ShapeError("q", f"1 to {MAX_INDEX_HEADS} heads", f"{heads}", function=_LOGITS)
    if paged and q.shape[1] < 1:
        raise ShapeError("q", "next_n of 1 or more", f"{q.shape[1]}", function=_LOGITS)
    values.check_strides(q, _LOGITS)
    sequences, queries = (q.shape[0], q.shape[1]) if paged else (1, q.shape[0])
    rows = sequences * queries
    if rows > arguments.MAX_ROWS:
        raise ShapeError("q", f"at most {arguments.MAX_ROWS} rows", f"{rows}", function=_LOGITS)
    values.check_like(weights, (rows, heads), "float32", _LOGITS)
    if heads > 1 and rows and weights.strides[1] != 1:
        raise StrideError("weights", "stride 1 in the last dimension", f"{weights.strides[1]}", function=_LOGITS)
    keys = _check_paged(tensors, sequences) if paged else _check_contiguous(tensors, rows)
    table = tensors.get("block_table")
    capacity = keys.block_size if table is None else min(table.shape[1] * keys.block_size, arguments.MAX_ROWS)
    max_keys = _check_max_keys(call.options.max_keys, capacity, paged)
    out = tensors.get("out")
    logits_stride = max_keys
    if out is not None:
        values.check_like(out, (rows, max_keys), "float32", _LOGITS)
        logits_stride = _check_rows(out, _LOGITS, written=True)
    q_strides = tuple(q.strides[:-1]) if paged else (0, *q.strides[:-1])
    return IndexLogitsProblem(
        sequences, queries, heads, max_keys, keys.block_size, keys.blocks if paged else 0,
        0 if table is None else table.strides[0], (q_strides[0], q_strides[1], q_strides[2]), keys.strides,
        keys.scale_strides, keys.scale_offset, weights.strides[0], logits_stride,
        (paged, "k_start" in tensors, "k_end" in tensors),
    )  # fmt: skip


def _check_paged(tensors: dict[str, Tensor], sequences: int) -> _Keys:
    """Keys in the blocks of a cache."""
    k, scale = tensors["k"], tensors.get("k_scale")
    for name in ("k_start", "k_end"):
        if name in tensors:
            raise ArgumentError(name, "None with seq_lens", "an array", function=_LOGITS)
    check_int32(tensors["seq_lens"], (sequences,), f"({sequences},)", _LOGITS)
    if "block_table" not in tensors:
        expected = f"an int32 array of shape ({sequences}, max_blocks), with seq_lens"
        raise ArgumentError("block_table", expected, "None", function=_LOGITS)
    table = tensors["block_table"]
    if table.dtype != "int32":
        raise DtypeError("block_table", "int32", table.dtype, function=_LOGITS)
    if len(table.shape) != 2 or table.shape[0] != sequences or table.shape[1] < 1:
        expected = f"shape ({sequences}, max_blocks), max_blocks >= 1"
        raise ShapeError("block_table", expected, f"{tuple(table.shape)}", function=_LOGITS)
    _check_rows(table, _LOGITS)
    fused = scale is None
    row = _FUSED if fused else INDEX_DIM
    dtypes = ("uint8",) if fused else (values.E4M3,)
    if k.dtype not in dtypes:
        expected = "uint8, values and scales in one array, without k_scale" if fused else f"{values.E4M3}, with k_scale"
        raise DtypeError("k", expected, k.dtype, function=_LOGITS)
    shape = tuple(k.shape)
    if len(shape) == 4 and shape[2] == 1:
        shape, strides = (*shape[:2], shape[3]), (*k.strides[:2], k.strides[3])
    else:
        strides = tuple(k.strides)
    if len(shape) != 3 or shape[2] != row or shape[1] < 1 or shape[0] < 1:
        expected = (
            f"(blocks, block_size, 1, {row}) or (blocks, block_size, {row}), {'without' if fused else 'with'} k_scale"
        )
        raise ShapeError("k", expected, f"{tuple(k.shape)}", function=_LOGITS)
    blocks, size = shape[:2]
    if scale is None:
        # A block is size * 128 bytes of values and size * 4 of scales: its rows are no rows of the array.
        if strides[2] != 1 or (size > 1 and strides[1] != row) or (blocks > 1 and strides[0] % 4):
            expected = f"blocks of consecutive bytes at multiples of 4, strides (n, {row}, 1)"
            raise StrideError("k", expected, f"strides {tuple(k.strides)}", function=_LOGITS)
        step = strides[0] if blocks > 1 else 0
        return _Keys(blocks, size, (step, INDEX_DIM), (step, 4), size * INDEX_DIM)
    values.check_strides(k, _LOGITS)
    values.check_like(scale, (blocks, size), "float32", _LOGITS)
    steps = (strides[0] if blocks > 1 else 0, strides[1] if size > 1 else 0)
    return _Keys(blocks, size, steps, (4 * scale.strides[0], 4 * scale.strides[1]), -1)


def _check_contiguous(tensors: dict[str, Tensor], rows: int) -> _Keys:
    """Keys one behind the other, with ranges of them for each row."""
    k, scale = tensors["k"], tensors.get("k_scale")
    if "block_table" in tensors:
        raise ArgumentError("block_table", "None without seq_lens", "an array", function=_LOGITS)
    if scale is None:
        raise ArgumentError("k_scale", "a float32 array (keys,), without seq_lens", "None", function=_LOGITS)
    if k.dtype != values.E4M3:
        raise DtypeError("k", values.E4M3, k.dtype, function=_LOGITS)
    if len(k.shape) != 2 or k.shape[1] != INDEX_DIM:
        raise ShapeError("k", f"(keys, {INDEX_DIM}), without seq_lens", f"{tuple(k.shape)}", function=_LOGITS)
    if k.shape[0] > arguments.MAX_ROWS:
        raise ShapeError("k", f"at most {arguments.MAX_ROWS} keys", f"{k.shape[0]}", function=_LOGITS)
    values.check_strides(k, _LOGITS)
    values.check_like(scale, (k.shape[0],), "float32", _LOGITS)
    for name in ("k_start", "k_end"):
        if name in tensors:
            check_int32(tensors[name], (rows,), f"({rows},)", _LOGITS)
    return _Keys(1, k.shape[0], (0, k.strides[0] if k.shape[0] > 1 else 0), (0, 4 * scale.strides[0]), -1)


def _check_max_keys(given: Any, capacity: int, paged: bool) -> int:
    if given is None:
        return capacity
    if not paged:
        raise ArgumentError("max_keys", "None without seq_lens", repr(given), function=_LOGITS)
    return arguments.check_int(given, "max_keys", _LOGITS, most=capacity)


def _check_rows(t: Tensor, function: str, *, written: bool = False) -> int:
    """The elements between the rows of an array whose last dimension is contiguous."""
    if 0 in t.shape:
        return t.shape[1]
    if t.shape[1] > 1 and t.strides[1] != 1:
        raise StrideError(t.argument, "stride 1 in the last dimension", f"{t.strides[1]}", function=function)
    if written:
        values.check_no_overlap(t, function)
    return t.strides[0]


def check_top_k(call: Call, tensors: dict[str, Tensor]) -> TopKProblem:
    """The problem of a call."""
    options, logits = call.options, tensors["logits"]
    arrays.require_same_device([logits, *(t for name, t in tensors.items() if name != "logits")])
    if logits.dtype != "float32":
        raise DtypeError("logits", "float32", logits.dtype, function=_TOP_K)
    if len(logits.shape) != 2:
        raise ShapeError("logits", "(rows, elements)", f"shape {tuple(logits.shape)}", function=_TOP_K)
    rows, width = logits.shape
    for extent, what in ((rows, "rows"), (width, "elements")):
        if extent > arguments.MAX_ROWS:
            raise ShapeError("logits", f"at most {arguments.MAX_ROWS} {what}", f"{extent}", function=_TOP_K)
    k = arguments.check_int(options.k, "k", _TOP_K, least=1, most=arguments.MAX_ROWS)
    next_n = arguments.check_int(options.next_n, "next_n", _TOP_K, least=1, most=arguments.MAX_ROWS)
    if rows % next_n:
        raise ArgumentError("next_n", f"a divisor of the {rows} rows of logits", f"{next_n}", function=_TOP_K)
    if next_n > 1 and not {"lengths", "block_table"} & tensors.keys():
        raise ArgumentError("next_n", "1 without lengths and block_table", f"{next_n}", function=_TOP_K)
    sequences = rows // next_n
    if "lengths" in tensors:
        check_int32(tensors["lengths"], (sequences,), f"({sequences},)", _TOP_K)
    if "starts" in tensors:
        check_int32(tensors["starts"], (rows,), f"({rows},)", _TOP_K)
    table, block_size, table_stride = tensors.get("block_table"), 0, 0
    if table is not None:
        block_size = arguments.check_int(options.block_size, "block_size", _TOP_K, least=1, most=arguments.MAX_ROWS)
        if table.dtype != "int32":
            raise DtypeError("block_table", "int32", table.dtype, function=_TOP_K)
        least = -(-width // block_size)
        if len(table.shape) != 2 or table.shape[0] != sequences or table.shape[1] < least:
            expected = f"shape ({sequences}, blocks) with {least} blocks or more for {width} elements"
            raise ShapeError("block_table", expected, f"{tuple(table.shape)}", function=_TOP_K)
        table_stride = _check_rows(table, _TOP_K)
    elif options.block_size is not None:
        raise ArgumentError("block_size", "None without block_table", repr(options.block_size), function=_TOP_K)
    out, indices_stride = tensors.get("out"), k
    if out is not None:
        values.check_like(out, (rows, k), "int32", _TOP_K)
        indices_stride = _check_rows(out, _TOP_K, written=True)
    logits_stride = _check_rows(logits, _TOP_K)
    # Without an address (a call that is traced), allocators give aligned ones.
    offsets = (logits.ptr, logits.itemsize * logits_stride if rows > 1 else 0)
    return TopKProblem(
        rows, width, k, next_n, block_size, logits_stride, indices_stride, table_stride,
        all(offset % ROWS_ALIGNMENT == 0 for offset in offsets), ("starts" in tensors, "lengths" in tensors),
    )  # fmt: skip
