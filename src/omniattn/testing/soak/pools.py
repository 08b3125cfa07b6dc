"""Caches on arrays of the caller: how these lie, what `append` has to write into them, and what it must not.

By docs/kv_formats.md, "Arrays of the caller", and docs/api.md, `from_arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import omniattn
from omniattn.testing.expected import Grade
from omniattn.testing.soak import cache_formats
from omniattn.testing.soak.cache_formats import BITS, DTYPES, Format, Stored
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.formats import e4m3_table
from omniattn.testing.soak.judge import grade, truth
from omniattn.testing.soak.machines import POISON, Machine, NotHereError, Placed
from omniattn.testing.soak.problem import Problem
from omniattn.testing.soak.views import View

#: What scales of 8 bits belong to.
SCALES = ("none", "one", "head", "sequence", "token")
#: How K and V lie: in two memories, in one, side by side in its rows, such rows given as two arrays.
KINDS = ("apart", "pair", "rows", "halves")
_EIGHT_BITS = {"fp8": "float8_e4m3fn", "int8": "int8"}
#: Smallest and largest codes.
_CODES = {"fp8": (-448.0, 448.0), "int8": (-128.0, 127.0)}
#: Error of x / scale in fp32, relative: roundings of x, of a reciprocal, of the product, and divisions of the hardware.
_QUOTIENT = 2.0**-21
#: Scales that are given, beside the size of the tokens: some of these are beyond the largest code then.
_STEP = 0.02


def draw_pool(d: Draw, facts: dict[str, Any], own: str) -> None:
    """Arrays of the caller as a cache; own: its format in 16 bits."""
    name = d.weighted({own: 1.0, "fp8": 1.0, "int8": 1.0})
    unit = 128 // BITS[name]
    dim = -(-facts["head_dims"][0] // unit) * unit
    facts["head_dims"] = (dim, dim)
    kind = d.pick(KINDS)
    pool: dict[str, Any] = {"kind": kind, "layout": d.pick(("NHD", "HND"))}
    pool["view"] = _view(d, 4 if kind == "pair" else 3, unit)
    if unit == 16:
        scales = d.pick(SCALES)
        pool["scales"] = scales
        pool["scale_view"] = _view(d, {"one": 1, "head": 1, "sequence": 2, "token": 3, "none": 0}[scales], 0)
        if scales in ("head", "sequence") and d.chance(0.2):
            pool["scale_view"]["expand"] = (0,)
    facts["pool"], facts["cache"], facts["counted"] = pool, {"k_dtype": name}, f"{name} arrays"


def own_scales(facts: dict[str, Any]) -> bool:
    """Whether sequences have scales of their own, which `append` and ``shared_prefix`` do not take."""
    return facts.get("pool", {}).get("scales") == "sequence"


def draw_nobody(d: Draw) -> Any:
    """What a table's entries left of all windows are: no block, or one that holds NaN."""
    return d.pick((-1, 1 << 30, "unused"))


def _view(d: Draw, outer: int, unit: int) -> View:
    """Dimensions in any order, with gaps few enough for a memory; unit: that of channels behind them, 0 for none."""
    view: View = {}
    if not outer:
        return view
    inner = range(outer, outer + (unit > 0))
    if d.chance(0.6):
        view["order"] = (*sorted(range(outer), key=lambda _: d.uniform(0, 1)), *inner)
    if d.chance(0.6):
        apart, around = d.integer(0, outer), d.integer(0, outer)
        view["step"] = (*(1 + (i == apart) for i in range(outer)), *(1 for _ in inner))
        for side in ("before", "after"):
            view[side] = (*(int(i == around) for i in range(outer)), *(unit * d.integer(0, 2) for _ in inner))
    return view


@dataclass(frozen=True)
class _Pair:
    """K's and V's arrays (blocks, tokens, heads, ...), as they are given, and the memory behind them."""

    places: list[Placed]
    arrays: list[Any]
    hnd: bool

    def rows(self) -> list[Any]:
        """By block and token."""
        return [x.swapaxes(1, 2) if self.hnd else x for x in self.arrays]


