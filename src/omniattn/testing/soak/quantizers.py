"""``quantize_qk`` and ``quantize_v``: their arrays beside the rules of docs/quantization.md, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import omniattn
from omniattn.testing.expected import Grade
from omniattn.testing.soak import attention, formats
from omniattn.testing.soak.attention import heads_first
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.formats import BLOCK, SLICES, TILES, Rows, Span
from omniattn.testing.soak.judge import grade, truth, unchanged
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.problem import Problem

#: Rounding of fp32 sums, rotations and differences, relative to the largest magnitude of a row.
_SLOP = 2.0**-19
#: Sequences of this many keys and more have means and ranges of a sample.
_SAMPLED = 512
#: Largest magnitudes below this become zeros.
_LEAST = 2.0**-100


def draw(d: Draw) -> dict[str, Any]:
    """Facts of a problem: Q and K, or V."""
    facts = attention.draw_qkv(d, packed=d.chance(0.4), loud=True, one_dim=True)
    arrays, options = facts["arrays"], facts["options"]
    of_v = d.chance(0.4)
    packed = {name for name in options if name.startswith("max_seqlen") and not (of_v and name.endswith("_q"))}
    kept = {name: options[name] for name in options if name in packed or name == "layout"}
    names = ("v", "cu_seqlens_k") if of_v else ("q", "k", "cu_seqlens_q", "cu_seqlens_k")
    facts["arrays"] = {name: x for name, x in arrays.items() if name in names}
    facts["options"], facts["function"] = kept, "quantize_v" if of_v else "quantize_qk"
    if of_v:
        choices: dict[str, Any] = {
            "dtype": d.pick(("float8_e4m3", "float16")), "smooth_v": d.chance(0.5),
            "pv_accumulator": d.pick(("fp32", "fp16")),
        }  # fmt: skip
        facts["counted"] = choices["dtype"]
    else:
        dtype = d.pick(("int8", "int4", "float8_e4m3"))
        facts["counted"] = dtype
        e4m3 = dtype == "float8_e4m3"
        grains = {"per_block": 4.0, "per_tensor": 0.5} if e4m3 else {
            "per_tensor": 1.0, "per_block": 1.0, "per_warp": 1.0, "per_thread": 2.0, "per_token": 1.0 if d.cpu else 0.2
        }  # fmt: skip
        choices = {
            "dtype": dtype, "granularity": d.weighted(grains), "smooth_k": d.chance(0.6), "with_bias": d.chance(0.4),
            "hadamard": d.chance(0.4), "seed": d.pick((0, 1, 12345, 2**32 - 1)),
        }  # fmt: skip
        if not e4m3:
            choices |= {"grouping": d.pick(("sm90", "sm80")), "smooth_q": d.chance(0.4)}
    facts["options"] |= {name: x for name, x in choices.items() if name == "dtype" or d.chance(0.8)}
    return facts


def check(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem."""
    facts, arrays = problem.facts, attention.place(m, problem)
    of_v = facts["function"] == "quantize_v"
    function: Any = omniattn.quantize_v if of_v else omniattn.quantize_qk
    names = ("v",) if of_v else ("q", "k")
    given = {name: x.array for name, x in arrays.items() if name not in names}
    result, grades = unchanged(
        m, arrays, lambda: function(*(arrays[name].array for name in names), **given, **problem.options())
    )
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in given:
            same = m.host(getattr(result, name)).tolist() == m.host(given[name]).tolist()
            grades.append(truth(name, same, "is no copy of what was given"))
    x = {name: heads_first(problem, m.f64(arrays[name].array)) for name in names}
    rows = {name: heads_first(problem, arrays[name].array).shape[-2] for name in names}
    worst: dict[str, Grade] = {}
    for b in range(len(facts["keys"]) if facts["packed"] else arrays[names[-1]].shape[0]):
        spans = {name: _span(problem, name, b, rows[name]) for name in names}
        found = _values(m, result, x["v"], spans["v"]) if of_v else _scores(m, result, x, spans)
        for one in found:
            if one.name not in worst or not one.ratio <= worst[one.name].ratio:
                worst[one.name] = one
    return grades + list(worst.values())


