"""Operations that move bytes and compute little: ``append`` and the quantizers, as fractions of a copy's bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omniattn.bench.ceilings import measure_ceilings
from omniattn.bench.decode import ERROR_LIMITS, FORMATS, CacheFormat, Tokens, make_cache
from omniattn.bench.decode_report import DecodeShape
from omniattn.bench.document import document, environment, samples_of, timing_facts, to_json
from omniattn.bench.low_precision import PartAlone
from omniattn.bench.shapes import ForwardShape
from omniattn.bench.sustained import choose_timer
from omniattn.bench.timing import BenchError, Candidate, Timer, Timing, require_torch

#: A prompt of 4096 tokens for each of 64 sequences, and one new token each: contiguous caches, pages of 16.
APPEND_SHAPES: tuple[DecodeShape, ...] = (DecodeShape(64, 8, 8, 4096), DecodeShape(64, 8, 8, 4096, block_size=16))
APPEND_FORMATS: tuple[str, ...] = ("bf16", "fp8", "int8", "int4")
#: Long and short sequences, many and few heads.
QUANTIZE_SHAPES: tuple[ForwardShape, ...] = (
    ForwardShape(4, 16, 4096, 128, False),
    ForwardShape(4, 32, 8192, 128, False),
    ForwardShape(1, 16, 16384, 128, False),
    ForwardShape(1, 16, 32768, 128, False),
    ForwardShape(1, 16, 4096, 128, False),
    ForwardShape(16, 16, 1024, 128, False),
    ForwardShape(4, 32, 4096, 64, False),
    ForwardShape(1, 32, 16384, 64, False),
)
#: Sets of Q, K and V that calls go around.
_INPUT_SETS = 2


@dataclass(frozen=True)
class CopyMeasurement:
    """One operation on one shape.

    Attributes
    ----------
    case : str
        The operation with its options.
    shape : str
    timing : Timing
    num_bytes : int
        What it has to read and to write: every input and output once.
    relative_l1 : float or None
        Error of sampled rows of attention on what it wrote, against fp64; None: not checked here.
    """

    case: str
    shape: str
    timing: Timing
    num_bytes: int
    relative_l1: float | None = None

    @property
    def tb_per_s(self) -> float:
        """Bytes over the median."""
        return self.num_bytes / self.timing.median_us * 1e-6


@dataclass(frozen=True)
class CopyReport:
    """All measurements of one run.

    Attributes
    ----------
    bench : {"append", "quantize"}
    environment : dict
    copy_tb_per_s : float
        A large copy in the same run, read plus written.
    measurements : tuple of CopyMeasurement
    command : str
        The command line.
    """

    bench: str
    environment: dict[str, str]
    copy_tb_per_s: float
    measurements: tuple[CopyMeasurement, ...]
    command: str = ""

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: one row a shape, each cell ``µs ±spread% share of a copy's bandwidth``."""
        cases = list(dict.fromkeys(m.case for m in self.measurements))
        found = {(m.shape, m.case): m for m in self.measurements}
        shapes = list(dict.fromkeys(m.shape for m in self.measurements))
        return ["shape", *cases], [[shape, *(self._cell(found.get((shape, c))) for c in cases)] for shape in shapes]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON (`document`)."""
        return document(
            self.bench,
            protocol="interleaved",
            command=self.command,
            environment=self.environment,
            rows=[self._row(m) for m in self.measurements],
            ceilings={"copy_tb_per_s": self.copy_tb_per_s},
            samples=[samples_of(m.timing) for m in self.measurements],
        )

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return to_json(self.to_dict())

    def _cell(self, m: CopyMeasurement | None) -> str:
        if m is None:
            return "–"
        return f"{m.timing.median_us:.1f} ±{100 * m.timing.spread:.1f}% ({m.tb_per_s / self.copy_tb_per_s:.2f})"

    def _row(self, m: CopyMeasurement) -> dict[str, Any]:
        return {
            "case": m.case,
            "shape": m.shape,
            **timing_facts(m.timing),
            "num_bytes": m.num_bytes,
            "tb_per_s": m.tb_per_s,
            "of_a_copy": m.tb_per_s / self.copy_tb_per_s,
            "relative_l1": m.relative_l1,
        }


#: What `_run` asks for each shape: its measurements.
_Measure = Callable[[Any, Timer, Any], Sequence[CopyMeasurement]]


def run_append(*, iters: int, command: str = "", progress: Callable[[str], None] = lambda _: None) -> CopyReport:
    """Time ``append`` of prompts and of single tokens, with and without rotary embedding.

    Parameters
    ----------
    iters : int
        Timed rounds a shape; all formats run in each.
    command : str
        The command line, for the report.
    progress : callable, optional
        Called with one line of text before each shape.

    Raises
    ------
    BenchError
        torch or a CUDA device is missing, or what was appended is not what was given.
    """
    return _run("append", APPEND_SHAPES, _append, iters, command, progress)


def run_quantize(*, iters: int, command: str = "", progress: Callable[[str], None] = lambda _: None) -> CopyReport:
    """Time the quantization inside ``attention(precision="int8")``, and ``quantize_qk`` and ``quantize_v``.

    Bytes are counted for V in e4m3. Where int8 attention takes V in fp16 (compute capability 8.0 and 8.6), shares of a
    copy are too low for its two cases. The results are not checked: `omniattn verify` does.

    Parameters: those of `run_append`.

    Raises
    ------
    BenchError
        torch or a CUDA device is missing.
    """
    return _run("quantize", QUANTIZE_SHAPES, _quantize, iters, command, progress)


def _run(
    bench: str,
    shapes: Sequence[Any],
    measure: _Measure,
    iters: int,
    command: str,
    progress: Callable[[str], None],
) -> CopyReport:
    torch = require_torch()
    found: list[CopyMeasurement] = []
    with choose_timer(torch, iters, None) as timer:
        progress("ceilings")
        ceilings = measure_ceilings(torch, timer)
        for shape in shapes:
            progress(shape.name)
            found += measure(torch, timer, shape)
            torch.cuda.empty_cache()
    return CopyReport(bench, environment(torch), ceilings.copy_tb_per_s, tuple(found), command)


def _append(torch: Any, timer: Timer, shape: DecodeShape) -> list[CopyMeasurement]:
    tokens = Tokens(torch, shape)
    cos, sin = _angles(torch, shape)
    candidates: dict[str, Candidate] = {}
    facts: dict[str, tuple[int, float | None]] = {}
    for name in APPEND_FORMATS:
        fmt = FORMATS[name]
        written = shape.cache_bytes(fmt.dtype, fmt.group_size)
        for rotary in (False, True):
            angles = {"cos": cos, "sin": sin} if rotary else {}
            case = f"{name}, rotary embedding" if rotary else name
            cache, arrays = make_cache(torch, tokens, fmt)
            candidates[case] = _prompt(torch, tokens, cache, {**arrays, **angles})
            error = _check(tokens, candidates[case], cache, arrays, fmt, (cos, sin) if rotary else None, case)
            facts[case] = shape.cache_bytes("bf16") + written, error
        case = f"{name}, one token"
        cache, arrays = make_cache(torch, tokens, fmt)
        candidates[case] = _one_token(tokens, cache, arrays)
        facts[case] = (shape.cache_bytes("bf16") + written) // shape.seqlen, None
    timings = timer(candidates)
    return [CopyMeasurement(case, shape.name, timings[case], *facts[case]) for case in candidates]


def _prompt(torch: Any, tokens: Tokens, cache: Any, arrays: dict[str, Any]) -> Candidate:
    import omniattn

    starts = [tokens.shape.seqlen * b for b in range(tokens.shape.batch + 1)]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device="cuda")
    return lambda _: omniattn.append(cache, tokens.k, tokens.v, cu_seqlens=cu_seqlens, **arrays)


def _one_token(tokens: Tokens, cache: Any, arrays: dict[str, Any]) -> Candidate:
    import omniattn

    shape = tokens.shape
    k, v = (x[: shape.batch].reshape(shape.batch, 1, shape.heads_kv, shape.head_dim) for x in (tokens.k, tokens.v))
    return lambda _: omniattn.append(cache, k, v, **arrays)


def _check(
    tokens: Tokens,
    append: Candidate,
    cache: Any,
    arrays: dict[str, Any],
    fmt: CacheFormat,
    angles: tuple[Any, Any] | None,
    case: str,
) -> float:
    """Relative L1 error of attention on what ``append`` has written."""
    import omniattn

    append(0)
    k = tokens.k if angles is None else _rotated(tokens, *angles)
    error = tokens.sampled_error(omniattn.decode(tokens.q, cache, **arrays), k)
    limit = ERROR_LIMITS[fmt.dtype]
    if not error <= limit:
        raise BenchError(f"append, {case}, {tokens.shape.name}: relative L1 {error:.3g} against fp64, limit {limit}")
    return error


def _angles(torch: Any, shape: DecodeShape) -> tuple[Any, Any]:
    """Cosines and sines of all positions and pairs, float32: Llama's, base 10000."""
    pairs = shape.head_dim // 2
    positions = torch.arange(shape.seqlen, dtype=torch.float32, device="cuda")
    frequencies = 10000.0 ** (-torch.arange(pairs, dtype=torch.float32, device="cuda") / pairs)
    angles = positions[:, None] * frequencies
    return angles.cos().contiguous(), angles.sin().contiguous()


