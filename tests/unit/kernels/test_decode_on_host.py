"""The kernels of append and decode, run on the CPU (tests/host_kernels.py), against the NumPy reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import omniattn as oa
from tests.host_kernels import HostKernels

E4M3 = ml_dtypes.float8_e4m3fn
HEADS, LENGTHS = 2, np.array([70, 17, 0, 40], np.int32)
STARTS = np.cumsum([0, *LENGTHS]).astype(np.int32)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernels]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield HostKernels(Path(tmp_path_factory.mktemp("kernels")), monkeypatch)


def normal(*shape: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def agree(got: Any, expected: Any) -> None:
    """O to fp16's last bits, the LSE, and the rows that see nothing."""
    (o, lse), (ref_o, ref_lse) = got, expected
    np.testing.assert_allclose(o.astype(np.float32), ref_o.astype(np.float32), atol=4e-3, rtol=4e-3)
    np.testing.assert_allclose(lse, ref_lse, atol=1e-3, rtol=1e-3)


def scales_of(kind: str, rows: tuple[int, ...], largest: float, times: float) -> Any:
    if kind == "none":
        return None
    if kind == "rows":  # NaN until they are written, a stride of 3
        return np.full((*rows, 3), math.nan, np.float32)[..., 1]
    return (times * 4.0 / largest * np.linspace(1.0, 2.0, HEADS if kind == "heads" else 1)).astype(np.float32)


