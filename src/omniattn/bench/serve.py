"""``omniattn bench serve``: steps of an engine on its own pools, beside own caches and FlashAttention-3."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omniattn.bench.anchors import EXACT_ERROR, QUANTIZED_ERROR
from omniattn.bench.ceilings import measure_ceilings
from omniattn.bench.decode_report import DecodeShape
from omniattn.bench.document import document, environment, samples_of, timing_facts
from omniattn.bench.sustained import captured, choose_timer
from omniattn.bench.timing import Candidate, Timer, Timing, require_torch
from omniattn.errors import ArgumentError

FA3 = "FlashAttention-3"
OURS = "omniattn"
DIM = 128
#: Rows of a sequence that are checked: its last ones.
_CHECKED = 16
_PAGES = (1, 16, 64, 256)


@dataclass(frozen=True)
class Case:
    """One step: new tokens of some sequences over a pool that holds them already.

    Attributes
    ----------
    section : str
        What it is about; the contenders follow from it (`BESIDE`).
    rows, lengths : tuple of int
        New tokens of each sequence, and all of its tokens.
    heads, kv_heads, page : int
    e4m3 : bool
        The pool is in e4m3, with a scale for each sequence and kv head.
    planned : int
        Tokens of a sequence that the block table has room for, if more than it has.
    shared : tuple of (int, int)
        First tokens that groups of sequences have in the same pages, level by level: how many, and sequences of a
        group.
    """

    section: str
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    page: int
    e4m3: bool = False
    planned: int = 0
    shared: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """For example ``decode b32 h8/1 t8192 p16``."""
        tokens = f"t{self.lengths[0]}" if len({*self.lengths}) == 1 else f"{sum(self.lengths)} tokens"
        rows = f" q{self.rows[0]}" if len({*self.rows}) == 1 else f" {sum(self.rows)} rows"
        shape = f"b{len(self.rows)} h{self.heads}/{self.kv_heads} {tokens} p{self.page}"
        levels = "".join(f" {tokens} of {count}" for tokens, count in self.shared)
        return f"{self.section} {shape}{rows if max(self.rows) > 1 else ''}{levels}"

    @property
    def pairs(self) -> int:
        """Pairs of query and key that count, of one head."""
        return sum(n * length - n * (n - 1) // 2 for n, length in zip(self.rows, self.lengths, strict=True))

    @property
    def flops(self) -> int:
        """Of both products."""
        return 4 * self.heads * DIM * self.pairs

    @property
    def tables(self) -> list[list[int]]:
        """Pages of each sequence: numbers without gaps, those of shared tokens the same."""
        fresh, found = itertools.count(), list[list[int]]()
        for b, length in enumerate(self.lengths):
            pages: list[int] = []
            for tokens, count in self.shared:
                new = len(pages) + tokens // self.page
                pages = (
                    found[b - b % count][:new] if b % count else [*pages, *itertools.islice(fresh, new - len(pages))]
                )
            found.append([*pages, *itertools.islice(fresh, -(-length // self.page) - len(pages))])
        return found

    @property
    def once(self) -> int:
        """Tokens of all sequences, those that are shared counted once."""
        again = sum(tokens * (len(self.rows) - -(-len(self.rows) // count)) for tokens, count in self.shared)
        return sum(self.lengths) - again

    @property
    def bytes(self) -> int:
        """K and V of all sequences, q and o, each once."""
        return 2 * DIM * ((1 if self.e4m3 else 2) * self.once * self.kv_heads + 2 * sum(self.rows) * self.heads)

    @property
    def by_bytes(self) -> bool:
        """Whether the memory decides: no sequence has a prompt."""
        return max(self.rows) <= _CHECKED


#: What stands beside this package's call on the pool, by section.
BESIDE: dict[str, tuple[str, ...]] = {
    "decode": ("own cache", FA3),
    "prompts": ("contiguous", FA3),
    "mixed": ("one after the other", FA3),
    "drafts": ("as a batch", FA3),
    "graph": ("planned for the length", FA3),
    "shared": ("each alone", "in levels", "as decode's prefix", FA3),
    "chunks": ("each alone", "in levels", FA3),
}
_MIXED = tuple(DecodeShape(64, 32, 8, 4096, ragged=True).lengths())


def _shared(shared: tuple[tuple[int, int], ...], batch: int, rows: int = 1) -> Case:
    """Requests with 512 tokens of their own behind shared ones, the last ``rows`` of which are new."""
    length = sum(tokens for tokens, _ in shared) + 512
    return Case("shared" if rows == 1 else "chunks", (rows,) * batch, (length,) * batch, 32, 8, 64, shared=shared)


CASES: tuple[Case, ...] = (
    *(
        Case("decode", (1,) * batch, (8192,) * batch, heads, kv_heads, page, e4m3)
        for e4m3 in (False, True) for heads, kv_heads in ((8, 1), (32, 8)) for batch in (1, 32, 128) for page in _PAGES
    ),
    *(Case("prompts", (2048,) * batch, (34816,) * batch, 32, 8, page) for batch in (1, 4) for page in _PAGES),
    *(Case("prompts", (n,), (32768 + n,), 32, 8, 64, True) for n in (2048, 512, 128, 32)),
    *(
        Case("mixed", (1,) * 64 + (n,) * count, (*_MIXED, *(4096,) * count), 32, 8, 64, e4m3)
        for e4m3 in (False, True) for n, count in ((4096, 2), (512, 8))
    ),
    *(Case("drafts", (n,) * batch, (8192,) * batch, 32, 8, 64) for batch in (1, 8, 64) for n in (2, 4, 8)),
    *(Case("graph", (1,), (n,), 32, 8, 64, planned=131072) for n in (100, 1024, 8192, 32768, 131072)),
    *(_shared(((n, batch),), batch) for batch in (32, 128) for n in (2048, 8192, 32768)),
    *(_shared(((8192, batch), (4096, 8)), batch) for batch in (32, 128)),
    *(_shared(((n, 4),), 4, 512) for n in (8192, 32768)),
)  # fmt: skip


def cases_of(texts: Sequence[str], *, quick: bool) -> tuple[Case, ...]:
    """Cases with one of these texts in their name, or all; quick: the first one of each section and type."""
    found = [c for c in CASES if not texts or any(text in c.name + " e4m3" * c.e4m3 for text in texts)]
    if not found:
        raise ArgumentError("--case", "a text in the name of a case, e.g. 'decode b1'", ", ".join(texts))
    firsts = {(c.section, c.e4m3): c for c in reversed(found)}
    return tuple(c for c in found if not quick or c is firsts[c.section, c.e4m3])


class Pool:
    """Random tokens of a case in pages anywhere in a pool, and what calls take with them."""

    def __init__(self, torch: Any, case: Case) -> None:
        self.torch, self.case, batch = torch, case, len(case.rows)
        generator = torch.Generator(device="cuda").manual_seed(1234)
        pages = case.tables
        num_pages = max(map(max, pages)) + 1
        order = torch.randperm(num_pages, device="cuda", generator=generator).to(torch.int32)
        width = -(-max(case.planned, *case.lengths) // case.page)
        self.table = torch.zeros((batch, width), dtype=torch.int32, device="cuda")
        for b, own in enumerate(pages):
            self.table[b, : len(own)] = order[torch.tensor(own, device="cuda")]
        random = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda", generator=generator)
        self.q = random((sum(case.rows), case.heads, DIM))
        self.k, self.v = (random((num_pages, case.page, case.kv_heads, DIM)) for _ in "kv")
        self.scales: dict[str, Any] = {}
        if case.e4m3:
            self.k, self.v = (x.to(torch.float8_e4m3fn) for x in (self.k, self.v))
            size = (batch, case.kv_heads)
            self.scales = {f"{x}_scale": 0.5 + torch.rand(size, device="cuda", generator=generator) for x in "kv"}
            # In e4m3, which FlashAttention-3 takes no other queries with; its numbers are those of all.
            self.q = self.q.to(torch.float8_e4m3fn).to(torch.bfloat16)
        self.lens = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
        self.bounds = [0, *itertools.accumulate(case.rows)]
        self.starts = torch.tensor(self.bounds, dtype=torch.int32, device="cuda")
        self.alike = len({*case.rows}) == 1

    def batch(self, x: Any) -> Any:
        """Rows as (batch, rows, heads, dim)."""
        return x.view(len(self.case.rows), -1, self.case.heads, DIM)

    def tokens(self, b: int) -> list[Any]:
        """K and V of a sequence, (tokens, kv_heads, dim), in bf16."""
        length = self.case.lengths[b]
        pages = self.table[b, : -(-length // self.case.page)].long()
        found = [x[pages].flatten(0, 1)[:length] for x in (self.k, self.v)]
        if self.scales:
            scales = (self.scales[f"{name}_scale"][b, :, None] for name in "kv")
            found = [(x.float() * s).to(self.torch.bfloat16) for x, s in zip(found, scales, strict=True)]
        return found

    def error(self, o: Any) -> float:
        """Relative L1 error against fp64: last rows of the first and the last sequence, first and last head."""
        case, torch, off, total = self.case, self.torch, 0.0, 0.0
        if o.numel() != self.q.numel():
            return float("inf")
        o = o.reshape(self.q.shape)
        for b in {0, len(case.rows) - 1}:
            k, v = self.tokens(b)
            n, length = min(case.rows[b], _CHECKED), case.lengths[b]
            own = slice(self.bounds[b + 1] - n, self.bounds[b + 1])
            seen = torch.arange(length, device="cuda") <= torch.arange(length - n, length, device="cuda")[:, None]
            for head in (0, case.heads - 1):
                of = head // (case.heads // case.kv_heads)
                scores = (self.q[own, head].double() @ k[:, of].double().T * DIM**-0.5).masked_fill(~seen, -torch.inf)
                expected = torch.softmax(scores, -1) @ v[:, of].double()
                off += float((o[own, head].double() - expected).abs().sum())
                total += float(expected.abs().sum())
        return off / total


Step = Callable[[], Any]


def _ours(pool: Pool, table: Any = None) -> Step:
    """One call on the pool: packed rows, or single tokens as a batch."""
    import omniattn

    cache = omniattn.PagedKVCache.from_arrays(pool.k, pool.v, **pool.scales)
    options = {"seq_lens": pool.lens, "block_table": pool.table if table is None else table}
    if max(pool.case.rows) == 1:
        return lambda: omniattn.attention_with_kvcache(pool.batch(pool.q), cache, **options)
    packed = {"cu_seqlens_q": pool.starts, "max_seqlen_q": max(pool.case.rows)}
    return lambda: omniattn.attention_with_kvcache(pool.q, cache, **options, **packed)


def _with_shared(pool: Pool, shared: Any) -> Step:
    """The call on the pool with ``shared_prefix``."""
    import omniattn

    cache = omniattn.PagedKVCache.from_arrays(pool.k, pool.v, **pool.scales)
    q, places = pool.batch(pool.q), {"seq_lens": pool.lens, "block_table": pool.table}
    return lambda: omniattn.attention_with_kvcache(q, cache, **places, shared_prefix=shared)


def _runs(pool: Pool) -> Any:
    """What the case's sequences share, as `BlockManager.shared_runs` has it."""
    from omniattn.kv.runs import SharedRuns, runs_of

    case, tables = pool.case, pool.table.tolist()
    limits = [(n - rows) // case.page for n, rows in zip(case.lengths, case.rows, strict=True)]
    return SharedRuns(
        tuple(range(len(tables))), case.rows, case.lengths, tuple(tables), case.page, runs_of(tables, limits)
    )


def _in_levels(pool: Pool) -> Step:
    return _with_shared(pool, _runs(pool).arrays().map(lambda x: pool.torch.tensor(x, device="cuda")))


def _by_choice(pool: Pool) -> Step:
    """In the levels that the model of costs takes, or none."""
    import omniattn

    cache = omniattn.PagedKVCache.from_arrays(pool.k, pool.v, **pool.scales)
    runs = omniattn.choose_shared_runs(_runs(pool), cache, num_q_heads=pool.case.heads)
    shared = runs.arrays().map(lambda x: pool.torch.tensor(x, device="cuda")) if runs.runs else 0
    return _with_shared(pool, shared)


def _as_prefix(pool: Pool) -> Step:
    """The first level as a number: in single tokens the two passes of `decode`."""
    return _with_shared(pool, pool.case.shared[0][0])


def _as_a_batch(pool: Pool) -> Step:
    import omniattn

    cache = omniattn.PagedKVCache.from_arrays(pool.k, pool.v, **pool.scales)
    q, options = pool.batch(pool.q), {"seq_lens": pool.lens, "block_table": pool.table}
    return lambda: omniattn.attention_with_kvcache(q, cache, **options)


def _own_cache(pool: Pool) -> Step:
    """`decode` from a contiguous cache of this package, in bf16 or with scales of its own."""
    import omniattn

    case, q = pool.case, pool.batch(pool.q)
    options = {"like": pool.q, "k_dtype": "fp8" if case.e4m3 else "bf16"}
    cache = omniattn.KVCache(len(case.rows), max(case.lengths), case.kv_heads, DIM, **options)
    for b, length in enumerate(case.lengths):
        starts = pool.torch.zeros(len(case.rows) + 1, dtype=pool.torch.int32, device="cuda")
        starts[b + 1 :] = length
        omniattn.append(cache, *pool.tokens(b), seq_lens=pool.lens, cu_seqlens=starts)
    return lambda: omniattn.decode(q, cache, seq_lens=pool.lens)


def _contiguous(pool: Pool) -> Step:
    import omniattn

    found = [pool.tokens(b) for b in range(len(pool.case.rows))]
    k, v = (pool.torch.stack(x) for x in zip(*found, strict=True))
    return lambda: omniattn.attention(pool.batch(pool.q), k, v, causal=True)


def _one_after_the_other(pool: Pool) -> Step:
    """`decode` of the sequences with one row, which come first, then the prompts."""
    import omniattn

    singles, out = pool.case.rows.count(1), pool.torch.empty_like(pool.q)
    ones, others = (
        omniattn.PagedKVCache.from_arrays(pool.k, pool.v, **{name: scale[own] for name, scale in pool.scales.items()})
        for own in (slice(singles), slice(singles, None))
    )
    starts, longest = (pool.starts[singles:] - singles).contiguous(), max(pool.case.rows)
    lens, table = (pool.lens[:singles], pool.lens[singles:]), (pool.table[:singles], pool.table[singles:])

    def step() -> Any:
        omniattn.decode(
            pool.q[:singles, None], ones, seq_lens=lens[0], block_table=table[0], out=out[:singles, None]
        )  # fmt: skip
        omniattn.attention_with_kvcache(
            pool.q[singles:], others, seq_lens=lens[1], block_table=table[1], cu_seqlens_q=starts, max_seqlen_q=longest,
            out=out[singles:],
        )  # fmt: skip
        return out

    return step


def _planned(pool: Pool) -> Any:
    """The table that a call for the length alone has."""
    return pool.table[:, : -(-max(pool.case.lengths) // pool.case.page)].contiguous()


def _fa3(pool: Pool) -> Step:
    import flash_attn_interface  # type: ignore[import-not-found, unused-ignore]

    q, options = pool.q, {"page_table": _planned(pool), "cache_seqlens": pool.lens, "causal": True}
    if pool.case.e4m3:
        q = q.to(pool.torch.float8_e4m3fn)
        options |= {f"{name}_descale": pool.scales[f"{name}_scale"] for name in "kv"}
    if pool.alike:
        q = pool.batch(q)
    else:
        options |= {"cu_seqlens_q": pool.starts, "max_seqlen_q": max(pool.case.rows)}
    return lambda: flash_attn_interface.flash_attn_with_kvcache(q, pool.k, pool.v, **options)


_BUILD: dict[str, Callable[[Pool], Step]] = {
    OURS: _ours, "own cache": _own_cache, "contiguous": _contiguous, "one after the other": _one_after_the_other,
    "each alone": functools.partial(_with_shared, shared=0), "in levels": _in_levels, "as decode's prefix": _as_prefix,
    "as a batch": _as_a_batch, "planned for the length": lambda pool: _ours(pool, _planned(pool)), FA3: _fa3,
}  # fmt: skip


@dataclass(frozen=True)
class ServeMeasurement:
    """A contender on a case; timing None with the reason why."""

    case: Case
    contender: str
    timing: Timing | None
    relative_l1: float | None
    reason: str

    @property
    def us(self) -> float | None:
        """Median."""
        return None if self.timing is None else self.timing.median_us


@dataclass(frozen=True)
class ServeReport:
    """All cases of one run; ``missing``: libraries that could not be imported."""

    environment: dict[str, str]
    matmul_tflops: float
    copy_tb_per_s: float
    measurements: tuple[ServeMeasurement, ...]
    missing: dict[str, str]
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON (`document`)."""
        found = {(m.case, m.contender): m.us for m in self.measurements}
        rows = []
        for m in self.measurements:
            best = found.get((m.case, FA3)) if m.contender != FA3 else None
            rows.append({
                "section": m.case.section, "case": m.case.name, "e4m3": m.case.e4m3, "contender": m.contender,
                **timing_facts(m.timing), "decides": "bytes" if m.case.by_bytes else "flops",
                "tb_per_s": None if m.us is None else m.case.bytes / m.us * 1e-6,
                "tflops": None if m.us is None else m.case.flops / m.us * 1e-6,
                "over_best_other": None if m.us is None or best is None else best / m.us,
                "relative_l1": m.relative_l1, "reason": m.reason,
            })  # fmt: skip
        return document(
            "serve", protocol="interleaved", command=self.command, environment=self.environment, rows=rows,
            ceilings={"matmul_tflops": self.matmul_tflops, "copy_tb_per_s": self.copy_tb_per_s}, missing=self.missing,
            samples=[samples_of(m.timing) for m in self.measurements],
        )  # fmt: skip

    def notes(self) -> list[str]:
        """What was not run, or not right."""
        wrong = [f"{m.contender}, {m.case.name}: {m.reason}" for m in self.measurements if m.reason]
        return [f"not run: {name}, {reason}" for name, reason in self.missing.items()] + wrong


def table_of(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a report's rows: one a case, with what stands beside this package's call."""
    cases: dict[tuple[str, bool], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["case"], row["e4m3"]), {})[row["contender"]] = row
    lines = []
    for (name, e4m3), found in cases.items():
        own, other = found[OURS], found.get(FA3)
        unit, key, digits = ("TB/s", "tb_per_s", 2) if own["decides"] == "bytes" else ("TFLOP/s", "tflops", 0)
        beside = [f"{_number(x['median_us'])} {c}" for c, x in found.items() if c not in (OURS, FA3)]
        speed = "–" if own[key] is None else f"{own[key]:.{digits}f} {unit}"
        over = "–" if own["over_best_other"] is None else f"{own['over_best_other']:.2f}×"
        fa3 = "–" if other is None else _number(other["median_us"])
        lines.append([name + " e4m3" * e4m3, _number(own["median_us"]), speed, ", ".join(beside), fa3, over])
    return ["case", "µs", "speed", "beside, µs", f"{FA3}, µs", "over it"], lines


def _number(us: float | None) -> str:
    return "–" if us is None else f"{us:.1f}"


def run_serve(
    cases: Sequence[Case], *, iters: int, command: str = "", progress: Callable[[str], None] = lambda _: None
) -> ServeReport:
    """Time cases on torch's current CUDA device; all contenders of one run in each of ``iters`` rounds.

    Raises
    ------
    BenchError
        torch or a CUDA device is missing.
    """
    torch = require_torch()
    found: list[ServeMeasurement] = []
    there = importlib.util.find_spec("flash_attn_interface") is not None
    missing = {} if there else {FA3: "flash_attn_interface cannot be imported"}
    with choose_timer(torch, iters, None) as timer:
        progress("ceilings")
        ceilings = measure_ceilings(torch, timer)
        for case in cases:
            progress(case.name)
            found += _run_case(torch, timer, case, missing)
            torch.cuda.empty_cache()
    facts = environment(torch, ["tokenspeed-fa3"] if there else [])
    return ServeReport(facts, ceilings.matmul_tflops, ceilings.copy_tb_per_s, tuple(found), missing, command)


def _run_case(torch: Any, timer: Timer, case: Case, missing: dict[str, str]) -> list[ServeMeasurement]:
    pool = Pool(torch, case)
    candidates: dict[str, Candidate] = {}
    errors: dict[str, float] = {}
    reasons: dict[str, str] = {}
    names = [name for name in (OURS, *BESIDE[case.section]) if name not in missing]
    for name in names:
        try:
            step = (_by_choice if name == OURS and case.shared else _BUILD[name])(pool)
            errors[name] = pool.error(step())
            torch.cuda.synchronize()
            run = captured(torch, step)  # the shortest steps take longer to enqueue than to run
        except Exception as error:
            if name != FA3:  # another library raises whatever it likes
                raise
            reasons[name] = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            continue
        limit = QUANTIZED_ERROR if case.e4m3 and name != OURS else EXACT_ERROR
        if errors[name] <= limit:
            candidates[name] = lambda _, run=run: run()  # type: ignore[misc]
        else:
            reasons[name] = f"wrong result: relative L1 {errors[name]:.3g} against fp64, limit {limit}"
    timings = timer(candidates)
    return [ServeMeasurement(case, n, timings.get(n), errors.get(n), reasons.get(n, "")) for n in names]
