"""``decode(shared_prefix=...)``: which calls there are none of, and what is launched, without a GPU."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from omniattn.launch.decode_prefix import plan_decode_prefix
from omniattn.launch.params import PARAMS

from omniattn import BlockManager, KVCache, PagedKVCache, append, decode, runtime
from omniattn.errors import ArgumentError
from omniattn.launch.decode import _ARGUMENTS, _REST, ALL_SEE_PREFIX
from omniattn.ops import DecodeProblem
from omniattn.registry.spec import KernelSpec
from omniattn.runtime.device import DeviceInfo

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


def test_the_cpu_takes_it() -> None:
    """It reads all keys for every sequence; tests/gpu/test_decode_gpu.py compares what a GPU makes of two sides."""
    q, cache, places = shared()
    np.testing.assert_array_equal(decode(q, cache, **places, shared_prefix=PREFIX), decode(q, cache, **places))


class Kernel:
    """Writes down its launches: the name of its row and the arguments."""

    overlap = None

    def __init__(self, spec: KernelSpec, log: list[tuple[str, bytes]]) -> None:
        self.spec, self.log = spec, log

    def launch(self, grid: Any, block_x: int, stream: int, params_address: int, cluster: Any = None) -> None:
        assert (stream, params_address) == (7, PARAMS.address)
        self.log.append((self.spec.op, bytes(PARAMS.buffer.raw)))


@pytest.mark.parametrize("q_len", [1, 3])
def test_what_is_launched(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix for the queries of all sequences at once, the other keys for each, then both are merged."""
    log: list[tuple[str, bytes]] = []
    info = DeviceInfo(0, "a GPU", (9, 0), 132, 232448, 50 << 20, (13, 0))
    monkeypatch.setattr(runtime, "device_info", lambda ordinal: info)
    monkeypatch.setattr(runtime, "load", lambda spec, ordinal: Kernel(spec, log))
    cache = PagedKVCache(64, 16, 2, 64, like=np.zeros(1, dtype=np.float16), k_dtype="int8")
    batch, heads, dim, prefix = 3, 4, 64, 48
    problem = DecodeProblem(
        "float16", batch, q_len, heads, 2, dim, 320, 16, 64, 20, -1, 0.125, 0.0, "float32", False, prefix
    )
    row = heads * dim
    strides = (q_len * row, row, dim, 1)
    plan = plan_decode_prefix(problem, cache, strides, strides, 0)
    pointers = tuple(1 << 20 | i << 8 for i in range(11))
    sinks, o, lse, workspace = 1 << 30, 2 << 30, 3 << 30, 4 << 30
    plan.launch(7, (*pointers, sinks, o, lse, workspace))
    assert [op for op, _ in log] == ["decode", "decode_combine", "decode", "decode_combine", "merge_states"]

    def of(data: bytes) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        addresses, rest = _ARGUMENTS.unpack_from(data)[:-1], _ARGUMENTS.unpack_from(data)[-1]
        return addresses, _REST.unpack(rest)

    (first, first_rest), (own, own_rest) = of(log[0][1]), of(log[2][1])
    assert first[:11] == own[:11] == pointers
    assert (first[11], own[11]) == (0, sinks)  # a sink counts once
    assert log[0][1] == log[1][1]
    assert log[2][1] == log[3][1]
    # Strides of q and o (0 for an extent of 1), then batch, q_len and heads; capacity; first_key.
    assert first_rest[:6] == (0, row, dim, 0, row, dim)
    assert own_rest[:6] == ((q_len * row, 0, dim) if q_len == 1 else (q_len * row, row, dim)) * 2
    assert first_rest[6:8] == (1, batch * q_len)
    assert own_rest[6:8] == (batch, q_len)
    assert (first_rest[13], first_rest[-1]) == (prefix, ALL_SEE_PREFIX)
    assert (own_rest[13], own_rest[-1]) == (320, prefix)
    # Both sides' results lie in the workspace, apart, and are what is merged.
    o_first, lse_first, o_own, lse_own = first[12], first[13], own[12], own[13]
    ends = [(o_first, 2 * batch * q_len * row), (o_own, 2 * batch * q_len * row)]
    ends += [(x, 4 * batch * q_len * heads) for x in (lse_first, lse_own)]
    ends += [(first[14], max(plan.first.workspace_bytes, plan.second.workspace_bytes))]
    places = sorted(ends)
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(places))
    assert workspace <= places[0][0]
    assert sum(places[-1]) <= workspace + plan.workspace_bytes
    assert struct.unpack_from("<6Q", log[4][1]) == (o_first, o_own, o, lse_first, lse_own, lse)


@pytest.mark.parametrize(
    ("options", "argument", "expected"),
    [
        ({"shared_prefix": 6}, "shared_prefix", "a multiple of block_size 4"),
        ({"shared_prefix": -4}, "shared_prefix", "an integer from 0"),
        ({"shared_prefix": 4.0}, "shared_prefix", "an integer from 0"),
        ({"shared_prefix": True}, "shared_prefix", "an integer from 0"),
        ({"shared_prefix": 400}, "shared_prefix", "from 0 to 32"),
        ({"shared_prefix": 4, "window": (3, 0)}, "shared_prefix", "0 with a window"),
        ({"shared_prefix": 4, "deterministic": True}, "shared_prefix", "0 with deterministic=True"),
        ({"shared_prefix": 16}, "seq_lens", "0, or at least 17"),
        ({"shared_prefix": 12, "seq_lens": np.array([12, 30, 14], dtype=np.int32)}, "seq_lens", "0, or at least 13"),
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
