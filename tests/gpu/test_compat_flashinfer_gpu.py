"""FlashInfer's wrappers and packed rows of flash_attn_with_kvcache on a GPU, beside attention in float64 on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from omniattn.compat import flash_attn_interface as fa3  # noqa: E402
from omniattn.compat import flashinfer as fi  # noqa: E402
from tests.unit.compat.compat_cases import close, naive, randoms, slices, starts  # noqa: E402
from tests.unit.compat.flashinfer_cases import BOUND, DIM, HEADS, KV, Requests, buffers, plan_of  # noqa: E402

pytestmark = pytest.mark.gpu

#: LSE in base 2 of scores that the tensor cores sum up in fp32.
LSE_BOUND = 1e-3


def cuda(x: Any) -> Any:
    return tuple(map(cuda, x)) if isinstance(x, tuple) else x.cuda()


def check(x: Requests, got: Any, q: Any, rows: list[int], **score: Any) -> None:
    out, lse = x.expected(q, rows, **score)
    assert close(got[0].cpu().double(), out, BOUND[x.dtype])
    assert close(got[1].cpu().double(), lse, LSE_BOUND)


@pytest.mark.parametrize("page", [1, 5, 16, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("on_host", [False, True])
def test_pages(page: int, layout: str, on_host: bool) -> None:
    """Index arrays on the host and on the device, batches and packed rows, of pools that hold NaN behind the tokens."""
    workspace = torch.empty(0, dtype=torch.uint8, device="cuda")
    x = Requests([70, 0, 333, 20, 1], page, layout, together=page != 5)
    tables = x.tables if on_host else cuda(x.tables)
    pool = cuda(x.pool)
    shape, options = plan_of(x)
    for rows, window in (([1] * 5, -1), ([1] * 5, 30), ([50, 0, 130, 20, 1], -1), ([2, 1, 33, 0, 1], 30)):
        (q,) = randoms((sum(rows), HEADS, DIM), seed=3, dtype=x.dtype)
        wrappers = [fi.BatchPrefillWithPagedKVCacheWrapper(workspace, layout)]
        qo = starts(rows) if on_host else starts(rows).cuda()
        wrappers[0].plan(qo, *tables, *shape, causal=True, window_left=window, **options)
        if max(rows) == 1:
            wrappers.append(fi.BatchDecodeWithPagedKVCacheWrapper(workspace, layout))
            wrappers[1].plan(*tables, *shape, window_left=window, **options)
        for wrapper in wrappers:
            got = wrapper.run(q.cuda(), pool, return_lse=True)
            check(x, got, q, rows, causal=True, window=(window, -1))


def test_a_plan_after_the_capture() -> None:
    """Captured once; lengths, pages and rows of each request change by plan()."""
    workspace = torch.empty(0, dtype=torch.uint8, device="cuda")
    names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    given = dict(zip(names, cuda(tuple(buffers(3, 60))), strict=True))
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(
        workspace, use_cuda_graph=True, qo_indptr_buf=torch.zeros(4, dtype=torch.int32, device="cuda"), **given
    )
    decode = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *cuda(tuple(buffers(3, 60))))
    steps = [
        (Requests([33, 300, 7], 16, spare=40), [20, 30, 7]), (Requests([700, 5, 0], 16, seed=1, spare=18), [55, 1, 0]),
        (Requests([16, 17, 400], 16, seed=2, spare=35), [1, 1, 40]),
    ]  # fmt: skip
    memory = torch.zeros(max(len(x.pool) for x, _ in steps), *steps[0][0].pool.shape[1:], dtype=torch.float16).cuda()
    queries = [torch.zeros(n, HEADS, DIM, dtype=torch.float16, device="cuda") for n in (57, 3)]

    def prepare(x: Requests, rows: list[int], on_host: bool) -> list[Any]:
        shape, options = plan_of(x)
        tables = x.tables if on_host else cuda(x.tables)
        prefill.plan(starts(rows), *tables, *shape, causal=True, **options)
        decode.plan(*tables, *shape, **options)
        memory[: len(x.pool)] = x.pool.cuda()
        made = [randoms((n, HEADS, DIM), seed=n, dtype=x.dtype)[0] for n in (sum(rows), 3)]
        for into, q in zip(queries, made, strict=True):
            into.zero_()
            into[: len(q)] = q.cuda()
        return made

    def run() -> list[Any]:
        return [w.run(q, memory, return_lse=True) for w, q in zip((prefill, decode), queries, strict=True)]

    prepare(*steps[0], False)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    for i, (x, rows) in enumerate(steps):
        own = prepare(x, rows, bool(i % 2))
        graph.replay()
        torch.cuda.synchronize()
        check(x, [t[: sum(rows)] for t in made[0]], own[0], rows, causal=True)
        check(x, made[1], own[1], [1, 1, 1])
        assert bool((made[0][0][sum(rows) :] == 0).all())


def test_what_is_not_over_pages() -> None:
    q, k, v = randoms((90, HEADS, DIM), (400, KV, DIM), (400, KV, DIM), seed=3, dtype=torch.float16)
    x = Requests([], 1)
    x.keys = [(k[:70], v[:70]), (k[70:], v[70:])]
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, device="cuda"))
    ragged.plan(starts([30, 60]), starts([70, 330]), HEADS, KV, DIM, causal=True)
    got = ragged.run(q.cuda(), k.cuda(), v.cuda(), return_lse=True)
    check(x, got, q, [30, 60], causal=True)
    x.keys = [(k, v)]
    parts = [fi.single_prefill_with_kv_cache(q.cuda(), k[a:b].cuda(), v[a:b].cuda(), return_lse=True)
             for a, b in ((0, 150), (150, 400))]  # fmt: skip
    check(x, fi.merge_state(*parts[0], *parts[1]), q, [90])
    one = fi.single_decode_with_kv_cache(q[0].cuda(), k.cuda(), v.cuda(), return_lse=True, window_left=100)
    check(x, (one[0][None], one[1][None]), q[:1], [1], window=(100, -1))


@pytest.mark.parametrize("page", [5, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_new_tokens(page: int, layout: str) -> None:
    x = Requests([70, 0, 33, 4], page, layout)
    new = [30, 0, 10, 4]
    pool = torch.full_like(x.pool, math.nan).cuda()
    indptr, indices, last = cuda(x.tables)
    lengths = fi.get_seq_lens(indptr, last, page)
    request, at = fi.get_batch_indices_positions(starts(new).cuda(), lengths, sum(new) + 2)
    tails = [[t[n - m :] for t in keys] for keys, n, m in zip(x.keys, x.lengths, new, strict=True)]
    k, v = (torch.cat([*(t[i] for t in tails), torch.full((2, KV, DIM), 7.0)]).half().cuda() for i in range(2))
    fi.append_paged_kv_cache(k, v, request, at, pool, indices, indptr, last, layout)
    made = pool.cpu()
    written = ~made.isnan()
    assert int(written.sum()) == 2 * sum(new) * KV * DIM
    assert torch.equal(made[written], x.pool[written])


@pytest.mark.parametrize("kind", ["index", "leftpad"])
def test_packed_rows_with_pages(kind: str) -> None:
    """FlashAttention-3's function; new keys are written through rows of the table that cache_batch_idx names."""
    before, rows, new, page, capacity = [50, 0, 120], [30, 1, 6], [30, 1, 6], 16, 160
    k, v = randoms((3, capacity, KV, DIM), (3, capacity, KV, DIM), dtype=torch.bfloat16)
    q, k_new, v_new = randoms((sum(rows) + 1, HEADS, DIM), *[(sum(new) + 2, KV, DIM)] * 2, seed=7, dtype=torch.bfloat16)
    table = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:50].reshape(5, 10).int()
    order, first = ([4, 0, 2], [0, 0, 0]) if kind == "index" else ([0, 1, 2], [7, 0, 20])
    caches = [torch.full((60, page, KV, DIM), math.nan, dtype=torch.bfloat16) for _ in range(2)]
    for cache, source in zip(caches, (k, v), strict=True):
        for b in range(3):
            for t in range(first[b], before[b]):
                cache[int(table[order[b], t // page]), t % page] = source[b, t]
    caches = [cache.cuda() for cache in caches]
    named = {"cache_batch_idx": order} if kind == "index" else {"cache_leftpad": first}
    options = {name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in named.items()}
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q.cuda(), *caches, k_new.cuda(), v_new.cuda(), cache_seqlens=torch.tensor(before, dtype=torch.int32).cuda(),
        page_table=(table if kind == "index" else table[:3]).cuda(), cu_seqlens_q=starts(rows).cuda(), max_seqlen_q=30,
        cu_seqlens_k_new=starts(new).cuda(), causal=True, return_softmax_lse=True, **options,
    )  # fmt: skip
    for b, (own, of_new) in enumerate(zip(slices(rows), slices(new), strict=True)):
        keys, values = (torch.cat([x[b, first[b] : before[b]], y[of_new]])[None] for x, y in ((k, k_new), (v, v_new)))
        ref, ref_lse = naive(q[None, own].double(), keys.double(), values.double(), causal=True)
        assert close(out[own].cpu().double(), ref[0], 2e-2)
        assert close(lse[:, own].cpu().double(), ref_lse[0], LSE_BOUND)
    assert bool((out[-1] == 0).all())
    held = sum(before) - sum(first) + sum(new)
    assert all(int((~cache.isnan()).any(-1).any(-1).sum()) == held for cache in caches)
