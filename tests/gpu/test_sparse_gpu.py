"""Sparse attention over latent rows (DSA), and decoding over rows in 8 bits, against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

from .latent_rows8 import FORMATS, Meaning, dressed, nan_rows, stored  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("latent_family"),
]

DIM, DIM_V = 576, 512
BOUND = {"bfloat16": 4e-3, "float16": 6e-4}
#: Of the LSE and of the largest score.
OF_SCORES = 1e-3
#: Formats of rows, and element types of q that each takes.
KINDS = [("16", "bfloat16"), ("16", "float16"), ("e4m3", "bfloat16"), ("e4m3", "float16"), ("656", "bfloat16")]


def pool_of(count: int, size: int, fmt: str, dtype: str, seed: int = 0) -> tuple[Any, Meaning, dict[str, Any]]:
    """Blocks of rows, what the rows mean, and arguments of `from_arrays`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = torch.randn(count * size, DIM, device="cuda", generator=generator)
    rows *= 1 + torch.rand(count * size, 1, device="cuda", generator=generator) * 3
    if fmt == "16":
        rows = rows.to(getattr(torch, dtype))
        return rows.view(count, size, 1, DIM), Meaning(rows.double(), rows.double()), {"head_dim_v": DIM_V}
    bytes_, meant = stored(rows, fmt, dtype)
    pool, options = dressed(bytes_.view(count, size, 1, -1), fmt)
    return pool, meant, options


def expected(q: Any, rows: Any, scale: float = DIM**-0.5, softcap: float = 0.0, sinks: Any = None) -> tuple[Any, ...]:
    """O, LSE and maximum of one token's heads over rows."""
    s = scale * q.double() @ rows.T
    s = softcap * torch.tanh(s / softcap) if softcap else s
    top = s.amax(-1) if len(rows) else torch.full((len(q),), -math.inf, device="cuda", dtype=torch.float64)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None]], -1)
    p = torch.softmax(s, -1)[:, : len(rows)].nan_to_num(0.0)
    return p @ rows[:, :DIM_V], torch.logsumexp(s, -1), top


def check(o: Any, lse: Any, top: Any, q: Any, meant: Any, lists: list[Any], dtype: str, **options: Any) -> None:
    """Results (tokens, heads, ...) of tokens with lists of rows."""
    for t, rows in enumerate(lists):
        want, want_lse, want_top = expected(q[t], meant[rows], **options)
        assert not o[t].isnan().any(), t
        error = (o[t].double() - want).norm() / want.norm().clamp_min(1e-9)
        assert error < BOUND[dtype], (t, float(error))
        for got, wanted in ((lse, want_lse), (top, want_top)):
            if got is not None:
                finite = wanted.isfinite()
                assert torch.equal(finite, got[t].isfinite()), t
                assert ((got[t].double() - wanted)[finite].abs() < OF_SCORES).all(), t


def kernel_of(function: Any, *arguments: Any, **options: Any) -> str:
    """The kernel that runs a call: it says what rows in 8 bits mean."""
    return str(oa.explain(function, *arguments, **options).kernel)


