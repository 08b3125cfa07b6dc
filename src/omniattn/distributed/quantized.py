"""K and V of a ring in 8 bits: each rank quantizes its own once, and what travels are operands of `attention`.

A mean of K over all ranks is taken away before: the same vector from every key changes no softmax, and all LSEs of a
row by one number, q . mean, which is added back at the end. So partial results can be merged as they are, and no rank
needs the means of another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CommunicationError
from ..ops.attention import attention_beside
from ..ops.quantize import MEAN_IS_READY, quantize_around, quantize_qk, quantize_v
from ..problems import Precision, QuantizedQK, QuantizedV, QuantizeProblem
from ..problems.quantize import BLOCK_ROWS, QK_DTYPES, sample_log2
from .exchange import Group
from .schedule import Range, Ring, Step, Task, length_of
from .steps import Common, rows_of
from .wires import product_of

#: Small arrays of a range of rows: they travel as bytes of one message behind those of k_int and of v, in this order,
#: in which each begins at a multiple of 16 bytes.
SMALL = ("v_scale", "v_mean", "k_scale")
#: Messages of a range.
MESSAGES = 3


@dataclasses.dataclass(frozen=True)
class Format:
    """What a GPU reads: of every rank the same, because operands travel between them.

    Attributes
    ----------
    grouping : str
    v_dtype, pv_accumulator : str
        As `quantize_v` takes them.
    """

    grouping: str
    v_dtype: str
    pv_accumulator: str


def format_of(precision: Precision, device: Any) -> Format:
    """That of the ranks' GPUs, by their compute capability; of the CPU that of Hopper."""
    cc = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    pv, accumulator = product_of(precision, cc)
    grouping = "sm90" if cc == (9, 0) or precision.qk == "fp8" else "sm80"
    return Format(grouping, "float8_e4m3" if pv == "fp8" else "float16", accumulator)


