"""append and decode on the caller's pools, of any strides, against caches of the package's own: the same bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.compat import flash_attn as fa2  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.select import decode_ways  # noqa: E402
from omniattn.select.model import rules  # noqa: E402
from tests.foreign_pools import ORDERS, memory_shape, planes  # noqa: E402
from tests.gpu.decode_cases import Case, compare  # noqa: E402

pytestmark = pytest.mark.gpu

LENGTHS = (300, 17, 0, 129)
LONGEST = 300


@pytest.fixture(autouse=True)
def _shared_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small caches too take the kernels whose warps share keys, where there are rows enough."""
    found = dataclasses.replace(rules(), shared_keys=0)
    monkeypatch.setattr(decode_ways, "rules", lambda: found)
    PLANS.clear()
    yield
    PLANS.clear()


def normal(*shape: int, seed: int = 0, dtype: Any = torch.bfloat16) -> torch.Tensor:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(x).to("cuda", dtype)


def int32(x: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(x), dtype=torch.int32, device="cuda")


class Twins:
    """A pool that is NaN but for what is written, and a cache of the package's own; both filled."""

    def __init__(self, order: str, size: int, heads: int, dim: int, dtype: Any = torch.bfloat16) -> None:
        columns = -(-LONGEST // size)
        self.blocks = len(LENGTHS) * columns + 2
        rng = np.random.default_rng(size + dim)
        self.numbers = rng.permutation(self.blocks)[: len(LENGTHS) * columns].reshape(len(LENGTHS), columns)
        self.table, self.lens = int32(self.numbers), int32(LENGTHS)
        self.memory = torch.full(
            memory_shape(order, self.blocks, size, heads, dim), math.nan, dtype=dtype, device="cuda"
        )
        self.k, self.v = planes(order, self.memory, self.blocks, size, heads, dim)
        self.cache = oa.PagedKVCache.from_arrays(self.k, self.v)
        names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        self.own = oa.PagedKVCache(self.blocks, size, heads, dim, like=self.memory, k_dtype=names[dtype])
        self.size = size
        for plane in (self.own.k, self.own.v):
            plane.fill_(math.nan)
        rows = sum(LENGTHS)
        self.new = [normal(rows, heads, dim, seed=n, dtype=dtype) for n in (1, 2)]
        self.starts = int32(np.cumsum([0, *LENGTHS]))

    def slots(self) -> np.ndarray[Any, Any]:
        """Of all tokens, in their order."""
        return np.concatenate([
            self.numbers[b, np.arange(n) // self.size] * self.size + np.arange(n) % self.size
            for b, n in enumerate(LENGTHS)
        ])  # fmt: skip

    def fill(self) -> None:
        for cache in (self.cache, self.own):
            oa.append(cache, *self.new, seq_lens=self.lens, cu_seqlens=self.starts, block_table=self.table)

    def check_memory(self) -> None:
        """The same rows, and nothing else written."""
        dim = self.k.shape[3]
        for theirs, own in ((self.k, self.own.k), (self.v, self.own.v)):
            theirs, own = theirs.transpose(1, 2), own[..., :dim]
            assert torch.equal(theirs.isnan(), own.isnan())
            assert torch.equal(theirs.nan_to_num(), own.nan_to_num())
        assert int(self.memory.isfinite().sum()) == 2 * sum(LENGTHS) * self.k.shape[2] * dim

    def check_decode(self, q: torch.Tensor, **options: Any) -> None:
        options = {"seq_lens": self.lens, "block_table": self.table, "return_lse": True} | options
        results = [oa.decode(q, cache, **options) for cache in (self.cache, self.own)]
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b), options
        assert results[0][0].isfinite().all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256, 328, 512])
