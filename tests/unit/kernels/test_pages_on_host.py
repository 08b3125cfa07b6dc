"""The sm_80 kernel over pages, run on the CPU (tests/host_kernels.py), against the NumPy reference.

Alone, and with the kernels of decode beside it for the sequences of few queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from tests.host_kernels import HostKernels

QUERIES = [1, 30, 0, 2, 1, 3, 0, 1, 19]
STARTS = np.cumsum([0, *QUERIES]).astype(np.int32)
LENGTHS = np.array([70, 40, 0, 33, 5, 64, 9, 1, 10], np.int32)
#: The kernels of a divided call.
BOTH = ["decode", "attention", "decode_combine"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernels]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield HostKernels(Path(tmp_path_factory.mktemp("kernels")), monkeypatch, cc=(8, 0), sm_count=108)


def normal(*shape: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


class Filled:
    """A cache of LENGTHS tokens: NaN elsewhere, and numbers of no block left of what `window` lets anybody see."""

    def __init__(self, q: Any, size: int | None, window: int | None = None) -> None:
        sequences = len(LENGTHS)
        self.places: dict[str, Any] = {"seq_lens": LENGTHS}
        k, v = (normal(int(LENGTHS.sum()), 2, q.shape[-1], seed=seed) for seed in (6, 7))
        if size is None:
            self.cache = oa.KVCache(sequences, 80, 2, q.shape[-1], like=q, k_dtype="fp16")
        else:
            columns = -(-int(LENGTHS.max()) // size)
            blocks = sequences * columns + 1
            table = np.random.default_rng(size).permutation(blocks)[: sequences * columns].reshape(-1, columns)
            self.places["block_table"] = table.astype(np.int32)
            self.cache = oa.PagedKVCache(blocks, size, 2, q.shape[-1], like=q, k_dtype="fp16")
        for x in (self.cache.k, self.cache.v):
            x[...] = math.nan
        oa.append(self.cache, k, v, cu_seqlens=np.cumsum([0, *LENGTHS]).astype(np.int32), **self.places)
        if size is not None and window is not None:
            left = np.maximum(LENGTHS - QUERIES - window, 0) // size
            hidden = np.arange(table.shape[1]) < left[:, None]
            of_nobody = np.where(np.arange(sequences) % 2, -1, 2**30)[:, None]
            self.places["block_table"] = np.where(hidden, of_nobody, table).astype(np.int32)


def check(
    kernels: HostKernels, function: Any, operations: list[str], *given: Any, times: float = 1.0, **said: Any
) -> None:
    """The same as the reference, by kernels of these operations: O to ``times`` fp16's last bits, and the LSE."""
    assert kernels.operations(function, *given, **said) == operations
    o, lse = kernels(function, *given, **said)
    ref_o, ref_lse = function(*given, **said)
    atol = times * 4e-3
    np.testing.assert_allclose(o.astype(np.float32), ref_o.astype(np.float32), atol=atol, rtol=atol)
    if ref_lse.ndim == 3:  # the kernel's is packed: (heads, rows)
        ref_lse = ref_lse.swapaxes(0, 1).reshape(lse.shape)
    np.testing.assert_allclose(lse, ref_lse, atol=atol / 4, rtol=atol / 4)


OPTIONS: list[dict[str, Any]] = [
    {}, {"window": (9, 0)}, {"window": (40, 0)}, {"deterministic": True},
    {"sinks": np.linspace(-1.0, 3.0, 8, dtype=np.float32)},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [None, 3, 16])
def test_divided(kernels: HostKernels, size: int | None, options: dict[str, Any]) -> None:
    """Sequences without queries or keys, with more queries than keys; rows of nobody behind the last."""
    q = normal(int(STARTS[-1]) + 2, 8, 64, seed=5)
    filled = Filled(q, size, options.get("window", (None,))[0])
    said = {**filled.places, "cu_seqlens_q": STARTS, "max_seqlen_q": 30, "return_lse": True, **options}
    check(kernels, oa.attention_with_kvcache, BOTH, q, filled.cache, **said)


@pytest.mark.parametrize("dim", [64, 128])
def test_divided_over_arrays(kernels: HostKernels, dim: int) -> None:
    """`attention_varlen` over pages, of other heads: one of K and V for each of Q."""
    q = normal(int(STARTS[-1]), 2, dim, seed=5)
    filled = Filled(q, 16)
    pools = (filled.cache.k.swapaxes(1, 2), filled.cache.v.swapaxes(1, 2))
    said = {"block_table": filled.places["block_table"], "seqused_k": LENGTHS, "causal": True, "return_lse": True}
    said |= {"cu_seqlens_q": STARTS, "max_seqlen_q": 30, "max_seqlen_k": int(LENGTHS.max())}
    check(kernels, oa.attention_varlen, BOTH, q, *pools, **said)


@pytest.mark.parametrize("options", [{}, {"window": (9, 0)}, {"causal": False}])
def test_prompts(kernels: HostKernels, options: dict[str, Any]) -> None:
    """As many queries of every sequence: attention over pages alone."""
    q = normal(len(LENGTHS), 20, 8, 64, seed=5)
    filled = Filled(q, 16)
    said = {**filled.places, "return_lse": True, **options}
    check(kernels, oa.attention_with_kvcache, ["attention"], q, filled.cache, **said)


def test_more_queries_than_the_most(kernels: HostKernels) -> None:
    """Of a sequence with more queries than max_seqlen_q a row may be NaN; no row is wrong."""
    q = normal(int(STARTS[-1]) + 2, 8, 64, seed=5)
    filled = Filled(q, 16)
    said = {**filled.places, "cu_seqlens_q": STARTS, "return_lse": True}
    assert kernels.operations(oa.attention_with_kvcache, q, filled.cache, max_seqlen_q=27, **said) == BOTH
    o, lse = kernels(oa.attention_with_kvcache, q, filled.cache, max_seqlen_q=27, **said)
    ref_o, ref_lse = oa.attention_with_kvcache(q, filled.cache, max_seqlen_q=30, **said)
    is_there = ~np.isnan(lse)
    assert is_there[:, np.r_[0, 31 : len(q)]].all()
    assert not np.isnan(o[is_there.T]).any()
    np.testing.assert_allclose(o[is_there.T].astype(np.float32), ref_o[is_there.T].astype(np.float32), atol=4e-3)
    np.testing.assert_allclose(lse[is_there], ref_lse[is_there], atol=1e-3, rtol=1e-3)