def mean_of_keys(group: Group, k: Any, ring: Ring, function: str) -> Any:
    """K's mean over keys of all ranks, (batch, num_kv_heads, head_dim) in float32.

    Of every so-many-th key of each rank, as `quantize_qk` takes of a sequence of that length; the same on all ranks.
    """
    each = 1 << sample_log2(ring.seqlen_k // group.size)
    lengths = (length_of(ring.seqlen_k, group.size, rank, ring.schedule) for rank in range(group.size))
    count = sum(-(-rows // each) for rows in lengths)
    total = k[:, ::each].sum(1, dtype=torch.float32)
    try:
        dist.all_reduce(total, group=group.handle)
    except RuntimeError as error:
        raise CommunicationError(
            f"{function}(): the all-reduce of K's mean failed ({error})",
            "see whether another rank raised before, or was called with other arguments",
        ) from error
    return total / max(count, 1)


def bias_of(q: Any, mean: Any, softmax_scale: float) -> Any:
    """What the mean adds to the scores of each query, (batch, num_q_heads, rows) in float32."""
    batch, rows, heads, channels = q.shape
    groups = q.reshape(batch, rows, mean.shape[1], heads // max(mean.shape[1], 1), channels).to(torch.float32)
    found = torch.einsum("bshgd,bhd->bhgs", groups, mean)
    return found.reshape(batch, heads, rows) * softmax_scale


class Quantized:
    """`Wire` of operands. Groups of scales begin where a chunk begins.

    Parameters
    ----------
    group : Group
    ring : Ring
        Whose chunks unite where `unites` says that they can.
    q, k, v : tensor, (batch, seq, heads, head_dim)
    precision : Precision
    common : Common
    """

    def __init__(self, group: Group, ring: Ring, q: Any, k: Any, v: Any, precision: Precision, common: Common) -> None:
        self.common = common
        self.mean: Any = None
        if precision.smooth_k:
            self.mean = mean_of_keys(group, k, ring, common.function)
        target = format_of(precision, q.device)
        # By the rows of the rank's part that were quantized together, and by those that a task reads of them.
        self.queries: dict[Range, QuantizedQK] = {}
        self.keys: dict[Range, Keys] = {}
        self.messages: dict[Range, list[Any]] = {}
        parts_q, parts_k = [(0, q.shape[1])], [(0, k.shape[1])]
        if not ring.unite:
            parts_q, parts_k = (_local(chunks) for chunks in (ring.chunks_q(group.rank), ring.chunks_k(group.rank)))
        for of_q, of_k in zip(parts_q, parts_k, strict=True):
            pair = _quantize(rows_of(q, of_q), rows_of(k, of_k), self.mean, precision, target.grouping)
            values = quantize_v(
                rows_of(v, of_k),
                dtype=target.v_dtype,
                smooth_v=precision.smooth_v,
                pv_accumulator=target.pv_accumulator,
            )
            self.problems = pair.problem, values.problem
            self.queries[of_q] = pair
            self.keys[of_k] = Keys(pair.k_int, pair.k_scale, values.v, values.v_scale, values.v_mean)
        self.like = q

    def own(self, step: Step) -> list[Any]:
        """Of the ranges that the step reads."""
        return [x for rows in step.ranges for x in self._messages_of(rows)]

    def sent(self, step: Step) -> list[Any]:
        """The same: operands are contiguous."""
        return self.own(step)

    def buffers(self, step: Step) -> list[Any]:
        """For the ranges of another rank, whose lengths the ring says."""
        found = []
        for rows in step.ranges:
            shapes = _shapes_of(*self._of(rows))
            found += [
                torch.empty(shape, dtype=dtype, device=self.like.device)
                for shape, dtype in (shapes["k_int"], shapes["v"], ((_bytes_of(shapes),), torch.uint8))
            ]
        return found

    def _of(self, rows: Range) -> tuple[QuantizeProblem, QuantizeProblem]:
        """The problems of K and V of so many rows."""
        number = rows[1] - rows[0]
        return _with_rows(self.problems[0], 0, number), _with_rows(self.problems[1], 0, number)

    def _messages_of(self, rows: Range) -> list[Any]:
        """Of this rank's keys: the same for every step that reads these rows."""
        if rows not in self.messages:
            part = _that_holds(rows, self.keys)
            keys = self.keys[part]
            if rows != part:
                keys = keys.cut(_within(rows, part), *self.problems)
            self.messages[rows] = keys.messages()
        return self.messages[rows]

    def _queries_of(self, rows: Range) -> QuantizedQK:
        part = _that_holds(rows, self.queries)
        if rows not in self.queries:
            self.queries[rows] = _cut_queries(self.queries[part], _within(rows, part))
        return self.queries[rows]

    def attend(self, part: list[Any], step: Step, task: Task, sinks: Any, is_shared: bool) -> tuple[Any, Any]:
        """Attention of one rectangle."""
        at = step.ranges.index(task.k) * MESSAGES
        of_k, of_v = self._of(task.k)
        found = Keys.of_messages(part[at : at + MESSAGES], _shapes_of(of_k, of_v))
        keys = QuantizedQK(None, found.k_int, None, found.k_scale, None, None, None, None, None, None, of_k, "NHD")
        values = QuantizedV(found.v, found.v_scale, found.v_mean, None, of_v, "NHD")
        options = self.common.options(task)
        queries = self._queries_of(task.q).q
        return attention_beside(queries, keys.k, values, is_shared=is_shared, sinks=None, **options)


@dataclasses.dataclass(frozen=True)
class Keys:
    """K and V of a range of rows."""

    k_int: Any
    k_scale: Any
    v: Any
    v_scale: Any
    v_mean: Any

    def messages(self) -> list[Any]:
        """As they travel."""
        small = [getattr(self, name).contiguous().view(-1).view(torch.uint8) for name in SMALL]
        return [self.k_int, self.v, torch.cat(small)]

    @classmethod
    def of_messages(cls, messages: list[Any], shapes: dict[str, tuple[tuple[int, ...], Any]]) -> Keys:
        """What has arrived; shapes and dtypes by name."""
        k_int, v, together = messages
        parts = together.split([_size_of(*shapes[name]) for name in SMALL])
        small = {name: x.view(shapes[name][1]).view(shapes[name][0]) for name, x in zip(SMALL, parts, strict=True)}
        return cls(k_int=k_int, v=v, **small)

    def cut(self, rows: Range, of_k: QuantizeProblem, of_v: QuantizeProblem) -> Keys:
        """Rows, which begin where a group of scales begins; problems of whatever length."""
        begin, end = rows
        scales = _groups(rows, of_k.key_tile, of_k.scales_per_tile[1])
        if of_v.v_dtype == "float16":
            v = self.v[:, :, begin:end]
        else:
            v = self.v[..., begin : begin + -(-(end - begin) // BLOCK_ROWS) * BLOCK_ROWS]
        k_int, k_scale = self.k_int[:, :, begin:end], self.k_scale[..., scales[0] : scales[1]]
        return Keys(_copy(k_int), _copy(k_scale), _copy(v), self.v_scale, self.v_mean)


def _quantize(q: Any, k: Any, mean: Any, precision: Precision, grouping: str) -> QuantizedQK:
    """Q and K; of K what is left without the mean, if there is one."""
    said: dict[str, Any] = {
        "dtype": QK_DTYPES[precision.qk], "granularity": precision.granularity, "grouping": grouping,
        "hadamard": precision.hadamard, "seed": precision.seed,
    }  # fmt: skip
    if mean is None:
        return quantize_qk(q, k, smooth_k=False, **said)
    batch, heads, channels = mean.shape
    ready = torch.full((batch * heads,), MEAN_IS_READY, dtype=torch.int32, device=k.device)
    return quantize_around(q, k, torch.nn.functional.pad(mean, (0, -channels % 32)), ready, **said)


def _cut_queries(of: QuantizedQK, rows: Range) -> QuantizedQK:
    """Rows, which begin where a group of scales begins."""
    scales = _groups(rows, BLOCK_ROWS, of.problem.scales_per_tile[0])
    return dataclasses.replace(
        of,
        q_int=_copy(of.q_int[:, :, rows[0] : rows[1]]),
        q_scale=_copy(of.q_scale[..., scales[0] : scales[1]]),
        row_bias=None if of.row_bias is None else _copy(of.row_bias[..., rows[0] : rows[1]]),
        problem=_with_rows(of.problem, rows[1] - rows[0], of.problem.rows_k),
    )


def _copy(x: Any) -> Any:
    """Contiguous, and at an address that kernels take: a view of one head's scales need not begin at 16 bytes.

    Eight bytes at a time where strides allow it: of single ones torch copies no more than 0.8 TB/s on an H200.
    """
    steps = (x.storage_offset(), x.shape[-1], *x.stride()[:-1])
    if x.stride(-1) == 1 and all(n * x.itemsize % 8 == 0 for n in steps):
        return x.view(torch.int64).clone(memory_format=torch.contiguous_format).view(x.dtype)
    return x.clone(memory_format=torch.contiguous_format)


def _groups(rows: Range, tile: int, of_tile: int) -> Range:
    """Scales of rows."""
    return rows[0] // tile * of_tile, -(-rows[1] // tile) * of_tile


def _that_holds(rows: Range, parts: Iterable[Range]) -> Range:
    """The part with these rows."""
    return next(part for part in parts if part[0] <= rows[0] and rows[1] <= part[1])


def _within(rows: Range, part: Range) -> Range:
    """Rows counted from the begin of a part."""
    return rows[0] - part[0], rows[1] - part[0]


@functools.lru_cache(maxsize=256)
def _with_rows(problem: QuantizeProblem, rows_q: int, rows_k: int) -> QuantizeProblem:
    """The same object for the same numbers: plans of calls on operands are found by it."""
    return dataclasses.replace(problem, rows_q=rows_q, rows_k=rows_k)


@functools.lru_cache(maxsize=256)
def _shapes_of(of_k: QuantizeProblem, of_v: QuantizeProblem) -> dict[str, tuple[tuple[int, ...], Any]]:
    found = {name: of_k.shapes()[name] for name in ("k_int", "k_scale")}
    found |= {name: of_v.shapes()[name] for name in ("v", "v_scale", "v_mean")}
    return {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in found.items()}


def _size_of(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes."""
    return math.prod(shape) * int(dtype.itemsize)


def _bytes_of(shapes: dict[str, tuple[tuple[int, ...], Any]]) -> int:
    """Bytes of the small arrays."""
    return sum(_size_of(*shapes[name]) for name in SMALL)


def _local(chunks: tuple[Range, ...]) -> list[Range]:
    """Rows of a rank's chunks in its part."""
    found, row = [], 0
    for begin, end in chunks:
        found.append((row, row + end - begin))
        row += end - begin
    return found
