"""``attention_with_kvcache``: CPU results beside `attention` of each sequence, what is refused, what a GPU runs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import omniattn as oa
from omniattn.errors import ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from omniattn.launch.structs import ATTN_FWD, ATTN_FWD_SM90
from omniattn.plan import engine
from omniattn.plan.with_cache import plan_with_cache
from omniattn.problems import AttentionProblem, DecodeProblem, Pages, Target, WithCacheProblem
from omniattn.testing import normal
from omniattn.testing.pages import NOWHERE
from tests.unit.launch.launch_fakes import explain_as_on_gpu, fields_of_record

HEADS, HEADS_KV, DIM = 4, 2, 16
LIKE = np.zeros(1, np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Served:
    """Sequences in a cache, what no token owns being NaN, and their new tokens.

    ``lengths``: (new tokens, tokens) of each. ``page``: tokens of a block, 0 for a contiguous cache.
    """

    def __init__(self, lengths: list[tuple[int, int]], page: int, dtype: str = "fp16", dim: int = DIM, **more: Any):
        self.new, self.tokens = [n for n, _ in lengths], [t for _, t in lengths]
        batch, longest = len(lengths), max([1, *self.tokens])
        options = {"like": LIKE, "k_dtype": dtype, **more}
        self.places: dict[str, Any] = {"seq_lens": ints(*self.tokens)}
        if page:
            counts = [-(-t // page) for t in self.tokens]
            order = np.random.default_rng(page).permutation(sum(counts) + 2)
            self.places["block_table"] = table = np.full((batch, max([1, *counts]) + 1), NOWHERE, np.int32)
            for b, count in enumerate(counts):
                table[b, :count], order = order[:count], order[count:]
            self.cache = oa.PagedKVCache(sum(counts) + 2, page, HEADS_KV, dim, **options)
        else:
            self.cache = oa.KVCache(max(batch, 1), longest, HEADS_KV, dim, **options)
        for plane in (self.cache.k, self.cache.v):
            plane.view(np.uint8)[...] = 0xFF  # NaN of both 16-bit types
        starts = np.cumsum([0, *self.tokens]).astype(np.int32)
        k, v = (normal((starts[-1], HEADS_KV, dim), seed, "float32") for seed in (1, 2))
        if batch:
            oa.append(self.cache, k, v, cu_seqlens=starts, **self.places)
        self.k, self.v = (
            [x[a:b].astype(np.float16).astype(np.float64) for a, b in itertools.pairwise(starts)] for x in (k, v)
        )
        self.dim = dim

    def packed(self, spare: int = 0) -> tuple[Any, dict[str, Any]]:
        """Queries one behind the other, and rows of nobody."""
        q = normal((sum(self.new) + spare, HEADS, self.dim), 3, "float32").astype(np.float64)
        starts = np.cumsum([0, *self.new]).astype(np.int32)
        return q, {"cu_seqlens_q": starts, "max_seqlen_q": max([0, *self.new]), **self.places}

    def batch(self, q_len: int) -> Any:
        return normal((len(self.new), q_len, HEADS, self.dim), 4, "float32").astype(np.float64)

    def expected(self, parts: list[Any], read: list[int] | None = None, **options: Any) -> list[tuple[Any, Any]]:
        """o and LSE of each sequence's queries, (queries, heads, dim), by `attention` in float64."""
        options = {"causal": True, **options}
        read = list(range(len(parts))) if read is None else read
        found = []
        for q, b in zip(parts, read, strict=True):
            o, lse = oa.attention(q[None], self.k[b][None], self.v[b][None], return_lse=True, **options)
            found.append((o[0], lse[0]))
        return found


def check_packed(call: Served, spare: int = 0, **options: Any) -> None:
    q, places = call.packed(spare)
    o, lse = oa.attention_with_kvcache(q, call.cache, **places, return_lse=True, **options)
    assert (o.shape, lse.shape) == (q.shape, (HEADS, len(q)))
    starts = places["cu_seqlens_q"]
    parts = [q[a:b] for a, b in itertools.pairwise(starts)]
    for b, (expected, of_lse) in enumerate(call.expected(parts, **options)):
        rows = slice(starts[b], starts[b + 1])
        np.testing.assert_allclose(o[rows], expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[:, rows], of_lse, rtol=1e-6, atol=1e-6)
    assert not o[starts[-1] :].any()
    assert np.isneginf(lse[:, starts[-1] :]).all()
    np.testing.assert_array_equal(oa.attention_with_kvcache(q, call.cache, **places, **options), o)


