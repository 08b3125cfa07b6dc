"""One problem on a cache: see `omniattn.testing.soak.caches`."""

from __future__ import annotations

from typing import Any

import numpy as np

import omniattn
from omniattn.testing.expected import Grade
from omniattn.testing.soak import cache_formats, formulas, limits
from omniattn.testing.soak.cache_formats import BITS, DTYPES, Format, hadamard, row_width, widened
from omniattn.testing.soak.formulas import Keys, Rules
from omniattn.testing.soak.judge import equal, grade, repeated, truth, unchanged
from omniattn.testing.soak.machines import POISON, Machine, Placed
from omniattn.testing.soak.pools import Pool
from omniattn.testing.soak.problem import Problem

_PLANES = ("k", "v", "k_params", "v_params")
#: Tokens that a ring has beyond its window.
_SPARE = 16


class Run:
    """A cache, its tokens, and what was found of it.

    Attributes
    ----------
    grades : list of Grade
    """

    def __init__(self, m: Machine, problem: Problem) -> None:
        facts = problem.facts
        self.grades: list[Grade] = []
        self._m, self._problem, self._facts = m, problem, facts
        self._lengths = list(facts["lengths"])
        self._batch = len(self._lengths)
        self._paged = "block_size" in facts
        self._rng = np.random.default_rng([problem.seed, problem.number])
        self._function: Any = getattr(omniattn, facts.get("function", "decode"))
        self._size = facts.get("block_size", max([1, *self._lengths]) + facts["spare"])
        self._blocks()
        cache = dict(facts["cache"])
        kv_heads, dim = facts["heads"][1], facts["head_dims"][0]
        own: dict[str, Placed] = {}
        for name in ("k_mean", "k_channel_scale"):
            if name in facts:
                own[name] = problem.place(m, name, facts[name])
                cache[name] = own[name].array
        like = m.place(np.zeros(1, np.float32), problem.dtype, {}).array
        window = cache.get("recent_window", 0)
        self._slots = None
        self._pool = Pool(m, problem, self._count, self._size) if "pool" in facts else None
        if self._pool is not None:
            self.cache: Any = self._pool.cache
        elif self._paged:
            if window:
                cache["recent_slots"] = self._batch + 2
                self._slots = self._rng.permutation(self._batch + 2)[: self._batch].astype(np.int32)
            self.cache = omniattn.PagedKVCache(self._count, self._size, kv_heads, dim, like=like, **cache)
        else:
            self.cache = omniattn.KVCache(self._batch, self._size, kv_heads, dim, like=like, **cache)
        self._own = {name: m.f64(x.array) for name, x in own.items()}
        self._formats = {"k": self._format(True), "v": self._format(False)}
        self._window, self._ring = window, window + _SPARE
        self._state = dict.fromkeys(range(self._batch), (0, 0))
        if m.writable and self._pool is None:
            for name in (*_PLANES, "recent_k", "recent_v"):
                plane = getattr(self.cache, name)
                if plane is not None:
                    m.bytes_of(plane)[...] = POISON
        #: Tokens of each sequence in float64, (tokens, heads, channels).
        self._tokens: dict[str, list[Any]] = {n: [m.zeros(0, kv_heads, dim)] * self._batch for n in "kv"}

    def _format(self, key: bool) -> Format:
        cache, dim = self._facts["cache"], self._facts["head_dims"][0]
        dtype = cache["k_dtype"] if key else cache.get("v_dtype", cache["k_dtype"])
        if "pool" in self._facts:
            return Format(dtype, dim, dim, dim, False, key, False)
        row = row_width(dim)
        zero = cache.get("zero_point", True) and dtype in ("int8", "int4")
        return Format(dtype, dim, row, cache.get("group_size") or row, zero, key, cache.get("layout") == "fbgemm")

    def _blocks(self) -> None:
        """The block table: random blocks of a pool that is larger than needed; a prefix has the same in all rows."""
        shared = self._facts["options"].get("shared_prefix", 0)
        if not self._paged:
            self._table = np.arange(self._batch, dtype=np.int32)[:, None]
            self._count = self._batch
            return
        needs = [-(-n // self._size) for n in self._lengths]
        self._count = 2 * sum(needs) + 1
        order = self._rng.permutation(self._count).astype(np.int32)
        columns = max([1, *needs]) + self._facts["spare"] % 3
        self._table = np.full((self._batch, columns), -1, dtype=np.int32)
        at = 0
        for b, n in enumerate(needs):
            self._table[b, :n] = order[at : at + n]
            at += n
            if shared and n:
                self._table[b, : shared // self._size] = self._table[0, : shared // self._size]
        self._free = order[at:]

    # Appending

    def append(self) -> None:
        """Append in steps, and compare what was written."""
        m, facts = self._m, self._facts
        if self._pool is not None and self._pool.scales == "sequence":
            self._pool.fill(self._rng, *self._used())
            return
        shared = facts["options"].get("shared_prefix", 0)
        done = [shared if b and n else 0 for b, n in enumerate(self._lengths)]
        for index, step in enumerate(facts["steps"]):
            done = [n + c for n, c in zip(done, step["counts"], strict=True)]
            self._step(index, step, done)
        if shared:
            for name in "kv":
                prefix = self._tokens[name][0][:shared]
                for b in range(1, self._batch):
                    if self._lengths[b]:
                        self._tokens[name][b] = m.cat([prefix, self._tokens[name][b]], 0)
        self._compare_tokens()
        self._compare_untouched()

    def _step(self, index: int, step: dict[str, Any], lengths: list[int]) -> None:
        m, problem, facts = self._m, self._problem, self._facts
        kv_heads, dim = facts["heads"][1], facts["head_dims"][0]
        counts, packed = step["counts"], step["packed"]
        total = sum(counts)
        extra = 3 if packed and index == 0 else 0
        shape = (total + extra, kv_heads, dim) if packed else (self._batch, counts[0], kv_heads, dim)
        view = {"before": (*(1 for _ in shape[:-1]), 8), "after": (*(0 for _ in shape[:-1]), 8)}
        placed = {}
        for name in "kv":
            recipe = {**facts["tokens"][name], "shape": shape, "dtype": "io"}
            recipe["view"] = view if facts["token_view"] else {}
            placed[name] = problem.place(m, f"{name}{index}", recipe)
        if step.get("by_slot"):
            call = self._places(counts, lengths, extra)
        else:
            # Rows whose sequence has no token yet are padding.
            call = self._lens([0 if self._lengths[b] == 0 else n for b, n in enumerate(lengths)])
            if packed:
                starts = np.cumsum([0, *counts]).astype(np.int32)
                call["cu_seqlens"] = m.place(starts, "int32", {}).array
        angles: dict[str, Any] = {}
        if "rope" in facts:
            rope = facts["rope"]
            for name in ("cos", "sin"):
                recipe = {"shape": (rope["positions"], rope["pairs"]), "dtype": "float32", "kind": "angles"}
                angles[name] = problem.place(m, name, recipe).array
            call |= angles
            if "style" in rope:
                call["rope"] = rope["style"]
        k, v = placed["k"], placed["v"]
        read = placed if self._pool is None else placed | self._pool.fixed
        _, grades = unchanged(m, read, lambda: omniattn.append(self.cache, k.array, v.array, **call))
        self.grades += grades
        x = {name: m.f64(placed[name].array).reshape(-1, kv_heads, dim) for name in "kv"}
        for b, count in enumerate(counts):
            rows = slice(sum(counts[:b]), sum(counts[: b + 1]))
            first = lengths[b] - count
            keys = x["k"][rows]
            if angles and count:
                cos, sin = (m.f64(angles[name])[first : first + count][:, None] for name in ("cos", "sin"))
                keys = _rotated(m, keys, cos, sin, facts["rope"].get("style", "half") == "interleaved")
            self._tokens["k"][b] = m.cat([self._tokens["k"][b], keys], 0)
            self._tokens["v"][b] = m.cat([self._tokens["v"][b], x["v"][rows]], 0)
            if count and self._window:
                self._follow(b, first, lengths[b])

    def _places(self, counts: list[int], lengths: list[int], extra: int) -> dict[str, Any]:
        """Slots of an append's tokens. Of extra rows the first has a negative one, the others none."""
        at = [(b, i) for b, (count, n) in enumerate(zip(counts, lengths, strict=True)) for i in range(n - count, n)]
        slots = [int(self._table[b, i // self._size]) * self._size + i % self._size for b, i in at]
        numbers = {"slot_mapping": [*slots, -7][: len(at) + min(extra, 1)]}
        if "rope" in self._facts:
            numbers["positions"] = [*(i for _, i in at), 0][: len(numbers["slot_mapping"])]
        return {name: self._m.place(np.array(x, np.int32), "int32", {}).array for name, x in numbers.items()}

    def _lens(self, lengths: list[int]) -> dict[str, Any]:
        """Arguments that every call on the cache has."""
        m = self._m
        call = {"seq_lens": m.place(np.array(lengths, np.int32), "int32", {}).array}
        if self._paged:
            call["block_table"] = m.place(self._table, "int32", {}).array
        if self._slots is not None:
            call["recent_slots"] = m.place(self._slots, "int32", {}).array
        return call

    def _read(self, lengths: list[int], queries: list[int]) -> dict[str, Any]:
        """Arguments of a call that reads the cache: blocks wholly left of all windows may have any numbers."""
        call, left = self._lens(lengths), self._facts["options"].get("window", (-1, -1))[0]
        if self._paged and left >= 0:
            nobody = self._facts["nobody"]
            nobody = self._free[-1] if nobody == "unused" else nobody
            table = self._table.copy()
            for b, (length, count) in enumerate(zip(lengths, queries, strict=True)):
                table[b, : max(length - count - left, 0) // self._size] = nobody
            call["block_table"] = self._m.place(table, "int32", {}).array
        return call

    def _at(self, b: int) -> tuple[Any, Any]:
        """Block, and row in it, of each token of a sequence."""
        at = np.arange(self._lengths[b])
        return self._table[b][at // self._size], at % self._size

    def _used(self) -> list[Any]:
        """Blocks, and rows in them, of all tokens, each once."""
        return list(np.unique(np.concatenate([self._at(b) for b in range(self._batch)], 1), axis=1))

    def _follow(self, b: int, first: int, length: int) -> None:
        """What an append makes of a slot's state: docs/kv_formats.md."""
        begin, end = self._state[b]
        kept = max(begin, end - self._ring)
        kept = kept if kept <= first <= end else first
        self._state[b] = (max(kept, length - self._ring), length)

    def _slot(self, b: int) -> int:
        return b if self._slots is None else int(self._slots[b])

    def _planes(self, name: str, b: int) -> cache_formats.Stored:
        """All rows of a sequence, as `decode` has to find them."""
        m = self._m
        blocks, rows = map(m.ints, self._at(b))
        if self._pool is not None:
            return self._pool.read(name, b, blocks, rows)
        plane, params = getattr(self.cache, name), getattr(self.cache, f"{name}_params")
        plane, params = (x if m.library != "jax" or x is None else np.asarray(x) for x in (plane, params))
        fmt = self._formats[name]
        if fmt.fbgemm:
            return cache_formats.read(m, fmt, plane[blocks, rows], None)
        found = plane[blocks, :, rows]
        return cache_formats.read(m, fmt, found, None if params is None else params[blocks, :, rows])

    def _compare_tokens(self) -> None:
        worst: dict[str, Grade] = {}
        m, cache = self._m, self._facts["cache"]
        for b in range(self._batch):
            if self._lengths[b] == 0:
                continue
            for name in "kv":
                fmt = self._formats[name]
                wanted = self._tokens[name][b]
                own = 2.0**-21 * float(abs(wanted).max()) if name == "k" and "rope" in self._facts else 0.0
                if name == "k" and fmt.quantized and self._pool is None:
                    wanted, more = self._transformed(wanted)
                    own = own * more + 2.0**-21 * more
                    wanted = widened(m, wanted, fmt.row)
                    wanted = hadamard(m, wanted) if cache.get("hadamard") else wanted
                wanted = widened(m, wanted, fmt.row)
                padded = not (name == "k" and cache.get("hadamard"))
                got = self._planes(name, b)
                if self._pool is not None:
                    found = self._pool.compare(name, fmt, got, wanted, own)
                else:
                    found = cache_formats.compare(m, f"cache.{name}", fmt, got, wanted, padded, own)
                for one in found:
                    if one.name not in worst or not one.ratio <= worst[one.name].ratio:
                        worst[one.name] = one
            if self._window:
                self._compare_recent(b, worst)
        self.grades += worst.values()

    def _transformed(self, k: Any) -> tuple[Any, float]:
        """K as it is quantized, before the rotation; how much larger its errors are."""
        more = 1.0
        if "k_mean" in self._own:
            k = k - self._own["k_mean"]
            more += float(abs(self._own["k_mean"]).max())
        if "k_channel_scale" in self._own:
            k = k / self._own["k_channel_scale"]
            more *= max(1.0, 1.0 / float(self._own["k_channel_scale"].min()))
        return k, more

    def _recent(self, name: str, b: int) -> tuple[int, Any]:
        """First position that is read from the ring, and these rows."""
        m, length = self._m, self._lengths[b]
        begin, end = self._state[b]
        first = min(max(begin, end - self._ring, length - self._window, 0), length) if end >= length else length
        plane = getattr(self.cache, f"recent_{name}")
        plane = np.asarray(plane) if m.library == "jax" else plane
        at = m.ints(np.arange(first, length) % self._ring)
        rows = plane[self._slot(b)][:, at].swapaxes(0, 1)
        dtype = self._facts["cache"]["recent_dtype"]
        fmt = Format(dtype, self._facts["head_dims"][0], row_width(self._facts["head_dims"][0]), 0, False, False, False)
        return first, cache_formats.read(m, fmt, rows, None).values[..., : fmt.dim]

    def _compare_recent(self, b: int, worst: dict[str, Grade]) -> None:
        m = self._m
        state = m.host(self.cache.recent_state)[self._slot(b)].tolist()
        self.grades.append(truth("recent_state", state == list(self._state[b]), f"{state}, expected {self._state[b]}"))
        dtype = self._facts["cache"]["recent_dtype"]
        for name in "kv":
            first, rows = self._recent(name, b)
            wanted = self._tokens[name][b][first:]
            bound = limits.ROUNDING[DTYPES[dtype]] * 1.001 * abs(wanted) + limits.LEAST[DTYPES[dtype]]
            if name == "k" and "rope" in self._facts and wanted.shape[0]:
                bound = bound + 2.0**-21 * float(abs(self._tokens[name][b]).max())
            one = grade(m, f"recent_{name}", rows, wanted, bound)
            if one.name not in worst or not one.ratio <= worst[one.name].ratio:
                worst[one.name] = one

    def _compare_untouched(self) -> None:
        """Rows of no token keep their bytes."""
        m = self._m
        if not m.writable:
            return
        if self._pool is not None:
            self.grades.append(self._pool.untouched(*self._used()))
            return
        used = np.zeros((self._count, self._size), dtype=bool)
        used[tuple(self._used())] = True
        for name in _PLANES:
            plane = getattr(self.cache, name)
            if plane is None:
                continue
            rows = m.host(m.bytes_of(plane)).reshape(*tuple(plane.shape)[:3], -1)
            rows = rows if self._formats[name[0]].fbgemm else rows.swapaxes(1, 2)
            good = bool((rows[~used] == POISON).all())
            self.grades.append(truth(f"cache.{name} elsewhere", good, "append has written rows of no token"))

    # Copying

    def copy(self) -> None:
        """Copy blocks, and slots of the recent window, and use the copies from now on."""
        if not self._facts.get("copies"):
            return
        used = sorted({int(x) for b, n in enumerate(self._lengths) for x in self._table[b, : -(-n // self._size)]})
        picked = [x for x in used if self._rng.random() < 0.6]
        pairs = list(zip(picked, (int(x) for x in self._free), strict=False))
        self._copied("copy_blocks", _PLANES, pairs)
        moved = dict(pairs)
        self._table = np.vectorize(lambda x: moved.get(int(x), int(x)), otypes=[np.int32])(self._table)
        if self._slots is not None:
            free = sorted(set(range(self._batch + 2)) - {int(x) for x in self._slots})
            slots = [(int(self._slots[i]), free[i]) for i in range(min(self._batch, len(free)))]
            self._copied("copy_recent", ("recent_k", "recent_v", "recent_state"), slots)
            for i, (_, slot) in enumerate(slots):
                self._slots[i] = slot

    def _copied(self, function: str, planes: tuple[str, ...], pairs: list[tuple[int, int]]) -> None:
        m = self._m
        if self._pool is not None:
            self.grades.append(self._pool.copied(lambda: getattr(omniattn, function)(self.cache, pairs), pairs))
            return
        before = {name: m.host(m.bits(x)).copy() for name in planes if (x := getattr(self.cache, name)) is not None}
        getattr(omniattn, function)(self.cache, pairs)
        m.synchronize()
        for name, old in before.items():
            plane = getattr(self.cache, name)
            rows = old.reshape(int(plane.shape[0]), -1)
            for source, destination in pairs:
                rows[destination] = rows[source]
            good = np.array_equal(rows.reshape(-1), m.host(m.bits(plane)))
            self.grades.append(truth(f"{function} of {name}", good, "other bytes than those copied"))

    # Decoding

    def decode(self) -> None:
        """Decode, and compare with attention on what the bytes stand for."""
        m, problem, facts = self._m, self._problem, self._facts
        arrays = {name: problem.place(m, name) for name in facts["arrays"]}
        options, call = problem.options(), self._read(self._lengths, [facts["q_len"]] * self._batch)
        if "sinks" in arrays:
            call["sinks"] = arrays["sinks"].array
        out = None
        if "out" in facts and m.writable:
            out = m.room(facts["arrays"]["q"]["shape"], problem.dtype, facts["out"])
            call["out"] = out.array
        q = arrays["q"].array

        def run() -> tuple[Any, ...]:
            result = self._function(q, self.cache, **call, **options)
            return result if isinstance(result, tuple) else (result,)

        read = arrays if self._pool is None else arrays | self._pool.places
        results, grades = unchanged(m, read, run)
        self.grades += grades
        if out is not None:
            self.grades.append(truth("guards", m.guarded(out), "the call has written outside of out"))
        o, lse, o_bound, lse_bound = self._expected(m.f64(q), arrays)
        self.grades.append(grade(m, "o", results[0], o, o_bound))
        if len(results) > 1:
            self.grades.append(grade(m, "lse", results[1], lse, lse_bound))
        self.grades += repeated(m, results, run, 1)
        # Scales of sequences are those of the whole call.
        own = self._pool is not None and self._pool.scales == "sequence"
        if options.get("deterministic") and self._paged and self._batch > 1 and not own:
            self._alone(q, arrays, options, results)

    def _alone(self, q: Any, arrays: dict[str, Placed], options: dict[str, Any], results: tuple[Any, ...]) -> None:
        """``deterministic``: the bits of a sequence do not depend on the batch."""
        m, b = self._m, self._batch - 1
        call = {name: x[b : b + 1] for name, x in self._lens(self._lengths).items()}
        if "sinks" in arrays:
            call["sinks"] = arrays["sinks"].array
        found = self._function(q[b : b + 1], self.cache, **call, **options)
        found = found if isinstance(found, tuple) else (found,)
        m.synchronize()
        for name, whole, one in zip(("o", "lse")[: len(found)], results, found, strict=True):
            what = "a sequence alone has other bits than in its batch"
            self.grades.append(equal(m, f"{name} alone", whole[b : b + 1], one, what))

    def _expected(self, q: Any, arrays: dict[str, Placed]) -> tuple[Any, Any, Any, Any]:
        m, facts = self._m, self._facts
        batch, q_len, heads, dim = q.shape
        found = [m.zeros(batch, q_len, heads, dim), m.zeros(batch, heads, q_len)]
        bounds = [m.zeros(batch, q_len, heads, dim), m.zeros(batch, heads, q_len)]
        options = facts["options"]
        scale = options.get("softmax_scale")
        rules = Rules(
            dim**-0.5 if scale is None else scale, options.get("softcap", 0.0), options.get("window", (-1, -1))[0], 0
        )
        codes, value_codes = (BITS[self._formats[name].dtype] < 16 for name in "kv")
        twice = bool(self._window) or "shared_prefix" in options
        of = limits.decode(self._problem.dtype, codes=codes, value_codes=value_codes, recent=twice, cpu=m.on_cpu)
        sinks = m.f64(arrays["sinks"].array) if "sinks" in arrays else None
        for b in range(batch):
            result = formulas.attend(m, self._keys(q[b].swapaxes(0, 1), b, sinks), rules, of)
            found[0][b], bounds[0][b] = result.o.swapaxes(0, 1), result.o_bound.swapaxes(0, 1)
            found[1][b], bounds[1][b] = result.lse, result.lse_bound
        return found[0], found[1], bounds[0], bounds[1]

    def _keys(self, q: Any, b: int, sinks: Any) -> Keys:
        """Operands of a sequence: channels of stored rows, of ``k_mean``, and of the recent window side by side."""
        m, dim = self._m, self._facts["head_dims"][0]
        k, v = self._planes("k", b), self._planes("v", b)
        values, size = v.values[..., :dim], v.size[..., :dim]
        k_values, k_size = k.values, k.size
        row = k_values.shape[-1]
        heads, kv_heads = q.shape[0], k_values.shape[1]
        turned = q
        if "k_channel_scale" in self._own:
            turned = turned * self._of_heads(self._own["k_channel_scale"], heads)
        turned = widened(m, turned, row)
        turned = hadamard(m, turned) if self._facts["cache"].get("hadamard") else turned
        q_parts, k_parts, sizes = [turned], [k_values], [k_size]
        if "k_mean" in self._own:
            mean = self._own["k_mean"][None] + 0.0 * k_values[..., :1]
            q_parts.append(q)
            k_parts.append(mean)
            sizes.append(abs(mean))
        if self._window:
            first, recent_k = self._recent("k", b)
            _, recent_v = self._recent("v", b)
            count = self._lengths[b]
            q_parts.append(q)
            old = [m.cat([x[:first], m.zeros(count - first, *x.shape[1:])], 0) for x in k_parts]
            old_sizes = [m.cat([x[:first], m.zeros(count - first, *x.shape[1:])], 0) for x in sizes]
            new = m.cat([m.zeros(first, kv_heads, dim), recent_k], 0)
            k_parts, sizes = [*old, new], [*old_sizes, abs(new)]
            values = m.cat([values[:first], recent_v], 0)
            size = m.cat([size[:first], abs(recent_v)], 0)
        swapped = [x.swapaxes(0, 1) for x in (m.cat(k_parts, 2), m.cat(sizes, 2), values, size)]
        return Keys(m.cat(q_parts, 2), swapped[0], swapped[2], None, swapped[1], swapped[3], None, sinks)

    def _of_heads(self, x: Any, heads: int) -> Any:
        """(kv heads, channels) for query heads: (heads, 1, channels)."""
        group = heads // x.shape[0]
        return x[self._m.ints([h // group for h in range(heads)])][:, None]


def _rotated(m: Machine, x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Rotary embedding of the first 2 * pairs channels; cos, sin: (tokens, 1, pairs)."""
    pairs = cos.shape[-1]
    head, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :pairs], head[..., pairs:])
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        both = m.cat([first[..., None], second[..., None]], 3).reshape(head.shape)
    else:
        both = m.cat([first, second], 2)
    return m.cat([both, rest], 2)