def lists_of(tokens: int, topk: int, rows: int, seed: int = 0, invalid: float = 0.1) -> tuple[Any, Any, list[Any]]:
    """Indices with invalid ones among them, lengths, and the rows that count."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, rows, (tokens, topk))
    indices[rng.random((tokens, topk)) < invalid] = -1
    indices[rng.random((tokens, topk)) < invalid / 4] = rows + 5
    indices[rng.random((tokens, topk)) < invalid / 4] = -(2**31)
    lengths = rng.integers(0, topk + 1, tokens)
    lengths[: min(tokens, 4)] = (topk, 0, 1, max(topk - 1, 1))[: min(tokens, 4)]
    if tokens > 5:
        indices[5] = -1
    counted = [x[:n][(x[:n] >= 0) & (x[:n] < rows)] for x, n in zip(indices, lengths, strict=True)]
    as_int = torch.tensor(indices, dtype=torch.int32, device="cuda")
    return as_int, torch.tensor(lengths, dtype=torch.int32, device="cuda"), [
        torch.tensor(x, device="cuda", dtype=torch.long) for x in counted
    ]  # fmt: skip


@pytest.mark.parametrize(("fmt", "dtype"), KINDS)
@pytest.mark.parametrize("topk", [1, 63, 64, 129, 500, 2048])
@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_lists(heads: int, topk: int, fmt: str, dtype: str) -> None:
    pool, meant, options = pool_of(40, 64, fmt, dtype)
    q = torch.randn(9, heads, DIM, device="cuda").to(getattr(torch, dtype))
    indices, lengths, lists = lists_of(9, topk, len(meant))
    cache = oa.PagedKVCache.from_arrays(pool, **options)
    given = {"indices": indices, "topk_length": lengths, "return_lse": True, "return_max": True}
    found = oa.attention_sparse(q, cache, **given)
    check(*found, q, meant.of(kernel_of(oa.attention_sparse, q, cache, **given)), lists, dtype)


@pytest.mark.parametrize("fmt", ["16", *FORMATS])
@pytest.mark.parametrize(("batch", "tokens"), [(3, 2), (1, 1), (130, 1), (2, 5)])
def test_decode(batch: int, tokens: int, fmt: str) -> None:
    pool, meant, options = pool_of(64, 48, fmt, "bfloat16")
    q = torch.randn(batch, tokens, 128, DIM, device="cuda").bfloat16()
    indices, lengths, lists = lists_of(batch * tokens, 700, len(meant))
    cache = oa.PagedKVCache.from_arrays(pool, **options)
    given = {"indices": indices.view(batch, tokens, -1), "topk_length": lengths.view(batch, tokens), "return_lse": True}
    o, lse = oa.decode(q, cache, **given)
    assert lse.shape == (batch, 128, tokens)
    rows = meant.of(kernel_of(oa.decode, q, cache, **given))
    check(o.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), None, q.flatten(0, 1), rows, lists, "bfloat16")


@pytest.mark.parametrize("fmt", ["16", *FORMATS])
def test_options(fmt: str) -> None:
    pool, meant, options = pool_of(30, 64, fmt, "bfloat16")
    cache = oa.PagedKVCache.from_arrays(pool, **options)
    q, sinks = torch.randn(7, 64, DIM, device="cuda").bfloat16(), torch.randn(64, device="cuda")
    indices, lengths, lists = lists_of(7, 300, len(meant))
    given = {"softmax_scale": 0.1352, "softcap": 5.0, "sinks": sinks}
    plain = {"scale": 0.1352, "softcap": 5.0, "sinks": sinks}
    for deterministic in (False, True):
        call = {"indices": indices, "topk_length": lengths, "deterministic": deterministic, **given}
        rows = meant.of(kernel_of(oa.attention_sparse, q, cache, **call))
        found = oa.attention_sparse(q, cache, return_lse=True, return_max=True, **call)
        check(*found, q, rows, lists, "bfloat16", **plain)
    alone, *_ = oa.attention_sparse(
        q[3:4], cache, indices=indices[3:4], topk_length=lengths[3:4], deterministic=True, return_max=True, **given
    )
    assert torch.equal(alone[0], found[0][3])


@pytest.mark.parametrize("strided", [False, True])
def test_arrays_and_many_tokens(strided: bool) -> None:
    """Rows as an array, also one whose rows lie apart; more tokens than CTAs; q and out with strides."""
    rows = torch.randn(3000, 1, 640 if strided else DIM, device="cuda").bfloat16()[..., :DIM]
    q = torch.randn(300, 80 if strided else 64, DIM, device="cuda").bfloat16()[:, :64]
    indices, lengths, lists = lists_of(300, 200, 3000)
    out = torch.full((300, 64, 1024), math.nan, device="cuda", dtype=torch.bfloat16)[..., :DIM_V]
    o, lse, top = oa.attention_sparse(
        q, rows, indices=indices[:, None], topk_length=lengths, return_lse=True, return_max=True, out=out
    )
    assert o is out
    check(o, lse, top, q, rows[:, 0].double(), lists, "bfloat16")
    again, _ = oa.attention_sparse(q, rows, indices=indices, topk_length=lengths, return_max=True)
    assert torch.equal(again, o)
    unasked = oa.attention_sparse(q, rows, indices=indices, topk_length=lengths)
    check(unasked, None, None, q, rows[:, 0].double(), lists, "bfloat16")


def test_rows_that_no_list_has_may_be_nan() -> None:
    for fmt in FORMATS:
        pool, meant, options = pool_of(20, 64, fmt, "bfloat16")
        indices, lengths, lists = lists_of(6, 150, len(meant))
        bytes_ = pool.view(torch.uint8).view(len(meant), -1)
        unused = torch.ones(len(meant), dtype=torch.bool, device="cuda")
        unused[torch.cat(lists)] = False
        bytes_[unused] = nan_rows(int(unused.sum()), fmt)
        q = torch.randn(6, 16, DIM, device="cuda").bfloat16()
        cache = oa.PagedKVCache.from_arrays(pool, **options)
        o, lse = oa.attention_sparse(q, cache, indices=indices, topk_length=lengths, return_lse=True)
        kernel = kernel_of(oa.attention_sparse, q, cache, indices=indices, topk_length=lengths, return_lse=True)
        check(o, lse, None, q, meant.of(kernel), lists, "bfloat16")


@pytest.mark.parametrize("heads", [16, 128])
def test_a_query_that_is_nan_has_no_largest_score(heads: int) -> None:
    """As NumPy's maximum has it: the LSE and the largest score of that row, and of no other one, are NaN."""
    pool, _, options = pool_of(20, 64, "16", "bfloat16")
    q = torch.randn(6, heads, DIM, device="cuda").bfloat16()
    q[2, 5, 100] = math.nan
    indices, lengths, _ = lists_of(6, 150, 20 * 64, invalid=0.0)
    given = {"indices": indices, "topk_length": lengths.clamp_min(40), "return_lse": True, "return_max": True}
    _, lse, top = oa.attention_sparse(q, oa.PagedKVCache.from_arrays(pool, **options), **given)
    for found in (lse, top):
        assert found.isnan().sum() == 1
        assert found[2, 5].isnan()


