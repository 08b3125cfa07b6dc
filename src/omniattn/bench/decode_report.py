"""Shapes of the decode benchmark, and from timings to TB/s and ratios. Pure arithmetic: no device, no torch."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from omniattn.bench.document import document, samples_of, timing_facts, to_json
from omniattn.bench.report import markdown_table, with_load
from omniattn.bench.timing import Timing
from omniattn.errors import ArgumentError
from omniattn.kv.formats import check_format

#: End of a key: the same cache, and the call told of the prefix that its sequences share.
WITH_PREFIX = " shared_prefix"

_LABELS = {"cudnn": "torch cuDNN bf16", "fa2": "torch FA2 bf16"}
#: Spread of ragged lengths: standard deviation of their logarithms, and longest in units of the mean.
_SIGMA, _LONGEST = 1.0, 4


def label(key: str) -> str:
    """Name of a format or an anchor in tables."""
    return _LABELS.get(key, key)


@dataclass(frozen=True)
class DecodeShape:
    """One decoding step: a new token for each sequence, or a few.

    Attributes
    ----------
    batch, heads_q, heads_kv, seqlen, head_dim : int
        ``seqlen`` tokens in each cache, on average where lengths are ragged.
    block_size : int
        Of a paged cache; 0: contiguous.
    ragged : bool
        Lengths are drawn from a lognormal distribution, the same ones in every run.
    prefix : int
        Of the ``seqlen`` tokens, so many first ones that all sequences share: the same blocks of a paged cache.
    queries : int
        Newest tokens of each sequence that attend: several in speculative decoding.
    """

    batch: int
    heads_q: int
    heads_kv: int
    seqlen: int
    head_dim: int = 128
    block_size: int = 0
    ragged: bool = False
    prefix: int = 0
    queries: int = 1

    @property
    def name(self) -> str:
        """Name used by filters and reports, for example ``b128 h8/1 t8192 d128 p16``."""
        text = f"b{self.batch} h{self.heads_q}/{self.heads_kv} t{self.seqlen} d{self.head_dim}"
        pages = f" p{self.block_size}" * bool(self.block_size)
        queries = f" q{self.queries}" * (self.queries > 1)
        return text + pages + " ragged" * self.ragged + f" shared{self.prefix}" * bool(self.prefix) + queries

    def lengths(self) -> list[int]:
        """Tokens of each sequence; their sum is batch * seqlen."""
        if not self.ragged:
            return [self.seqlen] * self.batch
        rng = random.Random(11)
        drawn = [min(rng.lognormvariate(0.0, _SIGMA), _LONGEST * math.exp(_SIGMA**2 / 2)) for _ in range(self.batch)]
        total, mean = self.batch * self.seqlen, math.fsum(drawn) / self.batch
        lengths = [max(1, int(x / mean * self.seqlen)) for x in drawn]
        # What rounding has left over goes to the longest one.
        lengths[lengths.index(max(lengths))] += total - sum(lengths)
        return lengths

    def new_tokens(self) -> list[int]:
        """Tokens that each sequence brings into the cache: the first one the shared ones too."""
        return [length - (self.prefix if b else 0) for b, length in enumerate(self.lengths())]

    def cache_bytes(self, dtype: str, group_size: int | None = None, *, shared: bool = True) -> int:
        """Bytes of the cache that a step has to read: K and V of all tokens, codes and parameters.

        Shared tokens count once; with ``shared=False`` for every sequence, as where each has a copy.
        """
        formats = (
            check_format(dtype, self.head_dim, group_size, True, "DecodeShape", is_key=is_key)
            for is_key in (True, False)
        )
        tokens = sum(self.new_tokens() if shared else self.lengths())
        return tokens * self.heads_kv * sum(fmt.token_bytes for fmt in formats)

    def needed_bytes(self, formats: Iterable[tuple[str, int | None]]) -> int:
        """Memory of a run: K and V, their copy in torch's layout, and a cache of each format."""
        # Contiguous caches and last blocks have room that nobody fills; a fourth is more than it takes.
        copies = 3 if self.prefix else 2
        tensors = copies * self.cache_bytes("bf16", shared=False)
        return int(1.25 * (tensors + sum(self.cache_bytes(*x) for x in formats)))


