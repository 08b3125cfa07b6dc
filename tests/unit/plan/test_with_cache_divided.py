"""Prompts and single tokens in one call: which kernels run which sequences, in which order, and what they are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.launch.structs import ATTN_FWD, ATTN_FWD_SM90, DECODE
from omniattn.plan.with_cache import plan_with_cache
from omniattn.problems import AttentionProblem, Target, WithCacheProblem
from omniattn.problems.with_cache import few_queries
from omniattn.select.with_cache import is_divided
from tests.unit.launch.launch_fakes import explain_as_on_gpu, fields_of_record

HOPPER, AMPERE = Target((9, 0), 232448, 132), Target((8, 0), 166912, 108)


def ints(*x: int) -> Any:
    return np.array(x, np.int32)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    explain_as_on_gpu(monkeypatch, (9, 0))


def problem_of(
    singles: int, prompts: int, rows: int, *, heads: int = 8, kv: int = 2, paged: bool = True, **options: Any
) -> WithCacheProblem:
    """So many single tokens, and prompts of so many rows."""
    batch, total = singles + prompts, singles + prompts * rows
    q = np.zeros((total, heads, 128), np.float16)
    places: dict[str, Any] = {"cu_seqlens_q": np.cumsum([0] + [1] * singles + [rows] * prompts).astype(np.int32)}
    if paged:
        cache: Any = oa.PagedKVCache(64, 64, kv, 128, like=q, k_dtype="fp16")
        places["block_table"] = np.zeros((batch, 16), np.int32)
    else:
        cache = oa.KVCache(batch, 1024, kv, 128, like=q, k_dtype="fp16")
    seq_lens = np.full(batch, rows, np.int32)
    made = oa.explain(oa.attention_with_kvcache, q, cache, seq_lens=seq_lens, max_seqlen_q=rows, **places, **options)
    assert isinstance(made.problem, WithCacheProblem)
    return made.problem


def test_launches_on_hopper() -> None:
    """decode's kernel first, on a third of the SMs; attention beside it; what is merged, behind both."""
    problem = problem_of(64, 2, 4096, return_lse=True)
    launches = plan_with_cache(problem, HOPPER, None)
    main, attend, combine = launches.records
    assert [r.spec.op for r in launches.records] == ["decode", "attention", "decode_combine"]
    assert [r.overlap for r in launches.records] == [False, True, False]
    assert main.spec.beside
    assert main.grid == (44, 1, 1)
    assert attend.grid[0] == 2 * 132
    told, others = fields_of_record(main, DECODE), fields_of_record(attend, ATTN_FWD_SM90)
    assert (told["q_len"], told["total_queries"], told["has_company"]) == (2, 64 + 2 * 4096, 1)
    assert others["fwd.queries_per_sequence"] == 2 == few_queries(4)
    names = {p.operand for r in (main, combine) for p in r.pointers}
    assert {"cu_seqlens_q", "cache.k", "cache.v", "block_table", "seq_lens", "q", "o", "lse", "workspace"} == names
    assert {"cu_seqlens_q", "block_table", "seq_lens", "o", "lse"} <= {p.operand for p in attend.pointers}
    assert launches.workspace_bytes > 0
    # The CTAs that would clear rows of nobody are attention's.
    assert combine.grid[0] == 66 * 2


def test_the_more_attention_has_to_do_the_fewer_sms_decode_has() -> None:
    """Down to a third of them, which keep memory busy; the kernel of a call without company to half of them."""
    ctas = [plan_with_cache(problem_of(300, n, 512), HOPPER, None).records[0].grid[0] for n in (1, 8, 32, 100)]
    assert ctas == sorted(ctas, reverse=True)
    assert (ctas[0], ctas[-1]) == (121, 43)  # 44, or one less where sequences then end where CTAs do
    fixed = plan_with_cache(problem_of(300, 200, 512, deterministic=True), HOPPER, None).records[0]
    assert not fixed.spec.beside
    assert 64 <= fixed.grid[0] <= 66


def test_launches_on_other_gpus() -> None:
    """One after the other: their kernels do not wait for each other."""
    records = plan_with_cache(problem_of(64, 2, 4096), AMPERE, None).records
    assert [r.spec.op for r in records] == ["decode", "attention", "decode_combine"]
    assert not any(r.overlap for r in records)
    assert fields_of_record(records[1], ATTN_FWD)["queries_per_sequence"] == 2