class Pool:
    """Pages of bytes that are NaN (int8: -1) until `append` writes them, in rows that are apart."""

    def __init__(self, dtype: Any, dim: int, size: int, kind: str) -> None:
        columns = -(-int(LENGTHS.max()) // size)
        blocks = len(LENGTHS) * columns + 1
        self.memory = np.full((2, blocks, size, HEADS, dim + 16), 0xFF, np.uint8)
        largest = 448.0 if dtype is E4M3 else 127.0
        self.scales = [scales_of(kind, (blocks, size, HEADS), largest, times) for times in (1.0, 1.5)]
        k, v = (x[..., :dim].view(dtype) for x in self.memory)
        self.cache = oa.PagedKVCache.from_arrays(k, v, k_scale=self.scales[0], v_scale=self.scales[1])
        numbers = np.random.default_rng(size).permutation(blocks)[: len(LENGTHS) * columns]
        self.places = {"seq_lens": LENGTHS, "block_table": numbers.reshape(-1, columns).astype(np.int32)}


@pytest.mark.parametrize("kind", ["none", "one", "heads", "rows"])
@pytest.mark.parametrize(("dtype", "dim"), [(E4M3, 64), (E4M3, 96), (np.int8, 96), (np.int8, 208)])
def test_pools_in_8_bits(kernels: HostKernels, dtype: Any, dim: int, kind: str) -> None:
    """append to the last bit, also of rows that are not finite; decode with one and two tiles of queries."""
    ours, theirs = (Pool(dtype, dim, 16 if kind == "rows" else 5, kind) for _ in "ab")
    k, v = (normal(int(LENGTHS.sum()), HEADS, dim, seed=seed) for seed in (1, 2))
    angles = np.random.default_rng(3).uniform(0, 6, (int(LENGTHS.max()), dim // 2))
    rotation = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    for worst in (math.inf, math.nan, 3.0):
        k[30, 1, 5] = v[80, 0, 7] = worst
        kernels(oa.append, ours.cache, k, v, cu_seqlens=STARTS, **ours.places, **rotation)
        oa.append(theirs.cache, k, v, cu_seqlens=STARTS, **theirs.places, **rotation)
        assert np.array_equal(ours.memory, theirs.memory)
        for x, y in zip(ours.scales, theirs.scales, strict=True):
            assert x is None or np.array_equal(x, y, equal_nan=True)
    for q_len, heads, options in ((1, 6, {}), (3, 8, {"window": (20, 0)}), (1, 6, {"deterministic": True})):
        if q_len > 1 and dim == 64:
            continue  # one kernel less to compile
        q, said = normal(len(LENGTHS), q_len, heads, dim, seed=4), {"return_lse": True, **options}
        agree(kernels(oa.decode, q, ours.cache, **ours.places, **said), oa.decode(q, ours.cache, **ours.places, **said))


@pytest.mark.parametrize("options", [{}, {"window": (9, 0)}, {"deterministic": True}, {"softcap": 5.0}])
@pytest.mark.parametrize("recent", [0, 16])
def test_packed_queries(kernels: HostKernels, recent: int, options: dict[str, Any]) -> None:
    """Sequences without queries, without keys, with fewer keys than queries; rows of nobody; two passes merged."""
    q = normal(14, 8, 64, seed=5)
    dtype = {"k_dtype": "int8", "recent_window": recent, "recent_dtype": "fp16"} if recent else {"k_dtype": "fp16"}
    cache = oa.KVCache(5, 80, 2, 64, like=q, v_dtype=dtype["k_dtype"], **dtype)
    lengths = np.array([70, 2, 0, 40, 7], np.int32)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    k, v = (normal(int(lengths.sum()), 2, 64, seed=seed) for seed in (6, 7))
    oa.append(cache, k, v, seq_lens=lengths, cu_seqlens=starts)
    said = {"seq_lens": lengths, "max_seqlen_q": 4, "return_lse": True, **options}
    said["cu_seqlens_q"] = np.array([0, 1, 5, 7, 7, 11], np.int32)
    if "deterministic" in options:  # which takes up to two queries a sequence of these heads
        said |= {"max_seqlen_q": 2, "cu_seqlens_q": np.array([0, 1, 3, 5, 5, 7], np.int32)}
    agree(kernels(oa.attention_with_kvcache, q, cache, **said), oa.attention_with_kvcache(q, cache, **said))


@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
def test_fewer_blocks_of_rows_than_the_longest_sequence_has(kernels: HostKernels, options: dict[str, Any]) -> None:
    """Beside 16 queries, whose rows make four blocks, sequences of one block, of two, and of none."""
    lengths = np.array([70, 40, 33, 0, 64], np.int32)
    starts = np.array([0, 1, 17, 22, 22, 24], np.int32)
    most = 2 if options else 16  # what `deterministic` takes
    if options:
        starts = np.array([0, 1, 3, 5, 5, 7], np.int32)
    q = normal(int(starts[-1]) + 1, 8, 64, seed=5)
    cache = oa.KVCache(5, 80, 2, 64, like=q, k_dtype="fp16", v_dtype="fp16")
    k, v = (normal(int(lengths.sum()), 2, 64, seed=seed) for seed in (6, 7))
    oa.append(cache, k, v, seq_lens=lengths, cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32))
    said: dict[str, Any] = {"seq_lens": lengths, "cu_seqlens_q": starts, "max_seqlen_q": most, "return_lse": True}
    said |= options
    agree(kernels(oa.attention_with_kvcache, q, cache, **said), oa.attention_with_kvcache(q, cache, **said))


def test_starts_that_are_wrong(kernels: HostKernels) -> None:
    """More queries than max_seqlen_q: NaN. Rows in front of the first sequence are nobody's."""
    q = normal(9, 8, 64, seed=5)
    cache = oa.KVCache(2, 32, 2, 64, like=q, k_dtype="fp16", v_dtype="fp16")
    k, v = (normal(2, 32, 2, 64, seed=seed) for seed in (6, 7))
    lengths = np.full(2, 32, np.int32)
    oa.append(cache, k, v, seq_lens=lengths)
    said: dict[str, Any] = {"seq_lens": lengths, "max_seqlen_q": 2, "return_lse": True}
    said["cu_seqlens_q"] = np.array([2, 4, 8], np.int32)
    o, lse = kernels(oa.attention_with_kvcache, q, cache, **said)
    assert (o[[0, 1, 8]] == 0).all()
    assert np.isneginf(lse[:, [0, 1, 8]]).all()
    assert np.isnan(o[4:8]).all()
    assert np.isnan(lse[:, 4:8]).all()
    said["cu_seqlens_q"] = np.array([0, 2, 2], np.int32)
    expected = oa.attention_with_kvcache(q[2:4], cache, **said)
    agree((o[2:4], lse[:, 2:4]), expected)
