"""flash_attn_with_kvcache of both versions, on the CPU: caches of every kind, updated in place."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from omniattn.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError

torch = pytest.importorskip("torch")
from omniattn.compat import cached, cached_checks  # noqa: E402
from omniattn.compat import flash_attn as fa2  # noqa: E402
from omniattn.compat import flash_attn_interface as fa3  # noqa: E402
from tests.foreign_pools import ORDERS, memory_shape, planes  # noqa: E402
from tests.unit.compat.compat_cases import close, naive, randoms  # noqa: E402

pytestmark = pytest.mark.frameworks

HEADS, KV, CAPACITY, PAGE = 4, 2, 16, 4
BEFORE = [3, 0, 9]
SLOPES = torch.tensor([0.1, 0.5, 0.0, 1.0])


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Sequences:
    """Three sequences of tokens, and a cache of some kind that holds the first of them; NaN everywhere else."""

    def __init__(self, kind: str, dim: int, dtype: Any, new: int) -> None:
        self.new, self.dtype = new, dtype
        shape = (3, CAPACITY, KV, dim)
        self.k, self.v, self.k_new, self.v_new = randoms(
            shape, shape, (3, new, KV, dim), (3, new, KV, dim), dtype=dtype
        )
        self.first = [2, 0, 5] if kind == "leftpad" else [0, 0, 0]
        rows = 3 * CAPACITY // PAGE + 2 if kind == "paged" else 5 if kind == "batch_idx" else 3
        tokens = PAGE if kind == "paged" else CAPACITY
        self.caches = [torch.full((rows, tokens, KV, dim), math.nan, dtype=dtype) for _ in range(2)]
        if kind == "strided":
            self.caches = [torch.full((3, KV, CAPACITY, dim), math.nan, dtype=dtype).transpose(1, 2) for _ in range(2)]
        self.options: dict[str, Any] = {"cache_seqlens": int32(*BEFORE)}
        order = [4, 0, 2] if kind == "batch_idx" else [0, 1, 2]
        if kind == "paged":
            shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
            self.table = shuffled[: 3 * CAPACITY // PAGE].reshape(3, -1).int()
            self.options["block_table"] = self.table
        if kind == "batch_idx":
            self.options["cache_batch_idx"] = int32(*order)
        if kind == "leftpad":
            self.options["cache_leftpad"] = int32(*self.first)
            self.options["cache_seqlens"] = int32(*(max(a, b) for a, b in zip(BEFORE, self.first, strict=True)))
        self.before = self.options["cache_seqlens"].tolist()
        self.places = [
            [(int(self.table[b, t // PAGE]), t % PAGE) if kind == "paged" else (order[b], t) for t in range(CAPACITY)]
            for b in range(3)
        ]  # fmt: skip
        for cache, source in zip(self.caches, (self.k, self.v), strict=True):
            for b in range(3):
                for t in range(self.first[b], self.before[b]):
                    cache[self.places[b][t]] = source[b, t]

    def held(self, b: int, k_new: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that a query of sequence b may see, new ones included."""
        old = slice(self.first[b], self.before[b])
        news = (self.k_new[b] if k_new is None else k_new[b], self.v_new[b]) if self.new else (self.k[b, :0],) * 2
        return torch.cat([self.k[b, old], news[0]])[None], torch.cat([self.v[b, old], news[1]])[None]

    def check(self, q: Any, out: Any, lse: Any, score: dict[str, Any], k_new: Any = None) -> None:
        """Output, LSE, and the cache: new tokens at their places, and nothing else written."""
        bound = 1e-6 if self.dtype == torch.float32 else 2e-2 if self.dtype == torch.bfloat16 else 3e-3
        for b in range(3):
            k, v = self.held(b, k_new)
            ref, ref_lse = naive(q[b : b + 1].double(), k.double(), v.double(), **score)
            assert close(out[b : b + 1].double(), ref, bound)
            assert close(lse[b : b + 1].double(), ref_lse, 3e-5)
        for cache, source in zip(self.caches, (self.k_new if k_new is None else k_new, self.v_new), strict=True):
            written = ~cache.isnan().all(-1).all(-1)
            assert int(written.sum()) == sum(self.before) - sum(self.first) + 3 * self.new
            for b in range(3):
                for i in range(self.new):
                    assert close(
                        cache[self.places[b][self.before[b] + i]], source[b, i], 1e-6 if k_new is not None else 0
                    )


SCORES: list[dict[str, Any]] = [
    {}, {"causal": True}, {"causal": True, "window": (2, 0), "softcap": 1.5}, {"window": (1, 1)}, {"scale": 0.4},
    {"slopes": SLOPES, "causal": True},
]  # fmt: skip


