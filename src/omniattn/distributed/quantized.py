"""K and V of a ring in 8 bits: each rank quantizes its own once, and what travels are operands of `attention`.

K's mean over all ranks is taken away before: the same vector from every key changes no softmax, and all LSEs of a row
by one number, q . mean, which is added back at the end. So partial results can be merged as they are, and no rank needs
the means of another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CommunicationError, UnsupportedError
from ..ops.attention import attention_beside
from ..ops.quantize import quantize_qk, quantize_v
from ..problems import Precision, QuantizedQK, QuantizedV, QuantizeProblem
from ..problems.products import products_of
from ..problems.quantize import QK_DTYPES
from .exchange import Group
from .schedule import Range, Ring, Step, Task
from .steps import Common, rows_of

#: Small arrays of one chunk: they travel as bytes of one message behind those of k_int and of v, in this order, in
#: which each begins at a multiple of 16 bytes.
SMALL = ("v_scale", "v_mean", "k_scale")
#: Messages of a chunk.
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
    choices = (("fp8", "fp32"), *products_of(cc)[0]) if cc == (9, 0) else products_of(cc)[0]
    asked = (precision.pv, precision.pv_accumulator)
    fits = [pair for pair in choices if all(a in ("auto", b) for a, b in zip(asked, pair, strict=True))]
    if not fits:
        raise UnsupportedError(
            f"pv={asked[0]!r} with pv_accumulator={asked[1]!r} on compute capability {cc[0]}.{cc[1]}",
            instead="pv='auto' and pv_accumulator='auto'",
        )
    pv, accumulator = fits[0]
    grouping = "sm90" if cc == (9, 0) or precision.qk == "fp8" else "sm80"
    return Format(grouping, "float8_e4m3" if pv == "fp8" else "float16", accumulator)


def mean_of_keys(group: Group, k: Any, seqlen_k: int, function: str) -> Any:
    """K's mean over all keys of all ranks, (batch, num_kv_heads, head_dim) in float32."""
    total = k.sum(1, dtype=torch.float32)
    try:
        dist.all_reduce(total, group=group.handle)
    except RuntimeError as error:
        raise CommunicationError(
            f"{function}(): the all-reduce of K's mean failed ({error})",
            "see whether another rank raised before, or was called with other arguments",
        ) from error
    return total / max(seqlen_k, 1)


def bias_of(q: Any, mean: Any, softmax_scale: float) -> Any:
    """What the mean adds to the scores of each query, (batch, num_q_heads, rows) in float32."""
    batch, rows, heads, channels = q.shape
    groups = q.reshape(batch, rows, mean.shape[1], heads // max(mean.shape[1], 1), channels).to(torch.float32)
    found = torch.einsum("bshgd,bhd->bhgs", groups, mean)
    return found.reshape(batch, heads, rows) * softmax_scale


class Quantized:
    """`Wire` of operands, chunk by chunk: groups of scales begin where a chunk begins.

    Parameters
    ----------
    group : Group
    ring : Ring
        Made with ``unite=False``.
    q, k, v : tensor, (batch, seq, heads, head_dim)
    precision : Precision
    common : Common
    """

    def __init__(self, group: Group, ring: Ring, q: Any, k: Any, v: Any, precision: Precision, common: Common) -> None:
        self.common, self.ring = common, ring
        self.mean: Any = None
        if precision.smooth_k:
            self.mean = mean_of_keys(group, k, ring.seqlen_k, common.function)
            # In float32, rounded once, in one launch.
            k = torch.sub(k, self.mean[:, None], out=torch.empty_like(k, memory_format=torch.contiguous_format))
        target = format_of(precision, q.device)
        self.queries: dict[Range, QuantizedQK] = {}
        self.keys: dict[Range, list[Any]] = {}
        rows_q, rows_k = (_local(chunks) for chunks in (ring.chunks_q(group.rank), ring.chunks_k(group.rank)))
        for of_q, of_k in zip(rows_q, rows_k, strict=True):
            pair = quantize_qk(
                rows_of(q, of_q), rows_of(k, of_k), dtype=QK_DTYPES[precision.qk], granularity=precision.granularity,
                grouping=target.grouping, smooth_k=False, hadamard=precision.hadamard, seed=precision.seed,
            )  # fmt: skip
            values = quantize_v(
                rows_of(v, of_k),
                dtype=target.v_dtype,
                smooth_v=precision.smooth_v,
                pv_accumulator=target.pv_accumulator,
            )
            small = [values.v_scale, values.v_mean, pair.k_scale]
            together = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in small])
            self.queries[of_q], self.keys[of_k] = pair, [pair.k_int, values.v, together]
            self.problems = pair.problem, values.problem
        self.like = q

    def own(self, step: Step) -> list[Any]:
        """Of the chunks that the step reads."""
        return [x for rows in _chunks(step) for x in self.keys[rows]]

    def sent(self, step: Step) -> list[Any]:
        """The same: operands are contiguous."""
        return self.own(step)

    def buffers(self, step: Step) -> list[Any]:
        """For the chunks of another rank, whose lengths the ring says."""
        found = []
        for rows in _chunks(step):
            shapes = self._shapes(rows)
            found += [
                torch.empty(shape, dtype=dtype, device=self.like.device)
                for shape, dtype in (shapes["k_int"], shapes["v"], ((_bytes_of(shapes),), torch.uint8))
            ]
        return found

    def _of(self, rows: Range) -> tuple[QuantizeProblem, QuantizeProblem]:
        """The problems of a chunk's K and V."""
        number = rows[1] - rows[0]
        return _with_rows(self.problems[0], number), _with_rows(self.problems[1], number)

    def _shapes(self, rows: Range) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of a chunk's arrays by name."""
        return _shapes_of(*self._of(rows))

    def attend(self, part: list[Any], step: Step, task: Task, sinks: Any, spare_sms: int) -> tuple[Any, Any]:
        """Attention of one chunk of queries over one of keys."""
        at = _chunks(step).index(task.k) * MESSAGES
        k_int, v, together = part[at : at + MESSAGES]
        of_k, of_v = self._of(task.k)
        shapes = self._shapes(task.k)
        sizes = [_size_of(*shapes[name]) for name in SMALL]
        v_scale, v_mean, k_scale = (
            x.view(shapes[name][1]).view(shapes[name][0]) for name, x in zip(SMALL, together.split(sizes), strict=True)
        )
        keys = QuantizedQK(None, k_int, None, k_scale, None, None, None, None, None, None, of_k, "NHD")
        values = QuantizedV(v, v_scale, v_mean, None, of_v, "NHD")
        pair = self.queries[task.q]
        options = self.common.options(task)
        return attention_beside(pair.q, keys.k, values, spare_sms=spare_sms, sinks=None, **options)


@functools.lru_cache(maxsize=256)
def _with_rows(problem: QuantizeProblem, rows: int) -> QuantizeProblem:
    """The same object for the same numbers: plans of calls on operands are found by it."""
    return dataclasses.replace(problem, rows_k=rows)


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


def _chunks(step: Step) -> list[Range]:
    """Chunks of the source that the step reads, each once."""
    return sorted({task.k for task in step.tasks})
