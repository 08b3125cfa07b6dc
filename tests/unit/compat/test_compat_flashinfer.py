"""omniattn.compat.flashinfer on the CPU, beside attention written out in float64."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from omniattn.compat import flashinfer as fi  # noqa: E402
from tests.unit.compat.compat_cases import close, randoms, starts  # noqa: E402
from tests.unit.compat.flashinfer_cases import DIM, HEADS, KV, WORKSPACE, Requests, buffers, int32, plan_of  # noqa: E402

pytestmark = pytest.mark.frameworks

#: Names of the originals, and those of the expected computation.
SCORES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"causal": True, "window_left": 3, "logits_soft_cap": 1.5}, {"causal": True, "window": (3, -1), "softcap": 1.5}),
    ({"window_left": 0, "sm_scale": 0.3}, {"window": (0, -1), "scale": 0.3}),
]


@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_over_pages(page: int, layout: str, dtype: Any) -> None:
    x = Requests([7, 0, 33, 20, 1], page, layout, dtype, together=page != 5)
    rows = [5, 2, 0, 20, 1]
    (q,) = randoms((sum(rows), HEADS, DIM), seed=3, dtype=dtype)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    for score, same in SCORES:
        shape, options = plan_of(x, **score)
        wrapper.plan(starts(rows), *x.tables, *shape, **options)
        x.check(wrapper.run(q, x.pool, return_lse=True), q, rows, **same)
        assert torch.equal(wrapper.run(q, x.pool), wrapper.run_return_lse(q, x.pool)[0])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_requests_of_a_few_rows(rows: int, page: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of the decode wrapper, packed rows of the other one; as many of each that do not depend on the others."""
    module: Any = importlib.import_module("omniattn.compat.flashinfer_wrappers")
    seen: list[Any] = []
    run = module.attention_with_kvcache
    monkeypatch.setattr(module, "attention_with_kvcache", lambda *a, **b: seen.append((a, b)) or run(*a, **b))
    x = Requests([7, 33, 20, 4], page, layout)
    (q,) = randoms((4 * rows, HEADS, DIM), seed=3, dtype=x.dtype)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    for window in (-1, 4):
        shape, options = plan_of(x, window_left=window)
        decode.plan(*x.tables, *shape, q_len_per_req=rows, **options)
        for fixed in ({}, {"fixed_split_size": 4}, {"disable_split_kv": True}):
            prefill.plan(starts([rows] * 4), *x.tables, *shape, causal=True, **fixed, **options)
            for wrapper in (decode, prefill):
                got = wrapper.run(q, x.pool, return_lse=True)
                x.check(got, q, [rows] * 4, causal=True, window=(window, -1))
                (given, _), named = seen.pop()
                packed = wrapper is prefill
                assert given.shape == ((4 * rows, HEADS, DIM) if packed else (4, rows, HEADS, DIM))
                assert named["max_seqlen_q"] == (rows if packed else None)
                assert (named["cu_seqlens_q"] is not None) == packed
                assert named["deterministic"] == (packed and bool(fixed))
                assert seen == []


def test_empty_requests_and_batches() -> None:
    x = Requests([0, 6, 0], 5)
    x.last = int32(5, 1, 3)  # of a request without pages it says nothing
    (q,) = randoms((3, HEADS, DIM), seed=3, dtype=x.dtype)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    shape, options = plan_of(x)
    wrapper.plan(*x.tables, *shape, **options)
    out, lse = wrapper.run(q, x.pool, return_lse=True)
    x.check((out, lse), q, [1, 1, 1])
    assert bool((out[0] == 0).all())
    assert bool((lse[2] == -math.inf).all())
    wrapper.plan(int32(0), int32(), int32(), *shape, **options)
    out, lse = wrapper.run(q[:0], x.pool, return_lse=True)
    assert (out.shape, lse.shape) == ((0, HEADS, DIM), (0, HEADS))
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    prefill.plan(int32(0, 0, 0, 0), *x.tables, *shape, **options)
    assert prefill.run(q[:0], x.pool).shape == (0, HEADS, DIM)


def test_pages_that_do_not_begin_with_the_first_of_all() -> None:
    """Engines give a part of the indptr of all requests, with all pages."""
    x = Requests([7, 12, 20], 5)
    (q,) = randoms((2, HEADS, DIM), seed=3, dtype=x.dtype)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    shape, options = plan_of(x)
    wrapper.plan(starts([1, 1]), x.indptr[1:], x.indices, x.last[1:], *shape, **options)
    x.keys = x.keys[1:]
    x.check(wrapper.run(q, x.pool, return_lse=True), q, [1, 1])