@pytest.mark.parametrize(("dim", "dtype"), [(5, torch.float32), (64, torch.bfloat16), (59, torch.float16)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "batch_idx", "paged", "leftpad", "strided"])
@pytest.mark.parametrize(("queries", "new"), [(1, 1), (3, 3), (2, 0)])
def test_caches(
    kind: str, dim: int, dtype: Any, queries: int, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    taken: list[str] = []
    for way in ("_decode", "_over_pages", "_over_cache", "_gathered"):
        run = getattr(cached, way)
        monkeypatch.setattr(cached, way, lambda *x, way=way, run=run: taken.append(way) or run(*x))
    for score in SCORES:
        x = Sequences(kind, dim, dtype, new)
        (q,) = randoms((3, queries, HEADS, dim), seed=7, dtype=dtype)
        names = {"window": "window_size", "scale": "softmax_scale", "slopes": "alibi_slopes"}
        options = x.options | {names.get(name, name): value for name, value in score.items()}
        news = (x.k_new, x.v_new) if new else ()
        out, lse = fa2.flash_attn_with_kvcache(q, *x.caches, *news, return_softmax_lse=True, **options)
        assert not (lse == -math.inf).any()
        x.check(q, out, lse.masked_fill(lse == math.inf, -math.inf), score)
        possible = dim == 64 and kind != "leftpad" and "slopes" not in score
        ordered = queries == 1 or score.get("window") != (1, 1)
        in_place = "_over_cache" if kind == "leftpad" and dtype != torch.float32 else "_over_pages"
        others = "_gathered" if dim % 8 else in_place
        assert taken.pop() == ("_decode" if possible and ordered else others)
        if "slopes" not in score:
            x = Sequences(kind, dim, dtype, new)
            options = x.options | options | {"page_table": x.options.get("block_table")}
            options.pop("block_table", None)
            splits = len(score)
            made = fa3.flash_attn_with_kvcache(
                q, *x.caches, *news, return_softmax_lse=True, num_splits=splits, pack_gqa=True, sm_margin=8, **options
            )
            assert len(made) == 4
            assert made[2].numel() == made[3].numel() == 0
            x.check(q, *made[:2], score)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("page", "dim"), [(1, 24), (3, 96), (16, 64)])
def test_pools_of_engines(order: str, page: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and written where they lie, by the caller's own table and page size."""
    seen: list[Any] = []
    for name in ("append", "decode"):
        run = getattr(cached, name)
        monkeypatch.setattr(cached, name, lambda *x, run=run, **y: seen.append((x, y)) or run(*x, **y))
    columns = -(-12 // page)
    blocks = 2 * columns + 3
    memory = torch.full(memory_shape(order, blocks, page, KV, dim), math.nan, dtype=torch.float16)
    k_cache, v_cache = planes(order, memory, blocks, page, KV, dim)
    table = torch.randperm(blocks)[: 2 * columns].reshape(2, columns).int()
    k, v, q = randoms((2, 11, KV, dim), (2, 11, KV, dim), (2, 1, HEADS, dim), dtype=torch.float16)
    for first, last in ((0, 7), (7, 11)):
        out = fa2.flash_attn_with_kvcache(
            q, k_cache, v_cache, k[:, first:last], v[:, first:last], cache_seqlens=int32(first, first), causal=True,
            block_table=table,
        )  # fmt: skip
    reference, _ = naive(q.double(), k.double(), v.double())
    assert close(out.double(), reference, 3e-3)
    assert int(torch.isfinite(memory).sum()) == 2 * 2 * 11 * KV * dim
    assert len(seen) == 4
    for given, options in seen:
        cache = next(x for x in given if isinstance(x, cached.KVCache))
        assert (cache.num_blocks, cache.block_size) == (blocks, page)
        assert cache.k is k_cache
        assert options["block_table"] is table


def test_a_cache_without_a_table_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = randoms((2, 1, HEADS, 64), (3, 9, KV, 64), (3, 9, KV, 64), dtype=torch.float16)
    with monkeypatch.context() as patch:
        patch.setattr(cached.torch, "arange", None)
        out = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(9, 9))
    assert close(out.double(), naive(q.double(), k[:2].double(), v[:2].double())[0], 3e-3)


@pytest.mark.parametrize("case", ["other strides of v", "odd strides", "shifted by a half"])
def test_caches_that_decode_cannot_read(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    run = cached._over_pages
    monkeypatch.setattr(cached, "_over_pages", lambda *x: taken.append("") or run(*x))
    wide = 64 + (4 if case == "odd strides" else 0)
    memory = torch.full((2, 3 * 16 * KV * wide + 8), math.nan, dtype=torch.float16)
    k_cache, v_cache = (
        x[4 * (case == "shifted by a half") :][: 3 * 16 * KV * wide].view(3, 16, KV, wide)[..., :64] for x in memory
    )
    if case == "other strides of v":
        v_cache = v_cache.reshape(3, KV, 16, 64).transpose(1, 2)
    k, v, q = randoms((3, 5, KV, 64), (3, 5, KV, 64), (3, 1, HEADS, 64), dtype=torch.float16)
    out = fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=int32(0, 0, 0))
    assert close(out.double(), naive(q.double(), k.double(), v.double())[0], 3e-3)
    assert taken == [""]


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: list[int], interleaved: bool
) -> torch.Tensor:
    """(tokens, heads, dim), each channel on its own."""
    made, pairs = x.clone(), cos.shape[1]
    for t, at in enumerate(positions):
        for i in range(pairs):
            one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
            a, b = x[t, :, one].double(), x[t, :, two].double()
            made[t, :, one] = a * cos[at, i] - b * sin[at, i]
            made[t, :, two] = a * sin[at, i] + b * cos[at, i]
    return made


