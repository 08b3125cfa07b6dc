"""Sparse attention: ``attention_sparse`` and ``decode`` with ``indices`` on the CPU, and what they may be given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import arrays as library
from omniattn import runtime
from omniattn.errors import ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from omniattn.launch.structs import MLA_DECODE
from omniattn.plan.others import plan_decode
from omniattn.problems import DecodeProblem, Target
from omniattn.runtime.device import DeviceInfo
from omniattn.runtime.record import LaunchRecord
from tests.latent_rows import e4m3, means_656, rows_656

RNG = np.random.default_rng(11)
DIM, DIM_V, ROWS = 24, 16, 12
INVALID = (-1, ROWS, -(2**31), 2**31 - 1)


def arrays(tokens: int = 5, heads: int = 3, topk: int = 6) -> tuple[Any, Any, Any]:
    """q, rows and indices."""
    q = RNG.standard_normal((tokens, heads, DIM)).astype(np.float16)
    rows = RNG.standard_normal((ROWS, DIM)).astype(np.float16)
    return q, rows, RNG.integers(0, ROWS, (tokens, topk)).astype(np.int32)


def expected(
    q: Any, rows: Any, listed: Any, dim_v: int = DIM_V, *, softmax_scale: float | None = None, softcap: float = 0.0,
    sinks: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """o, LSE and maximum of (heads, dim) over the rows of a list, in float64."""
    listed = np.asarray(listed)
    k = np.asarray(rows, np.float64)[listed[(listed >= 0) & (listed < len(rows))]]
    s = np.asarray(q, np.float64) @ k.T * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    s = softcap * np.tanh(s / softcap) if softcap else s
    most = s.max(-1, initial=-np.inf)
    total = np.exp(s).sum(-1) + (0.0 if sinks is None else np.exp(np.asarray(sinks, np.float64)))
    with np.errstate(divide="ignore"):
        return np.exp(s) @ k[:, :dim_v] / np.where(total == 0, 1.0, total)[:, None], np.log(total), most


def check(found: Any, q: Any, rows: Any, lists: Any, dim_v: int = DIM_V, **options: Any) -> None:
    """o, LSE and maximum of all tokens."""
    for i, listed in enumerate(lists):
        for got, want, tolerance in zip(
            (x[i] for x in found), expected(q[i], rows, listed, dim_v, **options), (4e-3, 1e-4, 1e-4), strict=True
        ):
            np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance, rtol=1e-5)


EVERYTHING: dict[str, Any] = {"return_lse": True, "return_max": True}


@pytest.mark.parametrize("source", ["rows", "rows with a head", "pages", "pages, HND", "sequences"])
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 2.0}, {"softmax_scale": 0.3}, {"sinks": np.linspace(-2, 3, 3, dtype=np.float32)},
     {"deterministic": True}],
    ids=lambda o: next(iter(o), "plain"),
)  # fmt: skip
def test_values(source: str, options: dict[str, Any]) -> None:
    q, rows, indices = arrays()
    kv: Any = {"rows": rows, "rows with a head": rows[:, None]}.get(source)
    more: dict[str, Any] = {"head_dim_v": DIM_V}
    if kv is None:
        more, blocks = {}, rows.reshape(3, 4, 1, DIM)
        if source == "pages, HND":
            kv = oa.PagedKVCache.from_arrays(blocks.swapaxes(1, 2), layout="HND", head_dim_v=DIM_V)
        else:
            kind = oa.PagedKVCache if source == "pages" else oa.KVCache
            kv = kind.from_arrays(blocks, head_dim_v=DIM_V)
    found = oa.attention_sparse(q, kv, indices=indices, **EVERYTHING, **more, **options)
    assert [x.shape for x in found] == [(5, 3, DIM_V), (5, 3), (5, 3)]
    assert [x.dtype for x in found] == [np.float16, np.float32, np.float32]
    check(found, q, rows, indices, **{name: x for name, x in options.items() if name != "deterministic"})


def test_entries_that_are_no_keys() -> None:
    """Invalid numbers stand anywhere, and rows that are named twice count twice."""
    q, rows, indices = arrays(topk=9)
    for i, at in enumerate(((0, 1, 2, 3), (5, 6, 7, 8), (1, 3, 5, 7), (0, 2, 4, 8))):
        indices[i, list(at)] = INVALID
    indices[1, :3] = indices[1, 4]
    indices[4] = -1
    sinks = np.array([0.5, -3.0, 9.0], np.float32)
    check(oa.attention_sparse(q, rows, indices=indices, head_dim_v=DIM_V, **EVERYTHING), q, rows, indices)
    o, lse, most = oa.attention_sparse(q, rows, indices=indices, head_dim_v=DIM_V, sinks=sinks, **EVERYTHING)
    check((o, lse, most), q, rows, indices, sinks=sinks)
    assert not o[4].any()
    np.testing.assert_array_equal(lse[4], sinks)
    assert np.isneginf(most[4]).all()


@pytest.mark.parametrize("has_head", [False, True])
def test_lengths_of_lists(has_head: bool) -> None:
    q, rows, indices = arrays()
    lengths = np.array([6, 0, 1, 3, 5], np.int32)
    behind = indices.copy()
    for row, n in zip(behind, lengths, strict=True):
        row[n:] = RNG.integers(-5, 2 * ROWS, len(row) - n)
    given = behind[:, None] if has_head else behind
    found = oa.attention_sparse(q, rows, indices=given, topk_length=lengths, head_dim_v=DIM_V, **EVERYTHING)
    check(found, q, rows, [x[:n] for x, n in zip(indices, lengths, strict=True)])


def test_rows_that_no_list_has_are_not_read() -> None:
    q, rows, indices = arrays()
    indices %= 5
    dirty = rows.copy()
    dirty[5:] = np.nan
    check(oa.attention_sparse(q, dirty, indices=indices, head_dim_v=DIM_V, **EVERYTHING), q, rows, indices)


@pytest.mark.parametrize("flat", [False, True])
def test_decode(flat: bool) -> None:
    """Tokens of sequences: o and LSE as `decode` has them."""
    tokens = 1 if flat else 2
    q, rows, indices = arrays(3 * tokens)
    lengths = np.array([6, 0, 2, 5, 1, 6], np.int32)[: 3 * tokens]
    cache = oa.PagedKVCache.from_arrays(rows.reshape(3, 4, 1, DIM), head_dim_v=DIM_V)
    out = np.full((3, tokens, 3, DIM_V), np.nan, np.float16)
    o, lse = oa.decode(
        q.reshape(3, tokens, 3, DIM), cache, indices=indices.reshape(3, tokens, -1), return_lse=True, out=out,
        topk_length=lengths if flat else lengths.reshape(3, 2),
    )  # fmt: skip
    assert o is out
    assert lse.shape == (3, 3, tokens)
    want = oa.attention_sparse(q, cache, indices=indices, topk_length=lengths, return_lse=True)
    np.testing.assert_array_equal(o.reshape(want[0].shape), want[0])
    np.testing.assert_array_equal(lse.swapaxes(1, 2).reshape(want[1].shape), want[1])


def test_decode_over_lists_of_all_tokens_is_decode() -> None:
    q, rows, _ = arrays(2)
    cache = oa.PagedKVCache.from_arrays(rows.reshape(3, 4, 1, DIM), head_dim_v=DIM_V)
    table, lens = np.array([[2, 0], [1, 2]], np.int32), np.array([7, 5], np.int32)
    indices = (table[:, :, None] * 4 + np.arange(4)).reshape(2, 1, 8).astype(np.int32)
    q = q[:, None]
    dense = oa.decode(q, cache, seq_lens=lens, block_table=table, return_lse=True)
    listed = oa.decode(q, cache, indices=indices, topk_length=lens, return_lse=True)
    for got, want in zip(listed, dense, strict=True):
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=2e-3)


@pytest.mark.parametrize("asked", [(), ("return_lse",), ("return_max",), ("return_lse", "return_max")])
def test_what_is_returned(asked: tuple[str, ...]) -> None:
    q, rows, indices = arrays()
    everything = oa.attention_sparse(q, rows, indices=indices, head_dim_v=DIM_V, **EVERYTHING)
    found = oa.attention_sparse(q, rows, indices=indices, head_dim_v=DIM_V, **dict.fromkeys(asked, True))
    found = found if asked else (found,)
    wanted = [everything[0], *(x for name, x in zip(EVERYTHING, everything[1:], strict=True) if name in asked)]
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_nothing_to_do() -> None:
    q, rows, indices = arrays(0)
    o, lse, most = oa.attention_sparse(q, rows, indices=indices, head_dim_v=DIM_V, **EVERYTHING)
    assert (o.shape, lse.shape, most.shape) == ((0, 3, DIM_V), (0, 3), (0, 3))
    cache = oa.PagedKVCache.from_arrays(rows.reshape(3, 4, 1, DIM), head_dim_v=DIM_V)
    o = oa.decode(np.zeros((0, 2, 3, DIM), np.float16), cache, indices=np.zeros((0, 2, 5), np.int32))
    assert o.shape == (0, 2, 3, DIM_V)


def test_it_is_explained() -> None:
    q, rows, indices = arrays()
    said = oa.explain(oa.attention_sparse, q, rows, indices=indices, head_dim_v=DIM_V)
    assert said.kernel == "reference (NumPy, CPU)"
    assert said.problem.topk == 6


# What the calls may be given


def call(**given: Any) -> Any:
    q, rows, indices = arrays(2, 3, 4)
    known = {"q": q, "kv": rows, "indices": indices, "head_dim_v": DIM_V, **given}
    return oa.attention_sparse(known.pop("q"), known.pop("kv"), **known)


def decode(**given: Any) -> Any:
    q, rows, indices = arrays(4, 3, 4)
    cache = oa.PagedKVCache.from_arrays(rows.reshape(3, 4, 1, DIM), head_dim_v=DIM_V)
    known = {"q": q.reshape(2, 2, 3, DIM), "cache": cache, "indices": indices.reshape(2, 2, 4), **given}
    return oa.decode(known.pop("q"), known.pop("cache"), **known)


LIST = np.zeros((2, 4), np.int32)
CACHE = oa.PagedKVCache.from_arrays(np.zeros((3, 4, 1, DIM), np.float16), head_dim_v=DIM_V)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"q": np.zeros((2, DIM), np.float16)}, ShapeError, "'q': expected 3 dimensions .*num_q_heads, head_dim"),
        ({"q": np.zeros((2, 1, 3, DIM), np.float16)}, ShapeError, r"'q': expected 3 dimensions .*\(2, 1, 3, 24\)"),
        ({"q": np.zeros((2, 3, 32), np.float16)}, ShapeError, "'q': expected head_dim 24, like the cache"),
        ({"q": np.zeros((2, 0, DIM), np.float16)}, ShapeError, "'q': expected a multiple"),
        ({"q": np.zeros((2, 3, DIM), np.int32)}, DtypeError, "'q'"),
        ({"q": [[[1.0]]]}, ArgumentError, "'q'"),
        ({"kv": np.zeros((4, 2, DIM), np.float16)}, ShapeError, r"'kv': expected \(rows, 1, head_dim\)"),
        ({"kv": np.zeros(DIM, np.float16)}, ShapeError, r"'kv': .*shape \(24,\)"),
        ({"kv": np.zeros((1, 4, 1, DIM), np.float16)}, ShapeError, "'kv'"),
        ({"kv": np.zeros((0, DIM), np.float16)}, ShapeError, r"'kv': expected 1 or more rows, received shape \(0, 24"),
        ({"kv": np.zeros((4, 2 * DIM), np.float16)[:, ::2]}, StrideError, "'kv': expected a contiguous last dim"),
        ({"kv": np.zeros((4, 20), np.float16)}, ShapeError, "'kv': expected head_dim, .* a multiple of 8"),
        ({"kv": np.zeros((4, 700), np.uint8)}, ShapeError, r"'kv': expected rows of 656 .*shape \(4, 700\)"),
        ({"kv": np.zeros((4, DIM), np.float16)[::-1]}, StrideError, r"'kv': .*strides \(-24, 1\)"),
        ({"kv": np.zeros((4, DIM), np.float32)}, DtypeError, "'kv': expected float16.*received float32"),
        ({"kv": None}, ArgumentError, "'kv'"),
        ({"head_dim_v": DIM}, ArgumentError, "'head_dim_v': expected a multiple of 8 below 24"),
        ({"head_dim_v": 1.5}, ArgumentError, "'head_dim_v': expected an integer"),
        ({"head_dim_v": None}, ArgumentError, "'head_dim_v': expected a multiple of 8 below 24.*received 512"),
        ({"kv": CACHE, "head_dim_v": 8}, ArgumentError, "'head_dim_v': expected None or 16 with a cache.*received 8"),
        ({"kv": CACHE, "head_dim_v": "16"}, ArgumentError, "'head_dim_v': expected an integer"),
        ({"indices": LIST[:1]}, ShapeError, r"'indices': expected shape \(2, topk\)"),
        ({"indices": LIST[:, :0]}, ShapeError, "topk >= 1"),
        ({"indices": LIST[:, None, None]}, ShapeError, "'indices'"),
        ({"indices": LIST.astype(np.int64)}, DtypeError, "'indices': expected int32"),
        ({"indices": np.zeros((2, 8), np.int32)[:, ::2]}, ArgumentError, "'indices': expected a contiguous array"),
        ({"indices": None}, ArgumentError, "'indices': expected an int32 array"),
        ({"indices": [[0], [1]]}, ArgumentError, "'indices'"),
        ({"topk_length": np.zeros(3, np.int32)}, ShapeError, r"'topk_length': expected shape \(2,\)"),
        ({"topk_length": np.zeros(2, np.int64)}, DtypeError, "'topk_length': expected int32"),
        ({"topk_length": np.array([1, 5], np.int32)}, ArgumentError, "'topk_length': expected 0 to 4.*received 5"),
        ({"topk_length": np.array([1, -1], np.int32)}, ArgumentError, "'topk_length': expected 0 to 4.*received -1"),
        ({"sinks": np.zeros(2, np.float32)}, ShapeError, "'sinks'"),
        ({"sinks": np.zeros(3, np.int32)}, DtypeError, "'sinks'"),
        ({"softcap": -1.0}, ArgumentError, "'softcap'"),
        ({"softcap": float("nan")}, ArgumentError, "'softcap'"),
        ({"softmax_scale": float("inf")}, ArgumentError, "'softmax_scale'"),
        ({"softmax_scale": "0.1"}, ArgumentError, "'softmax_scale'"),
        ({"return_lse": 2}, ArgumentError, "'return_lse'"),
        ({"return_max": None}, ArgumentError, "'return_max'"),
        ({"deterministic": "yes"}, ArgumentError, "'deterministic'"),
        ({"out": np.zeros((2, 3, DIM), np.float16)}, ShapeError, "'out'"),
        ({"out": np.zeros((2, 3, DIM_V), np.float32)}, DtypeError, "'out'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_attention_sparse_may_be_given(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as raised:
        call(**given)
    assert "attention_sparse()" in str(raised.value)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"seq_lens": np.ones(2, np.int32)}, ArgumentError, "'seq_lens': expected None with indices.*received ndarray"),
        ({"block_table": np.zeros((2, 1), np.int32)}, ArgumentError, "'block_table': expected None with indices"),
        ({"window": (5, 0)}, ArgumentError, "'window': expected None with indices"),
        ({"recent_slots": np.zeros(2, np.int32)}, ArgumentError, "'recent_slots': expected None with indices"),
        ({"shared_prefix": 4}, ArgumentError, "'shared_prefix': expected None with indices"),
        ({"shared_prefix": None}, ArgumentError, "'shared_prefix': expected an integer"),
        ({"shared_prefix": np.zeros(2, np.int32)}, ArgumentError, "'shared_prefix': expected an integer"),
        ({"q": np.zeros((2, 3, DIM), np.float16), "indices": LIST}, ShapeError, "'q': expected 4 dimensions"),
        (
            {"q": np.zeros((2, 0, 3, DIM), np.float16), "indices": np.zeros((2, 0, 4), np.int32)},
            ShapeError,
            "'q': expected q_len of 1 or more, received 0",
        ),
        ({"indices": None, "topk_length": np.zeros(2, np.int32)}, ArgumentError, "'topk_length': .*without indices"),
        ({"indices": LIST}, ShapeError, r"'indices': expected shape \(2, 2, topk\)"),
        ({"topk_length": np.zeros(2, np.int32)}, ShapeError, r"'topk_length': expected shape \(2, 2\)"),
        ({"topk_length": np.full((2, 2), 5, np.int32)}, ArgumentError, "'topk_length': expected 0 to 4"),
        ({"softcap": -1.0}, ArgumentError, "'softcap'"),
    ],
    ids=str,
)
def test_what_decode_may_be_given(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as raised:
        decode(**given)
    assert "decode()" in str(raised.value)


def test_caches_with_values_of_their_own_have_no_lists() -> None:
    k = np.zeros((3, 4, 1, DIM), np.float16)
    cache = oa.PagedKVCache.from_arrays(k, k.copy())
    for function in (call, decode):
        with pytest.raises(UnsupportedError, match="K and V of their own"):
            function(**{"kv" if function is call else "cache": cache})


# Rows in 8 bits


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn"])
def test_rows_of_656_bytes(dtype: str) -> None:
    stored = rows_656(RNG.standard_normal((ROWS, 576)) * 3)
    given = stored if dtype == "uint8" else stored.view(e4m3())
    q = RNG.standard_normal((3, 2, 576)).astype(np.float16)
    indices = RNG.integers(-2, ROWS + 2, (3, 7)).astype(np.int32)
    for rows in (given, given[:, None]):
        found = oa.attention_sparse(q, rows, indices=indices, **EVERYTHING)
        check(found, q, means_656(stored), indices, 512)
    cache = oa.PagedKVCache.from_arrays(given.reshape(3, 4, 1, 656), head_dim_v=512)
    assert (cache.head_dim, cache.v_format.head_dim, cache.token_bytes, cache.v) == (576, 512, 656, None)
    lens, table = np.array([6, 3, 4], np.int32), np.array([[1, 0], [2, 2], [0, 0]], np.int32)
    o, lse = oa.decode(q[:, None], cache, seq_lens=lens, block_table=table, return_lse=True)
    for b, n in enumerate(lens):
        own = (table[b][:, None] * 4 + np.arange(4)).reshape(-1)[:n]
        want, want_lse, _ = expected(q[b], means_656(stored), own, 512)
        np.testing.assert_allclose(o[b, 0].astype(np.float64), want, atol=4e-3, rtol=1e-3)
        np.testing.assert_allclose(lse[b, :, 0], want_lse, rtol=1e-5)


@pytest.mark.parametrize("scale", [None, 0.37])
def test_rows_in_e4m3(scale: float | None) -> None:
    stored = (RNG.standard_normal((3, 4, 1, 32)) * 4).astype(e4m3())
    meant = stored.astype(np.float64).reshape(-1, 32) * (1.0 if scale is None else np.float32(scale))
    given = {} if scale is None else {"k_scale": np.array([scale], np.float32)}
    q, indices = RNG.standard_normal((3, 2, 32)).astype(np.float16), RNG.integers(0, ROWS, (3, 5)).astype(np.int32)
    cache = oa.PagedKVCache.from_arrays(stored, head_dim_v=16, **given)
    check(oa.attention_sparse(q, cache, indices=indices, **EVERYTHING), q, meant, indices, 16)
    if scale is None:
        rows = stored.reshape(-1, 32)
        check(oa.attention_sparse(q, rows, indices=indices, head_dim_v=16, **EVERYTHING), q, meant, indices, 16)


BYTES = np.zeros((3, 4, 1, 656), np.uint8)


@pytest.mark.parametrize(
    ("rows", "given", "error", "said"),
    [
        (BYTES, {"head_dim_v": 256}, ArgumentError, "'head_dim_v': expected 512 with rows of 656 bytes"),
        (BYTES, {"k_scale": np.ones(1, np.float32)}, ArgumentError, "'k_scale': expected None with rows of 656 bytes"),
        (BYTES, {"v_scale": np.ones(1, np.float32)}, ArgumentError, "'v_scale': expected None with head_dim_v"),
        (BYTES, {"v": BYTES}, ArgumentError, "'v': expected None with head_dim_v"),
        (np.zeros((3, 4, 2, 656), np.uint8), {}, ShapeError, "one head with head_dim_v"),
        (np.zeros((3, 4, 1, 576), np.uint8), {}, ShapeError, "'k': expected rows of 656 bytes"),
        (np.zeros((3, 4, 1, 584), np.uint8), {}, ShapeError, "'k': expected rows of 656 bytes"),
        (np.zeros((3, 4, 1, 656), np.int8), {}, DtypeError, "'k': expected float16.*received int8"),
        (np.zeros((4, 656), np.uint8), {}, ShapeError, "'k': expected 4 dimensions"),
        (np.zeros((3, 4, 1, 660), np.uint8)[..., :656], {}, ArgumentError, "multiples of 16"),
        (BYTES, {"head_dim_v": None}, ArgumentError, "'k'"),
    ],
    ids=lambda x: str(x)[:60] if isinstance(x, dict) else "",
)  # fmt: skip
def test_rows_in_8_bits_that_are_none(rows: Any, given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        oa.PagedKVCache.from_arrays(rows, **{"head_dim_v": 512, **given})


@pytest.mark.parametrize(
    ("scale", "error", "said"),
    [
        (np.ones(2, np.float32), ShapeError, r"'k_scale': expected shape \(1,\), one for all rows"),
        (np.ones((3, 4, 1), np.float32), ShapeError, r"'k_scale': expected shape \(1,\), one for all rows"),
        (np.ones((3, 1), np.float32), ShapeError, r"'k_scale': expected shape \(1,\), one for all rows"),
        (np.ones(1, np.float64), DtypeError, "'k_scale'"),
        (0.5, ArgumentError, "'k_scale'"),
    ],
    ids=lambda x: str(getattr(x, "shape", "")),
)
def test_scales_of_rows_in_e4m3(scale: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        oa.PagedKVCache.from_arrays(np.zeros((3, 4, 1, 32), e4m3()), head_dim_v=16, k_scale=scale)


def test_a_row_of_656_bytes_is_what_the_page_says() -> None:
    """docs/kv_formats.md: where each channel begins, by a row that has one channel only."""
    page = (Path(__file__).parents[3] / "docs" / "kv_formats.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| 656 bytes \| (\d+) \| (\d+|–) \| (\d+) \|$", page, re.M)
    assert len(table) == 6
    for channel, scale, byte in table:
        stored = np.zeros((1, 656), np.uint8)
        if scale == "–":
            stored[0, int(byte) : int(byte) + 2] = 0x80, 0x3F
        else:
            stored[0, int(byte)] = 0x38
            stored[0, int(scale) : int(scale) + 4] = np.array([3.0], np.float32).view(np.uint8)
        cache = oa.PagedKVCache.from_arrays(stored.reshape(1, 1, 1, 656), head_dim_v=512)
        assert cache.k_format.position(int(channel)) == 8 * int(byte)
        q = np.zeros((1, 1, 576), np.float32)
        q[..., int(channel)] = 2.0
        zero = np.zeros((1, 1), np.int32)
        o, most = oa.attention_sparse(q, cache, indices=zero, softmax_scale=1.0, return_max=True)
        assert most[0, 0] == (2.0 if scale == "–" else 6.0)
        assert np.flatnonzero(o).tolist() == ([] if scale == "–" else [int(channel)])


# Plans for a GPU


HOPPER = Target((9, 0), 227 << 10, 132)


def all_planned(
    fmt: str = "16", tokens: int = 0, heads: int = 128, batch: int = 6, **more: Any
) -> tuple[LaunchRecord, ...]:
    """The launches of a call over lists of 2048 rows; tokens: those of each sequence of `decode`."""
    rows = {
        "16": np.zeros((2, 8, 1, 576), np.float16), "656": np.zeros((2, 8, 1, 656), np.uint8),
        "e4m3": np.zeros((2, 8, 1, 576), e4m3()),
    }[fmt]  # fmt: skip
    facts = oa.PagedKVCache.from_arrays(rows, head_dim_v=512).facts
    dtype = "bfloat16" if fmt == "656" else "float16"
    strides = (heads * 576, 0, 576, 1), (heads * 512, 0, 512, 1)
    known = {"has_lengths": False, "maximum": False, "deterministic": False, **more}
    problem = DecodeProblem(
        dtype, facts, batch, 1, heads, 1, 576, 2048, 8, 2, 2048, -1, 0.1, 0.0, "none", known.pop("deterministic"), 0,
        False, *strides, topk=2048, tokens=tokens, **known,
    )  # fmt: skip
    return plan_decode(problem, HOPPER, None).records


def planned(fmt: str = "16", tokens: int = 0, **more: Any) -> LaunchRecord:
    return all_planned(fmt, tokens, **more)[0]


def field(record: LaunchRecord, name: str) -> int:
    at = MLA_DECODE.offsets[name]
    return int.from_bytes(record.arguments[at : at + 4], "little")


@pytest.mark.parametrize("fmt", ["16", "e4m3", "656"])
def test_rows_of_lists_are_gathered(fmt: str) -> None:
    for tokens in (0, 1, 3):
        record = planned(fmt, tokens)
        assert not record.tensor_maps
        assert field(record, "lists_rows") == 1
        assert field(record, "listed_tokens") == max(tokens, 1)
        assert field(record, "box_rows_log2") == 0


def test_lists_have_outputs_of_their_own() -> None:
    names = lambda record: {pointer.operand for pointer in record.pointers}  # noqa: E731
    assert "topk_length" not in names(planned())
    assert "row_max" not in names(planned())
    assert "row_max" in names(planned(maximum=True))


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy arrays that pose as a GPU's; calls that are planned end there."""
    info = DeviceInfo(0, "Test GPU", (9, 0), 132, 227 << 10, 50 << 20, (13, 0))
    monkeypatch.setattr(runtime, "device_info", lambda ordinal: info)
    monkeypatch.setattr(runtime, "has_tensor_maps", lambda: True)
    describe = library.describe

    def on_gpu(value: Any, name: str, *rest: Any) -> Any:
        t = describe(value, name)
        t.device = "cuda"
        return t

    monkeypatch.setattr(library, "describe", on_gpu)
    monkeypatch.setattr(library, "require_same_device", lambda tensors: None)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_rows_of_a_type_that_is_none(dtype: str) -> None:
    rows = np.zeros((10, 576), dtype)
    q, indices = np.zeros((2, 4, 576), np.float32), np.zeros((2, 1, 3), np.int32)
    with pytest.raises(DtypeError, match=rf"attention_sparse\(\).*'kv': expected float16.*received {dtype}"):
        oa.attention_sparse(q, rows, indices=indices)
    with pytest.raises(DtypeError, match=rf"'k': expected float16.*received {dtype}"):
        oa.PagedKVCache.from_arrays(rows.reshape(1, 10, 1, 576), head_dim_v=512)


