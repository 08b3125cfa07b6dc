"""``sparse_blocks``, and attention in low precision that predicts its blocks.

The rule is written out in float64. Where two scores, a sum of weights and its share, or a similarity and its threshold
are nearer to each other than the arithmetic of the library can tell apart, a block may be kept or not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import omniattn
from omniattn.testing.expected import Grade
from omniattn.testing.soak import attention
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.judge import equal, repeated, truth, unchanged
from omniattn.testing.soak.machines import Machine, Placed
from omniattn.testing.soak.problem import Problem

Array = npt.NDArray[Any]

#: Error of a mean and of a product as a fraction of its summands' magnitudes, and of a similarity: fp32, or double.
_GPU, _CPU = (2.0**-20, 2.0**-16), (2.0**-44, 2.0**-40)
#: Error of a sum of weights, as a fraction, besides that of scores.
_SUM = 2.0**-14
#: Precisions whose kernels take block masks, by class and knobs.
_PRECISIONS: tuple[tuple[str, dict[str, bool]], ...] = (
    ("Int8", {}), ("Int8", {"smooth_k": False}), ("Int4", {"smooth_q": False}), ("Fp8", {}),
)  # fmt: skip


def draw(d: Draw) -> dict[str, Any]:
    """Facts of a problem."""
    layout, heads, dim = d.pick(("NHD", "HND")), d.heads(), d.head_dim()
    rows, keys = (d.length(600), d.length(1500)) if d.cpu else d.lengths()
    batch = d.weighted({1: 3.0, 2: 2.0, 3: 1.0, 0: 0.1})
    batch, heads = d.fit(batch, heads, rows, keys, dim)
    share = d.uniform(0.01, 1.0) if d.chance(0.8) else d.pick((1.0, 1e-6))
    options: dict[str, Any] = {"layout": layout, d.pick(("topk", "cdf")): share}
    if d.chance(0.4):
        options["similarity"] = d.pick((0.0, 0.005, 0.01, 0.02, 0.1, 1.5))
    if d.chance(0.6):
        options["block_size"] = d.pick((64, 128, (128, 64), (64, 256), (192, 128)))
    if d.chance(0.4):
        options["causal"] = True
    if d.chance(0.3):
        options["keep_first"] = d.integer(1, 3)
    arrays = {}
    for name, n, h in (("q", rows, heads[0]), ("k", keys, heads[1]), ("v", keys, heads[1])):
        shape = (batch, n, h, dim) if layout == "NHD" else (batch, h, n, dim)
        arrays[name] = {**d.numbers(shape, "io", loud=False), "view": d.view(shape, 8)}
    return {
        "dtype": d.dtype(), "packed": False, "heads": heads, "head_dims": (dim, dim), "arrays": arrays,
        "options": options, "attend": d.pick(_PRECISIONS) if d.chance(0.5) else None, "counted": "blocks",
    }  # fmt: skip


def check(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem."""
    arrays, options = attention.place(m, problem), problem.facts["options"]
    q, k = arrays["q"].array, arrays["k"].array

    def run() -> tuple[Any, ...]:
        return (omniattn.sparse_blocks(q, k, **options),)

    results, grades = unchanged(m, {name: arrays[name] for name in "qk"}, run)
    x, y = (m.host(attention.heads_first(problem, m.f64(a))).astype(np.float64) for a in (q, k))
    found = m.host(results[0])
    grades += [truth("blocks", not (text := wrong(found, x, y, options, on_cpu=m.on_cpu)), text)]
    grades += repeated(m, results, run, 1)
    if problem.facts["attend"] is not None and not any(grade.ratio > 1 for grade in grades):
        grades += _attends(m, problem, arrays, results[0])
    return grades


def _attends(m: Machine, problem: Problem, arrays: dict[str, Placed], blocks: Any) -> list[Grade]:
    """Attention that predicts its blocks beside attention that is given them."""
    name, knobs = problem.facts["attend"]
    options = problem.facts["options"]
    kind = getattr(omniattn, name)
    size = options.get("block_size", (128, 64))
    of_both = {"layout": options["layout"], "causal": options.get("causal", False), "return_lse": True}
    sparse = omniattn.Sparse(**{key: x for key, x in options.items() if key not in ("layout", "causal")})
    inputs = [arrays[x].array for x in "qkv"]
    wanted = omniattn.attention(*inputs, block_mask=blocks, block_size=size, precision=kind(**knobs), **of_both)
    got = omniattn.attention(*inputs, precision=kind(sparse=sparse, **knobs), **of_both)
    m.synchronize()
    what = "sparse= has other bits than block_mask= of the same blocks"
    return [equal(m, of, a, b, what) for of, a, b in zip(("o", "lse"), got, wanted, strict=True)]