ANGLES = torch.arange(2 * CAPACITY)[:, None] / torch.tensor([1.0, 2.0, 5.0, 9.0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("score", [{}, {"causal": True}, {"window": (None, 3)}], ids=str)
@pytest.mark.parametrize("kind", ["plain", "paged", "leftpad"])
@pytest.mark.parametrize("starts", [None, [7, 0, 21]])
def test_rotary(kind: str, score: dict[str, Any], interleaved: bool, starts: list[int] | None) -> None:
    """Tokens are rotated by their places in the cache, padding included, or where rotary_seqlens says."""
    x = Sequences(kind, 24, torch.float32, 2)
    (q,) = randoms((3, 2, HEADS, 24), seed=7, dtype=torch.float32)
    cos, sin = ANGLES.cos(), ANGLES.sin()
    options = x.options | {"causal": bool(score.get("causal")), "window_size": score.get("window", (-1, -1))}
    options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved, "return_softmax_lse": True}
    if starts is not None:
        options |= {"rotary_seqlens": int32(*starts), "page_table": options.pop("block_table", None)}
    out, lse, *_ = (fa2 if starts is None else fa3).flash_attn_with_kvcache(q, *x.caches, x.k_new, x.v_new, **options)
    new_q, new_k = (
        torch.stack([
            rotated(t[b], cos, sin, [n + i for i in range(2)] if moving else [n, n], interleaved)
            for b, n in enumerate(starts or x.before)
        ])
        for t, moving in ((q, bool(score)), (x.k_new, True))
    )  # fmt: skip
    x.check(new_q, out, lse, {"causal": True} if "causal" in score else {"window": (-1, 3)} if score else {}, new_k)


def test_positions_without_angles() -> None:
    """rotary_seqlens means nothing where nothing is rotated; where something is, there have to be angles."""
    x = Sequences("plain", 24, torch.float32, 1)
    (q,) = randoms((3, 1, HEADS, 24), seed=7, dtype=torch.float32)
    beyond = int32(2 * CAPACITY, 0, 0)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, *x.caches, x.k_new, x.v_new, rotary_seqlens=beyond, return_softmax_lse=True, **x.options
    )
    x.check(q, out, lse, {})
    saved = [cache.nan_to_num() for cache in x.caches]
    angles = {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin()}
    for starts in (beyond, int32(-1, 0, 0)):
        with pytest.raises(ShapeError, match="rotary_cos"):
            fa3.flash_attn_with_kvcache(
                q, *x.caches, x.k_new, x.v_new, rotary_seqlens=starts, **angles, **x.options
            )  # fmt: skip
    assert all(torch.equal(a.nan_to_num(), b) for a, b in zip(x.caches, saved, strict=True))