def check_batch(call: Served, q_len: int, **options: Any) -> None:
    q = call.batch(q_len)
    o, lse = oa.attention_with_kvcache(q, call.cache, **call.places, return_lse=True, **options)
    assert (o.shape, lse.shape) == (q.shape, (len(q), HEADS, q_len))
    for b, (expected, of_lse) in enumerate(call.expected(list(q), **options)):
        np.testing.assert_allclose(o[b], expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[b], of_lse, rtol=1e-6, atol=1e-6)


OPTIONS: list[dict[str, Any]] = [
    {}, {"causal": False}, {"window": (3, -1)}, {"window": (2, 1), "causal": False}, {"softcap": 3.0},
    {"sinks": np.linspace(-1, 1, HEADS).astype(np.float32)}, {"softmax_scale": -0.3},
]  # fmt: skip


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_random_packed_calls(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 25)), max_size=4))
    # A sequence without tokens may have rows that are padding.
    call = Served(lengths, data.draw(st.sampled_from([0, 1, 2, 3, 8, 16])))
    check_packed(call, data.draw(st.integers(0, 3)), **data.draw(st.sampled_from(OPTIONS)))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_random_batches(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 25), max_size=4))
    q_len = data.draw(st.sampled_from([0, 1, 2, 5, 16, 17, 30]))
    call = Served([(q_len, n) for n in tokens], data.draw(st.sampled_from([0, 1, 3, 16])))
    check_batch(call, q_len, **data.draw(st.sampled_from(OPTIONS)))


MIXED = Served([(1, 9), (7, 13), (0, 5), (0, 0), (3, 2)], 4)
FLAT = Served([(1, 9), (1, 13), (1, 5)], 0)


@pytest.mark.parametrize("dim", [64, 96])
def test_head_dims_whose_rows_are_padded_and_whose_are_not(dim: int) -> None:
    check_packed(Served([(3, 9), (1, 20)], 4, dim=dim))
    check_batch(Served([(20, 9), (20, 30)], 0, dim=dim), 20)


def test_single_tokens() -> None:
    q, places = FLAT.packed()
    o, lse = oa.attention_with_kvcache(q[:, None], FLAT.cache, **FLAT.places, return_lse=True)
    expected, of_lse = oa.decode(q[:, None], FLAT.cache, **FLAT.places, return_lse=True)
    np.testing.assert_array_equal(o, expected)
    np.testing.assert_array_equal(lse, of_lse)
    check_packed(FLAT)
    # Packed ones with as many rows as sequences, of which one has none: its rows are not those of others.
    starts = ints(0, 1, 1, 2)
    o, lse = oa.attention_with_kvcache(q, FLAT.cache, **{**places, "cu_seqlens_q": starts}, return_lse=True)
    for row, (one, of_one) in zip((0, 1), FLAT.expected([q[:1], q[1:2]], [0, 2]), strict=True):
        np.testing.assert_allclose(o[row], one[0], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[:, row], of_one[:, 0], rtol=1e-6, atol=1e-6)
    assert not o[2].any()
    assert np.isneginf(lse[:, 2]).all()


