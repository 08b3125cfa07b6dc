"""``index_logits`` and ``top_k`` on the CPU: semantics, and arguments that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, DtypeError, ShapeError, StrideError
from tests.indexer_cases import (
    E4M3,
    ROWS,
    logits_of,
    paged_call,
    pooled,
    ranged_call,
    row_of,
    same_logits,
    wanted_positions,
)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("block_size", [64, 7, 1])
@pytest.mark.parametrize(("heads", "next_n"), [(64, 1), (32, 2), (5, 3), (128, 2)])
def test_paged_logits(heads: int, next_n: int, block_size: int, fused: bool) -> None:
    call = paged_call(heads, next_n, block_size, fused)
    same_logits(oa.index_logits(**call.arguments), call)


def test_out_and_fewer_columns() -> None:
    call = paged_call(64, 2, 64, True)
    out = np.full((10, 257), np.nan, np.float32)
    assert oa.index_logits(**call.arguments, max_keys=257, out=out) is out
    call.wanted, call.bound = call.wanted[:, :257], call.bound[:, :257]
    same_logits(out, call)


@pytest.mark.parametrize("heads", [64, 3])
def test_ranges_of_keys(heads: int) -> None:
    call = ranged_call(heads, 9, 300)
    same_logits(oa.index_logits(**call.arguments), call)
    del call.arguments["k_start"], call.arguments["k_end"]
    assert np.isfinite(oa.index_logits(**call.arguments)).all()


def test_nan_reaches_the_logits_of_its_key_alone() -> None:
    call = ranged_call(64, 4, 200)
    given = call.arguments | {"k_start": None, "k_end": None}
    given["k"].view(np.uint8)[50, 3] = 0xFF
    given["k_scale"][60] = np.nan
    got = oa.index_logits(**given)
    assert np.isnan(got[:, [50, 60]]).all()
    assert np.isnan(got).sum() == 8


def test_nothing() -> None:
    call = paged_call(64, 1, 64, True).arguments
    none = {name: x[:0] for name, x in call.items() if name != "k"}
    assert oa.index_logits(k=call["k"], **none).shape == (0, 384)
    rows = {"q": np.zeros((3, 64, 128), E4M3), "weights": np.zeros((3, 64), np.float32)}
    got = oa.index_logits(**rows, k=np.zeros((0, 128), E4M3), k_scale=np.zeros(0, np.float32))
    assert got.shape == (3, 0)
    assert (oa.top_k(got, 5) == -1).all()


@pytest.mark.parametrize("kind", ROWS)
def test_top_k(kind: str) -> None:
    logits = np.stack([row_of(kind, 3001, seed) for seed in range(2)])
    for k in (1, 50, 2048, 4000):
        np.testing.assert_array_equal(oa.top_k(logits, k), wanted_positions(logits, k))


def test_parts_of_rows_and_rows_of_a_pool() -> None:
    logits, options, starts, lengths = logits_of(rows=12, width=501, next_n=2)
    wanted = wanted_positions(logits, 40, starts, lengths)
    np.testing.assert_array_equal(oa.top_k(logits, 40, **options), wanted)
    table = pooled(6, 501, 24)
    got = oa.top_k(logits, 40, **options, block_table=table, block_size=24)
    at = np.maximum(wanted, 0)
    mapped = np.take_along_axis(np.repeat(table, 2, axis=0), at // 24, axis=1) * 24 + at % 24
    np.testing.assert_array_equal(got, np.where(wanted >= 0, mapped, -1))


def test_entries_of_no_chosen_position_are_not_read() -> None:
    logits = np.full((2, 6), -np.inf, np.float32)
    logits[:, :2] = 1.0
    table = np.array([[3, -7, 2**31 - 1], [2**30 - 1, -1, -1]], np.int32)
    found = oa.top_k(logits, 3, block_table=table, block_size=2)
    np.testing.assert_array_equal(found, [[6, 7, -1], [2**31 - 2, 2**31 - 1, -1]])


def test_the_keys_of_decode() -> None:
    """What a query does not see is never chosen, with lengths or without."""
    call = paged_call(64, 2, 16, True)
    logits = oa.index_logits(**call.arguments)
    chosen = oa.top_k(logits, 64)
    np.testing.assert_array_equal(oa.top_k(logits, 64, lengths=call.arguments["seq_lens"], next_n=2), chosen)
    assert (chosen[:3] == -1).sum() == 2 * 64 + 64


def _paged(**changed: Any) -> Any:
    return lambda: oa.index_logits(**paged_call(64, 2, 64, True).arguments | changed)


def _ranged(**changed: Any) -> Any:
    return lambda: oa.index_logits(**ranged_call(64, 9, 300).arguments | changed)


def _chosen(**changed: Any) -> Any:
    return lambda: oa.top_k(**{"logits": np.zeros((6, 50), np.float32), "k": 5} | changed)


_I = np.int32
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "q in 16 bits": (_paged(q=np.zeros((5, 2, 64, 128), np.float16)), DtypeError, "'q': expected float8_e4m3fn"),
    "q of three dimensions": (_paged(q=np.zeros((10, 64, 128), E4M3)), ShapeError, "'q': expected .batch, next_n"),
    "q of four": (_ranged(q=np.zeros((3, 3, 64, 128), E4M3)), ShapeError, "'q': expected .rows, heads, 128."),
    "64 channels": (_paged(q=np.zeros((5, 2, 64, 64), E4M3)), ShapeError, "'q'"),
    "many heads": (_paged(q=np.zeros((5, 2, 129, 128), E4M3)), ShapeError, "1 to 128 heads, received 129"),
    "no new tokens": (_paged(q=np.zeros((5, 0, 64, 128), E4M3)), ShapeError, "next_n of 1 or more"),
    "weights": (_paged(weights=np.zeros((5, 64), np.float32)), ShapeError, r"'weights': expected shape \(10, 64\)"),
    "weights in 64 bits": (_paged(weights=np.zeros((10, 64))), DtypeError, "'weights': expected float32"),
    "seq_lens": (_paged(seq_lens=np.zeros(4, _I)), ShapeError, "'seq_lens'"),
    "a negative length": (_paged(seq_lens=np.array([-1, 0, 0, 0, 0], _I)), ArgumentError, "0 to 384, received -1 at 0"),
    "a long length": (_paged(seq_lens=np.array([0, 0, 0, 0, 385], _I)), ArgumentError, "0 to 384, received 385 at 4"),
    "no table": (_paged(block_table=None), ArgumentError, "'block_table': expected an int32 array"),
    "a table of other sequences": (_paged(block_table=np.zeros((4, 6), _I)), ShapeError, "'block_table'"),
    "a table in 64 bits": (_paged(block_table=np.zeros((5, 6), np.int64)), DtypeError, "'block_table'"),
    "no block": (_paged(block_table=np.full((5, 6), 99, _I)), ArgumentError, "blocks 0 to .*, received 99"),
    "rows of 128 bytes": (_paged(k=np.zeros((9, 64, 1, 128), np.uint8)), ShapeError, "'k': expected .blocks, block"),
    "blocks of e4m3": (_paged(k=np.zeros((9, 64, 128), E4M3)), DtypeError, "'k': expected uint8"),
    "bytes with scales": (_paged(k_scale=np.zeros((9, 64), np.float32)), DtypeError, "'k': expected float8_e4m3fn"),
    "blocks between blocks": (_paged(k=np.zeros((9, 128, 1, 132), np.uint8)[:, ::2]), StrideError, "'k'"),
    "ranges of a cache": (_paged(k_end=np.zeros(10, _I)), ArgumentError, "'k_end': expected None with seq_lens"),
    "many columns": (_paged(max_keys=385), ArgumentError, "'max_keys': expected an integer from 0 to 384"),
    "columns of keys": (_ranged(max_keys=5), ArgumentError, "'max_keys': expected None without seq_lens"),
    "out": (_ranged(out=np.zeros((9, 301), np.float32)), ShapeError, "'out'"),
    "no scale": (_ranged(k_scale=None), ArgumentError, "'k_scale': expected a float32 array"),
    "a table of keys": (_ranged(block_table=np.zeros((9, 1), _I)), ArgumentError, "'block_table': expected None"),
    "keys of other rows": (_ranged(k=np.zeros((300, 64), E4M3)), ShapeError, "'k': expected .keys, 128."),
    "ends": (_ranged(k_end=np.full(9, 301, _I)), ArgumentError, "'k_end': expected 0 to 300, received 301"),
    "starts": (_ranged(k_start=np.full(9, -1, _I)), ArgumentError, "'k_start': expected 0 to 300, received -1"),
    "k of 0": (_chosen(k=0), ArgumentError, "'k': expected an integer from 1"),
    "k of 1.5": (_chosen(k=1.5), ArgumentError, "'k'"),
    "logits in 64 bits": (_chosen(logits=np.zeros((6, 50))), DtypeError, "'logits': expected float32"),
    "one row": (_chosen(logits=np.zeros(50, np.float32)), ShapeError, "'logits': expected .rows, elements."),
    "lengths in 64 bits": (_chosen(lengths=np.zeros(6, np.int64)), DtypeError, "'lengths'"),
    "lengths of other rows": (_chosen(lengths=np.zeros(5, _I)), ShapeError, "'lengths'"),
    "long lengths": (
        _chosen(lengths=np.full(6, 51, _I)), ArgumentError, "at most the 50 elements of row 0, from 0 on, received 51",
    ),
    "long lengths of starts": (
        _chosen(lengths=np.full(6, 9, _I), starts=np.array([0, 0, 42, 0, 0, 0], _I)), ArgumentError,
        "at most the 8 elements of row 2, from 42 on, received 9",
    ),
    "no block of the pool": (
        _chosen(block_table=np.full((6, 4), -1, _I), block_size=16), ArgumentError, "blocks 0 to .*, received -1 at",
    ),
    "rows beyond int32": (
        _chosen(block_table=np.full((6, 4), 2**27, _I), block_size=16), ArgumentError, "0 to 134217727, .*134217728 at",
    ),
    "negative lengths": (_chosen(lengths=np.full(6, -1, _I)), ArgumentError, "'lengths': expected 0 or more"),
    "late starts": (_chosen(starts=np.full(6, 51, _I)), ArgumentError, "'starts': expected 0 to 50, received 51"),
    "next_n": (_chosen(next_n=4, lengths=np.zeros(1, _I)), ArgumentError, "a divisor of the 6 rows of logits"),
    "next_n alone": (_chosen(next_n=2), ArgumentError, "'next_n': expected 1 without lengths and block_table"),
    "a size without a table": (_chosen(block_size=16), ArgumentError, "'block_size': expected None"),
    "a table without a size": (_chosen(block_table=np.zeros((6, 9), _I)), ArgumentError, "'block_size'"),
    "a short table": (_chosen(block_table=np.zeros((6, 3), _I), block_size=16), ShapeError, "with 4 blocks or more"),
    "int64 out": (_chosen(out=np.zeros((6, 5), np.int64)), DtypeError, "'out': expected int32"),
    "logits apart": (_chosen(logits=np.zeros((6, 100), np.float32)[:, ::2]), StrideError, "'logits'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text) as caught:
        call()
    assert caught.type is error