def test_lengths() -> None:
    """An integer, none at all, a longer prompt than decode takes, and rows that see nothing."""
    q, k, v = randoms((2, 20, 4, 64), (2, 24, 2, 64), (2, 24, 2, 64), dtype=torch.float16)
    out, lse = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=15, causal=True, return_softmax_lse=True)
    ref, ref_lse = naive(q.double(), k[:, :15].double(), v[:, :15].double(), causal=True)
    assert close(out.double(), ref, 3e-3)
    assert close(lse.double(), torch.where(ref_lse == -math.inf, math.inf, ref_lse), 1e-5)
    assert bool((lse[:, :, :5] == math.inf).all())
    out, lse, *_ = fa3.flash_attn_with_kvcache(q[:, :5], k, v, cache_seqlens=3, causal=True, return_softmax_lse=True)
    assert bool((lse[:, :, :2] == -math.inf).all())
    assert not out[:, :2].any()
    out = fa2.flash_attn_with_kvcache(q[:, :2], k, v)
    assert close(out.double(), naive(q[:, :2].double(), k.double(), v.double())[0], 3e-3)
    empty = fa2.flash_attn_with_kvcache(q[:, :0], k, v, cache_seqlens=3)
    assert empty.shape == (2, 0, 4, 64)


def test_no_gradients_and_parameters() -> None:
    q, k, v = randoms((1, 1, 4, 24), (1, 8, 2, 24), (1, 8, 2, 24), dtype=torch.float32, grad=True)
    assert not fa2.flash_attn_with_kvcache(q, k, v).requires_grad
    fa2.flash_attn_with_kvcache(q, k, v, torch.ones(1, 1, 2, 24), torch.ones(1, 1, 2, 24), cache_seqlens=4)
    assert bool((k[0, 4] == 1).all())