def test_a_graph_is_replayed_with_other_lists() -> None:
    pool, meant, options = pool_of(40, 64, "656", "bfloat16")
    cache = oa.PagedKVCache.from_arrays(pool, **options)
    q = torch.randn(20, 128, DIM, device="cuda").bfloat16()
    indices, lengths, _ = lists_of(20, 400, len(meant))

    def call() -> Any:
        return oa.attention_sparse(q, cache, indices=indices, topk_length=lengths, return_lse=True, return_max=True)

    call()
    rows = meant.of(kernel_of(oa.attention_sparse, q, cache, indices=indices, topk_length=lengths, return_lse=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for seed in (1, 2):
        other, own, lists = lists_of(20, 400, len(meant), seed)
        indices.copy_(other)
        lengths.copy_(own)
        graph.replay()
        check(*found, q, rows, lists, "bfloat16")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block_size", [64, 16, 7, 1])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (128, 2), (64, 1), (5, 8)])
def test_dense_rows8(heads: int, q_len: int, block_size: int, fmt: str) -> None:
    """The dense call over rows in 8 bits; blocks that nobody has are NaN."""
    lengths = (500, 64, 65, 127, 1000, q_len)
    rng = np.random.default_rng(0)
    counts = [-(-n // block_size) for n in lengths]
    width = 576 if fmt == "e4m3" else 656
    pool = nan_rows((sum(counts) + 2) * block_size, fmt).view(-1, block_size, 1, width)
    table = np.full((len(lengths), max(counts)), 2**31 - 1, np.int32)
    order, meant = iter(rng.permutation(len(pool))), []
    for b, n in enumerate(lengths):
        bytes_, own = stored(torch.randn(n, DIM, device="cuda"), fmt)
        meant.append(own)
        for i in range(counts[b]):
            table[b, i] = next(order)
            some = bytes_[i * block_size : (i + 1) * block_size]
            pool[int(table[b, i]), : len(some), 0] = some
    array, options = dressed(pool, fmt)
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    q = torch.randn(len(lengths), q_len, heads, DIM, device="cuda").bfloat16()
    cache = oa.PagedKVCache.from_arrays(array, **options)
    for window in (None, (100, 0)):
        given = {"return_lse": True, "window": window, "seq_lens": lens, "block_table": torch.tensor(table).cuda()}
        o, lse = oa.decode(q, cache, **given)
        kernel = kernel_of(oa.decode, q, cache, **given)
        for b, n in enumerate(lengths):
            for i in range(q_len):
                end = n - q_len + i + 1
                begin = 0 if window is None else max(end - 1 - 100, 0)
                want, want_lse, _ = expected(q[b, i], meant[b].of(kernel)[begin:end])
                assert (o[b, i].double() - want).norm() / want.norm() < BOUND["bfloat16"], (b, i)
                assert ((lse[b, :, i].double() - want_lse).abs() < OF_SCORES).all(), (b, i)


@pytest.mark.parametrize("octaves", [0, 5])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_scales_of_any_value(heads: int, octaves: int) -> None:
    """Products of codes and scales that no 16 bits hold, groups up to 2^10 apart, and groups of zeros."""
    generator = torch.Generator("cuda").manual_seed(heads)
    rows = torch.randn(3000, DIM, device="cuda", generator=generator)
    groups = rows[:, :DIM_V].view(-1, 4, 128)
    groups *= torch.exp2(octaves * (2 * torch.rand(3000, 4, 1, device="cuda", generator=generator) - 1))
    groups[::7, 2] = 0
    bytes_, meant = stored(rows, "656")
    array, options = dressed(bytes_.view(1, -1, 1, 656), "656")
    # Scores of a few units, whatever the groups are.
    q = torch.randn(1, 1, heads, DIM, device="cuda", generator=generator)
    q = (q / meant.exact.pow(2).mean(0).sqrt().float()).bfloat16()
    lens, cache = torch.tensor([3000], dtype=torch.int32, device="cuda"), oa.KVCache.from_arrays(array, **options)
    o, lse = oa.decode(q, cache, seq_lens=lens, return_lse=True)
    want, want_lse, _ = expected(q[0, 0], meant.of(kernel_of(oa.decode, q, cache, seq_lens=lens, return_lse=True)))
    error = (o[0, 0].double() - want).view(heads, 4, 128).norm(dim=(0, 2)) / want.view(heads, 4, 128).norm(dim=(0, 2))
    assert (error < BOUND["bfloat16"]).all(), error.tolist()
    assert ((lse[0, :, 0].double() - want_lse).abs() < OF_SCORES).all()


def test_a_wide_batch_of_rows8() -> None:
    """Keys that are divided, and maxima that grow."""
    for fmt in FORMATS:
        rows = torch.randn(20000, DIM, device="cuda") * (1 + 0.0005 * torch.arange(20000, device="cuda")[:, None])
        bytes_, meant = stored(rows, fmt)
        array, options = dressed(bytes_.view(1, -1, 1, bytes_.shape[-1]), fmt)
        q = torch.randn(1, 1, 128, DIM, device="cuda").bfloat16()
        lens = torch.tensor([20000], dtype=torch.int32, device="cuda")
        cache = oa.KVCache.from_arrays(array, **options)
        o, lse = oa.decode(q, cache, seq_lens=lens, return_lse=True)
        kernel = kernel_of(oa.decode, q, cache, seq_lens=lens, return_lse=True)
        want, want_lse, _ = expected(q[0, 0], meant.of(kernel))
        assert (o[0, 0].double() - want).norm() / want.norm() < BOUND["bfloat16"]
        assert ((lse[0, :, 0].double() - want_lse).abs() < OF_SCORES).all()


def test_compiled() -> None:
    pool, meant, options = pool_of(20, 64, "656", "bfloat16")
    cache = oa.PagedKVCache.from_arrays(pool, **options)
    indices, _, _ = lists_of(4, 100, len(meant))
    q = torch.randn(4, 16, DIM, device="cuda").bfloat16()

    def call(q: Any, indices: Any) -> Any:
        return oa.attention_sparse(q, cache, indices=indices, return_lse=True)

    with torch.no_grad():
        for got, want in zip(torch.compile(call, backend="aot_eager")(q, indices), call(q, indices), strict=True):
            assert torch.equal(got, want)
