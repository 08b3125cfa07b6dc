"""Kernels of ``index_logits`` and ``top_k``, and how they divide their work, with no GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from omniattn.checks.indexer import LogitsOptions, TopKOptions, check_index_logits, check_top_k
from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.ops.index_logits import _INDEX_LOGITS
from omniattn.ops.top_k import _TOP_K
from omniattn.plan.engine import Call, describe
from omniattn.plan.others import plan_index_logits, plan_top_k
from omniattn.problems import IndexLogitsProblem, Target, TopKProblem
from omniattn.registry import GPUS
from omniattn.select.indexer import select_index_logits, select_top_k, span_of
from tests.indexer_cases import E4M3

HOPPER = Target((9, 0), 227 << 10, 132)
AMPERE = Target((8, 0), 163 << 10, 108)
ADA = Target((8, 9), 99 << 10, 142)
TURING = Target((7, 5), 64 << 10, 40)


def logits(
    sequences: int = 128, queries: int = 1, heads: int = 64, keys: int = 32768, size: int = 64
) -> IndexLogitsProblem:
    strides = (queries * heads * 128, heads * 128, 128)
    return IndexLogitsProblem(
        sequences, queries, heads, keys, size, 9999, -(-keys // size), strides, (132 * size, 128), (132 * size, 4),
        128 * size, heads, keys, (True, False, False),
    )  # fmt: skip


def rows(count: int, width: int, aligned: bool = True) -> TopKProblem:
    return TopKProblem(count, width, 2048, 1, 0, width, 2048, 0, aligned, (False, False))


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (logits(), "index_logits_sm90_one"),
        (logits(heads=32), "index_logits_sm90_one"),
        (logits(queries=2), "index_logits_sm90_two"),
        (logits(heads=65), "index_logits_sm90_two"),
        (logits(queries=2, heads=65), "index_logits_sm90_four"),
        (logits(queries=3), "index_logits_sm90_four"),
        (logits(queries=3, heads=128), "index_logits_sm90_more"),
        (logits(1, 4096), "index_logits_sm90_more"),
        (logits(size=100), "index_logits_sm90_one"),
        (logits(size=7), "index_logits_sm80"),
    ],
)
def test_rows_of_index_logits(problem: IndexLogitsProblem, name: str) -> None:
    assert select_index_logits(problem, HOPPER).spec.name == name
    assert select_index_logits(problem, AMPERE).spec.name == "index_logits_sm80"
    assert select_index_logits(problem, HOPPER).why


def test_a_row_that_is_named() -> None:
    assert select_index_logits(logits(), HOPPER, "index_logits_sm80").spec.name == "index_logits_sm80"
    with pytest.raises(ArgumentError, match="multiples of 16 bytes"):
        select_index_logits(logits(size=7), HOPPER, "index_logits_sm90_two")
    assert select_top_k(rows(1, 100), HOPPER, "top_k_sm80_many")[0].spec.name == "top_k_sm80_many"
    with pytest.raises(ArgumentError, match=r"9\.0"):
        select_top_k(rows(1, 100), AMPERE, "top_k_sm90_shared")


def test_old_gpus() -> None:
    with pytest.raises(UnsupportedError, match=r"8\.0"):
        select_index_logits(logits(), TURING)
    with pytest.raises(UnsupportedError, match=r"8\.0"):
        select_top_k(rows(1, 100), TURING)


def test_rows_of_top_k() -> None:
    assert select_top_k(rows(4096, 32768), HOPPER)[0].spec.name == "top_k_sm80_many_marked"
    assert select_top_k(rows(4096, 32769), HOPPER)[0].spec.name == "top_k_sm80_many"
    assert select_top_k(rows(128, 32768), HOPPER)[0].spec.name == "top_k_sm80_held"
    assert select_top_k(rows(128, 32769), HOPPER)[0].spec.name == "top_k_sm80_few"
    assert select_top_k(rows(4096, 16384), HOPPER)[0].spec.name == "top_k_sm80_many_held"
    assert select_top_k(rows(4096, 8192), HOPPER)[0].spec.name == "top_k_sm80_many_short"
    assert select_top_k(rows(264, 8192), HOPPER)[0].spec.name == "top_k_sm80_many_held"  # all at a time
    assert select_top_k(rows(4096, 8192), AMPERE)[0].spec.name == "top_k_sm80_many_short"
    assert select_top_k(rows(4096, 8192), Target((10, 0), 227 << 10, 148))[0].spec.name == "top_k_sm80_many_held"
    assert select_top_k(rows(4096, 8192), ADA)[0].spec.name == "top_k_sm80_many_held"  # one CTA an SM
    # Rows with up to three elements of others in front do not fit.
    assert select_top_k(rows(128, 32765, False), HOPPER)[0].spec.name == "top_k_sm80_held"
    assert select_top_k(rows(128, 32768, False), HOPPER)[0].spec.name == "top_k_sm80_few"
    assert select_top_k(rows(4096, 131072), HOPPER)[0].spec.name == "top_k_sm80_few"
    assert select_top_k(rows(1, 32768), ADA)[0].spec.name == "top_k_sm80_many_marked"  # less shared memory
    one, ctas = select_top_k(rows(1, 131072), HOPPER)
    assert one.spec.name == "top_k_sm90_shared_held"
    assert ctas == 8
    assert select_top_k(rows(1, 131072, False), HOPPER)[0].spec.name == "top_k_sm90_shared_marked"
    assert select_top_k(rows(1, 131074), HOPPER)[0].spec.name == "top_k_sm90_shared_marked"
    assert select_top_k(rows(1, 262145), HOPPER)[0].spec.name == "top_k_sm90_shared"
    assert select_top_k(rows(16, 32768), HOPPER)[1] == 4
    assert select_top_k(rows(16, 131072), HOPPER)[1] == 4  # 16 clusters of 8 do not fit at once
    assert select_top_k(rows(1, 131072), AMPERE)[1] == 1
    assert select_top_k(rows(1, 100), HOPPER)[1] == 1


@pytest.mark.parametrize("cc", [cc for gpus in GPUS.values() for cc in gpus])
@pytest.mark.parametrize("count", [1, 3, 66, 133, 5000])
@pytest.mark.parametrize("width", [1, 5000, 10**6, 2**31 - 512])
def test_every_row_has_ctas(cc: tuple[int, int], count: int, width: int) -> None:
    target = Target(cc, next(gpus[cc] for gpus in GPUS.values() if cc in gpus), 60)
    (record,) = plan_top_k(rows(count, width), target, None).records
    ctas = 1 if record.cluster is None else record.cluster[0]
    assert record.grid == (count * ctas, 1, 1)
    assert ctas in (1, 2, 4, 8)


def test_spans_that_were_measured() -> None:
    for problem, span in ((logits(), 4096), (logits(1, keys=131072), 512), (logits(1, keys=8192), 128)):
        assert span_of(select_index_logits(problem, HOPPER).spec, problem, HOPPER) == span


@pytest.mark.parametrize("target", [HOPPER, AMPERE])
@pytest.mark.parametrize("queries", [1, 2, 5, 4096])
@pytest.mark.parametrize("sequences", [1, 3, 500])
@pytest.mark.parametrize("keys", [1, 100, 131072])
def test_spans_cover_the_keys(target: Target, queries: int, sequences: int, keys: int) -> None:
    problem = logits(sequences, queries, 64, keys)
    spec = select_index_logits(problem, target).spec
    span = span_of(spec, problem, target)
    assert span % 64 == 0
    assert span < keys + 256
    (record,) = plan_index_logits(problem, target, None).records
    tile = problem.query_tile(spec.block_m)
    assert record.num_ctas == sequences * -(-queries // tile) * -(-keys // span)


def test_nothing_to_launch() -> None:
    assert plan_index_logits(logits(sequences=0), HOPPER, None).records == ()
    assert plan_index_logits(logits(keys=0), HOPPER, None).records == ()
    assert plan_top_k(rows(0, 10), HOPPER, None).records == ()
    assert len(plan_top_k(rows(3, 0), HOPPER, None).records) == 1  # all of the result is -1


def test_a_tile_never_holds_more_queries_than_there_are() -> None:
    assert [logits(queries=n).query_tile(8) for n in (1, 7, 100)] == [1, 7, 8]
    assert [logits(queries=n, heads=128).query_tile(8) for n in (1, 100)] == [1, 4]
    assert dataclasses.replace(logits(), queries=0).query_tile(8) == 1


def test_rows_are_aligned_by_address_and_stride() -> None:
    """Those of a view that begins within 16 bytes are not, whatever their stride is; one row has no stride."""
    memory = np.zeros(40 * 104 + 4, np.float32)
    first = -(memory.ctypes.data // 4) % 4
    whole = memory[first : first + 40 * 104].reshape(40, 104)
    given = {
        "whole": (whole, True), "columns": (whole[:, 4:], True), "odd columns": (whole[:, 1:], False),
        "odd stride": (memory[first : first + 4 * 101].reshape(4, 101), False),
        "one row": (memory[first : first + 101].reshape(1, 101), True),
    }  # fmt: skip
    for name, (logits, aligned) in given.items():
        call = Call(_TOP_K, (logits, None, None, None, None), TopKOptions(5, 1, None))
        problem = check_top_k(call, describe(call, None))
        assert problem.has_aligned_rows == aligned, name


def test_a_stride_between_blocks_or_keys_that_are_one() -> None:
    """It is no matter of alignment."""
    k = np.lib.stride_tricks.as_strided(np.zeros(64 * 132, np.uint8), (1, 64, 132), (12, 132, 1))
    weights, lens = np.zeros((1, 64), np.float32), np.array([3], np.int32)
    q = np.zeros((1, 1, 64, 128), E4M3)
    call = Call(_INDEX_LOGITS, (q, k, weights, None, lens, lens[:, None] * 0, None, None, None), LogitsOptions(None))
    assert check_index_logits(call, describe(call, None)).has_aligned_keys