@pytest.mark.parametrize(
    ("singles", "prompts", "rows", "options"),
    [
        (0, 4, 512, {}),  # all alike
        (0, 1, 512, {}),
        (2, 4, 512, {}),  # about as long as the longest, in the mean
        (64, 2, 4096, {"causal": False}),
        (64, 2, 4096, {"window": (100, 20), "causal": False}),
        (64, 2, 4096, {"score_mod": oa.ScoreMod("score")}),
    ],
)
def test_calls_that_are_not_divided(singles: int, prompts: int, rows: int, options: dict[str, Any]) -> None:
    problem = problem_of(singles, prompts, rows, **options)
    assert isinstance(problem.kernels, AttentionProblem)
    assert problem.few is None or not is_divided(problem.kernels)
    assert problem.kernels.passed_over == 0


@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["9.0", "8.0"])
def test_the_same_kernels_whatever_the_batch_is(target: Target) -> None:
    """With ``deterministic``: all rows of a batch, of a few sequences, of many, packed or not."""
    found = set()
    for singles, prompts, rows in ((0, 1, 17), (0, 4, 512), (3, 1, 300), (64, 2, 4096), (0, 300, 40)):
        plan = plan_with_cache(problem_of(singles, prompts, rows, deterministic=True), target, None)
        found.add(tuple(record.spec.name for record in plan.records))
        assert fields_of_record(plan.records[0], DECODE)["fixed_splits"] == 1
        assert fields_of_record(plan.records[0], DECODE)["q_len"] == 4
    ((decodes, attends, _),) = found
    # Up to as many queries as run beside prompts it is the same kernel of decode; more go over pages, too.
    main, _ = plan_with_cache(problem_of(9, 3, 2, deterministic=True), target, None).records
    assert main.spec.name == decodes
    assert fields_of_record(main, DECODE)["has_company"] == 0
    (first, *_) = plan_with_cache(problem_of(9, 3, 16, deterministic=True), target, None).records
    assert fields_of_record(first, DECODE)["q_len"] == 4
    # Tiles of 16 rows add in the order of those of 8.
    of_two, _ = plan_with_cache(problem_of(9, 3, 4, deterministic=True), target, None).records
    assert of_two.spec.block_m == 2 * main.spec.block_m == 16
    orders = [dict(spec.defines) for spec in (of_two.spec, main.spec)]
    for name in ("NUM_WARPS", "TILE_TOKENS", "M_TILES", "ROW_WARPS"):
        assert orders[0][name] == orders[1][name]
    q = np.zeros((3, 40, 8, 128), np.float16)
    cache = oa.KVCache(3, 1024, 2, 128, like=q, k_dtype="fp16")
    made = oa.explain(oa.attention_with_kvcache, q, cache, seq_lens=ints(50, 60, 70), deterministic=True)
    (record,) = plan_with_cache(made.problem, target, None).records
    assert record.spec.name == attends


@pytest.mark.parametrize("target", [HOPPER, AMPERE])
def test_no_queries(target: Target) -> None:
    problem = problem_of(0, 4, 0)
    assert (problem.q_shape[0], problem.kernels.batch) == (0, 4)
    assert plan_with_cache(problem, target, None).records == ()


def test_a_forced_kernel_has_all_sequences() -> None:
    problem = problem_of(64, 2, 4096)
    name = plan_with_cache(problem, HOPPER, None).selection.spec.name
    (record,) = plan_with_cache(problem, HOPPER, name).records
    assert record.spec.name == name
    assert fields_of_record(record, ATTN_FWD_SM90)["fwd.queries_per_sequence"] == 0


def test_an_index_of_a_contiguous_cache() -> None:
    index = ints(*range(66))
    problem = problem_of(64, 2, 4096, paged=False, batch_index=index)
    main, attend, combine = plan_with_cache(problem, HOPPER, None).records
    for record in (main, combine, attend):
        names = {p.operand for p in record.pointers}
        assert "batch_index" in names
        assert "block_table" not in names


@pytest.mark.parametrize(("group", "queries"), [(1, 8), (2, 4), (3, 2), (4, 2), (8, 1), (16, 1)])
def test_few_queries_fill_a_tile(group: int, queries: int) -> None:
    assert few_queries(group) == queries
    main = plan_with_cache(problem_of(64, 2, 4096, heads=group, kv=1), HOPPER, None).records[0]
    assert fields_of_record(main, DECODE)["num_row_blocks"] == 1
