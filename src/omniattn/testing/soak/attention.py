"""Exact ``attention`` and ``attention_varlen``: what is drawn, and how it is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import omniattn
from omniattn.testing.expected import Grade
from omniattn.testing.soak import formulas, limits, mods
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.dropouts import Dropped
from omniattn.testing.soak.formulas import Keys, Result, Rules
from omniattn.testing.soak.judge import grade, repeated, truth, unchanged
from omniattn.testing.soak.machines import Machine, Placed
from omniattn.testing.soak.mods import MODS, Mod
from omniattn.testing.soak.problem import Problem, draw_mask, mask_f64


def shaped(layout: str, lead: tuple[int, ...], rows: int, heads: int, dim: int) -> tuple[int, ...]:
    """Shape of an operand."""
    return (*lead, rows, heads, dim) if layout == "NHD" else (*lead, heads, rows, dim)


def draw_rules(d: Draw, options: dict[str, Any], queries: int, keys: int) -> None:
    """Options of scores, where they are not the defaults."""
    if d.chance(0.4):
        options["causal"] = True
    if d.chance(0.3):
        options["window"] = tuple(d.pick((-1, 0, 1, d.length(), max(queries, keys))) for _ in range(2))
    if d.chance(0.25):
        options["softmax_scale"] = d.weighted({1.0: 2.0, 0.05: 2.0, -0.2: 1.0, 0.0: 0.5, 1e-4: 0.5, 0.3: 2.0})
    if d.chance(0.2):
        options["softcap"] = d.weighted({20.0: 3.0, 1.0: 2.0, 0.3: 1.0, 1000.0: 1.0, 2.0**-126: 0.2, 1e20: 0.2})


def sequences(d: Draw) -> tuple[list[int], list[int]]:
    """Lengths of packed sequences: queries, keys. Some are empty."""
    count = d.weighted({0: 0.2, 1: 1.0, 2: 2.0, 3: 2.0, 5: 1.0, 9: 1.0, 33: 0.5})
    most = (150 if d.cpu else 1500) // (1 if count < 9 else 4)
    kind = d.weighted({"any": 2.0, "same": 1.0, "single": 1.0, "mixture": 1.0})
    keys = [0 if d.chance(0.1) else d.length(most) for _ in range(count)]
    if kind == "same":
        return list(keys), keys
    if kind == "single":
        return [1] * count, keys
    if kind == "mixture":
        return [1 if d.chance(0.7) else n for n in keys], keys
    return [0 if d.chance(0.1) else d.length(most) for _ in range(count)], keys


def draw_packed(d: Draw, facts: dict[str, Any], arrays: dict[str, Any], options: dict[str, Any]) -> tuple[int, int]:
    """Packed sequences; returns the rows of q and of k. Some rows belong to no sequence."""
    queries, keys = sequences(d)
    total = []
    for name, of in (("q", queries), ("k", keys)):
        starts = [sum(of[:i]) for i in range(len(of) + 1)]
        arrays[f"cu_seqlens_{name}"] = {"shape": (len(starts),), "dtype": "int32", "values": starts}
        options[f"max_seqlen_{name}"] = max([0, *of]) + (d.integer(1, 40) if d.chance(0.2) else 0)
        total.append(starts[-1] + (d.integer(1, 20) if d.chance(0.2) else 0))
        if d.chance(0.15) and facts.get("seqused", True):
            used = [d.integer(0, n) for n in of]
            arrays[f"seqused_{name}"] = {"shape": (len(used),), "dtype": "int32", "values": used}
    facts["queries"], facts["keys"] = queries, keys
    return total[0], total[1]


def draw_qkv(d: Draw, *, packed: bool, loud: bool = True, one_dim: bool = False, exact: bool = False) -> dict[str, Any]:
    """Facts of a call: operands, layout, options of scores. exact: heads may have more than 256 channels."""
    dtype, layout = d.dtype(), d.pick(("NHD", "HND"))
    heads, dim = d.heads(), d.wide_head_dim() if exact and d.chance(0.15) else d.head_dim()
    dim_v = d.head_dim() if d.chance(0.15) and not one_dim else dim
    arrays: dict[str, Any] = {}
    options: dict[str, Any] = {"layout": layout} if layout == "HND" or d.chance(0.3) else {}
    facts: dict[str, Any] = {"dtype": dtype, "packed": packed, "arrays": arrays, "options": options}
    lead: tuple[int, ...] = ()
    if packed:
        rows, keys = draw_packed(d, facts, arrays, options)
        _, heads = d.fit(1, heads, rows, max([0, *facts["keys"]]), max(dim, dim_v))
        draw_rules(d, options, options["max_seqlen_q"], options["max_seqlen_k"])
    else:
        rows, keys = d.lengths()
        batch = d.weighted({1: 3.0, 2: 3.0, 3: 1.0, 7: 0.5, 0: 0.1, 40: 0.2})
        batch, heads = d.fit(batch, heads, rows, keys, max(dim, dim_v))
        lead = (batch,)
        draw_rules(d, options, rows, keys)
    facts["heads"], facts["head_dims"] = heads, (dim, dim_v)
    for name, n, h, c in (("q", rows, heads[0], dim), ("k", keys, heads[1], dim), ("v", keys, heads[1], dim_v)):
        shape = shaped(layout, lead, n, h, c)
        arrays[name] = {**d.numbers(shape, "io", loud=loud and name != "v"), "view": d.view(shape, 8)}
    return facts


def draw_extras(d: Draw, facts: dict[str, Any], *, mask_chance: float = 0.3) -> None:
    """Masks and sinks."""
    arrays, options, heads = facts["arrays"], facts["options"], facts["heads"][0]
    if d.chance(mask_chance):
        batch, rows, keys = extents(facts)
        if not (facts["packed"] and min(rows, keys) == 0):
            arrays["mask"] = draw_mask(d, (batch, heads, rows, keys), facts["dtype"])
    if d.chance(0.2):
        arrays["sinks"] = {
            "shape": (heads,), "dtype": d.pick(("float32", "io")), "kind": "normal", "scale": d.pick((1.0, 5.0)),
        }  # fmt: skip
    if d.chance(0.3):
        options["deterministic"] = True


def extents(facts: dict[str, Any]) -> tuple[int, int, int]:
    """Sequences, and queries and keys that a mask is for."""
    if facts["packed"]:
        options = facts["options"]
        return len(facts["queries"]), options["max_seqlen_q"], options["max_seqlen_k"]
    of_q, of_k = facts["arrays"]["q"]["shape"], facts["arrays"]["k"]["shape"]
    seq = 1 if facts["options"].get("layout", "NHD") == "NHD" else 2
    return of_q[0], of_q[seq], of_k[seq]


def draw_pages(d: Draw, facts: dict[str, Any]) -> None:
    """Keys in pages of a pool, in no order; entries that no key needs lie far outside of it."""
    arrays, lengths = facts["arrays"], facts["keys"]
    size = facts["page_size"] = d.pick((1, 2, 3, 8, 16, 48, 64, 256))
    counts = [-(-n // size) for n in lengths]
    pool = list(range(sum(counts) + d.integer(0, 3)))
    order = [pool.pop(d.integer(0, len(pool) - 1)) for _ in range(sum(counts))]
    facts["pages"] = len(order) + len(pool)
    width = max([0, *counts]) + d.integer(0, 2)
    table = [
        [order[sum(counts[:b]) + i] if i < counts[b] else 1 << 30 for i in range(width)] for b in range(len(counts))
    ]
    del arrays["cu_seqlens_k"]
    arrays["seqused_k"] = {"shape": (len(lengths),), "dtype": "int32", "values": lengths}
    arrays["block_table"] = {"shape": (len(counts), width), "dtype": "int32", "values": table}


def draw(d: Draw, *, packed: bool) -> dict[str, Any]:
    """Facts of a problem."""
    facts = draw_qkv(d, packed=packed, exact=True)
    draw_extras(d, facts)
    arrays, options, dims = facts["arrays"], facts["options"], facts["head_dims"]
    if d.chance(0.8):
        options["return_lse"] = True
    if d.chance(0.05):
        options["out_dtype"] = facts["dtype"]
    out_shape = (*arrays["q"]["shape"][:-1], dims[1])
    if d.chance(0.5):
        view = d.view(out_shape, 8, written=True)
        facts["out"] = {**view, **_guards(out_shape)} if not view.get("before") else view
    elif d.chance(0.1) and dims[0] == dims[1] and not arrays["q"]["view"].get("expand"):
        facts["out"] = "q"
    if packed and "seqused_k" not in arrays and d.chance(0.25):
        draw_pages(d, facts)
    _, rows, keys = extents(facts)
    if d.chance(0.05) and min(rows, keys) > 0:
        facts["score_mod"] = d.pick(MODS)
    if not packed and d.chance(0.06) and arrays.get("mask", {}).get("dtype") != "bool":
        draw_block_mask(d, facts)
    draw_dropout(d, facts)
    return facts


def draw_dropout(d: Draw, facts: dict[str, Any]) -> None:
    """Dropout, where the other options leave kernels with it."""
    without = {"score_mod", "pages"} & set(facts) or "block_mask" in facts["arrays"]
    if d.chance(0.25) and not without and (d.cpu or max(facts["head_dims"]) <= 256):
        facts["options"]["dropout_p"] = d.pick((0.1, 0.5, 0.003, 0.9))
        facts["options"]["dropout_rng"] = (d.integer(0, 2**64 - 1), d.integer(0, 2**64 - 1))


def draw_block_mask(d: Draw, facts: dict[str, Any]) -> None:
    """A block mask, and perhaps the size of its blocks."""
    batch, rows, keys = extents(facts)
    size = d.pick((64, 128, (128, 64), (64, 256), None))
    block = (128, 128) if size is None else (size, size) if isinstance(size, int) else size
    full = (batch, facts["heads"][0], -(-rows // block[0]), -(-keys // block[1]))
    shape = tuple(n if d.chance(0.7) else 1 for n in full)
    facts["arrays"]["block_mask"] = {"shape": shape, "dtype": "bool", "kind": "bool"}
    if size is not None:
        facts["options"]["block_size"] = size


def _guards(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A row of guards around a result."""
    return {"before": (*(1 for _ in shape[:-1]), 8), "after": (*(1 for _ in shape[:-1]), 8)}


