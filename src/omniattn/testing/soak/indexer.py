"""``index_logits`` and ``top_k``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import omniattn
from omniattn.reference import indexer as reference
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.testing.expected import Grade
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.judge import equal, grade, repeated, truth
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.problem import Problem

_DIM = 128
#: Error of a logit as a fraction of the magnitudes of its products: fp32 sums, or sums of e4m3 on Hopper's tensor
#: cores, which keep about 13 bits.
_CPU, _GPU = 2.0**-20, 2.0**-12


def draw_logits(d: Draw) -> dict[str, Any]:
    """Facts of a problem of ``index_logits``."""
    paged = d.chance(0.6)
    longest = d.length(400 if d.cpu else 4000)
    size = d.weighted({64: 3.0, 16: 1.0, d.integer(1, 100): 1.0}) if paged else 0
    sequences = d.integer(1, 5) if paged else 1
    facts = {
        "heads": d.weighted({64: 3.0, 32: 1.0, d.integer(1, 128): 1.0}), "queries": d.integer(1, 4 if paged else 20),
        "lengths": [d.integer(0, longest) for _ in range(sequences)], "size": size, "fused": d.chance(0.6),
        "columns": longest, "seed": d.integer(0, 1 << 30), "ranges": d.chance(0.7), "out": d.chance(0.5),
        "narrow": d.chance(0.4),
    }  # fmt: skip
    return {"dtype": "float32", "arrays": {}, "options": {}, "facts": facts}


def check_logits(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem."""
    o = problem.facts["facts"]
    rng = np.random.default_rng(o["seed"])
    sequences, rows = len(o["lengths"]), len(o["lengths"]) * o["queries"]
    q = _codes(rng, rows, o["heads"], _DIM)
    weights = rng.standard_normal((rows, o["heads"])).astype(np.float32)
    if o["size"]:
        arrays, keys, ends = _paged(rng, o)
        arrays["q"] = (q.reshape(sequences, o["queries"], o["heads"], _DIM), "float8_e4m3fn")
        starts = np.zeros_like(ends)
        width = arrays["block_table"][0].shape[1] * o["size"]
    else:
        k, scale = _codes(rng, o["columns"], _DIM), rng.uniform(0.5, 2.0, o["columns"]).astype(np.float32)
        starts, ends = np.sort(rng.integers(0, o["columns"] + 1, (2, rows)), axis=0).astype(np.int32)
        arrays = {"q": (q, "float8_e4m3fn"), "k": (k, "float8_e4m3fn"), "k_scale": (scale, "float32")}
        if o["ranges"]:
            arrays |= {"k_start": (starts, "int32"), "k_end": (ends, "int32")}
        else:
            starts, ends = np.zeros_like(starts), np.full_like(ends, o["columns"])
        keys, width = [(k, scale)], o["columns"]
    wanted, bound = np.full((rows, width), -np.inf), np.ones((rows, width))
    for b, (k, scale) in enumerate(keys):
        own = slice(b * o["queries"], (b + 1) * o["queries"]) if o["size"] else slice(rows)
        of_q, of_k = (decode_e4m3(x).astype(np.float64) for x in (q[own], k))
        found = reference.index_logits(
            of_q, of_k, weights[own], scale, starts[own], ends[own], compute_dtype=np.float64
        )
        sizes = reference.index_logits(
            abs(of_q), abs(of_k), abs(weights[own]), scale, starts[own], ends[own], compute_dtype=np.float64
        )
        wanted[own, : len(k)] = found  # what is behind a sequence's keys stays -inf
        bound[own, : len(k)] = np.where(np.isfinite(sizes), sizes, 0.0) * (_CPU if m.on_cpu else _GPU) + 1e-30
    arrays["weights"] = (weights, "float32")
    given = _placed(m, arrays)
    if o["size"] and o["narrow"]:
        given["max_keys"] = width = max(o["lengths"])
        wanted, bound = wanted[:, :width], bound[:, :width]

    def run() -> tuple[Any, ...]:
        return (omniattn.index_logits(**given),)

    results = run()
    m.synchronize()
    grades = [grade(m, "logits", results[0], m.number(wanted), m.number(bound))]
    return [*grades, *_into(m, o["out"], omniattn.index_logits, given, results[0]), *repeated(m, results, run, 1)]


def draw_top_k(d: Draw) -> dict[str, Any]:
    """Facts of a problem of ``top_k``."""
    facts = {
        "rows": d.integer(1, 6), "width": d.length(3000 if d.cpu else 60000), "next_n": d.integer(1, 3),
        "k": d.weighted({2048: 2.0, d.integer(1, 3000): 2.0, 1: 0.5}), "starts": d.chance(0.4),
        "lengths": d.chance(0.6), "pool": d.chance(0.3), "size": d.integer(1, 100), "seed": d.integer(0, 1 << 30),
        "kind": d.weighted({"normal": 2.0, "narrow": 1.0, "few values": 1.0, "special": 1.0, "bits": 1.0}),
        "out": d.chance(0.5),
    }  # fmt: skip
    return {"dtype": "float32", "arrays": {}, "options": {}, "facts": facts}