def test_batch_index() -> None:
    index = ints(2, 0, 0, 1)
    for q_len in (1, 3, 20):
        q = normal((4, q_len, HEADS, DIM), 5, "float32").astype(np.float64)
        lens = ints(5, 9, 4, 13)
        o = oa.attention_with_kvcache(q, FLAT.cache, seq_lens=lens, batch_index=index)
        for b in range(4):
            one = oa.KVCache(1, 13, HEADS_KV, DIM, like=LIKE, k_dtype="fp16")
            for plane, source in ((one.k, FLAT.cache.k), (one.v, FLAT.cache.v)):
                plane[...] = source[index[b]]
            expected = oa.attention_with_kvcache(q[b : b + 1], one, seq_lens=lens[b : b + 1])
            np.testing.assert_array_equal(o[b : b + 1], expected)
    packed = normal((6, HEADS, DIM), 5, "float32").astype(np.float64)
    o = oa.attention_with_kvcache(
        packed, FLAT.cache, seq_lens=ints(5, 9), batch_index=ints(2, 0), cu_seqlens_q=ints(0, 4, 6), max_seqlen_q=4
    )
    for b, (expected, _) in enumerate(FLAT.expected([packed[:4], packed[4:]], [2, 0])):
        np.testing.assert_allclose(o[4 * b : 4 + 2 * b], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("page", [0, 4])
def test_score_mod(page: int) -> None:
    """Queries are counted among the new tokens of a sequence, sequences among those of the call."""
    mod = oa.ScoreMod(
        "score + 0.1f * (q - k) + b", mask="k != 3", bias=np.ones(1, np.float32),
        reference=lambda score, b, h, q, k, bias: np.where(k != 3, score + 0.1 * (q - k) + 0.2 * b + bias[0], -np.inf),
    )  # fmt: skip
    call = Served([(2, 9), (5, 13)], page)
    q, places = call.packed()
    o = oa.attention_with_kvcache(q, call.cache, **places, score_mod=mod)
    k, v = (np.concatenate(x) for x in (call.k, call.v))
    options = {"cu_seqlens_q": places["cu_seqlens_q"], "max_seqlen_q": 5, "max_seqlen_k": 13, "causal": True}
    expected = oa.attention_varlen(q, k, v, cu_seqlens_k=ints(0, 9, 22), score_mod=mod, **options)
    np.testing.assert_allclose(o, expected, rtol=1e-12, atol=1e-13)
    one = call.batch(1)
    both = [x[:1] for x in (call.k, call.v)]
    expected = oa.attention(one[:1], *(x[0][None] for x in both), causal=True, score_mod=mod)
    places = {name: x[:1] for name, x in call.places.items()}
    o = oa.attention_with_kvcache(one[:1], call.cache, **places, score_mod=mod)
    np.testing.assert_allclose(o, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("page", [0, 4])
def test_quantized_caches_take_what_decode_takes(dtype: str, page: int) -> None:
    call = Served([(1, 9), (1, 13)], page, dtype)
    for q_len in (1, 4):
        q = call.batch(q_len)
        for options in ({}, {"softcap": 2.0, "window": (4, 0)}, {"deterministic": True}):
            a, b = (f(q, call.cache, **call.places, **options) for f in (oa.attention_with_kvcache, oa.decode))
            np.testing.assert_array_equal(a, b)


def test_recent_windows_and_shared_prefixes() -> None:
    cache = oa.PagedKVCache(9, 4, HEADS_KV, DIM, like=LIKE, k_dtype="int8", recent_window=4, recent_slots=2)
    k, v = (normal((2, 10, HEADS_KV, DIM), seed, "float32") for seed in (1, 2))
    places = {
        "seq_lens": ints(10, 9), "block_table": np.arange(6, dtype=np.int32).reshape(2, 3), "recent_slots": ints(1, 0)
    }  # fmt: skip
    oa.append(cache, k, v, **{**places, "seq_lens": ints(10, 10)})
    q = normal((2, 2, HEADS, DIM), 3, "float32")
    np.testing.assert_array_equal(oa.attention_with_kvcache(q, cache, **places), oa.decode(q, cache, **places))
    exact = oa.PagedKVCache(9, 4, HEADS_KV, DIM, like=LIKE, k_dtype="fp16")
    shared = {"seq_lens": ints(9, 7), "block_table": ints(3, 1, 0, 3, 2, 5).reshape(2, 3)}
    for b in range(2):
        oa.append(exact, k[:1, : shared["seq_lens"][b]], v[:1, : shared["seq_lens"][b]],
                  **{name: x[b : b + 1] for name, x in shared.items()})  # fmt: skip
    made = oa.attention_with_kvcache(q, exact, **shared, shared_prefix=4)
    np.testing.assert_array_equal(made, oa.decode(q, exact, **shared, shared_prefix=4))
    apart = {**shared, "block_table": ints(3, 1, 0, 4, 2, 5).reshape(2, 3)}
    with pytest.raises(ArgumentError, match=r"attention_with_kvcache\(\).*'block_table': expected the same first"):
        oa.attention_with_kvcache(q, exact, **apart, shared_prefix=4)


def test_out_and_what_is_only_read() -> None:
    q, places = MIXED.packed()
    q = q.astype(np.float32)
    expected = oa.attention_with_kvcache(q, MIXED.cache, **places)
    out = np.full_like(q, np.nan)
    before = [plane.copy() for plane in (MIXED.cache.k, MIXED.cache.v)]
    assert oa.attention_with_kvcache(q, MIXED.cache, **places, out=out) is out
    np.testing.assert_array_equal(out, expected)
    for plane, copy in zip((MIXED.cache.k, MIXED.cache.v), before, strict=True):
        np.testing.assert_array_equal(plane.view(np.uint16), copy.view(np.uint16))
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="'out'"):
        oa.attention_with_kvcache(q, MIXED.cache, **places, out=out)


Q, PLACES = MIXED.packed()
FOUR = MIXED.batch(3)


@pytest.mark.parametrize(("q", "changes", "error", "text"), [
    (Q, {"cu_seqlens_q": None}, ShapeError, "'q': expected 4 dimensions.*without cu_seqlens_q"),
    (FOUR, {}, ShapeError, r"'q': expected 3 dimensions \(rows, num_q_heads, head_dim\), with cu_seqlens_q"),
    (FOUR, {"cu_seqlens_q": None}, ArgumentError, "'max_seqlen_q': expected None without cu_seqlens_q.*received 7"),
    (Q, {"max_seqlen_q": None}, ArgumentError, "'max_seqlen_q': expected an integer, with cu_seqlens_q"),
    (Q, {"max_seqlen_q": 6}, ArgumentError, "'max_seqlen_q': expected at least 7.*received 6"),
    (Q, {"max_seqlen_q": -1}, ArgumentError, "'max_seqlen_q'.*received -1"),
    (Q, {"cu_seqlens_q": PLACES["cu_seqlens_q"][::-1].copy()}, ArgumentError, "'cu_seqlens_q': expected a first"),
    (Q, {"cu_seqlens_q": PLACES["cu_seqlens_q"].astype(np.int64)}, DtypeError, "'cu_seqlens_q': expected int32"),
    (Q, {"cu_seqlens_q": ints(0, 1, 8, 8, 8, 12)}, ArgumentError, "'cu_seqlens_q': expected a last element of at most"),
    (Q, {"seq_lens": PLACES["seq_lens"][:3]}, ShapeError, r"'seq_lens': expected shape \(5,\)"),
    (Q, {"seq_lens": ints(9, 99, 5, 0, 2)}, ArgumentError, "'seq_lens': expected 0 to 20, received 99 at 1"),
    (Q, {"block_table": None}, ArgumentError, "'block_table': expected an int32 array"),
    (Q, {"block_table": PLACES["block_table"][:2]}, ShapeError, r"'block_table': expected shape \(5, max_blocks\)"),
    (Q, {"block_table": PLACES["block_table"] * 0 - 1}, ArgumentError, "'block_table': expected blocks 0 to 11"),
    (Q, {"batch_index": ints(0, 1, 2, 3, 4)}, ArgumentError, "'batch_index': expected None with a PagedKVCache"),
    (Q, {"recent_slots": ints(0, 1, 2, 3, 4)}, ArgumentError, "'recent_slots': expected None"),
    (Q[..., :8], {}, ShapeError, "'q': expected head_dim 16, like the cache"),
    (Q[:, :3], {}, ShapeError, "'q': expected a multiple of the cache's 2 heads"),
    (Q.astype(np.int32), {}, DtypeError, "'q': expected float16"),
    (Q, {"out": np.zeros_like(Q[1:])}, ShapeError, "'out'"),
    (Q, {"sinks": np.zeros(3, np.float32)}, ShapeError, "'sinks'"),
    (Q, {"window": (1,)}, ArgumentError, "'window'"),
    (Q, {"causal": 1}, ArgumentError, "'causal': expected True or False"),
    (Q, {"softcap": -1.0}, ArgumentError, "'softcap'"),
    (Q, {"score_mod": "score"}, ArgumentError, "'score_mod': expected an omniattn.ScoreMod, received str"),
    (Q, {"shared_prefix": 3}, ArgumentError, "'shared_prefix': expected a multiple of block_size 4"),
    (Q, {"shared_prefix": 4}, ArgumentError, "with shared_prefix|shared_prefix and the"),
])  # fmt: skip
def test_errors(q: Any, changes: dict[str, Any], error: type[Exception], text: str) -> None:
    places = {name: x for name, x in {**PLACES, **changes}.items() if x is not None}
    with pytest.raises(error, match=rf"attention_with_kvcache\(\).*{text}"):
        oa.attention_with_kvcache(q, MIXED.cache, **places)


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_prompts_over_quantized_caches(dtype: str) -> None:
    """The last rows are those that `decode` gives; rows that see later keys are those of a score modification."""
    call = Served([(1, 49), (1, 63)], 4, dtype)
    q = call.batch(40)
    o, lse = oa.attention_with_kvcache(q, call.cache, **call.places, return_lse=True)
    of_o, of_lse = oa.decode(q[:, -16:], call.cache, **call.places, return_lse=True)
    np.testing.assert_allclose(o[:, -16:], of_o, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse[..., -16:], of_lse, rtol=1e-6, atol=1e-6)
    mod = oa.ScoreMod("score", reference=lambda score, b, h, q, k: score)
    every = [
        oa.attention_with_kvcache(q, call.cache, **call.places, causal=False, **x) for x in ({}, {"score_mod": mod})
    ]
    np.testing.assert_allclose(*every, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(every[0][:, -1], o[:, -1], rtol=1e-6, atol=1e-6)
    assert oa.attention_with_kvcache(call.batch(0), call.cache, **call.places).shape == (2, 0, HEADS, DIM)


def test_what_quantized_caches_do_not_take() -> None:
    cache = oa.KVCache(2, 20, HEADS_KV, DIM, like=LIKE, k_dtype="int8", recent_window=4)
    q, places = normal((40, HEADS, DIM), 3, "float32"), {"cu_seqlens_q": ints(0, 20, 40), "seq_lens": ints(0, 0)}
    with pytest.raises(UnsupportedError, match="deterministic with up to 20 queries a sequence, packed"):
        oa.attention_with_kvcache(q, cache, **places, max_seqlen_q=20, deterministic=True)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0, "expected an integer from 1 to .*, received 0"),
        (1.5, "expected an integer"),
        (-2, "expected an integer from 1 to .*, received -2"),
    ],
)
def test_num_splits(given: Any, text: str) -> None:
    q, places = MIXED.packed()
    plain = oa.attention_with_kvcache(q, MIXED.cache, **places)
    np.testing.assert_array_equal(oa.attention_with_kvcache(q, MIXED.cache, **places, num_splits=3), plain)
    with pytest.raises(ArgumentError, match=f"'num_splits': {text}"):
        oa.attention_with_kvcache(q, MIXED.cache, **places, num_splits=given)
    with pytest.raises(ArgumentError, match="'num_splits': expected None with deterministic=True"):
        oa.attention_with_kvcache(q, MIXED.cache, **places, num_splits=1, deterministic=True)


