"""``attention_with_kvcache`` with what goes over pages: any number of queries a sequence, packed or a batch.

What `decode`'s kernels serve is drawn with the other caches (`omniattn.testing.soak.caches`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import omniattn
from omniattn.kv.runs import runs_of
from omniattn.testing.expected import Grade
from omniattn.testing.soak import formulas, limits, mods
from omniattn.testing.soak.cache_runs import Run
from omniattn.testing.soak.caches import draw_format, draw_steps, own_scales
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.formulas import Keys, Rules
from omniattn.testing.soak.judge import grade, repeated, truth, unchanged
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.pools import draw_nobody, draw_pool
from omniattn.testing.soak.problem import Problem


def draw(d: Draw) -> dict[str, Any]:
    """Facts of a problem."""
    heads, dim, batch = d.heads(), d.head_dim(), d.weighted({1: 1.0, 2: 2.0, 3: 2.0, 7: 1.0})
    facts: dict[str, Any] = {"dtype": d.dtype(), "heads": heads, "head_dims": (dim, dim), "packed": d.chance(0.7)}
    own = {"float16": "fp16", "bfloat16": "bf16"}.get(facts["dtype"], d.pick(("bf16", "fp16")))
    facts["cache"], facts["counted"] = {"k_dtype": own}, own
    if d.chance(0.4):
        draw_pool(d, facts, own)
    elif d.chance(0.6):
        draw_format(d, facts)
    dim = facts["head_dims"][0]
    recent = "recent_window" in facts["cache"]
    most = 150 if d.cpu else d.pick((300, 2000))
    lengths = [0 if d.chance(0.1) else max(d.length(most), 1) for _ in range(batch)]
    if d.chance(0.6):
        facts["block_size"] = d.pick((16, 64, 1, 3, 24, 128))
    elif d.chance(0.5) and not recent:
        facts["index"] = True
    facts["lengths"], facts["spare"] = lengths, d.pick((0, 1, 40))
    if d.chance(0.15):
        facts["leftpad"] = [d.integer(0, n) for n in lengths]
    draw_steps(d, facts, lengths, 0)
    counts = {1: 3.0, 0: 1.0, 5: 1.0, 16: 1.0, 40: 1.0, 150: 1.0}
    queries = [d.weighted(counts) for _ in range(batch)]
    if not facts["packed"]:
        queries[0] = max(queries[0], 1)
    if not facts["packed"]:
        queries = queries[:1] * batch
    facts["queries"] = queries
    shape = (sum(queries) + d.pick((0, 3)),) if facts["packed"] else (batch, queries[0])
    shape = (*shape, heads[0], dim)
    options: dict[str, Any] = {}
    if d.chance(0.3):
        options["causal"] = False
    if d.chance(0.3):
        options["window"] = (d.pick((-1, 0, 5, 20, 64)), d.pick((0, 3, -1)))
        facts["nobody"] = draw_nobody(d)
    if d.chance(0.2):
        options["softmax_scale"] = d.pick((0.3, 0.02))
    if d.chance(0.2):
        options["softcap"] = d.pick((20.0, 1.0))
    if d.chance(0.7):
        options["return_lse"] = True
    if d.chance(0.2):
        options["num_splits"] = d.pick((1, 2, 3, 100))
    elif d.chance(0.2) and not (recent and facts["packed"]):
        options["deterministic"] = True
    view = d.view(shape, 8) if facts["packed"] else {}
    facts["arrays"] = {"q": {**d.numbers(shape, "io", loud=False), "view": view}}
    if d.chance(0.2):
        facts["arrays"]["sinks"] = {"shape": (heads[0],), "dtype": "float32", "kind": "normal", "scale": 2.0}
    facts["options"] = options
    if d.chance(0.15):
        facts["score_mod"] = d.pick(mods.MODS)
    kinds = {name: d.numbers((1,), "io", loud=False) for name in ("k", "v")}
    facts["tokens"] = {name: {"kind": x["kind"], "scale": x["scale"]} for name, x in kinds.items()}
    facts["token_view"] = False
    if d.chance(0.3):
        facts["out"] = d.view(shape, 8, written=True) if facts["packed"] else {}
    if d.chance(0.3):
        _share(d, facts)
    return facts


def _share(d: Draw, facts: dict[str, Any]) -> None:
    """Give the sequences first blocks in common, where a call may have them."""
    against = {"window", "deterministic"} & facts["options"].keys() or {"leftpad", "score_mod"} & facts.keys()
    if "block_size" not in facts or "recent_window" in facts["cache"] or own_scales(facts) or against:
        return
    size, queries = facts["block_size"], facts["queries"]
    shared = size * d.integer(1, max(1, 64 // size))
    there = [n > 0 or b == 0 or (facts["packed"] and queries[b] > 0) for b, n in enumerate(facts["lengths"])]
    facts["lengths"] = [there[b] * (shared + queries[b] + n) for b, n in enumerate(facts["lengths"])]
    facts["options"]["shared_prefix"] = shared
    facts["levels"] = d.chance(0.5)
    facts.pop("rope", None)
    draw_steps(d, facts, facts["lengths"], shared)


class _Attend(Run):
    """A cache, and a call of all kinds of queries on it."""

    def attend(self) -> None:
        """Call, and compare with attention in float64 on the tokens of each sequence."""
        m, facts, problem = self._m, self._facts, self._problem
        arrays = {name: problem.place(m, name) for name in facts["arrays"]}
        index = self._rng.permutation(self._batch) if "index" in facts else np.arange(self._batch)
        lengths = [self._lengths[i] for i in index]
        call = self._read(lengths, facts["queries"])
        if "index" in facts:
            call["batch_index"] = m.place(index.astype(np.int32), "int32", {}).array
        pads = np.array(facts.get("leftpad", [0] * self._batch), np.int32)[index]
        if "leftpad" in facts:
            call["leftpad_k"] = m.place(pads, "int32", {}).array
        starts = np.cumsum([0, *facts["queries"]]).astype(np.int32)
        if facts["packed"]:
            call["cu_seqlens_q"] = m.place(starts, "int32", {}).array
            call["max_seqlen_q"] = max(facts["queries"])
        if "sinks" in arrays:
            call["sinks"] = arrays["sinks"].array
        mod = None
        if "score_mod" in facts:
            most = max([1, *self._lengths])
            mod = mods.build(facts["score_mod"], m, facts["heads"][0], max([1, *facts["queries"]]), most)
            call["score_mod"] = mod.made
        out, q = None, arrays["q"].array
        if "out" in facts and m.writable:
            out = m.room(facts["arrays"]["q"]["shape"], problem.dtype, facts["out"])
            call["out"] = out.array

        options = problem.options()
        if facts.get("levels"):
            options["shared_prefix"] = self._levels()

        def run() -> tuple[Any, ...]:
            result = omniattn.attention_with_kvcache(q, self.cache, **call, **options)
            return result if isinstance(result, tuple) else (result,)

        read = arrays
        if self._pool is not None:
            self._pool.of_call = np.argsort(index).tolist()
            read = arrays | self._pool.places
        results, grades = unchanged(m, read, run)
        self.grades += grades
        if out is not None:
            self.grades.append(truth("guards", m.guarded(out), "the call has written outside of out"))
        sinks = m.f64(arrays["sinks"].array) if "sinks" in arrays else None
        codes, values = (self._formats[name].quantized for name in "kv")
        of = limits.decode(
            problem.dtype, codes=codes, value_codes=values, cpu=m.on_cpu, rounded=codes or values,
            recent=bool(self._window), merged="shared_prefix" in facts["options"],
        )  # fmt: skip
        rows = m.f64(q).reshape(-1, *q.shape[-2:])
        o, o_bound = m.zeros(*rows.shape), m.zeros(*rows.shape)
        lse, lse_bound = m.full((rows.shape[1], rows.shape[0]), -float("inf")), m.zeros(rows.shape[1], rows.shape[0])
        for b, place in enumerate(index):
            own = slice(int(starts[b]), int(starts[b + 1]))
            keys = _behind(self._keys(rows[own].swapaxes(0, 1), int(place), sinks), int(pads[b]))
            found = formulas.attend(m, keys, self._rules(mod, b), of)
            o[own], o_bound[own] = found.o.swapaxes(0, 1), found.o_bound.swapaxes(0, 1)
            lse[:, own], lse_bound[:, own] = found.lse, found.lse_bound
        wanted = [x.reshape(q.shape) for x in (o, o_bound)]
        self.grades.append(grade(m, "o", results[0], *wanted))
        if len(results) > 1:
            if not facts["packed"]:
                shape = (lse.shape[0], *q.shape[:2])
                lse, lse_bound = (x.reshape(shape).swapaxes(0, 1) for x in (lse, lse_bound))
            self.grades.append(grade(m, "lse", results[1], lse, lse_bound))
        self.grades += repeated(m, results, run, 1)

    def _levels(self) -> omniattn.SharedPrefixes:
        """The blocks that sequences side by side have in common, as arrays of their library."""
        size, rows = self._size, self._facts["queries"]
        tables = [row[: -(-n // size)].tolist() for row, n in zip(self._table, self._lengths, strict=True)]
        limits = [max(n - new, 0) // size for n, new in zip(self._lengths, rows, strict=True)]
        runs = omniattn.SharedRuns(
            tuple(range(self._batch)), tuple(rows), tuple(self._lengths), tuple(tables), size, runs_of(tables, limits)
        )
        return runs.arrays().map(lambda x: self._m.place(x, "int32", {}).array)

    def _rules(self, mod: Any, b: int) -> Rules:
        options = self._facts["options"]
        left, right = options.get("window", (-1, -1))
        scale = options.get("softmax_scale", self._facts["head_dims"][0] ** -0.5)
        return Rules(scale, options.get("softcap", 0.0), left, 0 if options.get("causal", True) else right, mod, b)


def _behind(keys: Keys, pad: int) -> Keys:
    """The keys behind padding."""
    k, v, k_size, v_size = (None if x is None else x[:, pad:] for x in (keys.k, keys.v, keys.k_size, keys.v_size))
    return replace(keys, k=k, v=v, k_size=k_size, v_size=v_size)


def check(m: Machine, problem: Problem) -> list[Grade]:
    """Run a problem."""
    run = _Attend(m, problem)
    run.append()
    run.attend()
    return run.grades
