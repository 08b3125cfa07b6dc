"""``attention_backward`` and ``attention_varlen_backward``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import omniattn
from omniattn.testing.expected import Grade
from omniattn.testing.soak import attention, formulas, gradient_formulas, limits, mods
from omniattn.testing.soak.attention import heads_first
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.formulas import Rules
from omniattn.testing.soak.judge import grade, repeated, truth, unchanged
from omniattn.testing.soak.machines import Machine, Placed
from omniattn.testing.soak.mods import MODS
from omniattn.testing.soak.problem import Problem

NAMES = ("dq", "dk", "dv", "dsinks", "dmask")
#: Which operand each gradient is of.
_OF = {"dq": "q", "dk": "k", "dv": "v"}


def draw(d: Draw, *, packed: bool) -> dict[str, Any]:
    """Facts of a problem."""
    facts = attention.draw_qkv(d, packed=packed, loud=False, one_dim=not d.cpu, exact=True)
    attention.draw_extras(d, facts)
    arrays, options, dims = facts["arrays"], facts["options"], facts["head_dims"]
    for name in "qkv":
        arrays[name]["scale"] = min(arrays[name]["scale"], 2.0)
    kind = arrays.get("mask", {}).get("kind", "bool")
    if kind == "additive_lowest":
        arrays["mask"]["kind"] = "additive"  # of such rows a gradient is n times that of their o: docs/backward.md
    o_shape = (*arrays["q"]["shape"][:-1], dims[1])
    # Of o.sum() the gradient is one number, expanded.
    view = {"expand": tuple(range(len(o_shape)))} if d.chance(0.1) else d.view(o_shape, 8)
    arrays["do"] = {**d.numbers(o_shape, "io", loud=False), "view": view}
    arrays["do"]["scale"] = min(arrays["do"]["scale"], 2.0)  # dS is 16 bits, and has to be below 65504 in fp16
    layout = options.get("layout", "NHD")
    lse_shape = (*o_shape[:-3], o_shape[-2], o_shape[-3]) if layout == "NHD" else o_shape[:-1]
    if d.chance(0.3):
        view = d.view(lse_shape, 1) if d.chance(0.5) else {}
        arrays["dlse"] = {"shape": lse_shape, "dtype": "float32", "kind": "normal", "scale": 1.0, "view": view}
    allowed = ["dq", "dk", "dv"]
    if "sinks" in arrays:
        allowed.append("dsinks")
    if not kind.startswith("bool"):
        allowed.append("dmask")
    if "dmask" in allowed or d.chance(0.3):
        wanted = tuple(name for name in allowed if d.chance(0.75)) or (d.pick(allowed),)
        options["wanted"] = tuple(reversed(wanted)) if d.chance(0.3) else wanted
    got = options.get("wanted", allowed)
    given = {}
    for name in ("dq", "dk", "dv"):
        if name in got and d.chance(0.3):
            given[name] = d.view(arrays[_OF[name]]["shape"], 8, written=True)
    facts["given"] = given
    facts["autograd"] = d.chance(0.3)
    _, rows, keys = attention.extents(facts)
    if d.chance(0.05) and min(rows, keys) > 0:
        facts["score_mod"] = d.pick(MODS)
    if not packed and d.chance(0.06) and arrays.get("mask", {}).get("dtype") != "bool":
        attention.draw_block_mask(d, facts)
    attention.draw_dropout(d, facts)
    return facts


def _wanted(problem: Problem) -> tuple[str, ...]:
    usual = NAMES[:4] if "sinks" in problem.facts["arrays"] else NAMES[:3]
    return tuple(problem.facts["options"].get("wanted", usual))


def check(m: Machine, problem: Problem) -> list[Grade]:
    """Run the forward of the library and its backward; compare the gradients with float64."""
    facts, arrays = problem.facts, attention.place(m, problem)
    packed, options = facts["packed"], problem.options()
    mod = None
    if "score_mod" in facts:
        _, rows, keys = attention.extents(facts)
        mod = mods.build(facts["score_mod"], m, facts["heads"][0], rows, keys)
        options["score_mod"] = mod.made
    forward_options = {name: x for name, x in options.items() if name != "wanted"}
    forward = {name: x.array for name, x in arrays.items() if name not in ("do", "dlse", "q", "k", "v")}
    function: Any = omniattn.attention_varlen if packed else omniattn.attention
    o, lse = function(*(arrays[name].array for name in "qkv"), **forward, **forward_options, return_lse=True)
    results, grades = _call(m, problem, arrays, o, lse, options)
    names = _wanted(problem)
    autograd: dict[str, Any] = {}
    if facts["autograd"] and m.library == "torch":
        autograd = _by_autograd(m, problem, arrays, forward, forward_options)
    views = {name: x.array for name, x in arrays.items()}
    values, bounds = _expected(m, problem, views, attention.rules_of(m, problem, mod))
    grades.append(truth("results", len(results) == len(names), f"{len(results)} results for {names}"))
    for name, result in zip(names, results, strict=False):
        grades.append(grade(m, name, result, values[name], bounds[name]))
    for name, result in autograd.items():
        # Sinks and masks have gradients of their own type.
        dtype = m.dtype_name(result)
        rounded = limits.ROUNDING[dtype] * abs(values[name]) + limits.LEAST[dtype]
        grades.append(grade(m, f"{name} by autograd", result, values[name], bounds[name] + rounded))
    return grades


def _by_autograd(
    m: Machine, problem: Problem, arrays: dict[str, Placed], more: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Gradients of the same sum by torch's autograd."""
    import torch

    sources = {**_OF, "dsinks": "sinks", "dmask": "mask"}
    names = _wanted(problem)
    leaves = {sources[name]: arrays[sources[name]].array.detach().requires_grad_() for name in names}
    x = {name: leaves.get(name, placed.array) for name, placed in arrays.items()}
    function: Any = omniattn.attention_varlen if problem.facts["packed"] else omniattn.attention
    given = {name: leaves.get(name, array) for name, array in more.items()}
    o, lse = function(x["q"], x["k"], x["v"], **given, **options, return_lse=True)
    outputs, seeds = [o], [x["do"]]
    if "dlse" in x:
        outputs.append(lse)
        seeds.append(x["dlse"])
    found = torch.autograd.grad(outputs, [leaves[sources[name]] for name in names], seeds)
    return dict(zip(names, found, strict=True))