def test_indices_of_contiguous_caches() -> None:
    q = FLAT.batch(1)
    for index, error, text in (
        (ints(0, 1, 3), ArgumentError, "'batch_index': expected the cache's sequences, 0 to 2, received 3"),
        (ints(0, 1), ShapeError, r"'batch_index': expected shape \(3,\)"),
        (np.zeros(3, np.int64), DtypeError, "'batch_index': expected int32"),
    ):
        with pytest.raises(error, match=text):
            oa.attention_with_kvcache(q, FLAT.cache, **FLAT.places, batch_index=index)
    recent = oa.KVCache(3, 20, HEADS_KV, DIM, like=LIKE, k_dtype="int8", recent_window=4)
    with pytest.raises(UnsupportedError, match="batch_index with a recent_window"):
        oa.attention_with_kvcache(q, recent, seq_lens=ints(0, 0, 0), batch_index=ints(0, 1, 2))
    with pytest.raises(ArgumentError, match="'seq_lens': expected an array"):
        oa.attention_with_kvcache(q, FLAT.cache, seq_lens=None)
    with pytest.raises(ArgumentError, match="'cache': expected a KVCache or PagedKVCache"):
        oa.attention_with_kvcache(q, q, seq_lens=ints(1, 1, 1))


# What a GPU would run


