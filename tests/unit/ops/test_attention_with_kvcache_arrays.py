"""``attention_with_kvcache`` over caches on the caller's arrays: results of own caches, strides that kernels get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.plan.with_cache import plan_with_cache
from omniattn.problems import AttentionProblem, DecodeProblem, Pages, Target
from omniattn.testing import normal
from omniattn.testing.pages import NOWHERE
from tests.foreign_pools import memory_shape, planes
from tests.unit.launch.launch_fakes import explain_as_on_gpu

HEADS, HEADS_KV, DIM = 4, 2, 16
LIKE = np.zeros(1, np.float16)
#: Order of the memory, order of the dimensions that are given, and whether K and V are given as one array.
FORMS = {
    "NHD": ("two pools", "NHD", False),
    "pairs": ("pairs of blocks", "NHD", False),
    "padded": ("padded rows", "NHD", False),
    "HND": ("BHLNC", "HND", False),
    "one row, NHD": ("BNHC", "NHD", True),
    "one row, HND": ("BHNC", "HND", True),
}
#: Strides (block, token, head) of these, of blocks of n tokens and 2 heads of d elements.
STRIDES: dict[str, Callable[[int, int], tuple[int, int, int]]] = {
    "NHD": lambda n, d: (2 * n * d, 2 * d, d),
    "pairs": lambda n, d: (4 * n * d, 2 * d, d),
    "padded": lambda n, d: (2 * n * (d + 24), 2 * (d + 24), d + 24),
    "HND": lambda n, d: (12 * n * d, 2 * d, 6 * n * d),
    "one row, NHD": lambda n, d: (4 * n * d, 4 * d, 2 * d),
    "one row, HND": lambda n, d: (4 * n * d, 2 * d, 2 * n * d),
}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def on_arrays(form: str, cls: Any, blocks: int, tokens: int, heads: int = HEADS_KV, dim: int = DIM) -> Any:
    """A cache on arrays that are NaN."""
    order, layout, joined = FORMS[form]
    memory = np.full(memory_shape(order, blocks, tokens, heads, dim), np.nan, np.float16)
    given = (memory,) if joined else planes(order, memory, blocks, tokens, heads, dim)
    if layout == "HND" and not joined:
        given = tuple(x.swapaxes(1, 2) for x in given)
    return cls.from_arrays(*given, layout=layout)


@pytest.mark.parametrize("page", [0, 1, 3, 16])
@pytest.mark.parametrize("form", FORMS)
def test_results_of_own_caches(form: str, page: int) -> None:
    """Prompts, chunks, single tokens and none; a contiguous cache, page 0, is read by an index."""
    new, tokens = [1, 7, 0, 20], [9, 13, 5, 30]
    read, places = [0, 1, 2, 3], {"seq_lens": ints(*tokens)}
    if page:
        counts = [-(-n // page) for n in tokens]
        order = np.random.default_rng(page).permutation(sum(counts) + 2)
        table = places["block_table"] = np.full((4, max(counts)), NOWHERE, np.int32)
        for b, count in enumerate(counts):
            table[b, :count], order = order[:count], order[count:]
        caches = [on_arrays(form, oa.PagedKVCache, sum(counts) + 2, page)]
        caches.append(oa.PagedKVCache(sum(counts) + 2, page, HEADS_KV, DIM, like=LIKE, k_dtype="fp16"))
    else:
        read = [3, 0, 0, 1]
        caches = [on_arrays(form, oa.KVCache, 4, 33), oa.KVCache(4, 33, HEADS_KV, DIM, like=LIKE, k_dtype="fp16")]
    k, v = (normal((sum(tokens), HEADS_KV, DIM), seed, "float32").astype(np.float16) for seed in (1, 2))
    for cache in caches:
        oa.append(cache, k, v, cu_seqlens=np.cumsum([0, *tokens]).astype(np.int32), **places)
    for plane in (caches[0].k, caches[0].v):
        assert np.isfinite(plane).sum() == k.size
    if not page:
        places = {"seq_lens": ints(*(tokens[b] for b in read)), "batch_index": ints(*read)}
    starts = {"cu_seqlens_q": np.cumsum([0, *new]).astype(np.int32), "max_seqlen_q": 20}
    rows = normal((sum(new) + 2, HEADS, DIM), 3, "float32")
    batches = [normal((4, q_len, HEADS, DIM), q_len, "float32") for q_len in (1, 5, 20)]
    for q, more in ((rows, starts), *((x, {}) for x in batches)):
        for options in ({}, {"causal": False}, {"window": (4, -1), "softcap": 3.0}):
            made, expected = (
                oa.attention_with_kvcache(q, cache, **places, **more, **options, return_lse=True) for cache in caches
            )
            for a, b in zip(made, expected, strict=True):
                np.testing.assert_array_equal(a, b)
            assert np.isfinite(made[0]).all()


# What a GPU is told


def explained(cache: Any, q: Any, **more: Any) -> Any:
    """The problem of a call of four sequences."""
    places: dict[str, Any] = {"seq_lens": np.full(4, 30, np.int32), **more}
    if cache.paged:
        places["block_table"] = np.zeros((4, 7), np.int32)
    return oa.explain(oa.attention_with_kvcache, q, cache, **places).problem


@pytest.mark.parametrize("cc", [(9, 0), (8, 0)], ids=["9.0", "8.0"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_strides(form: str, paged: bool, cc: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    explain_as_on_gpu(monkeypatch, cc)
    blocks, tokens, dim = (20, 16, 64) if paged else (5, 300, 64)
    cache = on_arrays(form, oa.PagedKVCache if paged else oa.KVCache, blocks, tokens, dim=dim)
    block, token, head = STRIDES[form](tokens, dim)
    index = {} if paged else {"batch_index": ints(4, 0, 0, 2)}
    packed = {"cu_seqlens_q": ints(0, 40, 41, 41, 90), "max_seqlen_q": 49}
    for q, more in ((np.zeros((4, 40, 4, dim), np.float16), {}), (np.zeros((90, 4, dim), np.float16), packed)):
        problem = explained(cache, q, **index, **more)
        kernels = problem.kernels
        assert isinstance(kernels, AttentionProblem)
        assert kernels.strides is not None
        assert kernels.strides.k == kernels.strides.v == (block, token, head)
        assert kernels.pages == (Pages(16, 20, 7, 7) if paged else Pages(300, 5, 1, 0, False, True))
        assert kernels.tensor_maps == (cc == (9, 0))
        (record, *_) = plan_with_cache(problem, Target(cc, 232448, 132), None).records
        for plane in "kv" if cc == (9, 0) else "":
            (found,) = (m for m in record.tensor_maps if m.operand == f"cache.{plane}")
            assert found.dims == (dim, tokens, HEADS_KV, blocks)
            assert found.strides_bytes == (2 * token, 2 * head, 2 * block)
    few = explained(cache, np.zeros((4, 3, 4, dim), np.float16), **index)
    assert isinstance(few.kernels, DecodeProblem)
    assert few.kernels.cache.paged  # by an index too: blocks, one a sequence
    assert few.kernels.cache.strides == (block, head, token)
    assert (few.kernels.num_blocks, few.kernels.block_size) == (blocks, tokens)


@pytest.mark.parametrize(("blocks", "tokens", "heads", "strides"), [
    (5, 1, 2, (128, 0, 64)), (5, 16, 1, (1024, 64, 0)), (1, 16, 2, (0, 128, 64)),
])  # fmt: skip
def test_extents_of_one(
    blocks: int, tokens: int, heads: int, strides: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever strides their arrays have: problems have 0, tensor maps a number that is allowed."""
    explain_as_on_gpu(monkeypatch, (9, 0))
    shape = (blocks, tokens, heads, 64)
    odd = [
        np.lib.stride_tricks.as_strided(x, strides=[6 if n == 1 else s for n, s in zip(shape, x.strides, strict=True)])
        for x in (np.zeros(shape, np.float16), np.zeros(shape, np.float16))
    ]
    problem = explained(oa.PagedKVCache.from_arrays(*odd), np.zeros((4, 40, 4, 64), np.float16))
    assert problem.kernels.strides.k == problem.kernels.strides.v == strides
    block, token, head = strides
    (record, *_) = plan_with_cache(problem, Target((9, 0), 232448, 132), None).records
    for found in record.tensor_maps:
        if found.operand.startswith("cache"):
            assert found.strides_bytes == tuple(2 * s or 16 for s in (token, head, block))
