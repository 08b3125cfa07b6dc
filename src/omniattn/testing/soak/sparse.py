"""Sparse attention: ``attention_sparse`` on arrays and caches, and ``decode`` with ``indices``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import omniattn
from omniattn.testing.expected import Grade
from omniattn.testing.soak import formulas
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.formulas import Keys, Rules
from omniattn.testing.soak.judge import equal, grade, repeated, truth, unchanged
from omniattn.testing.soak.latent_rows import draw_format, draw_rows, limits_of, place_rows
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.problem import Problem
from omniattn.testing.soak.views import View

#: What ``kv`` is.
SOURCES = ("rows", "rows with a head", "pages", "sequences")
#: Entries of all lists times query heads, at most.
_MOST = 1 << 24


def draw(d: Draw) -> dict[str, Any]:
    """Facts of a problem."""
    source = d.weighted(dict(zip(SOURCES, (1.0, 1.0, 3.0, 1.0), strict=True)))
    facts: dict[str, Any] = draw_format(d, scaled=not source.startswith("rows"))
    dim = facts["head_dims"][0]
    heads = d.pick((1, 3, 8)) if d.cpu else d.pick((1, 5, 16, 32, 64, 100, 128))
    topk = max(d.length(100 if d.cpu else 2100), 1)
    tokens = d.weighted({1: 2.0, 2: 1.0, 5: 2.0, 17: 1.0, **({} if d.cpu else {140: 0.5, 300: 0.5})})
    tokens = max(min(tokens, _MOST // (topk * heads)), 1)
    facts |= {"source": source, "heads": (heads, 1), "topk": topk}
    facts["function"] = "attention_sparse" if source.startswith("rows") or d.chance(0.5) else "decode"
    queries: tuple[int, ...] = (tokens,)
    if facts["function"] == "decode":
        q_len = d.weighted({1: 3.0, 2: 1.0, 5: 1.0, 20: 0.3})
        queries = (max(tokens // q_len, 1), q_len)
    facts |= _draw_rows(d, source)
    shape = (*queries, heads, dim)
    arrays: dict[str, Any] = {"q": {**d.numbers(shape, "io", loud=False), "view": _view(d, shape)}}
    arrays |= draw_rows(d, facts, facts["lead"])
    if d.chance(0.25):
        arrays["sinks"] = {"shape": (heads,), "dtype": d.pick(("float32", "io")), "kind": "normal", "scale": 2.0}
    if d.chance(0.3):
        facts["out"] = _view(d, (*queries, heads, facts["head_dims"][1]), written=True)
    facts["arrays"] = arrays
    _draw_lists(d, facts)
    options: dict[str, Any] = {"return_lse": True} if d.chance(0.7) else {}
    if facts["function"] == "attention_sparse" and d.chance(0.5):
        options["return_max"] = True
    if d.chance(0.3):
        options["softmax_scale"] = d.pick((0.1, 0.02, -0.05))
    if d.chance(0.2):
        options["softcap"] = d.pick((20.0, 1.0))
    if d.chance(0.3):
        options["deterministic"] = True
    return {**facts, "options": options}


def _draw_rows(d: Draw, source: str) -> dict[str, Any]:
    """Dimensions of the rows' array before the channels, and how these are given."""
    most = 150 if d.cpu else 4000
    if source.startswith("rows"):
        rows = max(d.length(most), 1)
        return {"lead": (rows,) if source == "rows" else (rows, 1)}
    size = d.pick((64, 16, 1, 7, 256)) if source == "pages" else max(d.length(most // 2), 1)
    blocks = max(d.length(most) // size, 1) if source == "pages" else d.integer(1, 3)
    found: dict[str, Any] = {"layout": d.pick(("NHD", "HND"))}
    found["lead"] = (blocks, size, 1) if found["layout"] == "NHD" else (blocks, 1, size)
    return found


def _draw_lists(d: Draw, facts: dict[str, Any]) -> None:
    """What the lists are made of: invalid numbers anywhere or at the end, lists that have nothing else, lengths."""
    facts["invalid"] = d.weighted({0.0: 1.0, 0.1: 2.0, 0.7: 1.0})
    facts["nothing"] = d.chance(0.3)
    facts["sorted"] = d.chance(0.3)
    facts["head"] = facts["function"] == "attention_sparse" and d.chance(0.4)
    if d.chance(0.6):
        # A number beyond the list is refused on the CPU.
        facts["topk_length"] = {"flat": d.chance(0.5), "beyond": not d.cpu and d.chance(0.2)}
    facts["poisoned"] = d.chance(0.5)


def _view(d: Draw, shape: tuple[int, ...], *, written: bool = False) -> View:
    """q's strides, and o's: of decode the first two dimensions lie as one."""
    if len(shape) == 3:
        return d.view(shape, 8, written=written)
    if d.chance(0.5):
        return {}
    before, after = ((0, 0, d.integer(0, 2), 8 * d.integer(0, 2)) for _ in range(2))
    return {"before": before, "after": after}


@dataclass(frozen=True)
class _Lists:
    """What each query token's list has.

    Attributes
    ----------
    indices : int32 (tokens, topk)
    lengths : int32 (tokens,) or None
    keys : list of arrays
        The rows that count, as often as they are named.
    """

    indices: npt.NDArray[Any]
    lengths: npt.NDArray[Any] | None
    keys: list[npt.NDArray[Any]]


def lists(problem: Problem) -> _Lists:
    """The lists of a problem, of its seed and number."""
    facts = problem.facts
    rng = np.random.default_rng((problem.seed, problem.number))
    rows, topk = int(np.prod(facts["lead"])), facts["topk"]
    tokens = int(np.prod(facts["arrays"]["q"]["shape"][:-2]))
    indices = rng.integers(0, rows, (tokens, topk))
    for wrong, part in ((-1, 1.0), (rows, 0.2), (-(2**31), 0.2), (2**31 - 1, 0.2)):
        indices[rng.random((tokens, topk)) < facts["invalid"] * part] = wrong
    if facts["nothing"]:
        indices[rng.integers(0, tokens)] = -1
    if facts["sorted"]:
        indices = -np.sort(-indices, axis=1)
    lengths = None
    if "topk_length" in facts:
        lengths = rng.integers(0, topk + 1, tokens).astype(np.int32)
        if facts["topk_length"]["beyond"]:
            lengths[rng.integers(0, tokens)] = topk + 1 + rng.integers(0, 100)
    counted = [x if lengths is None else x[: lengths[i]] for i, x in enumerate(indices)]
    return _Lists(indices.astype(np.int32), lengths, [x[(x >= 0) & (x < rows)] for x in counted])


class _Sparse:
    """A problem's arrays and its call."""

    def __init__(self, m: Machine, problem: Problem) -> None:
        facts = problem.facts
        self._m, self._facts, self._options = m, facts, problem.options()
        self.lists = lists(problem)
        unseen = None
        if facts["poisoned"]:
            unseen = np.ones(int(np.prod(facts["lead"])), bool)
            unseen[np.concatenate([x.reshape(-1) for x in self.lists.keys])] = False
        stored = place_rows(m, problem, unseen)
        self.arrays = {name: problem.place(m, name) for name in facts["arrays"] if name in ("q", "sinks")}
        self.arrays |= stored.placed
        self.rows = stored.meant.reshape(-1, facts["head_dims"][0])
        self._kv, dim_v = self.arrays["k"].array, facts["head_dims"][1]
        if facts["source"].startswith("rows"):
            self._options["head_dim_v"] = dim_v
        else:
            kind = omniattn.PagedKVCache if facts["source"] == "pages" else omniattn.KVCache
            self._kv = kind.from_arrays(self._kv, layout=facts["layout"], head_dim_v=dim_v, **stored.options)
        lead = facts["arrays"]["q"]["shape"][:-2]
        head = (1,) if facts["head"] else ()
        indices = self.lists.indices.reshape(*lead, *head, -1)
        self.given = {"indices": m.place(indices, "int32", {}).array}
        if self.lists.lengths is not None:
            flat = len(lead) == 1 or (facts["topk_length"]["flat"] and lead[1] == 1)
            lengths = self.lists.lengths.reshape(lead[:1] if flat else lead)
            self.given["topk_length"] = m.place(lengths, "int32", {}).array
        self.out = None
        if "out" in facts and m.writable:
            shape = (*facts["arrays"]["q"]["shape"][:-1], dim_v)
            self.out = m.room(shape, problem.dtype, facts["out"])

    def run(self, only: int | None = None) -> tuple[Any, ...]:
        """The call; only: of one token, or one sequence of them."""
        part = slice(None) if only is None else slice(only, only + 1)
        call = {name: x[part] for name, x in self.given.items()} if only is not None else dict(self.given)
        q = self.arrays["q"].array
        if "sinks" in self.arrays:
            call["sinks"] = self.arrays["sinks"].array
        if self.out is not None and only is None:
            call["out"] = self.out.array
        result = getattr(omniattn, self._facts["function"])(
            q if only is None else q[part], self._kv, **call, **self._options
        )
        return result if isinstance(result, tuple) else (result,)


def check(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem."""
    facts, options = problem.facts, problem.options()
    made = _Sparse(m, problem)
    results, grades = unchanged(m, made.arrays, made.run)
    if made.out is not None:
        grades.append(truth("guards", m.guarded(made.out), "the call has written outside of out"))
    q, width_v = m.f64(made.arrays["q"].array), facts["head_dims"][1]
    lead, heads = tuple(q.shape[:-2]), q.shape[-2]
    q = q.reshape(-1, heads, q.shape[-1])
    sinks = m.f64(made.arrays["sinks"].array) if "sinks" in made.arrays else None
    of = limits_of(m, problem)
    rules = Rules(options.get("softmax_scale", q.shape[-1] ** -0.5), options.get("softcap", 0.0))
    o, o_bound = (m.zeros(len(q), heads, width_v) for _ in range(2))
    lse, lse_bound, most, most_bound = (m.zeros(len(q), heads) for _ in range(4))
    for i, listed in enumerate(made.lists.keys):
        k = made.rows[m.ints(listed)][None]
        keys = Keys(q[i][:, None], k, k[..., :width_v], sinks=sinks)
        found = formulas.attend(m, keys, rules, of)
        o[i], o_bound[i] = found.o[:, 0], found.o_bound[:, 0]
        lse[i], lse_bound[i] = found.lse[:, 0], found.lse_bound[:, 0]
        scores = formulas.scores(m, keys, rules, of, 0, 1)
        most[i] = m.top(scores.s)[:, 0, 0]
        size = abs(m.where(m.isfinite(most[i]), most[i], 0.0))
        most_bound[i] = m.maximum(m.top(scores.error)[:, 0, 0], 0.0) + of.lse + of.lse_relative * size
    grades.append(grade(m, "o", results[0], o.reshape(*lead, heads, -1), o_bound.reshape(*lead, heads, -1)))
    wanted = [("lse", lse, lse_bound)] * bool(options.get("return_lse"))
    wanted += [("row_max", most, most_bound)] * bool(options.get("return_max"))
    grades.append(truth("results", len(results) == 1 + len(wanted), f"{len(results)} results"))
    for (name, want, bound), got in zip(wanted, results[1:], strict=False):
        if len(lead) == 2:
            want, bound = (x.reshape(*lead, heads).swapaxes(1, 2) for x in (want, bound))
        grades.append(grade(m, name, got, want, bound))
    if options.get("deterministic") and lead[0] > 1:
        at = lead[0] // 2
        alone = made.run(at)
        m.synchronize()
        grades += [
            equal(m, f"result {i} alone", a[0], x[at], "a token by itself has other bits")
            for i, (a, x) in enumerate(zip(alone, results, strict=True))
        ]
    return [*grades, *repeated(m, results, made.run, 1)]