def place(m: Machine, problem: Problem) -> dict[str, Placed]:
    """All arrays of a problem."""
    return {name: problem.place(m, name) for name in problem.facts["arrays"]}


def place_pages(m: Machine, problem: Problem, arrays: dict[str, Placed]) -> dict[str, Placed]:
    """The arrays with k and v as pools of pages, where a problem has them. What no key owns is NaN."""
    facts = problem.facts
    if "page_size" not in facts:
        return arrays
    size, recipes = facts["page_size"], facts["arrays"]
    nhd = facts["options"].get("layout", "NHD") == "NHD"
    table = np.array(recipes["block_table"]["values"], np.int64).reshape(recipes["block_table"]["shape"])
    made = {}
    for name in "kv":
        x = m.host(arrays[name].array)
        x = x if nhd else x.swapaxes(0, 1)
        pool = np.full((facts["pages"], size, *x.shape[1:]), np.nan, x.dtype)
        for b, length in enumerate(facts["keys"]):
            keys, begin = np.arange(length), sum(facts["keys"][:b])
            pool[table[b, keys // size], keys % size] = x[begin : begin + length]
        pool = pool if nhd else np.ascontiguousarray(pool.swapaxes(1, 2))
        made[name] = m.place(pool, problem.dtype, {}, pool.shape)
    return arrays | made


def rules_of(m: Machine, problem: Problem, mod: Mod | None = None) -> Rules:
    """Options of scores as formulas take them."""
    options, dim = problem.facts["options"], problem.facts["head_dims"][0]
    left, right = options.get("window", (-1, -1))
    scale = options.get("softmax_scale")
    dropped = Dropped(options["dropout_p"], *options["dropout_rng"]) if options.get("dropout_p") else None
    return Rules(
        dim**-0.5 if scale is None else scale, options.get("softcap", 0.0), left, 0 if options.get("causal") else right,
        mod, dropped=dropped,
    )  # fmt: skip


def heads_first(problem: Problem, x: Any) -> Any:
    """An operand or a result with heads before rows."""
    return x.swapaxes(-3, -2) if problem.facts["options"].get("layout", "NHD") == "NHD" else x


def used_spans(problem: Problem) -> list[tuple[int, slice, slice]]:
    """Sequences: number, rows of q and of k, those that are used."""
    facts, arrays = problem.facts, problem.facts["arrays"]
    if not facts["packed"]:
        batch, rows, keys = extents(facts)
        return [(b, slice(0, rows), slice(0, keys)) for b in range(batch)]
    found = []
    for b in range(len(facts["queries"])):
        spans = []
        for name, lengths in (("q", facts["queries"]), ("k", facts["keys"])):
            begin, count = sum(lengths[:b]), lengths[b]
            if f"seqused_{name}" in arrays:
                count = arrays[f"seqused_{name}"]["values"][b]
            spans.append(slice(begin, begin + count))
        found.append((b, spans[0], spans[1]))
    return found


Operands = Callable[[int, slice, slice], Keys]


def exact_operands(m: Machine, problem: Problem, arrays: dict[str, Any]) -> Operands:
    """What gives each sequence's operands in float64; arrays by name."""
    x = {name: heads_first(problem, m.f64(arrays[name])) for name in "qkv"}
    mask = full_mask(m, problem, arrays)
    sinks = m.f64(arrays["sinks"]) if "sinks" in arrays else None

    def of(b: int, rows: slice, keys: slice) -> Keys:
        q, k, v = (t if problem.facts["packed"] else t[b] for t in (x["q"], x["k"], x["v"]))
        return Keys(q[:, rows], k[:, keys], v[:, keys], mask=own_mask(mask, b, rows, keys), sinks=sinks)

    return of


def full_mask(m: Machine, problem: Problem, arrays: dict[str, Any]) -> Any:
    """Mask and block mask together, in float64; None for neither."""
    mask = mask_f64(m, arrays["mask"]) if "mask" in arrays else None
    if "block_mask" in arrays:
        _, rows, keys = extents(problem.facts)
        size = problem.facts["options"].get("block_size", 128)
        size = (size, size) if isinstance(size, int) else size
        blocks = mask_f64(m, arrays["block_mask"])
        for dim, n, step in ((2, rows, size[0]), (3, keys, size[1])):
            if blocks.shape[dim] > 1 or n <= step:
                at = m.ints([i // step for i in range(n)])
                blocks = blocks[:, :, at] if dim == 2 else blocks[..., at]
        mask = blocks if mask is None else mask + blocks
    return mask


def own_mask(mask: Any, b: int, rows: slice, keys: slice) -> Any:
    """The part of a mask that is one sequence's; it counts from the sequence's start."""
    if mask is None:
        return None
    own = mask[b if mask.shape[0] > 1 else 0]
    if own.shape[1] > 1:
        own = own[:, : rows.stop - rows.start]
    return own[..., : keys.stop - keys.start] if own.shape[2] > 1 else own


def expected(m: Machine, problem: Problem, operands: Operands, rules: Rules, of: limits.Limits) -> Result:
    """o and lse of the whole call in the caller's layout, with bounds."""
    facts = problem.facts
    packed = facts["packed"]
    o_shape = (*facts["arrays"]["q"]["shape"][:-1], facts["head_dims"][1])
    o, o_bound, size = (m.zeros(*o_shape) for _ in range(3))
    firsts = [heads_first(problem, x) for x in (o, o_bound, size)]
    lse_shape = tuple(firsts[0].shape[:-1])
    lse, lse_bound = m.full(lse_shape, -float("inf")), m.zeros(*lse_shape)
    for b, rows, keys in used_spans(problem):
        own = replace(rules, batch=b)
        found = formulas.attend(m, operands(b, rows, keys), own, of)
        made = (found.o, found.o_bound, found.size, found.lse, found.lse_bound)
        for target, values in zip((*firsts, lse, lse_bound), made, strict=True):
            (target if packed else target[b])[:, rows] = values
    return Result(o, lse, o_bound, lse_bound, size)


def sinks_of(m: Machine, arrays: dict[str, Placed]) -> Any:
    """Sinks in float64, or None."""
    return m.f64(arrays["sinks"].array) if "sinks" in arrays else None


def call(
    m: Machine, problem: Problem, arrays: dict[str, Placed], more: dict[str, Any] | None = None, *, again: bool = True
) -> tuple[tuple[Any, ...], list[Grade]]:
    """Call the public function; its results, and whether it wrote where it may."""
    facts = problem.facts
    function: Any = omniattn.attention_varlen if facts["packed"] else omniattn.attention
    options = {**problem.options(), **(more or {})}
    given = {name: x.array for name, x in arrays.items() if name not in "qkv"}
    out: Placed | None = None
    if "out" in facts and m.writable:
        shape = (*facts["arrays"]["q"]["shape"][:-1], facts["head_dims"][1])
        out = arrays["q"] if facts["out"] == "q" else m.room(shape, facts.get("out_dtype", problem.dtype), facts["out"])
        given["out"] = out.array

    def run() -> tuple[Any, ...]:
        result = function(*(arrays[name].array for name in "qkv"), **given, **options)
        return result if isinstance(result, tuple) else (result,)

    kept = {name: x for name, x in arrays.items() if x is not out}
    results, grades = unchanged(m, kept, run)
    if out is not None and facts["out"] != "q":
        grades.append(truth("guards", m.guarded(out), "the call has written outside of out"))
        grades.append(truth("out", results[0] is out.array, "the result is another array than out"))
    if again and facts.get("out") != "q":
        grades += repeated(m, results, run, 2 if options.get("deterministic") else 1)
    return results, grades


def compare(m: Machine, results: tuple[Any, ...], wanted: Result, of: limits.Limits) -> list[Grade]:
    """o, and lse if it was asked for."""
    grades = [grade(m, "o", results[0], wanted.o, wanted.o_bound, mean=of.mean, size=wanted.size)]
    if len(results) > 1:
        grades.append(grade(m, "lse", results[1], wanted.lse, wanted.lse_bound))
    return grades


def check(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem."""
    facts, arrays = problem.facts, place(m, problem)
    more: dict[str, Any] = {}
    mod: Mod | None = None
    if "score_mod" in facts:
        _, rows, keys = extents(facts)
        mod = mods.build(facts["score_mod"], m, facts["heads"][0], rows, keys)
        more["score_mod"] = mod.made
    of = limits.exact(problem.dtype, cpu=m.on_cpu)
    operands = exact_operands(m, problem, {name: x.array for name, x in arrays.items()})
    # q is read before the call, which may write it.
    wanted = expected(m, problem, operands, rules_of(m, problem, mod), of)
    results, grades = call(m, problem, place_pages(m, problem, arrays), more)
    return grades + compare(m, results, wanted, of)
