"""Which kernels ``decode`` takes for how many query rows of a kv head, without a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from omniattn import KVCache
from omniattn.launch.structs import DECODE
from omniattn.plan.others import plan_decode
from omniattn.problems import DecodeProblem, Target
from omniattn.problems.decode import passes
from omniattn.registry import REGISTRY
from omniattn.registry.decode import SHARED_TILES, decode_row, unlisted_rows
from omniattn.select import decode_ways
from omniattn.select.model import rules
from tests.unit.launch.launch_fakes import fields_of_record

HOPPER = Target((9, 0), 232448, 132)


def problem(rows: int, head_dim: int = 128, k_dtype: str = "fp16", keys: int = 8192) -> DecodeProblem:
    """One new token of 32 sequences with ``rows`` heads on one kv head."""
    cache = KVCache(32, keys, 1, head_dim, like=np.zeros(1, dtype=np.float16), k_dtype=k_dtype, v_dtype=k_dtype)
    strides = (rows * head_dim, rows * head_dim, head_dim, 1)
    return DecodeProblem(
        "float16", cache.facts, 32, 1, rows, 1, head_dim, keys, keys, 32, 0, -1, 0.125, 0.0, "none", False, 0, False,
        strides, strides,
    )  # fmt: skip


def tiles(asked: DecodeProblem) -> tuple[tuple[int, int], ...]:
    return decode_ways.query_tiles(passes(asked)[0], HOPPER)


@pytest.fixture
def from_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dataclasses.replace(rules(), shared_keys=512)
    monkeypatch.setattr(decode_ways, "rules", lambda: found)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.usefixtures("from_few_keys")
def test_the_smallest_tile_that_has_all_rows(head_dim: int) -> None:
    assert [tiles(problem(rows, head_dim)) for rows in (1, 8, 9, 16)] == [((1, 1),)] * 2 + [((2, 1), (1, 1))] * 2
    largest = max(8 * n * warps for n, warps in SHARED_TILES[head_dim])
    for rows in (17, 32, 33, 64, 65, 71, 72, 73, 200):
        found = tiles(problem(rows, head_dim))
        assert sorted(found) == sorted({(2, 1), *SHARED_TILES[head_dim]})
        n, warps = found[0]
        assert warps > 1
        assert 8 * n * warps >= min(rows, largest)
        assert not any(min(rows, largest) <= 8 * a * b < 8 * n * warps for a, b in SHARED_TILES[head_dim])


@pytest.mark.usefixtures("from_few_keys")
def test_few_keys_codes_wide_rows_and_other_gpus_take_blocks_of_16_rows() -> None:
    enough = 512 * 132 // 32
    assert tiles(problem(64, keys=enough))[0] != (2, 1)
    assert tiles(problem(64, keys=enough - 1))[0] == (2, 1)
    assert tiles(problem(64, k_dtype="int8")) == ((2, 1),)
    assert tiles(problem(64, head_dim=256)) == ((2, 1),)
    ada = Target((8, 9), 101376, 128)
    assert decode_ways.query_tiles(passes(problem(64))[0], ada) == ((2, 1), *SHARED_TILES[128])


@pytest.mark.usefixtures("from_few_keys")
def test_a_fixed_order_does_not_depend_on_the_batch() -> None:
    for rows in (17, 64):
        asked = [dataclasses.replace(problem(rows, keys=keys), deterministic=True) for keys in (256, 65536)]
        assert tiles(asked[0]) == tiles(asked[1])


@pytest.mark.usefixtures("from_few_keys")
def test_what_is_launched() -> None:
    launches = plan_decode(problem(71, head_dim=64), HOPPER, None)
    main, combine = launches.records
    rows = 72
    assert (main.spec.block_m, combine.spec.block_m) == (rows, rows)
    assert main.threads == 3 * 32
    fields = fields_of_record(main, DECODE)
    assert fields["num_row_blocks"] == 1
    assert launches.workspace_bytes >= 2 * fields["num_workers"] * rows * (4 * 64 + 8)
    assert f"tiles of {rows} query rows" in launches.selection.why[0]


def test_every_width_can_be_forced() -> None:
    """Also where another one is the best; a row of another format still cannot serve."""
    for n, warps, beside in ((2, 1, False), (2, 1, True), *((*tiles, False) for tiles in SHARED_TILES[64])):
        row = decode_row("float16", 64, (0, 1), (0, 1), n, warps, beside=beside)
        launches = plan_decode(problem(71, head_dim=64), HOPPER, row.name)
        assert launches.selection.spec.name == row.name
        assert launches.records[1].spec.block_m == row.block_m
        assert fields_of_record(launches.records[0], DECODE)["num_row_blocks"] == -(-71 // row.block_m)


def test_every_row_fits_into_every_gpu() -> None:
    """Also those of formats that the registry does not list; but for warps that share rows of 512 channels."""
    for row in (*REGISTRY, *unlisted_rows()):
        small = row.op != "decode" or row.beside or row.smem_bytes <= 99 << 10
        assert small or (row.block_m == 16 and row.head_dim == 512 and row.prebuild == ("90a",)), row.name
