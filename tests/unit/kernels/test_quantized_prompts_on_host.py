"""Prompts over caches that `append` quantizes, by kernels run on the CPU (tests/host_kernels.py), against NumPy's.

Elements in 16 bits, of which the reference knows nothing, are rounded: twice the error of elements in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import UnsupportedError
from omniattn.problems import dequantize
from tests.host_kernels import HostKernels
from tests.unit.kernels.test_pages_on_host import LENGTHS, QUERIES, STARTS, check, normal

#: The kernels before attention.
MADE = ["dequantize_rounds", "dequantize"]
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"k_dtype": "fp8"},
    "int8": {"k_dtype": "int8"},
    "int8 in groups": {"k_dtype": "int8", "group_size": 32},
    "int8 without zeros": {"k_dtype": "int8", "zero_point": False},
    "int4": {"k_dtype": "int4"},
    "int4 in groups": {"k_dtype": "int4", "group_size": 32},
    "fbgemm": {"k_dtype": "int4", "layout": "fbgemm"},
    "K in fp16": {"k_dtype": "fp16", "v_dtype": "int4"},
    "V in fp16": {"k_dtype": "int8", "v_dtype": "fp16"},
    "rotated": {"k_dtype": "int8", "hadamard": True},
    "smoothed": {"k_dtype": "int4", "hadamard": True, "k_mean": 0.7, "k_channel_scale": 1.5},
    "recent": {"k_dtype": "int8", "hadamard": True, "recent_window": 12, "recent_dtype": "fp16"},
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernels]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield HostKernels(Path(tmp_path_factory.mktemp("kernels")), monkeypatch, cc=(8, 0), sm_count=108)


class Filled:
    """A cache of LENGTHS tokens; every other byte is that of NaN, or of codes of nobody."""

    def __init__(self, q: Any, size: int | None, *, lengths: Any = LENGTHS, **formats: Any) -> None:
        dim, sequences, heads = q.shape[-1], len(lengths), 2
        for seed, name in enumerate(("k_mean", "k_channel_scale")):
            if name in formats:
                at = np.random.default_rng(seed).uniform(0.5, 1.0, (heads, dim)) * formats[name]
                formats[name] = at.astype(np.float32)
        self.places: dict[str, Any] = {"seq_lens": lengths}
        k, v = (normal(int(lengths.sum()), heads, dim, seed=seed) for seed in (6, 7))
        if size is None:
            self.cache = oa.KVCache(sequences, max(80, int(lengths.max())), heads, dim, like=q, **formats)
        else:
            columns = -(-int(lengths.max()) // size)
            blocks = sequences * columns + 1
            table = np.random.default_rng(size).permutation(blocks)[: sequences * columns].reshape(-1, columns)
            self.places["block_table"] = table.astype(np.int32)
            if "recent_window" in formats:
                formats["recent_slots"] = sequences + 1
                slots = np.random.default_rng(1).permutation(sequences + 1)[:sequences]
                self.places["recent_slots"] = slots.astype(np.int32)
            self.cache = oa.PagedKVCache(blocks, size, heads, dim, like=q, **formats)
        for name in ("k", "v", "k_params", "v_params", "recent_k", "recent_v"):
            plane = getattr(self.cache, name)
            if plane is not None:
                plane.view(np.uint8)[...] = 0xFF
        oa.append(self.cache, k, v, cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32), **self.places)


@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("name", FORMATS)
def test_prompts(kernels: HostKernels, name: str, size: int | None) -> None:
    """As many queries of every sequence."""
    q = normal(len(LENGTHS), 33, 8, 64, seed=5)
    filled = Filled(q, size, **FORMATS[name])
    said = {**filled.places, "return_lse": True, "num_splits": 1}
    check(kernels, oa.attention_with_kvcache, [*MADE, "attention"], q, filled.cache, **said, times=3)


@pytest.mark.parametrize("options", [{}, {"window": (9, 0)}, {"window": (40, 3)}, {"causal": False}])
@pytest.mark.parametrize("dim", [48, 128, 256])
def test_options(kernels: HostKernels, dim: int, options: dict[str, Any]) -> None:
    """Packed sequences of many queries; widths of a row, and channels that pad one."""
    lengths = np.array([300, 40, 0, 129, 128], np.int32)
    starts = np.array([0, 40, 70, 90, 120, 140], np.int32)
    q = normal(142, 8, dim, seed=5)
    filled = Filled(q, 3, lengths=lengths, k_dtype="int8", hadamard=True)
    said = {**filled.places, "cu_seqlens_q": starts, "max_seqlen_q": 40, "return_lse": True, "num_splits": 1, **options}
    check(kernels, oa.attention_with_kvcache, [*MADE, "attention"], q, filled.cache, **said, times=3)


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("name", ["int4", "smoothed", "fbgemm"])
def test_divided(kernels: HostKernels, name: str, size: int | None) -> None:
    """Sequences of few queries by the kernels of decode, on the codes themselves."""
    q = normal(int(STARTS[-1]) + 2, 8, 64, seed=5)
    filled = Filled(q, size, **FORMATS[name])
    said = {**filled.places, "cu_seqlens_q": STARTS, "max_seqlen_q": 33, "return_lse": True}
    both = [*MADE, "decode", "attention", "decode_combine"]
    check(kernels, oa.attention_with_kvcache, both, q, filled.cache, **said, times=3)


def test_a_recent_window_is_not_divided(kernels: HostKernels) -> None:
    """Two passes of decode, merged, would be in the way of attention's results."""
    q = normal(int(STARTS[-1]) + 2, 8, 64, seed=5)
    filled = Filled(q, 16, **FORMATS["recent"])
    said = {**filled.places, "cu_seqlens_q": STARTS, "max_seqlen_q": 33, "return_lse": True}
    alone = [*MADE, "attention"]
    check(kernels, oa.attention_with_kvcache, alone, q, filled.cache, **said, num_splits=1, times=3)
    with pytest.raises(UnsupportedError, match="deterministic with up to 33 queries a sequence, packed"):
        oa.attention_with_kvcache(q, filled.cache, **said, deterministic=True)


