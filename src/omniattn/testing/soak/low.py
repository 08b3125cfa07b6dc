"""Attention in low precision and on quantized operands.

The float64 side attends to what the operands stand for: those of `quantize_qk` and `quantize_v` in the grouping that
the call's kernel reads. With Q and K smoothed, a score is

    s = q_scale k_scale (q_int . k_int) + q_mean . (k - k_mean) + q . k_mean

which is one product of rows with more channels. The quantizers themselves are checked in
`omniattn.testing.soak.quantizers`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import omniattn
from omniattn.errors import UnsupportedError
from omniattn.registry import by_name
from omniattn.testing.expected import Grade
from omniattn.testing.soak import attention, limits
from omniattn.testing.soak.attention import Operands, heads_first, own_mask
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.formats import Span, query_means, rows_of, values_of
from omniattn.testing.soak.formulas import Keys
from omniattn.testing.soak.judge import equal
from omniattn.testing.soak.machines import Machine, Placed
from omniattn.testing.soak.problem import Problem

#: Rounding of ``delta_s``: bfloat16 pairs.
_DELTA = 2.0**-14


def draw_knobs(d: Draw) -> tuple[str, dict[str, Any]]:
    """A precision: class and knobs that are not the defaults."""
    name = d.weighted({"Int8": 4.0, "Int4": 2.0, "Fp8": 2.0})
    knobs: dict[str, Any] = {}
    if name == "Fp8":
        if d.chance(0.08):
            knobs["granularity"] = "per_tensor"
        flags = {"hadamard": 0.3, "smooth_k": 0.4, "smooth_v": 0.4}
    else:
        if d.chance(0.4):
            knobs["granularity"] = d.weighted(
                {"per_tensor": 1.0, "per_block": 1.0, "per_warp": 1.0, "per_token": 0.3 if not d.cpu else 1.0}
            )
        if d.chance(0.35):
            knobs["pv"] = d.weighted({"fp8": 2.0, "fp16": 2.0, "exact": 0.2 if not d.cpu else 1.0})
        if d.chance(0.3) and knobs.get("pv") != "exact":
            knobs["pv_accumulator"] = d.pick(("fp32", "fp16"))
        flags = {"smooth_k": 0.3, "smooth_q": 0.35, "smooth_v": 0.3, "hadamard": 0.3}
    for flag, p in flags.items():
        if d.chance(p):
            knobs[flag] = d.chance(0.5)
    if d.chance(0.2):
        knobs["seed"] = d.pick((1, 7, 2**32 - 1))
    if d.chance(0.05):
        knobs["min_seqlen"] = d.pick((1, 100, 5000))
    return name, knobs


def _with_blocks(facts: dict[str, Any], name: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """Knobs of a precision that kernels take beside a block mask; options that they do not take go."""
    facts["options"].pop("softcap", None)
    left = ("hadamard", "smooth_k", "smooth_v", "seed") if name == "Fp8" else ("granularity", "smooth_k", "smooth_v")
    kept = {knob: x for knob, x in knobs.items() if knob in left and x != "per_token"}
    return kept | ({"smooth_q": False} if name == "Int4" else {})


def draw(d: Draw) -> dict[str, Any]:
    """Facts of a problem."""
    facts = attention.draw_qkv(d, packed=d.chance(0.4))
    attention.draw_extras(d, facts, mask_chance=0.2)
    name, knobs = draw_knobs(d)
    is_plain = d.chance(0.2)
    if not facts["packed"] and "mask" not in facts["arrays"] and d.chance(0.2):
        attention.draw_block_mask(d, facts)
        if not d.cpu:
            knobs = _with_blocks(facts, name, knobs)
        is_plain = False
    facts["counted"] = name.lower()
    facts["options"]["precision"] = name.lower() if is_plain else (name, knobs)
    facts["options"]["return_lse"] = d.chance(0.7)
    if d.chance(0.3):
        out_shape = (*facts["arrays"]["q"]["shape"][:-1], facts["head_dims"][1])
        facts["out"] = d.view(out_shape, 8, written=True)
    return facts


def _compact(problem: Problem, name: str, dim: int) -> np.ndarray[Any, Any]:
    """Values of q, k or v: the rows that count, filled up with zeros to ``dim`` channels."""
    facts, recipe = problem.facts, problem.facts["arrays"][name]
    x = np.broadcast_to(problem.numbers(name, recipe), recipe["shape"])
    if facts["packed"]:
        spans = [rows if name == "q" else keys for _, rows, keys in attention.used_spans(problem)]
        rows = np.array([i for s in spans for i in range(s.start, s.stop)], dtype=np.int64)
        x = np.take(x, rows, axis=-3 if facts["options"].get("layout", "NHD") == "NHD" else -2)
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, dim - x.shape[-1])])


class Quantized:
    """The operands that stand for a call's q, k and v.

    Attributes
    ----------
    qk, v : QuantizedQK, QuantizedV or None
    bits : bool
        Whether attention on them has the bits of the call itself.
    """

    def __init__(self, m: Machine, problem: Problem, arrays: dict[str, Placed], precision: Any, grouping: str) -> None:
        facts = problem.facts
        self._m, self._problem, self._precision = m, problem, precision
        dims = facts["head_dims"]
        used = any(name.startswith("seqused") for name in facts["arrays"])
        self.bits = dims[0] == dims[1] and not used and precision.pv != "exact"
        packed, layout = facts["packed"], facts["options"].get("layout", "NHD")
        whole = max(dims)
        spans = attention.used_spans(problem)
        lengths: dict[str, Any] = {}
        self._spans: dict[str, list[Span]] = {}
        for name in "qk":
            own = [rows if name == "q" else keys for _, rows, keys in spans]
            counts = [span.stop - span.start for span in own]
            begins = [sum(counts[:b]) if packed else 0 for b in range(len(counts))]
            if self.bits and packed:
                begins = [span.start for span in own]
            self._spans[name] = [Span(b, begins[b], n, packed) for b, n in enumerate(counts)]
            if packed:
                starts = facts["arrays"][f"cu_seqlens_{name}"]["values"] if self.bits else [*begins, sum(counts)]
                lengths[f"cu_seqlens_{name}"] = m.place(np.array(starts), "int32", {}).array
                lengths[f"max_seqlen_{name}"] = max([0, *counts])
        if self.bits:
            x = {name: arrays[name].array for name in "qkv"}
        else:
            x = {name: m.place(_compact(problem, name, whole), problem.dtype, {}).array for name in "qkv"}
        self._x = x
        kind = {"int8": "int8", "int4": "int4", "fp8": "float8_e4m3"}[precision.qk]
        groups = {} if precision.qk == "fp8" else {"grouping": grouping, "smooth_q": precision.smooth_q}
        self._said: dict[str, Any] = {
            "layout": layout, "dtype": kind, "granularity": precision.granularity, "smooth_k": precision.smooth_k,
            "hadamard": precision.hadamard, "seed": precision.seed, **groups, **lengths,
        }  # fmt: skip
        self.qk = omniattn.quantize_qk(x["q"], x["k"], with_bias=True, **self._said)
        of_k = {name: value for name, value in lengths.items() if name.endswith("_k")}
        accumulator = "fp16" if precision.pv == "fp8" and precision.pv_accumulator == "fp16" else "fp32"
        self.v = None
        if precision.pv != "exact":
            self.v = omniattn.quantize_v(
                x["v"], layout=layout, dtype="float16" if precision.pv == "fp16" else "float8_e4m3",
                smooth_v=precision.smooth_v, pv_accumulator=accumulator, **of_k,
            )  # fmt: skip

    def apart(self) -> tuple[Any, Any]:
        """Q and K of a batch, each quantized by a call that has nothing of the other."""
        q, k = self._x["q"], self._x["k"]
        none = k[:, :0] if self._said["layout"] == "NHD" else k[:, :, :0]
        return omniattn.quantize_qk(q, none, **self._said), omniattn.quantize_qk(none, k, **self._said)

    def operands(self, mask: Any, sinks: Any, products: float) -> Operands:
        """What gives each sequence's operands in float64. products: `Limits.qk`."""
        m, precision = self._m, self._precision
        dim, dim_v = max(self._problem.facts["head_dims"]), self._problem.facts["head_dims"][1]
        x = {name: heads_first(self._problem, m.f64(array)) for name, array in self._x.items()}

        def of(b: int, rows: slice, keys: slice) -> Keys:
            of_q, of_k = self._spans["q"][b], self._spans["k"][b]
            own_q = of_q.of(x["q"])[:, of_q.begin : of_q.begin + of_q.count]
            own_k = of_k.of(x["k"])[:, of_k.begin : of_k.begin + of_k.count]
            q, k = ([rows_of(m, self.qk, s, is_q=i == 0).values] for i, s in enumerate((of_q, of_k)))
            q_size = [abs(q[0])]
            mean = m.f64(self.qk.k_mean[b])[:, None, :dim] if precision.smooth_k else 0.0
            if precision.smooth_q:
                q.append(query_means(m, self.qk, of_q, dim))
                q_size.append(abs(q[1]) * max(1.0, _DELTA / products))
                k.append(own_k - mean)
            if precision.smooth_k:
                q.append(own_q)
                q_size.append(abs(own_q))
                k.append(mean + 0.0 * own_k)
            if self.v is None:
                v = of_k.of(x["v"])[:, of_k.begin : of_k.begin + of_k.count, :dim_v]
                v_size = abs(v)
            else:
                found = values_of(m, self.v, of_k, dim_v)
                v, v_size = found.values, abs(found.codes * found.scale) + abs(found.mean)
            own = own_mask(mask, b, rows, keys)
            return Keys(m.cat(q, 2), m.cat(k, 2), v, m.cat(q_size, 2), None, v_size, own, sinks)

        return of


