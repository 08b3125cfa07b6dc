"""Latent caches: `decode` and ``attention_with_kvcache`` over rows whose first channels are the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import omniattn
from omniattn.testing.expected import Grade
from omniattn.testing.soak import formulas
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.formulas import Keys, Rules
from omniattn.testing.soak.judge import grade, repeated, truth, unchanged
from omniattn.testing.soak.latent_rows import draw_format, draw_rows, limits_of, place_rows
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.problem import Problem


def draw(d: Draw) -> dict[str, Any]:
    """Facts of a problem."""
    heads = d.pick((1, 3, 8)) if d.cpu else d.pick((1, 5, 16, 32, 64, 100, 128))
    batch = d.weighted({1: 2.0, 2: 2.0, 5: 1.0, 40: 0.0 if d.cpu else 0.5})
    q_len = d.weighted({1: 4.0, 2: 1.0, 5: 1.0, 16: 0.5})
    lengths = [q_len - 1 + max(d.length(100 if d.cpu else 3000), 1) for _ in range(batch)]
    facts: dict[str, Any] = {
        **draw_format(d), "heads": (heads, 1), "lengths": lengths, "q_len": q_len,
        "function": d.pick(("decode", "attention_with_kvcache")),
    }  # fmt: skip
    if d.chance(0.8):
        size = facts["block_size"] = d.pick((64, 16, 1, 7, 48, 256))
        blocks = sum(-(-n // size) for n in lengths) + d.integer(0, 3)
        lead = (blocks, size, 1)
    else:
        lead = (batch, max(lengths) + d.integer(0, 20), 1)
    facts["layout"] = d.pick(("NHD", "HND"))
    if facts["layout"] == "HND":
        lead = (lead[0], 1, lead[1])
    of_q: tuple[int, ...] = (batch, q_len)
    if facts["function"] == "attention_with_kvcache" and d.chance(0.5):
        facts["counts"] = [d.integer(0, q_len) for _ in range(batch)]
        of_q = (sum(facts["counts"]) + d.pick((0, 0, 3)),)
    facts["arrays"] = {
        "q": {**d.numbers((*of_q, heads, facts["head_dims"][0]), "io", loud=False), "view": {}},
        **draw_rows(d, facts, lead),
    }
    if d.chance(0.2):
        facts["arrays"]["sinks"] = {"shape": (heads,), "dtype": "float32", "kind": "normal", "scale": 2.0}
    options = facts["options"] = draw_options(d)
    if "counts" in facts and heads * q_len > 8:
        options.pop("deterministic", None)  # packed calls have few rows then
    if facts["function"] == "attention_with_kvcache" and "deterministic" not in options and d.chance(0.2):
        options["num_splits"] = d.pick((1, 2, 5, 100))
    return facts


def draw_options(d: Draw) -> dict[str, Any]:
    """Options of a call over a latent cache."""
    options: dict[str, Any] = {"return_lse": True} if d.chance(0.7) else {}
    if d.chance(0.3):
        options["window"] = (d.pick((0, 5, 64, 300)), d.pick((0, -1)))
    if d.chance(0.3):
        options["softmax_scale"] = d.pick((0.1, 0.02, -0.05))
    if d.chance(0.2):
        options["softcap"] = d.pick((20.0, 1.0))
    if d.chance(0.2):
        options["deterministic"] = True
    return options


def check(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem."""
    facts, stored = problem.facts, place_rows(m, problem)
    arrays = {name: problem.place(m, name) for name in facts["arrays"] if name in ("q", "sinks")} | stored.placed
    kind = omniattn.PagedKVCache if "block_size" in facts else omniattn.KVCache
    cache = kind.from_arrays(
        arrays["k"].array, layout=facts["layout"], head_dim_v=facts["head_dims"][1], **stored.options
    )
    meant = stored.meant if facts["layout"] == "NHD" else stored.meant.swapaxes(1, 2)
    return judged(m, problem, cache, arrays, lambda: meant, limits_of(m, problem))


def judged(
    m: Machine, problem: Problem, cache: Any, arrays: dict[str, Any], meant: Callable[[], Any], of: Any
) -> list[Grade]:
    """Decode a cache, and compare.

    Parameters
    ----------
    arrays : dict
        What was placed: q, perhaps sinks, and what must not change.
    meant : callable
        What the rows (blocks, tokens, 1, channels) stand for, asked when they have been read.
    of : Limits
    """
    facts, options, q = problem.facts, problem.options(), arrays["q"].array
    lengths, width_v, q_len = facts["lengths"], facts["head_dims"][1], facts["q_len"]
    table = table_of(problem)
    call: dict[str, Any] = {"seq_lens": m.place(np.array(lengths, np.int32), "int32", {}).array}
    if table is not None:
        call["block_table"] = m.place(table, "int32", {}).array
    if "sinks" in arrays:
        call["sinks"] = arrays["sinks"].array
    if "counts" in facts:
        call["cu_seqlens_q"] = m.place(np.cumsum([0, *facts["counts"]], dtype=np.int32), "int32", {}).array
        call["max_seqlen_q"] = q_len

    def run() -> tuple[Any, ...]:
        result = getattr(omniattn, facts["function"])(q, cache, **call, **options)
        return result if isinstance(result, tuple) else (result,)

    results, grades = unchanged(m, arrays, run)
    rows = meant()
    queries, sinks = m.f64(q), m.f64(arrays["sinks"].array) if "sinks" in arrays else None
    scale = options.get("softmax_scale", facts["head_dims"][0] ** -0.5)
    rules = Rules(scale, options.get("softcap", 0.0), options.get("window", (-1, 0))[0], 0)
    o, o_bound = (m.zeros(*queries.shape[:-1], width_v) for _ in range(2))
    of_lse = (len(lengths), queries.shape[2], q_len) if "counts" not in facts else (queries.shape[1], queries.shape[0])
    lse, lse_bound = m.full(of_lse, -float("inf")), m.zeros(*of_lse)
    for b, n in enumerate(lengths):
        own = rows[b] if table is None else rows[m.ints(table[b])].reshape(-1, 1, rows.shape[-1])
        keys = own[:n].swapaxes(0, 1)
        begin = sum(facts.get("counts", ())[:b])
        # Rows of q, and of the LSE, that are this sequence's; packed ones may be none.
        at: Any = b if "counts" not in facts else slice(begin, begin + facts["counts"][b])
        of_q = queries[at].swapaxes(0, 1)
        if 0 in of_q.shape:
            continue
        found = formulas.attend(m, Keys(of_q, keys, keys[..., :width_v], sinks=sinks), rules, of)
        o[at], o_bound[at] = found.o.swapaxes(0, 1), found.o_bound.swapaxes(0, 1)
        at = at if "counts" not in facts else (slice(None), at)
        lse[at], lse_bound[at] = found.lse, found.lse_bound
    grades.append(grade(m, "o", results[0], o, o_bound))
    if len(results) > 1:
        grades.append(grade(m, "lse", results[1], lse, lse_bound))
    grades.append(truth("values", cache.v is None, "a latent cache has a plane of V"))
    return [*grades, *repeated(m, results, run, 1)]


def table_of(problem: Problem) -> Any:
    """Blocks of the sequences, in no order; None of a contiguous cache. What is not needed is block 0."""
    facts = problem.facts
    if "block_size" not in facts:
        return None
    size = facts["block_size"]
    counts = [-(-n // size) for n in facts["lengths"]]
    order = iter(np.random.default_rng((problem.seed, problem.number)).permutation(facts["arrays"]["k"]["shape"][0]))
    table = np.zeros((len(counts), max(counts)), np.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    return table