def test_outputs_and_scales() -> None:
    x = Requests([7, 33], 16)
    rows = [3, 5]
    (q,) = randoms((8, HEADS, DIM), seed=3, dtype=x.dtype)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    shape, options = plan_of(x, causal=True)
    wrapper.plan(starts(rows), *x.tables, *shape, **options)
    out, lse = torch.full_like(q, math.nan), torch.full((8, HEADS), math.nan)
    got = wrapper.run(
        q, x.pool, q_scale=0.5, k_scale=0.75, v_scale=2.0, out=out, lse=lse, return_lse=True, enable_pdl=True,
        window_left=-1,
    )  # fmt: skip
    assert got[0] is out
    assert got[1] is lse
    x.check(got, q, rows, causal=True, scale=0.375 / 8, v_scale=2.0)
    lse.fill_(math.nan)
    assert isinstance(wrapper.run(q, x.pool, lse=lse), torch.Tensor)
    plain = wrapper.run(q, x.pool, return_lse=True)
    assert torch.equal(lse, plain[1])
    other = wrapper.run(q, x.pool, return_lse=True, lse_base="ln", lse_layout="HN")[1]
    assert close(other.double(), plain[1].double().T * math.log(2), 1e-6)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    with_sinks = wrapper.run(q, x.pool, return_lse=True, sinks=sinks)[1]
    assert close(with_sinks.double(), torch.logaddexp2(plain[1].double(), sinks.double() / math.log(2)), 5e-5)
    batch = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    batch.plan(*x.tables, *shape, q_len_per_req=4, q_data_type=x.dtype)
    into = torch.full_like(q, math.nan)
    assert batch.run(q, x.pool, out=into, v_scale=0.5) is into
    assert torch.equal(into, batch.run(q, x.pool) * 0.5)


