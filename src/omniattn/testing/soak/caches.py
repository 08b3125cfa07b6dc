"""Caches: ``append`` in several steps, ``copy_blocks`` and ``copy_recent``, then ``decode``.

The bytes that `append` writes are compared with the tokens by the rules of docs/kv_formats.md, and `decode` with
attention in float64 on the numbers that these bytes stand for.
"""

from __future__ import annotations

from typing import Any

from omniattn.testing.expected import Grade
from omniattn.testing.soak.cache_formats import BITS, row_width
from omniattn.testing.soak.cache_runs import Run
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.pools import draw_nobody, draw_pool, own_scales
from omniattn.testing.soak.problem import Problem

_DTYPES = ("bf16", "fp16", "fp8", "int8", "int4")


def draw_format(d: Draw, facts: dict[str, Any]) -> None:
    """Arguments of the cache."""
    cache: dict[str, Any] = {}
    dim, heads = facts["head_dims"][0], facts["heads"][1]
    own = {"float16": "fp16", "bfloat16": "bf16"}.get(facts["dtype"], d.pick(("bf16", "fp16")))
    own = d.pick(("bf16", "fp16")) if d.cpu and d.chance(0.2) else own
    if d.chance(0.35):
        draw_pool(d, facts, own)
        return
    sixteen = lambda name: own if BITS[name] == 16 else name  # noqa: E731
    cache["k_dtype"] = sixteen(d.weighted({"bf16": 1.0, "fp8": 1.5, "int8": 1.5, "int4": 2.5}))
    cache["v_dtype"] = sixteen(d.pick(_DTYPES)) if d.chance(0.3) else cache["k_dtype"]
    if cache["v_dtype"] == cache["k_dtype"] and d.chance(0.5):
        del cache["v_dtype"]
    names = (cache["k_dtype"], cache.get("v_dtype", cache["k_dtype"]))
    quantized = [BITS[name] < 16 for name in names]
    width = row_width(dim)
    if names == ("int4", "int4") and dim == width and d.chance(0.3):
        cache["layout"] = "fbgemm"
        if d.chance(0.5) and dim // 4 >= 32:
            cache["group_size"] = dim // 4
    else:
        if any(quantized) and d.chance(0.4):
            cache["group_size"] = d.pick([g for g in (32, 64, 128, 256) if g <= width])
        if any(name in ("int8", "int4") for name in names) and d.chance(0.3):
            cache["zero_point"] = False
    if quantized[0]:
        if d.chance(0.25):
            cache["hadamard"] = True
        if d.chance(0.25):
            facts["k_mean"] = {"shape": (heads, dim), "dtype": "float32", "kind": "normal", "scale": 2.0}
        if d.chance(0.25):
            facts["k_channel_scale"] = {"shape": (heads, dim), "dtype": "float32", "kind": "uniform"}
    if any(quantized) and d.chance(0.25):
        cache["recent_window"] = d.pick((1, 7, 16, 33, 64))
        cache["recent_dtype"] = own
    if not any(quantized) and (dim == 256 or dim % 16):
        facts["head_dims"] = (dim + 256, dim + 256)  # which 16-bit caches alone have
    facts["cache"] = cache
    facts["counted"] = f"{names[0]}" if names[0] == names[1] else "K, V differ"