CALL = {"cache_seqlens": int32(3, 4)}
NEW = torch.zeros(2, 1, 2, 24)
ONES = torch.ones(8, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"k": NEW}, ArgumentError, "k and v, or neither"),
        ({"k": NEW, "v": NEW, "cache_seqlens": None}, ArgumentError, "cache_seqlens"),
        ({"k": NEW, "v": NEW, "cache_seqlens": 8}, ArgumentError, "cache_seqlens"),
        ({"k": NEW, "v": NEW, "cache_seqlens": int32(3, 8)}, ArgumentError, "room for 1 new tokens"),
        ({"k": NEW.double(), "v": NEW}, DtypeError, "'k'"),
        ({"k": NEW[:1], "v": NEW}, ShapeError, "'k'"),
        ({"cache_seqlens": torch.tensor([3, 4])}, DtypeError, "cache_seqlens"),
        ({"cache_seqlens": int32(3)}, ShapeError, "cache_seqlens"),
        ({"cache_seqlens": int32(3, -1)}, ArgumentError, "cache_seqlens"),
        ({"cache_batch_idx": int32(0, 2)}, ArgumentError, "cache_batch_idx"),
        ({"cache_leftpad": int32(0, 5)}, ArgumentError, "cache_leftpad"),
        ({"cache_leftpad": int32(0, 5), "block_table": int32(0, 1)[:, None]}, ArgumentError, "cache_leftpad"),
        ({"cache_leftpad": 5, "block_table": int32(0, 1)[:, None]}, ArgumentError, "received the int 5"),
        ({"cache_batch_idx": int32(0, 1), "block_table": int32(0, 1)[:, None]}, ArgumentError, "cache_batch_idx"),
        ({"block_table": int32(0, 2)[:, None]}, ArgumentError, "blocks 0 to 1"),
        ({"block_table": int32(0, 1)}, ShapeError, "block_table"),
        ({"num_splits": -1}, ArgumentError, "num_splits"),
        ({"block_table": int32(0, 1)[:, None], "cache_seqlens": 9}, ArgumentError, "cache_seqlens"),
        ({"block_table": int32(0, 1)[:, None], "cache_seqlens": int32(3, 9)}, RuntimeError, "block_table has 1 blocks"),
        ({"k": NEW.expand(2, 9, 2, 24), "v": NEW.expand(2, 9, 2, 24)}, ArgumentError, "at most 8 tokens"),
        ({"rotary_cos": torch.ones(8, 4)}, ArgumentError, "rotary_cos"),
        ({"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(8, 4)}, ArgumentError, "rotary_cos"),
        ({"k": NEW, "v": NEW, "rotary_cos": torch.ones(7, 4), "rotary_sin": torch.ones(7, 4)}, ShapeError, "positions"),
        ({"k": NEW, "v": NEW, "rotary_cos": ONES * 1j, "rotary_sin": ONES}, DtypeError, "'rotary_cos'.*complex64"),
        ({"k": NEW, "v": NEW, "rotary_cos": ONES, "rotary_sin": ONES.int()}, DtypeError, "'rotary_sin'.*int32"),
        ({"rotary_interleaved": None}, ArgumentError, "rotary_interleaved"),
        ({"k": NEW, "v": NEW, "return_softmax_lse": "no"}, ArgumentError, "'return_softmax_lse': expected True or"),
        ({"k": NEW, "v": NEW, "return_softmax_lse": torch.ones(2)}, ArgumentError, "'return_softmax_lse': expected"),
        ({"window_size": 3}, ArgumentError, "window_size"),
        ({"q": torch.zeros(2, 1, 3, 24)}, ShapeError, "multiple of 2 heads"),
        ({"q": torch.zeros(3, 1, 4, 24), "cache_seqlens": None}, ShapeError, "k_cache"),
        ({"alibi_slopes": torch.zeros(3)}, ShapeError, "alibi_slopes"),
        ({"k": NEW, "v": NEW, "alibi_slopes": torch.zeros(4).double()}, DtypeError, "'alibi_slopes'.*float64"),
        ({"k": NEW, "v": NEW, "alibi_slopes": torch.zeros(4, device="meta")}, DeviceError, "'alibi_slopes'.*meta"),
        ({"k": NEW, "v": NEW, "softmax_scale": "1"}, ArgumentError, "'softmax_scale': expected a finite number"),
        ({"k": NEW, "v": NEW, "softmax_scale": math.nan}, ArgumentError, "'softmax_scale': expected a finite number"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_errors_leave_the_cache_alone(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {
        "q": torch.zeros(2, 1, 4, 24),
        "k_cache": torch.full((2, 8, 2, 24), 3.0),
        "v_cache": torch.ones(2, 8, 2, 24),
    }
    given |= CALL | arguments
    with pytest.raises(error, match=text):
        fa2.flash_attn_with_kvcache(**given)
    assert bool((given["k_cache"] == 3).all())


@pytest.mark.parametrize(
    "name",
    [
        "qv", "q_descale", "k_descale", "v_descale", "attention_chunk",
    ],
)  # fmt: skip
def test_what_fa3_has_and_we_do_not(name: str) -> None:
    default = inspect.signature(fa3.flash_attn_with_kvcache).parameters[name].default
    value = int32(1, 2) if default is None else 3
    q, cache = torch.zeros(2, 1, 4, 24), torch.full((2, 8, 2, 24), 3.0)
    with pytest.raises(UnsupportedError, match=name):
        fa3.flash_attn_with_kvcache(q, cache, cache.clone(), NEW, NEW, **CALL, **{name: value})
    assert bool((cache == 3).all())


def test_scheduler_metadata() -> None:
    """There is nothing to schedule: what says so is taken, copied into a buffer of the caller's too, and no other."""
    x = Sequences("plain", 24, torch.float32, 1)
    (q,) = randoms((3, 1, HEADS, 24), seed=7, dtype=torch.float32)
    made = fa3.get_scheduler_metadata(3, 1, CAPACITY, HEADS, KV, 24, x.options["cache_seqlens"], num_splits=3)
    buffer = torch.zeros(8, dtype=torch.int32)
    buffer[: made.shape[0]] = made
    plain = fa3.flash_attn_with_kvcache(q, *x.caches, **x.options)
    for metadata in (made, buffer[: made.shape[0]]):
        assert torch.equal(fa3.flash_attn_with_kvcache(q, *x.caches, scheduler_metadata=metadata, **x.options), plain)
    for wrong in (buffer, torch.empty(0)):
        with pytest.raises(ArgumentError, match="get_scheduler_metadata"):
            fa3.flash_attn_with_kvcache(q, *x.caches, scheduler_metadata=wrong, **x.options)
    for knobs in ({"num_splits": 1.5}, {"pack_gqa": 2}, {"sm_margin": -1}):
        with pytest.raises(ArgumentError, match=next(iter(knobs))):
            fa3.get_scheduler_metadata(3, 1, CAPACITY, HEADS, KV, 24, x.options["cache_seqlens"], **knobs)
        with pytest.raises(ArgumentError, match=next(iter(knobs))):
            fa3.flash_attn_with_kvcache(q, *x.caches, **x.options, **knobs)


def test_lengths_of_a_gpu_are_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    most = torch.Tensor.max
    monkeypatch.setattr(torch.Tensor, "max", lambda x: reads.append(1) or most(x))
    lengths = int32(3, 8)
    assert [cached_checks._longest(lengths) for _ in range(3)] == [8, 8, 8]
    assert len(reads) == 1
    lengths += 1
    assert [
        cached_checks._longest(lengths),
        cached_checks._longest(lengths.clone()),
        cached_checks._longest(lengths),
    ] == [9, 9, 9]
    assert len(reads) == 4
    with torch.inference_mode():  # which has no versions
        lengths = int32(5)
        assert cached_checks._longest(lengths) == 5
        lengths += 1
        assert cached_checks._longest(lengths) == 6