def test_old_names_take_options_of_the_scores() -> None:
    x = Requests([7, 33], 16)
    (q,) = randoms((8, HEADS, DIM), seed=3, dtype=x.dtype)
    shape, options = plan_of(x)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(starts([3, 5]), *x.tables, *shape, **options)
    score = {"causal": True, "window_left": 4, "logits_soft_cap": 2.0, "sm_scale": 0.2}
    same = {"causal": True, "window": (4, -1), "softcap": 2.0, "scale": 0.2}
    got = wrapper.forward_return_lse(q, x.pool, **score)
    x.check(got, q, [3, 5], **same)
    assert torch.equal(got[0], wrapper.forward(q, x.pool, **score))
    # What engines look at.
    assert (wrapper._causal, wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (True, 4, 2.0, 0.2)
    wrapper.end_forward()
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    decode.begin_forward(*x.tables, *shape, "NONE", -1, None, x.dtype)
    got = decode.forward_return_lse(q[:2], x.pool, sm_scale=0.2, k_scale=0.5, v_scale=2.0)
    x.check(got, q[:2], [1, 1], scale=0.1, v_scale=2.0)
    assert torch.equal(got[0], decode.forward(q[:2], x.pool, sm_scale=0.2, k_scale=0.5, v_scale=2.0))
    assert not decode.is_cuda_graph_enabled
    decode.reset_workspace_buffer(WORKSPACE, WORKSPACE)
    with pytest.warns(DeprecationWarning, match="q_len_per_req"):
        decode.run(q[:2], x.pool, q_len_per_req=1)


def test_tables_and_lengths_that_are_there() -> None:
    x = Requests([7, 33, 1], 5)
    (q,) = randoms((3, HEADS, DIM), seed=3, dtype=x.dtype)
    counts = x.indptr.diff().tolist()
    table = torch.full((3, max(counts)), -77, dtype=torch.int32)
    for b, count in enumerate(counts):
        table[b, :count] = x.indices[int(x.indptr[b]) :][:count]
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    shape, options = plan_of(x)
    lengths = torch.tensor(x.lengths)  # int64, as host arrays may be
    decode.plan(x.indptr, int32(), x.last, *shape, block_tables=table, seq_lens=lengths, **options)
    x.check(decode.run(q, x.pool, return_lse=True), q, [1, 1, 1])
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    prefill.plan(starts([1, 1, 1]), *x.tables, *shape, max_sequence_kv=33, max_token_per_sequence=4, **options)
    x.check(prefill.run(q, x.pool, return_lse=True), q, [1, 1, 1])


def test_batch_invariance() -> None:
    x = Requests([70, 33], 16)
    (q,) = randoms((2, HEADS, DIM), seed=3, dtype=x.dtype)
    shape, options = plan_of(x)
    for name in ({"fixed_split_size": 4}, {"disable_split_kv": True}):
        for wrapper, rows in ((fi.BatchDecodeWithPagedKVCacheWrapper, ()),
                              (fi.BatchPrefillWithPagedKVCacheWrapper, (starts([1, 1]),))):  # fmt: skip
            made = wrapper(WORKSPACE)
            made.plan(*rows, *x.tables, *shape, **options, **name)
            assert made._planned.invariant
            x.check(made.run(q, x.pool, return_lse=True), q, [1, 1])


# CUDA graphs: what a captured run() reads are the same tensors after each plan()


def test_a_graph_s_tensors_are_written_in_place() -> None:
    buffered = buffers(3, 40)
    wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffered)
    assert wrapper.is_cuda_graph_enabled
    (q,) = randoms((3, HEADS, DIM), seed=3, dtype=torch.float16)
    first: Any = None
    for seed, lengths in enumerate(([7, 0, 33], [1, 40, 2], [0, 0, 5])):
        x = Requests(lengths, 5, seed=seed)
        shape, options = plan_of(x)
        wrapper.plan(*x.tables, *shape, **options)
        for b, given in zip(buffered, x.tables, strict=True):
            assert torch.equal(b[: len(given)], given)
        plan = wrapper._planned
        first = first or plan
        assert plan.seq_lens is first.seq_lens
        assert plan.table is first.table
        assert plan._replace(seq_lens=None, table=None) == first._replace(seq_lens=None, table=None)
        x.check(wrapper.run(q, x.pool, return_lse=True), q, [1, 1, 1])
    # One request may have all pages that the buffer has room for.
    x = Requests([0, 200, 0], 5)
    wrapper.plan(*x.tables, *shape, **options)
    x.check(wrapper.run(q, x.pool, return_lse=True), q, [1, 1, 1])
    with pytest.raises(ValueError, match="'indptr': expected 3 requests"):
        wrapper.plan(int32(0, 1), int32(0), int32(1), *shape, **options)
    with pytest.raises(ValueError, match="'indices': expected at most 40 pages"):
        wrapper.plan(int32(0, 41, 41, 41), torch.zeros(41, dtype=torch.int32), int32(1, 0, 0), *shape, **options)
    with pytest.raises(ValueError, match="'q_len_per_req': expected 1, as the first plan"):
        wrapper.plan(*x.tables, *shape, q_len_per_req=2, **options)
    assert int(buffered[0][-1]) == 40  # nothing was written


def test_a_graph_of_packed_rows() -> None:
    names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    qo = torch.zeros(4, dtype=torch.int32)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE, use_cuda_graph=True, qo_indptr_buf=qo, **dict(zip(names, buffers(3, 40), strict=True))
    )
    first: Any = None
    for seed, (rows, lengths) in enumerate((([2, 5, 3], [7, 6, 33]), ([1, 1, 1], [9, 40, 2]), ([9, 0, 1], [9, 0, 5]))):
        x = Requests(lengths, 5, seed=seed)
        (q,) = randoms((sum(rows), HEADS, DIM), seed=3, dtype=torch.float16)
        shape, options = plan_of(x, causal=True)
        wrapper.plan(starts(rows), *x.tables, *shape, **options)
        plan = wrapper._planned
        first = first or plan
        assert plan.starts is qo
        assert (plan.longest, plan.q_len) == (10, 0)
        assert plan.table is first.table
        x.check(wrapper.run(q, x.pool, return_lse=True), q, rows, causal=True)
    with pytest.raises(ValueError, match="'qo_indptr': expected at most 10 rows"):
        wrapper.plan(starts([9, 1, 1]), *x.tables, *shape, **options)
    alike = fi.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE, use_cuda_graph=True, qo_indptr_buf=qo, **dict(zip(names, buffers(3, 40), strict=True))
    )
    x = Requests([7, 6, 33], 5)
    alike.plan(starts([2, 2, 2]), *x.tables, *shape, uniform_q_len=2, max_sequence_kv=40, **options)
    assert (alike._planned.longest, alike._planned.q_len) == (2, 0)
    assert alike._planned.table.shape == (3, 8)
    x.check(alike.run(q[:6], x.pool, return_lse=True), q[:6], [2, 2, 2], causal=True)
    with pytest.raises(ValueError, match="'qo_indptr': expected 2 rows of each request"):
        alike.plan(starts([1, 2, 2]), *x.tables, *shape, **options)
    with pytest.raises(ValueError, match="'paged_kv_indices': expected at most 8 pages of a request"):
        alike.plan(starts([2, 2, 2]), int32(0, 9, 9, 9), torch.arange(9, dtype=torch.int32), int32(1, 0, 0), *shape,
                   **options)  # fmt: skip