#: One kv head for 8 query heads as the published comparisons have it, models with 8 of them, pages, ragged lengths,
#: sequences of 256 tokens of their own behind a prefix that they share. Then 16 new tokens, a kv head with many query
#: heads, a head_dim that is no power of two, short sequences.
DECODE_SHAPES: tuple[DecodeShape, ...] = (
    *(DecodeShape(batch, 8, 1, 8192) for batch in (1, 32, 128, 512)),
    DecodeShape(1, 64, 8, 131072),
    DecodeShape(16, 64, 8, 8192),
    DecodeShape(64, 64, 8, 32768),
    *(DecodeShape(128, 8, 1, 8192, block_size=size) for size in (1, 16, 64, 256)),
    DecodeShape(128, 8, 1, 8192, block_size=64, ragged=True),
    *(DecodeShape(batch, 8, 1, 8448, block_size=64, prefix=8192) for batch in (64, 256)),
    DecodeShape(64, 64, 8, 33024, block_size=64, prefix=32768),
    DecodeShape(32, 32, 8, 8192, queries=16),
    DecodeShape(32, 71, 1, 8192, 64),
    DecodeShape(32, 32, 8, 8192, 96),
    DecodeShape(256, 32, 8, 128),
)


def filter_decode_shapes(
    patterns: Sequence[str], shapes: Sequence[DecodeShape] = DECODE_SHAPES
) -> tuple[DecodeShape, ...]:
    """Shapes whose name has all words of one of the patterns; without patterns all. ``contiguous``: not paged.

    Raises
    ------
    ArgumentError
        A pattern matches no shape.
    """
    if not patterns:
        return tuple(shapes)
    chosen: set[DecodeShape] = set()
    for pattern in patterns:
        words = set(pattern.replace(",", " ").lower().split())
        matching = {shape for shape in shapes if words <= _words(shape)}
        if not words or not matching:
            known = sorted({word for shape in shapes for word in _words(shape)})
            raise ArgumentError("--shapes", f"words out of {', '.join(known)}", repr(pattern))
        chosen |= matching
    return tuple(shape for shape in shapes if shape in chosen)


def _words(shape: DecodeShape) -> set[str]:
    return {*shape.name.split(), *(() if shape.block_size else ("contiguous",))}


@dataclass(frozen=True)
class DecodeMeasurement:
    """One format, or the anchor, on one shape.

    Attributes
    ----------
    shape : DecodeShape
    key : str
        Name of the format or of the anchor; the format's followed by `WITH_PREFIX` where the call has a shared prefix.
    timing : Timing or None
        None: it could not run; ``reason`` says why.
    cache_bytes : int
        What a step has to read in this format.
    relative_l1 : float or None
        Error of sampled rows against fp64 on the numbers before they were quantized.
    reason : str
        Empty if it ran.
    """

    shape: DecodeShape
    key: str
    timing: Timing | None
    cache_bytes: int
    relative_l1: float | None = None
    reason: str = ""

    @property
    def tb_per_s(self) -> float | None:
        """The format's own bytes over the median, or None."""
        return None if self.timing is None else self.cache_bytes / self.timing.median_us * 1e-6