def test_errors_about_memory_name_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are the same on the CPU: what is compared."""
    seen: list[Any] = []
    monkeypatch.setattr(library, "require_same_device", lambda tensors: seen.extend(t.argument for t in tensors))
    call()
    assert seen[-3:] == ["q", "indices", "kv"]


@pytest.mark.usefixtures("pretend_gpu")
def test_strides_on_a_gpu() -> None:
    """Query tokens of sequences are one dimension to the kernels."""
    cache = oa.PagedKVCache.from_arrays(np.zeros((3, 4, 1, 576), np.float16), head_dim_v=512)
    indices = np.zeros((2, 3, 8), np.int32)
    wide, deep = np.zeros((2, 3, 8, 600), np.float16), np.zeros((2, 4, 8, 576), np.float16)
    for q in (wide[..., :576], wide[:, :, ::2, :576], deep[:, :1].repeat(3, 1), deep[:1, :3].repeat(2, 0)):
        said = oa.explain(oa.decode, q, cache, indices=indices)
        assert said.kernel.startswith("mla_decode_few_sm90")
    with pytest.raises(ArgumentError, match=r"'q': expected first two dimensions that lie as one, strides \(3 \* s, s"):
        oa.explain(oa.decode, deep[:, :3], cache, indices=indices)
    out = np.zeros((2, 4, 8, 512), np.float16)[:, :3]
    with pytest.raises(ArgumentError, match="'out': expected first two dimensions"):
        oa.explain(oa.decode, deep[:, :3].copy(), cache, indices=indices, out=out)
    other = np.zeros((2, 8, 576), pytest.importorskip("ml_dtypes").bfloat16)
    with pytest.raises(DtypeError, match="'q': expected float16, like the cache"):
        oa.explain(oa.attention_sparse, other, cache, indices=indices[:, 0])