def test_a_graph_s_table_has_a_bound() -> None:
    plans: Any = importlib.import_module("omniattn.compat.flashinfer_plans")
    for room, batch, columns in ((40, 3, 40), (2**19, 256, 2**12), (2**21, 256, 2**13), (2**21, 1, 2**21), (5, 0, 5)):
        table, _ = plans.table_of_graph(torch.empty(room, dtype=torch.int32), batch)
        assert table.shape == (batch, columns)
        assert table.is_contiguous()
    assert [plans.rounded(n) for n in (0, 1, 7, 8, 9, 15, 17, 127, 129)] == [1, 1, 7, 8, 10, 16, 20, 128, 160]


def test_graphs_on_one_buffer_share_a_table() -> None:
    """Engines have a graph for each batch, on one buffer of indices, which each plan writes anew."""
    starts_of, indices, last = buffers(3, 40)
    shape, options = plan_of(Requests([1], 5))
    wrappers = [
        fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, starts_of[: n + 1], indices, last[:n]) for n in (3, 2)
    ]
    for _ in range(2):
        for wrapper, lengths in zip(wrappers, ([7, 0, 33], [40, 2]), strict=True):
            x = Requests(lengths, 5)
            (q,) = randoms((len(lengths), HEADS, DIM), seed=3, dtype=torch.float16)
            wrapper.plan(*x.tables, *shape, **options)
            x.check(wrapper.run(q, x.pool, return_lse=True), q, [1] * len(lengths))
    tables = [wrapper._planned.table for wrapper in wrappers]
    assert [table.shape for table in tables] == [(3, 40), (2, 40)]
    assert tables[0].data_ptr() == tables[1].data_ptr()
    other = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers(2, 40))
    x = Requests([40, 2], 5)
    other.plan(*x.tables, *shape, **options)
    assert other._planned.table.data_ptr() != tables[0].data_ptr()


def test_a_graph_whose_results_do_not_depend_on_the_batch() -> None:
    x = Requests([40, 2], 5)
    (q,) = randoms((2, HEADS, DIM), seed=3, dtype=x.dtype)
    shape, options = plan_of(x, disable_split_kv=True)
    wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers(2, 40))
    with pytest.raises(ValueError, match="disable_split_kv"):
        wrapper.plan(*x.tables, *shape, **options)
    table = torch.zeros((2, 9), dtype=torch.int32)
    for b in range(2):
        own = x.indices[int(x.indptr[b]) : int(x.indptr[b + 1])]
        table[b, : len(own)] = own
    wrapper.plan(*x.tables, *shape, block_tables=table, **options)
    x.check(wrapper.run(q, x.pool, return_lse=True), q, [1, 1])
    wrapper.plan(*x.tables, *shape, **options)
    assert wrapper._planned.table.shape == (2, 9)
    x.check(wrapper.run(q, x.pool, return_lse=True), q, [1, 1])