def check_top_k(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem."""
    o = problem.facts["facts"]
    rng = np.random.default_rng(o["seed"])
    next_n = o["next_n"] if o["lengths"] or o["pool"] else 1
    sequences, width = o["rows"], o["width"]
    rows = sequences * next_n
    logits = _logits(rng, o["kind"], rows, width)
    starts = rng.integers(0, width + 1, rows) if o["starts"] else np.zeros(rows, np.int64)
    lengths = width - starts
    arrays: dict[str, Any] = {"logits": (logits, "float32")}
    given: dict[str, Any] = {"k": o["k"]}
    if o["starts"]:
        arrays["starts"] = (starts.astype(np.int32), "int32")
    if o["lengths"]:
        own = rng.integers(0, lengths.reshape(sequences, next_n).min(axis=1) + 1)
        arrays["lengths"] = (own.astype(np.int32), "int32")
        lengths = np.maximum(own[:, None] - next_n + 1 + np.arange(next_n), 0).reshape(-1)
    wanted = reference.top_k(logits, o["k"], starts, lengths)
    if o["pool"]:
        columns = -(-width // o["size"])
        table = rng.permutation(sequences * columns).reshape(sequences, columns).astype(np.int32)
        arrays["block_table"], given["block_size"] = (table, "int32"), o["size"]
        wanted = reference.pool_rows(wanted, np.repeat(table, next_n, axis=0), o["size"])
    given |= {"next_n": next_n, **_placed(m, arrays)}

    def run() -> tuple[Any, ...]:
        return (omniattn.top_k(**given),)

    results = run()
    m.synchronize()
    same = np.array_equal(m.host(results[0]), wanted)
    grades = [truth("indices", same, "other positions than those of the reference")]
    return [*grades, *_into(m, o["out"], omniattn.top_k, given, results[0]), *repeated(m, results, run, 1)]


def arguments_of(operation: str, facts: dict[str, Any]) -> set[str]:
    """Arguments that a problem gives to the function."""
    o = facts["facts"]
    out = {"out"} if o["out"] else set()
    if operation == "top_k":
        pool = {"block_table", "block_size"} if o["pool"] else set()
        return {"logits", "k", "next_n", *pool, *out, *(name for name in ("starts", "lengths") if o[name])}
    if not o["size"]:
        return {"q", "k", "weights", "k_scale", *({"k_start", "k_end"} if o["ranges"] else ()), *out}
    names = {"q", "k", "weights", "seq_lens", "block_table", *({"max_keys"} if o["narrow"] else ()), *out}
    return names if o["fused"] else names | {"k_scale"}


def _into(m: Machine, wanted: bool, function: Any, given: dict[str, Any], first: Any) -> list[Grade]:
    """The same call into an array of the caller, which holds other numbers, with guards around it."""
    if not (wanted and m.writable):
        return []
    out = m.room(tuple(first.shape), m.dtype_name(first), {})
    function(**given, out=out.array)
    m.synchronize()
    guards = truth("guards", m.guarded(out), "the call has written outside of out")
    return [guards, equal(m, "out", out.array, first, "other bits with out")]


def _placed(m: Machine, arrays: dict[str, tuple[npt.NDArray[Any], str]]) -> dict[str, Any]:
    """Arrays of the machine; those of e4m3 come as bytes, which `Machine.place` does not take."""
    placed = {}
    for name, (values, dtype) in arrays.items():
        numbers = decode_e4m3(values) if dtype == "float8_e4m3fn" else values
        placed[name] = m.place(numbers, dtype, {}).array
    return placed


def _codes(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.uint8]:
    magnitudes = np.exp2(rng.integers(-5, 3, (*shape[:-1], 1)))
    return encode_e4m3((rng.standard_normal(shape) * magnitudes).astype(np.float32))


def _paged(rng: np.random.Generator, o: dict[str, Any]) -> tuple[dict[str, Any], list[Any], npt.NDArray[Any]]:
    """Arrays, keys and scales of each sequence, and where the keys of each row end."""
    size, lengths, queries = o["size"], o["lengths"], o["queries"]
    columns = max(-(-o["columns"] // size), 1)
    blocks = len(lengths) * columns
    table = rng.permutation(blocks).reshape(len(lengths), columns).astype(np.int32)
    values = np.full((blocks, size, _DIM), 0x7F, np.uint8)
    scales = np.full((blocks, size), np.nan, np.float32)
    keys = []
    for b, length in enumerate(lengths):
        at = table[b, np.arange(length) // size], np.arange(length) % size
        k, scale = _codes(rng, length, _DIM), rng.uniform(0.5, 2.0, length).astype(np.float32)
        values[at], scales[at] = k, scale
        keys.append((k, scale))
    arrays = {"seq_lens": (np.array(lengths, np.int32), "int32"), "block_table": (table, "int32")}
    if o["fused"]:
        raw = np.concatenate([values.reshape(blocks, -1), scales.view(np.uint8).reshape(blocks, -1)], axis=1)
        arrays["k"] = (raw.reshape(blocks, size, 1, _DIM + 4), "uint8")
    else:
        arrays |= {"k": (values, "float8_e4m3fn"), "k_scale": (scales, "float32")}
    ends = np.array(lengths)[:, None] - queries + 1 + np.arange(queries)
    return arrays, keys, ends.reshape(-1)


def _logits(rng: np.random.Generator, kind: str, rows: int, width: int) -> npt.NDArray[np.float32]:
    x = rng.standard_normal((rows, width)).astype(np.float32)
    if kind == "narrow":
        x = (10.0 + 0.1 * x).astype(np.float32)
    elif kind == "few values":
        x = rng.integers(-2, 3, x.shape).astype(np.float32)
    elif kind == "special":
        for value in (np.nan, np.inf, -np.inf, 0.0, -0.0):
            x[rng.random(x.shape) < 0.2] = value
    elif kind == "bits":
        x = rng.integers(0, 1 << 32, x.shape, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return x
