"""``decode(shared_prefix=...)`` on the CPU, and which calls there are none of; launches are planned without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from omniattn import BlockManager, KVCache, PagedKVCache, append, decode
from omniattn.errors import ArgumentError
from omniattn.launch.decode import quotient_factors

LIKE = np.zeros(1, dtype=np.float32)
PREFIX, LENGTHS = 12, (13, 30, 14)


def shared(**options: Any) -> tuple[npt.NDArray[Any], PagedKVCache, dict[str, Any]]:
    """Queries, a cache in which three sequences share their first blocks, and where they are."""
    rng = np.random.default_rng(1)
    cache = PagedKVCache(30, 4, 2, 16, like=LIKE, **options)
    manager = BlockManager(30, 4)
    manager.add(0)
    manager.extend({0: PREFIX})

    def write(names: list[int], count: list[int]) -> None:
        starts = np.cumsum([0, *count]).astype(np.int32)
        k, v = (rng.standard_normal((starts[-1], 2, 16)).astype(np.float32) for _ in range(2))
        append(cache, k, v, seq_lens=manager.seq_lens(names), cu_seqlens=starts, block_table=manager.block_table(names))

    write([0], [PREFIX])
    for name in (1, 2):
        manager.fork(0, name)
    more = [n - PREFIX for n in LENGTHS]
    assert not manager.extend(dict(enumerate(more)))
    write([0, 1, 2], more)
    q = rng.standard_normal((3, 1, 4, 16)).astype(np.float32)
    names = [0, 1, 2]
    return q, cache, {"seq_lens": manager.seq_lens(names), "block_table": manager.block_table(names)}


@pytest.mark.parametrize("k_dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("prefix", [4, PREFIX])
def test_results_are_those_without_it(k_dtype: str, prefix: int) -> None:
    q, cache, places = shared(k_dtype=k_dtype)
    options = {"sinks": np.array([0.5, -1.0, 2.0, 0.0], dtype=np.float32), "softcap": 20.0, "return_lse": True}
    o, lse = decode(q, cache, **places, **options, shared_prefix=prefix)
    expected, expected_lse = decode(q, cache, **places, **options)
    np.testing.assert_array_equal(o, expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize(
    ("options", "argument", "expected"),
    [
        ({"shared_prefix": 6}, "shared_prefix", "a multiple of block_size 4"),
        ({"shared_prefix": -4}, "shared_prefix", "an integer from 0"),
        ({"shared_prefix": 4.0}, "shared_prefix", "an integer from 0"),
        ({"shared_prefix": True}, "shared_prefix", "an integer from 0"),
        ({"shared_prefix": 400}, "shared_prefix", "at most 32 tokens"),
        ({"shared_prefix": 4, "window": (3, 0)}, "shared_prefix", "0 with a window"),
        ({"shared_prefix": 4, "deterministic": True}, "shared_prefix", "0 with deterministic=True"),
        ({"shared_prefix": 16}, "seq_lens", "at least 17"),
        ({"shared_prefix": 12, "seq_lens": np.array([12, 30, 14], dtype=np.int32)}, "seq_lens", "at least 13"),
    ],
)
def test_what_it_does_not_go_with(options: dict[str, Any], argument: str, expected: str) -> None:
    q, cache, places = shared()
    with pytest.raises(ArgumentError) as caught:
        decode(q, cache, **(places | options))
    assert caught.value.argument == argument
    assert expected in str(caught.value)


def test_tables_that_differ() -> None:
    q, cache, places = shared()
    places["block_table"][2, 1] = 29
    with pytest.raises(ArgumentError) as caught:
        decode(q, cache, **places, shared_prefix=8)
    assert caught.value.argument == "block_table"
    decode(q, cache, **places, shared_prefix=4)


def test_caches_it_is_not_for() -> None:
    q = np.zeros((1, 1, 2, 16), dtype=np.float32)
    lens = np.array([9], dtype=np.int32)
    with pytest.raises(ArgumentError, match="0 with a KVCache"):
        decode(q, KVCache(1, 16, 2, 16, like=LIKE), seq_lens=lens, shared_prefix=8)
    cache = PagedKVCache(4, 8, 2, 16, like=LIKE, k_dtype="int8", recent_window=8, recent_slots=1)
    places = {"block_table": np.zeros((1, 2), dtype=np.int32), "recent_slots": np.zeros(1, dtype=np.int32)}
    with pytest.raises(ArgumentError, match="recent_window"):
        decode(q, cache, seq_lens=lens, **places, shared_prefix=8)


@pytest.mark.parametrize("divisor", [*range(1, 70), 132, 264, 396, 1000, 8191, 8192, 46340, 2**30 + 1, 2**31 - 1])
def test_quotients_by_a_product(divisor: int) -> None:
    multiplier, shift = quotient_factors(divisor)
    assert 0 <= multiplier < 2**32
    near = [0, 1, divisor - 1, divisor, 7 * divisor - 1, 7 * divisor, 2**31 - 1]
    last = (2**31 - 1) // divisor * divisor
    for n in (n for n in (*near, last - 1, last) if 0 <= n < 2**31):
        assert (2 * n * multiplier >> 32) >> shift == n // divisor, n  # as the kernels compute it