def _rotated(tokens: Tokens, cos: Any, sin: Any) -> Any:
    """The keys after rotary embedding; the second half of the channels is the first one's partner."""
    shape = tokens.shape
    k = tokens.k.view(shape.batch, shape.seqlen, shape.heads_kv, shape.head_dim).float()
    first, second = k.chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    rotated = tokens.torch.cat([first * c - second * s, second * c + first * s], dim=-1)
    return rotated.to(tokens.k.dtype).view(tokens.k.shape)


def _quantize(torch: Any, timer: Timer, shape: ForwardShape) -> list[CopyMeasurement]:
    import omniattn

    generator = torch.Generator(device="cuda").manual_seed(11)
    size = (shape.batch, shape.seqlen, shape.heads, shape.head_dim)
    sets = [
        tuple(torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=generator) for _ in range(3))
        for _ in range(_INPUT_SETS)
    ]
    # 16 bits are read and 8 written for each element.
    tensor_bytes = 3 * sets[0][0].numel()
    parts: dict[str, tuple[Callable[[Any, Any, Any], Any], int]] = {
        'attention(precision="int8")': (PartAlone(torch, shape, omniattn.Int8(), "quantization"), 3),
        "the same, smooth_q=True": (PartAlone(torch, shape, omniattn.Int8(smooth_q=True), "quantization"), 3),
        "quantize_qk": (lambda q, k, v: omniattn.quantize_qk(q, k), 2),
        "quantize_v": (lambda q, k, v: omniattn.quantize_v(v), 1),
    }
    candidates = {case: _on_sets(call, sets) for case, (call, _) in parts.items()}
    timings = timer(candidates, warmup=max(2, _INPUT_SETS))
    return [
        CopyMeasurement(case, shape.long_name, timings[case], tensors * tensor_bytes)
        for case, (_, tensors) in parts.items()
    ]


def _on_sets(call: Callable[[Any, Any, Any], Any], sets: Sequence[tuple[Any, ...]]) -> Candidate:
    return lambda number: call(*sets[number % len(sets)])
