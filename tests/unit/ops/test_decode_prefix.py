"""``decode(shared_prefix=...)``: which calls there are none of, and what is launched, without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from omniattn import BlockManager, KVCache, PagedKVCache, append, decode, registry
from omniattn.errors import ArgumentError
from omniattn.launch.host_struct import At
from omniattn.launch.structs import DECODE, MERGE_STATES
from omniattn.plan.others import plan_decode
from omniattn.problems import DecodeProblem, Target
from omniattn.problems.decode import SHARED_PREFIX, passes
from omniattn.registry import REGISTRY
from tests.unit.launch.launch_fakes import fields_of_record

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


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("q_len", [1, 3])
def test_what_is_launched(q_len: int, lse: bool) -> None:
    """The prefix for the queries of all sequences at once, the other keys for each, then both are merged."""
    cache = PagedKVCache(64, 16, 2, 64, like=np.zeros(1, dtype=np.float16), k_dtype="int8")
    batch, heads, dim, prefix = 3, 4, 64, 48
    row = heads * dim
    strides = (q_len * row, row, dim, 1)
    problem = DecodeProblem(
        "float16", cache.facts, batch, q_len, heads, 2, dim, 320, 16, 64, 20, -1, 0.125, 0.0, "float32", False, prefix,
        lse, strides, strides,
    )  # fmt: skip
    launches = plan_decode(problem, Target((9, 0), 232448, 132), None)
    records = launches.records
    ops = ["decode", "decode_combine", "decode", "decode_combine", "merge_states"]
    assert [record.spec.op for record in records] == ops
    assert [x.spec.op for x in (launches.selection, *launches.others)] == ops
    assert [record.overlap for record in records] == [False, True, False, True, False]
    first, own = (fields_of_record(records[i], DECODE) for i in (0, 2))
    assert fields_of_record(records[1], DECODE) == first
    assert fields_of_record(records[3], DECODE) == own
    planes = {name: At(f"cache.{name}") for name in ("k", "v", "k_params", "v_params")}
    same = {"q": At("q"), **planes, "seq_lens": At("seq_lens"), "block_table": At("block_table"), "k_mean": None}
    for fields in (first, own):
        assert {name: fields[name] for name in same} == same
    assert (first["sinks"], own["sinks"]) == (None, At("sinks"))  # a sink counts once
    assert (first["sinks_kind"], own["sinks_kind"]) == (0, 1)

    def strides_of(fields: dict[str, Any], x: str) -> tuple[int, ...]:
        return tuple(fields[f"{x}_stride_{dimension}"] for dimension in "bsh")

    # 0 for an extent of 1.
    for x in "qo":
        assert strides_of(first, x) == (0, row, dim)
        assert strides_of(own, x) == ((q_len * row, 0, dim) if q_len == 1 else (q_len * row, row, dim))
    assert (first["batch"], first["q_len"]) == (1, batch * q_len)
    assert (own["batch"], own["q_len"]) == (batch, q_len)
    assert (first["capacity"], first["first_key"]) == (prefix, SHARED_PREFIX)
    assert (own["capacity"], own["first_key"]) == (320, prefix)
    assert (first["prefix_sequences"], own["prefix_sequences"]) == (batch, 0)
    assert (first["least_seq_len"], own["least_seq_len"]) == (prefix, 0)
    # Both sides' results lie in the workspace, apart, and are what is merged.
    merged = fields_of_record(records[4], MERGE_STATES)
    assert (merged["o_a"], merged["o_b"], merged["lse_a"], merged["lse_b"]) == (
        first["o"], own["o"], first["lse"], own["lse"],
    )  # fmt: skip
    assert merged["o"] == At("o")
    assert merged["seq_lens"] == At("seq_lens")  # paused sequences see nothing of the prefix
    o_bytes, lse_bytes = 2 * batch * q_len * row, 4 * batch * q_len * heads
    ends = [(first["o"], o_bytes), (own["o"], o_bytes), (first["lse"], lse_bytes), (own["lse"], lse_bytes)]
    if lse:
        assert merged["lse"] == At("lse")
    else:
        ends.append((merged["lse"], lse_bytes))
    assert first["partial_o"] == own["partial_o"]  # one pass after the other
    ends += [(first["partial_o"], 1), (first["partial_ml"], 1)]
    places = sorted(ends)
    assert {place.operand for place, _ in places} == {"workspace"}
    assert all(at.offset + size <= after.offset for (at, size), (after, _) in itertools.pairwise(places))
    assert places[-1][0].offset < launches.workspace_bytes
    strides_b = [merged[f"lse_a_stride_{dimension}"] for dimension in "bhs"]
    assert strides_b == [q_len, batch * q_len, 1]  # the prefix's queries are those of one sequence
    assert [merged[f"lse_b_stride_{dimension}"] for dimension in "bhs"] == [heads * q_len, q_len, 1]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("k_dtype", ["fp16", "fp8", "int8", "int4"])
def test_its_kernels_are_listed_and_can_be_forced(head_dim: int, k_dtype: str) -> None:
    """The queries of all sequences are more than 8 rows, which other kernels take than those of a sequence alone."""
    cache = PagedKVCache(64, 16, 1, head_dim, like=np.zeros(1, dtype=np.float16), k_dtype=k_dtype)
    row = 2 * head_dim
    strides = (row, row, head_dim, 1)
    problem = DecodeProblem(
        "float16", cache.facts, 9, 1, 2, 1, head_dim, 320, 16, 64, 20, -1, 0.125, 0.0, "none", False, 48, False,
        strides, strides,
    )  # fmt: skip
    hopper = Target((9, 0), 232448, 132)
    chosen = [record.spec for record in plan_decode(problem, hopper, None).records]
    assert [spec.name.endswith("_n2") for spec in chosen] == [True, True, False, False, False]
    assert all(spec in REGISTRY for spec in chosen)
    names = [spec.name for spec in chosen]
    for force in (",".join(names), ",".join(reversed(names))):
        assert [record.spec.name for record in plan_decode(problem, hopper, force).records] == names
    with pytest.raises(ArgumentError, match=f"OMNIATTN_FORCE_KERNEL.*{names[0]}': the call takes '{names[2]}'"):
        plan_decode(problem, hopper, names[0])


@pytest.mark.parametrize(("capacity", "chunk"), [(320, 512), (1 << 20, 1 << 20), ((1 << 31) - 512, 1 << 30)])
def test_chunks_of_fixed_splits_have_31_bits(capacity: int, chunk: int) -> None:
    cache = PagedKVCache(64, 16, 1, 64, like=np.zeros(1, dtype=np.float16))
    strides = (128, 128, 64, 1)
    problem = DecodeProblem(
        "float16", cache.facts, 9, 1, 2, 1, 64, capacity, 16, 64, 20, -1, 0.125, 0.0, "none", False, 0, False, strides,
        strides, num_splits=1,
    )  # fmt: skip
    (alone,) = passes(problem)
    assert max(alone.chunk, 512) == chunk


def test_kernels_of_other_formats_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats that the registry does not list, in a process that has made no such row yet."""
    like = np.zeros(1, dtype=np.float16)
    cache = PagedKVCache(64, 16, 1, 64, like=like, k_dtype="int8", v_dtype="int4")
    strides = (128, 128, 64, 1)
    problem = DecodeProblem(
        "float16", cache.facts, 9, 1, 2, 1, 64, 320, 16, 64, 20, -1, 0.125, 0.0, "none", False, 48, False, strides,
        strides,
    )  # fmt: skip
    row, combine = "decode_sm80_fp16_d64_kint8_vint4", "decode_combine_sm80_fp16_d64"
    names = [f"{row}_n2", f"{combine}_n2", row, combine, "merge_states_sm80_fp16"]
    for force in (f"{row},{row}_n2", f"{row}_n2,{row}", None):
        monkeypatch.setattr(registry, "_BY_NAME", {spec.name: spec for spec in REGISTRY})
        assert row not in registry._BY_NAME
        records = plan_decode(problem, Target((9, 0), 232448, 132), force).records
        assert [record.spec.name for record in records] == names


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