def wrong(found: Array, q: Array, k: Array, options: dict[str, Any], *, on_cpu: bool) -> str:
    """What is wrong with a mask; nothing if it may be one.

    Parameters
    ----------
    found : array, bool
    q, k : array, (batch, heads, rows, head_dim), float64
    options : dict
        Of the call.
    on_cpu : bool
        Whether the library computed in double precision.
    """
    size = options.get("block_size", (128, 64))
    size = size if isinstance(size, tuple) else (size, size)
    batch, heads, rows, dim = q.shape
    counts = [-(-n // step) for n, step in zip((rows, k.shape[2]), size, strict=True)]
    if found.shape != (batch, heads, *counts) or found.dtype != np.bool_:
        return f"{found.dtype} of shape {found.shape}, expected bool of shape {(batch, heads, *counts)}"
    if 0 in found.shape:
        return ""
    part, of_similarity = _CPU if on_cpu else _GPU
    mean_q, size_q, alike_q = _of_blocks(q, size[0])
    mean_k, size_k, alike_k = (np.repeat(x, heads // k.shape[1], axis=1) for x in _of_blocks(k, size[1]))
    across = (np.swapaxes(x, -1, -2) for x in (mean_k, size_k))
    scores, error = (x @ y * dim**-0.5 for x, y in zip((mean_q, size_q), across, strict=True))
    last = np.minimum(np.arange(counts[0]) * size[0] + size[0], rows)[:, None] - 1 + k.shape[2] - rows
    seen = np.arange(counts[1]) * size[1] <= last if options.get("causal") else np.ones(counts, bool)
    threshold = options.get("similarity", -0.1)
    for at in np.ndindex(batch, heads, counts[0]):
        odd_q, odd_k = alike_q[at] - threshold, alike_k[at[:2]] - threshold
        text = _wrong_row(
            found[at], scores[at], 3 * part * error[at], seen[at[2]], odd_q, odd_k, of_similarity, options
        )
        if text:
            return f"row {at}: {text}"
    return ""


def _of_blocks(x: Array, size: int) -> tuple[Array, Array, Array]:
    """Means of blocks, means of magnitudes, and similarities."""
    starts = np.arange(0, x.shape[2], size)
    counts = np.minimum(size, x.shape[2] - starts)[:, None]
    lengths = np.sqrt((x * x).sum(-1, keepdims=True))
    directions = x / np.where(lengths == 0, 1.0, lengths)
    means, sizes, mean = (np.add.reduceat(y, starts, axis=2) / counts for y in (x, abs(x), directions))
    return means, sizes, (mean * mean).sum(-1)


def _wrong_row(
    kept: Array, scores: Array, error: Array, seen: Array, odd_q: float, odd_k: Array, of_similarity: float,
    options: dict[str, Any],
) -> str:  # fmt: skip
    """What is wrong with a block of queries. odd_q, odd_k: similarities less their threshold."""
    if (kept & ~seen).any():
        return "a hidden block is kept"
    first = seen & (np.arange(seen.size) < options.get("keep_first", 0))
    if (first & ~kept).any():
        return "one of the first blocks is left out"
    if kept[seen].all() and odd_q <= of_similarity:
        return ""
    if odd_q <= -of_similarity:
        return "a block of queries that does not resemble itself has not all blocks"
    if (seen & ~kept & (odd_k <= -of_similarity)).any():
        return "a block of keys that does not resemble itself is left out"
    if (abs(odd_k[seen]) < of_similarity).any():
        return ""  # which of them compete is not known
    of = seen & (odd_k > 0)
    if not of.any():
        return ""
    low, high = scores - error, scores + error
    # Of each block: how many, and what weights, are ahead of it for certain; or perhaps, itself among them.
    order = (low[of][:, None] > high[of], high[of][:, None] >= low[of])
    if "topk" in options:
        share = max(int(np.float32(options["topk"]) * np.float32(seen.size)), 1)
        ahead, perhaps = (x.sum(0) for x in order)
        surely, never = perhaps <= share, ahead >= share
        if not first.any() and int((kept & of).sum()) != min(share, int(of.sum())):
            return f"{int((kept & of).sum())} blocks are kept, expected {min(share, int(of.sum()))}"
    else:
        weights = np.exp(scores[of] - scores[of].max())
        slack = (_SUM + 4 * error[of].max()) * weights.sum()
        ahead, perhaps = (weights @ x for x in order)
        share = options["cdf"] * weights.sum()
        surely = (perhaps <= share - slack) | (order[1].sum(0) == 1)
        never = (ahead + weights > share + slack) & order[0].any(0)
    own = kept[of]
    if (surely & ~own).any():
        return f"block {np.flatnonzero(of)[surely & ~own][0]} of a large score is left out"
    if (never & own & ~first[of]).any():
        return f"block {np.flatnonzero(of)[never & own & ~first[of]][0]} of a small score is kept"
    return ""