def test_fast_plan() -> None:
    x = Requests([7, 33], 5)
    (q,) = randoms((2, HEADS, DIM), seed=3, dtype=x.dtype)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    shape, options = plan_of(x)
    wrapper.plan(*x.tables, *shape, **options)
    want = wrapper.run(q, x.pool)
    fi.fast_decode_plan(wrapper, *x.tables, *shape, data_type=x.dtype, global_override_indptr_cpu=x.indptr.clone())
    assert torch.equal(wrapper.run(q, x.pool), want)
    fi.fast_decode_plan(wrapper, *x.tables, *shape)
    assert torch.equal(wrapper.run(q, x.pool), want)
    with pytest.raises(ValueError, match="'self'"):
        fi.fast_decode_plan(object(), *x.tables, *shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'global_override_indptr_cpu'"):
        fi.fast_decode_plan(wrapper, *x.tables, *shape, global_override_indptr_cpu=int32(0, 1))


# Packed keys, single requests


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("graph", [False, True])
def test_packed_keys(layout: str, graph: bool) -> None:
    given = {}
    if graph:
        given = {name: torch.zeros(4, dtype=torch.int32) for name in ("qo_indptr_buf", "kv_indptr_buf")}
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, layout, graph, **given)
    for dim_v in (DIM, 32):
        for rows, lengths in (([5, 2, 3], [7, 2, 33]), ([1, 0, 4], [40, 3, 0])):
            k, v = randoms((sum(lengths), KV, DIM), (sum(lengths), KV, dim_v), seed=1, dtype=torch.float16)
            (q,) = randoms((sum(rows), HEADS, DIM), seed=3, dtype=torch.float16)
            x = Requests([], 1)
            x.keys = list(zip(k.split(lengths), v.split(lengths), strict=True))
            if layout == "HND":
                k, v = (t.transpose(0, 1).contiguous() for t in (k, v))
            for score, same in SCORES:
                wrapper.plan(starts(rows), starts(lengths), HEADS, KV, DIM, dim_v, q_data_type="float16", **score)
                got = wrapper.run(q, k, v, return_lse=True, q_scale=1.0)
                x.check(got, q, rows, **same)
            out, lse = torch.full_like(got[0], math.nan), torch.full((sum(rows), HEADS), math.nan)
            again = wrapper.run_return_lse(q, k, v, out=out, lse=lse)
            assert again[0] is out
            assert torch.equal(lse, got[1])
            named = {"window_left": 2, "causal": True, "logits_soft_cap": 1.0, "sm_scale": 0.1}
            x.check(wrapper.forward_return_lse(q, k, v, **named), q, rows, window=(2, -1), causal=True, softcap=1.0,
                    scale=0.1)  # fmt: skip
            assert wrapper.forward(q, k, v).shape == got[0].shape
    assert wrapper.is_cuda_graph_enabled is graph
    if graph:
        assert given["kv_indptr_buf"].tolist() == [0, 40, 43, 43]
        assert wrapper._planned.longest == 10
        with pytest.raises(ValueError, match="at most 10 rows"):
            wrapper.plan(starts([9, 1, 1]), starts([40, 3, 0]), HEADS, KV, DIM)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single_requests(layout: str) -> None:
    k, v = randoms((21, KV, DIM), (21, KV, DIM), seed=1, dtype=torch.bfloat16)
    (q,) = randoms((9, HEADS, DIM), seed=3, dtype=torch.bfloat16)
    x = Requests([], 1, dtype=torch.bfloat16)
    x.keys = [(k, v)]
    given = [t.transpose(0, 1).contiguous() if layout == "HND" else t for t in (k, v)]
    for score, same in SCORES:
        got = fi.single_prefill_with_kv_cache(q, *given, kv_layout=layout, return_lse=True, **score)
        x.check(got, q, [9], **same)
        score = {name: value for name, value in score.items() if name != "causal"}
        one = fi.single_decode_with_kv_cache(q[0], *given, layout, return_lse=True, **score)
        x.check((one[0][None], one[1][None]), q[:1], [1], **same)
    got = fi.single_prefill_with_kv_cache_return_lse(q, *given, kv_layout=layout, k_scale=0.5, v_scale=2.0)
    x.check(got, q, [9], scale=0.5 / 8, v_scale=2.0)
    one = fi.single_decode_with_kv_cache(q[0], *given, layout, q_scale=0.5, k_scale=0.5, v_scale=2.0, return_lse=True)
    x.check((one[0][None], one[1][None]), q[:1], [1], scale=0.25 / 8, v_scale=2.0)
    mask = torch.rand(9, 21, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[4] = False
    bits = torch.nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).reshape(-1, 8)
    packed = (bits << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)
    for named in ({"custom_mask": mask}, {"packed_custom_mask": packed, "causal": True}):
        got = fi.single_prefill_with_kv_cache(q, *given, kv_layout=layout, return_lse=True, window_left=9, **named)
        x.check(got, q, [9], mask=mask, window=(9, -1))
        assert bool((got[1][4] == -math.inf).all())


def test_nothing_has_gradients() -> None:
    x = Requests([7, 33], 5)
    q, k, v = randoms((8, HEADS, DIM), (40, KV, DIM), (40, KV, DIM), seed=3, dtype=x.dtype, grad=True)
    shape, options = plan_of(x)
    paged = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    paged.plan(starts([3, 5]), *x.tables, *shape, **options)
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(starts([3, 5]), starts([7, 33]), HEADS, KV, DIM)
    made = [
        *paged.run(q, x.pool.requires_grad_(), return_lse=True, v_scale=2.0), *ragged.run(q, k, v, return_lse=True),
        *fi.single_prefill_with_kv_cache(q, k, v, return_lse=True, v_scale=2.0),
        *fi.single_decode_with_kv_cache(q[0], k, v, return_lse=True),
        *fi.merge_state(q, q[..., 0].float(), q, q[..., 1].float()),
    ]  # fmt: skip
    assert not any(t.requires_grad for t in made)


