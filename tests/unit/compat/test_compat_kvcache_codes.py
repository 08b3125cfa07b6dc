"""FlashAttention-3's flash_attn_with_kvcache over caches in e4m3, beside attention of code times scale in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest

from omniattn.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError

torch = pytest.importorskip("torch")
from omniattn.compat import flash_attn as fa2  # noqa: E402
from omniattn.compat import flash_attn_interface as fa3  # noqa: E402
from tests.unit.compat.compat_cases import close, naive, randoms, slices, starts  # noqa: E402

pytestmark = pytest.mark.frameworks

E4M3 = torch.float8_e4m3fn
HEADS, KV, DIM, PAGE, CAPACITY = 4, 2, 64, 4, 24
BEFORE = [5, 0, 12]
NAMES = ("q_descale", "k_descale", "v_descale")
#: Of outputs in float32, and in bfloat16.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2, E4M3: 2e-2}


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def descales(kind: str) -> dict[str, Any]:
    """Of three sequences: all, with a stride of 0, of K alone, none."""
    torch.manual_seed(3)
    made = {name: 0.5 + torch.rand(3, KV) for name in NAMES}
    if kind == "repeated":
        made = {name: x[:1, :1].expand(3, KV) for name, x in made.items()}
    elif kind == "strides":  # of V others than of K
        made["v_descale"] = made["v_descale"].T.contiguous().T
    wanted = {"of k": ("k_descale",), "of v": ("v_descale",), "of q": ("q_descale",), "none": ()}.get(kind, NAMES)
    return {name: x for name, x in made.items() if name in wanted}


class Held:
    """Three sequences in caches of e4m3, contiguous, in pages or by an index; NaN behind what they hold."""

    def __init__(self, kind: str) -> None:
        self.k, self.v = (x.to(E4M3) for x in randoms((3, CAPACITY, KV, DIM), (3, CAPACITY, KV, DIM)))
        self.options: dict[str, Any] = {"cache_seqlens": int32(*BEFORE)}
        shape: tuple[int, ...] = (5 if kind == "index" else 3, CAPACITY, KV, DIM)
        if kind == "pages":
            shape = (20, PAGE, KV, DIM)
            table = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:18].reshape(3, 6).int()
            self.options["page_table"] = table
            self.places = [[(int(table[b, t // PAGE]), t % PAGE) for t in range(CAPACITY)] for b in range(3)]
        else:
            rows = [4, 0, 2] if kind == "index" else [0, 1, 2]
            self.places = [[(r, t) for t in range(CAPACITY)] for r in rows]
            if kind == "index":
                self.options["cache_batch_idx"] = int32(*rows)
        self.caches = [torch.full(shape, math.nan).to(E4M3) for _ in range(2)]
        for cache, source in zip(self.caches, (self.k, self.v), strict=True):
            for b in range(3):
                for t in range(BEFORE[b]):
                    cache[self.places[b][t]] = source[b, t]

    def bytes(self) -> list[Any]:
        return [cache.view(torch.uint8).clone() for cache in self.caches]

    def expected(self, q: Any, b: int, k: Any, v: Any, scales: dict[str, Any], **score: Any) -> Any:
        """o and LSE of the queries (rows, heads, dim) of one sequence, whose new tokens are k and v."""
        of_q, of_k, of_v = (scales[n][b].double() if n in scales else torch.ones(KV).double() for n in NAMES)
        keys, values = (
            torch.cat([x[b, : BEFORE[b]].double(), y.double()]) * scale[:, None]
            for x, y, scale in ((self.k, k, of_k), (self.v, v, of_v))
        )
        queries = q.double() * of_q.repeat_interleave(HEADS // KV)[:, None]
        o, lse = naive(queries[None], keys[None], values[None], **score)
        return o[0], lse[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("kind", ["plain", "pages", "index"])
def test_a_batch_with_new_tokens(kind: str, dtype: Any) -> None:
    """Bytes are written as they came, and nothing else is."""
    for scales_kind in ("all", "repeated", "strides", "of k", "of v", "of q", "none"):
        scales = descales(scales_kind)
        if dtype != E4M3:
            scales.pop("q_descale", None)
        for rows, score, same in (
            (1, {}, {}), (3, {"causal": True}, {"causal": True}), (3, {}, {}),
            (3, {"window_size": (4, 0), "softcap": 2.0}, {"window": (4, 0), "softcap": 2.0}),
            (16, {"causal": True, "num_splits": 1}, {"causal": True}),
            (17, {"causal": True}, {"causal": True}), (20, {"window_size": (3, 1)}, {"window": (3, 1)}),
        ):  # fmt: skip
            x = Held(kind)
            (q,) = randoms((3, rows, HEADS, DIM), seed=7)
            k, v = (t.to(E4M3) for t in randoms((3, 2, KV, DIM), (3, 2, KV, DIM), seed=8))
            q = q.to(dtype)
            before = x.bytes()
            out, lse, *_ = fa3.flash_attn_with_kvcache(
                q, *x.caches, k, v, return_softmax_lse=True, **x.options, **scales, **score
            )
            assert out.dtype == (torch.bfloat16 if dtype == E4M3 else dtype)
            for b in range(3):
                o, own_lse = x.expected(q[b], b, k[b], v[b], scales, **same)
                assert close(out[b].double(), o, BOUND[dtype] * (1 + float(o.abs().max())))
                assert close(lse[b].double(), own_lse, 5e-5)
                for old, new in zip(before, (k, v), strict=True):
                    for i in range(2):
                        old[x.places[b][BEFORE[b] + i]] = new[b, i].view(torch.uint8)
            assert all(map(torch.equal, before, x.bytes()))


@pytest.mark.parametrize("kind", ["plain", "pages", "index"])
def test_packed_rows(kind: str) -> None:
    scales = descales("all")
    for rows, new, score in (
        ([3, 0, 5], [3, 1, 2], {"causal": True}), ([1, 1, 1], [1, 0, 1], {}), ([3, 0, 5], [3, 1, 2], {}),
        ([1, 0, 29], [1, 1, 2], {"causal": True}),
    ):  # fmt: skip
        x = Held(kind)
        (q,) = (t.to(E4M3) for t in randoms((sum(rows) + 1, HEADS, DIM), seed=7))
        k, v = (t.to(E4M3) for t in randoms((sum(new) + 2, KV, DIM), (sum(new) + 2, KV, DIM), seed=8))
        out, lse, *_ = fa3.flash_attn_with_kvcache(
            q, *x.caches, k, v, cu_seqlens_q=starts(rows), max_seqlen_q=max(rows), cu_seqlens_k_new=starts(new),
            return_softmax_lse=True, **x.options, **scales, **score,
        )  # fmt: skip
        for b, (own, of_new) in enumerate(zip(slices(rows), slices(new), strict=True)):
            o, own_lse = x.expected(q[own], b, k[of_new], v[of_new], scales, **score)
            assert close(out[own].double(), o, BOUND[E4M3] * 3)
            assert close(lse[:, own].double(), own_lse, 5e-5)
        assert bool((out[-1] == 0).all())
        held = (sum(BEFORE) + sum(new)) * KV * DIM
        assert all(int((~cache.float().isnan()).sum()) == held for cache in x.caches)


def test_keys_are_rotated_as_codes() -> None:
    """In fp32, rounded once and to 448 at most; queries are rotated as what their codes are."""
    cos, sin = randoms((CAPACITY, 16), (CAPACITY, 16), seed=5, dtype=torch.float32)
    x, y = Held("plain"), Held("plain")
    (q,) = (t.to(E4M3) for t in randoms((3, 2, HEADS, DIM), seed=7))
    k, v = ((t * 200).clamp(-448, 448).to(E4M3) for t in randoms((3, 2, KV, DIM), (3, 2, KV, DIM), seed=8))
    scales = descales("all")
    small = {**scales, "k_descale": scales["k_descale"] / 256}
    named = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False, "causal": True}
    out = fa3.flash_attn_with_kvcache(q, *x.caches, k, v, **x.options, **small, **named)

    def turned(t: Any, b: int) -> Any:
        a, c = (r[BEFORE[b] : BEFORE[b] + 2, None] for r in (cos, sin))
        one, two, rest = t[..., :16].float(), t[..., 16:32].float(), t[..., 32:].float()
        return torch.cat([one * a - two * c, one * c + two * a, rest], -1)

    for b in range(3):
        keys = turned(k[b], b).clamp(-448, 448).to(E4M3)
        assert float(turned(k[b], b).abs().max()) > 448
        o, _ = y.expected(turned(q[b], b), b, keys, v[b], small, causal=True)
        assert close(out[b].double(), o, 2e-2 * float(o.abs().max()))
        for i in range(2):
            assert torch.equal(x.caches[0][b, BEFORE[b] + i].view(torch.uint8), keys[i].view(torch.uint8))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_compiled_graph(backend: str) -> None:
    scales = descales("all")
    (q,) = (t.to(E4M3) for t in randoms((3, 2, HEADS, DIM), seed=7))
    k, v = (t.to(E4M3) for t in randoms((3, 2, KV, DIM), (3, 2, KV, DIM), seed=8))

    def step(q: Any, caches: Any, k: Any, v: Any, options: Any) -> Any:
        made = fa3.flash_attn_with_kvcache(
            q, *caches, k, v, causal=True, return_softmax_lse=True, **options, **scales
        )  # fmt: skip
        return made[0] + 1, made[1]

    torch._dynamo.reset()
    for new in ((k, v), (None, None)):
        x, y = Held("pages"), Held("pages")
        got = torch.compile(step, fullgraph=True, backend=backend)(q, x.caches, *new, x.options)
        want = step(q, y.caches, *new, y.options)
        assert all(map(torch.equal, got, want))
        assert got[0].dtype == torch.bfloat16
        assert all(map(torch.equal, x.bytes(), y.bytes()))
    torch._dynamo.reset()


def test_padding_in_front() -> None:
    """As over the same numbers in bfloat16."""
    (q,) = randoms((3, 2, HEADS, DIM), seed=7, dtype=torch.bfloat16)
    x, pads = Held("pages"), int32(2, 0, 1)
    made = [
        fa3.flash_attn_with_kvcache(
            q, *(t.to(dtype) for t in x.caches), cache_leftpad=pads, causal=True, return_softmax_lse=True, **x.options
        )
        for dtype in (E4M3, torch.bfloat16)
    ]
    plain = fa3.flash_attn_with_kvcache(q, *x.caches, causal=True, return_softmax_lse=True, **x.options)
    for one, other in zip(made[0], made[1], strict=False):
        torch.testing.assert_close(one.float(), other.float(), atol=2e-2, rtol=2e-2)
    assert torch.equal(made[0][0][1], plain[0][1])
    assert not torch.equal(made[0][0][0], plain[0][0])


def test_no_queries() -> None:
    x = Held("pages")
    for shape in ((3, 0, HEADS, DIM),):
        out, lse, *_ = fa3.flash_attn_with_kvcache(
            torch.zeros(shape).to(E4M3), *x.caches, return_softmax_lse=True, **x.options
        )
        assert (out.shape, lse.shape, out.dtype) == (shape, (3, HEADS, 0), torch.bfloat16)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        torch.zeros(2, HEADS, DIM).to(E4M3), *x.caches, cu_seqlens_q=starts([0, 0, 0]), max_seqlen_q=0,
        return_softmax_lse=True, **x.options,
    )  # fmt: skip
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


def test_what_is_not_served_writes_nothing() -> None:
    x = Held("pages")
    (q,) = (t.to(E4M3) for t in randoms((3, 2, HEADS, DIM), seed=7))
    k, v = (t.to(E4M3) for t in randoms((3, 2, KV, DIM), (3, 2, KV, DIM), seed=8))
    before, one = x.bytes(), torch.ones(3, KV)

    def refused(error: type[Exception], match: str, q: Any = q, k: Any = k, v: Any = v, **options: Any) -> None:
        with pytest.raises(error, match=match):
            fa3.flash_attn_with_kvcache(q, *x.caches, k, v, **x.options | options)
        assert all(map(torch.equal, before, x.bytes()))

    refused(UnsupportedError, "q_descale with q in 16", q.bfloat16(), q_descale=one)
    refused(DtypeError, "'k': expected torch.float8_e4m3fn, like k_cache", q.bfloat16(), k.bfloat16(), v.bfloat16())
    refused(DtypeError, "'q'", q.to(torch.float8_e5m2))
    refused(ShapeError, r"'k_descale': expected shape \(3, 2\)", k_descale=one[:1])
    refused(DtypeError, "'v_descale': expected torch.float32", v_descale=one.double())
    refused(ArgumentError, "'k_descale': expected a torch.Tensor", k_descale=1.0)
    bf16 = [cache.bfloat16() for cache in x.caches]
    with pytest.raises(UnsupportedError, match="k_descale with caches in 16"):
        fa3.flash_attn_with_kvcache(q.bfloat16(), *bf16, k_descale=one, **x.options)
    with pytest.raises(DtypeError, match=r"'k_cache': expected torch.float8_e4m3fn, like q"):
        fa3.flash_attn_with_kvcache(q, *bf16, **x.options)
    odd = [torch.zeros(3, 8, KV, 24).to(E4M3) for _ in range(2)]
    with pytest.raises(ShapeError, match="a multiple of 16"):
        fa3.flash_attn_with_kvcache(torch.zeros(3, 1, HEADS, 24).to(E4M3), *odd)


def test_flash_attention_2_has_none() -> None:
    """Nor has attention of packed sequences over a block table, of either type of q."""
    x = Held("pages")
    (q,) = randoms((3, 1, HEADS, DIM), seed=7, dtype=torch.bfloat16)
    table = x.options["page_table"]
    with pytest.raises(DtypeError, match=r"'k_cache': expected torch.bfloat16"):
        fa2.flash_attn_with_kvcache(q, *x.caches, cache_seqlens=int32(*BEFORE), block_table=table)
    for of_q, match in ((q, "'k': expected bfloat16"), (q.to(E4M3), "block_table with e4m3")):
        with pytest.raises((DtypeError, UnsupportedError), match=match):
            fa2.flash_attn_varlen_func(
                of_q[:, 0], *x.caches, starts([1, 1, 1]), starts(BEFORE), 1, 12, block_table=table
            )  # fmt: skip
