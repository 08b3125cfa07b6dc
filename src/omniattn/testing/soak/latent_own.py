"""Latent caches of the package's own: what `append` has written to them, decoded."""

from __future__ import annotations

from typing import Any

import numpy as np

import omniattn
from omniattn.reference.e4m3 import decode_e4m3
from omniattn.reference.kv_cache import decode_656
from omniattn.testing.expected import Grade
from omniattn.testing.soak import limits
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.latent import draw_options, judged
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.problem import Problem
from omniattn.testing.soak.views import View


def draw(d: Draw) -> dict[str, Any]:
    """Facts of a problem."""
    dims = d.pick(((32, 16), (40, 8), (576, 512))) if d.cpu else (576, 512)
    heads = d.pick((1, 3, 8)) if d.cpu else d.pick((1, 5, 16, 32, 64, 100, 128))
    batch = d.weighted({1: 2.0, 2: 2.0, 5: 1.0, 40: 0.0 if d.cpu else 0.5})
    q_len = d.weighted({1: 4.0, 2: 1.0, 5: 1.0, 16: 0.5})
    lengths = [q_len - 1 + max(d.length(100 if d.cpu else 3000), 1) for _ in range(batch)]
    facts: dict[str, Any] = {
        "dtype": d.pick(("float16", "bfloat16")), "heads": (heads, 1), "head_dims": dims, "lengths": lengths,
        "q_len": q_len, "function": d.pick(("decode", "attention_with_kvcache")),
    }  # fmt: skip
    if d.chance(0.8):
        size = facts["block_size"] = d.pick((64, 16, 1, 7, 48, 256))
        blocks = sum(-(-n // size) for n in lengths) + d.integer(0, 3)
        shape = (blocks, size, 1, dims[0])
    else:
        shape = (batch, max(lengths) + d.integer(0, 20), 1, dims[0])
    facts["appends"] = _draw_own(d, facts)
    facts["arrays"] = {
        "q": {**d.numbers((batch, q_len, heads, dims[0]), "io", loud=False), "view": {}},
        "k": {**d.numbers(shape, "io", loud=False), "view": _view(d)},
    }
    if d.chance(0.2):
        facts["arrays"]["sinks"] = {"shape": (heads,), "dtype": "float32", "kind": "normal", "scale": 2.0}
    facts["options"] = draw_options(d)
    return facts


def _view(d: Draw) -> View:
    """Gaps between rows and blocks."""
    return {"after": (d.integer(0, 1), d.integer(0, 2), 0, 8 * d.integer(0, 2))} if d.chance(0.4) else {}


def check(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem."""
    facts = problem.facts
    arrays = {name: problem.place(m, name) for name in facts["arrays"]}
    rows = arrays["k"].array
    cache = _appended(m, problem, omniattn.PagedKVCache if "block_size" in facts else omniattn.KVCache, rows)
    in_codes = facts["appends"]["k_dtype"].startswith("fp8")
    # Of rows of 656 bytes some kernels round products of codes and scales to the type of q.
    rounded = facts["appends"]["k_dtype"] == "fp8_ds_mla" and not m.on_cpu
    of = limits.decode(problem.dtype, codes=False, value_codes=False, recent=False, cpu=m.on_cpu, rounded=rounded)
    meant = (lambda: m.number(_meant(m, problem, cache))) if in_codes else (lambda: m.f64(rows))
    return judged(m, problem, cache, arrays, meant, of)


def _draw_own(d: Draw, facts: dict[str, Any]) -> dict[str, Any]:
    """How a cache of the package's own is made and written."""
    own = {"k_dtype": {"float16": "fp16", "bfloat16": "bf16"}[facts["dtype"]], "apart": d.chance(0.5)}
    width = facts["head_dims"][0]
    if width % 16 == 0 and d.chance(0.7):
        takes_656 = width == 576 and (d.cpu or facts["dtype"] == "bfloat16")
        own["k_dtype"] = d.pick(("fp8", "fp8_ds_mla")) if takes_656 else "fp8"
        if own["k_dtype"] == "fp8":
            own["k_scale"] = d.pick((0.01, 0.03))
    return own


def _appended(m: Machine, problem: Problem, kind: Any, rows: Any) -> Any:
    """A cache of the package's own with these rows (blocks, tokens, 1, channels), a block as a sequence."""
    facts, own = problem.facts, problem.facts["appends"]
    blocks, size = facts["arrays"]["k"]["shape"][:2]
    width, width_v = facts["head_dims"]
    made = {"k_dtype": own["k_dtype"], "head_dim_v": width_v}
    if "k_scale" in own:
        made["k_scale"] = m.place(np.array([own["k_scale"]], np.float32), "float32", {}).array
    cache = kind(blocks, size, 1, width, like=rows, **made)
    call: dict[str, Any] = {"seq_lens": m.place(np.full(blocks, size, np.int32), "int32", {}).array}
    if "block_size" in facts:
        call["block_table"] = m.place(np.arange(blocks, dtype=np.int32)[:, None], "int32", {}).array
    if own["apart"]:
        omniattn.append(cache, rows[..., :width_v], k_pe=rows[..., width_v:], **call)
    else:
        omniattn.append(cache, rows, **call)
    return cache


def _meant(m: Machine, problem: Problem, cache: Any) -> Any:
    """Numbers of rows in 8 bits (blocks, tokens, 1, channels), on the host."""
    data = m.host(cache.k)
    if problem.facts["appends"]["k_dtype"] == "fp8":
        return decode_e4m3(data).astype(np.float64) * np.float32(problem.facts["appends"]["k_scale"])
    return decode_656(data)
