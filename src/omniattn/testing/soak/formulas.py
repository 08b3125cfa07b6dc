"""Attention in float64 from its definition, with a bound of what a kernel's arithmetic may make of it.

Nothing here comes from `omniattn.reference`: the two are beside each other. For query i, key j and channel c,

    s = scale q.k;  s = cap tanh(s / cap);  s = mod(s);  s += mask
    w_ij = exp(s_ij - lse_i);   o_ic = sum_j w_ij z_ij v_jc;   z = 1, or what dropout makes of it

e_ij bounds the error of a score, from the sum of |q_d k_d| and the size of s. Then to first order

    |error of o_ic| <= p A_ic + sum_j w_ij z_ij g_ij |v_jc| + G_i A_ic + out |o_ic|
    A_ic = sum_j w_ij z_ij |v_jc|;   g = exp(2 e) - 1;   G_i = sum_j w_ij g_ij
    |error of lse_i| <= 2 sum_j w_ij e_ij + lse

with p the rounding of probabilities and out that of o, see `omniattn.testing.soak.limits`. So every element has a
tolerance of its own, whatever the sizes of the inputs are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from omniattn.testing.soak.dropouts import Dropped
from omniattn.testing.soak.limits import Limits
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.mods import Mod

#: A mask below this leaves fp32 no digits for the score.
LOWEST = -1e37


@dataclass(frozen=True)
class Rules:
    """What is the same for all rows of a sequence.

    Attributes
    ----------
    scale, softcap : float
    left, right : int
        Window, -1 for no limit; causal is right = 0.
    mod : Mod or None
    batch : int
        Number of the sequence, for ``mod`` and ``dropped``.
    dropped : Dropped or None
    """

    scale: float
    softcap: float = 0.0
    left: int = -1
    right: int = -1
    mod: Mod | None = None
    batch: int = 0
    dropped: Dropped | None = None

    def factors(self, m: Machine, heads: int, begin: int, end: int, keys: int) -> Any:
        """What probabilities of a block of rows are multiplied by, broadcastable to (heads, rows, keys)."""
        if self.dropped is None:
            return m.full((1, 1, 1), 1.0)
        return m.number(self.dropped.factors(self.batch, heads, begin, end, keys))


@dataclass(frozen=True)
class Keys:
    """Operands of one sequence in float64, heads first.

    Attributes
    ----------
    q : (heads, queries, channels)
    k, v : (kv heads, keys, channels)
    q_size, k_size, v_size : arrays
        Magnitudes for the bounds, where they are not those of q, k and v.
    mask : array or None
        To be added, broadcastable to (heads, queries, keys).
    sinks : (heads,) or None
    """

    q: Any
    k: Any
    v: Any
    q_size: Any = None
    k_size: Any = None
    v_size: Any = None
    mask: Any = None
    sinks: Any = None


@dataclass(frozen=True)
class Scores:
    """Rows [begin, end) of all heads against all keys.

    Attributes
    ----------
    begin, end : int
    s, error : (heads, rows, keys)
        -inf where hidden; bound of its error.
    slope : (heads, rows, keys)
        Derivative of what softcap and mod make of a score.
    """

    begin: int
    end: int
    s: Any
    error: Any
    slope: Any


@dataclass(frozen=True)
class Result:
    """o (heads, queries, channels), lse (heads, queries), bounds of their errors; sum w |v|."""

    o: Any
    lse: Any
    o_bound: Any
    lse_bound: Any
    size: Any


def grouped(x: Any, kv_heads: int) -> Any:
    """(heads, rows, n) to (kv heads, group * rows, n)."""
    heads, rows, n = x.shape
    return x.reshape(kv_heads, heads // max(kv_heads, 1) * rows, n)


def scores(m: Machine, x: Keys, rules: Rules, limits: Limits, begin: int, end: int) -> Scores:
    """The scores of a block of rows."""
    heads, queries, keys = x.q.shape[0], x.q.shape[1], x.k.shape[1]
    kv_heads, rows = x.k.shape[0], end - begin
    shape = (heads, rows, keys)
    q = grouped(x.q[:, begin:end], kv_heads)
    q_size = abs(q) if x.q_size is None else grouped(x.q_size[:, begin:end], kv_heads)
    k_size = abs(x.k) if x.k_size is None else x.k_size
    s = (q @ x.k.swapaxes(-1, -2)).reshape(shape) * rules.scale
    error = (q_size @ k_size.swapaxes(-1, -2)).reshape(shape) * (abs(rules.scale) * limits.qk)
    slope = m.full((1, 1, 1), 1.0)
    if rules.softcap > 0:
        t = m.tanh(s / rules.softcap)
        s, slope = rules.softcap * t, 1.0 - t * t
        error = error + abs(s) * limits.function
    i = m.arange(begin, end)[:, None]
    j = m.arange(0, keys)[None, :]
    if rules.mod is not None:
        for h in range(heads):
            s[h], factor = rules.mod.apply(m, s[h], rules.batch, h, i, j)
            if rules.mod.slope_varies:
                slope = m.broadcast(slope, shape) + 0.0 if tuple(slope.shape) != shape else slope
                slope[h] = slope[h] * factor
        error = error + abs(m.where(m.isfinite(s), s, 0.0)) * limits.function
    hidden = s == -math.inf
    centre = i + float(keys - queries)
    if rules.left >= 0:
        hidden = hidden | (j < centre - float(rules.left))
    if rules.right >= 0:
        hidden = hidden | (j > centre + float(rules.right))
    s = m.where(hidden, 0.0, s)
    if x.mask is not None:
        mask = x.mask
        if mask.shape[-2] > 1:
            mask = mask[..., begin:end, :]
        hidden = hidden | (mask == -math.inf)
        added = m.where(mask == -math.inf, 0.0, mask)
        low = added < LOWEST
        s = m.where(low, 6 * LOWEST, s + m.where(low, 0.0, added))
        error = m.where(low, 0.0, error + (abs(s) + abs(m.where(low, 0.0, added))) * limits.fp)
    error = m.where(hidden, 0.0, error + m.where(s < LOWEST, 0.0, abs(s) * limits.fp))
    return Scores(begin, end, m.where(hidden, -math.inf, s), error, slope)


def blocks(m: Machine, heads: int, queries: int, keys: int) -> list[tuple[int, int]]:
    """Rows that are computed together: their scores stay below ``m.scores``."""
    step = max(1, m.scores // max(heads * keys, 1))
    return [(begin, min(begin + step, queries)) for begin in range(0, queries, step)]


def weights(m: Machine, of: Scores, sinks: Any) -> tuple[Any, Any]:
    """(w, lse) of a block: (heads, rows, keys), (heads, rows, 1)."""
    top = m.top(of.s)
    if sinks is not None:
        top = m.maximum(top, sinks[:, None, None])
    shift = m.where(top == -math.inf, 0.0, top)
    p = m.exp(of.s - shift)
    total = m.sum(p, -1)
    if sinks is not None:
        total = total + m.exp(sinks[:, None, None] - shift)
    none = total == 0
    lse = m.where(none, -math.inf, shift + m.log(m.where(none, 1.0, total)))
    return p / m.where(none, 1.0, total), lse


def growth(m: Machine, error: Any) -> Any:
    """What errors of scores make of their exponentials: exp(2 e) - 1, and no infinity."""
    return m.exp(2.0 * -m.maximum(-error, -20.0)) - 1.0


def attend(m: Machine, x: Keys, rules: Rules, limits: Limits) -> Result:
    """Attention of one sequence."""
    heads, queries, keys = x.q.shape[0], x.q.shape[1], x.k.shape[1]
    kv_heads, dim = x.v.shape[0], x.v.shape[2]
    if heads == 0 or queries == 0:
        o, lse = m.zeros(heads, queries, dim), m.zeros(heads, queries)
        return Result(o, lse, o, lse, o)
    v_size = abs(x.v) if x.v_size is None else x.v_size
    all_values = m.sum(v_size, 1)  # (kv heads, 1, channels)
    found: list[tuple[Any, ...]] = []
    for begin, end in blocks(m, heads, queries, keys):
        rows = end - begin
        of = scores(m, x, rules, limits, begin, end)
        w, lse = weights(m, of, x.sinks)
        g = growth(m, of.error)
        kept = w * rules.factors(m, heads, begin, end, keys)

        def times(left: Any, right: Any, rows: int = rows) -> Any:
            return (grouped(left, kv_heads) @ right).reshape(heads, rows, dim)

        o, size = times(kept, x.v), times(kept, v_size)
        most = m.top(kept) if keys else m.zeros(heads, rows, 1)
        bound = limits.p * size + times(kept * g, v_size) + m.sum(w * g, -1) * size
        bound = bound + limits.out * abs(o) + limits.least
        if limits.subnormal:
            bound = bound + limits.subnormal * times(most, all_values)
        lse = lse[..., 0]
        lse_bound = 2.0 * m.sum(w * of.error, -1)[..., 0] + limits.lse
        lse_bound = m.where(abs(lse) < 1e36, lse_bound + limits.lse_relative * abs(lse), math.inf)
        found.append((o, m.where(lse == -math.inf, -math.inf, lse), bound, lse_bound, size))
    parts = [m.cat([block[i] for block in found], 1) for i in range(5)]
    return Result(*parts)