# States


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_states(dtype: Any) -> None:
    bound = 2e-3 if dtype == torch.float16 else 1e-5
    v, s = randoms((6, 4, HEADS, 24), (6, 4, HEADS), dtype=dtype)
    s = 3 * s.float()
    s[0, 1], s[1, :], s[2, 0] = -math.inf, -math.inf, -math.inf

    def expected(v: Any, s: Any) -> Any:
        total = (s.double() * math.log(2)).logsumexp(1)
        p = torch.exp2(s.double() - (total / math.log(2))[:, None]).nan_to_num()
        return (p[..., None] * v.double()).sum(1), total / math.log(2)

    out, lse = fi.merge_states(v, s)
    want, want_lse = expected(v, s)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert close(out.double(), want, bound)
    assert close(lse.double(), want_lse, 1e-5)
    two = fi.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    want, want_lse = expected(v[:, :2], s[:, :2])
    assert close(two[0].double(), want, bound)
    assert close(two[1].double(), want_lse, 1e-5)
    only = fi.merge_states(v[:, :1], s[:, :1])
    assert torch.equal(only[0], v[:, 0].masked_fill((s[:, 0] == -math.inf)[..., None], 0))
    for mask in (None, torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.uint8)):
        into, sums = v[:, 0].clone(), s[:, 0].clone()
        fi.merge_state_in_place(into, sums, v[:, 1], s[:, 1], mask)
        rows = torch.ones(6, dtype=torch.bool) if mask is None else mask.bool()
        assert torch.equal(into, torch.where(rows[:, None, None], two[0], v[:, 0]))
        assert torch.equal(sums, torch.where(rows[:, None], two[1], s[:, 0]))


# Pages


@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_new_tokens(page: int, layout: str) -> None:
    x = Requests([7, 0, 33, 4], page, layout, together=page == 5)
    new = [3, 0, 10, 4]
    empty = [torch.full_like(t, math.nan) for t in (x.pool if isinstance(x.pool, tuple) else (x.pool,))]
    pool: Any = tuple(empty) if isinstance(x.pool, tuple) else empty[0]
    lengths = fi.get_seq_lens(x.indptr, x.last, page)
    assert lengths.tolist() == x.lengths
    request, at = fi.get_batch_indices_positions(starts(new), lengths, sum(new) + 2)
    assert request.tolist() == [0] * 3 + [2] * 10 + [3] * 4 + [-1] * 2
    assert at.tolist() == [4, 5, 6, *range(23, 33), 0, 1, 2, 3, 0, 0]
    assert request.dtype == at.dtype == torch.int32
    given = [torch.zeros(sum(new) + 2, dtype=torch.int32) for _ in range(2)]
    assert fi.get_batch_indices_positions(starts(new), lengths, sum(new) + 2, *given)[1] is given[1]
    assert torch.equal(given[0], request)
    tails = [[t[n - m :] for t in keys] for keys, n, m in zip(x.keys, x.lengths, new, strict=True)]
    k, v = (torch.cat([*(t[i] for t in tails), torch.full((2, KV, DIM), 7.0)]).half() for i in range(2))
    fi.append_paged_kv_cache(k, v, request, at, pool, x.indices, x.indptr, x.last, layout)
    both = lambda p: p if isinstance(p, tuple) else p.unbind(1)  # noqa: E731
    for made, full in zip(both(pool), both(x.pool), strict=True):
        written = ~made.isnan()
        assert int(written.sum()) == sum(new) * KV * DIM
        assert torch.equal(made[written], full[written])


def test_pages_of_one_token_without_their_dimension() -> None:
    x = Requests([7, 33], 1)
    (q,) = randoms((2, HEADS, DIM), seed=3, dtype=x.dtype)
    shape, options = plan_of(x)
    for layout, at in (("NHD", 2), ("HND", 3)):
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
        wrapper.plan(*x.tables, *shape, **options)
        pool = x.pool if layout == "NHD" else x.pool.transpose(2, 3)
        flat = pool.squeeze(at)
        assert flat.ndim == 4
        x.check(wrapper.run(q, flat, return_lse=True), q, [1, 1])
        x.check(wrapper.run(q, flat.unbind(1), return_lse=True), q, [1, 1])