def draw_steps(d: Draw, facts: dict[str, Any], lengths: list[int], shared: int) -> None:
    """Appends that end with these lengths: a prompt, then some tokens, or all at once."""
    steps: list[dict[str, Any]] = []
    if own_scales(facts):
        facts["steps"] = steps
        return
    left = [n - (shared if b and n else 0) for b, n in enumerate(lengths)]
    for last in (False, True):
        counts = list(left) if last else [max(n - d.integer(1, 4), 0) for n in left]
        left = [n - c for n, c in zip(left, counts, strict=True)]
        same = len(set(counts)) == 1 and all(lengths)
        steps.append({"counts": counts, "packed": not same or d.chance(0.5)})
        if d.chance(0.4) and not last:
            steps[0] = {"counts": [a + b for a, b in zip(counts, left, strict=True)], "packed": True}
            break
    for step in steps:
        if step["packed"] and "recent_window" not in facts["cache"] and d.chance(0.25):
            step["by_slot"] = True
    facts["steps"] = steps
    if d.chance(0.4):
        pairs = d.integer(1, facts["head_dims"][0] // 2)
        facts["rope"] = {"pairs": pairs, "positions": max([1, *lengths])}
        if d.chance(0.6):
            facts["rope"]["style"] = d.pick(("half", "interleaved"))


def draw(d: Draw) -> dict[str, Any]:
    """Facts of a problem."""
    heads, dim = d.heads(), d.head_dim()
    batch = d.weighted({1: 2.0, 2: 2.0, 3: 1.0, 5: 1.0, 17: 0.0 if d.cpu else 1.0})
    facts: dict[str, Any] = {"dtype": d.dtype(), "heads": heads, "head_dims": (dim, dim), "packed": False}
    draw_format(d, facts)
    dim = facts["head_dims"][0]
    most = 150 if d.cpu else d.pick((600, 3000, 9000 if batch < 6 and "pool" not in facts else 3000))
    q_len = d.weighted({1: 4.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 0.5, 5: 0.5})
    lengths = [0 if d.chance(0.07) else max(d.length(most), 1) for _ in range(batch)]
    paged, shared = d.chance(0.6), 0
    if paged:
        facts["block_size"] = d.weighted({16: 3.0, 64: 2.0, 1: 0.5, 3: 1.0, 128: 1.0, 33: 0.5})
        if d.chance(0.2) and "recent_window" not in facts["cache"] and not own_scales(facts):
            shared = facts["block_size"] * d.integer(1, max(1, 64 // facts["block_size"]))
            lengths = [n and shared + q_len + n for n in lengths]
            if lengths[0] == 0:
                lengths[0] = shared + q_len
        facts["copies"] = d.chance(0.4)
    facts["lengths"], facts["q_len"] = lengths, q_len
    if d.chance(0.25):  # its kernels are those of decode here
        facts["function"] = "attention_with_kvcache"
    facts["spare"] = d.pick((0, 0, 1, 40))
    draw_steps(d, facts, lengths, shared)
    options: dict[str, Any] = {}
    if d.chance(0.2):
        options["softmax_scale"] = d.pick((0.3, 1.0, 0.02, -0.1))
    if d.chance(0.2):
        options["softcap"] = d.pick((20.0, 1.0))
    if shared:
        options["shared_prefix"] = shared
    else:
        if d.chance(0.35):
            options["window"] = (d.pick((-1, 0, 5, 20, 64, 1000)), d.pick((0, -1)))
            facts["nobody"] = draw_nobody(d)
        if d.chance(0.3):
            options["deterministic"] = True
    if d.chance(0.7):
        options["return_lse"] = True
    shape = (batch, q_len, heads[0], dim)
    arrays: dict[str, Any] = {"q": {**d.numbers(shape, "io", loud=False), "view": {} if shared else d.view(shape, 8)}}
    if d.chance(0.2):
        arrays["sinks"] = {"shape": (heads[0],), "dtype": d.pick(("float32", "io")), "kind": "normal", "scale": 2.0}
    facts["arrays"], facts["options"] = arrays, options
    kinds = {name: d.numbers((1,), "io", loud=False) for name in ("k", "v")}
    facts["tokens"] = {name: {"kind": x["kind"], "scale": x["scale"]} for name, x in kinds.items()}
    facts["token_view"] = d.chance(0.3)
    if d.chance(0.4):
        facts["out"] = d.view(shape, 8, written=True)
    return facts


def check(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem."""
    run = Run(m, problem)
    run.append()
    run.copy()
    run.decode()
    return run.grades