@pytest.fixture(params=[(9, 0), (8, 0)], ids=["9.0", "8.0"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    cc: tuple[int, int] = request.param
    explain_as_on_gpu(monkeypatch, cc)
    return cc


def _cache(paged: bool, head_dim: int = 64, dtype: str = "fp16") -> oa.KVCache:
    like = np.zeros(1, np.float16)
    if paged:
        return oa.PagedKVCache(20, 16, 2, head_dim, like=like, k_dtype=dtype)
    return oa.KVCache(4, 300, 2, head_dim, like=like, k_dtype=dtype)


def _explained(q: Any, paged: bool, *, packed: int = 0, head_dim: int = 64, **options: Any) -> oa.Explanation:
    places: dict[str, Any] = {"seq_lens": np.full(4, 99, np.int32)}
    if paged:
        places["block_table"] = np.zeros((4, 7), np.int32)
    if packed:
        places |= {"cu_seqlens_q": np.linspace(0, len(q), 5).astype(np.int32), "max_seqlen_q": packed}
    return oa.explain(oa.attention_with_kvcache, q, _cache(paged, head_dim), **places, **options)


def _operands(problem: WithCacheProblem) -> set[str]:
    launches = plan_with_cache(problem, Target((9, 0), 232448, 132), None)
    return {x.operand for record in launches.records for x in (*record.pointers, *record.tensor_maps)}


@pytest.mark.parametrize("options", [
    {}, {"causal": False}, {"softcap": 5.0}, {"window": (64, 0)},
    {"return_lse": True, "sinks": np.zeros(4, np.float16)}, {"score_mod": oa.ScoreMod("score + 0.1f", mask="k >= 0")},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("q_len", [1, 16, 17])
def test_every_call_has_kernels(
    gpu: tuple[int, int], options: dict[str, Any], head_dim: int, paged: bool, q_len: int
) -> None:
    q = np.zeros((4, q_len, 4, head_dim), np.float16)
    by_decode = "score_mod" not in options and (q_len == 1 or (q_len == 16 and options.get("causal", True)))
    for x, packed in ((q, 0), (q.reshape(-1, 4, head_dim), q_len)):
        made = _explained(x, paged, packed=packed, head_dim=head_dim, **options)
        assert isinstance(made.problem, WithCacheProblem)
        decodes = by_decode
        assert isinstance(made.problem.kernels, DecodeProblem if decodes else AttentionProblem)
        assert made.kernel.startswith("decode" if decodes else "attn_fwd")
        assert decodes or "_paged" in made.kernel
        assert made.why[-1] == made.problem.why


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_kernels_read_the_arrays_of_the_call_and_of_the_cache(gpu: tuple[int, int]) -> None:
    q = np.zeros((4, 40, 4, 64), np.float16)
    always = {"q", "o", "cache.k", "cache.v", "seq_lens"}
    for x, packed, paged, index, more in (
        (q, 0, True, None, {"block_table"}),
        (q, 0, False, None, set()),
        (q, 0, False, ints(0, 3, 3, 1), {"batch_index"}),
        (q.reshape(160, 4, 64), 40, True, None, {"block_table", "cu_seqlens_q"}),
        (q[:, :2], 0, True, None, {"block_table"}),
        (q[:, :2], 0, False, None, set()),
        (q[:, :2], 0, False, ints(0, 3, 3, 1), {"batch_index"}),
        (q[:, :1], 0, True, None, {"block_table"}),
        (q[:, 0], 1, True, None, {"block_table", "cu_seqlens_q"}),
    ):
        options = {} if index is None else {"batch_index": index}
        problem = _explained(np.ascontiguousarray(x), paged, packed=packed, **options).problem
        assert _operands(problem) - {"workspace"} == always | more
        if isinstance(problem.kernels, AttentionProblem):
            expected = Pages(16, 20, 7, 7) if paged else Pages(300, 4, 1, 0, False, index is not None)
            assert problem.kernels.pages == expected
            assert problem.kernels.queries_per_sequence == (0 if packed else 40)


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_strides(gpu: tuple[int, int]) -> None:
    """Rows of a cache are padded; the first two dimensions of a batch over pages are one."""
    q = np.zeros((4, 40, 8, 96), np.float16)[:, :, ::2]
    s = _explained(q, True, head_dim=96).problem.kernels.strides
    assert s is not None
    assert (s.q, s.o) == ((0, 768, 192), (0, 384, 96))
    assert s.k == s.v == (2 * 16 * 128, 128, 16 * 128)
    apart = np.zeros((4, 50, 4, 64), np.float16)[:, :40]
    with pytest.raises(StrideError, match=r"'q': expected the first two dimensions as one: strides \(40 \* s, s"):
        _explained(apart, True)
    with pytest.raises(StrideError, match="'out': expected the first two dimensions as one"):
        _explained(np.ascontiguousarray(apart), True, out=apart)
    for few in (apart[:, :3], apart[:, :1], apart[:1]):  # decode's kernels, and single sequences, take any
        if len(few) == 4:
            assert _explained(few, True).problem.by_decode


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_lse_of_libraries_without_views(gpu: tuple[int, int]) -> None:
    describe = engine.describe

    def unknown(call: Any, raw: Any) -> dict[str, Any]:
        tensors = describe(call, raw)
        tensors["q"].framework = "dlpack"
        return tensors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "describe", unknown)
        _explained(np.zeros((4, 3, 4, 64), np.float16), True, return_lse=True)
        with pytest.raises(UnsupportedError, match="return_lse with a batch over pages, of a library"):
            _explained(np.zeros((4, 40, 4, 64), np.float16), True, return_lse=True)


@pytest.mark.parametrize(
    ("name", "layout", "prefix"),
    [
        ("attn_fwd_sm90_fp16_d64_m128n128_varlen_paged", ATTN_FWD_SM90, "fwd."),
        ("attn_fwd_sm80_fp16_d64_paged", ATTN_FWD, ""),
    ],
)
@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_what_kernels_are_told_of_a_batch(gpu: tuple[int, int], name: str, layout: Any, prefix: str) -> None:
    """So many queries of each sequence without starts, and pages that are found by an index and no table."""
    options = {"batch_index": ints(0, 3, 3, 1), "return_lse": True}
    problem = _explained(np.zeros((4, 40, 4, 64), np.float16), False, **options).problem
    (record,) = plan_with_cache(problem, Target((9, 0), 232448, 132), name).records
    found = {x.removeprefix(prefix): value for x, value in fields_of_record(record, layout).items()}
    given = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table", "batch_index", "q", "k", "o")
    assert [None if found[x] is None else found[x].operand for x in given] == [
        None, None, None, "seq_lens", None, "batch_index", "q", "cache.k", "o",
    ]  # fmt: skip
    assert (found["queries_per_sequence"], found["seqlen_q"], found["seqlen_k"]) == (40, 160, 300)
    assert (found["page_size"], found["num_pages"], found["table_stride"]) == (300, 4, 0)
    assert (found["lse_stride_b"], found["lse_stride_h"]) == (0, 160)
    if prefix:
        k = found["map_k"]
        assert (k.operand, k.dims) == ("cache.k", (64, 300, 2, 4))
        assert k.strides_bytes == (128, 2 * 300 * 64, 2 * 2 * 300 * 64)
