"""The decode benchmark: shapes x cache formats, beside torch's attention on 16-bit K and V of the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from omniattn.bench.anchors import EXACT_ERROR, INT4_ERROR, QUANTIZED_ERROR
from omniattn.bench.ceilings import measure_ceilings
from omniattn.bench.decode_report import WITH_PREFIX, DecodeMeasurement, DecodeReport, DecodeShape, label
from omniattn.bench.document import environment
from omniattn.bench.power import device_id, limits
from omniattn.bench.sustained import captured, choose_timer
from omniattn.bench.timing import Candidate, Timer, cold_bytes, require_torch
from omniattn.errors import ArgumentError
from omniattn.kv.formats import check_format


class CacheFormat(NamedTuple):
    """What `KVCache` is told of a format, K and V alike; and whether `decode` has to sum in a fixed order."""

    dtype: str
    group_size: int | None = None
    layout: str = "fragment"
    recent_window: int = 0
    deterministic: bool = False

    @property
    def shares(self) -> bool:
        """Whether `decode` takes ``shared_prefix`` with it."""
        return not (self.recent_window or self.deterministic)

    def has(self, head_dim: int) -> bool:
        """Whether it holds rows of this head_dim."""
        try:
            check_format(self.dtype, head_dim, self.group_size, True, "bench", is_key=True, layout=self.layout)
        except ArgumentError:
            return False
        return True


#: Cache formats by their names on the command line.
FORMATS: dict[str, CacheFormat] = {
    "bf16": CacheFormat("bf16"),
    "fp8": CacheFormat("fp8"),
    "int8": CacheFormat("int8"),
    "int4": CacheFormat("int4"),
    "int4g32": CacheFormat("int4", 32),
    "fbgemm": CacheFormat("int4", layout="fbgemm"),
    "fbgemm4": CacheFormat("int4", 32, "fbgemm"),
    "int4w128": CacheFormat("int4", recent_window=128),
    "bf16det": CacheFormat("bf16", deterministic=True),
    "int4det": CacheFormat("int4", deterministic=True),
}
#: Those that run unless others are named.
DEFAULT_FORMATS: tuple[str, ...] = ("bf16", "fp8", "int8", "int4", "int4g32", "fbgemm")
#: Backends of torch's attention that run beside them.
ANCHORS: dict[str, str] = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION"}
#: Relative L1 error that a format may have on random normal tokens.
ERROR_LIMITS = {"bf16": EXACT_ERROR, "fp8": QUANTIZED_ERROR, "int8": QUANTIZED_ERROR, "int4": INT4_ERROR}
#: Tokens that are appended in one call at most.
_APPEND_ROWS = 1 << 22


def run_decode(
    shapes: Sequence[DecodeShape],
    *,
    anchor: str = "cudnn",
    formats: Sequence[str] = DEFAULT_FORMATS,
    iters: int,
    sustained_s: float | None = None,
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> DecodeReport:
    """Time one decoding step of each of the formats on every shape, on torch's current CUDA device.

    Parameters
    ----------
    shapes : sequence of DecodeShape
    anchor : str
        Key of `ANCHORS`: what ratios are relative to.
    formats : sequence of str
        Keys of `FORMATS`. Where sequences share a prefix, each that can runs with ``shared_prefix`` too.
    iters : int
        Timed rounds a shape, where they are interleaved.
    sustained_s : float, optional
        Not interleaved: one format at a time, for so many seconds each (`sustained.sustain`). Steps go around copies of
        the cache, so that none is in L2, and run as CUDA graphs, because the shortest ones take longer to enqueue.
    command : str
        The command line, for the report.
    progress : callable, optional
        Called with one line of text before each shape.

    Returns
    -------
    DecodeReport

    Raises
    ------
    BenchError
        torch or a CUDA device is missing.
    ArgumentError
        An unknown anchor or format, seconds out of bounds.
    """
    if anchor not in ANCHORS:
        raise ArgumentError("anchor", " or ".join(ANCHORS), repr(anchor), function="run_decode")
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ArgumentError("formats", f"names out of {', '.join(FORMATS)}", repr(unknown), function="run_decode")
    torch = require_torch()
    # Between interleaved calls L2 is flushed; under load nothing else may run.
    rotated_bytes = 0 if sustained_s is None else cold_bytes(torch)
    found: list[DecodeMeasurement] = []
    with choose_timer(torch, iters, sustained_s, graphs=True) as timer:
        progress("ceilings")
        ceilings = measure_ceilings(torch, timer)
        for shape in shapes:
            progress(shape.name)
            found += _run_shape(torch, timer, shape, anchor, formats, rotated_bytes)
            torch.cuda.empty_cache()
    facts = environment(torch)
    if sustained_s is not None:
        facts.update(limits(device_id(torch)))
    return DecodeReport(anchor, facts, ceilings.copy_tb_per_s, tuple(found), sustained_s, command)


def _run_shape(
    torch: Any, timer: Timer, shape: DecodeShape, anchor: str, formats: Sequence[str], rotated_bytes: int
) -> list[DecodeMeasurement]:
    free, _ = torch.cuda.mem_get_info()
    formats = [name for name in formats if FORMATS[name].has(shape.head_dim)]
    own = [*formats, *(name + WITH_PREFIX for name in formats if shape.prefix and FORMATS[name].shares)]
    # Copies of a cache are at most as large as what has to rotate, and the cache itself.
    caches = [FORMATS[name.removesuffix(WITH_PREFIX)][:2] for name in own]
    needed = shape.needed_bytes(caches) + (len(own) + 1) * rotated_bytes
    if needed > 0.9 * free:
        reason = f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        return [DecodeMeasurement(shape, key, None, 0, None, reason) for key in (*own, anchor)]
    tokens = Tokens(torch, shape)
    candidates: dict[str, Candidate] = {}
    errors: dict[str, float] = {}
    reasons: dict[str, str] = {}
    sizes: dict[str, int] = {}
    warmup = 2
    for key in (*own, anchor):
        fmt = FORMATS.get(key.removesuffix(WITH_PREFIX), FORMATS["bf16"])
        # torch has a copy of the prefix for each sequence.
        sizes[key] = shape.cache_bytes(fmt.dtype, fmt.group_size, shared=key in own)
        try:
            make = own_step if key in own else _torch_step
            copies = max(1, -(-rotated_bytes // sizes[key]))
            steps = [make(torch, tokens, key) for _ in range(copies)]
            output = steps[0]()
            torch.cuda.synchronize()
            if rotated_bytes and key not in own:  # the timer captures it, and what raises then would end the run
                captured(torch, steps[0])
        except Exception as error:
            # torch raises whatever it likes; the report carries it. Our own errors are not hidden.
            if key in own:
                raise
            reasons[key] = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            continue
        errors[key] = tokens.sampled_error(output)
        limit = ERROR_LIMITS[fmt.dtype]
        if not errors[key] <= limit:
            reasons[key] = f"wrong result: relative L1 {errors[key]:.3g} against fp64, limit {limit}"
            continue
        candidates[key] = _interleaved(steps)
        warmup = max(warmup, copies)
    timings = timer(candidates, warmup=warmup)
    return [
        DecodeMeasurement(shape, key, timings.get(key), sizes[key], errors.get(key), reasons.get(key, ""))
        for key in (*own, anchor)
    ]


def _interleaved(steps: Sequence[Callable[[], Any]]) -> Candidate:
    return lambda number: steps[number % len(steps)]()


class Tokens:
    """Random normal queries, keys and values of one shape, packed: a sequence's tokens behind each other.

    Parameters
    ----------
    torch : module
    shape : DecodeShape
    """

    def __init__(self, torch: Any, shape: DecodeShape) -> None:
        self.torch, self.shape = torch, shape
        generator = torch.Generator(device="cuda").manual_seed(1234)
        self.lengths = shape.lengths()

        def random(*size: int) -> Any:
            return torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=generator)

        self.q = random(shape.batch, shape.queries, shape.heads_q, shape.head_dim)
        self.k, self.v = (random(sum(self.lengths), shape.heads_kv, shape.head_dim) for _ in range(2))
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        begin = 0
        for length in self.lengths if shape.prefix else ():
            for x in (self.k, self.v):
                x[begin : begin + shape.prefix] = x[: shape.prefix]
            begin += length

    def visible(self, tokens: int) -> Any:
        """Which of a sequence's tokens its queries see, bool (queries, tokens): those up to their own."""
        queries, arange = self.shape.queries, self.torch.arange
        own = arange(tokens - queries, tokens, device="cuda")
        return arange(tokens, device="cuda") <= own[:, None]

    def sampled_error(self, output: Any, k: Any = None) -> float:
        """Relative L1 error of the first and the last sequence of (batch, queries, heads_q, head_dim) against fp64.

        ``k``: keys that are in the cache, if not those of the tokens.
        """
        shape, torch = self.shape, self.torch
        keys = self.k if k is None else k
        if tuple(output.shape) != tuple(self.q.shape):
            return float("inf")
        group = shape.heads_q // shape.heads_kv
        difference = total = 0.0
        for b, begin in ((0, 0), (shape.batch - 1, sum(self.lengths[:-1]))):
            rows = slice(begin, begin + self.lengths[b])
            for head in (0, shape.heads_q - 1):
                seen, values = (x[rows, head // group].double() for x in (keys, self.v))
                scores = self.q[b, :, head].double() @ seen.T * shape.head_dim**-0.5
                scores = scores.masked_fill(~self.visible(self.lengths[b]), float("-inf"))
                expected = torch.softmax(scores, dim=-1) @ values
                difference += float((output[b, :, head].double() - expected).abs().sum())
                total += float(expected.abs().sum())
        return difference / total


def own_step(torch: Any, tokens: Tokens, name: str) -> Callable[[], Any]:
    """A cache of a format, filled by ``append``, and the step that is timed: one call of ``decode``."""
    import omniattn

    shape = tokens.shape
    fmt = FORMATS[name.removesuffix(WITH_PREFIX)]
    cache, arrays = make_cache(torch, tokens, fmt)
    # Shared tokens come with the first sequence.
    new = shape.new_tokens()
    ends = list(itertools.accumulate(tokens.lengths))
    rows = [slice(end - count, end) for end, count in zip(ends, new, strict=True)]
    if sum(new) <= _APPEND_ROWS:
        cu_seqlens = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32, device="cuda")
        k, v = (torch.cat([x[own] for own in rows]) if shape.prefix else x for x in (tokens.k, tokens.v))
        omniattn.append(cache, k, v, cu_seqlens=cu_seqlens, **arrays)
    else:
        # All but one sequence of a call have no new tokens.
        for b, own in enumerate(rows):
            cu_seqlens = torch.zeros(shape.batch + 1, dtype=torch.int32, device="cuda")
            cu_seqlens[b + 1 :] = new[b]
            omniattn.append(cache, tokens.k[own], tokens.v[own], cu_seqlens=cu_seqlens, **arrays)
    options: dict[str, Any] = {
        "deterministic": fmt.deterministic,
        "shared_prefix": shape.prefix if name.endswith(WITH_PREFIX) else 0,
    }
    return lambda: omniattn.decode(tokens.q, cache, **options, **arrays)


def make_cache(torch: Any, tokens: Tokens, fmt: CacheFormat) -> tuple[Any, dict[str, Any]]:
    """An empty cache for the tokens, and the arrays that `append` and `decode` take with it."""
    import omniattn

    shape = tokens.shape
    options: dict[str, Any] = {"like": tokens.q, "k_dtype": fmt.dtype, "group_size": fmt.group_size}
    options |= {"layout": fmt.layout, "recent_window": fmt.recent_window}
    arrays = {"seq_lens": tokens.seq_lens}
    if not shape.block_size:
        longest = max(tokens.lengths)
        return omniattn.KVCache(shape.batch, longest, shape.heads_kv, shape.head_dim, **options), arrays
    arrays["block_table"], num_blocks = _block_table(torch, tokens)
    if fmt.recent_window:
        options["recent_slots"] = shape.batch
        arrays["recent_slots"] = torch.arange(shape.batch, dtype=torch.int32, device="cuda")
    return omniattn.PagedKVCache(num_blocks, shape.block_size, shape.heads_kv, shape.head_dim, **options), arrays


def _block_table(torch: Any, tokens: Tokens) -> tuple[Any, int]:
    """(batch, blocks) int32 table and the blocks of the cache: anywhere in it, as after some hours of service."""
    shape = tokens.shape
    counts = [-(-length // shape.block_size) for length in tokens.lengths]
    shared = shape.prefix // shape.block_size
    total = sum(counts) - shared * (shape.batch - 1)
    generator = torch.Generator(device="cuda").manual_seed(5)
    order = torch.randperm(total, device="cuda", generator=generator).to(torch.int32)
    table = torch.zeros((shape.batch, max(counts)), dtype=torch.int32, device="cuda")
    table[:, :shared] = order[:shared]
    begin = shared
    for b, count in enumerate(counts):
        table[b, shared:count] = order[begin : begin + count - shared]
        begin += count - shared
    return table, total


def _torch_step(torch: Any, tokens: Tokens, name: str) -> Callable[[], Any]:
    """torch's attention on contiguous K and V: what there is without a paged cache, so of equal lengths only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = tokens.shape
    if shape.ragged:
        raise ValueError(f"{label(name)} has no lengths of sequences here: equal ones only")
    backend = getattr(SDPBackend, ANCHORS[name])
    size = (shape.batch, shape.seqlen, shape.heads_kv, shape.head_dim)
    q = tokens.q.transpose(1, 2).contiguous()
    # Copies even where the order stays (one head): steps that rotate must not read the same memory.
    k, v = (x.view(size).transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in (tokens.k, tokens.v))
    options: dict[str, Any] = {"enable_gqa": True} if shape.heads_q != shape.heads_kv else {}
    if shape.queries > 1:
        options["attn_mask"] = tokens.visible(shape.seqlen)

    def step() -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return step
