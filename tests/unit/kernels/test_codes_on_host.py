"""Prompts over pages of a caller in 8 bits, by kernels run on the CPU (tests/host_kernels.py), against NumPy's.

A code times its scale is rounded to fp16, of which the reference knows nothing: twice the error of elements in fp16.
"""

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
from tests.unit.kernels.test_pages_on_host import BOTH, LENGTHS, STARTS, check, normal
from tests.unit.kernels.test_quantized_prompts_on_host import MADE

SCALES = ("none", "one", "heads", "sequences", "rows", "rows apart")
DTYPES: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "int8": np.int8}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernels]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield HostKernels(Path(tmp_path_factory.mktemp("kernels")), monkeypatch, cc=(8, 9), sm_count=142)


class Codes:
    """A pool whose bytes are all NaN (int8: -1) but for the tokens of LENGTHS; NaN scales of rows that nobody has."""

    def __init__(self, dim: int, dtype: str, kind: str, size: int | None, order: str = "NHD") -> None:
        sequences, heads, kept = len(LENGTHS), 2, DTYPES[dtype]
        columns = 1 if size is None else -(-int(LENGTHS.max()) // size)
        rows = 80 if size is None else size
        blocks = sequences * columns + (size is not None)
        shape = (blocks, rows, heads) if order == "NHD" else (blocks, heads, rows)
        k, v = (np.full((*shape, dim), 0xFF, np.uint8).view(kept) for _ in "kv")
        scales: dict[str, Any] = {}
        if kind != "none":
            most = 448.0 if dtype == "e4m3" else 127.0
            extent = {"one": (1,), "heads": (heads,), "sequences": (sequences, heads)}.get(kind)
            for seed, name in enumerate(("k_scale", "v_scale")):
                if extent is not None:
                    scales[name] = np.random.default_rng(seed).uniform(5, 9, extent).astype(np.float32) / most
                else:
                    wide = np.full((*shape, 3), math.nan, np.float32)
                    scales[name] = wide[..., 1] if kind == "rows apart" else wide[..., 0].copy()
        cls = oa.KVCache if size is None else oa.PagedKVCache
        self.cache = cls.from_arrays(k, v, layout=order, **scales)
        self.places: dict[str, Any] = {"seq_lens": LENGTHS}
        if size is not None:
            table = np.random.default_rng(size).permutation(blocks)[: sequences * columns].reshape(-1, columns)
            self.places["block_table"] = table.astype(np.int32)
        times = {"none": 6.0 if dtype == "int8" else 1.0, "sequences": 20.0}.get(kind, 1.0)
        tokens = [
            (times * np.random.default_rng(seed).standard_normal((int(LENGTHS.sum()), heads, dim))).astype(np.float16)
            for seed in (6, 7)
        ]
        # Scales of sequences are those of a call: codes are written without.
        written = cls.from_arrays(k, v, layout=order) if kind == "sequences" else self.cache
        oa.append(written, *tokens, cu_seqlens=np.cumsum([0, *LENGTHS]).astype(np.int32), **self.places)


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts(kernels: HostKernels, dtype: str, kind: str) -> None:
    """As many queries of every sequence, over pages whose size divides no tile."""
    q = normal(len(LENGTHS), 33, 8, 64, seed=5) * (0.2 if kind == "none" and dtype == "int8" else 1)
    pool = Codes(64, dtype, kind, 3)
    said = {**pool.places, "return_lse": True, "num_splits": 1}
    check(kernels, oa.attention_with_kvcache, [*MADE, "attention"], q, pool.cache, **said, times=2)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("dim", [48, 64, 128, 256])
def test_divided(kernels: HostKernels, dim: int, size: int | None, order: str) -> None:
    """Beside the kernels of decode, which have the sequences of few queries; rows that no tile is as wide as."""
    q = normal(int(STARTS[-1]) + 2, 8, dim, seed=5)
    pool = Codes(dim, "e4m3", "rows" if size else "heads", size, order)
    said = {**pool.places, "cu_seqlens_q": STARTS, "max_seqlen_q": 33, "return_lse": True}
    check(kernels, oa.attention_with_kvcache, [*MADE, *BOTH], q, pool.cache, **said, times=2)


@pytest.mark.parametrize("options", [{"window": (9, 0)}, {"causal": False}, {"deterministic": True}])
@pytest.mark.parametrize("kind", ["sequences", "rows apart"])
def test_options(kernels: HostKernels, options: dict[str, Any], kind: str) -> None:
    q = normal(len(LENGTHS), 33, 8, 128, seed=5)
    pool = Codes(128, "int8", kind, 16)
    said = {**pool.places, "return_lse": True, **options, **({} if "deterministic" in options else {"num_splits": 1})}
    check(kernels, oa.attention_with_kvcache, [*MADE, "attention"], q, pool.cache, **said, times=2)