def test_the_bits_of_own_caches(order: str, dim: int) -> None:
    """Pages of 1 to 256 tokens; rows of few queries, of more, and of warps that share keys."""
    for size in (1, 3, 16, 256):
        x = Twins(order, size, 2, dim, torch.float16 if size == 3 else torch.bfloat16)
        x.fill()
        x.check_memory()
        for q_len, heads in ((1, 8), (3, 8), (4, 16), (9, 16)):
            q = normal(len(LENGTHS), q_len, heads, dim, seed=3, dtype=x.memory.dtype)
            x.check_decode(q)
            x.check_decode(q, window=(70, 0), deterministic=q_len == 3, softcap=5.0)


@pytest.mark.parametrize("dim", [72, 128, 264])
def test_values_against_numpy(dim: int) -> None:
    """Not only the same as own caches: O and LSE of NumPy's reference."""
    x = Twins("BNHC", 16, 2, dim)
    x.fill()
    q = normal(len(LENGTHS), 2, 8, dim, seed=3)
    got = oa.decode(q, x.cache, seq_lens=x.lens, block_table=x.table, return_lse=True)
    host = [t.float().cpu() for t in (q, *x.new)]
    twin = oa.PagedKVCache(x.blocks, 16, 2, dim, like=host[0], k_dtype="bf16")
    lens, starts, table = (t.cpu() for t in (x.lens, x.starts, x.table))
    oa.append(twin, host[1], host[2], seq_lens=lens, cu_seqlens=starts, block_table=table)
    expected = oa.decode(host[0], twin, seq_lens=lens, block_table=table, return_lse=True)
    compare(got, tuple(t.numpy() for t in expected), Case(head_dim=dim), f"d{dim}")


@pytest.mark.parametrize("dim", [64, 128, 512])
def test_a_shared_prefix(dim: int) -> None:
    x = Twins("BHLNC", 16, 2, dim)
    x.numbers[1:, :1] = x.numbers[0, :1]
    x.table.copy_(int32(x.numbers))
    for new in x.new:  # which all of them write
        for first, n in zip(x.starts.tolist(), LENGTHS, strict=False):
            new[first : first + min(n, 16)] = new[: min(n, 16)]
    x.fill()
    x.check_decode(normal(len(LENGTHS), 1, 8, dim, seed=3), shared_prefix=16)


@pytest.mark.parametrize("order", ORDERS)
def test_contiguous_caches(order: str) -> None:
    """The blocks of a pool as sequences, which need no table."""
    memory = torch.full(memory_shape(order, 3, 200, 2, 96), math.nan, dtype=torch.bfloat16, device="cuda")
    cache = oa.KVCache.from_arrays(*planes(order, memory, 3, 200, 2, 96))
    own = oa.KVCache(3, 200, 2, 96, like=memory)
    k, v, q = normal(3, 90, 2, 96), normal(3, 90, 2, 96, seed=1), normal(3, 1, 8, 96, seed=2)
    lens = int32([90, 200, 131])
    for each in (cache, own):
        oa.append(each, *(normal(3, 110, 2, 96, seed=n) for n in (5, 6)), seq_lens=int32([110] * 3))
        oa.append(each, k, v, seq_lens=lens)
    assert torch.equal(oa.decode(q, cache, seq_lens=lens), oa.decode(q, own, seq_lens=lens))


# Slots


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("order", ["BNHC", "BHLNC", "padded rows"])
def test_slots(order: str, dtype: torch.dtype) -> None:
    """In any order, with tokens that have none, slots outside the pool, and more tokens than slots."""
    for size, dim in ((1, 64), (3, 96), (16, 128), (64, 200)):
        x = Twins(order, size, 2, dim)
        x.fill()
        memory = x.memory.clone()
        x.memory.fill_(math.nan)
        slots = x.slots()
        outside = [-1, x.blocks * size, -(2**31) if dtype == torch.int32 else -(2**40), 2**31 - 1]
        if dtype == torch.int64:
            outside += [2**32 + int(slots[0]), 2**62]
        mixed = np.random.default_rng(1).permutation(len(slots) + len(outside))
        given = np.concatenate([slots, outside])[mixed]
        junk = torch.full((len(outside) + 7, 2, dim), 5.0, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.cat([t, junk])[torch.from_numpy(np.append(mixed, [len(slots)] * 5)).cuda()] for t in x.new)
        oa.append(x.cache, k, v, slot_mapping=torch.tensor(given, dtype=dtype, device="cuda"))
        assert torch.equal(x.memory.view(torch.int16), memory.view(torch.int16))