def _call(
    m: Machine, problem: Problem, arrays: dict[str, Placed], o: Any, lse: Any, options: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Grade]]:
    facts = problem.facts
    packed = facts["packed"]
    backward: Any = omniattn.attention_varlen_backward if packed else omniattn.attention_backward
    rooms: dict[str, Placed] = {}
    if m.writable:
        rooms = {
            name: m.room(facts["arrays"][_OF[name]]["shape"], problem.dtype, view)
            for name, view in facts["given"].items()
        }
    given = {name: x.array for name, x in (arrays | rooms).items() if name not in ("do", "q", "k", "v")}

    def run() -> tuple[Any, ...]:
        return tuple(backward(*(arrays[name].array for name in ("do", "q", "k", "v")), o, lse, **given, **options))

    results, grades = unchanged(m, arrays, run)
    bad = [name for name, room in rooms.items() if not m.guarded(room)]
    grades.append(truth("guards", not bad, f"the call has written outside of {', '.join(bad)}"))
    names = _wanted(problem)
    other = [n for n, x in rooms.items() if n in names and results[names.index(n)] is not x.array]
    grades.append(truth("given", not other, f"another array than the given one is returned for {', '.join(other)}"))
    # Without deterministic=True dq may be summed in any order, and so may a mask's gradient.
    all_fixed = options.get("deterministic") or m.on_cpu
    fixed = [i for i, name in enumerate(names) if all_fixed or name in ("dk", "dv")]
    grades += repeated(m, tuple(results[i] for i in fixed), lambda: tuple(run()[i] for i in fixed), 1 + bool(all_fixed))
    return results, grades


def _expected(
    m: Machine, problem: Problem, views: dict[str, Any], rules: Rules
) -> tuple[dict[str, Any], dict[str, Any]]:
    facts, arrays = problem.facts, problem.facts["arrays"]
    packed, heads = facts["packed"], facts["heads"][0]
    shapes = {name: arrays[of]["shape"] for name, of in _OF.items()}
    shapes |= {"dsinks": (heads,)}
    values, bounds = ({name: m.zeros(*shape) for name, shape in shapes.items()} for _ in range(2))
    with_mask = "dmask" in _wanted(problem)
    if with_mask:
        mask_shape = tuple(arrays["mask"]["shape"])
        own_shape = (1,) * (4 - len(mask_shape)) + mask_shape
        values["dmask"], bounds["dmask"] = m.zeros(*own_shape), m.zeros(*own_shape)
    operands = attention.exact_operands(m, problem, views)
    of = limits.exact(problem.dtype, cpu=m.on_cpu)
    do = heads_first(problem, m.f64(views["do"]))
    dlse = m.f64(views["dlse"]) if "dlse" in views else None
    for b, rows, keys in attention.used_spans(problem):
        x = operands(b, rows, keys)
        own = replace(rules, batch=b)
        result = formulas.attend(m, x, own, of)
        own_do, own_dlse = (None if t is None else (t if packed else t[b])[:, rows] for t in (do, dlse))
        found = gradient_formulas.gradients(m, x, own, of, result, own_do, own_dlse, problem.dtype)
        for source, target in ((found.values, values), (found.bounds, bounds)):
            for name, span in (("dq", rows), ("dk", keys), ("dv", keys)):
                whole = heads_first(problem, target[name])
                (whole if packed else whole[b])[:, span] = source[name]
            if heads:
                target["dsinks"] += source["dsinks"]
            if with_mask:
                _add_mask(m, target["dmask"], source["dmask"], b)
    if with_mask:
        hidden = m.f64(views["mask"]).reshape(own_shape) == -math.inf
        for target in (values, bounds):
            target["dmask"] = m.where(hidden, 0.0, target["dmask"]).reshape(mask_shape)
        bounds["dmask"] = bounds["dmask"] + 2.0**-126  # kernels have no numbers below
    return values, bounds


def _add_mask(m: Machine, target: Any, ds: Any, b: int) -> None:
    """One sequence's (heads, queries, keys) into the gradient of a mask, summed where that is broadcast."""
    own = target[b if target.shape[0] > 1 else 0]
    for dim in range(3):
        if own.shape[dim] == 1:
            ds = m.sum(ds, dim)
    part = own
    part = part[:, : ds.shape[1]] if own.shape[1] > 1 else part
    part = part[..., : ds.shape[2]] if own.shape[2] > 1 else part
    part += ds