def _span(problem: Problem, name: str, b: int, rows: int) -> Span:
    if not problem.facts["packed"]:
        return Span(b, 0, rows, False)
    lengths = problem.facts["queries" if name == "q" else "keys"]
    return Span(b, sum(lengths[:b]), lengths[b], True)


def _scores(m: Machine, qk: Any, x: dict[str, Any], spans: dict[str, Span]) -> list[Grade]:
    """Q and K of one sequence."""
    dim = x["k"].shape[-1]
    own = {name: spans[name].of(x[name])[:, spans[name].begin :][:, : spans[name].count] for name in "qk"}
    grades: list[Grade] = []
    mean_k: Any = 0.0
    if qk.k_mean is not None:
        mean_k = m.f64(qk.k_mean[spans["k"].batch])[:, None, :dim]
        grades.append(_mean(m, "k_mean", mean_k, own["k"]))
    mean_q: Any = 0.0
    if qk.q_mean is not None and spans["q"].count:
        mean_q = formats.query_means(m, qk, spans["q"], dim)
        for begin in range(0, spans["q"].count, BLOCK):
            block = slice(begin, begin + BLOCK)
            grades.append(_mean(m, "q_mean", mean_q[:, begin : begin + 1], own["q"][:, block], sampled=False))
        grades.append(_delta(m, qk, spans, mean_q, own["k"] - mean_k))
    for name, mean in (("q", mean_q), ("k", mean_k)):
        rows = formats.rows_of(m, qk, spans[name], is_q=name == "q")
        grades += _rows(m, qk, name, rows, own[name], mean)
    bias = qk.row_bias
    if bias is not None and spans["q"].count:
        got = spans["q"].of(bias)[:, spans["q"].begin :][:, : spans["q"].count]
        full = qk.with_bias and qk.k_mean is not None
        heads = own["q"].shape[0] // max(own["k"].shape[0], 1)
        turned = (mean_k if full else m.zeros(own["k"].shape[0], 1, dim)).swapaxes(-1, -2)
        shape = tuple(got.shape)
        of_heads = own["q"].reshape(own["k"].shape[0], heads * spans["q"].count, dim)
        wanted, size = (of_heads @ turned).reshape(shape), (abs(of_heads) @ abs(turned)).reshape(shape)
        grades.append(grade(m, "row_bias", got, wanted, 2.0**-19 * size + 2.0**-100))
    return grades


def _mean(m: Machine, name: str, got: Any, rows: Any, *, sampled: bool = True) -> Grade:
    """A mean over rows, which only has to lie among them where it is one of a sample."""
    count = rows.shape[1]
    if count == 0 or rows.shape[0] == 0:
        return Grade(name, 0.0, "empty")
    if sampled and count >= _SAMPLED:
        least, most = -m.amax(-rows, 1), m.amax(rows, 1)
        slack = 1e-5 * (abs(least) + abs(most)) + 1e-30
        return grade(m, name, got, (least + most) / 2, (most - least) / 2 + slack)
    size = m.sum(abs(rows), 1) / count
    return grade(m, name, got, m.sum(rows, 1) / count, 2.0**-20 * size + 2.0**-100)