@pytest.mark.parametrize("k_dtype", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_slots_of_own_caches_and_rotation(k_dtype: str, rope: str) -> None:
    """Every format; positions in 32 and 64 bits; a position without angles is NaN, as without slots."""
    caches = [oa.PagedKVCache(9, 16, 2, 64, like=normal(1), k_dtype=k_dtype) for _ in range(2)]
    for cache in caches:
        for plane in (cache.k, cache.v):
            plane.view(torch.uint8).fill_(7)
    angle = torch.randn(33, 32, device="cuda")
    turn = {"cos": angle.cos(), "sin": angle.sin(), "rope": rope}
    table = int32([[4, 2, 8], [0, 7, 3]])
    k, v = normal(2, 20, 2, 64), normal(2, 20, 2, 64, seed=1)
    oa.append(caches[0], k, v, seq_lens=int32([20, 36]), block_table=table, **turn)
    at = [(b, t) for b, first in ((0, 0), (1, 16)) for t in range(first, first + 20)]
    slots = [int(table[b, t // 16]) * 16 + t % 16 for b, t in at]
    for wide in (torch.int32, torch.int64):
        for plane in (caches[1].k, caches[1].v):
            plane.view(torch.uint8).fill_(7)
        oa.append(
            caches[1], k.flatten(0, 1), v.flatten(0, 1), slot_mapping=torch.tensor(slots, device="cuda"),
            positions=torch.tensor([t for _, t in at], dtype=wide, device="cuda"), **turn,
        )  # fmt: skip
        for name in ("k", "v", "k_params", "v_params"):
            a, b = (getattr(cache, name) for cache in caches)
            if a is not None and not name.endswith("params"):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            elif a is not None:  # of rows that were written
                at_slots = torch.tensor(slots, device="cuda")
                blocks, rows = at_slots // 16, at_slots % 16
                assert torch.equal(a[blocks, :, rows], b[blocks, :, rows])
    negative = torch.full((40,), -1, dtype=torch.int64, device="cuda")
    oa.append(
        caches[1], k.flatten(0, 1), v.flatten(0, 1), slot_mapping=torch.tensor(slots, device="cuda"),
        positions=negative, **turn,
    )  # fmt: skip
    torch.cuda.synchronize()


# Copies, graphs, sizes


@pytest.mark.parametrize("order", ORDERS)
def test_copies_of_blocks(order: str) -> None:
    for size, dim in ((1, 64), (3, 96), (48, 256)):
        memory = torch.full(memory_shape(order, 9, size, 2, dim), math.nan, dtype=torch.float16, device="cuda")
        k, v = planes(order, memory, 9, size, 2, dim)
        for i, block in enumerate((3, 8)):
            k[block], v[block] = (normal(size, 2, dim, seed=2 * i + n, dtype=torch.float16) for n in range(2))
        oa.copy_blocks(oa.PagedKVCache.from_arrays(k, v), [(3, 0), (8, 5)])
        for plane in (k, v):
            assert torch.equal(plane[0], plane[3])
            assert torch.equal(plane[5], plane[8])
        assert int(memory.isfinite().sum()) == 2 * 4 * size * 2 * dim


@pytest.mark.parametrize(("order", "size", "dim"), [("BNHC", 16, 128), ("BHLNC", 1, 96), ("one memory", 256, 64)])
def test_a_graph_follows_tables_lengths_and_slots(order: str, size: int, dim: int) -> None:
    x = Twins(order, size, 2, dim)
    x.fill()
    q, k, v = normal(4, 1, 8, dim), normal(4, 2, dim, seed=1), normal(4, 2, dim, seed=2)
    slots = torch.full((4,), -1, dtype=torch.int64, device="cuda")

    def step(cache: Any) -> torch.Tensor:
        oa.append(cache, k, v, slot_mapping=slots)
        found: torch.Tensor = oa.decode(q, cache, seq_lens=x.lens, block_table=x.table)
        return found

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x.cache)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = step(x.cache)
    torch.cuda.current_stream().wait_stream(stream)
    columns = x.table.shape[1]
    for i, lengths in enumerate(((300, 17, 0, 129), (1, 0, 0, 5), (17, 300, 1, 2))):
        numbers = np.random.default_rng(i).permutation(x.blocks)[: 4 * columns].reshape(4, columns)
        last = np.array([max(n - 1, 0) for n in lengths])
        places = numbers[np.arange(4), last // size] * size + last % size
        # Everything is finite by now but what no token owns; the result depends on what the tables say.
        x.table.copy_(int32(numbers))
        x.lens.copy_(int32(lengths))
        slots.copy_(torch.from_numpy(np.where(np.array(lengths) > 0, places, -1)))
        for plane, own in ((x.k, x.own.k), (x.v, x.own.v)):
            plane.copy_(normal(*plane.shape, seed=i))
            own[..., :dim].copy_(plane.transpose(1, 2))
            own[..., dim:].zero_()
        graph.replay()
        assert torch.equal(result, step(x.own))


@pytest.mark.alone
def test_more_than_2_31_elements() -> None:
    """Blocks on both sides of 2^31 and of 2^32 bytes, K and V in one row."""
    size, heads, dim = 16, 8, 128
    blocks = (2**31 + 2**27) // (size * heads * 2 * dim)
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * 2 * blocks * size * heads * 2 * dim // 2:
        pytest.skip("too little GPU memory")
    memory = torch.full((blocks, size, heads, 2 * dim), math.nan, dtype=torch.bfloat16, device="cuda")
    cache = oa.PagedKVCache.from_arrays(memory)
    half = blocks // 2
    table = int32([[0, half - 1, blocks - 1], [blocks - 2, half + 1, 1]])
    k, v = normal(96, heads, dim), normal(96, heads, dim, seed=1)
    q, lens = normal(2, 1, 16, dim, seed=2), int32([48, 33])
    own = oa.PagedKVCache(6, size, heads, dim, like=memory)
    own_table = int32([[0, 1, 2], [3, 4, 5]])
    slots = (table.long().flatten()[:, None] * size + torch.arange(size, device="cuda")).flatten()
    oa.append(cache, k, v, slot_mapping=slots)
    oa.append(own, k, v, slot_mapping=torch.arange(96, device="cuda"))
    got = oa.decode(q, cache, seq_lens=lens, block_table=table)
    assert torch.equal(got, oa.decode(q, own, seq_lens=lens, block_table=own_table))
    again = oa.PagedKVCache.from_arrays(memory)
    oa.append(
        again, k.view(2, 48, heads, dim), v.view(2, 48, heads, dim), seq_lens=int32([48, 48]), block_table=table
    )  # fmt: skip
    assert torch.equal(got, oa.decode(q, again, seq_lens=lens, block_table=table))
    oa.copy_blocks(cache, [(blocks - 1, blocks - 3)])
    assert torch.equal(memory[blocks - 1], memory[blocks - 3])
    assert int(memory.isfinite().sum()) == 7 * size * heads * 2 * dim


@pytest.mark.parametrize("order", ORDERS)
def test_flash_attn_with_kvcache(order: str) -> None:
    """The compatibility function on such pools is decode, bit for bit."""
    x = Twins(order, 16, 2, 128)
    x.fill()
    q = normal(4, 1, 8, 128, seed=3)
    lens = int32([n - 1 if n else 0 for n in LENGTHS])
    table = x.table
    k, v = normal(4, 1, 2, 128, seed=8), normal(4, 1, 2, 128, seed=9)
    out = fa2.flash_attn_with_kvcache(q, x.k, x.v, k, v, cache_seqlens=lens, causal=True, block_table=table)
    total = lens + 1
    oa.append(x.own, k, v, seq_lens=total, block_table=table)
    assert torch.equal(out, oa.decode(q, x.own, seq_lens=total, block_table=table))