class Pool:
    """Arrays of the caller, and a cache on them.

    Attributes
    ----------
    cache : KVCache or PagedKVCache
    scales : str
        One of `SCALES`.
    of_call : sequence of int
        Which sequence of the call each one of the cache is: scales of sequences are those of calls.
    """

    def __init__(self, m: Machine, problem: Problem, blocks: int, size: int) -> None:
        if not m.writable:
            raise NotHereError(f"arrays of {m.library} have no strides, and nobody writes into them")
        facts = problem.facts
        self._m, self._pool, self._dtype = m, facts["pool"], facts["cache"]["k_dtype"]
        batch, heads, dim = len(facts["lengths"]), facts["heads"][1], facts["head_dims"][0]
        self.of_call: Sequence[int] = range(batch)
        self.scales = self._pool.get("scales", "none")
        hnd = self._pool["layout"] == "HND"
        self._shape = (blocks, heads, size, dim) if hnd else (blocks, size, heads, dim)
        self._pairs = self._empty()
        #: Of those that are read only.
        self.fixed: dict[str, Placed] = {}
        given = {}
        if self.scales == "token":
            given = dict(zip(("k_scale", "v_scale"), self._pairs[1].arrays, strict=True))
        elif self.scales != "none":
            shape = {"one": (1,), "head": (heads,), "sequence": (batch, heads)}[self.scales]
            for name in "kv":
                recipe = {"shape": shape, "kind": "uniform", "view": self._pool["scale_view"]}
                numbers = problem.numbers(f"{name}_scale", recipe) * np.float32(_STEP * facts["tokens"][name]["scale"])
                self.fixed[f"{name}_scale"] = m.place(numbers, "float32", recipe["view"], shape)
            given = {name: placed.array for name, placed in self.fixed.items()}
        cls: Any = omniattn.PagedKVCache if "block_size" in facts else omniattn.KVCache
        if self._pool["kind"] == "rows":
            arrays = [self._pairs[0].places[0].array]
        else:
            arrays = self._pairs[0].arrays
        self.cache = cls.from_arrays(*arrays, layout=self._pool["layout"], **given)

    def _empty(self) -> list[_Pair]:
        """The memory of nobody: NaN, in int8 the largest number."""
        kind, dtype = self._pool["kind"], DTYPES.get(self._dtype) or _EIGHT_BITS[self._dtype]
        pairs = [self._pair(kind, self._shape, dtype, self._pool["view"], 0x80 if dtype == "int8" else POISON)]
        if self.scales == "token":
            pairs.append(self._pair("apart", self._shape[:3], "float32", self._pool["scale_view"], POISON))
        return pairs

    def _pair(self, kind: str, shape: tuple[int, ...], dtype: str, view: View, fill: int) -> _Pair:
        m, dim = self._m, shape[-1]
        if kind == "apart":
            places = [m.room(shape, dtype, view) for _ in "kv"]
            arrays = [x.array for x in places]
        elif kind == "pair":
            places = [m.room((2, *shape), dtype, view)]
            arrays = [places[0].array[i] for i in range(2)]
        else:
            places = [m.room((*shape[:-1], 2 * dim), dtype, view)]
            arrays = [places[0].array[..., :dim], places[0].array[..., dim:]]
        for x in places:
            m.bytes_of(x.base)[...] = fill
        return _Pair(places, arrays, self._pool["layout"] == "HND")

    @property
    def places(self) -> dict[str, Placed]:
        """All memory of the caller."""
        own = [x for pair in self._pairs for x in pair.places]
        return self.fixed | {f"the caller's array {i}": x for i, x in enumerate(own)}

    def fill(self, rng: np.random.Generator, blocks: Any, rows: Any) -> None:
        """Codes of any numbers, where there is no scale that `append` could take."""
        m = self._m
        for x in self._pairs[0].rows():
            codes = rng.integers(0, 256, (len(blocks), *x.shape[2:]), dtype=np.uint8)
            if self._dtype == "fp8":
                codes[codes & 127 == 127] = 0  # NaN
            m.codes(x)[m.ints(blocks), m.ints(rows)] = m.place(codes, "uint8", {}).array

    def read(self, name: str, b: int, blocks: Any, rows: Any) -> Stored:
        """Rows of a sequence: what they stand for, and their scales, (tokens, heads)."""
        m, which = self._m, "kv".index(name)
        x = self._pairs[0].rows()[which]
        if self._dtype == "fp8":
            numbers = m.number(e4m3_table())[m.int64(m.codes(x)[blocks, rows])]
        else:
            numbers = m.f64(x[blocks, rows])
        if self.scales == "none":
            return Stored(numbers, abs(numbers), m.full(numbers.shape[:2], 1.0), None)
        if self.scales == "token":
            scale = m.f64(self._pairs[1].rows()[which][blocks, rows])
        else:
            scale = m.f64(self.fixed[f"{name}_scale"].array)
            scale = scale[self.of_call[b]] if self.scales == "sequence" else scale
            scale = m.broadcast(scale[None], numbers.shape[:2])
        values = numbers * scale[..., None]
        return Stored(values, abs(values), scale, None)

    def compare(self, name: str, fmt: Format, got: Stored, wanted: Any, own: float) -> list[Grade]:
        """What `append` has written beside tokens (tokens, heads, dim); own: as `cache_formats.compare` has it."""
        m = self._m
        if not fmt.quantized:
            return cache_formats.compare(m, f"cache.{name}", fmt, got, wanted, False, own)
        least, most = _CODES[fmt.dtype]
        scale, grades = got.scale[..., None], []
        if self.scales == "token":
            # One division in fp32.
            fits = m.maximum(m.amax(abs(wanted), 2) / most, 2.0**-60)
            grades.append(grade(m, f"cache.{name}_scale", scale, fits, fits * 2.0**-22 + own / most))
        x = m.maximum(-m.maximum(-wanted / scale, -most), least)
        # No code is nearer, but for errors of the quotient: those move the middle of two codes.
        slop = 2 * (abs(x) * _QUOTIENT + own / scale)
        codes = got.values / scale
        grades.append(grade(m, f"cache.{name}", codes, x, abs(_nearest(m, x, fmt.dtype) - x) + slop + 2.0**-40))
        return grades

    def untouched(self, blocks: Any, rows: Any) -> Grade:
        """All memory but that of these rows is as it was."""
        m, fresh = self._m, self._empty()
        at = m.ints(blocks), m.ints(rows)
        for pair, now in zip(fresh, self._pairs, strict=True):
            for x, y in zip(pair.rows(), now.rows(), strict=True):
                if self._dtype in _EIGHT_BITS and len(x.shape) == 4:
                    x, y = m.codes(x), m.codes(y)
                x[at] = y[at]
        return truth("elsewhere", self._same(fresh), "append has written into memory of no token")

    def copied(self, call: Callable[[], None], pairs: list[tuple[int, int]]) -> Grade:
        """Copy blocks: all of them, and nothing else."""
        m, copy = self._m, self._empty()
        for pair, now in zip(copy, self._pairs, strict=True):
            for x, y in zip(pair.places, now.places, strict=True):
                m.bytes_of(x.base)[...] = m.bytes_of(y.base)
        call()
        m.synchronize()
        for pair in copy:
            for x in pair.arrays:
                for source, destination in pairs:
                    x[destination] = x[source]
        return truth("copy_blocks", self._same(copy), "other bytes than those copied")

    def _same(self, pairs: list[_Pair]) -> bool:
        """Whether all memory has the bytes of these."""
        m = self._m
        return all(
            m.same(m.bytes_of(x.base), m.bytes_of(y.base))
            for pair, now in zip(pairs, self._pairs, strict=True)
            for x, y in zip(pair.places, now.places, strict=True)
        )


def _nearest(m: Machine, x: Any, dtype: str) -> Any:
    """The code next to numbers that are no larger than the largest code.

    Sums and products with numbers of 53 bits leave the bits that a code has.
    """
    whole = 1.5 * 2.0**52
    if dtype == "int8":
        return (x + whole) - whole
    least = whole * 2.0**-9
    far = x * (2.0**49 + 1.0)
    return m.where(abs(x) < 2.0**-6, (x + least) - least, far - (far - x))
