"""Gradients of attention in float64 from their definition (docs/backward.md), with bounds of errors.

    w = exp(s - lse);  D_i = do_i.o_i - dlse_i;  ds_ij = w_ij (z_ij do_i.v_j - D_i)
    dv = (w z)^T do;  dq = scale (ds f') k;  dk = scale (ds f')^T q;  dsinks = -sum_i exp(sink - lse_i) D_i;  dmask = ds

Kernels round P and dS to 16 bits, and D is made of o as the forward stored it. The bounds are sums of the magnitudes of
what these roundings are multiplied by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from omniattn.testing.soak.formulas import Keys, Result, Rules, blocks, grouped, growth, scores, weights
from omniattn.testing.soak.limits import LEAST, ROUNDING, Limits
from omniattn.testing.soak.machines import Machine


@dataclass(frozen=True)
class Gradients:
    """By name, of one sequence, heads first: values, and bounds of their errors."""

    values: dict[str, Any]
    bounds: dict[str, Any]


def _rounded(dtype: str, cpu: bool) -> tuple[float, float, float]:
    """Rounding of P and dS, relative and absolute; what is lost of P, absolute, where dS is made of it."""
    if cpu:
        return 64 * ROUNDING["float64" if dtype == "float64" else "float32"], 0.0, 0.0
    least = 2 * LEAST[dtype] if dtype == "float16" else 0.0
    return 2 * ROUNDING[dtype], least, max(least, 2.0**-126)  # the least number of fp32 in kernels


def gradients(
    m: Machine, x: Keys, rules: Rules, limits: Limits, forward: Result, do: Any, dlse: Any, dtype: str
) -> Gradients:
    """Gradients of one sequence.

    Parameters
    ----------
    forward : Result
        Of `formulas.attend`: its bounds are those of o and lse as the call was given them.
    do : (heads, queries, channels of v)
    dlse : (heads, queries) or None
    dtype : str
        Element type of the operands.
    """
    heads, queries, dim = x.q.shape
    kv_heads, keys, dim_v = x.v.shape
    unit, least, lost = _rounded(dtype, m.on_cpu)
    names = ("dq", "dk", "dv", "dsinks")
    shapes = {
        "dq": (heads, queries, dim),
        "dk": (kv_heads, keys, dim),
        "dv": (kv_heads, keys, dim_v),
        "dsinks": (heads,),
    }
    values, bounds = ({name: m.zeros(*shapes[name]) for name in names} for _ in range(2))
    masks: list[tuple[Any, Any]] = []
    scale = rules.scale
    for begin, end in blocks(m, heads, queries, keys) if heads else []:
        rows = end - begin
        of = scores(m, x, rules, limits, begin, end)
        w, lse = weights(m, of, x.sinks)
        seen = lse != -math.inf
        own = m.where(seen, do[:, begin:end], 0.0)
        lse_bound = forward.lse_bound[:, begin:end, None]
        lse_bound = m.where(m.isfinite(lse_bound), lse_bound, 0.0)
        wg = w * (growth(m, of.error) + growth(m, lse_bound) + unit)
        grouped_do, v_turned = grouped(own, kv_heads), x.v.swapaxes(-1, -2)
        z = rules.factors(m, heads, begin, end, keys)
        dov = (grouped_do @ v_turned).reshape(heads, rows, keys) * z
        dov_size = (abs(grouped_do) @ abs(v_turned)).reshape(heads, rows, keys) * z
        big_d = m.sum(own * forward.o[:, begin:end], -1)
        d_bound = m.sum(abs(own) * (forward.o_bound[:, begin:end] + limits.fp * abs(forward.o[:, begin:end])), -1)
        if dlse is not None:
            big_d = big_d - m.where(seen[..., 0], dlse[:, begin:end], 0.0)[..., None]
            d_bound = d_bound + limits.fp * abs(m.where(seen[..., 0], dlse[:, begin:end], 0.0))[..., None]
        ds = w * (dov - big_d)
        ds_bound = (
            wg * (abs(dov) + abs(big_d)) + w * (d_bound + limits.qk * (dov_size + abs(big_d))) + 2 * unit * abs(ds)
        )
        ds_bound = 2 * ds_bound + lost * abs(dov - big_d)
        masks.append((ds, ds_bound))
        slope = abs(of.slope)
        pre, pre_bound = ds * of.slope, ds_bound * (slope + limits.function) + abs(ds) * limits.function + least
        q = grouped(x.q[:, begin:end], kv_heads)
        pre, pre_bound = grouped(pre, kv_heads), grouped(pre_bound, kv_heads)
        values["dq"][:, begin:end] = (scale * (pre @ x.k)).reshape(heads, rows, dim)
        bounds["dq"][:, begin:end] = (abs(scale) * (pre_bound @ abs(x.k))).reshape(heads, rows, dim)
        values["dk"] += scale * (pre.swapaxes(-1, -2) @ q)
        bounds["dk"] += abs(scale) * (pre_bound.swapaxes(-1, -2) @ abs(q))
        values["dv"] += grouped(w * z, kv_heads).swapaxes(-1, -2) @ grouped_do
        bounds["dv"] += grouped((2 * wg + least) * z, kv_heads).swapaxes(-1, -2) @ abs(grouped_do)
        if x.sinks is not None:
            share = m.exp(x.sinks[:, None, None] - m.where(seen, lse, math.inf))
            values["dsinks"] -= m.sum(share * big_d, 1)[:, 0, 0]
            grown = share * (growth(m, lse_bound) + 8 * limits.fp)
            bounds["dsinks"] += 2 * m.sum(grown * abs(big_d) + share * d_bound, 1)[:, 0, 0]
    if masks:
        values["dmask"], bounds["dmask"] = (m.cat([pair[i] for pair in masks], 1) for i in range(2))
    else:
        values["dmask"] = bounds["dmask"] = m.zeros(heads, queries, keys)
    out = ROUNDING[dtype] + (0.0 if dtype == "float64" else 2.0**-22)
    for name in ("dq", "dk", "dv"):
        bounds[name] = bounds[name] + 2 * out * abs(values[name]) + 2 * LEAST[dtype]
    for name in ("dsinks", "dmask"):
        bounds[name] = bounds[name] + 8 * limits.fp * abs(values[name]) + 2.0**-140
    return Gradients(values, bounds)