def _delta(m: Machine, qk: Any, spans: dict[str, Span], mean_q: Any, keys: Any) -> Grade:
    count = spans["k"].count
    if count == 0:
        return Grade("delta_s", 0.0, "empty")
    first = spans["q"].block(BLOCK)
    blocks = -(-spans["q"].count // BLOCK)
    got = spans["q"].of(qk.delta_s)[:, first : first + blocks, :count]
    means = mean_q[:, ::BLOCK]
    shape, kv = tuple(got.shape), keys.shape[0]
    grouped = means.reshape(kv, -1, means.shape[-1])
    wanted = (grouped @ keys.swapaxes(-1, -2)).reshape(shape)
    size = (abs(grouped) @ abs(keys).swapaxes(-1, -2)).reshape(shape)
    return grade(m, "delta_s", got, wanted, 2.0**-13 * size + 2.0**-100)


def _groups(qk: Any, count: int, *, is_q: bool) -> list[int]:
    """Which rows share a scale."""
    grain = qk.granularity
    if grain == "per_tensor":
        return [0] * count
    if grain == "per_block" or (grain == "per_warp" and not is_q):
        rows = BLOCK if is_q or qk.dtype == "float8_e4m3" else TILES[qk.grouping]
        return [row // rows for row in range(count)]
    if grain == "per_warp":
        return [row // SLICES[qk.grouping] for row in range(count)]
    return formats.slots(qk, count, is_q=is_q)


def _rows(m: Machine, qk: Any, name: str, rows: Rows, x: Any, mean: Any) -> list[Grade]:
    """Codes and scales of Q or K."""
    heads, count, dim = x.shape
    if heads == 0 or count == 0:
        return []
    pad = rows.codes.shape[-1]
    t = m.cat([x - mean + 0.0 * x, m.zeros(heads, count, pad - dim)], 2)
    if qk.problem.hadamard:
        t = t @ m.number(formats.rotation(pad, qk.problem.seed)).swapaxes(0, 1)
    size = m.amax(m.maximum(abs(t), 0.0 * t), 2)  # (heads, rows, 1)
    slop = _SLOP * (size + m.amax(abs(x), 2) + (0.0 if isinstance(mean, float) else m.amax(abs(mean), 2)))
    e4m3 = qk.dtype == "float8_e4m3"
    most = 448.0 if e4m3 else 127.0 if qk.dtype == "int8" else 7.0
    step = abs(rows.values) / 16 + rows.scale * 2.0**-10 if e4m3 else rows.scale / 2
    bound = 1.0001 * step + slop + _LEAST
    grades = [grade(m, f"{name} codes", rows.values, t, bound)]
    grades.append(truth(f"{name} range", float(abs(rows.codes).max()) <= most, "codes beyond their range"))
    host = m.host(size)[..., 0]
    groups = np.array(_groups(qk, count, is_q=name == "q"))
    largest = np.zeros((heads, int(groups.max()) + 1))
    np.maximum.at(largest.T, groups, host.T)
    wanted = largest[:, groups][..., None]
    slack = m.host(m.amax(slop, 1)) / most
    scale = np.where(wanted < _LEAST, 1.0, wanted / most)
    # Of nothing but rounding errors either scale is right.
    unsure = (wanted < _LEAST + slack * most) & (wanted > 0)
    allowed = np.where(unsure, math.inf, 1e-6 * scale + slack)
    grades.append(grade(m, f"{name}_scale", rows.scale, m.number(scale), m.number(allowed)))
    return grades


def _values(m: Machine, v: Any, x: Any, span: Span) -> list[Grade]:
    """V of one sequence."""
    dim = x.shape[-1]
    own = span.of(x)[:, span.begin :][:, : span.count]
    if span.count == 0 or own.shape[0] == 0:
        return []
    found = formats.values_of(m, v, span, dim)
    half = v.dtype == "float16"
    part = abs(found.codes * found.scale)
    step = part / 2048 + found.scale * 2.0**-25 if half else part / 16 + found.scale * 2.0**-10
    slop = _SLOP * (m.amax(abs(own), 1) + abs(found.mean)) + _LEAST
    # The mean holds that of what rounding takes away, at most the mean of the steps.
    shift = 0.0 * slop if half or not v.problem.smooth_v else m.sum(step, 1) / span.count + found.scale / 256
    grades = [grade(m, "v codes", found.values, own, 1.001 * step + shift + slop)]
    most = 256.0 if half else 32.0 if v.problem.v_levels < 448 else 448.0
    grades.append(truth("v range", float(abs(found.codes).max()) <= most, "values beyond their range"))
    if v.problem.smooth_v and not half:
        mean, got = m.sum(own, 1) / span.count, m.sum(found.values, 1) / span.count
        # What rounding takes away is added up in fp16.
        fp16 = m.sum(part, 1) / span.count * 2.0**-10
        grades.append(grade(m, "mean of v", got, mean, slop + fp16 + found.scale / 64))
    elif not v.problem.smooth_v:
        grades.append(grade(m, "v_mean", found.mean, 0.0 * found.mean, 0.0 * found.mean + 1e-300))
    return grades
