"""``index_logits`` and ``top_k`` by their generic kernels run on the CPU (tests/host_kernels.py), against NumPy's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.registry import REGISTRY, by_name
from tests.host_kernels import HostKernels
from tests.indexer_cases import (
    ROWS,
    logits_of,
    paged_call,
    pooled,
    ranged_call,
    row_of,
    same_logits,
    wanted_positions,
)

#: Rows of ``top_k`` without clusters.
TOP_K_ROWS = [spec.name for spec in REGISTRY if spec.op == "top_k" and spec.min_arch == (8, 0)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernels]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield HostKernels(Path(tmp_path_factory.mktemp("kernels")), monkeypatch, cc=(8, 0), sm_count=108)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("block_size", [64, 16, 7, 1])
@pytest.mark.parametrize(("heads", "next_n"), [(64, 1), (32, 2), (5, 3), (128, 2)])
def test_paged_logits(kernels: HostKernels, heads: int, next_n: int, block_size: int, fused: bool) -> None:
    call = paged_call(heads, next_n, block_size, fused, seed=heads + block_size)
    (got,) = kernels(oa.index_logits, **call.arguments)
    same_logits(got, call)


@pytest.mark.parametrize("heads", [64, 3, 100])
def test_ranges_of_keys(kernels: HostKernels, heads: int) -> None:
    call = ranged_call(heads, rows=9, keys=300, seed=heads)
    (got,) = kernels(oa.index_logits, **call.arguments)
    same_logits(got, call)


@pytest.mark.parametrize("row", TOP_K_ROWS)
@pytest.mark.parametrize("k", [1, 50, 2048])
@pytest.mark.parametrize("kind", ROWS)
def test_top_k(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch, kind: str, k: int, row: str) -> None:
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", row)
    logits = np.stack([row_of(kind, 9001, seed) for seed in range(2)])
    (got,) = kernels(oa.top_k, logits, k)
    np.testing.assert_array_equal(got, wanted_positions(logits, k))


@pytest.mark.parametrize("kind", ["normal", "rounded", "crowded", "outliers"])
def test_long_rows(kernels: HostKernels, kind: str) -> None:
    """More elements than have bits at a time, and a sample of several rounds."""
    for n, k in ((70_003, 2048), (262_200, 300)):
        logits = row_of(kind, n)[None]
        (got,) = kernels(oa.top_k, logits, k)
        np.testing.assert_array_equal(got, wanted_positions(logits, k))


@pytest.mark.parametrize("row", TOP_K_ROWS)
@pytest.mark.parametrize("kind", ["normal", "rounded", "one bin", "low bits", "ascending"])
def test_rows_as_long_as_a_kernel_holds(
    kernels: HostKernels, monkeypatch: pytest.MonkeyPatch, row: str, kind: str
) -> None:
    """And some elements more or less, which begin at every place of 16 bytes."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", row)
    most = by_name(row).most_elems or 20_000
    starts, lengths = np.array([0, 1, 2, 3, 0, 0], np.int32), np.array([2, 1, 0, -5, -1, 2], np.int32) + most - 2
    logits = np.stack([row_of(kind, most + 1, seed) for seed in range(len(starts))])
    for k in (300, 2049):
        (got,) = kernels(oa.top_k, logits, k, lengths=lengths, starts=starts)
        np.testing.assert_array_equal(got, wanted_positions(logits, k, starts, lengths), f"{k}")


@pytest.mark.parametrize("row", TOP_K_ROWS)
@pytest.mark.parametrize("pooled_rows", [False, True])
def test_parts_of_rows(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch, row: str, pooled_rows: bool) -> None:
    """Starts at every place of 16 bytes, lengths from 0 on, rows with a stride of their own, a block table."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", row)
    logits, options, starts, lengths = logits_of(rows=12, width=501, next_n=2)
    if pooled_rows:
        options |= {"block_table": pooled(6, 501, 24), "block_size": 24}
    (got,) = kernels(oa.top_k, logits, 40, **options)
    wanted = wanted_positions(logits, 40, starts, lengths)
    if pooled_rows:
        table = np.repeat(options["block_table"], 2, axis=0)
        at = np.maximum(wanted, 0)
        mapped = np.take_along_axis(table, at // 24, axis=1) * 24 + at % 24
        wanted = np.where(wanted >= 0, mapped, -1)
    np.testing.assert_array_equal(got, wanted)


def test_choice_of_a_kernel(kernels: HostKernels) -> None:
    few: Any = np.zeros((1, 4000), np.float32)
    many: Any = np.zeros((200, 8), np.float32)
    assert kernels.operations(oa.top_k, few, 3) == kernels.operations(oa.top_k, many, 3) == ["top_k"]