def _said(arrays: dict[str, Placed], options: dict[str, Any]) -> Any:
    """What `omniattn.explain` says of the call."""
    given = {name: x.array for name, x in arrays.items() if name not in "qkv"}
    explain: Any = omniattn.explain
    return explain(*(arrays[name].array for name in "qkv"), **given, **options)


def _flavour(m: Machine, problem: Problem, arrays: dict[str, Placed], options: dict[str, Any]) -> tuple[Any, str]:
    """Precision and grouping of the kernel that the call takes."""
    said = _said(arrays, options)
    precision: Any = said.problem.precision
    if m.on_cpu:
        return precision.on_cpu, "sm90"
    if not precision.quantized:
        return precision, ""
    spec = by_name(said.kernel)
    return dataclasses.replace(precision, pv=spec.pv, pv_accumulator=spec.pv_accumulator), spec.grouping


def check(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem: by ``precision=``, and on the operands, whose bits have to be the same."""
    arrays = attention.place(m, problem)
    options = problem.options()
    precision, grouping = _flavour(m, problem, arrays, options)
    views = {name: x.array for name, x in arrays.items()}
    rules, sinks = attention.rules_of(m, problem), attention.sinks_of(m, arrays)
    if not precision.quantized:
        of = limits.exact(problem.dtype, cpu=m.on_cpu)
        results, grades = attention.call(m, problem, arrays)
        wanted = attention.expected(m, problem, attention.exact_operands(m, problem, views), rules, of)
        return grades + attention.compare(m, results, wanted, of)
    rounds_q = not m.on_cpu and precision.qk == "fp8" and by_name(_said(arrays, options).kernel).quantizes_q
    of = limits.low(
        problem.dtype, precision.qk, precision.pv, precision.pv_accumulator, cpu=m.on_cpu, rounds_q=rounds_q
    )
    results, grades = attention.call(m, problem, arrays)
    quantized = Quantized(m, problem, arrays, precision, grouping)
    operands = quantized.operands(attention.full_mask(m, problem, views), sinks, of.qk)
    wanted = attention.expected(m, problem, operands, rules, of)
    grades += attention.compare(m, results, wanted, of)
    if quantized.bits and "block_mask" not in arrays:  # which operands do not go with
        grades += _on_operands(m, problem, arrays, quantized, results)
    return grades


def _on_operands(
    m: Machine, problem: Problem, arrays: dict[str, Placed], quantized: Quantized, results: tuple[Any, ...]
) -> list[Grade]:
    """Attention on the operands beside the call that made them itself."""
    facts = problem.facts
    function: Any = omniattn.attention_varlen if facts["packed"] else omniattn.attention
    options = {name: x for name, x in problem.options().items() if name != "precision"}
    given = {name: arrays[name].array for name in ("mask", "sinks") if name in arrays}
    precision = facts["options"]["precision"]
    if isinstance(precision, tuple) and "pv_accumulator" in precision[1]:
        options["precision"] = dataclasses.replace(problem.options()["precision"], min_seqlen=0)
    of_operands = (quantized.qk.q, quantized.qk.k, quantized.v)
    try:
        again = function(*of_operands, **given, **options)
    except UnsupportedError:
        return []  # what the operands' grouping cannot do; `precision=` may take another kernel
    explain: Any = omniattn.explain
    kernels = (explain(*of_operands, **given, **options).kernel, _said(arrays, problem.options()).kernel)
    if kernels[0] != kernels[1]:
        return []  # operands of 4 bits are multiplied as such, which `precision=` does on older GPUs alone
    again = again if isinstance(again, tuple) else (again,)
    m.synchronize()
    what = "attention on the operands of quantize_qk and quantize_v has other bits than precision="
    names = ("o of operands", "lse of operands")[: len(results)]
    grades = [equal(m, name, a, b, what) for name, a, b in zip(names, results, again, strict=True)]
    absolute = len(results) > 1 or "sinks" in given or options.get("softcap")
    knobs = quantized.qk.problem
    if not facts["packed"] and not knobs.smooth_q and not (absolute and knobs.smooth_k) and "precision" not in options:
        apart = quantized.apart()
        got = function(apart[0].q, apart[1].k, quantized.v, **given, **options)
        got = got[0] if isinstance(got, tuple) else got
        m.synchronize()
        grades.append(equal(m, "o of operands apart", results[0], got, f"{what}, where Q and K are of two calls"))
    return grades


def draw_e4m3(d: Draw) -> dict[str, Any]:
    """Facts of a problem on e4m3 arrays."""
    facts = attention.draw_qkv(d, packed=d.chance(0.4), loud=False)
    arrays, options, heads = facts["arrays"], facts["options"], facts["heads"]
    facts["counted"] = "fp8 arrays"
    facts["dtype"] = d.pick(("bfloat16", "float16"))
    for name in "qkv":
        shape, scale = arrays[name]["shape"], min(arrays[name]["scale"], 4.0)
        view = d.view(shape, 16)
        if shape[-1] % 16 and not d.cpu:
            # Rows begin at multiples of 16 bytes.
            zeros = (0,) * (len(shape) - 1)
            view = {"before": (*zeros, 0), "after": (*zeros, 8)}
        arrays[name] |= {"dtype": "float8_e4m3fn", "scale": scale, "view": view}
    attention.draw_extras(d, facts, mask_chance=0.2)
    if facts["dtype"] == "float16" or d.chance(0.3):
        options["out_dtype"] = facts["dtype"]
    options["return_lse"] = d.chance(0.7)
    if d.chance(0.2):
        options["precision"] = "fp8"
    batch, rows, keys = attention.extents(facts)
    for name, n, own in (("q", rows, heads[0]), ("k", keys, heads[1]), ("v", keys, heads[1])):
        if d.chance(0.6):
            kinds = [(), (1,), (batch, heads[1]), (batch, own, -(-n // 128))]
            arrays[f"descale_{name}"] = {"shape": d.pick(kinds), "dtype": "float32", "kind": "uniform"}
    return facts


def _factor(m: Machine, problem: Problem, array: Any, b: int, heads: int, count: int) -> Any:
    """Factors of a sequence's rows: (heads, rows, 1)."""
    x = m.f64(array)
    if x.ndim < 2:
        return x.reshape(1, 1, 1)
    own = x[b]
    repeats = heads // max(own.shape[0], 1)
    own = own[m.ints([h // max(repeats, 1) for h in range(heads)])]
    if own.ndim == 1:
        return own[:, None, None]
    return own[:, m.ints([i // 128 for i in range(count)])][..., None]


def check_e4m3(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem on e4m3 arrays."""
    arrays = attention.place(m, problem)
    views = {name: x.array for name, x in arrays.items()}
    results, grades = attention.call(m, problem, arrays)
    plain = attention.exact_operands(m, problem, views)
    heads = problem.facts["heads"]

    def operands(b: int, rows: slice, keys: slice) -> Keys:
        x = plain(b, rows, keys)
        q, k, v = x.q, x.k, x.v
        if "descale_q" in views:
            q = q * _factor(m, problem, views["descale_q"], b, heads[0], q.shape[1])
        if "descale_k" in views:
            k = k * _factor(m, problem, views["descale_k"], b, heads[1], k.shape[1])
        if "descale_v" in views:
            v = v * _factor(m, problem, views["descale_v"], b, heads[1], v.shape[1])
        return dataclasses.replace(x, q=q, k=k, v=v)

    of = limits.low(problem.dtype, "fp8", "fp8", "fp32", cpu=m.on_cpu)
    if "descale_v" in views and len(views["descale_v"].shape) == 3:
        # P is rounded with its factor against the largest product of a row; factors differ by 16 at most.
        of = dataclasses.replace(of, subnormal=16 * of.subnormal)
    wanted = attention.expected(m, problem, operands, attention.rules_of(m, problem), of)
    return grades + attention.compare(m, results, wanted, of)
