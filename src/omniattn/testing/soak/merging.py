"""``merge_states``."""

from __future__ import annotations

import math
from typing import Any

import omniattn
from omniattn.testing.expected import Grade
from omniattn.testing.soak import limits
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.judge import grade, repeated, truth, unchanged
from omniattn.testing.soak.machines import Machine, Placed
from omniattn.testing.soak.problem import Problem


def draw(d: Draw) -> dict[str, Any]:
    """Facts of a problem."""
    heads, dim = d.integer(1, 9), d.head_dim()
    lead = () if d.chance(0.4) else (d.weighted({1: 2.0, 2: 2.0, 5: 1.0, 0: 0.2}),)
    rows = d.length(300 if d.cpu else 3000)
    shape, lse_shape = (*lead, rows, heads, dim), (*lead, heads, rows)
    dtype = d.weighted({"float16": 2.0, "bfloat16": 2.0, "float32": 1.0, "float64": 1.0 if d.cpu else 0.0})
    arrays: dict[str, Any] = {}
    for side in "ab":
        arrays[f"o_{side}"] = {**d.numbers(shape, "io"), "view": d.view(shape, 8)}
        kind = d.weighted({"normal": 2.0, "additive_hiding": 2.0, "additive_keys": 1.0})
        scale = d.pick((1.0, 5.0, 100.0))
        arrays[f"lse_{side}"] = {"shape": lse_shape, "dtype": "float32", "kind": kind, "scale": scale}
    facts: dict[str, Any] = {"dtype": dtype, "arrays": arrays, "options": {}}
    if d.chance(0.6):
        facts["out"] = d.pick(("o_a", "o_b")) if d.chance(0.3) else d.view(shape, 8, written=True)
        if isinstance(facts["out"], str):
            arrays[facts["out"]]["view"].pop("expand", None)
    return facts


def check(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem."""
    facts = problem.facts
    arrays = {name: problem.place(m, name) for name in facts["arrays"]}
    x = {name: m.f64(placed.array) for name, placed in arrays.items()}
    given: dict[str, Any] = {}
    out: Placed | None = None
    if "out" in facts and m.writable:
        into = facts["out"]
        out = arrays[into] if isinstance(into, str) else m.room(arrays["o_a"].shape, problem.dtype, into)
        given["out"] = out.array
    o, lse, bound, lse_bound = _expected(m, problem, x)

    def run() -> tuple[Any, ...]:
        return tuple(omniattn.merge_states(*(arrays[n].array for n in ("o_a", "lse_a", "o_b", "lse_b")), **given))

    results, grades = unchanged(m, {name: p for name, p in arrays.items() if p is not out}, run)
    if out is not None and not isinstance(facts["out"], str):
        grades.append(truth("guards", m.guarded(out), "the call has written outside of out"))
    grades += [grade(m, "o", results[0], o, bound), grade(m, "lse", results[1], lse, lse_bound)]
    if out is None or not isinstance(facts["out"], str):
        grades += repeated(m, results, run, 1)
    return grades


def _expected(m: Machine, problem: Problem, x: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    of = limits.exact(problem.dtype, cpu=m.on_cpu)
    top = m.maximum(x["lse_a"], x["lse_b"])
    shift = m.where(top == -math.inf, 0.0, top)
    parts = [m.exp(x[f"lse_{side}"] - shift) for side in "ab"]
    total = parts[0] + parts[1]
    none = total == 0
    safe = m.where(none, 1.0, total)
    lse = m.where(none, -math.inf, shift + m.log(safe))
    shares = [(part / safe).swapaxes(-1, -2)[..., None] for part in parts]
    terms = [share * m.where(share > 0, x[f"o_{side}"], 0.0) for share, side in zip(shares, "ab", strict=True)]
    o = terms[0] + terms[1]
    # exp(lse_a - lse) in fp32: an error of the difference is one of the share.
    unit = 16 * of.fp * (1.0 + abs(shift)).swapaxes(-1, -2)[..., None]
    bound = unit * (abs(terms[0]) + abs(terms[1])) + of.out * abs(o) + 2 * of.least + 2.0**-120
    return o, lse, bound, of.lse + of.lse_relative * abs(m.where(none, 0.0, lse))