@dataclass(frozen=True)
class DecodeReport:
    """All measurements of one run.

    Attributes
    ----------
    anchor : str
    environment : dict
    copy_tb_per_s : float
        A large copy in the same run, read plus written.
    measurements : tuple of DecodeMeasurement
    sustained_s : float or None
        Seconds of load a format (`sustained`); None: interleaved.
    command : str
        The command line.
    """

    anchor: str
    environment: dict[str, str]
    copy_tb_per_s: float
    measurements: tuple[DecodeMeasurement, ...]
    sustained_s: float | None = None
    command: str = ""

    @property
    def shapes(self) -> tuple[DecodeShape, ...]:
        """Shapes in the order in which they were measured."""
        return tuple(dict.fromkeys(m.shape for m in self.measurements))

    @property
    def keys(self) -> tuple[str, ...]:
        """Formats and the anchor in the order in which they were measured."""
        return tuple(dict.fromkeys(m.key for m in self.measurements))

    def find(self, shape: DecodeShape, key: str) -> DecodeMeasurement | None:
        """The measurement of one cell, if it was made."""
        return next((m for m in self.measurements if m.shape == shape and m.key == key), None)

    def ratio(self, measurement: DecodeMeasurement) -> float | None:
        """Time relative to the anchor's on the same shape: below 1 is faster. None if either did not run."""
        other = self.find(measurement.shape, self.anchor)
        if other is None or other.timing is None or measurement.timing is None:
            return None
        return measurement.timing.median_us / other.timing.median_us

    def slower_than_larger(self) -> list[str]:
        """Formats that take longer than one with more bytes on the same shape, by more than both spreads."""
        found = []
        for shape in self.shapes:
            ran = [m for m in self.measurements if m.shape == shape and m.key != self.anchor and m.timing is not None]
            for narrow in ran:
                for larger in ran:
                    if narrow.cache_bytes >= larger.cache_bytes or narrow.timing is None or larger.timing is None:
                        continue
                    if narrow.key.endswith(WITH_PREFIX) != larger.key.endswith(WITH_PREFIX):
                        continue
                    slack = 1 + narrow.timing.spread + larger.timing.spread
                    if narrow.timing.median_us > slack * larger.timing.median_us:
                        found.append(f"{shape.name}: {narrow.key} is slower than {larger.key}")
        return found

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: one row a shape; each cell ``µs ±spread% TB/s (ratio)``, under load also clock and power."""
        header = ["shape", *(label(key) for key in self.keys)]
        return header, [[s.name, *(self._cell(self.find(s, key)) for key in self.keys)] for s in self.shapes]

    def markdown(self) -> str:
        """The table in Markdown."""
        return markdown_table(*self.table())

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON (`document`)."""
        return document(
            "decode",
            protocol="interleaved" if self.sustained_s is None else "sustained",
            command=self.command,
            environment=self.environment,
            rows=[self._row(m) for m in self.measurements],
            anchor=self.anchor,
            sustained_seconds=self.sustained_s,
            ceilings={"copy_tb_per_s": self.copy_tb_per_s},
            labels={key: label(key) for key in self.keys},
            slower_than_larger=self.slower_than_larger(),
            samples=[samples_of(m.timing) for m in self.measurements],
        )

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return to_json(self.to_dict())

    def _cell(self, m: DecodeMeasurement | None) -> str:
        if m is None or m.timing is None or m.tb_per_s is None:
            return "–"
        text = f"{m.timing.median_us:.1f} ±{100 * m.timing.spread:.1f}% {m.tb_per_s:.2f} TB/s"
        ratio = self.ratio(m)
        return with_load(text if ratio is None or m.key == self.anchor else f"{text} ({ratio:.2f}×)", m.timing)

    def doubts(self) -> list[str]:
        """What a reader should know before quoting a time: format, shape, reason."""
        return [
            f"{label(m.key)}, {m.shape.name}: {d}"
            for m in self.measurements
            for d in (m.timing.doubts() if m.timing else ())
        ]

    def _row(self, m: DecodeMeasurement) -> dict[str, Any]:
        return {
            "shape": m.shape.name,
            **dataclasses.asdict(m.shape),
            "format": m.key,
            **timing_facts(m.timing),
            "cache_bytes": m.cache_bytes,
            "tb_per_s": m.tb_per_s,
            "time_relative_to_anchor": self.ratio(m),
            "relative_l1": m.relative_l1,
            "reason": m.reason,
        }
