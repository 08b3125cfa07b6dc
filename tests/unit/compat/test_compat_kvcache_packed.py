"""FlashAttention-3's flash_attn_with_kvcache with packed queries and new keys, and pages by cache_batch_idx."""

from __future__ import annotations

import math
from typing import Any

import pytest

from omniattn.errors import ArgumentError, ShapeError

torch = pytest.importorskip("torch")
from omniattn.compat import flash_attn_interface as fa3  # noqa: E402
from tests.unit.compat.compat_cases import close, naive, randoms, slices, starts  # noqa: E402

pytestmark = pytest.mark.frameworks

HEADS, KV, PAGE, CAPACITY = 4, 2, 4, 24
BEFORE = [5, 0, 12]


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


class Held:
    """Three sequences in a cache, in pages or not, whose first tokens are there; NaN everywhere else."""

    def __init__(self, kind: str, dim: int, dtype: Any) -> None:
        self.dtype = dtype
        self.k, self.v = randoms((3, CAPACITY, KV, dim), (3, CAPACITY, KV, dim), dtype=dtype)
        self.options: dict[str, Any] = {"cache_seqlens": int32(*BEFORE)}
        self.first = [0, 0, 0]
        rows = 3
        if "index" in kind:
            self.options["cache_batch_idx"] = int32(4, 0, 2)
            rows = 5
        pages = CAPACITY // PAGE
        shape = (rows * pages + 2, PAGE, KV, dim) if "pages" in kind else (rows, CAPACITY, KV, dim)
        self.caches = [torch.full(shape, math.nan, dtype=dtype) for _ in range(2)]
        order = self.options.get("cache_batch_idx", int32(0, 1, 2)).tolist()
        if "pages" in kind:
            shuffled = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))
            table = shuffled[: rows * pages].reshape(rows, pages).int()
            self.options["page_table"] = table
            self.places = [[(int(table[r, t // PAGE]), t % PAGE) for t in range(CAPACITY)] for r in order]
        else:
            self.places = [[(r, t) for t in range(CAPACITY)] for r in order]
        if "leftpad" in kind:
            self.first = [2, 0, 7]
            self.options["cache_leftpad"] = int32(*self.first)
        for cache, source in zip(self.caches, (self.k, self.v), strict=True):
            for b in range(3):
                for t in range(self.first[b], BEFORE[b]):
                    cache[self.places[b][t]] = source[b, t]

    def check(self, q: Any, rows: list[int], out: Any, lse: Any, new: list[int], k: Any, v: Any, **score: Any) -> None:
        """Rows of q by sequences over what these hold; k and v are the new tokens, which the cache now has."""
        bound = 1e-5 if self.dtype == torch.float32 else 2e-2
        for b, (own, of_new) in enumerate(zip(slices(rows), slices(new), strict=True)):
            old = slice(self.first[b], BEFORE[b])
            keys, values = (torch.cat([x[b, old], y[of_new]])[None] for x, y in ((self.k, k), (self.v, v)))
            ref, ref_lse = naive(q[None, own].double(), keys.double(), values.double(), **score)
            assert close(out[own].double(), ref[0], bound)
            assert close(lse[:, own].double(), ref_lse[0], 3e-5)
            for cache, values in zip(self.caches, (k, v), strict=True):
                for i in range(new[b]):
                    # Rotated keys of a 16-bit cache are rounded once.
                    assert close(cache[self.places[b][BEFORE[b] + i]], values[of_new][i], bound)
        held = sum(BEFORE) - sum(self.first) + sum(new)
        assert all(int((~cache.isnan()).any(-1).any(-1).sum()) == held for cache in self.caches)


KINDS = ["plain", "index", "pages", "pages index", "pages leftpad", "pages index leftpad"]


@pytest.mark.parametrize(("dim", "dtype"), [(5, torch.float32), (64, torch.bfloat16), (59, torch.float16)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_queries_and_new_keys(kind: str, dim: int, dtype: Any) -> None:
    for score, options in (
        ({"causal": True}, {"causal": True}),
        ({"window": (2, 1), "scale": 0.3}, {"window_size": (2, 1), "softmax_scale": 0.3}),
        ({"softcap": 2.0}, {"softcap": 2.0, "num_splits": 1}),
    ):
        for new, rows in (([3, 1, 6], [3, 1, 6]), ([2, 3, 0], [4, 0, 2])):
            x = Held(kind, dim, dtype)
            q, k, v = randoms((sum(rows) + 1, HEADS, dim), *[(sum(new) + 2, KV, dim)] * 2, seed=7, dtype=dtype)
            out, lse, *none = fa3.flash_attn_with_kvcache(
                q, *x.caches, k, v, cu_seqlens_q=starts(rows), max_seqlen_q=6, cu_seqlens_k_new=starts(new),
                return_softmax_lse=True, **x.options, **options,
            )  # fmt: skip
            assert [t.numel() for t in none] == [0, 0]
            x.check(q, rows, out, lse, new, k, v, **score)
            assert bool((out[-1] == 0).all())  # a row of nobody
            assert bool((lse[:, -1] == -math.inf).all())


@pytest.mark.parametrize("kind", ["plain", "pages"])
def test_one_of_both_is_packed(kind: str) -> None:
    x = Held(kind, 64, torch.bfloat16)
    q, k, v = randoms((3, 2, HEADS, 64), (3, 2, KV, 64), (3, 2, KV, 64), seed=7, dtype=torch.bfloat16)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    shared = {"return_softmax_lse": True, "causal": True}
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        flat[0], *x.caches, k, v, cu_seqlens_q=starts([2, 2, 2]), max_seqlen_q=2, **x.options, **shared
    )
    x.check(flat[0], [2, 2, 2], out, lse, [2, 2, 2], *flat[1:], causal=True)
    x = Held(kind, 64, torch.bfloat16)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, *x.caches, *flat[1:], cu_seqlens_k_new=starts([1, 2, 3]), **x.options, **shared
    )
    lse = lse.transpose(0, 1).flatten(1)
    x.check(flat[0], [2, 2, 2], out.flatten(0, 1), lse, [1, 2, 3], *flat[1:], causal=True)
    x = Held(kind, 64, torch.bfloat16)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        flat[0], *x.caches, cu_seqlens_q=starts([2, 2, 2]), max_seqlen_q=2, return_softmax_lse=True, **x.options
    )
    x.check(flat[0], [2, 2, 2], out, lse, [0, 0, 0], *flat[1:])


@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_are_rotated_by_their_places(causal: bool) -> None:
    """As each sequence alone, whose rows are a batch of one."""
    rows, new = [2, 1, 4], [3, 1, 4]
    cos, sin = randoms((CAPACITY, 12), (CAPACITY, 12), seed=5, dtype=torch.float32)
    q, k, v = randoms((7, HEADS, 24), (8, KV, 24), (8, KV, 24), seed=7, dtype=torch.float32)
    shared = {"rotary_cos": cos, "rotary_sin": sin, "causal": causal, "return_softmax_lse": True}
    for positions in (None, int32(4, 9, 0)):
        x, y = (Held("pages", 24, torch.float32) for _ in range(2))
        out, lse, *_ = fa3.flash_attn_with_kvcache(
            q, *x.caches, k, v, cu_seqlens_q=starts(rows), max_seqlen_q=4, cu_seqlens_k_new=starts(new),
            rotary_seqlens=positions, **x.options, **shared,
        )  # fmt: skip
        for b, (own, of_new) in enumerate(zip(slices(rows), slices(new), strict=True)):
            one = {name: value[b : b + 1] for name, value in y.options.items()}
            want, want_lse, *_ = fa3.flash_attn_with_kvcache(
                q[None, own], *y.caches, k[None, of_new], v[None, of_new], **one, **shared,
                rotary_seqlens=None if positions is None else positions[b : b + 1],
            )  # fmt: skip
            assert close(out[own], want[0], 1e-5)
            assert close(lse[:, own], want_lse[0], 1e-5)
        for a, b in zip(x.caches, y.caches, strict=True):
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def test_rows_of_nobody_write_nothing() -> None:
    for dim, dtype in ((5, torch.float32), (64, torch.bfloat16)):
        x = Held("pages", dim, dtype)
        before = [cache.clone() for cache in x.caches]
        q, k, v = randoms((2, HEADS, dim), (4, KV, dim), (4, KV, dim), seed=7, dtype=dtype)
        for keys, values in ((k, v), (k[:0], v[:0])):
            out = fa3.flash_attn_with_kvcache(
                q, *x.caches, keys, values, cu_seqlens_q=starts([0, 0, 0]), max_seqlen_q=1,
                cu_seqlens_k_new=starts([0, 0, 0]), **x.options,
            )  # fmt: skip
            assert bool((out == 0).all())
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(x.caches, before, strict=True))


NEW = torch.zeros(6, KV, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"max_seqlen_q": None}, ArgumentError, "max_seqlen_q"),
        ({"max_seqlen_q": 2}, ArgumentError, "'max_seqlen_q': expected at least 3"),
        ({"cu_seqlens_q": None}, ShapeError, "'q': expected 4 dimensions"),
        ({"q": torch.zeros(3, 1, HEADS, 8)}, ShapeError, "'q': expected 3 dimensions"),
        ({"q": torch.zeros(3, 1, HEADS, 8), "cu_seqlens_q": None}, ArgumentError, "'max_seqlen_q': expected None"),
        ({"cu_seqlens_q": starts([3, 2, 2])}, ArgumentError, "at most 6 rows"),
        ({"cu_seqlens_q": int32(0, 3, 2, 6)}, ArgumentError, "cu_seqlens_q"),
        ({"cu_seqlens_q": starts([3, 2, 1]).long()}, ArgumentError, "cu_seqlens_q"),
        ({"cu_seqlens_k_new": starts([3, 2])}, ShapeError, "cu_seqlens_k_new"),
        ({"cu_seqlens_k_new": int32(1, 3, 4, 6)}, ArgumentError, "cu_seqlens_k_new"),
        ({"cu_seqlens_k_new": starts([3, 2, 2])}, ArgumentError, "at most 6 rows"),
        ({"cu_seqlens_k_new": starts([1, 1, 4]), "cache_seqlens": int32(0, 0, 5)}, RuntimeError, "cache_seqlens"),
        ({"cu_seqlens_k_new": starts([1, 1, 4]), "cache_seqlens": 5}, RuntimeError, "cache_seqlens"),
        ({"v": NEW[:5]}, ShapeError, "'v'"),
        ({"k": None, "v": None}, ArgumentError, "cu_seqlens_k_new"),
        ({"k": None, "v": None, "cu_seqlens_k_new": 3}, ArgumentError, "received the int 3"),
        ({"k": NEW[None], "v": NEW[None]}, ShapeError, "'k': expected 3 dimensions"),
        ({"page_table": int32(0, 1)[:, None], "cache_batch_idx": int32(0, 1, 2)}, ArgumentError, "0 to 1"),
        ({"page_table": int32(0, 1)[:, None]}, ShapeError, "page_table"),
        ({"page_table": int32(0, 1, 9)[:, None]}, ArgumentError, "blocks 0 to 2"),
        ({"return_softmax_lse": None}, ArgumentError, "'return_softmax_lse': expected True or False"),
        ({"cu_seqlens_k_new": starts([3, 2, 1]), "rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(8, 4),
          "rotary_seqlens": int32(6, 0, 0)}, ShapeError, "rotary_cos"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_errors_leave_the_cache_alone(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(6, HEADS, 8), "k_cache": torch.full((3, 8, KV, 8), 3.0), "v_cache": torch.ones(3, 8, KV, 8),
        "k": NEW, "v": NEW, "cache_seqlens": int32(1, 2, 3), "cu_seqlens_q": starts([3, 2, 1]), "max_seqlen_q": 3,
        "cu_seqlens_k_new": starts([3, 2, 1]),
    }  # fmt: skip
    fa3.flash_attn_with_kvcache(**given)
    given["k_cache"].fill_(3)
    given |= arguments
    with pytest.raises(error, match=text):
        fa3.flash_attn_with_kvcache(**given)
    assert bool((given["k_cache"] == 3).all())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_packed_rows_in_a_graph(backend: str) -> None:
    torch._dynamo.reset()
    q, k, v = randoms((7, HEADS, 64), (6, KV, 64), (6, KV, 64), seed=7, dtype=torch.bfloat16)

    def step(q: Any, a: Any, b: Any, of_q: Any, of_k: Any, options: dict[str, Any]) -> Any:
        return fa3.flash_attn_with_kvcache(
            q, a, b, k, v, cu_seqlens_q=of_q, max_seqlen_q=6, cu_seqlens_k_new=of_k, return_softmax_lse=True, **options
        )

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows, new in (([3, 1, 3], [1, 2, 3]), ([1, 0, 6], [0, 0, 6])):
        x, y = (Held("pages index", 64, torch.bfloat16) for _ in range(2))
        for got, want in zip(
            *(f(q, *z.caches, starts(rows), starts(new), z.options) for f, z in ((compiled, x), (step, y))), strict=True
        ):
            assert torch.equal(got, want)
        for a, b in zip(x.caches, y.caches, strict=True):
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    torch._dynamo.reset()
