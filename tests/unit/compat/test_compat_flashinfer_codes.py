"""FlashInfer's functions over pages in e4m3, beside attention of code times scale in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest

from omniattn.errors import DtypeError, ShapeError, UnsupportedError

torch = pytest.importorskip("torch")
from omniattn.compat import flashinfer as fi  # noqa: E402
from tests.unit.compat.compat_cases import close, naive, randoms, starts  # noqa: E402
from tests.unit.compat.flashinfer_cases import (  # noqa: E402
    BOUND,
    DIM,
    HEADS,
    KV,
    WORKSPACE,
    Requests,
    buffers,
    int32,
    plan_of,
)

pytestmark = pytest.mark.frameworks

E4M3 = torch.float8_e4m3fn
SCALES: list[tuple[Any, Any]] = [
    (None, None), (0.5, 2.0), (torch.tensor([0.5]), torch.tensor([2.0])), (torch.tensor(0.75), None),
    (torch.tensor([0.5, 1.25]), torch.tensor([2.0, 0.25])), (torch.tensor([0.5]), torch.tensor([2.0, 0.25])),
    (0.25, torch.tensor([2.0, 0.25])), (torch.tensor([0.5, 1.25]), 3.0),
]  # fmt: skip


def plan_e4m3(x: Requests, dtype: Any, **options: Any) -> Any:
    return plan_of(x)[0], {"q_data_type": dtype, "kv_data_type": E4M3, **options}


def check(x: Requests, got: Any, q: Any, rows: list[int], k_scale: Any, v_scale: Any, **score: Any) -> None:
    k_scale, v_scale = (torch.as_tensor(1.0 if s is None else s).double().expand(KV) for s in (k_scale, v_scale))
    at = 0
    for n, (k, v) in zip(rows, x.keys, strict=True):
        own = slice(at, at + n)
        keys, values = k.double() * k_scale[:, None], v.double() * v_scale[:, None]
        o, lse = naive(q[None, own].double(), keys[None], values[None], **score)
        assert close(got[0][own].double(), o[0], BOUND[q.dtype] * max(1.0, float(v_scale.max())) * 1.5)
        assert close(got[1][own].double(), lse[0].T / math.log(2), 5e-5)
        at += n
    assert got[0].dtype == q.dtype


@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_over_pages(page: int, layout: str, dtype: Any) -> None:
    x = Requests([7, 0, 33, 20, 1], page, layout, E4M3, together=page != 5)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    shape, options = plan_e4m3(x, dtype)
    for rows, causal in (([1] * 5, False), ([3, 0, 16, 2, 1], True), ([2] * 5, True), ([1, 0, 30, 17, 1], True)):
        (q,) = randoms((sum(rows), HEADS, DIM), seed=3, dtype=dtype)
        prefill.plan(starts(rows), *x.tables, *shape, causal=causal, window_left=6, **options)
        wrappers: list[Any] = [prefill]
        if len({*rows}) == 1:
            decode.plan(*x.tables, *shape, q_len_per_req=rows[0], window_left=6, **options)
            wrappers.append(decode)
        for wrapper in wrappers:
            for k_scale, v_scale in SCALES:
                got = wrapper.run(q, x.pool, k_scale=k_scale, v_scale=v_scale, return_lse=True)
                check(x, got, q, rows, k_scale, v_scale, causal=causal, window=(6, 0))
            out = torch.empty_like(q)
            assert wrapper.run(q, x.pool, k_scale=k_scale, v_scale=v_scale, out=out) is out
            assert torch.equal(out, got[0])


def test_no_rows() -> None:
    x = Requests([7, 3], 5, dtype=E4M3)
    q = torch.zeros(0, HEADS, DIM, dtype=torch.float16)
    shape, options = plan_e4m3(x, torch.float16)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(int32(0), int32(), int32(), *shape, **options)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    prefill.plan(int32(0, 0, 0), *x.tables, *shape, **options)
    for w in (wrapper, prefill):
        out, lse = w.run(q, x.pool, return_lse=True)
        assert (out.shape, lse.shape) == ((0, HEADS, DIM), (0, HEADS))


def test_a_graph_of_drafts() -> None:
    """max_token_per_sequence says that there are few, whatever the first plan has."""
    x = Requests([7, 33, 12], 5, dtype=E4M3)
    names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    given = dict(zip(names, buffers(3, 40), strict=True))
    shape, options = plan_e4m3(x, torch.float16)
    rows = [8, 8, 1]

    def made() -> Any:
        qo = torch.zeros(4, dtype=torch.int32)
        return fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True, qo_indptr_buf=qo, **given)

    (q,) = randoms((17, HEADS, DIM), seed=3, dtype=torch.float16)
    for said in ({}, {"max_token_per_sequence": 8}):
        wrapper = made()
        wrapper.plan(starts(rows), *x.tables, *shape, causal=True, **said, **options)
        check(x, wrapper.run(q, x.pool, return_lse=True), q, rows, None, None, causal=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_compiled_graph(backend: str) -> None:
    x = Requests([7, 33], 5, dtype=E4M3)
    shape, options = plan_e4m3(x, torch.float16)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*x.tables, *shape, **options)
    (q,) = randoms((2, HEADS, DIM), seed=3, dtype=torch.float16)

    def step(q: Any, pool: Any, scale: Any) -> Any:
        out, lse = wrapper.run(q * 2, pool, return_lse=True, k_scale=scale, v_scale=2.0)
        return out + 1, lse

    torch._dynamo.reset()
    scale = torch.tensor([0.5, 1.25])
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    assert all(map(torch.equal, compiled(q, x.pool, scale), step(q, x.pool, scale)))
    torch._dynamo.reset()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_new_tokens(layout: str) -> None:
    """Codes come back as the bytes that they were; 16 bits are rounded to the nearest one."""
    x = Requests([256, 0, 4], 5, layout, E4M3)
    every = torch.arange(256, dtype=torch.uint8)[:, None, None].expand(256, KV, DIM).contiguous().view(E4M3)
    new = [256, 0, 4]
    request, at = fi.get_batch_indices_positions(starts(new), int32(*x.lengths), sum(new) + 2)
    tail = torch.full((6, KV, DIM), 1.3).to(E4M3)
    k = torch.cat([every, tail])
    (wide,) = randoms((262, KV, DIM), seed=5, dtype=torch.bfloat16)
    pools = []
    tables = x.indices, x.indptr, x.last
    for tokens in (k, wide):
        pool = torch.full(x.pool.shape, math.nan).to(E4M3)
        fi.append_paged_kv_cache(tokens, tokens, request, at, pool, *tables, layout)
        pools.append(pool if layout == "NHD" else pool.transpose(2, 3))
    codes = k.view(torch.uint8).clone()
    for pool, tokens in zip(pools, (k, wide.to(E4M3)), strict=True):
        for b, first in ((0, 0), (2, 256)):
            for t in range(new[b]):
                page = pool[int(x.indices[int(x.indptr[b]) + t // 5]), :, t % 5].float()
                want = tokens[first + t].float()
                assert torch.equal(page.nan_to_num(1e9), want.expand(2, KV, DIM).nan_to_num(1e9))
                assert torch.equal(page.signbit() & ~page.isnan(), (want.signbit() & ~want.isnan()).expand(2, KV, DIM))
        assert int((~pool.float().isnan()).sum()) == int((~tokens[:260].float().isnan()).sum()) * 2
    assert torch.equal(codes, k.view(torch.uint8))
    with pytest.raises(DtypeError, match="'append_key'"):
        fi.append_paged_kv_cache(k, k, request, at, x.pool.bfloat16(), *tables, layout)


def test_what_is_not_served() -> None:
    x = Requests([7, 33], 5, dtype=E4M3)
    shape, options = plan_e4m3(x, torch.float16)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(UnsupportedError, match=r"head_dim=40 of torch.float8_e4m3fn"):
        decode.plan(*x.tables, HEADS, KV, 40, 5, **options)
    with pytest.raises(UnsupportedError, match=r"What works: torch.float16 or torch.float8_e4m3fn"):
        decode.plan(*x.tables, *shape, **options | {"kv_data_type": torch.float8_e5m2})
    decode.plan(*x.tables, *shape, **options)
    q = torch.zeros(2, HEADS, DIM, dtype=torch.float16)
    for error, match, given in (
        (ShapeError, "'k_scale'", {"k_scale": torch.ones(2, KV)}),
        (ShapeError, "'v_scale'", {"v_scale": torch.ones(3)}),
        (DtypeError, "'v_scale'", {"v_scale": torch.ones(1).half()}),
        (UnsupportedError, "q_scale", {"q_scale": torch.ones(1)}),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            decode.run(q, x.pool, **given)
    with pytest.raises(DtypeError, match="'paged_kv_cache'"):
        decode.run(q, x.pool.to(torch.float16))
