"""flash_attn_with_kvcache of both versions, and attention over a block table, in one graph of torch.compile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from omniattn.errors import ArgumentError, ShapeError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from omniattn.compat import flash_attn as fa2  # noqa: E402
from omniattn.compat import flash_attn_interface as fa3  # noqa: E402
from tests.unit.compat.compat_cases import close, randoms, starts  # noqa: E402

HEADS, KV, PAGE, DIM = 4, 2, 4, 64
TABLE = torch.tensor([[5, 2, 0], [1, 6, 3]], dtype=torch.int32)
BEFORE = torch.tensor([7, 3], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pool_of(kind: str, dtype: Any) -> Any:
    """Caches of two sequences of 12 tokens, contiguous or in pages; NaN behind what they hold."""
    tokens = randoms((2, 2, 12, KV, DIM), seed=1, dtype=dtype)[0]
    for b, n in enumerate(BEFORE.tolist()):
        tokens[:, b, n:] = math.nan
    if kind == "contiguous":
        return tokens
    pool = torch.full((7, 2, PAGE, KV, DIM), math.nan, dtype=dtype)
    for b in range(2):
        for i, page in enumerate(TABLE[b].tolist()):
            pool[page] = tokens[:, b, i * PAGE : (i + 1) * PAGE]
    return pool


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("module", [fa2, fa3], ids=lambda m: m.__name__.rpartition(".")[2])
@pytest.mark.parametrize("kind", ["contiguous", "pages"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_new_tokens_in_a_graph(module: Any, kind: str, dtype: Any, backend: str) -> None:
    """Keys are rotated and written into views of one pool; the graph goes on with what eager calls give."""
    q, k, v = randoms((2, 2, HEADS, DIM), (2, 2, KV, DIM), (2, 2, KV, DIM), seed=2, dtype=dtype)
    cos, sin = randoms((12, 8), (12, 8), seed=3, dtype=dtype)
    table = {"contiguous": {}, "pages": {"block_table" if module is fa2 else "page_table": TABLE}}[kind]

    def step(pool: Any, q: Any, k: Any, v: Any, used: Any, scale: float) -> Any:
        caches = pool.unbind(0 if kind == "contiguous" else 1)
        made = module.flash_attn_with_kvcache(
            q * 2, *caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=used, causal=True, softcap=3.0,
            window_size=(5, -1), softmax_scale=scale, return_softmax_lse=True, **table,
        )  # fmt: skip
        return made[0] + 1, made[1], caches[0].nan_to_num().sum()

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for shift in (0, 1):
        pools = [pool_of(kind, dtype) for _ in range(2)]
        for got, want in zip(
            *(f(pool, q, k, v, BEFORE + shift, 0.1) for f, pool in zip((compiled, step), pools, strict=True)),
            strict=True,
        ):
            assert close(got, want, 1e-6) or torch.equal(got.isnan(), want.isnan())
        assert torch.equal(pools[0].nan_to_num(7), pools[1].nan_to_num(7))
        assert int((~pools[0].isnan()).sum()) == 2 * KV * DIM * (10 + 4)
        counts.append(counter.frame_count)
    assert counts == [counts[0]] * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_caches_that_are_read(backend: str) -> None:
    pool = pool_of("contiguous", torch.bfloat16)
    (q,) = randoms((2, 3, HEADS, DIM), seed=2, dtype=torch.bfloat16)
    index, slopes = torch.tensor([1, 0], dtype=torch.int32), torch.rand(HEADS)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (fa2, {"cache_seqlens": 3}), (fa2, {"cache_seqlens": BEFORE.flip(0), "cache_batch_idx": index}),
        (fa2, {"cache_seqlens": BEFORE, "cache_leftpad": torch.tensor([2, 0], dtype=torch.int32)}),
        (fa2, {"cache_seqlens": BEFORE, "alibi_slopes": slopes, "causal": True, "num_splits": 1}),
        (fa3, {"cache_seqlens": BEFORE, "rotary_seqlens": BEFORE, "window_size": (2, 1), "num_splits": 3}),
        (fa3, {"cache_seqlens": BEFORE, "scheduler_metadata": torch.empty(0, dtype=torch.int32), "pack_gqa": True}),
    ]  # fmt: skip
    for module, options in cases:
        torch._dynamo.reset()

        def step(q: Any, k: Any, v: Any, module: Any = module, options: dict[str, Any] = options) -> Any:
            return module.flash_attn_with_kvcache(q, k, v, **options)

        got = torch.compile(step, fullgraph=True, backend=backend)(q, *pool)
        assert torch.equal(got, step(q, *pool))
        assert not got.isnan().any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_packed_queries_over_pages(backend: str) -> None:
    k, v = (x.nan_to_num(9) for x in pool_of("pages", torch.bfloat16).unbind(1))
    (q,) = randoms((5, HEADS, DIM), seed=2, dtype=torch.bfloat16)

    def step(q: Any, of_q: Any, of_k: Any, table: Any) -> Any:
        return fa2.flash_attn_varlen_func(
            q, k, v, of_q, of_k, 4, 12, causal=True, block_table=table, return_attn_probs=True
        )

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows in ([4, 1], [2, 3]):
        for got, want in zip(
            *(f(q, starts(rows), starts([7, 3]), TABLE) for f in (compiled, step)), strict=True
        ):  # fmt: skip
            assert torch.equal(got, want)


def test_no_gradients_in_a_graph() -> None:
    """As without a graph, and as in the originals."""
    pool = pool_of("contiguous", torch.float32)
    (q,) = randoms((2, 1, HEADS, DIM), seed=2, dtype=torch.float32, grad=True)
    run = torch.compile(
        lambda q, k, v: fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=BEFORE), fullgraph=True, backend="aot_eager"
    )
    assert not run(q, *pool).requires_grad
    assert not fa2.flash_attn_with_kvcache(q, *pool, cache_seqlens=BEFORE).requires_grad


def test_errors_of_a_graph() -> None:
    """Where it is read, or where the operator runs; the cache is not written."""
    pool = pool_of("contiguous", torch.bfloat16)
    q, k = randoms((2, 1, HEADS, DIM), (2, 1, KV, DIM), seed=2, dtype=torch.bfloat16)
    before = pool.clone()
    for error, match, options in (
        (ArgumentError, "cache_seqlens", {"k": k, "v": k, "cache_seqlens": BEFORE + 9}),
        (ShapeError, "'v'", {"k": k, "v": k[:, :, :1], "cache_seqlens": BEFORE}),
        (Exception, "'v': expected k and v, or neither", {"k": k, "cache_seqlens": BEFORE}),
    ):
        torch._dynamo.reset()
        run = torch.compile(
            lambda q, a, b, o=options: fa2.flash_attn_with_kvcache(q, a, b, **o), fullgraph=True, backend="aot_eager"
        )
        with pytest.raises(error, match=match):
            run(q, *pool)
        assert torch.equal(pool.nan_to_num(7), before.nan_to_num(7))
