"""The ways to quantize: kernels, heads that go together, CTAs; what they have to do and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..problems import QuantizeProblem, Target
from ..problems.costs import QuantizeCosts
from ..problems.quantize import BLOCK_ROWS, QuantizeGrid, sample_log2
from ..problems.target import Coefficients
from ..registry import KernelSpec
from ..registry.targets import is_carried
from .choice import Selection
from .cost import longest
from .fit import KV_OPS
from .model import rules
from .quantize import (
    VALUES_OPS,
    fitting,
    select_fp8_quantizer,
    select_fp8_values,
    select_kv,
    select_quantizer,
    selected,
)
from .ways import Asked


@dataclass(frozen=True)
class General:
    """The kernel for any knobs, or one made for some.

    Attributes
    ----------
    kernel : Selection
    grid : QuantizeGrid
    """

    kernel: Selection
    grid: QuantizeGrid


@dataclass(frozen=True)
class QuantizeWay:
    """One way to quantize: with the first of these that there is for Q and K, and for V.

    Attributes
    ----------
    values : (Selection, Selection), optional
        The kernels that make e4m3 of Q, K and V in two launches.
    keys_values : (Selection, Selection), optional
        Those that quantize K and V in two launches, where there is no Q.
    rows : Selection, optional
        The kernel that makes e4m3 of Q and K.
    general : General, optional
        Of all, or behind ``rows`` of V.
    """

    values: tuple[Selection, Selection] | None = None
    keys_values: tuple[Selection, Selection] | None = None
    rows: Selection | None = None
    general: General | None = None

    @property
    def text(self) -> str:
        """The way in one line."""
        pairs = *(self.values or ()), *(self.keys_values or ())
        words = [one.spec.name for one in (*pairs, *((self.rows,) if self.rows else ()))]
        if self.general is not None:
            grid = self.general.grid
            words.append(f"{self.general.kernel.spec.name}, {grid.units} heads a group, {grid.ctas_per_sm} CTAs an SM")
        return " and ".join(words)


def asked_of_quantizer(problem: QuantizeProblem, target: Target) -> Asked[QuantizeWay]:
    """What there is to choose among where this is quantized."""
    return Asked(
        "quantize",
        lambda force: _by_rule(problem, target, force),
        lambda: quantize_ways(problem, target),
        lambda way: quantize_work(way, problem, target),
        quantize_us,
        frozenset({"quantize", "quantize_fp8", *VALUES_OPS, *KV_OPS}),
    )


# The ways


def usual_units(problem: QuantizeProblem) -> int:
    """Heads of K and V that the rule has go together: all, or so many that L2 holds them until they are read again.

    Short sequences and ``per_tensor`` have the whole of them read twice.
    """
    p = problem
    usual_rows = p.rows_k // max(p.batch, 1) if p.varlen else p.rows_k
    is_read_twice = (p.qk and p.granularity == "per_tensor") or sample_log2(usual_rows) == 0
    return cached_units(p) if is_read_twice else p.units


def cached_units(problem: QuantizeProblem) -> int:
    """Heads of K and V of `model.Rules.cached_bytes`; one at least."""
    return max(1, min(rules().cached_bytes // max(_unit_bytes(problem), 1), problem.units))


def _unit_bytes(p: QuantizeProblem) -> int:
    return 2 * p.rows_k * p.head_dim * (int(p.qk) + int(p.v))


def _by_rule(problem: QuantizeProblem, target: Target, force: str | None) -> QuantizeWay:
    """Kernels made for the very problem, the fewest launches, all CTAs that are on the GPU at a time."""
    if problem.is_of_keys and (pair := select_kv(problem, target, force)) is not None:
        return QuantizeWay(keys_values=pair)
    if problem.is_of_rows and problem.has_values:
        values = select_fp8_values(problem, target, force)
        if values is not None:
            return QuantizeWay(values=values)
    if not problem.is_of_rows:
        return QuantizeWay(general=_usual(select_quantizer(problem, target, force), problem))
    rows, rest = select_fp8_quantizer(problem, target, force), problem.of_values
    return QuantizeWay(rows=rows, general=_usual(select_quantizer(rest, target, force), rest) if problem.v else None)


def _usual(kernel: Selection, problem: QuantizeProblem) -> General:
    return General(kernel, QuantizeGrid(usual_units(problem), kernel.spec.ctas_per_sm))


def quantize_ways(problem: QuantizeProblem, target: Target) -> tuple[QuantizeWay, ...]:
    """Every way that could be the fastest, in a fixed order.

    Of kernels that the wheel carries for the GPU; where it carries none that serves, of all.
    """
    found = []
    if problem.is_of_rows:
        rest = problem.of_values
        if problem.has_values:
            first, second = ([*_rows(op, problem, target)] for op in VALUES_OPS)
            found += [QuantizeWay(values=(a, b)) for a in first for b in second]
        for rows in _rows("quantize_fp8", problem, target):
            behind = tuple(_general(rest, target)) if problem.v else (None,)
            found += [QuantizeWay(rows=rows, general=general) for general in behind]
    if problem.is_of_keys:
        first, second = ([*_rows(op, problem, target)] for op in KV_OPS)
        found += [QuantizeWay(keys_values=(a, b)) for a in first for b in second]
    found += [QuantizeWay(general=general) for general in _general(problem, target)]
    return tuple(found) or (_by_rule(problem, target, None),)


def _rows(op: str, problem: QuantizeProblem, target: Target) -> Iterator[Selection]:
    """Rows of an operation: made for the problem, and the narrowest of the others."""
    rows = fitting(op, problem, target)
    if any(is_carried(row, target.cc) for row in rows):
        rows = [row for row in rows if is_carried(row, target.cc)]
    elif op in (*VALUES_OPS, *KV_OPS):  # one that is carried for Hopper alone, where all that it does was measured
        return
    for is_special in (True, False):
        alike = [row for row in rows if (row.specialization is not None) == is_special]
        if alike:
            yield selected(op, min(alike, key=lambda row: row.head_dim), problem)


def _general(problem: QuantizeProblem, target: Target) -> Iterator[General]:
    for kernel in _rows("quantize", problem, target):
        most = kernel.spec.ctas_per_sm
        for units in sorted({problem.units, cached_units(problem)}, reverse=True):
            # As many CTAs as are on the GPU at a time, and half of them where there is work for more.
            half = -(-most // 2)
            for ctas in (most, half) if half < most and problem.num_items > half * target.sm_count else (most,):
                yield General(kernel, QuantizeGrid(max(units, 1), ctas))


# What they have to do


class QuantizePart(NamedTuple):
    """One kernel.

    Attributes
    ----------
    kind : str
        ``"general"``, ``"decoded"`` (its items are decoded ahead) or ``"rows"``.
    items : float
        Of a place of a CTA, in units of 64 channels.
    moved : float
        Bytes from memory and to it.
    reread : float
        Bytes that were read for means and ranges before.
    held : float
        Bytes that pass between the two readings.
    groups : int
        Of heads.
    """

    kind: str
    items: float
    moved: float
    reread: float = 0.0
    held: float = 0.0
    groups: int = 0


class QuantizeWork(NamedTuple):
    """A way to quantize.

    Attributes
    ----------
    parts : tuple of QuantizePart
    launches : int
    """

    parts: tuple[QuantizePart, ...]
    launches: int


def quantize_work(way: QuantizeWay, problem: QuantizeProblem, target: Target) -> QuantizeWork:
    """Count what a way has to do."""
    p = problem
    parts: list[QuantizePart] = []
    launches = 1 if p.smooth_q else 0
    if way.values is not None:
        sums, values = (one.spec for one in way.values)
        parts.append(_of_rows(sums, p, target, p.units * p.slots_r))
        items = p.units * p.slots(p.rows_k, BLOCK_ROWS)
        parts.append(QuantizePart("rows", _places(values, items, target), _moved(p.of_values)))
        launches += 2
    if way.keys_values is not None:
        parts.append(_of_keys(way.keys_values[1].spec, p, target))
        launches += 2
    if way.rows is not None:
        parts.append(_of_rows(way.rows.spec, p, target, 0))
        launches += 1
    if way.general is not None:
        parts.append(_of_general(way.general, p if way.rows is None else p.of_values, target))
        launches += 2
    return QuantizeWork(tuple(parts), launches)


def _places(row: KernelSpec, items: int, target: Target, ctas_per_sm: int = 0) -> float:
    """Items that a place of a CTA takes one after the other."""
    return -(-items // (target.sm_count * max(ctas_per_sm or row.ctas_per_sm, 1))) * row.head_dim / 64


def _moved(p: QuantizeProblem) -> float:
    """16 bits are read and 8 written, of each element."""
    batch = 1 if p.varlen else p.batch
    rows = (p.rows_q * p.heads_q + p.rows_k * p.heads_kv if p.qk else 0) + (p.rows_k * p.heads_kv if p.v else 0)
    return 3.0 * batch * p.head_dim * rows


def _blocks(p: QuantizeProblem) -> int:
    """Blocks of rows of Q and K."""
    batch = 1 if p.varlen else p.batch
    of_q, of_k = p.heads_q * p.slots(p.rows_q, BLOCK_ROWS), p.heads_kv * p.slots(p.rows_k, BLOCK_ROWS)
    return batch * (of_q + of_k) if p.qk else 0


def _of_rows(row: KernelSpec, p: QuantizeProblem, target: Target, chunks: int) -> QuantizePart:
    moved = _moved(p) - _moved(p.of_values) if p.v else _moved(p)
    return QuantizePart("rows", _places(row, _blocks(p) + chunks, target), moved)


def _of_keys(row: KernelSpec, p: QuantizeProblem, target: Target) -> QuantizePart:
    """Samples and blocks of K and V, as `_of_general` has them, without heads that others wait for."""
    items = 2 * p.units * p.slots(p.rows_k, BLOCK_ROWS)
    usual_rows = p.rows_k // max(p.batch, 1) if p.varlen else p.rows_k
    samples = 2.0 * p.units * p.rows_k * p.head_dim * 2 / (1 << sample_log2(usual_rows))
    return QuantizePart("decoded", _places(row, items, target), _moved(p), samples, float(p.units * _unit_bytes(p)))


def _of_general(way: General, p: QuantizeProblem, target: Target) -> QuantizePart:
    row, grid, per = way.kernel.spec, way.grid, p.unit_items
    summed = int(p.sums_keys) + int(p.v)
    usual_rows = p.rows_k // max(p.batch, 1) if p.varlen else p.rows_k
    elements = (1 if p.varlen else p.batch) * p.heads_kv * p.rows_k * p.head_dim
    reread = 2.0 * elements * summed / (1 << sample_log2(usual_rows))
    if per.ranges:
        reread += _moved(p) * 2 / 3
    return QuantizePart(
        "general" if row.specialization is None else "decoded",
        _places(row, p.num_items, target, grid.ctas_per_sm),
        _moved(p),
        reread,
        float(grid.units * _unit_bytes(p)),
        -(-p.units // max(grid.units, 1)),
    )


# What that costs


def quantize_us(found: QuantizeWork, own: QuantizeCosts, c: Coefficients) -> float:
    """µs that a way takes."""
    time = c.launch + c.launch_more * (found.launches - 1)
    for one in found.parts:
        part = {"general": 1.0, "decoded": own.decoded, "rows": own.rows}[one.kind]
        time += longest(one.items * own.item * part, one.moved / c.quantize)
        in_l2 = own.cache / (own.cache + one.held)
        time += one.reread * (in_l2 / c.l2 + (1.0 - in_l2) / c.memory) + one.groups * own.group
    return time
