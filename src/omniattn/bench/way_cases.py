"""Calls beside attention whose every way is measured by ``omniattn bench candidates``, and as selection sees them.

Chosen to cover batches, heads, grouped heads, widths, lengths, formats, tails and tiny calls; nothing here needs a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omniattn.bench.backward_cases import BackwardShape, lognormal_lengths
from omniattn.bench.candidate_cases import candidate_cases
from omniattn.bench.decode import FORMATS
from omniattn.bench.decode_report import DecodeShape
from omniattn.bench.shape_cases import ShapeCase
from omniattn.bench.shape_plan import problem_of as attention_problem
from omniattn.kv.formats import check_format
from omniattn.kv.layout import CacheLayout
from omniattn.plan.stages import quantizations
from omniattn.problems import AppendProblem, BackwardProblem, DecodeProblem, QuantizeCall, Target
from omniattn.select import choices

#: What is measured, in this order.
OPERATIONS = ("attention", "backward", "decode", "append", "quantize")


def _layout(shape: DecodeShape, name: str) -> CacheLayout:
    """The cache of a shape as `bench.decode.make_cache` makes it."""
    fmt = FORMATS[name]
    formats = [
        check_format(fmt.dtype, shape.head_dim, fmt.group_size, True, "bench", is_key=is_key, layout=fmt.layout)
        for is_key in (True, False)
    ]
    lengths, page, window = shape.lengths(), shape.block_size, fmt.recent_window
    counts = [-(-length // page) for length in lengths] if page else []
    blocks = sum(counts) - (shape.prefix // page if page else 0) * (shape.batch - 1) if page else shape.batch
    recent = check_format("bf16", shape.head_dim, None, True, "bench", is_key=True) if window else None
    return CacheLayout(
        bool(page), blocks, page or max(lengths), shape.heads_kv, shape.head_dim, formats[0], formats[1], False, (),
        window, window, shape.batch if window else 0, recent, "cuda", 0,
    )  # fmt: skip


def _capacity(shape: DecodeShape) -> tuple[int, int]:
    """Tokens that a sequence can have, and columns of the block table."""
    longest, page = max(shape.lengths()), shape.block_size
    columns = -(-longest // page) if page else 0
    return columns * page or longest, columns


@dataclass(frozen=True)
class DecodeCase:
    """A call of ``decode``.

    Attributes
    ----------
    shape : DecodeShape
        With a prefix the call is told of it.
    format : str
        Key of `bench.decode.FORMATS`.
    """

    shape: DecodeShape
    format: str = "bf16"
    op = "decode"

    @property
    def long_name(self) -> str:
        """Name used by filters and reports."""
        return f"decode {self.shape.name} {self.format}"

    def problem(self, target: Target) -> DecodeProblem:
        """The call as selection sees it."""
        s = self.shape
        capacity, columns = _capacity(s)
        layout = _layout(s, self.format)
        strides = (s.queries * s.heads_q * s.head_dim, s.heads_q * s.head_dim, s.head_dim, 1)
        return DecodeProblem(
            "bfloat16", layout, s.batch, s.queries, s.heads_q, s.heads_kv, s.head_dim, capacity, layout.block_size,
            layout.num_blocks, columns, -1, s.head_dim**-0.5, 0.0, "none", FORMATS[self.format].deterministic,
            s.prefix, False, strides, strides,
        )  # fmt: skip


@dataclass(frozen=True)
class AppendCase:
    """A call of ``append``: the last ``tokens`` of every sequence; attributes as of `DecodeCase`."""

    shape: DecodeShape
    format: str = "bf16"
    tokens: int = 1
    op = "append"

    @property
    def long_name(self) -> str:
        """Name used by filters and reports."""
        return f"append {self.shape.name} {self.format} new{self.tokens}"

    def problem(self, target: Target) -> AppendProblem:
        """The call as selection sees it."""
        s = self.shape
        capacity, columns = _capacity(s)
        layout = _layout(s, self.format)
        strides = (self.tokens * s.heads_kv * s.head_dim, s.heads_kv * s.head_dim, s.head_dim, 1)
        return AppendProblem(
            "bfloat16", layout, s.batch, s.batch * self.tokens, self.tokens, s.head_dim, s.heads_kv, capacity,
            layout.block_size, layout.num_blocks, columns, "none", 0, 0, strides, strides,
        )  # fmt: skip


@dataclass(frozen=True)
class BackwardCase:
    """A call of ``attention_backward`` or ``attention_varlen_backward``.

    Attributes
    ----------
    shape : BackwardShape
    wanted : tuple of str
    deterministic : bool
    """

    shape: BackwardShape
    wanted: tuple[str, ...] = ("dq", "dk", "dv")
    deterministic: bool = False
    op = "backward"

    @property
    def long_name(self) -> str:
        """Name used by filters and reports."""
        words = ["backward", self.shape.long_name]
        if self.shape.packed:
            words.append(f"{self.shape.batch}of{self.shape.tokens}")
        if len(self.wanted) < 3:
            words.append("+".join(self.wanted))
        return " ".join([*words, *(["deterministic"] if self.deterministic else [])])

    @property
    def options(self) -> dict[str, Any]:
        """Those of the call and of its forward."""
        s = self.shape
        found: dict[str, Any] = {"causal": s.causal}
        if s.window:
            found["window"] = (s.window - 1, 0)
        return found | ({"softcap": s.softcap} if s.softcap else {})

    def problem(self, target: Target) -> BackwardProblem:
        """The call as selection sees it."""
        import omniattn

        s = self.shape
        leading = (s.tokens,) if s.packed else (s.batch, s.seqlen)
        q, k = (np.empty((*leading, heads, s.head_dim), np.float16) for heads in (s.heads, s.heads_kv))
        lse = np.empty((s.heads, s.tokens) if s.packed else (s.batch, s.heads, s.seqlen), np.float32)
        options = {**self.options, "wanted": self.wanted, "deterministic": self.deterministic}
        function = omniattn.attention_varlen_backward if s.packed else omniattn.attention_backward
        if s.packed:
            for name in "qk":
                options[f"cu_seqlens_{name}"] = np.cumsum([0, *s.lengths], dtype=np.int32)
                options[f"max_seqlen_{name}"] = s.seqlen
        found = omniattn.explain(function, q, q, k, k, q, lse, **options).problem
        assert isinstance(found, BackwardProblem)
        forward = dataclasses.replace(found.forward, dtype="bfloat16", tensor_maps=True)
        return dataclasses.replace(found, forward=forward)


@dataclass(frozen=True)
class QuantizeCase:
    """A quantization: ``quantize_qk``, ``quantize_v``, or that of q, k and v in a call of ``attention``.

    Attributes
    ----------
    what : {"qk", "v", "qkv"}
    shape : ShapeCase
        Of "qkv": of the call, with its precision.
    options : dict
        Of the quantizers.
    """

    what: str
    shape: ShapeCase
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    op = "quantize"

    @property
    def long_name(self) -> str:
        """Name used by filters and reports."""
        words = [f"{name}={value}".lower() for name, value in self.options.items()]
        return " ".join(["quantize", self.what, self.shape.long_name, *words])

    def problem(self, target: Target) -> QuantizeCall:
        """What is quantized, as selection sees it; ``target``: whose attention reads it."""
        import omniattn

        if self.what == "qkv":
            forward = attention_problem(self.shape)
            (whole,) = quantizations(choices(forward, target)[0].candidate, forward)
            return QuantizeCall(whole, ((0, 0, 0),) * 3, "NHD", 0)
        s = self.shape
        batch, heads_kv = len(s.lengths_q), s.heads // s.group
        q, k = (
            np.empty((batch, rows, heads, s.head_dim), np.float16)
            for rows, heads in ((s.lengths_q[0], s.heads), (s.lengths_k[0], heads_kv))
        )
        if self.what == "qk":
            found = omniattn.explain(omniattn.quantize_qk, q, k, **self.options).problem
        else:
            found = omniattn.explain(omniattn.quantize_v, k, **self.options).problem
        assert isinstance(found, QuantizeCall)
        return dataclasses.replace(found, problem=dataclasses.replace(found.problem, dtype="bfloat16"))


WayCase = DecodeCase | AppendCase | BackwardCase | QuantizeCase


def _decode() -> Iterator[DecodeCase]:
    # Batches and lengths; kv heads that share nothing and that share much; widths.
    for batch, tokens in ((1, 128), (1, 1024), (1, 8192), (1, 131072), (8, 4096), (32, 8192), (64, 100), (128, 8192),
                          (256, 128), (256, 2048)):  # fmt: skip
        yield DecodeCase(DecodeShape(batch, 32, 8, tokens))
    for heads_q, heads_kv in ((32, 32), (8, 1), (64, 4), (71, 1), (12, 12), (28, 4)):
        yield DecodeCase(DecodeShape(16, heads_q, heads_kv, 4096))
    for head_dim in (64, 96, 256):
        yield DecodeCase(DecodeShape(8, 32, 8, 8192, head_dim))
        yield DecodeCase(DecodeShape(1, 16, 16, 500, head_dim))
    # Few new tokens, whose rows are many.
    for queries in (2, 4, 8, 16):
        yield DecodeCase(DecodeShape(4, 32, 8, 8192, queries=queries))
        yield DecodeCase(DecodeShape(64, 8, 1, 1024, queries=queries))
    yield DecodeCase(DecodeShape(32, 71, 1, 8192, 64))
    yield DecodeCase(DecodeShape(4, 64, 1, 32768, queries=2))
    for name in ("fp8", "int8", "int4", "int4g32", "fbgemm"):
        yield from (
            DecodeCase(shape, name)
            for shape in (
                DecodeShape(1, 32, 8, 4096), DecodeShape(32, 32, 8, 8192), DecodeShape(128, 8, 1, 8192),
                DecodeShape(16, 48, 4, 3000),
            )
        )  # fmt: skip
    # Pages, lengths that differ, tails.
    yield from (DecodeCase(DecodeShape(64, 32, 8, 4000, block_size=16, ragged=ragged)) for ragged in (False, True))
    yield DecodeCase(DecodeShape(3, 24, 3, 5001, block_size=64), "int8")
    # Two passes, and a fixed order.
    for batch in (16, 128):
        yield DecodeCase(DecodeShape(batch, 8, 1, 8448, block_size=64, prefix=8192))
        yield DecodeCase(DecodeShape(batch, 32, 8, 4096), "int4w128")
        yield DecodeCase(DecodeShape(batch, 32, 8, 2048), "bf16det")


def _shape(head_dim: int, batch: int, heads: int, length: int, causal: bool = False, **more: Any) -> BackwardShape:
    return BackwardShape(heads, head_dim, (length,) * batch, causal, **more)


def _backward() -> Iterator[BackwardCase]:
    for head_dim, causal in ((64, False), (64, True), (128, False), (128, True), (96, True), (192, False), (256, True)):
        for batch, heads, length in ((1, 8, 512), (2, 16, 2048), (1, 16, 8192)):
            yield BackwardCase(_shape(head_dim, batch, heads, length, causal))
    for head_dim in (64, 128):
        for batch, heads, length in ((256, 8, 64), (64, 16, 256), (1, 4, 100), (3, 5, 1111)):
            yield BackwardCase(_shape(head_dim, batch, heads, length))
        yield BackwardCase(_shape(head_dim, 2, 32, 2048, True, group=4))
        yield BackwardCase(_shape(head_dim, 2, 32, 2048, False, group=8))
        yield BackwardCase(_shape(head_dim, 1, 16, 8192, True, window=1024))
        yield BackwardCase(_shape(head_dim, 2, 16, 2048, True, softcap=50.0))
        for causal in (False, True):
            packed = BackwardShape(16, head_dim, lognormal_lengths(16, 16384), causal, packed=True)
            yield from (BackwardCase(packed), BackwardCase(packed, deterministic=True))
        for batch, heads, length in ((2, 16, 2048), (64, 16, 256)):
            yield BackwardCase(_shape(head_dim, batch, heads, length, True), deterministic=True)
        yield BackwardCase(_shape(head_dim, 2, 16, 2048), ("dq",))
        yield BackwardCase(_shape(head_dim, 2, 16, 2048), ("dk", "dv"))
    for head_dim in (40, 72, 160):
        yield BackwardCase(_shape(head_dim, 2, 16, 1000))
    yield BackwardCase(_shape(256, 2, 8, 2048, True), deterministic=True)
    yield BackwardCase(_shape(192, 1, 8, 4096, True), ("dq",))


def _quantize() -> Iterator[QuantizeCase]:
    def shape(head_dim: int, batch: int, heads: int, length: int, **more: Any) -> ShapeCase:
        return ShapeCase(head_dim, heads, (length,) * batch, (length,) * batch, **more)

    shapes = (shape(128, 4, 16, 4096), shape(128, 1, 16, 700), shape(64, 64, 16, 200), shape(128, 16, 32, 400, group=4))
    for one in shapes:
        yield QuantizeCase("qk", one)
        yield QuantizeCase("qk", one, {"dtype": "float8_e4m3", "granularity": "per_block", "smooth_k": False})
        yield QuantizeCase("v", one)
    yield QuantizeCase("qk", shapes[0], {"granularity": "per_tensor"})
    yield QuantizeCase("qk", shapes[0], {"dtype": "int4", "grouping": "sm80"})
    yield QuantizeCase("qk", shapes[0], {"smooth_q": True})
    yield QuantizeCase("qk", shape(64, 1, 32, 16384), {"hadamard": True})
    yield QuantizeCase("v", shape(256, 2, 8, 3000))
    yield QuantizeCase("v", shape(128, 1, 4, 60), {"dtype": "float16"})
    for precision in ("int8", "fp8"):
        for one in (*shapes, shape(64, 1, 32, 16384), shape(256, 2, 8, 2048)):
            yield QuantizeCase("qkv", dataclasses.replace(one, precision=precision))


def _append() -> Iterator[AppendCase]:
    for name in ("bf16", "fp8", "int8", "int4"):
        for shape, tokens in (
            (DecodeShape(64, 8, 8, 4096), 1), (DecodeShape(64, 8, 8, 4096, block_size=16), 1),
            (DecodeShape(1, 8, 8, 1024), 1), (DecodeShape(4, 8, 8, 4096), 4096), (DecodeShape(7, 3, 3, 333, 64), 33),
        ):  # fmt: skip
            yield AppendCase(shape, name, tokens)


def way_cases() -> tuple[WayCase, ...]:
    """The calls, each once, by operation in the order of `OPERATIONS`."""
    return (*_backward(), *_decode(), *_append(), *_quantize())


def cases_of(operations: Sequence[str]) -> tuple[ShapeCase | WayCase, ...]:
    """The calls of these operations, in the order of `OPERATIONS`."""
    attention = candidate_cases() if "attention" in operations else ()
    return (*attention, *(case for case in way_cases() if case.op in operations))