def test_another_sequence_of_the_cache(kernels: HostKernels) -> None:
    q = normal(4, 33, 8, 64, seed=5)
    filled = Filled(q, None, **FORMATS["int8"])
    index = np.array([5, 0, 3, 0], np.int32)
    said = {"seq_lens": LENGTHS[index], "batch_index": index, "return_lse": True, "num_splits": 1}
    check(kernels, oa.attention_with_kvcache, [*MADE, "attention"], q, filled.cache, **said, times=3)


@pytest.mark.parametrize("window", [None, (9, 0), (150, 0)])
@pytest.mark.parametrize(
    ("size", "formats"), [(None, FORMATS["int8"]), (3, FORMATS["recent"]), (16, {"k_dtype": "fp16"})]
)
def test_padding_in_front(kernels: HostKernels, size: int | None, formats: dict[str, Any], window: Any) -> None:
    """One query and many, over caches in 16 bits too."""
    lengths, pads = np.array([300, 40, 0, 129, 128], np.int32), np.array([140, 3, 1, 129, -5], np.int32)
    for q_len in (1, 20):
        q = normal(5, q_len, 8, 64, seed=5)
        filled = Filled(q, size, lengths=lengths, **formats)
        said = {**filled.places, "leftpad_k": pads, "return_lse": True, "num_splits": 1, "window": window}
        check(kernels, oa.attention_with_kvcache, [*MADE, "attention"], q, filled.cache, **said, times=3)


@pytest.mark.parametrize("packed", [False, True])
def test_rounds(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """A workspace that has not room for all sequences: each is computed in its own round, and once."""
    lengths = np.array([300, 40, 0, 384, 129, 128, 256, 0], np.int32)
    queries = np.array([20, 30, 17, 40, 1, 20, 25, 20]) if packed else np.full(8, 33)
    q = normal(int(queries.sum()), 8, 64, seed=5)
    filled = Filled(q, 16, lengths=lengths, **FORMATS["int8"])
    page_bytes = 2 * 128 * 2 * 64 * 2
    monkeypatch.setattr(dequantize, "_MOST_BYTES", 4 * page_bytes)
    said = {**filled.places, "return_lse": True}
    if packed:
        said |= {"cu_seqlens_q": np.cumsum([0, *queries]).astype(np.int32), "max_seqlen_q": 40}
        made = [MADE[0], *[MADE[1], "attention"] * 8]
    else:
        q = q.reshape(8, 33, 8, 64)
        made = [MADE[0], *[MADE[1], "attention"] * 8]
    check(kernels, oa.attention_with_kvcache, made, q, filled.cache, **said, times=3)


def test_rounds_are_bounded() -> None:
    """Whatever lengths are: a workspace of some size, or of one sequence; rounds enough for all."""
    cache = oa.PagedKVCache(4096, 16, 8, 128, like=np.zeros(1, np.float16), k_dtype="int8").facts
    for capacity, batch, rows, most in (
        (8192, 1, 2048, 32 << 20), (8192, 64, 8192, 1 << 30), (1 << 20, 4, 4096, 4 << 30),
        (32768, 1024, 9000, 3 << 30),
    ):  # fmt: skip
        p = dequantize.DequantizeProblem("float16", cache, batch, rows, 0, capacity, capacity // 16, 16, 4096, -1)
        size = p.pages * 2 * 128 * 8 * 128 * 2
        assert size <= most
        assert p.rounds * (p.pages // (capacity // 128)) >= min(batch, rows)
        assert p.rounds <= 64
        assert p.places()[1] - size < 1 << 24
    assert QUERIES
